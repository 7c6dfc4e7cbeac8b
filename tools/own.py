"""Tools of a user's own: a Python file whose functions become tools.

The file says so in up to three names. `TOOLS`: a list of functions. `TOOLSETS`: toolset -> names of tools, own or built
in; tools that stand in none are a toolset that is called as the file. `DISTRIBUTIONS`: name -> {toolset: chance in
percent}, for `--distribution`.

A function's parameters have types, from which the schema that models are told is made; its docstring says what it does,
the parameters' descriptions are the docstring's `Args:` or `Annotated[type, "text"]`. A parameter of the type
`Environment` (or that is called `environment` and has no type) is the task's sandbox, and no argument. What a function
returns is the result; what it raises is told to the model.
"""

import asyncio
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NoReturn, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from tools.arguments import TypedTool
from tools.base import Tool, ToolContext
from tools.distributions import DISTRIBUTIONS, Distribution
from tools.environments.base import Environment
from tools.errors import ToolError, UsageProblem
from tools.plugins import module_at
from tools.results import result_object
from tools.text import told
from tools.threads import in_thread
from tools.toolsets import ALIASES, BUILT_IN_TOOLS, TOOLSETS

Function = Callable[..., Any]

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SECTION = re.compile(
    r"^(args|arguments|parameters|returns?|yields?|raises|examples?|notes?)[ \t]*:[ \t]*$", re.IGNORECASE | re.MULTILINE
)
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)[ \t]*(?:\([^)]*\))?[ \t]*:[ \t]*(.*)$")
_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class OwnTools(Struct, frozen=True, kw_only=True):
    """What a file holds."""

    tools: Mapping[str, Tool] = {}
    toolsets: Mapping[str, tuple[str, ...]] = {}
    distributions: Mapping[str, Distribution] = {}


def load_own(path: str) -> OwnTools:
    """Runs the file. UsageProblem for what cannot be used of it; whatever it raises itself is raised."""
    return _Reading(path).own(module_at(path))


