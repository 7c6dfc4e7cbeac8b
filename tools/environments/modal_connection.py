"""The connection to Modal's service: the SDK's client, its errors, its streams.

The SDK does its work in a thread and an event loop of its own; what we await of it (`.aio`) is done there. Its client
belongs to the process: it is closed when Python ends.
"""

import asyncio
import math
from collections.abc import Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import TYPE_CHECKING

from tools.environments.script import KILL
from tools.errors import EnvironmentLost, SandboxRefused, SetupFailed, SetupTimeout
from tools.text import one_line

if TYPE_CHECKING:
    from modal import Client, Sandbox
    from modal.container_process import ContainerProcess

MISSING_PACKAGE = "modal needs the package modal: pip install -e '.[modal]'"
REFUSED = "modal takes no such token: run `modal token new`, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"
UNREACHED = (
    "modal cannot be reached: is there a network here, MODAL_SERVER_URL unset or right, and is the service up"
    " (https://status.modal.com)?"
)
_CONNECT_SECONDS = 10.0
_KILL_SECONDS = 5.0
_LEAVE_SECONDS = 1.0
_SILENT_SECONDS = 30.0
_ANSWER_SECONDS = 15.0
_PIECE = 1 << 20
_READ = 65_536
_HELD = 16  # pieces that were read and nobody has asked for yet
# What a shell says of itself and of its sandbox before it listens. The service's own variables are not for commands;
# `ulimit` holds only where the sandbox's kernel applies it to this user.
_GREETING = r"""
{ ulimit -u %(pids)d || ulimit -p %(pids)d; } 2>/dev/null
eval "$(export -p | while read -r w n; do case $n in MODAL_[A-Z]*) echo "unset ${n%%%%=*}";; esac; done)"
h=${HOME:-/}; [ -d "$h" ] || h=/
t=/tmp; [ -d "$t" ] || t=/
p=/; [ -w / ] || p=$t/
printf '%%s\n' "$$" "$h" "$t" "$p" "${USER:-root}" ready
unset h t p w n
exec /bin/sh
"""


@contextmanager
def service_errors() -> Iterator[None]:
    """Whatever the service answers, or that it does not, as EnvironmentLost in one line; its cause is the SDK's."""
    from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError  # noqa: PLC0415 - as in `connected`
    from modal.exception import Error  # noqa: PLC0415 - as in `connected`

    try:
        yield
    except TimeoutError as error:
        raise EnvironmentLost("modal did not answer in time") from error
    except (Error, GRPCError, ProtocolError, StreamTerminatedError, OSError) as error:
        raise EnvironmentLost(f"modal: {one_line(str(error)) or type(error).__name__}") from error


@contextmanager
def start_errors() -> Iterator[None]:
    """What a sandbox did not start for: SandboxRefused, SetupTimeout, SetupFailed."""
    from modal.exception import AuthError, PermissionDeniedError  # noqa: PLC0415 - as in `connected`

    try:
        with service_errors():
            yield
    except EnvironmentLost as lost:
        if isinstance(lost.__cause__, AuthError | PermissionDeniedError):
            raise SandboxRefused(f"{REFUSED} ({one_line(str(lost.__cause__))})") from None
        if isinstance(lost.__cause__, TimeoutError):
            raise SetupTimeout("modal did not answer in time") from None
        if isinstance(lost.__cause__, _broken()):
            raise SetupFailed(f"{UNREACHED} ({one_line(str(lost.__cause__)) or 'connection lost'})") from None
        raise SetupFailed(str(lost)) from None


def _broken() -> tuple[type[Exception], ...]:
    """What says that no service of Modal's is at the other end, or no longer."""
    from grpclib.exceptions import ProtocolError, StreamTerminatedError  # noqa: PLC0415 - as in `connected`
    from modal.exception import ConnectionError as NotConnected  # noqa: PLC0415 - as in `connected`

    return (ProtocolError, StreamTerminatedError, NotConnected, OSError)


async def connected(seconds: float = math.inf) -> "Client":
    """The process's client, with the token of the SDK's variables or file, within `seconds` if that is less than usual.
    Raises SetupFailed."""
    try:
        import modal  # noqa: PLC0415 - an optional package and slow, imported when used
    except ImportError:
        raise SandboxRefused(MISSING_PACKAGE) from None
    with start_errors():
        try:
            async with asyncio.timeout(min(seconds, _CONNECT_SECONDS)):  # it would try for a minute
                return await modal.Client.from_env.aio()
        except TimeoutError:
            raise SetupFailed(UNREACHED) from None


class State:
    """What all channels of a sandbox know of it."""

    def __init__(self) -> None:
        self.ending = False  # it is about to be removed, with all that runs in it
        self.slow = False  # the service was too long about something
        self.lost = False  # the service did not answer: nothing more is asked of it

    def end(self) -> None:
        """It is about to be removed."""
        self.ending = True

    def lose(self) -> None:
        """The service did not answer."""
        self.lost = self.slow = True

    def refuse_lost(self) -> None:
        """Raises EnvironmentLost if it did not."""
        if self.lost:
            raise EnvironmentLost("modal does not answer")


