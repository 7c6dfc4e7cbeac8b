"""Wall time that one terminal command takes beyond the work itself, after the first, one at a time.

In turn, `commands` times: the terminal tool's call in an open sandbox, and `asyncio.create_subprocess_exec("bash",
"-c", ...)` of the same `echo` in the same process. The figure is the difference of the medians. Docker's sandboxes are
of the default image.
"""

import asyncio
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.bare_loop import shell
from benchmarks.bench import Bench
from benchmarks.endpoint import COMMAND
from benchmarks.report import Figure
from tools.base import ToolContext
from tools.environments.base import EnvironmentSpec
from tools.environments.owner import current_owner
from tools.environments.table import load_backend
from tools.errors import RowFailed
from tools.toolsets import load_tool

TARGETS = {"local": 3.0, "bubblewrap": 5.0, "docker": 6.0}  # milliseconds
IMAGE = "python:3.11-slim"
LIFE = 600.0  # seconds after which a sandbox that was left may be removed by anybody


def measure(bench: Bench) -> Iterator[Figure]:
    """See the module."""
    for name, target in TARGETS.items():
        yield asyncio.run(_figure(name, target, bench.sizes.commands))


async def _figure(name: str, target: float, count: int) -> Figure:
    title = f"one terminal command, {name}"
    problem = await load_backend(name).check()
    if not problem:
        try:
            ours, bare = await _times(name, count)
        except RowFailed as failed:
            problem = str(failed)
    if problem:
        return Figure(name=title, value=None, unit="ms", target=target, note=problem)
    return Figure(
        name=title,
        value=1000 * (median(ours) - median(bare)),
        unit="ms",
        target=target,
        note=f"{1000 * median(ours):.2f} ms; bare bash -c {1000 * median(bare):.2f} ms",
        values={"tool_ms": 1000 * median(ours), "bare_ms": 1000 * median(bare)},
    )


async def _times(name: str, count: int) -> tuple[list[float], list[float]]:
    """Seconds of each call and of each bare command."""
    backend = load_backend(name)
    image = IMAGE if backend.takes_images else ""
    if image:
        await backend.prepare(image)
    spec = EnvironmentSpec(task_id="bench", owner=current_owner("bench"), deadline=time.time() + LIFE, image=image)
    tool = load_tool("terminal")
    ours, bare = [], []
    async with backend.open(spec) as environment:
        context = ToolContext(environment, command_timeout=60.0)
        await _called(tool, context)
        for _ in range(count):
            began = time.perf_counter()
            await _called(tool, context)
            between = time.perf_counter()
            await shell(COMMAND)
            bare.append(time.perf_counter() - between)
            ours.append(between - began)
    return ours, bare


async def _called(tool: Any, context: ToolContext) -> None:
    result = await tool.call(context, tool.parse({"command": COMMAND}))
    if result["output"].strip() != COMMAND.removeprefix("echo "):
        raise RuntimeError(f"the command printed {result!r}")
