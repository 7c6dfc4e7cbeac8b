"""What a run leaves for others: files that loaders take, other formats, verdicts of checkers, calls of hooks."""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pyarrow.json  # type: ignore[import-untyped]
import pytest

from tests.e2e.inputs import PLAIN, runs, says, small_run, write_script
from tests.e2e.program import Program, journal, merged, read_lines, run_program, statistics, write_dataset
from tests.endpoint import EndpointProcess, tool_call

Rows = list[dict[str, Any]]


def finalize(home: Path, *flags: str) -> None:
    code, out, err = run_program("--finalize", "--run_name=r", *flags, home=home)
    assert code == 0, out + err


# --- loaders


def quiet_run(home: Path) -> Path:
    """No tool, no metadata, no error, nothing that has a fraction."""
    flags = [word for word in small_run(home, [{"prompt": "plain"}]) if "run_name" not in word]
    assert run_program(*flags, "--run_name=quiet", home=home)[0] == 0
    return home / "data/quiet"


def loud_run(home: Path) -> Path:
    """Of everything something: tools with clashing arguments, an invented one, errors, ids, metadata, a reward."""
    (home / "checker.py").write_text("def check(task): return 0.5\n", encoding="utf-8")
    calls = [
        tool_call("read_file", {"path": 1}, "call_0"),
        tool_call("read_file", {"path": "a\ud800"}, "call_1"),
        tool_call("invented", {"path": {"x": []}}, "call_2"),
        tool_call("terminal", {"command": "echo 'x\\ud83d' \U0001f600; exit 3"}, "call_3"),
    ]
    rules: Rows = [
        {"prompt": "bad", "status": 400, "error": {"message": "no \ud800", "code": "x"}},
        {"turn": 1, "message": {"content": "\ud800", "reasoning_content": "hm", "tool_calls": calls}},
        {"message": {"content": "end", "reasoning_content": "so"}},
    ]
    rows: Rows = [
        {"prompt": "loud \ud800", "id": 7, "metadata": {"a": 1, "b": [None, "x"]}, "expected_tools": ["terminal"]},
        {"prompt": "bad", "id": "x\ud800", "metadata": {"a": "text"}},
    ]
    dataset = write_dataset(home / "loud.jsonl", rows)
    with EndpointProcess(rules) as endpoint:
        code, out, err = run_program(
            "--container_backend=local",
            "--enabled_toolsets=terminal,file",
            "--model=gpt-4o",
            f"--base_url={endpoint.url}",
            f"--dataset_file={dataset}",
            "--run_name=loud",
            "--keep_unknown_tools",
            "--success_checker=checker.py:check",
            "--output_format=jsonl",
            home=home,
        )
    assert code == 1, out + err
    return home / "data/loud"


def test_files_of_different_runs_load_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, loud = quiet_run(tmp_path), loud_run(tmp_path)
    assert {row["status"] for row in journal(loud)} == {"completed", "failed"}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    import datasets  # type: ignore[import-untyped] # noqa: PLC0415 - reads the variables on import

    datasets.disable_progress_bars()
    seen: list[Any] = []
    for names in (
        [quiet / "trajectories.jsonl", loud / "trajectories.jsonl"],
        [loud / "trajectories.jsonl", quiet / "trajectories.jsonl"],
        [quiet / "batch_0.jsonl", loud / "batch_0.jsonl"],
        [loud / "batch_0.jsonl"],
    ):
        files = [str(name) for name in names]
        loaded = datasets.load_dataset("json", data_files=files, cache_dir=str(tmp_path / "cache"), split="train")
        assert loaded.num_rows == sum(len(read_lines(name)) for name in names)
        seen.append(loaded.features)
        assert not [name for name, kind in loaded.features.items() if getattr(kind, "dtype", "") == "null"]
    assert all(features == seen[0] for features in seen)
    schemas = [pyarrow.json.read_json(folder / "batch_0.jsonl").schema for folder in (quiet, loud)]
    assert schemas[0] == schemas[1]
    assert list(schemas[0].names) == list(journal(quiet)[0])
    kept = merged(loud)[0]
    assert (kept["reward"], kept["success"], kept["task_id"]) == (0.5, True, "7")
    assert json.loads(kept["unknown_tools"]) == [{"name": "invented", "count": 1}]
    assert json.loads(kept["dataset_row"])["metadata"] == {"a": 1, "b": [None, "x"]}


# --- the other formats

ODD_IDS = ["a/b", "..", ".", "ü €", "x" * 200, "x" * 200 + "y", "a__s1", "A b%2F", "-", "con\ttab"]


