"""Messages to from/value turns and back. Pure; `parse_trajectory(format_trajectory(m, t)).messages == normal_form(m)`.

The format is the published Hermes function-calling one, as the reference system's batch runner writes it: a system turn
with the tools, then human, gpt and tool turns; a think block first in every gpt turn, `<tool_call>` and
`<tool_response>` blocks of one line of JSON, all results of one gpt turn in one tool turn. Unlike there, no text can be
taken for a tag: inside JSON the `<` of our tags is `\\u003c`, in reasoning and prose it is `&lt;` (and what already
looks so gets one `amp;` more). Human turns and the dataset's system text stand as the model saw them.
"""

import json
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from agent.row import Turn
from agent.text import clean, json_text
from agent.types import Message, ToolCall
from tools.base import ToolSpec

T = TypeVar("T")

NOT_FINISHED = '{"error":"The call did not finish."}'

_BEFORE_TOOLS = (
    "You are a function calling AI model. The signatures of the functions that you have stand between <tools> </tools> "
    "tags. You may call one or more of them to help with what the user asks; where none helps, answer in natural "
    "language. Make no assumptions about the values of arguments. Once your calls have been carried out, their results "
    "come to you inside <tool_response> </tool_response> tags. Here are the available tools:\n<tools>\n"
)
_AFTER_TOOLS = (
    "\n</tools>\nWrite each function call as one JSON object that follows this pydantic-style JSON schema:\n"
    "{'title': 'FunctionCall', 'type': 'object', 'properties': {'name': {'title': 'Name', 'type': 'string'}, "
    "'arguments': {'title': 'Arguments', 'type': 'object'}}, 'required': ['name', 'arguments']}\n"
    "Put each function call inside <tool_call> </tool_call> XML tags.\n"
)
_EXAMPLE = "Example:\n<tool_call>\n{'name': <function-name>,'arguments': <args-dict>}\n</tool_call>"

_TAG = r"(/?(?:think|tools|tool_call|tool_response)>)"
_RAW_TAG = re.compile("<" + _TAG)
_ESCAPED_TAG = re.compile("&((?:amp;)*)lt;" + _TAG)
_TOOLS = re.compile(r"<tools>\n(.*)\n</tools>\n")  # one line: that is what tells it from the mention before
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_RESPONSE = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)
_THINK_FIRST = re.compile(r"<think>\n(?:.+\n)?</think>(?:\n|\Z)", re.DOTALL)

_spoken_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


class ParsedTrajectory(Struct, frozen=True):
    """A trajectory read. The dataset's system text, if any, is the first message."""

    messages: list[Message]
    tools: list[ToolSpec]


class _Call(Struct):
    name: str
    arguments: dict[str, Any]


class _Response(Struct):
    name: str
    content: Any


# --- writing


def system_turn(tools: Sequence[ToolSpec], system_text: str = "") -> str:
    """The value of the system turn: the tools as one JSON array in the order given, then the dataset's system text."""
    told = _BEFORE_TOOLS + _tools_json(tools) + _AFTER_TOOLS + _EXAMPLE
    return f"{told}\n\n{clean(system_text)}" if system_text else told


def format_trajectory(messages: Sequence[Message], tools: Sequence[ToolSpec], system_text: str = "") -> list[Turn]:
    """The turns of a conversation. `system_text` is the same as a system message in front; never raises."""
    said = _in_order([Message(role="system", content=system_text), *messages])
    head = next(said).content
    return [Turn("system", system_turn(tools, head)), *_turns(said)]


def normal_form(messages: Iterable[Message]) -> list[Message]:
    """What of a conversation a trajectory keeps.

    One system message in front, if there is any text; reasoning and text of assistant turns stripped; call ids
    `call_{turn}_{n}` (turn = number of the assistant turn from 1, n from 0); arguments that JSON cannot hold are {};
    one result per call in call order, taken by id, an error where there is none, results of no call left out; a
    result that is a JSON object or array as compact JSON; all text clean; nothing that only the wire needs.
    """
    head, *said = _in_order(messages)
    return [head, *map(_plain_result, said)] if head.content else list(map(_plain_result, said))


def _in_order(messages: Iterable[Message]) -> Iterator[Message]:
    """The system message first, even if empty; the rest normal but for the spelling of results."""
    system: list[str] = []
    groups: list[tuple[Message, list[Message]]] = []
    for message in messages:
        if message.role == "system":
            system.append(message.content)
        elif message.role != "tool":
            groups.append((message, []))
        elif groups:
            groups[-1][1].append(message)
    yield Message(role="system", content=clean("\n\n".join(filter(None, system))))
    turn = 0
    for message, results in groups:
        if message.role == "assistant":
            turn += 1
            yield from _exchange(message, results, turn)
        else:
            yield Message(role="user", content=clean(message.content))


