"""The other output formats: a file per task, those objects in one file, a file per task with a line per turn.

Each is a context that gives a function for the rows of a finished run, one after another in dataset order. What was
written is in its place with the end of the block.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from agent.row import Row
from agent.task_object import task_object, turn_lines
from batch.journal import disk_stop
from batch.store import RunDirectory, indented, replace_file, replacing
from tools.names import file_name

Take = Callable[[Row], None]


@contextmanager
def outputs(formats: Sequence[str], directory: RunDirectory, jsonl_file: Path | None = None) -> Iterator[list[Take]]:
    """Of the formats named those that are made here: json, jsonl (to `jsonl_file`, else tasks.jsonl), turns. RunStopped
    if the disk refuses."""
    with ExitStack() as stack:
        takes: list[Take] = []
        if "json" in formats:
            takes.append(stack.enter_context(_task_files(directory.tasks_path)))
        if "jsonl" in formats:
            takes.append(stack.enter_context(_task_lines(jsonl_file or directory.path / "tasks.jsonl")))
        if "turns" in formats:
            takes.append(stack.enter_context(_turn_files(directory.turns_path)))
        yield takes


@contextmanager
def _task_files(folder: Path) -> Iterator[Take]:
    files = _Folder(folder, ".json")
    yield lambda row: files.write(row, indented(task_object(row)))
    files.remove_others()


@contextmanager
def _task_lines(path: Path) -> Iterator[Take]:
    with replacing(path) as lines:
        yield lambda row: _write_line(lines.write, task_object(row))


@contextmanager
def _turn_files(folder: Path) -> Iterator[Take]:
    files = _Folder(folder, ".jsonl")
    aggregate = _Aggregate()

    def take(row: Row) -> None:
        lines = turn_lines(row)
        files.write(row, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        aggregate.take(lines[-1]["_stats"]["tool_usage"], lines[-1]["_stats"]["reasoning_coverage"], row.status)

    yield take
    files.remove_others()
    replace_file(folder / "_aggregate_stats.json", [aggregate.json()])


class _Aggregate:
    """Over all trajectories of the turns format."""

    def __init__(self) -> None:
        self._tool_usage: Counter[str] = Counter()
        self._coverage = array("d")
        self._statuses: Counter[str] = Counter()

    def take(self, tool_usage: dict[str, int], coverage: float, status: str) -> None:
        self._tool_usage.update(tool_usage)
        self._coverage.append(coverage)
        self._statuses["failed" if status == "failed" else "completed"] += 1

    def json(self) -> bytes:
        """Completed are all but the failed ones, as in checkpoint.json."""
        return indented(
            {
                "tool_usage": dict(sorted(self._tool_usage.items())),
                "reasoning_coverage": list(self._coverage),
                "total_trajectories": len(self._coverage),
                "completed": self._statuses["completed"],
                "failed": self._statuses["failed"],
            }
        )


class _Folder:
    """A folder of one file per row and sample, and nothing else with that ending."""

    def __init__(self, folder: Path, ending: str) -> None:
        self._folder = folder
        self._ending = ending
        self._written = array("Q")  # names, hashed

    def write(self, row: Row, content: bytes) -> None:
        name = file_name(row.task_id, row.sample_index) + self._ending
        self._written.append(_hashed(name))
        path = self._folder / name
        if not _holds(path, content):
            replace_file(path, [content])

    def remove_others(self) -> None:
        """Files of rows that are no longer in the dataset."""
        if not self._folder.is_dir():
            return
        names = [path for path in self._folder.iterdir() if path.suffix == self._ending]
        if len(names) <= len(self._written):
            return
        written = set(self._written)
        try:
            for path in names:
                if _hashed(path.name) not in written:
                    path.unlink()
        except OSError as error:
            raise disk_stop(self._folder, error) from error


def _holds(path: Path, content: bytes) -> bool:
    try:
        return path.stat().st_size == len(content) and path.read_bytes() == content
    except FileNotFoundError:
        return False


def _hashed(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def _write_line(write: Callable[[bytes], object], value: object) -> None:
    write(msgspec.json.encode(value) + b"\n")
