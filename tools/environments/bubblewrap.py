"""Sandboxes of Linux namespaces, made by `bwrap`: the machine's programs, but files and processes of their own.

The sandbox's first shell is its door: it opens channels on named pipes in a folder that the sandbox sees read-only, so
that no process inside can put something else in their place.
"""

import asyncio
import functools
import itertools
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tools.environments.base import Environment, EnvironmentSpec
from tools.environments.channel import Channel, base_variables
from tools.environments.ending import to_the_end
from tools.environments.hosted import Host, end_process, ended, limits_by, reap_folders, shell_channel
from tools.environments.pipes import PipeChannel
from tools.environments.processes import kill_call
from tools.environments.shell import ShellEnvironment, new_token
from tools.errors import EnvironmentLost, SetupFailed

_PARTS = ("workspace", "home", "door", "etc")
_HOME = "/home/user"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_OPEN_SECONDS = 20.0
_CHECK_SECONDS = 10.0
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = (
    "alternatives",
    "ca-certificates",
    "ca-certificates.conf",
    "crypto-policies",
    "debian_version",
    "fonts",
    "gai.conf",
    "host.conf",
    "hosts",
    "java",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "magic",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "perl",
    "pki",
    "protocols",
    "resolv.conf",
    "services",
    "ssl",
    "timezone",
)
_USERS = {
    "passwd": f"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:{_HOME}:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n",
}

_DOOR = r"""
trap : HUP INT QUIT TERM
S=$(command -v setsid)
o() { command eval '{ printf .; exec $S sh; } <"/run/door/$1.in" >"/run/door/$1.out" 2>&1 &'; }
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


class BubblewrapEnvironment(ShellEnvironment):
    """A `bwrap` process, and channels through its door."""

    def __init__(self, spec: EnvironmentSpec, host: Host) -> None:
        super().__init__(
            spec,
            backend="bubblewrap",
            image="",
            cwd=spec.cwd or "/workspace",
            private="/run/batch/",
            variables=base_variables(home=_HOME, temp="/tmp", user="user"),  # noqa: S108 - the sandbox's own
            open_channel=self._through_door,
            token=host.token,
        )
        self._host = host
        self._numbers = itertools.count()
        for name, text in _USERS.items():
            (host.folder / "etc" / name).write_text(text)
        command = f'{host.confine()} || exit 71\nexec "$@"'
        argv = ["sh", "-c", command, "sh", *arguments(spec, host.folder)]
        self._process = host.spawn(argv, {"PATH": _PATH}, Path("/"))
        self._door = shell_channel(self._process, self._end)

    async def open_door(self) -> None:
        """Waits for the sandbox. Raises SetupFailed with what `bwrap` says."""
        said = b""
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                await self._door.write((_nproc(self._host) + _DOOR).encode())
                while not said.endswith(b"ready\n") and (data := await self._door.read()):
                    said += data
        except (TimeoutError, EnvironmentLost):
            said += await _rest(self._door)
        if not said.endswith(b"ready\n"):
            reason = said.decode(errors="replace").strip() or "it ended at once"
            raise SetupFailed(f"the bubblewrap sandbox cannot be opened: {reason}")

    async def _through_door(self) -> Channel:
        name = str(next(self._numbers))
        try:
            pipes = Pipes(self._host.folder / "door" / name)
        except FileNotFoundError:
            raise EnvironmentLost("the sandbox's folder is gone") from None
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

    async def _kill(self, call: str) -> None:
        """From outside: a sandbox whose process table is full could not do it."""
        await asyncio.to_thread(kill_call, call, self._host.pids)

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
        if not await ended(self._process, _CHECK_SECONDS):
            await end_process(self._process)


async def _nothing() -> None:
    """A channel's shell ends with its stdin, or with the sandbox."""


async def _rest(door: Channel) -> bytes:
    """What `bwrap` said before it ended."""
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


def _nproc(host: Host) -> str:
    """Shell text that limits processes where no control group does; a namespace of users counts them for itself."""
    return "" if host.cgroup else f"{{ ulimit -u {host.limits.pids} || ulimit -p {host.limits.pids}; }} 2>/dev/null\n"


def arguments(spec: EnvironmentSpec, folder: Path) -> list[str]:
    """The `bwrap` command whose child is the door."""
    network = ["--unshare-net"] if spec.limits.network == "none" else []
    size = str(spec.limits.memory_mb << 20)
    return [
        "bwrap",
        *("--unshare-user", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL"),
        *("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--hostname", "sandbox", *network),
        *("--die-with-parent", "--new-session", "--clearenv", "--setenv", "PATH", _PATH),
        *_system_view(),
        *("--ro-bind", f"{folder}/etc/passwd", "/etc/passwd", "--ro-bind", f"{folder}/etc/group", "/etc/group"),
        *("--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/tmp"),  # noqa: S108 - the sandbox's own
        *("--perms", "0700", "--tmpfs", "/run/batch", "--ro-bind", f"{folder}/door", "/run/door"),
        *("--bind", f"{folder}/workspace", "/workspace", "--bind", f"{folder}/home", _HOME),
        *_volumes(spec.volumes),
        *("--chdir", "/workspace", "sh"),
    ]


def _volumes(volumes: tuple[str, ...]) -> list[str]:
    """HOST:SANDBOX[:ro] as mounts. Raises SetupFailed."""
    mounts = []
    for volume in volumes:
        source, _, rest = volume.partition(":")
        target, _, mode = rest.partition(":")
        if not Path(source).exists() or not target.startswith("/") or mode not in ("", "rw", "ro"):
            raise SetupFailed(
                f"volume {volume!r}: must be HOST:SANDBOX[:ro] with an existing HOST and an absolute path"
            )
        mounts += ["--ro-bind" if mode == "ro" else "--bind", str(Path(source).resolve()), target]
    return mounts


@functools.cache
def _system_view() -> tuple[str, ...]:
    view = ["--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM:
        place = Path(name)
        if place.is_symlink():
            view += ["--symlink", str(place.readlink()), name]
        elif place.exists():
            view += ["--ro-bind", name, name]
    for name in _ETC:
        place = Path("/etc", name)
        if place.exists():
            view += ["--ro-bind", str(place.resolve()), str(place)]
    return tuple(view)


class BubblewrapBackend:
    """See `Backend`."""

    name = "bubblewrap"
    takes_images = False
    isolates = True

    async def check(self) -> str:
        """See `Backend.check`."""
        if not shutil.which("bwrap"):
            return (
                "bubblewrap is not installed: install the package bubblewrap (its program is `bwrap`), or choose docker"
            )
        command = ("bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true")
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), _CHECK_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()
            return "bubblewrap does not answer"
        if process.returncode == 0:
            return ""
        said = " ".join(output.decode(errors="replace").split())
        return f"bubblewrap cannot make user namespaces here ({said}): allow them in the kernel, or choose docker"

    def limits_by(self) -> str:
        """See `hosted.limits_by`."""
        return limits_by()

    async def prepare(self, image: str) -> None:
        """Nothing: it takes no images."""

    @asynccontextmanager
    async def open(self, spec: EnvironmentSpec) -> AsyncIterator[Environment]:
        """See `Backend.open`."""
        host = Host(spec, new_token(), _PARTS)
        try:
            environment = BubblewrapEnvironment(spec, host)
        except BaseException:
            host.remove()
            raise
        try:
            await environment.open_door()
            await environment.enter()
            yield environment
        finally:
            await to_the_end(environment.close())

    async def reap(self) -> int:
        """See `Backend.reap`."""
        return await asyncio.to_thread(reap_folders)


BUBBLEWRAP = BubblewrapBackend()
