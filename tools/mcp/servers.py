"""MCP servers as toolsets: what a run is told of a server, the names of its tools, and what stays out of files. Pure.

A server's tools are called `mcp_SERVER_TOOL`, with `_` for whatever is no letter or digit; the toolset is called as the
server.
"""

import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from tools.base import ToolSpec
from tools.errors import UsageProblem
from tools.mcp import credentials
from tools.mcp.credentials import Credential
from tools.toolsets import ALIASES, BUILT_IN_TOOLS, TOOLSETS

LONGEST_NAME = 64  # characters that endpoints take for a tool's
HIDDEN = "[REDACTED]"

_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_REFERENCE = re.compile(rf"(?:\w+ )?{_VARIABLE.pattern}")
_HIDDEN_USER = re.compile(rf"(?<=://)[^/?#@\s]*{re.escape(HIDDEN)}@")


class McpServer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a server is reached: a program that speaks over its stdin and stdout, or a URL (streamable HTTP).

    `args`, `env`, `url` and `headers` may say `${VARIABLE}` for a value of the environment, or else of `env`. `tools`:
    these of the server's tools only; `timeout`: seconds for one call."""

    command: str | tuple[str, ...] = ""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    cwd: str = ""
    url: str = ""
    headers: dict[str, str] = {}
    type: str = ""  # stdio or http, as the usual files say; it follows from the rest
    tools: tuple[str, ...] = ()
    timeout: Annotated[float, Meta(gt=0, le=3600)] | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """The program and its arguments. A command that is one text and has no `args` is read as a shell would."""
        if isinstance(self.command, tuple):
            return (*self.command, *self.args)
        return (self.command, *self.args) if self.args else tuple(shlex.split(self.command))


class ListedTool(Struct, frozen=True, kw_only=True):
    """A tool as its server lists it. `name` is the server's own, `spec.name` the one that models are told."""

    server: str
    name: str
    spec: ToolSpec


class Listing(Struct, frozen=True, kw_only=True):
    """What servers were found to have. `protocols`: server -> version of the protocol that was agreed on; `lacking`:
    server -> why it cannot be had."""

    tools: tuple[ListedTool, ...] = ()
    protocols: dict[str, str] = {}
    lacking: dict[str, str] = {}


def check_servers(servers: Mapping[str, McpServer]) -> None:
    """Raises UsageProblem for what cannot be meant."""
    for name, server in servers.items():
        if problem := _problem(name, server):
            raise UsageProblem(f"mcp_servers: {name}: {problem}")


def _problem(name: str, server: McpServer) -> str:
    taken = name in TOOLSETS or name in ALIASES or name in BUILT_IN_TOOLS
    by_program = {"command": server.command, "args": server.args, "env": server.env, "cwd": server.cwd}
    checks = {
        "a name of at most 32 letters, digits, _ and - is needed": not _NAME.fullmatch(name),
        "this is the name of a built-in tool or toolset: choose another": taken,
        "give command or url": not server.command and not server.url,
        "give one of command and url": bool(server.command and server.url),
        "the type is stdio or http (sse has been given up)": server.type not in ("", "stdio", *_HTTP),
        f"type {server.type} goes with {'url' if server.type in _HTTP else 'command'}": bool(server.type)
        and (server.type in _HTTP) != bool(server.url),
        "url: expected one that starts with http:// or https://": bool(server.url)
        and not re.match(r"https?://|\$\{", server.url),
        "headers go with url": bool(server.headers and not server.url),
        "args, env and cwd go with command": bool(server.url and any(by_program.values())),
        "command: its quotes are not closed": not _splits(server),
    }
    return next((problem for problem, is_so in checks.items() if is_so), "")


_HTTP = ("http", "streamable-http", "streamable_http", "streamableHttp")


def _splits(server: McpServer) -> bool:
    try:
        return bool(server.words) or not server.command
    except ValueError:
        return False


