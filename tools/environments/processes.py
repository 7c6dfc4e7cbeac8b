"""Processes of this machine, known by the variable that marks what a call started (`script.MARKER`)."""

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from tools.environments.script import MARKER

_ROUNDS = 50
_ROUND_PAUSE = 0.002


def all_pids() -> set[int]:
    """Every process that /proc shows."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 - five times as fast


def is_marked(pid: int, call: str) -> bool:
    """Whether a living process carries the mark; `call` may be a beginning, as a task's token is of its calls."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # ended, or not ours
        return False
    return f"{MARKER}={call}".encode() in environ


def kill_call(call: str, candidates: Callable[[], Collection[int]]) -> None:
    """Kills what carries the mark and all descendants of those, also ones that have dropped it.

    They are stopped first, until no more are found, so that none can start another behind our back.
    """
    victims: set[int] = set()
    for _ in range(_ROUNDS):
        found = _stop_all(call, candidates, victims)
        if not found:
            return
        _signal_all(found, signal.SIGKILL)


def _stop_all(call: str, candidates: Callable[[], Collection[int]], victims: set[int]) -> set[int]:
    found: set[int] = set()
    more = True
    while more:
        pids = set(candidates()) - victims
        new = {pid for pid in pids if _parent(pid) in victims or is_marked(pid, call)}
        _signal_all(new, signal.SIGSTOP)
        victims |= new
        found |= new
        more = bool(new)
    return found


def kill_all(pids: Callable[[], Collection[int]]) -> bool:
    """Kills until nothing is left of a group; False if something was after all rounds."""
    for _ in range(_ROUNDS):
        left = pids()
        if not left:
            return True
        _signal_all(left, signal.SIGKILL)
        time.sleep(_ROUND_PAUSE)
    return not pids()


def _parent(pid: int) -> int:
    """0 for a process that is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    return int(stat.rpartition(b")")[2].split()[1])


def _signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):  # ended, or not ours
            continue
