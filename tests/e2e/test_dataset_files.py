"""Datasets in every form that people have them, through the whole program; and what a row may ask for."""

import gzip
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
import pytest
import zstandard

from agent.row import Turn
from agent.trajectory import parse_trajectory
from tests.e2e.inputs import PLAIN, runs, says, small_run, write_script
from tests.e2e.program import ROOT, Program, environment, journal, merged, read_lines, run_program, statistics
from tests.endpoint import EndpointProcess, tool_call

PROMPTS = ["first €", "second\u2028\u2029\u0085\x0b\x0c line", "third"]


def lines(*, end: bytes = b"\n") -> bytes:
    """JSONL with line separators of Unicode unescaped."""
    return b"".join(json.dumps({"prompt": text}, ensure_ascii=False).encode() + end for text in PROMPTS)


def table(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": PROMPTS, "n": [1, 2, 3]}), path)


def array(path: Path) -> None:
    path.write_text(json.dumps([{"prompt": text} for text in PROMPTS], indent=1), encoding="utf-8-sig")


FORMS: dict[str, Callable[[Path], Any]] = {
    "plain": lambda path: path.write_bytes(lines()),
    "BOM": lambda path: path.write_bytes(b"\xef\xbb\xbf" + lines()),
    "CRLF": lambda path: path.write_bytes(lines(end=b"\r\n")),
    "blank lines": lambda path: path.write_bytes(b"\n \n" + lines(end=b"\n\n\r\n") + b"\n\n"),
    "no newline at the end": lambda path: path.write_bytes(lines().rstrip()),
    "array": array,
    "gzip": lambda path: path.write_bytes(gzip.compress(lines())),
    "zstandard": lambda path: path.write_bytes(zstandard.compress(lines()) + zstandard.compress(b"\n")),
    "Parquet": table,
    "gzip of an array": lambda path: path.write_bytes(
        gzip.compress(json.dumps([{"prompt": p} for p in PROMPTS]).encode())
    ),
}


def prompts_of(rows: list[dict[str, Any]]) -> list[str]:
    return [row["conversations"][1]["value"] for row in rows]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_rows(form: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    FORMS[form](path)
    flags = [*PLAIN, write_script(tmp_path), f"--dataset_file={path}", "--run_name=r"]
    code, out, err = run_program(*flags, "--num_workers=0", home=tmp_path)
    assert code == 0, out + err
    assert prompts_of(merged(tmp_path / "data/r")) == PROMPTS
    assert [row["prompt_index"] for row in merged(tmp_path / "data/r")] == [0, 1, 2]
    code, _, err = run_program(*flags, "--resume", home=tmp_path)
    assert (code, "nothing is left to run" in err) == (0, True)
    assert len(journal(tmp_path / "data/r")) == 3


BAD = {
    b'{"prompt": 123}': "prompt must be a string, not a number",
    b'{"prompt": null}': "no prompt",
    b'{"prompt": ["a", "b"]}': "prompt must be a string, not a list",
    b'{"prompt": {"text": "x"}}': "prompt must be a string, not an object",
    b'{"prompt": ""}': "prompt is blank",
    b'{"prompt": "  "}': "prompt is blank",
    b"{}": "no prompt",
    b"[]": "not an object but a list",
    b'"text with prompt"': "not an object but a string",
    b"7": "not an object but a number",
    b"null": "not an object but null",
    b'{"prompt": "a", "n": NaN}': "NaN is not JSON",
    b'{"prompt": "a", "n": -Infinity}': "-Infinity is not JSON",
    b'{"prompt": "a", "n": 1e999}': "1e999 is too large a number",
    b'{"prompt": "a"': "not JSON",
    b'{"prompt": "a\xff"}': "not UTF-8",
    b'{"prompt": "a", "id": 7}': "id '7' is also row 0's",
    b'{"prompt": "a", "id": 1.5}': "id must be a string or an integer",
    b'{"prompt": "a", "id": ""}': "id is blank",
    b'{"prompt": "a", "id": "x", "task_id": "y"}': "contradict each other",
    b'{"prompt": "a", "tools": ["terminl"]}': "did you mean terminal?",
    b'{"prompt": "a", "tools": "terminal"}': "tools must be a list of strings",
    b'{"prompt": "a", "image": 3}': "image must be a string",
    b'{"prompt": "a", "files": {"a": 3}}': "files",
    b'{"prompt": "a", "files": {"a": {"base64": "!"}}}': "not base64",
    b'{"prompt": "a", "env": {"A": 1}}': "env.A must be a string",
    b'{"prompt": "a", "env": {"A=B": "1"}}': "no name of a variable",
    b'{"prompt": "a", "max_turns": 0}': "max_turns must be at least 1",
    b'{"prompt": "a", "max_turns": true}': "max_turns must be an integer",
    b'{"prompt": "a", "timeout_seconds": "5"}': "timeout_seconds must be a number",
    b'{"prompt": "a", "metadata": "x"}': "metadata must be an object",
    b'{"prompt": "a", "response_format": {"type": "objekt"}}': "no JSON schema",
    b'{"messages": []}': "must be a list of turns",
    b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}': "must be the user's",
    b'{"messages": [{"role": "robot", "content": "a"}]}': "role must be one of",
    b'{"conversations": [{"from": "human", "value": 3}]}': "value must be a string",
    b'{"prompt": "x", "messages": [{"role": "user", "content": "a"}]}': "contradict each other",
}


def test_bad_rows_are_all_found_before_anything_runs_or_are_left_out(tmp_path: Path) -> None:
    good = b'{"prompt": "good", "id": 7, "id2": 1, "id2": 2}\n'
    path = tmp_path / "rows.jsonl"
    path.write_bytes(good + b"\n" + b"".join(bad + b"\n" for bad in BAD) + b'{"prompt": "last"}')
    with EndpointProcess(calls=0) as endpoint:
        flags = [*PLAIN, "--model=m", f"--base_url={endpoint.url}", f"--dataset_file={path}", "--run_name=r"]
        code, out, err = run_program(*flags, home=tmp_path)
        assert (code, out) == (2, "")
        assert endpoint.stats()["requests"] == 0
        listed = err.splitlines()
        assert str(len(BAD)) in listed[0]
        assert "--skip_bad_rows" in listed[0]
        assert listed[-1] == f"and {len(BAD) - 10} more"
        assert len(listed) == 12
        for number, (line, reason) in enumerate(zip(listed[1:11], BAD.values(), strict=False), 3):
            assert line.startswith(f"{path}:{number}: ")
            assert reason in line
        assert not (tmp_path / "data/r").exists()
        code, out, err = run_program(*flags, "--skip_bad_rows", home=tmp_path)
    assert code == 0, out + err
    assert prompts_of(merged(tmp_path / "data/r")) == ["good", "last"]
    skipped = statistics(tmp_path / "data/r")["skipped_rows"]
    assert skipped["count"] == len(BAD)
    for number, (row, reason) in enumerate(zip(skipped["rows"], BAD.values(), strict=True), 3):
        assert row["line"] == number
        assert reason in row["reason"]


def test_a_row_of_twenty_megabytes_is_a_row(tmp_path: Path) -> None:
    flags = small_run(tmp_path, [{"prompt": "x" * 20_000_000}, {"prompt": "small"}])
    code, out, err = run_program(*flags, "--num_workers=0", home=tmp_path)
    assert code == 0, out + err
    assert [len(prompt) for prompt in prompts_of(merged(tmp_path / "data/r"))] == [20_000_000, 5]


@pytest.mark.parametrize("source", ["stdin", "pipe"])
def test_what_can_be_read_only_once_is_kept_for_the_command_that_resumes(source: str, tmp_path: Path) -> None:
    model = write_script(tmp_path, [{"prompt": "third", "turns": [{"error": {"status": 500}}]}])
    flags = [*PLAIN, model, "--run_name=r", "--request_retries=1"]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    if source == "stdin":
        code, out, err = run_program(*flags, "--dataset_file=-", home=tmp_path, stdin=gzip.compress(lines()))
    else:
        with Program(*flags, f"--dataset_file={pipe}", home=tmp_path) as program:
            pipe.write_bytes(lines())
            code, out, err = program.end()
    assert code == 1, out + err
    write_script(tmp_path)
    command = out.splitlines()[-1]
    assert "data/r/dataset.jsonl" in command
    done = subprocess.run(
        shlex.split(command), cwd=tmp_path, env=environment(tmp_path), capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert prompts_of(merged(tmp_path / "data/r")) == PROMPTS
    assert len(journal(tmp_path / "data/r")) == 4


def test_a_file_behind_stdin_is_resumed_by_its_own_name(tmp_path: Path) -> None:
    flags = small_run(tmp_path, rules=[{"prompt": "second", "turns": [{"error": {"status": 500}}]}])
    flags = [word for word in flags if "dataset" not in word]
    call = shlex.join([sys.executable, str(ROOT / "batch_runner.py"), *flags, "--request_retries=1"])
    command = ["sh", "-c", f"{call} --dataset_file=/dev/stdin <prompts.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert f"--dataset_file={tmp_path}/prompts.jsonl" in shlex.split(done.stdout.splitlines()[-1])


def test_bad_rows_from_stdin_leave_nothing_and_never_replace_a_good_dataset(tmp_path: Path) -> None:
    flags = [*PLAIN, write_script(tmp_path), "--run_name=r", "--dataset_file=-"]
    code, out, err = run_program(*flags, home=tmp_path, stdin=b'{"prompt": 1}\n')
    assert (code, out) == (2, "")
    assert "-:1: prompt must be a string" in err
    assert not (tmp_path / "data/r").exists()
    assert run_program(*flags, home=tmp_path, stdin=lines())[0] == 0
    assert run_program(*flags, "--resume", home=tmp_path, stdin=b'{"prompt": 1}\n')[0] == 2
    assert (tmp_path / "data/r/dataset.jsonl").read_bytes() == lines()


def test_a_run_of_stdin_is_finalized_where_it_was_moved_to(tmp_path: Path) -> None:
    flags = [*PLAIN, write_script(tmp_path), "--run_name=r", "--dataset_file=-"]
    assert run_program(*flags, home=tmp_path, stdin=lines())[0] == 0
    (tmp_path / "data/r").rename(tmp_path / "moved")
    (tmp_path / "moved/trajectories.jsonl").unlink()
    code, out, err = run_program("--finalize", "--output=moved", home=tmp_path)
    assert code == 0, out + err
    assert prompts_of(merged(tmp_path / "moved")) == PROMPTS


# --- which rows, in which order


def test_a_seed_decides_the_order_and_the_merge_keeps_the_datasets(tmp_path: Path) -> None:
    flags = small_run(tmp_path, [{"prompt": f"p{number}"} for number in range(12)])
    flags = [*[word for word in flags if "run_name" not in word], "--num_workers=0", "--concurrency=1"]
    orders = {}
    for name, more in (("a", ["--seed=5"]), ("b", ["--seed=5"]), ("c", ["--seed=6"])):
        assert run_program(*flags, "--shuffle", "--max_samples=6", *more, f"--run_name={name}", home=tmp_path)[0] == 0
        orders[name] = [row["prompt_index"] for row in journal(tmp_path / "data" / name)]
        indices = [row["prompt_index"] for row in merged(tmp_path / "data" / name)]
        assert indices == sorted(orders[name])
        assert len(set(indices)) == 6
    assert orders["a"] == orders["b"] != orders["c"]
    assert orders["a"] != sorted(orders["a"])


def test_rows_that_ask_for_a_toolset_are_spread(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{number}", **({"tools": ["file"]} if number < 4 else {})} for number in range(12)]
    flags = small_run(tmp_path, rows)
    code, out, err = run_program(*flags, "--spread=file", "--num_workers=0", "--concurrency=1", home=tmp_path)
    assert code == 0, out + err
    asks = [row["prompt_index"] < 4 for row in journal(tmp_path / "data/r")]
    assert asks == [False, False, True] * 4
    assert [row["prompt_index"] for row in merged(tmp_path / "data/r")] == list(range(12))


def test_samples_of_a_row_differ_in_their_seed_alone(tmp_path: Path) -> None:
    with EndpointProcess() as endpoint:
        flags = [word for word in small_run(tmp_path) if "scripted" not in word and "toolsets" not in word]
        flags += ["--model=m", f"--base_url={endpoint.url}", "--samples_per_prompt=3", "--seed=40"]
        flags += ["--distribution=development", "--allow_missing_toolsets", "--output_format=json"]
        code, out, err = run_program(*flags, home=tmp_path)
        assert code == 0, out + err
        bodies = endpoint.stats()["bodies"]
    rows = merged(tmp_path / "data/r")
    assert [(row["prompt_index"], row["sample_index"]) for row in rows] == [(i, s) for i in range(2) for s in range(3)]
    for index in range(2):
        assert len({row["tools_offered"] for row in rows if row["prompt_index"] == index}) == 1
        prompt = ("first", "second")[index]
        assert {body["seed"] for body in bodies if body["messages"][0]["content"] == prompt} == {40, 41, 42}
    assert {path.name for path in (tmp_path / "data/r/tasks").iterdir()} == {
        f"task_{index}{suffix}.json" for index in range(2) for suffix in ("", "__s1", "__s2")
    }
    assert statistics(tmp_path / "data/r")["total_prompts"] == 2


# --- rows that are chats


def test_the_turns_that_come_with_a_row_stand_in_the_trajectory_and_count_nowhere(tmp_path: Path) -> None:
    call = tool_call("terminal", {"command": "rm -rf /"}, "c1")
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "clean up"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": '{"output": "", "exit_code": 0}'},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "what now?"},
    ]
    turns = [
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": "hello"},
        {"from": "human", "value": "what now?"},
    ]
    rows: list[dict[str, Any]] = [
        {"messages": chat, "id": "a"},
        {"conversations": turns, "id": "b"},
        {"prompt": "what now?", "id": "c"},
    ]
    with EndpointProcess(calls=0) as endpoint:
        flags = [word for word in small_run(tmp_path, rows) if "scripted" not in word]
        flags += [
            "--model=m",
            f"--base_url={endpoint.url}",
            "--ephemeral_system_prompt=Secretly.",
            "--output_format=turns",
        ]
        code, out, err = run_program(*flags, home=tmp_path)
        assert code == 0, out + err
        bodies = endpoint.stats()["bodies"]
    first, second, third = merged(tmp_path / "data/r")
    roles = [[turn["from"] for turn in row["conversations"]] for row in (first, second, third)]
    assert roles[0] == ["system", "human", "gpt", "tool", "gpt", "human", "gpt"]
    assert roles[1] == ["system", "human", "gpt", "human", "gpt"]
    assert roles[2] == ["system", "human", "gpt"]
    assert first["conversations"][0]["value"].endswith("Be brief.")
    assert "Secretly" not in json.dumps([first, second, third])
    sent = next(body["messages"] for body in bodies if len(body["messages"]) == 6)
    assert [message["role"] for message in sent] == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert sent[0]["content"] == "Secretly.\n\nBe brief."
    found = statistics(tmp_path / "data/r")
    assert found["tool_statistics"] == {}
    assert found["reasoning_statistics"]["total_assistant_turns"] == 3
    assert {row["api_calls"] for row in (first, second, third)} == {1}
    shown = [read_lines(tmp_path / f"data/r/turns/{name}.jsonl")[-1]["_stats"] for name in "abc"]
    assert [each["tool_usage"] for each in shown] == [{}] * 3
    assert [each["reasoning_coverage"] for each in shown] == [1.0] * 3


# --- what a row may ask for


def test_a_row_brings_its_own_sandbox_tools_and_limits(tmp_path: Path) -> None:
    rules: list[dict[str, Any]] = [
        {"prompt": "look", "turns": [runs("pwd; cat a/b.txt; od -An -tx1 c.bin; echo $WORD; cat made"), says("seen")]},
        {"prompt": "again", "repeat": True, "turns": [runs("echo again")]},
        {"prompt": "slow", "turns": [runs("sleep 30"), says("late")]},
        {"prompt": "json", "turns": [says('{"n": "one"}')]},
    ]
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    rows: list[dict[str, Any]] = [
        {
            "prompt": "look",
            "id": 1,
            "cwd": "place/here",
            "env": {"WORD": "wörd"},
            "files": {"a/b.txt": "text\n", "c.bin": {"base64": "AP8="}},
            "setup": "echo set up > made",
            "expected_tools": ["bash", "web_search"],
            "metadata": {"level": {"deep": [1, None]}},
            "other": "kept",
        },
        {"prompt": "again", "id": "2", "max_turns": 2, "tools": ["terminal", "file_read"]},
        {"prompt": "slow", "task_id": "3", "timeout_seconds": 1.5},
        {"prompt": "json", "id": "4", "response_format": schema},
        {"prompt": "x", "id": "5", "setup": "exit 3"},
    ]
    code, out, err = run_program(*small_run(tmp_path, rows, rules), "--output_format=json", home=tmp_path)
    assert code == 1, out + err
    found = {row["task_id"]: row for row in journal(tmp_path / "data/r")}
    ends = {name: (row["status"], row["reason"]) for name, row in sorted(found.items())}
    assert ends == {
        "1": ("completed", ""),
        "2": ("max_turns", "max_turns"),
        "3": ("timeout", "timeout"),
        "4": ("partial", "schema_mismatch"),
        "5": ("failed", "setup_failed"),
    }
    result = json.loads(first_result(found["1"]))["output"]
    assert result.split() == [result.split()[0], "text", "00", "ff", "wörd", "set", "up"]
    assert result.split()[0].endswith("/place/here")
    assert found["2"]["tools_offered"] == "read_file terminal"
    assert found["2"]["api_calls"] == 2
    assert 1.4 < found["3"]["duration_seconds"] < 20
    kept = json.loads(found["1"]["dataset_row"])
    assert kept["metadata"] == {"level": {"deep": [1, None]}}
    assert kept["other"] == "kept"
    task = json.loads((tmp_path / "data/r/tasks/1.json").read_bytes())
    assert task["metadata"] == {"level": {"deep": [1, None]}}
    expected = statistics(tmp_path / "data/r")["expected_tools"]
    assert expected == {"bash": {"rows": 1, "used": 1}, "web_search": {"rows": 1, "used": 0}}


def first_result(row: dict[str, Any]) -> str:
    """The content of a row's first tool result."""
    messages = parse_trajectory(msgspec.convert(row["conversations"], list[Turn])).messages
    return next(message.content for message in messages if message.role == "tool")


def test_a_row_names_its_image(tmp_path: Path) -> None:
    rules = [{"turns": [runs("command -v python3 || echo none"), says("seen")]}]
    rows = [
        {"prompt": "a", "image": "batch-runner-test:py"},
        {"prompt": "b", "docker_image": "batch-runner-test:sh"},
        {"prompt": "c", "container_image": "127.0.0.1:1/none:0"},
    ]
    flags = [word for word in small_run(tmp_path, rows, rules) if "backend" not in word]
    code, out, err = run_program(*flags, "--container_backend=docker", home=tmp_path)
    assert code == 1, out + err
    first, second = merged(tmp_path / "data/r")
    assert first["environment"] == {"backend": "docker", "image": "batch-runner-test:py", "start_retries": 0}
    assert second["environment"] == {"backend": "docker", "image": "batch-runner-test:sh", "start_retries": 0}
    assert "python3" in first_result(first)
    assert "none" in first_result(second)
    failed = next(row for row in journal(tmp_path / "data/r") if row["status"] == "failed")
    assert failed["error_class"] == "image_unavailable"
    code, out, err = run_program(*flags, "--container_backend=local", "--output=other", home=tmp_path)
    assert code == 2


# --- characters that are none


def test_lone_surrogates_pass_through_everything_as_replacement_characters(tmp_path: Path) -> None:
    rows = tmp_path / "prompts.jsonl"
    rows.write_bytes(
        b'{"prompt": "say \\ud800\\u0000 it", "id": "\\udfff", "files": {"\\ud800.txt": "\\ud800"},'
        b' "metadata": {"\\ud83d": "\\ud83d\\u0000"}}\n{"prompt": "plain"}\n'
    )
    message = {
        "content": "\ud800",
        "reasoning_content": "\udc00 hm",
        "tool_calls": [
            tool_call(
                "terminal", '{"command": "printf \'\\\\xed\\\\xa0\\\\x80\\\\xff\'; cat *.txt; echo \\ud800\\u0000"}'
            ),
            tool_call("write_file", '{"path": "\\ud800", "content": "\\ud800"}', "call_1"),
            tool_call("terminal", '{"command": "touch \\"$(printf \'a\\\\xff\')\\"; ls"}', "call_2"),
        ],
    }
    rules: list[dict[str, Any]] = [
        {"turn": 1, "message": message, "finish_reason": "tool_calls"},
        {"message": {"content": "\udfff \U0001f600"}},
    ]
    with EndpointProcess(rules) as endpoint:
        flags = ["--model=m", f"--base_url={endpoint.url}", f"--dataset_file={rows}", "--run_name=r"]
        flags += ["--container_backend=local", "--enabled_toolsets=terminal,file", "--output_format=json,jsonl,turns"]
        code, out, err = run_program(*flags, "--prefill_messages_file=", home=tmp_path)
        assert code == 0, out + err
    for path in (tmp_path / "data/r").rglob("*"):
        if path.is_file():
            text = path.read_bytes().decode("utf-8")
            assert "\\ud8" not in text.lower()
            assert "\x00" not in text
            assert "\\u0000" not in text
    first, _ = merged(tmp_path / "data/r")
    assert (first["task_id"], first["final_response"]) == ("\ufffd", "\ufffd \U0001f600")
    assert first["status"] == "completed"
    assert prompts_of([first]) == ["say \ufffd\ufffd it"]
    assert (tmp_path / "data/r/tasks/%EF%BF%BD.json").exists()
    code, _, err = run_program(*flags, "--resume", home=tmp_path)
    assert (code, "nothing is left" in err) == (0, True)
