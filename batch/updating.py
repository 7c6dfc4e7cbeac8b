"""Large derived files: one that holds already what is to be written is left as it is."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from agent.errors import RunStopped
from batch.journal import disk_stop
from batch.store import replacing

_BLOCK = 1 << 20


@contextmanager
def updating(path: Path) -> Iterator[Callable[[bytes], object]]:
    """A function for the file's whole new content, piece by piece. As `replacing`, but the content is compared with the
    file's, byte by byte, and only from the first difference on is a new one written."""
    with ExitStack() as stack:
        update = _Update(path, stack)
        yield update.write
        update.finish()


class _Update:
    def __init__(self, path: Path, stack: ExitStack) -> None:
        self._path = path
        self._stack = stack
        self._pieces: list[bytes] = []
        self._size = 0
        self._same = 0
        self._new: BinaryIO | None = None
        self._old: BinaryIO | None = None
        with suppress(OSError):  # what cannot be read is replaced
            if path.is_file() and not path.is_symlink():
                self._old = stack.enter_context(path.open("rb", buffering=_BLOCK))

    def write(self, piece: bytes) -> None:
        """The next one."""
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size >= _BLOCK:
            self._flush()

    def finish(self) -> None:
        """There is no more."""
        self._flush()
        if not self._new and self._read(1) != b"":
            self._begin()

    def _flush(self) -> None:
        block = b"".join(self._pieces)
        self._pieces, self._size = [], 0
        if not self._new and self._read(len(block)) == block:
            self._same += len(block)
            return
        (self._new or self._begin()).write(block)

    def _read(self, size: int) -> bytes | None:
        """What comes next in the old file; None without one."""
        try:
            return self._old.read(size) if self._old else None
        except OSError as error:
            raise disk_stop(self._path, error) from error

    def _begin(self) -> BinaryIO:
        self._new = new = self._stack.enter_context(replacing(self._path))
        if self._old:
            self._old.seek(0)
            for start in range(0, self._same, _BLOCK):
                new.write(self._read(min(_BLOCK, self._same - start)) or b"")
            if new.tell() != self._same:
                raise RunStopped("disk", f"{self._path} is shorter than it was")
        return new
