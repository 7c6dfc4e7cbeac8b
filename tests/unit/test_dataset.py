import gzip
import hashlib
import json
import os
import threading
from array import array
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from agent.text import clean
from agent.types import Message
from batch.dataset import Dataset, DatasetScan, Selection, open_dataset, scan
from batch.rows import MAX_DEPTH, RowProblem, RowReader, parse_row
from tests.unit.made import dataset_of
from tools.errors import UsageProblem
from tools.toolsets import BUILT_IN


def scanned(path: Path, content: bytes) -> tuple[Dataset, DatasetScan]:
    path.write_bytes(content)
    dataset = open_dataset(str(path))
    return dataset, scan(dataset, BUILT_IN.resolve_names)


def prompts(dataset: Dataset) -> list[str]:
    return [parse_row(dataset.job(row).line).text for row in range(len(dataset))]


ROWS = b'{"prompt":"a"}\n{"prompt":"b"}\n'


@pytest.mark.parametrize(
    "content",
    [
        ROWS,
        ROWS[:-1],
        b"\xef\xbb\xbf" + ROWS,
        ROWS.replace(b"\n", b"\r\n"),
        b"\n" + ROWS.replace(b"\n", b"\n\n  \n") + b"\n\n",
        b'[{"prompt":"a"},\n {"prompt":"b"}]\n',
        b'\xef\xbb\xbf\n [{"prompt":"a"},{"prompt":"b"}]',
        gzip.compress(ROWS[:15], mtime=0) + gzip.compress(ROWS[15:], mtime=0),
        zstandard.compress(ROWS[:15]) + zstandard.compress(ROWS[15:]),
        gzip.compress(b'[{"prompt":"a"},{"prompt":"b"}]', mtime=0),
    ],
)
def test_every_form_of_a_file_gives_the_same_rows(tmp_path: Path, content: bytes) -> None:
    dataset, found = scanned(tmp_path / "d", content)
    assert prompts(dataset) == ["a", "b"]
    assert (found.rows, found.bad_rows) == (2, 0)


def test_size_and_hash_are_those_of_the_lines(tmp_path: Path) -> None:
    _, found = scanned(tmp_path / "d.gz", gzip.compress(ROWS, mtime=0))
    assert (found.size, found.sha256) == (len(ROWS), hashlib.sha256(ROWS).hexdigest())


def test_parquet(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a", "b"], "id": [7, 8], "image": [None, "x:1"], "tools": [["bash"], None]})
    pq.write_table(table, tmp_path / "d")
    dataset = open_dataset(str(tmp_path / "d"))
    found = scan(dataset, BUILT_IN.resolve_names)
    assert (prompts(dataset), found.images, found.names) == (["a", "b"], 1, frozenset({"bash"}))
    assert dataset.job(0).row_key == "id:7"


def test_line_separators_of_unicode_do_not_end_a_line(tmp_path: Path) -> None:
    texts = [f"x{odd}y" for odd in "\u2028\u2029\u0085"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False).encode() for text in texts]
    dataset, found = scanned(tmp_path / "d", b"\n".join(lines))
    assert prompts(dataset) == texts
    assert found.rows == 3


def test_a_row_of_20_mb(tmp_path: Path) -> None:
    dataset, _ = scanned(tmp_path / "d", b'{"prompt":"' + b"x" * 20_000_000 + b'"}\n{"prompt":"b"}')
    assert [len(text) for text in prompts(dataset)] == [20_000_000, 1]


