"""`terminal` and `process` in a real sandbox."""

import re
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.contract.toolbox import Toolbox, open_toolbox


@pytest.fixture
async def call() -> AsyncIterator[Toolbox]:
    async with open_toolbox("terminal") as toolbox:
        yield toolbox


async def started(call: Toolbox, command: str, **arguments: Any) -> str:
    result = await call("terminal", command=command, background=True, **arguments)
    assert result["error"] is None, result
    return str(result["session_id"])


async def ended(call: Toolbox, session_id: str) -> dict[str, Any]:
    return await call("process", action="wait", session_id=session_id)


class TestForeground:
    async def test_the_result_is_output_exit_code_and_null_error(self, call: Toolbox) -> None:
        result = await call("terminal", command="echo out; echo err >&2; exit 3")
        assert result == {"output": "out\nerr\n", "exit_code": 3, "error": None}
        assert list(result) == ["output", "exit_code", "error"]

    async def test_directory_and_variables_carry_over_but_workdir_does_not(self, call: Toolbox) -> None:
        await call("terminal", command="mkdir -p a/b && cd a && export X=1")
        first = await call("terminal", command="pwd; echo $X", workdir="b")
        second = await call("terminal", command="pwd; echo $X")
        assert first["output"].endswith("/a/b\n1\n")
        assert second["output"].endswith("/a\n1\n")

    async def test_a_workdir_that_is_not_there(self, call: Toolbox) -> None:
        result = await call("terminal", command="pwd", workdir="nowhere")
        assert result["error"] or result["exit_code"] != 0

    async def test_a_time_out_keeps_what_was_printed(self, call: Toolbox) -> None:
        began = time.monotonic()
        result = await call("terminal", command="echo before; sleep 30", timeout=3)
        assert time.monotonic() - began < 25
        assert result["output"].startswith("before\n")
        assert result["output"].endswith("\n[Command timed out after 3 s and was killed]")
        assert (result["exit_code"], result["error"]) == (124, None)
        assert (await call("terminal", command="echo on"))["output"] == "on\n"

    async def test_the_tasks_own_limit_holds_by_default(self) -> None:
        async with open_toolbox("limit", command_timeout=0.5) as call:
            result = await call("terminal", command="sleep 30")
        assert result["exit_code"] == 124
        assert result["output"].endswith("[Command timed out after 0.5 s and was killed]")

    @pytest.mark.parametrize("timeout", [601, 0, -1])
    async def test_a_limit_out_of_range_is_refused_and_nothing_runs(self, call: Toolbox, timeout: int) -> None:
        assert "timeout" in (await call("terminal", command="touch ran", timeout=timeout))["error"]
        assert await call.shell("ls") == ""

    @pytest.mark.parametrize(
        "arguments",
        [{"command": "echo a\0b"}, {"command": "  \n"}, {"command": "ls", "workdir": "a\0"}, {}, {"command": ["ls"]}],
    )
    async def test_what_no_shell_can_run_is_an_error(self, call: Toolbox, arguments: dict[str, Any]) -> None:
        assert (await call("terminal", **arguments))["error"]

    async def test_long_output_is_head_and_tail(self, call: Toolbox) -> None:
        result = await call("terminal", command="echo begin; yes 12345678 | head -c 900000; echo end")
        output = result["output"]
        assert output.startswith("begin\n")
        assert output.endswith("end\n")
        omitted = re.search(r"\D(\d+)\D+\n", output[19_000:25_000].replace("12345678", ""))
        assert omitted
        assert 50_000 <= len(output) <= 50_100
        assert 20_000 <= output.index(omitted[1]) <= 20_100
        assert int(omitted[1]) == 900_000 + 10 - 50_000

    async def test_binary_output_is_text(self, call: Toolbox) -> None:
        result = await call("terminal", command=r"printf 'a\377\000b\342\202'; sleep 0.1; printf '\254'")
        assert result["output"] == "a\ufffd\ufffdb€"
        assert (await call("terminal", command="head -c 100000 /dev/urandom"))["exit_code"] == 0

    async def test_escape_sequences_are_removed(self, call: Toolbox) -> None:
        command = (
            r"printf '\033[1;31mred\033[0m \033]0;title\007x \033]8;;http://a\033\\link\033]8;;\033\\ \033(Bend\033=\n'"
        )
        assert (await call("terminal", command=command))["output"] == "red x link end\n"

    @pytest.mark.parametrize(
        "command", ["sleep 60 &", "nohup sleep 60 >/dev/null 2>&1 & disown", "setsid sleep 60 &", "(sleep 60 &)"]
    )
    async def test_a_process_left_behind_holds_nothing_up_and_is_told(self, call: Toolbox, command: str) -> None:
        began = time.monotonic()
        result = await call("terminal", command=f"{command}\nsleep 0.1")
        assert time.monotonic() - began < 30
        assert result["exit_code"] == 0
        assert "still running" in result["note"]

    async def test_a_terminal_is_given_where_asked_for(self, call: Toolbox) -> None:
        command = "test -t 1 && echo yes || echo no"
        assert (await call("terminal", command=command))["output"] == "no\n"
        assert await call("terminal", command=command, pty=True) == {"output": "yes\n", "exit_code": 0, "error": None}
        result = await call("terminal", command="echo begun; sleep 60", pty=True, timeout=3)
        assert result["exit_code"] == 124
        assert result["output"].startswith("begun\n")


