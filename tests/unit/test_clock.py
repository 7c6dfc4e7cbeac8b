"""A row's clock: it stands while a request waits for its turn, and only then. In virtual time."""

import asyncio

import pytest

from agent.clock import RowClock
from tests.virtual_time import now, virtual


@virtual
async def test_a_row_ends_in_time_though_its_clock_was_paused_in_between() -> None:
    clock = RowClock(1)

    async def row() -> None:
        async with clock.timeout:
            await asyncio.sleep(0.25)
            with clock.paused():
                await asyncio.sleep(2)
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        await row()
    assert (clock.waited, now()) == (2, 3)


@virtual
async def test_it_stands_while_anyone_is_inside_and_counts_that_time_once() -> None:
    clock = RowClock(3)

    async def wait(seconds: float) -> None:
        with clock.paused():
            await asyncio.sleep(seconds)

    async with clock.timeout:
        await asyncio.sleep(1)
        await asyncio.gather(wait(4), wait(5))
        assert clock.remaining() == 2
    assert (clock.waited, now()) == (5, 6)


@virtual
async def test_pausing_outside_of_the_time_limit_harms_nothing() -> None:
    clock = RowClock(0.0)
    with clock.paused():
        pass
    assert clock.remaining() == 0.0
