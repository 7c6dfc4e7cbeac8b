"""mini_swe_runner as a user runs it: its modes, the sentinel, patches on every way out, stop and go on."""

import asyncio
import json
import os
import shlex
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from agent.row import Turn
from agent.trajectory import validate
from tests.contract.engine_front import engine_front
from tests.contract.engine_stub import stub_engine
from tests.e2e.program import Program, journal, merged, read_lines, run_program, wait_until, write_dataset
from tests.e2e.test_sandboxes import processes_with
from tests.made_repositories import SUMS, git, make

SENTINEL = "MINI_SWE_AGENT_FINAL_OUTPUT"
SCRIPT = "mini_swe_runner.py"
EDIT = "echo more >>notes.txt"
END = f"echo {SENTINEL}; echo all done"


def turns(*commands: str, **more: Any) -> list[dict[str, Any]]:
    return [
        {"reasoning": "so", "tool_calls": [{"name": "terminal", "arguments": {"command": command}}], **more}
        for command in commands
    ]


def model(home: Path, *steps: dict[str, Any], rules: Sequence[Mapping[str, Any]] = ()) -> str:
    """The flag for a model that takes these steps."""
    default = list(steps) or turns(EDIT, END)
    (home / "script.yaml").write_text(yaml.safe_dump({"rules": list(rules), "default": {"turns": default}}))
    return "--model=scripted:script.yaml"


def swe(home: Path, *flags: str, **variables: Any) -> tuple[int, str, str]:
    env = [] if any(flag.startswith("--env=") for flag in flags) else ["--env=local"]
    return run_program(*env, *flags, home=home, script=SCRIPT, **variables)


def predictions(run_dir: Path) -> dict[str, str]:
    rows = read_lines(run_dir / "all_preds.jsonl")
    assert all(list(row) == ["instance_id", "model_name_or_path", "model_patch"] for row in rows)
    assert len({row["instance_id"] for row in rows}) == len(rows)
    return {row["instance_id"]: row["model_patch"] for row in rows}


def instances(home: Path, count: int, **more: Any) -> list[str]:
    """Flags for so many instances of one repository, which comes out of a cache."""
    row = make(SUMS, home / "made")
    rows = [{**row, "instance_id": f"made__sums-{number}", **more} for number in range(count)]
    write_dataset(home / "instances.jsonl", rows)
    return ["--dataset=instances.jsonl", "--repo_cache=cache"]


def check(home: Path, patch: str) -> None:
    """It applies to a clean checkout of the base commit."""
    assert patch
    git(home / "made" / "made__sums", "apply", "--check", "-", stdin=patch.encode())


# --- modes


def test_one_task_prints_its_answer_and_writes_one_row(tmp_path: Path) -> None:
    code, out, err = swe(tmp_path, "--task=Say more.", "--output=run", model(tmp_path))
    assert (code, out) == (0, "all done\n"), err
    (row,) = journal(tmp_path / "run")
    assert merged(tmp_path / "run") == [row]
    assert (row["completed"], row["final_response"], row["api_calls"]) == (True, "all done", 2)
    system, human = (turn["value"] for turn in row["conversations"][:2])
    assert human == "Say more."
    assert SENTINEL not in system
    assert row["tools_offered"] == "terminal"
    assert predictions(tmp_path / "run") == {"task_0": ""}


