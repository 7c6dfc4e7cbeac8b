"""What users and their plug-ins do to a run while nobody looks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.inputs import small_run
from tests.e2e.program import ROOT, Program, journal, merged, run_program, wait_until

FORKS = """
import os, time
def check(task):
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    return True, ""
"""


@pytest.mark.parametrize("kill", [False, True])
def test_a_child_that_a_checker_forked_holds_nothing(kill: bool, tmp_path: Path) -> None:
    checker = tmp_path / "forks.py"
    checker.write_text(FORKS, encoding="utf-8")
    flags = [*small_run(tmp_path), f"--success_checker={checker}:check", "--num_workers=1"]
    with Program(*flags, home=tmp_path) as program:
        if kill:
            wait_until(lambda: program.process.poll() is not None or journal(tmp_path / "data" / "r"))
            program.process.kill()
        code = program.process.wait(40)  # the children keep its stderr open
        assert code == (-9 if kill else 0)
        assert any(process.pid != program.process.pid for process in program.tree())  # the children live
        with Program(*flags, "--resume", home=tmp_path) as again:
            assert again.process.wait(60) == 0
    assert len(merged(tmp_path / "data" / "r")) == 2


def test_a_dataset_that_is_edited_under_the_run_loses_nothing_that_was_paid_for(tmp_path: Path) -> None:
    rows = [{"id": f"r{number}", "prompt": f"prompt {number} " + "x" * 40_000} for number in range(40)]
    rules = [{"prompt": ".", "turns": [{"reasoning": "So.", "content": "done", "delay": 0.4}]}]
    flags = [*small_run(tmp_path, rows, rules), "--concurrency=2", "--num_workers=1", "--batch_size=2"]
    with Program(*flags, home=tmp_path) as program:
        wait_until(lambda: journal(tmp_path / "data" / "r"))
        dataset = tmp_path / "prompts.jsonl"
        changed = dataset.read_bytes().replace(b'"prompt": "p', b'"prompt": "P')
        with dataset.open("r+b") as file:
            file.write(changed)
        code, out, err = program.end()
    directory = tmp_path / "data" / "r"
    assert code == 3, err
    assert "was changed while the run read it" in out + err
    assert out.strip().splitlines()[-1].endswith("--resume")
    assert 0 < len(merged(directory)) < 40
    assert json.loads((directory / "run.json").read_bytes())["invocations"][-1]["end"] == "usage"


@pytest.mark.parametrize("output", ["prompts.jsonl", "folder.jsonl"])
def test_an_output_that_must_not_be_written_is_refused_before_anything_runs(output: str, tmp_path: Path) -> None:
    flags = [flag for flag in small_run(tmp_path) if not flag.startswith("--run_name")]
    (tmp_path / "folder.jsonl").mkdir()
    before = (tmp_path / "prompts.jsonl").read_bytes()
    code, out, err = run_program(*flags, f"--output={output}", "--output_format=jsonl", home=tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert (tmp_path / "prompts.jsonl").read_bytes() == before
    assert not os.path.lexists(tmp_path / output.removesuffix(".jsonl"))


def answers_signals(program: Program) -> bool:
    status = Path(f"/proc/{program.process.pid}/status").read_text(encoding="utf-8")
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("after", [0.0, 0.1, 0.2])
def test_an_interrupt_while_it_imports_is_an_exit_code(after: float, tmp_path: Path) -> None:
    with Program(*small_run(tmp_path), home=tmp_path) as program:
        wait_until(lambda: answers_signals(program))
        time.sleep(after)
        program.interrupt()
        code, _, err = program.end()
    assert code == 130
    assert "Traceback" not in err


@pytest.mark.parametrize("what", ["directory", "batch file"])
def test_rows_that_somebody_took_away_are_missed(what: str, tmp_path: Path) -> None:
    rows = [{"id": f"r{number}", "prompt": "wait" if number == 7 else "go"} for number in range(8)]
    rules = [{"prompt": "wait", "turns": [{"reasoning": "So.", "content": "done", "delay": 2}]}]
    directory = tmp_path / "data" / "r"
    with Program(*small_run(tmp_path, rows, rules), "--batch_size=2", "--num_workers=1", home=tmp_path) as program:
        wait_until(lambda: len(journal(directory)) == 7)
        if what == "directory":
            directory.rename(tmp_path / "elsewhere")
        else:
            (directory / "batch_0.jsonl").unlink()
        code, out, err = program.end()
    assert code == 3, err
    assert "changed from outside" in out
    assert out.strip().splitlines()[-1].endswith("--resume")


def test_odd_files_among_the_batches_are_passed_over_or_named(tmp_path: Path) -> None:
    flags = small_run(tmp_path)
    assert run_program(*flags, "--max_samples=1", home=tmp_path)[0] == 0
    directory = tmp_path / "data" / "r"
    (directory / "batch_99999999999999999999.jsonl").touch()
    (directory / "batch_007.jsonl").touch()
    assert run_program(*flags, "--resume", home=tmp_path)[0] == 0
    assert len(merged(directory)) == 2
    os.mkfifo(directory / "batch_20.jsonl")
    code, _, err = run_program(*flags, "--resume", home=tmp_path)
    assert (code, "batch_20.jsonl is no file" in err) == (2, True)


def test_a_row_places_no_file_outside_its_own_folder_where_nothing_is_kept_apart(tmp_path: Path) -> None:
    rows = [{"prompt": "go", "files": {"../../../outside.txt": "x"}}]
    code, _, err = run_program(*small_run(tmp_path, rows), home=tmp_path)
    (row,) = journal(tmp_path / "data" / "r")
    assert (code, row["error_class"]) == (1, "setup_failed"), err
    assert "outside the row's own folder" in row["error"]


def test_a_checker_may_name_its_environment(tmp_path: Path) -> None:
    checker = tmp_path / "named.py"
    checker.write_text("async def check(task, *, environment):\n    return (await environment.list('.')) == [], 'x'\n")
    assert run_program(*small_run(tmp_path), f"--success_checker={checker}:check", home=tmp_path)[0] == 0
    assert all(row["success"] for row in journal(tmp_path / "data" / "r"))


def test_a_directory_that_is_gone_is_said(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    flags = " ".join(small_run(tmp_path))
    command = f"cd {gone}; rmdir {gone}; exec {sys.executable} {ROOT}/batch_runner.py {flags}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
