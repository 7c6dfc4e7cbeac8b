"""What is to be compressed: files of rows, found, checked whole before anything is spent, then read again as a stream.

A row's index is its position among the lines of its file that are not blank. Nothing of a row stays in memory.
"""

import glob
import os
import random
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from agent.text import json_text
from batch.dataset import BadRow
from batch.rows import RowProblem, RowReader, is_too_deep
from batch.spool import open_lines
from tools.errors import UsageProblem

ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst")
MANIFEST, MERGED = "run.json", "trajectories.jsonl"  # of a run directory
WORK = ".work"  # what the name of our own work folders ends in
STDIN = "-"
BAD_ROWS_KEPT = 1000
_BOM = b"\xef\xbb\xbf"
_MAGIC = re.compile(r"[*?\[]")
_LONE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")  # escaped, or as bytes


class Source(Struct, frozen=True, kw_only=True):
    """A file of rows. `name` is what its output is called where outputs have a directory, with the folders within it
    that it stands in; `shown` is for messages."""

    path: Path
    name: str
    shown: str


class Inputs(Struct, frozen=True, kw_only=True):
    """What `--input` means: files, the directory that was named, if it was one, and what is to be said of it."""

    sources: tuple[Source, ...]
    directory: Path | None = None
    is_run: bool = False  # of that directory one file alone is read
    notice: str = ""

    @property
    def takes_all(self) -> Path | None:
        """The directory of which every file is read."""
        return None if self.is_run else self.directory


class Scanned(Struct, frozen=True, kw_only=True):
    """What the first pass over a file found. `sha256` and `size` are of its lines, decompressed."""

    rows: int
    sha256: str
    size: int
    bad_rows: int = 0
    bad: tuple[BadRow, ...] = ()  # the first thousand


# --- which files


def find_inputs(given: str, spool_to: Path) -> Inputs:
    """The files of an input. What can be read only once is copied to `spool_to`. Raises UsageProblem."""
    path = Path(given)
    if given == STDIN or _is_pipe(path):
        open_lines(given, spool_to)[0].close()
        return Inputs(sources=(Source(path=spool_to, name="stdin.jsonl", shown="standard input"),))
    if path.is_dir():
        return _of_directory(path)
    if path.exists():
        return Inputs(sources=(_source(path),))
    if not is_glob(given):
        raise UsageProblem(f"input {given} does not exist")
    return _of_glob(given)


def is_glob(given: str) -> bool:
    """Whether an input is a pattern, and not a file or directory of that name."""
    return _MAGIC.search(given) is not None and not Path(given).exists()


