"""Patches are judged by the instances' own tests, in sandboxes, and as the SWE-bench harness judges them."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiodocker
import msgspec
import pytest
from msgspec.structs import replace

from swe.evaluation import EvaluationOptions, evaluate
from swe.images import image_of
from swe.instances import read_instance
from swe.repository import fetch
from swe.types import Instance, Prediction, Report
from swe.verdict import run_report
from tests import made_repositories as made
from tests.contract.environments import eventually
from tests.made_repositories import CLOCK, DAYS, DRAINS, MADE, STACK, SUMS, Made, harness_row, make_all, patch_of
from tools.environments.base import Limits
from tools.environments.owner import current_owner
from tools.environments.table import load_backend
from tools.errors import UsageProblem

WRONG = {"days.py": "def is_leap(year):\n    return year % 4 == 0 and year % 100 != 0\n"}
ENDLESS = {"drains.py": "def drain(queue):\n    while True:\n        pass\n"}


class World:
    """The made instances, their images, and a prediction for each."""

    def __init__(self, folder: Path, rows: Sequence[dict[str, Any]], template: str) -> None:
        self.folder = folder
        self.rows = rows
        self.template = template
        self.instances = {row["instance_id"]: read_instance(row) for row in rows}

    def instance(self, which: Made) -> Instance:
        return self.instances[which.instance_id]

    def patch(self, which: Made, files: made.Files) -> str:
        return patch_of(Path(self.instance(which).repo_url), files)

    def predictions(self) -> list[Prediction]:
        """What comes to each one's `verdict`."""
        patches = {each.instance_id: self.instance(each).patch for each in MADE}
        patches[DAYS.instance_id] = self.patch(DAYS, WRONG)
        patches[DRAINS.instance_id] = self.patch(DRAINS, ENDLESS)
        patches[STACK.instance_id] = ""
        return [prediction(name, patch) for name, patch in patches.items()]

    def options(self, folder: Path, **changes: Any) -> EvaluationOptions:
        given: dict[str, Any] = {
            "backend": load_backend("docker"),
            "owner": current_owner("evaluation"),
            "folder": folder,
            "image_template": self.template,
            "cwd": "/testbed",
            "limits": Limits(memory_mb=1024, pids=256),
            "timeout": 60.0,
            **changes,
        }
        return EvaluationOptions(**given)

    async def judged(self, folder: Path, which: Made, patch: str, **changes: Any) -> Report:
        """One instance's report. `changes` of the instance by its field's name, of the options by theirs."""
        fields = {name: changes.pop(name) for name in list(changes) if name in Instance.__struct_fields__}
        instance = replace(self.instance(which), **fields)
        (report,) = await evaluate([instance], [prediction(which.instance_id, patch)], self.options(folder, **changes))
        return report


def prediction(instance_id: str, patch: str) -> Prediction:
    return Prediction(instance_id=instance_id, model_name_or_path="made/scripted", model_patch=patch)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("made")
    rows = make_all(folder)
    with made.made_images(rows, folder) as template:
        yield World(folder, rows, template)


async def test_every_verdict_with_the_tests_that_led_to_it(world: World, tmp_path: Path) -> None:
    predictions = [each for each in world.predictions() if each.instance_id != DRAINS.instance_id]
    told: list[Report] = []
    reports = await evaluate(list(world.instances.values()), predictions, world.options(tmp_path), told.append)
    assert [report.instance_id for report in reports] == [each.instance_id for each in predictions]
    assert sorted(told, key=str) == sorted(reports, key=str)
    by_id = {report.instance_id: report for report in reports}
    for each in MADE:
        if each is not DRAINS:
            assert by_id[each.instance_id].verdict == each.verdict, by_id[each.instance_id]
    wrong = by_id[DAYS.instance_id]
    assert wrong.fail_to_pass_passed == tuple(DAYS.fail_to_pass)
    assert wrong.pass_to_pass_passed == ("tests/test_days.py::test_leap[2004]",)
    assert wrong.pass_to_pass_failed == ("tests/test_days.py::test_leap[2000]",)
    assert wrong.patch_applied


async def test_tests_that_never_end_are_an_error_and_leave_nothing(world: World, tmp_path: Path) -> None:
    owner = current_owner("endless")
    report = await world.judged(tmp_path, DRAINS, world.patch(DRAINS, ENDLESS), timeout=3.0, owner=owner)
    assert (report.verdict, report.patch_applied) == ("error", True)
    assert report.error == "the tests took longer than 3 s"
    assert not await running("endless")
    assert "pytest" in (tmp_path / DRAINS.instance_id / "test_output.txt").read_text()


@pytest.mark.parametrize(
    "patch",
    ["no patch at all\n", "\n", "diff --git a/none.py b/none.py\n--- a/none.py\n+++ b/none.py\n@@ -1 +1 @@\n-a\n+b\n"],
)
async def test_a_patch_that_does_not_apply_is_an_error(world: World, tmp_path: Path, patch: str) -> None:
    report = await world.judged(tmp_path, SUMS, patch)
    assert (report.verdict, report.patch_applied) == ("error", False)
    assert report.error.startswith("the patch does not apply: $ git apply --verbose")


