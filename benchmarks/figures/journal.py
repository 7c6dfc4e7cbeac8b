"""Reading back what a run wrote: journals of short rows, made here, in batch files of 10 rows (the default
`batch_size`), the rows of each file in a drawn order, as the ends of prompts come.

A row has two turns of the model and one command. It has 2.7 kB and not the 2 kB that the target speaks of: without its
conversation it already has 2.5, above all the counts of every built-in tool.

Scan and merge are `scan_journal` and `finalize` in a process of their own, files in the page cache, in MB (10^6 bytes)
of journal a second; its memory is the most that was resident until the step's end. The resume is the whole program with
`--resume` and nothing left to run: it reads the dataset, mends, scans, merges and writes all derived files but the
merged one: the merge before has made that, so that it is compared, byte by byte, and left as it is.
"""

import hashlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from agent.row import Row, RowEnvironment, RowMetadata, ToolCount, Turn, encode_row
from agent.types import Usage
from benchmarks.bench import Bench
from benchmarks.journal_probe import Probe
from benchmarks.place import surroundings
from benchmarks.program import check, command, peak, scratch
from benchmarks.report import Figure
from benchmarks.tree import measure as measured
from benchmarks.tree import sampled
from tools.toolsets import BUILT_IN_TOOLS

BATCH = 10
MB = 1e6
_KEY, _SHA = "@id@", "@sha@"


def measure(bench: Bench) -> Iterator[Figure]:
    """See the module."""
    for rows in bench.sizes.journals:
        with scratch() as folder:
            size = write_run(folder, rows)
            yield from _throughput(folder, rows, size)
            yield _resume(folder, rows, size)


def _throughput(folder: Path, rows: int, size: int) -> Iterator[Figure]:
    words = [sys.executable, "-m", "benchmarks.journal_probe", str(folder / "run"), str(folder / "prompts.jsonl")]
    cost = measured(words, folder, surroundings(folder))
    if cost.code:
        raise RuntimeError(f"the probe ended with {cost.code}:\n{cost.output[-4000:]}")
    probe = msgspec.json.decode(cost.output, type=Probe)
    if probe.rows != rows:
        raise RuntimeError(f"{probe.rows} of {rows} rows were merged")
    for name, step in (("scan of the journal", probe.scan), ("merge", probe.merge)):
        yield Figure(
            name=f"{name}, {rows:,} rows",
            value=size / MB / step.seconds,
            unit="MB/s",
            target=150,
            at_least=True,
            note=f"{step.seconds:.2f} s, {step.cpu_seconds:.2f} s of CPU, for {size / MB:.0f} MB;"
            f" {step.peak_bytes / MB:.0f} MB of memory",
            values={
                "seconds": step.seconds,
                "cpu_seconds": step.cpu_seconds,
                "bytes": size,
                "peak_mb": step.peak_bytes / MB,
            },
        )


def _resume(folder: Path, rows: int, size: int) -> Figure:
    words = command(folder / "prompts.jsonl", "--model=bench", "--base_url=http://127.0.0.1:9/v1", "--resume")
    cost, samples = sampled(words, folder, surroundings(folder), 0.1)
    check(cost, folder / "run", rows)
    parent = peak([sample.parent for sample in samples])
    return Figure(
        name=f"resume with nothing left, {rows:,} rows",
        value=cost.seconds,
        unit="s",
        target=20 if rows == 1_000_000 else None,
        note=f"parent {parent / MB:.0f} MB, {cost.cpu:.1f} s of CPU, {size / MB:.0f} MB of journal; "
        "the merged file is there and is only compared",
        values={"parent_mb": parent / MB, "cpu_seconds": cost.cpu},
    )


# --- the journal


def write_run(folder: Path, rows: int) -> int:
    """A dataset `prompts.jsonl` and a run directory `run` in which each of its rows has completed; bytes of journal."""
    directory = folder / "run"
    directory.mkdir()
    template, size = _template(), 0
    with (folder / "prompts.jsonl").open("wb") as dataset:
        for first in range(0, rows, BATCH):
            numbers = list(range(first, min(first + BATCH, rows)))
            lines = [_dataset_line(number) for number in numbers]
            dataset.writelines(line + b"\n" for line in lines)
            found = [_row(template, number, line) for number, line in zip(numbers, lines, strict=True)]
            random.Random(first).shuffle(found)  # noqa: S311 - an order
            size += (directory / f"batch_{first // BATCH}.jsonl").write_bytes(b"".join(found))
    return size


def _dataset_line(number: int) -> bytes:
    """In canonical form, so that its hash is the row's."""
    return json.dumps({"id": f"r{number}", "prompt": f"Do task {number}."}, separators=(",", ":")).encode()


def _row(template: bytes, number: int, line: bytes) -> bytes:
    sha = hashlib.sha256(line).hexdigest().encode()
    row = template.replace(_SHA.encode(), sha).replace(_KEY.encode(), b"r%d" % number)
    row = row.replace(b'"prompt_index":0,', b'"prompt_index":%d,' % number)
    return row.replace(b'"batch_num":0,', b'"batch_num":%d,' % (number // BATCH))


def _template() -> bytes:
    called = ToolCount(count=1, success=1)
    row = Row(
        prompt_index=0,
        conversations=[
            Turn("human", f"Do task {_KEY}."),
            Turn("gpt", "<think>\nIt takes one command.\n</think>\n"),
            Turn("tool", "<tool_response>\ndone\n</tool_response>"),
            Turn("gpt", "<think>\nIt is done.\n</think>\nDone."),
        ],
        metadata=RowMetadata(batch_num=0, timestamp="2026-01-01T00:00:00.000Z", model="bench"),
        completed=True,
        api_calls=2,
        toolsets_used=["terminal"],
        tool_stats={name: called if name == "terminal" else ToolCount() for name in BUILT_IN_TOOLS},
        tool_error_counts=dict.fromkeys(BUILT_IN_TOOLS, 0),
        task_id=_KEY,
        row_key=f"id:{_KEY}",
        row_sha=_SHA,
        status="completed",
        end_status="completed",
        usage=Usage(input_tokens=2000, output_tokens=100, total_tokens=2100),
        requests=2,
        duration_seconds=1.5,
        final_response="Done.",
        environment=RowEnvironment(backend="local"),
        tools_offered="process terminal",
    )
    return encode_row(row)
