"""A server on loopback that is none of the services that backends speak with."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from tests.service import serving


@asynccontextmanager
async def answering(status: int, kind: str, body: bytes) -> AsyncIterator[int]:
    """The port of a server that says this to everything."""

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(status=status, body=body, headers={"Content-Type": kind})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with serving(app) as port:
        yield port
