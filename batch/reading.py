"""Reads batch files line by line: what each line says by itself, whatever other lines say of the same row.

This is what takes the time of a resume, so a large journal is read by several processes, each its share of the files.
They are forked here, since they need the dataset as it is in memory; what they find comes back in files in memory.
"""

import os
import pickle
import signal
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from batch.dataset import Dataset
from batch.facts import MergePolicy, Tried
from batch.signals import SIGNALS
from batch.statistics import Gathering, Statistics, TryTotals

UNSEEN, COMPLETED, MAX_TURNS, TIMEOUT, PARTIAL, DISCARDED, RETRYABLE, FAILED, STOPPED, CHANGED = range(10)
"""States. RETRYABLE and FAILED are the two kinds of `failed`; CHANGED: only tries of a former content of the row."""

STATES = {
    "completed": COMPLETED,
    "max_turns": MAX_TURNS,
    "timeout": TIMEOUT,
    "partial": PARTIAL,
    "discarded": DISCARDED,
    "failed": FAILED,
    "stopped": STOPPED,
}
STATE = 15  # the bits of a number that are a state; others may be added:
AS_WRITTEN = 32  # the try is kept, and its line needs no change to stand in the merged file
KEPT = 64  # the try may stand in the merged file
MOST_ATTEMPTS = 255
OFFSET_BITS = 40

_WINDOW = 1 << 16
_ROWS = 1 << 14  # that are handed on together
_ROWS_WORTH_A_PROCESS = 20_000
_MOST_PROCESSES = 4


class Found:
    """Tries, as they stand in the files: slot, place, attempt, and state with what is added to it."""

    def __init__(self) -> None:
        self.slots = array("Q")
        self.places = array("Q")
        self.attempts = bytearray()
        self.codes = bytearray()


class Totals:
    """Sums over all tries, those too that are not their row's last."""

    def __init__(self) -> None:
        self.of_tries = TryTotals()
        self.statistics = Statistics()
        self.tool_calls: Counter[str] = Counter()
        self.batches: list[tuple[int, int, int]] = []  # number, tries, discarded for lack of reasoning
        self.foreign = 0  # lines that are no rows
        self.elsewhere = 0  # rows that are not in the dataset, or of a sample that is not asked for
        self.strange: set[str] = set()  # keys of rows that are not in the dataset


class Reader:
    """Finds rows of a dataset. To be used once."""

    def __init__(self, path_of: Callable[[int], Path], dataset: Dataset, samples: int, policy: MergePolicy) -> None:
        self._path_of = path_of
        self._dataset = dataset
        self._samples = samples
        self._policy = policy
        self._found = Found()
        self._totals = Totals()
        self._gathering = Gathering(self._totals.statistics, self._totals.tool_calls)

    def read(self, batch_nums: Sequence[int]) -> Iterator[Found | Totals]:
        """What was found, piece by piece; at last the totals."""
        for batch_num in batch_nums:
            with self._path_of(batch_num).open("rb", buffering=_WINDOW) as lines:
                yield from self._read(batch_num, lines)
        self._gathering.settle()
        yield self._found
        yield self._totals

    def _read(self, batch_num: int, lines: BinaryIO) -> Iterator[Found]:
        totals, offset = self._totals, 0
        processed = discarded = 0
        for line in lines:
            place = place_of(batch_num, offset)
            offset += len(line)
            try:
                tried = Tried.read(line, self._policy)
                state = STATES[tried.facts.status]
            except (msgspec.DecodeError, KeyError):
                totals.foreign += 1
                continue
            totals.of_tries.add_facts(tried.facts)
            if state != STOPPED:
                processed += 1
            if state == DISCARDED and tried.facts.reason == "no_reasoning":
                discarded += 1
            if state == FAILED and tried.facts.retryable:
                state = RETRYABLE
            self._enter(tried, state, place)
            if len(self._found.slots) == _ROWS:
                yield self._found
                self._found = Found()
        totals.batches.append((batch_num, processed, discarded))

    def _enter(self, tried: Tried, state: int, place: int) -> None:
        facts, found = tried.facts, self._found
        row = self._dataset.find(facts.row_key, facts.prompt_index)
        if row < 0 or not 0 <= facts.sample_index < self._samples:
            self._totals.elsewhere += 1
            if row < 0:
                self._totals.strange.add(facts.row_key)
            return
        if self._dataset.same(row, facts.row_sha):
            self._gathering.take(tried)
            if self._policy.keeps(tried.status):
                state += KEPT + (AS_WRITTEN if self._is_as_now(row, tried) else 0)
        else:
            state = CHANGED
        found.slots.append(row * self._samples + facts.sample_index)
        found.places.append(place)
        found.attempts.append(max(0, min(facts.attempt, MOST_ATTEMPTS)))
        found.codes.append(state)

    def _is_as_now(self, row: int, tried: Tried) -> bool:
        facts = tried.facts
        named = self._dataset.has_id(row) or facts.task_id == f"task_{row}"
        return named and facts.prompt_index == row and facts.status == tried.status


