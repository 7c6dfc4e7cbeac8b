"""SWE-bench end to end: instances made here, real sandboxes, the scripted model, patches, predictions, verdicts."""

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from swebench.harness.utils import get_predictions_from_file  # type: ignore[import-untyped]

from tests.e2e.inputs import write_script
from tests.e2e.program import Program, journal, read_lines, wait_until
from tests.made_repositories import (
    CLOCK,
    DAYS,
    DRAINS,
    ICONS,
    MADE,
    PNG,
    STACK,
    Made,
    git,
    made_images,
    make_all,
    rules_of,
)


class Ran:
    """All made instances run, and what that left. The one whose own time runs out has a run of its own beside the
    others', so that their time is no matter; both are given by their names."""

    def __init__(self, home: Path, rows: list[dict[str, Any]], template: str, flags: list[str]) -> None:
        self.home = home
        self.rows = {row["instance_id"]: row for row in rows}
        self.template = template
        self.flags = flags
        self.directory, self.late = home / "data/r", home / "data/late"
        both = (self.directory, self.late)
        self.by_id = {row["task_id"]: row for directory in both for row in journal(directory)}
        self.predictions = {row["instance_id"]: row for each in both for row in read_lines(each / "all_preds.jsonl")}

    def json(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / name).read_bytes())
        return found


def runs(home: Path, *flags: str) -> tuple[int, str, str]:
    with Program(*flags, home=home, script="mini_swe_runner.py") as program:
        return program.end(200)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    home = tmp_path_factory.mktemp("swe")
    rows = make_all(home / "made")
    for name, chosen in (("late.json", [CLOCK]), ("instances.json", IN_TIME)):
        ids = {made.instance_id for made in chosen}
        (home / name).write_text(json.dumps([row for row in rows if row["instance_id"] in ids]))
    (home / "flags").mkdir()
    model = write_script(home, [rule for made in MADE for rule in rules_of(made)])
    with made_images(rows, home / "made") as template:
        common = [model, "--env=docker", f"--image_template={template}", "--evaluate"]
        late = ["--dataset=late.json", *common, "--run_name=late", "--timeout=25"]
        flags = [
            "--dataset=instances.json",
            *common,
            "--num_workers=2",
            "--concurrency=6",
            f"--volumes={home}/flags:/flags:ro",
        ]
        with Program(*late, home=home, script="mini_swe_runner.py") as beside:
            code, out, err = runs(home, *flags, "--run_name=r", EVALUATION)
            assert code == 0, out + err
            code, out, err = beside.end(200)
            assert code == 0, out + err
        yield Ran(home, rows, template, flags)


IN_TIME = [made for made in MADE if made is not CLOCK]
EVALUATION = "--evaluation_timeout=20"
pytestmark = pytest.mark.timeout(300)


def test_every_instance_ends_as_it_should(ran: Ran) -> None:
    ends = {name: row["status"] for name, row in ran.by_id.items()}
    expected = {made.instance_id: "completed" for made in MADE} | {CLOCK.instance_id: "timeout"}
    assert ends == expected
    summary = ran.json("evaluation.json")
    late = json.loads((ran.late / "evaluation.json").read_bytes())
    reports = [*summary["instances"], *late["instances"]]
    verdicts = {report["instance_id"]: report["verdict"] for report in reports}
    assert verdicts == {made.instance_id: made.verdict for made in MADE}, summary
    assert summary["unresolved_ids"] == [DAYS.instance_id]
    assert summary["empty_patch_ids"] == [STACK.instance_id]
    assert summary["error_ids"] == [DRAINS.instance_id]
    assert ran.json("metrics.json")["evaluation"] == {
        "resolved": 3, "unresolved": 1, "empty": 1, "error": 1, "resolved_rate": 0.5,
    }  # fmt: skip
    assert ran.json("metrics.json").keys() > {"evaluation"}, "what was there before is still there"


def test_predictions_are_what_the_harness_loads(ran: Ran) -> None:
    path = ran.directory / "all_preds.jsonl"
    loaded = get_predictions_from_file(str(path), str(ran.home / "instances.json"), "test")
    assert [each["instance_id"] for each in loaded] == [made.instance_id for made in IN_TIME]
    for each in loaded:
        assert list(each) == ["instance_id", "model_name_or_path", "model_patch"]
    assert ran.predictions[STACK.instance_id]["model_patch"] == ""
    validate = [f"--validate_predictions={path}", "--dataset=instances.json"]
    code, out, err = runs(ran.home, *validate)
    assert code == 0, out + err


