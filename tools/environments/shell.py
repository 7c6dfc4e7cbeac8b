"""`Environment` over channels: everything a sandbox does is written here once, whatever holds the sandbox."""

import asyncio
import functools
import itertools
import posixpath
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from tools.environments import script
from tools.environments.base import CommandResult, Entry, EnvironmentSpec
from tools.environments.channel import Channel, OpenChannel
from tools.environments.channels import ChannelEnded, Channels, Reply, new_nonce
from tools.environments.output import BoundedText, says_full
from tools.environments.process import ShellProcess
from tools.errors import EnvironmentLost, SandboxRefused, SetupFailed, ToolError

TIMED_OUT = 124
_KILLED = 137
_ENTER_SECONDS = 60.0
_KILL_SECONDS = 15.0
_TRAILER_SECONDS = 5.0
_GRACE_SECONDS = 0.05
_LEAVE_SECONDS = 0.2

_REASONS = {
    "missing": "no such file or directory",
    "directory": "is a directory",
    "file": "is not a directory",
    "special": "is not a regular file",
    "denied": "permission denied",
    "failed": "could not be read to its end",
    "tool": "cannot be listed: the sandbox has no `stat`",
}


def new_token() -> str:
    """Begins the mark of every call of one sandbox."""
    return secrets.token_hex(6)


