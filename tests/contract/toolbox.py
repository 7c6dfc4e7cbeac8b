"""A sandbox of this machine with the tools of one task in it, for the tests of tools."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from tools.base import ToolContext
from tools.environments.base import EnvironmentSpec, Owner
from tools.environments.table import load_backend
from tools.errors import ToolError
from tools.toolsets import load_tool


class Toolbox:
    """Calls tools as the agent does; a tool's error is `{"error": …}`. Every result is proven to be JSON."""

    def __init__(self, context: ToolContext) -> None:
        self.context = context
        self.environment = context.environment

    async def __call__(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        tool = load_tool(name)
        try:
            result = await tool.call(self.context, tool.parse(arguments))
        except ToolError as error:
            return {"error": str(error)}
        decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(result))
        assert decoded == result
        return result

    async def shell(self, command: str) -> str:
        """What the command prints; it must succeed."""
        ended = await self.environment.run(command, timeout=30)
        assert ended.exit_code == 0, ended.output
        return ended.output

    async def read(self, path: str) -> bytes:
        """The file's bytes."""
        return b"".join([chunk async for chunk in self.environment.read(path)])


@asynccontextmanager
async def open_toolbox(task_id: str, command_timeout: float = 20.0) -> AsyncIterator[Toolbox]:
    """A new sandbox and its tools."""
    owner = Owner(run_id="tools", boot_id="test", pid_namespace="test", pid=1, start_time=1)
    spec = EnvironmentSpec(task_id=task_id, owner=owner, deadline=time.time() + 300)
    async with load_backend("local").open(spec) as environment:
        yield Toolbox(ToolContext(environment, command_timeout))
