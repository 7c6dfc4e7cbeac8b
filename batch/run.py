"""One invocation's work: what the workers say becomes counts, checkpoints, log lines and further work."""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress

from agent.errors import RunStopped
from agent.models.account import Account, Budget, Minute
from agent.models.gate import RunGate
from agent.row import encode_row
from agent.text import Redactor, clean
from batch.checkpoint import write_checkpoint
from batch.ended import dead_row, ended_message
from batch.exits import EXIT_CODES, STOP_GRACE
from batch.hook import Hook
from batch.index import JournalIndex
from batch.leftovers import Leftovers, unremoved, warning_of
from batch.messages import NO_ROW, BatchJob, Job, Log, PromptEnded
from batch.plan import Plan
from batch.pool import Pool
from batch.prefetch import prefetch
from batch.progress import Progress, ProgressSnapshot, RunLog, counted
from batch.rows import parse_row
from batch.settings import RunSettings, at_once
from batch.store import RunDirectory
from batch.told import backend_settings
from batch.work import OpenBatch, Work
from batch.worker import WorkerSpec, unremoved_message
from tools.browser.folder import reap as reap_browsers
from tools.environments.base import Outspoken, Owner
from tools.environments.table import load_backend
from tools.errors import UsageProblem

TICK = 0.5  # seconds between looks at the clock, the gate and the display
CHECKPOINT_SECONDS = 5.0
CHECKPOINT_SHARE = 0.02  # of wall time at the most
REASONING_WARNING = 20  # ended rows without any reasoning after which the switch is named


