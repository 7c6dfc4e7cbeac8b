"""What a run shows. Progress goes to stderr, the summary to stdout, log lines to run.log.

A terminal gets a live display; anything else (also NO_COLOR, TERM=dumb) one plain line every few seconds, without a
control character. Only the parent process draws, and a stream that has gone away never ends a run.
"""

import io
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TextIO, cast

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

INTERVAL = 5.0  # seconds between plain lines
WINDOW = 60.0  # seconds that calls per second are taken over


class Pace(Struct, frozen=True):
    """How fast it goes. `eta` is in seconds, None while it cannot be told."""

    calls_per_second: float
    eta: float | None


class Snapshot(Protocol):
    """Where a run of any kind stands: `ended` of `total` things called `noun`."""

    @property
    def noun(self) -> str:
        """Plural."""

    @property
    def total(self) -> int:
        """All of them."""

    @property
    def ended(self) -> int:
        """Those that are over."""

    @property
    def model_calls(self) -> int:
        """So far."""

    def facts(self, pace: Pace) -> list[str]:
        """What stands beside the bar, in order."""


class ProgressSnapshot(Struct, frozen=True, kw_only=True):
    """Where a run stands. Counts are of the whole run, over all its invocations."""

    noun: ClassVar[str] = "prompts"
    total: int  # prompts times samples
    by_status: Mapping[str, int] = {}  # of each prompt's last try
    running: int = 0
    limit: int = 0  # requests that may be under way at once, as things stand
    at_most: int = 0  # and as was asked for
    tool_calls: int = 0
    model_calls: int = 0
    tokens: int = 0
    cost_usd: float = 0.0
    checkpoint_age: float | None = None  # seconds; None: not written yet
    cooling: float = 0.0  # seconds until requests may go on
    cooling_reason: str = "rate limit"  # what they wait for
    held_to: float = 0.0  # requests a second, learned from 429s; 0: as many as like

    @property
    def ended(self) -> int:
        """Prompts that are over; stopped ones are still to be run."""
        return sum(count for status, count in self.by_status.items() if status != "stopped")

    def facts(self, pace: Pace) -> list[str]:
        """See Snapshot."""
        statuses = [f"{name} {count}" for name, count in sorted(self.by_status.items()) if count]
        found = [
            *statuses,
            f"running {self.running}",
            *([f"{self.limit} of {self.at_most} requests at once"] if self.limit < self.at_most else []),
            *([f"held to {self.held_to:.1f} requests/s"] if self.held_to else []),
            f"{count_text(self.tool_calls)} tool calls",
            f"{count_text(self.tokens)} tokens",
            f"${self.cost_usd:.2f}",
            *pace_facts(pace),
            f"checkpoint {'-' if self.checkpoint_age is None else f'{self.checkpoint_age:.0f} s ago'}",
        ]
        return found + waiting_facts(self.cooling, self.cooling_reason)


def plain(text: str) -> str:
    """Without control characters, on one line."""
    return "".join(each if each.isprintable() else " " for each in text)


def clock_text(seconds: float) -> str:
    """H:MM:SS."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def count_text(number: int) -> str:
    """1234567 -> 1.23M."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def counted(number: int, one: str, more: str = "") -> str:
    """1, call -> 1 call; 2, call -> 2 calls. `more` is a plural that is not made with an s alone."""
    return f"{number} {one if number == 1 else more or one + 's'}"


def pace_facts(pace: Pace) -> list[str]:
    """How fast it goes, in words."""
    return [
        f"{pace.calls_per_second:.1f} calls/s",
        f"ETA {'-' if pace.eta is None else clock_text(pace.eta)}",
    ]


def waiting_facts(seconds: float, reason: str) -> list[str]:
    """What requests wait for, in words; nothing if they do not."""
    return [f"waiting {seconds:.0f} s ({reason})"] if seconds > 0 else []


def _facts_text(snapshot: Snapshot, pace: Pace) -> str:
    return ", ".join(plain(each) for each in snapshot.facts(pace))


def line(snapshot: Snapshot, pace: Pace, elapsed: float) -> str:
    """The plain line."""
    share = 100 * snapshot.ended / snapshot.total if snapshot.total else 100.0
    head = f"[{clock_text(elapsed)}] {snapshot.ended}/{snapshot.total} {snapshot.noun} ({share:.0f}%)"
    return f"{head}, {_facts_text(snapshot, pace)}"


