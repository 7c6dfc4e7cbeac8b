"""mini_swe_runner as a user runs it: its modes, the sentinel, patches on every way out, stop and go on."""

import asyncio
import json
import os
import shlex
import shutil
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
from tests.e2e.program import ROOT, Program, journal, merged, read_lines, run_program, wait_until, write_dataset
from tests.e2e.test_sandboxes import processes_with
from tests.made_repositories import SUMS, git, make

SENTINEL = "MINI_SWE_AGENT_FINAL_OUTPUT"
SCRIPT = "mini_swe_runner.py"
EDIT = "echo more >>notes.txt"
USED = {"input_tokens": 10, "output_tokens": 1}
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


class Ran:
    """One run of instances that each go their own way, and what it left. Read only: `copied` is for the rest."""

    def __init__(self, home: Path) -> None:
        self.home = home
        ways: list[tuple[str, list[dict[str, Any]]]] = [
            *[("", turns(EDIT, END))] * 3,
            (SET_UP, turns("echo own >>built.txt; echo more >>notes.txt", END)),
            (COMMITTING, turns("rm -r sub; echo $SET more >>notes.txt; rm -rf .git", END)),
            *[(setup, turns(EDIT, END)) for setup in ("rm -rf .git", "rm -rf .git; git init -q")],
            (LINKING, turns("echo own >sub/new", END)),
            ("", turns(f"{EDIT}; rm -rf .git $TMPDIR", END)),
            ("", turns(f"{EDIT}; mkfifo .gitattributes .git/objects/info/alternates", END)),
        ]
        row = make(SUMS, home / "made")
        rows = [{**row, "instance_id": f"made__sums-{number}", "setup": way[0]} for number, way in enumerate(ways)]
        write_dataset(home / "instances.jsonl", rows)
        rules = [{"task": f"-{number}$", "turns": way[1]} for number, way in enumerate(ways)]
        self.flags = ["--dataset=instances.jsonl", "--repo_cache=cache", "--run_name=r", model(home, rules=rules)]
        self.code, _, self.err = swe(home, *self.flags, "--split=test")
        self.directory = home / "data" / "r"
        self.rows = {int(row["task_id"].rpartition("-")[2]): row for row in journal(self.directory)}
        self.patches = list(predictions(self.directory).values())

    def copied(self, home: Path) -> Path:
        """The run directory of a copy of all of it in `home`."""
        shutil.copytree(self.home, home, dirs_exist_ok=True, symlinks=True)
        return home / "data" / "r"


SET_UP = "seq 9 >built.txt; echo set >>sums.py"
COMMITTING = (
    "mkdir sub; cd sub; echo 1 >made; export SET=yes; git add -A; git -c user.name=n -c user.email=e commit -qm s"
)

_COMMIT = "-c user.name=n -c user.email=e commit -q --allow-empty -m s"
_DECLARE = "git config -f .gitmodules submodule.sub.path sub"
LINKING = f"git init -q sub; git -C sub {_COMMIT}; {_DECLARE}; git add -A; git {_COMMIT}"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    found = Ran(tmp_path_factory.mktemp("ran"))
    assert found.code == 1, found.err
    assert len(found.rows) == 10
    return found


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


def test_what_is_no_task_is_named_before_anything_is_spent(tmp_path: Path) -> None:
    bad = {
        '["a list"]': "not an object but a list",
        "17": "not an object but a number",
        '{"prompt": "cut': "not JSON",
        '{"text": "no task"}': "no prompt",
        '{"task": 5}': "prompt must be",
    }
    (tmp_path / "p.txt").write_text("fine\n\n" + "\n".join(bad) + "\n")
    code, _, err = swe(tmp_path, "--prompts_file=p.txt", "--run_name=r", model(tmp_path))
    assert code == 2
    for number, reason in enumerate(bad.values(), 3):
        assert f"p.txt:{number}: {reason}" in err
    assert not (tmp_path / "data").exists()


def test_instances_come_with_their_repository_and_leave_a_patch(tmp_path: Path) -> None:
    flags = instances(tmp_path, 2, problem_statement="It says $(touch /pwned) `id`\n</problem>")
    look = "git status --porcelain; git log --format=%H --all; basename $PWD"
    steps = turns(look, f"{EDIT}; mkdir tests; touch helper.py tests/x; git add -A; git commit -qm own", END)
    code, _, err = swe(tmp_path, *flags, "--run_name=r", "--exclude=tests,helper.py", "--preds_format=json",
                       model(tmp_path, *steps))  # fmt: skip
    assert (code, "warning" in err) == (0, False), err
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


