"""The settings of SWE runs: those of every run and their own, and the rows that come of what they name."""

import json
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.outcome import RolloutPolicy
from agent.prompt import Prompt
from agent.rollout import offered_tools
from batch.cli import help_text
from batch.dataset import Dataset
from batch.options import by_name
from batch.rows import RowProblem, parse_row
from batch.settings import RunSettings, for_the_record, recorded, resume_command, run_directory, run_options
from swe.git import refusal_of
from swe.kind import SWE
from swe.patch import excluding
from swe.program import page
from swe.settings import LEFT_OUT, SweSettings, load_settings, swe_options
from swe.steps import patch_path
from swe.tasks import SENTINEL, prompt_rows, row_of
from swe.types import Instance
from tests.unit.command_lines import CommandLine
from tools.errors import UsageProblem

BASE = ("--prompts_file=p.txt", "--run_name=r", "--model=m")
DATASET = ("--dataset=d.jsonl", "--run_name=r", "--model=m")
LINE = CommandLine(load_settings, BASE)
load, refused = LINE.load, LINE.refused


def test_flags_of_every_run_mean_the_same_here() -> None:
    known = by_name(swe_options())
    for option in run_options():
        if option.name in LEFT_OUT:
            assert option.name not in known
        else:
            assert known[option.name].expected == option.expected
            assert set(option.aliases) <= known.keys()
    usual, ours = RunSettings(), SweSettings()
    differ = {item.name for item in msgspec.structs.fields(RunSettings)
              if getattr(usual, item.name) != getattr(ours, item.name)}  # fmt: skip
    assert differ == {"keep_no_reasoning", "max_turns", "enabled_toolsets", "disabled_toolsets"}
    assert len(known) == sum(1 + len(option.aliases) for option in swe_options())


def test_the_originals_flags_are_known() -> None:
    flags = ["--model=m", "--base_url=http://h/v1", "--api_key=k", "--env=docker", "--image=i", "--cwd=/tmp"]
    flags += ["--max_iterations=5", "--verbose", "--prompts_file=f", "--output_file=some/out.jsonl"]
    settings, _ = load_settings(flags, {})
    assert (settings.dataset_file, settings.max_turns, settings.container_backend) == ("f", 5, "docker")
    assert run_directory(settings) == Path("data/out")
    assert load_settings(["--task=hello", "--model=m"], {})[0].prompt == "hello"


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--run_name=r"], "no prompts: give --task TEXT or --prompts_file FILE or --dataset NAME_OR_FILE"),
        (["--task=x", "--dataset=d"], "--task and --dataset: give one of them"),
        (["--task=x", "--prompts_file=d"], "--task and --prompts_file: give one of them"),
        (["--task=x", "--slice=0:1"], "slice is for instances: give --dataset"),
        (["--task=x", "--evaluate"], "evaluate is for instances: give --dataset"),
        ([*DATASET, "--filter=("], "filter: '(' is no regular expression"),
        ([*DATASET, "--subset=light"], "subset: expected one of full, lite, multilingual, verified"),
        (["--task=x", "--distribution=default"], "unknown flag --distribution"),
        (["--task=x", "--dataste=d"], "did you mean --dataset?"),
        (["--dataset=d", "--model=m"], "no run_name"),
        ([*DATASET, "--instance_ids="], "instance_ids is empty: leave it out to choose all"),
        ([*DATASET, "--instance_ids", " , "], "instance_ids is empty"),
        ([*DATASET, "--filter="], "filter is empty"),
        ([*DATASET, "--slice", ""], "slice is empty"),
        ([*DATASET, "--split="], "split is empty"),
        ([*DATASET, "--finalize", "--filter="], "filter is empty"),
        ([*DATASET, "--instance_ids", "a", "b"], "'b': commas stand between the values of --instance_ids"),
        (["--task=x", "--exclude=tests/**,../x"], "exclude: '../x' names nothing in the repository"),
        (["--task=x", "--exclude=a/../../b"], "exclude: 'a/../../b' names nothing"),
        (["--task=x", "--exclude=/"], "exclude: '/' names nothing"),
        (["--task=x", "--exclude=//"], "exclude: '//' names nothing"),
        (["--task=x", "--exclude=//m.py"], "exclude: '//m.py' names nothing"),
        (["--task=x", "--exclude=\ud800"], "exclude: '\\ud800' names nothing"),
    ],
)
def test_mistakes_are_named(argv: list[str], problem: str) -> None:
    assert problem in refused(*argv, base=[] if "--model=m" in argv else ["--model=m"])


def test_an_empty_choice_is_none_wherever_it_stands(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="instance_ids is empty"):
        load(base=DATASET, MINI_SWE_RUNNER_INSTANCE_IDS="")
    config = tmp_path / "c.yaml"
    config.write_text("instance_ids: []\nexclude: [ok, '']\n")
    with pytest.raises(UsageProblem, match="instance_ids is empty"):
        load(f"--config={config}", base=DATASET)
    with pytest.raises(UsageProblem, match="exclude: '' names nothing"):
        load(f"--config={config}", "--instance_ids=a", base=DATASET)


def test_patterns_of_the_top_directory_are_taken() -> None:
    given = ("/m.py", "/t/**", "a..b/x", "..x", "/*.py", "build/", "it s", ":(x)", "!x")
    assert load(f"--exclude={','.join(given)}").exclude == given