def test_a_file_of_prompts_makes_rows_of_the_batch_runners_form(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "a", "prompt": "one", "files": {"in.txt": "in"}, "setup": "echo set >>in.txt"},
        {"task": "two", "task_id": "b"},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows) + "\n[x] a plain line\n"
    (tmp_path / "prompts.txt").write_text(lines)
    steps = turns("cat in.txt", END)
    code, _, err = swe(tmp_path, "--prompts_file=prompts.txt", "--output_file=out.jsonl", model(tmp_path, *steps))
    assert code == 0, err
    run_dir = tmp_path / "data" / "out"
    assert (tmp_path / "out.jsonl").read_bytes() == (run_dir / "trajectories.jsonl").read_bytes()
    found = {row["task_id"]: row for row in merged(run_dir)}
    assert [row["conversations"][1]["value"] for row in found.values()] == ["one", "two", "[x] a plain line"]
    assert '"inset\\n"' in found["a"]["conversations"][3]["value"]
    assert list(predictions(run_dir)) == ["a", "b", "task_2"]

    write_dataset(tmp_path / "batch.jsonl", rows[:1])
    flags = ["--dataset_file=batch.jsonl", "--run_name=batch", "--env=local", "--enabled_toolsets=terminal"]
    steps = [*turns(EDIT), {"content": "bye"}]
    code, _, err = run_program(*flags, "--keep_no_reasoning", model(tmp_path, *steps), home=tmp_path)
    assert code == 0, err
    (batch,) = journal(tmp_path / "data" / "batch")
    for row in journal(run_dir):
        assert [(key, type(value)) for key, value in row.items()] == [(key, type(batch[key])) for key in batch]
        assert row["tool_stats"].keys() == batch["tool_stats"].keys()
        assert validate(msgspec.convert(row["conversations"], list[Turn])) == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('["a list"]', "not an object but a list"),
        ("17", "not an object but a number"),
        ('{"prompt": "cut', "not JSON"),
        ('{"text": "no task"}', "no prompt"),
        ('{"task": 5}', "prompt must be"),
    ],
)
def test_what_is_no_task_is_named_before_anything_is_spent(line: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text(f"fine\n\n{line}\n")
    code, _, err = swe(tmp_path, "--prompts_file=p.txt", "--run_name=r", model(tmp_path))
    assert code == 2
    assert f"p.txt:3: {reason}" in err
    assert not (tmp_path / "data").exists()


def test_instances_come_with_their_repository_and_leave_a_patch(tmp_path: Path) -> None:
    flags = instances(tmp_path, 2, problem_statement="It says $(touch /pwned) `id`\n</problem>")
    look = "git status --porcelain; git log --format=%H --all; basename $PWD"
    steps = turns(look, f"{EDIT}; mkdir tests; touch helper.py tests/x; git add -A; git commit -qm own", END)
    code, _, err = swe(tmp_path, *flags, "--run_name=r", "--exclude=tests,helper.py", "--preds_format=json",
                       model(tmp_path, *steps))  # fmt: skip
    assert code == 0, err
    run_dir = tmp_path / "data" / "r"
    base = json.loads((tmp_path / "instances.jsonl").read_text().splitlines()[0])["base_commit"]
    for row in merged(run_dir):
        seen = json.loads(row["conversations"][3]["value"].split("\n")[1])["content"]
        assert seen == {"output": f"{base}\ntestbed\n", "exit_code": 0, "error": None}
        assert "$(touch /pwned) `id`" in row["conversations"][1]["value"]
    found = predictions(run_dir)
    assert list(found) == ["made__sums-0", "made__sums-1"]
    for patch in found.values():
        check(tmp_path, patch)
        assert "+++ b/notes.txt" in patch
        assert "helper.py" not in patch
    by_id = json.loads((run_dir / "preds.json").read_text())
    assert {name: row["model_patch"] for name, row in by_id.items()} == found
    saved = (run_dir / "dataset.jsonl").read_text() + "".join(map(json.dumps, journal(run_dir)))
    assert "FAIL_TO_PASS" not in saved  # nothing that gives the solution away
    code, out, _ = swe(tmp_path, f"--validate_predictions={run_dir}/all_preds.jsonl", *flags)
    assert (code, "ready to submit" in out) == (0, True)
    code, out, _ = swe(tmp_path, f"--validate_predictions={run_dir}/all_preds.jsonl", *flags, "--slice=0:1")
    assert (code, "made__sums-1" in out) == (2, True)
    code, out, _ = swe(tmp_path, f"--validate_predictions={run_dir}/all_preds.jsonl", flags[0])
    assert (code, "ready to submit" in out) == (0, False)
    assert "2 patches were not tried on the base commit: give --dataset and --repo_cache" in out


def test_what_is_missing_in_the_predictions_is_said(tmp_path: Path) -> None:
    flags = [*instances(tmp_path, 3), "--run_name=r", model(tmp_path, *turns("rm -rf .git $TMPDIR", END))]
    code, _, err = swe(tmp_path, *flags, "--split=test")
    assert code == 0, err
    assert f"notice: --split test: no row of {tmp_path}/instances.jsonl has a split" in err
    assert "no patch could be taken of 3 rows, such as made__sums-0: the repository is gone" in err
    metrics = json.loads((tmp_path / "data" / "r" / "metrics.json").read_bytes())
    assert metrics["patches_not_taken"] == 3
    for path in (tmp_path / "data" / "r" / "patches").iterdir():
        path.unlink()
    code, _, err = swe(tmp_path, "--finalize", "--run_name=r")
    assert (code, "no file in" in err) == (0, False), "it is said already"
    code, _, err = swe(tmp_path, *flags, "--slice=0:1", "--resume")
    assert code == 0, err
    assert "2 rows of this run are not in the predictions" in err
    assert list(predictions(tmp_path / "data" / "r")) == ["made__sums-0"]
    assert "has a split" not in err


def test_a_patch_that_is_gone_is_no_empty_prediction_unnoticed(tmp_path: Path) -> None:
    code, _, err = swe(tmp_path, *instances(tmp_path, 3), "--run_name=r", model(tmp_path))
    assert (code, "warning" in err) == (0, False), err
    (tmp_path / "data" / "r" / "patches" / "made__sums-1.1.diff").unlink()
    code, _, err = swe(tmp_path, "--finalize", "--run_name=r")
    assert code == 0, err
    assert "1 row has no file in data/r/patches, such as made__sums-1: no patch is predicted" in err
    assert [bool(patch) for patch in predictions(tmp_path / "data" / "r").values()] == [True, False, True]


@pytest.mark.parametrize("output", ["instances.jsonl", "data/r/run.json", "data/other/all_preds.jsonl"])
def test_a_copy_of_the_rows_replaces_nothing_that_is_needed(output: str, tmp_path: Path) -> None:
    asked = instances(tmp_path, 1)
    (tmp_path / "data" / "other").mkdir(parents=True)
    for name in ("run.json", "all_preds.jsonl"):
        (tmp_path / "data" / "other" / name).write_text("{}\n")
    before = {path: path.read_bytes() for path in tmp_path.glob("data/*/*")} | {
        tmp_path / "instances.jsonl": (tmp_path / "instances.jsonl").read_bytes()
    }
    for more in ([], ["--dry_run"]):
        code, _, err = swe(tmp_path, *asked, "--run_name=r", f"--output_file={output}", model(tmp_path), *more)
        assert (code, f"--output_file {output}" in err) == (2, True), err
    assert not journal(tmp_path / "data" / "r")
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("flags", [[], ["--dry_run"]])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"problem_statement": ""}, "instances.jsonl:1: made__sums-0 has no problem_statement"),
        ({"base_commit": "main"}, "made__sums-0: base_commit 'main' is not 40 hex digits"),
        ({"repo": "../x"}, "made__sums-0: repo '../x' is not of the form owner/name"),
    ],
)
def test_an_instance_that_cannot_be_worked_on_is_named(
    fault: dict[str, str], said: str, flags: list[str], tmp_path: Path
) -> None:
    code, _, err = swe(tmp_path, *instances(tmp_path, 1, **fault), "--run_name=r", model(tmp_path), *flags)
    assert (code, said in err) == (2, True), err
    assert not (tmp_path / "data").exists(), "nothing is left of it"