def test_a_pipe_is_copied_to_where_a_resume_finds_it(tmp_path: Path) -> None:
    pipe, copy = tmp_path / "pipe", tmp_path / "run" / "dataset.jsonl"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(ROWS,))
    writer.start()
    dataset = open_dataset(str(pipe), spool_to=copy)
    writer.join()
    scan(dataset, BUILT_IN.resolve_names)
    assert (prompts(dataset), dataset.path, copy.read_bytes()) == (["a", "b"], str(copy), ROWS)
    assert [path.name for path in copy.parent.iterdir()] == ["dataset.jsonl"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(ROWS, mtime=0)[:-6], "damaged"),
        (gzip.compress(ROWS, mtime=0)[:12] + b"\xff" * 30, "damaged"),
        (zstandard.compress(ROWS * 9)[:-1], "damaged"),
        (zstandard.compress(ROWS)[:4] + b"\xff" * 9, "damaged"),
        (b"PAR1" + ROWS, "damaged"),
        (None, "No such file"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / "d").write_bytes(content)
    with pytest.raises(UsageProblem, match=said):
        open_dataset(str(tmp_path / "d"))


def test_a_directory_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="directory"):
        open_dataset(str(tmp_path))


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    assert scanned(tmp_path / "d", b"")[1].rows == 0


BAD = {
    b"{": "not JSON",
    b"text": "not JSON",
    b'{"prompt":"x"} y': "not JSON",
    b'{"prompt":"x","n":NaN}': "NaN",
    b'{"prompt":"x","n":[-Infinity]}': "-Infinity",
    b'{"prompt":"x","n":1e999}': "too large",
    b'{"prompt":"\xff"}': "UTF-8",
    b"7": "not an object but a number",
    b'"the prompt string"': "not an object but a string",
    b"[]": "not an object but a list",
    b"null": "not an object but null",
    b"{}": "no prompt",
    b'{"prompt":null}': "no prompt",
    b'{"prompt":123}': "prompt must be a string, not a number",
    b'{"prompt":["a"]}': "prompt must be a string, not a list",
    b'{"prompt":{"text":"x"}}': "prompt must be a string, not an object",
    b'{"prompt":""}': "prompt is blank",
    b'{"prompt":" \\n"}': "prompt is blank",
    b'{"messages":[]}': "messages: must be a list of turns",
    b'{"messages":"x"}': "messages: must be a list of turns",
    b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}': "last turn must be the user's",
    b'{"prompt":"x","messages":[{"role":"user","content":"a"}]}': "contradict",
    b'{"prompt":"x","id":1.5}': "id must be a string or an integer",
    b'{"prompt":"x","id":true}': "id must be a string or an integer",
    b'{"prompt":"x","id":""}': "id is blank",
    b'{"prompt":"x","id":"a","task_id":"b"}': "id and task_id contradict",
    b'{"prompt":"x","image":1}': "image must be a string",
    b'{"prompt":"x","env":{"A":1}}': "env.A must be a string",
    b'{"prompt":"x","env":{"A=B":"1"}}': "no name of a variable",
    b'{"prompt":"x","env":{"A":"1","UID":"1"}}': "env: UID: the sandbox's shell holds it itself",
    b'{"prompt":"x","env":{"BATCH_CALL":"x"}}': "env: BATCH_CALL: ",
    b'{"prompt":"x","files":{"a":1}}': "files",
    b'{"prompt":"x","files":{"a":{"base64":"?"}}}': "base64",
    b'{"prompt":"x","tools":"terminal"}': "tools must be a list of strings",
    b'{"prompt":"x","tools":[1]}': "tools must hold strings only",
    b'{"prompt":"x","tools":["teminal"]}': "terminal",
    b'{"prompt":"x","toolsets":["nothing_such"]}': "nothing_such",
    b'{"prompt":"x","max_turns":0}': "max_turns must be at least 1",
    b'{"prompt":"x","max_turns":2.0}': "max_turns must be an integer",
    b'{"prompt":"x","max_turns":true}': "max_turns must be an integer",
    b'{"prompt":"x","timeout_seconds":0}': "timeout_seconds",
    b'{"prompt":"x","timeout_seconds":"5"}': "timeout_seconds must be a number",
    b'{"prompt":"x","metadata":[]}': "metadata must be an object",
    b'{"prompt":"x","response_format":{"type":"objekt"}}': "no JSON schema",
    b'{"prompt":"x","response_format":{"type":"json_object"}}': "no JSON schema",
    b'{"prompt":"x","response_format":{"$ref":"https://example.com/a.json"}}': "no JSON schema (it refers to",
    b'{"prompt":"x","response_format":{"items":{"$ref":"#/$defs/a"}}}': "no JSON schema (it refers to",
    b'{"prompt":"x","a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}": "nested deeper",
    b'{"prompt":"x","a":' + b"[" * 100_000 + b"]" * 100_000 + b"}": "nested deeper",
    b'{"prompt":"x","a":' + b"1" * 5000 + b"}": "not JSON",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_rows_are_named_by_line_and_reason(tmp_path: Path, line: bytes) -> None:
    dataset, found = scanned(tmp_path / "d", b'{"prompt":"first"}\n\n' + line + b'\n{"prompt":"last"}')
    assert [bad.line for bad in found.bad] == [3]
    assert BAD[line] in found.bad[0].reason
    assert prompts(dataset) == ["first", "last"]