def _exchange(message: Message, results: Sequence[Message], turn: int) -> Iterator[Message]:
    calls = tuple(
        ToolCall(id=f"call_{turn}_{n}", name=clean(call.name), arguments=_arguments(call.arguments))
        for n, call in enumerate(message.tool_calls)
    )
    content, reasoning = clean(message.content).strip(), clean(message.reasoning).strip()
    yield Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)
    waiting: dict[str, deque[str]] = defaultdict(deque)
    for result in results:
        waiting[result.tool_call_id].append(result.content)
    for asked, call in zip(message.tool_calls, calls, strict=True):
        content = clean(waiting[asked.id].popleft()) if waiting[asked.id] else NOT_FINISHED
        yield Message(role="tool", content=content, tool_call_id=call.id, name=call.name)


def _arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    cleaned = clean(arguments)
    try:
        _spoken_json(cleaned)
    except (ValueError, RecursionError):  # not a number, infinite, nested without end
        return {}
    return cleaned


def _plain_result(message: Message) -> Message:
    if message.role != "tool":
        return message
    return msgspec.structs.replace(message, content=_plain(json.loads(_embedded(message.content))))


def _plain(content: Any) -> str:
    return content if isinstance(content, str) else json_text(content)


def _embedded(content: str) -> str:
    """A result as it stands in its block: the JSON object or array that it is the text of, else a JSON string."""
    if content.lstrip()[:1] in ("{", "["):
        try:
            return _spoken_json(clean(json.loads(content)))
        except (ValueError, RecursionError):  # only looks like JSON
            return _spoken_json(content)
    return _spoken_json(content)


def _turns(said: Iterable[Message]) -> Iterator[Turn]:
    for role, group in groupby(said, lambda message: message.role):
        if role == "tool":
            yield Turn("tool", "\n".join(map(_response, group)))
        elif role == "assistant":
            yield from (Turn("gpt", _gpt_value(message)) for message in group)
        else:
            yield from (Turn("human", message.content) for message in group)


def _gpt_value(message: Message) -> str:
    parts = ["<think>", _escaped(message.reasoning), "</think>"] if message.reasoning else ["<think>\n</think>"]
    if message.content:
        parts.append(_escaped(message.content))
    for call in message.tool_calls:
        payload = f'{{"name": {_spoken_json(call.name)}, "arguments": {_spoken_json(call.arguments)}}}'
        parts.append(f"<tool_call>\n{without_tags(payload)}\n</tool_call>")
    return "\n".join(parts)


def _response(result: Message) -> str:
    told = f'"tool_call_id": {_spoken_json(result.tool_call_id)}, "name": {_spoken_json(result.name)}'
    payload = f'{{{told}, "content": {_embedded(result.content)}}}'
    return f"<tool_response>\n{without_tags(payload)}\n</tool_response>"


def without_tags(payload: str) -> str:
    """JSON text as it stands inside a block: equal JSON, in which no reader finds a tag."""
    return _RAW_TAG.sub(r"\\u003c\1", payload)


def _escaped(text: str) -> str:
    return _RAW_TAG.sub(r"&lt;\1", _ESCAPED_TAG.sub(r"&amp;\1lt;\2", text))


def _unescaped(text: str) -> str:
    return _ESCAPED_TAG.sub(lambda m: f"&{m[1][4:]}lt;{m[2]}" if m[1] else f"<{m[2]}", text)


_tools_texts: dict[tuple[int, ...], tuple[Sequence[ToolSpec], str]] = {}  # by identity; the value keeps it alive


def _tools_json(tools: Sequence[ToolSpec]) -> str:
    """Thousands of rows offer the same few sets of tools: each is serialized once."""
    key = tuple(map(id, tools))
    if key not in _tools_texts:
        if len(_tools_texts) >= 256:
            _tools_texts.clear()
        told = [
            {"name": t.name, "description": t.description, "parameters": t.parameters, "required": None} for t in tools
        ]
        _tools_texts[key] = (tuple(tools), without_tags(_spoken_json(clean(told))))
    return _tools_texts[key][1]


# --- reading


def parse_trajectory(turns: Sequence[Turn]) -> ParsedTrajectory:
    """Messages and tools of a trajectory in this format, other wordings of the system turn and missing think blocks
    allowed. ValueError names the first turn that cannot be read without loss."""
    messages: list[Message] = []
    tools: list[ToolSpec] = []
    gpt_turns = 0
    for place, turn in enumerate(turns):
        gpt_turns += turn.sender == "gpt"
        try:
            if place == 0 and turn.sender == "system":
                tools, system_text = _read_system(turn.value)
                messages += [Message(role="system", content=system_text)] if system_text else []
            else:
                messages += _read_turn(turn, gpt_turns)
        except ValueError as problem:
            raise ValueError(f"turn {place}: {problem}") from problem
    return ParsedTrajectory(messages, tools)


def _read_system(value: str) -> tuple[list[ToolSpec], str]:
    told = _TOOLS.search(value)
    if not told:
        return [], value
    _, _, system_text = value[told.end() :].partition(_EXAMPLE)
    return _decoded(told[1], list[ToolSpec]), system_text.removeprefix("\n\n")


