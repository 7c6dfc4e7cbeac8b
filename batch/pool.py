"""Where workers run: processes forked from a server that has imported what is heavy, or this process (`num_workers=0`).

Not `multiprocessing.Pool`: that waits for ever for the work of a worker that was killed. Here each worker has one
socket and an exit status; whatever it leaves is found in its batch files. A row that was running when its worker died
is run again in a worker that runs nothing else: only a death there is that row's own.
"""

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Protocol

import msgspec

from agent.errors import RunStopped, Stopping, StopReason
from agent.faults import Fault, attempted, fault_of
from agent.models.base import Lease, Verdict
from agent.models.gate import RunGate
from batch.exits import STOP_GRACE, InternalFaultError
from batch.messages import (
    NO_ROW,
    Ask,
    BatchJob,
    Broken,
    Finish,
    Granted,
    Heartbeat,
    Job,
    Log,
    PromptEnded,
    PromptStarted,
    Refused,
    Release,
    Retire,
    Stop,
    ToParent,
    Unask,
    WantBatch,
    Wire,
    parent_side,
)
from batch.processes import start_worker
from batch.work import OpenBatch
from batch.worker import Worker, WorkerSpec
from tools.errors import UsageProblem

SILENCE = 10.0  # seconds without a heartbeat, with a row past its deadline: the loop is blocked
CUT_GRACE = 12.0  # seconds that they have once they were cut off
LAST_WORDS = 1.0  # seconds in which a dead worker's socket is read to its end
EXIT_GRACE = 15.0  # seconds that an idle worker has to close what it opened
FRUITLESS = 10  # workers in a row that die before they ask for rows: something is wrong with us

Key = tuple[str, int]  # row_key, sample_index


class Events(Protocol):
    """What the run hears, always in the parent's loop."""

    def next_batch(self, free: int, open_batch: OpenBatch | None, *, single: bool) -> BatchJob | None:
        """The next rows to run, for a worker with so many free slots and that open batch; None when there are none now.
        `single`: requeued rows, one alone."""

    def ended(self, message: PromptEnded, job: Job | None) -> None:
        """A row is on disk."""

    def died(self, batch_num: int, job: Job, cause: str) -> None:
        """A row killed its worker while it ran alone: write its row."""

    def recover(self, batch_nums: list[int]) -> list[PromptEnded]:
        """Mends the tails of a dead worker's batch files and gives the rows in them."""

    def requeue(self, jobs: list[Job], *, suspect: bool) -> None:
        """Rows without an end, to be run again; suspects one at a time, alone."""

    def has_suspects(self) -> bool:
        """Whether rows wait that are to be run alone."""

    async def reap(self) -> None:
        """Removes the sandboxes of dead workers."""

    def log(self, message: Log) -> None:
        """A line for run.log."""


def job_key(job: Job) -> Key:
    """What a job is known by."""
    return (job.row_key, job.sample_index)


