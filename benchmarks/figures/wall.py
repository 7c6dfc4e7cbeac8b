"""Wall time of a whole run, start-up included, against the larger of two floors.

The ideal is prompts x calls x latency / concurrency; the CPU floor is what a bare loop needs for the same calls and
commands (the better of its two transports), spread over all cores. 2 workers, sandboxes `local`; the sizes stand in
`Sizes.loads`. The endpoint runs on the same cores. Where there is a target, the same work is then done by two bare
loops side by side, which share out the prompts and the concurrency.
"""

import os
from collections.abc import Iterator

from benchmarks.bench import TRANSPORTS, Bench
from benchmarks.endpoint import CALLS
from benchmarks.program import WORKERS, Done
from benchmarks.report import Figure
from benchmarks.sizes import Load

PROMISED = (0.2, 100)  # the latency and concurrency that have a target


def measure(bench: Bench) -> Iterator[Figure]:
    """See the module."""
    floor_ms = min(bench.bare_ms(transport) for transport in TRANSPORTS)
    for load in bench.sizes.loads:
        yield _figure(load, bench.run(load), floor_ms)
        if _is_promised(load):
            yield _beside(load, bench.run(load).cost.seconds, bench.bare_seconds(load))


def _is_promised(load: Load) -> bool:
    return (load.latency, load.concurrency) == PROMISED


def _beside(load: Load, seconds: float, bare: float) -> Figure:
    return Figure(
        name=f"the same against {WORKERS} bare loops side by side",
        value=seconds / bare,
        unit="x",
        note=f"{load.prompts} prompts: {seconds:.1f} s; the bare loops {bare:.1f} s",
        values={"bare_seconds": bare},
    )


def _figure(load: Load, done: Done, floor_ms: float) -> Figure:
    calls = CALLS * load.prompts
    ideal = calls * load.latency / load.concurrency
    floor = calls * floor_ms / 1000 / min(len(os.sched_getaffinity(0)), load.concurrency)
    seconds = done.cost.seconds
    return Figure(
        name=f"wall time, {1000 * load.latency:.0f} ms, {load.concurrency} at once",
        value=seconds / max(ideal, floor),
        unit="x",
        target=1.15 if _is_promised(load) else None,
        note=f"{load.prompts} prompts: {seconds:.1f} s; ideal {ideal:.1f} s, CPU floor {floor:.1f} s",
        values={
            "seconds": seconds,
            "ideal_seconds": ideal,
            "floor_seconds": floor,
            "cpu_seconds": done.cost.cpu,
            "peak_in_flight": done.seen.peak,
            "endpoint_cpu_seconds": done.seen.cpu_seconds,
        },
    )
