"""The one place that catches everything: code that is not ours, or a fault of our own, becomes data."""

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from msgspec import Struct

from agent.errors import RunStopped
from tools.errors import DiskFull, RowFailed, ToolError, UsageProblem

T = TypeVar("T")


class Fault(Struct, frozen=True, kw_only=True):
    """An exception as values that can be written and sent."""

    kind: str
    message: str
    trace: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind


class Done(Struct, Generic[T], frozen=True):
    """What came back without an exception."""

    value: T


MEANT = (RowFailed, RunStopped, DiskFull, ToolError, UsageProblem, asyncio.CancelledError, TimeoutError)
"""What has a meaning of its own: a row's end, the run's stop, an answer to the model, the user's mistake, cancelling,
a time limit."""
CAUGHT = (Exception, SystemExit, KeyboardInterrupt, asyncio.CancelledError)


async def guarded(call: Awaitable[T], *, through: tuple[type[BaseException], ...] = MEANT) -> Done[T] | Fault:
    """Awaits tools, checkers and whole rollouts, so that none of them can take its neighbours down. Exceptions of the
    kinds `through` are raised as they are. A KeyboardInterrupt is a plug-in's: loops hear of signals otherwise."""
    try:
        return Done(await call)
    except through:
        raise
    except CAUGHT as error:  # what a plug-in, a tool or we did wrong ends as data
        return fault_of(error)


def attempted(
    call: Callable[[], T], *, through: tuple[type[BaseException], ...] = (*MEANT, KeyboardInterrupt)
) -> Done[T] | Fault:
    """As `guarded`, for what is no coroutine and may stand on the main thread, where Ctrl-C is the user's."""
    try:
        return Done(call())
    except through:
        raise
    except CAUGHT as error:
        return fault_of(error)


def fault_of(error: BaseException) -> Fault:
    """An exception's name, text and traceback; one whose text cannot be made is survived."""
    try:
        message = str(error)
    except Exception as broken:  # noqa: BLE001 - a foreign __str__ may do anything
        message = f"(its text cannot be made: {type(broken).__name__})"
    return Fault(kind=type(error).__name__, message=message, trace="".join(traceback.format_tb(error.__traceback__)))
