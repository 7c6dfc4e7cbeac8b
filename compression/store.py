"""Every byte that the compressor writes: outputs, and the work folder beside them, which a stopped run goes on from.

`OUTPUT.work/` holds `journal.jsonl` (a line for every row that has its end, and one for every summary of a row that
has none yet; append-only; the truth), `run.json` (what the run was told), `run.lock`, and `stdin.jsonl` where that was
the input.
"""

import gzip
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
from msgspec import Raw, Struct

from agent.types import NO_SPEND, Spend
from batch.journal import JournalWriter, Mended, disk_stop, mend_tail
from batch.store import OwnedFolder, RowFiles, indented, is_writable, replace_file, replacing
from compression.inputs import ENDINGS, MANIFEST, STDIN, WORK, Inputs, Source, is_glob
from compression.types import Number, RowMetrics
from tools.errors import UsageProblem

JOURNAL = "journal.jsonl"
METRICS_FILE = "compression_metrics.json"


# --- where outputs go


class Target(Struct, frozen=True, kw_only=True):
    """An input and its output."""

    source: Source
    path: Path


class Places(Struct, frozen=True, kw_only=True):
    """All files of a run. `root` is the output as a whole: the one file, or the directory of all."""

    root: Path
    targets: tuple[Target, ...]
    metrics: Path

    def name(self, path: Path) -> str:
        """Of one of them: its place beside the work folder."""
        return str(path.relative_to(self.root.parent))


def work_path(root: Path) -> Path:
    """The work folder of an output."""
    return root.with_name(root.name + WORK)


def root_of(given: str, output: str, suffix: str) -> Path:
    """The output as a whole, by the words of the command line alone: known before any input is read."""
    if output:
        return _named("output", output)
    if given == STDIN or is_glob(given):
        raise UsageProblem(f"input {given}: give --output, there is no one name to make it from")
    if not Path(given).exists():
        raise UsageProblem(f"input {given} does not exist")
    path = Path(given)
    if path.is_dir():
        path = _named("input", given)
        return path.with_name(path.name + suffix)
    stem, ending = _split(path.name)
    return path.with_name(stem + suffix + ending)


def _named(what: str, given: str) -> Path:
    """A path whose last part is a name, beside which a work folder can stand."""
    path = Path(given)
    path = path if path.name not in ("", "..") else path.resolve()
    if not path.name:
        raise UsageProblem(f"{what} {given}: expected a file or a directory, not the root of all")
    return path


def places_of(inputs: Inputs, root: Path, metrics_name: str, *, is_folder: bool = False, plot: str = "") -> Places:
    """Where everything goes; `is_folder`: the output was asked for as a directory. UsageProblem where an output would
    be one of the inputs, now or the next time, or stand in another's place; `plot` is one, too."""
    if is_folder or _is_folder(inputs, root):
        targets = tuple(Target(source=each, path=root / "".join(_split(each.name))) for each in inputs.sources)
        metrics = root / (metrics_name or METRICS_FILE)
    else:
        targets = (Target(source=inputs.sources[0], path=root),)
        metrics = root.with_name(metrics_name or f"{_split(root.name)[0]}_metrics.json")
    paths = [*(each.path for each in targets), metrics]
    _check_next_time(inputs, paths)
    _check_places(inputs, [*paths, *([Path(plot)] if plot else [])])
    return Places(root=root, targets=targets, metrics=metrics)


def _is_folder(inputs: Inputs, root: Path) -> bool:
    """Whether the output is a directory: it need not be one where there is but one input."""
    if root.is_dir():
        return True
    if not root.name.endswith(ENDINGS):
        return len(inputs.sources) > 1 or inputs.directory is not None
    if len(inputs.sources) > 1:
        raise UsageProblem(f"output {root}: expected a directory, there are {len(inputs.sources)} inputs")
    return False


def _split(name: str) -> tuple[str, str]:
    """x.jsonl.gz -> x, .jsonl.gz; what ends otherwise becomes JSONL."""
    ending = next((each for each in ENDINGS if name.endswith(each)), "")
    return (name.removesuffix(ending), ending) if ending else (str(Path(name).with_suffix("")), ".jsonl")


def _check_next_time(inputs: Inputs, paths: Sequence[Path]) -> None:
    for path in paths:
        if inputs.takes_all and path.parent.exists() and path.parent.samefile(inputs.takes_all):
            raise UsageProblem(f"output {path} would be one of the inputs the next time; choose another directory")


