"""Sandboxes through the program: what runs on in them, what is cut off, what is lost, and what is left: nothing."""

import asyncio
import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.contract import environments
from tests.contract.engine_stub import stub_engine
from tests.e2e.against import called, results_of, run_against, said, script
from tests.e2e.program import Program, journal, run_program, wait_until, write_dataset
from tests.endpoint import EndpointProcess, tool_call

IMAGE = "batch-runner-test:py"
IMAGES = {**environments.IMAGES, "docker": IMAGE}
BACKENDS = ("local", "bubblewrap", "docker")


def of_backend(backend: str) -> tuple[str, ...]:
    image = (f"--image={IMAGES[backend]}",) if backend in IMAGES else ()
    return (f"--container_backend={backend}", *image)


def command(text: str, **more: Any) -> dict[str, Any]:
    return called(tool_call("terminal", {"command": text, **more}))


def processes_with(mark: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if mark in line:
            found.append(line)
    return found


def containers(label: str) -> list[str]:
    listed = subprocess.run(
        ["docker", "ps", "-aq", "--filter", f"label={label}"], capture_output=True, text=True, check=True
    )
    return listed.stdout.split()


@pytest.mark.parametrize("backend", BACKENDS)
def test_background_processes_hold_nothing_up_and_end_with_the_row(backend: str, tmp_path: Path) -> None:
    mark = f"300.{os.getpid()}{BACKENDS.index(backend)}"
    starts = [
        f"sleep {mark} &",
        f"nohup sleep {mark} >/dev/null 2>&1 & disown",
        f"setsid sleep {mark} &",
        f"(sleep {mark} &)",
        "python3 -m http.server 0 &",
    ]
    count = f"echo alive $(grep -l -a {mark} /proc/[0-9]*/cmdline 2>/dev/null | wc -l)"
    rules = script("daemons", *map(command, starts), command(count), said("left them"))
    with EndpointProcess(rules) as endpoint:
        ran = run_against(endpoint.url, tmp_path, ["daemons"], *of_backend(backend))
    row = ran.rows["daemons"]
    assert row["status"] == "completed", row["error"]
    *started, alive = results_of(row)
    assert [each["exit_code"] for each in started] == [0] * len(starts)
    assert row["duration_seconds"] < 50
    assert int(alive["output"].split()[1]) >= 4
    wait_until(lambda: not processes_with(mark))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_commands_time_ends_all_of_it_and_nothing_else(backend: str, tmp_path: Path) -> None:
    mark = f"301.{os.getpid()}{BACKENDS.index(backend)}"
    other = f"302.{os.getpid()}{BACKENDS.index(backend)}"
    slow = f"echo before; trap '' TERM; (sleep {mark}) & setsid sleep {mark} & sleep {mark}"
    left = f"for m in {mark} {other}; do grep -l -a '[s]leep.'$m /proc/[0-9]*/cmdline 2>/dev/null | wc -l; done"
    rules = script("slow", command(f"sleep {other} &"), command(slow, timeout=1), command(left), said("ok"))
    with EndpointProcess(rules) as endpoint:
        ran = run_against(endpoint.url, tmp_path, ["slow"], *of_backend(backend))
    row = ran.rows["slow"]
    assert row["status"] == "completed", row["error"]
    _, cut, after = results_of(row)
    assert (cut["exit_code"], cut["output"].startswith("before\n")) == (124, True)
    assert after["output"].split() == ["0", "1"]
    assert not processes_with(mark)
    wait_until(lambda: not processes_with(other))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rows_time_ends_the_command_that_runs(backend: str, tmp_path: Path) -> None:
    mark = f"303.{os.getpid()}{BACKENDS.index(backend)}"
    rules = script("stuck", command("echo first"), command(f"trap '' TERM; sleep {mark}"))
    row = {"id": "stuck", "prompt": "stuck", "timeout_seconds": 4}
    with EndpointProcess(rules) as endpoint:
        ran = run_against(endpoint.url, tmp_path, [row], *of_backend(backend))
    ended = ran.rows["stuck"]
    assert (ended["status"], ended["duration_seconds"] < 50) == ("timeout", True)
    first, cut = results_of(ended)
    assert first["output"] == "first\n"
    assert cut["error"]
    wait_until(lambda: not processes_with(mark))


@pytest.mark.parametrize("backend", [*BACKENDS, "singularity"])
def test_odd_output_and_empty_input(backend: str, tmp_path: Path) -> None:
    rules = script(
        "odd",
        command("head -c 50000000 /dev/zero | tr '\\0' x"),
        command("read x; echo \"[$x]\"; cat; python3 -c 'input()' 2>&1 | tail -n 1"),
        command("echo $PAGER $GIT_TERMINAL_PROMPT $DEBIAN_FRONTEND; cd /tmp; export A='b c'"),
        command('pwd; echo "$A"'),
        said("ok"),
    )
    with EndpointProcess(rules) as endpoint:
        ran = run_against(endpoint.url, tmp_path, ["odd"], *of_backend(backend))
    row = ran.rows["odd"]
    assert row["status"] == "completed", row["error"]
    long, empty, variables, carried = results_of(row)
    assert len(long["output"]) < 100_000
    (omitted,) = re.findall(r"x[^x]*?([\d,]+) char[^x]*x", long["output"])
    assert int(omitted.replace(",", "")) + long["output"].count("x") in range(49_999_900, 50_000_100)
    assert empty["output"].startswith("[]\n")
    assert "EOFError" in empty["output"]
    assert variables["output"].split() == ["cat", "0", "noninteractive"]
    assert carried["output"] == "/tmp\nb c\n"


def test_rows_with_images_of_their_own(tmp_path: Path) -> None:
    look = command("command -v python3 >/dev/null && echo python || echo none")
    rows = [
        {"id": "py", "prompt": "py", "image": IMAGE},
        {"id": "sh", "prompt": "sh", "docker_image": "batch-runner-test:sh"},
    ]
    rules = [*script("py", look, said("ok")), *script("sh", look, said("ok"))]
    with EndpointProcess(rules) as endpoint:
        ran = run_against(endpoint.url, tmp_path, rows, "--container_backend=auto")
    assert ran.code == 0, ran.err
    found = {name: (row["environment"], results_of(row)[0]["output"]) for name, row in ran.rows.items()}
    assert found == {
        "py": ({"backend": "docker", "image": IMAGE, "start_retries": 0}, "python\n"),
        "sh": ({"backend": "docker", "image": "batch-runner-test:sh", "start_retries": 0}, "none\n"),
    }


def test_an_image_on_a_backend_without_images_is_refused(tmp_path: Path) -> None:
    with EndpointProcess() as endpoint:
        rows: list[Any] = ["fine", {"id": "py", "prompt": "py", "image": IMAGE}]
        ran = run_against(endpoint.url, tmp_path, rows, "--container_backend=bubblewrap")
        requests = endpoint.stats()["requests"]
    assert (ran.code, requests) == (2, 0)
    assert "r.jsonl:2" in ran.err


async def test_an_image_that_is_not_there_is_that_rows_end(tmp_path: Path) -> None:
    socket = tmp_path / "engine.sock"
    rows = [{"id": f"r{number}", "prompt": "x", "image": "none:1"} for number in range(6)]
    async with stub_engine(socket) as engine:
        with EndpointProcess() as endpoint:
            first = await _in_thread(endpoint, tmp_path, rows, f"unix://{socket}")
            second = await _in_thread(endpoint, tmp_path, rows, f"unix://{socket}", "--resume")
            requests = endpoint.stats()["requests"]
    assert (first, second) == (1, 1)
    found = journal(tmp_path / "out" / "r")
    assert len(found) == 6
    assert {(row["status"], row["error_class"], row["retryable"]) for row in found} == {
        ("failed", "image_unavailable", False)
    }
    assert requests == 0
    assert set(engine.pulls) == {"none:1"}


async def _in_thread(
    endpoint: EndpointProcess, home: Path, rows: Sequence[dict[str, Any]], engine: str, *flags: str
) -> int:
    ran = await asyncio.to_thread(
        run_against, endpoint.url, home, rows, "--container_backend=docker", *flags, DOCKER_HOST=engine
    )
    return ran.code


def test_a_lost_container_is_tried_once_more_at_the_end(tmp_path: Path) -> None:
    name = f"lost-{uuid.uuid4().hex[:12]}"
    rules = script(name, command("echo first"), command("echo never"), command("echo again"), said("at last"))
    held = {"prompt": name, "turn": 2, "hold": True, **command("echo too late")}
    rows = [{"id": each, "prompt": each} for each in (name, "o1", "o2", "o3")]
    with EndpointProcess([held, *rules]) as endpoint:
        dataset = write_dataset(tmp_path / "r.jsonl", rows)
        flags = ("--model=m", f"--base_url={endpoint.url}", f"--dataset_file={dataset}", f"--output_dir={tmp_path}")
        more = ("--run_name=r", "--keep_no_reasoning", "--num_workers=1", "--enabled_toolsets=terminal")
        with Program(*flags, *more, *of_backend("docker"), home=tmp_path) as program:
            wait_until(lambda: endpoint.stats()["prompts"].get(name, 0) == 2)
            (container,) = containers(f"batch-runner.task={name}.0")
            subprocess.run(["docker", "rm", "-f", container], check=True, capture_output=True)
            endpoint.set_rules(rules)
            code, _, err = program.end()
    assert code == 0, err
    tries = [row for row in journal(tmp_path / "r") if row["task_id"] == name]
    assert [(row["status"], row["error_class"], row["attempt"]) for row in tries] == [
        ("failed", "environment_lost", 1),
        ("completed", "", 2),
    ]
    assert results_of(tries[0])[0]["output"] == "first\n"
    assert [row["task_id"] for row in journal(tmp_path / "r")][-1] == name
    assert not containers(f"batch-runner.task={name}.0")


def test_a_sandbox_that_ends_itself_is_lost(tmp_path: Path) -> None:
    rules = [
        {"prompt": "^x$", "turn": 1, "times": 1, **command("kill -9 -1")},
        *script("x", {}, command("echo new"), said("at last")),
    ]
    with EndpointProcess(rules) as endpoint:
        ran = run_against(endpoint.url, tmp_path, ["x", "y"], "--container_backend=bubblewrap")
        requests = endpoint.stats()["prompts"]["x"]
    assert ran.code == 0, ran.err
    ends = [(row["task_id"], row["status"], row["error_class"]) for row in journal(ran.directory)]
    assert [end for end in ends if end[0] == "x"] == [("x", "failed", "environment_lost"), ("x", "completed", "")]
    assert ends[-1][0] == "x"
    assert requests == 3


def test_no_docker_is_no_local_run(tmp_path: Path) -> None:
    with EndpointProcess() as endpoint:
        ran = run_against(
            endpoint.url, tmp_path, ["one"], "--container_backend=docker", DOCKER_HOST=f"unix://{tmp_path}/nobody"
        )
        requests = endpoint.stats()["requests"]
    assert (ran.code, requests) == (2, 0), ran.err
    assert "docker" in ran.err


def test_setup_files_variables_and_folder_of_a_row(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "id": "good",
            "prompt": "good",
            "files": {"a b/c.txt": "text\n"},
            "setup": "echo made > made.txt",
            "env": {"COLOUR": "blue"},
        },
        {"id": "bad", "prompt": "bad", "setup": "echo why >&2; exit 3"},
        {"id": "slow", "prompt": "slow", "setup": "sleep 60", "timeout_seconds": 1},
    ]
    rules = script("good", command('cat "a b/c.txt" made.txt; echo $COLOUR; pwd'), said("ok"))
    with EndpointProcess(rules) as endpoint:
        ran = run_against(endpoint.url, tmp_path, rows, "--container_backend=bubblewrap")
        prompts = endpoint.stats()["prompts"]
    assert ran.code == 1, ran.err
    assert results_of(ran.rows["good"])[0]["output"] == "text\nmade\nblue\n/workspace\n"
    assert (ran.rows["bad"]["status"], ran.rows["bad"]["error_class"]) == ("failed", "setup_failed")
    assert "why" in ran.rows["bad"]["error"]
    slow = [row for row in journal(ran.directory) if row["task_id"] == "slow"]
    assert [(row["error_class"], row["attempt"]) for row in slow] == [("setup_timeout", 1), ("setup_timeout", 2)]
    assert max(row["duration_seconds"] for row in slow) < 50
    assert prompts == {"good": 2}