def place_of(batch_num: int, offset: int) -> int:
    """A line's place as one number, never 0."""
    return (batch_num << OFFSET_BITS) + offset + 1


def read_files(
    make_reader: Callable[[], Reader], batch_nums: Sequence[int], rows: int, processes: int | None = None
) -> Generator[Found | Totals, None, None]:
    """What readers find in all files, in the files' order. `rows`: about how many there are; `processes`: at most so
    many, by default one for each core if there is enough to do."""
    if processes is None:
        processes = max(1, min(len(os.sched_getaffinity(0)), _MOST_PROCESSES, rows // _ROWS_WORTH_A_PROCESS))
    share = -(-len(batch_nums) // processes) or 1
    shares = [batch_nums[first : first + share] for first in range(0, len(batch_nums), share)]
    others: list[_Other] = []
    try:
        others.extend(_Other(make_reader(), each) for each in shares[1:])
        for own in shares[:1]:
            yield from make_reader().read(own)
        for other in others:
            yield from other.found()
    finally:
        for other in others:
            other.end()


class _Other:
    """Another process that reads. What it does not bring to an end is read here."""

    def __init__(self, reader: Reader, batch_nums: Sequence[int]) -> None:
        self._reader = reader
        self._batch_nums = batch_nums
        self._results = os.fdopen(os.memfd_create("found"), "w+b")
        self._pid: int | None = None
        parent, mask = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:  # a signal must not make the other process do what this one does then
            with suppress(OSError):  # there can be no more processes now
                self._pid = os.fork()
            if self._pid == 0:
                self._read(parent)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def found(self) -> Iterator[Found | Totals]:
        """See `read_files`."""
        if self._wait() != 0:
            yield from self._reader.read(self._batch_nums)
            return
        self._results.seek(0)
        piece: Found | Totals | None = None
        while not isinstance(piece, Totals):
            piece = pickle.load(self._results)  # noqa: S301 - our own child's, in memory that nobody else has
            yield piece

    def end(self) -> None:
        """Whatever it is doing."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            self._wait()
        self._results.close()

    def _wait(self) -> int | None:
        """What it ended with; None if that cannot be told."""
        status = None
        if self._pid:
            with suppress(ChildProcessError):  # SIGCHLD is ignored here
                _, status = os.waitpid(self._pid, 0)
        self._pid = None
        return status

    def _read(self, parent: int) -> None:
        """In the other process. It never returns, and does not outlive its parent, whose lock it has too."""
        code = 1
        try:
            for piece in self._reader.read(self._batch_nums):
                if os.getppid() != parent:
                    break
                pickle.dump(piece, self._results, pickle.HIGHEST_PROTOCOL)
            else:
                self._results.flush()
                code = 0
        finally:
            os._exit(code)