def _is_pipe(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _source(path: Path) -> Source:
    return Source(path=path, name=path.name, shown=str(path))


def _of_directory(directory: Path) -> Inputs:
    if _is_run(directory):
        return Inputs(sources=(_source(_merged(directory)),), directory=directory, is_run=True)
    files = _once([each for each in sorted(directory.iterdir()) if each.name.endswith(ENDINGS) and each.is_file()])
    if not files:
        raise UsageProblem(f"input {directory}: no file in it ends in {', '.join(ENDINGS)}")
    return Inputs(sources=tuple(map(_source, files)), directory=directory)


def _once(paths: Sequence[Path]) -> list[Path]:
    """Of several names of one file the first that is no link."""
    files: dict[tuple[int, int], Path] = {}
    for path in sorted(paths, key=Path.is_symlink):
        told = path.stat()
        files.setdefault((told.st_dev, told.st_ino), path)
    kept = set(files.values())
    return [path for path in paths if path in kept]


def _is_run(directory: Path) -> bool:
    return (directory / MANIFEST).exists() or any(directory.glob("batch_*.jsonl"))


def _merged(directory: Path) -> Path:
    merged = directory / MERGED
    if not merged.exists():
        raise UsageProblem(
            f"input {directory}: a run directory without {MERGED}: make it with batch-runner --finalize"
            f" --output {directory}"
        )
    return merged


def _of_glob(given: str) -> Inputs:
    """The files that match, and the merged files of the run directories that do. Of files in a run directory (or in a
    work folder of ours) no other one is taken."""
    found = [Path(each) for each in sorted(glob.glob(given, recursive=True))]  # noqa: PTH207 - may be absolute
    files, parts = dict[Path, None](), list[Path]()
    for path in found:
        if path.is_file():
            if path.name != MERGED and (path.parent / MANIFEST).exists():
                parts.append(path)
            else:
                files[path] = None
        elif _is_run(path) and path.suffix != WORK:
            files[_merged(path)] = None
    told = f"{len(parts)} in run directories, of which {MERGED} alone is taken" if parts else ""
    if not files:
        raise UsageProblem(f"input {given}: no file matches" + (f" but {told}" if told else ""))
    notice = f"left out of input {given}: {told} (the first is {parts[0]})" if told else ""
    return Inputs(sources=_by_place(_once(list(files))), notice=notice)


def _by_place(files: list[Path]) -> tuple[Source, ...]:
    """Each named by its place within the folder that holds them all."""
    top = os.path.commonpath([each.absolute().parent for each in files])
    return tuple(Source(path=each, name=str(each.absolute().relative_to(top)), shown=str(each)) for each in files)


# --- rows


@contextmanager
def opened(source: Source) -> Iterator[BinaryIO]:
    """The file's lines, decompressed. Raises UsageProblem."""
    lines, _ = open_lines(str(source.path), None)
    with lines:
        yield lines


def rows(lines: BinaryIO) -> Iterator[bytes]:
    """Each row as JSON that readers take: a lone surrogate in it has become U+FFFD, all other bytes are the file's."""
    for _, line in _numbered(lines):
        yield line if _LONE_SURROGATE.search(line) is None else readable(line)


def _numbered(lines: BinaryIO) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(lines, 1):
        if text := (line.removeprefix(_BOM) if number == 1 else line).strip():
            yield number, text


def readable(line: bytes) -> bytes:
    """The line if it is JSON, an object, without a lone surrogate; else written anew. Raises RowProblem, also for one
    that is nested too deep."""
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):  # stricter than JSON in places
        return json_text(RowReader().read(line)[0]).encode()
    if not isinstance(value, dict) or is_too_deep(value, line):
        RowReader().read(line)  # says what is wrong
    return line


def scan(source: Source) -> Scanned:
    """Reads every line once. Raises UsageProblem if the file cannot be read."""
    digest, size, count, bad_rows = sha256(), 0, 0, 0
    bad: list[BadRow] = []
    with opened(source) as lines:
        for number, line in enumerate(lines, 1):
            digest.update(line)
            size += len(line)
            text = (line.removeprefix(_BOM) if number == 1 else line).strip()
            if not text:
                continue
            count += 1
            if problem := _problem(text):
                bad_rows += 1
                bad += [BadRow(number, problem)] if len(bad) < BAD_ROWS_KEPT else []
    return Scanned(rows=count, sha256=digest.hexdigest(), size=size, bad_rows=bad_rows, bad=tuple(bad))


def _problem(line: bytes) -> str:
    try:
        readable(line)
    except RowProblem as problem:
        return str(problem)
    return ""


# --- samples


def sample_size(count: int, percent: float | None) -> int:
    """How many of a file's rows are taken: at least one, if it has any."""
    if percent is None:
        return count
    return min(count, max(1, int(count * Fraction(str(percent)) / 100)))  # as it is written: 32.3 is no float


def drawn(count: int, percent: float | None, seed: str) -> Iterator[bool]:
    """For each of a file's rows in order whether it is taken: the same ones for the same count, percent and seed."""
    left, rng = sample_size(count, percent), random.Random(seed)  # noqa: S311 - a sample, not a secret
    for ahead in range(count, 0, -1):
        taken = left == ahead or rng.random() * ahead < left
        left -= taken
        yield taken
