"""The tool `execute_code`: a Python script inside the task's sandbox that calls the task's tools.

`tools.code.child` runs in the sandbox, starts the script, keeps what it prints and carries its calls here, over
the stdin and stdout of a background process: the same on every backend.
"""

import asyncio
import json
import secrets
import shlex
import time
from collections import deque
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from tools.arguments import TypedTool
from tools.base import ToolContext, ToolSpec
from tools.code.child import LONGEST_CALL, Lines
from tools.code.module import module_text
from tools.environments.base import Process
from tools.environments.ending import to_the_end
from tools.errors import EnvironmentLost, ToolError
from tools.text import without_escapes
from tools.toolsets import BUILT_IN_TOOLS

CALLABLE = ("web_search", "web_extract", "read_file", "write_file", "search_files", "patch", "terminal")
"""The built-in tools that a script may call; it may call those of the run's own as well."""

_FOREGROUND = ("command", "timeout", "workdir")  # what `terminal` takes in a script
_TERMINAL = "Run a shell command in the sandbox, in the foreground, and return its output and exit code."
_STOP_SECONDS = 5.0
_AT_ONCE = 65_536  # bytes
_NOISE = 2_000  # bytes
_NO_PYTHON = (126, 127)
_KILLED = -9
_LIVES = "Processes that the script started are still running in the background"


class CodeArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What `execute_code` takes."""

    code: Annotated[str, Meta(description="The Python script")]


class CodeLimits(Struct, frozen=True):
    """What one script may use; `output` and `errors` are the characters kept of its stdout and stderr."""

    seconds: float = 300.0
    calls: int = 50
    output: int = 50_000
    errors: int = 10_000


class End(Struct, frozen=True):
    """How a script ended, code -N: by signal N; `lives`: a process that it started still runs."""

    code: int
    output: str = ""
    errors: str = ""
    lives: bool = False


LIMITS = CodeLimits()


async def execute_code(context: ToolContext, arguments: CodeArguments, limits: CodeLimits = LIMITS) -> dict[str, Any]:
    """`{status, output, exit_code, tool_calls_made, duration_seconds}`; status is success, or error or timeout (exit
    code 124) with an `error`. What the script wrote to stderr stands at the end of output.

    Raises ToolError where no Python can be started."""
    if not arguments.code.strip():
        raise ToolError("The code is empty")
    began = time.monotonic()
    script = Script(context, limits)
    end, timed_out = await script.run(arguments.code)
    error = f"The script ran longer than {limits.seconds:g} s and was killed" if timed_out else _problem(end)
    result = {
        "status": "timeout" if timed_out else "error" if error else "success",
        "output": _output(end),
        "exit_code": 124 if timed_out else end.code if end.code >= 0 else 128 - end.code,
        "tool_calls_made": script.calls.made,
        "duration_seconds": round(time.monotonic() - began, 3),
        "error": error,
        "note": _LIVES if end.lives and not timed_out else "",
    }
    return {name: value for name, value in result.items() if value or name not in ("error", "note")}


def _output(end: End) -> str:
    output, errors = without_escapes(end.output), without_escapes(end.errors)
    gap = "\n" if output and not output.endswith("\n") else ""
    return f"{output}{gap}--- stderr ---\n{errors}" if errors else output


def _problem(end: End) -> str:
    """The last line of the script's traceback, or of what it gave to `sys.exit`."""
    if not end.code:
        return ""
    if end.code < 0:
        return f"The script was killed by signal {-end.code}"
    lines = [line for line in without_escapes(end.errors).splitlines() if line.strip()]
    return lines[-1].strip()[:_NOISE] if lines else f"The script ended with exit code {end.code}"


class Calls:
    """The tools that a script may call, and how often it did."""

    def __init__(self, context: ToolContext, most: int) -> None:
        self.made = 0
        self._most = most
        self._partner = context.partner
        self._offered = {spec.name: _in_a_script(spec) for spec in self._partner.inner_tools() if _may_call(spec.name)}

    def module_text(self) -> str:
        """The module by which it calls them."""
        return module_text(self._offered.values())

    async def answer(self, line: bytes) -> dict[str, Any]:
        """The result object of a call, {name, arguments} as JSON: from the tool, or why there is none."""
        try:
            call = json.loads(line)
            name, arguments = call["name"], call["arguments"]
        except (ValueError, RecursionError, TypeError, KeyError):
            return {"error": "That is no call of a tool"}
        problem = self._problem(name, arguments)
        if problem:
            return {"error": problem}
        self.made += 1
        return await self._partner.call(name, arguments)

    def _problem(self, name: Any, arguments: Any) -> str:
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return "A call has a name and an object of arguments"
        if name not in self._offered:
            return f"A script cannot call {name!r}. It can call: {', '.join(self._offered) or 'no tool'}"
        if name == "terminal" and (barred := sorted(arguments.keys() - set(_FOREGROUND))):
            return f"terminal in a script runs in the foreground and takes no {', '.join(barred)}"
        if self.made == self._most:
            return f"A script makes at most {self._most} tool calls; this one was not made"
        return ""


def _may_call(name: str) -> bool:
    return name in CALLABLE or name not in BUILT_IN_TOOLS


def _in_a_script(spec: ToolSpec) -> ToolSpec:
    if spec.name != "terminal":
        return spec
    properties = {name: each for name, each in spec.parameters["properties"].items() if name in _FOREGROUND}
    parameters = {**spec.parameters, "properties": properties}
    return msgspec.structs.replace(spec, description=_TERMINAL, parameters=parameters)


