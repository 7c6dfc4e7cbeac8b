"""The examples as a user runs them: the quickstart in real sandboxes, the settings files and the script."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent.models.scripted import load_script
from batch.settings import load_settings, run_directory

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "datagen-config-examples"
DISCARDED, LIMITED = "compound-interest", "wait-for-file"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(folder: Path, *argv: str, name: str = "first") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "batch_runner.py", "--config", str(EXAMPLES / "quickstart.yaml"), f"--run_name={name}"]
    return subprocess.run(
        [*command, f"--output_dir={folder}", *argv],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("backend", ["local", "bubblewrap"])
def test_the_quickstart_does_what_its_prompts_ask_for(backend: str, tmp_path: Path) -> None:
    done = run(tmp_path, f"--container_backend={backend}", "--output_format=sharegpt,turns")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["task_id"]: row for path in (tmp_path / "first").glob("batch_*.jsonl") for row in lines(path)}
    prompts = [row["id"] for row in lines(EXAMPLES / "quickstart.jsonl")]
    assert set(rows) == set(prompts)
    assert len(rows) >= 12
    failed = {name: row["success_reason"] for name, row in rows.items() if not row["success"] and name != LIMITED}
    assert not failed
    assert {row["environment"]["backend"] for row in rows.values()} == {backend}

    assert (rows[LIMITED]["status"], rows[LIMITED]["api_calls"], rows[LIMITED]["success"]) == ("max_turns", 3, False)
    assert (rows[DISCARDED]["status"], rows[DISCARDED]["reason"]) == ("discarded", "unknown_tool")
    others = {row["status"] for name, row in rows.items() if name not in (LIMITED, DISCARDED)}
    assert others == {"completed"}

    merged = lines(tmp_path / "first" / "trajectories.jsonl")
    assert [row["task_id"] for row in merged] == [name for name in prompts if name != DISCARDED]
    assert all(
        turn["value"].startswith("<think>") for row in merged for turn in row["conversations"] if turn["from"] == "gpt"
    )
    assert "trajectories.jsonl" in done.stdout
    assert not set(done.stdout + done.stderr) & {"\x1b", "\r"}


def test_a_second_quickstart_under_the_same_name_is_refused_and_can_be_resumed(tmp_path: Path) -> None:
    settings = ("--container_backend=local", "--max_samples=2")
    assert run(tmp_path, *settings).returncode == 0
    assert run(tmp_path, *settings).returncode == 2
    assert run(tmp_path, *settings, "--resume").returncode == 0
    assert run(tmp_path, *settings, name="second").returncode == 0


def test_every_prompt_has_one_rule_and_every_rule_a_prompt() -> None:
    script = load_script(EXAMPLES / "quickstart_script.yaml")
    fitting = [
        [rule.fits(row["prompt"], row["id"]) for rule in script.rules] for row in lines(EXAMPLES / "quickstart.jsonl")
    ]
    assert [sum(each) for each in fitting] == [1] * len(fitting)
    assert [sum(each) for each in zip(*fitting, strict=True)] == [1] * len(script.rules)


@pytest.mark.parametrize("name", ["quickstart.yaml", "terminal_tasks.yaml"])
def test_the_settings_files_are_understood(name: str) -> None:
    settings, action = load_settings([f"--config={EXAMPLES / name}", "--run_name=r"], {})
    assert action == "run"
    assert run_directory(settings) == Path("data/r")


def test_the_script_starts_and_resumes_the_run_of_terminal_tasks(tmp_path: Path) -> None:
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_bytes((EXAMPLES / "quickstart.jsonl").read_bytes())
    settings = ["--model=scripted:datagen-config-examples/quickstart_script.yaml", "--container_backend=local"]
    settings += [f"--dataset_file={dataset}", f"--output_dir={tmp_path}", "--max_samples=3", "--image="]
    settings += ["--price_in=1", "--price_out=1"]  # a script has none
    for _ in range(2):
        done = subprocess.run(
            ["sh", str(EXAMPLES / "run_terminal_tasks.sh"), *settings],
            env={**os.environ, "PYTHON": sys.executable},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert len(lines(tmp_path / "terminal_tasks" / "trajectories.jsonl")) == 3


def test_the_script_and_its_settings_work_as_they_are_delivered(tmp_path: Path) -> None:
    for name in ("batch_runner.py", "toolset_distributions.py", "datagen-config-examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "look"}\n', encoding="utf-8")
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    done = subprocess.run(
        ["sh", str(tmp_path / "datagen-config-examples/run_terminal_tasks.sh"), "--dry_run", *NO_ENGINE],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OPENROUTER_API_KEY": "a-key-for-the-example"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "openrouter" in done.stdout


NO_ENGINE = ("--container_backend=local", "--image=")


@pytest.mark.parametrize("code", [0, 1, 2])
def test_make_run_names_the_files_and_passes_a_failure_on(code: int, tmp_path: Path) -> None:
    (tmp_path / "Makefile").symlink_to(ROOT / "Makefile")
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "requirements.lock").touch()
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        '#!/bin/sh\n[ "$1" != -c ] || { echo local; exit 0; }\n'
        f'[ {code} = 2 ] || {{ mkdir -p "data/$5" && touch "data/$5/trajectories.jsonl"; }}\nexit {code}\n',
        encoding="utf-8",
    )
    python.chmod(0o755)
    (tmp_path / ".venv/run.stamp").touch()
    done = subprocess.run(["make", "run"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (2 if code else 0), done.stdout + done.stderr
    assert ("trajectories: data/quickstart-" in done.stdout) == (code != 2)
    assert (f"exit code {code}" in done.stderr) == bool(code)
