"""Ctrl-C, SIGTERM and SIGHUP end a pass at once: what runs is killed, what was written is removed."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heed() -> None:
    """From now on the first of them that is not ignored raises SystemExit, with 128 and its number; no second one
    disturbs the putting away."""
    for number in INTERRUPTS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupted)


def _interrupted(number: int, _frame: object) -> NoReturn:
    for each in INTERRUPTS:
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


@contextmanager
def held() -> Iterator[None]:
    """They come at the end of the block. What is started in it has to `let_through` what it wants to hear."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_through() -> None:
    """For a process that was started while they were held."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)


def interrupt_before(error: BaseException | None) -> SystemExit | None:
    """The interrupt after which things were being put away when this went wrong, if that is how it came."""
    while error is not None and not isinstance(error, SystemExit):
        error = error.__context__
    return error
