"""Scripts and lists in whole runs: what is counted where, what the files hold, what a kill leaves."""

import json
import os
from pathlib import Path
from typing import Any

from tests.e2e.inputs import runs, says, small_run, write_script
from tests.e2e.program import Program, journal, merged, run_program, statistics, wait_until, write_dataset

CODE = """
import batch_tools
from batch_tools import read_file, terminal, write_file

write_file("made.txt", "one\\ntwo\\n")
print(terminal("wc -l <made.txt; exit 3"), read_file("nowhere")["error"][:7])
try:
    batch_tools.todo
except AttributeError:
    print(batch_tools._call("todo", {}), batch_tools._call("frobnicate", {}))
"""
TODOS = [{"id": "1", "content": "look", "status": "in_progress"}, {"id": "2", "content": "write", "status": "pending"}]


def calls(*each: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    made = [{"name": name, "arguments": arguments} for name, arguments in each]
    return {"reasoning": "I do.", "tool_calls": made}


def results(row: dict[str, Any]) -> list[dict[str, Any]]:
    turns = "".join(turn["value"] for turn in row["conversations"] if turn["from"] == "tool")
    responses = [part.partition("</tool_response>")[0] for part in turns.split("<tool_response>")[1:]]
    return [json.loads(response)["content"] for response in responses]


def test_inner_calls_stand_in_a_column_and_a_statistic_of_their_own(tmp_path: Path) -> None:
    turns = [
        calls(("execute_code", {"code": CODE}), ("todo", {"todos": TODOS})),
        calls(
            ("execute_code", {"code": "1 / 0"}), ("todo", {"todos": [{"id": 2, "status": "completed"}], "merge": True})
        ),
        runs("cat made.txt"),
        says("done"),
    ]
    flags = small_run(tmp_path, [{"prompt": "code"}, {"prompt": "plain"}], [{"prompt": "code", "turns": turns}])
    flags[1] = "--enabled_toolsets=terminal,file,todo,code_execution"
    code, out, err = run_program(*flags, home=tmp_path)
    assert code == 0, out + err
    rows = {row["prompt_index"]: row for row in merged(tmp_path / "data/r")}
    assert json.loads(rows[0]["inner_tool_stats"]) == {
        "read_file": {"count": 1, "success": 0, "failure": 1},
        "terminal": {"count": 1, "success": 1, "failure": 0},
        "write_file": {"count": 1, "success": 1, "failure": 0},
    }
    assert rows[1]["inner_tool_stats"] == "{}"
    columns = list(rows[0])
    assert columns[columns.index("inner_tool_stats") - 1] == "extra_tool_stats"
    assert (rows[0]["unknown_tools"], rows[0]["api_calls"]) == ("[]", 4)
    made, first, failed, second, shown = results(rows[0])
    assert (made["status"], made["tool_calls_made"]) == ("success", 3)
    assert made["output"].splitlines()[0] == "{'output': '2\\n', 'exit_code': 3, 'error': None} nowhere"
    assert made["output"].count("A script cannot call") == 2
    assert (failed["status"], failed["error"]) == ("error", "ZeroDivisionError: division by zero")
    assert (first["todos"], first["summary"]["in_progress"]) == (TODOS, 1)
    assert second["todos"][1] == {"id": "2", "content": "write", "status": "completed"}
    assert shown["output"] == "one\ntwo\n"
    told = statistics(tmp_path / "data/r")
    counts = {name: (tally["success"], tally["failure"]) for name, tally in told["tool_statistics"].items()}
    assert counts == {"execute_code": (1, 1), "terminal": (1, 0), "todo": (2, 0)}
    inner = {name: (tally["success"], tally["failure"]) for name, tally in told["inner_tool_statistics"].items()}
    assert inner == {"read_file": (0, 1), "terminal": (1, 0), "write_file": (1, 0)}
    assert told["unknown_tools"] == {}


def test_a_row_that_runs_out_of_time_in_a_script_keeps_what_it_called(tmp_path: Path) -> None:
    code = "from batch_tools import terminal\nterminal('echo x >begun')\nterminal('sleep 41.25')"
    rules = [{"prompt": "slow", "turns": [calls(("execute_code", {"code": code}))]}]
    flags = small_run(tmp_path, [{"prompt": "slow"}], rules)
    flags[1] = "--enabled_toolsets=terminal,code_execution"
    assert run_program(*flags, "--timeout=5", home=tmp_path)[0] == 0
    (row,) = journal(tmp_path / "data/r")
    assert (row["status"], row["tool_stats"]["execute_code"]["failure"]) == ("timeout", 1)
    assert json.loads(row["inner_tool_stats"]) == {"terminal": {"count": 2, "success": 1, "failure": 1}}
    assert not running("sleep\x0041.25\0")


def running(words: str) -> bool:
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if place.read_bytes() == words.encode():
                return True
        except OSError:
            continue
    return False


def test_a_killed_run_leaves_no_script(tmp_path: Path) -> None:
    seconds = f"{os.getpid() % 9000 + 1000}.75"
    code = f"import subprocess\nsubprocess.run(['sleep', '{seconds}'])"
    dataset = write_dataset(tmp_path / "prompts.jsonl", [{"prompt": "slow"}])
    script = write_script(tmp_path, [{"prompt": "slow", "turns": [calls(("execute_code", {"code": code}))]}])
    flags = ("--container_backend=bubblewrap", "--enabled_toolsets=code_execution", script, f"--dataset_file={dataset}")
    with Program(*flags, "--run_name=r", home=tmp_path) as program:
        wait_until(lambda: running(f"sleep\0{seconds}\0"))
        program.kill_all()
        wait_until(lambda: not running(f"sleep\0{seconds}\0"))
