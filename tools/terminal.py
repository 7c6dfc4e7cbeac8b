"""The tools `terminal` and `process`: commands in the sandbox, in the foreground and in the background."""

import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from tools.arguments import TypedTool
from tools.base import ToolContext
from tools.environments.base import CommandResult, Process
from tools.environments.output import says_full
from tools.errors import ToolError
from tools.text import shorten, without_escapes

MAX_SECONDS = 600
MAX_OUTPUT = 50_000  # characters
MAX_PROCESSES = 64


class TerminalArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What `terminal` takes."""

    command: Annotated[str, Meta(description="The shell command to run")]
    background: Annotated[
        bool,
        Meta(
            description="Start it and return at once with a session_id for the process tool; for servers and long jobs"
        ),
    ] = False
    timeout: (
        Annotated[int, Meta(description=f"Seconds after which a foreground command is killed, at most {MAX_SECONDS}")]
        | None
    ) = None
    workdir: Annotated[str, Meta(description="Directory for this command alone; default is the current one")] | None = (
        None
    )
    pty: Annotated[bool, Meta(description="Run it in a pseudo-terminal, for programs that want one")] = False
    notify_on_complete: Annotated[
        bool, Meta(description="With background: the first terminal or process result after its end reports it")
    ] = False
    watch_patterns: Annotated[
        tuple[str, ...],
        Meta(
            description="With background: texts to look for in its output; each one found is reported once, "
            "in the next terminal or process result"
        ),
    ] = ()


class ProcessArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What `process` takes."""

    action: Annotated[
        Literal["list", "poll", "log", "wait", "kill", "write", "submit", "close"],
        Meta(
            description="list: all background processes; poll: state and latest output; log: output by lines; "
            "wait: until it ends or the timeout; kill: end it; write: data to its stdin; submit: data and a newline "
            "to its stdin; close: its stdin ends"
        ),
    ]
    session_id: Annotated[str, Meta(description="Which process, as terminal returned it; all but list need it")] = ""
    data: Annotated[str, Meta(description="Text for write and submit")] = ""
    timeout: Annotated[int, Meta(description="Seconds that wait waits at most")] | None = None
    offset: (
        Annotated[int, Meta(description="First line that log shows, counted from 0; default is the last lines")] | None
    ) = None
    limit: Annotated[int, Meta(description="Lines that log shows at most")] = 200


@dataclass
class Session:
    """A background process and what is still to be told of it."""

    id: str
    command: str
    process: Process
    pty: bool = False
    notify: bool = False
    patterns: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None

    def exit_code(self) -> int | None:
        """None while it runs."""
        code = self.process.exit_code()
        if code is not None and self.ended is None:
            self.ended = time.monotonic()
        return code

    def output(self) -> str:
        """What it printed, without escape sequences."""
        text = without_escapes(self.process.output())
        return text.replace("\r\n", "\n") if self.pty else text

    def state(self) -> dict[str, Any]:
        """Its part of `list` and `poll`; `exit_code` only once it has ended."""
        code = self.exit_code()
        return {
            "session_id": self.id,
            "command": self.command,
            "status": "running" if code is None else "exited",
            "pid": self.process.pid,
            "uptime_seconds": round((self.ended or time.monotonic()) - self.started, 1),
            "output_preview": self.output()[-1000:],
            **({} if code is None else {"exit_code": code}),
        }

    def news(self) -> list[dict[str, Any]]:
        """What it was to report and has not yet: found patterns, its end."""
        events: list[dict[str, Any]] = []
        if self.patterns:
            lines = self.output().split("\n")
            first = {pattern: next((line for line in lines if pattern in line), None) for pattern in self.patterns}
            seen = {pattern: line for pattern, line in first.items() if line is not None}
            self.patterns = [pattern for pattern in self.patterns if pattern not in seen]
            events += [
                {"session_id": self.id, "event": "pattern", "pattern": pattern, "line": shorten(line, 500)}
                for pattern, line in seen.items()
            ]
        if self.notify and (code := self.exit_code()) is not None:
            self.notify = False
            events.append(
                {"session_id": self.id, "event": "exited", "exit_code": code, "output": self.output()[-1000:]}
            )
        return events


