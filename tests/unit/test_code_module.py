"""What travels into a sandbox for `execute_code`: Python of any age, whatever tools are called."""

import ast
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tools.base import ToolSpec
from tools.code import child
from tools.code.child import Kept, Lines
from tools.code.module import module_text
from tools.toolsets import TOOLS, load_tool


def spec(name: str, required: tuple[str, ...] = (), description: str = "", **properties: Any) -> ToolSpec:
    return ToolSpec(name, description, {"type": "object", "properties": properties, "required": list(required)})


def module_of(*specs: ToolSpec) -> Any:
    """The module, its calls written down in `made` and not made."""
    module: Any = ModuleType("batch_tools")
    module.__file__ = __file__
    exec(module_text(specs), module.__dict__)
    module.made = []
    module._call = lambda name, arguments: module.made.append((name, arguments))
    return module


def test_every_python_from_3_6_on_can_read_it() -> None:
    sources = [module_text([load_tool(name).spec for name in TOOLS]), Path(child.__file__).read_text()]
    for source in sources:
        tree = ast.parse(source, feature_version=(3, 6))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not names & {"removeprefix", "anext", "aiter"}


def test_it_fits_a_command_line() -> None:
    assert len(Path(child.__file__).read_bytes()) < 50_000


def test_required_ones_come_first_and_the_rest_can_be_left_out() -> None:
    module = module_of(spec("f", ("b",), 'says \'f\'\n\\ """ ü', a={}, b={}, c={}))
    assert str(inspect.signature(module.f)) == "(b, a=Ellipsis, c=Ellipsis)"
    assert module.f.__doc__ == 'says \'f\'\n\\ """ ü'
    module.f(1)
    module.f(1, c=None)
    assert module.made == [("f", {"b": 1, "a": ..., "c": ...}), ("f", {"b": 1, "a": ..., "c": None})]


ODD = ["class", "None", "a-b", "_hidden", "", "1st", "ünï", "x y", "'); import os  #"]


@pytest.mark.parametrize("name", [*ODD, "print", "dict", "list"])
def test_odd_names_of_tools_and_parameters(name: str) -> None:
    properties: dict[str, Any] = {name: {}, "plain": {}}
    module = module_of(spec(name or "-", (name,), **properties), spec("after"))
    (made,) = {key for key in vars(module) if not key.startswith("_")} - {"after", "made"}
    assert made.isidentifier()
    getattr(module, made)(**{name: 1})
    assert module.made[0][0] == (name or "-")
    assert module.made[0][1] == {name: 1, "plain": ...}


def test_no_schema_to_speak_of() -> None:
    module = module_of(ToolSpec("f", "", {"type": "object"}))
    module.f()
    assert module.made == [("f", {})]


def test_lines_out_of_pieces() -> None:
    lines = Lines()
    assert lines.feed(b"a") == []
    assert (len(lines), lines.feed(b"b\nc\n\nd")) == (1, [b"ab", b"c", b""])
    assert (len(lines), lines.feed(b"\n"), len(lines)) == (1, [b"d"], 0)


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 5_000])
def test_head_and_tail(tmp_path: Path, size: int) -> None:
    text = "".join("ä" if number % 7 else "€" for number in range(size))
    (tmp_path / "f").write_text(text, encoding="utf-8")
    with (tmp_path / "f").open("rb") as file:
        kept = Kept(file, 100)
        kept.drain()
        assert not kept.is_open
    shown = f"{text[:40]}\n[... {size - 100} characters left out ...]\n{text[-60:]}"
    assert kept.text() == (shown if size > 100 else text)
