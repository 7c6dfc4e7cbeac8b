"""Names of tools and toolsets, and what they stand for."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.errors import ToolError, UsageProblem
from tools.services import ToolSettings
from tools.toolsets import (
    ALIASES,
    BUILT_IN,
    BUILT_IN_TOOLS,
    TOOLS,
    TOOLSETS,
    Catalog,
    find_lacking,
    load_tool,
)

ROOT = Path(__file__).parents[2]
FILE_TOOLS = ("read_file", "write_file", "patch", "search_files")


def names_of(*toolsets: str) -> list[str]:
    return [tool.spec.name for tool in BUILT_IN.select(BUILT_IN.resolve_toolsets(toolsets))]


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
    web = {"web_search", "web_extract", "vision_analyze"}
    assert {name for name in TOOLS if load_tool(name).read_only} == {"read_file", "search_files"} | web


def test_terminal_and_file_give_exactly_six_tools_sorted_by_name() -> None:
    six = ["patch", "process", "read_file", "search_files", "terminal", "write_file"]
    assert names_of("terminal", "file") == six
    assert names_of("file", "terminal", "file") == six
    assert names_of("dev") == six
    assert names_of() == []


def test_web_is_search_and_extract() -> None:
    assert BUILT_IN.resolve_toolsets(["web"]) == ("web_search", "web_extract")


def test_a_name_that_is_both_is_the_tool_in_a_row_and_the_toolset_in_settings() -> None:
    assert BUILT_IN.resolve_names(["terminal"]) == ("terminal",)
    assert BUILT_IN.resolve_toolsets(["terminal"]) == ("terminal", "process")


def test_several_names_combine_without_duplicates_in_order() -> None:
    assert BUILT_IN.resolve_names(["file", "terminal", "patch", "bash"]) == (*FILE_TOOLS, "terminal")


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
    assert BUILT_IN.resolve_names([alias]) == tools


def test_every_alias_and_toolset_leads_to_built_in_tools() -> None:
    assert set(BUILT_IN.resolve_names([*ALIASES, *TOOLSETS])) == set(BUILT_IN_TOOLS)


@pytest.mark.parametrize("resolve", [BUILT_IN.resolve_names, BUILT_IN.resolve_toolsets])
def test_an_unknown_name_is_refused_with_the_nearest(resolve: object) -> None:
    assert callable(resolve)
    with pytest.raises(UsageProblem, match=r"'terminel': did you mean terminal\?"):
        resolve(["file", "terminel"])
    with pytest.raises(UsageProblem, match="'': there are browser, code_execution"):
        resolve([""])


def test_disabled_tools_and_toolsets_are_taken_away() -> None:
    every = BUILT_IN.resolve_toolsets(["terminal", "file"])
    assert [tool.spec.name for tool in BUILT_IN.select(every, ["file"])] == ["process", "terminal"]
    left = [tool.spec.name for tool in BUILT_IN.select(every, ["bash", "write_file"])]
    assert left == ["patch", "read_file", "search_files"]
    web = BUILT_IN.resolve_toolsets(["web", "browser"])
    assert [tool.spec.name for tool in BUILT_IN.select(web, ["browser"])] == ["web_extract", "web_search"]
    assert "web_search" not in [tool.spec.name for tool in BUILT_IN.select(web, ["web"])]


def test_what_cannot_be_had_is_named_and_not_offered() -> None:
    catalog = Catalog(lacking={"web_search": "a key", "browser_click": "a browser", "browser_back": "a browser"})
    assert catalog.missing(["terminal", "file", "dev", "read_file", "web_extract"]) == {}
    assert catalog.missing(["web", "browser", "web"]) == {"web": "a key", "browser": "a browser; a key"}
    assert catalog.missing(["browser"], ["browser_click", "browser_back"]) == {"browser": "a key"}
    assert catalog.missing(["web", "browser"], ["browser"]) == {"web": "a key"}
    assert catalog.missing(["web", "browser"], ["web_search", "browser_back"]) == {"browser": "a browser"}
    shared = Catalog(lacking={"browser_click": "a browser", "browser_vision": "a browser; a model that sees"})
    assert shared.missing(["browser", "browser_vision"]) == {
        "browser": "a browser; a model that sees",
        "browser_vision": "a browser; a model that sees",
    }
    assert Catalog(toolsets={"box": []}, lacking={"box": "a server"}).missing(["box"], ["box"]) == {}
    every = catalog.resolve_toolsets(["file", "web"])
    assert "web_search" not in [tool.spec.name for tool in catalog.select(every, ["web_extract"])]
    with pytest.raises(UsageProblem, match="Unknown tool or toolset"):
        catalog.missing(["nope"])


def test_the_listing_says_of_every_toolset_what_it_lacks() -> None:
    rows = {name: (tools, state) for name, tools, state in Catalog(lacking={"todo": "time"}).describe()}
    assert list(rows) == sorted(TOOLSETS)
    assert rows["terminal"] == ("terminal, process", "ready")
    assert rows["todo"] == ("todo", "time")


def test_a_sandbox_is_enough_for_terminal_and_file() -> None:
    lacking = find_lacking(ToolSettings(), {})
    assert not lacking.keys() & set(BUILT_IN.resolve_toolsets(["terminal", "file"]))


def test_toolset_of_a_tool() -> None:
    assert BUILT_IN.toolset_of("process") == "terminal"
    assert BUILT_IN.toolset_of("patch") == "file"
    assert BUILT_IN.toolset_of("web_search") == "web"
    assert BUILT_IN.toolset_of("made_up") == ""


def test_naming_tools_loads_none() -> None:
    script = (
        "from tools.toolsets import BUILT_IN as t; t.resolve_names(['dev']); t.describe(); t.missing(['web']);"
        "import sys; print([m for m in sys.modules if m in ('tools.terminal', 'tools.files', 'rich', 'openai')])"
    )
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


GIVEN_BY_MODELS = {
    "terminal": "command background timeout workdir pty notify_on_complete watch_patterns",
    "process": "action session_id data timeout offset limit",
    "read_file": "path offset limit",
    "write_file": "path content cross_profile",
    "patch": "mode path old_string new_string replace_all patch cross_profile",
    "search_files": "pattern target path file_glob limit offset output_mode context",
    "execute_code": "code",
    "todo": "todos merge",
    "delegate_task": "goal context tasks role",
}
"""The parameters that models were trained to give."""
MEANINGLESS = {"cross_profile", "role"}


@pytest.mark.parametrize("name", GIVEN_BY_MODELS)
def test_every_parameter_that_models_give_is_taken_and_those_without_meaning_are_not_told(name: str) -> None:
    tool = load_tool(name)
    given = set(GIVEN_BY_MODELS[name].split())
    assert given - MEANINGLESS <= set(tool.spec.parameters["properties"])
    assert not MEANINGLESS & set(tool.spec.parameters["properties"])
    needed = {"action": "list", "todos": [], "tasks": []}
    arguments = {each: needed.get(each, "x") for each in tool.spec.parameters["required"]}
    for more in given & MEANINGLESS:
        for value in ("leaf", "orchestrator", True, None):
            tool.parse({**arguments, more: value})


def test_a_task_of_several_may_have_a_role() -> None:
    tool = load_tool("delegate_task")
    tasks = [{"goal": "a", "role": "leaf"}, {"goal": "b", "role": "orchestrator"}]
    assert [task.goal for task in tool.parse({"tasks": tasks}).tasks] == ["a", "b"]
    assert "role" not in repr(tool.spec.parameters)
    with pytest.raises(ToolError, match="unknown argument `rol`"):
        tool.parse({"goal": "a", "rol": "leaf"})