class Member:
    """One worker as the parent sees it."""

    def __init__(self, pool: "Pool", *, slots: int, alone: bool) -> None:
        self.wire: Wire = parent_side(self._receive)
        self.slots = slots
        self.alone = alone
        self.batches: dict[int, dict[Key, Job]] = {}
        self.open_batch: OpenBatch | None = None
        self.started: dict[Key, float] = {}  # rows that run, with their deadlines (monotonic)
        self.wants = 0  # free slots for which it has asked for rows
        self.retiring = False
        self.last_beat = time.monotonic()
        self.was_ready = False
        self.is_over = False
        self.process: BaseProcess | None = None
        self.task: asyncio.Task[None] | None = None
        self._pool = pool
        self._leases: dict[tuple[int, int], Lease] = {}  # by gate and number, as the asks
        self._asks: dict[tuple[int, int], asyncio.Task[None]] = {}

    @property
    def busy(self) -> bool:
        """Whether rows that it was given have no end yet."""
        return any(self.batches.values())

    @property
    def rows(self) -> int:
        """How many rows it was given that have no end yet."""
        return sum(map(len, self.batches.values()))

    def give(self, batch: BatchJob) -> None:
        """Sends it rows."""
        self.wants = 0
        given = self.open_batch.rows if self.open_batch and self.open_batch.number == batch.batch_num else 0
        self.open_batch = OpenBatch(batch.batch_num, given + len(batch.jobs))
        self.batches.setdefault(batch.batch_num, {}).update({job_key(job): job for job in batch.jobs})
        self.wire.send(batch)

    def kill(self) -> None:
        """At once. Its sandboxes go with it, or are removed by what reaps."""
        if self.process is not None:
            self.process.kill()
        elif self.task is not None:
            self.task.cancel()

    def let_go(self) -> None:
        """Gives back what it holds of the gate."""
        for task in self._asks.values():
            task.cancel()
        for (gate, _), lease in self._leases.items():
            self._pool.gates[gate].release(lease, Verdict(kind="abandoned"))
        self._asks.clear()
        self._leases.clear()

    def _receive(self, message: ToParent) -> None:
        self._pool.guard(lambda: self._take(message))

    def _take(self, message: ToParent) -> None:
        match message:
            case Ask():
                self._asked(message)
            case Release():
                self._leases.pop((message.gate, message.lease.id), None)
                self._pool.gates[message.gate].release(message.lease, message.verdict)
            case Heartbeat():
                self.last_beat = time.monotonic()
                self.started = {key: max(deadline, message.overdue_at) for key, deadline in self.started.items()}
            case PromptStarted():
                self.started[(message.row_key, message.sample_index)] = message.deadline
            case PromptEnded():
                self._row_ended(message)
            case WantBatch():
                self.wants, self.was_ready = message.free, True
                self._pool.feed()
            case Unask():
                if task := self._asks.pop((message.gate, message.ask), None):
                    task.cancel()
            case Log():
                self._pool.events.log(message)
            case Retire():
                self.retiring = True
            case Broken():
                self._pool.broken(message)

    def _asked(self, message: Ask) -> None:
        try:
            lease = self._pool.gates[message.gate].acquire_now(message.tokens)
        except RunStopped as stop:
            self._refuse(message, stop)
            return
        if lease is None:
            self._asks[(message.gate, message.ask)] = asyncio.create_task(self._answer(message))
        else:
            self._grant(message, lease)

    async def _answer(self, message: Ask) -> None:
        try:
            self._grant(message, await self._pool.gates[message.gate].acquire(message.tokens))
        except RunStopped as stop:
            self._refuse(message, stop)
        finally:
            self._asks.pop((message.gate, message.ask), None)

    def _grant(self, message: Ask, lease: Lease) -> None:
        self._leases[(message.gate, lease.id)] = lease
        self.wire.send(Granted(message.ask, lease, message.gate))

    def _refuse(self, message: Ask, stop: RunStopped) -> None:
        self.wire.send(Refused(message.ask, stop.reason, stop.message, message.gate))

    def _row_ended(self, message: PromptEnded) -> None:
        key = (message.row_key, message.sample_index)
        self.started.pop(key, None)
        jobs = self.batches.get(message.batch_num, {})
        job = jobs.pop(key, None)
        if not jobs:
            self.batches.pop(message.batch_num, None)
        self._pool.events.ended(message, job)
        self._pool.feed()


