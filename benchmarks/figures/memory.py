"""Memory as PSS, sampled while prompts wait for a slow endpoint; sandboxes `local`, 2 workers.

Two runs, at the lower and the higher concurrency of `Sizes.memory_concurrency`, two rounds of prompts each. A prompt in
flight costs the difference of the two peaks over the difference of the two concurrencies: with its sandbox's shell (the
whole tree), and without. A page that a worker shares with the fork server counts in each of them by its share, so the
figure of a worker is to be read with the fork server's.
"""

from collections.abc import Iterator, Sequence

from benchmarks.bench import Bench
from benchmarks.program import peak, run
from benchmarks.report import Figure
from benchmarks.sizes import Load
from benchmarks.tree import Sample

MB = 1e6


def measure(bench: Bench) -> Iterator[Figure]:
    """See the module."""
    few, many = bench.sizes.memory_concurrency
    low, high = _run(bench, few), _run(bench, many)
    yield from _parts(low, few)
    yield from _parts(high, many)
    program = (_program(high) - _program(low)) / (many - few)
    whole = (_whole(high) - _whole(low)) / (many - few)
    yield Figure(
        name="memory per prompt in flight, sandbox included",
        value=whole / MB,
        unit="MB",
        target=1.0,
        note=f"from {few} to {many} at once; {program / MB:.2f} MB of it in the program",
        values={"program_mb": program / MB},
    )


def _run(bench: Bench, concurrency: int) -> list[Sample]:
    latency = bench.sizes.memory_latency
    return run(Load(latency, concurrency, 2 * concurrency), interval=latency / 4).samples


def _program(samples: Sequence[Sample]) -> int:
    return peak([sample.program for sample in samples])


def _whole(samples: Sequence[Sample]) -> int:
    return peak([sample.program + sample.sandboxes for sample in samples])


def _parts(samples: Sequence[Sample], concurrency: int) -> Iterator[Figure]:
    worker = peak([peak(sample.workers) for sample in samples])
    parent, server = peak([each.parent for each in samples]), peak([each.fork_server for each in samples])
    shells = max(samples, key=lambda sample: sample.sandboxes)
    yield Figure(
        name=f"memory of a worker, {concurrency} at once",
        value=worker / MB,
        unit="MB",
        target=90,
        note="PSS: of pages shared with the fork server only its share; not in it: "
        f"fork server {server / MB:.1f} MB, parent {parent / MB:.1f} MB, {shells.sandbox_processes} sandbox processes "
        f"{shells.sandboxes / MB:.1f} MB",
        values={
            "parent_mb": parent / MB,
            "fork_server_mb": server / MB,
            "sandboxes_mb": shells.sandboxes / MB,
            "sandbox_processes": shells.sandbox_processes,
        },
    )
