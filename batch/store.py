"""Every path and every byte of a run directory. See `batch.journal` for its journal, `batch.lock` for its lock."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from agent.errors import RunStopped
from agent.row import Row, decode_row
from batch.journal import BatchFile, Mended, Place, batch_path, children_path, disk_stop, mend_tail, sync_directory
from batch.lock import PATIENCE, RunLock, join, own
from batch.manifest import Moment, checked
from tools.environments.base import Owner
from tools.errors import UsageProblem

_BATCH_NAME = re.compile(r"batch_(0|[1-9]\d{0,8})((?:\.children)?\.jsonl)(\.torn)?")
_FOLDERS = ("", "tasks", "turns", "artifacts")  # where derived files stand
_WINDOW = 1 << 16


class Mending(Struct, frozen=True, kw_only=True):
    """What was left of an invocation that did not end well: batch files whose tail was cut, or lacked its newline, and
    half-made derived files that were removed."""

    cut: tuple[str, ...] = ()
    completed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


class _Checkpointed(Struct, frozen=True):
    last_checkpoint_at: Moment


class OwnedFolder:
    """A folder that one process at a time may write. `witness` is a file that its owner writes again and again."""

    def __init__(self, path: Path, witness: Path) -> None:
        self.path = path
        self.lock_path = path / "run.lock"
        self._witness = witness
        self._made: list[Path] = []  # by `own`, innermost first

    def own(self, owner: Owner, *, steal: bool = False, patience: float = PATIENCE) -> RunLock:
        """Makes the directory if need be and takes its lock. UsageProblem if another process has it, or it cannot be
        made."""
        try:
            self._made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            return own(self.lock_path, owner, self._witness, steal=steal, patience=patience)
        except OSError as error:
            raise UsageProblem(f"the run directory {self.path} cannot be written: {error.strerror or error}") from error

    def remove_if_unused(self) -> None:
        """Takes the lock away again if nothing else was ever written, and the folders that were made for it."""
        with suppress(OSError):
            if [path.name for path in self.path.iterdir()] == [self.lock_path.name]:
                self.lock_path.unlink()
                for folder in self._made:
                    folder.rmdir()


class RunDirectory(OwnedFolder):
    """The files of one run, by name."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, path / "checkpoint.json")
        self.manifest_path = path / "run.json"
        self.checkpoint_path = path / "checkpoint.json"
        self.trajectories_path = path / "trajectories.jsonl"
        self.merged_children_path = path / "children.jsonl"
        self.statistics_path = path / "statistics.json"
        self.metrics_path = path / "metrics.json"
        self.failures_path = path / "failures.jsonl"
        self.tasks_path = path / "tasks"
        self.turns_path = path / "turns"
        self.log_path = path / "run.log"
        self.dataset_path = path / "dataset.jsonl"  # what came by a pipe
        self._had_dataset = True
        self._started_at = ""

    def own(self, owner: Owner, *, steal: bool = False, patience: float = PATIENCE) -> RunLock:
        """See OwnedFolder."""
        lock = super().own(owner, steal=steal, patience=patience)
        self._had_dataset = self.dataset_path.exists()
        return lock

    def remove_if_unused(self) -> None:
        """Of a run that never began the copy of its dataset goes too."""
        if not self._had_dataset and not self.manifest_path.exists():
            with suppress(OSError):
                self.dataset_path.unlink(missing_ok=True)
        super().remove_if_unused()

    def files(self) -> tuple[Path, ...]:
        """Those that are written whole: none may be a directory, or be somebody else's."""
        derived = (self.checkpoint_path, self.trajectories_path, self.statistics_path, self.metrics_path)
        others = (self.failures_path, self.manifest_path, self.log_path, self.path / "tasks.jsonl")
        return (*derived, *others, self.merged_children_path)

    def join(self, owner: Owner) -> RunLock:
        """A worker's share of its owner's lock. UsageProblem if the run has another owner by now."""
        return join(self.lock_path, owner)

    def batch_path(self, batch_num: int) -> Path:
        """The file of a batch."""
        return batch_path(self.path, batch_num)

    def batch_numbers(self) -> list[int]:
        """Batches that have a file, lowest first."""
        return sorted(number for number, ending in self._batch_names() if ending == ".jsonl")

    def children_path(self, batch_num: int) -> Path:
        """The file of the children of a batch's rows."""
        return children_path(self.path, batch_num)

    def children_numbers(self) -> list[int]:
        """Batches that have such a file, lowest first."""
        return sorted(number for number, ending in self._batch_names() if ending == ".children.jsonl")

    def next_batch_number(self) -> int:
        """Above every one that left a trace."""
        return max((number for number, _ in self._batch_names()), default=-1) + 1

    def holds_results(self) -> bool:
        """Whether any row has ended here."""
        return any(self.batch_path(number).stat().st_size for number in self.batch_numbers())

    def _batch_names(self) -> Iterator[tuple[int, str]]:
        """Numbers, and what follows them in the name."""
        if not self.path.is_dir():
            return
        with os.scandir(self.path) as entries:  # there may be 100,000: a Path of each would take seconds
            for entry in entries:
                if found := _BATCH_NAME.fullmatch(entry.name):
                    if not entry.is_file():
                        raise UsageProblem(f"{entry.path} is no file: move it away")
                    yield int(found[1]), found[2] + (found[3] or "")

    # --- the journal

    def mend(self) -> Mending:
        """Before anything else is read or written: see Mending. RunStopped if the disk refuses."""
        cut, completed = [], []
        files = [*map(self.batch_path, self.batch_numbers()), *map(self.children_path, self.children_numbers())]
        for path in files:
            mended = _mended(path)
            if mended.cut:
                cut.append(path.name)
            if mended.newline:
                completed.append(path.name)
        return Mending(cut=tuple(cut), completed=tuple(completed), removed=tuple(self._remove_half_made()))

    def mend_batch(self, batch_num: int) -> Mended:
        """The tail of one batch file; nothing if it has no file."""
        return _mended(self.batch_path(batch_num))

    def _remove_half_made(self) -> Iterator[str]:
        for folder in _FOLDERS:
            for path in (self.path / folder).glob("*.tmp"):
                if path.is_symlink() or not path.is_dir():  # a folder is none of ours
                    _remove(path)
                    yield str(path.relative_to(self.path))

    def append(self, batch_num: int, row: bytes) -> Place:
        """A row that no worker can write any more. It is on disk when this returns."""
        path = self.batch_path(batch_num)
        try:
            file = BatchFile(path)
            try:
                (place,) = file.write([row])
                file.sync()
            finally:
                file.close()
        except OSError as error:
            raise disk_stop(path, error) from error
        return place

    def rows(self, batch_num: int) -> Iterator[tuple[Row, Place]]:
        """The rows of one batch file; lines that are none are passed over."""
        path = self.batch_path(batch_num)
        if not path.exists():
            return
        offset = 0
        with path.open("rb") as lines:
            for line in lines:
                place = Place(offset, len(line))
                offset += len(line)
                if row := _row(line):
                    yield row, place

    # --- manifest and derived files

    def started_at(self) -> str:
        """The time that run.json tells, which is read once; "" as long as there is none."""
        if not self._started_at:
            self._started_at = str((self.read_manifest() or {}).get("started_at", ""))
        return self._started_at

    def last_checkpoint_at(self) -> str:
        """The time that checkpoint.json tells; "" if there is none."""
        try:
            told = msgspec.json.decode(self.checkpoint_path.read_bytes(), type=_Checkpointed).last_checkpoint_at
            return told.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        except (OSError, msgspec.DecodeError, RecursionError):
            return ""

    def read_manifest(self) -> dict[str, Any] | None:
        """run.json; None if there is none. UsageProblem if it cannot be read as what it is."""
        try:
            return checked(msgspec.json.decode(self.manifest_path.read_bytes()))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UsageProblem(f"{self.manifest_path} cannot be read: {error.strerror or error}") from error
        except (msgspec.DecodeError, RecursionError) as error:
            raise UsageProblem(
                f"{self.manifest_path} is damaged ({error}): move it away to go on without it"
            ) from error

    def read_metrics(self) -> dict[str, Any]:
        """metrics.json, which is there. What is not a batch runner's is added to it by others."""
        metrics: dict[str, Any] = msgspec.json.decode(self.metrics_path.read_bytes())
        return metrics

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Replaces run.json."""
        replace_file(self.manifest_path, [indented(manifest)])


def _mended(path: Path) -> Mended:
    try:
        return mend_tail(path)
    except FileNotFoundError:
        return Mended()
    except OSError as error:
        raise disk_stop(path, error) from error


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise disk_stop(path, error) from error


def _row(line: bytes) -> Row | None:
    try:
        return decode_row(line)
    except msgspec.DecodeError:
        return None


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to be written whole: it is there at once with the end of the block, or not at all. RunStopped if the disk
    refuses."""
    half_made = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with half_made.open("wb", buffering=1 << 20) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        half_made.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        with suppress(OSError):  # the first fault is the one to tell
            half_made.unlink(missing_ok=True)
        raise disk_stop(path, error) from error
    except BaseException:
        with suppress(OSError):
            half_made.unlink(missing_ok=True)
        raise


