"""SIGKILL at any moment, damage to files, resume: every row ends once, nothing is paid for twice."""

import json
import random
import socket
import subprocess
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.bench import STEP, Bench, ids, pause, prompts, whole_lines
from tests.e2e.program import Program, merged, run_program, started_with, wait_until
from tests.endpoint import EndpointProcess, tool_call

# --- kills at random moments


def kill_parent(program: Program) -> None:
    program.process.kill()
    wait_until(lambda: not program.tree())  # orphans end by themselves


def kill_everything(program: Program) -> None:
    program.kill_all()


ROWS = 24
MANY = {"num_workers": "2", "concurrency": "2", "batch_size": "2", "max_attempts": "20"}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, endpoint: EndpointProcess) -> dict[str, Any]:
    bench = Bench(tmp_path_factory.mktemp("uninterrupted"), endpoint, prompts(ROWS))
    bench.finish("--batch_size=2")
    return bench.outcome()


@pytest.mark.parametrize("kill", [kill_parent, kill_everything])
def test_a_run_killed_again_and_again_ends_as_one_that_was_not(
    kill: Callable[[Program], None], uninterrupted: dict[str, Any], bench: Bench
) -> None:
    dice = random.Random(kill.__name__)
    bench.write(prompts(ROWS))
    bench.settings |= MANY
    settled: Counter[str] = Counter()  # requests for rows that had ended, when they had
    for _ in range(5):
        before, left = bench.asked(), ROWS - len(settled)
        with bench.start("--resume") as program:
            wait_until(lambda: bench.asked() != before or program.process.poll() is not None)  # noqa: B023 - at once
            pause(dice, 0.02 * left)
            kill(program)
        asked, ended = bench.asked(), [row for row in bench.ended() if row["status"] == "completed"]
        assert len(ended) == len(set(ids(ended)))
        assert all(asked[prompt] == requests for prompt, requests in settled.items())
        settled = Counter({row["prompt"]: asked[row["prompt"]] for row in prompts(ROWS) if row["id"] in ids(ended)})
    last = bench.asked_by("--resume")
    assert not [prompt for prompt in settled if last[prompt]]
    assert_as(uninterrupted, bench)


def fork_server_folders(temp: Path, pid: int) -> Iterator[Path]:
    for place in (temp, Path("/tmp")):  # the latter where the former's path is too long for a socket
        for record in place.glob("pymp-*/owner.json"):
            with suppress(FileNotFoundError):  # another test's
                if json.loads(record.read_bytes())["pid"] == pid:
                    yield record.parent


def test_a_killed_run_is_counted_and_its_folder_removed_by_the_next(bench: Bench) -> None:
    bench.endpoint.set_rules([{"prompt": "row 3", "stall": True, "times": 1}])
    with bench.start("--checkpoint_interval=1", "--concurrency=4") as program:
        wait_until(lambda: bench.ended() and (bench.directory / "checkpoint.json").exists())
        program.kill_all()
    (folder,) = fork_server_folders(bench.temp, program.process.pid)
    bench.finish("--resume")
    assert not folder.exists()
    first, second = bench.read("run.json")["invocations"]
    assert (first["end"], second["end"]) == ("cut off", "finished")
    assert first["seconds"] > 0
    total = bench.read("statistics.json")["duration_seconds"]
    assert total == pytest.approx(first["seconds"] + second["seconds"], abs=0.01)


def test_a_run_whose_workers_are_killed_again_and_again_ends_as_one_that_was_not(
    uninterrupted: dict[str, Any], bench: Bench
) -> None:
    dice = random.Random(3)
    bench.write(prompts(ROWS))
    bench.settings |= MANY
    bench.endpoint.set_rules([{"delay": 0.1, "turn": 1, "message": STEP}])
    kills = 0
    while kills < 5:
        with bench.start("--resume") as program:
            while program.process.poll() is None and kills < 5:
                pause(dice, 0.4)
                kills += kill_a_worker(program, dice)
            code, out, err = program.end()
            assert code in (0, 1), out + err
    bench.finish("--resume")
    assert_as(uninterrupted, bench)


