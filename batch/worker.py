"""A worker: one event loop, several batches at once, a share of the run's prompts in flight.

It owns the batch files of its batches while it runs. A row is on disk before the parent hears that it ended. It ends by
itself when the parent is gone.
"""

import asyncio
import io
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from agent.catalog import open_catalog
from agent.checkers import load_plugin
from agent.errors import RunStopped, Stopping
from agent.faults import Fault, attempted, fault_of, guarded
from agent.models.base import Lease, Verdict
from agent.models.table import ModelSpec, open_model
from agent.outcome import RolloutPolicy
from agent.rollout import Rollout, Surroundings
from agent.row import encode_row
from agent.secrets import redactor_for
from agent.steps import load_steps
from batch.ended import ended_message
from batch.journal import JournalWriter, children_path
from batch.leftovers import unremoved
from batch.lock import join
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
    PromptStarted,
    Refused,
    Release,
    Retire,
    Stop,
    ToParent,
    ToWorker,
    Unask,
    WantBatch,
    Wire,
    try_of,
    worker_side,
)
from batch.rows import parse_row
from batch.signals import SIGNALS
from tools.environments.base import BackendSettings, Owner
from tools.environments.owner import current_owner
from tools.environments.table import load_backend
from tools.errors import UsageProblem
from tools.services import Services, close_all

HEARTBEAT = 1.0  # seconds
ORPHAN = 12.0  # seconds that an orphan has to remove its sandboxes: less than a resume waits for it
CLOSE = 5.0  # seconds for connections and browsers at the worker's end
OVERRUN = 10.0  # seconds that a row past its deadline is given before it is cancelled, and again before it is left


class WorkerSpec(Struct, frozen=True, kw_only=True):
    """What a worker is told at its start. Plain values; of keys only the names of their variables. `eye`: the model
    that answers questions about pictures, where it is not the run's own. Each of the two has a gate, the eye's is the
    second."""

    run_dir: str
    slots: int
    model: ModelSpec
    eye: ModelSpec | None = None
    policy: RolloutPolicy
    backend: str
    backend_settings: BackendSettings = BackendSettings()
    owner: Owner
    success_checker: str = ""

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """One for each gate."""
        return (self.model, self.eye) if self.eye else (self.model,)


class RemoteGate:
    """One of the run's gates, asked over the wire."""

    def __init__(self, wire: Wire, gate: int) -> None:
        self._wire = wire
        self._gate = gate
        self._asks: dict[int, asyncio.Future[Lease]] = {}
        self._last = 0

    async def acquire(self, tokens: int) -> Lease:
        """See Gate."""
        self._last += 1
        ask = self._last
        answer: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._asks[ask] = answer
        self._wire.send(Ask(ask, tokens, self._gate))
        try:
            return await answer
        except asyncio.CancelledError:
            self._give_back(ask, answer)
            raise
        finally:
            self._asks.pop(ask, None)

    def _give_back(self, ask: int, answer: asyncio.Future[Lease]) -> None:
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            self.release(answer.result(), Verdict(kind="abandoned"))
        else:
            self._wire.send(Unask(ask, self._gate))

    def release(self, lease: Lease, verdict: Verdict) -> None:
        """See Gate."""
        self._wire.send(Release(lease, verdict, self._gate))

    def granted(self, message: Granted) -> None:
        """The parent's yes; whoever asked may be gone by now."""
        answer = self._asks.get(message.ask)
        if answer is None or answer.done():
            self.release(message.lease, Verdict(kind="abandoned"))
        else:
            answer.set_result(message.lease)

    def refused(self, message: Refused) -> None:
        """The parent's no."""
        answer = self._asks.get(message.ask)
        if answer is not None and not answer.done():
            answer.set_exception(RunStopped(message.reason, message.message))


class Overruns:
    """A row whose time ran out cancels itself. One that does not come back is cancelled again, then left: each once."""

    def __init__(self, send: Callable[[ToParent], None]) -> None:
        self._send = send
        self._cancelled: set[Rollout] = set()
        self._left: set[Rollout] = set()

    def end(self, running: Iterable[Rollout]) -> None:
        """What is due now for those that still run."""
        still = set(running)
        self._cancelled &= still
        self._left &= still
        for rollout in still - self._left:
            late = 0.0 if rollout.clock.pauses else time.monotonic() - rollout.clock.deadline
            if late > 2 * OVERRUN:
                self._leave(rollout)
            elif late > OVERRUN and rollout not in self._cancelled:
                self._cancel(rollout)

    def _cancel(self, rollout: Rollout) -> None:
        self._cancelled.add(rollout)
        rollout.time_out()
        self._send(Log(NO_ROW, rollout.which.prompt_index, "past its time and its clean-up: cancelled"))

    def _leave(self, rollout: Rollout) -> None:
        self._left.add(rollout)
        rollout.abandon()
        self._send(Retire())