def test_patches_give_back_what_the_model_left(ran: Ran, tmp_path: Path) -> None:
    for made in MADE:
        patch = ran.predictions[made.instance_id]["model_patch"].encode()
        checkout = tmp_path / made.name
        git(tmp_path, "clone", "-q", ran.rows[made.instance_id]["repo_url"], str(checkout))
        if patch:
            git(checkout, "apply", "--check", "-", stdin=patch)
            git(checkout, "apply", "-", stdin=patch)
    icons = tmp_path / ICONS.name
    assert (icons / "icon.png").read_bytes() == PNG
    assert (icons / "new dir/ü.bin").read_bytes() == bytes(range(256))
    assert not (icons / "old.bin").exists()
    assert b"\r\n" in (tmp_path / "words/words.py").read_bytes()


def test_nothing_of_the_solution_reaches_the_model(ran: Ran) -> None:
    text = b"".join(path.read_bytes() for path in ran.home.glob("data/*/batch_*.jsonl")).decode()
    for made in MADE:
        for name in made.fail_to_pass:
            assert json.dumps(name)[1:-1] not in text
    assert "$(rm x)" in text, "the problem is data"


def test_a_resumed_run_evaluates_only_errors_again(ran: Ran) -> None:
    directory = ran.home / "data/again"
    shutil.copytree(ran.directory, directory)
    reports = sorted((directory / "evaluation").glob("*/report.json"))
    assert len(reports) == len(IN_TIME) - 1, "an empty patch needs no evaluation"
    assert "the tests took longer than 20 s" in error_of(directory, DRAINS)
    before = {path.parent.name: path.stat().st_mtime_ns for path in reports}
    (ran.home / "flags" / "crash").touch()
    code, out, err = runs(ran.home, *ran.flags, "--run_name=again", "--resume", EVALUATION)
    (ran.home / "flags" / "crash").unlink()
    assert code == 0, out + err
    changed = {path.parent.name for path in reports if path.stat().st_mtime_ns != before[path.parent.name]}
    assert changed == {DRAINS.instance_id}
    assert journal(directory) == journal(ran.directory)
    assert "took longer" not in error_of(directory, DRAINS), "its tests crashed"


def error_of(directory: Path, made: Made) -> str:
    reports = json.loads((directory / "evaluation.json").read_bytes())["instances"]
    return next(str(report.get("error")) for report in reports if report["instance_id"] == made.instance_id)


def sandboxes(ran: Ran, *which: Made, status: str = "") -> list[str]:
    """Of these instances; images are this test's alone."""
    images = [ran.template.format(id_docker=made.instance_id.replace("__", "_1776_")) for made in which]
    words = [word for image in images for word in ("--filter", f"ancestor={image}")]
    words += ["--filter", f"status={status}"] * bool(status)
    return subprocess.run(["docker", "ps", "-aq", *words], capture_output=True, text=True, check=True).stdout.split()


def test_no_sandbox_is_left(ran: Ran) -> None:
    assert sandboxes(ran, *MADE) == []


def test_evaluating_is_cut_off_cleanly_and_gone_on_with(ran: Ran) -> None:
    """The rows are there already: what goes on is the evaluation alone."""
    directory = ran.home / "data/cut"
    endless = [*ran.flags, "--run_name=cut", f"--instance_ids={DRAINS.instance_id}", "--resume"]
    rows: list[dict[str, Any]] = []
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        with Program(*endless, "--evaluation_timeout=600", home=ran.home, script="mini_swe_runner.py") as program:
            # one that was made and never started would stay until the next run: nothing tells it that its owner is dead
            wait_until(
                lambda: (directory / "all_preds.jsonl").exists() and sandboxes(ran, DRAINS, status="running"), 60
            )
            program.interrupt(number)
            ended, out, err = program.end(60)
            assert ended == code, err
            assert "Traceback" not in err
            assert code < 0 or "--resume" in out.splitlines()[-1], out
        wait_until(lambda: not sandboxes(ran, DRAINS), 60)
        assert not (directory / "evaluation.json").exists()
        assert rows in ([], journal(directory))
        rows = journal(directory)
        (directory / "all_preds.jsonl").unlink()
    ended, out, err = runs(ran.home, *endless, "--evaluation_timeout=1")
    assert ended == 0, out + err
    assert journal(directory) == rows
    assert json.loads((directory / "evaluation.json").read_bytes())["error_ids"] == [DRAINS.instance_id]
