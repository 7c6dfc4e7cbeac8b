"""The channels of one sandbox: which are idle, which are retired, and one request's answer."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from tools.environments import script
from tools.environments.channel import Channel, OpenChannel
from tools.errors import EnvironmentLost

_IDLE = 4
_MUCH = 16_384
_PAUSE_SECONDS = 0.02


def new_nonce() -> str:
    """A word that nobody in the sandbox can guess."""
    return secrets.token_hex(8)


class ChannelEnded(EnvironmentLost):
    """A channel's shell ended before its answer did; the sandbox may still be there."""


class Reply:
    """One answer of a channel: its payload in pieces, then the trailer's fields."""

    def __init__(self, channel: Channel, nonce: str) -> None:
        self._channel = channel
        self._trailer = script.Trailer(nonce)

    @property
    def fields(self) -> bytes | None:
        """The trailer's text, once it has come."""
        return self._trailer.fields

    @property
    def rest(self) -> bytes:
        """What was printed after the trailer and read with it."""
        return self._trailer.rest

    async def piece(self) -> bytes:
        """More payload; may be empty. Raises ChannelEnded."""
        data = await self._channel.read()
        if not data:
            raise ChannelEnded("the sandbox's shell has ended")
        return self._trailer.feed(data)

    async def whole(self) -> tuple[bytes, bytes]:
        """All of the payload, and the fields."""
        pieces = []
        while self.fields is None:
            pieces.append(await self.piece())
        return b"".join(pieces), self.fields


async def paced(data: bytes) -> None:
    """Between reads of what nobody waits for: much output must not take the loop's time."""
    if len(data) >= _MUCH:
        await asyncio.sleep(_PAUSE_SECONDS)


class Channels:
    """Opens channels as they are needed and closes all of them; nothing may be asked after `close`."""

    def __init__(self, open_channel: OpenChannel, prelude: Callable[[], bytes]) -> None:
        self._open_channel = open_channel
        self._prelude = prelude
        self._all: set[Channel] = set()
        self._idle: list[Channel] = []
        self._retired: set[Channel] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def open(self) -> Channel:
        """A new channel that knows our functions; it is the caller's until it is discarded or retired."""
        if self._closed:
            raise EnvironmentLost("the sandbox is closed")
        channel = await self._open_channel()
        self._all.add(channel)
        await channel.write(self._prelude())
        return channel

    @asynccontextmanager
    async def exchange(self, request: bytes) -> AsyncIterator[Channel]:
        """A channel that has taken the request: idle again afterwards, closed if its answer was not read to the end."""
        channel = await self._send(request)
        try:
            yield channel
        except BaseException:
            await self.discard(channel)
            raise
        if channel not in self._retired:
            self._idle.append(channel)
            await self._shrink()

    async def ask(self, request: bytes, nonce: str) -> tuple[bytes, bytes]:
        """(payload, fields) of a request whose answer is short."""
        async with self.exchange(request) as channel:
            return await Reply(channel, nonce).whole()

    async def probe(self) -> None:
        """Raises EnvironmentLost if no new channel can be had."""
        channel, nonce = await self.open(), new_nonce()
        await channel.write(script.words("say", nonce, ""))
        await Reply(channel, nonce).whole()
        self._idle.append(channel)

    async def _send(self, request: bytes) -> Channel:
        while self._idle:
            channel = self._idle.pop()
            try:
                await channel.write(request)
            except EnvironmentLost:  # that shell was killed: another may do
                await self.discard(channel)
            else:
                return channel
        channel = await self.open()
        await channel.write(request)
        return channel

    async def _shrink(self) -> None:
        while len(self._idle) > _IDLE:
            await self.discard(self._idle.pop(0))

    async def discard(self, channel: Channel) -> None:
        """Closes a channel."""
        self._all.discard(channel)
        await channel.close()

    def retire(self, channel: Channel) -> None:
        """Nothing is sent to it any more. What processes there print is read and thrown away, so that none of them
        blocks or gets SIGPIPE."""
        self._retired.add(channel)
        self.beside(self._throw_away(channel))

    async def _throw_away(self, channel: Channel) -> None:
        while data := await channel.read():
            await paced(data)
        self._retired.discard(channel)
        await self.discard(channel)

    def beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs until it ends or the channels are closed."""
        if self._closed:
            work.close()
            return
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ends every task and closes every channel."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self.discard(channel) for channel in list(self._all)))
