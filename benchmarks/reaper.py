"""Runs a command and writes what its whole process tree cost: `python reaper.py REPORT COMMAND...`.

It is a child subreaper: what the command leaves without a parent becomes its child. So the resource usage of every
descendant is counted, of each once, when it is waited for, here or by its parent. REPORT gets one line of five
numbers: exit code, seconds until the command's own end, user and system seconds of the tree, and the monotonic time of
the start.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def main(report: str, command: list[str]) -> None:
    """See the module."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # nothing is blocked for the command
    began = time.monotonic()
    first = os.posix_spawn(command[0], command, os.environ)
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


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
