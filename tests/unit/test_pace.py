"""What is learned from 429s, in virtual time, from endpoints that let so many requests a second through."""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from itertools import pairwise

import pytest

from agent.models.base import Verdict
from agent.models.gate import RunGate
from agent.models.pace import BELOW, DOUBLED, PLATEAU_FIRST, Pace
from tests.virtual_time import VirtualLoop, now

Wait = Callable[[float], float | None]
"""What a refusal says of the time to come again, of the seconds that it will take."""


class Sliding:
    """So many within any second."""

    def __init__(self, per_second: int) -> None:
        self.per_second = per_second
        self._taken: deque[float] = deque()

    def wait(self) -> float | None:
        """None for a request that is taken."""
        while self._taken and self._taken[0] <= now() - 1:
            self._taken.popleft()
        if len(self._taken) >= self.per_second:
            return self._taken[-self.per_second] + 1 - now()
        self._taken.append(now())
        return None


class Dip(Sliding):
    """Fewer between two times."""

    def __init__(self, per_second: int, fewer: int, begin: float, end: float) -> None:
        super().__init__(per_second)
        self._sizes = (per_second, fewer)
        self._begin, self._end = begin, end

    def wait(self) -> float | None:
        """None for a request that is taken."""
        self.per_second = self._sizes[self._begin <= now() < self._end]
        return super().wait()


class Bucket:
    """So many a second in the mean, as many at once."""

    def __init__(self, per_second: int) -> None:
        self._per_second = per_second
        self._left, self._at = float(per_second), 0.0

    def wait(self) -> float | None:
        """None for a request that is taken."""
        self._left = min(self._per_second, self._left + (now() - self._at) * self._per_second)
        self._at = now()
        if self._left < 1:
            return (1 - self._left) / self._per_second
        self._left -= 1
        return None


class Places:
    """So many at once. A place is free again `seconds` after it was taken."""

    def __init__(self, places: int, seconds: float) -> None:
        self._places = places
        self._seconds = seconds
        self._taken: list[float] = []

    def wait(self) -> float | None:
        """None for a request that is taken."""
        self._taken = [at for at in self._taken if at > now() - self._seconds]
        if len(self._taken) >= self._places:
            return 0.01
        self._taken.append(now())
        return None


class Load:
    """Callers that ask again and again, for so many seconds; `taken` and `refused` hold times."""

    def __init__(self, endpoint: Sliding | Bucket | Places, latency: float, tell: Wait, seconds: float) -> None:
        self._endpoint = endpoint
        self._latency = latency
        self._tell = tell
        self._seconds = seconds
        self._rng = random.Random(2)
        self.taken: list[float] = []
        self.refused: list[float] = []

    async def run(self, callers: int) -> None:
        """To the end."""
        gate = RunGate((1,), callers, rng=random.Random(1))
        await asyncio.gather(*(self._call(gate) for _ in range(callers)))

    async def _call(self, gate: RunGate) -> None:
        while now() < self._seconds:
            lease = await gate.acquire(0)
            await asyncio.sleep(self._rng.uniform(0.001, 0.004))  # on its way
            if (wait := self._endpoint.wait()) is None:
                self.taken.append(now())
                await asyncio.sleep(self._latency * self._rng.uniform(0.8, 1.2))
                gate.release(lease, Verdict(kind="ok"))
            else:
                self.refused.append(now())
                gate.release(lease, Verdict(kind="rate_limited", retry_after=self._tell(wait)))


def used(load: Load, callers: int, begin: float, end: float) -> float:
    """Requests a second between two times."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(load.run(callers))
    return sum(begin <= at < end for at in load.taken) / (end - begin)


def exactly(wait: float) -> float | None:
    return wait


def a_second(_: float) -> float | None:
    return 1.0


def nothing(_: float) -> float | None:
    return None


@pytest.mark.parametrize("tell", [exactly, a_second, nothing])
@pytest.mark.parametrize(("per_second", "latency", "callers"), [(10, 0.05, 16), (40, 0.05, 32), (40, 0.3, 32)])
def test_a_limit_of_requests_a_second_is_used_to_95_percent(
    per_second: int, latency: float, callers: int, tell: Wait
) -> None:
    load = Load(Sliding(per_second), latency, tell, 300.0)
    assert used(load, callers, 30.0, 270.0) >= 0.95 * per_second
    assert sum(at > 30.0 for at in load.refused) <= 0.01 * len(load.taken)


@pytest.mark.parametrize("tell", [exactly, a_second, nothing])
def test_most_of_it_is_used_where_replies_take_seconds(tell: Wait) -> None:
    load = Load(Bucket(40), 2.0, tell, 120.0)
    assert used(load, 200, 10.0, 110.0) >= 0.75 * 40, "each 429 halves the requests at once, which come back one by one"
    assert len(load.refused) < 200


@pytest.mark.parametrize(("places", "latency"), [(4, 0.02), (10, 0.1), (50, 0.5)])
def test_a_limit_of_requests_at_once_is_not_taken_for_a_pace(
    places: int, latency: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_pace = used(Load(Places(places, latency), latency, a_second, 60.0), 32, 1.0, 59.0)
    monkeypatch.setattr(Pace, "free_at", lambda _, at: at)
    assert with_pace >= 0.95 * used(Load(Places(places, latency), latency, a_second, 60.0), 32, 1.0, 59.0)


def learned(per_second: int) -> Pace:
    """From one second, at the end of which all but the last request have been answered."""
    pace = Pace()
    for number in range(per_second):
        pace.send(number / per_second).answered_at = number / per_second + 0.01
    pace.refuse(pace.send(1.0))
    return pace


def seconds_apart(pace: Pace, begin: float, count: int) -> list[float]:
    """Of so many requests that go as soon as they may."""
    at, times = begin, []
    for _ in range(count):
        at = pace.free_at(at)
        pace.send(at)
        times.append(at)
    return [later - sooner for sooner, later in pairwise(times)]


def test_requests_leave_evenly_and_a_little_slower_than_was_learned() -> None:
    apart = seconds_apart(learned(20), 2.0, 20)
    assert apart == pytest.approx([1 / (20 * (1 - BELOW))] * 19, rel=0.01)


def rate(pace: Pace, begin: float, seconds: float) -> float:
    """Requests a second of somebody who sends as soon as he may, at the end."""
    at = begin
    while at < begin + seconds:
        before, at = at, pace.free_at(at)
        pace.send(at)
    return 1 / (at - before)


def test_the_pace_comes_back_to_what_was_learned_and_then_doubles_and_doubles() -> None:
    rates = [rate(learned(20), 2.0, PLATEAU_FIRST + DOUBLED * part) for part in (0, 1, 3)]
    assert rates == pytest.approx([20, 40, 160], rel=0.02)


def test_a_pace_that_holds_nobody_up_is_not_raised() -> None:
    pace = learned(20)
    pace.free_at(2.0)
    for second in range(2, 100):
        pace.send(float(second))
    assert 20 * (1 - BELOW) <= pace.held_to(99.0) < 20
    assert pace.held_to(99.5) == 0.0


def test_a_short_dip_is_made_up_for_within_a_minute() -> None:
    load = Load(Dip(40, 5, 12.0, 16.0), 0.05, exactly, 100.0)
    assert used(load, 32, 76.0, 96.0) >= 0.95 * 40


def test_a_few_requests_make_no_pace() -> None:
    assert seconds_apart(learned(4), 2.0, 20) == [0.0] * 19
