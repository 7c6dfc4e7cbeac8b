"""Who made a sandbox, as one text, and whether that process is dead. A leaf but for the record it speaks of."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tools.environments.base import Owner

LABEL = "batch-runner.owner"


def current_owner(run_id: str) -> Owner:
    """This process."""
    return Owner(
        run_id=run_id,
        boot_id=_text("/proc/sys/kernel/random/boot_id"),
        pid_namespace=_namespace(),
        pid=os.getpid(),
        start_time=start_time(os.getpid()) or 0,
    )


def is_dead(owner: Owner) -> bool | None:
    """None if that cannot be said from here: another boot, another process namespace, or no /proc."""
    here = _text("/proc/sys/kernel/random/boot_id"), _namespace()
    if not all(here) or here != (owner.boot_id, owner.pid_namespace):
        return None
    return start_time(owner.pid) != owner.start_time


def encode(owner: Owner) -> str:
    """For a label or a file."""
    return msgspec.json.encode(owner).decode()


def decode(text: str) -> Owner | None:
    """None for what is no owner of ours."""
    try:
        return msgspec.json.decode(text, type=Owner)
    except msgspec.DecodeError:
        return None


def folders_of_the_dead(place: Path, record: str) -> Iterator[Path]:
    """Folders in a place whose record (such as `made-*/owner`) names a dead owner."""
    for path in place.glob(record):
        try:
            owner = decode(path.read_text(encoding="utf-8", errors="replace"))
        except OSError:  # another one is removing it
            continue
        if owner and is_dead(owner):
            yield path.parent


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the process's start; None if there is no such process, or only its zombie."""
    after_name = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if not after_name or after_name[0] in "ZX":
        return None
    return int(after_name[19])


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
