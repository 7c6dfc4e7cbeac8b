"""The dataset: a file of rows, checked whole before anything is spent, then read again row by row.

Of a row only its place and two hashes stay in memory (`Dataset`, about 30 bytes a row); its bytes stay in the file.
"""

import random
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from agent.prompt import Prompt
from agent.text import clean
from batch.messages import Job
from batch.rows import RowProblem, RowReader, read_prompt, row_identity
from batch.spool import open_lines
from tools.errors import UsageProblem

BAD_ROWS_KEPT = 1000
_BLOCK = 1 << 20
_BOM = b"\xef\xbb\xbf"
_REPEATED = 1 << 31  # in `_occurrence`: this row is the first of several equal ones, the rest of the number counts them

NamesCheck = Callable[[Sequence[str]], object]  # raises UsageProblem for a tool or toolset that nobody knows


class BadRow(Struct, frozen=True):
    """A line that is no row. `line` counts from 1, as editors do; in an array or a table it is the element's number."""

    line: int
    reason: str


class DatasetScan(Struct, frozen=True, kw_only=True):
    """What the first pass found. `sha256` and `size` are of the lines as read (after decompression)."""

    rows: int
    bad_rows: int
    bad: tuple[BadRow, ...]  # the first thousand
    sha256: str
    size: int
    images: int  # rows that name an image
    first_image_line: int
    asked: Mapping[tuple[str, ...], int]  # tool and toolset names that rows ask for, () for none -> how many rows do

    @property
    def names(self) -> frozenset[str]:
        """All tool and toolset names that rows ask for."""
        return frozenset(name for names in self.asked for name in names)


class Dataset:
    """Rows by their index (position among the valid rows). Filled by `scan`, then only read."""

    def __init__(self, lines: BinaryIO, path: str) -> None:
        self.path = path
        self.lines = lines
        self._closing = weakref.finalize(self, lines.close)
        self.asks = bytearray()  # rows that ask for the toolset to be spread; empty without one
        self._offsets = array("Q")
        self._keys = array("q")
        self._shas = array("I")
        self._occurrence = array("I")
        self._named = bytearray()
        self._table = array("I", bytes(4 * 1024))  # open addressing: row + 1 by its key's hash
        self._reader = RowReader()

    @classmethod
    def of_prompt(cls, prompt: str) -> "Dataset":
        """A dataset of one row, which is in no file."""
        return cls(BytesIO(msgspec.json.encode({"prompt": clean(prompt)})), "")

    def __len__(self) -> int:
        return len(self._offsets)

    def close(self) -> None:
        """The file. It also closes when nobody has the dataset any more."""
        self._closing()

    def find(self, row_key: str, hint: int = -1) -> int:
        """The row's index, -1 if it is not there. `hint`: where it is likely to be."""
        hashed = hash(row_key)
        if 0 <= hint < len(self._keys) and self._keys[hint] == hashed:
            return hint
        return self._table[self._place(hashed)] - 1

    def same(self, index: int, row_sha: str) -> bool:
        """Whether the row's content is the one with this hash."""
        return self._shas[index] == int(row_sha[:8], 16)

    def has_id(self, index: int) -> bool:
        """Whether the dataset names the row; if not, its task id follows its position."""
        return bool(self._named[index])

    def task_id(self, index: int) -> str:
        """The row's name."""
        return self.job(index).task_id if self.has_id(index) else f"task_{index}"

    def line(self, index: int) -> bytes:
        """The row's bytes."""
        self.lines.seek(self._offsets[index])
        return self.lines.readline().removeprefix(_BOM).strip()

    def job(self, index: int, sample_index: int = 0, attempt: int = 1) -> Job:
        """One try of a row. UsageProblem if the file was changed since the scan."""
        line = self.line(index)
        try:
            prompt, canonical = self.read(line)
        except RowProblem as problem:
            raise self._changed() from problem
        key, sha = row_identity(prompt.id, canonical)
        if not self.same(index, sha):
            raise self._changed()
        occurrence = 1 if self._occurrence[index] & _REPEATED else self._occurrence[index]
        return Job(
            prompt_index=index,
            task_id=prompt.id or f"task_{index}",
            row_key=f"{key}#{occurrence}" if occurrence > 1 else key,
            row_sha=sha,
            sample_index=sample_index,
            attempt=attempt,
            line=line,
        )

    def add(self, offset: int, prompt: Prompt, canonical: bytes) -> None:
        """The next row. Raises RowProblem if its id is taken."""
        key, sha = row_identity(prompt.id, canonical)
        hashed, occurrence = hash(key), 1
        place = self._place(hashed)
        if taken := self._table[place]:
            if prompt.id:
                raise RowProblem(f"id {prompt.id!r} is also row {taken - 1}'s")
            occurrence = self._count_equal(taken - 1)
            hashed = hash(f"{key}#{occurrence}")
            place = self._place(hashed)
        self._offsets.append(offset)
        self._keys.append(hashed)
        self._shas.append(int(sha[:8], 16))
        self._occurrence.append(occurrence)
        self._named.append(bool(prompt.id))
        self._table[place] = len(self._keys)
        if 3 * len(self._keys) > 2 * len(self._table):
            self._grow()

    def refuse_borrowed_names(self) -> None:
        """Raises UsageProblem if a row is called `task_N` and row N, having no id, would be called so too."""
        if any(self._named) and not all(self._named):
            for index, named in enumerate(self._named):
                if not named and (other := self.find(f"id:task_{index}")) >= 0:
                    raise UsageProblem(
                        f"{self.path}: row {other} has the id task_{index}, as which row {index}, having none, is known"
                    )

    def read(self, line: bytes) -> tuple[Prompt, bytes]:
        """A line as a prompt, and the text its hash is made of. Raises RowProblem."""
        row, canonical = self._reader.read(line)
        return read_prompt(row), canonical

    def _count_equal(self, first: int) -> int:
        count = (self._occurrence[first] & ~_REPEATED) + 1
        self._occurrence[first] = count | _REPEATED
        return count

    def _place(self, hashed: int) -> int:
        """Where in the table the row with this hash of a key stands, or may be entered."""
        keys, table = self._keys, self._table
        mask = len(table) - 1
        place = hashed & mask
        while (entry := table[place]) and keys[entry - 1] != hashed:
            place = (place + 1) & mask
        return place

    def _grow(self) -> None:
        self._table = table = array("I", bytes(8 * len(self._table)))
        mask = len(table) - 1
        for number, hashed in enumerate(self._keys, 1):
            place = hashed & mask
            while table[place]:
                place = (place + 1) & mask
            table[place] = number

    def _changed(self) -> UsageProblem:
        return UsageProblem(
            f"{self.path} was changed while the run read it: --resume goes on (--allow_config_change for edited rows)"
        )


