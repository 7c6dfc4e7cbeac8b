"""What the figures of one pass share: how much to run, what a bare loop costs, and runs that several look at."""

import json
import shlex
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

from benchmarks.endpoint import CALLS, EndpointProcess, Seen
from benchmarks.place import surroundings
from benchmarks.program import WORKERS, Done, run, scratch, write_prompts
from benchmarks.sizes import Load, Sizes
from benchmarks.tree import Cost, measure
from tools.toolsets import BUILT_IN

TRANSPORTS = ("default", "aiohttp")
BARE_AT_ONCE = 16


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
        cost, seen = _bare(transport, Load(0.0, BARE_AT_ONCE, prompts), 1)
        self._bare[transport].append(1000 * cost.cpu / seen.requests)
        return cost, seen

    def bare_seconds(self, load: Load) -> float:
        """Wall time of the same work by as many bare loops side by side as the program has workers."""
        return _bare(min(TRANSPORTS, key=self.bare_ms), load, WORKERS)[0].seconds

    def bare_ms(self, transport: str) -> float:
        """CPU milliseconds of one model call and one command of the bare loop: the median so far."""
        if not self._bare[transport]:
            self.run_bare(transport, max(1, self.sizes.cpu_prompts // 4))
        return median(self._bare[transport])


def _bare(transport: str, load: Load, processes: int) -> tuple[Cost, Seen]:
    with scratch() as folder, EndpointProcess(load.latency) as endpoint:
        dataset = write_prompts(folder / "prompts.jsonl", load.prompts // processes)
        tools = _write_tools(folder / "tools.json")
        words = [sys.executable, "-m", "benchmarks.bare_loop", endpoint.url, str(dataset), transport, str(tools)]
        loop = shlex.join([*words, str(load.concurrency // processes)])
        cost = measure(["/bin/sh", "-c", f"{' & '.join([loop] * processes)} & wait"], folder, surroundings(folder))
    if endpoint.seen.requests != CALLS * load.prompts:
        raise RuntimeError(f"the bare loop did not do its work:\n{cost.output[-4000:]}")
    return cost, endpoint.seen


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
