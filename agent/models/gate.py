"""The one gate of a run: every request of every worker asks here for leave, and tells here how it ended.

Policy only: no request is sent from here. One event loop, one instance, in the parent; time is that loop's.

Where a request may go is a `Slot`: one target with one of its keys. Requests go to the first target that has a slot
neither cooling, closed nor dead; they wait only when no target has one. The run stops when every slot is hopeless.
Verdicts on requests that were sent before a slot's last change do not change it again: a burst of equal answers counts
once.
"""

import asyncio
import random
from collections import deque
from collections.abc import Sequence
from typing import cast

from msgspec import Struct

from agent.errors import RunStopped, StopReason
from agent.models.account import Account, Entry
from agent.models.base import Lease, Verdict
from agent.models.pace import Sent
from agent.models.slots import Closure, Slot
from agent.types import Spend

COOL_DOWN_FIRST = 1.0  # seconds after a 429 that names no time, doubled by each further one
COOL_DOWN_LONGEST = 60.0
IN_VAIN = 0.1  # of that pause is kept at least where the time that a 429 names has brought nothing but 429s
CONFIRM_AFTER = 10.0  # seconds until a key that had worked is tried once more
START_WAIT = 4.0  # seconds that an endpoint which never answered is tried: with the rest of a start below 5
PROBE_LONGEST = 10.0  # seconds between two probes of an unreachable endpoint, from 0.5 doubling
ROW_FAULTS = 20  # rows in a row that end by an endpoint's refusal
LATE = 2.0  # time-outs beyond half of the good answers that halve the limit
UNKNOWN = 4  # requests at once under a limit of tokens until a reply tells how long replies are


class _Flight(Struct):
    """A request under way; `entry` is its place in the minute's account."""

    slot: Slot
    sent: Sent
    entry: Entry


class _Waiter(Struct, eq=False):
    tokens: int
    future: "asyncio.Future[Lease]"


