"""Scripted and replayed models, and the tries of a call, which a script shows without a network."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agent.clock import RowClock
from agent.errors import ModelError, RunStopped
from agent.models.base import Model, ModelRequest
from agent.models.gate import RunGate
from agent.models.options import RequestOptions
from agent.models.table import ModelSpec, is_local, open_model
from agent.row import Turn
from agent.trajectory import format_trajectory
from agent.types import Message, RawCall, ToolCall, Usage
from tools.errors import UsageProblem

SCRIPT = """
model: actor
rules:
  - prompt: 'count .* files'
    turns:
      - reasoning: Let me look.
        tool_calls: [{name: terminal, arguments: {command: ls}}, {name: terminal, arguments: '{"command": "l'}]
        usage: {input_tokens: 10, output_tokens: 5}
      - content: three
        finish_reason: length
  - equals: again
    repeat: true
    turns: [{content: once}, {content: more}]
  - equals: flaky
    turns: [{content: at last, error: {status: 500, times: 2}}]
  - equals: broken
    turns: [{error: {status: 500, message: oops}}]
  - equals: limited
    turns: [{content: then, error: {status: 429, retry_after: 0.2, times: 3}}]
  - equals: refused
    turns: [{error: {status: 401}}]
  - equals: too long
    turns: [{error: {status: 400, code: context_length_exceeded}}]
  - equals: slow
    turns: [{content: late, delay: 30}]
  - equals: nobody
    turns: [{error: {status: 0, message: no route}}]
default:
  turns: [{content: done}]
