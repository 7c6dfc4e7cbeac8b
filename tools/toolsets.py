"""Which toolset holds which tools, where they are found, and which of them can be had here."""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from tools.base import Tool
from tools.distributions import Distribution, get_distribution
from tools.errors import UsageProblem
from tools.names import did_you_mean
from tools.services import ToolSettings

TOOLS = {
    "terminal": "tools.terminal:TERMINAL",
    "process": "tools.terminal:PROCESS",
    "read_file": "tools.files:READ_FILE",
    "write_file": "tools.files:WRITE_FILE",
    "patch": "tools.files:PATCH",
    "search_files": "tools.search:SEARCH_FILES",
    "web_search": "tools.web.search:WEB_SEARCH",
    "web_extract": "tools.web.pages:WEB_EXTRACT",
    "todo": "tools.todo:TODO",
    "execute_code": "tools.code.execute_code:EXECUTE_CODE",
    "delegate_task": "tools.delegation:DELEGATE_TASK",
    "vision_analyze": "tools.pictures.vision:VISION_ANALYZE",
    "browser_navigate": "tools.browser.tools:NAVIGATE",
    "browser_snapshot": "tools.browser.tools:SNAPSHOT",
    "browser_click": "tools.browser.tools:CLICK",
    "browser_type": "tools.browser.tools:TYPE",
    "browser_scroll": "tools.browser.tools:SCROLL_PAGE",
    "browser_back": "tools.browser.tools:BACK",
    "browser_press": "tools.browser.tools:PRESS",
    "browser_get_images": "tools.browser.tools:GET_IMAGES",
    "browser_console": "tools.browser.tools:CONSOLE",
    "browser_vision": "tools.browser.tools:VISION",
    "image_generate": "tools.pictures.image_generation:IMAGE_GENERATE",
}
"""Tool -> "module:OBJECT"."""

NEEDS: dict[str, str] = {
    "web_search": "tools.web.search:find_lack",
    "web_extract": "tools.web.pages:find_lack",
    "vision_analyze": "tools.pictures.vision:lacks_eye",
    "browser_navigate": "tools.browser.program:lacks_browser",
    "browser_snapshot": "tools.browser.program:lacks_browser",
    "browser_click": "tools.browser.program:lacks_browser",
    "browser_type": "tools.browser.program:lacks_browser",
    "browser_scroll": "tools.browser.program:lacks_browser",
    "browser_back": "tools.browser.program:lacks_browser",
    "browser_press": "tools.browser.program:lacks_browser",
    "browser_get_images": "tools.browser.program:lacks_browser",
    "browser_console": "tools.browser.program:lacks_browser",
    "browser_vision": "tools.pictures.vision:lacks_browser_eye",
    "image_generate": "tools.pictures.image_services:lacks_image_service",
}
"""Tool -> "module:FUNCTION" of those that need more than a sandbox. The function takes `ToolSettings` and the
environment and says what is missing and how to mend it, in one line; "" if nothing is."""

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
"""Toolset -> its tools."""

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
    """The built-in tool of that name."""
    return load_tool_at(TOOLS[name])


def load_tool_at(place: str) -> Tool:
    """The tool at `module:OBJECT`."""
    tool: Tool = _object_at(place)
    return tool


def _object_at(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)


def find_lacking(settings: ToolSettings, environ: Mapping[str, str]) -> dict[str, str]:
    """The built-in tools that cannot be had here, each with what it lacks."""
    reasons = {place: str(_object_at(place)(settings, environ)) for place in dict.fromkeys(NEEDS.values())}
    found = {name: reasons[NEEDS[name]] if name in NEEDS else "" for name in TOOLS}
    return {name: reason for name, reason in found.items() if reason}


