"""A fake OpenAI-compatible endpoint that costs about 0.1 ms a request, so that it is not what is measured.

A process of its own: `python -m benchmarks.endpoint LATENCY PER_SECOND TELLS` prints its base_url, and ends with its
stdin, so also when whoever holds that dies; then it prints what it saw, as JSON. With a PER_SECOND that is not 0 it
lets through no more than so many requests within any second and refuses others with 429; with TELLS 1 it then says when
to come again.
HTTP/1.1 with kept connections, by hand; all answers are made beforehand. A conversation gets `CALLS - 1` terminal calls
(`COMMAND`), one a turn, then the answer; each reply has about 40 words of reasoning and text, and usage. Which turn it
is follows from the number of assistant messages in the request. Everything else of a request is ignored.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from array import array
from collections import deque
from contextlib import suppress
from itertools import pairwise
from types import TracebackType
from typing import Any, Self

import msgspec
from msgspec import Struct

from benchmarks.interrupts import held, let_through
from benchmarks.place import ROOT

CALLS = 5  # model calls of one prompt
COMMAND = "echo the quick brown fox"
SLICES = 100  # of the time between the first request and the last answer
KEPT_CHANGES = 2_000_000

_ASSISTANT = re.compile(rb'"role":\s*"assistant"')
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_REASONING = (
    "The task asks for several small steps, and this one comes next; the output so far looks as it should, nothing "
    "failed, so I go on with the plan as it stands and look at what the command prints."
)
_TEXT = "Running the next step now."


class Seen(Struct, frozen=True, kw_only=True):
    """What the endpoint saw. Times are monotonic seconds, 0 without a request; `in_flight` are means over SLICES equal
    parts of the time from the first request to the last answer. Refused requests are in `refused` alone; `tenths` has
    how many others came in each tenth of a second from the first on."""

    requests: int
    refused: int
    tenths: list[int]
    peak: int
    first: float
    last: float
    cpu_seconds: float
    body_bytes: int
    connections: int
    in_flight: list[float]

    @property
    def span(self) -> float:
        """Seconds from the first request to the last answer."""
        return self.last - self.first


class Endpoint:
    """Answers, and counts what was asked."""

    def __init__(self, latency: float, per_second: int = 0, tells: bool = False) -> None:
        self.latency = latency
        self.connections = 0
        self._per_second = per_second
        self._tells = tells
        self._refused = 0
        self._tenths: list[int] = []
        self._recent: deque[float] = deque()  # what was let through within the last second
        self._answers = [_http(_completion(turn)) for turn in range(1, CALLS + 1)]
        self._bytes = 0
        self._requests = 0
        self._now = 0
        self._peak = 0
        self._times = array("d")
        self._counts = array("i")

    def answer(self, body: bytes) -> bytes:
        """The answer to a request that came just now. `sent` is to be called when it goes out."""
        self._requests += 1
        self._bytes += len(body)
        self._note(1)
        tenth = int(10 * (time.monotonic() - self._times[0]))
        self._tenths += [0] * (tenth + 1 - len(self._tenths))
        self._tenths[tenth] += 1
        return self._answers[min(len(_ASSISTANT.findall(body)), CALLS - 1)]

    def refusal(self) -> bytes:
        """The answer to a request that came just now, if it is one too many; else b""."""
        now = time.monotonic()
        while self._recent and self._recent[0] <= now - 1:
            self._recent.popleft()
        if self._per_second and len(self._recent) >= self._per_second:
            self._refused += 1
            wait = self._recent[0] + 1 - now
            return _http(b'{"error": {"message": "too many requests"}}', 429, wait if self._tells else None)
        if self._per_second:
            self._recent.append(now)
        return b""

    def sent(self) -> None:
        """A request has its answer."""
        self._note(-1)

    def seen(self) -> Seen:
        """Everything so far."""
        return Seen(
            requests=self._requests,
            refused=self._refused,
            tenths=self._tenths,
            peak=self._peak,
            first=self._times[0] if self._times else 0.0,
            last=self._times[-1] if self._times else 0.0,
            cpu_seconds=time.process_time(),
            body_bytes=self._bytes,
            connections=self.connections,
            in_flight=slices(self._times, self._counts),
        )

    def _note(self, change: int) -> None:
        self._now += change
        self._peak = max(self._peak, self._now)
        if len(self._times) < KEPT_CHANGES:
            self._times.append(time.monotonic())
            self._counts.append(self._now)


def slices(times: "array[float]", counts: "array[int]") -> list[float]:
    """Mean of a step function over SLICES equal parts of its time; `counts[i]` holds from `times[i]` on."""
    if len(times) < 2 or times[-1] <= times[0]:
        return []
    width = (times[-1] - times[0]) / SLICES
    areas = [0.0] * SLICES
    for (begin, end), count in zip(pairwise(times), counts, strict=False):
        first, last = (min(int((at - times[0]) / width), SLICES - 1) for at in (begin, end))
        for place in range(first, last + 1):
            low, high = times[0] + place * width, times[0] + (place + 1) * width
            areas[place] += count * max(0.0, min(end, high) - max(begin, low))
    return [area / width for area in areas]


class Connection(asyncio.Protocol):
    """One client's connection. Requests that come together are answered in turn."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._endpoint.connections += 1

    def data_received(self, data: bytes) -> None:
        """Part of asyncio.Protocol."""
        self._buffer += data
        while (head := self._buffer.find(b"\r\n\r\n")) >= 0:
            found = _LENGTH.search(self._buffer, 0, head + 2)
            end = head + 4 + (int(found[1]) if found else 0)
            if len(self._buffer) < end:
                return
            self._take(self._buffer[head + 4 : end])
            self._buffer = self._buffer[end:]

    def _take(self, body: bytes) -> None:
        if (refusal := self._endpoint.refusal()) and self._transport is not None:
            self._transport.write(refusal)
            return
        answer = self._endpoint.answer(body)
        if self._endpoint.latency:
            asyncio.get_running_loop().call_later(self._endpoint.latency, self._send, answer)
        else:
            self._send(answer)

    def _send(self, answer: bytes) -> None:
        self._endpoint.sent()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(answer)