def test_what_the_setup_made_is_no_part_of_the_patch(tmp_path: Path) -> None:
    asked = instances(tmp_path, 1, setup="seq 9 >built.txt; echo set >>sums.py")
    steps = turns("echo own >>built.txt; echo more >>notes.txt", END)
    code, _, err = swe(tmp_path, *asked, "--run_name=r", model(tmp_path, *steps))
    assert code == 0, err
    patch = predictions(tmp_path / "data" / "r")["made__sums-0"]
    assert [line for line in patch.splitlines() if line[0] == "+"] == [
        "+++ b/built.txt", "+own", "+++ b/notes.txt", "+more"
    ]  # fmt: skip
    (row,) = journal(tmp_path / "data" / "r")
    assert "does not apply to the commit alone" in row["error"], "built.txt is not there where it is submitted"


def test_a_setup_may_go_elsewhere_and_commit(tmp_path: Path) -> None:
    setup = (
        "mkdir sub; cd sub; echo 1 >made; export SET=yes; git add -A; git -c user.name=n -c user.email=e commit -qm s"
    )
    steps = turns("rm -r sub; echo $SET more >>notes.txt; rm -rf .git", END)
    code, _, err = swe(tmp_path, *instances(tmp_path, 1, setup=setup), "--run_name=r", model(tmp_path, *steps))
    assert code == 0, err
    patch = predictions(tmp_path / "data" / "r")["made__sums-0"]
    check(tmp_path, patch)
    assert [line for line in patch.splitlines() if line[0] in "+-"][1:] == ["+++ b/notes.txt", "+yes more"]
    assert [row["error"] for row in journal(tmp_path / "data" / "r")] == [""]


