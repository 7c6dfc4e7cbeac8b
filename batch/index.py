"""What the journal says about every row and sample: a state, the number of its tries, and where two of them stand.

19 bytes for each row and sample, whatever the journal's size. Filled by one pass over all batch files, the only one
that reads every row (a merge mostly copies), kept up to date while the run goes on, and asked what is still to be run.
"""

import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import compress

from msgspec import Struct

from batch.dataset import Dataset
from batch.facts import MergePolicy, Tried
from batch.messages import Job, PromptEnded
from batch.reading import (
    AS_WRITTEN,
    CHANGED,
    COMPLETED,
    DISCARDED,
    FAILED,
    KEPT,
    MAX_TURNS,
    MOST_ATTEMPTS,
    OFFSET_BITS,
    PARTIAL,
    RETRYABLE,
    STATE,
    STATES,
    STOPPED,
    TIMEOUT,
    UNSEEN,
    Reader,
    Totals,
    place_of,
    read_files,
)
from batch.statistics import Statistics, TryTotals
from batch.store import RowFiles, RunDirectory
from tools.errors import UsageProblem

_PENDING = (UNSEEN, STOPPED, CHANGED)
_FAILURES = (RETRYABLE, FAILED)
_DONE = (COMPLETED, MAX_TURNS, TIMEOUT, PARTIAL, DISCARDED)
_REPEATS: dict[str, tuple[int, ...]] = {
    "none": (),
    "failed": (RETRYABLE,),
    "timeout": (TIMEOUT,),
    "incomplete": (MAX_TURNS, PARTIAL),
    "all": (RETRYABLE, FAILED, TIMEOUT, MAX_TURNS, PARTIAL),
}
"""Class of `retry` -> the states that a resume repeats, besides rows without an end."""

_SELECTED = 16  # added to the state of rows that this invocation is to run
_OFFSET = (1 << OFFSET_BITS) - 1
_OWN_NAME = re.compile(r"task_(0|[1-9]\d*)")


class Counts(Struct, frozen=True, kw_only=True):
    """Rows times samples. `completed` is every end but failed; stopped ones are pending."""

    total: int
    completed: int
    failed: int
    pending: int


