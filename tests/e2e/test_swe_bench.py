"""SWE-bench end to end: instances made here, real sandboxes, the scripted model, patches, predictions, verdicts."""

import json
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
    """One run of all made instances, and what it left."""

    def __init__(self, home: Path, rows: list[dict[str, Any]], template: str, flags: list[str]) -> None:
        self.home = home
        self.rows = {row["instance_id"]: row for row in rows}
        self.template = template
        self.flags = flags
        self.directory = home / "data/r"
        self.by_id = {row["task_id"]: row for row in journal(self.directory)}
        self.predictions = {row["instance_id"]: row for row in read_lines(self.directory / "all_preds.jsonl")}

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
    (home / "instances.json").write_text(json.dumps(rows))
    model = write_script(home, [rule for made in MADE for rule in rules_of(made)])
    with made_images(rows, home / "made") as template:
        flags = [
            *("--dataset=instances.json", model, "--env=docker", f"--image_template={template}"),
            *("--num_workers=2", "--concurrency=7", "--timeout=25", "--evaluate"),
        ]
        code, out, err = runs(home, *flags, "--run_name=r", "--evaluation_timeout=20")
        assert code == 0, out + err
        yield Ran(home, rows, template, flags)


pytestmark = pytest.mark.timeout(300)


def test_every_instance_ends_as_it_should(ran: Ran) -> None:
    ends = {name: row["status"] for name, row in ran.by_id.items()}
    expected = {made.instance_id: "completed" for made in MADE} | {CLOCK.instance_id: "timeout"}
    assert ends == expected
    summary = ran.json("evaluation.json")
    verdicts = {report["instance_id"]: report["verdict"] for report in summary["instances"]}
    assert verdicts == {made.instance_id: made.verdict for made in MADE}, summary
    assert summary["unresolved_ids"] == [DAYS.instance_id]
    assert summary["empty_patch_ids"] == [STACK.instance_id]
    assert summary["error_ids"] == [DRAINS.instance_id]
    assert ran.json("metrics.json")["evaluation"] == {
        "resolved": 4, "unresolved": 1, "empty": 1, "error": 1, "resolved_rate": round(4 / 7, 4),
    }  # fmt: skip
    assert ran.json("metrics.json").keys() > {"evaluation"}, "what was there before is still there"


def test_predictions_are_what_the_harness_loads(ran: Ran) -> None:
    path = ran.directory / "all_preds.jsonl"
    loaded = get_predictions_from_file(str(path), str(ran.home / "instances.json"), "test")
    assert [each["instance_id"] for each in loaded] == [made.instance_id for made in MADE]
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
    text = b"".join(path.read_bytes() for path in ran.directory.glob("batch_*.jsonl")).decode()
    for made in MADE:
        for name in made.fail_to_pass:
            assert json.dumps(name)[1:-1] not in text
    assert "$(rm x)" in text, "the problem is data"


def test_a_resumed_run_evaluates_only_errors_again(ran: Ran) -> None:
    reports = sorted((ran.directory / "evaluation").glob("*/report.json"))
    assert len(reports) == len(MADE) - 1, "an empty patch needs no evaluation"
    before = {path.parent.name: path.stat().st_mtime_ns for path in reports}
    lines = journal(ran.directory)
    code, out, err = runs(ran.home, *ran.flags, "--run_name=r", "--resume", "--evaluation_timeout=20")
    assert code == 0, out + err
    changed = {path.parent.name for path in reports if path.stat().st_mtime_ns != before[path.parent.name]}
    assert changed == {DRAINS.instance_id}
    assert journal(ran.directory) == lines
    assert ran.json("evaluation.json")["error_ids"] == [DRAINS.instance_id]


def sandboxes(ran: Ran, *which: Made) -> list[str]:
    """Of these instances; images are this test's alone."""
    images = [ran.template.format(id_docker=made.instance_id.replace("__", "_1776_")) for made in which]
    words = [word for image in images for word in ("--filter", f"ancestor={image}")]
    return subprocess.run(["docker", "ps", "-aq", *words], capture_output=True, text=True, check=True).stdout.split()


def test_no_sandbox_is_left(ran: Ran) -> None:
    assert sandboxes(ran, *MADE) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_evaluating_is_cut_off_cleanly_and_gone_on_with(ran: Ran, number: signal.Signals, code: int) -> None:
    """The rows are there already: what goes on is the evaluation alone."""
    directory = ran.home / f"data/cut{code}"
    endless = [*ran.flags, f"--run_name={directory.name}", f"--instance_ids={DRAINS.instance_id}"]
    with Program(*endless, "--evaluation_timeout=600", home=ran.home, script="mini_swe_runner.py") as program:
        wait_until(lambda: (directory / "all_preds.jsonl").exists() and sandboxes(ran, DRAINS), 40)
        program.interrupt(number)
        ended, out, err = program.end(30)
        assert ended == code, err
        assert "Traceback" not in err
        assert code < 0 or "--resume" in out.splitlines()[-1], out
    wait_until(lambda: not sandboxes(ran, DRAINS), 10)
    assert not (directory / "evaluation.json").exists()
    rows = journal(directory)
    ended, out, err = runs(ran.home, *endless, "--evaluation_timeout=1", "--resume")
    assert ended == 0, out + err
    assert journal(directory) == rows
    assert json.loads((directory / "evaluation.json").read_bytes())["error_ids"] == [DRAINS.instance_id]
