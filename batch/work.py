"""What is still to be run, cut into batches: rows without an end, rows to be tried again, rows of dead workers."""

from collections import deque
from collections.abc import Callable, Iterator

import msgspec
from msgspec import Struct

from batch.messages import BatchJob, Job, PromptEnded


class OpenBatch(Struct, frozen=True):
    """A worker's latest batch, and how many rows it has been given for it."""

    number: int
    rows: int


SECOND_CHANCES = ("environment_lost", "setup_timeout", "image_unavailable")
"""Faults of the surroundings: tried once more at the end of the same invocation."""


class Work:
    """Hands out batches, each with a number of its own. `may_start(outstanding)`: the budget's word on one more row."""

    def __init__(
        self,
        pending: Iterator[Job],
        *,
        batch_size: int,
        next_number: int,
        may_start: Callable[[int], bool],
    ) -> None:
        self.outstanding = 0  # rows handed out that have no end
        self._pending = pending
        self._batch_size = batch_size
        self._number = next_number
        self._may_start = may_start
        self._again: deque[Job] = deque()  # before anything else
        self._suspects: deque[Job] = deque()
        self._second: deque[Job] = deque()  # after everything else
        self._had_second: set[tuple[str, int]] = set()
        self._held: Job | None = None  # taken from `pending`, but not started for want of budget
        self.refused = False  # the budget held a row back

    def next_batch(self, free: int, open_batch: OpenBatch | None, *, single: bool) -> BatchJob | None:
        """Rows that start at once, `free` at most; None when there are none now. They go into the worker's open batch
        as long as that has room: no row waits in one worker while another has a free slot."""
        room = self._batch_size - open_batch.rows if open_batch and not single else 0
        jobs = list(self._suspect()) if single else list(self._take(min(free, room or self._batch_size)))
        if not jobs:
            return None
        if open_batch and room > 0:
            return BatchJob(open_batch.number, jobs)
        self._number += 1
        return BatchJob(self._number - 1, jobs)

    def requeue(self, jobs: list[Job], *, suspect: bool) -> None:
        """Rows whose worker died."""
        self.outstanding -= len(jobs)
        (self._suspects if suspect else self._again).extend(jobs)

    def has_suspects(self) -> bool:
        """Whether rows wait that are to be run alone."""
        return bool(self._suspects)

    def ended(self, message: PromptEnded, job: Job | None, max_attempts: int) -> None:
        """A row has an end; one that its surroundings failed gets a second chance, once."""
        self.outstanding -= 1
        key = (message.row_key, message.sample_index)
        if job is None or not message.retryable or message.error_class not in SECOND_CHANCES:
            return
        if key not in self._had_second and message.attempt < max_attempts:
            self._had_second.add(key)
            self._second.append(msgspec.structs.replace(job, attempt=message.attempt + 1))

    def _suspect(self) -> Iterator[Job]:
        if self._suspects:
            self.outstanding += 1
            yield self._suspects.popleft()

    def _take(self, size: int) -> Iterator[Job]:
        for _ in range(size):
            job = self._next()
            if job is None:
                return
            if not self._may_start(self.outstanding):
                self._held, self.refused = job, True
                return
            self.refused = False
            self.outstanding += 1
            yield job

    def _next(self) -> Job | None:
        if (held := self._held) is not None:
            self._held = None
            return held
        if self._again:
            return self._again.popleft()
        job = next(self._pending, None)
        if job is None and self._second and not self.outstanding:
            self._again, self._second = self._second, self._again
            return self._again.popleft()
        return job
