"""A stand-in for services that make pictures, and a site that has some: a real HTTP server on loopback.

It answers as OpenAI's images endpoint (/v1/images/generations, /v1/images/edits) and as FAL (/fal/MODEL) do, with a PNG
of the size asked for, and keeps what it was asked. `answers` are given first, in turn, in place of pictures:
{"status", "headers", "body", "stall"}. `urls`: pictures come as URLs of this server.

    async with PictureService() as service:
        service.url, service.fal_url           # for image_base_url
        service.site + "/picture.png"          # also .jpg .gif .webp, /huge, /never, /page.html, /to?url=…
        service.asked[0].fields, .files, .authorization

As a process of its own: `python -m tests.picture_service` prints `url` as its first line, ends with SIGTERM.
"""

import argparse
import asyncio
import base64
import io
import json
import struct
import zlib
from typing import Any

from aiohttp import web
from msgspec import Struct
from PIL import Image

from tests.endpoint import EndpointProcess, serve
from tests.service import Service

FAL_PIXELS = {"landscape_16_9": (1024, 576), "square_hd": (1024, 1024), "portrait_16_9": (576, 1024)}


def png(width: int = 4, height: int = 3, colour: tuple[int, int, int] = (255, 0, 0)) -> bytes:
    """A PNG of one colour."""
    rows = (b"\0" + bytes(colour) * width) * height
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [b"IHDR" + header, b"IDAT" + zlib.compress(rows), b"IEND"]
    body = b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


class Asked(Struct, frozen=True):
    """A request: its path, its fields, its files as (field, name, type, bytes), its authorization."""

    path: str
    fields: dict[str, Any]
    files: list[tuple[str, str, str, bytes]]
    authorization: str


class PictureService(Service):
    """The server."""

    cancels = True

    def __init__(self, answers: list[dict[str, Any]] | None = None, *, urls: bool = False, port: int = 0) -> None:
        super().__init__(port)
        self.answers = answers or []
        self.urls = urls
        self.asked: list[Asked] = []
        self._made: dict[str, bytes] = {}

    @property
    def site(self) -> str:
        return self.origin

    @property
    def url(self) -> str:
        return f"{self.site}/v1"

    @property
    def fal_url(self) -> str:
        return f"{self.site}/fal"

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/images/{kind}", self._openai)
        app.router.add_post("/fal/{model:.*}", self._fal)
        app.router.add_get("/made/{name}", self._get_made)
        app.router.add_get("/picture.{ending}", _get_picture)
        app.router.add_get("/page.html", _get_page)
        app.router.add_get("/huge", _get_huge)
        app.router.add_get("/never", _get_never)
        app.router.add_get("/to", _get_elsewhere)
        app.router.add_get("/stats", self._get_stats)
        return app

    async def _openai(self, http: web.Request) -> web.Response:
        if http.content_type == "multipart/form-data":
            fields, files = await _form(http)
        else:
            fields, files = json.loads(await http.read()), []
        if answer := await self._refusal(http, fields, files):
            return answer
        width, height = map(int, fields["size"].split("x"))
        data = png(width // 8, height // 8)
        if self.urls:
            return web.json_response({"created": 0, "data": [{"url": self._kept(data)}]})
        return web.json_response({"created": 0, "data": [{"b64_json": base64.b64encode(data).decode()}]})

    async def _fal(self, http: web.Request) -> web.Response:
        fields = json.loads(await http.read())
        if answer := await self._refusal(http, fields, []):
            return answer
        width, height = FAL_PIXELS[fields["image_size"]]
        image = {"url": self._kept(png(width // 8, height // 8)), "width": width, "height": height}
        return web.json_response({"images": [image], "seed": 1, "has_nsfw_concepts": [False], "prompt": ""})

    async def _refusal(
        self, http: web.Request, fields: dict[str, Any], files: list[tuple[str, str, str, bytes]]
    ) -> web.Response | None:
        self.asked.append(Asked(http.path, fields, files, http.headers.get("Authorization", "")))
        if not self.answers:
            return None
        answer = self.answers.pop(0)
        if answer.get("stall"):
            await asyncio.Event().wait()
        body = answer.get("body", {})
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=answer.get("status", 200), headers=answer.get("headers"), text=text)

    def _kept(self, data: bytes) -> str:
        name = f"{len(self._made)}.png"
        self._made[name] = data
        return f"{self.site}/made/{name}"

    async def _get_made(self, http: web.Request) -> web.Response:
        assert "Authorization" not in http.headers, "keys do not go with downloads"
        return web.Response(body=self._made[http.match_info["name"]], content_type="image/png")

    async def _get_stats(self, _: web.Request) -> web.Response:
        return web.json_response({"requests": len(self.asked), "paths": [each.path for each in self.asked]})


async def _form(http: web.Request) -> tuple[dict[str, Any], list[tuple[str, str, str, bytes]]]:
    fields: dict[str, Any] = {}
    files = []
    for name, value in (await http.post()).items():
        if isinstance(value, web.FileField):
            files.append((name, value.filename, value.content_type, value.file.read()))
        else:
            fields[name] = value
    return fields, files


async def _get_picture(http: web.Request) -> web.Response:
    """The type that it says is wrong: what counts are the bytes."""
    ending = http.match_info["ending"]
    stream = io.BytesIO()
    form = {"jpg": "JPEG"}.get(ending, ending.upper())
    Image.new("P" if form == "GIF" else "RGB", (20, 10)).save(stream, form)
    return web.Response(body=stream.getvalue(), content_type="application/octet-stream")


async def _get_page(_: web.Request) -> web.Response:
    return web.Response(text="<!doctype html><p>no picture", content_type="image/png")


async def _get_huge(http: web.Request) -> web.StreamResponse:
    """60 MB that begin like a picture."""
    answer = web.StreamResponse(headers={"Content-Type": "image/png"})
    await answer.prepare(http)
    await answer.write(png())
    for _ in range(60):
        await answer.write(bytes(1 << 20))
    return answer


async def _get_never(_: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


async def _get_elsewhere(http: web.Request) -> web.Response:
    raise web.HTTPFound(http.query["url"])


class PictureServiceProcess(EndpointProcess):
    """The service as a process of its own, for tests without an event loop."""

    module = "tests.picture_service"


def main() -> None:
    """The command line: `--port N`."""
    parser = argparse.ArgumentParser(description="a stand-in for image services")
    parser.add_argument("--port", type=int, default=0)
    options, _ = parser.parse_known_args()
    asyncio.run(serve(PictureService(port=options.port)))


if __name__ == "__main__":
    main()
