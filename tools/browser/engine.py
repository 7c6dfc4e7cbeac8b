"""The browser of one process: Playwright's driver and a Chromium, started on first use, shared by all its tasks."""

import asyncio
import re
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from tools.browser.folder import BrowserFolder, reap
from tools.browser.gateway import Gateway, proxies
from tools.browser.pagescripts import KEEP
from tools.browser.program import SWITCHES, USUAL_PATH, find_program, may_use_sandbox
from tools.environments.script import MARKER
from tools.errors import ToolError
from tools.services import Services
from tools.web.addresses import Resolve, addresses_of

if TYPE_CHECKING:
    from playwright.async_api import Browser as Chromium
    from playwright.async_api import BrowserContext, Playwright

START_SECONDS = 60.0
PROBE_SECONDS = 20.0  # a machine may be busy; a browser that is gone says so at once
END_SECONDS = 3.0
VIEW = (1280, 720)
_PROFILE = re.compile(r"--user-data-dir=(\S+)")


class Limits(Struct, frozen=True):
    """Seconds. What takes longer than `open`, `act` or `reach` fails; after `load` one goes on with what is there."""

    open: float = 60.0  # until a site answers
    load: float = 10.0  # until the answer is a page
    rest: float = 3.0  # until pictures and scripts are there too
    frame: float = 2.0  # until a frame says that it is there
    act: float = 30.0  # one action
    reach: float = 10.0  # until an element can be clicked


def playwright_error() -> type[Exception]:
    """The class of what Playwright raises; it is loaded late."""
    from playwright.async_api import Error  # noqa: PLC0415 - a tenth of a second that few runs need

    return Error