def as_meant(given: Any) -> Any:
    """Servers as files usually have them: maybe under `mcpServers` or `mcp_servers`, numbers among the texts."""
    if isinstance(given, dict) and len(given) == 1:
        key = next(iter(given))
        if key in ("mcpServers", "mcp_servers") and isinstance(given[key], dict):
            given = given[key]
    if not isinstance(given, dict):
        return given
    return {
        name: {key: _texts(key, value) for key, value in server.items()} if isinstance(server, dict) else server
        for name, server in given.items()
    }


def _texts(key: str, value: Any) -> Any:
    if key in ("env", "headers") and isinstance(value, dict):
        return {name: _text(each) for name, each in value.items()}
    if key in ("args", "command") and isinstance(value, list):
        return [_text(each) for each in value]
    return value


def _text(value: Any) -> Any:
    """8080 as "8080", true as "true"."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


# --- names


def listed_tools(server: str, wanted: Sequence[str], found: Sequence[tuple[str, str, Any]]) -> tuple[ListedTool, ...]:
    """A server's tools (name, description, JSON schema of the arguments) under our names; `wanted`: these only, if any.
    UsageProblem for a wanted one that is not there and for names that become one."""
    names = [name for name, _, _ in found]
    for name in wanted:
        if name not in names:
            raise UsageProblem(f"it has no tool {name!r}; it has {', '.join(names) or 'none'}")
    tools = [
        ListedTool(server=server, name=name, spec=ToolSpec(our_name(server, name), description, _parameters(schema)))
        for name, description, schema in found
        if not wanted or name in wanted
    ]
    refuse_equal_names(tools)
    return tuple(tools)


def refuse_equal_names(tools: Sequence[ListedTool]) -> None:
    """Raises UsageProblem."""
    seen: dict[str, ListedTool] = {}
    for tool in tools:
        other = seen.setdefault(tool.spec.name, tool)
        if other is not tool:
            both = f"{other.server}'s {other.name} and {tool.server}'s {tool.name}"
            raise UsageProblem(f"{both} would both be called {tool.spec.name}: leave one out (tools: [...])")


def our_name(server: str, tool: str) -> str:
    """What a tool is called here: as endpoints take it, and as a script can call it."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", f"mcp_{server}_{tool}")
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}_{sha256(tool.encode(errors='replace')).hexdigest()[:8]}"


def _parameters(schema: Any) -> dict[str, Any]:
    """As endpoints take it: of type object, with properties."""
    given = dict(schema) if isinstance(schema, Mapping) else {}
    given.pop("$schema", None)
    properties = given.get("properties")
    return {**given, "type": "object", "properties": properties if isinstance(properties, dict) else {}}


# --- what the environment holds


def expanded(text: str, environ: Mapping[str, str]) -> str:
    """The text with every `${VARIABLE}` replaced. UsageProblem for one that is not set."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in environ:
            raise UsageProblem(f"the variable {found[1]} is not set")
        return environ[found[1]]

    return _VARIABLE.sub(value, text)


def _known_to(server: McpServer, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment, and what else the server's own variables are."""
    own: dict[str, str] = {}
    for name, text in server.env.items():
        with suppress(UsageProblem):  # said where it is used
            own[name] = expanded(text, environ)
    return {**own, **environ}


def filled(server: McpServer, environ: Mapping[str, str]) -> McpServer:
    """The server as it is to be reached. UsageProblem."""
    environ = _known_to(server, environ)
    return msgspec.structs.replace(
        server,
        env={name: expanded(value, environ) for name, value in server.env.items()},
        command=tuple(expanded(word, environ) for word in server.words),
        args=(),
        url=expanded(server.url, environ),
        headers={name: expanded(value, environ) for name, value in server.headers.items()},
    )


class Secret(Struct, frozen=True):
    """A key that was found in what a server is told. `name`: where, once per server."""

    name: str
    text: str


def secrets_of(server: McpServer) -> list[Secret]:
    """The keys in its command, arguments, variables, headers and URL."""
    found: list[Secret] = []

    def kept(secret: Secret) -> str:
        found.append(secret)
        return secret.text

    _with_secrets(server, kept)
    return found


