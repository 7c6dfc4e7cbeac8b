"""One invocation's work: rows are read in order, counted and planned in processes, summarized, written as they end.

Rows in flight are bounded, by number and by bytes; those that have ended wait in the journal, not in memory.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, closing
from hashlib import sha256
from typing import BinaryIO, ClassVar

from msgspec import Raw, Struct, structs

from agent.errors import ModelError, RunStopped
from agent.models.base import Tally
from agent.types import NO_SPEND, Spend
from batch.exits import EXIT_CODES, STOP_GRACE
from batch.progress import Pace, Progress, count_text, pace_facts, waiting_facts
from batch.spool import open_lines
from compression.crew import Crew
from compression.inputs import Scanned, Source, drawn, rows, sample_size
from compression.settings import CompressorSettings, policy_of
from compression.steps import unchanged
from compression.store import Ended, JournalReader, Paid, Records, RowKey, WorkFolder, record_line
from compression.summarizer import Summarizer, Summary
from compression.types import Ask, Done, Rejected, Step
from tools.threads import in_thread

TICK = 0.5  # seconds between looks at the display
CHUNK_ROWS, CHUNK_BYTES = 64, 1 << 18  # of rows that cross to a process together
BYTES_AHEAD = 1 << 24  # of rows that wait for their summaries
ROWS_AT_ONCE = 256  # read before anything else gets its turn
_SHA_DIGITS = 16


class Job(Struct, frozen=True, kw_only=True):
    """A row to be compressed."""

    key: RowKey
    line: bytes


class File(Struct, frozen=True, kw_only=True):
    """An input as it was found."""

    source: Source
    scanned: Scanned


class CompressionSnapshot(Struct, frozen=True, kw_only=True):
    """Where a run stands, over all its invocations. See `batch.progress.Snapshot`."""

    noun: ClassVar[str] = "rows"
    total: int
    ended: int = 0
    failed: int = 0
    summaries: int = 0  # under way
    model_calls: int = 0
    tokens: int = 0
    cost_usd: float = 0.0
    cooling: float = 0.0  # seconds until requests may go on
    cooling_reason: str = ""

    def facts(self, pace: Pace) -> list[str]:
        """See Snapshot."""
        return [
            *([f"failed {self.failed}"] if self.failed else []),
            f"{self.summaries} summaries under way",
            f"{count_text(self.tokens)} tokens",
            f"${self.cost_usd:.2f}",
            *pace_facts(pace),
            *waiting_facts(self.cooling, self.cooling_reason),
        ]


def line_sha(line: bytes) -> str:
    """By which the journal knows that a row is still the one it speaks of."""
    return sha256(line).hexdigest()[:_SHA_DIGITS]


def crew_for(settings: CompressorSettings) -> Crew:
    """The processes that count."""
    return Crew(
        settings.num_workers,
        policy_of(settings),
        settings.tokenizer,
        settings.chat_template,
        row_seconds=settings.per_trajectory_timeout,
    )


def selected(settings: CompressorSettings, number: int, file: File) -> Iterator[bool]:
    """For each row of a file in order whether it is to be compressed and written."""
    return drawn(file.scanned.rows, settings.sample_percent, f"{settings.seed}:{number}")


# --- reading


class Room:
    """Rows in flight: so many at the most, and so many bytes, unless it is one row alone."""

    def __init__(self, rows_limit: int, size_limit: int) -> None:
        self._rows_limit, self._size_limit = rows_limit, size_limit
        self._rows = self._size = 0
        self._changed = asyncio.Event()

    def is_full(self, size: int) -> bool:
        """Whether a row of this size must wait."""
        over = self._rows >= self._rows_limit or self._size + size > self._size_limit
        return over and self._rows > 0

    async def enter(self, size: int) -> None:
        """Waits until there is room."""
        while self.is_full(size):
            self._changed.clear()
            await self._changed.wait()
        self._rows += 1
        self._size += size

    def leave(self, size: int) -> None:
        """A row has ended."""
        self._rows -= 1
        self._size -= size
        self._changed.set()


class Stream:
    """The rows that have no end yet, in order, in chunks that enter `room` as they are read."""

    def __init__(self, settings: CompressorSettings, files: Sequence[File], records: Records) -> None:
        workers = max(1, settings.num_workers)
        in_chunks = 3 * workers
        self.room = Room(
            in_chunks * CHUNK_ROWS + 2 * settings.max_concurrent_requests, 2 * in_chunks * CHUNK_BYTES + BYTES_AHEAD
        )
        self._settings, self._files, self._records = settings, files, records
        self._chunk: list[Job] = []
        self._size = 0

    async def chunks(self) -> AsyncGenerator[list[Job], None]:
        """All of them. Raises UsageProblem if a file cannot be read, RunStopped if it was changed since its scan."""
        for number, file in enumerate(self._files):
            lines, _ = await in_thread(open_lines, str(file.source.path), None)
            with closing(lines):
                async for chunk in self._of_file(number, file, lines):
                    yield chunk
        if self._chunk:
            yield self._taken()

    async def _of_file(self, number: int, file: File, lines: BinaryIO) -> AsyncGenerator[list[Job], None]:
        read = 0
        for index, (line, taken) in enumerate(zip(rows(lines), selected(self._settings, number, file), strict=False)):
            read = index + 1
            if not read % ROWS_AT_ONCE:
                await asyncio.sleep(0)
            key = RowKey(number, index)
            if not taken or self._records.place(key) >= 0:
                continue
            size = len(line)
            if self._chunk and self._is_large(size):  # else it could hold the room that this row waits for
                yield self._taken()
            await self.room.enter(size)
            self._chunk.append(Job(key=key, line=line))
            self._size += size
        if read < file.scanned.rows:
            raise changed_since(file.source)

    def _is_large(self, more: int) -> bool:
        return len(self._chunk) >= CHUNK_ROWS or self._size + more > CHUNK_BYTES

    def _taken(self) -> list[Job]:
        chunk, self._chunk, self._size = self._chunk, [], 0
        return chunk


def changed_since(source: Source) -> RunStopped:
    """The file is not what it was when it was scanned."""
    return RunStopped("input", f"{source.shown} was changed while it was read")


# --- the work


class Asking(Struct, kw_only=True):
    """What asking for a row's summaries has brought and cost. The last of the summaries may still be refused."""

    summaries: list[str] = []
    requests: int = 0
    errors: int = 0
    tried: int = 0  # tries of answers refused since the last one that was taken
    tried_for_last: int = 0  # tries that led to the last of the summaries
    model: str = ""
    untold: Spend = NO_SPEND  # that no Paid tells of
    seconds: float = 0.0

    def took(self, summary: Paid) -> None:
        """Counts one more summary."""
        self.requests += summary.spend.requests
        self.errors += summary.errors
        self.model = summary.model or self.model
        if summary.withdraws:
            del self.summaries[-1:]
        if summary.problem:
            self.tried += summary.tries
        else:
            self.tried, self.tried_for_last = 0, self.tried + summary.tries
            self.summaries.append(summary.text)

    def lost(self, spend: Spend) -> None:
        """Counts requests that brought nothing."""
        self.requests += spend.requests
        self.errors += spend.requests
        self.untold += spend


