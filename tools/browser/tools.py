"""The tools of the toolset `browser` (but `web_search`): one task's tabs in the process's browser.

A failure is `{success: false, error}`. Beside what its description says a result may hold `new_tab`, `downloads` and
`notes`, see `BrowserSession.news`. Whatever holds words of a page is marked. The browser runs beside the sandbox, on
this machine.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from tools.arguments import TypedTool
from tools.base import Picture, ToolContext
from tools.browser.engine import VIEW, Browser, Limits, explained, playwright_error, retrieve
from tools.browser.pagescripts import DRAW, ERASE, EVALUATE, HIDE, IMAGES, MAX_VALUE, OPTIONS, SCROLL, UNHIDE
from tools.browser.session import MAX_TEXT, BrowserSession, folder_of
from tools.browser.snapshot import Line, compact, count_elements, cut, marks, parse_ref, parse_snapshot
from tools.browser.underway import NETWORK_CHANGED
from tools.errors import ToolError
from tools.pictures.vision import check_given
from tools.text import decoded_json, without_halves
from tools.untrusted import marked
from tools.web.addresses import refuse_secrets, split_url, with_scheme

if TYPE_CHECKING:
    from playwright.async_api import ElementHandle, Frame, Locator, Page, Response

MAX_IMAGES = 200
MAX_FRAMES = 100
MAX_WHOLE = 2_000_000  # characters of a snapshot that is kept in a file
MAX_TITLE = 500
_TRIES = 3  # of what another navigation has interrupted
_FUNCTION = re.compile(r"\s*(async\s+)?function\b")  # a statement, unless it is put in brackets
_FIRST_REF = re.compile(r"\[ref=((?:f\d+)?)e\d+\]")
_BLANK = "about:blank"
_LEFT = "Execution context was destroyed"  # in an error: another page came in the place of the one that was asked
_NO_FRAME = "Invalid frame in aria-ref selector"  # in an error: the frame that a ref names is gone, with all its refs

_KEY_NAMES = (
    *("Enter", "Escape", "Tab", "Space", "Backspace", "Delete", "Home", "End", "PageUp", "PageDown"),
    *("ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight", "Control", "Meta", "Shift", "Alt"),
)
_KEYS = (
    {name.lower(): name for name in _KEY_NAMES}
    | {name.removeprefix("Arrow").lower(): name for name in _KEY_NAMES}
    | {"return": "Enter", "esc": "Escape", "del": "Delete", "ctrl": "Control", "cmd": "Meta"}
)


class NavigateArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What `browser_navigate` takes."""

    url: Annotated[str, Meta(description="The address to open, http or https")]


class SnapshotArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What `browser_snapshot` takes."""

    full: Annotated[
        bool, Meta(description="Everything the browser tells of the page: containers, addresses of links, all refs")
    ] = False


class ClickArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What `browser_click` takes."""

    ref: Annotated[str, Meta(description="The element's ref in the latest snapshot, such as @e12")]


class TypeArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What `browser_type` takes."""

    ref: Annotated[str, Meta(description="The field's ref in the latest snapshot, such as @e12")]
    text: Annotated[str, Meta(description="What the field holds afterwards; of a selection list the option to choose")]


class ScrollArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What `browser_scroll` takes."""

    direction: Annotated[Literal["up", "down"], Meta(description="Where to; most of a screen at a time")]


class BackArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What `browser_back` takes: nothing."""


class PressArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What `browser_press` takes."""

    key: Annotated[str, Meta(description="Enter, Tab, Escape, ArrowDown, PageDown, a character, or Control+a and such")]


class ImagesArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What `browser_get_images` takes: nothing."""


class ConsoleArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What `browser_console` takes."""

    clear: Annotated[bool, Meta(description="Forget the messages once they are told")] = False
    expression: (
        Annotated[str, Meta(description="JavaScript to evaluate in the page; its value is the result")] | None
    ) = None


class VisionArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What `browser_vision` takes."""

    question: Annotated[str, Meta(description="What you want to know of how the page looks")]
    annotate: Annotated[bool, Meta(description="Draw the refs of what can be clicked or filled into the picture")] = (
        False
    )


# --- around every action


class Tab(Struct):
    """What an action works on."""

    context: ToolContext
    session: BrowserSession
    limits: Limits
    page: "Page"

    def marked(self, result: dict[str, Any]) -> dict[str, Any]:
        """A result that holds text of the page."""
        return marked(result, self.page.url[:200])


class PageSays(ToolError):
    """One whose text is partly the page's."""


