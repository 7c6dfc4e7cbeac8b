"""Downloads: the pure parts."""

import gzip
import tracemalloc
import zlib

import pytest

from tools.errors import ToolError
from tools.web.addresses import proxy_for, refuse_secrets, with_scheme
from tools.web.fetch import inflater

SECRET = "ab-0123456789-cd"


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("example.com/a:b", "https://example.com/a:b"),
        ("//example.com/a", "https://example.com/a"),
        ("localhost:8080/a", "https://localhost:8080/a"),
        ("127.0.0.1:80", "https://127.0.0.1:80"),
        ("http://example.com", "http://example.com"),
        ("HTTP://example.com", "HTTP://example.com"),
        ("mailto:me@example.com", "mailto:me@example.com"),
        ("", ""),
    ],
)
def test_a_host_without_a_scheme(given: str, read: str) -> None:
    assert with_scheme(given) == read


@pytest.mark.parametrize(
    "url",
    [f"https://e.com/?k={SECRET}", f"https://{SECRET}.e.com/", "https://e.com/ab%2d0123456789%2Dcd", f"x#{SECRET}"],
)
def test_our_keys_leave_in_no_url(url: str) -> None:
    with pytest.raises(ToolError, match=r"holds a secret \(SOME_API_KEY\)") as raised:
        refuse_secrets(url, {"PATH": "/bin", "SOME_API_KEY": f"other-key-1234, {SECRET}"})
    assert SECRET not in str(raised.value)


def test_what_is_no_key_of_ours() -> None:
    environ = {"HOMEPAGE": "https://e.com/", "API_KEY": "short", "MAX_TOKEN": "123456789012345", "EMPTY_KEY": ""}
    refuse_secrets("https://e.com/short?a=123456789012345", environ)


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_content_encodings(step: int) -> None:
    data = b"".join(b"line %d\n" % number for number in range(500))
    bare = zlib.compressobj(wbits=-15)
    cases = {
        "gzip": gzip.compress(data[:900]) + gzip.compress(data[900:]),
        "x-gzip": gzip.compress(data),
        "deflate": zlib.compress(data),
        " Deflate ": bare.compress(data) + bare.flush(),
        "identity": data,
        "": data,
    }
    for encoding, packed in cases.items():
        inflate = inflater(encoding)
        pieces = [inflate(packed[start : start + step], 10_000) for start in range(0, len(packed), step)]
        assert b"".join(pieces) == data, encoding


def test_a_bomb_stays_small() -> None:
    packed = gzip.compress(bytes(50_000_000), 6)
    tracemalloc.start()
    try:
        assert len(inflater("gzip")(packed, 1_000_000)) == 1_000_000
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_encodings_that_cannot_be_undone() -> None:
    with pytest.raises(ToolError, match="not asked for: br"):
        inflater("br")
    with pytest.raises(ToolError, match="cannot be decompressed"):
        inflater("gzip")(b"\x1f\x8b" + b"\xff" * 100, 1000)


def test_proxies_are_those_of_the_usual_variables() -> None:
    environ = {"HTTPS_PROXY": "http://proxy:1", "http_proxy": "proxy:2", "NO_PROXY": "intern.example,127.0.0.1"}
    assert proxy_for("https", "e.com", 443, environ) == "http://proxy:1"
    assert proxy_for("http", "e.com", 80, environ) == "http://proxy:2"
    assert proxy_for("http", "a.intern.example", 80, environ) == ""
    assert proxy_for("http", "127.0.0.1", 80, environ) == ""
    assert proxy_for("http", "e.com", 80, {"ALL_PROXY": "socks5://proxy:3"}) == "socks5://proxy:3"
    assert proxy_for("http", "e.com", 80, {"ALL_PROXY": "socks5://proxy:3", "no_proxy": "*"}) == ""
    assert proxy_for("http", "e.com", 80, {}) == ""