class RunGate:
    """Fulfils `Gate`, first come first served. `targets`: the number of keys of the model, then of each fallback.
    `account`: what its requests count against, beside those of the gates of the run's other models."""

    def __init__(
        self,
        targets: Sequence[int] = (1,),
        concurrency: int = 16,
        account: Account | None = None,
        *,
        rate_limit_wait: float = 900.0,
        endpoint_wait: float = 300.0,
        rng: random.Random | None = None,
    ) -> None:
        account = account or Account()
        self._slots = [Slot(target, key, concurrency) for target, keys in enumerate(targets) for key in range(keys)]
        self._concurrency = concurrency
        self._minute = account.minute
        self._budget = account.budget
        self._rate_limit_wait = rate_limit_wait
        self._endpoint_wait = endpoint_wait
        self._rng = rng or random.Random()  # noqa: S311 - jitter, not a secret
        self._waiters: deque[_Waiter] = deque()
        self._flights: dict[int, _Flight] = {}
        self._next_id = 1
        self._timer: asyncio.TimerHandle | None = None
        self._row_faults = 0
        self._stopped: RunStopped | None = None

    # What others may see

    @property
    def spent(self) -> Spend:
        """All requests of all invocations, failed ones too."""
        return self._budget.spent

    @property
    def in_flight(self) -> int:
        """Requests under way."""
        return len(self._flights)

    @property
    def limit(self) -> int:
        """Requests that may be under way at once, as things stand."""
        usable = sum(slot.limit for slot in self._slots if slot.dead is None)
        return min(self._concurrency, usable)

    @property
    def held_to(self) -> float:
        """Requests a second that the pace lets go, 0 while it holds none up."""
        now = asyncio.get_running_loop().time()
        return sum(slot.pace.held_to(now) for slot in self._slots if slot.is_open(now))

    @property
    def cooling_until(self) -> float | None:
        """When requests go on, in the loop's time; None if nothing holds all of them up for a second or more."""
        now = asyncio.get_running_loop().time()
        if any(slot.is_open(now) for slot in self._slots):
            free_at = self._minute.free_at(now, self._waiters[0].tokens) if self._waiters else now
            return free_at if free_at >= now + 1 else None
        times = [at for slot in self._slots if (at := slot.opens_at()) is not None]
        return min(times, default=now)

    @property
    def cooling_reason(self) -> str:
        """What requests wait for while something holds all of them up."""
        now = asyncio.get_running_loop().time()
        if any(slot.is_open(now) for slot in self._slots):
            return "rpm or tpm"
        return "rate limit" if any(slot.cooling_until > now for slot in self._slots) else "endpoint"

    @property
    def stopped(self) -> RunStopped | None:
        """Why no further request is let go; None while they are."""
        return self._stopped

    # Requests

    async def acquire(self, tokens: int) -> Lease:
        """See `Gate`."""
        self._raise_if_stopped()
        waiter = _Waiter(tokens, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._let_go()
        try:
            return await waiter.future
        except asyncio.CancelledError:
            self._withdraw(waiter)
            raise

    def acquire_now(self, tokens: int) -> Lease | None:
        """A lease if `acquire` would not wait for one. Raises RunStopped."""
        self._raise_if_stopped()
        if self._waiters or self._budget.reached():
            return None
        now = asyncio.get_running_loop().time()
        slot, _ = self._way(now, tokens)
        return self._lease(slot, tokens, now) if slot else None

    def release(self, lease: Lease, verdict: Verdict) -> None:
        """See `Gate`. A lease that is not out (any more) changes nothing."""
        flight = self._flights.pop(lease.id, None)
        if flight is None:
            return
        flight.slot.in_flight -= 1
        self._minute.answer(flight.entry, verdict.tokens or verdict.spend.all_tokens)
        self._budget.add(verdict.spend)
        self._judge(lease, flight, verdict)
        if self._budget.reached():
            self.stop("budget", "the budget is spent")
        self._let_go()

    def stop(self, reason: StopReason, message: str) -> None:
        """No further request is let go; all that wait raise RunStopped. The first reason stays."""
        if self._stopped is None:
            self._stopped = RunStopped(reason, message)
        waiters, self._waiters = self._waiters, deque()
        for waiter in waiters:
            if not waiter.future.done():
                waiter.future.set_exception(RunStopped(self._stopped.reason, self._stopped.message))
        self._set_timer(None)

    # Rows

    def may_start_row(self, running: int) -> bool:
        """Whether the budget has room for one more row beside those running."""
        return self._stopped is None and not self._budget.reached() and self._budget.has_room(running)

    def row_ended(self, spend: Spend, completed: bool, row_fault: bool, *, ours: bool = False) -> None:
        """Counts a row. `row_fault`: what ended it may concern this row alone: a refusal of the endpoint, or, `ours`, a
        fault of this program."""
        self._budget.row_ended(spend)
        if completed:
            self._row_faults = 0
        elif row_fault:
            self._row_faults += 1
            if self._row_faults >= ROW_FAULTS:
                who = "a fault of this program (see run.log) ended" if ours else "the endpoint refused"
                self.stop("row_faults", f"{who} {ROW_FAULTS} rows in a row")

    # Letting go

    def _let_go(self) -> None:
        """Gives leases, in order, to as many as may go now, and sets the timer for the next."""
        now = asyncio.get_running_loop().time()
        if self._budget.reached():
            self.stop("budget", "the budget is spent")
        while self._waiters and self._stopped is None:
            waiter = self._waiters[0]
            if waiter.future.done():
                self._waiters.popleft()
                continue
            slot, look_again_at = self._way(now, waiter.tokens)
            if slot is None:
                self._set_timer(look_again_at)
                return
            self._waiters.popleft()
            waiter.future.set_result(self._lease(slot, waiter.tokens, now))
        self._set_timer(None)

    def _way(self, now: float, tokens: int) -> tuple[Slot | None, float | None]:
        """Where a request of so many tokens may go now; if nowhere, when time alone may change that."""
        slot = self._slot(now)
        if slot is None:
            return None, self._next_opening(now)
        if self._minute.is_new() and len(self._flights) >= UNKNOWN:
            return None, None
        free_at = self._minute.free_at(now, tokens)
        return (slot, None) if free_at <= now else (None, free_at)

    def _slot(self, now: float) -> Slot | None:
        """Where a request may go now: the first target with an open slot, even if that has no free place. Of its keys
        the one that failed least of late."""
        if len(self._flights) >= self._concurrency:
            return None
        target = next((slot.target for slot in self._slots if slot.is_open(now)), None)
        ready = (slot for slot in self._slots if slot.target == target and slot.may_send(now))
        return min(ready, key=lambda slot: slot.failed, default=None)

    def _next_opening(self, now: float) -> float | None:
        times = (slot.opens_at() for slot in self._slots)
        return min((at for at in times if at is not None and at > now), default=None)

    def _lease(self, slot: Slot, tokens: int, now: float) -> Lease:
        lease = Lease(id=self._next_id, target=slot.target, key=slot.key, probes=slot.doubted)
        self._next_id += 1
        slot.in_flight += 1
        if slot.closure is not None:
            slot.closure.probe = lease.id
        self._flights[lease.id] = _Flight(slot, slot.pace.send(now), self._minute.add(now, tokens))
        return lease

    def _set_timer(self, at: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if at is None else asyncio.get_running_loop().call_at(at, self._let_go)

    def _withdraw(self, waiter: _Waiter) -> None:
        """A cancelled waiter leaves nothing behind, not even a lease that it was given in the same moment."""
        if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
            self.release(waiter.future.result(), Verdict(kind="abandoned"))
        elif waiter in self._waiters:
            self._waiters.remove(waiter)
            self._let_go()

    def _raise_if_stopped(self) -> None:
        if self._stopped is not None:
            raise RunStopped(self._stopped.reason, self._stopped.message)

    # Judging

    def _judge(self, lease: Lease, flight: _Flight, verdict: Verdict) -> None:
        slot = flight.slot
        closure = slot.closure
        probing = closure is not None and closure.probe == lease.id
        if closure is not None and probing:
            closure.probe = 0
        if slot.dead is not None or verdict.kind == "abandoned":
            return
        current = probing or lease.id >= slot.changed
        now = flight.sent.answered_at = asyncio.get_running_loop().time()
        match verdict.kind:
            case "condemned":
                self._answered(slot, reopen=probing and slot.is_lost())
                if current:
                    self._condemn(slot, verdict, now)
            case "unreachable":
                if current:
                    self._lose(slot, flight, verdict, now)
            case "rate_limited":
                self._answered(slot, reopen=probing)
                slot.pace.refuse(flight.sent)
                self._cool_down(slot, verdict, now, current)
            case "ok":
                self._answered(slot, reopen=probing or slot.is_lost())
                self._praise(slot, current)
            case _:
                self._answered(slot, reopen=probing)
                if verdict.kind == "transient":
                    slot.fail(now)
                if verdict.reason == "request_timeout" and current:
                    self._count_late(slot)
        self._doubt(slot.target)
        self._stop_if_hopeless()

    def _doubt(self, target: int) -> None:
        """Of a target's keys, those that only fail while another might not."""
        keys = [slot for slot in self._slots if slot.target == target]
        is_hope = not all(slot.only_fails() or slot.is_hopeless(self._rate_limit_wait) for slot in keys)
        for slot in keys:
            slot.doubted = is_hope and slot.only_fails()

    def _answered(self, slot: Slot, *, reopen: bool) -> None:
        """The endpoint is there; that holds for all its keys."""
        for other in self._slots:
            if other.target == slot.target:
                other.answered = True
                if reopen and other.is_lost():
                    self._change(other, None)
        if reopen and slot.closure is not None:
            self._change(slot, None)

    def _condemn(self, slot: Slot, verdict: Verdict, now: float) -> None:
        if slot.closure is None and slot.worked:
            at = now + CONFIRM_AFTER
            self._change(slot, Closure(verdict, probe_at=at, give_up_at=at, pause=CONFIRM_AFTER))
        else:
            slot.dead = verdict

    def _lose(self, slot: Slot, flight: _Flight, verdict: Verdict, now: float) -> None:
        """No connection: the whole target closes until a probe gets through or its time is up."""
        closure = slot.closure
        if closure is None:
            wait = self._endpoint_wait if slot.answered else START_WAIT
            since = now if slot.answered else flight.sent.at
            closure = Closure(verdict, probe_at=now, give_up_at=since + wait, pause=0.25)
        closed = [other for other in self._slots if other.target == slot.target and other.dead is None]
        if now >= closure.give_up_at:
            for other in closed:
                other.dead = verdict
            return
        closure.pause = min(PROBE_LONGEST, closure.pause * 2)
        closure.probe_at = min(now + closure.pause, closure.give_up_at)
        for other in closed:
            self._change(other, closure)

    def _cool_down(self, slot: Slot, verdict: Verdict, now: float, current: bool) -> None:
        if slot.dry_since is None:
            slot.dry_since = now
        if current:
            self._halve(slot)
            slot.pause = min(COOL_DOWN_LONGEST, max(COOL_DOWN_FIRST, slot.pause * 2))
        if verdict.retry_after is not None:
            vain = IN_VAIN * slot.pause if current and slot.pause > COOL_DOWN_FIRST else 0.0
            slot.cooling_until = max(slot.cooling_until, now + max(verdict.retry_after, vain))
        elif current:
            least = 0.75 if slot.pace.is_learned else 1.0  # a burst of the last second still counts at the endpoint
            pause = min(COOL_DOWN_LONGEST, slot.pause * self._rng.uniform(least, least + 0.25))
            slot.cooling_until = max(slot.cooling_until, now + pause)

    def _count_late(self, slot: Slot) -> None:
        """More requests at once than an endpoint can serve in time only make all of them late."""
        slot.late += 1
        if slot.late > LATE:
            self._halve(slot)

    def _halve(self, slot: Slot) -> None:
        slot.limit = max(1, slot.limit // 2)
        slot.changed = self._next_id
        slot.good = 0
        slot.late = 0.0

    def _praise(self, slot: Slot, current: bool) -> None:
        slot.worked = True
        slot.failed = 0
        slot.dry_since = None
        if not current:
            return
        slot.pause = 0.0
        slot.late = max(0.0, slot.late - 0.5)
        slot.good += 1
        if slot.good >= slot.limit and slot.limit < self._concurrency:
            slot.limit += 1
            slot.good = 0

    def _change(self, slot: Slot, closure: Closure | None) -> None:
        slot.closure = closure
        slot.changed = self._next_id

    def _stop_if_hopeless(self) -> None:
        if self._stopped is not None or not all(slot.is_hopeless(self._rate_limit_wait) for slot in self._slots):
            return
        first = self._slots[0].dead
        if first is None:
            self.stop("quota", f"rate limits leave no request through within {self._rate_limit_wait:g} s")
        else:
            why = cast("StopReason", first.reason or first.kind)  # dead is only what is condemned or unreachable
            self.stop(why, first.message)
