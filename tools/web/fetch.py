"""Downloads within bounds of size and time, with their redirects, and only from where tools may go.

httpx loads a tenth of a second: import this late.
"""

import asyncio
import re
import zlib
from collections.abc import Callable

import httpx
from msgspec import Struct

from tools.errors import ToolError
from tools.services import Services
from tools.web.addresses import Resolve, refuse_secrets, resolve, split_url, with_scheme
from tools.web.transport import Connections

MAX_BYTES = 10_000_000
MAX_REDIRECTS = 10
SECONDS = 30.0
PAGES = "text/html,application/xhtml+xml,application/pdf;q=0.9,text/*;q=0.9,application/json;q=0.9,*/*;q=0.5"


class Fetched(Struct, frozen=True, kw_only=True):
    """What came. `url` is where it came from in the end, `media_type` in lower case without parameters, `body` without
    content encoding; `cut` says why it is not whole, "" if it is."""

    url: str
    media_type: str
    charset: str
    body: bytes
    cut: str = ""


async def fetch(
    services: Services,
    url: str,
    *,
    max_bytes: int = MAX_BYTES,
    seconds: float = SECONDS,
    accept: str = PAGES,
    check_type: Callable[[str], None] = lambda media_type: None,
    by: Resolve = resolve,
) -> Fetched:
    """Gets what a URL names, after its redirects. Raises ToolError; so may `check_type`, given the media type before
    the body is read. A URL without a scheme is https. It ends within `seconds`: what has come by then is what came."""
    address = with_scheme(url.strip())
    split_url(address)
    refuse_secrets(address, services.environ)
    deadline = asyncio.get_running_loop().time() + seconds
    client = services.part(Connections).client(allow_private=services.settings.allow_private_urls, by=by)
    try:
        async with client:
            async with asyncio.timeout_at(deadline):
                response = await _followed(client, address, accept)
            try:
                media_type, charset = _content_type(response.headers.get("content-type", ""))
                check_type(media_type)
                body, cut = await read_bounded(response, max_bytes, deadline)
            finally:
                await response.aclose()
    except TimeoutError:
        raise ToolError(f"No answer within {seconds:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ToolError(f"It cannot be reached: {explained(error)}") from error
    return Fetched(url=str(response.url), media_type=media_type, charset=charset, body=body, cut=cut)


def explained(error: Exception) -> str:
    """An httpx error in words, for one without a text its name."""
    return re.sub(r"\s+", " ", str(error)).strip() or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(error).__name__).lower()


async def _followed(client: httpx.AsyncClient, url: str, accept: str) -> httpx.Response:
    """The answer at the end of the redirects, its body still to be read."""
    headers = {"Accept": accept, "Accept-Encoding": "gzip, deflate", "Accept-Language": "en,*;q=0.5"}
    request = client.build_request("GET", url, headers=headers)
    for _ in range(MAX_REDIRECTS + 1):
        response = await client.send(request, stream=True)
        if response.next_request is None:
            break
        await response.aclose()
        request = response.next_request
    else:
        raise ToolError(f"More than {MAX_REDIRECTS} redirects, the last one to {str(request.url)[:200]}")
    if response.status_code >= 400 or response.is_redirect:
        await response.aclose()
        raise ToolError(f"HTTP {response.status_code} {response.reason_phrase}".rstrip())
    return response


def _content_type(header: str) -> tuple[str, str]:
    media_type, _, parameters = header.partition(";")
    charset = re.search(r"charset\s*=\s*[\"']?([^\s\"';,]+)", parameters, re.IGNORECASE)
    return media_type.strip().lower(), charset[1] if charset else ""


async def read_bounded(response: httpx.Response, max_bytes: int, deadline: float) -> tuple[bytes, str]:
    """An answer's body, and why it is not whole. `deadline` is the event loop's time. Raises ToolError, httpx.HTTPError
    if nothing came."""
    inflate = inflater(response.headers.get("content-encoding", ""))
    body = bytearray()
    try:
        async with asyncio.timeout_at(deadline):
            async for chunk in response.aiter_raw():
                body += inflate(chunk, max_bytes + 1 - len(body))
                if len(body) > max_bytes:
                    return bytes(body[:max_bytes]), f"it is larger than {max_bytes:,} bytes"
    except TimeoutError:
        if not body:
            raise
        return bytes(body), "it took too long to come"
    except httpx.TransportError:
        if not body:
            raise
        return bytes(body), "the connection broke"
    return bytes(body), ""


def inflater(encoding: str) -> Callable[[bytes, int], bytes]:
    """Undoes a content encoding: (what came, at most so many bytes) -> bytes. What is too much is dropped, so that a
    few bytes cannot become gigabytes. Raises ToolError."""
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return lambda data, room: data[:room]
    if name not in ("gzip", "x-gzip", "deflate"):
        raise ToolError(f"The answer has a content encoding that was not asked for: {name[:50]}")
    return _Inflater().feed


class _Inflater:
    def __init__(self) -> None:
        self._inflate: zlib._Decompress | None = None

    def feed(self, data: bytes, room: int) -> bytes:
        """At most `room` bytes of what the data inflates to."""
        out = bytearray()
        try:
            while data and len(out) < room:
                stream = self._started(data)
                out += stream.decompress(data, room - len(out))
                data = stream.unused_data  # what follows the end of a stream: the next one
        except zlib.error as error:
            raise ToolError(f"The answer cannot be decompressed: {error}") from error
        return bytes(out)

    def _started(self, data: bytes) -> "zlib._Decompress":
        if self._inflate is None or self._inflate.eof:
            bare = data[0] != 0x1F and data[0] & 0x0F != 8  # "deflate" without a head, as some servers send it
            self._inflate = zlib.decompressobj(wbits=-15 if bare else 47)  # 47: gzip or zlib, as the head says
        return self._inflate