class Pool:
    """Keeps workers busy until `events` has no more rows, or `stop` is called. `slots`: prompts in flight of each;
    `gates`: see `WorkerSpec`; `here`: they run in this process; `most_rows`: in flight over all workers, also over one
    that is opened for a single row, and over dead ones until their sandboxes are gone."""

    def __init__(
        self,
        spec: WorkerSpec,
        slots: Sequence[int],
        gates: Sequence[RunGate],
        events: Events,
        *,
        here: bool,
        most_rows: int | None = None,
    ) -> None:
        self.gates = gates
        self.events = events
        self.stop_reason: Stopping = ""
        self.problem: Exception | None = None
        self._spec = spec
        self._slots = slots
        self._here = here
        self._most_rows = most_rows
        self._left_rows = 0  # of dead workers whose sandboxes may still be there
        self._members: list[Member] = []
        self._changed = asyncio.Event()
        self._fruitless = 0
        self._unsettled = 0  # workers that are being opened, or whose end has yet to bring what takes their place
        self._endings: set[asyncio.Future[None]] = set()
        self.started = False  # the first workers are there
        self._cut_at = float("inf")
        self._kill_at = float("inf")
        self._starting = asyncio.Lock()  # a start changes what is the whole process's

    @property
    def running(self) -> int:
        """Prompts in flight."""
        return sum(len(member.started) for member in self._members)

    async def run(self) -> None:
        """To the end of the work. Raises UsageProblem or InternalFaultError if a worker could not go on."""
        watch = asyncio.create_task(self._watch())
        try:
            await asyncio.gather(*(self._open(slots=slots) for slots in self._slots))
            self.started = True
            self.feed()
            while self._members or self._unsettled:
                await self._changed.wait()
                self._changed.clear()
        finally:
            watch.cancel()
            for member in self._members:
                member.kill()
        if self.problem is not None:
            raise self.problem

    def stop(self, reason: StopReason, *, now: bool = False) -> None:
        """No new rows and no new model calls; with `now`, running rows are cut off. Ends in bounded time."""
        self.stop_reason = self.stop_reason or reason
        cut_at = time.monotonic() + (0 if now else STOP_GRACE)
        self._cut_at = min(self._cut_at, cut_at)
        self._kill_at = min(self._kill_at, cut_at + CUT_GRACE)
        for member in self._members:
            member.wire.send(Stop(self.stop_reason, now))
            self._drop_unstarted(member)
        self.feed()

    def broken(self, message: Broken) -> None:
        """A worker says that it cannot go on."""
        if message.kind == "stop":
            self._fail(RunStopped(message.reason, message.message), now=False)
        elif message.kind == "usage":
            self._fail(UsageProblem(message.message))
        else:
            self._fail(InternalFaultError(message.message))

    def guard(self, call: Callable[[], None]) -> None:
        """For what the event loop calls: an exception there would go nowhere, and the run would wait for ever."""
        try:
            outcome = attempted(call)
        except (UsageProblem, RunStopped) as problem:
            self._fail(problem)
            return
        if isinstance(outcome, Fault):
            self._fail(InternalFaultError(f"{outcome}\n{outcome.trace}"))

    def _fail(self, problem: Exception, *, now: bool = True) -> None:
        self.problem = self.problem or problem
        self.stop(problem.reason if isinstance(problem, RunStopped) else "fault", now=now)

    def feed(self) -> None:
        """Gives rows to whoever wants some; lets go whoever can have no more."""
        for member in sorted(self._members, key=lambda each: not each.alone):
            if self.stop_reason or member.retiring:
                if not member.busy:
                    self._finish(member)
            elif free := self._room(member.wants):
                batch = self.events.next_batch(free, member.open_batch, single=member.alone)
                if batch is not None:
                    member.give(batch)
        self._finish_all_if_done()

    def _room(self, wanted: int) -> int:
        """For how many more rows there is room, if so many are wanted."""
        if self._most_rows is None or not wanted:
            return wanted
        taken = self._left_rows + sum(member.rows for member in self._members)
        return max(0, min(wanted, self._most_rows - taken))

    # --- life of a worker

    async def _open(self, *, slots: int, alone: bool = False) -> None:
        self._unsettled += 1
        try:
            self._members.append(await self._opened(slots=slots, alone=alone))
        finally:
            self._unsettled -= 1

    async def _opened(self, *, slots: int, alone: bool) -> Member:
        member = Member(self, slots=slots, alone=alone)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: member.wire, sock=ours)
        spec = msgspec.structs.replace(self._spec, slots=slots)
        if self._here:
            member.task = asyncio.create_task(_serve_here(spec, theirs))
        else:
            async with self._starting:
                member.process = await asyncio.to_thread(start_worker, spec, theirs)
            loop.add_reader(member.process.sentinel, self._note_end, member)
        member.wire.closed.add_done_callback(lambda _: self._note_end(member))
        return member

    def _finish(self, member: Member) -> None:
        member.wire.send(Finish())

    def _finish_all_if_done(self) -> None:
        if self._unsettled:  # that may still bring work
            return
        idle = [member for member in self._members if member.wants and not member.busy]
        if len(idle) == len(self._members) and not self.stop_reason:
            for member in idle:
                self._finish(member)

    def _drop_unstarted(self, member: Member) -> None:
        for batch in member.batches.values():
            for key in [key for key in batch if key not in member.started]:
                del batch[key]

    def _note_end(self, member: Member) -> None:
        """Its process is gone, or its socket is closed. Either may be long before the other: a plug-in's child may hold
        the socket open."""
        if member.process is not None:
            asyncio.get_running_loop().remove_reader(member.process.sentinel)
        if member.is_over:
            return
        member.is_over = True
        self._unsettled += 1
        ending = asyncio.ensure_future(self._gone(member))
        self._endings.add(ending)
        ending.add_done_callback(self._gone_for_good)

    def _gone_for_good(self, ending: "asyncio.Future[None]") -> None:
        self._endings.discard(ending)
        self._unsettled -= 1
        self.guard(ending.result)
        self.guard(self.feed)
        self._changed.set()

    async def _gone(self, member: Member) -> None:
        """It ended, or died. What it said before is heard first."""
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(member.wire.closed), LAST_WORDS)
        member.wire.close()
        member.let_go()
        code = await self._exit_code(member)
        self._members.remove(member)
        if member.process is not None:
            member.process.close()
        if code:
            rows = member.rows
            self._left_rows += rows
            await self.events.reap()  # before its rows run again
            self._left_rows -= rows
        left = self._left_by(member)
        if left and not self.stop_reason:
            self._take_over(member, left, code)
        if not self.stop_reason:
            await self._replace(member, died=bool(left) or code != 0)

    async def _exit_code(self, member: Member) -> int:
        if member.process is None:
            assert member.task is not None
            outcome = (await asyncio.gather(member.task, return_exceptions=True))[0]
            if isinstance(outcome, Exception):
                self._fail(InternalFaultError(str(fault_of(outcome))))
            return 0
        await asyncio.to_thread(member.process.join, EXIT_GRACE)
        if member.process.exitcode is None:
            member.process.kill()
            await asyncio.to_thread(member.process.join, EXIT_GRACE)
        return member.process.exitcode or 0

    def _left_by(self, member: Member) -> list[tuple[int, Job]]:
        """The jobs that have no row on disk. What is there, but was not said any more, is heard now."""
        open_batches = [number for number, jobs in member.batches.items() if jobs]
        for message in self.events.recover(open_batches) if open_batches else ():
            key = (message.row_key, message.sample_index)
            if job := member.batches.get(message.batch_num, {}).pop(key, None):
                self.events.ended(message, job)
        return [(number, job) for number in open_batches for job in member.batches[number].values()]

    def _take_over(self, member: Member, left: list[tuple[int, Job]], code: int) -> None:
        cause = f"signal={-code} ({signal.Signals(-code).name})" if code < 0 else f"exit status {code}"
        self.events.log(Log(NO_ROW, NO_ROW, f"a worker died: {cause}; {len(left)} of its rows have no end"))
        suspects = [job for _, job in left if job_key(job) in member.started]
        self.events.requeue([job for _, job in left if job_key(job) not in member.started], suspect=False)
        if not member.alone:
            self.events.requeue(suspects, suspect=True)
            return
        for number, job in left:
            if job_key(job) in member.started:
                self.events.died(number, job, cause)

    async def _replace(self, member: Member, *, died: bool) -> None:
        self._fruitless = self._fruitless + 1 if died and not member.was_ready else 0
        if self._fruitless >= FRUITLESS:
            self._fail(InternalFaultError(f"{FRUITLESS} workers in a row died before they were ready"))
            return
        if (died or member.retiring) and not member.alone:
            await self._open(slots=member.slots)
        await self._open_alone_if_needed()

    async def _open_alone_if_needed(self) -> None:
        if self.events.has_suspects() and not any(other.alone for other in self._members):
            await self._open(slots=1, alone=True)

    async def _watch(self) -> None:
        """Enforces from outside what a worker whose loop is blocked cannot do itself."""
        while True:
            await asyncio.sleep(0.5)
            now = time.monotonic()
            if self.stop_reason and now >= self._cut_at:
                self._cut_at = float("inf")
                self.stop(self.stop_reason, now=True)
            for member in self._members:
                blocked = now - member.last_beat > SILENCE and min(member.started.values(), default=now) < now
                if now >= self._kill_at or (blocked and member.process is not None):
                    member.kill()


async def _serve_here(spec: WorkerSpec, connection: socket.socket) -> None:
    worker = Worker(spec)
    await asyncio.get_running_loop().create_connection(lambda: worker.wire, sock=connection)
    try:
        await worker.run()
    finally:
        worker.wire.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(worker.wire.closed), 2)
