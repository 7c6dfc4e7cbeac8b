"""Which process of this machine is at the other end of a connection on loopback."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

_ENDS, _INODE = slice(1, 3), 9  # columns of /proc/net/tcp


class Peers:
    """Remembers whom it found: the same few processes open one connection after another."""

    def __init__(self) -> None:
        self._known: list[int] = []

    def pid(self, port: int, to_port: int) -> int:
        """Of the process that holds the connection between these ports of its and ours; 0 if there is none any more."""
        inode = _inode(port, to_port)
        if not inode:
            return 0
        self._known = [pid for pid in self._known if Path(f"/proc/{pid}").exists()]
        holders = _holders(inode, self._known) or _holders(inode, psutil.pids())
        found = min(holders, key=_began, default=0)  # a process being started has its parent's descriptors for a moment
        if found and found not in self._known:
            self._known.append(found)
        return found


def _inode(port: int, to_port: int) -> str:
    ends = [f"0100007F:{each:04X}" for each in (port, to_port)]
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines():
        columns = line.split()
        if columns[_ENDS] == ends:
            return "" if columns[_INODE] == "0" else columns[_INODE]  # 0: closed, nobody's any more
    return ""


def _holders(inode: str, pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if f"socket:[{inode}]" in _links(pid)]


def _links(pid: int) -> set[str]:
    found = set()
    with suppress(OSError):  # gone, or somebody else's
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed just now
                found.add(str(link.readlink()))
    return found


def _began(pid: int) -> float:
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return float("inf")
