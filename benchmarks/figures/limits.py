"""How well limits are used, and kept.

An endpoint that lets through N requests within any second, by a sliding window, and refuses the others with 429: the
share of N that is used between the first second and the last, with a retry-after and without (then each 429 is a pause
of about a second, of which the first minute holds most, as N is being learned: its share is in the note). Every row
ends completed, else there is no figure. Then `--rpm` and `--tpm` over little more than a minute: the share of the limit
that the busiest 60 seconds held (a shorter run that broke no limit has no figure). Refused requests count for neither.
"""

from collections.abc import Iterator, Sequence

from benchmarks.bench import Bench
from benchmarks.endpoint import CALLS, Seen
from benchmarks.program import run
from benchmarks.report import Figure, Number
from benchmarks.sizes import Load, Sizes

TOKENS = 1060  # of one request and its reply, as the endpoint reports them
MINUTE = 600  # tenths of a second


def measure(bench: Bench) -> Iterator[Figure]:
    """See the module."""
    sizes = bench.sizes
    for tells in (True, False):
        yield _used(sizes, tells)
    for name, unit in (("rpm", 1), ("tpm", TOKENS)):
        yield _kept(sizes, name, unit)


def _used(sizes: Sizes, tells: bool) -> Figure:
    load = Load(0.05, 32, sizes.limit_seconds * sizes.limit_per_second // CALLS)
    seen = run(load, per_second=sizes.limit_per_second, tells=tells).seen
    whole = seen.tenths[10 : len(seen.tenths) // 10 * 10 - 10]
    values: dict[str, Number | Sequence[Number]] = {"tenths": seen.tenths, "refused": seen.refused}
    told = ""
    if len(seen.tenths) > MINUTE:
        first = 100 * _per_second(whole[: MINUTE - 10]) / sizes.limit_per_second
        values["first_minute"], told = first, f"; first minute {first:.1f} %"
    return Figure(
        name=f"used of {sizes.limit_per_second} requests a second, {'with' if tells else 'without'} retry-after",
        value=100 * _per_second(whole) / sizes.limit_per_second,
        unit="%",
        target=95.0,
        at_least=True,
        note=f"{seen.requests} requests of {load.prompts} prompts, all completed; {seen.refused} refused{told}",
        values=values,
    )


def _per_second(tenths: Sequence[int]) -> float:
    return 10 * sum(tenths) / len(tenths)


def _kept(sizes: Sizes, name: str, unit: int) -> Figure:
    prompts = sizes.minute_prompts
    seen = run(Load(0.05, 32, prompts), f"--{name}={sizes.minute_requests * unit}").seen
    most = _busiest(seen)
    told = is_told(seen, sizes.minute_requests)
    return Figure(
        name=f"--{name} over a minute",
        value=100 * most / sizes.minute_requests if told else None,
        unit="%",
        target=102.0,
        note=f"of {sizes.minute_requests} requests a minute; {prompts} prompts in {seen.span:.0f} s"
        f"{'' if told else ', which is no minute'}",
        values={"tenths": seen.tenths, "busiest": most},
    )


def is_told(seen: Seen, limit: int) -> bool:
    """Whether the run says how a limit of so many a minute was kept: a short one can only break it."""
    return seen.span >= MINUTE / 10 or _busiest(seen) > limit


def _busiest(seen: Seen) -> int:
    """The most requests within 60 seconds."""
    starts = range(max(1, len(seen.tenths) - MINUTE + 1))
    return max(sum(seen.tenths[start : start + MINUTE]) for start in starts)
