"""A large dataset streamed through a scripted model that answers at once: one model call a prompt, no command.

Every prompt has its own `local` sandbox all the same, so opening and closing those is most of it. Two runs, of the
smaller and the larger number of prompts of `Sizes.stream`, 64 at once, 2 workers; the parent's memory is its peak PSS,
the final merge included, and may grow by 10 MB and 64 bytes a prompt.
"""

from collections.abc import Iterator

from benchmarks.bench import Bench
from benchmarks.place import surroundings
from benchmarks.program import check, command, peak, scratch, write_prompts
from benchmarks.report import Figure
from benchmarks.tree import Cost, sampled

SCRIPT = """default:
  turns:
    - {reasoning: There is nothing to find out., content: The answer is ready.}
"""
MB = 1e6
PROMISED = 1_000_000  # prompts, of `--full`


def measure(bench: Bench) -> Iterator[Figure]:
    """See the module."""
    few, many = bench.sizes.stream
    small, (large, cost) = _run(few)[0], _run(many)
    yield Figure(
        name=f"prompts streamed, {many:,} of them",
        value=many / cost.seconds,
        unit="prompts/s",
        note=f"{cost.seconds:.0f} s; {1000 * cost.cpu / many:.2f} ms of CPU each",
        values={"seconds": cost.seconds, "cpu_ms_per_prompt": 1000 * cost.cpu / many},
    )
    yield Figure(
        name=f"growth of the parent from {few:,} to {many:,} prompts",
        value=(large - small) / MB,
        unit="MB",
        target=10 + 64 * (many - few) / MB,
        note=f"{small / MB:.1f} MB, {large / MB:.1f} MB"
        f"{'' if many == PROMISED else f'; the {PROMISED:,} prompts of the promise with --full'}",
        values={"small_mb": small / MB, "large_mb": large / MB},
    )


def _run(prompts: int) -> tuple[int, Cost]:
    """The parent's peak, and the cost of all."""
    with scratch() as folder:
        dataset = write_prompts(folder / "prompts.jsonl", prompts)
        script = folder / "script.yaml"
        script.write_text(SCRIPT, encoding="utf-8")
        words = command(dataset, f"--model=scripted:{script}", concurrency=64)
        cost, samples = sampled(words, folder, surroundings(folder), 0.2)
        check(cost, folder / "run", prompts)
    return peak([sample.parent for sample in samples]), cost