def test_what_is_missing_in_the_predictions_is_said(ran: Ran, tmp_path: Path) -> None:
    assert f"notice: --split test: no row of {ran.home}/instances.jsonl has a split" in ran.err
    assert "no patch could be taken of 1 row, such as made__sums-7: " in ran.err
    assert ran.rows[7]["error"].startswith("the patch could not be taken: ")
    assert json.loads((ran.directory / "metrics.json").read_bytes())["patches_not_taken"] == 1
    run_dir = ran.copied(tmp_path)
    (run_dir / "patches" / "made__sums-7.1.diff").unlink()
    code, _, err = swe(tmp_path, "--finalize", "--run_name=r")
    assert (code, "no file in" in err) == (1, False), "it is said already"
    (run_dir / "patches" / "made__sums-1.1.diff").unlink()
    code, _, err = swe(tmp_path, "--finalize", "--run_name=r")
    assert code == 1, err
    assert "1 row has no file in data/r/patches, such as made__sums-1: no patch is predicted" in err
    assert [bool(patch) for patch in predictions(run_dir).values()][:3] == [True, False, True]
    code, _, err = swe(tmp_path, *ran.flags, "--slice=0:1", "--resume")
    assert code == 0, err
    assert "9 rows of this run are not in the predictions" in err
    assert list(predictions(run_dir)) == ["made__sums-0"]
    assert "has a split" not in err


def test_a_copy_of_the_rows_replaces_nothing_that_is_needed(tmp_path: Path) -> None:
    asked = instances(tmp_path, 1)
    (tmp_path / "data" / "other").mkdir(parents=True)
    for name in ("run.json", "all_preds.jsonl"):
        (tmp_path / "data" / "other" / name).write_text("{}\n")
    before = {path: path.read_bytes() for path in tmp_path.glob("data/*/*")} | {
        tmp_path / "instances.jsonl": (tmp_path / "instances.jsonl").read_bytes()
    }
    for output in ("instances.jsonl", "data/r/run.json", "data/other/all_preds.jsonl"):
        for more in ([], ["--dry_run"]) if output != "data/r/run.json" else ([],):
            code, _, err = swe(tmp_path, *asked, "--run_name=r", f"--output_file={output}", model(tmp_path), *more)
            assert (code, f"--output_file {output}" in err) == (2, True), err
    assert not journal(tmp_path / "data" / "r")
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(
    ("fault", "said", "flags"),
    [
        ({"problem_statement": ""}, "instances.jsonl:1: made__sums-0 has no problem_statement", ["--dry_run"]),
        ({"base_commit": "main"}, "made__sums-0: base_commit 'main' is not 40 hex digits", []),
        ({"repo": "../x"}, "made__sums-0: repo '../x' is not of the form owner/name", []),
        ({"repo": "../x"}, "made__sums-0: repo '../x' is not of the form owner/name", ["--dry_run"]),
    ],
)
def test_an_instance_that_cannot_be_worked_on_is_named(
    fault: dict[str, str], said: str, flags: list[str], tmp_path: Path
) -> None:
    code, _, err = swe(tmp_path, *instances(tmp_path, 1, **fault), "--run_name=r", model(tmp_path), *flags)
    assert (code, said in err) == (2, True), err
    assert not (tmp_path / "data").exists(), "nothing is left of it"


def test_what_the_setup_made_is_no_part_of_the_patch(ran: Ran) -> None:
    assert [line for line in ran.patches[3].splitlines() if line[0] == "+"] == [
        "+++ b/built.txt", "+own", "+++ b/notes.txt", "+more"
    ]  # fmt: skip
    assert "does not apply to the commit alone" in ran.rows[3]["error"], "built.txt is not there where it is submitted"


def test_a_setup_may_go_elsewhere_and_commit(ran: Ran) -> None:
    check(ran.home, ran.patches[4])
    assert [line for line in ran.patches[4].splitlines() if line[0] in "+-"][1:] == ["+++ b/notes.txt", "+yes more"]
    assert ran.rows[4]["error"] == ""


def test_an_instance_without_its_base_commit_costs_nothing(ran: Ran) -> None:
    for number in (5, 6):
        row = ran.rows[number]
        assert (row["error_class"], row["requests"]) == ("setup_failed", 0)
        assert "no patch could be taken of" in row["error"]


@pytest.mark.parametrize("number", [0, 8, 9])
def test_what_an_agent_does_to_the_repository_costs_no_patch(number: int, ran: Ran) -> None:
    """8: all that was kept is gone too; 9: git would wait for a pipe."""
    check(ran.home, ran.patches[number])
    assert ran.patches[number] == ran.patches[1]
    assert ran.rows[number]["error"] == ""