def asked_so_far(job: Job, records: Records, reader: JournalReader) -> Asking:
    """What earlier invocations paid for, of a row without an end."""
    asking = Asking()
    for place in records.paid(job.key):
        found = reader.read(place)
        if found.sha != line_sha(job.line):
            continue
        if isinstance(found, Paid):
            asking.took(found)
        else:  # it failed before
            asking.requests = found.metrics.summarization_api_calls
            asking.errors = found.metrics.summarization_errors
    return asking


class Compression:
    """`stopped` says afterwards why it ended early, `signal_code` whether a signal did."""

    def __init__(
        self,
        settings: CompressorSettings,
        files: Sequence[File],
        folder: WorkFolder,
        records: Records,
        summarizer: Summarizer | None,
        progress: Progress,
    ) -> None:
        """`summarizer` is None for strategies that need none."""
        self.stopped: RunStopped | None = None
        self.signal_code = 0
        self._settings = settings
        self._records = records
        self._summarizer = summarizer
        self._progress = progress
        self._journal, self._reader = folder.writer(), folder.reader()
        self._crew = crew_for(settings)
        self._stream = Stream(settings, files, records)
        self._total = sum(sample_size(each.scanned.rows, settings.sample_percent) for each in files)
        self._asking = 0  # rows that wait for a summary
        self._task: asyncio.Task[None] | None = None

    async def execute(self) -> None:
        """Ends all rows that have no end, or as many as it may. Raises UsageProblem, InternalFaultError."""
        self._task = asyncio.current_task()
        self._listen()
        try:
            await self._executed()
        except RunStopped as stop:
            self.stopped = self.stopped or stop
        except asyncio.CancelledError:
            if not self.signal_code:
                raise
        if self.stopped is None and self._summarizer:
            self.stopped = self._summarizer.stopped

    async def _executed(self) -> None:
        async with AsyncExitStack() as stack:
            stack.callback(self._progress.close)
            stack.callback(self._reader.close)
            if self._summarizer:
                await stack.enter_async_context(self._summarizer)
            stack.push_async_callback(in_thread, self._journal.close)
            await stack.enter_async_context(self._crew)
            self._progress.open()
            ticking = asyncio.create_task(self._tick())
            try:
                await self._all_rows()
            finally:
                ticking.cancel()
                self._progress.update(self._snapshot())

    async def _all_rows(self) -> None:
        try:
            async with aclosing(self._stream.chunks()) as chunks, asyncio.TaskGroup() as group:
                async for chunk in chunks:
                    if self.signal_code:
                        break
                    group.create_task(self._begin(group, chunk))
        except BaseExceptionGroup as several:
            raise _first_of(several) from None

    async def _begin(self, group: asyncio.TaskGroup, jobs: Sequence[Job]) -> None:
        asking = [asked_so_far(job, self._records, self._reader) for job in jobs]
        items = [(job.line, tuple(each.summaries)) for job, each in zip(jobs, asking, strict=True)]
        for job, each, step in zip(jobs, asking, await self._crew.advance(items), strict=True):
            group.create_task(self._row(job, each, step))

    # --- one row

    async def _row(self, job: Job, asking: Asking, step: Step) -> None:
        try:
            while isinstance(step, Rejected):  # the last summary was not judged yet, or by another version
                await self._withdraw(job, asking, step.problem)
                step = await self._step(job, asking)
            done = await self._to_its_end(job, asking, step)
            if done:
                await self._end(job, asking, done)
        finally:
            self._stream.room.leave(len(job.line))

    async def _step(self, job: Job, asking: Asking) -> Step:
        (step,) = await self._crew.advance([(job.line, tuple(asking.summaries))], first=True)
        return step

    async def _to_its_end(self, job: Job, asking: Asking, step: Step) -> Done | None:
        """None: it was interrupted."""
        while isinstance(step, Ask):
            try:
                summary = await self._summary(job, asking, step)
            except (ModelError, RunStopped) as error:
                if isinstance(error, RunStopped) and self.signal_code:
                    await self._note_interrupted(job, asking, error.spend)
                    return None
                asking.lost(error.spend)
                return unchanged(job.line, step.metrics, str(error))
            paid = Paid(text=summary.text, model=summary.model, spend=summary.spend, tries=summary.tries)
            await self._take(job, asking, paid)  # before all else: whoever counts may be busy for long
            after = await self._step(job, asking)
            problem = after.problem if isinstance(after, Rejected) else ""
            self._judged(problem)
            if problem:
                await self._withdraw(job, asking, problem)
            if asking.tried >= self._settings.max_retries:
                return unchanged(job.line, step.metrics, problem)
            step = step if problem else after
        assert isinstance(step, Done)
        return step

    async def _take(self, job: Job, asking: Asking, paid: Paid) -> None:
        paid = structs.replace(paid, file=job.key.file, row=job.key.row, sha=line_sha(job.line))
        await self._write(paid)
        asking.took(paid)

    async def _note_interrupted(self, job: Job, asking: Asking, spend: Spend) -> None:
        """Requests that an interrupt made vain: they count, their tries do not."""
        if spend.requests:
            await self._take(job, asking, Paid(problem="interrupted", spend=spend, tries=0))

    async def _withdraw(self, job: Job, asking: Asking, problem: str) -> None:
        """The last summary is none."""
        tries, asking.tried_for_last = asking.tried_for_last, 0
        await self._take(job, asking, Paid(problem=problem, tries=tries, withdraws=True))

    def _judged(self, problem: str) -> None:
        if self._summarizer:
            self._summarizer.judged(problem)

    async def _summary(self, job: Job, asking: Asking, ask: Ask) -> Summary:
        assert self._summarizer is not None, "no strategy but summary asks"
        self._asking += 1
        tally = Tally()
        try:
            summary = await self._summarizer.summarize(
                ask,
                row_key=f"{job.key.file}:{job.key.row}",
                remaining=self._settings.per_trajectory_timeout - asking.seconds,
                tried=asking.tried,
                tally=tally,
            )
        except asyncio.CancelledError:  # cut off: there is time for a line
            await self._note_interrupted(job, asking, tally.spend)
            raise
        finally:
            self._asking -= 1
        asking.seconds += summary.seconds
        return summary

    async def _end(self, job: Job, asking: Asking, done: Done) -> None:
        metrics = structs.replace(
            done.metrics,
            summarization_api_calls=asking.requests,
            summarization_errors=asking.errors,
            summary_model=asking.model if done.metrics.passes else "",
        )
        line = b"" if done.line == job.line else done.line
        await self._write(
            Ended(
                file=job.key.file,
                row=job.key.row,
                sha=line_sha(job.line),
                metrics=metrics,
                spend=asking.untold,
                errors=asking.untold.requests,
                line=Raw(line),
            )
        )

    async def _write(self, record: Ended | Paid) -> None:
        place = await self._journal.append(0, record_line(record))
        self._records.note(record, place.offset)

    # --- signals and time

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number, code in EXIT_CODES.items():
            loop.add_signal_handler(number, self._interrupted, code)

    def _interrupted(self, code: int) -> None:
        """Once: summaries under way may end. Twice: at once."""
        if self.signal_code:
            self._cut_off()
            return
        self.signal_code = code
        self.stopped = self.stopped or RunStopped("interrupt", "interrupted")
        self._progress.note("interrupted: summaries under way are being saved (again to cut them off)")
        if self._summarizer:
            self._summarizer.stop("interrupt", "interrupted")
        asyncio.get_running_loop().call_later(STOP_GRACE, self._cut_off)

    def _cut_off(self) -> None:
        if self._task:
            self._task.cancel()

    async def _tick(self) -> None:
        while True:
            self._progress.update(self._snapshot())
            await asyncio.sleep(TICK)

    def _snapshot(self) -> CompressionSnapshot:
        snapshot = CompressionSnapshot(
            total=self._total, ended=self._records.ended, failed=self._records.failed, summaries=self._asking
        )
        if self._summarizer is None:
            return snapshot
        spent = self._summarizer.spent
        return structs.replace(
            snapshot,
            model_calls=spent.requests,
            tokens=spent.all_tokens,
            cost_usd=spent.all_cost,
            cooling=self._summarizer.cooling,
            cooling_reason=self._summarizer.cooling_reason,
        )


def _first_of(several: BaseExceptionGroup[BaseException]) -> BaseException:
    """What made a group of tasks end."""
    first = several.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first
