"""Sessions with MCP servers, through the official SDK: the run lists each server's tools once, before it starts; a task
has sessions of its own, opened on first use and closed at its end, so that no task sees another's state."""

import asyncio
import importlib.util
import logging
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from msgspec import Struct

from tools.base import ToolContext
from tools.errors import ToolError, UsageProblem
from tools.mcp.servers import (
    HIDDEN,
    ListedTool,
    Listing,
    McpServer,
    filled,
    listed_tools,
    refuse_equal_names,
    secrets_of,
)

if TYPE_CHECKING:
    from httpx2 import Response
    from mcp import Client
    from mcp.types import CallToolResult, ListToolsResult

T = TypeVar("T")

MISSING_PACKAGE = "MCP servers need the package mcp: pip install -e '.[mcp]'"
CLOSE_SECONDS = 8.0  # the SDK waits 2 s for a server whose stdin was closed, 2 s after SIGTERM, 2 s after SIGKILL
PAGES = 100
START_SECONDS = 30.0  # that a server has at least to start, whatever a call may take
_TOLD_OF_STDERR = 300  # characters
_SHORTEST_SECRET = 6
_LOST_CODE, _LOST_TEXT = -32000, "Session terminated"  # how the SDK says that a connection or a session is no more
_GUARD = str(Path(__file__).with_name("guard.py"))


