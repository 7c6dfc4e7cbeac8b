"""Where a run's own tools come from: its module's file, and its MCP servers, looked at once before it starts."""

from collections.abc import Mapping

from agent.catalog import Sources
from batch.settings import RunSettings
from tools.errors import UsageProblem
from tools.mcp.servers import without_secrets
from tools.mcp.sessions import look


async def find_sources(settings: RunSettings, environ: Mapping[str, str]) -> Sources:
    """Connects to every server. UsageProblem for a server whose tools cannot be named as asked."""
    servers = without_secrets(settings.mcp_servers, environ)
    if not servers:
        return Sources(module=settings.tools_module)
    listing = await look(servers, environ, settings.command_timeout)
    return Sources(module=settings.tools_module, servers=servers, listing=listing)


def refuse_lacking(settings: RunSettings, sources: Sources) -> None:
    """UsageProblem for servers that cannot be had, unless the run may do without."""
    if sources.listing.lacking and not settings.allow_missing_toolsets:
        raise UsageProblem(
            f"mcp_servers: {'; '.join(sources.listing.lacking.values())}. Mend it, leave the server out, or run "
            "without it (--allow_missing_toolsets)"
        )
