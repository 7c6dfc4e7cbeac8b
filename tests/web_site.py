"""Sites of the web on loopback, for tests of what reads and visits them: a real HTTP server on a thread of its own.

    with Site() as site:
        site.url                    # http://127.0.0.1:PORT
        site.seen                   # what was asked for: Seen(method, path with query, headers, body)

Its pages:

    /                   index, linked to the others
    /article            an article between navigation and footer: headings, a table, code, a list, links
    /long               100 numbered chapters, 60,000 characters
    /shop               goods with forms; /shop/search?q=, /shop/item/N, POST /shop/cart (item, amount), /shop/cart
    /redirect/N         N redirects, then the article; /loop goes to itself; /to?url= goes anywhere
    /cookie             goes to itself until its cookie comes back, then greets
    /large              100 MB of HTML; /large.pdf the same as a PDF; /endless a page that never ends; /silent no answer
    /broken             ends before the length that it told
    /bomb               1 MB of gzip that becomes 1 GB; /packed/ENCODING the article, compressed
    /paper.pdf          two pages of text; /locked.pdf, /torn.pdf, /pictures.pdf
    /charset/NAME       a line of text in that charset: header, meta, bom, wrong, undeclared, unknown, cut
    /type?type=&body=   the bytes of `body`, which comes last, as that media type ("" = none told)
    /status/N           that status
    /search?q=          answers as SearXNG does (format=json), with pages of this site
"""

import asyncio
import gzip
import threading
import zlib
from types import TracebackType
from typing import Self
from urllib.parse import unquote_to_bytes

from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec import Struct

from tests.service import serving

LARGE = 100_000_000
CHAPTERS = 100
ARTICLE = "On tides"
LINE = {
    "header": ("windows-1251", "Привет, мир"),
    "meta": ("shift_jis", "こんにちは世界"),
    "bom": ("utf-16", "Grüße überall"),
    "wrong": ("cp1252", "Café “crème” … 5 €"),
    "undeclared": ("cp1251", "Съешь же ещё этих мягких французских булок, да выпей чаю. " * 5),
    "unknown": ("utf-8", "naïve façade"),
    "cut": ("utf-8", "ends in the middle of €"),
}
"""Name under /charset -> the charset its bytes are in, and the text."""

_GOODS = ("Green tea", "Black tea", "Oolong", "Mint", "Cups")


class Seen(Struct, frozen=True):
    """One request."""

    method: str
    path: str
    headers: dict[str, str]
    body: str


