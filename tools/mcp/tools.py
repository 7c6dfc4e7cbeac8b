"""A tool of an MCP server: arguments held against the server's schema, its answer as a result object."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tools.arguments import repaired
from tools.base import ToolContext, ToolSpec
from tools.errors import ToolError
from tools.mcp.servers import ListedTool, McpServer
from tools.mcp.sessions import TaskSessions, starts_within
from tools.results import result_object
from tools.untrusted import marked

if TYPE_CHECKING:
    from mcp.types import CallToolResult

_LEFT_TO_THE_SERVER = ("pattern", "patternProperties", "format")  # a pattern can take for ever
_READ_AS_JSON = ("integer", "number", "boolean")


class McpTool:
    """Fulfils `tools.base.Tool`."""

    read_only = False

    def __init__(self, listed: ListedTool, server: McpServer, protocol: str) -> None:
        self.spec: ToolSpec = listed.spec
        self._listed = listed
        self._server = server
        self._protocol = protocol

    def parse(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """See `tools.base.Tool`. What the schema forbids that it cannot be asked here is the server's to say."""
        problem = self._problem(arguments)
        if not problem:
            return arguments
        try:
            mended = _mended(arguments, self.spec.parameters)
        except (AttributeError, TypeError):  # a schema may say `true` where a mapping is looked for
            mended = arguments
        if self._problem(mended):
            raise ToolError(f"Invalid arguments for {self.spec.name}: {problem}")
        return mended

    async def call(self, context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
        """See `tools.base.Tool`."""
        seconds = self._server.timeout or context.command_timeout
        server = self._listed.server
        session = TaskSessions.of(context).session(server, self._server, context.services.environ, self._protocol)
        limit, what = starts_within(seconds), "did not start"
        try:
            async with asyncio.timeout(limit):
                await session.client()
            limit, what = seconds, "gave no answer"
            async with asyncio.timeout(limit):
                answer = await session.call(self._listed.name, arguments)
        except TimeoutError:
            session.give_up()
            raise ToolError(f"MCP server {server} {what} within {limit:g} s") from None
        except ToolError as error:
            raise ToolError(f"MCP server {server}: {error}") from error.__cause__
        result = result_of(answer, self.spec.name)
        return marked({"result": result} if "untrusted" in result else result, f"the MCP server {server}")

    def _problem(self, arguments: dict[str, Any]) -> str:
        """ "" if they meet the schema, or if it cannot be said."""
        from referencing.exceptions import Unresolvable  # noqa: PLC0415 - few runs need it

        with suppress(Unresolvable, RecursionError):
            for error in self._validator.iter_errors(arguments):
                where = ".".join(map(str, error.absolute_path))
                return (f"argument `{where}`: " if where else "") + str(error.message)[:500]
        return ""

    @cached_property
    def _validator(self) -> Any:
        from jsonschema import Draft202012Validator  # noqa: PLC0415 - few runs need it
        from referencing.jsonschema import EMPTY_REGISTRY  # noqa: PLC0415 - as above

        schema = _askable(self.spec.parameters)
        usable = next(Draft202012Validator(Draft202012Validator.META_SCHEMA).iter_errors(schema), None) is None
        return Draft202012Validator(schema if usable else {}, registry=EMPTY_REGISTRY)


def _askable(schema: Any, *, of_names: bool = False) -> Any:
    """The schema without what can take for ever. `of_names`: the mapping's keys are names, not words of a schema."""
    if isinstance(schema, list):
        return [_askable(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    names = ("properties", "$defs", "definitions", "dependentSchemas")
    return {
        key: value if key in ("enum", "const", "default") else _askable(value, of_names=key in names and not of_names)
        for key, value in schema.items()
        if of_names or key not in _LEFT_TO_THE_SERVER
    }


def _mended(arguments: dict[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """What is plainly meant put right, as for every tool."""
    properties = {name: each if isinstance(each, dict) else {} for name, each in schema["properties"].items()}
    required = schema.get("required")
    known = {"properties": properties, "required": required if isinstance(required, list) else []}
    return {name: _read(value, properties.get(name, {})) for name, value in repaired(arguments, known).items()}


def _read(value: Any, expected: Mapping[str, Any]) -> Any:
    """ "5" for 5."""
    if isinstance(value, str) and expected.get("type") in _READ_AS_JSON:
        with suppress(ValueError):
            return json.loads(value.strip().lower())
    return value


def result_of(answer: "CallToolResult", tool: str) -> dict[str, Any]:
    """The object that the server gave (`structuredContent`), else its texts, joined, as `result`; of what is no text
    the names, as `not_shown`. An answer that says it is an error is one."""
    texts, others = _contents(answer)
    text = "\n".join(texts)
    if answer.is_error:
        return {"error": text or "the tool failed and did not say why"}
    result = result_object(text if answer.structured_content is None else answer.structured_content, tool)
    return {**result, "not_shown": others} if others else result


def _contents(answer: "CallToolResult") -> tuple[list[str], list[str]]:
    """Texts, and what else there is, by name."""
    texts, others = [], []
    for block in answer.content:
        match block.type:
            case "text":
                texts.append(block.text)
            case "image" | "audio":
                others.append(f"{block.type} ({block.mime_type}, {len(block.data) * 3 // 4} bytes)")
            case "resource_link":
                others.append(f"resource {block.name} ({block.uri})")
            case "resource":
                text = getattr(block.resource, "text", None)
                kind = block.resource.mime_type or "unknown type"
                if text is None:
                    others.append(f"resource {block.resource.uri} ({kind})")
                else:
                    texts.append(text)
    return texts, others