class Speed:
    """The pace of this invocation, from the snapshots so far."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._calls: deque[tuple[float, int]] = deque()

    def pace(self, now: float, snapshot: Snapshot) -> Pace:
        """Calls per second over the last minute; the rest at the mean speed since the first snapshot."""
        if self._first is None:
            self._first = (now, snapshot.ended)
        self._calls.append((now, snapshot.model_calls))
        while self._calls[0][0] < now - WINDOW:
            self._calls.popleft()
        since, calls = self._calls[0]
        rate = (snapshot.model_calls - calls) / (now - since) if now > since else 0.0
        return Pace(rate, self._eta(now, snapshot))

    def _eta(self, now: float, snapshot: Snapshot) -> float | None:
        assert self._first is not None
        began, ended_before = self._first
        done = snapshot.ended - ended_before
        left = snapshot.total - snapshot.ended
        if left <= 0:
            return 0.0
        return (now - began) / done * left if done > 0 and now > began else None


class _Lasting(io.TextIOBase):
    """A stream that swallows text once its reader is gone: nobody looks, the run goes on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]  # an attribute in the stub
        """As the stream's."""
        return self._stream.encoding

    def isatty(self) -> bool:
        """As the stream's."""
        return self._stream.isatty()

    def write(self, text: str) -> int:
        """All of it, or nothing if the stream is gone."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()
        except (OSError, ValueError):
            silence(self._stream)
            self._stream = io.StringIO()
        return len(text)


def silence(stream: TextIO) -> None:
    """What a broken stream still holds goes nowhere: the interpreter's last flush of it would change the exit code."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def takes_control_characters(environ: Mapping[str, str]) -> bool:
    """Whether the user's terminal may be drawn on."""
    return not environ.get("NO_COLOR") and environ.get("TERM", "dumb") not in {"dumb", "unknown"}