class TestBackground:
    async def test_life_of_a_process(self, call: Toolbox) -> None:
        result = await call("terminal", command="echo hello; read x; echo got $x; exit 4", background=True)
        assert result["output"] == "Background process started"
        assert (result["session_id"], result["exit_code"], result["error"]) == ("proc_1", 0, None)
        assert isinstance(result["pid"], int)
        running = await call("process", action="poll", session_id="proc_1")
        assert running["status"] == "running"
        assert "exit_code" not in running
        assert running["uptime_seconds"] >= 0
        sent = await call("process", action="submit", session_id="proc_1", data="wörld")
        assert sent == {"status": "ok", "session_id": "proc_1", "bytes_written": 7}
        done = await ended(call, "proc_1")
        assert done["status"] == "exited"
        assert done["exit_code"] == 4
        assert done["output"] == "hello\ngot wörld\n"
        polled = await call("process", action="poll", session_id="proc_1")
        assert polled["status"] == "exited"
        assert polled["exit_code"] == 4
        assert polled["pid"] == result["pid"]
        assert polled["output_preview"] == "hello\ngot wörld\n"
        again = await call("process", action="poll", session_id="proc_1")
        assert again["uptime_seconds"] == polled["uptime_seconds"]

    async def test_write_and_close(self, call: Toolbox) -> None:
        session = await started(call, "cat; echo over")
        await call("process", action="write", session_id=session, data="a")
        await call("process", action="write", session_id=session, data="b\n")
        assert (await call("process", action="close", session_id=session))["status"] == "ok"
        assert (await ended(call, session))["output"] == "ab\nover\n"
        late = await call("process", action="submit", session_id=session, data="x")
        assert late["status"] == "already_exited"
        assert late["error"]

    async def test_kill(self, call: Toolbox) -> None:
        session = await started(call, "sleep 60 & echo $! >child; wait")
        await call.shell("until [ -s child ]; do sleep 0.02; done")
        assert await call("process", action="kill", session_id=session) == {"status": "killed", "session_id": session}
        assert await call.shell("grep -s ^State: /proc/$(cat child)/status | grep -v Z || echo gone") == "gone\n"
        again = await call("process", action="kill", session_id=session)
        assert again["status"] == "already_exited"

    async def test_a_wait_that_is_too_short(self, call: Toolbox) -> None:
        session = await started(call, "echo on; sleep 60")
        result = await call("process", action="wait", session_id=session, timeout=1)
        assert (result["status"], result["exit_code"], result["output"]) == ("timeout", None, "on\n")
        assert "timeout_note" not in result

    async def test_no_wait_is_longer_than_the_tasks_limit(self) -> None:
        async with open_toolbox("wait", command_timeout=0.3) as call:
            session = await started(call, "sleep 60")
            result = await call("process", action="wait", session_id=session, timeout=500)
        assert result["status"] == "timeout"
        assert "at most 0.3 s" in result["timeout_note"]

    async def test_log_by_lines(self, call: Toolbox) -> None:
        session = await started(call, "seq 500; printf end")
        await ended(call, session)
        last = await call("process", action="log", session_id=session)
        assert last["total_lines"] == 501
        assert last["showing"] == "200 lines"
        assert last["output"] == "\n".join([*(str(n) for n in range(302, 501)), "end"])
        part = await call("process", action="log", session_id=session, offset=9, limit="2")
        assert part["output"] == "10\n11"
        empty = await call("process", action="log", session_id=await started(call, "sleep 60"))
        assert (empty["output"], empty["total_lines"], empty["status"]) == ("", 0, "running")

    async def test_list(self, call: Toolbox) -> None:
        assert await call("process", action="list") == {"processes": []}
        await ended(call, await started(call, "true"))
        await started(call, "sleep 60")
        processes = (await call("process", action="list"))["processes"]
        assert [(one["session_id"], one["command"], one["status"]) for one in processes] == [
            ("proc_1", "true", "exited"),
            ("proc_2", "sleep 60", "running"),
        ]
        assert processes[0]["exit_code"] == 0

    @pytest.mark.parametrize("action", ["poll", "log", "wait", "kill", "write", "submit", "close"])
    async def test_an_id_that_is_missing_or_unknown(self, call: Toolbox, action: str) -> None:
        unknown = await call("process", action=action, session_id="proc_9")
        assert unknown == {"status": "not_found", "error": "No background process proc_9"}
        assert "session_id" in (await call("process", action=action))["error"]

    async def test_an_unknown_action(self, call: Toolbox) -> None:
        assert "expected one of" in (await call("process", action="restart"))["error"]

    async def test_a_terminal_in_the_background(self, call: Toolbox) -> None:
        session = await started(call, "test -t 0 && test -t 1 && echo yes", pty=True)
        assert (await ended(call, session))["output"] == "yes\n"

    async def test_64_processes_run_at_most(self, call: Toolbox) -> None:
        for _ in range(2):
            await ended(call, await started(call, "true"))
        for _ in range(64):
            await started(call, "sleep 60")
        refused = await call("terminal", command="sleep 60", background=True)
        assert "64 background processes" in refused["error"]
        ids = [one["session_id"] for one in (await call("process", action="list"))["processes"]]
        assert ids == [f"proc_{n}" for n in range(3, 67)]

    async def test_processes_belong_to_one_task(self, call: Toolbox) -> None:
        await started(call, "sleep 60")
        async with open_toolbox("other") as other:
            assert await other("process", action="list") == {"processes": []}


