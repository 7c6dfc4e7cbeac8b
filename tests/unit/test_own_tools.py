"""A Python file of a user's own as tools, toolsets and distributions."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent.catalog import Sources, open_catalog
from agent.faults import Done, guarded
from tests.contract.toolbox import open_toolbox
from tools.base import Tool, ToolContext
from tools.distributions import draw, row_rng
from tools.errors import EnvironmentLost, ToolError, UsageProblem
from tools.own import load_own, read_docstring
from tools.toolsets import TOOLSETS

HEAD = """
import asyncio, dataclasses, enum, os, time
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from msgspec import Meta
from tools.environments.base import Environment
"""


def module(folder: Path, text: str, name: str = "mine.py") -> str:
    path = folder / name
    path.write_text(HEAD + text, encoding="utf-8")
    return str(path)


def tools_of(folder: Path, text: str) -> dict[str, Tool]:
    return dict(load_own(module(folder, text)).tools)


def refused(folder: Path, text: str, name: str = "mine.py") -> str:
    with pytest.raises(UsageProblem) as caught:
        open_catalog(Sources(module=module(folder, text, name)), {})
    message = str(caught.value)
    assert "\n" not in message
    assert f"{folder}/{name}" in message
    return message


async def call(tool: Tool, *, seconds: float = 5, **arguments: Any) -> dict[str, Any]:
    """As a conversation does it."""
    context: Any = ToolContext(None, seconds)  # type: ignore[arg-type]  # no tool here looks at its sandbox
    try:
        outcome = await guarded(tool.call(context, tool.parse(arguments)))
    except ToolError as error:
        return {"error": str(error)}
    return outcome.value if isinstance(outcome, Done) else {"error": str(outcome)}


WEATHER = '''
@dataclass
class Place:
    name: str
    height: float = 0.0

def look_up(
    city: str, place: Place, days: int = 3, unit: Literal["c", "f"] = "c", level: Literal[1, 2] = 1,
    tags: list[str] = [], title: Annotated[str, "the heading"] = "", near: int | str = 0, note: str = None,
    share: Annotated[float, Meta(ge=0, le=1)] = 0.5,
) -> dict:
    """The weather of a city.

    More than one line.

    Args:
        city: Its name,
            in English: so that it is found.
        days (int): How many days.
        share: Of the day.

    Returns:
        A forecast.
    """
    return {"city": city, "height": place.height, "days": days, "level": level, "near": near, "note": note}

TOOLS = [look_up]
'''


def test_the_schema_comes_from_signature_and_docstring(tmp_path: Path) -> None:
    spec = tools_of(tmp_path, WEATHER)["look_up"].spec
    assert spec.description == "The weather of a city.\n\nMore than one line."
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Its name, in English: so that it is found."},
            "place": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "height": {"type": "number", "default": 0.0}},
                "required": ["name"],
            },
            "days": {"type": "integer", "description": "How many days.", "default": 3},
            "unit": {"enum": ["c", "f"], "default": "c", "type": "string"},
            "level": {"enum": [1, 2], "default": 1},
            "tags": {"type": "array", "items": {"type": "string"}},
            "title": {"type": "string", "description": "the heading"},
            "near": {"anyOf": [{"type": "integer"}, {"type": "string"}], "default": 0},
            "note": {"type": "string"},
            "share": {"type": "number", "minimum": 0, "maximum": 1, "description": "Of the day.", "default": 0.5},
        },
        "required": ["city", "place"],
    }


async def test_arguments_are_typed_repaired_and_refused(tmp_path: Path) -> None:
    tool = tools_of(tmp_path, WEATHER)["look_up"]
    result = await call(tool, city="Rome", place='{"name": "hill", "height": 2}', days="5", note=None, near="x")
    assert result == {"city": "Rome", "height": 2.0, "days": 5, "level": 1, "near": "x", "note": None}
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"city": "Rome"}, "missing argument `place`"),
        ({"city": "Rome", "place": {"name": "x"}, "town": 1}, "unknown argument `town`; known are city, place"),
        ({"city": "Rome", "place": {"name": "x"}, "level": 3}, "expected one of 1, 2"),
        ({"city": "Rome", "place": {"name": "x"}, "share": 2}, "argument `share`"),
    ]
    for wrong, told in mistakes:
        assert told in (await call(tool, **wrong))["error"]


def test_defaults_that_are_of_their_types(tmp_path: Path) -> None:
    text = """