class Running:
    """A driver and its Chromium."""

    def __init__(self, driver: "Playwright", chromium: "Chromium", folder: BrowserFolder) -> None:
        self.chromium = chromium
        self._driver = driver
        self._folder = folder
        self._ended = False

    async def is_alive(self) -> bool:
        """Whether it answers. A driver that was killed does not say that its browser is gone."""
        if self._ended or not self.chromium.is_connected():
            return False
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await (await self.chromium.new_browser_cdp_session()).detach()
        except (playwright_error(), TimeoutError):
            return False
        return True

    async def end(self) -> None:
        """Both, and all that they have left; by force if they are slow."""
        if self._ended:
            return
        self._ended = True
        with suppress(playwright_error(), TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self.chromium.close()
        with suppress(playwright_error(), TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self._driver.stop()
        await asyncio.to_thread(self._folder.remove)


class Browser:
    """A part of `Services`. `limits` and `addresses` are as they are unless a test says otherwise."""

    def __init__(self, services: Services) -> None:
        self.limits = Limits()
        self.addresses: Resolve = self._public_addresses
        self._services = services
        self._lock = asyncio.Lock()
        self._start: asyncio.Task[Running] | None = None
        self._running: Running | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def _public_addresses(self, host: str, port: int) -> Sequence[str]:
        return await addresses_of(host, port, allow_private=self._services.settings.allow_private_urls)

    async def close(self) -> None:
        """See `tools.services.Closing`."""
        if self._start is not None and not self._start.done():
            self._start.cancel()
            await asyncio.wait({self._start}, timeout=END_SECONDS)
        if self._running is not None:
            await self._running.end()

    async def running(self) -> Running:
        """The browser; a new one if there is none, or if the last one has died. Raises ToolError."""
        async with self._lock:
            start = self._start
            if start is None or (start.done() and not await _is_usable(start)):
                start = self._start = asyncio.create_task(self._replaced())
                start.add_done_callback(retrieve)
        return await asyncio.shield(start)  # others wait for it as well

    async def _replaced(self) -> Running:
        if self._running is not None:
            await self._running.end()
        self._running = await self._launched()
        return self._running

    async def _launched(self) -> Running:
        program = find_program(self._services.settings, self._services.environ)
        if not program:
            raise ToolError("There is no browser on this machine")
        await asyncio.to_thread(reap)
        folder = await asyncio.to_thread(BrowserFolder)
        try:
            async with asyncio.timeout(START_SECONDS):
                return await self._started(program, folder)
        except (playwright_error(), OSError, TimeoutError) as error:
            await asyncio.to_thread(folder.remove)
            raise ToolError(f"The browser cannot be started: {explained(error)}") from error
        except asyncio.CancelledError:
            folder.remove()
            raise

    async def _started(self, program: str, folder: BrowserFolder) -> Running:
        from playwright.async_api import async_playwright  # noqa: PLC0415

        driver = await async_playwright().start()
        try:
            chromium = await driver.chromium.launch(
                executable_path=program,
                headless=True,
                args=list(SWITCHES),
                chromium_sandbox=may_use_sandbox(),
                handle_sigint=False,  # Ctrl-C is for the run, which lets rows end their calls
                env=self._variables(folder),
                downloads_path=folder.path / "downloads",
                artifacts_dir=folder.path / "artifacts",
                timeout=START_SECONDS * 1000,
            )
            session = await chromium.new_browser_cdp_session()
            command = (await session.send("SystemInfo.getInfo"))["commandLine"]
            await session.detach()
        except BaseException:
            with suppress(playwright_error(), TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    await driver.stop()
            raise
        if profile := _PROFILE.search(command):
            folder.keep_profile(profile[1])
        return Running(driver, chromium, folder)

    def _variables(self, folder: BrowserFolder) -> dict[str, str | float | bool]:
        """All that the browser's environment holds."""
        return {
            "PATH": self._services.environ.get("PATH", USUAL_PATH),
            "LANG": "C.UTF-8",
            "HOME": str(folder.path / "home"),
            "TMPDIR": str(folder.path),
            MARKER: f"{folder.token}.0.",
        }

    async def open_context(self, running: Running) -> "tuple[BrowserContext, Gateway]":
        """A context of its own, with a way into the network of its own, for one task. Raises Playwright's errors."""
        settings, environ = self._services.settings, self._services.environ
        gateway = Gateway(self.addresses, proxies(environ, allow_private=settings.allow_private_urls))
        server = await gateway.open()
        try:
            width, height = VIEW
            making = running.chromium.new_context(
                proxy={"server": server}, viewport={"width": width, "height": height}, accept_downloads=True
            )
            context = await self._kept(_prepared(making))
        except BaseException:
            await gateway.close()
            raise
        context.set_default_timeout(self.limits.act * 1000)
        context.set_default_navigation_timeout(self.limits.open * 1000)
        return context, gateway

    async def _kept(self, making: "Coroutine[Any, Any, BrowserContext]") -> "BrowserContext":
        """A context, closed again if nobody waits for it any more: the driver would forget it, not the browser."""
        task = asyncio.create_task(making)
        task.add_done_callback(retrieve)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            closing = asyncio.create_task(_closed(task))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            raise


async def _prepared(making: "Coroutine[Any, Any, BrowserContext]") -> "BrowserContext":
    context = await making
    await context.add_init_script(KEEP)
    return context


async def _is_usable(start: "asyncio.Task[Running]") -> bool:
    return not start.cancelled() and start.exception() is None and await start.result().is_alive()


def retrieve(start: "asyncio.Task[Any]") -> None:
    """What went wrong has been told to whoever waited; nobody may have."""
    if not start.cancelled():
        start.exception()


async def _closed(task: "asyncio.Task[BrowserContext]") -> None:
    with suppress(playwright_error()):
        await (await task).close()


def explained(error: BaseException) -> str:
    """An error of Playwright in a line: without the method's name, and of its log what says why."""
    if isinstance(error, TimeoutError) and not str(error):
        return "it took too long"
    lines = [line.strip() for line in _ESCAPES.sub("", str(error)).split("\n") if line.strip()]
    first = _METHOD.sub("", lines[0]) if lines else type(error).__name__
    why = next((line for word in _REASONS for line in reversed(lines[1:]) if word in line), "")
    why = _LOG.sub("", why)
    return f"{first[:300]} ({why[:300]})" if why else first[:500]


_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_METHOD = re.compile(r"^[A-Z]\w+\.\w+: ")
_LOG = re.compile(r"^(?:- )?(?:\d+ \S )?(?:\[[^\]]*\] ?)*")
_REASONS = (
    *("intercepts pointer events", "is not visible", "is not enabled", "is not stable", "is not editable"),
    *("outside of the viewport", "FATAL", "ERROR", "exitCode="),
)
"""The lines of a log that say why, the better ones first."""
