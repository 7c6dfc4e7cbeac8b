"""Delegation in whole runs: where children's rows stand, what they cost, and what is left of those cut off."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent.row import Turn
from agent.trajectory import parse_trajectory
from tests.e2e.inputs import USAGE, runs, says, write_script
from tests.e2e.program import Program, journal, merged, read_lines, run_program, wait_until, write_dataset

TOKENS = 15  # of one reply


def delegates(*goals: str, **more: Any) -> dict[str, Any]:
    call = {"name": "delegate_task", "arguments": {"tasks": [{"goal": goal, "context": "here"} for goal in goals]}}
    return {"reasoning": "Others can.", "tool_calls": [call], "usage": USAGE, **more}


def flags_of(folder: Path, rows: Sequence[dict[str, Any]], rules: Sequence[dict[str, Any]]) -> list[str]:
    dataset = write_dataset(folder / "prompts.jsonl", rows)
    return [
        "--container_backend=local",
        "--enabled_toolsets=terminal,file,delegation",
        write_script(folder, rules),
        f"--dataset_file={dataset}",
        "--run_name=r",
    ]


def children(directory: Path) -> list[dict[str, Any]]:
    """All rows of all files of children."""
    return [row for path in sorted(directory.glob("batch_*.children.jsonl")) for row in read_lines(path)]


ROWS = [{"prompt": "plain"}, {"id": "two", "prompt": "split"}, {"prompt": "split once more"}]
RULES = [
    {"task": r"two\.child_1$", "turns": [runs("cat shared.txt"), says("it says so")]},
    {"prompt": "^write\n", "turns": [runs("echo from a child >shared.txt"), says("written")]},
    {"prompt": "^look\n", "turns": [runs("ls"), runs("pwd"), says("looked")]},
    {
        "prompt": "split",
        "turns": [delegates("write"), delegates("look"), runs("cat shared.txt"), says("both are done")],
    },
]


def test_children_have_rows_of_their_own_kind(tmp_path: Path) -> None:
    flags = flags_of(tmp_path, ROWS, RULES)
    code, out, err = run_program(*flags, "--batch_size=2", "--samples_per_prompt=2", home=tmp_path)
    assert code == 0, out + err
    run = tmp_path / "data/r"
    rows = merged(run)
    assert len(rows) == len(journal(run)) == 6
    assert [row["api_calls"] for row in rows] == [1, 1, 4, 4, 4, 4]
    kept = read_lines(run / "children.jsonl")
    assert [(row["task_id"], row["sample_index"]) for row in kept] == [
        (f"{name}.child_{index}", sample) for name in ("two", "task_2") for sample in (0, 1) for index in (0, 1)
    ]
    key = ("row_key", "sample_index", "attempt")
    parents = {tuple(row[name] for name in key): row for row in rows}
    for row in rows:
        own = [
            each
            for each in kept
            if (each["parent_row_key"], each["sample_index"]) == (row["row_key"], row["sample_index"])
        ]
        for child in own:
            parent = parents[child["parent_row_key"], child["sample_index"], child["attempt"]]
            assert child["metadata"]["batch_num"] == parent["metadata"]["batch_num"]
            assert child in read_lines(run / f"batch_{parent['metadata']['batch_num']}.children.jsonl")
        calls = row["api_calls"] + sum(each["api_calls"] for each in own)
        assert (row["requests"], row["usage"]["total_tokens"]) == (calls, calls * TOKENS)
    assert [row["final_response"] for row in kept[:2]] == ["written", "it says so"]
    assert "from a child" in kept[1]["conversations"][3]["value"]
    assert [row["goal"] for row in kept[2:4]] == ["write", "look"]
    assert [turn["from"] for turn in kept[0]["conversations"]] == ["system", "human", "gpt", "tool", "gpt"]
    turns = [Turn(turn["from"], turn["value"]) for turn in kept[0]["conversations"]]
    assert "delegate_task" not in {tool.name for tool in parse_trajectory(turns).tools}
    assert len(children(run)) == len(kept) == 8
    metrics = json.loads((run / "metrics.json").read_bytes())
    assert metrics["requests"] == sum(row["requests"] for row in rows)
    assert metrics["api_calls"] == sum(row["api_calls"] for row in rows)
    assert_finalize_changes_nothing(run, flags, tmp_path)
    assert_a_replay_is_the_same(run, flags, tmp_path)


def assert_finalize_changes_nothing(run: Path, flags: list[str], home: Path) -> None:
    before = {name: (run / name).read_bytes() for name in ("trajectories.jsonl", "children.jsonl")}
    (run / "children.jsonl").unlink()
    assert run_program("--run_name=r", "--finalize", home=home)[0] == 0
    assert {name: (run / name).read_bytes() for name in before} == before
    assert run_program(*flags, "--batch_size=2", "--samples_per_prompt=2", "--resume", home=home)[0] == 0
    assert {name: (run / name).read_bytes() for name in before} == before


def assert_a_replay_is_the_same(run: Path, flags: list[str], home: Path) -> None:
    again = [flag for flag in flags if not flag.startswith(("--model", "--run_name"))]
    more = ("--samples_per_prompt=2", f"--model=replay:{run}", "--run_name=again")
    code, out, err = run_program(*again, *more, home=home)
    assert code == 0, out + err
    for name in ("trajectories.jsonl", "children.jsonl"):
        first, second = (read_lines(place / name) for place in (run, home / "data/again"))
        told = ("task_id", "status", "final_response", "api_calls", "tool_stats")
        assert [[row[column] for column in told] for row in first] == [
            [row[column] for column in told] for row in second
        ]


def test_a_row_that_runs_out_of_time_keeps_its_children(tmp_path: Path) -> None:
    rules = [
        {"prompt": "^slow", "turns": [runs("sleep 41.5"), says("late")]},
        {"prompt": "^quick", "turns": [says("quick")]},
        {"prompt": "both", "turns": [delegates("slow", "quick"), says("never")]},
    ]
    flags = flags_of(tmp_path, [{"prompt": "both"}], rules)
    assert run_program(*flags, "--timeout=5", home=tmp_path)[0] == 0
    (row,) = merged(tmp_path / "data/r")
    assert (row["status"], row["api_calls"], row["requests"]) == ("timeout", 1, 3)
    assert row["tool_stats"]["delegate_task"] == {"count": 1, "success": 0, "failure": 1}
    slow, quick = read_lines(tmp_path / "data/r/children.jsonl")
    assert (slow["status"], slow["end_status"], slow["requests"]) == ("timeout", "timeout", 1)
    assert (quick["status"], quick["final_response"]) == ("completed", "quick")


def test_children_of_an_interrupted_try_stay_out_of_the_merged_file(tmp_path: Path) -> None:
    begun, held = tmp_path / "begun", tmp_path / "held"
    held.write_text("")
    wait = f"touch {begun}; while [ -e {held} ]; do sleep 0.05; done"
    rules = [
        {"prompt": "^wait", "turns": [runs(wait), says("waited")]},
        {"prompt": "split", "turns": [delegates("wait"), says("done")]},
    ]
    flags = flags_of(tmp_path, [{"prompt": "split"}], rules)
    with Program(*flags, home=tmp_path) as program:
        wait_until(begun.exists)
        program.interrupt()
        time.sleep(0.5)
        program.interrupt()
        code, _, _ = program.end()
    assert code == 130
    run = tmp_path / "data/r"
    (cut,), (row,) = children(run), journal(run)
    assert (cut["status"], row["status"], cut["attempt"], row["attempt"]) == ("stopped", "stopped", 1, 1)
    assert (run / "children.jsonl").read_bytes() == b""
    held.unlink()
    assert run_program(*flags, "--resume", home=tmp_path)[0] == 0
    (child,) = read_lines(run / "children.jsonl")
    assert (child["status"], child["attempt"], child["metadata"]["batch_num"]) == ("completed", 1, 1)
    assert len(children(run)) == 2


def test_no_row_is_written_whose_children_cannot_be(tmp_path: Path) -> None:
    begun, held = tmp_path / "begun", tmp_path / "held"
    held.write_text("")
    rules = [
        {
            "prompt": "^wait",
            "turns": [runs(f"touch {begun}; while [ -e {held} ]; do sleep 0.05; done"), says("waited")],
        },
        {"prompt": "split", "turns": [delegates("wait"), says("done")]},
    ]
    flags = flags_of(tmp_path, [{"prompt": "split"}], rules)
    run = tmp_path / "data/r"
    with Program(*flags, home=tmp_path) as program:
        wait_until(begun.exists)
        (run / "batch_0.children.jsonl").mkdir()
        held.unlink()
        code, out, err = program.end()
    assert code not in (0, 1), out + err
    assert "batch_0.children.jsonl" in err
    assert journal(run) == []
    (run / "batch_0.children.jsonl").rmdir()
    assert run_program(*flags, "--resume", home=tmp_path)[0] == 0
    assert (len(merged(run)), len(children(run))) == (1, 1)


def test_what_children_spend_is_the_budgets(tmp_path: Path) -> None:
    rules: list[dict[str, Any]] = [
        {"prompt": "^dear", "repeat": True, "turns": [runs("true")]},
        {"prompt": "split", "turns": [delegates("dear", "dear"), says("never")]},
    ]
    flags = flags_of(tmp_path, [{"prompt": "split"}, {"prompt": "split too"}], rules)
    code, out, err = run_program(*flags, "--max_total_tokens=150", "--concurrency=1", home=tmp_path)
    assert code == 3, out + err
    rows, metrics = journal(tmp_path / "data/r"), json.loads((tmp_path / "data/r/metrics.json").read_bytes())
    assert [row["status"] for row in rows] == ["stopped"]
    assert {row["status"] for row in children(tmp_path / "data/r")} == {"stopped"}
    spent = metrics["usage"]["total_tokens"]
    assert spent == rows[0]["usage"]["total_tokens"] == rows[0]["requests"] * TOKENS
    assert 150 <= spent <= 150 + TOKENS
    assert spent == TOKENS + sum(row["usage"]["total_tokens"] for row in children(tmp_path / "data/r"))
