"""The connection to the Docker engine: one client per event loop, its errors, its streams."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from tools.environments.docker_images import one_line
from tools.errors import EnvironmentLost, SetupFailed

if TYPE_CHECKING:
    from aiodocker import Docker
    from aiodocker.containers import DockerContainer
    from aiodocker.stream import Stream

MISSING_PACKAGE = "docker needs the package aiodocker: pip install -e '.[docker]'"
NOT_RUNNING = "docker is not running: start it (systemctl start docker, or Docker Desktop), or set DOCKER_HOST"
_KILL_SECONDS = 10.0
# Kills the children of process $1, then itself.
_KILL = """\
for d in /proc/[0-9]*; do
  while read -r k v _; do
    case $k in PPid:) [ "$v" != "$1" ] || kill -KILL "${d#/proc/}"; break;; esac
  done <"$d/status"
done 2>/dev/null
kill -KILL "$1"
"""


def connect() -> "Docker":
    """A client of the engine that DOCKER_HOST or the docker context names, for any number of streams at once.

    Raises SetupFailed where there is none.
    """
    try:
        import aiodocker  # noqa: PLC0415 - an optional package, imported when used
    except ImportError:
        raise SetupFailed(MISSING_PACKAGE) from None
    try:
        client = aiodocker.Docker()
    except (AssertionError, ValueError, aiodocker.DockerError) as error:  # AssertionError: there is no socket to guess
        detail = one_line(str(error))
        raise SetupFailed(f"{NOT_RUNNING} ({detail})" if detail else NOT_RUNNING) from None
    client.connector._limit = 0  # each channel holds a connection; aiohttp's 100 would be a dead end
    return client


class _Shared:
    """A client, how many use it, and what its engine can do (once asked)."""

    def __init__(self, client: "Docker") -> None:
        self.client = client
        self.users = 0
        self.info: Mapping[str, Any] = {}


class Clients:
    """One client per event loop, shared by all who use it at the same time and closed by the last."""

    def __init__(self) -> None:
        self._open: dict[asyncio.AbstractEventLoop, _Shared] = {}

    @asynccontextmanager
    async def use(self) -> AsyncIterator["Docker"]:
        """The client of the running loop. Raises SetupFailed."""
        loop = asyncio.get_running_loop()
        shared = self._open.get(loop) or self._open.setdefault(loop, _Shared(connect()))
        shared.users += 1
        try:
            yield shared.client
        finally:
            shared.users -= 1
            if not shared.users:
                del self._open[loop]
                await uninterrupted(shared.client.close(), 5)

    async def info(self, client: "Docker") -> Mapping[str, Any]:
        """The engine's `info`, asked once a client: it takes 15 ms."""
        shared = self._open[asyncio.get_running_loop()]
        shared.info = shared.info or await client.system.info()
        return shared.info


async def uninterrupted(work: Coroutine[Any, Any, object], seconds: float) -> None:
    """Runs `work` to its end or for `seconds`, even if this task is cancelled meanwhile: that comes after."""
    task = asyncio.ensure_future(asyncio.wait_for(work, seconds))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    fault = None if task.cancelled() else task.exception()
    if cancelled:
        raise cancelled
    if fault and not isinstance(fault, TimeoutError):
        raise fault


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
            raise EnvironmentLost("the container or the docker engine is gone") from None

    async def end_input(self) -> None:
        """Its stdin ends once what was written is read."""
        response = self._stream._resp  # aiodocker has no half-close of its own
        if response and response.connection and (transport := response.connection.transport):
            transport.write_eof()

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
                execution = await self._container.exec(["/bin/sh", "-c", _KILL, "sh", pid])
                await execution.start(detach=True)


async def open_channel(container: "DockerContainer", ending: asyncio.Event) -> EngineChannel:
    """One more shell in the container."""
    execution = await container.exec(["/bin/sh"], stdin=True, stdout=True, stderr=True)
    channel = EngineChannel(container, execution.start(), ending)
    try:
        await channel.connect()
        await channel.greet()
    except BaseException:
        await channel.close()
        raise
    return channel


@contextmanager
def engine_errors() -> Iterator[None]:
    """Whatever the engine answers, or that it does not, as EnvironmentLost in one line."""
    import aiohttp  # noqa: PLC0415 - heavy, imported when used
    from aiodocker import DockerError  # noqa: PLC0415 - an optional package, imported when used

    try:
        yield
    except TimeoutError:
        raise EnvironmentLost("docker did not answer in time") from None
    except DockerError as error:
        raise EnvironmentLost(f"docker: {one_line(error.message)}") from None
    except (aiohttp.ClientError, OSError) as error:
        raise EnvironmentLost(f"docker: {one_line(str(error)) or type(error).__name__}") from None