@pytest.mark.parametrize("setup", ["rm -rf .git", "rm -rf .git; git init -q"])
def test_an_instance_without_its_base_commit_costs_nothing(setup: str, tmp_path: Path) -> None:
    code, _, err = swe(tmp_path, *instances(tmp_path, 1, setup=setup), "--run_name=r", model(tmp_path))
    assert code == 1, err
    (row,) = journal(tmp_path / "data" / "r")
    assert (row["error_class"], row["requests"]) == ("setup_failed", 0)
    assert "no patch could be taken of" in row["error"]


def test_a_prompt_is_no_instance_and_may_have_an_instances_id(tmp_path: Path) -> None:
    row = {"instance_id": "own-1", "prompt": "x", "swe": {"repo": "o/r", "setup": "exit 1", "base_commit": "1" * 40}}
    write_dataset(tmp_path / "p.jsonl", [row, {"task": "y", "instance_id": "own-2", "id": "other"}])
    code, _, err = swe(tmp_path, "--prompts_file=p.jsonl", "--run_name=r", model(tmp_path))
    assert code == 0, err
    assert predictions(tmp_path / "data" / "r") == {"own-1": "", "other": ""}


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        (400, [{"error": {"status": 400}}], True),
        (400, turns("git checkout -q .", END), False),
        (401, [{"error": {"status": 400}}], True),
    ],
)
def test_a_retry_that_ends_worse_takes_no_patch_away(
    first: int, second: list[dict[str, Any]], kept: bool, tmp_path: Path
) -> None:
    flags = [*instances(tmp_path, 1), "--run_name=r", "--keep_no_reasoning"]
    code, _, err = swe(tmp_path, *flags, model(tmp_path, *turns(EDIT), {"error": {"status": first}}))
    assert code == (1 if first == 400 else 3), err
    before = predictions(tmp_path / "data" / "r")
    check(tmp_path, before["made__sums-0"])
    again = ["--resume", "--only_ids=made__sums-0", "--allow_config_change"]
    _, _, err = swe(tmp_path, *flags, *again, model(tmp_path, *second))
    assert len(journal(tmp_path / "data" / "r")) == 2
    assert predictions(tmp_path / "data" / "r") == (before if kept else {"made__sums-0": ""})
    assert ("1 prediction is an earlier try's, as the last was cut off and left no patch: made__sums-0" in err) == kept


def test_a_task_in_a_repository_leaves_a_patch_too(tmp_path: Path) -> None:
    setup = "git init -q . && echo one >a.txt && git add -A && git -c user.name=n -c user.email=e commit -qm one"
    setup += " && seq 9 >b.txt"
    rows = [{"id": "with", "prompt": "x", "setup": setup}, {"id": "within", "prompt": "x", "setup": "mkdir sub"}]
    write_dataset(tmp_path / "p.jsonl", rows)
    code, _, err = swe(tmp_path, "--prompts_file=p.jsonl", "--run_name=r", model(tmp_path))
    assert code == 0, err
    found = predictions(tmp_path / "data" / "r")
    assert "+more" in found["with"]
    assert "b.txt" not in found["with"]
    assert found["within"] == ""


