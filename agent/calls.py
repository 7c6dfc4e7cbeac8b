"""From what an endpoint sent to calls that may run: names, arguments, text that only looks like a call. Pure."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from agent.types import RawCall, ToolCall
from tools.base import Tool
from tools.errors import ToolError

QUOTED = 200  # characters of bad arguments that the model is shown


class CheckedCall(Struct, frozen=True, kw_only=True):
    """A call with its tool and typed arguments, or with the kind of what is wrong: invalid_tool, invalid_arguments,
    truncated."""

    call: ToolCall
    tool: Tool | None = None
    arguments: Any = None
    problem_kind: str = ""


class _BadArgumentsError(Exception):
    def __init__(self, kind: str, message: str, quoted: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.quoted = quoted


def check_call(
    raw: RawCall, wire_id: str, tools: Mapping[str, Tool], *, cut: bool, purge: Callable[[Any], Any]
) -> CheckedCall:
    """`cut` says that the reply was ended by its length; `purge` takes out of a JSON value what may not enter. It sees
    the arguments' values, for in their text what it looks for may be escaped. Nothing is run here."""
    name = purge(raw.name)
    tool = tools.get(name)
    if tool is None:
        problem = f"There is no tool {name!r}. Tools: {', '.join(tools) or 'none'}."
        call = ToolCall(id=wire_id, name=name, arguments=purge(_arguments_or_none(raw)), problem=problem)
        return CheckedCall(call=call, problem_kind="invalid_tool")
    try:
        arguments = purge(_read_arguments(raw, cut=cut))
    except _BadArgumentsError as bad:
        call = ToolCall(id=wire_id, name=name, problem=f"{bad}{purge(bad.quoted)[:QUOTED]}")
        return CheckedCall(call=call, problem_kind=bad.kind)
    try:
        typed = tool.parse(arguments)
    except ToolError as bad_arguments:
        call = ToolCall(id=wire_id, name=name, arguments=arguments, problem=str(bad_arguments))
        return CheckedCall(call=call, problem_kind="invalid_arguments")
    return CheckedCall(call=ToolCall(id=wire_id, name=name, arguments=arguments), tool=tool, arguments=typed)


def _arguments_or_none(raw: RawCall) -> dict[str, Any]:
    try:
        return _read_arguments(raw, cut=False)
    except _BadArgumentsError:
        return {}


def _read_arguments(raw: RawCall, *, cut: bool) -> dict[str, Any]:
    """A JSON object, given as text or as it is; empty or missing ones are {}."""
    given = raw.arguments
    if isinstance(given, dict):
        return given
    if given is None or (isinstance(given, str) and not given.strip()):
        if cut:
            raise _BadArgumentsError("truncated", f"The arguments of {raw.name} were cut off. Nothing was run.")
        return {}
    if not isinstance(given, str):
        raise _not_an_object(raw, json.dumps(given))
    value = _parse(raw, given, cut=cut)
    if not isinstance(value, dict):
        raise _not_an_object(raw, given)
    return value


def _parse(raw: RawCall, text: str, *, cut: bool) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:
        if cut or _ends_early(error, text):
            message = f"The arguments of {raw.name} were cut off and nothing was run. They began: "
            raise _BadArgumentsError("truncated", message, text) from None
        message = f"The arguments of {raw.name} are not valid JSON ({error}). They began: "
        raise _BadArgumentsError("invalid_arguments", message, text) from None


def _ends_early(error: Exception, text: str) -> bool:
    """Some routers hide a cut: the text then stops in the middle of a value (an unterminated string, or at its end)."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated string") or error.pos >= len(text.rstrip())


def _not_an_object(raw: RawCall, text: str) -> _BadArgumentsError:
    message = f"The arguments of {raw.name} must be a JSON object. They were: "
    return _BadArgumentsError("invalid_arguments", message, text)


_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([\w.-]+)>\s*(.*?)\s*(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([\w.-]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_BARE = re.compile(r"\A\s*(\{.*\})\s*\Z", re.DOTALL)
_FENCE = re.compile(r"```(?:json|tool_call)?\s*(\{.*?\})\s*```", re.DOTALL)


def split_calls(text: str, names: Sequence[str]) -> tuple[tuple[RawCall, ...], str]:
    """Calls of offered tools that a model wrote as prose (in `<tool_call>` tags, as `<function=`, as bare or fenced
    JSON), and the text without them."""
    for pattern, read in _FORMS:
        found: list[RawCall] = []

        def taken(match: re.Match[str], read: _Read = read, found: list[RawCall] = found) -> str:
            calls = [call for call in read(match) if call.name in names]
            found.extend(calls)
            return "" if calls else match[0]

        rest = pattern.sub(taken, text)
        if found:
            return tuple(found), rest.strip()
    return (), text


def _from_body(body: str) -> Sequence[RawCall]:
    function = _FUNCTION.match(body)
    return _from_function(function[1], function[2]) if function else _from_json(body)


def _from_function(name: str, body: str) -> Sequence[RawCall]:
    parameters = dict(_PARAMETER.findall(body))
    return [RawCall(name=name, arguments=parameters or body)]


def _from_json(body: str) -> Sequence[RawCall]:
    if not body.startswith("{"):
        return []
    try:
        value = msgspec.json.decode(body.encode(errors="replace"))
    except msgspec.DecodeError:
        return []
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    return [RawCall(name=name, arguments=arguments)] if isinstance(name, str) and arguments is not None else []


_Read = Callable[[re.Match[str]], Sequence[RawCall]]
_FORMS: tuple[tuple[re.Pattern[str], _Read], ...] = (
    (_TAGGED, lambda match: _from_body(match[1])),
    (_FUNCTION, lambda match: _from_function(match[1], match[2])),
    (_BARE, lambda match: _from_json(match[1])),
    (_FENCE, lambda match: _from_json(match[1])),
)
