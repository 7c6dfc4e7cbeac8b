"""Stand-ins for search services on loopback: each checks that it is asked as its documentation says, and answers as it
shows. `SERVICES[name](request)` -> (status, JSON value); `unfit` says what was wrong with a request.

Sources: api-dashboard.search.brave.com (Web search), docs.tavily.com (POST /search), exa.ai/docs/reference/search,
serper.dev (POST /search), docs.firecrawl.dev (POST /v2/search).
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web
from msgspec import Struct

from tests.service import Service

KEY = "key-of-a-search-service"


class Asked(Struct):
    """A request as the services see it."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: dict[str, Any]


Answer = tuple[int, Any]


def hits(asked: str, first: int, count: int) -> list[tuple[str, str, str]]:
    """Title, address and description of made-up results; there are 45 of each query."""
    numbers = range(first, min(first + count, 45))
    return [(f"{asked} no. {number}", f"https://site-{number}.example/", f"About {asked}.") for number in numbers]


def brave(asked: Asked) -> Answer:
    """GET /res/v1/web/search?q=&count=&offset=, at most 20 results on each of 10 pages."""
    if asked.headers.get("x-subscription-token") != KEY:
        return 422, {"type": "ErrorResponse", "error": {"code": "SUBSCRIPTION_TOKEN_INVALID", "detail": "Bad token."}}
    count, offset = int(asked.query.get("count", "20")), int(asked.query.get("offset", "0"))
    fits = asked.method == "GET" and asked.path == "/res/v1/web/search" and 1 <= count <= 20 and 0 <= offset <= 9
    if not (fits and asked.query.get("text_decorations") in (None, "true", "false")):
        return 422, {"error": {"detail": "Unable to validate request parameter(s)"}}
    results = [
        {"type": "search_result", "title": f"{title} &amp; <b>more</b>", "url": url, "description": f"<p>{text}</p>"}
        for title, url, text in hits(asked.query["q"], offset * count, count)
    ]
    return 200, {
        "type": "search",
        "query": {"original": asked.query["q"]},
        **({"web": {"results": results}} if results else {}),
    }


def tavily(asked: Asked) -> Answer:
    """POST /search, at most 20 results."""
    if asked.headers.get("authorization") != f"Bearer {KEY}":
        return 401, {"detail": {"error": "Unauthorized: missing or invalid API key."}}
    if (asked.method, asked.path) != ("POST", "/search") or not 0 <= asked.body.get("max_results", 5) <= 20:
        return 400, {"detail": {"error": "Max results must be between 0 and 20"}}
    results = [
        {"title": title, "url": url, "content": text, "score": 0.9, "raw_content": None}
        for title, url, text in hits(asked.body["query"], 0, asked.body.get("max_results", 5))
    ]
    return 200, {"query": asked.body["query"], "answer": None, "images": [], "results": results, "response_time": 0.4}


def exa(asked: Asked) -> Answer:
    """POST /search; text comes only where it is asked for."""
    if asked.headers.get("x-api-key") != KEY:
        return 401, {"requestId": "1", "error": "Invalid API key", "tag": "INVALID_API_KEY"}
    wanted = asked.body.get("numResults", 10)
    if (asked.method, asked.path) != ("POST", "/search") or not 1 <= wanted <= 100:
        return 400, {"requestId": "1", "error": "Invalid request body", "tag": "INVALID_REQUEST_BODY"}
    highlights = asked.body.get("contents", {}).get("highlights")
    results = [
        {
            "id": url,
            "title": title,
            "url": url,
            "author": None,
            **({"highlights": [text, "And more."]} if highlights else {}),
        }
        for title, url, text in hits(asked.body["query"], 0, wanted)
    ]
    return 200, {"requestId": "1", "resolvedSearchType": "neural", "results": results, "costDollars": {"total": 0.005}}


def serper(asked: Asked) -> Answer:
    """POST /search."""
    if asked.headers.get("x-api-key") != KEY:
        return 403, {"message": "Unauthorized.", "statusCode": 403}
    if (asked.method, asked.path) != ("POST", "/search") or not 1 <= asked.body.get("num", 10) <= 100:
        return 400, {"message": "Bad request", "statusCode": 400}
    organic = [
        {"title": title, "link": url, "snippet": text, "position": position}
        for position, (title, url, text) in enumerate(hits(asked.body["q"], 0, asked.body.get("num", 10)), 1)
    ]
    return 200, {"searchParameters": {"q": asked.body["q"], "type": "search"}, "organic": organic, "credits": 1}


def firecrawl(asked: Asked) -> Answer:
    """POST /v2/search; a server of one's own wants no key."""
    if asked.headers.get("authorization") not in (f"Bearer {KEY}", None):
        return 401, {"success": False, "error": "Unauthorized: Invalid token"}
    if (asked.method, asked.path) != ("POST", "/v2/search") or not 1 <= asked.body.get("limit", 10) <= 100:
        return 400, {"success": False, "error": "Bad Request"}
    found = [
        {"title": title, "url": url, "description": text, "position": position}
        for position, (title, url, text) in enumerate(hits(asked.body["query"], 0, asked.body.get("limit", 5)), 1)
    ]
    return 200, {"success": True, "data": {"web": found}, "creditsUsed": 2}


SERVICES: dict[str, Callable[[Asked], Answer]] = {
    "brave": brave,
    "tavily": tavily,
    "exa": exa,
    "serper": serper,
    "firecrawl": firecrawl,
}


class SearchService(Service):
    """One of them as a server in the running event loop. `first` are answers that come before its own: (status, JSON
    value or bytes, headers)."""

    def __init__(self, name: str, first: list[tuple[int, Any, dict[str, str]]] | None = None) -> None:
        super().__init__()
        self.asked: list[Asked] = []
        self._answer = SERVICES[name]
        self._first = first or []

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._handle)
        return application

    async def _handle(self, request: web.Request) -> web.Response:
        text = await request.text()
        headers = {name.lower(): value for name, value in request.headers.items()}
        asked = Asked(request.method, request.path, dict(request.query), headers, json.loads(text) if text else {})
        self.asked.append(asked)
        if self._first:
            status, body, more = self._first.pop(0)
            if status == 0:
                await asyncio.Event().wait()
            if isinstance(body, bytes):
                return web.Response(body=body, status=status, headers=more, content_type="text/html")
            return web.json_response(body, status=status, headers=more)
        status, body = self._answer(asked)
        return web.json_response(body, status=status)
