"""What sandboxes that are processes of this machine share: a folder with their owner, their limits, and their end."""

import asyncio
import errno
import math
import os
import random
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence, Set
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from msgspec import Struct

from tools.environments.base import EnvironmentSpec, Limits, Owner
from tools.environments.cgroup import Cgroup, cgroup_folders, make_cgroup
from tools.environments.ending import to_the_end
from tools.environments.owner import is_dead
from tools.environments.pipes import PipeChannel
from tools.environments.processes import all_pids, kill_call
from tools.environments.script import MARKER
from tools.errors import DiskFull, EnvironmentLost, SandboxRefused, SetupFailed

_PREFIX = "batch-sandbox-"
_MEMORY = "/dev/shm"  # noqa: S108 - a folder of our own is made in it
_RECORD = "owner"
_NOBODYS = 60.0  # seconds after which a folder without a record is nobody's
_END_SECONDS = 2.0
_CHECK_SECONDS = 20.0
_LITTLE = 1 << 16  # bytes that a disk with room for anything has


class Record(Struct, frozen=True):
    """The file `owner` in each of a sandbox's folders: all that is needed to remove it without its maker."""

    owner: Owner
    deadline: float
    token: str
    folders: tuple[str, ...]
    cgroup: tuple[str, ...]


class Host:
    """One sandbox's folders, control group and shells on this machine.

    `folder` is for what may be large; `parts` are its first subfolders. `state` is in memory where there is such a
    place: what every command writes there costs a fifth of a trivial command's time on a disk. It is also the same for
    every run, so that `reap` finds sandboxes whose temporary folder was elsewhere.
    """

    def __init__(self, spec: EnvironmentSpec, token: str, parts: Sequence[str]) -> None:
        self.token = token
        self.limits = spec.limits
        self.cgroup: Cgroup | None = None
        self._made: list[str] = []
        try:
            for place in _places():
                folder = f"{place}/{_PREFIX}{token}"
                with making(folder):
                    os.mkdir(folder, 0o700)  # noqa: PTH102 - here and below texts take a tenth of the time of paths
                self._made.append(folder)
            self.state, self.folder = Path(self._made[0]), Path(self._made[-1])
            self._write_record(spec)  # all else comes after it: who dies meanwhile leaves nothing that is not in it
            self.cgroup = make_cgroup(self._group_name(), spec.limits)
            with making(folder):
                for part in parts:
                    os.mkdir(f"{folder}/{part}", 0o700)  # noqa: PTH102
        except (SetupFailed, DiskFull):
            self.remove()
            raise

    def _write_record(self, spec: EnvironmentSpec) -> None:
        cgroup = cgroup_folders(self._group_name())
        record = msgspec.json.encode(Record(spec.owner, spec.deadline, self.token, tuple(self._made), cgroup))
        for folder in self._made:
            with making(folder), open(f"{folder}/{_RECORD}", "xb", buffering=0) as file:  # noqa: PTH123
                file.write(record)

    def _group_name(self) -> str:
        return f"batch-{self.token}"

    def confine(self) -> str:
        """Shell text by which a shell puts itself under the limits; false if it cannot."""
        if self.cgroup:
            return self.cgroup.join_commands()
        return f"ulimit -d {self.limits.memory_mb << 10}"

    def spawn(self, argv: Sequence[str], environ: Mapping[str, str], folder: Path) -> "subprocess.Popen[bytes]":
        """A shell in a session of its own, its output on one pipe, on as many processors as its limit says."""
        usual = None if self.cgroup else _fewer_cpus(self.limits)
        try:
            return subprocess.Popen(  # noqa: S603 - our own words
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                env={**environ, MARKER: f"{self.token}.0."},
                cwd=folder,
                start_new_session=True,
            )
        except OSError as error:
            raise SetupFailed(f"the sandbox's shell cannot be started: {error}") from None
        finally:
            if usual:
                os.sched_setaffinity(0, usual)

    def check_room(self, size: int = 0) -> None:
        """Raises DiskFull if so many bytes more cannot be written in `folder`, or hardly any in `state`."""
        for folder in self._made:
            try:
                _take_room(f"{folder}/room", max(size if folder == self._made[-1] else 0, _LITTLE))
            except OSError as error:
                refuse_full(error, folder)

    def pids(self) -> Set[int]:
        """Processes that may be the sandbox's."""
        return self.cgroup.pids() if self.cgroup else all_pids()

    def remove(self) -> None:
        """The group with all that runs in it, and the folders. What cannot be removed stays, with its record."""
        if self.cgroup and not (self.cgroup.kill() and self.cgroup.remove()):
            return
        for folder in self._made:
            remove_tree(Path(folder))


