"""What a run shows, and that nothing but a terminal gets control characters."""

import errno
import io
import json
import os
import pty
import re
import threading
from pathlib import Path

import msgspec
import pytest

from batch.progress import (
    Pace,
    Progress,
    ProgressSnapshot,
    RunLog,
    RunReport,
    Speed,
    count_text,
    line,
    plain,
    print_summary,
)

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


class Clock:
    """Time that a test moves on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Gone(io.StringIO):
    """A stream whose reader went away."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def snapshot(ended: int = 3, **more: object) -> ProgressSnapshot:
    values: dict[str, object] = {"total": 10, "by_status": {"completed": ended}, "running": 2, **more}
    return ProgressSnapshot(**values)  # type: ignore[arg-type]


def test_the_plain_line_says_everything() -> None:
    text = line(
        ProgressSnapshot(
            total=200,
            by_status={"failed": 2, "completed": 98, "timeout": 0},
            running=16,
            limit=4,
            at_most=16,
            tool_calls=1234,
            tokens=5_600_000,
            cost_usd=0.519,
            checkpoint_age=3.2,
            cooling=11.6,
            cooling_reason="rate limit of m",
            held_to=5.2,
        ),
        Pace(3.14159, 3725.0),
        83.0,
    )
    assert text == (
        "[0:01:23] 100/200 prompts (50%), completed 98, failed 2, running 16, 4 of 16 requests at once, "
        "held to 5.2 requests/s, "
        "1.23k tool calls, 5.6M tokens, $0.52, "
        "3.1 calls/s, ETA 1:02:05, checkpoint 3 s ago, waiting 12 s (rate limit of m)"
    )


def test_a_run_without_rows_is_all_done() -> None:
    assert "0/0 prompts (100%)" in line(ProgressSnapshot(total=0), Pace(0.0, 0.0), 0.0)


def test_pace_counts_this_invocation_only() -> None:
    speed = Speed()
    assert speed.pace(0.0, snapshot(4, model_calls=1000)) == Pace(0.0, None)
    assert speed.pace(10.0, snapshot(6, model_calls=1050)) == Pace(5.0, 20.0)
    assert speed.pace(80.0, snapshot(10, model_calls=1050)).eta == 0.0


def test_calls_per_second_forget_what_is_older_than_a_minute() -> None:
    speed = Speed()
    speed.pace(0.0, snapshot(model_calls=0))
    speed.pace(50.0, snapshot(model_calls=5000))
    assert speed.pace(100.0, snapshot(model_calls=5000)).calls_per_second == 0.0


@pytest.mark.parametrize(("number", "text"), [(0, "0"), (999, "999"), (1000, "1k"), (1_234_567, "1.23M")])
def test_counts_are_short(number: int, text: str) -> None:
    assert count_text(number) == text


def test_one_plain_line_each_few_seconds_and_one_at_the_end() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream, {"TERM": "xterm"}, interval=5.0, clock=clock)
    progress.open()
    for _ in range(12):
        progress.update(snapshot())
        clock.now += 1.0
    progress.close()
    progress.close()
    lines = stream.getvalue().splitlines()
    assert [each[:9] for each in lines] == ["[0:00:00]", "[0:00:05]", "[0:00:10]", "[0:00:12]"]
    assert not CONTROL.search(stream.getvalue())


def test_notes_lose_control_characters_and_show_even_when_quiet() -> None:
    stream = io.StringIO()
    progress = Progress(stream, {}, quiet=True)
    progress.open()
    progress.update(snapshot())
    progress.note("bad \x1b[31mred\x1b[0m\r\nsecond")
    progress.close()
    assert stream.getvalue() == "bad  [31mred [0m  second\n"
    assert plain("a\tb\u2028c") == "a b c"


def test_a_stream_that_went_away_does_not_end_the_run() -> None:
    progress = Progress(Gone(), {})
    progress.update(snapshot())
    progress.note("still here")
    progress.close()


