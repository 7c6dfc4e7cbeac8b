"""What /proc says of processes. The standard library alone: the reaper of each measured command has to load it."""

import os
from pathlib import Path


def descendants(root: int) -> list[tuple[int, int]]:
    """Each one's id and its parent's."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (parent := _parent(entry.name)):
            children.setdefault(parent, []).append(int(entry.name))
    found, left = [], [(pid, root) for pid in children.get(root, ())]
    while left:
        pid, parent = left.pop()
        found.append((pid, parent))
        left += [(child, pid) for child in children.get(pid, ())]
    return found


def read(path: str) -> bytes:
    """The file, or b"" of a process that is gone."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _parent(pid: str) -> int:
    fields = read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0
