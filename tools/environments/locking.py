"""One at a time over all processes that see a file. A leaf."""

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

_PAUSE_SECONDS = 0.1


@asynccontextmanager
async def alone(path: Path) -> AsyncIterator[int]:
    """Holds the lock of a file, which is made if it is not there; its descriptor. A child that inherits the descriptor
    holds the lock as long as it lives."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while not try_lock(descriptor):  # noqa: ASYNC110 - another process frees it; a thread in flock() has no limit
            await asyncio.sleep(_PAUSE_SECONDS)
        yield descriptor
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Takes the lock of an open file if nobody has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
