"""A sandbox whose first shell is its door: it opens channels on named pipes in a folder that the sandbox cannot write.

No process inside can put something else in their place. For sandboxes that are processes of this machine.
"""

import asyncio
import itertools
import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.environments.base import EnvironmentSpec
from tools.environments.channel import Channel
from tools.environments.hosted import Host, end_process, refuse_full, shell_channel, wait_for_end
from tools.environments.pipes import PipeChannel
from tools.environments.processes import kill_call
from tools.environments.shell import ShellEnvironment
from tools.errors import EnvironmentLost, SetupFailed

_OPEN_SECONDS = 20.0
_END_SECONDS = 10.0
_DOOR = r"""
trap : HUP INT QUIT TERM
S=$(command -v setsid)
o() { command eval '{ printf .; exec $S sh; } <"%(door)s/$1.in" >"%(door)s/$1.out" 2>&1 &'; }
echo ready
"""


class Pipes:
    """Two named pipes, and our ends of them."""

    def __init__(self, base: Path) -> None:
        self._paths = inner, outer = base.with_suffix(".in"), base.with_suffix(".out")
        for path in self._paths:
            os.mkfifo(path, 0o600)
        self.stdout = os.open(outer, os.O_RDONLY | os.O_NONBLOCK)
        self._kept = os.open(inner, os.O_RDWR | os.O_NONBLOCK)  # a reader, until the shell is one
        self.stdin = os.open(inner, os.O_WRONLY | os.O_NONBLOCK)

    def forget(self) -> None:
        """Takes the names away, once the shell has opened them or will not."""
        os.close(self._kept)
        for path in self._paths:
            path.unlink()


class DoorEnvironment(ShellEnvironment):
    """The process that makes the sandbox, and channels through its door.

    `argv` is a command whose end is the door's `sh`; the host's folder `door` is shown in the sandbox as the absolute
    path `door`. That process's children are the sandbox's process 1, with whose end all in the sandbox ends.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        host: Host,
        *,
        backend: str,
        image: str,
        private: str,
        variables: Mapping[str, str],
        door: str,
        argv: Sequence[str],
        environ: Mapping[str, str],
    ) -> None:
        super().__init__(
            spec,
            backend=backend,
            image=image,
            cwd=spec.cwd or "/workspace",
            private=private,
            variables=variables,
            open_channel=self._through_door,
            token=host.token,
        )
        self._host = host
        self._numbers = itertools.count()
        self._inside = door
        command = f'{host.confine()} || exit 71\nexec "$@"'
        self._process = host.spawn(["sh", "-c", command, "sh", *argv], environ, Path("/"))
        self._door = shell_channel(self._process, self._end)

    async def open_door(self, before: str = "") -> str:
        """Waits for the sandbox, whose first shell runs `before`; what that says. Raises SetupFailed."""
        said = b""
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                await self._door.write((before + _DOOR % {"door": self._inside}).encode())
                while not said.endswith(b"ready\n") and (data := await self._door.read()):
                    said += data
        except (TimeoutError, EnvironmentLost):
            said += await _rest(self._door)
        if not said.endswith(b"ready\n"):
            reason = said.decode(errors="replace").strip() or "it ended at once"
            raise SetupFailed(f"the {self.backend} sandbox cannot be opened: {reason}")
        return said.removesuffix(b"ready\n").decode(errors="replace")

    async def _through_door(self) -> Channel:
        name = str(next(self._numbers))
        try:
            pipes = Pipes(self._host.folder / "door" / name)
        except FileNotFoundError:
            raise EnvironmentLost("the sandbox's folder is gone") from None
        except OSError as error:
            refuse_full(error, str(self._host.folder))
            raise
        channel = PipeChannel(pipes.stdin, pipes.stdout, _nothing)
        try:
            await self._door.write(f"o {name}\n".encode())
            await self._opened(channel)
        except BaseException:
            await channel.close()
            raise
        finally:
            pipes.forget()
        return channel

    async def _opened(self, channel: Channel) -> None:
        """Waits for the new shell's first byte, or the door's word that it could make none. Raises EnvironmentLost."""
        reads = [asyncio.create_task(place.read()) for place in (channel, self._door)]
        try:
            await asyncio.wait(reads, timeout=_OPEN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not reads[0].done() or reads[0].result() != b".":
                raise EnvironmentLost("the sandbox opens no more shells")
        finally:
            for read in reads:
                read.cancel()
            await asyncio.gather(*reads, return_exceptions=True)

    def init(self) -> int:
        """The sandbox's process 1, as this machine counts. Raises EnvironmentLost."""
        for pid in _children(self._process.pid):
            if _is_init(pid):
                return pid
        raise EnvironmentLost("the sandbox has ended")

    async def _kill(self, call: str) -> None:
        """From outside: a sandbox whose process table is full could not do it."""
        await asyncio.to_thread(kill_call, call, self._host.pids)

    async def check_room(self, size: int) -> None:
        """See `Environment.check_room`."""
        await asyncio.to_thread(self._host.check_room, size)

    async def close(self) -> None:
        """Ends the sandbox, then removes its folder."""
        await self.leave()
        await self._door.close()
        await asyncio.to_thread(self._host.remove)

    async def _end(self) -> None:
        """Its process 1 is killed first: the kernel ends all others before that is over."""
        for pid in _children(self._process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not await wait_for_end(self._process, _END_SECONDS):
            await end_process(self._process)


async def _nothing() -> None:
    """A channel's shell ends with its stdin, or with the sandbox."""


async def _rest(door: Channel) -> bytes:
    """What was said before the end."""
    said = b""
    try:
        async with asyncio.timeout(1.0):
            while data := await door.read():
                said += data
    except TimeoutError:
        pass
    return said


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # ended
        return []


def _is_init(pid: int) -> bool:
    """Whether it is process 1 of a namespace below ours: the last of its numbers, the first being ours."""
    try:
        (numbers,) = re.findall(r"(?m)^NSpid:\t(.*)$", Path(f"/proc/{pid}/status").read_text())
    except (OSError, ValueError):  # ended; a kernel that does not tell
        return False
    return bool(re.search(r"\t1$", numbers))


def limit_processes(host: Host) -> str:
    """Shell text that limits processes where no control group does; a namespace of users counts them for itself."""
    return "" if host.cgroup else f"{{ ulimit -u {host.limits.pids} || ulimit -p {host.limits.pids}; }} 2>/dev/null\n"
