"""A row's time: what waiting for a rate limit takes is not the row's."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class RowClock:
    """Counts a row's seconds and ends it by `asyncio.timeout`; time inside `paused()` does not count. `deadline` is in
    the loop's time, which is `time.monotonic()`."""

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.deadline = self._loop.time() + seconds
        self.waited = 0.0
        self.pauses = 0
        self.timeout = asyncio.timeout(seconds)
        self._paused_at = 0.0

    def remaining(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self.deadline - (self._paused_at if self.pauses else self._loop.time()))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The clock stands still while anyone is inside."""
        if not self.pauses:
            self._paused_at = self._loop.time()
            self._reschedule(None)
        self.pauses += 1
        try:
            yield
        finally:
            self.pauses -= 1
            if not self.pauses:
                self._resume()

    def _resume(self) -> None:
        waited = self._loop.time() - self._paused_at
        self.waited += waited
        self.deadline += waited
        self._reschedule(self._loop.time() + self.remaining())

    def _reschedule(self, when: float | None) -> None:
        try:
            self.timeout.reschedule(when)
        except RuntimeError:  # not entered yet, or over already: nothing to move
            return