async def test_a_pattern_that_git_does_not_take_is_refused_before_anything_is_spent() -> None:
    assert refusal_of([spec for each in ("/m.py", "/t/**", "tests", "**/x", ":(x)") for spec in excluding(each)]) == ""
    with pytest.raises(UsageProblem, match=r"exclude: fatal: .*'\.\./x' is outside"):
        await SWE.prepare(SweSettings(exclude=("tests", "../x")), Dataset.of_prompt("x"), "local")


def test_the_environment_has_a_prefix_of_its_own() -> None:
    assert load(MINI_SWE_RUNNER_MAX_ITERATIONS="7", BATCH_RUNNER_MAX_TURNS="x").max_turns == 7
    with pytest.raises(UsageProblem, match="MINI_SWE_RUNNER_SPLITS"):
        load(MINI_SWE_RUNNER_SPLITS="x")


def test_a_subset_is_a_dataset_and_a_check_needs_no_run() -> None:
    assert load_settings(["--subset=lite", "--run_name=r", "--model=m"], {})[0].dataset == "lite"
    assert load_settings(["--validate_predictions=f"], {})[0].validate_predictions == "f"


def test_the_manifest_and_the_command_that_resumes_hold_them() -> None:
    argv = [*DATASET, "--instance-ids=a,b", "--exclude=tests", "--api_key=sk-1", "--evaluate"]
    settings, _ = load_settings(argv, {})
    saved = msgspec.json.decode(msgspec.json.encode({"settings": for_the_record(settings)}))
    assert recorded(saved, SweSettings) == msgspec.structs.replace(settings, api_key="")
    for flags in (argv, []):
        words = shlex.split(resume_command(settings, flags, "python mini_swe_runner.py"))
        again, _ = load_settings(words[2:], {})
        assert again == msgspec.structs.replace(settings, api_key="", resume=True)


def test_help_names_every_setting() -> None:
    text = help_text(page())
    assert all(f"--{name}" in text for name in by_name(swe_options()))
    assert all(len(line) <= 115 for line in text.splitlines())


def test_the_policy_is_a_terminal_and_a_sentinel() -> None:
    settings = load("--ephemeral_system_prompt=Be brief.")
    policy = SWE.policy(
        settings, RolloutPolicy(enabled_toolsets=settings.enabled_toolsets, disabled_toolsets=("process",))
    )
    (tool,) = offered_tools(Prompt(text="x"), policy, "id:x")
    assert (tool.spec.name, sorted(tool.spec.parameters["properties"])) == ("terminal", ["command", "timeout"])
    assert "process" not in tool.spec.description
    assert policy.sentinel == SENTINEL
    assert policy.ephemeral_system_prompt.endswith("\n\nBe brief.")
    assert "repository" not in policy.ephemeral_system_prompt
    assert "repository" in SWE.policy(load(base=DATASET), policy).ephemeral_system_prompt


def prompts(*lines: bytes) -> list[bytes]:
    return [row.strip() for row in prompt_rows(line + b"\n" for line in lines)]


def test_lines_become_rows_one_by_one() -> None:
    given = [b"\xef\xbb\xbfplain", b"", b'{"task": "t", "id": 1}', b'{"prompt": "p", "task": "t"}', b"[ ] do", b"NaN?"]
    found = prompts(*given)
    assert len(found) == len(given)
    assert not found.pop(1)
    assert [parse_row(row).text for row in found] == ["plain", "t", "p", "[ ] do", "NaN?"]
    assert prompts(*found) == found
    assert json.loads(found[1]) == {"prompt": "t", "id": 1}
    assert [json.loads(row) for row in prompts(b'{"prompt": null, "task": "t"}')] == [{"prompt": "t"}]


@pytest.mark.parametrize("line", [b"[1]", b"1", b'"text"', b"null", b"true", b'{"prompt": "x', b"\xff\xfe", b"{}"])
def test_what_is_neither_is_left_for_the_datasets_check(line: bytes) -> None:
    (row,) = prompts(line)
    assert row == line
    with pytest.raises(RowProblem):
        parse_row(row)


def test_an_instances_row_tells_the_problem_and_not_the_solution() -> None:
    instance = Instance(
        instance_id="o__n-1",
        repo="o/n",
        base_commit="c",
        problem_statement="It breaks on `{x}` {0}",
        patch="GOLD",
        test_patch="GOLD",
        hints_text="GOLD",
        fail_to_pass=("GOLD",),
        rest={"more": "GOLD"},
        repo_url="https://me:secret@host/o/n",
    )

    def row(**more: Any) -> Prompt:
        line = row_of(instance, **{"image_template": "", "with_image": True, "cwd": "/testbed", **more})
        assert b"GOLD" not in line
        assert b"secret" not in line
        return parse_row(line)

    prompt = row()
    assert (prompt.id, prompt.cwd) == ("o__n-1", "/testbed")
    assert prompt.image == "swebench/sweb.eval.x86_64.o_1776_n-1:latest"
    assert "It breaks on `{x}` {0}" in prompt.text
    assert prompt.rest["swe"]["base_commit"] == "c"
    assert row(image_template="x/{name}:1").image == "x/n:1"
    assert not row(with_image=False).image


def test_patches_have_names_of_their_own() -> None:
    run = Path("run")
    assert patch_path(run, "a/b", "id:a/b", 0, 2) == run / "patches" / "a%2Fb.2.diff"
    tries = [("task_0", "sha:1", 0, 1), ("task_0", "sha:2", 0, 1), ("task_0", "sha:1", 1, 1), ("task_0", "sha:1", 0, 2)]
    assert len({patch_path(run, *each) for each in tries}) == 4
