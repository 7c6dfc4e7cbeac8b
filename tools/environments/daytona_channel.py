"""Terminals of a Daytona sandbox: the door, and channels, which are shells whose bytes cross one (`daytona_script`)."""

import asyncio
import itertools
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from tools.environments import daytona_script as script
from tools.environments.daytona_connection import service_errors
from tools.environments.daytona_script import Chunks, Facts
from tools.errors import EnvironmentLost

if TYPE_CHECKING:
    from daytona import AsyncSandbox
    from daytona.handle.async_pty_handle import AsyncPtyHandle

_OPEN_SECONDS = 40.0
_SEND_SECONDS = 60.0
_END_SECONDS = 1.0
_LEAVE_SECONDS = 2.0
_PULSE_SECONDS = 15.0
_UNANSWERED = 3  # pulses in a row, each of which the door would answer: the sandbox is lost


class Terminal:
    """A terminal of the sandbox whose shell we have replaced by one of our programs.

    `is_cut` says that its connection broke while that program ran; `is_over` that it ended, one way or the other.
    """

    def __init__(self) -> None:
        self.pid = ""
        self.is_cut = False
        self._heard = b""
        self._hello: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._handle: AsyncPtyHandle | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing can be sent to it any more."""
        return self._watch is None or self._watch.done()

    async def open(self, sandbox: "AsyncSandbox", facts: Facts, name: str) -> None:
        """Raises EnvironmentLost."""
        from daytona.common.pty import PtySize  # noqa: PLC0415 - an optional package, imported when used

        try:
            with service_errors():
                async with asyncio.timeout(_OPEN_SECONDS):
                    # So small that no shell greets a new user with a dialog, so dumb that it sends no escapes.
                    self._handle = await sandbox.process.create_pty_session(
                        f"batch-{name or 'door'}", self._hear, envs={"TERM": "dumb"}, pty_size=PtySize(rows=10, cols=60)
                    )
                    self._watch = asyncio.create_task(self._watched(self._handle))
                    await self._handle.send_input(script.typed(facts, name))
                    await self._hello
        except BaseException:
            await self.leave()
            raise

    async def _hear(self, data: bytes) -> None:
        if self.pid:
            self.take(data)
            return
        self._heard += data
        if found := script.ready(self._heard):
            self.pid, rest = found
            self._heard = b""
            if not self._hello.done():
                self._hello.set_result(None)
            self.take(rest)

    def take(self, data: bytes) -> None:
        """What our program printed."""

    def end(self) -> None:
        """The terminal has ended, or what it prints is of no use any more: nothing is taken from it from here, and who
        still waits for our program to begin gets EnvironmentLost. To say it twice does no harm."""
        if not self._hello.done():
            self._hello.set_exception(EnvironmentLost("daytona: a terminal ended before our program ran in it"))
            self._hello.exception()  # nobody may be left to ask for it

    async def _watched(self, handle: "AsyncPtyHandle") -> None:
        """Until it is over: the service says how its program ended, a broken connection does not."""
        try:
            result = await handle.wait()
            self.is_cut = result.exit_code is None
        finally:
            self.end()

    async def send(self, data: bytes) -> None:
        """One message. Raises EnvironmentLost."""
        if self._handle is None or self.is_over:
            raise EnvironmentLost("the sandbox's shell has ended")
        with service_errors():
            async with asyncio.timeout(_SEND_SECONDS):
                await self._handle.send_input(data)

    async def wait_for_end(self, seconds: float) -> None:
        """Waits until it is over, for so long at most."""
        if self._watch is not None:
            await asyncio.wait({self._watch}, timeout=seconds)

    async def leave(self) -> None:
        """Drops the connection."""
        if self._handle is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_SECONDS):
                    await self._handle.disconnect()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch}, timeout=_LEAVE_SECONDS)


class Door(Terminal):
    """A sandbox's first terminal: grants channels their chunks, ends them, and says that the sandbox is still there."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[bytes] = deque()
        self._waiting = asyncio.Event()
        self._unanswered = 0
        self._names = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []
        self.channels: set[TerminalChannel] = set()

    @property
    def is_lost(self) -> bool:
        """Whether it, or the connection of a channel, is gone: what ran in the sandbox cannot be told from then on."""
        return self.is_over or self.is_cut

    async def open_door(self, sandbox: "AsyncSandbox", facts: Facts) -> None:
        """Raises EnvironmentLost."""
        await self.open(sandbox, facts, "")
        self._tasks = [asyncio.create_task(self._tell()), asyncio.create_task(self._pulse())]

    async def open_channel(self, sandbox: "AsyncSandbox", facts: Facts) -> "TerminalChannel":
        """Raises EnvironmentLost."""
        if self.is_lost:
            raise EnvironmentLost("daytona: the connection to the sandbox was lost, and what ran in it with it")
        channel = TerminalChannel(self, str(next(self._names)))
        self.channels.add(channel)  # before it is there: it may be lost while it opens
        try:
            await channel.open(sandbox, facts, channel.name)
        except BaseException:
            self.channels.discard(channel)
            raise
        return channel

    def tell(self, line: str) -> None:
        """Sent as soon as can be."""
        self._lines.append(line.encode() + b"\n")
        self._waiting.set()

    async def _tell(self) -> None:
        try:
            while True:
                await self._waiting.wait()
                self._waiting.clear()
                lines = b"".join(self._lines)
                self._lines.clear()
                for at in range(0, len(lines), script.FRAME):
                    await self.send(lines[at : at + script.FRAME])
        except EnvironmentLost:
            self.lose()

    async def _pulse(self) -> None:
        """A service that accepts everything and does nothing would be waited for in vain."""
        while self._unanswered < _UNANSWERED:
            self._unanswered += 1
            self.tell("p 0")
            await asyncio.sleep(_PULSE_SECONDS)
        self.lose()

    def take(self, data: bytes) -> None:
        """Whatever it says is a sign of life."""
        self._unanswered = 0

    def lose(self) -> None:
        """No channel is of use any more."""
        self.is_cut = True
        for channel in list(self.channels):
            channel.end()

    def end(self) -> None:
        """See `Terminal.end`."""
        super().end()
        self.lose()

    async def close(self) -> None:
        """Ends the connections; what runs there is for whoever removes the sandbox."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(channel.leave() for channel in list(self.channels)))
        await self.leave()


class TerminalChannel(Terminal):
    """See `Channel`."""

    def __init__(self, door: Door, name: str) -> None:
        super().__init__()
        self.name = name
        self._door = door
        self._chunks = Chunks()
        self._ready: asyncio.Queue[bytes] = asyncio.Queue()  # bounded by what we ask for
        self._is_at_end = False
        self._is_closed = False
        self._has_ended_input = False

    async def write(self, data: bytes) -> None:
        """See `Channel.write`."""
        for frame in script.frames(data):
            if self._is_at_end or self._door.is_lost:
                raise EnvironmentLost("the sandbox's shell has ended")
            await self.send(frame)

    async def end_input(self) -> None:
        """See `Channel.end_input`."""
        if not self._has_ended_input and not self.is_over:
            self._has_ended_input = True
            await self.send(script.END)

    async def read(self) -> bytes:
        """See `Channel.read`."""
        data = await self._ready.get()
        if data:
            self._door.tell(f"c {self.name}")
        else:
            self._ready.put_nowait(b"")
        return data

    def take(self, data: bytes) -> None:
        """What the shell printed, in chunks."""
        try:
            chunks = self._chunks.feed(data)
        except ValueError:  # the terminal is no longer ours: something in the sandbox wrote to it
            self.end()
            return
        for chunk in chunks:
            self._ready.put_nowait(chunk)
            self._is_at_end = self._is_at_end or not chunk

    def end(self) -> None:
        """See `Terminal.end`."""
        super().end()
        self._is_at_end = True
        self._ready.put_nowait(b"")
        if self.is_cut and not self._is_closed and not self._door.is_cut:
            self._door.lose()

    async def close(self) -> None:
        """See `Channel.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self.is_over and not self._door.is_lost:
            self._door.tell(f"k {self.pid} {self.name}")
            await self.wait_for_end(_END_SECONDS)
        await self.leave()
        self._door.channels.discard(self)
