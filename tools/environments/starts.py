"""Starts of sandboxes: a few at once, so that hundreds do not bring an engine down, and again where one fails."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext

from tools.environments.base import Backend, Environment, EnvironmentSpec
from tools.errors import EnvironmentLost, SandboxRefused, SetupFailed

TRIES = 3
_AT_ONCE = 4
_PAUSE = 1.0  # seconds before the second try, give or take a half; twice as many before the third


class Starts:
    """Those of one event loop. `at_once`: sandboxes that are being started at the same time."""

    def __init__(self, at_once: int = _AT_ONCE, pause: float = _PAUSE) -> None:
        self._pause = pause
        self._places = asyncio.Semaphore(at_once)

    @asynccontextmanager
    async def open(
        self,
        backend: Backend,
        spec: Callable[[], EnvironmentSpec],
        *,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        failed: Callable[[str], None] = lambda _: None,
    ) -> AsyncIterator[Environment]:
        """See `Backend.open`. `spec` is asked for when a sandbox may start; `waiting` is entered while others are
        first. `failed` hears why a start failed that is tried again; what it raises is the end."""
        async with AsyncExitStack() as stack:
            for number in range(1, TRIES + 1):
                try:
                    async with self._place(waiting):
                        environment = await stack.enter_async_context(backend.open(spec()))
                    break
                except (SetupFailed, EnvironmentLost) as problem:
                    if number == TRIES or isinstance(problem, SandboxRefused):
                        raise
                    failed(str(problem))
                await asyncio.sleep(self._pause * 2 ** (number - 1) * random.uniform(0.5, 1.5))  # noqa: S311 - no secret
            yield environment

    @asynccontextmanager
    async def _place(self, waiting: Callable[[], AbstractContextManager[None]]) -> AsyncIterator[None]:
        with waiting() if self._places.locked() else nullcontext():
            await self._places.acquire()
        try:
            yield
        finally:
            self._places.release()