class Colour(enum.Enum):
    RED = "red"
@dataclass
class Place:
    name: str = "x"
def f(
    a: float = 1, b: int = None, c: Colour = Colour.RED, d: Place = Place(), e: tuple[int, ...] = (1,),
    g: set[int] = {1}, h: dict[str, Place] = {"x": Place()}, i: bytes = b"x", j: Any = "x",
):
    'D.'
TOOLS = [f]
"""
    assert tools_of(tmp_path, text)["f"].spec.parameters["required"] == []


def test_docstrings() -> None:
    assert read_docstring("Does.\n\nArgs:\n    a: One.\n    b:\n        Two.\n\nRaises:\n    ValueError: no.") == (
        "Does.",
        {"a": "One.", "b": "Two."},
    )
    assert read_docstring("Does.\nNote: this stays.") == ("Does.\nNote: this stays.", {})
    assert read_docstring("Args:\n  a: x") == ("", {"a": "x"})
    assert read_docstring("Does.\n\nArgs:\n    a: One.\nAfterwards: text") == ("Does.", {"a": "One."})


RESULTS = '''
class Colour(enum.Enum):
    RED = "red"

@dataclass
class Point:
    x: int

def give(what: str) -> Any:
    """Gives."""
    return {
        "text": "a", "number": 1, "nothing": None, "list": [1, (2,)], "dict": {1: Colour.RED}, "point": Point(3),
        "surrogate": "\\ud800", "error": {"error": "told"}, "nan": float("nan"), "object": object(),
        "nan_inside": {"a": [float("inf")]},
    }[what]

TOOLS = [give]
'''


@pytest.mark.parametrize(
    ("what", "result"),
    [
        ("text", {"result": "a"}),
        ("number", {"result": 1}),
        ("nothing", {"result": None}),
        ("list", {"result": [1, [2]]}),
        ("dict", {"1": "red"}),
        ("point", {"x": 3}),
        ("surrogate", {"result": "\ud800"}),
        ("error", {"error": "told"}),
    ],
)
async def test_whatever_json_can_say_is_a_result(what: str, result: dict[str, Any], tmp_path: Path) -> None:
    assert await call(tools_of(tmp_path, RESULTS)["give"], what=what) == result


@pytest.mark.parametrize("what", ["nan", "object", "nan_inside"])
async def test_what_json_cannot_say_is_an_error(what: str, tmp_path: Path) -> None:
    error = (await call(tools_of(tmp_path, RESULTS)["give"], what=what))["error"]
    assert error.startswith("the result of give cannot be written as JSON: ")


RAISES = '''
def raising(kind: str) -> str:
    """Raises."""
    raise eval(kind)("why")

async def raising_later(kind: str) -> str:
    """Raises."""
    raise eval(kind)("why")

TOOLS = [raising, raising_later]
'''


@pytest.mark.parametrize(
    "kind", ["KeyError", "SystemExit", "KeyboardInterrupt", "TimeoutError", "asyncio.CancelledError"]
)
@pytest.mark.parametrize("name", ["raising", "raising_later"])
async def test_whatever_a_function_raises_is_told_and_ends_nothing(name: str, kind: str, tmp_path: Path) -> None:
    error = (await call(tools_of(tmp_path, RAISES)[name], kind=kind))["error"]
    assert kind.removeprefix("asyncio.") in error
    assert "why" in error


async def test_a_lost_sandbox_stays_one(tmp_path: Path) -> None:
    text = '''
from tools.errors import EnvironmentLost
async def look(environment) -> str:
    """Looks."""
    raise EnvironmentLost("gone")
TOOLS = [look]
'''
    with pytest.raises(EnvironmentLost):
        await call(tools_of(tmp_path, text)["look"])


SLOW = '''
def blocking() -> str:
    """Waits for its time, 20 s at the most."""
    for _ in range(2000):
        if os.path.exists(__file__ + ".over"):
            return "told"
        time.sleep(0.01)
    open(__file__ + ".ended", "x").close()

async def waiting() -> str:
    """Waits."""
    await asyncio.sleep(20)
    open(__file__ + ".ended", "x").close()

TOOLS = [blocking, waiting]
'''


@pytest.mark.parametrize("name", ["blocking", "waiting"])
async def test_time_is_limited_and_the_loop_goes_on(name: str, tmp_path: Path) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    ticking = asyncio.create_task(tick())
    assert await call(tools_of(tmp_path, SLOW)[name], seconds=0.3) == {
        "error": f"{name} took longer than 0.3 s and was given up"
    }
    assert not (tmp_path / "mine.py.ended").exists(), "nobody waited for it"
    (tmp_path / "mine.py.over").touch()
    assert ticks > 5
    ticking.cancel()


async def test_a_call_that_is_cut_off_is_cancelled(tmp_path: Path) -> None:
    task = asyncio.create_task(call(tools_of(tmp_path, SLOW)["waiting"]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_sandbox_is_handed_over_and_no_argument(tmp_path: Path) -> None:
    text = '''
async def note(text: str, environment) -> str:
    """Writes."""
    await environment.write("note.txt", text.encode())
    return "written"

async def size(box: Environment, path: str) -> int:
    """Counts."""
    return len(b"".join([chunk async for chunk in box.read(path)]))

async def name(environment: str) -> str:
    """Not the sandbox."""
    return environment

TOOLS = [note, size, name]
'''
    tools = tools_of(tmp_path, text)
    assert [list(tool.spec.parameters["properties"]) for tool in tools.values()] == [
        ["text"],
        ["path"],
        ["environment"],
    ]
    async with open_toolbox("own") as box:
        assert await tools["note"].call(box.context, tools["note"].parse({"text": "abc"})) == {"result": "written"}
        assert await tools["size"].call(box.context, tools["size"].parse({"path": "note.txt"})) == {"result": 3}
        assert await tools["name"].call(box.context, tools["name"].parse({"environment": "x"})) == {"result": "x"}


GOOD = '''
def one() -> int:
    """One."""
    return 1

def two() -> int:
    """Two."""
    return 2
'''


def test_toolsets_and_distributions(tmp_path: Path) -> None:
    text = (
        GOOD
        + 'TOOLS = [one, two]\nTOOLSETS = {"odd": ["one", "terminal"]}\nDISTRIBUTIONS = {"d": {"odd": 50, "web": 50}}'
    )
    catalog = open_catalog(Sources(module=module(tmp_path, text, "my-tools.v2.py")), {"web_search": "a key"})
    assert catalog.toolsets["odd"] == ("one", "terminal")
    assert catalog.toolsets["my-tools_v2"] == ("two",)
    assert catalog.toolset_of("one") == "odd"
    assert catalog.toolset_of("terminal") == "terminal"
    assert catalog.resolve_names(["odd", "two", "bash"]) == ("one", "terminal", "two")
    assert [tool.spec.name for tool in catalog.select(["one", "two", "terminal"], ["my-tools_v2"])] == [
        "one",
        "terminal",
    ]
    assert {"one", "two"} <= set(catalog.names)
    assert ("odd", "one, terminal", "ready") in catalog.describe()
    drawn = {tuple(draw(catalog.distribution("d"), row_rng(0, f"id:{number}"))) for number in range(50)}
    assert drawn == {("odd",), ("web",), ("odd", "web")}
    with pytest.raises(UsageProblem, match=r"'tow': did you mean two\?"):
        catalog.resolve_names(["tow"])


def test_a_module_may_have_distributions_alone(tmp_path: Path) -> None:
    catalog = open_catalog(Sources(module=module(tmp_path, 'DISTRIBUTIONS = {"d": {"web": 0.5}}')), {})
    assert set(catalog.toolsets) == set(TOOLSETS)
    assert draw(catalog.distribution("d"), row_rng(0, "id:1")) == ["web"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "there is no list of functions"),
        ("TOOLS = one", "expected a list of functions"),
        ("TOOLS = ['one']", "'one' is no function"),
        ("TOOLS = [dict]", "is no function"),
        ("TOOLS = [lambda: 1]", "<lambda>: a tool's name has"),
        ("TOOLS = [one, one]", "one: stands in TOOLS twice"),
        ("def f():\n    return 1\nTOOLS = [f]", "f: has no docstring"),
        ("def f(x):\n    'D.'\nTOOLS = [f]", "f: parameter x has no type"),
        ("def f(*x: int):\n    'D.'\nTOOLS = [f]", "f: parameter *x: int: every parameter has to be"),
        ("def f(x: int, /):\n    'D.'\nTOOLS = [f]", "every parameter has to be one that can be given by name"),
        ("def f(x: object()):\n    'D.'\nTOOLS = [f]", "f: its "),
        (
            "def f(x: Environment.__class__):\n    'D.'\nTOOLS = [f]",
            "f: its parameters cannot be told as a JSON schema",
        ),
        ("def f(x: 'Nope'):\n    'D.'\nTOOLS = [f]", "f: its signature cannot be read: name 'Nope' is not defined"),
        ("def f(x: int | list[int] | tuple[int]):\n    'D.'\nTOOLS = [f]", "f: its parameters cannot be told"),
        ("def f(environment):\n    'D.'\nTOOLS = [f]", "write `async def f`"),
        ("async def f(environment, e: Environment):\n    'D.'\nTOOLS = [f]", "f: takes the sandbox twice"),
        (
            "@dataclass\nclass T:\n    t: 'T | None' = None\ndef f(x: T):\n    'D.'\nTOOLS = [f]",
            "f: has a parameter whose type holds itself",
        ),
        ("def terminal():\n    'D.'\nTOOLS = [terminal]", "terminal: is a built-in tool: rename the function"),
        ("def web():\n    'D.'\nTOOLS = [web]", "web: is a built-in toolset"),
        ("def bash():\n    'D.'\nTOOLS = [bash]", "bash: is a built-in other name of a tool"),
        ("TOOLS = [one]\nTOOLSETS = []", "TOOLSETS: expected a mapping"),
        ("TOOLS = [one]\nTOOLSETS = {'a b': ['one']}", "toolset 'a b': a toolset's name has"),
        ("TOOLS = [one]\nTOOLSETS = {'web': ['one']}", "web: is a built-in toolset: rename it"),
        ("TOOLS = [one]\nTOOLSETS = {'a': ['oen']}", "TOOLSETS a: 'oen' is no tool"),
        ("TOOLS = [one]\nTOOLSETS = {'a': [one]}", "TOOLSETS a: <function one"),
        ("TOOLS = [one]\nTOOLSETS = {'a': 'one'}", "TOOLSETS a: expected a list of names"),
        ("TOOLS = [one]\nDISTRIBUTIONS = {'default': {'web': 1}}", "there is a built-in distribution of this name"),
        ("TOOLS = [one]\nDISTRIBUTIONS = {'d': {}}", "expected {toolset: percent}"),
        ("TOOLS = [one]\nDISTRIBUTIONS = {'d': {'web': 0}}", "web: expected a chance above 0 and at most 100, got 0"),
        ("TOOLS = [one]\nDISTRIBUTIONS = {'d': {'web': True}}", "got True"),
        ("TOOLS = [one]\nDISTRIBUTIONS = {'d': {'wbe': 5}}", "DISTRIBUTIONS d: Unknown tool or toolset 'wbe'"),
        ("TOOLS = [one", "cannot be loaded: SyntaxError: "),
        (
            "\n\nimport no_such_module\n",
            "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module' (line",
        ),
        ("raise SystemExit(3)", "cannot be loaded: SystemExit: 3"),
        ("\nimport os\nos._exit(0)", "cannot be loaded: SystemExit: os._exit(0) (line"),
        ("def f(a: int = 'x'):\n    'D.'\nTOOLS = [f]", "f: parameter a: its default 'x' is none of its type: Expec"),
        ("def f(a: Literal['y'] = 'x'):\n    'D.'\nTOOLS = [f]", "f: parameter a: its default 'x' is none of its type"),
        ("def f(a: Annotated[int, Meta(ge=1)] = 0):\n    'D.'\nTOOLS = [f]", "f: parameter a: its default 0 is none"),
        ("def f(a: list[int] = ['x']):\n    'D.'\nTOOLS = [f]", "f: parameter a: its default ['x'] is none of"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_line(text: str, told: str, tmp_path: Path) -> None:
    assert told in refused(tmp_path, GOOD + text)


def test_a_file_that_is_called_as_a_toolset_is_refused(tmp_path: Path) -> None:
    message = refused(tmp_path, GOOD + "TOOLS = [one]", "web.py")
    assert "web: is a built-in toolset: rename the file, or name its toolsets in TOOLSETS" in message


@pytest.mark.parametrize("name", ["nope.py", "folder", ""])
def test_a_file_that_is_not_there(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageProblem, match="there is no Python file"):
        open_catalog(Sources(module=f"{tmp_path}/{name}"), {})