class Selection(Struct, frozen=True, kw_only=True):
    """Which rows to run, in which order: the first `max_samples` after the shuffle, those that ask for the spread
    toolset interleaved evenly with the others."""

    max_samples: int | None = None
    shuffle: bool = False
    seed: int = 0

    def order(self, dataset: Dataset) -> Sequence[int]:
        """Row indices; 4 bytes each, or none where the file's own order is kept."""
        size = len(dataset) if self.max_samples is None else min(self.max_samples, len(dataset))
        if not self.shuffle and not dataset.asks:
            return range(size)
        rows = array("I", range(len(dataset)))
        if self.shuffle:
            random.Random(self.seed).shuffle(rows)  # noqa: S311  an order, not a secret
        return _spread(rows[:size], dataset.asks) if dataset.asks else rows[:size]


def open_dataset(path: str, *, spool_to: Path | None = None) -> Dataset:
    """Opens JSONL (plain, gzip or zstandard), a JSON array or Parquet, told apart by content; `-` is standard input.

    What can be read only once is copied to `spool_to`, or to an unnamed temporary file without one; `Dataset.path` says
    where it can be read again. Raises UsageProblem.
    """
    lines, named = open_lines(path, spool_to)
    return Dataset(lines, named)


def scan(
    dataset: Dataset,
    check_names: NamesCheck,
    *,
    asks_for_spread: Callable[[Prompt], bool] | None = None,
) -> DatasetScan:
    """Reads every line once: fills the dataset with the rows, and lists the lines that are none."""
    return _Scan(dataset, check_names, asks_for_spread).run()


class _Scan:
    def __init__(
        self, dataset: Dataset, check_names: NamesCheck, asks_for_spread: Callable[[Prompt], bool] | None
    ) -> None:
        self.dataset = dataset
        self.check_names = check_names
        self.asks_for_spread = asks_for_spread
        self.bad: list[BadRow] = []
        self.bad_rows = 0
        self.images = 0
        self.first_image_line = 0
        self.asked: Counter[tuple[str, ...]] = Counter()

    def run(self) -> DatasetScan:
        lines = self.dataset.lines
        lines.seek(0)
        digest, offset, number = sha256(), 0, 0
        while block := lines.readlines(_BLOCK):
            digest.update(b"".join(block))
            for line in block:
                number += 1
                if text := (line if offset else line.removeprefix(_BOM)).strip():
                    self._take(number, offset, text)
                offset += len(line)
        self.dataset.refuse_borrowed_names()
        return DatasetScan(
            rows=len(self.dataset),
            bad_rows=self.bad_rows,
            bad=tuple(self.bad),
            sha256=digest.hexdigest(),
            size=offset,
            images=self.images,
            first_image_line=self.first_image_line,
            asked=self.asked,
        )

    def _take(self, number: int, offset: int, line: bytes) -> None:
        try:
            prompt, canonical = self.dataset.read(line)
            if prompt.tools not in self.asked:
                self._check(prompt.tools)
            self.dataset.add(offset, prompt, canonical)
            self.asked[prompt.tools] += 1
        except RowProblem as problem:
            self._refuse(number, str(problem))
            return
        if self.asks_for_spread:
            self.dataset.asks.append(self.asks_for_spread(prompt))
        if prompt.image:
            self.images += 1
            self.first_image_line = self.first_image_line or number

    def _check(self, names: tuple[str, ...]) -> None:
        try:
            self.check_names(names)
        except UsageProblem as problem:
            raise RowProblem(str(problem)) from problem

    def _refuse(self, number: int, reason: str) -> None:
        self.bad_rows += 1
        if len(self.bad) < BAD_ROWS_KEPT:
            self.bad.append(BadRow(number, reason))


def _spread(rows: "array[int]", asks: bytearray) -> "array[int]":
    """Those that ask at even distances among the others; within each group the order stays."""
    askers = array("I", (row for row in rows if asks[row]))
    others = array("I", (row for row in rows if not asks[row]))
    mixed, taken = array("I"), 0
    for place in range(1, len(rows) + 1):
        if place * len(askers) // len(rows) > taken:
            mixed.append(askers[taken])
            taken += 1
        else:
            mixed.append(others[len(mixed) - taken])
    return mixed
