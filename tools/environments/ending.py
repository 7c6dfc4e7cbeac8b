"""Work that has to be done on every way out. A leaf."""

import asyncio
from collections.abc import Coroutine
from typing import Any

_CLOSE_SECONDS = 10.0


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Does clean-up work even if cancelled meanwhile, and waits ten seconds for it at most: what is left then goes on
    beside us, or is for whoever looks after the dead."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait_for(asyncio.shield(task), _CLOSE_SECONDS)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=_CLOSE_SECONDS)
        raise
    except TimeoutError:
        return


async def uninterrupted(work: Coroutine[Any, Any, object], seconds: float) -> None:
    """Runs `work` to its end or for `seconds`, after which it is cancelled, however often this task is cancelled
    meanwhile: that comes after."""
    task = asyncio.ensure_future(asyncio.wait_for(work, seconds))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    fault = None if task.cancelled() else task.exception()
    if cancelled:
        raise cancelled
    if fault and not isinstance(fault, TimeoutError):
        raise fault
