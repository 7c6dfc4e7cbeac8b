"""A conversation that ends because a command says so."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent.conversation import Conversation, End
from agent.trajectory import format_trajectory, parse_trajectory, validate
from tests.contract.environments import eventually
from tests.contract.toolbox import open_toolbox
from tests.unit.test_conversation import DONE, Stage, call, calls, results
from tools.toolsets import load_tool

SENTINEL = "MINI_SWE_AGENT_FINAL_OUTPUT"
END = f"echo {SENTINEL}; echo all is well"


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with open_toolbox("sentinel") as toolbox:
        yield Stage(toolbox.context, tmp_path)


def opened(stage: Stage, *commands: str, sentinel: str = SENTINEL, **more: Any) -> Conversation:
    turns = [calls(call("terminal", command=command), content="I am done") for command in commands]
    return stage.open([*turns, DONE], tools=[load_tool("terminal")], sentinel=sentinel, **more)


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (END, "all is well"),
        (f"echo {SENTINEL}", "I am done"),
        (f"printf '{SENTINEL}\\n\\n  two\\nlines \\n'", "two\nlines"),
        (f"cd /tmp && echo '{SENTINEL}' && pwd", "/tmp"),
        (f"""python3 -c 'print("{SENTINEL}")'""", "I am done"),
        (f"cat <<'E'\n{SENTINEL}\nfixed\nE", "fixed"),
        (f"cat <<E | tee f\n{SENTINEL}\nE", "I am done"),
        (f"printf '{SENTINEL}  \\r\\na -> b\\n'", "a -> b"),
        (f"printf '%s\\n' {SENTINEL} 'a > b'", "a > b"),
        (f'echo -e "{SENTINEL}\\nit said \\"> x\\"" 2>&1', 'it said "> x"'),
        (f"echo {SENTINEL} && echo noted >f; {{ echo both; }}", "both"),
        (f"echo {SENTINEL} | tee f; rm f", "I am done"),
        (f"{{ echo {SENTINEL}; echo in a group; }}", "in a group"),
        (f"""python3 -c 'print("{SENTINEL}")' 2>&1""", "I am done"),
        (f"echo {SENTINEL} 2>/dev/null", "I am done"),
        (f"cat 2>/dev/null <<E 2>&1\n{SENTINEL}\nE", "I am done"),
        (f"if true; then echo {SENTINEL}; fi", "I am done"),
    ],
)
async def test_a_command_that_prints_it_first_ends_the_conversation(stage: Stage, command: str, answer: str) -> None:
    conversation = opened(stage, command)
    assert await conversation.run() == End(status="completed")
    assert (conversation.final_response, conversation.api_calls) == (answer, 1)
    turns = format_trajectory(conversation.messages, [])
    assert not validate(turns)
    assert [message.role for message in parse_trajectory(turns).messages] == ["user", "assistant", "tool"]


@pytest.mark.parametrize(
    "command",
    [
        f"echo one; echo {SENTINEL}",
        f"echo {SENTINEL}; false",
        f"echo {SENTINEL}x",
        f"echo ' {SENTINEL}'",
        f"echo 'finish with: echo {SENTINEL}'",
        f"true {SENTINEL}",
        "cat said",
        f"cat said # {SENTINEL}",
        f"grep {SENTINEL} said",
        f"cp said {SENTINEL}.txt; cat {SENTINEL}.txt",
        "head -n 1 said",
        f"head -n 1 said; echo not {SENTINEL}",
        f"echo {SENTINEL} >f; cat f",
        f"echo '{SENTINEL}' >>f && cat f",
        f"echo {SENTINEL} &>f; cat f",
        f"echo {SENTINEL} | cat >f; cat f",
        f"printf '{SENTINEL}\\n' | tee f >/dev/null; cat f",
        f"{{ echo {SENTINEL}; echo x; }} >f; cat f",
        f"(echo {SENTINEL}) >f; cat f",
        f"echo {SENTINEL} 2>/dev/null >f; cat f",
        f"cat >f <<E\n{SENTINEL}\nE\ncat f",
        f"cat <<E >f\n{SENTINEL}\nE\ncat f",
        f"""python3 -c 'print("{SENTINEL}")' >f; cat f""",
    ],
)
async def test_anything_else_completes_nothing(stage: Stage, command: str) -> None:
    await stage.context.environment.write("said", f"{SENTINEL}\nnot me\n".encode())
    conversation = opened(stage, command)
    await conversation.run()
    assert (conversation.final_response, conversation.api_calls) == ("done", 2)


async def test_a_conversation_without_a_sentinel_goes_on(stage: Stage) -> None:
    conversation = opened(stage, "echo; true", END, sentinel="")
    await conversation.run()
    assert conversation.api_calls == 3


async def test_calls_behind_it_in_its_turn_do_not_run(stage: Stage) -> None:
    commands = ("echo before", END, "touch after")
    turn = calls(*(call("terminal", command=command) for command in commands), call("nothing"))
    conversation = stage.open([turn, DONE], tools=[load_tool("terminal")], sentinel=SENTINEL)
    assert await conversation.run() == End(status="completed")
    first, last, *others = results(conversation)
    assert (first["output"], last["output"]) == ("before\n", f"{SENTINEL}\nall is well\n")
    assert others == [{"error": "Not run: the task had ended with the call before."}] * 2
    assert "after" not in [entry.name for entry in await stage.context.environment.list(".")]
    assert [event.ok for event in conversation.events] == [True, True, False, False]


async def test_on_the_last_call_that_is_allowed_it_is_no_limit_reached(stage: Stage) -> None:
    conversation = opened(stage, "ls", END, max_turns=2)
    assert (await conversation.run()).status == "completed"


async def test_the_answer_has_to_meet_the_schema_all_the_same(stage: Stage) -> None:
    schema = {"type": "object"}
    conversation = opened(stage, END, response_format=schema)
    assert (await conversation.run()).reason == "schema_mismatch"


async def test_a_stop_asked_for_meanwhile_does_not_undo_the_end(stage: Stage) -> None:
    conversation = opened(stage, f"sleep 0.5; {END}")
    running = asyncio.create_task(conversation.run())

    async def begun() -> bool:
        return conversation.api_calls > 0

    assert await eventually(begun)
    stage.stop = "interrupt"
    assert (await running).status == "completed"