class Sessions:
    """The background processes of one task, oldest first."""

    def __init__(self) -> None:
        self._count = 0
        self._all: dict[str, Session] = {}

    def __iter__(self) -> Iterator[Session]:
        return iter(self._all.values())

    def make_room(self) -> None:
        """Forgets the oldest ended process where there are too many; raises ToolError if all of them run."""
        if len(self._all) < MAX_PROCESSES:
            return
        ended = next((session.id for session in self if session.exit_code() is not None), None)
        if ended is None:
            raise ToolError(f"{MAX_PROCESSES} background processes are running; kill one before starting another")
        del self._all[ended]

    def add(self, process: Process, arguments: TerminalArguments) -> Session:
        """The new session, named proc_1, proc_2, …"""
        self._count += 1
        session = Session(
            id=f"proc_{self._count}",
            command=arguments.command,
            process=process,
            pty=arguments.pty,
            notify=arguments.notify_on_complete,
            patterns=[pattern for pattern in dict.fromkeys(arguments.watch_patterns) if pattern],
        )
        self._all[session.id] = session
        return session

    def find(self, session_id: str) -> Session | None:
        """The session of that id, if it is still known."""
        return self._all.get(session_id)

    def with_news(self, result: dict[str, Any]) -> dict[str, Any]:
        """The result; `notifications` is added if a process has something to report."""
        events = [event for session in self for event in session.news()]
        return {**result, "notifications": events} if events else result


async def run_terminal(context: ToolContext, arguments: TerminalArguments) -> dict[str, Any]:
    """`{output, exit_code, error: null}`; in the background also `session_id` and `pid`."""
    _check(arguments)
    sessions = context.memory(Sessions)
    if arguments.background:
        result = await _in_background(context, sessions, arguments)
    else:
        result = await _in_foreground(context, arguments)
    return sessions.with_news(result)


def _check(arguments: TerminalArguments) -> None:
    if "\0" in arguments.command or "\0" in (arguments.workdir or ""):
        raise ToolError("A command and its workdir cannot hold a NUL character")
    if not arguments.command.strip():
        raise ToolError("The command is empty")
    if arguments.timeout is not None and arguments.timeout <= 0:
        raise ToolError("timeout must be at least 1 second")
    if (arguments.timeout or 0) > MAX_SECONDS and not arguments.background:
        raise ToolError(
            f"timeout is at most {MAX_SECONDS} seconds in the foreground; use background=true for longer work"
        )


async def _in_background(context: ToolContext, sessions: Sessions, arguments: TerminalArguments) -> dict[str, Any]:
    sessions.make_room()
    process = await context.environment.start(arguments.command, cwd=arguments.workdir, pty=arguments.pty)
    session = sessions.add(process, arguments)
    return {
        "output": "Background process started",
        "session_id": session.id,
        "pid": process.pid,
        "exit_code": 0,
        "error": None,
        "hint": f"Use process with session_id {session.id} to poll, wait for, write to or kill it",
    }


async def _in_foreground(context: ToolContext, arguments: TerminalArguments) -> dict[str, Any]:
    seconds = arguments.timeout or context.command_timeout
    run = _run_in_pty if arguments.pty else _run
    ended = await run(context, arguments, seconds)
    output = without_escapes(ended.output)
    if ended.timed_out:
        output = f"{output}\n[Command timed out after {seconds:g} s and was killed]".lstrip("\n")
    result = {"output": output, "exit_code": ended.exit_code, "error": None}
    if ended.background:
        result["note"] = "Processes that this command started are still running in the background"
    return result


def _run(context: ToolContext, arguments: TerminalArguments, seconds: float) -> Awaitable[CommandResult]:
    return context.environment.run(arguments.command, timeout=seconds, cwd=arguments.workdir, max_chars=MAX_OUTPUT)


async def _run_in_pty(context: ToolContext, arguments: TerminalArguments, seconds: float) -> CommandResult:
    process = await context.environment.start(arguments.command, cwd=arguments.workdir, pty=True)
    code = None
    try:
        code = await process.wait(seconds)
    finally:
        if code is None:
            await process.kill()
    output = shorten(process.output().replace("\r\n", "\n"), MAX_OUTPUT)
    await _notice_full(context, output)
    return CommandResult(output=output, exit_code=124 if code is None else code, timed_out=code is None)


