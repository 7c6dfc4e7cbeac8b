"""What the compressor tells at its end, and of a dry run."""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

import msgspec
from msgspec import Struct

from batch.progress import count_text, counted, plain, print_lines, unreported_facts

WIDTH = 115
WIDEST_BAR = 30


class Report(Struct, frozen=True, kw_only=True):
    """What a run ended with. `metrics` are the file's, empty where not all `rows` have `ended`, so that no output was
    written; `files`: what -> path."""

    exit_code: int
    rows: int
    ended: int
    stopped: str = ""
    metrics: dict[str, Any] = {}
    files: dict[str, str] = {}
    resume: str = ""


class DryRun(Struct, frozen=True, kw_only=True):
    """What a run would do. `done` of the `rows` have their end, all else is of the others. `requests` are the first of
    each row: a long one may need more. `cost_usd` is -1 where no price is known."""

    files: int
    rows: int
    done: int
    tokens: int
    over_target: int
    out_of_reach: int  # of these, rows that cannot be brought to the target
    failed: int  # rows that cannot be read as trajectories, or counted
    requests: int
    input_tokens: int
    output_tokens: int
    cost_usd: float
    tokenizer: str
    target_max_tokens: int
    strategy: str
    model: str
    output: str


def print_report(report: Report, stream: TextIO, *, json_summary: bool) -> None:
    """For people, or as one line of JSON. The command that resumes is not part of the text."""
    print_lines([msgspec.json.encode(report).decode()] if json_summary else _text(report), stream)


def print_dry_run(told: DryRun, stream: TextIO, *, json_summary: bool) -> None:
    """As `print_report`."""
    print_lines([msgspec.json.encode(told).decode()] if json_summary else _dry_run_lines(told), stream)


def _dry_run_lines(told: DryRun) -> list[str]:
    cost = "cost unknown: give --price_in and --price_out" if told.cost_usd < 0 else f"${told.cost_usd:.2f}"
    lost = f", of which {told.out_of_reach} cannot be brought there" if told.out_of_reach else ""
    calls = (
        f"{counted(told.requests, 'model call')} at least, {count_text(told.input_tokens)} tokens in,"
        f" {count_text(told.output_tokens)} out, {cost}"
    )
    done = f"{told.done} are done, the others have " if told.done else ""
    return [
        "Dry run: no model was called, nothing was written",
        f"  rows       {told.rows} in {counted(told.files, 'file')}, {done}{told.tokens:,} tokens by {told.tokenizer}",
        f"  over       {told.over_target} are over {told.target_max_tokens:,} tokens{lost}",
        *([f"  failed     {counted(told.failed, 'row')} cannot be read or counted"] if told.failed else []),
        f"  strategy   {told.strategy}" + (f" with {told.model}" if told.model and told.strategy == "summary" else ""),
        f"  would take {calls if told.strategy == 'summary' else 'no model call'}",
        f"  output     {told.output}",
    ]


def _text(report: Report) -> list[str]:
    lines = ["Compression " + (f"stopped early: {plain(report.stopped)}" if report.stopped else "finished")]
    if report.metrics:
        lines += _table((), _facts(report.metrics))
        lines += _table(("tokens of a row", "before", "after"), _histogram(report.metrics["histogram"]))
    else:
        lines.append(f"  ended      {report.ended} of {counted(report.rows, 'row')}")
    return lines + [f"  {what:<10} {path}" for what, path in report.files.items()]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A box of text, without a control character."""
    from rich.console import Console  # noqa: PLC0415 - 0.1 s
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415 - as above

    drawn, table = io.StringIO(), Table(*columns, show_header=bool(columns))
    for row in rows:
        table.add_row(*map(Text, row))
    Console(file=drawn, width=WIDTH, color_system=None).print(table)
    return drawn.getvalue().splitlines()


def _facts(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    rows, tokens = metrics["summary"], metrics["tokens"]
    states = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in metrics["states"].items())
    yield "rows", f"{rows['total_trajectories']}: {states}"
    counter = f", {metrics['tokenizer']}" if metrics["tokenizer"] else ""
    uncounted = f", {counted(tokens['rows_not_counted'], 'row')} not counted" if tokens["rows_not_counted"] else ""
    yield "tokens", f"{_change(tokens)} ({tokens['overall_compression_ratio']:.1%}){counter}{uncounted}"
    yield "turns", _change(metrics["turns"])
    if rows["trajectories_compressed"]:
        yield "ratio", _spread(metrics["compression_ratios"], "{:.3f}")
        yield "saved", f"{_spread(metrics['tokens_saved'], '{:,.0f}')} tokens a row"
    if metrics["summarization"]["requests"]:
        yield "summaries", _spent(metrics["summarization"])
    yield from (("", each) for each in unreported_facts(metrics["summarization"]["unreported"]))
    yield "time", f"{metrics['processing']['duration_seconds']:.1f} s"


def _spent(calls: Mapping[str, Any]) -> str:
    errors = f" ({counted(calls['total_errors'], 'error')})" if calls["total_errors"] else ""
    tokens = count_text(calls["usage"]["total_tokens"])
    return f"{counted(calls['requests'], 'request')}{errors}, {tokens} tokens, ${calls['cost_usd']:.4f}" + "".join(
        f", {model}" for model in calls["models"]
    )


def _change(of: Mapping[str, int]) -> str:
    return f"{of['total_before']:,} -> {of['total_after']:,}"


def _spread(of: Mapping[str, float], form: str) -> str:
    return ", ".join(f"{name} {form.format(of[name])}" for name in ("min", "median", "max"))


def _histogram(buckets: Sequence[Mapping[str, int]]) -> list[tuple[str, ...]]:
    most = max((max(each["before"], each["after"]) for each in buckets), default=1)
    return [
        (f"up to {each['up_to']:,}", *(_bar(each[side], most) for side in ("before", "after")))
        for each in buckets
        if each["before"] or each["after"]
    ]


def _bar(count: int, most: int) -> str:
    return f"{count:>7} " + "#" * -(-count * WIDEST_BAR // most)
