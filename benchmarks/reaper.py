"""Runs a command and writes what its whole process tree cost: `python -m benchmarks.reaper REPORT COMMAND...`.

It is a child subreaper: what the command leaves without a parent becomes its child. So the resource usage of every
descendant is counted, of each once, when it is waited for, here or by its parent. REPORT gets one line of five
numbers: exit code, seconds until the command's own end, user and system seconds of the tree, and the monotonic time of
the start.

Its stdin is a pipe that whoever started it holds open: at its end, also by the other's death, the tree is killed.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.processes import descendants

PR_SET_CHILD_SUBREAPER = 36
ROUND = 0.05  # seconds between two looks for what is to be killed


def main(report: str, command: list[str]) -> None:
    """See the module."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # nothing is blocked for the command
    began = time.monotonic()
    nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)  # for its stdin: ours is not for it
    first = os.posix_spawn(command[0], command, os.environ, file_actions=[nothing])
    threading.Thread(target=_kill_when_left, daemon=True).start()
    code, ended, user, system = 0, began, 0.0, 0.0
    while True:
        try:
            pid, status, usage = os.wait4(-1, 0)
        except ChildProcessError:
            break
        user += usage.ru_utime
        system += usage.ru_stime
        if pid == first:
            code, ended = os.waitstatus_to_exitcode(status), time.monotonic()
    Path(report).write_text(f"{code} {ended - began} {user} {system} {began}", encoding="ascii")


def _kill_when_left() -> None:
    """Again and again, as a tree may grow while it is killed: until all are waited for, and this process ends."""
    os.read(0, 1)
    while True:
        for pid, _ in descendants(os.getpid()):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(ROUND)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
