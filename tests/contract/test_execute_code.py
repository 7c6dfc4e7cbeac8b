"""The tool `execute_code`: scripts in every kind of sandbox that call the task's tools, good ones and hostile ones."""

import asyncio
import json
import random
import textwrap
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.clock import RowClock
from agent.conversation import Conversation, ConversationOptions
from agent.models.gate import RunGate
from agent.models.options import RequestOptions
from agent.models.table import ModelSpec, open_model
from agent.partner import ConversationPartner
from agent.text import Redactor
from tests.contract.environments import eventually, open_sandbox, printed
from tools.base import Tool, ToolContext, ToolSpec
from tools.code.child import LONGEST_CALL, _made
from tools.code.execute_code import LIMITS, CodeArguments, CodeLimits, execute_code
from tools.environments.base import Environment, Limits
from tools.errors import EnvironmentLost, ToolError
from tools.toolsets import load_tool

SECRET = "secret-that-must-not-show"
BUILT_IN = ("terminal", "process", "read_file", "write_file", "search_files", "patch", "todo", "execute_code")


class Own:
    """A tool of the run's own: does what a function does."""

    read_only = False

    def __init__(self, name: str, act: Callable[[dict[str, Any]], Any], **properties: Any) -> None:
        self.spec = ToolSpec(name, f"does {name}", {"type": "object", "properties": properties, "required": []})
        self._act = act

    def parse(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return arguments

    async def call(self, context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
        value = self._act(arguments)
        result: dict[str, Any] = await value if asyncio.iscoroutine(value) else value
        return result


def lose(_: dict[str, Any]) -> dict[str, Any]:
    raise EnvironmentLost("the sandbox is gone")


def fail(_: dict[str, Any]) -> dict[str, Any]:
    raise RuntimeError("a fault")


OWN = (
    Own("echo", lambda arguments: {"said": arguments}, text={"type": "string"}, number={"type": "integer"}),
    Own("mcp_here_odd-name", lambda arguments: {"said": arguments}, **{"class": {}, "plain": {}, "a-b": {}}),
    Own("big", lambda _: {"text": "ü\u2028\n" * 500_000}),
    Own("leak", lambda _: {"text": f"it is {SECRET}"}),
    Own("lose", lose),
    Own("fail", fail),
    Own("unhappy", lambda _: {"success": False}),
)


class Desk:
    """A task's sandbox, its tools, and the conversation that they serve; no model is asked."""

    def __init__(self, environment: Environment, folder: Path, own: Sequence[Tool] = OWN) -> None:
        script = folder / "script.yaml"
        script.write_text("default: {turns: [{content: done}]}")
        self.environment = environment
        self.context = ToolContext(environment, 20.0)
        self.conversation = Conversation(
            open_model(ModelSpec(model=f"scripted:{script}", options=RequestOptions()), RunGate()),
            [*map(load_tool, BUILT_IN), *own],
            self.context,
            [],
            ConversationOptions(),
            clock=RowClock(60),
            redactor=Redactor({"KEY": SECRET}),
        )
        self.context.partner = ConversationPartner(self.conversation, None)

    async def __call__(self, code: str, limits: CodeLimits = LIMITS) -> dict[str, Any]:
        """What the script's result is; it is proven to be JSON."""
        result = await execute_code(self.context, CodeArguments(textwrap.dedent(code)), limits)
        assert json.loads(json.dumps(result)) == result
        return result

    async def prints(self, code: str) -> str:
        """What a script that has to succeed prints."""
        result = await self(code)
        assert (result["status"], result["exit_code"]) == ("success", 0), result
        assert "error" not in result
        output: str = result["output"]
        return output

    @property
    def counted(self) -> list[tuple[str, bool]]:
        return [(event.name, event.ok) for event in self.conversation.inner_events]


@asynccontextmanager
async def open_desk(folder: Path, backend: str = "bubblewrap", **changes: object) -> AsyncIterator[Desk]:
    async with open_sandbox(backend, **changes) as environment:
        yield Desk(environment, folder)


@pytest.fixture
async def every(sandbox: Environment, tmp_path: Path) -> Desk:
    """A desk of each kind of sandbox."""
    return Desk(sandbox, tmp_path)


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with open_desk(tmp_path) as one:
        yield one


async def nothing_is_left(environment: Environment) -> bool:
    return await printed(environment, 'ls -d "$TMPDIR"/batch-code-* 2>/dev/null || :') == ""


# what it is for


async def test_a_script_that_calls_tools(every: Desk) -> None:
    await printed(every.environment, "git init -q . && mkdir sub && cd sub && export COLOUR=red")
    result = await every(
        """
        import os
        from batch_tools import patch, read_file, search_files, terminal, write_file

        print(os.path.basename(os.getcwd()), os.environ["COLOUR"])
        print(write_file("a/b.txt", "one\\ntwo\\n")["bytes_written"], read_file("a/b.txt", limit=1)["content"])
        print(patch(path="a/b.txt", old_string="two", new_string="zwei")["success"])
        print([found["line"] for found in search_files("zwei", path="a")["matches"]])
        for word in ("x", "y"):
            print(terminal(f"echo {word}; cat a/b.txt; exit 3"))
        terminal("rm -r a")
        """
    )
    assert result["output"].splitlines() == [
        "sub red",
        "8 1|one",
        "True",
        "[2]",
        "{'output': 'x\\none\\nzwei\\n', 'exit_code': 3, 'error': None}",
        "{'output': 'y\\none\\nzwei\\n', 'exit_code': 3, 'error': None}",
    ]
    assert (result["status"], result["exit_code"], result["tool_calls_made"]) == ("success", 0, 7)
    assert set(result) == {"status", "output", "exit_code", "tool_calls_made", "duration_seconds"}
    names = ["write_file", "read_file", "patch", "search_files", "terminal", "terminal", "terminal"]
    assert every.counted == [(name, True) for name in names]
    assert every.conversation.events == []
    assert await printed(every.environment, "git status --porcelain") == ""
    assert await nothing_is_left(every.environment)


async def test_it_goes_through_the_models_own_call(desk: Desk) -> None:
    tool = load_tool("execute_code")
    result = await tool.call(desk.context, tool.parse({"code": "print(6 * 7)"}))
    assert (result["status"], result["output"]) == ("success", "42\n")
    assert not tool.read_only


async def test_own_tools_by_their_names(desk: Desk) -> None:
    code = """
    import batch_tools, inspect
    print(batch_tools.echo("x", number=None), batch_tools.echo(number=3))
    print(batch_tools.mcp_here_odd_name(1, **{"class": 2, "a-b": 3}))
    print(inspect.signature(batch_tools.terminal), inspect.signature(batch_tools.read_file), batch_tools.echo.__doc__)
    """
    assert (await desk.prints(code)).splitlines() == [
        "{'said': {'text': 'x', 'number': None}} {'said': {'number': 3}}",
        "{'said': {'plain': 1, 'class': 2, 'a-b': 3}}",
        "(command, timeout=Ellipsis, workdir=Ellipsis) (path, offset=Ellipsis, limit=Ellipsis) does echo",
    ]
    assert desk.counted == [("echo", True), ("echo", True), ("mcp_here_odd-name", True)]


async def test_verdicts_of_inner_calls(desk: Desk) -> None:
    code = "import batch_tools as b\nprint(b.fail(), b.unhappy(), b.read_file('none')['error'], b.echo(), b.leak())"
    output = await desk.prints(code)
    assert "'error': 'RuntimeError: a fault'" in output
    assert "no such file" in output
    assert desk.counted == [
        ("fail", False),
        ("unhappy", False),
        ("read_file", False),
        ("echo", True),
        ("leak", True),
    ]
    assert "it is [REDACTED:KEY]" in output
    assert SECRET not in output


async def test_threads_and_processes_of_the_script_are_served_in_turn(desk: Desk) -> None:
    code = """
    import multiprocessing, threading
    from batch_tools import terminal

    def told(number):
        return int(terminal(f"mkdir lock && sleep 0.01 && rmdir lock && echo {number}")["output"])

    if __name__ == "__main__":
        found = []
        threads = [threading.Thread(target=lambda number=number: found.append(told(number))) for number in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        with multiprocessing.get_context("fork").Pool(3) as pool:
            print(sorted(found), pool.map(told, range(6)))
    """
    assert await desk.prints(code) == "[0, 1, 2, 3, 4, 5, 6, 7] [0, 1, 2, 3, 4, 5]\n"
    assert len(desk.counted) == 14


# ends


@pytest.mark.parametrize(
    ("code", "exit_code", "error"),
    [
        ("import sys; print('said'); sys.exit('in words')", 1, "in words"),
        ("print('said'); 1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("print('said'); raise ValueError('a\\n\\nb\\n')", 1, "b"),
        ("import os; print('said'); os._exit(7)", 7, "The script ended with exit code 7"),
        ("import sys; print('said'); sys.exit(200)", 200, "The script ended with exit code 200"),
        ("import os; print('said'); os.kill(os.getpid(), 15)", 143, "The script was killed by signal 15"),
        ("import os; print('said'); os.killpg(0, 9)", 137, "The script was killed by signal 9"),
        ("import os; print('said'); os.close(1); print('more')", 1, "OSError: [Errno 9] Bad file descriptor"),
        (
            "print('said'); print(open('none').read())",
            1,
            "FileNotFoundError: [Errno 2] No such file or directory: 'none'",
        ),
        ("print('said'); from batch_tools import terminal; terminal()", 1, "TypeError: terminal() missing 1 required"),
        ("print('said'); from batch_tools import todo", 1, "ImportError: cannot import name 'todo'"),
        (
            "print('said'); from batch_tools import echo; echo(b'bytes')",
            1,
            "TypeError: tools take JSON values, not bytes",
        ),
        ("print('said'); from batch_tools import echo; echo(float('nan'))", 1, "ValueError: Out of range float values"),
    ],
)
async def test_a_script_that_fails(desk: Desk, code: str, exit_code: int, error: str) -> None:
    result = await desk(code)
    assert (result["status"], result["exit_code"], result["error"][: len(error)]) == ("error", exit_code, error)
    assert result["output"].startswith("said\n")
    assert desk.counted == []
    assert await nothing_is_left(desk.environment)


async def test_a_script_that_is_none(desk: Desk) -> None:
    with pytest.raises(ToolError, match="empty"):
        await desk(" \n ")
    result = await desk("x = (")
    assert (result["status"], result["error"]) == ("error", "SyntaxError: '(' was never closed")
    assert await desk.prints("print('\ud800')") == "?\n"


async def test_what_stderr_says_stands_behind(desk: Desk) -> None:
    output = await desk.prints("import sys; print('out', end=''); print('\\x1b[31mred', file=sys.stderr)")
    assert output == "out\n--- stderr ---\nred\n"


async def test_stdin_is_empty_and_odd_text_survives(desk: Desk) -> None:
    code = r"""
    import os, pathlib, sys
    from batch_tools import echo, write_file
    print(repr(sys.stdin.read()), "\ud800", "\0", "€")
    os.write(1, b"\xfe\xff")
    print(ascii(echo("\ud800 \0 \u20ac")["said"]), write_file(pathlib.Path("p"), "x")["bytes_written"])
    """
    assert await desk.prints(code) == "'' \\ud800 \ufffd €\n\ufffd\ufffd{'text': '\\ufffd \\ufffd \\u20ac'} 1\n"


async def test_processes_that_it_leaves_live_on(desk: Desk) -> None:
    code = """
    import subprocess
    subprocess.Popen(["sh", "-c", "sleep 0.2; echo late; echo late; echo survived >end"])
    print("left")
    """
    result = await desk(code)
    assert (result["output"], "still running" in result["note"]) == ("left\n", True)

    async def survived() -> bool:
        return (await desk.environment.run("cat end", timeout=20)).output == "survived\n"

    assert await eventually(survived)


# limits


def seconds() -> str:
    return f"{random.randrange(10**4, 10**6)}.5"


async def none_lives(environment: Environment, argument: str) -> bool:
    """Whether every process with such an argument is gone, or nearly."""
    command = f"grep -slzx '[{argument[0]}]{argument[1:]}' /proc/[0-9]*/cmdline | wc -l"

    async def none() -> bool:
        return await printed(environment, command) == "0\n"

    return await eventually(none)


async def cut_off(desk: Desk, code: str) -> dict[str, Any]:
    """The result of an endless script whose time runs out after it has printed something, however busy the machine."""
    result: dict[str, Any] = {}
    for limit in (1.0, 4.0, 16.0):
        result = await desk(code, CodeLimits(seconds=limit))
        assert (result["status"], result["exit_code"]) == ("timeout", 124)
        assert result["error"] == f"The script ran longer than {limit:g} s and was killed"
        assert limit <= result["duration_seconds"] < limit + 10
        if result["output"]:
            break
    return result


async def test_a_time_out_kills_the_whole_tree(every: Desk) -> None:
    code = f"""
    import signal, subprocess, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for words in (["sleep", "{(mine := seconds())}"], ["setsid", "sleep", "{mine}"], ["nohup", "sleep", "{mine}"]):
        subprocess.Popen(words, env={{}} if words[0] == "nohup" else None)
    print("before")
    while True: time.sleep(1)
    """
    result = await cut_off(every, code)
    assert result["output"].startswith("before\n")
    assert "note" not in result
    assert await none_lives(every.environment, mine)
    assert await nothing_is_left(every.environment)
    assert await every.prints("print('usable')") == "usable\n"


async def test_a_time_out_cuts_an_inner_call_too(desk: Desk) -> None:
    mine = seconds()
    code = f"from batch_tools import terminal\nprint(terminal('echo before')['output'])\nterminal('sleep {mine}')"
    result = await cut_off(desk, code)
    assert (result["output"], result["tool_calls_made"]) == ("before\n\n", 2)
    assert desk.counted[-2:] == [("terminal", True), ("terminal", False)]
    assert await none_lives(desk.environment, mine)


async def test_an_end_does_not_wait_for_a_call_that_nobody_waits_for(desk: Desk) -> None:
    mine = seconds()
    code = f"""
    import os, threading, time
    from batch_tools import terminal
    threading.Thread(target=terminal, args=["touch begun; sleep {mine}"], daemon=True).start()
    while not os.path.exists("begun"): time.sleep(0.01)
    """
    assert (await asyncio.wait_for(desk(code), 30))["status"] == "success"
    assert desk.counted == [("terminal", False)]


async def test_a_cancelled_call_kills_the_script(desk: Desk) -> None:
    mine = seconds()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await desk(f"import subprocess; subprocess.run(['sleep', '{mine}'])")
    assert await none_lives(desk.environment, mine)
    assert await nothing_is_left(desk.environment)


async def test_output_is_bounded(every: Desk) -> None:
    code = """
    import sys
    line = "€" * 99 + "\\n"
    for _ in range(3_500): sys.stdout.write(line * 100)
    sys.stderr.write("e" * 50_000)
    """
    output, errors = (await every.prints(code)).split("--- stderr ---\n")
    head, marker, tail = output.partition("\n[... 34950000 characters left out ...]\n")  # of 104 MB
    assert (len(head), bool(marker), len(tail)) == (20_000, True, 30_000)
    assert (set(head), tail[-2:]) == ({"€", "\n"}, "€\n")
    assert errors == "e" * 4_000 + "\n[... 40000 characters left out ...]\n" + "e" * 6_000


async def test_calls_are_counted(desk: Desk) -> None:
    code = """
    from batch_tools import echo
    for number in range(60):
        last = echo(number=number)
        if "error" in last: break
    print(number, last["error"])
    """
    result = await desk(code)
    assert result["output"] == "50 A script makes at most 50 tool calls; this one was not made\n"
    assert (result["tool_calls_made"], len(desk.counted)) == (50, 50)


async def test_a_fork_bomb_in_its_sandbox(tmp_path: Path) -> None:
    bomb = """
    import os
    print("begun")
    while True:
        try: os.fork()
        except OSError: pass
    """
    async with open_desk(tmp_path, limits=Limits(pids=64, memory_mb=1024)) as desk:
        assert (await cut_off(desk, bomb))["output"].startswith("begun\n")
        assert await desk.prints("print('usable')") == "usable\n"


async def test_large_results_and_arguments(every: Desk) -> None:
    code = """
    from batch_tools import big, write_file
    print(len(big()["text"]), write_file("f", "x" * 500_000)["bytes_written"])
    """
    assert await every.prints(code) == "1500000 500000\n"


# hostile scripts

SOCKET = """
import batch_tools, json, os, socket

def send(data):
    link = socket.socket(socket.AF_UNIX)
    link.connect(os.path.join(os.path.dirname(batch_tools.__file__), "tools"))
    link.sendall(data)
    link.shutdown(socket.SHUT_WR)
    answer = link.makefile().read()
    return json.loads(answer)["error"] if answer else "hung up"
"""


async def test_calls_that_are_none(desk: Desk) -> None:
    calls = r"""
for data in (b"junk\n", b"\xff\x00\n", b"[" * 100_000 + b"\n", b"[]\n", b'{"name": 1, "arguments": {}}\n',
             b'{"name": "echo"}\n', b'{"name": "echo", "arguments": []}\n', b"", b"cut off"):
    print(send(data))
print(batch_tools.echo("fine"))
"""
    assert (await desk.prints(SOCKET + calls)).splitlines() == [
        *["That is no call of a tool"] * 4,
        "A call has a name and an object of arguments",
        "That is no call of a tool",
        "A call has a name and an object of arguments",
        *["hung up"] * 2,
        "{'said': {'text': 'fine'}}",
    ]
    assert desk.counted == [("echo", True)]


async def test_tools_that_it_may_not_call_are_errors_and_not_counted(desk: Desk) -> None:
    calls = """
for name in ("todo", "process", "execute_code", "nonsense", "\\ud800", "browser_navigate"):
    print(send(json.dumps({"name": name, "arguments": {}}).encode() + b"\\n"))
print(send(json.dumps({"name": "terminal", "arguments": {"command": "x", "background": True}}).encode() + b"\\n"))
print(send(json.dumps({"name": "read_file", "arguments": {"pfad": "x"}}).encode() + b"\\n"))
"""
    lines = (await desk.prints(SOCKET + calls)).splitlines()
    assert [line.split(". ")[0] for line in lines[:6]] == [
        f"A script cannot call {name}"
        for name in ("'todo'", "'process'", "'execute_code'", "'nonsense'", "'\\ud800'", "'browser_navigate'")
    ]
    assert lines[6] == "terminal in a script runs in the foreground and takes no background"
    assert "unknown argument `pfad`" in lines[7]
    assert desk.counted == [("read_file", False)]
    assert not desk.conversation.refused_names


async def test_junk_in_the_stream_of_requests(every: Desk) -> None:
    code = r"""
    import os
    from batch_tools import echo
    with open(f"/proc/{os.getppid()}/fd/1", "wb", 0) as stream:
        stream.write(b"junk\n\xff\x00 call {}\n\nend\n" * 5_000)
    print(echo("fine"))
    """
    assert await every.prints(code) == "{'said': {'text': 'fine'}}\n"


async def test_one_endless_line_of_junk_is_not_kept(desk: Desk) -> None:
    code = r"""
    import os
    with open(f"/proc/{os.getppid()}/fd/1", "wb", 0) as stream:
        for _ in range(100): stream.write(b"x" * 1_000_000)
    """
    result = await desk(code)
    assert (result["status"], result["exit_code"]) == ("error", 137)
    assert await desk.prints("print('usable')") == "usable\n"


async def test_it_kills_what_serves_it(every: Desk) -> None:
    mine = seconds()
    code = f"import os; os.kill(os.getppid(), 9); os.execvp('sleep', ['sleep', '{mine}'])"
    result = await every(code)
    assert (result["status"], result["exit_code"]) == ("error", 137)
    assert await none_lives(every.environment, mine)
    assert await nothing_is_left(every.environment)


async def test_it_closes_everything_and_calls_on(desk: Desk) -> None:
    code = "import os; os.closerange(0, 256)\nfrom batch_tools import write_file; write_file('proof', 'x')"
    assert await desk.prints(code) == ""
    assert desk.counted == [("write_file", True)]


async def test_it_removes_its_folder(desk: Desk) -> None:
    code = """
    import batch_tools, os, shutil
    shutil.rmtree(os.path.dirname(batch_tools.__file__))
    try: batch_tools.echo()
    except RuntimeError as error: print(error)
    """
    assert await desk.prints(code) == "the tools cannot be called any more\n"


# faults that are not the script's


async def test_a_lost_sandbox_ends_the_row(desk: Desk) -> None:
    with pytest.raises(EnvironmentLost):
        await desk("from batch_tools import lose; lose()")
    assert desk.counted == [("lose", False)]


async def test_without_a_conversation() -> None:
    async with open_sandbox("local") as environment:
        with pytest.raises(ToolError, match="only while a model is asked"):
            await execute_code(ToolContext(environment, 20.0), CodeArguments("print(1)"))


async def test_an_image_without_python(tmp_path: Path) -> None:
    for image in ("batch-runner-test:box", "batch-runner-test:sh"):
        async with open_desk(tmp_path, "docker", image=image) as desk:
            with pytest.raises(ToolError, match="no python3 in this sandbox"):
                await desk("print(1)")


@pytest.mark.parametrize("place", ["/proc", "/no/such/folder", "not/absolute", "''"])
async def test_a_folder_for_temporary_files_that_takes_none(desk: Desk, place: str) -> None:
    await printed(desk.environment, f"export TMPDIR={place}")
    assert await desk.prints("import os; from batch_tools import echo; os.chdir('/'); print(echo('x'))")
    left = "ls -d /tmp/batch-code-* /var/tmp/batch-code-* batch-code-* 2>/dev/null | grep -c ."
    before = await printed(desk.environment, left + " || :")
    assert (await desk("import os; os.kill(os.getppid(), 9)"))["status"] == "error"
    assert await printed(desk.environment, left + " || :") == before


async def test_no_folder_takes_temporary_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(SystemExit, match="There is no folder that takes temporary files: set TMPDIR to one"):
        _made("batch-code-x")


async def test_a_call_that_is_too_long_is_said_and_the_next_one_works(desk: Desk) -> None:
    code = f"""
    from batch_tools import echo
    print(echo("x" * {LONGEST_CALL + 100_000}))
    print(echo("y"))
    print(echo("x" * {2 * LONGEST_CALL + 100}))
    print(len(echo("z" * {LONGEST_CALL // 2})["said"]["text"]))
    """
    result = await desk(code)
    assert result["output"].splitlines() == [
        "{'error': 'the call is too long'}",
        "{'said': {'text': 'y'}}",
        "{'error': 'the call is too long'}",
        str(LONGEST_CALL // 2),
    ]
    assert result["tool_calls_made"] == 2


async def test_an_old_python(desk: Desk) -> None:
    await printed(desk.environment, "mkdir bin; printf '#!/bin/sh\\necho SyntaxError: too old; exit 1' >bin/python3")
    await printed(desk.environment, "chmod +x bin/python3; export PATH=$PWD/bin:$PATH")
    result = await desk("print(1)")
    assert (result["status"], result["error"]) == ("error", "SyntaxError: too old")