def test_a_prompt_is_no_instance_and_may_have_an_instances_id(tmp_path: Path) -> None:
    row = {"instance_id": "own-1", "prompt": "x", "swe": {"repo": "o/r", "setup": "exit 1", "base_commit": "1" * 40}}
    write_dataset(tmp_path / "p.jsonl", [row, {"task": "y", "instance_id": "own-2", "id": "other"}])
    code, _, err = swe(tmp_path, "--prompts_file=p.jsonl", "--run_name=r", model(tmp_path))
    assert code == 0, err
    assert predictions(tmp_path / "data" / "r") == {"own-1": "", "other": ""}


def test_a_retry_that_ends_worse_takes_no_patch_away(tmp_path: Path) -> None:
    flags = [*instances(tmp_path, 2), "--run_name=r"]
    failing = {"error": {"status": 400}}
    code, _, err = swe(tmp_path, *flags, model(tmp_path, *turns(EDIT), failing))
    assert code == 1, err
    before = predictions(tmp_path / "data" / "r")
    check(tmp_path, before["made__sums-0"])
    again = ["--resume", "--only_ids=made__sums-0,made__sums-1", "--allow_config_change"]
    rules = [{"task": "-0$", "turns": [failing]}]
    _, _, err = swe(tmp_path, *flags, *again, model(tmp_path, *turns("git checkout -q .", END), rules=rules))
    assert len(journal(tmp_path / "data" / "r")) == 4
    assert predictions(tmp_path / "data" / "r") == {**before, "made__sums-1": ""}
    assert "1 prediction is an earlier try's, as the last was cut off and left no patch: made__sums-0" in err


def test_a_stop_saves_the_patch_and_a_worse_retry_takes_it_not_away(tmp_path: Path) -> None:
    flags = [*instances(tmp_path, 1), "--run_name=r"]
    code, _, err = swe(tmp_path, *flags, "--max_total_tokens=9", model(tmp_path, *turns(EDIT, "ls", "ls", usage=USED)))
    assert code == 3, err
    (row,) = journal(tmp_path / "data" / "r")
    assert (row["status"], row["api_calls"]) == ("stopped", 1), row["error"]
    before = predictions(tmp_path / "data" / "r")
    check(tmp_path, before["made__sums-0"])
    again = ["--resume", "--only_ids=made__sums-0", "--allow_config_change"]
    _, _, err = swe(tmp_path, *flags, *again, model(tmp_path, {"error": {"status": 400}}))
    assert len(journal(tmp_path / "data" / "r")) == 2
    assert predictions(tmp_path / "data" / "r") == before
    assert "1 prediction is an earlier try's, as the last was cut off and left no patch: made__sums-0" in err


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
        assert not (tmp_path / "run").exists(), "nothing is left of it"


def test_a_refusal_leaves_nothing_but_what_was_there(tmp_path: Path) -> None:
    refused = ["--env=docker", f"--output={tmp_path}/a/run", model(tmp_path)]
    nowhere = f"unix://{tmp_path}/no"
    code, _, err = swe(tmp_path, "--prompts_file=-", *refused, stdin=b"one\ntwo\n", DOCKER_HOST=nowhere)
    assert (code, "docker" in err) == (2, True), err
    assert not (tmp_path / "a").exists()
    own = tmp_path / "a" / "run" / "dataset.jsonl"
    own.parent.mkdir(parents=True)
    own.write_text("mine\n")
    code, _, err = swe(tmp_path, f"--prompts_file={own}", *refused, DOCKER_HOST=nowhere)
    assert (code, own.read_text()) == (2, "mine\n"), err


def test_a_published_set_that_cannot_be_had_is_refused_in_one_line(tmp_path: Path) -> None:
    flags = ["--dataset=own/none", "--repo_cache=cache", "--run_name=r", model(tmp_path)]
    code, out, err = swe(tmp_path, *flags, HF_HUB_OFFLINE="1")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: the data set own/none (split test) cannot be had: ")
    assert "Traceback" not in err
    assert not (tmp_path / "data").exists()


def test_instances_with_images_are_refused_where_there_are_none(tmp_path: Path) -> None:
    flags = instances(tmp_path, 1)[:1]
    code, _, err = swe(tmp_path, *flags, "--run_name=r", model(tmp_path))
    assert (code, "--repo_cache" in err) == (2, True)


# --- patches on every way out


