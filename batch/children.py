"""The rows of child conversations, `batch_N.children.jsonl`: which of them belong to the tries that are kept.

They are on disk before their row, in one piece. Those of a try that came to no row are left-overs that nobody asks
for: a file is one worker's, so its number tells them apart from those of the same try begun anew.
"""

from array import array
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from agent.delegation import MAX_CHILDREN
from agent.row import child_name, decode_child, encode_row
from batch.facts import Tried
from batch.index import JournalIndex
from batch.store import RowFiles, RunDirectory
from batch.updating import updating


class _Header(Struct):
    """Whose child it is."""

    prompt_index: int
    parent_row_key: str
    sample_index: int
    attempt: int


def merge_children(directory: RunDirectory, index: JournalIndex) -> None:
    """Writes children.jsonl, in the order of trajectories.jsonl, if there ever were children. RunStopped if the disk
    refuses."""
    if not directory.children_numbers():
        return
    children = KeptChildren(directory, index)
    try:
        with updating(directory.merged_children_path) as write:
            for row, sample, _, _ in index.tries():
                for line in children.lines(row, sample):
                    write(line)
    finally:
        children.close()


_header = msgspec.json.Decoder(_Header).decode


class KeptChildren:
    """Where the children of every row's kept try stand: 17 bytes each."""

    def __init__(self, directory: RunDirectory, index: JournalIndex) -> None:
        self._index = index
        self._files = RowFiles(directory.children_path)
        slots = len(index.dataset) * index.samples
        self._batches = array("Q", bytes(8 * slots))
        self._offsets = array("Q", bytes(8 * slots))
        self._counts = bytearray(slots)
        for number in directory.children_numbers():
            with directory.children_path(number).open("rb") as lines:
                self._find(number, lines)

    def close(self) -> None:
        """The files that it read from."""
        self._files.close()

    def _find(self, number: int, lines: Iterator[bytes]) -> None:
        offset = 0
        for line in lines:
            slot = self._slot(number, line)
            if slot >= 0:
                if not self._counts[slot]:
                    self._batches[slot], self._offsets[slot] = number, offset
                self._counts[slot] = min(self._counts[slot] + 1, MAX_CHILDREN)
            offset += len(line)

    def _slot(self, number: int, line: bytes) -> int:
        """The row and sample whose kept try has this child; -1 for a left-over."""
        try:
            header = _header(line if line.endswith(b"\n") else b"")
        except msgspec.DecodeError:
            return -1
        index = self._index
        row = index.dataset.find(header.parent_row_key, header.prompt_index)
        if row < 0 or not 0 <= header.sample_index < index.samples:
            return -1
        kept = index.is_kept(row, header.sample_index, number, header.attempt)
        return row * index.samples + header.sample_index if kept else -1

    def lines(self, row: int, sample: int) -> Iterator[bytes]:
        """As they stand in the merged file: those that may stand there by themselves."""
        slot = row * self._index.samples + sample
        offset = self._offsets[slot]
        for _ in range(self._counts[slot]):
            line = self._files.line(self._batches[slot], offset)
            offset += len(line)
            tried = Tried.read(line, self._index.policy)
            if self._index.policy.keeps(tried.status):
                yield self._labelled(row, tried)

    def _labelled(self, row: int, tried: Tried) -> bytes:
        """With the present dataset's position and name, and the present policy's status."""
        child = decode_child(tried.line)
        is_named = self._index.dataset.has_id(row)
        return encode_row(
            msgspec.structs.replace(
                child,
                prompt_index=row,
                task_id=child.task_id if is_named else child_name(f"task_{row}", child.child_index),
                status=tried.status,
                reason=tried.reason,
            )
        )
