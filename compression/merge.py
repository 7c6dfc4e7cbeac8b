"""The end of a run: the inputs are streamed again, beside what the journal says of each row, into the outputs."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any, BinaryIO

import msgspec
from msgspec import Raw, Struct

from compression.inputs import opened, rows
from compression.metrics import RowName, Totals
from compression.run import File, changed_since, line_sha, selected
from compression.settings import CompressorSettings
from compression.store import Ended, JournalReader, Places, Records, RowKey, Target, WorkFolder, output_file
from compression.types import RowMetrics

METRICS_KEY = "compression_metrics"
_REGION = {"region_start_idx": "start_idx", "region_end_idx": "end_idx", "region_turns_count": "turns_count"}


class Merged(Struct, frozen=True):
    """What was written: sums over rows, and of each file {input, output, rows, rows_written}."""

    totals: Totals
    files: list[dict[str, Any]]


def merge(
    settings: CompressorSettings, files: Sequence[File], places: Places, folder: WorkFolder, records: Records
) -> Merged:
    """Writes every output; one row in memory at a time. RunStopped if the disk refuses or an input was changed."""
    totals = Totals()
    with closing(folder.reader()) as journal:
        merging = _Merging(settings, records, journal, totals)
        told = [merging.file(number, file, places.targets[number]) for number, file in enumerate(files)]
    return Merged(totals, told)


class _Merging:
    def __init__(self, settings: CompressorSettings, records: Records, journal: JournalReader, totals: Totals) -> None:
        self._settings = settings
        self._records = records
        self._journal = journal
        self._totals = totals

    def file(self, number: int, file: File, target: Target) -> dict[str, Any]:
        """One input's output."""
        before, left_out = self._totals.rows, self._totals.left_out
        with opened(file.source) as lines, output_file(target.path) as output:
            for index, (line, taken) in enumerate(
                zip(rows(lines), selected(self._settings, number, file), strict=False)
            ):
                if taken:
                    self._row(RowKey(number, index), file, line, output)
        count = self._totals.rows - before
        return {
            "input": file.source.shown,
            "output": str(target.path),
            "rows": count,
            "rows_written": count - (self._totals.left_out - left_out),
        }

    def _row(self, key: RowKey, file: File, line: bytes, output: BinaryIO) -> None:
        record = self._journal.read(self._records.place(key))
        if not isinstance(record, Ended) or record.sha != line_sha(line):
            raise changed_since(file.source)
        told = record.metrics
        left_out = told.still_over_limit and not told.failed and not self._settings.save_over_limit
        self._totals.take(RowName(file.source.shown, key.row), record.metrics, left_out=left_out)
        if not left_out:
            line = bytes(record.line) or line
            output.write((with_metrics(line, record.metrics) if self._settings.per_trajectory else line) + b"\n")


def with_metrics(line: bytes, metrics: RowMetrics) -> bytes:
    """A row with `compression_metrics` as its last field, in place of an earlier one; all else is byte for byte."""
    if METRICS_KEY.encode() in line:
        line = _without_metrics(line)
    body = line.rstrip().removesuffix(b"}").rstrip()
    told = msgspec.json.encode({METRICS_KEY: _told(metrics)})
    return body + told[1:] if body.endswith(b"{") and len(body) == 1 else body + b"," + told[1:]


def _without_metrics(line: bytes) -> bytes:
    fields = msgspec.json.decode(line, type=dict[str, Raw])
    if fields.pop(METRICS_KEY, None) is None:
        return line
    return msgspec.json.encode(fields)


def _told(metrics: RowMetrics) -> dict[str, Any]:
    """As the row holds them: the region is an object of its own."""
    told: dict[str, Any] = {}
    for name, value in msgspec.structs.asdict(metrics).items():
        if name in _REGION:
            told.setdefault("compression_region", {})[_REGION[name]] = value
        else:
            told[name] = value
    return told
