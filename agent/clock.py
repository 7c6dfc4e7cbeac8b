"""A row's time: what waiting for a rate limit takes is not the row's."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager


class RowClock:
    """Counts a row's seconds and ends it by `asyncio.timeout`; time inside `paused()` does not count."""

    def __init__(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self.started = time.monotonic()
        self.waited = 0.0
        self.pauses = 0
        self.timeout = asyncio.timeout(seconds)

    def remaining(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self.deadline - time.monotonic())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The clock stands still inside."""
        began = time.monotonic()
        self.pauses += 1
        self._move(None)
        try:
            yield
        finally:
            waited = time.monotonic() - began
            self.waited += waited
            self.deadline += waited
            self.pauses -= 1
            self._move(asyncio.get_running_loop().time() + self.remaining())

    def _move(self, when: float | None) -> None:
        if self.timeout.when() is not None or self.pauses:
            self._reschedule(when)

    def _reschedule(self, when: float | None) -> None:
        try:
            self.timeout.reschedule(when)
        except RuntimeError:  # not entered yet, or over already: nothing to move
            return
