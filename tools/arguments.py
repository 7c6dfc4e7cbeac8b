"""A tool made of a Struct of arguments and a function: its JSON schema, and what comes from a model made to fit it."""

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct

from tools.base import ToolContext, ToolSpec
from tools.errors import ToolError

A = TypeVar("A", bound=Struct)
Action = Callable[[ToolContext, A], Awaitable[dict[str, Any]]]
_UNTOLD = "x-untold"
Meaningless = Annotated[Any, Meta(extra_json_schema={_UNTOLD: True})]
"""The type of an argument that models were trained to give and that changes nothing here: taken, and not told."""

_PLACE = re.compile(r"^(.*) - at `\$\.?([^`]*)`$", re.DOTALL)
_FIELD = re.compile(r"^Object (missing required|contains unknown) field `([^`]*)`$")


class TypedTool(Generic[A]):
    """Fulfils `tools.base.Tool`. `arguments` forbids unknown fields; a field's description is its `msgspec.Meta`."""

    def __init__(
        self, name: str, description: str, arguments: type[A], action: Action[A], *, read_only: bool = False
    ) -> None:
        self.spec = ToolSpec(name=name, description=description, parameters=parameter_schema(arguments))
        self.read_only = read_only
        self._type = arguments
        self._action = action

    def parse(self, arguments: dict[str, Any]) -> A:
        """See `tools.base.Tool`. An argument that is null and may be left out counts as left out."""
        try:
            return msgspec.convert(arguments, self._type, strict=False)
        except msgspec.ValidationError:
            pass  # most calls fit at once; only the others pay for the repair
        try:
            return msgspec.convert(repaired(arguments, self.spec.parameters), self._type, strict=False)
        except msgspec.ValidationError as error:
            reason = _explained(str(error), self.spec.parameters)
            raise ToolError(f"Invalid arguments for {self.spec.name}: {reason}") from error

    def call(self, context: ToolContext, arguments: A) -> Awaitable[dict[str, Any]]:
        """See `tools.base.Tool`."""
        return self._action(context, arguments)


def parameter_schema(arguments: type[Struct]) -> dict[str, Any]:
    """A Struct's JSON schema as models are told it: inlined, no titles, no null where leaving out says the same."""
    schema = msgspec.json.schema(arguments)
    plain: dict[str, Any] = _plain(schema, schema.get("$defs", {}))
    return {"type": "object", "properties": plain["properties"], "required": plain.get("required", [])}


def _plain(node: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(node, list | tuple):
        return [_plain(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _plain(definitions[node["$ref"].rpartition("/")[2]], definitions)
    result = {key: _within(key, value, definitions) for key, value in node.items() if key not in ("$defs", "title")}
    if isinstance(result.get("properties"), dict):
        result.pop("additionalProperties", None)
    if all(isinstance(choice, str) for choice in result.get("enum", (0,))):
        result.setdefault("type", "string")
    branches = [branch for branch in result.pop("anyOf", []) if branch != {"type": "null"}]
    if len(branches) == 1:  # "X or null"
        result = {**branches[0], **result}
    elif branches:
        result["anyOf"] = branches
    if result.get("default", 0) in (None, [], ""):
        del result["default"]
    return result


def _within(key: str, value: Any, definitions: Mapping[str, Any]) -> Any:
    if key == "properties":  # names of ours, not words of the schema
        return {name: _plain(each, definitions) for name, each in value.items() if _UNTOLD not in each}
    if key in ("default", "enum"):
        return list(value) if isinstance(value, tuple) else value
    return _plain(value, definitions)


def repaired(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with what is plainly meant put right: null for "left out", a bare value for a list of it, JSON text
    for a list or an object, a number for its text. What a converter repairs by itself ("5" for 5) is left to it."""
    result = {}
    for name, value in arguments.items():
        expected = schema["properties"].get(name, {})
        absent = value is None or (value == "null" and expected.get("type") != "string")
        if not absent or name in schema.get("required", ()):
            result[name] = _fitted(value, expected)
    return result


def _fitted(value: Any, expected: Mapping[str, Any]) -> Any:
    kind = expected.get("type")
    if kind == "string" and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if kind in ("array", "object") and isinstance(value, str):
        value = _decoded(value)
    if kind == "array":
        items = value if isinstance(value, list) else [value]
        return [_fitted(item, expected.get("items", {})) for item in items]
    if isinstance(value, dict) and "properties" in expected:
        return repaired(value, expected)
    return value


def _decoded(text: str) -> Any:
    if not text.lstrip().startswith(("[", "{")):
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _explained(problem: str, schema: Mapping[str, Any]) -> str:
    if found := _FIELD.match(problem):
        if found[1] == "missing required":
            return f"missing argument `{found[2]}`"
        return f"unknown argument `{found[2]}`; known are {', '.join(schema['properties'])}"
    if not (found := _PLACE.match(problem)):
        return problem
    choices = _expected_at(found[2], schema).get("enum")
    one_of = f", expected one of {', '.join(map(str, choices))}" if choices else ""
    return f"argument `{found[2]}`: {found[1][:1].lower()}{found[1][1:]}{one_of}"


def _expected_at(place: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of `todos[0].status`."""
    for part in re.findall(r"\[[^\]]*\]|[^.\[]+", place):
        schema = schema.get("items", {}) if part.startswith("[") else schema.get("properties", {}).get(part, {})
    return schema
