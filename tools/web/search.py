"""The tool `web_search`: one service of several, asked within 30 seconds."""

import asyncio
import random
from collections.abc import Mapping
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from tools.arguments import TypedTool
from tools.base import ToolContext
from tools.errors import ToolError
from tools.services import Services, ToolSettings
from tools.text import decoded_json
from tools.threads import in_thread
from tools.untrusted import marked
from tools.web.providers import (
    MAX_PAGES,
    Hit,
    Request,
    Service,
    chosen,
    complaint_of,
    distinct,
    hits_of,
    is_failure,
    request_for,
)

if TYPE_CHECKING:
    import httpx

SECONDS = 30.0  # for one search, with its retries
TRIES = 4
MAX_PAUSE = 15.0  # seconds; who is to wait longer is told so at once
MAX_ANSWER = 5_000_000  # bytes
MAX_RESULTS = 100
_NO_JSON = object()


class SearchArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What `web_search` takes."""

    query: Annotated[str, Meta(description="What to look for")]
    limit: Annotated[int, Meta(description=f"Results to return, 1 to {MAX_RESULTS}")] = 5


class Refused(Exception):
    """What a service said instead of results."""


def find_lack(settings: ToolSettings, environ: Mapping[str, str]) -> str:
    """See `tools.toolsets.NEEDS`."""
    return chosen(settings, environ).lacks


async def web_search(context: ToolContext, arguments: SearchArguments) -> dict[str, Any]:
    """`{success: true, data: {web: [{title, url, description, position}]}}` or `{success: false, error}`."""
    query, limit = (
        arguments.query.encode("utf-8", "replace").decode().strip(),
        max(1, min(arguments.limit, MAX_RESULTS)),
    )
    service = chosen(context.services.settings, context.services.environ)
    source = f"the web, found by {service.name}"
    if not query or service.lacks:
        return {"success": False, "error": f"{service.name} lacks {service.lacks}" if query else "query is empty"}
    try:
        async with asyncio.timeout(SECONDS):
            hits = await _hits(context.services, service, query, limit)
    except TimeoutError:
        return {"success": False, "error": f"{service.name} did not answer within {SECONDS:g} s"}
    except ToolError as error:
        return {"success": False, "error": str(error)}
    except Refused as error:
        return marked({"success": False, "error": str(error)}, source)
    found = [
        {"title": hit.title, "url": hit.url, "description": hit.description, "position": position}
        for position, hit in enumerate(hits[:limit], 1)
    ]
    return marked({"success": True, "data": {"web": found}}, source)


async def _hits(services: Services, service: Service, query: str, limit: int) -> list[Hit]:
    """Page after page, where the service has pages, until there are enough or no more. Raises ToolError, Refused."""
    if service.row.library:
        return await _by_library(services, service, query, limit)
    from tools.web.transport import Connections  # noqa: PLC0415 - loads httpx

    key = services.environ[service.key_variable].strip() if service.key_variable else ""
    hits: list[Hit] = []
    async with services.part(Connections).client(allow_private=True) as client:  # an address that the user gave
        for page in range(MAX_PAGES if service.row.page else 1):
            answer = await _answer(client, service, request_for(service, query, limit, page, key), key)
            more = distinct([*hits, *hits_of(service.row, answer)])
            if len(more) == len(hits):
                break
            hits = more
            if len(hits) >= limit:
                break
    return hits


async def _answer(client: "httpx.AsyncClient", service: Service, request: Request, key: str) -> Any:
    """The answer's JSON, after some tries if the service is busy or out of reach. Raises ToolError, Refused."""
    for number in count(1):
        status, answer, pause = await _try(client, service, request)
        if status < 400:
            break
        if number == TRIES or not (status == 429 or status >= 500) or (pause or 0) > MAX_PAUSE:
            break
        await asyncio.sleep(pause if pause is not None else 2 ** (number - 1) * random.uniform(0.5, 1))  # noqa: S311
    if status < 400 and not is_failure(answer):
        return answer
    told = " ".join(complaint_of(answer).split()).replace(key or "\0", "[key]")[:300]
    raise Refused(f"{service.name} answered {_in_words(status, service)}{f': {told}' if told else ''}")


def _in_words(status: int, service: Service) -> str:
    if status < 400:
        return "without results"
    denied = service.row.denied or f"the key in {service.key_variable or 'none of its variables'} is not accepted"
    hint = {401: denied, 402: "its credit is used up", 403: denied, 429: "too many searches"}.get(status, "")
    return f"HTTP {status}" + (f" ({hint})" if hint else "")


async def _try(client: "httpx.AsyncClient", service: Service, request: Request) -> tuple[int, Any, float | None]:
    """Status, JSON value (_NO_JSON if it is none) and seconds to wait, if the service says so. Raises ToolError."""
    import httpx  # noqa: PLC0415

    from tools.web.fetch import explained, read_bounded  # noqa: PLC0415 - loads httpx

    built = client.build_request(
        request.method, request.url, params=request.query, json=request.body, headers=request.headers
    )
    try:
        response = await client.send(built, stream=True)
        try:
            body, _ = await read_bounded(response, MAX_ANSWER, asyncio.get_running_loop().time() + SECONDS)
        finally:
            await response.aclose()
    except httpx.TransportError as error:
        return 599, {"error": f"{urlsplit(request.url).hostname} cannot be reached ({explained(error)})"}, None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ToolError(f"{service.name} cannot be asked: {explained(error)}") from error
    answer = _json(body)
    if answer is _NO_JSON and response.status_code < 400:
        answer = {"error": "the answer is no JSON"}
    return response.status_code, answer, _seconds(response.headers.get("retry-after", ""))


def _json(body: bytes) -> Any:
    try:
        return decoded_json(body)
    except (ValueError, RecursionError):
        return _NO_JSON


def _seconds(header: str) -> float | None:
    try:
        return max(0.0, min(float(header), 3600.0))
    except ValueError:
        return None


async def _by_library(services: Services, service: Service, query: str, limit: int) -> list[Hit]:
    """Raises Refused."""
    from ddgs import DDGS  # noqa: PLC0415
    from ddgs.exceptions import DDGSException  # noqa: PLC0415

    environ = services.environ
    proxies = (environ.get(name, "") for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"))
    asker = DDGS(proxy=next(filter(None, proxies), None), timeout=5, verify=environ.get("SSL_CERT_FILE") or True)
    try:
        answer = await in_thread(lambda: asker.text(query, max_results=limit))
    except DDGSException as error:
        if "No results found" in str(error):
            return []
        raise Refused(f"{service.name} found nothing: {' '.join(str(error).split())[:300]}") from error
    return distinct(hits_of(service.row, answer))


WEB_SEARCH = TypedTool(
    "web_search",
    "Search the web. Returns titles, addresses and short descriptions; web_extract reads the pages themselves.",
    SearchArguments,
    web_search,
    read_only=True,
)