class TestNotifications:
    async def test_an_end_is_reported_once(self, call: Toolbox) -> None:
        session = await started(call, "sleep 0.2; echo bye; exit 2", notify_on_complete=True)
        assert "notifications" not in await call("terminal", command="true")
        event = {"session_id": session, "event": "exited", "exit_code": 2, "output": "bye\n"}
        assert (await ended(call, session))["notifications"] == [event]
        assert "notifications" not in await call("terminal", command="true")

    async def test_without_asking_nothing_is_reported(self, call: Toolbox) -> None:
        assert "notifications" not in await ended(call, await started(call, "true"))

    async def test_every_pattern_is_reported_once_with_its_line(self, call: Toolbox) -> None:
        command = "echo on; read x; echo port 80 open; echo port 81 open; read x"
        session = await started(call, command, watch_patterns=["port", "port", "never", ""])
        assert "notifications" not in await call("terminal", command="true")
        await call("process", action="submit", session_id=session)
        found: list[Any] = []
        while not found:
            found = (await call("terminal", command="sleep 0.02")).get("notifications", [])
        assert found == [{"session_id": session, "event": "pattern", "pattern": "port", "line": "port 80 open"}]
        await call("process", action="submit", session_id=session)
        assert "notifications" not in await ended(call, session)

    async def test_what_was_killed_on_purpose_is_not_reported(self, call: Toolbox) -> None:
        session = await started(call, "sleep 60", notify_on_complete=True)
        assert "notifications" not in await call("process", action="kill", session_id=session)
        assert "notifications" not in await call("process", action="list")
