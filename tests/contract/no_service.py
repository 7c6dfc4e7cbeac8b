"""A server on loopback that is none of the services that backends speak with."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def answering(status: int, kind: str, body: bytes) -> AsyncIterator[int]:
    """The port of a server that says this to everything."""

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(status=status, body=body, headers={"Content-Type": kind})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