def replace_file(path: Path, chunks: Iterable[bytes]) -> None:
    """The file's whole new content. See `replacing`."""
    with replacing(path) as file:
        file.writelines(chunks)


def is_writable(path: Path) -> bool:
    """Whether a file can be made there, as far as that can be told without making it."""
    nearest = next(place for place in [path, *path.absolute().parents] if place.exists())
    return os.access(nearest, os.W_OK) and (nearest == path or nearest.is_dir())


def indented(value: Any) -> bytes:
    """JSON for people, with the newline at the end."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"


class RowFiles:
    """Reads journal rows by their place, a few files open at a time. Neighbours mostly come out of one read. `path_of`
    gives a number's file."""

    def __init__(self, path_of: Callable[[int], Path], open_files: int = 64) -> None:
        self._path_of = path_of
        self._limit = open_files
        self._descriptors: dict[int, int] = {}
        self._window = (-1, 0, b"")  # batch number, offset, bytes: what was read last

    def __enter__(self) -> "RowFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """More than once is fine."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self._window = (-1, 0, b"")

    def line(self, batch_num: int, offset: int) -> bytes:
        """The line that begins there, with its newline."""
        number, start, window = self._window
        if number == batch_num and start <= offset:
            end = window.find(b"\n", offset - start)
            if end >= 0:
                return window[offset - start : end + 1]
        return self._read(batch_num, offset)

    def _read(self, batch_num: int, offset: int) -> bytes:
        descriptor, size = self._descriptor(batch_num), _WINDOW
        start = offset - offset % _WINDOW
        while True:
            size *= 2
            window = os.pread(descriptor, size, start)
            end = window.find(b"\n", offset - start)
            if end >= 0:
                self._window = (batch_num, start, window)
                return window[offset - start : end + 1]
            if len(window) < size:
                raise RunStopped("disk", f"{self._path_of(batch_num)} is shorter than it was")

    def _descriptor(self, batch_num: int) -> int:
        if batch_num not in self._descriptors:
            if len(self._descriptors) >= self._limit:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            self._descriptors[batch_num] = os.open(self._path_of(batch_num), os.O_RDONLY | os.O_CLOEXEC)
        return self._descriptors[batch_num]
