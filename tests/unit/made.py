"""Rows and datasets for the tests of run directories."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from agent.row import Row, RowMetadata, ToolCount, Turn, encode_row
from batch.dataset import Dataset, open_dataset, scan
from batch.messages import Job
from batch.store import RunDirectory
from tools.toolsets import BUILT_IN, BUILT_IN_TOOLS

THOUGHT = "<think>\nhm\n</think>\ndone"
THOUGHTLESS = "<think>\n</think>\ndone"


def dataset_of(path: Path, rows: Iterable[Any]) -> Dataset:
    """A scanned dataset of these rows (objects, or lines as they are)."""
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    dataset = open_dataset(str(path))
    scan(dataset, BUILT_IN.resolve_names)
    return dataset


def row_of_job(job: Job, batch_num: int = 0, **changes: Any) -> Row:
    """A completed try of a job, with reasoning and one call of terminal."""
    tally = {name: ToolCount() for name in BUILT_IN_TOOLS} | {"terminal": ToolCount(1, 1, 0)}
    row = Row(
        prompt_index=job.prompt_index,
        conversations=[Turn("system", "tools"), Turn("human", "do"), Turn("gpt", THOUGHT)],
        metadata=RowMetadata(batch_num=batch_num, timestamp="2026-01-01T00:00:00.000Z", model="m"),
        completed=True,
        api_calls=2,
        requests=3,
        cost_usd=0.5,
        duration_seconds=1.5,
        toolsets_used=["terminal"],
        tool_stats=tally,
        tool_error_counts=dict.fromkeys(BUILT_IN_TOOLS, 0),
        task_id=job.task_id,
        row_key=job.row_key,
        row_sha=job.row_sha,
        sample_index=job.sample_index,
        attempt=job.attempt,
        status=changes.get("status", "completed"),
        end_status=changes.get("end_status", changes.get("status", "completed")),
        success=True,
        final_response="done",
    )
    return msgspec.structs.replace(row, **changes)


def write_batch(directory: RunDirectory, batch_num: int, rows: Iterable[Row]) -> None:
    """A batch file as a worker leaves it."""
    directory.path.mkdir(parents=True, exist_ok=True)
    directory.batch_path(batch_num).write_bytes(b"".join(map(encode_row, rows)))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A file of JSON lines."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]
