"""What one task has open in the browser: tabs, and what happened in them that is still to be told."""

import asyncio
import re
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.base import ToolContext
from tools.browser.engine import END_SECONDS, Browser, Limits, Running, explained, playwright_error, retrieve
from tools.browser.gateway import Gateway
from tools.browser.underway import UnderWay
from tools.environments.base import Environment
from tools.errors import ToolError

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, ConsoleMessage, Dialog, Download, Frame, Page, WebError

MAX_TABS = 10
MAX_DOWNLOAD = 10_000_000  # bytes
MAX_DOWNLOADS = 5  # at once
DOWNLOAD_SECONDS = 300.0
KEPT_MESSAGES = 200
KEPT_DIALOGS = 20
FLOOD = 1_000  # console messages within one action after which nobody listens any more
MAX_TEXT = 1_000  # characters of a message
_GRACE = 0.05  # seconds until what an action has set off shows
_RELOADS = 3  # of a page that was broken off
_SLACK = 1_000_000  # bytes that a page may load beside a download
_WATCH = 0.1  # seconds
_ODD = re.compile(r"[^\w.()+ -]")
_OVER = f"it is larger than {MAX_DOWNLOAD // 1_000_000} MB"


class Saving:
    """A download on its way into the task's environment; cancelled when it grows too large."""

    def __init__(self, download: "Download", gateway: Gateway, name: str) -> None:
        self.name = name
        self.url = download.url[:MAX_TEXT]
        self.told = False
        self.task = asyncio.create_task(self._data(download, gateway))
        self.task.add_done_callback(retrieve)

    async def _data(self, download: "Download", gateway: Gateway) -> bytes:
        """Raises ToolError, Playwright's errors."""
        before = gateway.received
        path = asyncio.create_task(download.path())
        path.add_done_callback(retrieve)
        until = time.monotonic() + DOWNLOAD_SECONDS
        try:
            while not (await asyncio.wait({path}, timeout=_WATCH))[0]:
                too_large = gateway.received - before > MAX_DOWNLOAD + _SLACK
                if too_large or time.monotonic() > until:
                    await download.cancel()
                    raise ToolError(_OVER if too_large else f"it took longer than {DOWNLOAD_SECONDS:g} s")
            return await asyncio.to_thread(_read_bounded, await path)
        finally:
            path.cancel()
            with suppress(playwright_error()):  # one that was cancelled has left nothing
                await download.delete()

    async def result(self, environment: Environment, folder: str) -> dict[str, Any]:
        """What the model is told once it has ended."""
        told: dict[str, Any] = {"url": self.url}
        try:
            data = await self.task
            path = f"{folder}/{self.name}"
            await environment.write(path, data)
        except (ToolError, playwright_error(), OSError) as error:
            return {**told, "file": self.name, "error": explained(error)}
        return {**told, "file": path, "size": len(data)}


def _read_bounded(file: Path) -> bytes:
    if file.stat().st_size > MAX_DOWNLOAD:
        raise ToolError(_OVER)
    return file.read_bytes()


