"""How fast the compressor counts: generated trajectories of 3 to 200 turns, whole rows through its processes, one for
each core, against `encode_ordinary` of tiktoken for the same texts in a loop in one process.

Bytes of text a second of CPU, so that it does not matter what else runs here; of the compressor all processes, also
the one that hands out the rows. Their start is left out. No row is over its target: it is read, counted and done. The
median of some rounds, each of which takes both.
"""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from statistics import median

import msgspec
import psutil
import tiktoken
from msgspec import Struct

from agent.tokens import cl100k
from benchmarks.bench import Bench
from benchmarks.report import Figure
from compression import forms
from compression.crew import Crew
from compression.types import Done, Policy
from tests.unit.trajectories import trajectories

CHUNK = 3  # rows, of about 85 kB
POLICY = Policy(target_max_tokens=10**9)


class _Round(Struct, frozen=True):
    """CPU seconds of both, and the compressor's wall time."""

    raw: float
    crew: float
    seconds: float


def measure(bench: Bench) -> Iterator[Figure]:
    """See the module."""
    lines = [msgspec.json.encode(row) for row in trajectories(bench.sizes.counted_rows, unusual=0)]
    texts = [text for line in lines for text in _texts(line)]
    size, cores = sum(len(text.encode()) for text in texts), len(os.sched_getaffinity(0))
    rounds = asyncio.run(_rounds(lines, texts, cores, bench.sizes.counting_rounds))
    raw, crew, wall = (size / 1e6 / median(each) for each in zip(*map(msgspec.structs.astuple, rounds), strict=True))
    busy = median(each.crew / each.seconds for each in rounds)
    yield Figure(
        name="compressor's counting against raw tiktoken, per core",
        value=median(each.raw / each.crew for each in rounds),
        unit="x",
        target=0.9,
        at_least=True,
        note=f"{crew:.1f} against {raw:.1f} MB a CPU second; {wall:.1f} MB/s, {busy:.1f} of {cores} cores busy",
        values={"raw_mb": raw, "crew_mb": crew, "wall_mb": wall, "busy": busy, "rows": len(lines), "bytes": size},
    )


def _texts(line: bytes) -> list[str]:
    reading = forms.read(forms.fields_of(line))
    assert reading is not None
    return [turn.text for turn in reading.turns]


async def _rounds(lines: Sequence[bytes], texts: Sequence[str], cores: int, rounds: int) -> list[_Round]:
    encoding = cl100k()
    async with Crew(cores, POLICY, encoding.name) as crew:
        return [_Round(_raw(encoding, texts), *await _counted(crew, lines)) for _ in range(rounds)]


def _raw(encoding: tiktoken.Encoding, texts: Sequence[str]) -> float:
    began = time.process_time()
    for text in texts:
        encoding.encode_ordinary(text)
    return time.process_time() - began


async def _counted(crew: Crew, lines: Sequence[bytes]) -> tuple[float, float]:
    chunks = [[(line, ()) for line in lines[place : place + CHUNK]] for place in range(0, len(lines), CHUNK)]
    began, cpu = time.perf_counter(), _cpu()
    for steps in await asyncio.gather(*map(crew.advance, chunks)):
        if not all(isinstance(step, Done) and step.metrics.skipped_under_target for step in steps):
            raise RuntimeError("a row was not counted")
    return _cpu() - cpu, time.perf_counter() - began


def _cpu() -> float:
    """Seconds of this process and its children so far, in hundredths."""
    here = psutil.Process()
    times = [process.cpu_times() for process in (here, *here.children())]
    return sum(each.user + each.system for each in times)
