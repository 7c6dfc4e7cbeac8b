"""A fake OpenAI-compatible endpoint: a real HTTP server on loopback, for tests and measurements.

In a test's own event loop:

    async with Endpoint(calls=2) as endpoint:
        ...                                   # endpoint.url is the base_url: http://127.0.0.1:PORT/v1
        assert endpoint.stats.requests == 3

As a process of its own, for tests that run programs (prints its base_url as its first line, ends with SIGTERM):

    python -m tests.endpoint --port 0 --calls 2 --latency 0.1 --rules FILE.json
    with EndpointProcess(rules=[...], calls=2) as endpoint:       # the same from Python
        endpoint.url; endpoint.stats()["requests"]; endpoint.set_rules([...])

Without rules it plays an agent, the same for the same prompt: `calls` terminal calls (`echo step N of PROMPT`), one a
turn, each with reasoning, then a final answer `done: PROMPT`. Where no terminal is offered the answer comes at once.
Every reply reports usage: 100 input and 10 output tokens.

A rule says which requests it answers and how; the first that fits answers. All keys may be left out:

    which   prompt      regular expression, searched in the request's last user message
            call        number of the request among those with this prompt, from 1: a number, or [first, last]
            turn        number of assistant messages in the request, plus 1: a number, or [first, last]
            key, model  the bearer key, the model, as sent
            has         text that the request's body must hold
            times       how often this rule answers at most
            per_second  only for requests above so many within the last second (a rate limit)
    how     status, headers       of the answer (200)
            body                  any JSON value, as it is
            raw                   any text, as it is
            message, finish_reason, usage     the parts of a usual reply
            error                 shorthand for the body {"error": ...}
            delay                 seconds before the answer
            stall                 true: no answer, ever
            hold                  true: no answer before other rules are set
            together              no answer before so many requests have been under way at once
            drip                  seconds between the answer's bytes, the head's too
            drop                  "before" an answer, or in the middle of its "body": the connection is cut

`GET /stats` (see `Stats`), `POST /rules` (a JSON list, replaces all), `POST /reset` (counts from 0).
"""

import argparse
import asyncio
import atexit
import importlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import msgspec
from aiohttp import web
from msgspec import Struct, field

from tests.service import Service

KEPT_BODIES = 200

Span = int | tuple[int, int] | None


class Rule(Struct, kw_only=True, forbid_unknown_fields=True):
    """See the module."""

    prompt: str = ""
    call: Span = None
    turn: Span = None
    key: str | None = None
    model: str | None = None
    has: str = ""
    times: int | None = None
    per_second: int | None = None
    status: int = 200
    headers: dict[str, str] = {}
    body: Any = msgspec.UNSET
    raw: str | None = None
    message: Any = msgspec.UNSET
    finish_reason: str = "stop"
    usage: Any = msgspec.UNSET
    error: Any = msgspec.UNSET
    delay: float = 0.0
    stall: bool = False
    hold: bool = False
    together: int = 0
    drip: float = 0.0
    drop: str = ""
    used: int = 0


class Stats(Struct, kw_only=True):
    """What came: `bodies` and `times` (seconds, monotonic) of the last 200 requests, the rest of all."""

    requests: int = 0
    in_flight: int = 0
    peak: int = 0
    prompts: Counter[str] = field(default_factory=Counter)
    keys: Counter[str] = field(default_factory=Counter)
    models: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    connections: int = 0
    bodies: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=KEPT_BODIES))
    times: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_BODIES))


class Request(Struct):
    """One that came, and its numbers."""

    body: dict[str, Any]
    text: str
    prompt: str
    call: int
    turn: int
    key: str