class Hosted(Protocol):
    """A sandbox on a `Host`, which it removes when it is closed."""

    async def open_up(self) -> None:
        """Waits until commands can be run. Raises SetupFailed, EnvironmentLost."""

    async def close(self) -> None:
        """Ends all that runs in it, and removes the host."""


H = TypeVar("H", bound=Hosted)


@asynccontextmanager
async def open_on(host: Host, build: Callable[[Host], H]) -> AsyncIterator[H]:
    """What `build` makes on the host, opened, and closed on every way out. Raises what those raise; DiskFull where it
    could not be opened for want of room."""
    try:
        hosted = build(host)
    except BaseException:
        host.remove()
        raise
    try:
        try:
            await hosted.open_up()
        except (SetupFailed, EnvironmentLost):
            host.check_room()
            raise
        yield hosted
    finally:
        await to_the_end(hosted.close())


@contextmanager
def making(folder: str) -> Iterator[None]:
    """For what belongs to a sandbox's folder. Raises DiskFull, SetupFailed."""
    try:
        yield
    except OSError as error:
        refuse_full(error, folder)
        raise SetupFailed(f"the sandbox's folder cannot be made: {error}") from None


def refuse_full(error: OSError, folder: str) -> None:
    """Raises DiskFull if there was no room left where the sandbox's folder is."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise DiskFull(f"{os.path.dirname(folder)}, where sandboxes are made, cannot be written: {error.strerror}")  # noqa: PTH120 - as above


def _take_room(path: str, size: int) -> None:
    """Allocates so many bytes there and frees them. OSError where there is no room."""
    with open(path, "wb") as file:  # noqa: PTH123 - as above
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        finally:
            os.unlink(path)  # noqa: PTH108 - as above


def _fewer_cpus(limits: Limits) -> set[int] | None:
    """Takes processors from this thread, for a child to inherit; the set to give back, None if it has few enough."""
    usual = os.sched_getaffinity(0)
    count = math.ceil(limits.cpus)
    if count >= len(usual):
        return None
    os.sched_setaffinity(0, random.sample(sorted(usual), count))
    return usual


def shell_channel(process: "subprocess.Popen[bytes]", end: Callable[[], Awaitable[None]]) -> PipeChannel:
    """The channel on a spawned shell; it takes over the pipes."""
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        return PipeChannel(os.dup(process.stdin.fileno()), os.dup(process.stdout.fileno()), end)


async def end_process(process: "subprocess.Popen[bytes]") -> None:
    """Kills a shell and its process group, and takes its exit code."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
    await wait_for_end(process, _END_SECONDS)


async def wait_for_end(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Waits for a process's end; whether it came in time."""
    if process.poll() is None and (descriptor := _pidfd(process.pid)) is not None:
        await _readable(descriptor, seconds)
    pause, until = 0.0005, time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() > until:
            return False
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.02)
    return True