class ShellEnvironment:
    """One sandbox, given by what opens channels into it.

    `private` is a path prefix in the sandbox where files of ours may be made ("/.batch/" or "/tmp/.batch-"); `cwd` is
    made if it is not there, relative to where channels start. `processes` is where the sandbox sees its processes:
    /proc, or a file that lists them (a control group's); "" is for a subclass that sees them from outside and overrides
    `_lives_on`, `_alive`, `_kill`.
    """

    _ours = ""
    """What stands in the command of programs whose children are not the sandbox's own, where a backend has such."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        *,
        backend: str,
        image: str,
        cwd: str,
        private: str,
        variables: Mapping[str, str],
        open_channel: OpenChannel,
        processes: str = "/proc",
        token: str = "",
    ) -> None:
        self.backend = backend
        self.image = image
        self.token = token or new_token()
        self._cwd = cwd.encode()
        self._variables = {**variables, **spec.variables}
        self.temp = next(place for place in (self._variables["TMPDIR"], variables["TMPDIR"]) if place.startswith("/"))
        self._private = private
        self._processes = processes
        self._shell, self._slot = b"", 0
        self._calls = itertools.count(1)
        self._lock = asyncio.Lock()
        self.channels = Channels(open_channel, self._prelude)

    # life

    async def enter(self) -> None:
        """Opens the first channel. Raises SetupFailed for a directory or variable that cannot be, EnvironmentLost."""
        self._check_variables()
        try:
            async with asyncio.timeout(_ENTER_SECONDS):
                await self._begin()
        except TimeoutError:
            await self.leave()
            raise SetupFailed(f"the sandbox's shell did not answer within {_ENTER_SECONDS:.0f} s") from None
        except BaseException:
            await self.leave()
            raise

    async def _begin(self) -> None:
        nonce = new_nonce()
        request = script.begin(self._private, nonce, self._cwd.decode(), self._variables)
        output, fields = await self.channels.ask(request, nonce)
        done, shell, cwd = fields.rstrip(b"\n").split(b"|", 2)
        if done != b"0":
            reason = output.decode(errors="replace").strip() or "its directory cannot be used"
            raise SandboxRefused(f"working directory {self._cwd.decode()!r}: {reason}")
        self._shell, self._cwd = shell, cwd

    async def leave(self) -> None:
        """Closes every channel; what runs in the sandbox is for its backend to end."""
        await self.channels.close()

    def _check_variables(self) -> None:
        for name, value in self._variables.items():
            if not name.isascii() or not name.isidentifier() or "\0" in value:
                raise SandboxRefused(f"environment variable {name!r}: not a name and value that a shell can hold")
            if name in script.HELD:
                raise SandboxRefused(f"environment variable {name}: {script.IS_HELD}")

    # commands

    async def run(
        self, command: str, *, timeout: float, cwd: str | None = None, max_chars: int = 50_000
    ) -> CommandResult:
        """See `Environment.run`."""
        data = _no_nul(command, "command")
        async with self._lock:
            call, nonce = self._next_call()
            request = self._foreground(call, nonce, data, cwd)
            async with self._calling(call, request) as channel:
                text = BoundedText(max_chars)
                result = await self._foreground_result(channel, call, nonce, timeout, text, cwd is None)
        if says_full(result.output):
            await self.check_room(0)
        return result

    def _foreground(self, call: str, nonce: str, command: bytes, cwd: str | None) -> bytes:
        long = len(command) > script.LONG_COMMAND
        child = script.foreground(self._private, self._slot, long)
        before = script.store_command(self._private, command) if long else b""
        return before + script.words("run", call, nonce, child, b"" if long else command, *self._directory(cwd))

    def _directory(self, cwd: str | None) -> tuple[bytes, bytes]:
        """Where a child goes, and whether it has to be there."""
        return (self._cwd, b"") if cwd is None else (self._path(cwd), b"1")

    async def _foreground_result(
        self, channel: Channel, call: str, nonce: str, timeout: float, text: BoundedText, keeps_cwd: bool
    ) -> CommandResult:
        reply = Reply(channel, nonce)
        try:
            timed_out = await self._collect(reply, call, timeout, text)
        except ChannelEnded:
            return await self._after_lost_channel(channel, call, text)
        if reply.fields is None:
            await self.channels.discard(channel)
            return _result(text, TIMED_OUT, timed_out=True)
        code, seen, cwd = reply.fields.split(b" ", 2)
        self._remember(cwd, keeps_cwd)
        lives = await self._background(channel, call, reply, text, seen == b"1")
        return _result(text, TIMED_OUT if timed_out else int(code), timed_out=timed_out, background=lives)

    async def _collect(self, reply: Reply, call: str, timeout: float, text: BoundedText) -> bool:
        """Reads up to the trailer; after `timeout` kills the call and waits for the trailer a little longer."""
        try:
            async with asyncio.timeout(timeout):
                await _feed(reply, text)
        except TimeoutError:
            await self._kill(call)
        else:
            return False
        try:
            async with asyncio.timeout(_TRAILER_SECONDS):
                await _feed(reply, text)
        except TimeoutError:
            pass
        return True

    async def _after_lost_channel(self, channel: Channel, call: str, text: BoundedText) -> CommandResult:
        """The command killed its channel's shell: if the sandbox is still there, that is this command's end alone."""
        await self.channels.discard(channel)
        await self._kill(call)
        await self.channels.probe()
        return _result(text, _KILLED)

    def _remember(self, cwd: bytes, keeps_cwd: bool) -> None:
        if not cwd:
            return
        self._slot = 1 - self._slot
        if keeps_cwd:
            self._cwd = cwd.removesuffix(b"\n")

    async def _background(self, channel: Channel, call: str, reply: Reply, text: BoundedText, seen: bool) -> bool:
        """Whether processes of the call live on. If so, what they print from now on is read and thrown away."""
        if not await self._lives_on(call, seen):
            text.feed(reply.rest)
            return False
        text.feed(reply.rest)
        await _late_output(channel, text)
        try:
            lives = await self._alive(call)
        except EnvironmentLost:  # so many processes that there is no room for a shell, or really lost
            await self._kill(call)
            lives = await self._alive(call)
        if not lives:
            return False
        self.channels.retire(channel)
        return True

    async def _lives_on(self, call: str, seen: bool) -> bool:
        return seen

    async def _alive(self, call: str) -> bool:
        nonce = new_nonce()
        _, fields = await self.channels.ask(script.words("alive", call, nonce), nonce)
        return fields == b"1"

    async def _kill(self, call: str) -> None:
        """Every process of the call. Raises EnvironmentLost."""
        nonce = new_nonce()
        try:
            async with asyncio.timeout(_KILL_SECONDS):
                await self.channels.ask(script.words("slay", call, nonce), nonce)
        except TimeoutError:
            raise EnvironmentLost("the sandbox no longer answers") from None

    # background processes

    async def start(
        self, command: str, *, cwd: str | None = None, pty: bool = False, piped: bool = False
    ) -> ShellProcess:
        """See `Environment.start`."""
        data = _no_nul(command, "command")
        if len(data) > script.LONG_COMMAND:
            raise ToolError(f"the command is too long to be started in the background: {len(data)} bytes")
        call, nonce = self._next_call()
        hello = new_nonce()
        child = script.background(self._private, self._slot, hello, pty)
        channel = await self.channels.open()
        await channel.write(script.words("start", call, nonce, child, data, *self._directory(cwd)))
        process = ShellProcess(channel, nonce, functools.partial(self._kill, call), piped)
        try:
            await process.begun(hello)
        except BaseException:
            await self.channels.discard(channel)
            raise
        self.channels.beside(self._follow(process, channel))
        return process

    async def _follow(self, process: ShellProcess, channel: Channel) -> None:
        await process.follow()
        await asyncio.sleep(
            _LEAVE_SECONDS
        )  # its shell ends by itself: killed, it would take along what it has just begun
        await self.channels.discard(channel)

    # files

    async def read(self, path: str) -> AsyncIterator[bytes]:
        """See `Environment.read`."""
        nonce = new_nonce()
        async with self.channels.exchange(script.words("get", nonce, self._path(path))) as channel:
            reply = Reply(channel, nonce)
            while reply.fields is None:
                data = await reply.piece()
                if data:
                    yield data
        _verdict(path, reply.fields)

    async def write(self, path: str, data: bytes) -> bool:
        """See `Environment.write`."""
        nonce = new_nonce()
        requests = script.store_file(nonce, self._path(path), data)
        async with self._lock, self.channels.exchange(requests[0]) as channel:
            output, fields = await Reply(channel, nonce).whole()
            made = fields.endswith(b"1")
            for request in requests[1:]:
                await channel.write(request)
                more, fields = await Reply(channel, nonce).whole()
                output += more
        if not fields.startswith(b"0"):
            if says_full(output.decode(errors="replace")):
                await self.check_room(len(data))
            raise ToolError(f"{path}: {_reason(output)}")
        return made

    async def list(self, path: str) -> Sequence[Entry]:
        """See `Environment.list`."""
        nonce = new_nonce()
        output, fields = await self.channels.ask(script.words("ls_", nonce, self._path(path)), nonce)
        _verdict(path, fields)
        entries = [
            Entry(name=name.decode(errors="replace"), kind=kind, size=size)
            for name, kind, size in script.listed(output)
        ]
        return sorted(entries, key=lambda entry: entry.name)

    async def delete(self, path: str) -> None:
        """See `Environment.delete`."""
        nonce = new_nonce()
        async with self._lock:
            output, fields = await self.channels.ask(script.words("del", nonce, self._path(path)), nonce)
        if fields == b"failed":
            raise ToolError(f"{path}: {_reason(output)}")
        _verdict(path, fields)

    async def check_room(self, size: int) -> None:
        """See `Environment.check_room`; for backends on a disk of this machine to override."""

    def _path(self, path: str) -> bytes:
        """Absolute, in bytes; `.` and `..` stay for the sandbox to resolve."""
        data = _no_nul(path, "path")
        if not data:
            raise ToolError("the path is empty")
        return posixpath.join(self._cwd, data)

    def _next_call(self) -> tuple[str, str]:
        return f"{self.token}.{next(self._calls)}.", new_nonce()

    def _prelude(self) -> bytes:
        return script.prelude(self._private, self._processes, self._shell, self._ours)

    @asynccontextmanager
    async def _calling(self, call: str, request: bytes) -> AsyncIterator[Channel]:
        """A channel for a command: one that is cancelled is killed."""
        try:
            async with self.channels.exchange(request) as channel:
                yield channel
        except asyncio.CancelledError:
            self.channels.beside(self._kill(call))
            raise


def _no_nul(text: str, what: str) -> bytes:
    if "\0" in text:
        raise ToolError(f"the {what} holds a NUL byte")
    return script.encoded(text)


async def _late_output(channel: Channel, text: BoundedText) -> None:
    """What comes within a short grace after the shell's end."""
    try:
        async with asyncio.timeout(_GRACE_SECONDS):
            while data := await channel.read():
                text.feed(data)
    except TimeoutError:
        pass


async def _feed(reply: Reply, text: BoundedText) -> None:
    while reply.fields is None:
        text.feed(await reply.piece())


def _result(text: BoundedText, code: int, *, timed_out: bool = False, background: bool = False) -> CommandResult:
    text.feed(b"", final=True)
    return CommandResult(
        output=text.text(), exit_code=code, timed_out=timed_out, omitted_chars=text.omitted, background=background
    )


def _verdict(path: str, fields: bytes) -> None:
    verdict = fields.decode()
    if verdict != "done":
        raise ToolError(f"{path}: {_REASONS[verdict]}")


def _reason(output: bytes) -> str:
    """What the system said, without the shell's own name and line in front."""
    return output.decode(errors="replace").strip().rpartition(": ")[2].lower() or "failed"