class Site:
    """See the module."""

    def __init__(self) -> None:
        self.url = ""
        self.seen: list[Seen] = []
        self._cart: list[tuple[str, str]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ready = threading.Event()
        self._stop = asyncio.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def paths(self) -> list[str]:
        """What was asked for, in order."""
        return [seen.path for seen in self.seen]

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        application = web.Application(middlewares=[self._noted])
        application.add_routes(self._routes())
        async with serving(application) as port:
            self.url = f"http://127.0.0.1:{port}"
            self._ready.set()
            await self._stop.wait()

    @web.middleware
    async def _noted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        body = await request.text() if request.can_read_body else ""
        self.seen.append(Seen(request.method, request.path_qs, dict(request.headers), body))
        return await handler(request)

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self._index),
            web.get("/article", self._article),
            web.get("/long", self._long),
            web.get("/shop", self._shop),
            web.get("/shop/search", self._shop),
            web.get("/shop/item/{number}", self._item),
            web.get("/shop/cart", self._show_cart),
            web.post("/shop/cart", self._add),
            web.get("/redirect/{number}", self._redirect),
            web.get("/loop", self._loop_page),
            web.get("/to", self._to),
            web.get("/cookie", self._cookie),
            web.get("/large", self._large),
            web.get("/large.pdf", self._large),
            web.get("/endless", self._endless),
            web.get("/silent", self._silent),
            web.get("/broken", self._broken),
            web.get("/bomb", self._bomb),
            web.get("/packed/{encoding}", self._packed),
            web.get("/{name}.pdf", self._pdf),
            web.get("/charset/{name}", self._charset),
            web.get("/type", self._type),
            web.get("/status/{number}", self._status),
            web.get("/search", self._search),
        ]

    async def _index(self, _: web.Request) -> web.Response:
        links = "".join(
            f'<li><a href="{path}">{path}</a></li>' for path in ("/article", "/long", "/shop", "/paper.pdf")
        )
        return page("Index", f"<h1>Index</h1><ul>{links}</ul>")

    async def _article(self, _: web.Request) -> web.Response:
        return page(ARTICLE, article())

    async def _long(self, _: web.Request) -> web.Response:
        chapters = "".join(
            f"<h2>Chapter {number}</h2><p>{f'Sentence of chapter {number}. ' * 24}</p>" for number in range(CHAPTERS)
        )
        return page("A long page", f"<article><h1>A long page</h1>{chapters}</article>")

    async def _shop(self, request: web.Request) -> web.Response:
        wanted = request.query.get("q", "").lower()
        goods = "".join(
            f'<li><a href="/shop/item/{number}">{name}</a> <b>{number + 2}.50</b> '
            f'<form action="/shop/cart" method="post"><input type="hidden" name="item" value="{name}">'
            f'<label>Amount <input name="amount" value="1"></label>'
            f'<button type="submit">Add {name}</button></form></li>'
            for number, name in enumerate(_GOODS)
            if wanted in name.lower()
        )
        search = '<form action="/shop/search"><label>Search <input name="q"></label><button>Find</button></form>'
        return page("Corner shop", f"<h1>Corner shop</h1>{search}<ul>{goods or 'Nothing found'}</ul>")

    async def _item(self, request: web.Request) -> web.Response:
        name = _GOODS[int(request.match_info["number"])]
        return page(name, f'<h1>{name}</h1><p>The best {name} in town.</p><a href="/shop">Back to the shop</a>')

    async def _add(self, request: web.Request) -> web.Response:
        form = await request.post()
        self._cart.append((str(form["item"]), str(form["amount"])))
        raise web.HTTPSeeOther("/shop/cart")

    async def _show_cart(self, _: web.Request) -> web.Response:
        lines = "".join(f"<li>{amount} x {item}</li>" for item, amount in self._cart)
        return page("Cart", f"<h1>Your cart</h1><ul>{lines}</ul><a href='/shop'>Back to the shop</a>")

    async def _redirect(self, request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        raise web.HTTPFound(f"/redirect/{number - 1}" if number > 1 else "../article")

    async def _loop_page(self, _: web.Request) -> web.Response:
        raise web.HTTPFound("/loop")

    async def _to(self, request: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": request.query["url"]})

    async def _cookie(self, request: web.Request) -> web.Response:
        if request.cookies.get("visit") == "2":
            return page("Welcome", "<p>Welcome back.</p>")
        answer = web.Response(status=302, headers={"Location": "/cookie"})
        answer.set_cookie("visit", "2")
        return answer

    async def _large(self, request: web.Request) -> web.StreamResponse:
        pdf = request.path.endswith("pdf")
        answer = web.StreamResponse(headers={"Content-Type": "application/pdf" if pdf else "text/html"})
        answer.content_length = LARGE
        await answer.prepare(request)
        await answer.write(b"%PDF-1.7\n" if pdf else b"<html><title>Large</title><body>")
        line = b"<p>One of many lines of a page that is far too large.</p>\n" * 1000
        for _ in range(LARGE // len(line)):
            await answer.write(line)
        return answer

    async def _endless(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/html"})
        await answer.prepare(request)
        await answer.write(b"<html><title>Endless</title><body><p>It begins.</p>")
        while not self._stop.is_set():
            await answer.write(b"<p>and goes on</p>")
            await asyncio.sleep(0.05)
        return answer

    async def _silent(self, _: web.Request) -> web.Response:
        await self._stop.wait()
        return web.Response()

    async def _broken(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/html"})
        answer.content_length = 1000
        await answer.prepare(request)
        await answer.write(b"<html><title>Broken</title><body><p>This much came.</p>")
        assert request.transport is not None
        request.transport.close()
        return answer

    async def _bomb(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/html", "Content-Encoding": "gzip"})
        await answer.prepare(request)
        packer = zlib.compressobj(1, wbits=31)
        for _ in range(1000):
            await answer.write(packer.compress(bytes(1_000_000)))
            await asyncio.sleep(0)
        await answer.write(packer.flush())
        return answer

    async def _packed(self, request: web.Request) -> web.Response:
        data = document(ARTICLE, article()).encode()
        bare = zlib.compressobj(wbits=-15)
        packed = {
            "gzip": gzip.compress(data),
            "members": gzip.compress(data[:500]) + gzip.compress(data[500:]),
            "deflate": zlib.compress(data),
            "bare": bare.compress(data) + bare.flush(),
            "torn": gzip.compress(data)[:20] + b"\xff" * 100,
            "br": b"\x0b\x02\x80",
        }
        name = request.match_info["encoding"]
        encoding = {"members": "gzip", "bare": "deflate", "torn": "gzip"}.get(name, name)
        return web.Response(body=packed[name], headers={"Content-Type": "text/html", "Content-Encoding": encoding})

    async def _pdf(self, request: web.Request) -> web.Response:
        paper = pdf("Tides on paper: the first page.", "And the second page (with brackets).")
        body = {
            "paper": paper,
            "locked": pdf("Nobody may see this.", locked=True),
            "torn": paper[: len(paper) // 2].replace(b"obj", b"xxx"),
            "pictures": pdf(""),
        }
        return web.Response(body=body[request.match_info["name"]], content_type="application/pdf")

    async def _charset(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        charset, text = LINE[name]
        meta = '<meta charset="Shift_JIS">' if name == "meta" else ""
        body = f"<html><head>{meta}<title>Charset</title></head><body><p>{text}</p></body></html>".encode(charset)
        if name == "cut":
            body = text.encode()[:-1]
        told = {"header": "; charset=windows-1251", "wrong": "; charset=utf-8", "unknown": "; charset=klingon"}
        media_type = "text/plain" if name == "cut" else "text/html"
        return web.Response(body=body, headers={"Content-Type": media_type + told.get(name, "")})

    async def _type(self, request: web.Request) -> web.Response:
        body = unquote_to_bytes(request.rel_url.raw_query_string.partition("body=")[2])
        answer = web.Response(body=body, headers={"Content-Type": request.query.get("type", "text/plain")})
        if not request.query.get("type"):
            del answer.headers["Content-Type"]
        return answer

    async def _status(self, request: web.Request) -> web.Response:
        return web.Response(status=int(request.match_info["number"]), text="<p>What went wrong is a long story.</p>")

    async def _search(self, request: web.Request) -> web.Response:
        if request.query.get("format") != "json":
            return web.Response(status=403, text="<h1>Forbidden</h1>", content_type="text/html")
        query, number = request.query["q"], int(request.query.get("pageno", "1"))
        items = ["article", *(f"shop/item/{place % 5}?page={number}&place={place}" for place in range(1, 10))]
        hits = [
            {
                "url": f"{self.url}/{items[place]}{'' if place or number == 1 else f'?page={number}'}",
                "title": f"{query}, result {10 * (number - 1) + place + 1}",
                "content": f"What the page says of {query}.",
                "engine": "made up",
                "score": 1.0,
            }
            for place in range(10 if number < 4 else 0)
        ]
        return web.json_response({"query": query, "number_of_results": 0, "results": hits, "suggestions": []})


def page(title: str, body: str) -> web.Response:
    """An HTML page."""
    return web.Response(text=document(title, body), content_type="text/html")


def document(title: str, body: str) -> str:
    """Its text."""
    navigation = "".join(f'<a href="{path}">{path.strip("/") or "home"}</a> ' for path in ("/", "/article", "/shop"))
    return (
        f"<!DOCTYPE html><html><head><meta charset='utf-8'><title>{title}</title><style>p {{ margin: 0 }}</style>"
        f"</head><body><nav>{navigation}</nav><main>{body}</main><script>var hidden = 'never shown';</script>"
        "<footer>Imprint of a made-up site</footer></body></html>"
    )


def article() -> str:
    """Long enough to be found as the main part of its page."""
    paragraphs = "".join(
        f"<p>Paragraph {number}: the sea rises and falls twice a day, pulled by the <b>moon</b> and the sun, and "
        f'<a href="/shop/item/{number}">what is written on it</a> would fill a library of its own.</p>'
        for number in range(5)
    )
    table = "<table><tr><th>port</th><th>range</th></tr><tr><td>Saint-Malo</td><td>12 m</td></tr></table>"
    code = "<pre><code>def tide(hour):\n    return hour % 12\n</code></pre><ul><li>ebb</li><li>flow</li></ul>"
    return f"<article><h1>{ARTICLE}</h1>{paragraphs}<h2>Figures</h2>{table}{code}</article>"


def pdf(*pages: str, locked: bool = False) -> bytes:
    """A PDF with a line of text on each page, made by hand; `locked` with a password that nobody knows."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, text in enumerate(pages):
        shown = text.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)")
        stream = f"BT /F1 12 Tf 72 720 Td ({shown}) Tj ET" if text else ""
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * number} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>",
            f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream",
        ]
    info = len(objects) + 1
    objects.append("<< /Title (A paper on tides) >>")
    trailer = f"/Size {len(objects) + 1} /Root 1 0 R /Info {info} 0 R"
    if locked:
        objects.append(f"<< /Filter /Standard /V 1 /R 2 /O <{'41' * 32}> /U <{'42' * 32}> /P -44 >>")
        trailer += f" /Encrypt {len(objects)} 0 R /ID [<00> <00>]"
    out = bytearray(b"%PDF-1.4\n")
    offsets = []
    for number, text in enumerate(objects, 1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n{text}\nendobj\n".encode("latin-1")
    start = len(out)
    out += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    out += b"".join(f"{offset:010} 00000 n \n".encode() for offset in offsets)
    out += f"trailer\n<< {trailer} >>\nstartxref\n{start}\n%%EOF\n".encode()
    return bytes(out)
