"""Pictures by their bytes: kind, size, what is no picture, and what is made smaller."""

import base64
import io
import random
import struct
import sys
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tools.base import Picture
from tools.errors import ToolError
from tools.pictures import pictures
from tools.pictures.pictures import LARGEST_SHOWN, data_of, fitted, media_type, picture_of, size_of


def made(form: str, size: tuple[int, int] = (31, 17), mode: str = "RGB", **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.new(mode, size, 1).save(stream, form, **options)
    return stream.getvalue()


def noise(form: str, size: tuple[int, int], mode: str = "RGB") -> bytes:
    """A picture that cannot be compressed."""
    bands = len(Image.new(mode, (1, 1)).getbands())
    stream = io.BytesIO()
    data = random.Random(1).randbytes(size[0] * size[1] * bands)
    Image.frombytes(mode, size, data).save(stream, form, quality=100)
    return stream.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that says so of itself and holds next to nothing."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(b"\0" * 10_000)
    chunks = [header, b"IDAT" + data, b"IEND"]
    body = b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


KINDS = {
    "png": ("image/png", made("PNG")),
    "png with a palette": ("image/png", made("PNG", mode="P")),
    "jpeg": ("image/jpeg", made("JPEG")),
    "progressive jpeg": ("image/jpeg", made("JPEG", progressive=True)),
    "jpeg with a comment": ("image/jpeg", made("JPEG", comment=b"\xff\xc0" * 100)),
    "gif": ("image/gif", made("GIF", mode="P")),
    "webp": ("image/webp", made("WEBP")),
    "lossless webp": ("image/webp", made("WEBP", lossless=True)),
    "webp with more": ("image/webp", made("WEBP", exif=b"Exif\0\0" + bytes(20))),
}


@pytest.mark.parametrize("name", KINDS)
def test_kind_and_size_are_read_from_the_bytes(name: str) -> None:
    kind, data = KINDS[name]
    assert (media_type(data), size_of(data)) == (kind, (31, 17))
    assert picture_of(data) == Picture(kind, data)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from(["PNG", "JPEG", "GIF", "WEBP"]))
def test_sizes_agree_with_pillow(width: int, height: int, form: str) -> None:
    assert size_of(made(form, (width, height), "P" if form == "GIF" else "RGB")) == (width, height)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF1234WEBP"]), st.binary(max_size=60))
def test_damaged_headers_are_told(head: bytes, rest: bytes) -> None:
    try:
        assert min(size_of(head + rest)) > 0
    except ToolError as error:
        assert "damaged" in str(error)  # noqa: PT017 - either way is right


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "empty"),
        (b"<?xml version='1.0'?><svg xmlns='x'></svg>", "SVG"),
        (b"\n<!DOCTYPE html><html>", "HTML"),
        (b"%PDF-1.7", "PDF"),
        (b"BM\0\0\0\0", "convert"),
        (b"RIFF1234WAVE", "something else"),
        (b"plain text", "something else"),
    ],
)
def test_what_is_no_picture_is_told(data: bytes, told: str) -> None:
    with pytest.raises(ToolError, match=told):
        picture_of(data)


@pytest.mark.parametrize(
    ("url", "data"),
    [
        ("data:image/png;base64,aGk=", b"hi"),
        ("DATA:;BASE64,aGk", b"hi"),
        ("data:image/png;charset=x;base64,a Gk\n=", b"hi"),
        ("data:image/png;base64,%61Gk%3D", b"hi"),
        ("data:;base64,_-8", b"\xff\xef"),
        ("data:text/plain,a%20b", b"a b"),
    ],
)
def test_data_urls(url: str, data: bytes) -> None:
    assert data_of(url) == data


@pytest.mark.parametrize("url", ["data:image/png;base64", "data:;base64,a", "data:;base64,ü", "data:;base64,a?b="])
def test_bad_data_urls(url: str) -> None:
    with pytest.raises(ToolError):
        data_of(url)


# --- small enough


async def test_what_is_small_enough_stays_as_it_is() -> None:
    for kind, data in KINDS.values():
        assert (await fitted(Picture(kind, data))).data is data


@pytest.mark.parametrize(
    ("form", "mode", "expected"),
    [
        ("PNG", "RGB", "image/png"),
        ("PNG", "RGBA", "image/png"),
        ("PNG", "P", "image/png"),
        ("PNG", "LA", "image/png"),
        ("PNG", "1", "image/png"),
        ("JPEG", "RGB", "image/jpeg"),
        ("JPEG", "L", "image/jpeg"),
        ("JPEG", "CMYK", "image/jpeg"),
        ("GIF", "P", "image/png"),
        ("WEBP", "RGBA", "image/png"),
    ],
)
async def test_too_many_pixels_a_side(form: str, mode: str, expected: str) -> None:
    small = await fitted(picture_of(made(form, (8200, 41), mode)))
    assert (small.media_type, size_of(small.data)[0]) == (expected, 7900)
    assert media_type(small.data) == expected


async def test_too_many_bytes() -> None:
    for form, mode in (("PNG", "RGBA"), ("JPEG", "RGB")):
        data = noise(form, (1700, 1200), mode)
        assert len(data) > LARGEST_SHOWN
        small = await fitted(picture_of(data))
        assert 0 < len(base64.b64encode(small.data)) <= 5 * 1024 * 1024
        assert Image.open(io.BytesIO(small.data)).size == size_of(small.data)


async def test_what_is_seen_through_becomes_white(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "LARGEST_SHOWN", 20_000)
    stream = io.BytesIO()
    image = Image.frombytes("RGBA", (200, 200), random.Random(1).randbytes(160_000))
    image.putalpha(0)
    image.save(stream, "PNG")
    small = await fitted(picture_of(stream.getvalue()))
    assert small.media_type == "image/jpeg"
    assert Image.open(io.BytesIO(small.data)).getpixel((50, 50)) == (255, 255, 255)


async def test_a_bomb_is_not_decoded() -> None:
    with pytest.raises(ToolError, match=r"too large.*60000 x 60000"):
        await fitted(picture_of(png_header(60_000, 60_000)))


async def test_a_gif_whose_frame_is_larger_than_it_says_is_not_decoded() -> None:
    screen = b"GIF89a" + struct.pack("<HH", 8000, 1) + b"\x80\0\0" + b"\0\0\0\xff\xff\xff"
    frame = b"," + struct.pack("<HHHHB", 0, 0, 8500, 8500, 0) + b"\x02\x02\x4c\x01\0;"
    with pytest.raises(ToolError):
        await fitted(picture_of(screen + frame))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
async def test_a_broken_picture_is_told(form: str) -> None:
    data = noise(form, (8000, 20))
    with pytest.raises(ToolError, match="damaged"):
        await fitted(picture_of(data[: len(data) // 2]))


async def test_without_pillow_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ToolError, match=r"8200 x 41 pixels.*make it smaller.*pip install -e '.\[vision\]'"):
        await fitted(picture_of(png_header(8200, 41)))
    assert await fitted(picture_of(png_header(100, 41)))
