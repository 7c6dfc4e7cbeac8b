"""What crosses between the parent and a worker: small frozen records, and the socket that carries them.

Never crosses: trajectories (they are in the journal), exceptions (turned into data at the border), clients, locks and
keys (the names of their variables cross).
"""

import asyncio
import struct
from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import Struct

from agent.errors import StopReason
from agent.models.base import Lease, Verdict
from agent.prompt import Try
from agent.types import Spend

_LENGTH = struct.Struct("<I")

ERROR_HEAD = 1000  # characters of an error that a PromptEnded carries


class Job(Struct, frozen=True, kw_only=True):
    """One try to run: identity and the dataset's line."""

    prompt_index: int
    task_id: str
    row_key: str
    row_sha: str
    sample_index: int
    attempt: int
    line: bytes


def try_of(job: Job, batch_num: int) -> Try:
    """What a job is to the agent."""
    return Try(
        prompt_index=job.prompt_index,
        task_id=job.task_id,
        row_key=job.row_key,
        row_sha=job.row_sha,
        sample_index=job.sample_index,
        attempt=job.attempt,
        batch_num=batch_num,
    )


# --- parent to worker


class BatchJob(Struct, frozen=True, tag=True):
    """Rows to run and to write into one batch file."""

    batch_num: int
    jobs: list[Job]


class Granted(Struct, frozen=True, tag=True, omit_defaults=True):
    """The answer to an Ask. `gate`, here and below: which of the run's gates, see `WorkerSpec`."""

    ask: int
    lease: Lease
    gate: int = 0


class Refused(Struct, frozen=True, tag=True, omit_defaults=True):
    """The answer to an Ask once no request is let go any more."""

    ask: int
    reason: StopReason
    message: str
    gate: int = 0


class Stop(Struct, frozen=True, tag=True):
    """No new rows, no new model calls; `now`: running rows are cut off too."""

    reason: StopReason
    now: bool


class Finish(Struct, frozen=True, tag=True):
    """Nothing more will come: end once idle."""


# --- worker to parent


class WantBatch(Struct, frozen=True, tag=True):
    """So many slots are free."""

    free: int


class PromptStarted(Struct, frozen=True, tag=True):
    """From here on a death of the worker, or a loop that stands still, may be this row's doing."""

    batch_num: int
    row_key: str
    sample_index: int
    deadline: float  # monotonic time, until a Heartbeat says more


class PromptEnded(Struct, frozen=True, tag=True, kw_only=True):
    """A row is on disk, at this place. Small: the trajectory stays in the file."""

    batch_num: int
    offset: int
    length: int
    prompt_index: int
    task_id: str
    row_key: str
    sample_index: int
    attempt: int
    status: str
    reason: str
    error: str
    error_class: str
    retryable: bool
    row_fault: bool
    has_reasoning: bool
    spend: Spend
    api_calls: int
    tool_stats: dict[str, tuple[int, int, int]]  # only tools that were called: count, success, failure
    duration_seconds: float
    start_retries: int = 0


class Ask(Struct, frozen=True, tag=True, omit_defaults=True):
    """May one request of about `tokens` be sent?"""

    ask: int
    tokens: int
    gate: int = 0


class Unask(Struct, frozen=True, tag=True, omit_defaults=True):
    """Whoever asked is gone."""

    ask: int
    gate: int = 0


class Release(Struct, frozen=True, tag=True, omit_defaults=True):
    """A request ended."""

    lease: Lease
    verdict: Verdict
    gate: int = 0


class Heartbeat(Struct, frozen=True, tag=True):
    """The loop is alive. `overdue_at` is the monotonic time at which the first running row is past its deadline; 0 =
    none runs."""

    overdue_at: float


class Retire(Struct, frozen=True, tag=True):
    """A row could not be ended: this worker wants to be replaced once idle."""


class Log(Struct, frozen=True, tag=True, omit_defaults=True):
    """A line for run.log. `left`: the sandboxes it speaks of, which could not be removed."""

    batch_num: int
    prompt_index: int
    text: str
    left: tuple[str, ...] = ()


class Broken(Struct, frozen=True, tag=True):
    """The worker cannot go on."""

    kind: Literal["usage", "stop", "fault"]
    reason: StopReason
    message: str


ToWorker = BatchJob | Granted | Refused | Stop | Finish
ToParent = WantBatch | PromptStarted | PromptEnded | Ask | Unask | Release | Heartbeat | Retire | Log | Broken

NO_ROW = -1

_encode = msgspec.msgpack.Encoder().encode
_decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
_decode_to_parent = msgspec.msgpack.Decoder(ToParent).decode


class Wire(asyncio.Protocol):
    """Messages over a stream socket, in order, never blocking: a length of four bytes, then MessagePack."""

    def __init__(self, decode: Callable[[bytes], ToWorker | ToParent], receive: Callable[..., None]) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._decode = decode
        self._receive = receive
        self._buffer = bytearray()
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Part of asyncio.Protocol."""
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            message = self._decode(bytes(buffer[start + _LENGTH.size : end]))
            start = end
            self._receive(message)
        del buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of asyncio.Protocol."""
        if not self.closed.done():
            self.closed.set_result(None)

    def send(self, message: ToWorker | ToParent) -> None:
        """Queues a message; nothing is said if the other side is gone (`closed` tells). All messages of one round of
        the loop go out together."""
        if self._transport is not None and not self._transport.is_closing():
            payload = _encode(message)
            if not self._unsent:
                asyncio.get_running_loop().call_soon(self._flush)
            self._unsent += (_LENGTH.pack(len(payload)), payload)

    def _flush(self) -> None:
        if self._unsent and self._transport is not None:
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def close(self) -> None:
        """What was sent is still delivered."""
        self._flush()
        if self._transport is not None:
            self._transport.close()


def worker_side(receive: Callable[..., None]) -> Wire:
    """The worker's end."""
    return Wire(_decode_to_worker, receive)


def parent_side(receive: Callable[..., None]) -> Wire:
    """The parent's end."""
    return Wire(_decode_to_parent, receive)
