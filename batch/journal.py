"""The journal: `batch_N.jsonl`, one line for every ended try, append-only. The truth of a run; all else follows.

A row is on disk before anybody is told that it ended. A file's tail is looked at before anything is added to it: what a
crash left half written is cut off and kept beside it, a newline that is missing is added.
"""

import asyncio
import contextlib
import os
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from agent.errors import RunStopped, StopReason

_CHUNK = 1 << 16
_OPEN_FILES = 64
_ROWS_PER_SYNC = 1024


class Place(Struct, frozen=True):
    """Where a row stands: bytes from the beginning of its batch file; the length includes the newline."""

    offset: int
    length: int

    def __iter__(self) -> Iterator[int]:
        yield self.offset
        yield self.length


def batch_path(directory: Path, batch_num: int) -> Path:
    """The file of a batch."""
    return directory / f"batch_{batch_num}.jsonl"


def children_path(directory: Path, batch_num: int) -> Path:
    """The file of the child conversations of a batch's rows."""
    return directory / f"batch_{batch_num}.children.jsonl"


def disk_stop(path: Path, error: OSError) -> RunStopped:
    """A write that failed ends the run."""
    return RunStopped("disk", f"{path} cannot be written: {error.strerror or error}")


def sync_directory(directory: Path) -> None:
    """Makes new and renamed names last."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- tails


class Mended(Struct, frozen=True):
    """What was wrong with a tail: bytes cut off, and whether the newline was missing."""

    cut: int = 0
    newline: bool = False


def mend_tail(path: Path) -> Mended:
    """Leaves the file empty or ending in a whole line; a fragment goes to NAME.torn. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return _mend(descriptor, path)
    finally:
        os.close(descriptor)


def _mend(descriptor: int, path: Path) -> Mended:
    size = os.fstat(descriptor).st_size
    if not size or os.pread(descriptor, 1, size - 1) == b"\n":
        return Mended()
    start, tail = _last_line(descriptor, size)
    if _is_object(tail):
        _write(descriptor, b"\n", size)
        os.fsync(descriptor)
        return Mended(newline=True)
    _keep_torn(path, tail)
    os.ftruncate(descriptor, start)
    os.fsync(descriptor)
    return Mended(cut=len(tail))


def _last_line(descriptor: int, size: int) -> tuple[int, bytes]:
    """Where the line without a newline at the end begins, and its bytes."""
    step = _CHUNK
    while True:
        start = max(0, size - step)
        tail = os.pread(descriptor, size - start, start)
        newline = tail.rfind(b"\n")
        if newline >= 0 or not start:
            return start + newline + 1, tail[newline + 1 :]
        step *= 4


def _is_object(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _keep_torn(path: Path, fragment: bytes) -> None:
    torn = path.with_name(path.name + ".torn")
    descriptor = os.open(torn, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        _write(descriptor, fragment + b"\n", os.fstat(descriptor).st_size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_directory(path.parent)


def _write(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


# --- writing


class BatchFile:
    """One batch file, open at its mended end. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        is_new = not path.exists()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _mend(self._descriptor, path)
        self._end = os.fstat(self._descriptor).st_size
        if is_new:
            sync_directory(path.parent)

    def write(self, rows: list[bytes]) -> list[Place]:
        """Rows with their newlines, one after another; not yet synced. After an error none of them is left, if the disk
        allows that much; else the next mending cuts off what is."""
        places, end = [], self._end
        for row in rows:
            places.append(Place(end, len(row)))
            end += len(row)
        try:
            _write(self._descriptor, b"".join(rows), self._end)
        except OSError:
            self.take_back()
            raise
        self._end = end
        return places

    def sync(self) -> None:
        """Until this returns nothing is promised."""
        os.fsync(self._descriptor)

    def take_back(self) -> None:
        """Cuts off a write that failed half way."""
        with contextlib.suppress(OSError):  # the disk has failed already, and the next mending does the same
            os.ftruncate(self._descriptor, self._end)

    def close(self) -> None:
        """Once."""
        os.close(self._descriptor)


class _Waiting(Struct, frozen=True):
    batch_num: int
    row: bytes
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Place]


class JournalWriter:
    """Appends rows on a thread of its own, many per fsync, so that the loop never waits for a disk.

    After one failed write, or once `forbid` was called, nothing more is written: everyone who waits gets RunStopped.
    """

    def __init__(self, directory: Path, path_of: Callable[[Path, int], Path] = batch_path) -> None:
        self._directory = directory
        self._path_of = path_of
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._files: OrderedDict[int, BatchFile] = OrderedDict()
        self._refusal: tuple[StopReason, str] | None = None
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._started = False

    def append(self, batch_num: int, row: bytes) -> asyncio.Future[Place]:
        """A row with its newline. The future is done once the row is on disk; it fails with RunStopped. Must be called
        in a running loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Place] = loop.create_future()
        if not self._started:
            self._started = True
            self._thread.start()
        self._queue.put(_Waiting(batch_num, row, loop, future))
        return future

    def forbid(self) -> None:
        """From now on nothing is written: somebody else may own the files."""
        self._refusal = ("interrupt", "the run's owner is gone")

    def close(self) -> None:
        """Writes what waits, then ends the thread. Blocks."""
        if self._started:
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        ending = False
        while not ending:
            waiting, ending = self._next()
            self._settle(waiting)
        for file in self._files.values():
            file.close()

    def _next(self) -> tuple[list[_Waiting], bool]:
        """Everything that waits, and whether this was the last."""
        waiting: list[_Waiting] = []
        item = self._queue.get()
        while item is not None:
            waiting.append(item)
            if len(waiting) == _ROWS_PER_SYNC or self._queue.empty():
                return waiting, False
            item = self._queue.get()
        return waiting, True

    def _settle(self, waiting: list[_Waiting]) -> None:
        outcome = self._refusal or self._written(waiting)
        for number, each in enumerate(waiting):
            _tell(each, RunStopped(*outcome) if isinstance(outcome, tuple) else outcome[number])

    def _written(self, waiting: list[_Waiting]) -> list[Place] | tuple[StopReason, str]:
        """Their places, on disk; or why there will be none, now and later."""
        groups: dict[int, list[int]] = {}
        for number, each in enumerate(waiting):
            groups.setdefault(each.batch_num, []).append(number)
        places: dict[int, Place] = {}
        for batch_num, numbers in groups.items():
            try:
                file = self._file(batch_num)
                places.update(zip(numbers, file.write([waiting[number].row for number in numbers]), strict=True))
                file.sync()
            except OSError as error:
                stop = disk_stop(self._path_of(self._directory, batch_num), error)
                self._refusal = refusal = (stop.reason, stop.message)
                return refusal
        return [places[number] for number in range(len(waiting))]

    def _file(self, batch_num: int) -> BatchFile:
        if batch_num not in self._files:
            self._files[batch_num] = BatchFile(self._path_of(self._directory, batch_num))
            if len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(batch_num)
        return self._files[batch_num]


def _tell(waiting: _Waiting, outcome: Place | RunStopped) -> None:
    def settle() -> None:
        if waiting.future.done():  # whoever waited was cancelled
            return
        if isinstance(outcome, RunStopped):
            waiting.future.set_exception(outcome)
        else:
            waiting.future.set_result(outcome)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        waiting.loop.call_soon_threadsafe(settle)
