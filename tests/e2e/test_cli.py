"""The command line: what a mistake gets, what is printed where, and which command goes on with a run."""

import asyncio
import json
import os
import pty
import re
import select
import shlex
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.inputs import PLAIN, runs, says, small_run, write_script
from tests.e2e.program import ROOT, Program, environment, journal, merged, run_program, wait_until, write_dataset
from tests.endpoint import Endpoint, EndpointProcess

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")
NOWHERE = "tcp://127.0.0.1:9"


def contents(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".pyc", ".lock")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def one_line(text: str) -> str:
    assert text.startswith("error: "), text
    assert text.count("\n") == 1, text
    assert not CONTROL.search(text)
    return text


def resume(out: str, home: Path, *more: str, **variables: str) -> tuple[int, str, str]:
    """Runs the command that a run printed last, in a shell, where it was printed."""
    done = subprocess.run(
        ["sh", "-c", shlex.join([*shlex.split(out.splitlines()[-1]), *more])],
        cwd=home,
        env=environment(home, **variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


# --- mistakes

MISTAKES = {
    "no such dataset": (["--dataset_file=none.jsonl"], "none.jsonl .*No such file"),
    "a directory": (["--dataset_file=folder"], "folder is a directory"),
    "an empty dataset": (["--dataset_file=empty"], "empty: no valid row"),
    "a damaged gzip": (["--dataset_file=damaged.gz"], "damaged.gz is damaged"),
    "unknown flag": (["--datset_file=x"], "unknown flag --datset_file: did you mean --dataset_file?"),
    "a stray word": (["prompts.jsonl"], "unexpected argument 'prompts.jsonl'"),
    "no value": (["--max_turns"], "--max_turns needs a value"),
    "a bad value": (["--max_turns=0"], "--max_turns: expected a whole number >= 1 and <= 10000, got '0'"),
    "a number beyond 64 bits": (["--seed=9" + "9" * 30], "--seed: expected a whole number"),
    "nesting without end": (["--config=deep.yaml"], "deep.yaml is nested too deeply"),
    "a script nested without end": (["--model=scripted:deep.yaml"], "deep.yaml: nested too deeply"),
    "a script with a date that is none": (["--model=scripted:date.yaml"], "date.yaml: not YAML"),
    "a bad choice": (
        ["--output_format=xml"],
        "--output_format: expected a comma list of json, jsonl, sharegpt, turns, got 'xml'",
    ),
    "unknown distribution": (["--enabled_toolsets=", "--distribution=defalt"], "did you mean default?"),
    "unknown toolset": (["--disabled_toolsets=terminl"], "did you mean terminal?"),
    "unknown backend": (["--container_backend=dockr"], "did you mean docker"),
    "tools that are not here": (["--enabled_toolsets=image_gen"], "enabled_toolsets: image_gen lacks a service"),
    "no tool is left": (["--disabled_toolsets=terminal"], "leaves no tool of enabled_toolsets"),
    "no tool of a distribution is left": (
        ["--enabled_toolsets=", "--distribution=terminal_only", "--disabled_toolsets=terminal,process,file"],
        "leaves no tool of distribution terminal_only",
    ),
    "no docker": (["--container_backend=docker"], "docker is not running"),
    "an image without docker": (
        ["--container_backend=auto", "--image=debian"],
        r"docker is not running.*\(images need docker\)$",
    ),
    "an image on a backend without": (["--image=debian"], "local .*no images"),
    "no key": (["--model=gpt-4o"], "OPENAI_API_KEY"),
    "unknown provider": (["--model=m", "--provider=opnai"], "did you mean openai?"),
    "no script": (["--model=scripted:none.yaml"], "none.yaml: cannot read the script"),
    "no earlier run": (["--model=replay:nowhere"], "nowhere"),
    "unknown price": (["--max_cost=1"], "price .* not known"),
    "no settings file": (["--config=none.yaml"], "cannot read none.yaml"),
    "unknown key": (["--config=typo.yaml"], "unknown key 'max_turn' in typo.yaml: did you mean max_turns?"),
    "no YAML": (["--config=damaged.gz"], "damaged.gz is not YAML"),
    "a mapping as environment": (["--config=mapping.yaml"], "got a mapping"),
    "a checker that is not there": (["--success_checker=none.py:check"], "there is no file none.py"),
    "a checker that cannot be read": (["--success_checker=broken.py:check"], "RuntimeError: at import"),
    "a checker without the name": (["--success_checker=checker.py:chek"], "chek"),
    "a bad run name": (["--run_name=../x"], "one path component"),
    "a file where the run should be": (["--output=empty", "--run_name=empty"], "empty cannot be written"),
    "no place for it": (["--output_dir=/proc/none"], "/proc/none/r cannot be written"),
    "nothing to finalize": (["--finalize"], "there is no run.json"),
    "a prefill that is none": (["--prefill_messages_file=typo.yaml"], "not a JSON array"),
    "a .jsonl without the format": (["--output=r.jsonl", "--run_name=r"], "needs output_format=jsonl"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_line_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    more, said = MISTAKES[name]
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "damaged.gz").write_bytes(b"\x1f\x8b\x08\x00\x01\x02")
    (tmp_path / "typo.yaml").write_text("max_turn: 3\n", encoding="utf-8")
    (tmp_path / "deep.yaml").write_text("[" * 5000, encoding="utf-8")
    (tmp_path / "date.yaml").write_text("rules: 2026-99-99", encoding="utf-8")
    (tmp_path / "mapping.yaml").write_text("environment: {type: docker}\n", encoding="utf-8")
    (tmp_path / "broken.py").write_text("raise RuntimeError('at\\nimport')\n", encoding="utf-8")
    (tmp_path / "checker.py").write_text("def check(task): return True\n", encoding="utf-8")
    given = {word.partition("=")[0] for word in more}
    flags = [word for word in small_run(tmp_path) if word.partition("=")[0] not in given]
    flags = [word for word in flags if word != "--enabled_toolsets="]
    before = contents(tmp_path)
    code, out, err = run_program(
        *flags, *(word for word in more if word[-1] != "="), home=tmp_path, DOCKER_HOST=NOWHERE
    )
    assert (code, out) == (2, "")
    assert re.search(said, one_line(err)), err
    assert contents(tmp_path) == before
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("action", ["--resume", "--finalize"])
@pytest.mark.parametrize("damaged", ["{}", '{"settings": 5}'])
def test_a_manifest_of_another_shape_is_a_mistake(damaged: str, action: str, tmp_path: Path) -> None:
    flags = small_run(tmp_path)
    assert run_program(*flags, home=tmp_path)[0] == 0
    (tmp_path / "data/r/run.json").write_text(damaged, encoding="utf-8")
    before = contents(tmp_path)
    code, out, err = run_program(*flags, action, home=tmp_path)
    assert (code, out) == (2, "")
    assert "run.json is damaged" in one_line(err)
    assert contents(tmp_path) == before


def test_a_folder_that_ends_in_tmp_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "data/r/foo.tmp").mkdir(parents=True)
    (tmp_path / "data/r/dataset.jsonl.tmp").mkdir()
    code, _, err = run_program(*small_run(tmp_path), home=tmp_path)
    assert code == 0, err
    assert (tmp_path / "data/r/foo.tmp").is_dir()


@pytest.mark.parametrize("action", ["help", "version", "list_providers", "list_distributions", "list_toolsets"])
def test_a_listing_that_cannot_be_written_is_one_line(action: str, tmp_path: Path) -> None:
    done = listing(action, tmp_path, os.open("/dev/full", os.O_WRONLY))
    assert done.returncode == 2
    assert "No space left on device" in one_line(done.stderr)


@pytest.mark.parametrize("action", ["help", "list_toolsets"])
def test_a_listing_with_no_stdout_is_one_line(action: str, tmp_path: Path) -> None:
    call = shlex.join([sys.executable, str(ROOT / "batch_runner.py"), f"--{action}"])
    done = subprocess.run(
        ["sh", "-c", f"{call} >&-"], cwd=tmp_path, env=environment(tmp_path), stderr=subprocess.PIPE, check=False
    )
    assert done.returncode == 2
    assert "stdout is closed" in one_line(done.stderr.decode())


@pytest.mark.parametrize("action", ["help", "list_providers"])
def test_a_reader_that_goes_away_has_seen_enough(action: str, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = listing(action, tmp_path, write)
    assert (done.returncode, done.stderr) == (0, "")


def listing(action: str, home: Path, out: int) -> "subprocess.CompletedProcess[str]":
    """Asks for it, with its output into that descriptor, which is closed then."""
    command = [sys.executable, str(ROOT / "batch_runner.py"), f"--{action}"]
    with os.fdopen(out, "wb", buffering=0) as stdout:
        return subprocess.run(
            command, cwd=home, env=environment(home), stdout=stdout, stderr=subprocess.PIPE, text=True, check=False
        )


def test_a_mistaken_variable_is_refused(tmp_path: Path) -> None:
    code, out, err = run_program(*small_run(tmp_path), home=tmp_path, BATCH_RUNNER_MAX_TURN="3")
    assert (code, out) == (2, "")
    assert "did you mean BATCH_RUNNER_MAX_TURNS?" in one_line(err)


def test_an_image_that_does_not_exist_is_found_before_anything_is_written(tmp_path: Path) -> None:
    flags = [word for word in small_run(tmp_path) if "backend" not in word]
    flags += ["--container_backend=docker", "--image=127.0.0.1:1/none:0"]
    code, out, err = run_program(*flags, home=tmp_path)
    assert (code, out) == (2, "")
    assert "image 127.0.0.1:1/none:0" in one_line(err)
    assert not list((tmp_path / "data").glob("*"))


def test_an_empty_directory_stays_the_users(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    flags = [word for word in small_run(tmp_path) if "run_name" not in word]
    assert run_program(*flags, "--output=mine", "--success_checker=none.py:check", home=tmp_path)[0] == 2
    assert list((tmp_path / "mine").iterdir()) == []
    assert run_program(*flags, "--output=mine", home=tmp_path)[0] == 0


def test_a_directory_with_results_is_left_alone(tmp_path: Path) -> None:
    flags = small_run(tmp_path)
    assert run_program(*flags, home=tmp_path)[0] == 0
    before = contents(tmp_path / "data")
    code, out, err = run_program(*flags, home=tmp_path)
    assert (code, out) == (2, "")
    assert "--resume" in one_line(err)
    assert contents(tmp_path / "data") == before


def test_a_directory_in_use_is_refused_with_its_owner(tmp_path: Path) -> None:
    flags = small_run(tmp_path, rules=[{"turns": [says("late", delay=60)]}])
    with Program(*flags, home=tmp_path) as first:
        wait_until((tmp_path / "data/r/run.json").exists)
        code, out, err = run_program(*flags, "--resume", home=tmp_path)
        assert (code, out) == (2, "")
        assert str(first.process.pid) in one_line(err)
        assert first.process.poll() is None


@pytest.mark.parametrize("size", ["full", "read-only"])
def test_a_disk_that_takes_nothing_is_found_before_anything_is_spent(size: str, tmp_path: Path) -> None:
    bwrap = shutil.which("bwrap")
    assert bwrap
    (tmp_path / "data").mkdir()
    disk = ["--size", "4096", "--tmpfs"] if size == "full" else ["--ro-bind", str(tmp_path / "data")]
    sandbox = [bwrap, "--dev-bind", "/", "/", *disk, str(tmp_path / "data")]
    with EndpointProcess() as endpoint:
        words = [*small_run(tmp_path, [{"prompt": "x" * 9000}]), "--model=m", f"--base_url={endpoint.url}"]
        words = [word for word in words if "scripted" not in word]
        done = subprocess.run(
            [*sandbox, sys.executable, str(ROOT / "batch_runner.py"), *words, "--api_key=" + "k" * 20],
            cwd=tmp_path,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert re.search("No space left|Read-only", one_line(done.stderr))
        assert endpoint.stats()["requests"] == 0


# --- endpoints that are not there


async def test_an_endpoint_that_is_not_there_stops_the_run_and_the_printed_command_goes_on(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    rows = [{"prompt": f"p{number}"} for number in range(6)]
    flags = [word for word in small_run(tmp_path, rows) if "scripted" not in word]
    flags += ["--model=m", f"--base_url=http://127.0.0.1:{port}/v1", "--api_key=testkey-0123456789"]
    began = time.monotonic()
    code, out, err = await asyncio.to_thread(lambda: run_program(*flags, home=tmp_path))
    assert code == 3, out + err
    assert time.monotonic() - began < 40  # five seconds, and a busy machine
    assert f"127.0.0.1:{port}" in err
    assert "Traceback" not in err
    assert "testkey" not in out + err
    assert merged(tmp_path / "data/r") == []
    async with Endpoint(port=port) as endpoint:
        key = {"BATCH_RUNNER_API_KEY": "testkey-0123456789"}
        code, out, err = await asyncio.to_thread(lambda: resume(out, tmp_path, **key))
        assert code == 0, out + err
        assert len(merged(tmp_path / "data/r")) == 6
        assert endpoint.stats.requests == 12


# --- where settings come from


def test_a_flag_beats_the_file_and_the_file_the_environment(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "prompts.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    config = tmp_path / "run.yaml"
    config.write_text(
        f"input: {dataset}\nmax_iterations: 7\ntimeout: 70\nbatch-size: 3\nenv: local\n"
        "enabled_toolsets: [bash]\ntrajectory_dir: out\nnetwork: on\n",
        encoding="utf-8",
    )
    flags = [write_script(tmp_path), "--config", str(config), "--run-name", "r", "--max-steps", "4", "--no-save-all"]
    code, out, err = run_program(
        *flags, home=tmp_path, BATCH_RUNNER_TIMEOUT="5", BATCH_RUNNER_CONCURRENCY="2", BATCH_RUNNER_MAX_STEPS="9"
    )
    assert code == 0, out + err
    settings = json.loads((tmp_path / "out/r/run.json").read_bytes())["settings"]
    found = {name: settings[name] for name in ("max_turns", "timeout", "batch_size", "concurrency", "save_all")}
    assert found == {"max_turns": 4, "timeout": 70.0, "batch_size": 3, "concurrency": 2, "save_all": False}
    assert {row["tools_offered"] for row in journal(tmp_path / "out/r")} == {"process terminal"}


def test_a_resume_keeps_the_backend_that_was_chosen(tmp_path: Path) -> None:
    flags = small_run(tmp_path)
    assert run_program(*flags, "--max_samples=1", home=tmp_path)[0] == 0
    rest = [word for word in flags if "backend" not in word]
    code, out, err = run_program(*rest, "--resume", home=tmp_path)
    assert code == 0, out + err
    assert [row["environment"]["backend"] for row in merged(tmp_path / "data/r")] == ["local", "local"]
    code, out, err = run_program(*rest, "--container_backend=bubblewrap", "--resume", home=tmp_path)
    assert (code, out) == (2, "")
    assert 'container_backend: "local" -> "bubblewrap"' in err


# --- what the program says about itself


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--help", "--dataset_file"),
        ("-h", "Exit codes"),
        ("--version", "batch-runner"),
        ("--list_distributions", "terminal_tasks"),
        ("--list-toolsets", "search_files"),
        ("--list_backends", "docker is not running"),
        ("--list_providers", "OPENROUTER_API_KEY"),
    ],
)
def test_the_program_tells_about_itself(flag: str, said: str, tmp_path: Path) -> None:
    code, out, err = run_program(flag, home=tmp_path, DOCKER_HOST=NOWHERE, OPENAI_API_KEY="sk-testkey-0123456789")
    assert (code, err) == (0, "")
    assert said in out
    assert not CONTROL.search(out.replace("\t", ""))  # they stand between the cells of a listing
    assert "testkey" not in out
    assert not list(tmp_path.iterdir())


def test_installed_commands_are_there(tmp_path: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {"batch-runner", "toolset-distributions"} <= set(project["scripts"])
    for target in project["scripts"].values():
        module, _, function = target.partition(":")
        assert callable(getattr(import_module(module), function))
    call = "import sys; from batch_runner import main; sys.argv = ['batch-runner', '--version']; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", call], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# --- one prompt


def test_the_answer_to_one_prompt_goes_to_stdout_alone(tmp_path: Path) -> None:
    model = write_script(tmp_path, [{"equals": "caf\ufffd", "turns": [runs("echo hi"), says("line 1\nline € 2")]}])
    code, out, err = run_program(*PLAIN, model, "--prompt", os.fsdecode(b"caf\xe9"), home=tmp_path)
    assert (code, out) == (0, "line 1\nline € 2\n"), err
    assert "Run prompt-" in err
    code, out, err = run_program(*PLAIN, model, "--prompt=x", "--quiet", home=tmp_path, PYTHONIOENCODING="ascii")
    assert (code, out, err) == (0, "the answer\n", "")
    code, out, err = run_program(*PLAIN, model, "--prompt=x", "--json_summary", "--quiet", home=tmp_path)
    assert (code, err) == (0, "")
    assert json.loads(out)["answers"] == ["the answer"]
    assert len(list((tmp_path / "data").iterdir())) == 3


def test_one_prompt_that_failed_is_resumed_by_the_command_on_stderr(tmp_path: Path) -> None:
    model = write_script(tmp_path, [{"turns": [{"error": {"status": 500}}]}])
    code, out, err = run_program(*PLAIN, model, "--prompt=it's", "--request_retries=1", home=tmp_path)
    assert (code, out.strip()) == (1, "")
    write_script(tmp_path)
    code, out, err = resume(err, tmp_path)
    assert (code, out) == (0, "the answer\n"), err


# --- a dry run


def started_by_a_program(folder: Path, flags: list[str], given: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """A run by `batch.invocation.run`, whose mapping has further variables."""
    (folder / "started.py").write_text(
        "import os\n"
        "from batch.invocation import run\n"
        "from batch.settings import load_settings\n"
        "if __name__ == '__main__':\n"
        f"    environ = {{**os.environ, **{given!r}}}\n"
        f"    settings, _ = load_settings({flags!r}, environ)\n"
        "    raise SystemExit(run(settings, argv=[], environ=environ))\n",
        encoding="utf-8",
    )
    return subprocess.run(
        [sys.executable, "started.py"],
        cwd=folder, env=environment(folder, PYTHONPATH=str(ROOT)), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_run_that_a_program_started_is_resumed_by_the_command_it_prints(tmp_path: Path) -> None:
    flags = [*small_run(tmp_path, [{"prompt": "a", "setup": "[ -e made ]"}]), "--network=none", "--no-save_all"]
    done = started_by_a_program(tmp_path, flags, {})
    assert done.returncode == 1, done.stdout + done.stderr
    assert "started.py" not in done.stdout.splitlines()[-1]
    code, out, err = resume(done.stdout, tmp_path, "--dry_run")
    assert code == 0, out + err
    saved = json.loads((tmp_path / "data/r/run.json").read_bytes())["settings"]
    assert (saved["network"], saved["save_all"]) == ("none", False)
    code, out, err = resume(done.stdout, tmp_path)
    assert code == 1, out + err
    again = json.loads((tmp_path / "data/r/run.json").read_bytes())["settings"]
    assert {**saved, "resume": True} == again


@pytest.mark.parametrize("workers", [0, 1])
def test_a_program_gives_a_run_an_environment_of_its_own(tmp_path: Path, workers: int) -> None:
    key = "key-of-a-mapping-0123456789"
    flags = small_run(tmp_path, [{"prompt": "a", "setup": '[ "$GREETING" = hello ]'}])
    with EndpointProcess(calls=0) as endpoint:
        flags += ["--model=gpt-x", "--provider=openai", f"--base_url={endpoint.url}", "--env_allow=GREETING"]
        flags = [word for word in flags if "scripted" not in word] + [f"--num_workers={workers}"]
        done = started_by_a_program(tmp_path, flags, {"OPENAI_API_KEY": key, "GREETING": "hello"})
        assert done.returncode == 0, done.stdout + done.stderr
        assert endpoint.stats()["keys"] == {key: 1}
    assert [row["status"] for row in journal(tmp_path / "data/r")] == ["completed"]


def test_a_dry_run_writes_nothing_and_asks_no_model(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "a" * 400, "tools": ["file_read"]}, {"prompt": "b"}, {"prompt": 7}]
    flags = [word for word in small_run(tmp_path, rows) if "scripted" not in word]
    with EndpointProcess() as endpoint:
        flags += ["--model=gpt-x", f"--base_url={endpoint.url}", "--api_key=testkey-0123456789", "--skip_bad_rows"]
        flags += ["--samples_per_prompt=2", "--price_in=1", "--price_out=2"]
        before = contents(tmp_path)
        code, out, err = run_program(*flags, "--dry_run", home=tmp_path)
        assert (code, err) == (0, "")
        for said in ("2 of 2 rows", "2 samples each", "1 bad row left out", "4 to run", "terminal", "read_file"):
            assert said in out
        for said in ("local", endpoint.url, "gpt-x", "$", "characters a token"):
            assert said in out
        assert "testkey" not in out
        code, out, err = run_program(*flags, "--dry_run", "--json_summary", home=tmp_path)
        report = json.loads(out)
        assert (code, report["pending"], report["backend"]) == (0, 4, "local")
        costs = [each["cost_usd"] for each in report["estimates"]]
        assert costs == sorted(costs)
        assert costs[0] > 0
        assert endpoint.stats()["requests"] == 0
    assert contents(tmp_path) == before
    assert not (tmp_path / "data").exists()


def test_a_dry_run_of_a_resume_counts_what_is_left(tmp_path: Path) -> None:
    flags = small_run(tmp_path)
    assert run_program(*flags, "--max_samples=1", home=tmp_path)[0] == 0
    before = contents(tmp_path)
    code, out, _ = run_program(*flags, "--resume", "--dry_run", "--json_summary", home=tmp_path)
    assert (code, json.loads(out)["pending"]) == (0, 1)
    assert run_program(*flags, "--dry_run", home=tmp_path)[0] == 2
    assert run_program(*flags, "--resume", "--dry_run", "--seed=5", home=tmp_path)[0] == 2
    assert contents(tmp_path) == before


# --- what goes where


def test_output_is_for_machines_where_no_terminal_is(tmp_path: Path) -> None:
    rules = [{"turns": [runs("printf '\\033[31mred\\a'"), says("\x1b[32mgreen")]}]
    flags = small_run(tmp_path, rules=rules)
    code, out, err = run_program(*flags, "--verbose", home=tmp_path, TERM="xterm-256color", COLUMNS="80")
    assert code == 0
    assert not CONTROL.search(out + err)
    assert re.search(r"^\[0:00:\d\d\] 2/2 prompts \(100%\), completed 2", err, re.MULTILINE)
    assert "prompts    2: completed 2" in out
    assert "[B0:P1]" in err


def test_the_json_summary_is_one_object_and_the_command_is_on_stderr(tmp_path: Path) -> None:
    flags = small_run(tmp_path, rules=[{"prompt": "second", "turns": [{"error": {"status": 400}}]}])
    code, out, err = run_program(*flags, "--json_summary", "--quiet", home=tmp_path)
    assert code == 1
    report = json.loads(out)
    assert (report["exit_code"], report["metrics"]["rows"]) == (1, 2)
    assert report["statistics"]["by_status"] == {"completed": 1, "failed": 1}
    assert err == report["resume"] + "\n"
    write_script(tmp_path)
    code, out, _ = resume(err, tmp_path, "--retry=all")
    assert (code, json.loads(out)["statistics"]["by_status"]) == (0, {"completed": 2})


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_plugins_print_is_kept_out_of_stdout(workers: str, tmp_path: Path) -> None:
    (tmp_path / "chatty.py").write_text(
        "import os, sys\nprint('imported')\nos.system('echo child')\nsys.__stdout__.write('written')\n"
        "def check(task): print('checked'); return True\ndef told(task): print('told')\n",
        encoding="utf-8",
    )
    flags = [*small_run(tmp_path), "--success_checker=chatty.py:check", "--on_task_done=chatty.py:told"]
    code, out, err = run_program(*flags, f"--num_workers={workers}", "--json_summary", home=tmp_path)
    assert code == 0, out + err
    assert json.loads(out)["metrics"]["completed"] == 2
    assert "told" in err


def test_a_reader_that_goes_away_changes_nothing(tmp_path: Path) -> None:
    flags = small_run(tmp_path)
    with Program(*flags, home=tmp_path) as program:
        for stream in (program.process.stdout, program.process.stderr):
            assert stream is not None
            stream.close()
        program.process.stdout = program.process.stderr = None
        assert program.process.wait(60) == 0
    assert len(merged(tmp_path / "data/r")) == 2


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_change_nothing(closed: str, tmp_path: Path) -> None:
    call = shlex.join([sys.executable, str(ROOT / "batch_runner.py"), *small_run(tmp_path)])
    done = subprocess.run(["sh", "-c", f"{call} {closed}"], cwd=tmp_path, env=environment(tmp_path), check=False)
    assert done.returncode == 0
    assert len(merged(tmp_path / "data/r")) == 2
    refused = subprocess.run(["sh", "-c", f"{call} {closed}"], cwd=tmp_path, env=environment(tmp_path), check=False)
    assert refused.returncode == 2


def test_the_callers_stdin_is_not_touched(tmp_path: Path) -> None:
    flags = small_run(tmp_path, rules=[{"turns": [runs("cat; read x"), says("done")]}])
    call = shlex.join([sys.executable, str(ROOT / "batch_runner.py"), *flags])
    done = subprocess.run(
        ["sh", "-c", f"{call} >out 2>err; cat"],
        cwd=tmp_path,
        env=environment(tmp_path),
        input="".join(f"{number}\n" for number in range(10)),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == [str(number) for number in range(10)]


def on_a_terminal(home: Path, *flags: str, **variables: str) -> tuple[int, str, str]:
    """Exit code, what the terminal on stderr showed, and stdout."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "batch_runner.py"), *flags],
        cwd=home,
        env=environment(home, COLUMNS="100", LINES="30", **variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if select.select([ours], [], [], 1)[0]:
            try:
                more = os.read(ours, 65536)
            except OSError:  # the other side is closed
                break
            shown += more
    os.close(ours)
    out, _ = process.communicate(timeout=60)
    return process.returncode, shown.decode(), out.decode()


def test_a_terminal_gets_a_live_display_of_prompts(tmp_path: Path) -> None:
    flags = small_run(tmp_path, rules=[{"prompt": "second", "turns": [says("late", delay=1.5)]}])
    code, shown, out = on_a_terminal(tmp_path, *flags, TERM="xterm")
    assert code == 0, shown
    assert "\x1b[" in shown
    assert "1/2 prompts" in shown
    assert "2/2 prompts" in shown
    assert "completed 2" in shown.rpartition("2/2 prompts")[2]
    assert not CONTROL.search(out)


@pytest.mark.parametrize("variables", [{"TERM": "xterm", "NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_that_wants_none_gets_plain_lines(variables: dict[str, str], tmp_path: Path) -> None:
    code, shown, _ = on_a_terminal(tmp_path, *small_run(tmp_path), **variables)
    assert code == 0
    assert "\x1b" not in shown
    assert "2/2 prompts (100%)" in shown