def _pidfd(pid: int) -> int | None:
    """A descriptor that is readable once this process has ended; None where the system has none to give."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, an old kernel, no descriptor left
        return None


async def _readable(descriptor: int, seconds: float) -> None:
    """Closes the descriptor afterwards."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        async with asyncio.timeout(seconds):
            await ready.wait()
    except TimeoutError:
        pass
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def failure_of(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
    """What a command that fails says, or ""."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environ,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _CHECK_SECONDS)
    except TimeoutError:
        return f"no answer within {_CHECK_SECONDS:g} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 0:
        return ""
    return " ".join(output.decode(errors="replace").split()) or f"exit code {process.returncode}"


def remove_tree(folder: Path) -> None:
    """Removes a folder with all in it, whatever modes a sandbox gave it, the record last; what cannot be removed stays
    for `reap`."""

    def unlock(_function: object, path: str, _error: object) -> None:
        for place in {Path(path), Path(path).parent}:
            with suppress(OSError):  # gone
                if place.is_relative_to(folder) and stat.S_ISDIR(place.lstat().st_mode):
                    place.chmod(0o700)

    for _ in range(3):
        with suppress(OSError):  # gone, or for the next round
            with os.scandir(folder) as places:
                for place in places:
                    _remove_place(place, unlock)
            if os.listdir(folder) == [_RECORD]:  # noqa: PTH208
                (folder / _RECORD).unlink()
            folder.rmdir()
        if not folder.exists():
            return
        unlock(None, str(folder), None)
        _remove_mapped(folder)


def _remove_mapped(folder: Path) -> None:
    """What belongs to the further users that an ordinary user's sandbox has (/etc/subuid) is removed as their root."""
    program = shutil.which("unshare") if os.getuid() else None
    with suppress(OSError):  # gone
        left = [str(place) for place in folder.iterdir() if place.name != _RECORD]
        if program and left:
            command = [program, "--map-root-user", "--map-auto", "rm", "-rf", "--", *left]
            subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True)  # noqa: S603 - our own


def _remove_place(place: "os.DirEntry[str]", unlock: Callable[[object, str, object], None]) -> None:
    if not place.is_dir(follow_symlinks=False):
        if place.name != _RECORD:
            os.unlink(place.path)  # noqa: PTH108
        return
    try:
        os.rmdir(place.path)  # noqa: PTH106 - most are empty, and `rmtree` takes ten times as long to see that
    except OSError:
        shutil.rmtree(place.path, onerror=unlock)


def bound_volumes(volumes: Sequence[str]) -> list[tuple[str, str, bool]]:
    """HOST:SANDBOX[:ro] as (source, target, read only). Raises SetupFailed."""
    bound = []
    for volume in volumes:
        source, _, rest = volume.partition(":")
        target, _, mode = rest.partition(":")
        if not Path(source).exists() or not target.startswith("/") or mode not in ("", "rw", "ro"):
            raise SandboxRefused(
                f"volume {volume!r}: must be HOST:SANDBOX[:ro] with an existing HOST and an absolute path"
            )
        bound.append((str(Path(source).resolve()), target, mode == "ro"))
    return bound


def _places() -> list[str]:
    return list(dict.fromkeys([*([_MEMORY] if os.access(_MEMORY, os.W_OK) else []), _temporary()]))


def _temporary() -> str:
    """Where TMPDIR says, also when that is full: nobody wants 400 sandboxes on the disk that is tried next."""
    named = os.environ.get("TMPDIR", "")
    return named if named.startswith("/") and os.access(named, os.W_OK | os.X_OK) else tempfile.gettempdir()


def reap_folders() -> int:
    """Removes sandboxes whose maker is dead or whose deadline has passed; how many those were."""
    folders = [folder for place in _places() for folder in Path(place).glob(f"{_PREFIX}*")]
    stale = {record.token: record for folder in folders if (record := _stale(folder))}
    for record in stale.values():
        _reap(record)
    for folder in filter(_is_nobodys, folders):
        remove_tree(folder)
    return len(stale)


def _is_nobodys(folder: Path) -> bool:
    """Whether its maker died before there was a record, or had no room to write one."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    old = found.st_uid == os.getuid() and found.st_mtime < time.time() - _NOBODYS
    return old and not _has_record(folder)


def _has_record(folder: Path) -> bool:
    try:
        return (folder / _RECORD).lstat().st_size > 0
    except OSError:
        return False


def _stale(folder: Path) -> Record | None:
    """Its record, if it may be removed."""
    try:
        if folder.lstat().st_uid != os.getuid():
            return None
        record = msgspec.json.decode((folder / _RECORD).read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError):  # being made or removed just now, or not ours
        return None
    return record if is_dead(record.owner) or record.deadline < time.time() else None


def _reap(record: Record) -> None:
    if record.cgroup:
        group = Cgroup(record.cgroup)
        group.kill()
        group.remove()
    kill_call(f"{record.token}.", all_pids)
    for folder in record.folders:
        remove_tree(Path(folder))
