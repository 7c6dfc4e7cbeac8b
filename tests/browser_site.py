"""Pages for a browser, on loopback: what goes well and what does not. `hits` counts requests by path."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from html import escape

from aiohttp import web

from tests.service import Service
from tests.web_site import pdf

FORM = """<title>Shop</title><h1>Lamps</h1><p>Twelve lamps, <b>all</b> of them bright.</p>
<form action=/found><label>Search <input name=q placeholder="a lamp"></label>
<label>Size <select name=size><option value=s>Small<option value=l>Large</select></label>
<label><input type=checkbox name=gift> As a gift</label><button>Find</button></form>
<button onclick="document.querySelector('#basket').textContent = ++window.count + ' lamps'">Add</button>
<p id=basket>no lamps</p><script>window.count = 0</script><a href=/found?q=red>Red lamps</a>"""

DIALOGS = """<title>Dialogs</title><button onclick="alert('Hear this')">Alert</button>
<button onclick="say(confirm('Really?'))">Confirm</button><button onclick="say(prompt('Name?', 'Ada'))">Prompt</button>
<button onclick="window.addEventListener('beforeunload', event => event.preventDefault()); say('stays')">Stay</button>
<p id=said>nothing</p>
<script>const say = what => document.querySelector('#said').textContent = 'said ' + what</script>"""

TABS = """<title>Tabs</title><a href=/slow?tab target=_blank>Slow tab</a>
<button onclick="window.open('/found?q=opened')">Open</button>
<button onclick="for (let n = 0; n < 12; n++) window.open('/found?q=' + n)">Many</button>
<button onclick="window.close()">Close</button>"""

FILES = """<title>Files</title><a href=/file>Report</a><a href=/large>Large</a><a href=/trickle>Trickle</a>
<button onclick="const link = document.createElement('a'); link.download = '../made here.txt';
link.href = window.URL.createObjectURL(new Blob(['made'])); link.click()">Make</button>"""

CONSOLE = """<title>Console</title><script>console.log('hello', 1); console.warn('careful');
setTimeout(() => { throw new Error('broken') }, 0)</script>
<button onclick="for (let n = 0; n < 3000; n++) console.log('flood ' + n)">Flood</button>"""

IMAGES = """<title>Images</title><img src=/picture alt="a dot"><img src="data:image/gif;base64,R0lGODlhAQABAAAAACw=">
<img src=/missing alt=none>"""

FRAMES = """<title>Frames</title><h1>Outside</h1>
<iframe src=/framed width=300 height=150 style="position:absolute;left:100px;top:200px;border:0"></iframe>"""
FRAMED = """<form action=/slow><input aria-label=Inside name=inside></form>
<button style="position:absolute;left:10px;top:50px" onclick="this.textContent = 'Pressed'">Press me</button>"""

PARTS = """<title>Parts</title><p>first part</p><iframe src=/pending></iframe><iframe src=/framed></iframe>
<a href=/pending>Wait</a>"""

COVERED = """<title>Covered</title><button>Under</button><input aria-label=Off disabled>
<div style="position:fixed;inset:0;background:#fff8" id=cover>cover</div>"""

BUSY = "<title>Busy</title><button onclick='for (;;);'>Hang</button><p>still here</p>"
INNER = """<title>Inner</title><body style="margin:0;overflow:hidden"><div style="height:100vh;overflow:auto">
<div style="height:5000px">tall</div></div>"""

HALVES = """<title>Halves</title><p id=text></p><img src=/picture><script>
document.title = 'title \\ud800'; document.querySelector('#text').textContent = 'half \\udc00 \\ud83d\\ude00';
document.images[0].alt = 'a \\ud800 dot'; console.log('\\ud83d'); alert('\\ud800')</script>"""