def kill_a_worker(program: Program, dice: random.Random) -> int:
    """How many were."""
    workers = program.workers()
    if not workers:
        return 0
    with suppress(psutil.NoSuchProcess):
        dice.choice(workers).kill()
    return 1


def assert_as(uninterrupted: dict[str, Any], bench: Bench) -> None:
    assert ids(merged(bench.directory)) == [f"row{number}" for number in range(ROWS)]
    assert max(Counter(ids([row for row in bench.journal() if row["status"] == "completed"])).values()) == 1
    errors = [(row["task_id"], row["status"], row["error"]) for row in bench.journal() if row["error"]]
    assert bench.outcome() == uninterrupted, errors
    assert not bench.sandboxes()


# --- rows that take their worker with them

CHECKER = """
import os, signal, time

async def check(task):
    name = task["task_id"]
    if name == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "crash":
        os.kill(os.getpid(), signal.SIGABRT)
    if name == "block":
        open("blocked", "w").close()
        time.sleep(1000)
    return True, "fine"

def hang(task):
    if task["task_id"] == "hang":
        time.sleep(1000)
    return True, "fine"
"""


@pytest.fixture
def plugin(bench: Bench) -> Path:
    path = bench.folder / "plugin.py"
    path.write_text(CHECKER)
    return path


def test_a_row_that_kills_its_worker_is_charged_and_no_other_row(plugin: Path, bench: Bench) -> None:
    bench.write([*prompts(6), *({"id": name, "prompt": name} for name in ("kill", "crash"))])
    bench.settings |= {"success_checker": f"{plugin}:check", "max_attempts": "2"}
    bench.finish(code=1)
    rows = bench.last_tries()
    assert len(bench.journal()) == 8
    assert {name: rows[name]["error_class"] for name in rows} == {
        **{f"row{number}": "" for number in range(6)},
        "kill": "worker_died",
        "crash": "worker_died",
    }
    assert "SIGKILL" in rows["kill"]["error"]
    assert "SIGABRT" in rows["crash"]["error"]
    assert all(rows[name]["attempt"] == 1 for name in rows)
    assert bench.read("checkpoint.json")["failed_tasks"] == 2
    assert rows["kill"]["retryable"]
    asked = bench.asked_by("--resume", code=1)
    assert set(asked) == {"kill", "crash"}
    assert sorted(row["attempt"] for row in bench.journal() if row["task_id"] == "kill") == [1, 2]
    assert not bench.last_tries()["kill"]["retryable"]
    assert not bench.asked_by("--resume", code=1)


def test_a_blocked_worker_is_killed_from_outside(plugin: Path, bench: Bench) -> None:
    bench.write([*prompts(2), {"id": "block", "prompt": "block", "timeout_seconds": 1}])
    sooner = started_with(bench.folder, "import batch.pool\nbatch.pool.SILENCE = 3.0\n")
    flags = bench.flags(f"--success_checker={plugin}:check")
    code, out, err = run_program(*flags, home=bench.folder, TMPDIR=str(bench.temp), PYTHONPATH=sooner)
    assert code == 1, out + err
    rows = bench.last_tries()
    assert {name: rows[name]["status"] for name in rows} == {
        "row0": "completed",
        "row1": "completed",
        "block": "failed",
    }
    assert rows["block"]["error_class"] == "worker_died"
    assert len(bench.journal()) == 3


def test_a_checker_that_hangs_in_its_thread_ends_with_its_rows_time(plugin: Path, bench: Bench) -> None:
    bench.write([*prompts(2), {"id": "hang", "prompt": "hang", "timeout_seconds": 3}])
    bench.settings["success_checker"] = f"{plugin}:hang"
    bench.finish()
    row = bench.last_tries()["hang"]
    assert (row["status"], row["success"]) == ("completed", False)
    assert "time" in row["success_reason"]
    assert all(row["success"] for name, row in bench.last_tries().items() if name != "hang")