def format_files(folder: Path) -> dict[str, bytes]:
    paths = [*(folder / "tasks").glob("*"), *(folder / "turns").glob("*"), *folder.glob("tasks.jsonl")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_every_format_comes_with_the_run_or_afterwards(tmp_path: Path) -> None:
    rows = [{"prompt": f"look {number}", "id": name} for number, name in enumerate(ODD_IDS)]
    flags = small_run(tmp_path, rows, [{"turns": [runs("echo found"), says("it is there")]}])
    code, out, err = run_program(*flags, "--samples_per_prompt=2", "--output_format=json,jsonl,turns", home=tmp_path)
    assert code == 0, out + err
    folder = tmp_path / "data/r"
    made = format_files(folder)
    assert len(made) == 2 * 2 * len(ODD_IDS) + 2
    for name in made:
        last = name.rpartition("/")[2]
        assert len(last.rpartition(".")[0].encode()) <= 150
        assert set(last) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-%")
    assert "tasks/a%2Fb.json" in made
    assert "tasks/a%2Fb__s1.json" in made
    assert "turns/%C3%BC%20%E2%82%AC.jsonl" in made

    tasks = [json.loads(content) for name, content in made.items() if name.startswith("tasks/")]
    assert {task["id"] for task in tasks} == set(ODD_IDS)
    key = ("id", "sample_index")
    lines = read_lines(folder / "tasks.jsonl")
    assert [(line["id"], line["sample_index"]) for line in lines] == [(name, s) for name in ODD_IDS for s in (0, 1)]
    assert sorted(lines, key=lambda each: [each[k] for k in key]) == sorted(tasks, key=lambda e: [e[k] for k in key])
    task = lines[0]
    assert (task["success"], task["tool_calls_made"], task["error"]) == (True, 1, "")
    assert task["usage"]["total_tokens"] == 30
    assert task["final_response"] == "it is there"
    assert [message["role"] for message in task["messages"]] == ["user", "assistant", "tool", "assistant"]

    turns = [json.loads(line) for line in made["turns/a%2Fb.jsonl"].splitlines()]
    assert [turn.get("role", "_stats") for turn in turns] == ["user", "assistant", "tool", "assistant", "_stats"]
    assert turns[1]["tool_calls"] == [{"name": "terminal", "args": {"command": "echo found"}}]
    assert turns[2]["result"]["output"] == "found\n" or turns[2]["result"]["output"] == "found"
    assert turns[-1]["_stats"]["tool_usage"] == {"terminal": 1}
    whole = json.loads(made["turns/_aggregate_stats.json"])
    assert (whole["total_trajectories"], whole["completed"], whole["tool_usage"]) == (20, 20, {"terminal": 20})

    for name in made:
        (folder / name).unlink()
    finalize(tmp_path, "--output_format=json,turns,jsonl")
    assert format_files(folder) == made


def test_one_file_of_records_stands_where_it_was_asked_for(tmp_path: Path) -> None:
    flags = [word for word in small_run(tmp_path) if "run_name" not in word]
    code, out, err = run_program(*flags, "--output=out/all.jsonl", "--output_format=jsonl", home=tmp_path)
    assert code == 0, out + err
    assert [line["id"] for line in read_lines(tmp_path / "out/all.jsonl")] == ["task_0", "task_1"]
    assert len(merged(tmp_path / "out/all")) == 2
    assert json.loads((tmp_path / "out/all/run.json").read_bytes())["run_name"] == "all"
    (tmp_path / "out/all.jsonl").unlink()
    command = ("--finalize", "--output=out/all.jsonl", "--output_format=jsonl")
    assert run_program(*command, home=tmp_path)[0] == 0
    assert len(read_lines(tmp_path / "out/all.jsonl")) == 2


def test_what_is_kept_can_be_decided_afterwards(tmp_path: Path) -> None:
    rules: Rows = [
        {"prompt": "silent", "turns": [{"content": "4"}]},
        {"prompt": "endless", "repeat": True, "turns": [runs("true")]},
    ]
    rows = [{"prompt": "silent"}, {"prompt": "endless"}, {"prompt": "good"}, {"prompt": "bad", "setup": "exit 1"}]
    flags = small_run(tmp_path, rows, rules)
    assert run_program(*flags, "--max_turns=2", home=tmp_path)[0] == 1
    folder = tmp_path / "data/r"

    def kept() -> dict[int, str]:
        return {row["prompt_index"]: row["status"] for row in merged(folder)}

    def left_out() -> set[tuple[str, str]]:
        return {(row["task_id"], row["status"]) for row in read_lines(folder / "failures.jsonl")}

    assert kept() == {1: "max_turns", 2: "completed"}
    assert left_out() == {("task_0", "discarded"), ("task_3", "failed")}
    assert statistics(folder)["filtered"] == {"failed": 1, "no_reasoning": 1}
    before = [path.read_bytes() for path in sorted(folder.glob("batch_*.jsonl"))]
    code, out, _ = run_program("--finalize", "--run_name=r", "--keep_no_reasoning", "--no-save_all", home=tmp_path)
    assert code == 1
    assert not {"finalize", "keep_no_reasoning"} & set(re.findall(r"--(\w+)", out.splitlines()[-1]))
    assert kept() == {0: "completed", 2: "completed"}
    assert left_out() == {("task_1", "max_turns"), ("task_3", "failed")}
    run_program("--finalize", "--run_name=r", home=tmp_path)
    assert kept() == {1: "max_turns", 2: "completed"}
    assert [path.read_bytes() for path in sorted(folder.glob("batch_*.jsonl"))] == before


# --- checkers

CHECKERS = """
import asyncio

print("imported")  # a worker's stdout is nobody's

def sync(task): return task["final_response"] == "the answer", "read it"

async def with_environment(task, environment):
    await asyncio.sleep(0)
    result = await environment.run("cat made", timeout=10)
    return {"success": True, "reason": result.output, "reward": 0.25, "rewards": [{"name": "n", "value": 1}]}

def plain_true(task): return True

def number(task): return -1.5

def raising(task): raise KeyError("what\\ud800")

def rubbish(task): return object()

class Evil:
    def __repr__(self): raise RuntimeError("no repr")

def evil(task): return Evil()

def nan(task): return {"success": True, "reward": float("nan")}

def infinite(task): return float("inf")

def late(task, **options): return (1, None)
"""

VERDICTS: dict[str, dict[str, Any]] = {
    "sync": {"success": True, "success_reason": "read it", "reward": 1.0, "error_class": ""},
    "with_environment": {"success": True, "success_reason": "set\n", "reward": 0.25, "error_class": ""},
    "plain_true": {"success": True, "success_reason": "", "reward": 1.0, "error_class": ""},
    "number": {"success": False, "reward": -1.5, "error_class": ""},
    "raising": {"success": False, "reward": 0.0, "error_class": "checker_error"},
    "rubbish": {"success": False, "error_class": "checker_error"},
    "evil": {"success": False, "error_class": "checker_error"},
    "nan": {"success": False, "reward": 0.0, "error_class": "checker_error"},
    "infinite": {"success": False, "reward": 0.0, "error_class": "checker_error"},
    "late": {"success": True, "success_reason": "None", "error_class": ""},
}


@pytest.mark.parametrize("name", VERDICTS)
def test_a_checkers_verdict_is_the_rows(name: str, tmp_path: Path) -> None:
    (tmp_path / "checks.py").write_text(CHECKERS, encoding="utf-8")
    flags = small_run(tmp_path, [{"prompt": "a", "setup": "echo set > made"}])
    spelling = f"checks.{name}" if name == "sync" else f"checks.py:{name}"
    code, out, err = run_program(*flags, f"--success_checker={spelling}", home=tmp_path)
    assert code == 0, out + err
    (row,) = merged(tmp_path / "data/r")
    assert {key: row[key] for key in VERDICTS[name]} == VERDICTS[name]
    assert row["status"] == "completed"
    if name == "with_environment":
        assert json.loads(row["rewards"]) == [{"name": "n", "value": 1.0}]
    if name == "raising":
        assert "KeyError" in row["success_reason"]
    rate = json.loads((tmp_path / "data/r/metrics.json").read_bytes())["success_rate"]
    assert rate == float(VERDICTS[name]["success"])


def test_a_checker_can_judge_afterwards(tmp_path: Path) -> None:
    (tmp_path / "checks.py").write_text(CHECKERS, encoding="utf-8")
    assert run_program(*small_run(tmp_path), home=tmp_path)[0] == 0
    before = [path.read_bytes() for path in (tmp_path / "data/r").glob("batch_*.jsonl")]
    finalize(tmp_path, "--success_checker=checks.py:number", "--output_format=jsonl")
    assert [(row["success"], row["reward"]) for row in merged(tmp_path / "data/r")] == [(False, -1.5)] * 2
    assert [line["reward"] for line in read_lines(tmp_path / "data/r/tasks.jsonl")] == [-1.5] * 2
    assert json.loads((tmp_path / "data/r/metrics.json").read_bytes())["success_rate"] == 0
    finalize(tmp_path)
    assert [row["success"] for row in merged(tmp_path / "data/r")] == [True] * 2
    assert [path.read_bytes() for path in (tmp_path / "data/r").glob("batch_*.jsonl")] == before


def test_a_checker_that_fails_afterwards_is_told_of_and_the_run_still_resumes(tmp_path: Path) -> None:
    (tmp_path / "checks.py").write_text(
        "def check(task, environment):\n    return environment.folder if task['id'] == 'b' else True\n",
        encoding="utf-8",
    )
    rows: Rows = [{"prompt": name, "id": name} for name in "ab"] + [{"prompt": "c", "id": "c", "setup": "exit 1"}]
    assert run_program(*small_run(tmp_path, rows), "--max_attempts=1", home=tmp_path)[0] == 1
    flags = ["--run_name=r", "--finalize", "--success_checker=checks.py:check"]
    code, out, err = run_program(*flags, home=tmp_path)
    assert code == 1, out + err
    assert "warning: the checker failed on 1 row (" in err
    words = shlex.split(out.splitlines()[-1])
    assert {"--run_name=r", "--max_attempts=1", "--resume", f"--dataset_file={tmp_path}/prompts.jsonl"} <= set(words)
    assert not any("finalize" in word for word in words)
    code, out, err = run_program(*words[2:], home=tmp_path)
    assert (code, "nothing is left to run" in err) == (1, True), out + err


def test_a_file_of_the_current_directory_shadows_no_package(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')\n", encoding="utf-8")
    (tmp_path / "msgspec.py").write_text("raise SystemExit('shadowed')\n", encoding="utf-8")
    (tmp_path / "checks.py").write_text("import json\ndef check(task): return json.loads('true')\n", encoding="utf-8")
    code, out, err = run_program(*small_run(tmp_path), "--success_checker=checks.check", home=tmp_path)
    assert code == 0, out + err
    assert [row["reward"] for row in merged(tmp_path / "data/r")] == [1.0, 1.0]


# --- hooks


def test_the_hook_is_called_in_the_parent_once_for_every_end(tmp_path: Path) -> None:
    (tmp_path / "hook.py").write_text(
        "import json, os\n"
        "def told(task):\n"
        "    with open('told', 'a') as file:\n"
        "        file.write(json.dumps([os.getpid(), task['id'], task['status'], task['success']]) + '\\n')\n"
        "    if task['id'] == 'b': raise RuntimeError('hook broke')\n",
        encoding="utf-8",
    )
    rows: Rows = [{"prompt": name, "id": name} for name in "abc"]
    rows.append({"prompt": "d", "id": "d", "setup": "exit 1"})
    flags = [*small_run(tmp_path, rows), "--on_task_done=hook.py:told", "--concurrency=1", "--num_workers=1"]
    with Program(*flags, home=tmp_path) as program:
        parent = program.process.pid
        code, out, err = program.end()
    assert code == 1, out + err
    assert "on_task_done: b: RuntimeError: hook broke" in err
    told: list[Any] = [*read_lines(tmp_path / "told")]
    assert [each[1:] for each in told] == [
        ["a", "completed", True],
        ["b", "completed", True],
        ["c", "completed", True],
        ["d", "failed", False],
    ]
    assert {each[0] for each in told} == {parent}
    assert os.getpid() != parent


def test_a_hook_may_be_async(tmp_path: Path) -> None:
    (tmp_path / "hook.py").write_text(
        "import asyncio\n"
        "from pathlib import Path\n"
        "lock = asyncio.Lock()\n"
        "async def told(task):\n"
        "    async with lock:\n"
        "        await asyncio.sleep(0)\n"
        "        Path('told-' + task['id']).touch()\n"
        "        if task['id'] == 'a': raise RuntimeError('hook broke')\n",
        encoding="utf-8",
    )
    rows: Rows = [{"prompt": name, "id": name} for name in "ab"]
    code, out, err = run_program(*small_run(tmp_path, rows), "--on_task_done=hook.py:told", home=tmp_path)
    assert code == 0, out + err
    assert sorted(path.name for path in tmp_path.glob("told-*")) == ["told-a", "told-b"]
    assert "on_task_done: a: RuntimeError: hook broke" in err
    assert "never awaited" not in err


def test_two_runs_of_a_deterministic_setting_leave_the_same_files(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "prompts.jsonl", [{"prompt": f"look {number}"} for number in range(8)])
    model = write_script(tmp_path, [{"turns": [runs("echo found"), says("there")]}])
    kept = []
    for name in ("a", "b"):
        flags = [PLAIN[0], model, f"--dataset_file={dataset}", "--distribution=development"]
        flags += ["--allow_missing_toolsets", "--deterministic", f"--run_name={name}", "--shuffle", "--seed=3"]
        code, out, err = run_program(*flags, home=tmp_path)
        assert code == 0, out + err
        rows = merged(tmp_path / "data" / name)
        for row in rows:
            row.pop("duration_seconds")
            row["metadata"].pop("timestamp")
            row["conversations"] = [turn for turn in row["conversations"] if turn["from"] != "tool"]
        kept.append(rows)
    assert kept[0] == kept[1]
    assert len({row["tools_offered"] for row in kept[0]}) > 1
