"""The way of one task's browser into the network: a SOCKS5 server on loopback that goes only where the task may.

All of a browser context's connections go through it, those of redirects, frames, scripts, sockets and downloads too. A
name is resolved and checked here, and the connection goes to the very address that was checked.
"""

import asyncio
import base64
import os
import ssl
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from tools.errors import ToolError
from tools.web.addresses import Resolve, check_name, proxy_for

CONNECT_SECONDS = 15.0
MAX_TRIED = 4  # addresses of one name
_CHUNK = 65_536
_NOTHING = bytes(6)  # the address and port in an answer, which no client reads
_REFUSED, _UNREACHABLE, _UNKNOWN_COMMAND = b"\x02", b"\x04", b"\x07"
_BROWSERS_OWN = {"content-autofill.googleapis.com"}  # it would tell Google of every form; no switch but a long list

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Problem(Struct, frozen=True):
    """A connection that did not come about."""

    host: str
    reason: str


class Gateway:
    """`async with` opens and closes it. `received` counts the bytes that came in; `problems` are the latest ones.

    `addresses` says where a host may be reached and raises ToolError for one that may not be; `proxy` names the proxy
    (http://[user:password@]host:port) that has to be asked for it, "" for none."""

    def __init__(self, addresses: Resolve, proxy: Callable[[str, int], str] = lambda host, port: "") -> None:
        self.received = 0
        self.problems: deque[Problem] = deque(maxlen=50)
        self._addresses = addresses
        self._proxy = proxy
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> str:
        """Its address, as a browser takes it."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"socks5://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """With every connection."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(2 * CONNECT_SECONDS):
                far = await self._connected(reader, writer)
            if far is not None:
                await self._carry((reader, writer), far)
        except (OSError, EOFError, TimeoutError):  # one of the two went away
            pass
        finally:
            writer.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Streams | None:
        """Greets the browser and connects to what it asks for; None, and it is told so, where that cannot be."""
        (methods,) = (await reader.readexactly(2))[1:]
        await reader.readexactly(methods)
        writer.write(b"\x05\x00")
        command, kind = (await reader.readexactly(4))[1::2]
        host, port = await _target(reader, kind)
        answer = _UNKNOWN_COMMAND
        if command == 1:
            try:
                far = await self._dial(host, port)
            except (ToolError, OSError, EOFError, TimeoutError) as error:
                answer = _REFUSED if isinstance(error, ToolError) else _UNREACHABLE
                if host not in _BROWSERS_OWN:
                    self.problems.append(Problem(host, _explained(error)))
            else:
                writer.write(b"\x05\x00\x00\x01" + _NOTHING)
                return far
        writer.write(b"\x05" + answer + b"\x00\x01" + _NOTHING)
        await writer.drain()
        return None

    async def _dial(self, host: str, port: int) -> Streams:
        if host in _BROWSERS_OWN:
            raise ToolError("nobody asked for it")
        if proxy := self._proxy(host, port):
            return await _through(proxy, host, port)
        problem: Exception = OSError("no address")
        for address in (await self._addresses(host, port))[:MAX_TRIED]:
            try:
                return await _open(address, port)
            except (OSError, TimeoutError) as error:
                problem = error
        raise problem

    async def _carry(self, near: Streams, far: Streams) -> None:
        """Bytes both ways, until one side ends."""
        ways = {_task(self._pump(near[0], far[1], counted=False)), _task(self._pump(far[0], near[1], counted=True))}
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            far[1].close()
            await asyncio.wait(ways)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, counted: bool) -> None:
        with suppress(OSError):
            while data := await source.read(_CHUNK):
                self.received += len(data) if counted else 0
                sink.write(data)
                await sink.drain()


def _task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.create_task(work)


async def _target(reader: asyncio.StreamReader, kind: int) -> tuple[str, int]:
    """The host and port of a SOCKS5 request (RFC 1928, section 5)."""
    if kind == 3:
        (length,) = await reader.readexactly(1)
        host = (await reader.readexactly(length)).decode("ascii", "replace").lower().rstrip(".")
    elif kind == 1:
        host = ".".join(map(str, await reader.readexactly(4)))
    else:
        packed = (await reader.readexactly(16)).hex()
        host = ":".join(packed[place : place + 4] for place in range(0, 32, 4))
    return host, int.from_bytes(await reader.readexactly(2))


async def _open(address: str, port: int, *, tls: ssl.SSLContext | None = None) -> Streams:
    async with asyncio.timeout(CONNECT_SECONDS):
        return await asyncio.open_connection(address, port, ssl=tls)


async def _through(proxy: str, host: str, port: int) -> Streams:
    """A tunnel through an HTTP proxy (RFC 9110, section 9.3.6)."""
    parts = urlsplit(proxy)
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    reader, writer = await _open(parts.hostname or "", parts.port or (443 if tls else 80), tls=tls)
    try:
        writer.write(_connect_request(host, port, parts.username, parts.password))
        async with asyncio.timeout(CONNECT_SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
        _check_answer(head)
    except asyncio.LimitOverrunError as error:
        writer.close()
        raise OSError("the proxy does not speak HTTP") from error
    except BaseException:
        writer.close()
        raise
    return reader, writer


def _check_answer(head: bytes) -> None:
    if head.split(None, 2)[1:2] != [b"200"]:
        raise OSError(f"the proxy says {head.splitlines()[0].decode('latin-1')[:100]}")


def proxies(environ: Mapping[str, str], *, allow_private: bool) -> Callable[[str, int], str]:
    """The proxy for a host and port, see `proxy_for`. Where there is one it is the proxy that resolves names: ToolError
    for those that say that they are private."""

    def chosen(host: str, port: int) -> str:
        proxy = proxy_for("https" if port == 443 else "http", host, port, environ)
        if proxy and not allow_private:
            check_name(host)
        return proxy

    return chosen


def _connect_request(host: str, port: int, user: str | None, password: str | None) -> bytes:
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    lines = [f"CONNECT {place} HTTP/1.1", f"Host: {place}"]
    if user is not None:
        pair = f"{unquote(user)}:{unquote(password or '')}"
        lines.append(f"Proxy-Authorization: Basic {base64.b64encode(pair.encode()).decode()}")
    return "\r\n".join([*lines, "", ""]).encode()


def _explained(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        return os.strerror(error.errno)  # what asyncio says names the address alone
    return (str(error) or "it hung up")[:300]