def _read_turn(turn: Turn, gpt_turns: int) -> list[Message]:
    if turn.sender == "human":
        return [Message(role="user", content=turn.value)]
    if turn.sender == "gpt":
        return [_read_gpt(turn.value, gpt_turns)]
    if turn.sender == "tool":
        return _read_results(turn.value, gpt_turns)
    raise ValueError(f"{turn.sender!r} does not belong here")


def _read_gpt(value: str, turn: int) -> Message:
    reasoning, prose = _split_think(value)
    prose, mark, calls = prose.partition("<tool_call>")
    return Message(
        role="assistant",
        content=_unescaped(prose).strip(),
        reasoning=_unescaped(reasoning).strip(),
        tool_calls=tuple(
            ToolCall(id=f"call_{turn}_{n}", name=call.name, arguments=call.arguments)
            for n, call in enumerate(_blocks(_CALL, _Call, mark + calls))
        ),
    )


def _read_results(value: str, turn: int) -> list[Message]:
    return [
        Message(role="tool", content=_plain(result.content), tool_call_id=f"call_{turn}_{n}", name=result.name)
        for n, result in enumerate(_blocks(_RESPONSE, _Response, value))
    ]


def _split_think(value: str) -> tuple[str, str]:
    """What the first think block holds, and what comes after it."""
    reasoning, closed, after = value.removeprefix("<think>").partition("</think>")
    return (reasoning, after) if closed and value.startswith("<think>") else ("", value)


def _blocks(pattern: re.Pattern[str], kind: type[T], text: str) -> list[T]:
    lost = pattern.sub("", text).strip()
    if lost:
        raise ValueError(f"text beside a block: {lost[:200]}")
    return [_decoded(payload, kind) for payload in pattern.findall(text)]


def _decoded(payload: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(payload, type=kind)
    except msgspec.DecodeError as problem:
        raise ValueError(f"{problem} in {payload[:200]}") from problem


# --- counting and checking


def has_reasoning(turn_value: str) -> bool:
    """Whether a gpt turn's think block holds more than the placeholder."""
    return bool(_split_think(turn_value)[0].strip())


def reasoning_counts(turns: Sequence[Turn], skip: int = 0) -> tuple[int, int]:
    """gpt turns, and how many of them have reasoning, from turn `skip` on: the system turn (1) and a row's
    `context_turns` are not the model's doing."""
    gpt_turns = [turn.value for turn in turns[skip:] if turn.sender == "gpt"]
    return len(gpt_turns), sum(map(has_reasoning, gpt_turns))


def validate(turns: Sequence[Turn]) -> list[str]:
    """What is wrong with a trajectory, in words; nothing if readers and trainers will take it.

    System, human, then no two neighbours of one role; a think block first and alone in every gpt turn; nothing of ours
    outside its place; after a gpt turn with calls, and only there, a tool turn that answers each of them in order.
    """
    problems = [f"turn {place}: {problem}" for place in range(len(turns)) for problem in _turn_problems(turns, place)]
    if len(turns) < 2:
        problems.append("no system and human turn in front")
    elif turns[-1].sender == "gpt" and "<tool_call>" in turns[-1].value:
        problems.append("the last call has no answer")
    return problems


def _turn_problems(turns: Sequence[Turn], place: int) -> Iterator[str]:
    turn, before = turns[place], turns[place - 1] if place else Turn("", "")
    allowed = (("system",), ("human",))[place] if place < 2 else ("human", "gpt", "tool")
    if turn.sender not in allowed:
        yield f"{turn.sender!r} stands where {' or '.join(allowed)} belongs"
    elif turn.sender == before.sender:
        yield f"a second {turn.sender} turn in a row"
    if turn.sender == "gpt" and not _THINK_FIRST.match(turn.value):
        yield "no think block in front"
    if _RAW_TAG.search(_inside(turn)):
        yield "a tag outside its place"
    try:
        called, answered = _names(before, "gpt"), _names(turn, "tool")
        _names(turn, "gpt")
    except ValueError as problem:
        yield str(problem)
        return
    if called != answered or (turn.sender == "tool" and not answered):
        yield f"answers {answered} to calls of {called}"


def _names(turn: Turn, sender: str) -> list[str]:
    """Of the calls of a gpt turn, of the results of a tool turn; none for a turn of another sender."""
    if turn.sender != sender:
        return []
    if sender == "gpt":
        return [call.name for call in _read_gpt(turn.value, 1).tool_calls]
    return [result.name for result in _read_results(turn.value, 1)]


def _inside(turn: Turn) -> str:
    """A turn without the tags that belong there."""
    if turn.sender == "gpt":
        return "".join(_split_think(_CALL.sub(r"\1", turn.value)))
    return _RESPONSE.sub(r"\1", turn.value) if turn.sender == "tool" else ""