def test_all_bad_rows_are_counted_and_the_first_thousand_kept(tmp_path: Path) -> None:
    _, found = scanned(tmp_path / "d", b"x\n" * 1500)
    assert (found.bad_rows, len(found.bad), found.rows) == (1500, 1000, 0)


@pytest.mark.parametrize("line", [b"[]", b"[1]", b'[{"prompt":"x"}'])
def test_a_first_line_that_begins_with_a_bracket_makes_no_array(tmp_path: Path, line: bytes) -> None:
    dataset, found = scanned(tmp_path / "d", line + b'\n{"prompt":"a"}\n')
    assert ([bad.line for bad in found.bad], prompts(dataset)) == ([1], ["a"])


def test_an_id_is_one_whether_a_number_or_a_string(tmp_path: Path) -> None:
    dataset, found = scanned(tmp_path / "d", b'{"prompt":"a","id":7}\n{"prompt":"b","task_id":"7"}\n{"prompt":"c"}')
    assert [bad.line for bad in found.bad] == [2]
    assert "7" in found.bad[0].reason
    assert [dataset.job(row).task_id for row in range(2)] == ["7", "task_1"]


def test_an_id_that_another_row_goes_by_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="task_1"):
        scanned(tmp_path / "d", b'{"prompt":"a","id":"task_1"}\n{"prompt":"b"}')


def test_odd_characters_become_replacement_characters(tmp_path: Path) -> None:
    lines = [b'{"prompt":"a\\ud800b\\u0000"}', b'{"prompt":"c\xed\xa0\x80d"}', b'{"prompt":"\\ud83d\\ude00"}']
    dataset, found = scanned(tmp_path / "d", b"\n".join(lines))
    assert prompts(dataset) == ["a\ufffdb\ufffd", "c\ufffdd", "\U0001f600"]
    assert found.bad_rows == 0


def test_null_is_as_good_as_absent(tmp_path: Path) -> None:
    names = "id messages image cwd env files setup tools toolsets max_turns timeout_seconds metadata response_format"
    dataset = dataset_of(tmp_path / "d", [{"prompt": "a", **dict.fromkeys(names.split())}])
    prompt = parse_row(dataset.job(0).line)
    assert (prompt.text, prompt.image, prompt.max_turns, prompt.tools) == ("a", "", None, ())


def test_every_field_arrives() -> None:
    row: dict[str, Any] = {
        "prompt": "p",
        "task_id": 7,
        "docker_image": "i:1",
        "cwd": "/w",
        "env": {"A": "1"},
        "files": {"a.txt": "text ü", "b.bin": {"base64": "AAH/"}},
        "setup": "make",
        "tools": ["bash"],
        "toolsets": ["file"],
        "max_turns": 3,
        "timeout_seconds": 5,
        "expected_tools": ["terminal"],
        "metadata": {"k": [1]},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        "other": 1.5,
    }
    prompt = parse_row(json.dumps(row).encode())
    assert (prompt.id, prompt.image, prompt.cwd, prompt.variables, prompt.setup) == (
        "7",
        "i:1",
        "/w",
        {"A": "1"},
        "make",
    )
    assert prompt.files == {"a.txt": "text ü".encode(), "b.bin": b"\x00\x01\xff"}
    assert (prompt.tools, prompt.max_turns, prompt.timeout_seconds) == (("bash", "file"), 3, 5.0)
    assert (prompt.expected_tools, prompt.response_format) == (("terminal",), {"type": "object"})
    assert prompt.rest == {key: value for key, value in row.items() if key not in ("prompt", "task_id")}


