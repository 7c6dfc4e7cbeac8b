"""The connection to the Docker engine: one client per event loop, its errors, its streams."""

import asyncio
import ssl
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from tools.environments.docker_host import not_an_engine
from tools.environments.docker_images import Misread, object_of
from tools.environments.ending import uninterrupted
from tools.environments.script import KILL
from tools.errors import EnvironmentLost
from tools.text import one_line

if TYPE_CHECKING:
    from asyncio import WriteTransport as Transport

    from aiodocker import Docker
    from aiodocker.containers import DockerContainer
    from aiodocker.stream import Stream

    Connect = Callable[[], AbstractAsyncContextManager[Docker]]

_KILL_SECONDS = 10.0
# What aiodocker raises of an answer that it cannot read.
_MISREAD = (AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)

# Podman says `container=podman` to every program.
_CHANNEL = "unset container; exec /bin/sh"


class _Shared:
    """A client, made when it is first wanted, and how many use it."""

    def __init__(self) -> None:
        self.users = 0
        self._client: Docker | None = None
        self._making = asyncio.Lock()
        self._stack = AsyncExitStack()
        self.close = self._stack.aclose

    async def client(self, connect: "Connect") -> "Docker":
        """Who is cancelled while it is made leaves it to the next."""
        async with self._making:
            if self._client is None:
                self._client = await self._stack.enter_async_context(connect())
            return self._client


class Clients:
    """One client per event loop, shared by all who use it at the same time and closed by the last."""

    def __init__(self, connect: "Connect") -> None:
        self._connect = connect
        self._info: Mapping[str, Any] = {}
        self._open: dict[asyncio.AbstractEventLoop, _Shared] = {}

    @asynccontextmanager
    async def use(self) -> AsyncIterator["Docker"]:
        """The client of the running loop. Raises SetupFailed, EnvironmentLost."""
        loop = asyncio.get_running_loop()
        shared = self._open.setdefault(loop, _Shared())
        shared.users += 1
        try:
            yield await shared.client(self._connect)
        finally:
            shared.users -= 1
            if not shared.users:
                del self._open[loop]
                await uninterrupted(shared.close(), 5)

    async def info(self, client: "Docker", *, again: bool = False) -> Mapping[str, Any]:
        """The engine's `info`, asked once: it takes 15 ms, and 300 of podman. Raises what `engine_errors` knows."""
        if again or not self._info:
            info = object_of(await client.system.info())
            if not {"MemoryLimit", "OSType"} & info.keys():  # any engine says so much of itself
                raise Misread
            self._info = info
        return self._info


class EngineStream:
    """The stdin and stdout of a process in a container, over one of the engine's hijacked connections.

    What it prints on stderr is kept to explain a process that did not start.
    """

    def __init__(self, stream: "Stream") -> None:
        self.ended = False
        self._stream = stream
        self._complaint = b""

    async def connect(self) -> None:
        """Takes the connection over."""
        await self._stream.__aenter__()

    async def lines_before(self, last: str) -> list[str]:
        """The lines printed before the line `last`. Raises EnvironmentLost if that does not come."""
        answer = b""
        while not answer.endswith(f"{last}\n".encode()):
            chunk = await self.read()
            if not chunk:
                raise EnvironmentLost(one_line(self._complaint.decode("utf-8", "replace")) or "its shell has ended")
            answer += chunk
        return answer.decode("utf-8", "replace").splitlines()[:-1]

    async def write(self, data: bytes) -> None:
        """To the process's stdin. Raises EnvironmentLost if nobody reads there any more."""
        try:
            await self._stream.write_in(data)
        except (OSError, RuntimeError, AssertionError):  # AssertionError: as in `close`
            raise EnvironmentLost("the container or its engine is gone") from None

    async def end_input(self) -> None:
        """Its stdin ends once what was written is read."""
        response = self._stream._resp  # aiodocker has no half-close of its own
        if response and response.connection and (transport := response.connection.transport):
            _half_close(transport)

    async def read(self) -> bytes:
        """The next bytes of its stdout; b"" at the end."""
        import aiohttp  # noqa: PLC0415 - heavy, imported when used

        while not self.ended:
            try:
                message = await self._stream.read_out()
            except (aiohttp.ClientError, OSError):
                message = None
            if message is None:
                self.ended = True
            elif message.stream == 2:
                self._complaint = (self._complaint + message.data)[-500:]
            elif message.data:
                return message.data
        return b""

    async def close(self) -> None:
        """Ends the connection, and the process's stdin with it."""
        with suppress(AssertionError):  # aiodocker's word for a connection that has ended
            await self._stream.close()


