"""Ctrl-C and SIGTERM: bounded, nothing left behind, and the printed command goes on with the run."""

import json
import shlex
import signal
import subprocess
import time
import zlib
from pathlib import Path
from typing import Any

import psutil
import pytest

from batch.exits import STOP_GRACE
from tests.e2e.bench import STEP, Bench, ids
from tests.e2e.program import ROOT, Program, environment, merged, started_with, wait_until
from tests.endpoint import tool_call


def seconds(bench: Bench) -> str:
    """No other process sleeps so long."""
    return f"300.{zlib.crc32(str(bench.folder).encode())}"


def waiting(bench: Bench, prompt: str) -> dict[str, Any]:
    """A rule: these prompts run a command that does not end by itself."""
    call = tool_call("terminal", {"command": f"echo begun; sleep {seconds(bench)} & sleep {seconds(bench)}"})
    return {"prompt": prompt, "turn": 1, "message": {"reasoning_content": "So.", "tool_calls": [call]}}


def sleepers(bench: Bench) -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", seconds(bench)]]


def assert_nothing_is_left(bench: Bench, program: Program) -> None:
    assert not sleepers(bench)
    assert not list(bench.temp.iterdir())
    wait_until(lambda: not program.tree())  # the fork server hears of its parent's end by a pipe


def command_after_interrupt(out: str) -> list[str]:
    """The last line printed, as a shell would read it."""
    words = shlex.split(out.splitlines()[-1])
    assert words[-1] == "--resume", out
    return words


def resume(bench: Bench, out: str) -> None:
    subprocess.run(
        command_after_interrupt(out),
        cwd=bench.folder if Path(command_after_interrupt(out)[1]).is_absolute() else ROOT,
        env=environment(bench.folder, TMPDIR=str(bench.temp)),
        check=True,
        capture_output=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("number", "whom", "workers"),
    [
        (signal.SIGINT, "group", 2),
        (signal.SIGTERM, "parent", 2),
        (signal.SIGINT, "group", 0),
    ],
)
def test_one_signal_saves_running_rows_when_their_call_returns(
    number: int, whom: str, workers: int, bench: Bench
) -> None:
    bench.settings |= {"num_workers": str(workers), "batch_size": "1", "concurrency": "2"}
    bench.endpoint.set_rules([{"hold": True, "turn": 2}])
    with bench.start() as program:
        wait_until(lambda: bench.asked().total() == 4)  # two rows, each in its second call
        (program.interrupt if whom == "group" else program.process.send_signal)(number)
        program.hear("interrupted: ")
        bench.endpoint.set_rules([])
        found, out, err = program.end()
        assert found == 128 + number, out + err
        assert_nothing_is_left(bench, program)
    rows = bench.journal()
    # their call returned after the signal and was their last one
    assert [row["status"] for row in rows] == ["completed"] * 2, rows
    checkpoint = bench.read("checkpoint.json")
    assert (checkpoint["completed_tasks"], checkpoint["pending_tasks"], checkpoint["total_tasks"]) == (2, 2, 4)
    assert len(merged(bench.directory)) == 2
    assert bench.read("run.json")["invocations"][-1]["end"] == "interrupt"
    resume(bench, out)
    assert ids(merged(bench.directory)) == [f"row{row}" for row in range(4)]
    assert set(bench.asked().values()) == {2}


def test_stopped_rows_are_saved_and_are_no_attempt(bench: Bench) -> None:
    bench.settings |= {"max_attempts": "1"}
    bench.endpoint.set_rules([{"hold": True, "turn": 1, "message": STEP}])
    with bench.start() as program:
        wait_until(lambda: bench.asked().total() == 4)
        program.interrupt()
        program.hear("interrupted: ")
        bench.endpoint.set_rules([])
        found, out, err = program.end()
        assert found == 130, out + err
        assert_nothing_is_left(bench, program)
    rows = bench.journal()
    assert {(row["status"], row["reason"], row["attempt"]) for row in rows} == {("stopped", "interrupt", 1)}
    assert all(row["conversations"][-1]["from"] == "tool" for row in rows)  # what had happened is kept
    assert all(row["usage"]["total_tokens"] == 110 for row in rows)
    assert not merged(bench.directory)
    assert bench.read("checkpoint.json")["pending_tasks"] == 4
    resume(bench, out)
    assert sorted(row["attempt"] for row in bench.journal()) == [1] * 8
    assert ids(merged(bench.directory)) == [f"row{row}" for row in range(4)]
    assert bench.read("metrics.json")["usage"]["total_tokens"] == 4 * 330