# --- chats

CALL = {"id": "c1", "type": "function", "function": {"name": "terminal", "arguments": '{"command":"ls"}'}}


def test_an_openai_chat() -> None:
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "li"}, {"type": "text", "text": "st"}]},
        {"role": "assistant", "content": None, "reasoning_content": "ls will do", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
        {"role": "assistant", "content": "one file"},
        {"role": "user", "content": "which?"},
    ]
    prompt = parse_row(json.dumps({"messages": chat}).encode())
    assert (prompt.text, prompt.system_text) == ("which?", "be brief")
    assert [(message.role, message.content) for message in prompt.context] == [
        ("user", "list"),
        ("assistant", ""),
        ("tool", "a.txt"),
        ("assistant", "one file"),
    ]
    assert prompt.context[1].reasoning == "ls will do"
    assert prompt.context[1].tool_calls[0].arguments == {"command": "ls"}
    assert prompt.context[2].tool_call_id == prompt.context[1].tool_calls[0].id == "c1"


def test_thoughts_in_the_text_of_an_openai_chat_are_split_as_a_reply_is() -> None:
    said: list[dict[str, Any]] = [
        {"content": "<think>look first</think>\none file"},
        {"content": [{"type": "text", "text": "look first</think>one file"}]},
        {"content": "<think>look first</think>one file", "reasoning": "look first"},
        {"content": "one file", "reasoning_details": [{"text": "look first"}]},
    ]
    for turn in said:
        chat = [
            {"role": "user", "content": "how many?"},
            {"role": "assistant", **turn},
            {"role": "user", "content": "which?"},
        ]
        context = parse_row(json.dumps({"messages": chat}).encode()).context
        assert context[1] == Message(role="assistant", content="one file", reasoning="look first")


def test_from_value_turns() -> None:
    turns = [
        {"from": "system", "value": "be brief"},
        {"from": "human", "value": "list"},
        {"from": "gpt", "value": "<think>\nso\n</think>\none file"},
        {"from": "human", "value": "which?"},
    ]
    prompt = parse_row(json.dumps({"conversations": turns}).encode())
    assert (prompt.text, prompt.system_text) == ("which?", "be brief")
    assert prompt.context == (
        Message(role="user", content="list"),
        Message(role="assistant", content="one file", reasoning="so"),
    )


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        (
            [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}, {"role": "user", "content": "c"}],
            "system",
        ),
        ([{"role": "tool", "content": "a"}, {"role": "user", "content": "c"}], "answers no call"),
        ([{"role": "assistant", "tool_calls": [CALL]}, {"role": "user", "content": "c"}], "no result"),
        ([{"role": "assistant", "tool_calls": [CALL, CALL]}, {"role": "user", "content": "c"}], "one id"),
        ([{"role": "assistant", "tool_calls": [{}]}, {"role": "user", "content": "c"}], "tool call must be"),
        ([{"role": "robot", "content": "a"}], "role must be"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "text parts"),
        ([{"role": "user", "content": " "}], "blank"),
        ([{"role": "user", "content": 5}], "content must be"),
        ([7], "object"),
        ([{"from": "human", "value": 1}], "value must be"),
        ([{"from": "robot", "value": "x"}], "from must be"),
    ],
)
def test_what_is_no_chat(turns: list[Any], said: str) -> None:
    with pytest.raises(RowProblem, match=said):
        parse_row(json.dumps({"messages": turns}).encode())


