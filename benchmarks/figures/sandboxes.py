"""What a sandbox of each backend costs, one at a time: start, first and last command, 1 MB up and down, stop.

The figure is the time of command number `sandbox_commands`, the thousandth in a whole pass, beyond a bare `bash -c` in
the same process; as nobody can time one command well, it is the median of the last ones up to it. The other times are
medians over sandboxes. SSH is to a server on this machine; a service is measured where its keys are set.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, closing, nullcontext
from pathlib import Path
from statistics import median

from benchmarks.bare_loop import shell
from benchmarks.bench import Bench
from benchmarks.endpoint import COMMAND
from benchmarks.figures.commands import IMAGE, LIFE, TARGETS
from benchmarks.report import Figure
from benchmarks.sizes import Sizes
from tests.contract.environments import IMAGES
from tests.contract.ssh_server import SshServer
from tools.environments.base import Backend, BackendSettings, Environment, EnvironmentSpec
from tools.environments.owner import current_owner
from tools.environments.table import BACKENDS, load_backend
from tools.errors import RowFailed

LAST = 50  # commands whose median is the last one's time
MEGABYTE = 1_000_000
SSHD = "/usr/sbin/sshd"
Times = dict[str, list[float]]  # milliseconds by what took them


def measure(bench: Bench) -> Iterator[Figure]:
    """See the module."""
    for name in BACKENDS:
        with closing(SshServer()) if name == "ssh" and Path(SSHD).exists() else nullcontext() as server:
            settings = server.settings() if server else BackendSettings()
            yield asyncio.run(figure(name, settings, bench.sizes))


async def figure(name: str, settings: BackendSettings, sizes: Sizes) -> Figure:
    """One backend's; without a value, and with the reason, where it cannot be used here."""
    title, target = f"command {sizes.sandbox_commands:,} in a sandbox, {name}", TARGETS.get(name)
    backend = load_backend(name, settings)
    try:
        problem = await backend.check()
        times = {} if problem else await _times(backend, sizes)
    except RowFailed as failed:
        problem = str(failed)
    if problem:
        return Figure(name=title, value=None, unit="ms", target=target, note=problem)
    values = {what: median(taken) for what, taken in times.items()}
    return Figure(
        name=title,
        value=values["last"] - values["bare"],
        unit="ms",
        target=target,
        note=_note(values),
        values={f"{what.replace(' ', '_')}_ms": value for what, value in values.items()},
    )


def _note(values: Mapping[str, float]) -> str:
    return ", ".join(f"{what} {value:.3g}" for what, value in values.items()) + " ms"


async def _times(backend: Backend, sizes: Sizes) -> Times:
    image = IMAGES.get(backend.name, IMAGE) if backend.takes_images else ""
    if image:
        await backend.prepare(image)
    times: Times = {}
    for number in range(sizes.sandbox_rounds):
        async with _timed_sandbox(backend, image, times) as environment:
            async with _timed(times, "first"):
                await _command(environment)
            if number == 0:
                await _commands(environment, sizes.sandbox_commands, times)
            await _megabyte(environment, times)
    return times


@asynccontextmanager
async def _timed(times: Times, what: str) -> AsyncIterator[None]:
    began = time.perf_counter()
    yield
    times.setdefault(what, []).append(1000 * (time.perf_counter() - began))


@asynccontextmanager
async def _timed_sandbox(backend: Backend, image: str, times: Times) -> AsyncIterator[Environment]:
    spec = EnvironmentSpec(task_id="bench", owner=current_owner("bench"), deadline=time.time() + LIFE, image=image)
    sandbox = backend.open(spec)
    async with _timed(times, "start"):
        environment = await sandbox.__aenter__()
    try:
        yield environment
    finally:
        async with _timed(times, "stop"):
            await sandbox.__aexit__(None, None, None)


async def _command(environment: Environment) -> None:
    result = await environment.run(COMMAND, timeout=60)
    if result.output.strip() != COMMAND.removeprefix("echo "):
        raise RuntimeError(f"the command printed {result!r}")


async def _commands(environment: Environment, count: int, times: Times) -> None:
    """From the second to the last."""
    for number in range(2, count + 1):
        if number + LAST <= count:
            await _command(environment)
            continue
        async with _timed(times, "last"):
            await _command(environment)
        async with _timed(times, "bare"):
            await shell(COMMAND)


async def _megabyte(environment: Environment, times: Times) -> None:
    data = os.urandom(MEGABYTE)
    async with _timed(times, "1 MB up"):
        await environment.write("megabyte", data)
    async with _timed(times, "1 MB down"):
        size = sum([len(chunk) async for chunk in environment.read("megabyte")])
    if size != MEGABYTE:
        raise RuntimeError(f"{size} bytes came back")