def test_a_command_that_hangs_ends_with_its_rows_time(bench: Bench) -> None:
    bench.write([*prompts(1), {"id": "slow", "prompt": "slow", "timeout_seconds": 3}])
    seconds = f"777.{zlib.crc32(str(bench.folder).encode())}"
    call = tool_call("terminal", {"command": f"echo begun; trap '' TERM; sleep {seconds}"})
    bench.endpoint.set_rules([{"prompt": "slow", "message": {"reasoning_content": "So.", "tool_calls": [call]}}])
    bench.finish()
    row = bench.last_tries()["slow"]
    assert row["status"] == "timeout"
    assert row["duration_seconds"] < 60
    assert row["conversations"][-1]["from"] == "tool"
    assert not [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", seconds]]


# --- who owns a run


def test_a_second_invocation_is_refused_by_name(bench: Bench) -> None:
    bench.endpoint.set_rules([{"stall": True}])
    with bench.start() as program:
        wait_until(bench.asked)
        for more in ((), ("--resume",), ("--finalize",)):
            message = bench.finish(*more, code=2)
            assert f"process {program.process.pid} on {socket.gethostname()}" in message
        program.kill_all()
    bench.endpoint.set_rules([])
    bench.finish("--resume")


def test_an_orphan_whose_loop_is_blocked_gives_the_run_free(plugin: Path, bench: Bench) -> None:
    bench.write([{"id": "block", "prompt": "block"}])
    sooner = started_with(bench.folder, "import batch.worker\nbatch.worker.ORPHAN = 3.0\n")
    flags = bench.flags(f"--success_checker={plugin}:check")
    with Program(*flags, home=bench.folder, TMPDIR=str(bench.temp), PYTHONPATH=sooner) as program:
        wait_until((bench.folder / "blocked").exists)
        program.process.kill()
        program.process.wait()
        bench.finish("--resume")
        assert not program.tree()
    assert len(bench.journal()) == 1


def test_orphans_write_nothing_and_end(bench: Bench) -> None:
    bench.settings["concurrency"] = "4"
    bench.endpoint.set_rules([{"hold": True}])
    never = started_with(bench.folder, "import batch.worker\nbatch.worker.ORPHAN = 1000.0\n")
    with Program(*bench.flags(), home=bench.folder, TMPDIR=str(bench.temp), PYTHONPATH=never) as program:
        wait_until(lambda: bench.asked().total() == 4)
        program.process.kill()
        wait_until(lambda: not program.tree())  # they wait for no answer
    assert not bench.ended()
    bench.endpoint.set_rules([])
    bench.finish("--resume")
    assert not bench.sandboxes()


# --- disks


def test_a_full_disk_stops_the_run_which_goes_on_once_there_is_room(disk: Path, bench: Bench) -> None:
    ballast = disk / "ballast"
    ballast.write_bytes(b"x" * 1_800_000)
    bench.directory = disk / "run"
    bench.write(prompts(24))
    text = {"content": "4" * 10_000, "reasoning_content": "So."}
    bench.endpoint.set_rules([{"message": text}])
    bench.settings["concurrency"] = "4"
    code, out, err = bench.run()
    assert code == 3, out + err
    assert "No space left" in err
    assert "Traceback" not in err
    assert "--resume" in out + err
    lines = whole_lines(bench.directory)
    assert 3 < len(lines) < 24
    for line in lines:
        json.loads(line)
    assert set(bench.asked().values()) == {1}
    ballast.unlink()
    assert not set(bench.asked_by("--resume")) & {json.loads(line)["conversations"][1]["value"] for line in lines}
    assert len(merged(bench.directory)) == 24


def test_a_disk_that_is_full_at_the_start_costs_nothing(disk: Path, bench: Bench) -> None:
    with suppress(OSError), (disk / "ballast").open("wb") as file:
        file.write(b"x" * (1 << 21))
    bench.directory = disk / "run"
    message = bench.finish(code=2)
    assert "No space left" in message
    assert not bench.asked()


def test_a_disk_that_cannot_be_written_costs_nothing(disk: Path, bench: Bench) -> None:
    bench.directory = disk / "run"
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    message = bench.finish(code=2)
    assert str(bench.directory) in message
    assert "Read-only" in message
    assert not bench.asked()
