"""A channel over two file descriptors of this machine, read and written without blocking the event loop."""

import asyncio
import os
from collections.abc import Awaitable, Callable

from tools.errors import EnvironmentLost

_READ = 65_536
_CLOSED = -1


class PipeChannel:
    """`Channel` over a pipe to the shell's stdin and one from its output. `end` is what ends the shell itself."""

    def __init__(self, stdin: int, stdout: int, end: Callable[[], Awaitable[None]]) -> None:
        self._stdin, self._stdout = stdin, stdout
        self._end = end
        self._waiting: asyncio.Future[None] | None = None
        os.set_blocking(stdin, False)
        os.set_blocking(stdout, False)

    async def write(self, data: bytes) -> None:
        """See `Channel.write`."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._stdin, view) :]
            except BlockingIOError:
                await self._writable()
            except OSError as error:  # nobody reads it, or we have closed it
                raise EnvironmentLost(f"the sandbox's shell has ended: {error.strerror}") from None

    async def end_input(self) -> None:
        """See `Channel.end_input`."""
        stdin, self._stdin = self._stdin, _CLOSED
        if stdin != _CLOSED:
            asyncio.get_running_loop().remove_writer(stdin)
            os.close(stdin)

    async def read(self) -> bytes:
        """See `Channel.read`."""
        while self._stdout != _CLOSED:
            await self._readable()
            try:
                return os.read(self._stdout, _READ) if self._stdout != _CLOSED else b""
            except BlockingIOError:
                continue
        return b""

    async def close(self) -> None:
        """See `Channel.close`."""
        await self.end_input()
        stdout, self._stdout = self._stdout, _CLOSED
        if stdout == _CLOSED:
            return
        asyncio.get_running_loop().remove_reader(stdout)
        os.close(stdout)
        if self._waiting is not None:
            _settle(self._waiting)
        await self._end()

    async def _readable(self) -> None:
        loop, descriptor = asyncio.get_running_loop(), self._stdout
        self._waiting = loop.create_future()
        loop.add_reader(descriptor, _settle, self._waiting)
        try:
            await self._waiting
        finally:
            if self._stdout == descriptor:  # else the number may be another's by now
                loop.remove_reader(descriptor)

    async def _writable(self) -> None:
        loop, descriptor = asyncio.get_running_loop(), self._stdin
        waiting: asyncio.Future[None] = loop.create_future()
        loop.add_writer(descriptor, _settle, waiting)
        try:
            await waiting
        finally:
            if self._stdin == descriptor:
                loop.remove_writer(descriptor)


def _settle(waiting: "asyncio.Future[None]") -> None:
    if not waiting.done():
        waiting.set_result(None)
