"""Pictures as bytes: what kind they are, how large, where they come from, and small enough for a model.

Kinds and sizes are read from the bytes themselves; nothing is decoded unless a picture has to be made smaller, and then
only one that was found to be of bounded size, one at a time.
"""

import asyncio
import base64
import binascii
import io
import re
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import unquote_to_bytes

from tools.base import Picture, ToolContext
from tools.errors import ToolError
from tools.files import located

LARGEST_SOURCE = 50 * 1024 * 1024  # bytes of a picture that is looked at at all
LARGEST_SHOWN = 5 * 1024 * 1024 * 3 // 4  # bytes that are 5 MiB as base64
MOST_PIXELS_A_SIDE = 7_900
MOST_PIXELS = 64_000_000  # of a picture that is decoded: 256 MB in memory
LOAD_SECONDS = 60.0
ACCEPT = "image/png,image/jpeg,image/webp,image/gif,image/*;q=0.5,*/*;q=0.2"

KINDS = {"image/png": "png", "image/jpeg": "jpg", "image/gif": "gif", "image/webp": "webp"}
"""Media type -> ending of a file's name."""

_DATA_URL = re.compile(r"data:([^,]{0,200}),", re.IGNORECASE)
_SMALLER = (MOST_PIXELS_A_SIDE, 4096, 2048, 1024)  # pixels a side, until it is small enough
_SOF = set(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # JPEG: the markers of a frame's header
_one_at_a_time = threading.Lock()


def media_type(data: bytes) -> str:
    """image/png, image/jpeg, image/gif or image/webp, by the first bytes; "" for anything else."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    return "image/webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else ""


def size_of(data: bytes) -> tuple[int, int]:
    """Width and height in pixels, as the header says. Raises ToolError where it says nothing."""
    readers = {"image/png": _png_size, "image/jpeg": _jpeg_size, "image/gif": _gif_size, "image/webp": _webp_size}
    try:
        width, height = readers[media_type(data)](data)
    except (struct.error, KeyError, IndexError) as error:
        raise ToolError("the picture is damaged: its size cannot be read") from error
    if not width or not height:
        raise ToolError("the picture is damaged: it has no pixels")
    return width, height


def _png_size(data: bytes) -> tuple[int, int]:
    return struct.unpack_from(">II", data, 16)


def _gif_size(data: bytes) -> tuple[int, int]:
    return struct.unpack_from("<HH", data, 6)


def _webp_size(data: bytes) -> tuple[int, int]:
    form = data[12:16]
    if form == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if form == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<HH", data, 26)
    return width & 0x3FFF, height & 0x3FFF


def _jpeg_size(data: bytes) -> tuple[int, int]:
    for marker, place in _jpeg_segments(data):
        if marker in _SOF:
            height, width = struct.unpack_from(">HH", data, place + 3)
            return width, height
    raise KeyError("no frame")


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Markers, each with the place of its length."""
    place = 2
    while data[place] == 0xFF:
        while data[place] == 0xFF:
            place += 1
        yield data[place], place + 1
        (length,) = struct.unpack_from(">H", data, place + 1)
        place += 1 + length


def picture_of(data: bytes) -> Picture:
    """A picture of a kind that models see. Raises ToolError for other bytes."""
    kind = media_type(data)
    if not kind:
        raise ToolError(f"this is no PNG, JPEG, GIF or WebP picture but {_looks_like(data)}")
    size_of(data)
    return Picture(kind, data)


def _looks_like(data: bytes) -> str:
    head = data[:1000].lstrip().lower()
    if not data:
        return "empty"
    if b"<svg" in head:
        return "an SVG drawing: convert it to PNG first"
    if head.startswith((b"<!doctype html", b"<html")):
        return "an HTML page: give the address of the picture itself"
    if head.startswith(b"%pdf"):
        return "a PDF: convert a page to PNG first"
    if head.startswith((b"bm", b"ii*\0", b"mm\0*")):
        return "of another format: convert it to PNG first"
    return "something else"


def data_url(picture: Picture) -> str:
    """The picture in a URL."""
    return f"data:{picture.media_type};base64,{base64.b64encode(picture.data).decode()}"


# --- where pictures come from


async def load_picture(context: ToolContext, place: str) -> Picture:
    """The picture at an http(s) or data URL, or at a path in the task's sandbox. Raises ToolError."""
    place = place.strip()
    try:
        async with asyncio.timeout(LOAD_SECONDS):
            return picture_of(await _bytes_at(context, place))
    except TimeoutError as late:
        raise ToolError(f"{_short(place)}: it could not be read within {LOAD_SECONDS:g} s") from late
    except ToolError as error:
        raise ToolError(str(error) if str(error).startswith(place) else f"{_short(place)}: {error}") from error


async def _bytes_at(context: ToolContext, place: str) -> bytes:
    if place[:5].lower() == "data:":
        return data_of(place)
    if is_on_the_web(place):
        return await download(context, place)
    path = place.removeprefix("file://")
    return await bounded(context.environment.read(await located(context.environment, path)))


def is_on_the_web(place: str) -> bool:
    """Whether it is an http(s) URL."""
    return place.strip()[:8].lower().startswith(("http://", "https://"))


async def download(context: ToolContext, url: str) -> bytes:
    """What is at a web address that tasks may open. Raises ToolError."""
    try:
        from tools.web.fetch import fetch  # noqa: PLC0415 - loads httpx, of the extra `web`
    except ModuleNotFoundError as error:
        raise ToolError(f"pictures from the web need {error.name}: pip install -e '.[web]'") from error
    fetched = await fetch(context.services, url, max_bytes=LARGEST_SOURCE, seconds=LOAD_SECONDS, accept=ACCEPT)
    if fetched.cut:
        raise ToolError(fetched.cut)
    return fetched.body


async def bounded(chunks: AsyncIterator[bytes], most: int = LARGEST_SOURCE) -> bytes:
    """All of them, joined. Raises ToolError for more than `most` bytes."""
    data = bytearray()
    async for chunk in chunks:
        data += chunk
        if len(data) > most:
            raise ToolError(f"it is larger than {most / 2**20:.0f} MB")
    return bytes(data)


def data_of(url: str) -> bytes:
    """What a data URL holds. Raises ToolError."""
    found = _DATA_URL.match(url)
    if found is None:
        raise ToolError("this data URL has no comma behind its media type")
    if len(url) > LARGEST_SOURCE * 2:
        raise ToolError(f"it is larger than {LARGEST_SOURCE / 2**20:.0f} MB")
    data = unquote_to_bytes(url[found.end() :])
    if not found[1].lower().endswith(";base64"):
        return data
    data = b"".join(data.split()).replace(b"-", b"+").replace(b"_", b"/")
    try:
        return base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
    except binascii.Error as error:
        raise ToolError("what this data URL holds is no base64") from error


def _short(place: str) -> str:
    return place if len(place) <= 200 else place[:100] + "…"


# --- small enough


async def fitted(picture: Picture) -> Picture:
    """The picture, made smaller if it is too large for models. Raises ToolError where that cannot be done here."""
    width, height = size_of(picture.data)
    if len(picture.data) <= LARGEST_SHOWN and max(width, height) <= MOST_PIXELS_A_SIDE:
        return picture
    if width * height > MOST_PIXELS:
        raise ToolError(f"{_too_large(picture)}: make it smaller, or cut out what matters, and try again")
    return await asyncio.to_thread(_smaller, picture)


def _too_large(picture: Picture) -> str:
    width, height = size_of(picture.data)
    return (
        f"the picture is too large to be looked at ({width} x {height} pixels, {len(picture.data) / 2**20:.1f} MB;"
        f" {MOST_PIXELS_A_SIDE:,} pixels a side and {LARGEST_SHOWN / 2**20:.1f} MB are the most)"
    )


def _smaller(picture: Picture) -> Picture:
    try:
        from PIL import Image  # noqa: PLC0415 - of the extra `vision`, and seldom needed
    except ImportError as error:
        raise ToolError(
            f"{_too_large(picture)}: make it smaller and try again (pip install -e '.[vision]' lets this program do it)"
        ) from error
    try:
        with _one_at_a_time, Image.open(io.BytesIO(picture.data), formats=["PNG", "JPEG", "GIF", "WEBP"]) as opened:
            if opened.width * opened.height > MOST_PIXELS:  # a frame may be larger than the header says
                raise ToolError(_too_large(picture))
            return _first_that_fits(opened, picture)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ToolError(f"the picture is damaged: {error}") from error


def _first_that_fits(opened: Any, picture: Picture) -> Picture:
    image = opened
    if image.mode not in ("L", "RGB", "RGBA"):
        image = image.convert("RGB" if image.mode in ("CMYK", "YCbCr") else "RGBA")
    for side in _SMALLER:
        image.thumbnail((side, side))
        for kind, data in _encoded(image, picture.media_type):
            if len(data) <= LARGEST_SHOWN:
                return Picture(kind, data)
    raise ToolError(_too_large(picture))


def _encoded(image: Any, kind: str) -> Iterator[tuple[str, bytes]]:
    """As PNG if it was no JPEG, so that writing stays sharp; then as JPEG, on white."""
    from PIL import Image  # noqa: PLC0415 - see above

    if kind != "image/jpeg":
        yield "image/png", _saved(image, "PNG")
    if image.mode == "RGBA":
        ground = Image.new("RGB", image.size, "white")
        ground.paste(image, mask=image.getchannel("A"))
        image = ground
    yield "image/jpeg", _saved(image, "JPEG", quality=85)


def _saved(image: Any, form: str, **options: int) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()