# --- identity

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON_VALUES, max_size=4), st.booleans())
def test_the_canonical_text_is_that_of_the_standard_library(row: dict[str, Any], ascii_only: bool) -> None:
    line = json.dumps(row, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    read, canonical = RowReader().read(line)
    expected = clean(row)
    assert read == expected
    assert canonical == json.dumps(expected, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()


def test_equal_rows_are_told_apart_by_number(tmp_path: Path) -> None:
    dataset = dataset_of(
        tmp_path / "d", [b'{"prompt":"hi","n":1}', {"prompt": "other"}, b'{ "n": 1, "prompt": "hi"}'] * 2
    )
    sha = hashlib.sha256(b'{"n":1,"prompt":"hi"}').hexdigest()
    jobs = [dataset.job(row) for row in range(6)]
    assert [job.row_key for job in jobs if job.row_sha == sha] == [
        f"sha:{sha}{mark}" for mark in ("", "#2", "#3", "#4")
    ]
    assert [dataset.find(job.row_key) for job in jobs] == list(range(6))
    assert dataset.find("sha:" + "0" * 64) == -1


def test_an_edited_row_with_an_id_keeps_its_key_and_changes_its_hash(tmp_path: Path) -> None:
    before = dataset_of(tmp_path / "a", [{"id": "x", "prompt": "one"}]).job(0)
    after = dataset_of(tmp_path / "b", [{"id": "y", "prompt": "one"}, {"id": "x", "prompt": "two"}])
    assert before.row_key == after.job(1).row_key == "id:x"
    assert after.find(before.row_key) == 1
    assert not after.same(1, before.row_sha)


def test_many_rows_are_found_and_take_few_bytes(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "d", ({"prompt": f"p{n % 9000}"} for n in range(10_000)))
    jobs = [dataset.job(row) for row in range(10_000)]
    assert [dataset.find(job.row_key) for job in jobs] == list(range(10_000))
    arrays = [value for value in vars(dataset).values() if isinstance(value, array | bytearray)]
    assert sum(memoryview(each).nbytes for each in arrays) <= 40 * len(dataset)


def test_a_file_that_changes_under_the_run_is_noticed(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "d", [{"prompt": "one"}, {"prompt": "two"}])
    (tmp_path / "d").write_bytes(b'{"prompt": "two"}\n{"prompt": "one"}\n')
    with pytest.raises(UsageProblem, match="changed"):
        dataset.job(0)


# --- selection


def order(dataset: Dataset, **selection: Any) -> list[int]:
    return list(Selection(**selection).order(dataset))


def test_the_first_rows_after_the_shuffle(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "d", ({"prompt": str(n)} for n in range(100)))
    assert order(dataset) == list(range(100))
    assert order(dataset, max_samples=3) == [0, 1, 2]
    assert order(dataset, max_samples=200) == list(range(100))
    shuffled = order(dataset, shuffle=True, seed=1)
    assert shuffled != sorted(shuffled) == list(range(100))
    assert order(dataset, shuffle=True, seed=1, max_samples=9) == shuffled[:9]
    assert order(dataset, shuffle=True, seed=2) != shuffled


def test_rows_that_ask_for_a_toolset_are_spread_evenly(tmp_path: Path) -> None:
    path = tmp_path / "d"
    path.write_text(
        "".join(json.dumps({"prompt": str(n), "tools": ["bash"] if n < 5 else []}) + "\n" for n in range(20))
    )
    dataset = open_dataset(str(path))
    scan(dataset, BUILT_IN.resolve_names, asks_for_spread=lambda prompt: "bash" in prompt.tools)
    mixed = order(dataset)
    assert [place for place, row in enumerate(mixed) if row < 5] == [3, 7, 11, 15, 19]
    assert [row for row in mixed if row < 5] == [0, 1, 2, 3, 4]
    assert [row for row in mixed if row >= 5] == list(range(5, 20))


def test_a_prompt_from_the_command_line_is_a_dataset_of_one_row() -> None:
    dataset = Dataset.of_prompt("say hi")
    scan(dataset, BUILT_IN.resolve_names)
    assert prompts(dataset) == ["say hi"]
