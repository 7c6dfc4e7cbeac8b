"""The module `batch_tools` that scripts of `execute_code` import: a function for each tool, from its schema. Pure."""

import keyword
import re
from collections.abc import Iterable

from tools.base import ToolSpec

_HEAD = '''\
"""This task's tools: each function returns its tool's result, a dict. What is left out has the tool's own default."""

import json as _json
import os as _os
import socket as _socket

_FOLDER = _os.path.dirname(_os.path.abspath(__file__))


def _plain(value):
    if isinstance(value, _os.PathLike):
        return _os.fspath(value)
    raise TypeError("tools take JSON values, not " + type(value).__name__)


def _call(name, arguments):
    given = {key: value for key, value in arguments.items() if value is not ...}
    call = _json.dumps({"name": name, "arguments": given}, allow_nan=False, default=_plain)
    answer = b""
    try:
        folder = _os.open(_FOLDER, _os.O_RDONLY)
        try:
            with _socket.socket(_socket.AF_UNIX) as link:
                link.connect("/proc/self/fd/%d/tools" % folder)
                link.sendall(call.encode() + b"\\n")
                with link.makefile("rb") as answers:
                    answer = answers.read()
        finally:
            _os.close(folder)
    except OSError:
        pass
    if not answer:
        raise RuntimeError("the tools cannot be called any more")
    return _json.loads(answer.decode())
'''


def module_text(specs: Iterable[ToolSpec]) -> str:
    """The module's source, for Python 3.6 and later. A tool whose name is no name in Python has `_` for every odd
    character; parameters with such names are given as `**{name: value}`."""
    return _HEAD + "".join(f"\n\n{_function(spec)}" for spec in specs)


def _function(spec: ToolSpec) -> str:
    properties = spec.parameters.get("properties", {})
    required = [name for name in properties if name in spec.parameters.get("required", ())]
    names = [name for name in [*required, *properties] if _is_plain(name)]
    names = list(dict.fromkeys(names))
    taken = [name if name in required else f"{name}=..." for name in names]
    given = [f"{name!r}: {name}" for name in names]
    if len(names) < len(properties):
        taken.append("**_more")
        given.append("**_more")
    return (
        f"def {_name(spec.name)}({', '.join(taken)}):\n"
        f"    {spec.description!a}\n"
        f"    return _call({spec.name!a}, {{{', '.join(given)}}})\n"
    )


def _is_plain(name: str) -> bool:
    return name.isascii() and name.isidentifier() and not name.startswith("_") and not keyword.iskeyword(name)


def _name(tool: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_]", "_", tool).lstrip("_")
    return name if _is_plain(name) else f"tool_{name}"