async def test_the_models_own_tests_do_not_count(world: World, tmp_path: Path) -> None:
    """Neither one that it put in the place of a new test file, nor a changed one, nor a folder that it made of one."""
    cheat = {
        "tests/test_top.py": "def test_two():\n    pass\n",
        "tests/test_stack.py": "def test_one():\n    pass\n",
    }
    report = await world.judged(tmp_path, STACK, world.patch(STACK, cheat))
    assert report.fail_to_pass_failed == tuple(STACK.fail_to_pass)
    folder = {"tests/test_top.py/x.py": "", "stack.py": STACK.fix["stack.py"]}
    report = await world.judged(tmp_path, STACK, world.patch(STACK, folder))
    assert report.verdict == "resolved", report


async def test_what_only_says_that_it_passed_did_not(world: World, tmp_path: Path) -> None:
    """The tests' command failed, yet no test did: as the harness has it, such a log tells nothing."""
    said = "".join(f"PASSED {name}\n" for name in (*SUMS.fail_to_pass, *SUMS.pass_to_pass))
    forged = f"import os\nprint({said!r}, flush=True)\nos._exit(1)\n"
    report = await world.judged(tmp_path, SUMS, world.patch(SUMS, {"conftest.py": forged}))
    assert report.verdict == "unresolved"
    assert report.error


async def test_what_is_evaluated_is_not_evaluated_again_but_errors_are(world: World, tmp_path: Path) -> None:
    instance, gold = world.instance(SUMS), world.instance(SUMS).patch
    broken = await world.judged(tmp_path, SUMS, gold, image="batch-runner-test:none")
    assert broken.verdict == "error"
    first = await world.judged(tmp_path, SUMS, gold)
    assert first.verdict == "resolved"
    assert await world.judged(tmp_path, SUMS, gold) == first  # to its seconds
    cwd = "/there/is/none"
    log = tmp_path / instance.instance_id / "test_output.txt"
    log.unlink()
    for changes in ({"timeout": 61.0}, {"test_command": "python -m pytest -rA"}):
        assert (await world.judged(tmp_path, SUMS, gold, **changes)).verdict == "resolved"
        log.unlink()  # it was written anew
    for others in ({"cwd": cwd}, {"backend": load_backend("local"), "cwd": cwd}, {"image": "batch-runner-test:none"}):
        assert (await world.judged(tmp_path, SUMS, gold, **others)).verdict == "error"


async def test_a_runner_that_is_missing_is_an_error_and_told(world: World, tmp_path: Path) -> None:
    gold = world.instance(SUMS).patch
    log = tmp_path / SUMS.instance_id / "test_output.txt"
    report = await world.judged(tmp_path, SUMS, gold, test_command="python -m no_runner tests")
    assert (report.verdict, report.patch_applied) == ("error", True)
    assert report.error.startswith("the tests' runner is missing here: there is no module no_runner: ")
    assert report.error.endswith(f"No module named no_runner ({log})")
    report = await world.judged(tmp_path, SUMS, gold, test_command="no-runner tests")
    assert report.verdict == "error"
    assert "cannot be run (exit code 127)" in report.error
    assert f"no-runner: command not found ({log})" in report.error


async def test_what_gave_no_test_results_is_evaluated_again(world: World, tmp_path: Path) -> None:
    asked = {"test_command": "exit_code() { return 3; }; exit_code"}
    first = await world.judged(tmp_path, SUMS, world.instance(SUMS).patch, **asked)
    assert first.verdict == "unresolved"
    log = tmp_path / SUMS.instance_id / "test_output.txt"
    log.unlink()
    await world.judged(tmp_path, SUMS, world.instance(SUMS).patch, **asked)
    assert log.exists()


async def test_a_broken_instance_says_so(world: World, tmp_path: Path) -> None:
    gold = world.instance(SUMS).patch
    report = await world.judged(tmp_path, SUMS, gold, setup="echo no such thing; exit 9")
    assert report.verdict == "error"
    assert "setup command: ended with 9: no such thing" in report.error
    report = await world.judged(tmp_path, SUMS, gold, test_patch=world.instance(DAYS).test_patch)
    assert report.verdict == "unresolved"
    assert report.error.startswith("the test patch does not apply: error: ")
    with pytest.raises(UsageProblem, match="predictions of no instance: other__one-1"):
        await evaluate([world.instance(SUMS)], [prediction("other__one-1", gold)], world.options(tmp_path))


async def test_the_setup_command_may_go_elsewhere_and_export(world: World, tmp_path: Path) -> None:
    setup = "cd / && export MADE=yes"
    command = '[ "$MADE" = yes ] && python -m pytest -rA tests'
    report = await world.judged(tmp_path, SUMS, world.instance(SUMS).patch, setup=setup, test_command=command)
    assert report.verdict == "resolved", report


