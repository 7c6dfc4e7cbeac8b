"""A dataset row's chat, in OpenAI's form (role/content) or as from/value turns, read to messages. Pure."""

from typing import Any

import msgspec
from msgspec import Struct

from agent.models.replies import split_thoughts
from agent.row import Turn
from agent.trajectory import parse_trajectory
from agent.types import Message, Role, ToolCall

_SENDERS = {
    "system": "system",
    "human": "human",
    "user": "human",
    "gpt": "gpt",
    "assistant": "gpt",
    "tool": "tool",
}
_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class ChatProblem(Exception):
    """Why a value is no chat that a prompt can be made of."""


class Chat(Struct, frozen=True):
    """`text` is the user's last turn, `context` what came before it, without the system's text."""

    text: str
    context: tuple[Message, ...] = ()
    system_text: str = ""


def read_chat(value: Any) -> Chat:
    """Reads either form. Raises ChatProblem."""
    if not isinstance(value, list) or not value:
        raise ChatProblem("must be a list of turns")
    if not all(isinstance(turn, dict) for turn in value):
        raise ChatProblem("every turn must be an object")
    messages = _from_turns(value) if "from" in value[0] else _from_openai(value)
    return _chat(messages)


def _chat(messages: list[Message]) -> Chat:
    start = next((n for n, message in enumerate(messages) if message.role != "system"), len(messages))
    system_text = "\n\n".join(message.content for message in messages[:start] if message.content)
    if any(message.role == "system" for message in messages[start:]):
        raise ChatProblem("a system turn may only stand at the beginning")
    if start == len(messages) or messages[-1].role != "user":
        raise ChatProblem("the last turn must be the user's")
    if not messages[-1].content.strip():
        raise ChatProblem("the last turn is blank")
    return Chat(messages[-1].content, tuple(messages[start:-1]), system_text)


def _from_turns(turns: list[dict[str, Any]]) -> list[Message]:
    try:
        return parse_trajectory([_turn(turn) for turn in turns]).messages
    except ValueError as problem:
        raise ChatProblem(str(problem)) from problem


def _turn(turn: dict[str, Any]) -> Turn:
    sender, value = turn.get("from"), turn.get("value")
    if sender not in _SENDERS:
        raise ChatProblem(f"from must be one of {', '.join(_SENDERS)}, not {sender!r}")
    if not isinstance(value, str):
        raise ChatProblem("value must be a string")
    return Turn(_SENDERS[sender], value)


def _from_openai(turns: list[dict[str, Any]]) -> list[Message]:
    messages: list[Message] = []
    waiting: list[ToolCall] = []
    for number, turn in enumerate(turns, 1):
        role = _ROLES.get(turn.get("role", "")) if isinstance(turn.get("role"), str) else None
        if role is None:
            raise ChatProblem(f"turn {number}: role must be one of {', '.join(_ROLES)}")
        if waiting and role != "tool":
            raise ChatProblem(f"turn {number}: the call of {waiting[0].name} before it has no result")
        message = _message(role, turn, number, waiting)
        waiting = list(message.tool_calls) or waiting
        messages.append(message)
    return messages


def _message(role: Role, turn: dict[str, Any], number: int, waiting: list[ToolCall]) -> Message:
    content = _content(turn.get("content"), number)
    if role == "tool":
        call = _answered(turn.get("tool_call_id"), number, waiting)
        return Message(role="tool", content=content, tool_call_id=call.id, name=call.name)
    if role != "assistant":
        return Message(role=role, content=content)
    calls = tuple(_call(call, f"call_{number}_{n}") for n, call in enumerate(turn.get("tool_calls") or ()))
    if len({call.id for call in calls}) < len(calls):
        raise ChatProblem(f"turn {number}: two calls have one id")
    content, reasoning = split_thoughts({**turn, "content": content})
    return Message(role=role, content=content, reasoning=reasoning, tool_calls=calls)


def _answered(call_id: Any, number: int, waiting: list[ToolCall]) -> ToolCall:
    """The call that a result answers, taken off the waiting ones: by id, or the next one where it has no id."""
    for call in waiting:
        if not call_id or call.id == call_id:
            waiting.remove(call)
            return call
    raise ChatProblem(f"turn {number}: a tool result that answers no call")


def _content(value: Any, number: int) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "".join(part["text"] for part in value)
    raise ChatProblem(f"turn {number}: content must be a string or a list of text parts")


def _call(value: Any, own_id: str) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatProblem('a tool call must be {"id": …, "function": {"name": …, "arguments": …}}')
    call_id = value.get("id")
    return ToolCall(
        id=call_id if isinstance(call_id, str) and call_id else own_id,
        name=function["name"],
        arguments=_arguments(function.get("arguments")),
    )


def _arguments(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError:
            return {}
    return value if isinstance(value, dict) else {}