class Script:
    """One script from start to end."""

    def __init__(self, context: ToolContext, limits: CodeLimits) -> None:
        self.calls = Calls(context, limits.calls)
        self._environment = context.environment
        self._limits = limits
        self._mark = secrets.token_hex(8)
        self._folder = f"batch-code-{secrets.token_hex(4)}"
        self._splitter = Lines()
        self._lines: deque[bytes] = deque()
        self._noise = b""  # the end of what came without our mark

    async def run(self, code: str) -> tuple[End, bool]:
        """How it ended, and whether its time had run out. Raises ToolError."""
        process = await self._environment.start(_command(), piped=True)
        try:
            return await self._played(process, self._order(code))
        except BaseException:
            with suppress(EnvironmentLost):  # there is something worse to tell
                await to_the_end(self._clean_up(process))
            raise

    def _order(self, code: str) -> bytes:
        files = {"script.py": code, "batch_tools.py": self.calls.module_text()}
        limits = {"output": self._limits.output, "errors": self._limits.errors}
        return json.dumps({"mark": self._mark, "folder": self._folder, "files": files, **limits}).encode() + b"\n"

    async def _played(self, process: Process, order: bytes) -> tuple[End, bool]:
        try:
            async with asyncio.timeout(self._limits.seconds):
                end = await self._served(process, order)
        except TimeoutError:
            end = await self._stopped(process)
            await self._clean_up(process)
            return end or End(_KILLED), True
        if end is None:
            end = self._untold(process)
            await self._clean_up(process)
        return end, False

    async def _served(self, process: Process, order: bytes) -> End | None:
        """Answers its calls, one after the other, until it has ended; None if that was not told."""
        asked: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)
        answering = asyncio.create_task(self._answer(process, order, asked))
        listening = asyncio.create_task(self._listen(process, asked))
        try:
            await asyncio.wait({answering, listening}, return_when=asyncio.FIRST_COMPLETED)
            return await (listening if listening.done() else answering)
        finally:
            answering.cancel()
            listening.cancel()
            await asyncio.gather(answering, listening, return_exceptions=True)

    async def _answer(self, process: Process, order: bytes, asked: "asyncio.Queue[bytes]") -> None:
        """For ever: ends only by what ends the row."""
        await _send(process, order)
        while True:
            answer = await self.calls.answer(await asked.get())
            await _send(process, f"answer {json.dumps(answer, ensure_ascii=False)}\n".encode(errors="replace"))

    async def _listen(self, process: Process, asked: "asyncio.Queue[bytes]") -> End | None:
        while (message := await self._message(process)) is not None:
            kind, data = message
            if kind == b"call":
                await asked.put(data)
            elif kind == b"end" and (end := _read_end(data)) is not None:
                return end
        return None

    async def _message(self, process: Process) -> tuple[bytes, bytes] | None:
        """Kind and content of the next one; None when no more can come."""
        while (line := await self._line(process)) is not None:
            mark, _, rest = line.partition(b" ")
            if mark == self._mark.encode():
                kind, _, data = rest.partition(b" ")
                return kind, data
            self._noise = (self._noise + line + b"\n")[-_NOISE:]
        return None

    async def _line(self, process: Process) -> bytes | None:
        while not self._lines:
            piece = await process.read()
            if not piece or len(self._splitter) > 2 * LONGEST_CALL:
                return None
            self._lines += self._splitter.feed(piece)
        return self._lines.popleft()

    async def _stopped(self, process: Process) -> End | None:
        """What it had printed when its time ran out, if that can be had."""
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await _send(process, b"\nstop\n")  # an answer may have been cut off
                return await self._listen(process, asyncio.Queue())
        except TimeoutError:
            return None

    def _untold(self, process: Process) -> End:
        """Whatever runs scripts has been killed, writes no lines, or could not even begin. Raises ToolError without
        Python."""
        code = process.exit_code()
        if code in _NO_PYTHON:
            raise ToolError("There is no python3 in this sandbox: use terminal")
        return End(
            code if code is not None and 0 < code <= 128 else _KILLED, errors=self._noise.decode(errors="replace")
        )

    async def _clean_up(self, process: Process) -> None:
        """Ends all that it started, and removes the folder if it is still there."""
        await process.kill()
        places = '"${TMPDIR:-/tmp}" /tmp /var/tmp .'
        remove = f'for place in {places}; do rm -rf -- "$place/{self._folder}"; done'
        await self._environment.run(remove, timeout=_STOP_SECONDS)


@cache
def _command() -> str:
    text = Path(__file__).with_name("child.py").read_text(encoding="utf-8")
    return f"exec python3 -I -S -c {shlex.quote(text)}"


async def _send(process: Process, data: bytes) -> None:
    """To its stdin, in pieces that each have time. One that has ended is noticed by its silence."""
    with suppress(ToolError):
        for start in range(0, len(data), _AT_ONCE):
            await process.write(data[start : start + _AT_ONCE])


def _read_end(data: bytes) -> End | None:
    try:
        return msgspec.json.decode(data, type=End)
    except msgspec.DecodeError:
        return None


EXECUTE_CODE = TypedTool(
    "execute_code",
    "Run a Python script in the sandbox, in the current directory. It can call tools: `from batch_tools import "
    "read_file, terminal` gives functions with their names, arguments and results (as dicts), for those that you have "
    f"among {', '.join(CALLABLE)} (in the foreground) and for tools of this run's own. Use it for several calls with "
    "logic between them, and print what you want to see. A script has no stdin, runs for at most "
    f"{LIMITS.seconds:g} s and makes at most {LIMITS.calls} tool calls; output above {LIMITS.output:,} characters is "
    "shortened in the middle.",
    CodeArguments,
    execute_code,
)
