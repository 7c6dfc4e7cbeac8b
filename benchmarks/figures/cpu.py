"""CPU per model call over the whole process tree, start-up included, against a bare loop that does the same work.

`cpu_prompts` prompts of 5 model calls and 4 trivial commands, an endpoint that answers at once, sandboxes `local`, 16
prompts in flight. In turn, `cpu_rounds` times: the program with 2 workers, the bare loop with openai's default
transport, the bare loop with its aiohttp transport. The figures are medians; the endpoint's CPU is not in them. The
target is for the better of the two bare loops.
"""

from collections.abc import Iterator
from statistics import median

from benchmarks.bench import TRANSPORTS, Bench
from benchmarks.program import Done, run
from benchmarks.report import Figure
from benchmarks.sizes import Load


def measure(bench: Bench) -> Iterator[Figure]:
    """See the module."""
    prompts = bench.sizes.cpu_prompts
    runs: list[Done] = []
    for _ in range(bench.sizes.cpu_rounds):
        runs.append(run(Load(0.0, 16, prompts)))
        bodies = [bench.run_bare(transport, prompts)[1].body_bytes for transport in TRANSPORTS]
    per_call = [1000 * done.cost.cpu / done.seen.requests for done in runs]
    ours, bare = median(per_call), {transport: bench.bare_ms(transport) for transport in TRANSPORTS}
    size = runs[0].seen.body_bytes / runs[0].seen.requests
    yield Figure(
        name="CPU per model call",
        value=ours,
        unit="ms",
        note=f"{prompts} prompts; requests of {size:.0f} bytes (bare loop: {bodies[0] / runs[0].seen.requests:.0f})",
        values={
            "each": per_call,
            "user_seconds": median(done.cost.user for done in runs),
            "system_seconds": median(done.cost.system for done in runs),
            "wall_seconds": median(done.cost.seconds for done in runs),
            "endpoint_ms_per_call": median(1000 * done.seen.cpu_seconds / done.seen.requests for done in runs),
            "endpoint_peak_in_flight": max(done.seen.peak for done in runs),
            "connections": runs[0].seen.connections,
        },
    )
    better = min(TRANSPORTS, key=bare.__getitem__)
    for transport in TRANSPORTS:
        yield Figure(
            name=f"the same against the bare loop, {transport} transport",
            value=ours / bare[transport],
            unit="x",
            target=1.0 if transport == better else None,
            note=f"bare loop: {bare[transport]:.2f} ms{', the better of the two' if transport == better else ''}",
            values={"bare_ms": bare[transport]},
        )
