"""Exit codes, and the border at which every kind of error becomes one. What every program of ours ends by."""

import os
import shlex
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from agent.errors import RunStopped
from agent.faults import Fault, attempted
from batch.progress import plain, print_lines
from batch.signals import SIGNALS
from tools.errors import UsageProblem

FINISHED, SOME_FAILED, USAGE, STOPPED_EARLY, FAULT, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 70, 130, 143
RESUMABLE = (SOME_FAILED, STOPPED_EARLY, INTERRUPTED, TERMINATED)
EXIT_CODES = dict(zip(SIGNALS, (INTERRUPTED, TERMINATED), strict=True))
STOP_GRACE = 30.0  # seconds that running rows have to come to an end once a stop was asked for


class InternalFaultError(Exception):
    """A fault of our own that ends the program; the text holds the traceback."""


class _Terminated(KeyboardInterrupt):
    """SIGTERM where Ctrl-C would raise KeyboardInterrupt: before and after the work, which answers both itself."""


def _terminated(_number: int, _frame: object) -> NoReturn:
    raise _Terminated


@contextmanager
def _terminable() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def handlers_kept() -> Iterator[None]:
    """An event loop that has answered signals leaves none of the handlers that it found: here they are put back."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _be_silent() -> None:
    """What an interrupt left half begun (an event loop, a coroutine) would complain of it at its end."""
    sys.unraisablehook = lambda _: None
    warnings.simplefilter("ignore")


def open_standard_streams() -> None:
    """Those that the caller had closed lead nowhere, or the next files opened would take their places."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest descriptor that is free: this one
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", encoding="utf-8", closefd=False))


def exit_code(work: Callable[[], int]) -> int:
    """The exit code of one invocation; what `work` raises is printed."""
    open_standard_streams()
    try:
        with _terminable():
            outcome = attempted(work)
    except (UsageProblem, RunStopped) as problem:
        print_lines((plain(line) for line in f"error: {problem}".split("\n")), sys.stderr)
        return USAGE if isinstance(problem, UsageProblem) else STOPPED_EARLY
    except KeyboardInterrupt as interrupt:
        _be_silent()
        return TERMINATED if isinstance(interrupt, _Terminated) else INTERRUPTED
    if isinstance(outcome, Fault):
        print_lines([f"{outcome.trace}{outcome}"], sys.stderr)
        return FAULT
    return outcome.value


def called_as(module: str, command: str) -> str:
    """How the program of this module was started, or (by a program that calls it from Python) can be, for a shell in
    the same directory."""
    script = sys.argv[0]
    if Path(script).name not in (module, command):
        ours, here = Path(__file__).parents[1] / module, Path.cwd()
        script = str(ours.relative_to(here) if ours.is_relative_to(here) else ours)
    if not script.endswith(".py"):
        return shlex.quote(Path(script).name if shutil.which(Path(script).name) == script else script)
    python = next((each for each in ("python", "python3") if shutil.which(each) == sys.executable), sys.executable)
    return f"{shlex.quote(python)} {shlex.quote(script)}"