def slots_of(settings: RunSettings, pending: int) -> Sequence[int]:
    """Prompts in flight for each worker: no more workers than there are batches or slots."""
    batches, slots = -(-pending // settings.batch_size), at_once(settings)
    workers = max(1, min(settings.num_workers, slots, batches))
    share, more = divmod(slots, workers)
    return [share + (number < more) for number in range(workers)]


def count_pending(index: JournalIndex, settings: RunSettings) -> int:
    """Rows and samples that an invocation with these settings runs."""
    return index.count_pending(settings.retry, settings.only_ids, settings.max_attempts)


class Run:
    """Fulfils the pool's `Events`. `stopped` says afterwards why it ended early, `signal_code` whether a signal did."""

    def __init__(
        self,
        plan: Plan,
        directory: RunDirectory,
        index: JournalIndex,
        *,
        pending: int,
        owner: Owner,
        redactor: Redactor,
    ) -> None:
        self.stopped: RunStopped | None = None
        self.signal_code = 0
        self._plan = plan
        self._settings = plan.settings
        self._directory = directory
        self._index = index
        self._owner = owner
        self._redactor = redactor
        self._log = RunLog(directory.log_path)
        self._backend = load_backend(plan.backend, backend_settings(plan.settings))
        self._leftovers = Leftovers(self._backend)
        self.left: tuple[str, ...] = ()  # names of sandboxes that could not be removed, once it has ended
        self._gates = self._make_gates()
        self._gate = self._gates[0]
        self._is_blind = False  # and the user knows it
        self._work = Work(
            index.pending(plan.settings.retry, plan.settings.only_ids, plan.settings.max_attempts),
            batch_size=plan.settings.batch_size,
            next_number=directory.next_batch_number(),
            may_start=self._gate.may_start_row,
        )
        self._progress = Progress(sys.stderr, plan.environ, quiet=plan.settings.quiet)
        self._hook: Hook | None = None
        self._pool = Pool(
            self._worker_spec(),
            slots_of(plan.settings, pending),
            self._gates,
            self,
            here=plan.settings.num_workers == 0,
            most_rows=plan.settings.max_sandboxes,
        )
        self._checkpoint_at = time.monotonic() + CHECKPOINT_SECONDS
        self._checkpointed_at: float | None = None
        self._not_before = 0.0
        self._since_checkpoint = 0
        self._requests_before = self._gate.spent.requests
        self._seen: Counter[bool] = Counter()  # rows ended in this invocation, by whether they had reasoning
        self.unjudged: set[tuple[str, int]] = set()  # rows whose checker failed

    # --- start to end

    async def execute(self) -> None:
        """Runs what is pending. Raises UsageProblem and InternalFaultError."""
        await self.reap()
        self._warn_of_backend()
        self._warn_of_absent_tools()
        if self._settings.prefetch_images:
            await self._prefetch()
        if self._plan.on_task_done:
            self._hook = Hook(self._plan.on_task_done, self._directory, self.say)
        self._listen()
        ticking = asyncio.create_task(self._tick())
        try:
            await self._pool.run()
        except RunStopped as stop:
            self.stopped = self.stopped or stop
        except UsageProblem as problem:
            if self._gate.spent.requests == self._requests_before:
                raise
            self.stopped = RunStopped("usage", str(problem))  # what was paid for is kept and merged
        finally:
            ticking.cancel()
            self._warn_of_eye()
            self._progress.update(self._snapshot())
            self._progress.close()
            await self.reap()
            await self._end_leftovers()
            if self._hook:
                await self._hook.close()
        self.stopped = self.stopped or self._gate.stopped or self._out_of_budget()
        if self.stopped:
            self.say(f"stopped early: {self.stopped.message}")
        self._write_checkpoint()
        self._log.close()

    def _make_gates(self) -> list[RunGate]:
        """The run's own, and that of a model beside it, which shares the account but ends no run."""
        settings, before = self._settings, self._index.totals
        account = Account(
            Minute(settings.rpm, settings.tpm),
            Budget(settings.max_cost, settings.max_total_tokens, before.spend, before.tries),
        )
        return [
            RunGate(
                model.keys,
                settings.concurrency,
                account,
                rate_limit_wait=settings.rate_limit_wait,
                endpoint_wait=settings.endpoint_wait,
            )
            for model in (self._plan.model, self._plan.eye)
            if model is not None
        ]

    def _worker_spec(self) -> WorkerSpec:
        return WorkerSpec(
            run_dir=str(self._directory.path.resolve()),
            slots=0,
            model=self._plan.model,
            eye=self._plan.eye,
            policy=self._plan.policy,
            backend=self._plan.backend,
            backend_settings=backend_settings(self._settings),
            owner=self._owner,
            success_checker=self._settings.success_checker,
        )

    async def _prefetch(self) -> None:
        """Images of what is pending. Rows of one that cannot be had try it themselves, and end without it."""
        settings = self._settings
        jobs = self._index.pending(settings.retry, settings.only_ids, settings.max_attempts)
        for fault in await prefetch((parse_row(job.line).image or settings.image for job in jobs), self._backend):
            self.say(f"warning: {fault}")

    def _warn_of_backend(self) -> None:
        for text in self._backend.warnings() if isinstance(self._backend, Outspoken) else ():
            self.say(f"warning: {text}")

    def _warn_of_absent_tools(self) -> None:
        if absence := self._plan.absence:
            self.say(f"warning: {absence}")

    def _out_of_budget(self) -> RunStopped | None:
        if not self._work.refused:
            return None
        return RunStopped("budget", "the budget has no room for another row")

    # --- signals and time

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        for number, code in EXIT_CODES.items():
            loop.add_signal_handler(number, self._interrupted, code)

    def _interrupted(self, code: int) -> None:
        """Once: running rows may end their current call. Twice: at once."""
        again = bool(self.signal_code)
        self.signal_code = self.signal_code or code
        if not again:
            self._progress.note("interrupted: running rows are being saved (again to cut them off)")
        if again:
            self._leftovers.give_up()
        if self._hook:
            self._hook.hurry(0.0 if again else STOP_GRACE)
        self.stop(RunStopped("interrupt", "interrupted"), now=again)

    def stop(self, why: RunStopped, *, now: bool = False) -> None:
        """No new rows, no new model calls."""
        self.stopped = self.stopped or why
        for gate in self._gates:
            gate.stop(why.reason, why.message)
        self._pool.stop(why.reason, now=now)

    async def _tick(self) -> None:
        opened = False
        while True:
            if not opened and self._pool.started:  # the display's thread comes after the workers' processes
                self._progress.open()
                opened = True
            if self._gate.stopped and not self._pool.stop_reason:
                self.stop(self._gate.stopped)
            self._warn_of_eye()
            if time.monotonic() >= self._checkpoint_at:
                self._checkpoint_if_due()
            self._progress.update(self._snapshot())
            await asyncio.sleep(TICK)

    def _warn_of_eye(self) -> None:
        """Once. The run goes on without its vision model."""
        lost = self._gates[-1].stopped
        if lost and not self._is_blind and not self._gate.stopped and lost.reason != "budget":
            self._is_blind = True
            self.say(f"warning: pictures can no longer be looked at: {lost.message}")

    def _snapshot(self) -> ProgressSnapshot:
        index, cooling = self._index, self._gate.cooling_until
        now = time.monotonic()
        return ProgressSnapshot(
            total=index.counts().total,
            by_status=index.by_status(),
            running=self._pool.running,
            limit=self._gate.limit,
            at_most=self._settings.concurrency,
            tool_calls=index.tool_calls.total(),
            model_calls=index.totals.api_calls,
            tokens=self._gate.spent.all_tokens,
            cost_usd=self._gate.spent.all_cost,
            checkpoint_age=None if self._checkpointed_at is None else now - self._checkpointed_at,
            cooling=max(0.0, cooling - asyncio.get_running_loop().time()) if cooling else 0.0,
            cooling_reason=self._gate.cooling_reason,
            held_to=self._gate.held_to,
        )

    # --- Events

    def next_batch(self, free: int, open_batch: OpenBatch | None, *, single: bool) -> BatchJob | None:
        """See Events."""
        return self._work.next_batch(free, open_batch, single=single)

    def ended(self, message: PromptEnded, job: Job | None) -> None:
        """See Events."""
        self._index.note(message)
        done = message.status in ("completed", "discarded")
        self._gate.row_ended(message.spend, done, message.row_fault, ours=message.error_class == "internal")
        self._work.ended(message, job, self._settings.max_attempts)
        line = self._line(message, job)
        self._log.write(line, message.batch_num, message.prompt_index)
        if self._settings.verbose:
            self._progress.note(f"[B{message.batch_num}:P{message.prompt_index}] {line}")
        if self._hook:
            self._hook.ended(message)
        self._warn_of_reasoning(message)
        self._warn_of_checker(message)
        self._since_checkpoint += 1
        if self._since_checkpoint >= self._settings.checkpoint_interval:
            self._checkpoint_if_due()

    def _line(self, message: PromptEnded, job: Job | None) -> str:
        reason = f" ({message.reason})" if message.reason and message.reason != message.status else ""
        calls = f"{counted(message.api_calls, 'call')}, {message.duration_seconds:.1f} s"
        prompt = self._redactor.text(clean(parse_row(job.line).text)) if job and self._settings.log_prefix_chars else ""
        texts = {"prompt": self._head(prompt), "error": self._head(message.error)}
        shown = "".join(f"; {name}: {text}" for name, text in texts.items() if text)
        return f"{message.task_id} {message.status}{reason}, {calls}{shown}"

    def _head(self, text: str) -> str:
        """On one line, as long as log lines may show a text."""
        return " ".join(text[: self._settings.log_prefix_chars].split())

    def _warn_of_checker(self, message: PromptEnded) -> None:
        if message.error_class != "checker_error":
            return
        if not self.unjudged:
            self.say(f"warning: the checker failed on {message.task_id}: its success_reason says how")
        self.unjudged.add((message.row_key, message.sample_index))

    def _warn_of_reasoning(self, message: PromptEnded) -> None:
        self._seen[message.has_reasoning] += 1
        if self._seen.total() == REASONING_WARNING and not self._seen[True] and not self._settings.keep_no_reasoning:
            self.say(f"the first {REASONING_WARNING} rows are discarded: no reasoning (--keep_no_reasoning keeps such)")

    def died(self, batch_num: int, job: Job, cause: str) -> None:
        """See Events."""
        plan = self._plan
        row = dead_row(
            job,
            batch_num,
            cause,
            plan.policy,
            model=plan.model.model,
            catalog=plan.catalog,
            redactor=self._redactor,
        )
        self._directory.mend_batch(batch_num)
        offset, length = self._directory.append(batch_num, encode_row(row))
        self.ended(ended_message(row, offset, length), job)

    def recover(self, batch_nums: list[int]) -> list[PromptEnded]:
        """See Events."""
        return list(self._recovered(batch_nums))

    def _recovered(self, batch_nums: list[int]) -> Iterator[PromptEnded]:
        for number in batch_nums:
            self._directory.mend_batch(number)
            for row, (offset, length) in self._directory.rows(number):
                yield ended_message(row, offset, length)

    def requeue(self, jobs: list[Job], *, suspect: bool) -> None:
        """See Events."""
        self._work.requeue(jobs, suspect=suspect)

    def has_suspects(self) -> bool:
        """See Events."""
        return self._work.has_suspects()

    async def reap(self) -> None:
        """See Events."""
        sandboxes, browsers = await self._backend.reap(), await asyncio.to_thread(reap_browsers)
        found = ((sandboxes, "sandbox", "sandboxes"), (browsers, "browser"))
        removed = ", ".join(counted(number, *words) for number, *words in found if number)
        if removed:
            self.say(f"removed what dead runs left: {removed}")
        if names := unremoved(self._backend):
            self.log(unremoved_message(self._plan.backend, names))

    async def _end_leftovers(self) -> None:
        self.left = await self._leftovers.close()
        if self.left:
            self.say(warning_of(self._backend, self.left))

    def log(self, message: Log) -> None:
        """See Events."""
        self._leftovers.add(message.left)
        self._log.write(self._redactor.text(clean(message.text)), message.batch_num, message.prompt_index)

    def say(self, text: str) -> None:
        """A line for the user and for run.log."""
        self.log(Log(NO_ROW, NO_ROW, text))
        self._progress.note(self._redactor.text(clean(text)))

    # --- checkpoints

    def _checkpoint_if_due(self) -> None:
        if time.monotonic() >= self._not_before:
            with suppress(RunStopped):  # the next one, or the journal, tells that the disk is full
                self._write_checkpoint()

    def _write_checkpoint(self) -> None:
        began = time.monotonic()
        write_checkpoint(self._directory, self._index, self._settings.run_name)
        now = time.monotonic()
        self._since_checkpoint = 0
        self._checkpointed_at = now
        self._checkpoint_at = now + CHECKPOINT_SECONDS
        self._not_before = now + (now - began) / CHECKPOINT_SHARE
