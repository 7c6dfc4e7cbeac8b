"""Blocking code beside the event loop."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """As `asyncio.to_thread`, on a daemon thread: a plug-in that never returns cannot hold the process at its end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[], None]) -> None:
        if not future.done():
            set_outcome()

    def run() -> None:
        try:
            value = function(*arguments)
        except BaseException as error:  # noqa: BLE001 - carried to whoever awaits, as to_thread does
            outcome = _raising(future, error)
        else:
            outcome = _returning(future, value)
        try:
            loop.call_soon_threadsafe(settle, outcome)
        except RuntimeError:  # the loop is closed: nobody awaits any more
            return

    threading.Thread(target=run, daemon=True).start()
    return await future


def _returning(future: asyncio.Future[T], value: T) -> Callable[[], None]:
    return lambda: future.set_result(value)


def _raising(future: asyncio.Future[T], error: BaseException) -> Callable[[], None]:
    if isinstance(error, StopIteration | asyncio.CancelledError):  # a future refuses the one; nobody cancelled, says it
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return lambda: future.set_exception(error)
