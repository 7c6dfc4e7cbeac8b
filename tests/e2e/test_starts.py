"""Sandboxes that do not start at once, and no more of them than were asked for, through the program."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.against import called, results_of
from tests.e2e.bench import Bench, prompts
from tests.e2e.program import Program, run_program, wait_until
from tests.endpoint import EndpointProcess, tool_call


@pytest.fixture(scope="module")
def endpoint() -> Iterator[EndpointProcess]:
    with EndpointProcess(calls=1) as process:
        yield process


@pytest.fixture
def bench(tmp_path: Path, endpoint: EndpointProcess) -> Bench:
    return Bench(tmp_path, endpoint, prompts(3))


def failing(bench: Bench, times: int) -> dict[str, Any]:
    """Variables with which shells of sandboxes end at once, the first so many times."""
    folder = bench.folder / "programs"
    folder.mkdir()
    program = folder / "sh"
    program.write_text(f"""#!/bin/sh
[ $# -gt 0 ] || for number in $(seq {times}); do
  mkdir {folder}/$number 2>/dev/null && exit 1
done
exec /bin/sh "$@"
""")
    program.chmod(0o755)
    return {"TMPDIR": str(bench.temp), "PATH": f"{folder}:{os.environ['PATH']}"}


def log_lines(bench: Bench) -> list[str]:
    """Those of run.log about starts."""
    text = (bench.directory / "run.log").read_text() if (bench.directory / "run.log").exists() else ""
    return [line for line in text.splitlines() if "is started again" in line]


def test_starts_that_fail_are_tried_again_and_counted(bench: Bench) -> None:
    flags = bench.flags("--keep_no_reasoning")
    code, out, err = run_program(*flags, home=bench.folder, **failing(bench, 2))
    assert code == 0, out + err
    assert {row["status"] for row in bench.journal()} == {"completed"}
    assert sum(row["environment"]["start_retries"] for row in bench.journal()) == 2
    assert bench.read("metrics.json")["start_retries"] == 2
    assert "2 starts tried again" in out
    first, second = log_lines(bench)
    assert "[B0:P" in first
    assert "ended at once" in second


def test_a_start_that_fails_three_times_fails_the_row(bench: Bench) -> None:
    flags = bench.flags("--keep_no_reasoning", "--max_samples=1")
    code, out, err = run_program(*flags, home=bench.folder, **failing(bench, 100))
    assert code == 1, out + err
    (row,) = bench.journal()
    assert (row["error_class"], row["environment"]["start_retries"], row["api_calls"]) == ("setup_failed", 2, 0)
    assert "ended at once" in row["error"]
    assert len(log_lines(bench)) == 2
    assert not bench.sandboxes()


def test_a_signal_ends_what_is_tried_again(bench: Bench) -> None:
    bench.write(prompts(50))
    flags = bench.flags("--keep_no_reasoning", "--concurrency=1")
    with Program(*flags, home=bench.folder, **failing(bench, 1000)) as program:
        wait_until(lambda: log_lines(bench), 60)
        program.interrupt()
        code, out, err = program.end()
    assert code == 130, out + err
    rows = bench.journal()
    assert len(rows) < 50
    assert {row["status"] for row in rows} <= {"stopped", "failed"}
    assert not bench.sandboxes()


# --- no more than were asked for

CHECKER = """
import os, signal

def check(task):
    if task["task_id"] == "row3":
        os.kill(os.getpid(), signal.SIGKILL)
    return True
"""


def counting(bench: Bench) -> None:
    """Every row waits until another one has come as far, and says how many sandboxes there are then."""
    seen = bench.folder / "seen"
    seen.mkdir()
    command = (
        f"mktemp -p {seen} >/dev/null; n=0;"
        f" while [ $(ls {seen} | wc -l) -lt 2 ] && [ $n -lt 300 ]; do sleep 0.1; n=$((n+1)); done;"
        f" echo $n $(ls -d {bench.temp}/batch-sandbox-* 2>/dev/null | wc -l)"
    )
    bench.endpoint.set_rules([{"turn": 1, **called(tool_call("terminal", {"command": command}))}])


@pytest.mark.parametrize("workers", [0, 3])
def test_there_are_never_more_sandboxes_than_asked_for(workers: int, bench: Bench) -> None:
    bench.write(prompts(12))
    counting(bench)
    bench.finish(
        "--max_sandboxes=2", f"--num_workers={workers}", "--concurrency=8", "--batch_size=2", "--keep_no_reasoning"
    )
    assert_two_at_once(bench, 12)


def test_nor_after_workers_were_killed(bench: Bench) -> None:
    (bench.folder / "plugin.py").write_text(CHECKER)
    bench.write(prompts(12))
    counting(bench)
    more = ("--batch_size=2", "--keep_no_reasoning", f"--success_checker={bench.folder}/plugin.py:check")
    bench.finish("--max_sandboxes=2", "--num_workers=2", *more, code=1)
    rows = bench.last_tries()
    assert rows.pop("row3")["error_class"] == "worker_died"
    assert_two_at_once(bench, 11)


def assert_two_at_once(bench: Bench, rows: int) -> None:
    results = [results_of(row)[0]["output"].split() for row in bench.journal() if row["status"] == "completed"]
    assert len(results) == rows
    assert max(int(sandboxes) for _, sandboxes in results) == 2
    assert max(int(waited) for waited, _ in results) < 300
