"""Work that has to be done on every way out. A leaf."""

import asyncio
from collections.abc import Coroutine
from typing import Any

_CLOSE_SECONDS = 10.0


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Does clean-up work even if cancelled meanwhile, for ten seconds at most: what is left then is for whoever looks
    after the dead."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait_for(asyncio.shield(task), _CLOSE_SECONDS)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=_CLOSE_SECONDS)
        raise
    except TimeoutError:
        return