async def test_an_instance_needs_a_sandbox_with_bash(world: World, tmp_path: Path) -> None:
    report = await world.judged(tmp_path, SUMS, world.instance(SUMS).patch, image="batch-runner-test:box")
    assert (report.verdict, report.error.partition(":")[0]) == ("error", "bash and mktemp")


async def test_an_end_from_outside_leaves_no_sandbox(world: World, tmp_path: Path) -> None:
    options = world.options(tmp_path, owner=current_owner("cut-off"))
    patches = [prediction(DRAINS.instance_id, world.patch(DRAINS, ENDLESS))]
    work = asyncio.create_task(evaluate([world.instance(DRAINS)], patches, options))
    assert await eventually(lambda: running("cut-off"), 30)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert not await running("cut-off")
    assert not (tmp_path / DRAINS.instance_id / "report.json").exists()


async def running(run_id: str) -> bool:
    async with aiodocker.Docker() as engine:
        return bool(await engine.containers.list(all=1, filters=json.dumps({"label": [f"batch-runner.run={run_id}"]})))


async def test_repositories_may_come_from_the_cache(world: World, tmp_path: Path) -> None:
    """On any backend, with whatever runs the tests there."""
    instance = replace(world.instance(CLOCK), test_command="python3 -m unittest -v")
    fetch(tmp_path / "cache", [instance])
    options = world.options(
        tmp_path, backend=load_backend("local"), with_image=False, cwd="", repo_cache=tmp_path / "cache"
    )
    (report,) = await evaluate([instance], [prediction(CLOCK.instance_id, instance.patch)], options)
    assert report.verdict == "resolved", report


async def test_a_part_of_a_patch_counts_as_the_whole_and_is_told(tmp_path: Path) -> None:
    """As it does for the harness: git ends well where it leaves a damaged binary patch out."""
    instance = replace(read_instance(made.make(CLOCK, tmp_path)), test_command="python3 -m unittest -v")
    fetch(tmp_path / "cache", [instance])
    options = EvaluationOptions(
        backend=load_backend("local"),
        owner=current_owner("evaluation"),
        folder=tmp_path / "evaluation",
        with_image=False,
        repo_cache=tmp_path / "cache",
    )
    icon = patch_of(Path(instance.repo_url), {"icon.png": made.PNG})
    for end, error in ((None, ""), (-30, "only a part of the patch was applied: error: corrupt binary patch at line")):
        patch = instance.patch + icon[:end]
        (report,) = await evaluate([instance], [prediction(CLOCK.instance_id, patch)], options)
        assert (report.verdict, report.patch_applied) == ("resolved", True), report
        assert report.error.startswith(error)
        assert bool(report.error) == bool(error)


async def test_the_harness_itself_comes_to_the_same(world: World, tmp_path: Path) -> None:
    rows = [harness_row(row, image_of(world.instances[row["instance_id"]], world.template)) for row in world.rows]
    predictions = [each for each in world.predictions() if each.instance_id != DRAINS.instance_id]
    place = [each.instance_id for each in predictions].index(CLOCK.instance_id)
    predictions[place] = prediction(CLOCK.instance_id, world.instance(DAYS).patch)  # it does not apply
    theirs = await asyncio.to_thread(run_harness, tmp_path, rows, predictions)
    instances = [read_instance(row) for row in rows]
    ours = run_report(list(world.instances), await evaluate(instances, predictions, world.options(tmp_path / "ours")))
    assert {key: value for key, value in ours.items() if key != "instances"} == {
        key: value for key, value in theirs.items() if key in ours
    }
    assert ours["unresolved_ids"] == [DAYS.instance_id]
    assert ours["error_ids"] == [CLOCK.instance_id]
    for report in ours["instances"]:
        if report.verdict in ("resolved", "unresolved"):
            told = harness_report(tmp_path, report.instance_id)
            assert told["patch_successfully_applied"]
            assert told["tests_status"]["FAIL_TO_PASS"] == {
                "success": list(report.fail_to_pass_passed),
                "failure": list(report.fail_to_pass_failed),
            }
            assert told["tests_status"]["PASS_TO_PASS"] == {
                "success": list(report.pass_to_pass_passed),
                "failure": list(report.pass_to_pass_failed),
            }


def run_harness(folder: Path, rows: Sequence[dict[str, Any]], predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Its own summary of its own run."""
    (folder / "instances.json").write_text(json.dumps(rows))
    (folder / "all_preds.jsonl").write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in predictions))
    words = ["--dataset_name", "instances.json", "--predictions_path", "all_preds.jsonl", "--run_id", "r"]
    run = subprocess.run(
        [sys.executable, "-m", "swebench.harness.run_evaluation", *words, "--timeout", "60", "--max_workers", "6"],
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    summary: dict[str, Any] = json.loads((folder / "made__scripted.r.json").read_bytes())
    return summary


def harness_report(folder: Path, instance_id: str) -> dict[str, Any]:
    path = folder / "logs/run_evaluation/r/made__scripted" / instance_id / "report.json"
    report: dict[str, Any] = json.loads(path.read_bytes())[instance_id]
    return report
