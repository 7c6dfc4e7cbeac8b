"""What an action has set off in the browser and is not there yet."""

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tools.browser.engine import playwright_error

if TYPE_CHECKING:
    from playwright.async_api import Browser as Chromium
    from playwright.async_api import BrowserContext, CDPSession, Download, Frame, Page, Request, Response

_NO_CONTENT = (204, 205)  # answers after which the page stays, and nothing comes
NETWORK_CHANGED = "ERR_NETWORK_CHANGED"  # a device came or went, such as a container's: all that is loading breaks off
_TRIPS = 2  # to a page and back, which what it has begun precedes


class UnderWay:
    """Pages that were asked for, tabs, files, and tabs that close: known from when the browser begins with them. A file
    that a page makes itself has no such beginning, nor has what a page does only later."""

    def __init__(self) -> None:
        self._pages: dict[Page, Request] = {}  # what was asked for last in their main frames
        self._answered: set[Request] = set()
        self._due: set[str] = set()  # addresses whose answers turned out to be files
        self._come: set[str] = set()  # those of files
        self._tabs: set[str] = set()
        self._closing: set[Page] = set()
        self._broken_off = False
        self._torn: set[Page] = set()  # those of which only a part came
        self._changed = asyncio.Event()
        self._error_page = asyncio.Event()
        self._targets: CDPSession | None = None
        self._context_id = ""

    async def watch(self, chromium: "Chromium", page: "Page") -> None:
        """Tabs are known from here on: of the page's context, whose first one it is. Raises Playwright's errors."""
        if self._context_id:
            return
        session = await page.context.new_cdp_session(page)
        target = (await session.send("Target.getTargetInfo"))["targetInfo"]
        await session.detach()
        self._targets = await chromium.new_browser_cdp_session()
        self._targets.on("Target.targetCreated", self._note_tab)
        self._targets.on("Target.targetDestroyed", self._note_tab_gone)
        await self._targets.send("Target.setDiscoverTargets", {"discover": True, "filter": [{"type": "page"}]})
        self._context_id = target["browserContextId"]  # only now: it has begun with those that were there

    async def close(self) -> None:
        """No tab is known any more."""
        targets, self._targets, self._context_id = self._targets, None, ""
        if targets is not None:
            with suppress(playwright_error()):
                await targets.detach()

    def listen(self, context: "BrowserContext") -> None:
        """To its tabs as they come."""
        context.on("page", self._note_page)

    def begin(self, context: "BrowserContext | None") -> None:
        """An action begins, which what was under way does not concern."""
        for each in (self._pages, self._answered, self._due, self._come, self._tabs, self._closing, self._torn):
            each.clear()
        self._broken_off = False
        if context is not None:
            context.on("request", self._note_request)
            context.on("response", self._note_answer)
            context.on("requestfailed", self._note_failure)

    def end(self, context: "BrowserContext | None") -> None:
        """It has ended."""
        if context is not None:
            context.remove_listener("request", self._note_request)
            context.remove_listener("response", self._note_answer)
            context.remove_listener("requestfailed", self._note_failure)

    # --- what the browser tells

    def _note_request(self, request: "Request") -> None:
        if page := _led(request):
            self._pages[page] = request

    def _note_answer(self, response: "Response") -> None:
        if response.request.is_navigation_request() and response.status not in _NO_CONTENT:
            self._answered.add(response.request)

    def _note_failure(self, request: "Request") -> None:
        """The browser breaks off what turns out to be a file. After any other failure it shows a page that says so."""
        page = _led(request)
        if NETWORK_CHANGED in (request.failure or "") and request.is_navigation_request() and request.method == "GET":
            self._broken_off = True
            if page and request in self._answered:
                self._torn.add(page)
        if "ERR_ABORTED" not in (request.failure or "") or (page and self._pages.get(page) is not request):
            return
        if request in self._answered:
            self._due.add(_address(request.url))
        if page:
            del self._pages[page]
        self._changed.set()

    def _note_tab(self, event: dict[str, Any]) -> None:
        if self._context_id and event["targetInfo"].get("browserContextId") == self._context_id:
            self._tabs.add(event["targetInfo"]["targetId"])

    def _note_tab_gone(self, event: dict[str, Any]) -> None:
        self._tabs.discard(event["targetId"])
        self._changed.set()

    def _note_page(self, page: "Page") -> None:
        """Which of the tabs it is nobody says."""
        if self._tabs:
            self._tabs.pop()
        self._changed.set()

    def note_commit(self, frame: "Frame") -> None:
        """A page's main frame shows something else."""
        self._pages.pop(frame.page, None)
        if frame.url.startswith("chrome-error:"):
            self._error_page.set()
        self._changed.set()

    def note_file(self, download: "Download") -> None:
        """A file comes."""
        self._come.add(_address(download.url))
        self._changed.set()

    def note_loss(self, page: "Page") -> None:
        """The page is gone."""
        self._pages.pop(page, None)
        self._closing.discard(page)
        self._changed.set()

    # --- waiting

    def is_broken_off(self, page: "Page") -> bool:
        """Whether the page could not be opened, or not whole, only as the machine's network changed. Told once for each
        time."""
        broken_off, self._broken_off = self._broken_off, False
        is_torn = page in self._torn
        self._torn.clear()
        return is_torn or (broken_off and page.url.startswith("chrome-error:"))

    async def come(self, page: "Page | None", seconds: float) -> None:
        """Waits for what the page has set off, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                if page is not None:
                    await self._hear(page)
                while self._pages or self._tabs or self._closing or self._due - self._come:
                    self._changed.clear()
                    await self._changed.wait()

    async def _hear(self, page: "Page") -> None:
        """What the page has begun by now is known then, however slow the machine is: the browser tells it in order."""
        with suppress(playwright_error()):
            for _ in range(_TRIPS):
                if await page.evaluate("window.closed") and not page.is_closed():
                    self._closing.add(page)
                    return

    def expect_error_page(self) -> None:
        """Something is asked for, which may fail."""
        self._error_page.clear()

    async def error_page(self, seconds: float) -> None:
        """Waits for what the browser shows in the place of a page that failed: it would come into what follows."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._error_page.wait(), seconds)


def _led(request: "Request") -> "Page | None":
    """The page whose main frame the request is to fill; None for any other request, and for one in a tab that no page
    stands for yet."""
    if not request.is_navigation_request():
        return None
    try:
        frame = request.frame
    except playwright_error():
        return None
    return None if frame.parent_frame else frame.page


def _address(url: str) -> str:
    return url.partition("#")[0]
