"""The gate's policy, in virtual time: no test waits for real."""

import asyncio
import random
from typing import Any

import pytest

from agent.errors import RunStopped
from agent.models.account import Budget, Minute
from agent.models.base import Verdict
from agent.models.gate import RunGate
from agent.types import Spend, Usage
from tests.unit.gates import BAD_KEY, FAULT, GONE, LIMITED, LOST, OK, always, blocked, gate_of, once
from tests.virtual_time import now, virtual

# --- places


@virtual
async def test_never_more_requests_than_places_and_first_come_first_served() -> None:
    gate = gate_of([1], 3)
    order: list[int] = []
    peak = 0

    async def ask(number: int) -> None:
        nonlocal peak
        lease = await gate.acquire(0)
        order.append(number)
        peak = max(peak, gate.in_flight)
        await asyncio.sleep(1)
        gate.release(lease, OK)

    await asyncio.gather(*(ask(number) for number in range(10)))
    assert (peak, order, gate.in_flight, now()) == (3, list(range(10)), 0, 4.0)


@virtual
async def test_rising_time_outs_halve_the_limit_without_a_pause_and_rare_ones_do_not() -> None:
    late = Verdict(kind="transient", reason="request_timeout", message="no answer")
    gate = gate_of([1], 16)
    for _ in range(30):
        await once(gate, late)
        await once(gate, OK)
        await once(gate, OK)
    assert gate.limit == 16
    leases = [await gate.acquire(0) for _ in range(16)]
    for lease in leases:
        gate.release(lease, late)
    assert (gate.limit, now()) == (8, 0.0), "what was sent before the change does not halve it again"
    for _ in range(3):
        await once(gate, late)
    assert gate.limit == 4
    for _ in range(4):
        await once(gate, OK)
    assert gate.limit == 5


@virtual
async def test_a_burst_of_429_halves_once_and_good_answers_bring_it_back_one_by_one() -> None:
    gate = gate_of([1], 16)
    leases = [await gate.acquire(0) for _ in range(16)]
    for lease in leases:
        gate.release(lease, LIMITED)
    assert gate.limit == 8
    leases = [await gate.acquire(0) for _ in range(8)]
    assert await blocked(gate)
    gate.release(leases.pop(), LIMITED)
    assert gate.limit == 4
    for lease in leases:
        gate.release(lease, OK)
    assert gate.limit == 4, "answers to requests sent before the decrease prove nothing"
    for _ in range(4):
        await once(gate, OK)
    assert gate.limit == 5
    for _ in range(5):
        await once(gate, OK)
    assert gate.limit == 6


@virtual
async def test_the_limit_never_falls_below_one_nor_rises_above_the_concurrency() -> None:
    gate = gate_of([1], 2)
    for _ in range(5):
        await once(gate, LIMITED)
    assert gate.limit == 1
    for _ in range(20):
        await once(gate, OK)
    assert gate.limit == 2
    gate = gate_of([1], 4)
    for _ in range(500):
        await once(gate, OK)
    await once(gate, LIMITED)
    assert gate.limit == 2, "it had not grown beyond"


@virtual
async def test_a_cancelled_waiter_leaves_nothing_behind() -> None:
    gate = gate_of([1], 1)
    held = await gate.acquire(0)
    waiting = [asyncio.create_task(gate.acquire(0)) for _ in range(3)]
    await asyncio.sleep(1)
    waiting[0].cancel()
    gate.release(held, OK)  # gives the place to the second waiter ...
    waiting[1].cancel()  # ... which is cancelled before it can know
    lease = await waiting[2]
    assert gate.in_flight == 1
    gate.release(lease, OK)
    gate.release(lease, OK)
    assert gate.in_flight == 0
    assert not await blocked(gate)


# --- rate limits


@virtual
async def test_retry_after_pauses_everyone_for_exactly_as_long() -> None:
    gate = gate_of([1], 4)
    await once(gate, Verdict(kind="rate_limited", retry_after=3.0))
    assert gate.cooling_until == 3.0
    await asyncio.gather(*(once(gate, OK) for _ in range(3)))
    assert now() == 3.0
    assert gate.cooling_until is None


