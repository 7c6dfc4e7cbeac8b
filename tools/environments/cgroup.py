"""A control group for one sandbox, version 1 or 2, where this process may make one."""

import functools
import os
import time
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from tools.environments.base import Limits
from tools.environments.processes import kill_all

CONTROLLERS = ("memory", "cpu", "pids")
_PERIOD = 100_000
OPTIONAL = {"memory.memsw.limit_in_bytes", "memory.swap.max"}  # files that are there only if the kernel accounts swap
_REMOVE_TRIES = 1000
_REMOVE_PAUSE = 0.005


class Bases(Struct, frozen=True):
    """Where groups can be made: one folder per controller (version 1), or one for all (version 2)."""

    version: int
    folders: tuple[Path, ...]


class Cgroup(Struct, frozen=True):
    """One sandbox's group; with version 1 it is a folder in each of three hierarchies."""

    folders: tuple[str, ...]

    def join_commands(self) -> str:
        """Shell text by which a shell puts itself in; false if it cannot."""
        return " && ".join(f"echo 0 >'{folder}/cgroup.procs'" for folder in self.folders)

    def pids(self) -> set[int]:
        """Living processes in it."""
        try:
            with open(f"{self.folders[-1]}/cgroup.procs", "rb") as file:  # noqa: PTH123
                return {int(line) for line in file.read().split()}
        except OSError:  # removed
            return set()

    def kill(self) -> bool:
        """Ends all of them: no new one can be made meanwhile. False if one would not end."""
        with suppress(OSError):  # removed already
            _write(f"{self.folders[-1]}/pids.max", "0")
        return kill_all(self.pids)

    def remove(self) -> bool:
        """Removes the empty group, waiting five seconds at most for processes that are just ending."""
        left = [folder for folder in self.folders if not _remove(folder)]
        return not left


def cgroup_folders(name: str) -> tuple[str, ...]:
    """Where a group of this name is, or would be; none where this process may make no groups."""
    bases = usable_bases()
    return tuple(str(base / name) for base in bases.folders) if bases else ()


def make_cgroup(name: str, limits: Limits) -> Cgroup | None:
    """None where this process may make no groups."""
    bases, folders = usable_bases(), cgroup_folders(name)
    if bases is None:
        return None
    try:
        for folder in folders:
            os.mkdir(folder)  # noqa: PTH102 - here and below texts take a tenth of the time of paths
        for folder, file, text in limit_files(bases.version, folders, limits):
            _write(f"{folder}/{file}", text, optional=file in OPTIONAL)
    except OSError:
        Cgroup(folders).remove()
        return None
    return Cgroup(folders)


def limit_files(version: int, folders: tuple[str, ...], limits: Limits) -> list[tuple[str, str, str]]:
    """(folder, file, text) of each limit; those that are OPTIONAL may be missing."""
    memory, quota = str(limits.memory_mb << 20), str(int(limits.cpus * _PERIOD))
    first, pids = folders[0], (folders[-1], "pids.max", str(limits.pids))
    if version == 1:
        return [
            (first, "memory.limit_in_bytes", memory),
            (first, "memory.memsw.limit_in_bytes", memory),
            (folders[1], "cpu.cfs_quota_us", quota),
            pids,
        ]
    return [
        (first, "memory.max", memory),
        (first, "memory.swap.max", "0"),
        (first, "cpu.max", f"{quota} {_PERIOD}"),
        pids,
    ]


def _write(path: str, text: str, *, optional: bool = False) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY)
    except FileNotFoundError:
        if optional:
            return
        raise
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


@functools.cache
def usable_bases() -> Bases | None:
    """The folders below which this process may make groups; looked for once."""
    try:
        mounts, membership = Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
    except OSError:
        return None
    bases = find_bases(mounts, membership)
    if bases is None or not all(os.access(folder, os.W_OK) for folder in bases.folders):
        return None
    if bases.version == 2 and not _delegates(bases.folders[0]):
        return None
    return bases


def find_bases(mountinfo: str, membership: str) -> Bases | None:
    """From the texts of /proc/self/mountinfo and /proc/self/cgroup; version 1 where it has all three controllers."""
    own = {
        controller: path
        for _, controllers, path in (line.split(":", 2) for line in membership.splitlines())
        for controller in controllers.split(",")
    }
    mounted = {key: (root, place) for key, root, place in _mounts(mountinfo)}
    if all(name in mounted and name in own for name in CONTROLLERS):
        return Bases(1, tuple(_folder(*mounted[name], own[name]) for name in CONTROLLERS))
    if "" in mounted and "" in own:
        return Bases(2, (_folder(*mounted[""], own[""]),))
    return None


def _mounts(mountinfo: str) -> list[tuple[str, str, str]]:
    """(controller, root, mount point); the controller of version 2 is ""."""
    found = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, place = before.split(" ")[3:5]
        if kind == "cgroup2":
            found.append(("", root, place))
        elif kind == "cgroup":
            found += [(option, root, place) for option in options.split(" ")[-1].split(",")]
    return found


def _folder(root: str, place: str, own: str) -> Path:
    """Our own group's folder; `root` is the group that stands at the mount point."""
    below = own.removeprefix(root.rstrip("/")) if own.startswith(root.rstrip("/")) else ""
    return Path(place + "/" + below.lstrip("/"))


def _delegates(base: Path) -> bool:
    """Whether groups made here get the controllers; tries to hand them on."""
    control = base / "cgroup.subtree_control"
    try:
        if not set(CONTROLLERS) <= set(control.read_text().split()):
            control.write_text(" ".join(f"+{name}" for name in CONTROLLERS))
    except OSError:  # not delegated, or processes stand in this very group
        return False
    return True


def _remove(folder: str) -> bool:
    for _ in range(_REMOVE_TRIES):
        try:
            os.rmdir(folder)  # noqa: PTH106
        except FileNotFoundError:
            return True
        except OSError:
            time.sleep(_REMOVE_PAUSE)
        else:
            return True
    return False