async def _notice_full(context: ToolContext, output: str) -> None:
    """For what was started, as `run` does it for a command. Raises DiskFull."""
    if says_full(output):
        await context.environment.check_room(0)


async def run_process(context: ToolContext, arguments: ProcessArguments) -> dict[str, Any]:
    """What the action found or did; `{status: not_found, error}` for an id that is not known."""
    sessions = context.memory(Sessions)
    if arguments.action == "list":
        return sessions.with_news({"processes": [session.state() for session in sessions]})
    if not arguments.session_id:
        raise ToolError(f"{arguments.action} needs a session_id")
    session = sessions.find(arguments.session_id)
    if session is None:
        return {"status": "not_found", "error": f"No background process {arguments.session_id}"}
    result = await _ACTIONS[arguments.action](context, session, arguments)
    await _notice_full(context, str(result.get("output") or result.get("output_preview")))
    return sessions.with_news(result)


async def _poll(context: ToolContext, session: Session, arguments: ProcessArguments) -> dict[str, Any]:
    return session.state()


async def _log(context: ToolContext, session: Session, arguments: ProcessArguments) -> dict[str, Any]:
    lines = session.output().removesuffix("\n").split("\n") if session.output() else []
    limit = max(1, arguments.limit)
    first = max(0, len(lines) - limit if arguments.offset is None else arguments.offset)
    shown = lines[first : first + limit]
    return {
        "session_id": session.id,
        "status": "running" if session.exit_code() is None else "exited",
        "output": shorten("\n".join(shown), MAX_OUTPUT),
        "total_lines": len(lines),
        "showing": f"{len(shown)} lines",
    }


async def _wait(context: ToolContext, session: Session, arguments: ProcessArguments) -> dict[str, Any]:
    longest = context.command_timeout
    asked = longest if arguments.timeout is None else max(0, arguments.timeout)
    code = await session.process.wait(min(asked, longest))
    result = {
        "status": "timeout" if code is None else "exited",
        "command": session.command,
        "exit_code": code,
        "output": session.output()[-(1000 if code is None else 2000) :],
    }
    if code is None and asked > longest:
        result["timeout_note"] = f"A wait takes at most {longest:g} s; it is still running"
    return result


async def _kill(context: ToolContext, session: Session, arguments: ProcessArguments) -> dict[str, Any]:
    code = session.exit_code()
    session.notify = False
    if code is not None:
        return {"status": "already_exited", "session_id": session.id, "exit_code": code}
    await session.process.kill()
    return {"status": "killed", "session_id": session.id}


async def _write(context: ToolContext, session: Session, arguments: ProcessArguments) -> dict[str, Any]:
    if (code := session.exit_code()) is not None:
        return {"status": "already_exited", "error": f"It has ended with exit code {code}"}
    text = arguments.data + ("\n" if arguments.action == "submit" else "")
    data = text.encode("utf-8", "replace")
    await session.process.write(data)
    return {"status": "ok", "session_id": session.id, "bytes_written": len(data)}


async def _close(context: ToolContext, session: Session, arguments: ProcessArguments) -> dict[str, Any]:
    await session.process.close_stdin()
    return {"status": "ok", "session_id": session.id, "message": "stdin closed"}


_ACTIONS: dict[str, Callable[[ToolContext, Session, ProcessArguments], Awaitable[dict[str, Any]]]] = {
    "poll": _poll,
    "log": _log,
    "wait": _wait,
    "kill": _kill,
    "write": _write,
    "submit": _write,
    "close": _close,
}

TERMINAL = TypedTool(
    "terminal",
    "Run a shell command in the sandbox and return its output (stdout and stderr together) and exit code. The current "
    "directory and exported variables carry over to the next command; files persist. Commands read an empty stdin. Use "
    "background=true for servers and long jobs, and the process tool to look after them. Output above "
    f"{MAX_OUTPUT:,} characters is shortened in the middle.",
    TerminalArguments,
    run_terminal,
)
PROCESS = TypedTool(
    "process",
    "Look after processes that terminal started with background=true: list, poll, log, wait, kill, or write to stdin.",
    ProcessArguments,
    run_process,
)
