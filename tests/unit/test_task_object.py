"""A row as one object per task and as one line per turn."""

import json
from typing import Any

import msgspec
import pytest

from agent.row import Row, RowMetadata, Turn
from agent.task_object import task_object, turn_lines
from agent.trajectory import format_trajectory
from agent.types import Message, ToolCall, Usage

USER = Message(role="user", content="Count the files.")
CALLING = Message(
    role="assistant",
    content="Looking.",
    reasoning="ls will do",
    tool_calls=(
        ToolCall(id="x", name="terminal", arguments={"command": "ls 'é'"}),
        ToolCall(id="y", name="no_such"),
    ),
)
RESULTS = [
    Message(role="tool", content='{"output":"a\\n","exit_code":0}', tool_call_id="x"),
    Message(role="tool", content="no such tool", tool_call_id="y"),
]
DONE = Message(role="assistant", content="One.")
SYSTEM = Message(role="system", content="Be brief.")
TIME = "2025-01-02T03:04:05.678Z"


def row_of(messages: list[Message], **columns: Any) -> Row:
    row = Row(
        prompt_index=3,
        conversations=format_trajectory(messages, []),
        metadata=RowMetadata(batch_num=0, timestamp=TIME, model="m-1"),
        toolsets_used=["terminal"],
        tool_stats={},
        tool_error_counts={},
        task_id="task_3",
        row_key="sha:1",
        row_sha="1",
        status="completed",
        end_status="completed",
    )
    return msgspec.structs.replace(row, **columns)


def test_task_object_holds_everything_asked_for() -> None:
    row = row_of(
        [USER, CALLING, *RESULTS, DONE],
        final_response="One.",
        success=True,
        success_reason="it is so",
        reward=0.5,
        duration_seconds=1.25,
        usage=Usage(input_tokens=10, output_tokens=2, cache_read_tokens=4, total_tokens=12),
        dataset_row='{"metadata":{"level":2},"other":1}',
    )
    assert task_object(row) == {
        "id": "task_3",
        "task_id": "task_3",
        "sample_index": 0,
        "prompt": "Count the files.",
        "model": "m-1",
        "final_response": "One.",
        "messages": [
            {"role": "user", "content": "Count the files."},
            {
                "role": "assistant",
                "content": "Looking.",
                "reasoning": "ls will do",
                "tool_calls": [
                    {
                        "id": "call_1_0",
                        "type": "function",
                        "function": {"name": "terminal", "arguments": '{"command": "ls \'é\'"}'},
                    },
                    {"id": "call_1_1", "type": "function", "function": {"name": "no_such", "arguments": "{}"}},
                ],
            },
            {
                "role": "tool",
                "content": '{"output":"a\\n","exit_code":0}',
                "tool_call_id": "call_1_0",
                "name": "terminal",
            },
            {"role": "tool", "content": "no such tool", "tool_call_id": "call_1_1", "name": "no_such"},
            {"role": "assistant", "content": "One.", "reasoning": ""},
        ],
        "usage": {
            "input_tokens": 10,
            "output_tokens": 2,
            "cache_read_tokens": 4,
            "cache_write_tokens": 0,
            "reasoning_tokens": 0,
            "total_tokens": 12,
        },
        "tool_calls_made": 2,
        "duration_seconds": 1.25,
        "status": "completed",
        "reason": "",
        "success": True,
        "success_reason": "it is so",
        "reward": 0.5,
        "error": "",
        "metadata": {"level": 2},
    }


def test_a_failed_row_has_the_same_keys_and_types() -> None:
    good = task_object(row_of([USER, CALLING, *RESULTS, DONE], dataset_row='{"metadata":{"a":1}}'))
    bad = task_object(row_of([USER], status="failed", reason="auth", error="401", dataset_row="{}"))
    assert {key: type(value) for key, value in bad.items()} == {key: type(value) for key, value in good.items()}
    assert (bad["error"], bad["tool_calls_made"], bad["metadata"]) == ("401", 0, {})


def test_context_is_shown_and_not_counted() -> None:
    context = [USER, CALLING, *RESULTS, DONE]
    given = len(format_trajectory(context, [])) - 1
    own = [Message(role="user", content="And now?"), CALLING, *RESULTS, DONE]
    row = row_of([SYSTEM, *context, *own], context_turns=given)
    told = task_object(row)
    assert (told["prompt"], told["tool_calls_made"], len(told["messages"])) == ("And now?", 2, 11)
    assert told["messages"][0] == {"role": "system", "content": "Be brief."}
    assert told["messages"][7]["tool_calls"][0]["id"] == "call_3_0"
    stats = turn_lines(row)[-1]["_stats"]
    assert stats["tool_usage"] == {"no_such": 1, "terminal": 1}
    assert stats["reasoning_coverage"] == 0.5
    assert stats["total_turns"] == 11


def test_turn_lines() -> None:
    row = row_of([USER, CALLING, *RESULTS, DONE], duration_seconds=2.0, status="max_turns")
    assert turn_lines(row) == [
        {
            "turn": 1,
            "role": "user",
            "content": "Count the files.",
            "tool_calls": [],
            "reasoning": "",
            "timestamp": TIME,
        },
        {
            "turn": 2,
            "role": "assistant",
            "content": "Looking.",
            "tool_calls": [
                {"name": "terminal", "args": {"command": "ls 'é'"}},
                {"name": "no_such", "args": {}},
            ],
            "reasoning": "ls will do",
            "timestamp": TIME,
        },
        {"turn": 3, "role": "tool", "name": "terminal", "result": {"output": "a\n", "exit_code": 0}, "timestamp": TIME},
        {"turn": 4, "role": "tool", "name": "no_such", "result": "no such tool", "timestamp": TIME},
        {"turn": 5, "role": "assistant", "content": "One.", "tool_calls": [], "reasoning": "", "timestamp": TIME},
        {
            "_stats": {
                "total_turns": 5,
                "tool_usage": {"no_such": 1, "terminal": 1},
                "reasoning_coverage": 0.5,
                "duration_seconds": 2.0,
                "task_id": "task_3",
                "status": "max_turns",
            }
        },
    ]


def test_a_row_without_a_gpt_turn_has_no_coverage() -> None:
    *lines, last = turn_lines(row_of([USER], status="failed"))
    assert [line["role"] for line in lines] == ["user"]
    assert (last["_stats"]["reasoning_coverage"], last["_stats"]["tool_usage"]) == (0.0, {})


@pytest.mark.parametrize("text", ["7", "null", '"x"', "[", "", "{}x"])
def test_a_result_that_is_no_object_is_shown_as_its_text(text: str) -> None:
    calling = Message(role="assistant", tool_calls=(ToolCall(id="x", name="t"),))
    row = row_of([USER, calling, Message(role="tool", content=text, tool_call_id="x")])
    assert turn_lines(row)[2]["result"] == text


def test_no_line_needs_more_than_json() -> None:
    row = row_of([USER, CALLING, *RESULTS, DONE])
    assert json.loads(json.dumps(turn_lines(row))) == turn_lines(row)
    assert json.loads(json.dumps(task_object(row))) == task_object(row)
    assert row.conversations[0] == Turn("system", row.conversations[0].value)
