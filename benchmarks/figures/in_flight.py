"""Requests at the endpoint over time: how much of the concurrency that was asked for is used between 10 % and 90 % of
the time from the first request to the last answer. The runs are those of the wall times, with a latency and more than
one at once.

What is missing from 100 % is the time that prompts spend in between: their commands, their sandboxes, their turn for
the CPU.
"""

from collections.abc import Iterator
from statistics import fmean

from benchmarks.bench import Bench
from benchmarks.endpoint import SLICES, Seen
from benchmarks.report import Figure
from benchmarks.sizes import Load

TENTH = SLICES // 10


def measure(bench: Bench) -> Iterator[Figure]:
    """See the module."""
    for load in bench.sizes.loads:
        if load.latency and load.concurrency > 1:
            yield _figure(load, bench.run(load).seen)


def _figure(load: Load, seen: Seen) -> Figure:
    tenths = [fmean(seen.in_flight[start : start + TENTH]) for start in range(0, SLICES, TENTH)]
    return Figure(
        name=f"in flight, {1000 * load.latency:.0f} ms, {load.concurrency} at once",
        value=100 * fmean(seen.in_flight[TENTH:-TENTH]) / load.concurrency,
        unit="%",
        note=f"{load.prompts} prompts; by tenths: {' '.join(f'{mean:.0f}' for mean in tenths)}; peak {seen.peak}",
        values={"tenths": tenths, "peak": seen.peak, "span_seconds": seen.span},
    )