class EngineChannel(EngineStream):
    """A shell in a container. `ending` is set when the container is about to be removed, with all that runs in it."""

    def __init__(self, container: "DockerContainer", stream: "Stream", ending: asyncio.Event) -> None:
        super().__init__(stream)
        self._container = container
        self._ending = ending
        self._pid = ""

    async def greet(self) -> None:
        """Learns the shell's process id. Raises EnvironmentLost if there is no shell."""
        await self.write(b"echo $$; echo ready\n")
        (self._pid,) = await self.lines_before("ready")

    async def close(self) -> None:
        """Ends the shell and what it waits for: the end of a connection would end neither."""
        pid, self._pid = self._pid, ""
        try:
            if pid and not self.ended and not self._ending.is_set():
                await self._kill(pid)
        finally:
            await super().close()

    async def _kill(self, pid: str) -> None:
        with suppress(EnvironmentLost), engine_errors():
            async with asyncio.timeout(_KILL_SECONDS):
                execution = await self._container.exec(["/bin/sh", "-c", KILL, "sh", pid])
                await execution.start(detach=True)


async def open_channel(container: "DockerContainer", ending: asyncio.Event) -> EngineChannel:
    """One more shell in the container."""
    execution = await container.exec(["/bin/sh", "-c", _CHANNEL], stdin=True, stdout=True, stderr=True)
    channel = EngineChannel(container, execution.start(), ending)
    try:
        await channel.connect()
        await channel.greet()
    except BaseException:
        await channel.close()
        raise
    return channel


def _half_close(transport: "Transport") -> None:
    """Ends what we send, not what we hear."""
    if transport.can_write_eof():
        transport.write_eof()
        return
    # TLS says it by an alert, after which the other side may go on; asyncio has no word for it.
    protocol: Any = getattr(transport, "_ssl_protocol", None)
    with suppress(ssl.SSLError, AttributeError):  # SSLError: the other side's own end is not there yet
        try:
            protocol._sslobj.unwrap()
        finally:
            protocol._process_outgoing()


class NotAnEngine(EnvironmentLost):
    """What answers at the engine's address is none, or something between here and there answered for it."""


@contextmanager
def engine_errors(name: str = "docker") -> Iterator[None]:
    """Whatever the engine `name` answers, or that it does not, as EnvironmentLost in one line: NotAnEngine for what no
    engine says."""
    import aiohttp  # noqa: PLC0415 - heavy, imported when used
    from aiodocker import DockerError  # noqa: PLC0415 - an optional package, imported when used

    try:
        yield
    except TimeoutError:
        raise EnvironmentLost(f"{name} did not answer in time") from None
    except DockerError as error:
        if not _is_said(error.message):
            raise NotAnEngine(not_an_engine(name)) from None
        raise EnvironmentLost(f"{name}: {one_line(error.message)}") from None
    except aiohttp.ClientResponseError:  # it is no HTTP
        raise NotAnEngine(not_an_engine(name)) from None
    except (aiohttp.ClientError, OSError) as error:
        raise EnvironmentLost(f"{name}: {one_line(str(error)) or type(error).__name__}") from None
    except (Misread, *_MISREAD) as error:
        if not isinstance(error, Misread) and not _is_aiodockers(error):
            raise  # a fault of our own
        raise NotAnEngine(not_an_engine(name)) from None


def _is_said(message: object) -> bool:
    """Whether an engine words its errors so: not as an object, a page, or nothing at all."""
    return isinstance(message, str) and bool(message.strip()) and not message.lstrip().startswith("<")


def _is_aiodockers(error: BaseException) -> bool:
    """Whether it was raised while aiodocker made sense of an answer."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__", "").split(".")[0] == "aiodocker" for frame in frames)