class Session:
    """One connection. The SDK's task groups have to be entered and left in one task, which is `_task` here; calls may
    come from any."""

    def __init__(
        self, server: McpServer, environ: Mapping[str, str], *, protocol: str = "", errors: TextIO | None = None
    ) -> None:
        self.lost = False  # by what a call has found; a new one is needed
        self._refusal = ""  # the last answer by which an HTTP server refused a request
        self._closing = asyncio.Event()
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(server, environ, protocol, errors))

    async def _hold(self, server: McpServer, environ: Mapping[str, str], protocol: str, errors: TextIO | None) -> None:
        async with _opened(filled(server, environ), environ, protocol, errors, self._note) as client:
            if protocol:  # known from before: nothing was asked yet, so the server may still be starting
                await client.list_tools()  # by which a call's result is held against its schema
            self._ready.set_result(client)
            await self._closing.wait()

    async def _note(self, response: "Response") -> None:
        self._refusal = f" (HTTP {response.status_code} {response.reason_phrase})" if response.is_error else ""

    async def client(self) -> "Client":
        """Once it is connected. Raises ToolError."""
        ends: list[asyncio.Future[Any]] = [self._ready, self._task]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            self.lost = True
            raise ToolError(f"it cannot be reached: {_end_of(self._task)}{self._refusal}")
        return self._ready.result()

    async def call(self, name: str, arguments: dict[str, Any]) -> "CallToolResult":
        """The result, as the server gives it. Raises ToolError."""
        return await self.ask(lambda client: client.call_tool(name, arguments))

    async def ask(self, what: "Callable[[Client], Coroutine[Any, Any, T]]") -> T:
        """The answer to a request. Raises ToolError, whatever the SDK makes of what the server does."""
        call = asyncio.create_task(what(await self.client()))
        call.add_done_callback(_seen)
        try:
            await asyncio.wait({call, self._task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not call.done():
                call.cancel()
        if call.done() and not call.cancelled() and call.exception() is None:
            return call.result()
        ended = call if call.done() else self._task
        self.lost = self._task.done() or _is_loss(ended)
        anew = ": it has ended; the next call starts it anew" if self.lost else ""
        raise ToolError(f"{_end_of(ended)}{self._refusal}{anew}")

    def give_up(self) -> None:
        """A call ran out of time. If it is not even connected, the next one tries anew."""
        self.lost = self.lost or not self._ready.done()

    def begin_to_close(self) -> None:
        """The connection, and a server that is our own process, end in `_task` from here, which nobody has to await;
        what is not connected yet is given up."""
        self._closing.set()
        if not self._ready.done():
            self._task.cancel()

    async def close(self) -> None:
        """Ends it within a few seconds, whatever the server does."""
        self.begin_to_close()
        await asyncio.wait({self._task}, timeout=CLOSE_SECONDS)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=1)
        _seen(self._task)


def _seen(task: "asyncio.Task[Any]") -> None:
    """So that nobody complains of an exception that nobody waits for any more."""
    if task.done() and not task.cancelled():
        task.exception()


def _end_of(task: "asyncio.Task[Any]") -> str:
    """How a task ended, in a line."""
    error = None if task.cancelled() else task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is None:
        return "the connection was closed"
    text = " ".join(str(error).split())
    if isinstance(error, UsageProblem) or type(error).__name__ == "MCPError":
        return text or "an error without a text"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_loss(task: "asyncio.Task[Any]") -> bool:
    error = None if task.cancelled() else task.exception()
    return getattr(error, "code", 0) == _LOST_CODE or str(error) == _LOST_TEXT


@asynccontextmanager
async def _opened(
    server: McpServer,
    environ: Mapping[str, str],
    protocol: str,
    errors: TextIO | None,
    note: "Callable[[Response], Awaitable[None]]",
) -> AsyncIterator["Client"]:
    import httpx2  # noqa: PLC0415 - a second, and only for those who have servers
    from mcp import Client, StdioServerParameters, stdio_client  # noqa: PLC0415 - as above
    from mcp.client.streamable_http import streamable_http_client  # noqa: PLC0415 - as above

    logging.getLogger("mcp").setLevel(logging.CRITICAL)  # whatever it would say is said by how a call ends
    transport: Any
    async with AsyncExitStack() as stack:
        if server.url:
            timeout = httpx2.Timeout(30.0, read=None)  # how long a call may take is for whoever calls
            http = httpx2.AsyncClient(headers=server.headers, timeout=timeout, event_hooks={"response": [note]})
            transport = streamable_http_client(server.url, http_client=await stack.enter_async_context(http))
        else:
            program, *arguments = _guarded(server.words)
            variables = {"LANG": environ.get("LANG", "C.UTF-8"), **server.env}
            parameters = StdioServerParameters(
                command=program, args=arguments, env=variables, cwd=server.cwd or None, encoding_error_handler="replace"
            )
            transport = stdio_client(parameters, errlog=errors or stack.enter_context(_nowhere()))
        yield await stack.enter_async_context(Client(transport, mode=_mode(protocol), cache=None))


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")


def _guarded(words: tuple[str, ...]) -> tuple[str, ...]:
    """The command, so that nothing of it is left when this process is gone."""
    if not sys.platform.startswith("linux"):
        return words
    return (sys.executable, "-I", "-S", _GUARD, str(os.getpid()), *words)


def _mode(protocol: str) -> str:
    """The SDK's: a version that was agreed on before needs no second finding out."""
    from mcp.types.version import MODERN_PROTOCOL_VERSIONS  # noqa: PLC0415 - as above

    if not protocol:
        return "auto"
    return protocol if protocol in MODERN_PROTOCOL_VERSIONS else "legacy"


# --- before the run


class _Looked(Struct, frozen=True, kw_only=True):
    tools: tuple[ListedTool, ...] = ()
    protocol: str = ""
    lack: str = ""


def starts_within(seconds: float) -> float:
    """The time limit of a server's start, where a call has so many seconds."""
    return max(seconds, START_SECONDS)


async def look(servers: Mapping[str, McpServer], environ: Mapping[str, str], seconds: float) -> Listing:
    """Connects to each server once, all at a time, and lists its tools. `seconds`: what a call has where the server has
    no time limit of its own; this has START_SECONDS at least. UsageProblem for tools that cannot be named as asked."""
    if importlib.util.find_spec("mcp") is None:
        return Listing(lacking=dict.fromkeys(servers, MISSING_PACKAGE))
    looks = (
        _look_at(name, server, environ, starts_within(server.timeout or seconds)) for name, server in servers.items()
    )
    found = dict(zip(servers, await asyncio.gather(*looks), strict=True))
    tools = tuple(tool for each in found.values() for tool in each.tools)
    refuse_equal_names(tools)
    return Listing(
        tools=tools,
        protocols={name: each.protocol for name, each in found.items() if not each.lack},
        lacking={name: each.lack for name, each in found.items() if each.lack},
    )


async def _look_at(name: str, server: McpServer, environ: Mapping[str, str], seconds: float) -> _Looked:
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        session = Session(server, environ, errors=errors)
        try:
            async with asyncio.timeout(seconds):
                found = await _list(session)
                if found:
                    protocol = (await session.client()).protocol_version
                    return _Looked(tools=listed_tools(name, server.tools, found), protocol=protocol)
                lack = "it has no tools"
        except TimeoutError:
            lack = f"no answer within {seconds:g} s"
        except ToolError as error:
            lack = str(error)
        except UsageProblem as problem:
            raise UsageProblem(f"mcp_servers: {name}: {problem}") from problem
        finally:
            await session.close()
        return _Looked(lack=_without_values(f"MCP server {name}: {lack}{_last_words(errors)}", server, environ))


async def _list(session: Session) -> list[tuple[str, str, Any]]:
    """Name, description and schema of all tools."""
    found: list[tuple[str, str, Any]] = []
    cursor = None
    for _ in range(PAGES):
        page = await session.ask(partial(_page, cursor))
        found += [(tool.name, tool.description or tool.title or tool.name, tool.input_schema) for tool in page.tools]
        cursor = page.next_cursor
        if cursor is None:
            break
    return found


async def _page(cursor: str | None, client: "Client") -> "ListToolsResult":
    return await client.list_tools(cursor=cursor)


def _last_words(errors: TextIO) -> str:
    """What a server that failed wrote to its stderr last."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - 4 * _TOLD_OF_STDERR))
    text = " ".join(errors.read().split())
    return f" (it said: {text[-_TOLD_OF_STDERR:]})" if text else ""


def _without_values(text: str, server: McpServer, environ: Mapping[str, str]) -> str:
    """What a server says of itself may hold its keys."""
    try:
        told = filled(server, environ)
    except UsageProblem:
        return text
    keys = (secret.text for secret in secrets_of(told))
    for value in sorted((*told.env.values(), *told.headers.values(), *keys), key=len, reverse=True):
        for secret in (value, value.rpartition(" ")[2]):
            if len(secret) >= _SHORTEST_SECRET:
                text = text.replace(secret, HIDDEN)
    return text


# --- while a task runs


class TaskSessions:
    """A task's sessions by their servers' names."""

    def __init__(self) -> None:
        self.known_to_task = False
        self._open: dict[str, Session] = {}
        self._ending: list[Session] = []

    @classmethod
    def of(cls, context: ToolContext) -> "TaskSessions":
        """Those of this task; closed with it."""
        sessions = context.memory(cls)
        if not sessions.known_to_task:
            sessions.known_to_task = True
            context.at_end(sessions.close)
        return sessions

    def session(self, name: str, server: McpServer, environ: Mapping[str, str], protocol: str) -> Session:
        """The one with a server: a new one if there is none, or the one before was lost."""
        session = self._open.get(name)
        if session is not None and not session.lost:
            return session
        if session is not None:
            session.begin_to_close()
            self._ending.append(session)
        self._open[name] = Session(server, environ, protocol=protocol)
        return self._open[name]

    async def close(self) -> None:
        """All of them, at once."""
        sessions = [*self._open.values(), *self._ending]
        self._open, self._ending = {}, []
        await asyncio.gather(*(session.close() for session in sessions))
