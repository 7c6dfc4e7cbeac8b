"""The command line: words in, exit code out; every kind of error at its border."""

import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from agent.errors import RunStopped
from agent.faults import Fault, attempted
from batch.cli import open_standard_streams, show
from batch.invocation import run
from batch.progress import plain, print_lines
from batch.settings import load_settings
from tools.errors import UsageProblem

USAGE, STOPPED, FAULT, INTERRUPTED, TERMINATED = 2, 3, 70, 130, 143


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


def _be_silent() -> None:
    """What an interrupt left half begun (an event loop, a coroutine) would complain of it at its end."""
    sys.unraisablehook = lambda _: None
    warnings.simplefilter("ignore")


def invoke(words: Sequence[str]) -> int:
    """The exit code of one invocation."""
    open_standard_streams()
    try:
        with _terminable():
            outcome = attempted(lambda: _invoke(words))
    except (UsageProblem, RunStopped) as problem:
        print_lines((plain(line) for line in f"error: {problem}".split("\n")), sys.stderr)
        return USAGE if isinstance(problem, UsageProblem) else STOPPED
    except KeyboardInterrupt as interrupt:
        _be_silent()
        return TERMINATED if isinstance(interrupt, _Terminated) else INTERRUPTED
    if isinstance(outcome, Fault):
        print_lines([f"{outcome.trace}{outcome}"], sys.stderr)
        return FAULT
    return outcome.value


def _invoke(words: Sequence[str]) -> int:
    settings, action = load_settings(words, os.environ)
    if action != "run":
        show(action, os.environ)
        return 0
    return run(settings, words, os.environ)