@pytest.mark.parametrize(("number", "backend"), [(signal.SIGINT, "local"), (signal.SIGTERM, "bubblewrap")])
def test_two_signals_cut_off_what_runs_at_once(number: int, backend: str, bench: Bench) -> None:
    bench.settings["container_backend"] = backend
    bench.endpoint.set_rules([waiting(bench, "row [23]")])
    with bench.start() as program:
        wait_until(lambda: len(bench.ended()) == 2 and len(sleepers(bench)) == 4)
        program.interrupt(number)
        program.hear("interrupted: ")
        time.sleep(0.3)
        assert sleepers(bench)  # one signal lets a command go on
        began = time.monotonic()
        program.interrupt(number)
        found, out, err = program.end()
        assert time.monotonic() - began < 25  # else it waits for 30 s
        assert found == 128 + number, out + err
        assert_nothing_is_left(bench, program)
    ends = {row["task_id"]: row["status"] for row in bench.journal()}
    assert ends == {"row0": "completed", "row1": "completed", "row2": "stopped", "row3": "stopped"}
    bench.endpoint.set_rules([])
    resume(bench, out)
    assert len(merged(bench.directory)) == 4


def test_one_signal_waits_no_longer_than_its_grace(bench: Bench) -> None:
    """Half a minute, here made shorter."""
    assert STOP_GRACE == 30
    bench.endpoint.set_rules([waiting(bench, "row 3"), {"prompt": "row 2", "stall": True}])
    shorter = started_with(bench.folder, "import batch.exits\nbatch.exits.STOP_GRACE = 4.0\n")
    with Program(*bench.flags(), home=bench.folder, TMPDIR=str(bench.temp), PYTHONPATH=shorter) as program:
        wait_until(lambda: len(bench.ended()) == 2 and len(sleepers(bench)) == 2)
        began = time.monotonic()
        program.interrupt()
        found, _, err = program.end()
        assert 3.9 < time.monotonic() - began < 30
        assert found == 130, err
        assert_nothing_is_left(bench, program)
    assert {row["status"] for row in bench.journal() if row["task_id"] in ("row2", "row3")} == {"stopped"}


def test_a_hook_that_hangs_is_cut_off_by_a_second_signal(bench: Bench) -> None:
    hook = bench.folder / "hook.py"
    hook.write_text("import pathlib, time\ndef told(task): pathlib.Path('told').touch(); time.sleep(600)\n")
    with bench.start(f"--on_task_done={hook}:told") as program:
        wait_until(lambda: len(bench.ended()) == 4 and (bench.folder / "told").exists())
        program.interrupt()
        with pytest.raises(subprocess.TimeoutExpired):  # one signal leaves the hook its time
            program.process.wait(1)
        began = time.monotonic()
        program.interrupt()
        found, out, err = program.end()
        assert time.monotonic() - began < 25  # else it waits for 30 s
        assert found == 130, out + err
        assert "left behind" in err
        assert_nothing_is_left(bench, program)
    assert len(merged(bench.directory)) == 4


@pytest.mark.parametrize(
    ("moment", "number"), [(0.0, signal.SIGINT), (0.0, signal.SIGTERM), (0.2, signal.SIGINT), (0.5, signal.SIGTERM)]
)
def test_a_signal_while_the_run_starts_ends_it_without_a_traceback(moment: float, number: int, bench: Bench) -> None:
    with bench.start() as program:
        wait_until(bench.directory.exists)
        time.sleep(moment)
        program.interrupt(number)
        found, out, err = program.end()
        assert found in (128 + number, 0), out + err
        assert "Traceback" not in err, err
        assert_nothing_is_left(bench, program)
    bench.finish("--resume")
    assert len(merged(bench.directory)) == 4


def test_a_command_in_a_sandbox_can_be_interrupted(bench: Bench) -> None:
    command = "python3 -c 'import os, signal; os.kill(os.getpid(), signal.SIGINT)' 2>&1 | grep -c KeyboardInterrupt"
    call = tool_call("terminal", {"command": command})
    bench.endpoint.set_rules([{"turn": 1, "message": {"reasoning_content": "So.", "tool_calls": [call]}}])
    bench.finish("--max_samples=1")
    (row,) = bench.journal()
    assert '"output":"1' in row["conversations"][3]["value"].replace(" ", "")


def test_json_summary_keeps_the_command_off_stdout(bench: Bench) -> None:
    bench.endpoint.set_rules([{"hold": True}])
    with bench.start("--json_summary") as program:
        wait_until(bench.asked)
        program.interrupt()
        program.hear("interrupted: ")
        bench.endpoint.set_rules([])
        _, out, err = program.end()
    assert json.loads(out)["exit_code"] == 130
    assert err.splitlines()[-1].endswith(" --resume")