class Worker:
    """Runs batches until told to finish. `receive` is called by the wire."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.wire = worker_side(self._receive)
        self._spec = spec
        self._gates = [RemoteGate(self.wire, number) for number, _ in enumerate(spec.models)]
        self._journal = JournalWriter(Path(spec.run_dir))
        self._children = JournalWriter(Path(spec.run_dir), children_path)
        self._running: dict[asyncio.Task[None], Rollout] = {}
        self._overruns = Overruns(self.wire.send)
        self._waiting: deque[tuple[int, Job]] = deque()
        self._wanted = False
        self._stop_reason: Stopping = ""
        self._finished = asyncio.Event()
        self._around: Surroundings | None = None

    async def run(self) -> None:
        """To the end of the work, or of the parent."""
        try:
            lock = join(Path(self._spec.run_dir) / "run.lock", self._spec.owner)
            self._around = self._open()
        except UsageProblem as problem:
            self.wire.send(Broken("usage", "usage", str(problem)))
            return
        heart = asyncio.create_task(self._beat(self._around))
        try:
            self._ask_for_rows()
            ended = asyncio.create_task(self._finished.wait())
            ends: list[asyncio.Future[Any]] = [ended, self.wire.closed]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
        finally:
            heart.cancel()
            await self._close(self._around)
            lock.release()

    def _open(self) -> Surroundings:
        spec, policy = self._spec, self._spec.policy
        model = open_model(spec.model, self._gates[0])
        return Surroundings(
            model=model,
            eye=open_model(spec.eye, self._gates[1]) if spec.eye else model if policy.tools.sees else None,
            backend=load_backend(spec.backend, spec.backend_settings),
            owner=current_owner(spec.owner.run_id),
            redactor=redactor_for(spec.models, os.environ, policy.tools)[0],
            checker=load_plugin(spec.success_checker) if spec.success_checker else None,
            catalog=open_catalog(policy.sources, policy.lacking),
            services=Services(policy.tools, os.environ),
            steps=load_steps(policy.steps, policy.steps_options, Path(spec.run_dir)) if policy.steps else None,
            stopping=lambda: self._stop_reason,
            log=lambda which, text: self.wire.send(Log(which.batch_num, which.prompt_index, text)),
        )

    async def _close(self, around: Surroundings) -> None:
        if self.wire.closed.done():  # the parent is gone, or closed on us
            self.forbid_writing()
        for rollout in self._running.values():
            rollout.stop("interrupt")
        if self._running:
            await asyncio.wait(list(self._running), timeout=OVERRUN)
        for journal in (self._children, self._journal):
            await asyncio.to_thread(journal.close)
        models = {around.model, around.eye or around.model}
        with suppress(TimeoutError):
            await asyncio.wait_for(close_all([around.services.close(), *(each.close() for each in models)]), CLOSE)
        self._tell_of_unremoved(around)

    def forbid_writing(self) -> None:
        """Without a parent nobody may write any more. From any thread."""
        self._children.forbid()
        self._journal.forbid()

    def _tell_of_unremoved(self, around: Surroundings) -> None:
        if names := unremoved(around.backend):
            self.wire.send(unremoved_message(around.backend.name, names))

    # --- messages

    def _receive(self, message: ToWorker) -> None:
        outcome = attempted(lambda: self._take(message))
        if isinstance(outcome, Fault):
            self._break(outcome)

    def _take(self, message: ToWorker) -> None:
        match message:
            case Granted():
                self._gates[message.gate].granted(message)
            case Refused():
                self._gates[message.gate].refused(message)
            case BatchJob():
                self._begin(message)
            case Stop():
                self._stop(message)
            case Finish():
                self._finished.set()

    def _stop(self, message: Stop) -> None:
        self._stop_reason = message.reason
        if message.now:
            for rollout in self._running.values():
                rollout.stop(message.reason)
        self._end_if_stopped()

    def _end_if_stopped(self) -> None:
        """Not left to the parent: of a row that could not be written it never hears that it ended."""
        if self._stop_reason and not self._running:
            self._finished.set()

    # --- rows

    def _begin(self, batch: BatchJob) -> None:
        self._wanted = False
        if not self._stop_reason:
            self._waiting.extend((batch.batch_num, job) for job in batch.jobs)
            self._start_next()

    def _start_next(self) -> None:
        """One row in each round of the loop: rows that begin at the same moment would go on in step, all waiting for
        the model at one time, all for the processor at another."""
        if self._waiting and not self._stop_reason:
            self._start(*self._waiting.popleft())
        if self._waiting and not self._stop_reason:
            asyncio.get_running_loop().call_soon(self._start_next)
        else:
            self._ask_for_rows()

    def _ask_for_rows(self) -> None:
        free = self._spec.slots - len(self._running) - len(self._waiting)
        if free > 0 and not self._wanted and not self._stop_reason:
            self._wanted = True
            self.wire.send(WantBatch(free))

    def _start(self, batch_num: int, job: Job) -> None:
        assert self._around is not None
        rollout = Rollout(parse_row(job.line), try_of(job, batch_num), self._spec.policy, self._around)
        self.wire.send(PromptStarted(batch_num, job.row_key, job.sample_index, rollout.clock.deadline))
        task = asyncio.create_task(self._roll(rollout))
        self._running[task] = rollout
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(fault_of(error))
        self._ask_for_rows()
        self._end_if_stopped()

    async def _roll(self, rollout: Rollout) -> None:
        row = await rollout.run()
        children = b"".join(map(encode_row, rollout.children()))
        try:
            if children:  # on disk first: no row lacks its children
                await self._children.append(row.metadata.batch_num, children)
            offset, length = await self._journal.append(row.metadata.batch_num, encode_row(row))
        except RunStopped as stop:
            self.wire.send(Broken("stop", stop.reason, stop.message))
            self._finished.set()  # what is still running here cannot be written either
            return
        if row.error_class == "internal":
            self.wire.send(Log(row.metadata.batch_num, row.prompt_index, row.error))
        self.wire.send(ended_message(row, offset, length))
        if (row.status, row.reason) == ("stopped", "disk") and not self._stop_reason:
            self.wire.send(Broken("stop", "disk", row.error))  # what stands beside the rows cannot be written

    def _break(self, fault: Fault) -> None:
        self.wire.send(Broken("fault", "fault", f"{fault}\n{fault.trace}"))

    async def _beat(self, around: Surroundings) -> None:
        while True:
            self.wire.send(Heartbeat(min((each.clock.deadline for each in self._running.values()), default=0.0)))
            self._overruns.end(self._running.values())
            self._tell_of_unremoved(around)
            await asyncio.sleep(HEARTBEAT)


def unremoved_message(backend: str, names: tuple[str, ...]) -> Log:
    """What the parent is told of sandboxes that it has to look after."""
    return Log(NO_ROW, NO_ROW, f"{backend}: not removed yet, and tried again: {', '.join(names)}", names)


class _Said(io.TextIOBase):
    """What plug-ins print: lines for run.log. The terminal is the parent's alone."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._loop = asyncio.get_running_loop()
        self._line = ""

    def writable(self) -> bool:
        """Part of TextIOBase."""
        return True

    def write(self, text: str) -> int:
        """From any thread."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            with suppress(RuntimeError):  # the loop is over
                self._loop.call_soon_threadsafe(self._wire.send, Log(NO_ROW, NO_ROW, line))
        return len(text)


def worker_main(spec_bytes: bytes, connection: socket.socket) -> None:
    """The entry of a worker process."""
    for number in SIGNALS:
        signal.signal(number, _pass_over)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    spec = msgspec.msgpack.decode(spec_bytes, type=WorkerSpec)
    asyncio.run(_serve(spec, connection))
    os._exit(0)  # whatever still hangs must not hold the process


def _pass_over(_number: int, _frame: object) -> None:
    """Not SIG_IGN: that a sandbox's commands would inherit."""


def _end_with_parent(worker: Worker) -> None:
    """A thread's work: an orphan writes no more and ends, even if its loop stands still."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    worker.forbid_writing()
    time.sleep(ORPHAN)
    os._exit(1)


async def _serve(spec: WorkerSpec, connection: socket.socket) -> None:
    worker = Worker(spec)
    os.register_at_fork(after_in_child=connection.close)  # a plug-in's child is not this worker
    threading.Thread(target=_end_with_parent, args=(worker,), daemon=True).start()
    await asyncio.get_running_loop().create_connection(lambda: worker.wire, sock=connection)
    sys.stdout = sys.stderr = _Said(worker.wire)
    os.dup2(2, 1)  # what plug-ins' children print: stdout is the summary's
    outcome = await guarded(worker.run())
    if isinstance(outcome, Fault):
        worker.wire.send(Broken("fault", "fault", f"{outcome}\n{outcome.trace}"))
    worker.wire.close()
    with suppress(TimeoutError):
        await asyncio.wait_for(worker.wire.closed, 2)
