"""The metrics of a whole run, added up row by row. Pure.

The file's fields `summary` to `processing` are the reference system's (metrics of a directory or file), each with what
we tell beside; then ours.
"""

from array import array
from collections import Counter
from statistics import median
from typing import Any

from msgspec import Struct, structs

from agent.types import Unreported, Usage
from compression.types import RowMetrics

STATES = ("compressed", "within_target", "still_over_target", "without_turns", "failed", "left_out")
LISTED = 1000  # rows that failed or were left out, by name
FIRST_BUCKET = 256  # tokens; each further bucket reaches twice as far


class RowName(Struct, frozen=True):
    """Where a row stands: its input, its index there."""

    file: str
    row: int


class RunFacts(Struct, frozen=True, kw_only=True):
    """What the rows do not say, of all invocations; times as everywhere."""

    strategy: str
    target_max_tokens: int
    requests: int
    errors: int  # requests that brought no summary
    usage: Usage
    cost_usd: float
    unreported: Unreported = Unreported()
    start_time: str
    end_time: str
    seconds: float
    files: list[dict[str, Any]]  # {input, output, rows, rows_written}


class Totals:
    """Sums over rows; 9 bytes a row beside."""

    def __init__(self) -> None:
        self.tokenizer = ""
        self._states: Counter[str] = Counter()
        self.before, self.after = array("I"), array("I")  # tokens of each row that could be counted
        self.uncounted = self.rows = self.compressed = self.skipped = self.over = self.failed = self.left_out = 0
        self._turns_before = self._turns_after = 0
        self._ratios, self._saved = array("d"), array("q")  # of compressed rows
        self._turns_removed = 0
        self._passes = self._shortened = 0
        self._models: set[str] = set()
        self._failures: list[dict[str, Any]] = []
        self._lost: list[dict[str, Any]] = []

    def take(self, name: RowName, row: RowMetrics, *, left_out: bool) -> None:
        """One row. `left_out`: it is over the target and not in the output."""
        self.rows += 1
        self._states[_state(row, left_out)] += 1
        self.tokenizer = row.tokenizer or self.tokenizer
        if row.failed and not row.original_tokens:
            self.uncounted += 1
        else:
            self.before.append(row.original_tokens)
            self.after.append(row.compressed_tokens)
        self._turns_before += row.original_turns
        self._turns_after += row.compressed_turns
        self.skipped += row.skipped_under_target
        self.over += row.still_over_limit
        self._passes += row.passes
        self._shortened += row.shortened_turns
        if row.was_compressed:
            self._take_compressed(row)
        if row.failed:
            self.failed += 1
            _list(self._failures, name, error=row.error)
        if left_out:
            self.left_out += 1
            _list(self._lost, name, tokens=row.compressed_tokens)

    def _take_compressed(self, row: RowMetrics) -> None:
        self.compressed += 1
        self._ratios.append(row.compression_ratio)
        self._saved.append(row.tokens_saved)
        self._turns_removed += row.turns_removed
        if row.summary_model:
            self._models.add(row.summary_model)

    def to_dict(self, facts: RunFacts) -> dict[str, Any]:
        """The file's content."""
        before, after = sum(self.before), sum(self.after)
        return {
            "summary": {
                "total_trajectories": self.rows,
                "trajectories_compressed": self.compressed,
                "trajectories_skipped_under_target": self.skipped,
                "trajectories_still_over_limit": self.over,
                "trajectories_failed": self.failed,
                "trajectories_left_out": self.left_out,
                "compression_rate": _ratio(self.compressed, self.rows, 0.0),
            },
            "states": {state: self._states[state] for state in STATES},
            "tokens": {
                "total_before": before,
                "total_after": after,
                "total_saved": before - after,
                "overall_compression_ratio": _ratio(after, before, 1.0),
                "rows_not_counted": self.uncounted,
            },
            "turns": {
                "total_before": self._turns_before,
                "total_after": self._turns_after,
                "total_removed": self._turns_before - self._turns_after,
            },
            "averages": {
                "avg_compression_ratio": _mean(sum(self._ratios), self.compressed, 1.0, 4),
                "avg_tokens_saved_per_compressed": _mean(sum(self._saved), self.compressed, 0.0, 1),
                "avg_turns_removed_per_compressed": _mean(self._turns_removed, self.compressed, 0.0, 2),
            },
            "summarization": {
                "total_api_calls": facts.requests,
                "total_errors": facts.errors,
                "success_rate": _ratio(facts.requests - facts.errors, facts.requests, 1.0),
                "models": sorted(self._models),
                "requests": facts.requests,
                "usage": structs.asdict(facts.usage),
                "cost_usd": round(facts.cost_usd, 6),
                "unreported": structs.asdict(facts.unreported),
            },
            "processing": {
                "start_time": facts.start_time,
                "end_time": facts.end_time,
                "duration_seconds": round(facts.seconds, 2),
            },
            "strategy": facts.strategy,
            "tokenizer": self.tokenizer,
            "target_max_tokens": facts.target_max_tokens,
            "passes": self._passes,
            "shortened_turns": self._shortened,
            "compression_ratios": _spread(self._ratios),
            "tokens_saved": _spread(self._saved),
            "histogram": histogram(self.before, self.after),
            "files": facts.files,
            "failed": self._failures,
            "left_out": self._lost,
        }


def _state(row: RowMetrics, left_out: bool) -> str:
    """The one of `STATES` that says what became of a row."""
    if row.failed or left_out:
        return "failed" if row.failed else "left_out"
    if not row.original_turns:
        return "without_turns"
    if row.still_over_limit:
        return "still_over_target"
    return "compressed" if row.was_compressed else "within_target"


def histogram(before: "array[int]", after: "array[int]") -> list[dict[str, int]]:
    """Rows by their tokens: `up_to` is a bucket's upper bound, itself included."""
    counts = [[0, 0] for _ in range(64)]
    for side, tokens in enumerate((before, after)):
        for each in tokens:
            counts[_bucket(each)][side] += 1
    used = max((place for place, count in enumerate(counts) if any(count)), default=-1)
    return [
        {"up_to": FIRST_BUCKET << place, "before": first, "after": then}
        for place, (first, then) in enumerate(counts[: used + 1])
    ]


def _bucket(tokens: int) -> int:
    return ((tokens - 1) // FIRST_BUCKET).bit_length() if tokens > 0 else 0


def _list(names: list[dict[str, Any]], name: RowName, **more: Any) -> None:
    if len(names) < LISTED:
        names.append({"file": name.file, "row": name.row, **more})


def _ratio(part: int, whole: int, of_nothing: float) -> float:
    return round(part / whole, 4) if whole else of_nothing


def _mean(total: float, count: int, of_nothing: float, digits: int) -> float:
    return round(total / count, digits) if count else of_nothing


def _spread(values: "array[Any]") -> dict[str, float]:
    """Of the compressed rows; zeros without one."""
    if not values:
        return {"min": 0.0, "median": 0.0, "max": 0.0}
    return {"min": float(min(values)), "median": float(median(values)), "max": float(max(values))}