def drawn_on_a_terminal(environ: dict[str, str]) -> str:
    """What arrives at the other end of a terminal."""
    ours, theirs = pty.openpty()
    received: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(ours, 65536):
                received.append(data)
        except OSError:  # the terminal was closed
            return

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w", encoding="utf-8") as terminal:
        progress = Progress(terminal, environ)
        progress.open()
        progress.update(snapshot(5))
        progress.note("look [here]")
        progress.close()
    reader.join()
    os.close(ours)
    return b"".join(received).decode()


def test_a_terminal_gets_a_bar_over_prompts() -> None:
    text = drawn_on_a_terminal({"TERM": "xterm"})
    assert "\x1b[" in text
    assert "5/10 prompts" in text
    assert "look [here]" in text


@pytest.mark.parametrize("environ", [{"TERM": "xterm", "NO_COLOR": "1"}, {"TERM": "dumb"}, {}])
def test_a_terminal_that_wants_no_colour_gets_plain_lines(environ: dict[str, str]) -> None:
    text = drawn_on_a_terminal(environ)
    assert "5/10 prompts" in text
    assert not CONTROL.search(text.replace("\r\n", "\n"))


def report() -> RunReport:
    return RunReport(
        run_name="r",
        exit_code=3,
        stopped="budget\x1b[0m",
        statistics={
            "by_status": {"completed": 8, "failed": 1, "stopped": 0},
            "reasoning_statistics": {"total_assistant_turns": 40, "turns_with_reasoning": 30},
            "tool_statistics": {
                "patch": {"count": 2, "success": 1, "failure": 1, "success_rate": 50.0, "failure_rate": 50.0},
                "terminal": {"count": 30, "success": 30, "failure": 0, "success_rate": 100.0, "failure_rate": 0.0},
            },
        },
        metrics={
            "rows": 9,
            "success_rate": 0.75,
            "requests": 41,
            "cost_usd": 0.1234,
            "usage": {"total_tokens": 12345},
        },
        files={"trajectories": "data/r/trajectories.jsonl"},
        resume="python batch_runner.py --resume",
    )


def test_the_summary_names_sandboxes_that_are_still_there() -> None:
    stream = io.StringIO()
    print_summary(msgspec.structs.replace(report(), left=("a", "b")), stream)
    assert "left       2 sandboxes: a, b\n" in stream.getvalue()


def test_the_summary_as_text() -> None:
    stream = io.StringIO()
    print_summary(report(), stream)
    text = stream.getvalue()
    assert "prompts    9: completed 8, failed 1\n" in text
    assert "in 30 of 40 turns (75.0%)" in text
    assert text.index("terminal ") < text.index("patch ")
    assert "data/r/trajectories.jsonl" in text
    assert "41 requests, 12.3k tokens, $0.1234" in text
    assert not CONTROL.search(text)


def test_the_summary_of_a_run_without_turns_or_tools() -> None:
    empty = report()
    empty.statistics["reasoning_statistics"] = {"total_assistant_turns": 0, "turns_with_reasoning": 0}
    empty.statistics["tool_statistics"] = {}
    stream = io.StringIO()
    print_summary(empty, stream)
    assert "reasoning" not in stream.getvalue()


def test_the_summary_as_one_json_object() -> None:
    stream = io.StringIO()
    print_summary(report(), stream, json_summary=True)
    assert stream.getvalue().count("\n") == 1
    read = json.loads(stream.getvalue())
    assert (read["exit_code"], read["metrics"]["rows"]) == (3, 9)


def test_log_lines_carry_batch_and_prompt(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run.log")
    log.write("two\nlines \x1b[1m", 0, 3)
    log.write("of the run")
    log.close()
    log.close()
    log.write("too late")
    lines = (tmp_path / "run.log").read_text().splitlines()
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z "
    assert [bool(re.match(stamp, each)) for each in lines] == [True, True, True]
    assert [re.sub(stamp, "", each) for each in lines] == ["[B0:P3] two", "[B0:P3] lines  [1m", "of the run"]