def _check_places(inputs: Inputs, paths: Sequence[Path]) -> None:
    taken: set[Path] = set()
    for path in paths:
        place = path.parent.resolve() / path.name
        if place in taken:
            raise UsageProblem(f"output {path}: two files would have this name")
        taken.add(place)
        for source in inputs.sources:
            if path.exists() and source.path.exists() and path.samefile(source.path):
                raise UsageProblem(f"output {path} is an input: it would be overwritten; choose another output")
        if path.is_dir():
            raise UsageProblem(f"output {path} is a directory")


# --- the journal


class RowKey(Struct, frozen=True):
    """Which row: the number of its file, its index in it."""

    file: int
    row: int


class Ended(Struct, frozen=True, kw_only=True, tag="row"):
    """A row that has its end. `line` is empty where the row is as it was; `spend` is what no Paid has told, `errors`
    those of its requests that brought nothing."""

    file: Number
    row: Number
    sha: str
    metrics: RowMetrics
    spend: Spend = NO_SPEND
    errors: Number = 0
    line: Raw = Raw()


class Paid(Struct, frozen=True, kw_only=True, tag="summary", omit_defaults=True):
    """What was paid for of a row without an end: a summary that was had after so many `tries`, or none because of
    `problem`. One that `withdraws` says that the summary before it is none, and counts its tries."""

    file: Number = 0
    row: Number = 0
    sha: str = ""
    text: str = ""
    problem: str = ""
    model: str = ""
    spend: Spend = NO_SPEND
    tries: Number = 1
    withdraws: bool = False

    @property
    def errors(self) -> int:
        """Requests that brought nothing."""
        return self.spend.requests - (not self.problem) + self.withdraws


Record = Ended | Paid
_decode = msgspec.json.Decoder(Record).decode
_USUAL = msgspec.structs.asdict(RowMetrics())


def record_line(record: Record) -> bytes:
    """The journal's line, newline included. Metrics that are as by default are left out."""
    if isinstance(record, Paid):
        return msgspec.json.encode(record) + b"\n"
    metrics = msgspec.structs.asdict(record.metrics)
    told: dict[str, Any] = {"type": "row", "file": record.file, "row": record.row, "sha": record.sha}
    told["metrics"] = {name: value for name, value in metrics.items() if value != _USUAL[name]}
    if record.spend != NO_SPEND:
        told["spend"] = record.spend
    if record.errors:
        told["errors"] = record.errors
    if bytes(record.line):
        told["line"] = record.line
    return msgspec.json.encode(told) + b"\n"


class Records:
    """What the journal says of every row, 8 bytes each."""

    def __init__(self, counts: Sequence[int]) -> None:
        self._ends = [array("Q", bytes(8 * count)) for count in counts]
        self._taken: dict[RowKey, list[int]] = {}  # places of summaries, of rows without a good end
        self._refused: dict[RowKey, list[int]] = {}  # of rows without a good end; and of the last end that was none
        self.spent = NO_SPEND
        self.errors = 0  # of the requests, those that brought nothing
        self.ended = 0
        self.failed = 0
        self.foreign = 0

    def place(self, key: RowKey) -> int:
        """Where the record of the row's end begins; -1 if it has none."""
        return (self._ends[key.file][key.row] >> 1) - 1

    def paid(self, key: RowKey) -> list[int]:
        """Where, in their order, the summaries begin that a row may go on from, its last end if it failed, and the
        summaries refused since."""
        return sorted([*self._taken.get(key, ()), *self._refused.get(key, ())])

    def note(self, record: Record, offset: int) -> None:
        """A record that stands there."""
        key = RowKey(record.file, record.row)
        self.spent += record.spend
        self.errors += record.errors
        if isinstance(record, Paid):
            (self._refused if record.problem else self._taken).setdefault(key, []).append(offset)
            if record.withdraws and self._taken.get(key):
                self._refused[key].append(self._taken[key].pop())
            return
        self._forget(key)
        self._ends[key.file][key.row] = (offset + 1) << 1 | record.metrics.failed
        self.ended += 1
        self.failed += record.metrics.failed
        self._refused.pop(key, None)
        if not record.metrics.failed:
            self._taken.pop(key, None)

    def _forget(self, key: RowKey) -> None:
        before = self._ends[key.file][key.row]
        self.ended -= bool(before)
        self.failed -= before & 1
        self._ends[key.file][key.row] = 0

    def retry_failed(self) -> None:
        """Rows that failed have no end any more."""
        for file, ends in enumerate(self._ends):
            for row, end in enumerate(ends):
                if end & 1:
                    key = RowKey(file, row)
                    self._refused.setdefault(key, []).append(self.place(key))
                    self._forget(key)

    def holds(self, record: Record) -> bool:
        """Whether there is such a row."""
        return record.file < len(self._ends) and record.row < len(self._ends[record.file])


