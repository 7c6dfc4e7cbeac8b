"""Start to first request: from the start of the program's process to the first request that the endpoint sees. 16
prompts, 2 workers, sandboxes `local`; the median of `starts` runs."""

from collections.abc import Iterator
from statistics import median

from benchmarks.bench import Bench
from benchmarks.program import run
from benchmarks.report import Figure
from benchmarks.sizes import Load


def measure(bench: Bench) -> Iterator[Figure]:
    """See the module."""
    each = [_seconds() for _ in range(bench.sizes.starts)]
    yield Figure(
        name="start to first request",
        value=median(each),
        unit="s",
        target=1.2,
        note=f"of {len(each)}: {min(each):.2f} to {max(each):.2f} s",
        values={"each": each},
    )


def _seconds() -> float:
    done = run(Load(0.0, 16, 16))
    return done.seen.first - done.cost.began