@virtual
async def test_without_retry_after_the_pause_doubles_from_one_second_to_sixty() -> None:
    gate = gate_of([1], 4, rate_limit_wait=1e6)
    pauses = []
    for _ in range(9):
        began = now()
        await once(gate, LIMITED)
        pauses.append(now() - began)
    for pause, longest in zip(pauses[1:], [1, 2, 4, 8, 16, 32, 60, 60], strict=True):
        assert longest <= pause <= min(60, 1.25 * longest)
    await once(gate, OK)
    began = now()
    await once(gate, LIMITED)
    await once(gate, OK)
    assert now() - began <= 1.25, "a success starts it over"


@virtual
async def test_next_key_then_fallback_then_waiting_and_back() -> None:
    gate = gate_of([2, 1], 4)
    seen = []
    for seconds in (10.0, 20.0, 5.0):
        lease = await once(gate, Verdict(kind="rate_limited", retry_after=seconds))
        seen.append((lease.target, lease.key))
    assert seen == [(0, 0), (0, 1), (1, 0)]
    assert gate.cooling_until == 5.0
    lease = await once(gate, OK)
    assert (lease.target, now()) == (1, 5.0)
    await asyncio.sleep(5)
    lease = await once(gate, OK)
    assert (lease.target, lease.key) == (0, 0)


@virtual
async def test_a_key_that_only_fails_comes_last_until_it_answers() -> None:
    gate = gate_of([2], 4)
    broken = Verdict(kind="transient", reason="server_error")
    assert (await once(gate, broken)).key == 0
    assert [(await once(gate, OK)).key for _ in range(3)] == [1, 1, 1]
    assert (await once(gate, broken)).key == 1
    assert (await once(gate, broken)).key == 0, "one failure each: the first of them"
    assert (await once(gate, OK)).key == 1
    await asyncio.gather(*(once(gate, OK) for _ in range(8)))


@virtual
async def test_requests_wait_for_a_key_that_pauses_rather_than_fail_with_one_that_only_fails() -> None:
    broken = Verdict(kind="transient", reason="server_error")
    gate = gate_of([2], 4)
    await once(gate, Verdict(kind="rate_limited", retry_after=10.0))
    failures = [await once(gate, broken) for _ in range(3)]
    assert [lease.key for lease in failures] == [1, 1, 1]
    probes = []
    while (lease := await gate.acquire(0)).key == 1:
        probes.append(now())
        assert await blocked(gate), "one probe at a time"
        gate.release(lease, broken)
    gate.release(lease, OK)
    assert probes == [1.0, 3.0, 7.0]
    assert now() == 10.0
    for _ in range(3):  # now that none is better
        lease = await once(gate, broken)
    held = [await gate.acquire(0) for _ in range(4)]
    assert {lease.key for lease in held} == {0, 1}


@virtual
async def test_a_key_that_is_limited_for_good_is_no_hope() -> None:
    gate = gate_of([2], 4, rate_limit_wait=8)
    broken = Verdict(kind="transient", reason="server_error")
    seen = []
    while now() < 30:
        lease = await gate.acquire(0)
        seen.append(lease)
        gate.release(lease, broken if lease.key else Verdict(kind="rate_limited", retry_after=2.0))
        await asyncio.sleep(0.1)
    first = next(place for place, lease in enumerate(seen) if lease.probes)
    assert [lease.probes for lease in seen[: first + 1] if lease.key] == [False, False, False, True]
    assert not any(lease.probes for lease in seen[-50:])
    assert sum(lease.key for lease in seen[-50:]) > 40, "rows may use up their tries"


@virtual
async def test_a_fallback_is_better_than_a_key_that_only_fails() -> None:
    gate = gate_of([2, 1], 4)
    await once(gate, Verdict(kind="rate_limited", retry_after=10.0))
    for _ in range(3):
        await once(gate, Verdict(kind="transient", reason="server_error"))
    held = [await gate.acquire(0) for _ in range(4)]
    assert {lease.target for lease in held} == {1}


@virtual
async def test_a_time_that_a_429_names_in_vain_is_not_believed_for_ever() -> None:
    gate = gate_of([1], 4)
    at_once = Verdict(kind="rate_limited", retry_after=0.0)
    await once(gate, at_once)
    await once(gate, at_once)
    assert now() == 0.0
    for _ in range(8):
        await once(gate, at_once)
    assert 10.0 < now() < 30.0
    await once(gate, OK)
    began = now()
    await once(gate, at_once)
    await once(gate, OK)
    assert now() == began, "a success starts it over"


@virtual
async def test_a_full_model_does_not_spill_over_to_the_fallback() -> None:
    gate = gate_of([1, 1], 8)
    await once(gate, LIMITED)
    await asyncio.sleep(2)
    leases = [await gate.acquire(0) for _ in range(4)]
    assert {lease.target for lease in leases} == {0}
    assert await blocked(gate)