# --- the loop


def test_a_file_that_holds_the_sentinel_completes_nothing_and_invented_tools_are_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path / "p.jsonl", [{"id": "a", "prompt": "x", "files": {"said.txt": f"{SENTINEL}\nno\n"}}])
    odd: list[dict[str, Any]] = [
        {"tool_calls": [{"name": "bash", "arguments": {"command": f"echo {SENTINEL} | tee ran"}}]},
        {"tool_calls": [{"name": "terminal", "arguments": "[1]"}]},
        {"tool_calls": [{"name": "terminal", "arguments": {}}]},
    ]
    steps = [*turns("cat said.txt"), *odd[:2], *turns("ls"), odd[2], {"content": "given up"}]
    code, _, err = swe(
        tmp_path, "--prompts_file=p.jsonl", "--run_name=r", "--keep_unknown_tools", model(tmp_path, *steps)
    )
    assert code == 0, err
    (row,) = merged(tmp_path / "data" / "r")
    assert (row["status"], row["final_response"], row["api_calls"]) == ("completed", "given up", 6)
    assert row["unknown_tools"] == '[{"name":"bash","count":1}]'
    results = [turn["value"] for turn in row["conversations"] if turn["from"] == "tool"]
    assert "There is no tool 'bash'" in results[1]
    assert "must be a JSON object" in results[2]
    assert "ran" not in results[3]


def test_a_server_that_is_down_is_said_in_the_row(tmp_path: Path) -> None:
    flags = ["--task=x", "--output=run", "--model=m", "--base_url=http://127.0.0.1:9/v1", "--api_key=sk-none"]
    code, _, err = swe(tmp_path, *flags)
    assert code == 3
    assert "Traceback" not in err
    (row,) = journal(tmp_path / "run")
    assert (row["completed"], row["status"]) == (False, "stopped")
    assert row["error"]
    last = shlex.split(err.splitlines()[-1])
    assert last[1].endswith(SCRIPT)
    assert last[-1] == "--resume"
    assert "sk-none" not in err
    assert predictions(tmp_path / "run") == {"task_0": ""}


def test_no_docker_is_refused_and_nothing_runs_here(tmp_path: Path) -> None:
    for flags in (["--task=x"], instances(tmp_path, 1)):
        steps = model(tmp_path, *turns(f"touch {tmp_path}/ran", END))
        code, _, err = swe(tmp_path, *flags, "--output=run", steps, "--env=docker", DOCKER_HOST=f"unix://{tmp_path}/no")
        assert (code, "docker" in err, "Traceback" in err) == (2, True, False)
        assert not (tmp_path / "ran").exists()


def test_instances_with_images_are_refused_where_there_are_none(tmp_path: Path) -> None:
    flags = instances(tmp_path, 1)[:1]
    code, _, err = swe(tmp_path, *flags, "--run_name=r", model(tmp_path))
    assert (code, "--repo_cache" in err) == (2, True)


# --- patches on every way out


