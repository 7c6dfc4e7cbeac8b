"""A dataset row: its bytes, its fields, its identity. Pure.

A row is a JSON object. Names a field is also known by, and what each must be, stand in `_NAMES` and `_READERS`; null
counts as not given; fields not named there pass through as `Prompt.rest`.
"""

import base64
import binascii
import hashlib
import json
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec

from agent.prompt import Prompt
from agent.schema import schema_fault
from agent.text import clean
from batch.chat import ChatProblem, read_chat
from tools.environments.script import HELD, IS_HELD

MAX_DEPTH = 200  # levels of nesting; deeper ones break readers of the files we write

_NAMES = {
    "prompt": "text",
    "messages": "chat",
    "conversations": "chat",
    "id": "id",
    "task_id": "id",
    "image": "image",
    "docker_image": "image",
    "container_image": "image",
    "cwd": "cwd",
    "env": "variables",
    "files": "files",
    "setup": "setup",
    "tools": "tools",
    "toolsets": "toolsets",
    "max_turns": "max_turns",
    "timeout_seconds": "timeout_seconds",
    "expected_tools": "expected_tools",
    "metadata": "metadata",
    "response_format": "response_format",
}
_OWN_COLUMNS = frozenset({"prompt", "messages", "conversations", "id", "task_id"})  # the journal has them elsewhere


class RowProblem(Exception):
    """Why a line of the dataset is no row; the text is for the user."""


class RowReader:
    """Reads lines to objects, and tells each one's canonical text. Not for several threads at once."""

    def __init__(self) -> None:
        self._floats = 0
        self._decode = msgspec.json.Decoder(float_hook=self._float).decode

    def _float(self, digits: str) -> float:
        self._floats += 1
        return _finite(digits)

    def read(self, line: bytes) -> tuple[dict[str, Any], bytes]:
        """The row, and its text as `json.dumps(row, sort_keys=True, ensure_ascii=False, separators=(",", ":"))` in
        UTF-8. Raises RowProblem."""
        self._floats = 0
        try:
            value, odd = self._decode(line), b"\\u0000" in line
        except (msgspec.DecodeError, RecursionError):  # stricter than JSON in places: the standard library decides
            value, odd = _strict_json(line), True
        row = _checked(clean(value) if odd else value, line)
        return row, _canonical_json(row) if odd or self._floats else _canonical(row)


def parse_row(line: bytes) -> Prompt:
    """A line of the dataset as the agent's prompt. Raises RowProblem."""
    return read_prompt(RowReader().read(line)[0])


def read_prompt(row: dict[str, Any]) -> Prompt:
    """The row's fields, each of its type. Raises RowProblem."""
    given: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in row.items():
        if key not in _OWN_COLUMNS:
            rest[key] = value
        if value is None or key not in _FIELDS:
            continue
        name, reader = _FIELDS[key]
        read = reader(key, value)
        if given.setdefault(name, read) != read:
            raise RowProblem(f"{_spellings(name, row)} contradict each other: give one")
    return _prompt(given, rest)


def row_identity(row_id: str, canonical: bytes) -> tuple[str, str]:
    """(row_key, row_sha). The key of a second, third equal row without id has `#2`, `#3` added by whoever counts."""
    sha = hashlib.sha256(canonical).hexdigest()
    return (f"id:{row_id}" if row_id else f"sha:{sha}"), sha


def _prompt(given: dict[str, Any], rest: dict[str, Any]) -> Prompt:
    chat = given.pop("chat", None)
    given.pop("metadata", None)
    toolsets = given.pop("toolsets", ())
    if toolsets:
        given["tools"] = (*given.get("tools", ()), *toolsets)
    if chat:
        if given.setdefault("text", chat.text) != chat.text:
            raise RowProblem("prompt and the last turn of messages contradict each other: give one")
        return Prompt(**given, context=chat.context, system_text=chat.system_text, rest=rest)
    if "text" not in given:
        raise RowProblem("no prompt")
    return Prompt(**given, rest=rest)


def _spellings(name: str, row: dict[str, Any]) -> str:
    return " and ".join(key for key, known in _NAMES.items() if known == name and row.get(key) is not None)


# --- bytes to values


