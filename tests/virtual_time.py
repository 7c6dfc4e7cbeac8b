"""An event loop on which no test waits for real: when nobody has anything to do, its clock jumps to what comes next."""

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Any


class _NoWait(selectors.SelectSelector):
    """Instead of waiting, the clock jumps."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing left that could wake anyone"
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only when nobody has anything to do."""

    def __init__(self) -> None:
        self._virtual = _NoWait()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def virtual(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Runs a coroutine test in virtual time."""

    def run() -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(_awaited(test))

    run.__name__ = run.__qualname__ = test.__name__
    return run


async def _awaited(test: Callable[[], Awaitable[None]]) -> None:
    await test()


def now() -> float:
    return asyncio.get_running_loop().time()
