"""A Docker engine that has no containers: a server on a unix socket that speaks the image part of the API."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from tests.service import running

# What `images/create` streams as its last line, by image; others arrive half a second later.
ERRORS = {
    "none:1": "manifest for none:1 not found: manifest unknown: manifest unknown",
    "private:1": "pull access denied for private, repository does not exist or may require 'docker login'",
    "offline:1": "Get https://registry-1.docker.io/v2/: dial tcp: lookup registry-1.docker.io: no such host",
    "limited:1": "toomanyrequests: You have reached your pull rate limit",
}


class StubEngine:
    """Counts pulls. `slow…` never arrives, `flaky:1` arrives at the second try, `cut:1` ends without being there."""

    def __init__(self) -> None:
        self.pulls: list[str] = []
        self.credentials: list[object] = []
        self.present: set[str] = set()
        self.info: dict[str, object] = {"MemoryLimit": True, "CpuCfsQuota": True, "PidsLimit": True}

    async def version(self, _request: web.Request) -> web.Response:
        return web.json_response({"ApiVersion": "1.41", "Version": "stub"})

    async def system_info(self, _request: web.Request) -> web.Response:
        return web.json_response(self.info)

    async def inspect(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.present:
            return web.json_response({"message": f"No such image: {name}"}, status=404)
        return web.json_response({"Id": "sha256:0", "Config": {}})

    async def create(self, request: web.Request) -> web.StreamResponse:
        name = ":".join(request.query[key] for key in ("fromImage", "tag") if key in request.query)
        self.pulls.append(name)
        self.credentials.append(json.loads(base64.urlsafe_b64decode(request.headers["X-Registry-Auth"])))
        reply = web.StreamResponse(headers={"Content-Type": "application/json"})
        await reply.prepare(request)
        await reply.write(b'{"status":"Pulling"}\n')
        await reply.write(json.dumps(await self._arrival(name)).encode() + b"\n")
        return reply

    async def _arrival(self, name: str) -> dict[str, object]:
        if name in ERRORS or (name == "flaky:1" and self.pulls.count(name) == 1):
            message = ERRORS.get(name, "net/http: TLS handshake timeout")
            return {"errorDetail": {"message": message}, "error": message}
        await asyncio.sleep(3600 if name.startswith("slow") else 0.5)
        if name != "cut:1":
            self.present |= {name, name.removesuffix(":latest")}
        return {"status": "Downloaded"}


@asynccontextmanager
async def stub_engine(socket: Path) -> AsyncIterator[StubEngine]:
    stub = StubEngine()
    app = web.Application()
    app.add_routes(
        [
            web.get("/version", stub.version),
            web.get("/v1.41/version", stub.version),
            web.get("/v1.41/info", stub.system_info),
            web.get("/v1.41/images/{name:.+}/json", stub.inspect),
            web.post("/v1.41/images/create", stub.create),
        ]
    )
    async with running(app) as runner:
        await web.UnixSite(runner, str(socket)).start()
        yield stub