@pytest.mark.parametrize(
    ("steps", "flags", "status", "code"),
    [
        (turns(EDIT, "ls", "ls"), ["--max_turns=2"], "max_turns", 0),
        (turns(f"{EDIT}; sleep 60"), ["--timeout=4"], "timeout", 0),
        ([*turns(EDIT), {"error": {"status": 400}}], [], "failed", 1),
        ([*turns(EDIT), {"error": {"status": 401}}], [], "stopped", 3),
        ([*turns(EDIT), {"content": "", "tool_calls": [{"name": "no"}]}, *[{"tool_calls": [{"name": "no"}]}] * 2], [],
         "discarded", 0),
    ],
)  # fmt: skip
def test_a_patch_is_saved_however_the_row_ended(
    steps: list[dict[str, Any]], flags: list[str], status: str, code: int, tmp_path: Path
) -> None:
    asked = instances(tmp_path, 1)
    found, _, err = swe(tmp_path, *asked, "--run_name=r", *flags, model(tmp_path, *steps))
    assert found == code, err
    (row,) = journal(tmp_path / "data" / "r")
    assert row["status"] == status, row["error"]
    (patch,) = predictions(tmp_path / "data" / "r").values()
    check(tmp_path, patch)


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_saves_the_patch_and_a_resume_goes_on(times: int, tmp_path: Path) -> None:
    asked = instances(tmp_path, 2)
    seconds = 2 if times == 1 else 60
    steps = turns(f"{EDIT}; [ -e {tmp_path}/on ] || {{ touch {tmp_path}/begun; sleep {seconds}; }}", END)
    flags = [*asked, "--run_name=r", "--env=local", "--concurrency=1", model(tmp_path, *steps)]
    with Program(*flags, home=tmp_path, script=SCRIPT) as program:
        wait_until((tmp_path / "begun").exists)
        for _ in range(times):
            program.interrupt()
            time.sleep(0.5)  # two at once would be one
        code, out, err = program.end()
    assert code == 130, err
    run_dir = tmp_path / "data" / "r"
    stopped = predictions(run_dir)
    assert list(stopped) == ["made__sums-0", "made__sums-1"]
    check(tmp_path, stopped["made__sums-0"])
    assert stopped["made__sums-1"] == ""
    last = shlex.split(out.splitlines()[-1])
    assert last[1].endswith(SCRIPT)
    (tmp_path / "on").touch()
    code, _, err = run_program(*last[2:], home=tmp_path, script=SCRIPT)
    assert code == 0, err
    for patch in predictions(run_dir).values():
        check(tmp_path, patch)


# --- kill and go on


def test_a_run_that_was_killed_ends_as_one_that_was_not(tmp_path: Path) -> None:
    asked = instances(tmp_path, 8)
    steps = turns(EDIT, END, delay=0.2)
    flags = [*asked, "--env=local", "--concurrency=2", "--num_workers=2", "--batch_size=2", model(tmp_path, *steps)]
    code, _, err = run_program(*flags, "--run_name=whole", home=tmp_path, script=SCRIPT)
    assert code == 0, err
    killed = tmp_path / "data" / "killed"
    for ended in (2, 4):
        with Program(*flags, "--run_name=killed", "--resume", home=tmp_path, script=SCRIPT) as program:
            wait_until(lambda: len(journal_ids(killed)) >= ended)  # noqa: B023 - at once
            program.kill_all()
    before = journal_ids(killed)
    code, _, err = run_program(*flags, "--run_name=killed", "--resume", home=tmp_path, script=SCRIPT)
    assert code == 0, err
    after = journal_ids(killed)
    assert after[: len(before)] == before or set(before) <= set(after)
    assert sorted(after) == [f"made__sums-{number}" for number in range(8)]  # nothing lost, nothing twice
    assert predictions(killed) == predictions(tmp_path / "data" / "whole")


def journal_ids(run_dir: Path) -> list[str]:
    whole = (path.read_bytes().rpartition(b"\n")[0].split(b"\n") for path in sorted(run_dir.glob("batch_*.jsonl")))
    return [json.loads(line)["task_id"] for lines in whole for line in lines if line]


# --- docker


def remove_image(image: str) -> None:
    subprocess.run(["docker", "rmi", image], capture_output=True, check=False)