class Catalog:
    """The tools and toolsets that a run knows: the built-in ones and its own. `toolsets`: its own, also with tools that
    are known by name only; `lacking`: tools and toolsets that cannot be had here, each with what it lacks."""

    def __init__(
        self,
        own: Mapping[str, Tool] | None = None,
        toolsets: Mapping[str, Sequence[str]] | None = None,
        lacking: Mapping[str, str] | None = None,
        distributions: Mapping[str, Distribution] | None = None,
    ) -> None:
        self.own = own or {}
        self.own_toolsets: Mapping[str, Sequence[str]] = toolsets or {}
        self.toolsets: Mapping[str, Sequence[str]] = {**TOOLSETS, **self.own_toolsets}
        self.lacking = lacking or {}
        self.own_distributions: Mapping[str, Distribution] = distributions or {}
        named = {tool for tools in self.own_toolsets.values() for tool in tools}
        self.names = (*BUILT_IN_TOOLS, *sorted({*self.own, *named} - set(BUILT_IN_TOOLS)))
        self._each = {tool: (tool,) for tool in self.names}

    def resolve_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """Tool names, toolset names and aliases -> tool names, each once, in order. A name that is both is the tool.

        Raises UsageProblem for a name that is neither; what is known but cannot be had here is not left out."""
        return self._resolved(names, {**self.toolsets, **self._each})

    def resolve_toolsets(self, names: Sequence[str]) -> tuple[str, ...]:
        """Like `resolve_names`, for places where toolsets are named: a name that is both is the toolset."""
        return self._resolved(names, {**self._each, **self.toolsets})

    def _resolved(self, names: Sequence[str], table: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
        targets = [target for name in names for target in ALIASES.get(name, (name,))]
        for name in targets:
            if name not in table:
                raise UsageProblem(f"Unknown tool or toolset {name!r}: {self._suggestion(name)}")
        return tuple(dict.fromkeys(tool for name in targets for tool in table[name]))

    def _suggestion(self, name: str) -> str:
        question = did_you_mean(name, [*self.toolsets, *self.names, *ALIASES])
        return question or f"there are {', '.join(sorted(self.toolsets))}"

    def disabled(self, names: Sequence[str]) -> set[str]:
        """The tools that go with toolsets or tools of these names. One that several toolsets hold goes with the first:
        `browser` does not take `web_search` from `web`. Raises UsageProblem."""
        targets = [target for name in names for target in ALIASES.get(name, (name,))]
        return {
            tool
            for name in targets
            for tool in self.resolve_toolsets([name])
            if name not in self.toolsets or self.toolset_of(tool) == name
        }

    def select(self, tools: Sequence[str], disabled: Sequence[str] = ()) -> tuple[Tool, ...]:
        """Of the tools of these names those that can be had here, without what `disabled` (toolsets or tools) names,
        sorted by name."""
        wanted = set(tools) - self.lacking.keys() - self.disabled(disabled)
        return tuple(self.own[name] if name in self.own else load_tool(name) for name in sorted(wanted))

    def toolset_of(self, tool: str) -> str:
        """The first toolset that holds the tool, "" for none."""
        return next((toolset for toolset, tools in self.toolsets.items() if tool in tools), "")

    def distribution(self, name: str) -> Distribution:
        """The distribution of that name. Raises UnknownDistribution."""
        return get_distribution(name, self.own_distributions)

    def missing(self, names: Sequence[str], disabled: Sequence[str] = ()) -> dict[str, str]:
        """Those of the named toolsets and tools that cannot be had here, or not whole, each with what they lack; what
        `disabled` (toolsets or tools) names is not missed. Raises UsageProblem."""
        off = {*disabled, *self.disabled(disabled)}
        wanted = {name: self.resolve_toolsets([name]) for name in dict.fromkeys(names) if name not in off}
        lacks = {
            name: self._lack_of(name, [tool for tool in tools if tool not in off]) for name, tools in wanted.items()
        }
        return {name: lack for name, lack in lacks.items() if lack}

    def _lack_of(self, name: str, tools: Sequence[str]) -> str:
        lacks = [self.lacking[each] for each in (name, *tools) if each in self.lacking]
        return "; ".join(dict.fromkeys(part for lack in lacks for part in lack.split("; ")))

    def describe(self) -> tuple[tuple[str, str, str], ...]:
        """All toolsets, sorted by name: name, tools joined by comma and blank, "ready" or what is missing, with the
        tools that miss it where these are not all."""
        return tuple(
            (name, ", ".join(tools), self._state(name, tools)) for name, tools in sorted(self.toolsets.items())
        )

    def _state(self, name: str, tools: Sequence[str]) -> str:
        without: dict[str, list[str]] = {}
        for tool in tools:
            for lack in filter(None, self._lack_of(name, [tool]).split("; ")):
                without.setdefault(lack, []).append(tool)
        said = [_lacking(lack, without[lack], tools) for lack in without] or [self._lack_of(name, ()) or "ready"]
        some = 0 < len({tool for each in without.values() for tool in each}) < len(tools)
        return "; ".join([*said, *["the rest is ready"] * some])


def _lacking(lack: str, those: Sequence[str], tools: Sequence[str]) -> str:
    """`lack`, and which of a toolset's tools have it."""
    others = [tool for tool in tools if tool not in those]
    if len(those) > len(others):
        return f"all but {', '.join(others)} lack {lack}" if others else lack
    return f"{', '.join(those)} lack{'s' * (len(those) == 1)} {lack}"


BUILT_IN = Catalog()
"""The built-in tools, wherever they can be had."""
