import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.row import Row, Turn
from batch.dataset import Dataset, scan
from batch.outputs import outputs
from batch.store import RunDirectory
from tests.unit.made import read_lines, row_of_job
from tools.names import file_name
from tools.toolsets import BUILT_IN

DATASET = Dataset.of_prompt("x")
scan(DATASET, BUILT_IN.resolve_names)


def a_row(task_id: str, sample_index: int = 0, **changes: Any) -> Row:
    return row_of_job(DATASET.job(0), task_id=task_id, sample_index=sample_index, **changes)


@pytest.mark.parametrize(
    ("task_id", "sample", "name"),
    [
        ("task_0", 0, "task_0"),
        ("task_0", 2, "task_0__s2"),
        ("a/../b c~ü", 0, "a%2F..%2Fb%20c%7E%C3%BC"),
        ("a%2F", 0, "a%252F"),
        ("a__s1", 0, "a%5F_s1"),
        ("a__s1", 1, "a%5F_s1__s1"),
        ("x" * 150, 0, "x" * 150),
        (".", 0, "%2E"),
        ("..", 0, "%2E%2E"),
        ("..", 1, "%2E%2E__s1"),
        ("...", 0, "..."),
        ("%2E", 0, "%252E"),
    ],
)
def test_names_of_files(task_id: str, sample: int, name: str) -> None:
    assert file_name(task_id, sample) == name


IDS = ["é" * 80, "é" * 80 + "1", "a", "a__s1", ".", "..", "%2E"]
TASKS = st.tuples(st.text(min_size=1) | st.sampled_from(IDS), st.integers(0, 3))


@given(TASKS, TASKS)
def test_names_are_short_safe_and_each_its_own(one: tuple[str, int], other: tuple[str, int]) -> None:
    names = [file_name(*task) for task in (one, other) if _is_text(task[0])]
    for name in names:
        assert 0 < len(name) <= 150
        assert name not in (".", "..")
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-%")
    assert len(set(names)) == len({task for task in (one, other) if _is_text(task[0])})


def _is_text(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def write(directory: RunDirectory, formats: tuple[str, ...], *rows: Row, jsonl_file: Path | None = None) -> None:
    with outputs(formats, directory, jsonl_file) as takes:
        for row in rows:
            for take in takes:
                take(row)


def test_a_file_per_task(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    write(directory, ("sharegpt", "json"), a_row("a/b"), a_row("a/b", 1, success=False))
    assert {path.name for path in directory.tasks_path.iterdir()} == {"a%2Fb.json", "a%2Fb__s1.json"}
    told = json.loads((directory.tasks_path / "a%2Fb.json").read_bytes())
    assert (told["id"], told["success"], told["prompt"], told["final_response"]) == ("a/b", True, "do", "done")


def test_files_that_stay_the_same_are_left_alone_and_others_removed(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    write(directory, ("json",), a_row("a"), a_row("b"), a_row("gone"))
    before = {path.name: path.stat().st_ino for path in directory.tasks_path.iterdir()}
    (directory.tasks_path / "note.txt").write_text("mine")
    write(directory, ("json",), a_row("a"), a_row("b", error="new"))
    after = {path.name: path.stat().st_ino for path in directory.tasks_path.iterdir()}
    assert after.keys() == {"a.json", "b.json", "note.txt"}
    assert after["a.json"] == before["a.json"]
    assert after["b.json"] != before["b.json"]


def test_all_tasks_in_one_file(tmp_path: Path) -> None:
    rows = [a_row("a"), a_row("b")]
    write(RunDirectory(tmp_path), ("jsonl",), *rows, jsonl_file=tmp_path / "out" / "F.jsonl")
    write(RunDirectory(tmp_path), ("jsonl",), *rows)
    assert [line["id"] for line in read_lines(tmp_path / "out" / "F.jsonl")] == ["a", "b"]
    assert (tmp_path / "out" / "F.jsonl").read_bytes() == (tmp_path / "tasks.jsonl").read_bytes()


def test_a_line_per_turn(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    turns = [Turn("system", "s"), Turn("human", "h")]
    failed = a_row("b", status="failed", conversations=turns, error="e")
    write(directory, ("turns",), a_row("a"), failed)
    lines = read_lines(directory.turns_path / "a.jsonl")
    assert [line.get("role") for line in lines] == ["system", "user", "assistant", None]
    assert lines[-1]["_stats"]["status"] == "completed"
    aggregate = json.loads((directory.turns_path / "_aggregate_stats.json").read_bytes())
    assert aggregate == {
        "tool_usage": {},
        "reasoning_coverage": [1.0, 0.0],
        "total_trajectories": 2,
        "completed": 1,
        "failed": 1,
    }


def test_formats_made_elsewhere_make_nothing_here(tmp_path: Path) -> None:
    write(RunDirectory(tmp_path), ("sharegpt",), a_row("a"))
    assert list(tmp_path.iterdir()) == []