class _Reading:
    """The file as far as it is read, for the words in which a mistake is told."""

    def __init__(self, path: str) -> None:
        self._path = path

    def refuse(self, what: str, problem: str) -> NoReturn:
        raise UsageProblem(f"tools_module {self._path}: {what}: {problem}")

    def own(self, module: ModuleType) -> OwnTools:
        names = [name for name in ("TOOLS", "TOOLSETS", "DISTRIBUTIONS") if hasattr(module, name)]
        if not names:
            self.refuse("TOOLS", "there is no list of functions of this name, nor TOOLSETS or DISTRIBUTIONS")
        tools = self._tools(getattr(module, "TOOLS", ()))
        return OwnTools(
            tools=tools,
            toolsets=self._toolsets(getattr(module, "TOOLSETS", {}), tools),
            distributions=self._distributions(getattr(module, "DISTRIBUTIONS", {})),
        )

    # --- tools

    def _tools(self, functions: Any) -> dict[str, Tool]:
        if not isinstance(functions, Sequence) or isinstance(functions, str):
            self.refuse("TOOLS", "expected a list of functions")
        tools: dict[str, Tool] = {}
        for function in functions:
            name = self._name_of(function)
            if name in tools:
                self.refuse(name, "stands in TOOLS twice")
            tools[name] = self._tool(name, function)
        return tools

    def _name_of(self, function: Any) -> str:
        name = getattr(function, "__name__", "")
        if not callable(function) or inspect.isclass(function) or not isinstance(name, str) or not name:
            self.refuse("TOOLS", f"{function!r:.80} is no function")
        if not _NAME.fullmatch(name):
            self.refuse(name, "a tool's name has letters, digits, _ and - only, 64 at most: give the function one")
        self._refuse_taken(name, "rename the function")
        return name

    def _refuse_taken(self, name: str, mend: str) -> None:
        kinds = {"tool": BUILT_IN_TOOLS, "toolset": TOOLSETS, "other name of a tool": ALIASES}
        for kind, known in kinds.items():
            if name in known:
                self.refuse(name, f"is a built-in {kind}: {mend}")

    def _tool(self, name: str, function: Function) -> Tool:
        text = inspect.getdoc(function) or ""
        description, documented = read_docstring(text)
        if not description:
            self.refuse(name, "has no docstring: by it models are told what the tool does")
        parameters, types = self._signature(name, function)
        sandbox = [each for each in parameters if _is_sandbox(each, types.get(each.name))]
        if len(sandbox) > 1:
            self.refuse(name, "takes the sandbox twice")
        if sandbox and not inspect.iscoroutinefunction(function):
            self.refuse(name, f"takes {sandbox[0].name}, whose methods are awaited: write `async def {name}`")
        given = [each for each in parameters if each not in sandbox]
        fields = [self._field(name, each, types, documented) for each in given]
        try:
            arguments = msgspec.defstruct(name, fields, kw_only=True, frozen=True, forbid_unknown_fields=True)
            tool = TypedTool(name, description, arguments, _action(name, function, sandbox))
        except RecursionError:
            self.refuse(name, "has a parameter whose type holds itself: a schema cannot say that")
        except (TypeError, ValueError) as error:
            self.refuse(name, f"its parameters cannot be told as a JSON schema: {' '.join(str(error).split())}")
        return tool

    def _signature(self, name: str, function: Function) -> tuple[list[inspect.Parameter], dict[str, Any]]:
        try:
            parameters = list(inspect.signature(function).parameters.values())
            types = get_type_hints(function, include_extras=True)
        except (TypeError, ValueError, NameError, AttributeError) as error:
            self.refuse(name, f"its signature cannot be read: {error}")
        for each in parameters:
            if each.kind not in _KINDS:
                self.refuse(name, f"parameter {each}: every parameter has to be one that can be given by name")
        return parameters, types

    def _field(
        self, name: str, parameter: inspect.Parameter, types: Mapping[str, Any], documented: Mapping[str, str]
    ) -> Any:
        if parameter.name not in types:
            self.refuse(name, f"parameter {parameter.name} has no type")
        kind = _described(types[parameter.name], documented.get(parameter.name, ""))
        default = parameter.default
        if default is inspect.Parameter.empty:
            return (parameter.name, kind)
        self._check_default(name, parameter, kind)
        if default is None:
            kind = kind | None if not isinstance(kind, str) else kind
        if isinstance(default, list | dict | set):
            return (parameter.name, kind, msgspec.field(default_factory=default.copy))
        return (parameter.name, kind, default)

    def _check_default(self, name: str, parameter: inspect.Parameter, kind: Any) -> None:
        """None means that there is no value. What no schema can say is told later."""
        if parameter.default is None:
            return
        try:
            msgspec.convert(msgspec.to_builtins(parameter.default), kind)
        except msgspec.ValidationError as error:
            told = f"its default {parameter.default!r:.60} is none of its type: {error}"
            self.refuse(name, f"parameter {parameter.name}: {' '.join(told.split())}")
        except (TypeError, ValueError, RecursionError):
            pass

    # --- toolsets and distributions

    def _toolsets(self, given: Any, tools: Mapping[str, Tool]) -> dict[str, tuple[str, ...]]:
        if not isinstance(given, Mapping):
            self.refuse("TOOLSETS", "expected a mapping of names to lists of tools")
        toolsets = {name: self._toolset(name, names, tools) for name, names in given.items()}
        rest = tuple(name for name in tools if not any(name in names for names in toolsets.values()))
        if rest:
            name = re.sub(r"[^A-Za-z0-9_-]", "_", Path(self._path).stem)[:64]
            self._check_toolset(name, "rename the file, or name its toolsets in TOOLSETS")
            toolsets[name] = (*toolsets.get(name, ()), *rest)
        return toolsets

    def _toolset(self, name: Any, names: Any, tools: Mapping[str, Tool]) -> tuple[str, ...]:
        self._check_toolset(name, "rename it")
        if not isinstance(names, Sequence) or isinstance(names, str) or not names:
            self.refuse(f"TOOLSETS {name}", "expected a list of names of tools")
        for each in names:
            if each not in tools and each not in BUILT_IN_TOOLS:
                self.refuse(
                    f"TOOLSETS {name}", f"{each!r:.80} is no tool: it stands neither in TOOLS nor is it built in"
                )
        return tuple(dict.fromkeys(names))

    def _check_toolset(self, name: Any, mend: str) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            self.refuse(f"toolset {name!r:.80}", "a toolset's name has letters, digits, _ and - only, 64 at most")
        self._refuse_taken(name, mend)

    def _distributions(self, given: Any) -> dict[str, Distribution]:
        if not isinstance(given, Mapping):
            self.refuse("DISTRIBUTIONS", "expected a mapping of names to {toolset: percent}")
        return {name: self._distribution(name, chances) for name, chances in given.items()}

    def _distribution(self, name: Any, chances: Any) -> Distribution:
        what = f"DISTRIBUTIONS {name!s:.80}"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            self.refuse(what, "a distribution's name has letters, digits, _ and - only, 64 at most")
        if name in DISTRIBUTIONS:
            self.refuse(what, "there is a built-in distribution of this name: rename it")
        if not isinstance(chances, Mapping) or not chances:
            self.refuse(what, "expected {toolset: percent}")
        for toolset, percent in chances.items():
            is_number = isinstance(percent, int | float) and not isinstance(percent, bool) and math.isfinite(percent)
            if not isinstance(toolset, str) or not is_number or not 0 < percent <= 100:
                self.refuse(what, f"{toolset}: expected a chance above 0 and at most 100, got {percent!r:.40}")
        return Distribution(f"of {Path(self._path).name}", dict(chances))


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring says ahead of its sections, and what its `Args:` say of each parameter."""
    heads = list(_SECTION.finditer(text))
    description = text[: heads[0].start()] if heads else text
    documented: dict[str, str] = {}
    for head, following in pairwise([*heads, None]):
        if head and head[1].lower() in ("args", "arguments", "parameters"):
            documented.update(_documented(text[head.end() : following.start() if following else None]))
    return description.strip(), documented


def _documented(section: str) -> dict[str, str]:
    """`name: text` or `name (type): text`; lines that are indented further go on with the one before."""
    said: dict[str, list[str]] = {}
    latest: list[str] = []
    margin: int | None = None
    for line in section.splitlines():
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            continue
        margin = indent if margin is None else margin
        found = _ARGUMENT.match(line.strip()) if indent <= margin else None
        if indent == 0 and margin:  # the section is over
            break
        if found:
            latest = said.setdefault(found[1], [])
            latest.append(found[2])
        else:
            latest.append(line.strip())
    return {name: " ".join(filter(None, lines)) for name, lines in said.items()}


def _described(kind: Any, documented: str) -> Any:
    """The type with its description as msgspec has it: a text in `Annotated`, else the docstring's."""
    if get_origin(kind) is not Annotated:
        return Annotated[kind, Meta(description=documented)] if documented else kind
    plain, *notes = get_args(kind)
    texts = [note for note in notes if isinstance(note, str)]
    metas = [note for note in notes if isinstance(note, Meta)]
    for meta in metas:
        plain = Annotated[plain, meta]
    text = " ".join(texts) or ("" if any(meta.description for meta in metas) else documented)
    return Annotated[plain, Meta(description=text)] if text else plain


def _is_sandbox(parameter: inspect.Parameter, kind: Any) -> bool:
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return kind is Environment or (parameter.name == "environment" and kind in (None, Any, object))


def _action(
    name: str, function: Function, sandbox: Sequence[inspect.Parameter]
) -> Callable[[ToolContext, Struct], Awaitable[dict[str, Any]]]:
    async def act(context: ToolContext, arguments: Struct) -> dict[str, Any]:
        values = {field: getattr(arguments, field) for field in arguments.__struct_fields__}
        values.update({each.name: context.environment for each in sandbox})
        return result_object(await _in_time(name, function, values, context.command_timeout), name)

    return act


async def _in_time(name: str, function: Function, values: Mapping[str, Any], seconds: float) -> Any:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await _called(function, values)
    except TimeoutError as error:
        if limit.expired():
            raise ToolError(f"{name} took longer than {seconds:g} s and was given up") from None
        raise ToolError(told(f"TimeoutError: {error}")) from error
    except ToolError as error:
        raise ToolError(told(error)) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ToolError(told(f"CancelledError: {error}")) from error  # the function's own doing


async def _called(function: Function, values: Mapping[str, Any]) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(**values)
    value = await in_thread(lambda: function(**values))
    return await value if inspect.isawaitable(value) else value