class BrowserSession:
    """`pages` are its tabs, the current one last. Everything is made on the first navigation."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.pages: list[Page] = []
        self.dialogs: list[dict[str, str]] = []
        self.console: deque[dict[str, str]] = deque(maxlen=KEPT_MESSAGES)
        self.errors: deque[dict[str, str]] = deque(maxlen=KEPT_MESSAGES)
        self.total_messages = self.total_errors = 0
        self.main_frame = ""  # what is put before a ref that names no frame
        self._frameless = False  # a snapshot had such refs
        self.files = 0  # snapshots and screenshots kept so far
        self._running: Running | None = None
        self._context: BrowserContext | None = None
        self._gateway: Gateway | None = None
        self._opening: asyncio.Task[Page] | None = None
        self._registered = False
        self._lost = ""  # why there is no page
        self._notes: list[str] = []
        self._new_tab: Page | None = None
        self._savings: list[Saving] = []
        self._names: Counter[str] = Counter()
        self._answers: set[asyncio.Task[None]] = set()
        self._said = 0  # console messages of this action
        self._navigated = False
        self._under_way = UnderWay()
        self._acting: Page | None = None

    # --- opening and closing

    async def opened(self, context: ToolContext) -> "Page":
        """A page to navigate, in a living browser. Raises ToolError, Playwright's errors."""
        if not self._registered:
            self._registered = True
            context.at_end(self.close)
        browser = context.services.part(Browser)
        running = await browser.running()
        if running is not self._running:
            if self._running is not None:
                self._notes.append("The browser had ended: this is a new one, without the earlier tabs and cookies")
            await self.close()
            self._context, self._gateway = await browser.open_context(running)
            self._running = running
            self._listen(self._context)
            self._opening = None
        assert self._context is not None
        if not self.pages:
            if self._opening is None or self._opening.done():
                self._opening = asyncio.create_task(self._new_page(self._context, running))
                self._opening.add_done_callback(retrieve)
            self._add(await asyncio.shield(self._opening))  # one that nobody waits for any more is the next one's
        return self.pages[-1]

    async def _new_page(self, context: "BrowserContext", running: Running) -> "Page":
        page = await context.new_page()
        await self._under_way.watch(running.chromium, page)
        return page

    def page(self) -> "Page":
        """The current page. Raises ToolError."""
        if self._running is None:
            raise ToolError("Nothing is open yet: browser_navigate comes first")
        if not self._running.chromium.is_connected():
            raise ToolError("The browser has ended, and its tabs with it; browser_navigate starts another")
        if not self.pages:
            raise ToolError(f"{self._lost or 'There is no page'}; browser_navigate opens another")
        return self.pages[-1]

    @property
    def gateway(self) -> Gateway:
        """Of the open context."""
        assert self._gateway is not None
        return self._gateway

    async def close(self) -> None:
        """Everything that is open; what happened stays to be told."""
        context, self._context = self._context, None
        gateway, self._gateway = self._gateway, None
        self._running, self.pages, savings, self._savings = None, [], self._savings, []
        for saving in savings:
            saving.task.cancel()
        if context is not None:
            with suppress(playwright_error(), TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    await self._under_way.close()
                    await context.close()
        if gateway is not None:
            await gateway.close()

    async def close_tab(self, page: "Page") -> None:
        """Even if it does not answer."""
        self._lose(page, "The page was closed")
        with suppress(playwright_error(), TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await page.close()

    async def give_up(self) -> str:
        """Closes a page that answers no more, and the tabs beside it, which may hang with it. What is to be said."""
        pages, self.pages = self.pages, []
        self._lost = "The page did not answer in time and was closed"
        await asyncio.gather(*map(self.close_tab, pages))
        others = ", as were the tabs beside it" if len(pages) > 1 else ""
        return f"{self._lost}{others}; browser_navigate opens another"

    async def is_alive(self) -> bool:
        """Whether its browser is still there."""
        return self._running is not None and await self._running.is_alive()

    # --- what happens in it

    def _listen(self, context: "BrowserContext") -> None:
        context.on("page", self._add)
        context.on("dialog", self._answer)
        context.on("weberror", self._note_error)
        context.on("console", self._note_message)
        self._under_way.listen(context)

    def _add(self, page: "Page") -> None:
        if page in self.pages or page.context != self._context:  # a late one of a context that is closed by now
            return
        if not page.url:  # its page turned out to be a file: it closes by itself
            return
        if len(self.pages) >= MAX_TABS:
            self._notes.append(f"A tab was closed at once: there are {MAX_TABS} already")
            self._later(page.close())
            return
        page.on("close", self._closed)
        page.on("crash", self._crashed)
        page.on("download", self._save)
        page.on("framenavigated", self._note_navigation)
        if self.pages:
            self._new_tab = page
            self._navigated = True
        self.pages.append(page)

    def _later(self, work: Any) -> None:
        async def done() -> None:
            with suppress(playwright_error()):
                await work

        task = asyncio.create_task(done())
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    def _closed(self, page: "Page") -> None:
        self._lose(page, "The page was closed")

    def _crashed(self, page: "Page") -> None:
        if page in self.pages:
            self._lose(page, "The page has crashed")
            self._notes.append(f"The page {page.url[:MAX_TEXT]} has crashed")
            self._later(page.close())

    def _lose(self, page: "Page", reason: str) -> None:
        self._under_way.note_loss(page)
        if page in self.pages:
            self.pages.remove(page)
            self._lost = reason

    def _answer(self, dialog: "Dialog") -> None:
        self._later(dialog.accept(dialog.default_value) if dialog.type == "prompt" else dialog.accept())
        if len(self.dialogs) < KEPT_DIALOGS:
            noted = {"type": dialog.type, "message": dialog.message[:MAX_TEXT], "answer": "accepted"}
            self.dialogs.append({**noted, **({"text": dialog.default_value} if dialog.type == "prompt" else {})})

    def _save(self, download: "Download") -> None:
        self._under_way.note_file(download)
        if self._gateway is None:
            return
        if len(self._savings) >= MAX_DOWNLOADS:
            self._notes.append(f"A download was refused: there are {MAX_DOWNLOADS} already")
            self._later(download.cancel())
            return
        self._savings.append(Saving(download, self._gateway, self._name_for(download.suggested_filename)))

    def _name_for(self, suggested: str) -> str:
        """A file name that no other download of the task has."""
        name = _ODD.sub("_", suggested).lstrip(".")[-100:] or "download"
        self._names[name] += 1
        return name if self._names[name] == 1 else f"{self._names[name]}_{name}"

    def _note_navigation(self, frame: "Frame") -> None:
        if frame.parent_frame is None:
            self._navigated = True
            self._under_way.note_commit(frame)

    def _note_error(self, problem: "WebError") -> None:
        self.total_errors += 1
        self.errors.append({"message": str(problem.error)[:MAX_TEXT], "source": "exception"})

    def _note_message(self, message: "ConsoleMessage") -> None:
        self.total_messages += 1
        self.console.append({"type": message.type, "text": message.text[:MAX_TEXT], "source": "console"})
        self._said += 1
        if self._said >= FLOOD and self._context is not None:
            self._context.remove_listener("console", self._note_message)

    # --- around an action

    def told_frame(self, frame: str) -> None:
        """`frame` stands before the refs of a snapshot: `f1` after a page that failed, "" on the first that did not. A
        ref without it means that page's element, unless such refs were another page's."""
        self._frameless |= not frame
        self.main_frame = "" if self._frameless else frame

    def begin(self) -> None:
        """An action: what it sets off is looked for from here on."""
        if self._said >= FLOOD and self._context is not None:
            self._context.on("console", self._note_message)
        self._said = 0
        self._navigated = False
        self._acting = self.pages[-1] if self.pages else None
        self._under_way.begin(self._context)

    def end(self) -> None:
        """The action has ended."""
        self._under_way.end(self._context)

    async def settle(self, limits: Limits) -> None:
        """Waits for what an action has set off: a tab, a page, its pictures, a file; for a while."""
        await asyncio.sleep(_GRACE)
        await self._under_way.come(self._acting, limits.load)
        for tries in reversed(range(_RELOADS + 1)):
            if self.pages:
                await self.loaded(self.pages[-1], limits)
            if not tries or not self.pages or not self.is_broken_off(self.pages[-1]):
                break
            with suppress(playwright_error()):  # of a file, or again
                await self.pages[-1].reload(wait_until="commit", timeout=limits.load * 1000)
            await self._under_way.come(self.pages[-1] if self.pages else None, limits.load)

    def is_broken_off(self, page: "Page") -> bool:
        """Whether the page came not, or not whole, only as the machine's network changed."""
        return self._under_way.is_broken_off(page)

    def expect_error_page(self) -> None:
        """Something is asked for, which may fail."""
        self._under_way.expect_error_page()

    async def error_page(self, limits: Limits) -> None:
        """Waits for what the browser shows in the place of a page that failed."""
        await self._under_way.error_page(limits.rest)

    async def loaded(self, page: "Page", limits: Limits) -> bool:
        """Waits until the page is there, and if it is new a little for the rest; False if it still is not."""
        try:
            await page.wait_for_load_state("domcontentloaded", timeout=limits.load * 1000)
            if self._navigated:
                with suppress(playwright_error()):
                    await page.wait_for_load_state("load", timeout=limits.rest * 1000)
        except playwright_error():
            return False
        return True

    def messages(self, *, clear: bool) -> dict[str, Any]:
        """What was said on consoles, and which errors there were: the latest, and how many in all."""
        told = {
            "console_messages": list(self.console),
            "js_errors": list(self.errors),
            "total_messages": self.total_messages,
            "total_errors": self.total_errors,
        }
        if clear:
            self.console.clear()
            self.errors.clear()
            self.total_messages = self.total_errors = 0
        return told

    async def news(self, context: ToolContext, limits: Limits) -> dict[str, Any]:
        """What is to be told beside an action's result: `new_tab`, `downloads`, `notes`."""
        told: dict[str, Any] = {}
        tab, self._new_tab = self._new_tab, None
        if tab is not None and tab in self.pages:
            told["new_tab"] = tab.url[:MAX_TEXT]
        if downloads := await self._saved(context.environment, limits):
            told["downloads"] = downloads
        if self._notes:
            told["notes"], self._notes = list(dict.fromkeys(self._notes))[:KEPT_DIALOGS], []
        return told

    async def _saved(self, environment: Environment, limits: Limits) -> list[dict[str, Any]]:
        """Those that have ended, and those that were not told of before. New ones are waited for."""
        if new := [saving.task for saving in self._savings if not saving.told]:
            await asyncio.wait(new, timeout=limits.load)
        told = []
        for saving in list(self._savings):
            if saving.task.done():
                self._savings.remove(saving)
                told.append(await saving.result(environment, folder_of(environment)))
            elif not saving.told:
                status = "downloading: a later result tells more"
                told.append({"url": saving.url, "file": saving.name, "status": status})
            saving.told = True
        return told


def folder_of(environment: Environment) -> str:
    """Where the browser puts files for the task."""
    return f"{environment.temp}/browser"