class JournalIndex:
    """See the module. A slot is `row * samples + sample`; a place is a batch number and an offset, 0 for none."""

    def __init__(self, directory: RunDirectory, dataset: Dataset, order: Sequence[int], samples: int = 1) -> None:
        self.directory = directory
        self.dataset = dataset
        self.samples = samples
        self.order = order
        self.policy = MergePolicy()
        self.totals = TryTotals()
        self.statistics = Statistics()  # of the last try of every slot; as it was read: not to be asked after `note`
        self.tool_calls: Counter[str] = Counter()  # of the last try of every slot
        self.foreign = 0  # lines that are no rows
        self.strange: set[str] = set()  # keys of rows that are not in the dataset
        self.elsewhere = 0  # rows that are not in the dataset, or of a sample that is not asked for
        self._files = RowFiles(directory.batch_path)
        slots = len(dataset) * samples
        self._state = bytearray(slots)
        self._attempts = bytearray(slots)
        self._last = array("Q", bytes(8 * slots))
        self._kept = array("Q", bytes(8 * slots))
        self._kept_attempt = bytearray(slots)
        self._superseded = array("Q")  # places of tries that were counted, but are not their row's last one
        self._processed = array("I")  # tries by batch number
        self._discarded = array("I")
        self._select()

    def _select(self) -> None:
        for row in self.order:
            for slot in self._slots(row):
                self._state[slot] = _SELECTED

    def close(self) -> None:
        """The files that it read from."""
        self._files.close()

    def _slots(self, row: int) -> range:
        return range(row * self.samples, (row + 1) * self.samples)

    # --- filling

    def note(self, ended: PromptEnded) -> None:
        """A try that has just ended."""
        self.totals.add(ended.api_calls, ended.spend, ended.duration_seconds, ended.start_retries)
        state = RETRYABLE if ended.status == "failed" and ended.retryable else STATES[ended.status]
        is_discard = state == DISCARDED and ended.reason == "no_reasoning"
        self._count(ended.batch_num, int(state != STOPPED), int(is_discard))
        for name, tally in ended.tool_stats.items():
            self.tool_calls[name] += tally[0]
        code = state + (KEPT if self.policy.keeps(ended.status) else 0)
        slot = ended.prompt_index * self.samples + ended.sample_index
        self._enter(slot, place_of(ended.batch_num, ended.offset), ended.attempt, code)
        self._take_back()

    def read(self, batch_nums: Sequence[int], processes: int | None = None) -> None:
        """Batch files. See `read_files`."""
        make = partial(Reader, self.directory.batch_path, self.dataset, self.samples, self.policy)
        for piece in read_files(make, batch_nums, len(self._state), processes):
            if isinstance(piece, Totals):
                self._add(piece)
                continue
            for each in zip(piece.slots, piece.places, piece.attempts, piece.codes, strict=True):
                self._enter(*each)
        self._take_back()

    def _add(self, totals: Totals) -> None:
        self.totals += totals.of_tries
        self.statistics += totals.statistics
        self.tool_calls.update(totals.tool_calls)
        self.foreign += totals.foreign
        self.elsewhere += totals.elsewhere
        self.strange |= totals.strange
        for batch in totals.batches:
            self._count(*batch)

    def _enter(self, slot: int, place: int, attempt: int, code: int) -> None:
        """A try, as `Found` has it, whose numbers have been added already."""
        before, state = self._state[slot], code & STATE
        if state == CHANGED:
            if before & STATE == UNSEEN:
                self._state[slot] = before + CHANGED
            return
        is_last = attempt >= self._last_attempt(slot)
        if code & KEPT and attempt >= self._kept_attempt[slot]:
            self._kept[slot] = place
            self._kept_attempt[slot] = min(attempt, MOST_ATTEMPTS)
            self._state[slot] = before = (before & ~AS_WRITTEN) + (code & AS_WRITTEN)
        if not is_last:
            self._superseded.append(place)
            return
        if self._last[slot]:
            self._superseded.append(self._last[slot])
        self._state[slot] = (before & ~STATE) + state
        self._last[slot] = place
        if state != STOPPED:
            self._attempts[slot] = min(attempt, MOST_ATTEMPTS)

    def _take_back(self) -> None:
        """The numbers of tries that are not their row's last one."""
        for place in self._superseded:
            tried = Tried.read(self.line(place), self.policy)
            self.statistics.take(tried, -1)
            self.tool_calls.subtract(tried.tools.calls)
        del self._superseded[:]

    def _count(self, batch_num: int, processed: int, discarded: int) -> None:
        missing = batch_num + 1 - len(self._processed)
        if missing > 0:
            self._processed.extend([0] * missing)
            self._discarded.extend([0] * missing)
        self._processed[batch_num] += processed
        self._discarded[batch_num] += discarded

    # --- asking

    def _last_attempt(self, slot: int) -> int:
        return self._attempts[slot] + (self._state[slot] & STATE == STOPPED)

    def next_job(self, row: int, sample: int) -> Job:
        """The slot's next try. A stopped one is made up for: it was none."""
        return self.dataset.job(row, sample, self._attempts[row * self.samples + sample] + 1)

    def pending(self, retry: Collection[str], only_ids: Collection[str], max_attempts: int) -> Iterator[Job]:
        """What is to be run, in the run's order, as things stand when each is asked for.

        `only_ids`: these rows alone, whatever became of them; without it, as `retry` (classes of _REPEATS) and
        `max_attempts` say. UsageProblem for an id that no row has.
        """
        for row, sample in self._pending(retry, only_ids, max_attempts):
            yield self.next_job(row, sample)

    def count_pending(self, retry: Collection[str], only_ids: Collection[str], max_attempts: int) -> int:
        """How many jobs `pending` would give now."""
        return sum(1 for _ in self._pending(retry, only_ids, max_attempts))

    def _pending(
        self, retry: Collection[str], only_ids: Collection[str], max_attempts: int
    ) -> Iterator[tuple[int, int]]:
        if only_ids:
            yield from ((row, sample) for row in self.rows_named(only_ids) for sample in range(self.samples))
            return
        repeated = {state for name in retry for state in _REPEATS[name]}
        for row in self.order:
            for sample, slot in enumerate(self._slots(row)):
                state = self._state[slot] & STATE
                if state in _PENDING or (state in repeated and self._attempts[slot] < max_attempts):
                    yield row, sample

    def rows_named(self, ids: Collection[str]) -> list[int]:
        """Rows by id, or by the name that their position gives them; in dataset order."""
        rows = {task_id: self._row_named(task_id) for task_id in ids}
        if unknown := [task_id for task_id, row in rows.items() if row < 0]:
            raise UsageProblem(f"only_ids: no row of the dataset is called {', '.join(unknown)}")
        return sorted(set(rows.values()))

    def _row_named(self, task_id: str) -> int:
        row = self.dataset.find(f"id:{task_id}")
        if row < 0 and (own := _OWN_NAME.fullmatch(task_id)):
            position = int(own[1])
            return position if position < len(self.dataset) and not self.dataset.has_id(position) else -1
        return row

    def counts(self) -> Counts:
        """Of the rows to be run, and of those that have an end although they are not (a smaller max_samples)."""
        done, failed = self._number(_DONE), self._number(_FAILURES)
        pending = self._number(_PENDING, _SELECTED)
        return Counts(total=done + failed + pending, completed=done, failed=failed, pending=pending)

    @property
    def total(self) -> int:
        """See Counts."""
        return self.counts().total

    def by_status(self) -> dict[str, int]:
        """Rows times samples by the status of their last try; those without one are not in it."""
        numbers = {name: self._number((state,)) for name, state in STATES.items()}
        numbers["failed"] += self._number((RETRYABLE,))
        return {name: number for name, number in numbers.items() if number}

    def _number(self, states: Collection[int], bit: int = 0) -> int:
        """Slots in one of the states, and with that bit."""
        found = bytes(value for value in range(256) if value & STATE in states and value & bit == bit)
        return len(self._state) - len(self._state.translate(None, found))

    def changed(self) -> tuple[int, list[str]]:
        """Rows whose content is another one than that which was run, and the first ten of them by name."""
        rows = self._rows_with((CHANGED,))
        names = [self.dataset.job(row).task_id for row, _ in zip(rows, range(10), strict=False)]
        return self._number((CHANGED,)), names

    def _rows_with(self, states: Collection[int]) -> Iterator[int]:
        return dict.fromkeys(slot // self.samples for slot in self._slots_with(states)).__iter__()

    def _slots_with(self, states: Collection[int]) -> Iterator[int]:
        return compress(range(len(self._state)), self._state.translate(_membership(states)))

    def completed_rows(self) -> Iterator[int]:
        """Rows of which every sample has an end other than failed."""
        done = self._state.translate(_membership(_DONE))
        if self.samples == 1:
            return compress(range(len(done)), done)
        return (row for row in range(len(self.dataset)) if all(done[slot] for slot in self._slots(row)))

    def failed_lines(self) -> Iterator[tuple[int, bytes]]:
        """(row, its last try's line) of every slot that failed."""
        for slot in self._slots_with(_FAILURES):
            yield slot // self.samples, self.line(self._last[slot])

    def batches(self) -> Iterator[tuple[int, int, int]]:
        """(batch number, tries that ended in it, those discarded for lack of reasoning)."""
        for number, processed in enumerate(self._processed):
            yield number, processed, self._discarded[number]

    def as_written(self) -> bytes:
        """1 for each slot whose last kept try's line needs no change to stand in the merged file."""
        return bytes(self._state.translate(bytes(bool(value & AS_WRITTEN) for value in range(256))))

    def tries(self) -> Iterator[tuple[int, int, int, int]]:
        """(row, sample, place of the last try, place of the last kept one) of all that were tried, in dataset order."""
        for slot, last in enumerate(self._last):
            if last:
                yield slot // self.samples, slot % self.samples, last, self._kept[slot]

    def is_kept(self, row: int, sample: int, batch_num: int, attempt: int) -> bool:
        """Whether the last kept try is this one."""
        slot = row * self.samples + sample
        kept = self._kept[slot]
        same_file = kept > 0 and (kept - 1) >> OFFSET_BITS == batch_num
        return same_file and self._kept_attempt[slot] == max(0, min(attempt, MOST_ATTEMPTS))

    def first_samples(self) -> Iterator[tuple[int, int]]:
        """(row, place of the last try of its first sample, 0 without one) of all that are to be run or were, in dataset
        order."""
        for row, slot in enumerate(range(0, len(self._last), self.samples)):
            if self._last[slot] or self._state[slot] & _SELECTED:
                yield row, self._last[slot]

    def line(self, place: int) -> bytes:
        """The journal's line at a place."""
        return self._files.line((place - 1) >> OFFSET_BITS, (place - 1) & _OFFSET)


def scan_journal(
    directory: RunDirectory,
    dataset: Dataset,
    order: Sequence[int],
    *,
    samples: int = 1,
    policy: MergePolicy | None = None,
    processes: int | None = None,
) -> JournalIndex:
    """Reads every batch file once. `order`: the rows that are to be run; `processes`: see `read_files`."""
    index = JournalIndex(directory, dataset, order, samples)
    index.policy = policy or index.policy
    index.read(directory.batch_numbers(), processes)
    return index


def _membership(states: Collection[int]) -> bytes:
    return bytes(value & STATE in states for value in range(256))