GIF = b"GIF89a\1\0\1\0\x80\0\0\xff\xff\xff\0\0\0,\0\0\0\0\1\0\1\0\0\2\2D\1\0;"


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BrowserSite(Service):
    """The server. `url` is its address without a slash at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.hits: Counter[str] = Counter()
        pages = {"/shop": FORM, "/dialogs": DIALOGS, "/tabs": TABS, "/files": FILES, "/console": CONSOLE}
        pages |= {"/images": IMAGES, "/frames": FRAMES, "/framed": FRAMED, "/covered": COVERED, "/busy": BUSY}
        self._pages = {**pages, "/inner": INNER, "/parts": PARTS, "/halves": HALVES}

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._counted])
        app.add_routes([web.get(path, self._page) for path in self._pages])
        handlers: list[Handler] = [self.found, self.slow, self.huge, self.redirect, self.holds, self.cookie, self.file]
        handlers += [
            self.paper,
            self.late,
            self.large,
            self.trickle,
            self.endless,
            self.pending,
            self.picture,
            self.strict,
        ]
        app.add_routes([web.get(f"/{handler.__name__}", handler) for handler in handlers])
        return app

    @web.middleware
    async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.hits[request.path] += 1
        try:
            return await handler(request)
        except ConnectionError:  # who asked is gone
            return web.Response()

    async def _page(self, request: web.Request) -> web.Response:
        return _html(self._pages[request.path])

    async def found(self, request: web.Request) -> web.Response:
        """What a form sent."""
        return _html(f"<title>Found</title><p>found {escape(request.query_string)}</p>")

    async def slow(self, request: web.Request) -> web.Response:
        """Answers after a while."""
        await asyncio.sleep(0.5)
        return _html(f"<title>Slow</title><p>slow {escape(request.query_string)}</p>")

    async def huge(self, request: web.Request) -> web.Response:
        """Several thousand elements."""
        rows = "".join(f"<p>Row {n} <a href=/found?q={n}>Link {n}</a></p>" for n in range(1200))
        return _html(f"<title>Huge</title><h1>Rows</h1>{rows}")

    async def redirect(self, request: web.Request) -> web.Response:
        """To `to`."""
        raise web.HTTPFound(request.query["to"])

    async def holds(self, request: web.Request) -> web.Response:
        """A page with all kinds of things at `at`, which it asks for."""
        at = escape(request.query["at"])
        return _html(
            f"<title>Holds</title><img src={at}/picture><script src={at}/found></script>"
            f"<iframe src={at}/framed></iframe><link rel=stylesheet href={at}/found><p id=told>waiting</p>"
            f"<script>fetch('{at}/slow').then(answer => document.querySelector('#told').textContent = 'got it', "
            "() => document.querySelector('#told').textContent = 'refused')</script>"
        )

    async def cookie(self, request: web.Request) -> web.Response:
        """Says the visitor's cookie, and gives one."""
        response = _html(f"<title>Cookie</title><p>cookie: {escape(request.cookies.get('who', 'none'))}</p>")
        response.set_cookie("who", request.query.get("who", "somebody"))
        return response

    async def file(self, request: web.Request) -> web.Response:
        """A file to be saved."""
        return web.Response(body=b"a,b\n1,2\n", headers={"Content-Disposition": 'attachment; filename="report 1.csv"'})

    async def late(self, request: web.Request) -> web.Response:
        """A file to be saved, after a while."""
        await asyncio.sleep(0.5)
        return await self.file(request)

    async def paper(self, request: web.Request) -> web.Response:
        """A PDF."""
        return web.Response(body=pdf("paper"), content_type="application/pdf")

    async def large(self, request: web.Request) -> web.StreamResponse:
        """A file of 40 MB that does not say so."""
        response = web.StreamResponse(headers={"Content-Disposition": "attachment; filename=large.bin"})
        await response.prepare(request)
        for _ in range(400):
            await response.write(bytes(100_000))
        return response

    async def trickle(self, request: web.Request) -> web.StreamResponse:
        """A file that never ends."""
        response = web.StreamResponse(headers={"Content-Disposition": "attachment; filename=trickle.bin"})
        await response.prepare(request)
        while True:
            await response.write(b"drop")
            await asyncio.sleep(0.1)

    async def endless(self, request: web.Request) -> web.StreamResponse:
        """A page that never ends."""
        response = web.StreamResponse(headers={"Content-Type": "text/html"})
        await response.prepare(request)
        await response.write(b"<title>Endless</title><p>the beginning</p>")
        while True:
            await response.write(b"<!-- more -->")
            await asyncio.sleep(0.1)

    async def pending(self, request: web.Request) -> web.Response:
        """No answer, ever."""
        await asyncio.sleep(3600)
        return _html("late")

    async def picture(self, request: web.Request) -> web.Response:
        """A dot."""
        return web.Response(body=GIF, content_type="image/gif")

    async def strict(self, request: web.Request) -> web.Response:
        """A page that forbids all scripts, and styles in its text."""
        response = _html("<title>Strict</title><p>strict</p><button>Here</button>")
        response.headers["Content-Security-Policy"] = "default-src 'none'"
        return response


def _html(text: str) -> web.Response:
    return web.Response(text=f"<!doctype html><meta charset=utf-8>{text}", content_type="text/html")