async def test_twenty_instances_on_four_workers_pull_one_image_once(tmp_path: Path) -> None:
    image = f"mini-swe-test-{uuid.uuid4().hex[:8]}:1"
    row = make(SUMS, tmp_path / "made")
    rows = [{**row, "instance_id": f"made__sums-{number}", "image": image, "cwd": "/work"} for number in range(20)]
    setup = "git init -q . && echo one >a.txt && git add -A && git -c user.name=n -c user.email=e commit -qm one"
    write_dataset(tmp_path / "instances.jsonl", [{**each, "base_commit": "", "setup": setup} for each in rows])
    flags = ["--dataset=instances.jsonl", "--run_name=r", "--num_workers=4", "--concurrency=8", "--batch_size=2"]
    steps = turns(EDIT, END)
    try:
        async with engine_front(tmp_path / "engine", "batch-runner-test:py") as front:
            code, _, err = await asyncio.to_thread(
                swe, tmp_path, *flags, model(tmp_path, *steps), "--env=docker",
                DOCKER_HOST=f"unix://{tmp_path}/engine",
            )  # fmt: skip
    finally:
        await asyncio.to_thread(remove_image, image)
    assert code == 0, err
    assert front.pulls == [image]
    found = predictions(tmp_path / "data" / "r")
    assert len(found) == 20
    assert all("+more" in patch for patch in found.values())
    assert {row["environment"]["image"] for row in journal(tmp_path / "data" / "r")} == {image}


async def test_images_that_cannot_be_had_are_named_before_a_model_is_asked(tmp_path: Path) -> None:
    row = make(SUMS, tmp_path / "made")
    images = {"made__sums-1": "none:1", "made__sums-2": "here:1"}
    write_dataset(tmp_path / "d.jsonl", [{**row, "instance_id": name, "image": images[name]} for name in images])
    flags = ["--dataset=d.jsonl", "--run_name=r", "--env=docker", "--prefetch", model(tmp_path)]
    async with stub_engine(tmp_path / "engine") as stub:
        code, _, err = await asyncio.to_thread(swe, tmp_path, *flags, DOCKER_HOST=f"unix://{tmp_path}/engine")
    assert code == 2
    assert "1 image cannot be had:\nnone:1: " in err
    assert sorted(stub.pulls) == ["here:1", "none:1"]
    assert not journal(tmp_path / "data" / "r")


# --- evaluation


def test_an_evaluation_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    mark = f"30{os.getpid()}"
    wait = f"touch {tmp_path}/begun; [ -e {tmp_path}/on ] || sleep {mark}; python3 -m pytest -rA tests"
    asked = instances(tmp_path, 2, test_command=wait)
    commands = turns("sed -i 's/numbers\\[1:\\]/numbers/' sums.py", END)
    flags = [*asked, "--run_name=r", "--env=local", "--evaluate", model(tmp_path, *commands)]
    with Program(*flags, home=tmp_path, script=SCRIPT) as program:
        wait_until((tmp_path / "begun").exists)
        program.interrupt()
        code, out, err = program.end()
    assert (code, "Traceback" in err) == (130, False), err
    assert not processes_with(mark)
    last = shlex.split(out.splitlines()[-1])
    (tmp_path / "on").touch()
    code, out, err = run_program(*last[2:], home=tmp_path, script=SCRIPT)
    assert code == 0, err
    assert "nothing is left to run" in err
    assert "evaluated  resolved 2" in out
    metrics = json.loads((tmp_path / "data" / "r" / "metrics.json").read_bytes())
    assert metrics["evaluation"]["resolved"] == 2

    run_dir = tmp_path / "data" / "r"
    told = (run_dir / "evaluation.json").read_bytes()
    (tmp_path / "elsewhere").mkdir()
    flags = ["--finalize", "--evaluate", f"--output={run_dir}"]
    code, out, err = swe(tmp_path / "elsewhere", *flags)
    assert (code, "evaluated  resolved 2" in out) == (0, True), err
    code, out, err = swe(tmp_path, "--finalize", "--run_name=r")
    assert (code, "evaluated  resolved 2" in out) == (0, True), err
    assert (run_dir / "evaluation.json").read_bytes() == told
    patch = next(run_dir.glob("patches/*sums-0*"))
    patch.write_bytes(patch.read_bytes() + b"\n")
    code, out, err = swe(tmp_path, "--finalize", "--run_name=r")
    assert (code, "evaluated  resolved 1" in out) == (0, True), err
    assert "evaluation.json: 1 verdict on other patches left out" in err
    summary = json.loads((run_dir / "evaluation.json").read_bytes())
    assert (summary["resolved_ids"], summary["incomplete_ids"]) == (["made__sums-1"], ["made__sums-0"])
