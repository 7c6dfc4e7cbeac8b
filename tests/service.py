"""How tests serve HTTP: applications of aiohttp, on loopback, in the running event loop."""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Self

from aiohttp import web


@asynccontextmanager
async def running(app: web.Application, *, cancels: bool = False) -> AsyncIterator[web.AppRunner]:
    """The application, for a site of any kind. `cancels`: a handler ends when who asked is gone."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=cancels)
    await runner.setup()
    try:
        yield runner
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serving(app: web.Application, port: int = 0, *, cancels: bool = False) -> AsyncIterator[int]:
    """The port at which the application answers: a free one for 0."""
    async with running(app, cancels=cancels) as runner:
        await web.TCPSite(runner, "127.0.0.1", port, backlog=2048).start()
        yield runner.addresses[0][1]


class Service(ABC):
    """A server for `async with`; then `port` is the one at which it answers."""

    cancels = False

    def __init__(self, port: int = 0) -> None:
        self.port = port
        self._open = AsyncExitStack()

    @abstractmethod
    def application(self) -> web.Application:
        """What it answers."""

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """What clients are told."""
        return self.origin

    async def __aenter__(self) -> Self:
        served = serving(self.application(), self.port, cancels=self.cancels)
        self.port = await self._open.enter_async_context(served)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()