@virtual
async def test_a_retry_after_above_what_may_be_waited_stops_the_run_as_quota() -> None:
    gate = gate_of([1], 4, rate_limit_wait=900)
    await once(gate, Verdict(kind="rate_limited", retry_after=901))
    with pytest.raises(RunStopped) as stopped:
        await gate.acquire(0)
    assert (stopped.value.reason, now()) == ("quota", 0.0)


@virtual
async def test_as_long_without_one_success_stops_the_run_and_a_success_in_between_does_not() -> None:
    gate = gate_of([1], 4, rate_limit_wait=100)
    for round_ in range(50):
        await once(gate, Verdict(kind="rate_limited", retry_after=30))
        if round_ % 3 == 2:
            await once(gate, OK)
    began = now()
    with pytest.raises(RunStopped):
        await always(gate, Verdict(kind="rate_limited", retry_after=30))
    assert now() - began <= 100


@virtual
async def test_a_long_pause_of_the_model_is_no_stop_while_a_fallback_answers() -> None:
    gate = gate_of([1, 1], 4, rate_limit_wait=60)
    await once(gate, Verdict(kind="rate_limited", retry_after=3600))
    assert (await once(gate, OK)).target == 1
    await asyncio.sleep(3600)
    assert (await once(gate, OK)).target == 0


# --- condemned


@virtual
async def test_condemned_at_once_stops_after_one_such_answer_per_request_in_flight() -> None:
    gate = gate_of([1], 8)
    requests = 0

    async def row() -> None:
        nonlocal requests
        while True:
            lease = await gate.acquire(0)
            requests += 1
            await asyncio.sleep(1)
            gate.release(lease, BAD_KEY)

    ends = await asyncio.gather(*(row() for _ in range(100)), return_exceptions=True)
    assert all(isinstance(end, RunStopped) and end.reason == "auth" for end in ends)
    assert requests == 8


@virtual
async def test_condemned_keys_make_room_for_other_keys_and_fallbacks() -> None:
    gate = gate_of([2, 1], 4)
    seen = [await once(gate, BAD_KEY) for _ in range(2)] + [await once(gate, OK) for _ in range(3)]
    assert [(lease.target, lease.key) for lease in seen] == [(0, 0), (0, 1), (1, 0), (1, 0), (1, 0)]
    await once(gate, BAD_KEY)
    await once(gate, BAD_KEY)
    with pytest.raises(RunStopped, match="no such key"):
        await gate.acquire(0)


@virtual
async def test_after_earlier_successes_one_probe_ten_seconds_later_decides() -> None:
    gate = gate_of([1], 4)
    await once(gate, OK)
    leases = [await gate.acquire(0) for _ in range(3)]
    for lease in leases:
        gate.release(lease, BAD_KEY)
    probe = await gate.acquire(0)
    assert now() == 10.0
    assert await blocked(gate), "one probe, not four"
    gate.release(probe, OK)
    leases = [await gate.acquire(0) for _ in range(4)]
    gate.release(leases[0], BAD_KEY)
    probe = await gate.acquire(0)
    gate.release(probe, BAD_KEY)
    with pytest.raises(RunStopped):
        await gate.acquire(0)
    assert now() == 20.0


@virtual
async def test_a_probe_that_is_cancelled_is_followed_by_another() -> None:
    gate = gate_of([1], 4)
    await once(gate, OK)
    await once(gate, BAD_KEY)
    await once(gate, GONE)
    await once(gate, OK)
    assert not await blocked(gate)


# --- unreachable


@virtual
async def test_unreachable_at_the_start_stops_within_five_seconds() -> None:
    gate = gate_of([1], 8)
    requests = 0

    async def row() -> None:
        nonlocal requests
        while True:
            lease = await gate.acquire(0)
            requests += 1
            gate.release(lease, LOST)

    ends = await asyncio.gather(*(row() for _ in range(20)), return_exceptions=True)
    assert {end.reason for end in ends if isinstance(end, RunStopped)} == {"unreachable"}
    assert now() <= 5
    assert requests < 8 + 10


@virtual
async def test_a_connection_that_hangs_at_the_start_stops_with_its_first_end() -> None:
    gate = gate_of([1], 1)
    lease = await gate.acquire(0)
    await asyncio.sleep(4.0)
    gate.release(lease, LOST)
    with pytest.raises(RunStopped, match="refused"):
        await gate.acquire(0)


