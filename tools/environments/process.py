"""A program in the background, on a channel of its own."""

import asyncio
from collections.abc import Awaitable, Callable

from tools.environments.channel import Channel
from tools.environments.channels import ChannelEnded, Reply, paced
from tools.environments.output import BoundedText
from tools.errors import EnvironmentLost, ToolError

_KEPT_CHARS = 200_000
_HELD_BYTES = 200_000
_BEGIN_SECONDS = 30.0
_WRITE_SECONDS = 10.0
_KILLED = 137


class _Pipe:
    """Bytes on their way to a reader; who puts them in waits while he is far behind."""

    def __init__(self) -> None:
        self._held = b""
        self._changed = asyncio.Event()
        self._read = asyncio.Event()
        self._ended = False

    async def put(self, data: bytes) -> None:
        """More bytes; they are dropped after the end."""
        while len(self._held) > _HELD_BYTES and not self._ended:
            self._read.clear()
            await self._read.wait()
        if not self._ended:
            self._held += data
            self._changed.set()

    async def get(self) -> bytes:
        """All that is there; b"" once there will be no more."""
        while not self._held and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        data, self._held = self._held, b""
        self._read.set()
        return data

    def end(self) -> None:
        """Nothing comes any more."""
        self._ended = True
        self._changed.set()
        self._read.set()


class ShellProcess:
    """`Process` over a channel: its stdin and stdout are the program's from the program's first word on."""

    def __init__(self, channel: Channel, nonce: str, kill: Callable[[], Awaitable[None]], piped: bool = False) -> None:
        self.pid = 0
        self._channel = channel
        self._reply = Reply(channel, nonce)
        self._kill = kill
        self._text = BoundedText(_KEPT_CHARS, head=0.0)
        self._pipe = _Pipe() if piped else None
        self._code: int | None = None
        self._ended = asyncio.Event()
        self._input_open = True

    async def begun(self, hello: str) -> None:
        """Waits for the program's shell to say `hello PID`. Raises ToolError."""
        seen = b""
        word = hello.encode() + b" "
        try:
            async with asyncio.timeout(_BEGIN_SECONDS):
                while b"\n" not in seen.partition(word)[2] and self._reply.fields is None:
                    seen += await self._reply.piece()
        except TimeoutError:
            raise ToolError("the command could not be started: the sandbox is too busy") from None
        before, _, after = seen.partition(word)
        pid, _, output = after.partition(b"\n")
        if not pid.isdigit():
            reason = "the sandbox has no `script`, which a terminal needs" if pid else before.decode(errors="replace")
            raise ToolError(f"the command could not be started: {reason.strip()}")
        self.pid = int(pid)
        await self._take(output)

    async def follow(self) -> None:
        """To its end, and what it left running to theirs: the channel can be closed then."""
        try:
            while self._reply.fields is None:
                await self._take(await self._reply.piece())
            self._end(int(self._reply.fields))
            await self._channel.end_input()
            while data := await self._channel.read():
                await paced(data)
        except ChannelEnded:
            self._end(_KILLED)
        finally:
            if self._code is None:
                self._end(_KILLED)

    async def _take(self, data: bytes) -> None:
        if self._pipe is not None:
            await self._pipe.put(data)
        else:
            self._text.feed(data)
            await paced(data)

    def _end(self, code: int) -> None:
        self._text.feed(b"", final=True)
        if self._pipe is not None:
            self._pipe.end()
        self._code = code
        self._ended.set()

    def output(self) -> str:
        """See `Process.output`."""
        return self._text.tail()

    def exit_code(self) -> int | None:
        """See `Process.exit_code`."""
        return self._code

    async def read(self) -> bytes:
        """See `Process.read`."""
        return await self._pipe.get() if self._pipe is not None else b""

    async def wait(self, timeout: float) -> int | None:
        """See `Process.wait`."""
        try:
            async with asyncio.timeout(timeout):
                await self._ended.wait()
        except TimeoutError:
            return None
        return self._code

    async def write(self, data: bytes) -> None:
        """See `Process.write`."""
        if self._code is not None or not self._input_open:
            raise ToolError("the process has ended" if self._code is not None else "the process's stdin is closed")
        try:
            async with asyncio.timeout(_WRITE_SECONDS):
                await self._channel.write(data)
        except TimeoutError:
            raise ToolError("the process does not read its stdin") from None
        except EnvironmentLost:
            raise ToolError("the process has ended") from None

    async def close_stdin(self) -> None:
        """See `Process.close_stdin`."""
        if self._code is None and self._input_open:
            self._input_open = False
            await self._channel.end_input()

    async def kill(self) -> None:
        """See `Process.kill`."""
        if self._pipe is not None:
            self._pipe.end()  # or its end would wait for a reader
        await self._kill()
        await self.wait(_WRITE_SECONDS)
