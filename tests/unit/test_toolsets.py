"""Names of tools and toolsets, and what they stand for."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.errors import UsageProblem
from tools.toolsets import (
    ALIASES,
    BUILT_IN_TOOLS,
    TOOLS,
    TOOLSETS,
    describe,
    load_tool,
    missing,
    resolve_names,
    resolve_toolsets,
    select_tools,
    toolset_of,
)

ROOT = Path(__file__).parents[2]
FILE_TOOLS = ("read_file", "write_file", "patch", "search_files")


def names_of(*toolsets: str) -> list[str]:
    return [tool.spec.name for tool in select_tools(resolve_toolsets(toolsets))]


def test_built_in_tools_are_the_columns_of_tool_stats() -> None:
    assert " ".join(BUILT_IN_TOOLS) == (
        "browser_back browser_click browser_console browser_get_images browser_navigate browser_press browser_scroll "
        "browser_snapshot browser_type browser_vision delegate_task execute_code image_generate patch process "
        "read_file search_files terminal todo vision_analyze web_extract web_search write_file"
    )


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_loads_under_its_own_name_with_a_plain_schema(name: str) -> None:
    tool = load_tool(name)
    assert tool.spec.name == name
    assert len(tool.spec.description) > 20
    assert tool.spec.parameters["type"] == "object"
    assert set(tool.spec.parameters["required"]) <= tool.spec.parameters["properties"].keys()
    text = repr(tool.spec.parameters)
    assert not any(word in text for word in ("$ref", "$defs", "title", "anyOf", "null", "None"))
    assert all(set(field) >= {"type", "description"} for field in tool.spec.parameters["properties"].values())


def test_read_only_tools() -> None:
    assert {name for name in TOOLS if load_tool(name).read_only} == {"read_file", "search_files"}


def test_terminal_and_file_give_exactly_six_tools_sorted_by_name() -> None:
    six = ["patch", "process", "read_file", "search_files", "terminal", "write_file"]
    assert names_of("terminal", "file") == six
    assert names_of("file", "terminal", "file") == six
    assert names_of("dev") == six
    assert names_of() == []


def test_web_is_search_and_extract() -> None:
    assert resolve_toolsets(["web"]) == ("web_search", "web_extract")


def test_a_name_that_is_both_is_the_tool_in_a_row_and_the_toolset_in_settings() -> None:
    assert resolve_names(["terminal"]) == ("terminal",)
    assert resolve_toolsets(["terminal"]) == ("terminal", "process")


def test_several_names_combine_without_duplicates_in_order() -> None:
    assert resolve_names(["file", "terminal", "patch", "bash"]) == (*FILE_TOOLS, "terminal")


@pytest.mark.parametrize(
    ("alias", "tools"),
    [
        ("bash", ("terminal",)),
        ("git", ("terminal",)),
        ("file_read", ("read_file",)),
        ("file_write", ("write_file",)),
        ("python_exec", ("execute_code",)),
        ("dev", ("terminal", "process", *FILE_TOOLS)),
    ],
)
def test_aliases(alias: str, tools: tuple[str, ...]) -> None:
    assert resolve_names([alias]) == tools


def test_every_alias_and_toolset_leads_to_built_in_tools() -> None:
    assert set(resolve_names([*ALIASES, *TOOLSETS])) == set(BUILT_IN_TOOLS)


@pytest.mark.parametrize("resolve", [resolve_names, resolve_toolsets])
def test_an_unknown_name_is_refused_with_the_nearest(resolve: object) -> None:
    assert callable(resolve)
    with pytest.raises(UsageProblem, match=r"'terminel': did you mean terminal\?"):
        resolve(["file", "terminel"])
    with pytest.raises(UsageProblem, match="'': there are file, terminal"):
        resolve([""])


def test_disabled_tools_and_toolsets_are_taken_away() -> None:
    every = resolve_toolsets(["terminal", "file"])
    assert [tool.spec.name for tool in select_tools(every, ["file"])] == ["process", "terminal"]
    left = [tool.spec.name for tool in select_tools(every, ["bash", "write_file"])]
    assert left == ["patch", "read_file", "search_files"]


def test_what_cannot_be_had_is_named_and_not_offered() -> None:
    assert missing(["terminal", "file", "dev", "read_file"]) == ()
    absent = tuple(name for name in TOOLSETS if not set(TOOLSETS[name]) <= TOOLS.keys())
    assert missing(["file", *absent, *absent]) == absent
    assert names_of("file", *absent) == sorted(FILE_TOOLS)
    with pytest.raises(UsageProblem, match="Unknown tool or toolset"):
        missing(["nope"])


def test_the_listing_holds_only_toolsets_that_can_be_had_whole() -> None:
    rows = describe()
    assert [name for name, _, _ in rows] == sorted(name for name in TOOLSETS if not missing([name]))
    assert ("terminal", "terminal, process", "ready") in rows


def test_toolset_of_a_tool() -> None:
    assert toolset_of("process") == "terminal"
    assert toolset_of("patch") == "file"
    assert toolset_of("web_search") == "web"
    assert toolset_of("made_up") == ""


def test_naming_tools_loads_none() -> None:
    script = (
        "import sys, tools.toolsets as t; t.resolve_names(['dev']); t.describe(); t.missing(['web']);"
        "print([m for m in sys.modules if m in ('tools.terminal', 'tools.files', 'asyncio', 'rich', 'openai')])"
    )
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
