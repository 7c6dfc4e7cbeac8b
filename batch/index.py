"""What the journal says about every row and sample: a state, the number of its tries, and where two of them stand.

19 bytes for each row and sample, whatever the journal's size. Filled by one pass over all batch files, kept up to date
while the run goes on, and asked what is still to be run.
"""

import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import compress

import msgspec
from msgspec import Struct

from batch.dataset import Dataset, Job
from batch.facts import Facts, MergePolicy, call_counts, decode_facts, gpt_turns, status_under
from batch.messages import PromptEnded
from batch.statistics import Spent
from batch.store import RowFiles, RunDirectory
from tools.errors import UsageProblem

UNSEEN, COMPLETED, MAX_TURNS, TIMEOUT, PARTIAL, DISCARDED, RETRYABLE, FAILED, STOPPED, CHANGED = range(10)
"""States. RETRYABLE and FAILED are the two kinds of `failed`; CHANGED: only tries of a former content of the row."""

_STATES = {
    "completed": COMPLETED,
    "max_turns": MAX_TURNS,
    "timeout": TIMEOUT,
    "partial": PARTIAL,
    "discarded": DISCARDED,
    "failed": FAILED,
    "stopped": STOPPED,
}
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
_STATE = 15
_OFFSET_BITS = 40
_OFFSET = (1 << _OFFSET_BITS) - 1
_MOST_ATTEMPTS = 255
_OWN_NAME = re.compile(r"task_(0|[1-9]\d*)")


class _Try(Struct, frozen=True):
    """A try as the index takes it in. `called`: tools with their numbers of calls."""

    attempt: int
    state: int
    place: int
    called: Mapping[str, int]
    kept: bool


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
        self.spent = Spent()
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
        self.spent.add(ended.api_calls, ended.spend, ended.duration_seconds)
        state = RETRYABLE if ended.status == "failed" and ended.retryable else _STATES[ended.status]
        self._count(ended.batch_num, state, is_discard=ended.reason == "no_reasoning")
        slot = ended.prompt_index * self.samples + ended.sample_index
        called = {name: tally[0] for name, tally in ended.tool_stats.items()}
        place = _place(ended.batch_num, ended.offset)
        self._enter(slot, _Try(ended.attempt, state, place, called, self.policy.keeps(ended.status)))

    def read(self, batch_num: int, offset: int, line: bytes) -> None:
        """A line of the journal."""
        try:
            facts = decode_facts(line)
            state = _STATES[facts.status]
        except (msgspec.DecodeError, KeyError):
            self.foreign += 1
            return
        if state == FAILED and facts.retryable:
            state = RETRYABLE
        self.spent.add_facts(facts)
        self._count(batch_num, state, is_discard=facts.reason == "no_reasoning")
        row = self.dataset.find(facts.row_key)
        if row < 0 or not 0 <= facts.sample_index < self.samples:
            self.elsewhere += 1
            if row < 0:
                self.strange.add(facts.row_key)
            return
        slot = row * self.samples + facts.sample_index
        if not self.dataset.same(row, facts.row_sha):
            if self._state[slot] & _STATE == UNSEEN:
                self._state[slot] += CHANGED
            return
        self._read_into(slot, facts, state, _place(batch_num, offset), line)

    def _read_into(self, slot: int, facts: Facts, state: int, place: int, line: bytes) -> None:
        status, _ = status_under(self.policy, facts, gpt_turns(facts, line)[1])
        called = call_counts(bytes(facts.tool_stats))
        self._enter(slot, _Try(facts.attempt, state, place, called, self.policy.keeps(status)))

    def _enter(self, slot: int, tried: _Try) -> None:
        if tried.kept and tried.attempt >= self._kept_attempt[slot]:
            self._kept[slot] = tried.place
            self._kept_attempt[slot] = min(tried.attempt, _MOST_ATTEMPTS)
        if tried.attempt < self._last_attempt(slot):
            return
        if self._last[slot]:
            for name, count in call_counts(bytes(decode_facts(self.line(self._last[slot])).tool_stats)).items():
                self.tool_calls[name] -= count
        for name, count in tried.called.items():
            self.tool_calls[name] += count
        self._state[slot] = (self._state[slot] & _SELECTED) + tried.state
        self._last[slot] = tried.place
        if tried.state != STOPPED:
            self._attempts[slot] = min(tried.attempt, _MOST_ATTEMPTS)

    def _count(self, batch_num: int, state: int, *, is_discard: bool) -> None:
        missing = batch_num + 1 - len(self._processed)
        if missing > 0:
            self._processed.extend([0] * missing)
            self._discarded.extend([0] * missing)
        self._processed[batch_num] += state != STOPPED
        self._discarded[batch_num] += state == DISCARDED and is_discard

    # --- asking

    def _last_attempt(self, slot: int) -> int:
        return self._attempts[slot] + (self._state[slot] & _STATE == STOPPED)

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
        """How many those are now."""
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
                state = self._state[slot] & _STATE
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
        pending = sum(self._state.count(_SELECTED + state) for state in _PENDING)
        return Counts(total=done + failed + pending, completed=done, failed=failed, pending=pending)

    @property
    def total(self) -> int:
        """See Counts."""
        return self.counts().total

    def by_status(self) -> dict[str, int]:
        """Rows times samples by the status of their last try; those without one are not in it."""
        numbers = {name: self._number((state,)) for name, state in _STATES.items()}
        numbers["failed"] += self._number((RETRYABLE,))
        return {name: number for name, number in numbers.items() if number}

    def _number(self, states: Collection[int]) -> int:
        return sum(self._state.count(state) + self._state.count(_SELECTED + state) for state in states)

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

    def tries(self) -> Iterator[tuple[int, int, int, int]]:
        """(row, sample, place of the last try, place of the last kept one) of all that were tried, in dataset order."""
        for slot, last in enumerate(self._last):
            if last:
                yield slot // self.samples, slot % self.samples, last, self._kept[slot]

    def first_samples(self) -> Iterator[tuple[int, int]]:
        """(row, place of the last try of its first sample, 0 without one) of all that are to be run or were, in dataset
        order."""
        for row, slot in enumerate(range(0, len(self._last), self.samples)):
            if self._last[slot] or self._state[slot] & _SELECTED:
                yield row, self._last[slot]

    def line(self, place: int) -> bytes:
        """The journal's line at a place."""
        return self._files.line((place - 1) >> _OFFSET_BITS, (place - 1) & _OFFSET)


def scan_journal(
    directory: RunDirectory,
    dataset: Dataset,
    order: Sequence[int],
    *,
    samples: int = 1,
    policy: MergePolicy | None = None,
) -> JournalIndex:
    """Reads every batch file once. `order`: the rows that are to be run."""
    index = JournalIndex(directory, dataset, order, samples)
    index.policy = policy or index.policy
    for number in directory.batch_numbers():
        offset = 0
        with directory.batch_path(number).open("rb", buffering=1 << 20) as lines:
            for line in lines:
                index.read(number, offset, line)
                offset += len(line)
    return index


def _place(batch_num: int, offset: int) -> int:
    return (batch_num << _OFFSET_BITS) + offset + 1


def _membership(states: Collection[int]) -> bytes:
    return bytes(value & _STATE in states for value in range(256))