@virtual
async def test_later_all_pause_one_probes_and_the_run_goes_on() -> None:
    gate = gate_of([2], 8, endpoint_wait=300)
    await once(gate, OK)
    leases = [await gate.acquire(0) for _ in range(8)]
    for lease in leases:
        gate.release(lease, LOST)
    probes = 0
    while now() < 200:
        lease = await gate.acquire(0)
        assert await blocked(gate)
        probes += 1
        gate.release(lease, LOST)
    assert 20 <= probes <= 30
    await once(gate, OK)
    assert len([await gate.acquire(0) for _ in range(8)]) == 8


@virtual
async def test_unreachable_for_too_long_stops_the_run_at_its_time() -> None:
    gate = gate_of([1], 2, endpoint_wait=30)
    await once(gate, OK)
    with pytest.raises(RunStopped) as stopped:
        await always(gate, LOST)
    assert (stopped.value.reason, now()) == ("unreachable", 30.0)


@virtual
async def test_an_unreachable_model_is_replaced_by_its_fallback() -> None:
    gate = gate_of([1, 1], 4)
    await once(gate, LOST)
    assert (await once(gate, OK)).target == 1


@virtual
async def test_a_late_answer_opens_an_endpoint_that_had_been_lost() -> None:
    gate = gate_of([1], 4)
    await once(gate, OK)
    slow, lost = await gate.acquire(0), await gate.acquire(0)
    gate.release(lost, LOST)
    assert await blocked(gate)
    gate.release(slow, OK)
    assert not await blocked(gate)


# --- requests and tokens a minute


@virtual
async def test_requests_per_minute_hold_in_every_minute() -> None:
    gate = gate_of([1], 100, Minute(rpm=10))
    times: list[float] = []

    async def ask(after: float) -> None:
        await asyncio.sleep(after)
        await once(gate, OK)
        times.append(now())

    await asyncio.gather(*(ask(number) for number in range(35)))
    assert all(later - earlier >= 60 for earlier, later in zip(times, times[10:], strict=False))
    assert times[-1] < 240


@virtual
async def test_tokens_per_minute_count_what_was_reported_not_what_was_estimated() -> None:
    gate = gate_of([1], 100, Minute(tpm=1000))
    await once(gate, Verdict(kind="ok", tokens=400), tokens=100)
    await once(gate, Verdict(kind="ok", tokens=550), tokens=100)
    assert now() == 0.0
    await once(gate, OK, tokens=100)
    assert now() == 60.5
    await once(gate, OK, tokens=5000)
    assert now() == 121.0, "one that is larger than the limit goes alone"


@virtual
async def test_how_long_replies_are_is_learnt_before_many_are_asked_for() -> None:
    """Estimates know the requests alone."""
    gate = gate_of([1], 100, Minute(tpm=20_000))
    sent: list[float] = []

    async def ask() -> None:
        lease = await gate.acquire(100)
        sent.append(now())
        await asyncio.sleep(1)
        gate.release(lease, Verdict(kind="ok", tokens=2_100))

    async with asyncio.TaskGroup() as group:
        for _ in range(40):
            group.create_task(ask())
        await asyncio.sleep(0.5)
        assert len(sent) == 4
        assert gate.cooling_until is None
        await asyncio.sleep(5)
        assert gate.cooling_until == 60.5
        assert gate.cooling_reason == "rpm or tpm"
    busiest = max(sum(at <= other < at + 60 for other in sent) for at in sent)
    assert busiest == 9, "9 of 2,100 tokens are below 20,000"


@virtual
async def test_a_large_request_that_is_cancelled_no_longer_holds_up_those_behind_it() -> None:
    gate = gate_of([1], 100, Minute(tpm=1000))
    await once(gate, OK, tokens=500)
    large, small = (asyncio.create_task(gate.acquire(tokens)) for tokens in (900, 100))
    await asyncio.sleep(1)
    large.cancel()
    await small
    assert now() == 1.0


# --- budget and rows


def spend(usd: float = 0.0, tokens: int = 0) -> Spend:
    return Spend(requests=1, cost_usd=usd, usage=Usage(total_tokens=tokens))


@virtual
async def test_at_the_budget_no_further_call_is_made_and_failed_tries_count() -> None:
    gate = gate_of([1], 4, budget=Budget(max_cost=1.0, spent=spend(0.4)))
    await once(gate, Verdict(kind="transient", spend=spend(0.3)))
    held = await gate.acquire(0)
    gate.release(held, Verdict(kind="ok", spend=spend(0.3)))
    with pytest.raises(RunStopped) as stopped:
        await gate.acquire(0)
    assert stopped.value.reason == "budget"
    assert gate.spent.requests == 3


