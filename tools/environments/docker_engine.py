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

MISSING_PACKAGE = "docker needs the package aiodocker: pip install 'batch-runner[docker]'"
NOT_RUNNING = "docker is not running: start it (systemctl start docker, or Docker Desktop), or set DOCKER_HOST"
_KILL_SECONDS = 10.0
# Kills the children of process $1, then process $2. Detaching from a shell ends neither.
_KILL = """\
for d in /proc/[0-9]*; do
  while read -r k v _; do
    case $k in PPid:) [ "$v" != "$1" ] || kill -KILL "${d#/proc/}"; break;; esac
  done <"$d/status"
done 2>/dev/null
[ -z "$2" ] || kill -KILL "$2"
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


class EngineChannel:
    """The stdin and stdout of a shell in a container, over one of the engine's hijacked connections.

    What it prints on stderr is kept to explain a shell that did not start. `main` is the container's main process:
    it cannot end before the container does, so to close it is to free it from what it runs and to leave it alone.
    `ending` is set when the container is about to be removed, and all in it.
    """

    def __init__(
        self, container: "DockerContainer", stream: "Stream", ending: asyncio.Event, *, main: bool = False
    ) -> None:
        self.complaint = b""
        self._container = container
        self._stream = stream
        self._ending = ending
        self._main = main
        self._pid = ""
        self._ended = False
        self._closing: asyncio.Task[None] | None = None

    async def greet(self, questions: str) -> list[str]:
        """The lines that these commands print. Raises EnvironmentLost if no shell answers."""
        await self.write(f"{questions}\necho $$; echo ready\n".encode())
        answer = b""
        while not answer.endswith(b"\nready\n"):
            chunk = await self.read()
            if not chunk:
                raise EnvironmentLost(one_line(self.complaint.decode("utf-8", "replace")) or "its shell has ended")
            answer += chunk
        *lines, self._pid, _ = answer.decode("utf-8", "replace").splitlines()
        return lines

    async def write(self, data: bytes) -> None:
        """To the shell's stdin. Raises EnvironmentLost if nobody reads there any more."""
        try:
            await self._stream.write_in(data)
        except (OSError, RuntimeError, AssertionError):  # AssertionError: aiodocker's word for a connection that ended
            raise EnvironmentLost("the container or the docker engine is gone") from None

    async def read(self) -> bytes:
        """The next bytes of its stdout; b"" at the end."""
        import aiohttp  # noqa: PLC0415 - heavy, imported when used

        while True:
            try:
                message = await self._stream.read_out()
            except (aiohttp.ClientError, OSError):
                return b""
            if message is None:
                self._ended = True
                return b""
            if message.stream == 2:
                self.complaint = (self.complaint + message.data)[-500:]
            elif message.data:
                return message.data

    async def end_input(self) -> None:
        """Its stdin ends once what was written is read; the main shell's stays open."""
        response = self._stream._resp  # aiodocker has no half-close of its own
        if not self._main and response and response.connection and (transport := response.connection.transport):
            transport.write_eof()

    async def close(self) -> None:
        """Ends the shell and what it waits for."""
        if not (self._closing or self._ended or self._ending.is_set()):
            self._closing = asyncio.ensure_future(self._drain())
            with suppress(EnvironmentLost), engine_errors():
                await self._kill()
        if not self._main:
            await self.disconnect()

    async def _kill(self) -> None:
        shell = "" if self._main else self._pid
        async with asyncio.timeout(_KILL_SECONDS):
            execution = await self._container.exec(["/bin/sh", "-c", _KILL, "sh", self._pid, shell])
            await execution.start(detach=True)

    async def _drain(self) -> None:
        while await self.read():
            pass

    async def disconnect(self) -> None:
        """Ends the connection. The shell's stdin ends with it, and after the main shell's the container."""
        if self._closing:
            self._closing.cancel()
            await asyncio.wait({self._closing})
        await self._stream.close()


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