def _with_secrets(server: McpServer, written: Callable[[Secret], str]) -> McpServer:
    """The server with its keys written otherwise; what holds none stays as it is."""
    taken: Counter[str] = Counter()

    def put(text: str, found: Sequence[Credential], place: str) -> str:
        pieces, end = [], 0
        for each in found:
            name = "_".join(dict.fromkeys(filter(None, (place, each.name))))  # SOME_TOKEN is called that once
            taken[_variable("", name)] += 1
            name = name if (count := taken[_variable("", name)]) == 1 else f"{name}_{count}"
            pieces += [text[end : each.start], written(Secret(name, text[each.start : each.end]))]
            end = each.end
        return "".join([*pieces, text[end:]])

    found = credentials.in_words(server.words)
    words = [
        put(word, inside, str(place)) for place, (word, inside) in enumerate(zip(server.words, found, strict=True))
    ]
    return msgspec.structs.replace(
        _with_words(server, words) if any(found) else server,
        env={name: put(text, credentials.in_value(name, text), name) for name, text in server.env.items()},
        headers={name: put(text, credentials.in_value(name, text), name) for name, text in server.headers.items()},
        url=put(server.url, credentials.in_url(server.url), "url"),
    )


def _with_words(server: McpServer, words: Sequence[str]) -> McpServer:
    if isinstance(server.command, str) and server.args:
        return msgspec.structs.replace(server, args=tuple(words[1:]))
    count = len(words) - len(server.args)
    return msgspec.structs.replace(server, command=tuple(words[:count]), args=tuple(words[count:]))


def secret_variables(servers: Mapping[str, McpServer], environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that carry the servers' keys to the processes that use them, and by which they are known as keys; none
    for a key that refers to a variable that is not set."""
    found: dict[str, str] = {}
    for server, told in servers.items():
        known = _known_to(told, environ)
        for secret in secrets_of(told):
            try:
                text = expanded(secret.text, known)
            except UsageProblem:
                continue  # said when the server is looked at
            if found.setdefault(_variable(server, secret.name), text) != text:
                raise UsageProblem(
                    f"mcp_servers: {server}: {secret.name}: another server's cannot be told from it: rename one"
                )
    return found


def without_secrets(servers: Mapping[str, McpServer], environ: Mapping[str, str]) -> dict[str, McpServer]:
    """The servers with those variables, where they are set, in place of the keys."""

    def written(server: str) -> Callable[[Secret], str]:
        def referred(secret: Secret) -> str:
            variable = _variable(server, secret.name)
            return f"${{{variable}}}" if variable in environ else secret.text

        return referred

    return {name: _with_secrets(server, written(name)) for name, server in servers.items()}


def _variable(server: str, name: str) -> str:
    """Its last word says to everybody that this is a secret."""
    return re.sub(r"[^A-Z0-9]", "_", f"MCP_{server}_{name}_TOKEN".upper())


def for_the_record(servers: Mapping[str, McpServer]) -> dict[str, Any]:
    """The servers as plain values without what may be secret: of `env` and `headers` the names, and the values that are
    `${VARIABLE}`; no keys in a command and in URLs."""
    return {name: msgspec.to_builtins(_recorded(server)) for name, server in servers.items()}


def _recorded(server: McpServer) -> McpServer:
    shown = _with_secrets(server, lambda secret: _recorded_text(secret.text))
    command = shown.command
    return msgspec.structs.replace(
        shown,
        command=_HIDDEN_USER.sub("", command)
        if isinstance(command, str)
        else tuple(_HIDDEN_USER.sub("", word) for word in command),
        args=tuple(_HIDDEN_USER.sub("", word) for word in shown.args),
        env={name: _recorded_text(text) for name, text in server.env.items()},
        headers={name: _recorded_text(text) for name, text in server.headers.items()},
        url=_HIDDEN_USER.sub("", shown.url),
    )


def _recorded_text(text: str) -> str:
    return text if _REFERENCE.fullmatch(text) else HIDDEN