T = TypeVar("T")
Action = Callable[[Tab], Awaitable[dict[str, Any]]]


async def _acted(context: ToolContext, action: Action) -> dict[str, Any]:
    """The result of an action on the current page."""
    session, limits = context.memory(BrowserSession), context.services.part(Browser).limits
    async with session.lock:
        try:
            tab = Tab(context, session, limits, session.page())
        except ToolError as error:
            return _failure(str(error))
        session.begin()
        try:
            result = await _in_time(tab, action)
        finally:
            session.end()
        return await _with_news(tab, result)


async def _with_news(tab: Tab, result: dict[str, Any]) -> dict[str, Any]:
    """Addresses of tabs and names of files are the page's words. All that a page says leaves through here."""
    news = await tab.session.news(tab.context, tab.limits)
    told = {**result, **news}
    return _of_whole_characters(tab.marked(told) if news else told)


def _of_whole_characters(result: dict[str, Any]) -> dict[str, Any]:
    """A page's text may hold halves of surrogate pairs, which is no text elsewhere."""
    text = json.dumps(result, ensure_ascii=False)
    whole = without_halves(text)
    return result if whole == text else json.loads(whole)


def _failure(error: str) -> dict[str, Any]:
    return {"success": False, "error": error}


async def _in_time(tab: Tab, action: Action) -> dict[str, Any]:
    try:
        async with asyncio.timeout(tab.limits.act):
            return await action(tab)
    except PageSays as error:
        return tab.marked(_failure(str(error)))
    except ToolError as error:
        return _failure(str(error))
    except TimeoutError:
        return _failure(await _stopped(tab, f"It took longer than {tab.limits.act:g} s"))
    except playwright_error() as error:
        return await _broken(tab, error)


async def _stopped(tab: Tab, problem: str) -> str:
    """The problem. Ends what the page is loading, which leaves the one before it; where that hangs, it is given up."""
    try:
        async with asyncio.timeout(tab.limits.rest):
            session = await tab.page.context.new_cdp_session(tab.page)
            await session.send("Page.stopLoading")
            await session.detach()
            await tab.page.evaluate("0")
    except (TimeoutError, playwright_error()):
        return f"{problem}. {await tab.session.give_up()}"
    return problem


async def _broken(tab: Tab, error: Exception, before: str = "") -> dict[str, Any]:
    """What Playwright says, which is in part the page's, behind `before`; or what has become of the page."""
    if not await tab.session.is_alive():
        return _failure("The browser has ended, and its tabs with it; browser_navigate starts another")
    if tab.page in tab.session.pages:
        return tab.marked(_failure(f"{before}{explained(error)}"))
    try:
        tab.session.page()
    except ToolError as lost:
        return _failure(str(lost))
    return _failure("The page was closed or has crashed; an earlier tab is the current one now")


# --- browser_navigate


async def navigate(context: ToolContext, arguments: NavigateArguments) -> dict[str, Any]:
    """`{success, url, title, snapshot, element_count}`; `status` of an answer that is an error."""
    session, limits = context.memory(BrowserSession), context.services.part(Browser).limits
    url = with_scheme(arguments.url.strip())
    async with session.lock:
        try:
            split_url(url)
            refuse_secrets(url, context.services.environ)
            page = await session.opened(context)
        except ToolError as error:
            return _failure(str(error))
        except playwright_error() as error:
            return _failure(f"The browser cannot open a tab: {explained(error)}")
        tab = Tab(context, session, limits, page)
        session.begin()
        try:
            for _ in range(_TRIES):
                failure, told = await _gone_to(tab, url)
                result = failure or await _in_time(tab, _arrived)
                if page not in session.pages or not session.is_broken_off(page):
                    break
        finally:
            session.end()
        return await _with_news(tab, {**result, **told})


