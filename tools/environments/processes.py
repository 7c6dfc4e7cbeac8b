"""Processes of this machine, known by the variable that marks what a call started (`script.MARKER`)."""

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from tools.environments.script import MARKER

_ROUNDS = 50
_ROUND_PAUSE = 0.002
_END_SECONDS = 5.0  # that the killed may take to be gone, on a machine that does much else
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD


def all_pids() -> set[int]:
    """Every process that /proc shows."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 - five times as fast


def is_marked(pid: int, call: str) -> bool | None:
    """Whether a living process carries the mark; `call` may be a beginning, as a task's token is of its calls.

    None if that cannot be said: a process that is just replacing its program shows an empty environment.
    """
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # ended, or not ours
        return False
    if environ:
        return f"{MARKER}={call}".encode() in environ
    fields = _stat(pid)
    return False if not fields or fields[0] in b"ZX" or int(fields[6]) & _KERNEL_THREAD else None


def kill_call(call: str, candidates: Callable[[], Collection[int]]) -> None:
    """Kills what carries the mark and all descendants of those, also ones that have dropped it.

    They are stopped first, until no more are found, so that none can start another behind our back.
    """
    victims: set[int] = set()
    for _ in range(_ROUNDS):
        before = set(victims)
        while found := _more(call, set(candidates()) - victims, victims):
            sure = {pid for pid in found if found[pid]}
            _signal_all(sure, signal.SIGSTOP)
            victims |= sure
            if not sure:
                break
        _signal_all(victims - before, signal.SIGKILL)
        if victims == before and not found:
            return
        time.sleep(_ROUND_PAUSE)


def _more(call: str, pids: Collection[int], victims: Collection[int]) -> dict[int, bool]:
    """Further processes of the call; False for those of which it cannot be said."""
    marks = {pid: _parent(pid) in victims or is_marked(pid, call) for pid in pids}
    return {pid: bool(mark) for pid, mark in marks.items() if mark is not False}


def kill_all(pids: Callable[[], Collection[int]]) -> bool:
    """Kills until nothing is left of a group; False if something was after some seconds."""
    pause, until = _ROUND_PAUSE, time.monotonic() + _END_SECONDS
    while left := pids():
        if time.monotonic() > until:
            return False
        _signal_all(left, signal.SIGKILL)
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
    return True


def _parent(pid: int) -> int:
    """0 for a process that is gone."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat after the name: state, parent, …; none if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


def _signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):  # ended, or not ours
            continue
