"""What the figures of one pass share: how much to run, what a bare loop costs, and runs that several look at."""

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

from benchmarks.endpoint import CALLS, EndpointProcess, Seen
from benchmarks.place import surroundings
from benchmarks.program import Done, run, scratch, write_prompts
from benchmarks.sizes import Load, Sizes
from benchmarks.tree import Cost, measure
from tools.toolsets import BUILT_IN

TRANSPORTS = ("default", "aiohttp")


class Bench:
    """One pass. `bare_ms` is measured when it is first asked for, unless a figure did so before."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._bare: dict[str, list[float]] = defaultdict(list)
        self._runs: dict[Load, Done] = {}

    def run(self, load: Load) -> Done:
        """The program under a load, run when it is first asked for."""
        if load not in self._runs:
            self._runs[load] = run(load)
        return self._runs[load]

    def run_bare(self, transport: str, prompts: int) -> tuple[Cost, Seen]:
        """The bare loop once; its CPU per call is remembered."""
        with scratch() as folder:
            dataset = write_prompts(folder / "prompts.jsonl", prompts)
            tools = _write_tools(folder / "tools.json")
            with EndpointProcess() as endpoint:
                words = [sys.executable, "-m", "benchmarks.bare_loop", endpoint.url, str(dataset), transport]
                cost = measure([*words, str(tools)], folder, surroundings(folder))
        if cost.code or endpoint.seen.requests != CALLS * prompts:
            raise RuntimeError(f"the bare loop ended with {cost.code}:\n{cost.output[-4000:]}")
        self._bare[transport].append(1000 * cost.cpu / endpoint.seen.requests)
        return cost, endpoint.seen

    def bare_ms(self, transport: str) -> float:
        """CPU milliseconds of one model call and one command of the bare loop: the median so far."""
        if not self._bare[transport]:
            self.run_bare(transport, max(1, self.sizes.cpu_prompts // 4))
        return median(self._bare[transport])


def _write_tools(path: Path) -> Path:
    """The tools that the program offers, as its requests hold them."""
    specs = [tool.spec for tool in BUILT_IN.select(BUILT_IN.resolve_toolsets(["terminal"]))]
    tools = [
        {
            "type": "function",
            "function": {"name": spec.name, "description": spec.description, "parameters": spec.parameters},
        }
        for spec in specs
    ]
    path.write_text(json.dumps(tools), encoding="utf-8")
    return path
