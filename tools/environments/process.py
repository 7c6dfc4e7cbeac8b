"""A program in the background, on a channel of its own."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from tools.environments.channel import Channel
from tools.environments.channels import ChannelEnded, Reply, paced
from tools.environments.output import BoundedText
from tools.errors import EnvironmentLost, ToolError

_KEPT_CHARS = 200_000
_BEGIN_SECONDS = 30.0
_WRITE_SECONDS = 10.0
_KILLED = 137


class ShellProcess:
    """`Process` over a channel: its stdin and stdout are the program's from the program's first word on."""

    def __init__(self, channel: Channel, nonce: str, kill: Callable[[], Awaitable[None]]) -> None:
        self.pid = 0
        self._channel = channel
        self._reply = Reply(channel, nonce)
        self._kill = kill
        self._text = BoundedText(_KEPT_CHARS, head=0.0)
        self._code: int | None = None
        self._ended = asyncio.Event()
        self._input_open = True

    async def begun(self, hello: str) -> Coroutine[Any, Any, None]:
        """Waits for the program's shell to say `hello PID`; the work of following it from there. Raises ToolError."""
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
        self._text.feed(output)
        return self._follow()

    async def _follow(self) -> None:
        try:
            while self._reply.fields is None:
                data = await self._reply.piece()
                self._text.feed(data)
                await paced(data)
            self._end(int(self._reply.fields))
            while data := await self._channel.read():
                await paced(data)
        except ChannelEnded:
            self._end(_KILLED)
        finally:
            if self._code is None:
                self._end(_KILLED)

    def _end(self, code: int) -> None:
        self._text.feed(b"", final=True)
        self._code = code
        self._ended.set()

    def output(self) -> str:
        """See `Process.output`."""
        return self._text.tail()

    def exit_code(self) -> int | None:
        """See `Process.exit_code`."""
        return self._code

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
        if self._code is None:
            await self._kill()
            await self.wait(_WRITE_SECONDS)
