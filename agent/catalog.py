"""A run's tools: the built-in ones, those of its own module, and those of its MCP servers."""

import re
from collections.abc import Mapping
from typing import NoReturn

from msgspec import Struct

from agent.faults import Fault, attempted
from tools.base import Tool
from tools.errors import UsageProblem
from tools.mcp.servers import Listing, McpServer, our_name
from tools.mcp.tools import McpTool
from tools.own import OwnTools, load_own
from tools.toolsets import Catalog


class Sources(Struct, frozen=True, kw_only=True):
    """Where a run's own tools come from. Crosses the process border: plain values, never a key."""

    module: str = ""
    servers: dict[str, McpServer] = {}
    listing: Listing = Listing()


def open_catalog(sources: Sources, lacking: Mapping[str, str]) -> Catalog:
    """`lacking`: built-in tools that cannot be had here. Raises UsageProblem for a module that cannot be used, and for
    names that two tools or toolsets would have."""
    own = _load(sources.module) if sources.module else OwnTools()
    servers = _tools_of_servers(sources)
    _refuse_common("tool", own.tools, servers)
    toolsets = _toolsets_of_servers(sources)
    _refuse_common("toolset", own.toolsets, toolsets)
    missing = sources.listing.lacking
    catalog = Catalog(
        own={**own.tools, **servers},
        toolsets={**own.toolsets, **toolsets},
        lacking={**lacking, **missing, **{tool: missing[name] for name in missing for tool in toolsets[name]}},
        distributions=own.distributions,
    )
    for name, distribution in own.distributions.items():
        _check_distribution(sources.module, name, distribution.toolsets, catalog)
    return catalog


def _load(path: str) -> OwnTools:
    loaded = attempted(lambda: load_own(path), through=(UsageProblem, KeyboardInterrupt))
    if isinstance(loaded, Fault):
        _refuse(path, loaded)
    return loaded.value


def _refuse(path: str, fault: Fault) -> NoReturn:
    """The line where it happened is the last one of the file's own."""
    lines = re.findall(rf'File "[^"]*{re.escape(path.rpartition("/")[2])}", line (\d+)', fault.trace)
    where = f" (line {lines[-1]})" if lines else ""
    raise UsageProblem(f"tools_module {path}: cannot be loaded: {' '.join(str(fault).split())}{where}")


def _tools_of_servers(sources: Sources) -> dict[str, Tool]:
    listing = sources.listing
    return {
        tool.spec.name: McpTool(tool, sources.servers[tool.server], listing.protocols.get(tool.server, ""))
        for tool in listing.tools
    }


def _toolsets_of_servers(sources: Sources) -> dict[str, tuple[str, ...]]:
    """Of a server that cannot be had those tools are known that the run wants of it by name."""
    return {
        name: tuple(our_name(name, tool) for tool in server.tools)
        if name in sources.listing.lacking
        else tuple(tool.spec.name for tool in sources.listing.tools if tool.server == name)
        for name, server in sources.servers.items()
    }


def _refuse_common(kind: str, own: Mapping[str, object], servers: Mapping[str, object]) -> None:
    for name in own.keys() & servers.keys():
        raise UsageProblem(f"{kind} {name}: it is both the tools_module's and an MCP server's: rename one")


def _check_distribution(path: str, name: str, chances: Mapping[str, float], catalog: Catalog) -> None:
    try:
        catalog.resolve_toolsets(list(chances))
    except UsageProblem as problem:
        raise UsageProblem(f"tools_module {path}: DISTRIBUTIONS {name}: {problem}") from problem