def _strict_json(line: bytes) -> Any:
    try:
        text = line.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise RowProblem(f"not UTF-8 ({error.reason} at byte {error.start})") from error
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise RowProblem(f"not JSON ({error.msg} at character {error.pos})") from error
    except RecursionError as error:
        raise RowProblem(f"nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:  # a number of more digits than Python reads
        raise RowProblem(f"not JSON ({error})") from error


def _refuse_constant(name: str) -> Any:
    raise RowProblem(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise RowProblem(f"{digits[:40]} is too large a number")
    return value


def _checked(value: Any, line: bytes) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RowProblem(f"not an object but {_kind(value)}")
    if is_too_deep(value, line):
        raise RowProblem(f"nested deeper than {MAX_DEPTH} levels")
    return value


def is_too_deep(value: Any, line: bytes) -> bool:
    """Whether a value, which was read from the line, is nested deeper than `MAX_DEPTH` levels."""
    return line.count(b"[") + line.count(b"{") > MAX_DEPTH and _depth(value) > MAX_DEPTH


def _depth(value: Any) -> int:
    level, depth = [value], 0
    while level:
        depth += 1
        boxes = [item.values() if isinstance(item, dict) else item for item in level]
        level = [item for box in boxes for item in box if isinstance(item, dict | list)]
    return depth


_sorted_json = msgspec.json.Encoder(order="sorted").encode


def _canonical(row: dict[str, Any]) -> bytes:
    try:
        return _sorted_json(row)
    except OverflowError:  # an integer beyond 64 bits
        return _canonical_json(row)


def _canonical_json(row: dict[str, Any]) -> bytes:
    return json.dumps(row, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()


# --- fields


def _kind(value: Any) -> str:
    names = {
        str: "a string",
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), "null")


def _wrong(key: str, expected: str, value: Any) -> RowProblem:
    return RowProblem(f"{key} must be {expected}, not {_kind(value)}")


def _text(key: str, value: Any) -> str:
    if type(value) is not str:
        raise _wrong(key, "a string", value)
    return value


def _filled(key: str, value: Any) -> str:
    if type(value) is not str:
        raise _wrong(key, "a string", value)
    if not value.strip():
        raise RowProblem(f"{key} is blank")
    return value


def _id(key: str, value: Any) -> str:
    if type(value) is int:
        return str(value)
    if type(value) is not str:
        raise _wrong(key, "a string or an integer", value)
    return _filled(key, value)


def _texts(key: str, value: Any) -> tuple[str, ...]:
    if type(value) is not list or any(type(item) is not str for item in value):
        raise (
            _wrong(key, "a list of strings", value)
            if type(value) is not list
            else RowProblem(f"{key} must hold strings only")
        )
    return tuple(value)


def _object(key: str, value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise _wrong(key, "an object", value)
    return value


def _variables(key: str, value: Any) -> dict[str, str]:
    for name, text in _object(key, value).items():
        if not name or "=" in name or "\ufffd" in name:
            raise RowProblem(f"{key}: {name!r} is no name of a variable")
        if name in HELD:
            raise RowProblem(f"{key}: {name}: {IS_HELD}")
        _text(f"{key}.{name}", text)
    return dict(value)


def _files(key: str, value: Any) -> dict[str, bytes]:
    """path -> text, or {"base64": …} for bytes."""
    return {
        _filled(f"{key}: a path", path): _content(f"{key}[{path!r}]", it) for path, it in _object(key, value).items()
    }


def _content(key: str, value: Any) -> bytes:
    if type(value) is str:
        return value.encode()
    if type(value) is not dict or set(value) != {"base64"} or type(value["base64"]) is not str:
        raise RowProblem(f'{key} must be a string or {{"base64": "…"}}')
    try:
        return base64.b64decode("".join(value["base64"].split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowProblem(f"{key} is not base64 ({error})") from error


def _count(key: str, value: Any) -> int:
    if type(value) is not int:
        raise _wrong(key, "an integer", value)
    if value < 1:
        raise RowProblem(f"{key} must be at least 1, not {value}")
    return value


def _seconds(key: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise _wrong(key, "a number of seconds", value)
    if not 0 < value < 1e9:
        raise RowProblem(f"{key} must be above 0 and below 1e9, not {value}")
    return float(value)


def _schema(key: str, value: Any) -> dict[str, Any]:
    """A JSON schema, bare or in OpenAI's wrapping {"type": "json_schema", "json_schema": {"schema": …}}."""
    schema = _object(key, value)
    if schema.get("type") == "json_schema":
        schema = _object(
            f"{key}.json_schema.schema", _object(f"{key}.json_schema", schema.get("json_schema")).get("schema")
        )
    if fault := _schema_fault(json.dumps(schema)):
        raise RowProblem(f"{key} is no JSON schema ({fault})")
    return schema


@lru_cache(maxsize=64)  # most datasets give every row the same one
def _schema_fault(text: str) -> str:
    return schema_fault(json.loads(text))[:200]


def _chat(key: str, value: Any) -> Any:
    try:
        return read_chat(value)
    except ChatProblem as problem:
        raise RowProblem(f"{key}: {problem}") from problem


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "text": _filled,
    "chat": _chat,
    "id": _id,
    "image": _text,
    "cwd": _text,
    "variables": _variables,
    "files": _files,
    "setup": _text,
    "tools": _texts,
    "toolsets": _texts,
    "max_turns": _count,
    "timeout_seconds": _seconds,
    "expected_tools": _texts,
    "metadata": _object,
    "response_format": _schema,
}
_FIELDS = {key: (name, _READERS[name]) for key, name in _NAMES.items()}