"""


def script(tmp_path: Path, text: str = SCRIPT) -> str:
    path = tmp_path / "script.yaml"
    path.write_text(text, encoding="utf-8")
    return f"scripted:{path}"


def opened(tmp_path: Path, gate: RunGate | None = None, **options: Any) -> Model:
    spec = ModelSpec(model=script(tmp_path), options=RequestOptions(**options))
    return open_model(spec, gate or RunGate(spec.keys))


def asking(prompt: str, turn: int = 1, *more: Message, seconds: float = 60, **request: Any) -> ModelRequest:
    messages = [Message(role="user", content=prompt), *more]
    return ModelRequest(messages=messages, turn=turn, clock=RowClock(seconds), **request)


async def test_turns_come_in_order(tmp_path: Path) -> None:
    model = opened(tmp_path, price_in=1e6, price_out=2e6)
    first = await model.reply(asking("please count all files"))
    assert (first.reasoning, first.content, first.finish_reason) == ("Let me look.", "", "tool_calls")
    assert first.tool_calls == (
        RawCall(name="terminal", arguments='{"command":"ls"}'),
        RawCall(name="terminal", arguments='{"command": "l'),
    )
    assert first.spend.usage == Usage(input_tokens=10, output_tokens=5, total_tokens=15)
    assert (first.spend.requests, first.spend.cost_usd, first.model) == (1, 20.0, "actor")
    second = await model.reply(asking("please count all files", 2))
    assert (second.content, second.finish_reason) == ("three", "length")
    with pytest.raises(ModelError, match="ends after 2 turns") as ended:
        await model.reply(asking("please count all files", 3))
    assert (ended.value.reason, ended.value.retryable) == ("script_ended", False)


async def test_the_last_turn_repeats_where_the_rule_says_so(tmp_path: Path) -> None:
    model = opened(tmp_path)
    assert [(await model.reply(asking("again", turn))).content for turn in (1, 2, 3, 9)] == [
        "once",
        "more",
        "more",
        "more",
    ]


async def test_messages_that_no_rule_fits_do_not_hide_the_prompt(tmp_path: Path) -> None:
    nudge = Message(role="user", content="go on")
    model = opened(tmp_path)
    assert (await model.reply(asking("again", 2, Message(role="assistant", content="once"), nudge))).content == "more"
    assert (await model.reply(asking("else"))).content == "done"


async def test_without_rule_and_default_the_row_ends(tmp_path: Path) -> None:
    model = open_model(ModelSpec(model=script(tmp_path, "rules: []")), RunGate())
    with pytest.raises(ModelError, match="no rule") as ended:
        await model.reply(asking("x"))
    assert ended.value.reason == "no_rule"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("rules: [{prompt: '(', turns: []}]", r"rules\[0\].prompt"),
        ("rules: [{turns: [{contents: x}]}]", r"contents.*rules\[0\]\.turns\[0\]"),
        ("rules: [{turns: [{delay: soon}]}]", r"rules\[0\]\.turns\[0\]\.delay"),
        ("rules: {", "not YAML"),
        ("7", "script.yaml"),
    ],
)
def test_a_bad_script_names_the_file_and_the_place(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(UsageProblem, match=named) as problem:
        open_model(ModelSpec(model=script(tmp_path, text)), RunGate())
    assert "script.yaml" in str(problem.value)


def test_a_missing_script_is_a_usage_problem(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="No such file"):
        open_model(ModelSpec(model=f"scripted:{tmp_path}/none.yaml"), RunGate())
    assert is_local("scripted:x")
    assert is_local("replay:x")
    assert not is_local("gpt-4o")


# --- tries


async def test_transient_failures_are_tried_again_and_counted(tmp_path: Path) -> None:
    gate = RunGate()
    reply = await opened(tmp_path, gate).reply(asking("flaky"))
    assert (reply.content, reply.spend.requests, gate.spent.requests) == ("at last", 3, 3)


async def test_tries_are_used_up(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="oops") as ended:
        await opened(tmp_path, request_retries=2).reply(asking("broken"))
    assert (ended.value.error_class, ended.value.reason, ended.value.retryable) == ("model_error", "server_error", True)
    assert ended.value.spend.requests == 2


async def test_rate_limits_use_neither_tries_nor_row_time(tmp_path: Path) -> None:
    request = asking("limited", seconds=0.3)
    async with request.clock.timeout:
        reply = await opened(tmp_path, request_retries=1).reply(request)
    assert (reply.content, reply.spend.requests) == ("then", 4)
    assert request.clock.waited >= 0.6


async def test_a_condemned_key_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunStopped) as stopped:
        await opened(tmp_path).reply(asking("refused"))
    assert (stopped.value.reason, stopped.value.spend.requests) == ("auth", 1)


async def test_an_overflowing_context_is_one_request(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as ended:
        await opened(tmp_path).reply(asking("too long"))
    assert (ended.value.error_class, ended.value.retryable, ended.value.spend.requests) == (
        "context_exceeded",
        False,
        1,
    )


async def test_a_request_has_a_deadline(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"within 0\.05 s") as ended:
        await opened(tmp_path, request_timeout=0.05, request_retries=1).reply(asking("slow"))
    assert ended.value.reason == "request_timeout"


async def test_a_cancelled_call_gives_its_place_back(tmp_path: Path) -> None:
    gate = RunGate([1], 1)
    model = opened(tmp_path, gate)
    request = asking("slow", seconds=0.05)
    with pytest.raises(TimeoutError):
        async with request.clock.timeout:
            await model.reply(request)
    assert gate.in_flight == 0
    assert (await model.reply(asking("else"))).content == "done"


async def test_a_run_that_stops_while_a_call_backs_off_ends_that_call(tmp_path: Path) -> None:
    gate = RunGate()
    call = asyncio.create_task(opened(tmp_path, gate).reply(asking("broken")))
    await asyncio.sleep(0.05)
    gate.stop("interrupt", "Ctrl-C")
    with pytest.raises(RunStopped) as stopped:
        await call
    assert (stopped.value.reason, stopped.value.spend.requests) == ("interrupt", 1)


# --- replay


def turns(prompt: str, answer: str) -> list[Turn]:
    call = ToolCall(id="call_1_0", name="terminal", arguments={"command": "ls"})
    messages = [
        Message(role="user", content=prompt),
        Message(role="assistant", reasoning="Look.", tool_calls=(call,)),
        Message(role="tool", content='{"output":"x"}', tool_call_id="call_1_0", name="terminal"),
        Message(role="assistant", content=answer),
    ]
    return format_trajectory(messages, [])


def row(key: str, conversation: list[Turn], sample: int = 0, **more: Any) -> str:
    conversations = [{"from": turn.sender, "value": turn.value} for turn in conversation]
    return json.dumps(
        {"row_key": f"id:{key}", "task_id": key, "sample_index": sample, "conversations": conversations, **more}
    )


def journal(directory: Path, name: str, *lines: str) -> None:
    (directory / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")


async def test_replay_plays_the_last_try_that_has_turns(tmp_path: Path) -> None:
    none = turns("a", "")[:2]
    journal(tmp_path, "batch_2.jsonl", row("a", turns("a", "first é")), row("b", turns("b", "of b"), sample=1))
    journal(tmp_path, "batch_10.jsonl", '{"torn', row("a", turns("a", "second")), row("a", none), "")
    journal(tmp_path, "trajectories.jsonl", row("a", turns("a", "not read")))
    model = open_model(ModelSpec(model=f"replay:{tmp_path}"), RunGate())
    first = await model.reply(asking("a", row_key="id:a"))
    assert (first.reasoning, first.tool_calls[0].arguments) == ("Look.", '{"command":"ls"}')
    assert (await model.reply(asking("a", 2, row_key="id:a"))).content == "second"
    assert (await model.reply(asking("b", 2, row_key="sha:0", task_id="b", sample_index=1))).content == "of b"
    for missing in (asking("b", 1, row_key="id:b"), asking("a", 3, row_key="id:a")):
        with pytest.raises(ModelError) as ended:
            await model.reply(missing)
        assert not ended.value.retryable


async def test_replay_says_how_the_row_ended(tmp_path: Path) -> None:
    journal(tmp_path, "batch_0.jsonl", row("a", turns("a", "done"), end_status="max_turns"))
    model = open_model(ModelSpec(model=f"replay:{tmp_path}"), RunGate())
    with pytest.raises(ModelError, match="has 2 assistant turns and ended as max_turns") as ended:
        await model.reply(asking("a", 3, row_key="id:a"))
    assert ended.value.reason == "replayed_max_turns"


async def test_replay_leaves_out_the_turns_that_came_with_the_row(tmp_path: Path) -> None:
    given = [
        Message(role="user", content="q"),
        Message(role="assistant", content="old"),
        Message(role="user", content="a"),
    ]
    conversation = format_trajectory([*given, Message(role="assistant", content="new")], [])
    journal(tmp_path, "trajectories.jsonl", row("a", conversation, context_turns=2))
    model = open_model(ModelSpec(model=f"replay:{tmp_path}"), RunGate())
    assert (await model.reply(asking("a", task_id="a"))).content == "new"


def test_replay_of_nothing_is_a_usage_problem(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="to replay"):
        open_model(ModelSpec(model=f"replay:{tmp_path}"), RunGate())
