"""The one tool of a SWE run: commands in the sandbox, one after another."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from tools.arguments import TypedTool
from tools.base import ToolContext
from tools.terminal import MAX_OUTPUT, MAX_SECONDS, TerminalArguments, run_terminal


class CommandArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What it takes."""

    command: Annotated[str, Meta(description="The shell command to run; it may have several lines")]
    timeout: Annotated[int, Meta(description=f"Seconds after which it is killed, at most {MAX_SECONDS}")] | None = None


async def run_command(context: ToolContext, arguments: CommandArguments) -> dict[str, Any]:
    """As `run_terminal` in the foreground."""
    return await run_terminal(context, TerminalArguments(arguments.command, timeout=arguments.timeout))


TERMINAL = TypedTool(
    "terminal",
    "Run a shell command in the sandbox and return its output (stdout and stderr together) and exit code. The current "
    "directory, exported variables and files carry over to the next command. Commands cannot ask anything: their input "
    f"is empty. Output above {MAX_OUTPUT:,} characters is shortened in the middle.",
    CommandArguments,
    run_command,
)