class Progress:
    """`open` starts a thread where the display is live: call it once the workers are started. `update` is to be called
    about once a second."""

    def __init__(
        self,
        stream: TextIO,
        environ: Mapping[str, str],
        *,
        quiet: bool = False,
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = cast("TextIO", _Lasting(stream))
        self._quiet = quiet
        self._interval = interval
        self._clock = clock
        self._began = clock()
        self._printed = float("-inf")
        self._last: tuple[Snapshot, Pace] | None = None
        self._speed = Speed()
        self._live: Live | None = None
        self.is_live = not quiet and stream.isatty() and takes_control_characters(environ)

    def open(self) -> None:
        """The live display, if there is one, appears."""
        if not self.is_live:
            return
        from rich.console import Console  # noqa: PLC0415 - 0.1 s that a run without a terminal need not pay
        from rich.live import Live  # noqa: PLC0415 - as above

        console = Console(file=self._stream)
        self._live = Live(console=console, redirect_stdout=False, redirect_stderr=False, get_renderable=self._drawn)
        self._live.start()

    def update(self, snapshot: Snapshot) -> None:
        """Shows where the run stands; as a plain line only if the last one is old enough."""
        now = self._clock()
        self._last = (snapshot, self._speed.pace(now, snapshot))
        if not self.is_live and now - self._printed >= self._interval:
            self._print_line(now)

    def note(self, text: str) -> None:
        """One line of text, above the display. Shown also when quiet: it is a warning."""
        if self._live is None:
            self._stream.write(plain(text) + "\n")
        else:
            self._live.console.print(plain(text), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """The last state stays on the screen. May be called twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._last is not None and not self.is_live:
            self._print_line(self._clock())
        self._last = None

    def _print_line(self, now: float) -> None:
        if self._last is not None and not self._quiet:
            self._stream.write(line(*self._last, now - self._began) + "\n")
            self._printed = now

    def _drawn(self) -> "RenderableType":
        from rich.console import Group  # noqa: PLC0415 - as in open
        from rich.progress_bar import ProgressBar  # noqa: PLC0415 - as in open
        from rich.table import Table  # noqa: PLC0415 - as in open
        from rich.text import Text  # noqa: PLC0415 - as in open

        if self._last is None:
            return Text("starting")
        snapshot, pace = self._last
        row = Table.grid(padding=(0, 1))
        row.add_row(
            ProgressBar(total=max(1, snapshot.total), completed=snapshot.ended, width=40),
            Text(f"{snapshot.ended}/{snapshot.total} {snapshot.noun}"),
            Text(clock_text(self._clock() - self._began)),
        )
        return Group(row, Text(_facts_text(snapshot, pace)))


class RunReport(Struct, frozen=True, kw_only=True):
    """What a run ended with: the content of statistics.json and metrics.json, and where the files are."""

    run_name: str
    exit_code: int
    stopped: str = ""  # why it ended early
    statistics: dict[str, Any]
    metrics: dict[str, Any]
    files: dict[str, str]  # what -> path
    answers: tuple[str, ...] = ()  # of the one prompt on the command line, a text per sample
    resume: str = ""  # the command that goes on
    left: tuple[str, ...] = ()  # sandboxes that could not be removed


def print_summary(report: RunReport, stream: TextIO, *, json_summary: bool = False) -> None:
    """Counts, the tools sorted by count, reasoning coverage, files; or the report as one line of JSON. The command that
    resumes is not part of the text: it is the caller's last line."""
    print_lines([msgspec.json.encode(report).decode()] if json_summary else summary_lines(report), stream)


def print_lines(lines: Iterable[str], stream: TextIO) -> None:
    """To a stream whose reader may be gone by now, or that cannot show every character."""
    lasting = _Lasting(stream)
    lasting.write("".join(f"{each}\n" for each in lines))


def summary_lines(report: RunReport) -> list[str]:
    """The summary as text."""
    statistics, metrics = report.statistics, report.metrics
    statuses = ", ".join(f"{name} {count}" for name, count in sorted(statistics["by_status"].items()) if count)
    requests, tokens = counted(metrics["requests"], "request"), count_text(metrics["usage"]["total_tokens"])
    return [
        f"Run {report.run_name}" + (f" stopped early: {plain(report.stopped)}" if report.stopped else " finished"),
        f"  prompts    {sum(statistics['by_status'].values())}: {statuses or 'none'}",
        f"  success    {100 * metrics['success_rate']:.1f}%",
        f"  spent      {requests}, {tokens} tokens, ${metrics['cost_usd']:.4f}",
        *(f"  unreported {each}" for each in unreported_facts(metrics.get("unreported", {}))),
        *_retries_line(metrics.get("start_retries", 0)),
        *_left_line(report.left),
        *_reasoning_line(statistics["reasoning_statistics"]),
        *_tool_lines(statistics["tool_statistics"]),
        *_evaluation_line(metrics.get("evaluation", {})),
        *(f"  {what:<10} {path}" for what, path in report.files.items()),
    ]


def unreported_facts(of: Mapping[str, Any]) -> list[str]:
    """What replies without usage are taken to have cost (`Unreported` as an object); nothing if there are none."""
    if not of.get("replies"):
        return []
    tokens = count_text(of["input_tokens"] + of["output_tokens"])
    return [f"{of['replies']} replies without usage, by estimate {tokens} tokens, ${of['cost_usd']:.4f}"]


def _retries_line(retries: int) -> list[str]:
    return [f"  sandboxes  {counted(retries, 'start')} tried again"] if retries else []


def _left_line(names: Collection[str]) -> list[str]:
    return [f"  left       {counted(len(names), 'sandbox', 'sandboxes')}: {', '.join(names)}"] if names else []


def _reasoning_line(counts: Mapping[str, int]) -> list[str]:
    turns, reasoned = counts["total_assistant_turns"], counts["turns_with_reasoning"]
    return [f"  reasoning  in {reasoned} of {turns} turns ({100 * reasoned / turns:.1f}%)"] if turns else []


def _evaluation_line(counts: Mapping[str, float]) -> list[str]:
    numbers = ", ".join(f"{name} {count}" for name, count in counts.items() if name != "resolved_rate")
    return [f"  evaluated  {numbers} ({100 * counts['resolved_rate']:.1f}% resolved)"] if counts else []


def _tool_lines(tools: Mapping[str, Mapping[str, float]]) -> list[str]:
    if not tools:
        return []
    ordered = sorted(tools.items(), key=lambda item: (-item[1]["count"], item[0]))
    head = f"  {'tool':<20} {'count':>8} {'success':>8} {'failure':>8} {'rate':>7}"
    rows = [
        f"  {name:<20} {each['count']:>8} {each['success']:>8} {each['failure']:>8} {each['success_rate']:>6.1f}%"
        for name, each in ordered
    ]
    return [head, *rows]


class RunLog:
    """run.log: one line per event, appended, `TIME [B0:P3] text`. What cannot be written is dropped: the journal tells
    that a disk is full."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", errors="replace", buffering=1)

    def write(self, text: str, batch_num: int = -1, prompt_index: int = -1) -> None:
        """`text` is clean and redacted already; -1: the line is about no row."""
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        prefix = f"{stamp} [B{batch_num}:P{prompt_index}] " if batch_num >= 0 else f"{stamp} "
        try:
            self._file.writelines(f"{prefix}{plain(each)}\n" for each in text.splitlines())
        except (OSError, ValueError):
            return

    def close(self) -> None:
        """May be called twice."""
        try:
            self._file.close()
        except OSError:
            return
