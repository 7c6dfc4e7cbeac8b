"""A row as two other output formats show it: one object per task, and one line per turn. Pure."""

import json
from collections import Counter
from typing import Any

import msgspec

from agent.row import Row
from agent.trajectory import parse_trajectory, reasoning_counts
from agent.types import Message


def task_object(row: Row) -> dict[str, Any]:
    """The task's object: always these keys, each of one type; `error` is "" where there was none.

    `messages` are in OpenAI's form (arguments as JSON text), with an assistant's thinking under `reasoning`; a system
    message is the dataset's own. `tool_calls_made` and nothing else leaves out the turns that came with the row.
    """
    messages = parse_trajectory(row.conversations).messages
    return {
        "id": row.task_id,
        "task_id": row.task_id,
        "sample_index": row.sample_index,
        "prompt": next(message.content for message in reversed(messages) if message.role == "user"),
        "model": row.metadata.model,
        "final_response": row.final_response,
        "messages": [_openai_form(message) for message in messages],
        "usage": msgspec.to_builtins(row.usage),
        "tool_calls_made": sum(_calls_made(row).values()),
        "duration_seconds": row.duration_seconds,
        "status": row.status,
        "reason": row.reason,
        "success": row.success,
        "success_reason": row.success_reason,
        "reward": row.reward,
        "error": row.error,
        "metadata": _metadata(row),
    }


def turn_lines(row: Row) -> list[dict[str, Any]]:
    """One line per turn, numbered from 1, then one with statistics under `_stats`.

    A tool result has a line of its own, and `result` is the result object. Every `timestamp` is the row's end: the
    journal keeps no times of single turns. The statistics leave out the turns that came with the row.
    """
    messages = parse_trajectory(row.conversations).messages
    timestamp = row.metadata.timestamp
    lines = [
        {"turn": number, **_turn_line(message), "timestamp": timestamp} for number, message in enumerate(messages, 1)
    ]
    gpt_turns, with_reasoning = reasoning_counts(row.conversations, _given(row))
    stats = {
        "total_turns": len(lines),
        "tool_usage": dict(sorted(_calls_made(row).items())),
        "reasoning_coverage": round(with_reasoning / gpt_turns, 4) if gpt_turns else 0.0,
        "duration_seconds": row.duration_seconds,
        "task_id": row.task_id,
        "status": row.status,
    }
    return [*lines, {"_stats": stats}]


def _given(row: Row) -> int:
    """Turns that stand before the model's own: the system turn and the row's context."""
    return 1 + row.context_turns


def _calls_made(row: Row) -> Counter[str]:
    own = parse_trajectory(row.conversations[_given(row) :]).messages
    return Counter(call.name for message in own for call in message.tool_calls)


def _openai_form(message: Message) -> dict[str, Any]:
    said: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.role == "tool":
        return {**said, "tool_call_id": message.tool_call_id, "name": message.name}
    if message.role == "assistant":
        said["reasoning"] = message.reasoning
    if message.tool_calls:
        said["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in message.tool_calls
        ]
    return said


def _turn_line(message: Message) -> dict[str, Any]:
    if message.role == "tool":
        return {"role": "tool", "name": message.name, "result": _result(message.content)}
    calls = [{"name": call.name, "args": call.arguments} for call in message.tool_calls]
    return {"role": message.role, "content": message.content, "tool_calls": calls, "reasoning": message.reasoning}


def _result(content: str) -> Any:
    """The object or array that the text is, else the text."""
    try:
        value = msgspec.json.decode(content)
    except msgspec.DecodeError:
        return content
    return value if isinstance(value, dict | list) else content


def _metadata(row: Row) -> dict[str, Any]:
    metadata = msgspec.json.decode(row.dataset_row).get("metadata")
    return metadata if isinstance(metadata, dict) else {}