class Endpoint(Service):
    """The server. `rules` may be changed while it runs."""

    cancels = True

    def __init__(
        self, rules: list[dict[str, Any]] | None = None, *, calls: int = 1, latency: float = 0.0, port: int = 0
    ) -> None:
        super().__init__(port)
        self.calls = calls
        self.latency = latency
        self.stats = Stats()
        self.rules: list[Rule] = []
        self.set_rules(rules or [])
        self._recent: deque[float] = deque()
        self._seen: set[int] = set()

    @property
    def url(self) -> str:
        return f"{self.origin}/v1"

    def set_rules(self, rules: list[dict[str, Any]]) -> None:
        self.rules = msgspec.convert(rules, list[Rule])

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/stats", self._get_stats)
        app.router.add_post("/rules", self._post_rules)
        app.router.add_post("/reset", self._post_reset)
        return app

    # --- HTTP

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        request = self._note(http, await http.read())
        self.stats.in_flight += 1
        self.stats.peak = max(self.stats.peak, self.stats.in_flight)
        try:
            return await self._answer(http, request)
        finally:
            self.stats.in_flight -= 1

    async def _get_stats(self, _: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(self.stats, enc_hook=list), content_type="application/json")

    async def _post_rules(self, http: web.Request) -> web.Response:
        self.set_rules(await http.json())
        return web.Response()

    async def _post_reset(self, _: web.Request) -> web.Response:
        self.stats = Stats(in_flight=self.stats.in_flight)
        return web.Response()

    # --- one request

    def _note(self, http: web.Request, data: bytes) -> Request:
        body = json.loads(data)
        prompt = prompt_of(body)
        key = http.headers.get("Authorization", "").removeprefix("Bearer ")
        stats = self.stats
        stats.requests += 1
        stats.prompts[prompt] += 1
        stats.keys[key] += 1
        stats.models[body.get("model", "")] += 1
        stats.bodies.append(body)
        stats.times.append(time.monotonic())
        if id(http.protocol) not in self._seen:
            self._seen.add(id(http.protocol))
            stats.connections += 1
        turn = 1 + sum(message["role"] == "assistant" for message in body["messages"])
        return Request(body, data.decode(), prompt, stats.prompts[prompt], turn, key)

    async def _answer(self, http: web.Request, request: Request) -> web.StreamResponse:
        rule = self._rule(request)
        delay = self.latency + (rule.delay if rule else 0.0)
        if delay:
            await asyncio.sleep(delay)
        if rule is None:
            return self._reply(200, {}, msgspec.json.encode(self._play(request)))
        rule_body = _rule_body(rule, request)
        if rule.stall:
            await asyncio.Event().wait()
        while self._is_held(rule):  # noqa: ASYNC110 - what it waits for changes in many ways
            await asyncio.sleep(0.01)
        if rule.drop or rule.drip:
            return await _raw_answer(http, rule, rule_body)
        return self._reply(rule.status, rule.headers, rule_body)

    def _is_held(self, rule: Rule) -> bool:
        return self.stats.peak < rule.together or (rule.hold and any(rule is each for each in self.rules))

    def _reply(self, status: int, headers: dict[str, str], body: bytes) -> web.Response:
        self.stats.statuses[status] += 1
        return web.Response(status=status, headers={"Content-Type": "application/json", **headers}, body=body)

    def _rule(self, request: Request) -> Rule | None:
        over = self._over_rate()
        for rule in self.rules:
            if _fits(rule, request) and (rule.per_second is None or over > rule.per_second):
                rule.used += 1
                if rule.per_second is not None:
                    self._recent.pop()  # a refused request does not count against the rate
                return rule
        return None

    def _over_rate(self) -> int:
        now = time.monotonic()
        self._recent.append(now)
        while self._recent[0] <= now - 1:
            self._recent.popleft()
        return len(self._recent)

    def _play(self, request: Request) -> dict[str, Any]:
        done = request.turn - 1
        if done >= self.calls or not _offers_terminal(request.body):
            return completion(
                {"content": f"done: {request.prompt}", "reasoning_content": "All steps are done."}, request
            )
        command = f"echo step {done + 1} of {shlex.quote(request.prompt)}"
        message = {
            "content": "",
            "reasoning_content": f"Step {done + 1} comes next.",
            "tool_calls": [tool_call("terminal", {"command": command}, f"call_{done}")],
        }
        return completion(message, request, finish_reason="tool_calls")


def prompt_of(body: dict[str, Any]) -> str:
    """The last user message of a request."""
    for message in reversed(body["messages"]):
        if message["role"] == "user":
            content = message["content"]
            return content if isinstance(content, str) else json.dumps(content)
    return ""