@virtual
async def test_waiters_learn_of_the_budget_and_a_spent_one_starts_nothing() -> None:
    gate = gate_of([1], 1, budget=Budget(max_total_tokens=100))
    held = await gate.acquire(0)
    waiting = asyncio.create_task(gate.acquire(0))
    await asyncio.sleep(1)
    gate.release(held, Verdict(kind="ok", spend=spend(tokens=100)))
    with pytest.raises(RunStopped):
        await waiting
    with pytest.raises(RunStopped):
        await gate_of([1], 1, budget=Budget(max_cost=1.0, spent=spend(1.0))).acquire(0)


def test_rows_start_while_the_mean_of_those_ended_leaves_room() -> None:
    gate = gate_of([1], 4, budget=Budget(max_cost=5.0))
    assert gate.may_start_row(running=4)
    gate = gate_of([1], 4, budget=Budget(max_cost=5.0, spent=spend(2.0), ended_rows=1))
    gate.row_ended(spend(0.0), completed=True, row_fault=False)  # mean 1.0, spent 2.0
    assert gate.may_start_row(running=2)
    assert not gate.may_start_row(running=3)
    assert gate_of([1], 4).may_start_row(running=1000)


def test_twenty_refused_rows_in_a_row_stop_the_run() -> None:
    gate = gate_of([1], 4)
    for completed in [False] * 19 + [True] + [False] * 19:
        gate.row_ended(spend(), completed=completed, row_fault=not completed)
    gate.row_ended(spend(), completed=False, row_fault=False)
    assert gate.stopped is None
    gate.row_ended(spend(), completed=False, row_fault=True)
    assert gate.stopped is not None
    assert (gate.stopped.reason, gate.stopped.message) == ("row_faults", "the endpoint refused 20 rows in a row")
    assert not gate.may_start_row(running=0)


def test_a_stop_by_faults_of_ours_says_so() -> None:
    gate = gate_of([1], 4)
    for _ in range(20):
        gate.row_ended(spend(), completed=False, row_fault=True, ours=True)
    assert gate.stopped is not None
    assert "fault of this program" in gate.stopped.message


@virtual
async def test_a_stop_from_outside_wakes_all_waiters_and_the_first_reason_stays() -> None:
    gate = gate_of([1], 1, Minute(rpm=1))
    await once(gate, OK)
    waiting = [asyncio.create_task(gate.acquire(0)) for _ in range(5)]
    await asyncio.sleep(1)
    gate.stop("interrupt", "Ctrl-C")
    gate.stop("disk", "full")
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert [getattr(end, "reason", None) for end in ends] == ["interrupt"] * 5
    assert now() == 1.0


@virtual
async def test_a_row_fault_changes_nothing_for_others() -> None:
    gate = gate_of([1], 4)
    for _ in range(50):
        await once(gate, FAULT)
    assert (gate.limit, gate.stopped, now()) == (4, None, 0.0)


@virtual
async def test_any_mix_of_verdicts_ends_with_nothing_in_flight_and_nobody_forgotten() -> None:
    rng = random.Random(7)
    kinds = ["ok"] * 12 + ["rate_limited", "transient", "row_fault", "abandoned", "unreachable", "condemned"]
    for _ in range(40):
        gate = gate_of([2, 1], 5, Minute(rpm=200, tpm=10_000))
        answered = 0

        async def row(gate: RunGate = gate) -> None:
            nonlocal answered
            lease = await gate.acquire(rng.randrange(50))
            try:
                await asyncio.sleep(rng.random())
            finally:
                kind: Any = rng.choice(kinds)
                gate.release(lease, Verdict(kind=kind, reason="auth", retry_after=rng.choice([None, 2.0])))
            answered += 1

        rows = [asyncio.create_task(row()) for _ in range(60)]
        for victim in rng.sample(rows, 10):
            asyncio.get_running_loop().call_later(rng.random() * 5, victim.cancel)
        ends = await asyncio.gather(*rows, return_exceptions=True)
        lost = [end for end in ends if isinstance(end, BaseException)]
        assert answered + len(lost) == 60
        assert all(isinstance(end, asyncio.CancelledError | RunStopped) for end in lost)
        assert gate.in_flight == 0
