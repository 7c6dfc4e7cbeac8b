"""checkpoint.json: progress at a glance. Derived from the journal's index, written often, never read by a resume."""

from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import msgspec
from msgspec import Struct

from batch.index import JournalIndex
from batch.store import RunDirectory, replace_file

_ITEMS_PER_CHUNK = 4096
_ERROR_HEAD = 200


class _Failure(Struct, frozen=True, kw_only=True, gc=False):
    task_id: str
    attempt: int
    error: str


_decode_failure = msgspec.json.Decoder(_Failure).decode


def write_checkpoint(directory: RunDirectory, index: JournalIndex, run_name: str) -> None:
    """Replaces the run's. RunStopped if the disk refuses."""
    replace_file(directory.checkpoint_path, checkpoint(index, run_name=run_name, started_at=directory.started_at()))


def checkpoint(index: JournalIndex, *, run_name: str, started_at: str) -> Iterator[bytes]:
    """The file's content, piece by piece, so that its lists are never in memory whole. Times as in the journal."""
    counts, now = index.counts(), utc_now()
    yield b'{\n  "run_name": ' + _json(run_name)
    yield from _listed("completed_prompts", b"[]", _numbers(index.completed_rows()))
    yield from _listed("batch_stats", b"{}", map(_batch, index.batches()))
    fields = {
        "last_updated": now,
        "total_tasks": counts.total,
        "completed_tasks": counts.completed,
        "failed_tasks": counts.failed,
        "pending_tasks": counts.pending,
    }
    yield _fields(fields)
    yield from _listed("failed_task_ids", b"[]", map(_failure, _failures(index)))
    tool_usage = {name: count for name, count in sorted(index.tool_calls.items()) if count}
    yield _fields({"tool_usage_stats": tool_usage, "started_at": started_at, "last_checkpoint_at": now})
    yield b"\n}\n"


def utc_now() -> str:
    """The time as YYYY-MM-DDTHH:MM:SS.mmmZ."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def _failures(index: JournalIndex) -> Iterator[dict[str, Any]]:
    for row, line in index.failed_lines():
        failure = _decode_failure(line)
        yield {
            "task_id": failure.task_id if index.dataset.has_id(row) else f"task_{row}",
            "error": failure.error[:_ERROR_HEAD],
            "retry_count": failure.attempt - 1,
        }


def _failure(failure: dict[str, Any]) -> bytes:
    return b"\n    " + _json(failure)


def _batch(batch: tuple[int, int, int]) -> bytes:
    number, processed, discarded = batch
    return b'\n    "%d": {"processed": %d, "skipped": 0, "discarded_no_reasoning": %d}' % (number, processed, discarded)


def _listed(key: str, brackets: bytes, items: Iterable[bytes]) -> Iterator[bytes]:
    yield b',\n  "%s": ' % key.encode() + brackets[:1]
    source, comma = iter(items), b""
    while chunk := list(islice(source, _ITEMS_PER_CHUNK)):
        yield comma + b",".join(chunk)
        comma = b","
    yield brackets[1:]


def _numbers(numbers: Iterable[int]) -> Iterator[bytes]:
    """Many to an item: there may be a million of them."""
    source = iter(numbers)
    while chunk := list(islice(source, _ITEMS_PER_CHUNK)):
        yield _json(chunk)[1:-1]


def _fields(fields: Mapping[str, Any]) -> bytes:
    return b"".join(b',\n  "%s": ' % key.encode() + _json(value) for key, value in fields.items())


_json = msgspec.json.encode