def tool_call(name: str, arguments: dict[str, Any] | str, call_id: str = "call_0") -> dict[str, Any]:
    """A call as endpoints send it."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def completion(
    message: dict[str, Any], request: Request, finish_reason: str = "stop", usage: Any = msgspec.UNSET
) -> dict[str, Any]:
    """The body of a usual reply."""
    if usage is msgspec.UNSET:
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    if isinstance(message, dict):
        message = {"role": "assistant", **message}
    return {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": request.body.get("model", ""),
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
        "usage": usage,
    }


def _rule_body(rule: Rule, request: Request) -> bytes:
    if rule.raw is not None:
        return rule.raw.encode("utf-8", "surrogateescape")
    if rule.error is not msgspec.UNSET:
        return json.dumps({"error": rule.error}).encode()
    if rule.body is not msgspec.UNSET:
        return json.dumps(rule.body).encode()
    if rule.message is msgspec.UNSET and rule.status >= 400:
        return json.dumps({"error": {"message": f"status {rule.status}", "type": "fake"}}).encode()
    message = {"content": f"done: {request.prompt}"} if rule.message is msgspec.UNSET else rule.message
    return json.dumps(completion(message, request, rule.finish_reason, rule.usage)).encode()


async def _raw_answer(http: web.Request, rule: Rule, body: bytes) -> web.Response:
    """Writes past the server, which could not be so rude."""
    assert http.transport is not None
    head = f"HTTP/1.1 {rule.status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    answer = head.encode() + body
    if rule.drop == "before":
        answer = b""
    elif rule.drop == "body":
        answer = answer[: len(head) + len(body) // 2]
    for byte in answer if rule.drip else ():
        http.transport.write(bytes([byte]))
        await asyncio.sleep(rule.drip)
    if not rule.drip:
        http.transport.write(answer)
    http.transport.close()
    return web.Response()


def _fits(rule: Rule, request: Request) -> bool:
    return (
        (rule.times is None or rule.used < rule.times)
        and _within(request.call, rule.call)
        and _within(request.turn, rule.turn)
        and rule.key in (None, request.key)
        and rule.model in (None, request.body.get("model"))
        and rule.has in request.text
        and re.search(rule.prompt, request.prompt) is not None
    )


def _within(number: int, span: Span) -> bool:
    if span is None:
        return True
    first, last = (span, span) if isinstance(span, int) else span
    return first <= number <= last


def _offers_terminal(body: dict[str, Any]) -> bool:
    return any(tool["function"]["name"] == "terminal" for tool in body.get("tools", []))


class _Nursery:
    """A process that has loaded a module of servers and forks itself for each server that is asked for: starting Python
    anew takes ten times as long. It ends with the process that made it."""

    def __init__(self, module: str) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [sys.executable, "-m", "tests.endpoint", "--forks", module, "--line", str(theirs.fileno())]
            self._process = subprocess.Popen(words, pass_fds=[theirs.fileno()], cwd=Path(__file__).parent.parent)
        atexit.register(self._end)

    def fork(self, arguments: Sequence[str]) -> "_Fork":
        """The module's `main` with these arguments, as a process."""
        reading, writing = os.pipe()
        try:
            socket.send_fds(self._line, [json.dumps(arguments).encode()], [writing])
        finally:
            os.close(writing)
        return _Fork(int(self._line.recv(64)), os.fdopen(reading))

    def _end(self) -> None:
        self._line.close()
        self._process.wait()


class _Fork:
    """A process of a nursery, and what it prints."""

    def __init__(self, pid: int, output: TextIO) -> None:
        self._pid = pid
        self.output = output

    def end(self) -> None:
        """SIGTERM, and until it has ended."""
        with suppress(ProcessLookupError), self.output:
            os.kill(self._pid, signal.SIGTERM)
            self.output.read()


_nursery = cache(_Nursery)


def _be_forked(module: str, line: socket.socket) -> None:
    """The nursery's side: until the other side is closed."""
    main = importlib.import_module(module).main
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead leave nothing
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the other side ends us
    while True:
        words, files, _, _ = socket.recv_fds(line, 1 << 16, 1)
        if not words:
            return
        if pid := os.fork():
            line.send(str(pid).encode())
            os.close(files[0])
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        line.close()
        os.dup2(files[0], 1)
        os.close(files[0])
        sys.argv = [module, *json.loads(words)]
        main()
        os._exit(0)  # the interpreter's own end would take longer


class EndpointProcess:
    """The endpoint as a process of its own, for tests without an event loop."""

    module = "tests.endpoint"

    def __init__(
        self, rules: list[dict[str, Any]] | None = None, *, calls: int = 1, latency: float = 0.0, port: int = 0
    ) -> None:
        self._rules = rules or []
        self._arguments = ["--port", str(port), "--calls", str(calls), "--latency", str(latency)]
        self._process: _Fork | None = None
        self.url = ""

    def __enter__(self) -> Self:
        self._process = _nursery(self.module).fork(self._arguments)
        self.url = self._process.output.readline().strip()
        if self._rules:
            self.set_rules(self._rules)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.end()

    def stats(self) -> dict[str, Any]:
        """`Stats` as JSON gives them."""
        with urllib.request.urlopen(self.url.removesuffix("/v1") + "/stats", timeout=60) as answer:
            value: dict[str, Any] = json.load(answer)
            return value

    def set_rules(self, rules: list[dict[str, Any]]) -> None:
        self._post("/rules", json.dumps(rules).encode())

    def reset(self) -> None:
        """Counts from 0."""
        self._post("/reset", b"")

    def _post(self, path: str, data: bytes) -> None:
        url = self.url.removesuffix("/v1") + path
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60):
            pass


async def serve(service: Service) -> None:
    """Until SIGTERM or SIGINT; its first line is its `url`."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with service:
        print(service.url, flush=True)
        await stopped.wait()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="a fake OpenAI-compatible endpoint")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--calls", type=int, default=1)
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--rules", "--script", type=Path)
    parser.add_argument("--forks", metavar="MODULE", help=argparse.SUPPRESS)
    parser.add_argument("--line", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.forks:
        _be_forked(options.forks, socket.socket(fileno=options.line))
        return
    rules = json.loads(options.rules.read_text(encoding="utf-8")) if options.rules else []
    asyncio.run(serve(Endpoint(rules, calls=options.calls, latency=options.latency, port=options.port)))


if __name__ == "__main__":
    main()