async def _gone_to(tab: Tab, url: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The failure if it could not be opened, {} if it was; what else is to be told."""
    tab.session.gateway.problems.clear()
    try:
        async with asyncio.timeout(tab.limits.open):
            response = await _answer(tab, url)
            here = await tab.session.loaded(tab.page, tab.limits)
    except TimeoutError:
        return _failure(await _stopped(tab, f"{url} did not answer within {tab.limits.open:g} s")), {}
    except playwright_error() as error:
        return await _why_not(tab, url, error), {}
    told: dict[str, Any] = (
        {} if here else {"note": "The page is still loading; browser_snapshot shows more of it later"}
    )
    if response and response.headers.get("content-type", "").startswith("application/pdf"):
        told["note"] = "This is a PDF, of which a snapshot shows nothing; web_extract reads it"
    return {}, {**told, **({"status": response.status} if response and response.status >= 400 else {})}


async def _answer(tab: Tab, url: str) -> "Response | None":
    """What was under way before can come in between, as can the browser's own page for what went wrong with it; then a
    second navigation is itself interrupted by the first one. None where the answer went to that one. A network device
    that comes or goes, such as a container's, breaks off whatever is under way."""
    for tries in reversed(range(_TRIES)):
        tab.session.expect_error_page()
        try:
            return await tab.page.goto(url, wait_until="commit", timeout=0)
        except playwright_error() as error:
            _, interrupted, what = str(error).partition('interrupted by another navigation to "')
            is_changed = NETWORK_CHANGED in str(error)
            if not (is_changed or interrupted) or (not tries and (is_changed or "chrome-error:" in what)):
                raise
        if is_changed:
            await tab.session.error_page(tab.limits)
        elif what.partition('"')[0].rstrip("/") == url.rstrip("/"):
            break
    return None


async def _why_not(tab: Tab, url: str, error: Exception) -> dict[str, Any]:
    """{} for a file: it is being saved, and the page before it is still there."""
    if "Download is starting" in str(error):
        await tab.session.settle(tab.limits)
        return {}
    if "net::ERR" in str(error) and "ERR_ABORTED" not in str(error):
        await tab.session.error_page(tab.limits)
    if "SOCKS_CONNECTION" in str(error) and (problems := tab.session.gateway.problems):
        host = urlsplit(url).hostname
        problem = next((each for each in reversed(problems) if each.host == host), problems[-1])
        failure = _failure(f"{url} cannot be opened: {problem.reason}")
        return failure if problem.host == host else tab.marked(failure)  # a host to which the site has led
    return await _broken(tab, error, f"{url} cannot be opened: ")


async def _arrived(tab: Tab) -> dict[str, Any]:
    title = (await _of_one_page(tab.page.title))[:MAX_TITLE]
    seen = await _snapshot(tab, full=False)
    return tab.marked({"success": True, "url": tab.page.url[:MAX_TEXT], "title": title, **seen})


# --- browser_snapshot


async def snapshot(context: ToolContext, arguments: SnapshotArguments) -> dict[str, Any]:
    """`{success, snapshot, element_count}`; `pending_dialogs` and `frames_left_out` (how many) where there are some."""

    async def act(tab: Tab) -> dict[str, Any]:
        await tab.session.loaded(tab.page, tab.limits)
        return tab.marked({"success": True, **await _snapshot(tab, full=arguments.full)})

    return await _acted(context, act)


async def _snapshot(tab: Tab, *, full: bool) -> dict[str, Any]:
    text, mute = await _of_one_page(lambda: _text_of(tab))
    lines = await asyncio.to_thread(_shown, text, full)
    shown = cut(lines)
    if shown.left_out or shown.text.startswith("[..."):
        shown = cut(lines, whole_at=await _kept(tab, lines))
    seen: dict[str, Any] = {"snapshot": shown.text, "element_count": count_elements(lines)}
    if mute:
        seen["frames_left_out"] = mute
    if tab.session.dialogs:
        seen["pending_dialogs"], tab.session.dialogs = tab.session.dialogs, []
    return seen


async def _text_of(tab: Tab) -> tuple[str, int]:
    """The browser's snapshot, and how many frames are not in it: it would wait for one that is not there yet, or hangs,
    so these are hidden meanwhile."""
    mute = await _mute_frames(tab)
    hidden = [await frame.frame_element() for frame in mute]
    for element in hidden:
        await element.evaluate(HIDE)
    try:
        text = await tab.page.aria_snapshot(mode="ai", boxes=True, timeout=0)
    finally:
        for element in hidden:
            with suppress(playwright_error()):
                await element.evaluate(UNHIDE)
    first = _FIRST_REF.search(text)
    tab.session.told_frame(first[1] if first else "")
    return text, len(hidden)


async def _mute_frames(tab: Tab) -> "list[Frame]":
    """Those that do not answer soon; not those within them."""
    asked = {asyncio.create_task(frame.evaluate("0")): frame for frame in tab.page.frames[1:MAX_FRAMES]}
    if not asked:
        return []
    _, waiting = await asyncio.wait(asked, timeout=tab.limits.frame)
    for task in asked:
        task.cancel()
        task.add_done_callback(retrieve)
    mute = [asked[task] for task in waiting if not asked[task].is_detached()]
    return [frame for frame in mute if frame.parent_frame not in mute]


def _shown(text: str, full: bool) -> list[Line]:
    lines = parse_snapshot(text)
    return lines if full else compact(lines)


async def _kept(tab: Tab, lines: list[Line]) -> str:
    """The path of a file of the task that holds the whole snapshot; "" where it cannot be kept."""
    tab.session.files += 1
    path = f"{folder_of(tab.context.environment)}/snapshot_{tab.session.files}.txt"
    whole = "\n".join(map(str, lines))[:MAX_WHOLE]
    try:
        await tab.context.environment.write(path, whole.encode("utf-8", "replace"))
    except ToolError:
        return ""
    return path


# --- what one does on a page


async def click(context: ToolContext, arguments: ClickArguments) -> dict[str, Any]:
    """`{success, clicked}`."""

    async def act(tab: Tab) -> dict[str, Any]:
        element = await _element(tab, arguments.ref)
        await element.click(timeout=tab.limits.reach * 1000, trial=True)
        await element.click(timeout=0)  # with the page that it leads to
        await tab.session.settle(tab.limits)
        return {"success": True, "clicked": arguments.ref}

    return await _acted(context, act)


async def _element(tab: Tab, text: str) -> "Locator":
    ref = parse_ref(text)
    if not ref:
        raise ToolError(f"{text[:100]!r} is no ref; one looks like @e12 and stands in the snapshot as [ref=e12]")
    frame = "" if ref.startswith("f") else tab.session.main_frame  # see `told_frame`
    element = tab.page.locator(f"aria-ref={frame}{ref}")
    if not await _is_there(element):
        raise ToolError(f"There is no element @{ref} on the page as it is now; browser_snapshot shows which there are")
    return element


async def _is_there(element: "Locator") -> bool:
    try:
        return bool(await element.count())
    except playwright_error() as error:
        if _NO_FRAME not in str(error):
            raise
        return False


async def type_text(context: ToolContext, arguments: TypeArguments) -> dict[str, Any]:
    """`{success, typed, element}`."""

    async def act(tab: Tab) -> dict[str, Any]:
        element = await _element(tab, arguments.ref)
        options = await element.evaluate(OPTIONS, timeout=tab.limits.reach * 1000)
        if options is None:
            await element.fill(arguments.text, timeout=tab.limits.reach * 1000)
        else:
            await element.select_option(_option(options, arguments.text), timeout=tab.limits.reach * 1000)
        await tab.session.settle(tab.limits)
        return {"success": True, "typed": arguments.text, "element": arguments.ref}

    return await _acted(context, act)


def _option(options: list[list[str]], text: str) -> str:
    """The value of the option that the text names."""
    for value, label in options:
        if text.strip() in (value, label):
            return value
    labels = ", ".join(label for _, label in options)
    raise PageSays(f"The list has no option {text[:100]!r}; it has: {labels[:MAX_TEXT]}")


async def scroll(context: ToolContext, arguments: ScrollArguments) -> dict[str, Any]:
    """`{success, scrolled, position}`."""

    async def act(tab: Tab) -> dict[str, Any]:
        down = arguments.direction == "down"
        above, whole, view = await _of_one_page(lambda: tab.page.evaluate(SCROLL, down))
        position = f"pixels {above} to {above + view} of {max(whole, above + view)}"
        return {"success": True, "scrolled": arguments.direction, "position": position}

    return await _acted(context, act)


async def back(context: ToolContext, arguments: BackArguments) -> dict[str, Any]:
    """`{success, url}`. From the first page of a tab to the tab before it."""

    async def act(tab: Tab) -> dict[str, Any]:
        session, url = tab.session, await _url_before(tab.page)
        if not url and len(session.pages) == 1:
            raise ToolError("There is no earlier page")
        if not url:
            await session.close_tab(tab.page)
        elif failure := await _gone_back(tab, url):
            return failure
        await session.settle(tab.limits)
        return tab.marked({"success": True, "url": session.page().url[:MAX_TEXT]})

    return await _acted(context, act)


async def _url_before(page: "Page") -> str:
    """Of what was there before in this tab; "" if nothing was, for a tab begins blank."""
    session = await page.context.new_cdp_session(page)
    history = await session.send("Page.getNavigationHistory")
    await session.detach()
    before: int = history["currentIndex"] - 1
    url = str(history["entries"][before]["url"]) if before >= 0 else ""
    return "" if before == 0 and url == _BLANK else url


async def _gone_back(tab: Tab, url: str) -> dict[str, Any]:
    """The failure if it could not be opened, {} if it was."""
    tab.session.gateway.problems.clear()
    tab.session.expect_error_page()
    try:
        await tab.page.go_back(wait_until="commit", timeout=0)
    except playwright_error() as error:
        if NETWORK_CHANGED not in str(error):
            return await _why_not(tab, url, error)
        await tab.session.error_page(tab.limits)  # which is tried again
    return {}


async def press(context: ToolContext, arguments: PressArguments) -> dict[str, Any]:
    """`{success, pressed}`."""

    async def act(tab: Tab) -> dict[str, Any]:
        element = await _of_one_page(lambda: _focused(tab.page))
        await element.press(key_name(arguments.key), timeout=0)
        await tab.session.settle(tab.limits)
        return {"success": True, "pressed": arguments.key}

    return await _acted(context, act)


async def _of_one_page(look: Callable[[], Awaitable[T]]) -> T:
    """What only looks at a page is done again where another page came in its place meanwhile."""
    for _ in range(_TRIES - 1):
        try:
            return await look()
        except playwright_error() as error:
            if _LEFT not in str(error):
                raise
    return await look()


async def _focused(page: "Page") -> "ElementHandle":
    """What has the focus, also within frames: a key pressed on an element waits for the page that it leads to."""
    frame: Frame | None = page.main_frame
    element = None
    while frame is not None:
        handle = await frame.evaluate_handle("document.activeElement || document.body || document.documentElement")
        element = handle.as_element() or element
        frame = await element.content_frame() if element else None
    if element is None:
        raise ToolError("The page takes no keys")
    return element


def key_name(text: str) -> str:
    """A key as Playwright names it: `ctrl+a` is Control+a."""
    if len(text) <= 1:
        return text
    head, plus, last = text.strip().rpartition("+")
    if plus and not last:  # the key + itself
        head, last = head.removesuffix("+"), "+"
    keys = [*(key for key in head.split("+") if key), last]
    return "+".join(_KEYS.get(key.strip().lower(), key.strip()) for key in keys)


# --- what one asks of a page


async def get_images(context: ToolContext, arguments: ImagesArguments) -> dict[str, Any]:
    """`{success, images: [{src, alt, width, height}], count}`; count may be more than are listed."""

    async def act(tab: Tab) -> dict[str, Any]:
        count, images = await _of_one_page(lambda: tab.page.evaluate(IMAGES, [MAX_IMAGES, MAX_TEXT]))
        return tab.marked({"success": True, "images": images, "count": count})

    return await _acted(context, act)


async def console(context: ToolContext, arguments: ConsoleArguments) -> dict[str, Any]:
    """`{success, console_messages, js_errors, total_messages, total_errors}`, the latest messages; with an expression
    `{success, result, result_type}`, and `note` if it led to another page before its value was read."""

    async def evaluate(tab: Tab) -> dict[str, Any]:
        try:
            value = await _value(tab.page, arguments.expression or "")
        except playwright_error() as error:
            if _LEFT not in str(error):
                raise
            note = "The page was left meanwhile, and the value went with it"
            value = {"result": None, "result_type": "undefined", "note": note}
        await tab.session.settle(tab.limits)
        return tab.marked({"success": True, **value})

    async def tell(tab: Tab) -> dict[str, Any]:
        return tab.marked({"success": True, **tab.session.messages(clear=arguments.clear)})

    return await _acted(context, tell if arguments.expression is None else evaluate)


async def _value(page: "Page", expression: str) -> dict[str, Any]:
    source = f"({expression})" if _FUNCTION.match(expression) else expression
    kind, length, text = (await page.evaluate(EVALUATE, source)).split(" ", 2)
    if int(length) > MAX_VALUE:
        left = f"{int(length) - MAX_VALUE} of {length} characters of its JSON are left out"
        return {"result": text, "result_type": kind, "truncated": left}
    return {"result": decoded_json(text), "result_type": kind}


async def vision(context: ToolContext, arguments: VisionArguments) -> dict[str, Any]:
    """`{success, analysis, screenshot_path}`."""
    try:
        check_given("question", arguments.question)
    except ToolError as error:
        return _failure(str(error))
    taken: list[Picture] = []

    async def act(tab: Tab) -> dict[str, Any]:
        picture = Picture("image/png", await _screenshot(tab, annotate=arguments.annotate))
        tab.session.files += 1
        path = f"{folder_of(context.environment)}/screenshot_{tab.session.files}.png"
        await context.environment.write(path, picture.data)
        taken.append(picture)
        return {"screenshot_path": path}

    result = await _acted(context, act)
    if not taken:
        return result
    try:
        analysis = await context.partner.look(arguments.question, taken[0])
    except ToolError as error:
        return {**_failure(str(error)), **result}
    return marked({"success": True, "analysis": analysis, **result}, "a picture of a page")


async def _screenshot(tab: Tab, *, annotate: bool) -> bytes:
    if not annotate:
        return await tab.page.screenshot(timeout=0)
    lines = parse_snapshot((await _text_of(tab))[0])
    await tab.page.evaluate(DRAW, [[mark.ref, *mark.box] for mark in marks(lines, *VIEW)])
    try:
        return await tab.page.screenshot(timeout=0)
    finally:
        with suppress(playwright_error()):
            await tab.page.evaluate(ERASE)


# --- the tools

NAVIGATE = TypedTool(
    "browser_navigate",
    "Open a page in a browser and see what is on it: title, text, and elements with refs such as [ref=e12] for "
    "browser_click and browser_type. The browser keeps cookies and tabs until the task ends; it runs beside the "
    "sandbox, so servers started by terminal cannot be reached by it unless private addresses are allowed. For mere "
    "reading web_extract is quicker.",
    NavigateArguments,
    navigate,
)
SNAPSHOT = TypedTool(
    "browser_snapshot",
    "See the current page as text, with refs of its elements. Long pages are cut around the part in view: "
    "browser_scroll moves it. Dialogs that came up meanwhile are listed; they were accepted.",
    SnapshotArguments,
    snapshot,
)
CLICK = TypedTool(
    "browser_click",
    "Click an element of the current page by its ref. A new tab becomes the current one; a file that comes is saved in "
    "the sandbox and named in the result.",
    ClickArguments,
    click,
)
TYPE = TypedTool(
    "browser_type",
    "Fill a field of the current page by its ref (what it held is replaced), or choose an option of a selection list.",
    TypeArguments,
    type_text,
)
SCROLL_PAGE = TypedTool("browser_scroll", "Scroll the current page up or down.", ScrollArguments, scroll)
BACK = TypedTool(
    "browser_back",
    "Go back to the page before the current one; from the first page of a new tab, to the tab it came from.",
    BackArguments,
    back,
)
PRESS = TypedTool(
    "browser_press",
    "Press a key where the focus is, such as Enter in a field that was filled.",
    PressArguments,
    press,
)
GET_IMAGES = TypedTool(
    "browser_get_images",
    "List the pictures of the current page with address, text and size.",
    ImagesArguments,
    get_images,
)
CONSOLE = TypedTool(
    "browser_console",
    "Read what the page wrote to its console and which JavaScript errors there were, or evaluate an expression in it.",
    ConsoleArguments,
    console,
)
VISION = TypedTool(
    "browser_vision",
    "Take a picture of the current view and have a question about it answered by a model that sees. For layout, "
    "charts, captchas: what a snapshot does not tell. The picture is saved in the sandbox.",
    VisionArguments,
    vision,
)
