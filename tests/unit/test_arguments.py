"""Arguments from a model made to fit a tool's schema."""

from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta, Struct

from tools.arguments import TypedTool, parameter_schema
from tools.base import ToolContext
from tools.errors import ToolError


class Item(Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    done: bool = False


class Arguments(Struct, frozen=True, forbid_unknown_fields=True):
    text: Annotated[str, Meta(description="A text")]
    kind: Annotated[Literal["b", "a"], Meta(description="A kind")] = "a"
    seconds: Annotated[int, Meta(description="A limit")] | None = None
    count: Annotated[int, Meta(description="A number")] = 1
    share: Annotated[float, Meta(description="A share")] = 0.5
    flag: Annotated[bool, Meta(description="A switch")] = False
    names: Annotated[tuple[str, ...], Meta(description="Names")] = ()
    items: Annotated[tuple[Item, ...], Meta(description="Items")] = ()


async def act(context: ToolContext, arguments: Arguments) -> dict[str, Any]:
    return {"text": arguments.text}


TOOL = TypedTool("sample", "A tool for tests", Arguments, act)


def test_the_schema_is_plain() -> None:
    assert parameter_schema(Arguments) == {
        "type": "object",
        "properties": {
            "text": {"description": "A text", "type": "string"},
            "kind": {"description": "A kind", "type": "string", "enum": ["a", "b"], "default": "a"},
            "seconds": {"description": "A limit", "type": "integer"},
            "count": {"description": "A number", "type": "integer", "default": 1},
            "share": {"description": "A share", "type": "number", "default": 0.5},
            "flag": {"description": "A switch", "type": "boolean", "default": False},
            "names": {"description": "Names", "type": "array", "items": {"type": "string"}},
            "items": {
                "description": "Items",
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"id": {"type": "string"}, "done": {"type": "boolean", "default": False}},
                    "required": ["id"],
                },
            },
        },
        "required": ["text"],
    }


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({}, Arguments("x")),
        ({"seconds": "5", "count": "7", "share": "0.25"}, Arguments("x", seconds=5, count=7, share=0.25)),
        ({"count": 7.0, "share": 1}, Arguments("x", count=7, share=1.0)),
        ({"flag": "true"}, Arguments("x", flag=True)),
        ({"flag": "False"}, Arguments("x")),
        ({"seconds": None, "count": None, "flag": None, "names": None}, Arguments("x")),
        ({"seconds": "null", "count": "null", "flag": "null"}, Arguments("x")),
        ({"names": "a"}, Arguments("x", names=("a",))),
        ({"names": ["a", 1]}, Arguments("x", names=("a", "1"))),
        ({"names": '["a", "b"]'}, Arguments("x", names=("a", "b"))),
        ({"names": "[a"}, Arguments("x", names=("[a",))),
        ({"names": []}, Arguments("x")),
        ({"text": 5}, Arguments("5")),
        ({"text": "null"}, Arguments("null")),
        ({"text": "5"}, Arguments("5")),
        ({"items": {"id": "i"}}, Arguments("x", items=(Item("i"),))),
        ({"items": '[{"id": "i", "done": "true"}]'}, Arguments("x", items=(Item("i", done=True),))),
        ({"unknown": None}, Arguments("x")),
    ],
)
def test_what_is_plainly_meant_is_repaired(given: dict[str, Any], read: Arguments) -> None:
    assert TOOL.parse({"text": "x", **given}) == read


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "missing argument `text`"),
        ({"text": None}, "argument `text`: expected `str`, got `null`"),
        ({"text": {"a": 1}}, "argument `text`: expected `str`, got `object`"),
        ({"text": True}, "argument `text`: expected `str`, got `bool`"),
        ({"text": "x", "count": "many"}, "argument `count`: expected `int`, got `str`"),
        ({"text": "x", "seconds": [1]}, "argument `seconds`: expected `int | null`, got `array`"),
        ({"text": "x", "flag": "perhaps"}, "argument `flag`: expected `bool`, got `str`"),
        ({"text": "x", "kind": "c"}, "argument `kind`: invalid enum value 'c', expected one of a, b"),
        ({"text": "x", "items": [{}]}, "argument `items[0]`: object missing required field `id`"),
        (
            {"text": "x", "comand": "ls"},
            "unknown argument `comand`; known are text, kind, seconds, count, share, flag, names, items",
        ),
    ],
)
def test_what_misses_the_schema_is_told_by_name_and_type(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ToolError) as caught:
        TOOL.parse(given)
    assert str(caught.value) == f"Invalid arguments for sample: {problem}"


def test_parsing_leaves_what_it_was_given_alone() -> None:
    given = {"text": 5, "names": "a", "count": None}
    TOOL.parse(given)
    assert given == {"text": 5, "names": "a", "count": None}
