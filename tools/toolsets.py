"""Tables: which toolset holds which tools, and where the tools that exist here are found."""

import difflib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module

from tools.base import Tool
from tools.errors import UsageProblem

TOOLS = {
    "terminal": "tools.terminal:TERMINAL",
    "process": "tools.terminal:PROCESS",
    "read_file": "tools.files:READ_FILE",
    "write_file": "tools.files:WRITE_FILE",
    "patch": "tools.files:PATCH",
    "search_files": "tools.search:SEARCH_FILES",
}
"""Tool -> "module:OBJECT" of those that can be had."""

TOOLSETS = {
    "terminal": ("terminal", "process"),
    "file": ("read_file", "write_file", "patch", "search_files"),
    "web": ("web_search", "web_extract"),
    "browser": (
        "browser_navigate",
        "browser_snapshot",
        "browser_click",
        "browser_type",
        "browser_scroll",
        "browser_back",
        "browser_press",
        "browser_get_images",
        "browser_console",
        "browser_vision",
        "web_search",
    ),
    "vision": ("vision_analyze",),
    "image_gen": ("image_generate",),
    "todo": ("todo",),
    "code_execution": ("execute_code",),
    "delegation": ("delegate_task",),
}
"""Toolset -> its tools. One with a tool that is not in TOOLS is known by name only."""

ALIASES = {
    "bash": ("terminal",),
    "git": ("terminal",),
    "file_read": ("read_file",),
    "file_write": ("write_file",),
    "python_exec": ("execute_code",),
    "dev": (*TOOLSETS["terminal"], *TOOLSETS["file"]),
}
"""Other names in rows and settings -> tools, or names of toolsets."""

BUILT_IN_TOOLS = tuple(sorted({tool for tools in TOOLSETS.values() for tool in tools}))
"""The columns of `tool_stats`."""


@cache
def load_tool(name: str) -> Tool:
    """The tool of that name, which must be in TOOLS."""
    return load_tool_at(TOOLS[name])


def load_tool_at(place: str) -> Tool:
    """The tool at `module:OBJECT`."""
    module, _, attribute = place.partition(":")
    tool: Tool = getattr(import_module(module), attribute)
    return tool


def resolve_names(names: Sequence[str]) -> tuple[str, ...]:
    """Tool names, toolset names and aliases -> tool names, each once, in order. A name that is both is the tool.

    Raises UsageProblem for a name that is neither; what is known but cannot be had here is not left out."""
    return _resolved(names, {**TOOLSETS, **{tool: (tool,) for tool in BUILT_IN_TOOLS}})


def resolve_toolsets(names: Sequence[str]) -> tuple[str, ...]:
    """Like `resolve_names`, for places where toolsets are named: a name that is both is the toolset."""
    return _resolved(names, {**{tool: (tool,) for tool in BUILT_IN_TOOLS}, **TOOLSETS})


def _resolved(names: Sequence[str], table: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    targets = [target for name in names for target in ALIASES.get(name, (name,))]
    for name in targets:
        if name not in table:
            raise UsageProblem(f"Unknown tool or toolset {name!r}: {_suggestion(name)}")
    return tuple(dict.fromkeys(tool for name in targets for tool in table[name]))


def _suggestion(name: str) -> str:
    toolsets = [toolset for toolset, _, _ in describe()]
    near = difflib.get_close_matches(name, [*toolsets, *TOOLS, *ALIASES], n=1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(toolsets)}"


def select_tools(tools: Sequence[str], disabled: Sequence[str] = ()) -> tuple[Tool, ...]:
    """Of the tools of these names those that can be had here, without what `disabled` (toolsets or tools) names, sorted
    by name."""
    wanted = set(tools) & TOOLS.keys() - set(resolve_toolsets(disabled))
    return tuple(load_tool(name) for name in sorted(wanted))


def toolset_of(tool: str) -> str:
    """The first toolset that holds the tool, "" for none."""
    return next((toolset for toolset, tools in TOOLSETS.items() if tool in tools), "")


def missing(names: Sequence[str]) -> tuple[str, ...]:
    """Those of the named toolsets and tools that cannot be had here, or not whole. Raises UsageProblem."""
    return tuple(name for name in dict.fromkeys(names) if not set(resolve_toolsets([name])) <= TOOLS.keys())


def describe() -> tuple[tuple[str, str, str], ...]:
    """The toolsets that exist here, sorted by name: name, tools joined by comma and blank, state."""
    return tuple(
        (name, ", ".join(tools), "ready") for name, tools in sorted(TOOLSETS.items()) if set(tools) <= TOOLS.keys()
    )