# --- from Python

AGENT = """
import asyncio, json, sys
from agent.agent import AIAgent

agent = AIAgent("m", base_url=sys.argv[1], toolsets=["terminal"], container_backend="local")
first = agent.run_conversation("from python", task_id="one", max_turns=5)

async def both():
    return await asyncio.gather(*(agent.arun_conversation(f"twin {n}", task_id=f"t{n}") for n in range(2)))

print(json.dumps([first, *asyncio.run(both())]))
"""

BATCH = """
import logging, os, sys, threading
from batch.invocation import run
from batch.settings import RunSettings

def hammer():
    while True:
        logging.getLogger().isEnabledFor(10)
        with logging._lock:
            pass

threading.Thread(target=hammer, daemon=True).start()
settings = RunSettings(
    dataset_file=sys.argv[2], output_dir=sys.argv[3], run_name="p", model="m", base_url=sys.argv[1],
    num_workers=int(sys.argv[4]), batch_size=2, enabled_toolsets=("terminal",), container_backend="local",
)
sys.exit(run(settings, argv=[], environ=os.environ))
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        cwd=root, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_one_conversation_from_python() -> None:
    with EndpointProcess(calls=2) as endpoint:
        done = python(AGENT, endpoint.url)
    assert done.returncode == 0, done.stderr
    first, *twins = json.loads(done.stdout)
    assert (first["final_response"], first["completed"], first["partial"], first["api_calls"]) == (
        "done: from python",
        True,
        False,
        3,
    )
    assert first["task_id"] == "one"
    assert first["usage"]["total_tokens"] == 330
    assert [message["role"] for message in first["messages"]] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [each["final_response"] for each in twins] == ["done: twin 0", "done: twin 1"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_from_a_python_program_with_threads(workers: int, tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "d.jsonl", [{"prompt": f"p{number}"} for number in range(8)])
    with EndpointProcess() as endpoint:
        done = python(BATCH, endpoint.url, str(dataset), str(tmp_path), str(workers))
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "p" / "trajectories.jsonl").read_bytes().splitlines()) == 8


def test_the_programs_input_is_left_alone(tmp_path: Path) -> None:
    rules = script("reads", command("cat; read x; echo [$x]"), said("ok"))
    with EndpointProcess(rules) as endpoint:
        dataset = write_dataset(tmp_path / "d.jsonl", [{"id": "reads", "prompt": "reads"}])
        code, _, err = run_program(
            "--model=m", f"--base_url={endpoint.url}", f"--dataset_file={dataset}", f"--output_dir={tmp_path}",
            "--run_name=r", "--keep_no_reasoning", "--container_backend=local", "--enabled_toolsets=terminal",
            home=tmp_path, stdin=b"1\n2\n3\n",
        )  # fmt: skip
    assert code == 0, err
    (row,) = journal(tmp_path / "r")
    assert results_of(row)[0]["output"] == "[]\n"