def _http(body: bytes, status: int = 200, wait: float | None = None) -> bytes:
    told = "" if wait is None else f"retry-after-ms: {1000 * wait:.0f}\r\n"
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{told}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _completion(turn: int) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": _TEXT, "reasoning_content": _REASONING}
    if turn < CALLS:
        function = {"name": "terminal", "arguments": json.dumps({"command": COMMAND})}
        message["tool_calls"] = [{"id": f"call_{turn}", "type": "function", "function": function}]
    reason = "tool_calls" if turn < CALLS else "stop"
    reply = {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": "bench",
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {"prompt_tokens": 1000, "completion_tokens": 60, "total_tokens": 1060},
    }
    return json.dumps(reply).encode()


class EndpointProcess:
    """The endpoint, running as a process; `seen` is there once it has ended."""

    def __init__(self, latency: float = 0.0, per_second: int = 0, *, tells: bool = False) -> None:
        self.url = ""
        self._words = [str(latency), str(per_second), str(int(tells))]
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: Seen | None = None

    @property
    def seen(self) -> Seen:
        """After the end."""
        assert self._seen is not None, "the endpoint still runs"
        return self._seen

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "benchmarks.endpoint", *self._words]
        try:
            with held():
                self._process = subprocess.Popen(  # noqa: S603 - our own words
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True
                )
            assert self._process.stdout is not None
            self.url = self._process.stdout.readline().decode().strip()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:  # nobody will ask what it saw
            self._kill()
            return
        assert self._process is not None
        out, _ = self._process.communicate(timeout=30)  # which ends its stdin
        self._seen = msgspec.json.decode(out, type=Seen)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


async def serve(latency: float, per_second: int, tells: bool) -> None:
    """Until stdin ends."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), stopped.set)
    endpoint = Endpoint(latency, per_second, tells)
    server = await loop.create_server(lambda: Connection(endpoint), "127.0.0.1", 0, backlog=4096)
    port = server.sockets[0].getsockname()[1]
    sys.stdout.write(f"http://127.0.0.1:{port}/v1\n")
    sys.stdout.flush()
    await stopped.wait()
    loop.remove_reader(sys.stdin.fileno())
    server.close()
    with suppress(BrokenPipeError):  # nobody is there any more
        os.write(sys.stdout.fileno(), msgspec.json.encode(endpoint.seen()))


if __name__ == "__main__":
    let_through()
    asyncio.run(serve(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1"))