class ModalChannel:
    """A shell in a sandbox: a process of the service's `exec`, which keeps what it prints until it is read."""

    def __init__(self, sandbox: "Sandbox", process: "ContainerProcess[bytes]", state: State) -> None:
        self._sandbox = sandbox
        self._process = process
        self._state = state
        self._pid = ""
        self._ended = self._input_ended = False
        self._writing = asyncio.Lock()
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue(_HELD)
        self._pump = asyncio.create_task(self._pumped())

    async def _pumped(self) -> None:
        """Reads as the SDK's stream wants to be read: by one task, never interrupted but at its end."""
        try:
            with service_errors():
                async with aclosing(aiter(self._process.stdout)) as stream:
                    async for data in stream:
                        for start in range(0, len(data), _READ):
                            await self._pieces.put(data[start : start + _READ])
        except EnvironmentLost:
            pass  # its end
        finally:
            self._ended = True
            with suppress(asyncio.QueueFull):  # then nobody is waiting
                self._pieces.put_nowait(b"")

    async def greeting(self) -> list[str]:
        """The shell's own answers: home, folder for temporary files, prefix of private ones, user. Raises
        EnvironmentLost if there is no shell."""
        said = b""
        while not said.endswith(b"\nready\n"):
            data = await self.read()
            if not data:
                raise EnvironmentLost(one_line(said.decode(errors="replace")) or "its shell has ended")
            said += data
        self._pid, *facts = said.decode(errors="replace").splitlines()[-6:-1]
        return facts

    async def write(self, data: bytes) -> None:
        """See `Channel.write`."""
        async with self._writing:
            self._state.refuse_lost()
            if self._ended or self._input_ended:
                raise EnvironmentLost("the sandbox's shell has ended")
            with service_errors():
                for start in range(0, len(data), _PIECE):
                    self._process.stdin.write(data[start : start + _PIECE])
                    await self._sent()

    async def end_input(self) -> None:
        """See `Channel.end_input`."""
        async with self._writing:
            if self._ended or self._input_ended:
                return
            self._input_ended = True
            with service_errors():
                self._process.stdin.write_eof()
                await self._sent()

    async def _sent(self) -> None:
        """A program may let its input wait, the service may not."""
        sending = asyncio.ensure_future(self._process.stdin.drain.aio())
        sending.add_done_callback(_heard)
        try:
            while not sending.done():
                await asyncio.wait({sending}, timeout=_SILENT_SECONDS)
                if not sending.done():
                    await self._asked()
            await sending
        finally:
            sending.cancel()

    async def _asked(self) -> None:
        """Whether the shell is still there. Raises what `service_errors` knows, and EnvironmentLost."""
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                code = await self._process.poll.aio()
        except TimeoutError:
            self._state.lose()
            raise
        if code is not None:
            raise EnvironmentLost("the sandbox's shell has ended")

    async def read(self) -> bytes:
        """See `Channel.read`. A silent shell may be one whose service is gone: that is asked now and then."""
        while not self._ended or not self._pieces.empty():
            try:
                async with asyncio.timeout(_SILENT_SECONDS):
                    return await self._pieces.get()
            except TimeoutError:
                pass
            try:
                with service_errors():
                    await self._asked()
            except EnvironmentLost:
                self._ended = True
        return b""

    async def close(self) -> None:
        """Ends the shell and what it waits for: the service ends neither with the connection."""
        pid, self._pid = self._pid, ""
        try:
            if pid and not (self._ended or self._state.ending or self._state.lost):
                await self._kill(pid)
        finally:
            self._pump.cancel()
            await asyncio.wait({self._pump}, timeout=_LEAVE_SECONDS)

    async def _kill(self, pid: str) -> None:
        with suppress(EnvironmentLost), service_errors():
            try:
                async with asyncio.timeout(_KILL_SECONDS):
                    killer = await started(self._sandbox, KILL + "echo", "sh", pid)
                    async with aclosing(aiter(killer.stdout)) as said:
                        await anext(said, b"")
            except TimeoutError:
                self._state.slow = True


def _heard(done: "asyncio.Future[None]") -> None:
    """Nobody may be left to ask how it ended."""
    if not done.cancelled():
        done.exception()


async def started(sandbox: "Sandbox", *words: str) -> "ContainerProcess[bytes]":
    """A shell with a text to run."""
    from modal.stream_type import StreamType  # noqa: PLC0415 - as in `connected`

    return await sandbox.exec.aio("/bin/sh", "-c", *words, stderr=StreamType.DEVNULL, text=False)


async def open_channel(sandbox: "Sandbox", pids: int, state: State) -> tuple[ModalChannel, list[str]]:
    """One more shell in the sandbox, and its greeting."""
    channel = ModalChannel(sandbox, await started(sandbox, _GREETING % {"pids": pids}), state)
    try:
        return channel, await channel.greeting()
    except BaseException:
        await channel.close()
        raise