class _Input(Struct, frozen=True):
    path: str
    size: int
    sha256: str


class _Manifest(Struct, frozen=True):
    """What run.json must have to be gone on from."""

    format: int
    started_at: str
    seconds: float
    settings: dict[str, Any]
    inputs: list[_Input]
    written: list[str]


class WorkFolder(OwnedFolder):
    """The files that a stopped run goes on from."""

    def __init__(self, path: Path) -> None:
        self.journal_path = path / JOURNAL
        super().__init__(path, self.journal_path)
        self.manifest_path = path / MANIFEST
        self.spool_path = path / "stdin.jsonl"
        self.new_spool_path = path / "stdin.jsonl.new"  # until it is known to be good

    def holds_results(self) -> bool:
        """Whether any row has ended here, or anything was paid for."""
        return self.journal_path.exists() and self.journal_path.stat().st_size > 0

    def forget_what_led_nowhere(self) -> None:
        """Before the lock is released: takes away what an invocation left that came to no result, its first."""
        with suppress(OSError):
            self.new_spool_path.unlink(missing_ok=True)
            if not self.holds_results():
                for path in (self.journal_path, self.manifest_path, self.spool_path):
                    path.unlink(missing_ok=True)
        self.remove_if_unused()

    def mend(self) -> Mended:
        """What a crash left half written is cut off. RunStopped if the disk refuses."""
        try:
            return mend_tail(self.journal_path) if self.journal_path.exists() else Mended()
        except OSError as error:
            raise disk_stop(self.journal_path, error) from error

    def writer(self) -> JournalWriter:
        """Appends to the journal."""
        return JournalWriter(self.path, lambda folder, _: folder / JOURNAL)

    def reader(self) -> "JournalReader":
        """Reads the journal's records by their places."""
        return JournalReader(self.journal_path)

    def records(self, counts: Sequence[int]) -> Records:
        """What the journal says, for files of so many rows."""
        found, offset = Records(counts), 0
        if not self.journal_path.exists():
            return found
        with self.journal_path.open("rb") as lines:
            for line in lines:
                record = _record(line)
                if record is not None and found.holds(record):
                    found.note(record, offset)
                else:
                    found.foreign += 1
                offset += len(line)
        return found

    def known_manifest(self) -> dict[str, Any] | None:
        """run.json of a run that has results; None without. UsageProblem if it cannot be read as what it is."""
        try:
            return (
                None
                if not self.holds_results()
                else msgspec.to_builtins(msgspec.json.decode(self.manifest_path.read_bytes(), type=_Manifest))
            )
        except (OSError, msgspec.DecodeError, RecursionError) as error:
            raise UsageProblem(f"{self.manifest_path} cannot be read: {error}") from error

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        """Replaces run.json. RunStopped if the disk refuses."""
        replace_file(self.manifest_path, [indented(manifest)])


def _record(line: bytes) -> Record | None:
    try:
        record = _decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    return record if _is_possible(record.spend) else None


def _is_possible(spend: Spend) -> bool:
    numbers = [*msgspec.structs.astuple(spend.usage), *msgspec.structs.astuple(spend.unreported)]
    return all(number >= 0 for number in (spend.requests, spend.cost_usd, *numbers))


class JournalReader:
    """Records by their places. Close it."""

    def __init__(self, path: Path) -> None:
        self._files = RowFiles(lambda _: path)

    def read(self, place: int) -> Record:
        """The record that begins there. RunStopped if the file was changed from outside."""
        record = _record(self._files.line(0, place))
        if record is None:
            raise disk_stop(Path(JOURNAL), OSError("it was changed from outside"))
        return record

    def close(self) -> None:
        """More than once is fine."""
        self._files.close()


# --- outputs


@contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """A file to be written whole, compressed as its name says: it is there at once with the end of the block, or not at
    all. The same content gives the same bytes. RunStopped if the disk refuses."""
    with replacing(path) as file:
        if path.suffix == ".gz":
            with gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=6, mtime=0) as packed:
                yield cast("BinaryIO", packed)
        elif path.suffix == ".zst":
            import zstandard  # noqa: PLC0415 - only for .zst

            with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as packed:
                yield cast("BinaryIO", packed)
        else:
            yield file


def refuse_unwritable(paths: Sequence[Path]) -> None:
    """Files that could not be written when all is paid for."""
    for path in paths:
        if path.is_dir() or not is_writable(path):
            raise UsageProblem(f"{path} cannot be written")
