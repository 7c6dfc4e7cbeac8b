"""Who answers web searches: the table in `search_providers.yaml`, what a service is sent and what its answer says."""

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from tools.services import SEARCH_KEY, ToolSettings

INSTALL = "packages: pip install -e '.[web]'"
MAX_DESCRIPTION = 1_000  # characters
MAX_PAGES = 5


class Provider(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of the table; see there."""

    results: tuple[str, ...]
    description: tuple[str, ...]
    address: str = ""
    path: str = ""
    method: Literal["GET", "POST"] = "GET"
    keys: tuple[str, ...] = ()
    header: str = "Authorization"
    prefix: str = "Bearer "
    keyless: bool = False
    fixed: dict[str, Any] = {}
    query: str = ""
    limit: str = ""
    most: int = 100
    page: str = ""
    first_page: int = 1
    url: tuple[str, ...] = ("url",)
    title: tuple[str, ...] = ("title",)
    markup: bool = False
    library: str = ""
    denied: str = ""


class Service(Struct, frozen=True, kw_only=True):
    """A provider as it is used. `key_variable` names where its key is, "" for none; `lacks` says what is missing."""

    name: str
    row: Provider
    address: str = ""
    key_variable: str = ""
    lacks: str = ""


class Request(Struct, frozen=True, kw_only=True):
    """What is sent. `body` is None for a GET."""

    method: str
    url: str
    headers: dict[str, str]
    query: dict[str, Any] | None = None
    body: dict[str, Any] | None = None


class Hit(Struct, frozen=True):
    """One result."""

    title: str
    url: str
    description: str


def chosen(settings: ToolSettings, environ: Mapping[str, str]) -> Service:
    """The service named, or else the first that has its key or address, or else the one that needs none."""
    rows = table()
    if settings.search_provider:
        return _service(settings.search_provider, settings.search_url, environ)
    if settings.search_url:
        return _service(next(name for name, row in rows.items() if not row.address), settings.search_url, environ)
    keyless = next(name for name, row in rows.items() if row.library)
    if environ.get(SEARCH_KEY):
        return Service(name=keyless, row=rows[keyless], lacks="the name of the service: give --search_provider")
    return _service(next((name for name, row in rows.items() if _key_variable(row, environ)), keyless), "", environ)


def _service(name: str, own_address: str, environ: Mapping[str, str]) -> Service:
    row = table()[name]
    variable = SEARCH_KEY if environ.get(SEARCH_KEY) and not row.library else _key_variable(row, environ)
    lacks = ""
    if find_spec(row.library or "httpx") is None:
        lacks = INSTALL
    elif not (own_address or row.address or row.library):
        lacks = "the address of a server: give --search_url"
    elif row.keys and not variable and not (row.keyless and own_address):
        lacks = f"a key: set {' or '.join(row.keys)}, or give --search_api_key"
    return Service(name=name, row=row, address=own_address or row.address, key_variable=variable, lacks=lacks)


def _key_variable(row: Provider, environ: Mapping[str, str]) -> str:
    return next((name for name in row.keys if environ.get(name, "").strip()), "")


def request_for(service: Service, query: str, limit: int, page: int, key: str) -> Request:
    """Asks for `limit` results; `page` counts from 0."""
    row = service.row
    fields: dict[str, Any] = {**row.fixed, row.query: query}
    if row.limit:
        fields[row.limit] = min(limit, row.most)
    if row.page and page:
        fields[row.page] = row.first_page + page
    base = service.address.rstrip("/")
    return Request(
        method=row.method,
        url=base if base.endswith(row.path) else base + row.path,
        headers={"Accept": "application/json", **({row.header: row.prefix + key} if key else {})},
        query=fields if row.method == "GET" else None,
        body=fields if row.method == "POST" else None,
    )


def hits_of(row: Provider, answer: Any) -> list[Hit]:
    """The results that an answer lists; what is no result is left out."""
    lists = (_at(answer, place) for place in row.results)
    found = next((each for each in lists if isinstance(each, list)), [])
    hits = [_hit(row, result) for result in found if isinstance(result, dict)]
    return [hit for hit in hits if hit.url.startswith(("http://", "https://"))]


def complaint_of(answer: Any) -> str:
    """What an answer says went wrong, in the words of the service; "" if it does not."""
    places = ("error.detail", "error.message", "error", "detail.error", "detail", "message")
    return next((str(text) for place in places if (text := _at(answer, place))), "")


def is_failure(answer: Any) -> bool:
    """Whether an answer with a good status is no answer all the same."""
    return not isinstance(answer, dict) or bool(answer.get("error")) or answer.get("success") is False


def _at(value: Any, place: str) -> Any:
    for name in filter(None, place.split(".")):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _hit(row: Provider, result: Mapping[str, Any]) -> Hit:
    title, url, description = (_text(result, names) for names in (row.title, row.url, row.description))
    if row.markup:
        title, description = _unmarked(title), _unmarked(description)
    description = " ".join(description.split())
    short = description if len(description) <= MAX_DESCRIPTION else f"{description[:MAX_DESCRIPTION]}…"
    return Hit(title=" ".join(title.split())[:500], url=url.strip(), description=short)


def _text(result: Mapping[str, Any], names: Sequence[str]) -> str:
    values = (result.get(name) for name in names)
    texts = (" … ".join(map(str, value)) if isinstance(value, list) else value for value in values)
    return next((text for text in texts if isinstance(text, str) and text), "")


def _unmarked(text: str) -> str:
    return html.unescape(re.sub(r"<[^>]{0,200}>", "", text))


def distinct(hits: Iterable[Hit]) -> list[Hit]:
    """The hits, each address once."""
    return list({hit.url: hit for hit in reversed(list(hits))}.values())[::-1]


@cache
def table() -> dict[str, Provider]:
    """Provider -> its row."""
    import yaml  # noqa: PLC0415 - only where web searches are offered

    text = Path(__file__).with_name("search_providers.yaml").read_text(encoding="utf-8")
    return msgspec.convert(yaml.safe_load(text), dict[str, Provider])
