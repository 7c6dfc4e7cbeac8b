"""The tool `web_extract`: pages of the web as text, from this machine (not from the sandbox), the rest in a file of the
task's sandbox."""

import asyncio
import re
import zlib
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Any

from msgspec import Meta, Struct

from tools.arguments import TypedTool
from tools.base import ToolContext
from tools.errors import ToolError
from tools.services import Services, ToolSettings
from tools.untrusted import marked
from tools.web.extract import Job, Text, refused
from tools.web.providers import INSTALL
from tools.web.reader import Reader

MAX_URLS = 5
USUAL_CHARS, LEAST_CHARS, MOST_CHARS = 15_000, 2_000, 500_000
SECONDS = 75.0  # for one page, with its turn to be read

_PACKAGES = ("httpx", "trafilatura", "lxml_html_clean", "pypdf")


class ExtractArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What `web_extract` takes."""

    urls: Annotated[tuple[str, ...], Meta(description=f"Addresses of pages or PDFs, at most {MAX_URLS}")]
    char_limit: Annotated[
        int,
        Meta(
            description=f"Characters to return of each page, {LEAST_CHARS} to {MOST_CHARS}; the rest is saved in a file"
        ),
    ] = USUAL_CHARS


class Saved:
    """How many pages of one task have been saved."""

    def __init__(self) -> None:
        self.count = 0


def find_lack(_settings: ToolSettings, _environ: Mapping[str, str]) -> str:
    """See `tools.toolsets.NEEDS`."""
    return "" if all(find_spec(name) for name in _PACKAGES) else INSTALL


async def web_extract(context: ToolContext, arguments: ExtractArguments) -> dict[str, Any]:
    """`{results: [{url, title, content, error}]}`, an `error` of null where there is content; where no page could be
    read, `error` too."""
    urls = list(dict.fromkeys(url.strip() for url in arguments.urls if url.strip()))
    if not urls:
        raise ToolError("urls is empty")
    if len(urls) > MAX_URLS:
        raise ToolError(f"At most {MAX_URLS} URLs in one call; these are {len(urls)}")
    limit = max(LEAST_CHARS, min(arguments.char_limit, MOST_CHARS))
    texts = await asyncio.gather(*(_read(context.services, url) for url in urls))
    results = [
        {
            "url": url,
            "title": text.title,
            "content": await _shown(context, url, text.content, limit),
            "error": text.error or None,
        }
        for url, text in zip(urls, texts, strict=True)
    ]
    if all(text.error for text in texts):
        problems = "; ".join(dict.fromkeys(text.error for text in texts))
        return marked({"results": results, "error": f"No page could be read: {problems}"}, "web pages")
    return marked({"results": results}, "web pages")


async def _read(services: Services, url: str) -> Text:
    from tools.web.fetch import fetch  # noqa: PLC0415 - loads httpx

    try:
        async with asyncio.timeout(SECONDS), services.part(Reader).places:
            page = await fetch(services, url, check_type=_check_type)
            job = Job(url=page.url, media_type=page.media_type, charset=page.charset, body=page.body, cut=page.cut)
            return await services.part(Reader).read(job)
    except TimeoutError:
        return Text(error=f"It was not read within {SECONDS:g} s")
    except ToolError as error:
        return Text(error=str(error))


def _check_type(media_type: str) -> None:
    if reason := refused(media_type):
        raise ToolError(reason)


async def _shown(context: ToolContext, url: str, content: str, limit: int) -> str:
    """What the model gets of a page: all of it, or head and tail and where the whole is."""
    if len(content) <= limit:
        return content
    place = await _save(context, url, content)
    head = limit * 3 // 4
    tail = limit - head
    kept = f"the whole page ({len(content):,} characters) is saved in {place}" if place else "they could not be saved"
    marker = f"\n\n[... {len(content) - limit:,} characters left out here; {kept} ...]\n\n"
    return f"{content[:head]}{marker}{content[-tail:]}"


async def _save(context: ToolContext, url: str, content: str) -> str:
    """The file's path in the sandbox, "" where it takes none."""
    saved = context.memory(Saved)
    saved.count += 1
    digest = zlib.crc32(content.encode())  # several conversations may use one sandbox
    name = f"{saved.count}-{file_name(url)}-{digest:08x}.md"
    try:
        path = f"{context.environment.temp.rstrip('/')}/web-pages/{name}"
        await context.environment.write(path, content.encode())
    except ToolError:
        return ""
    return path


def file_name(url: str) -> str:
    """A short name for a page's file."""
    plain = re.sub(r"^[a-z]+://|[?#].*$", "", url.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:60].strip("-") or "page"


WEB_EXTRACT = TypedTool(
    "web_extract",
    "Read web pages and PDFs as Markdown or text. Of a long page the beginning and the end are returned, and the whole "
    "is saved in a file, which read_file and search_files can look at.",
    ExtractArguments,
    web_extract,
    read_only=True,
)