def test_a_patch_is_saved_however_the_row_ended(tmp_path: Path) -> None:
    asked = instances(tmp_path, 3)  # one whose time is over is in test_swe_bench
    invented = {"content": "", "tool_calls": [{"name": "no"}]}
    ways = {
        "max_turns": turns(EDIT, "ls", "ls", "ls", "ls"),
        "failed": [*turns(EDIT), {"error": {"status": 400}}],
        "discarded": [*turns(EDIT), *[invented] * 3],
    }
    rules = [{"task": f"-{number}$", "turns": steps} for number, steps in enumerate(ways.values())]
    code, _, err = swe(tmp_path, *asked, "--run_name=r", "--max_turns=4", model(tmp_path, rules=rules))
    assert code == 1, err
    rows = sorted(journal(tmp_path / "data" / "r"), key=lambda row: str(row["task_id"]))
    assert [row["status"] for row in rows] == list(ways), [row["error"] for row in rows]
    for patch in predictions(tmp_path / "data" / "r").values():
        check(tmp_path, patch)


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_saves_the_patch_and_a_resume_goes_on(times: int, tmp_path: Path) -> None:
    asked = instances(tmp_path, 2)
    wait = f"for i in $(seq 600); do [ ! -e {tmp_path}/on ] || break; sleep 0.1; done"
    steps = turns(f"{EDIT}; touch {tmp_path}/begun; {wait}", END)
    flags = [*asked, "--run_name=r", "--env=local", "--concurrency=1", model(tmp_path, *steps)]
    with Program(*flags, home=tmp_path, script=SCRIPT) as program:
        wait_until((tmp_path / "begun").exists)
        for _ in range(times):
            program.interrupt()
            time.sleep(0.5)  # two at once would be one
        if times == 1:
            (tmp_path / "on").touch()
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


def test_a_run_that_was_killed_ends_as_one_that_was_not(ran: Ran, tmp_path: Path) -> None:
    asked = instances(tmp_path, 8)
    steps = turns(EDIT, END, delay=0.2)
    flags = [*asked, "--env=local", "--concurrency=2", "--num_workers=2", "--batch_size=2", model(tmp_path, *steps)]
    killed = tmp_path / "data" / "killed"
    for ended in (2, 4):
        with Program(*flags, "--run_name=killed", "--resume", home=tmp_path, script=SCRIPT) as program:
            wait_until(lambda: len(journal_ids(killed)) >= ended, 60)  # noqa: B023 - at once
            program.kill_all()
    before = journal_ids(killed)
    code, _, err = run_program(*flags, "--run_name=killed", "--resume", home=tmp_path, script=SCRIPT)
    assert code == 0, err
    after = journal_ids(killed)
    assert after[: len(before)] == before or set(before) <= set(after)
    assert sorted(after) == [f"made__sums-{number}" for number in range(8)]  # nothing lost, nothing twice
    assert list(predictions(killed).values()) == [ran.patches[0]] * 8


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
    assert "1 image cannot be had:\nimage none:1: " in err
    assert sorted(stub.pulls) == ["here:1", "none:1"]
    assert not journal(tmp_path / "data" / "r")


# --- the example


def test_the_example_is_made_once_and_whole(tmp_path: Path) -> None:
    def made() -> str:
        script = ROOT / "datagen-config-examples" / "swe_example.sh"
        run = subprocess.run(["bash", script, "x"], cwd=tmp_path, check=True, capture_output=True, text=True)
        return run.stdout

    assert made() == ""
    (first,) = read_lines(tmp_path / "x" / "instances.jsonl")
    assert "x/instances.jsonl is there already" in made()
    assert read_lines(tmp_path / "x" / "instances.jsonl") == [first]
    (tmp_path / "x" / "instances.jsonl").unlink()  # as if it had been cut off
    assert made() == ""
    (again,) = read_lines(tmp_path / "x" / "instances.jsonl")
    assert {**again, "base_commit": first["base_commit"]} == first
    assert git(Path(again["repo_url"]), "rev-parse", "HEAD").decode().strip() == again["base_commit"]


# --- evaluation


def test_an_evaluation_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    mark = f"30{os.getpid()}"
    wait = f"touch {tmp_path}/begun; [ -e {tmp_path}/on ] || sleep {mark}; python3 -m pytest -rA tests"
    asked = instances(tmp_path, 2, test_command=wait)
    commands = turns("sed -i 's/numbers\\[1:\\]/numbers/' sums.py", END)
    flags = [*asked, "--run_name=r", "--env=local", "--evaluate", "--evaluation_timeout=900"]
    flags.append(model(tmp_path, *commands))
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
