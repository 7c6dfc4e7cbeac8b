"""The merge: every derived file of a run from its journal, one row in memory at a time."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from agent.row import Row, decode_row, encode_row
from batch.checkpoint import utc_now, write_checkpoint
from batch.children import merge_children
from batch.dataset import BadRow
from batch.facts import Tried
from batch.index import Counts, JournalIndex
from batch.outputs import Take, outputs
from batch.statistics import Statistics
from batch.store import RunDirectory, indented, replace_file
from batch.updating import updating

_ERROR_HEAD = 200


class SummaryOptions(Struct, frozen=True, kw_only=True):
    """What the files say that the journal does not. `duration_seconds`: wall time of all invocations; `judge` gives
    rows another verdict; `jsonl_file`: where the format jsonl goes, if not into the run directory."""

    run_name: str
    distribution: str
    model: str
    batch_size: int
    duration_seconds: float
    skipped_rows: int = 0
    skipped: tuple[BadRow, ...] = ()
    output_format: tuple[str, ...] = ("sharegpt",)
    jsonl_file: Path | None = None
    judge: Callable[[Row], Row] | None = None


class RunSummary(Struct, frozen=True, kw_only=True):
    """What a run came to. `statistics` and `metrics` are what their files hold; `kept` rows are in the merged file."""

    counts: Counts
    kept: int
    statistics: dict[str, Any]
    metrics: dict[str, Any]


def finalize(directory: RunDirectory, index: JournalIndex, options: SummaryOptions) -> RunSummary:
    """Writes trajectories.jsonl, children.jsonl where rows have any, failures.jsonl, the other formats,
    statistics.json, metrics.json and checkpoint.json. RunStopped if the disk refuses."""
    merge = _Merge(directory, index, options)
    merge.run()
    merge_children(directory, index)
    summary = merge.summary()
    replace_file(directory.statistics_path, [indented(summary.statistics)])
    replace_file(directory.metrics_path, [indented(summary.metrics)])
    write_checkpoint(directory, index, options.run_name)
    return summary


class _Merge:
    def __init__(self, directory: RunDirectory, index: JournalIndex, options: SummaryOptions) -> None:
        self.directory = directory
        self.index = index
        self.options = options
        self.statistics = Statistics() + index.statistics
        self.kept = 0
        self.takes: list[Take] = []

    def run(self) -> None:
        options, directory = self.options, self.directory
        with ExitStack() as stack:
            merge = stack.enter_context(updating(directory.trajectories_path))
            leave_out = stack.enter_context(updating(directory.failures_path))
            self.takes = stack.enter_context(outputs(options.output_format, directory, options.jsonl_file))
            as_written = None if self.takes or options.judge else self.index.as_written()
            for row, sample, last_place, kept_place in self.index.tries():
                if as_written and as_written[row * self.index.samples + sample]:
                    self.kept += 1
                    merge(self.index.line(kept_place))
                    continue
                last = self._last(last_place)
                if kept_place:
                    kept = last if kept_place == last_place else self._judged(self._read(kept_place))
                    merge(self._kept(row, kept))
                elif last.status != "stopped":
                    leave_out(self._left_out(row, sample, last))

    def _read(self, place: int) -> Tried:
        return Tried.read(self.index.line(place), self.index.policy)

    def _judged(self, tried: Tried) -> Tried:
        if not self.options.judge:
            return tried
        return Tried.read(encode_row(self.options.judge(decode_row(tried.line))), self.index.policy)

    def _last(self, place: int) -> Tried:
        """The row's last try. One that has another verdict now counts as that."""
        tried = self._read(place)
        judged = self._judged(tried)
        if judged is not tried:
            self.statistics.take(tried, -1)
            self.statistics.take(judged)
        return judged

    def _kept(self, row: int, kept: Tried) -> bytes:
        self.kept += 1
        line = self._labelled(row, kept)
        self._hand_out(line)
        return line

    def _left_out(self, row: int, sample: int, last: Tried) -> bytes:
        self.statistics.filtered[last.reason if last.status == "discarded" else last.status] += 1
        if self.index.policy.save_all and self.takes:
            self._hand_out(self._labelled(row, last))
        short = {
            "task_id": self._task_id(row, last),
            "sample_index": sample,
            "status": last.status,
            "reason": last.reason,
            "error_class": last.facts.error_class,
            "error": last.facts.error[:_ERROR_HEAD],
        }
        return msgspec.json.encode(short) + b"\n"

    def _hand_out(self, line: bytes) -> None:
        if self.takes:
            row = decode_row(line)
            for take in self.takes:
                take(row)

    def _task_id(self, row: int, tried: Tried) -> str:
        return tried.facts.task_id if self.index.dataset.has_id(row) else f"task_{row}"

    def _labelled(self, row: int, tried: Tried) -> bytes:
        """The line with the present dataset's position and name, and the present policy's status; mostly as it is."""
        facts, task_id = tried.facts, self._task_id(row, tried)
        if facts.status != tried.status:
            return _with_status(decode_row(tried.line), row, task_id, tried)
        line = tried.line
        if facts.prompt_index != row:
            line = b'{"prompt_index":%d,' % row + line[len(b'{"prompt_index":%d,' % facts.prompt_index) :]
        if facts.task_id != task_id:
            line = line.replace(_task_column(facts.task_id), _task_column(task_id), 1)
        return line

    def summary(self) -> RunSummary:
        options, index = self.options, self.index
        if index.elsewhere:
            self.statistics.filtered["not_in_dataset"] = index.elsewhere
        return RunSummary(
            counts=index.counts(),
            kept=self.kept,
            statistics={
                "run_name": options.run_name,
                "distribution": options.distribution,
                "total_prompts": len(index.order),
                "total_batches": sum(1 for _ in index.batches()),
                "batch_size": options.batch_size,
                "model": options.model,
                "completed_at": utc_now(),
                "duration_seconds": round(options.duration_seconds, 2),
                **self.statistics.to_dict(),
                "skipped_rows": {"count": options.skipped_rows, "rows": msgspec.to_builtins(options.skipped)},
                "foreign_lines": index.foreign,
            },
            metrics=self.statistics.metrics(index.totals),
        )


def _with_status(row: Row, prompt_index: int, task_id: str, tried: Tried) -> bytes:
    changed = msgspec.structs.replace(
        row, prompt_index=prompt_index, task_id=task_id, status=tried.status, reason=tried.reason
    )
    return encode_row(changed)


def _task_column(task_id: str) -> bytes:
    """As it stands in a line: bare quotes cannot stand inside a JSON string, so it is found nowhere else."""
    return b',"task_id":' + msgspec.json.encode(task_id) + b","
