"""The loop, with a scripted model and small tools: what is asked, run, kept and counted."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.clock import RowClock
from agent.conversation import Conversation, ConversationOptions, End
from agent.errors import RunStopped, Stopping
from agent.models.base import Model, ModelRequest
from agent.models.gate import RunGate
from agent.models.options import RequestOptions
from agent.models.table import ModelSpec, open_model
from agent.text import Redactor
from agent.trajectory import NOT_FINISHED, format_trajectory, parse_trajectory
from agent.types import Message, RawCall, Reply, ToolCall
from tests.contract.toolbox import open_toolbox
from tools.base import Tool, ToolContext, ToolSpec
from tools.errors import EnvironmentLost, ToolError

KEY = 'secret"with\\odd-marks'


class Named:
    """A tool that does what a function does."""

    def __init__(self, name: str, act: Callable[[dict[str, Any]], Any], *, read_only: bool = False) -> None:
        self.spec = ToolSpec(name, f"does {name}", {"type": "object"})
        self.read_only = read_only
        self._act = act

    def parse(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if "refuse" in arguments:
            raise ToolError("refuse is no argument")
        return arguments

    async def call(self, context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
        value = self._act(arguments)
        result: dict[str, Any] = await value if asyncio.iscoroutine(value) else value
        return result


class Unsendable(Exception):
    def __init__(self, message: str, *, response: object) -> None:
        super().__init__(message)
        self.response = response


def raising(error: BaseException) -> Callable[[dict[str, Any]], Any]:
    def act(_: dict[str, Any]) -> None:
        raise error

    return act


ECHO = Named("echo", lambda arguments: {"said": arguments.get("text", "")})
TOOLS: tuple[Tool, ...] = (
    ECHO,
    Named("break", raising(Unsendable("it broke", response=lambda: None))),
    Named("refuse", raising(ToolError("not today"))),
    Named("late", raising(TimeoutError())),
    Named("lose", raising(EnvironmentLost("the sandbox is gone"))),
    Named("unhappy", lambda _: {"success": False}),
)


class Listening:
    """The scripted model, and what it was asked."""

    def __init__(self, model: Model) -> None:
        self.name = model.name
        self.requests: list[ModelRequest] = []
        self._model = model

    async def reply(self, request: ModelRequest) -> Reply:
        self.requests.append(request)
        return await self._model.reply(request)

    async def close(self) -> None:
        await self._model.close()


class Stage:
    def __init__(self, context: ToolContext, folder: Path) -> None:
        self.context = context
        self.folder = folder
        self.stop: Stopping = ""
        self.model: Listening

    def open(
        self,
        turns: Sequence[dict[str, Any]],
        *,
        tools: Sequence[Tool] = TOOLS,
        given: Sequence[Message] = (),
        options: RequestOptions | None = None,
        **changes: Any,
    ) -> Conversation:
        script = self.folder / "script.yaml"
        script.write_text(yaml.safe_dump({"default": {"turns": list(turns)}}), encoding="utf-8")
        spec = ModelSpec(model=f"scripted:{script}", options=options or RequestOptions(request_retries=1))
        self.model = Listening(open_model(spec, RunGate()))
        return Conversation(
            self.model,
            tools,
            self.context,
            [*given, Message(role="user", content="go")],
            ConversationOptions(**changes),
            clock=RowClock(60),
            redactor=Redactor({"KEY": KEY}),
            stopping=lambda: self.stop,
        )


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with open_toolbox("conversation") as toolbox:
        yield Stage(toolbox.context, tmp_path)


def call(name: str, call_id: str = "", **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "name": name, "arguments": arguments}


def calls(*each: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"tool_calls": list(each), **more}


DONE = {"content": "done", "reasoning": "so"}


def results(conversation: Conversation) -> list[dict[str, Any]]:
    return [json.loads(message.content) for message in conversation.messages if message.role == "tool"]


async def test_calls_run_until_a_reply_without_one(stage: Stage) -> None:
    usage = {"input_tokens": 5, "output_tokens": 2}
    turns = [calls(call("echo", text="a"), call("echo", text="b"), usage=usage), {**DONE, "usage": usage}]
    conversation = stage.open(turns)
    assert await conversation.run() == End(status="completed")
    assert results(conversation) == [{"said": "a"}, {"said": "b"}]
    assert [message.role for message in conversation.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert (conversation.api_calls, conversation.gpt_turns, conversation.final_response) == (2, 2, "done")
    assert (conversation.spend.requests, conversation.spend.usage.total_tokens) == (2, 14)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("break", "Unsendable: it broke"),
        ("refuse", "not today"),
        ("late", "The tool ran out of time."),
    ],
)
async def test_a_tool_that_fails_answers_the_model(name: str, error: str, stage: Stage) -> None:
    conversation = stage.open([calls(call(name), call("echo", text="next")), DONE])
    assert (await conversation.run()).status == "completed"
    assert results(conversation) == [{"error": error}, {"said": "next"}]
    assert [(event.name, event.ok) for event in conversation.events] == [(name, False), ("echo", True)]


async def test_success_false_is_a_failure(stage: Stage) -> None:
    conversation = stage.open([calls(call("unhappy")), DONE])
    await conversation.run()
    assert [event.ok for event in conversation.events] == [False]


async def test_a_lost_sandbox_ends_the_row_and_keeps_what_was_said(stage: Stage) -> None:
    conversation = stage.open([calls(call("echo", text="kept")), calls(call("lose"), call("echo"))])
    with pytest.raises(EnvironmentLost):
        await conversation.run()
    turns = format_trajectory(conversation.messages, [])
    read = [message.content for message in parse_trajectory(turns).messages if message.role == "tool"]
    assert read == ['{"said":"kept"}', NOT_FINISHED, NOT_FINISHED]


async def test_read_only_calls_of_one_turn_run_at_once_and_others_do_not(stage: Stage) -> None:
    met = asyncio.Barrier(2)

    async def meet(arguments: dict[str, Any]) -> dict[str, Any]:
        async with asyncio.timeout(1):
            await met.wait()
        return arguments

    reader = Named("look", meet, read_only=True)
    writer = Named("touch", meet)
    pair = calls(call("look", n=1), call("look", n=2))
    conversation = stage.open([pair, DONE], tools=[reader, writer])
    await conversation.run()
    assert results(conversation) == [{"n": 1}, {"n": 2}]
    mixed = stage.open([calls(call("look"), call("touch")), DONE], tools=[reader, writer])
    await mixed.run()
    assert results(mixed) == [{"error": "The tool ran out of time."}] * 2


async def test_a_refused_call_beside_read_only_ones_keeps_its_place(stage: Stage) -> None:
    reader = Named("look", lambda arguments: arguments, read_only=True)
    turn = calls(call("look", n=1), call("look", refuse=1), call("nobody"), call("look", n=2))
    conversation = stage.open([turn, DONE], tools=[reader])
    await conversation.run()
    first, second, third, fourth = results(conversation)
    assert (first, fourth) == ({"n": 1}, {"n": 2})
    assert second == {"error": "refuse is no argument"}
    assert "no tool 'nobody'" in third["error"]
    assert conversation.refused_names == {"nobody": 1}


@pytest.mark.parametrize("end", ["answer", "stop"])
async def test_a_stop_runs_no_further_call(end: str, stage: Stage) -> None:
    def stop(_: dict[str, Any]) -> dict[str, Any]:
        stage.stop = "interrupt" if end == "stop" else ""
        return {"stopped": 1}

    conversation = stage.open([calls(call("halt"), call("echo")), DONE], tools=[Named("halt", stop), ECHO])
    if end == "answer":
        assert (await conversation.run()).status == "completed"
        return
    with pytest.raises(RunStopped) as stopped:
        await conversation.run()
    assert stopped.value.reason == "interrupt"
    assert results(conversation) == [{"stopped": 1}]
    assert len(stage.model.requests) == 1


async def test_ids_are_unique_also_among_the_rows_own(stage: Stage) -> None:
    given = [
        Message(role="user", content="before"),
        Message(role="assistant", tool_calls=(ToolCall(id="call_1", name="echo"),)),
        Message(role="tool", content="{}", tool_call_id="call_1", name="echo"),
        Message(role="assistant", content="well"),
    ]
    turns = [calls(call("echo", "call_1"), call("echo", "call_1"), call("echo", "x")), calls(call("echo", "x")), DONE]
    conversation = stage.open(turns, given=given)
    await conversation.run()
    ids = [each.id for message in conversation.messages for each in message.tool_calls]
    answered = [message.tool_call_id for message in conversation.messages if message.role == "tool"]
    assert ids == answered
    assert len(set(ids)) == 5
    assert ids[0] == "call_1"
    assert ids[3] == "x"
    ours = [each for each in ids[1:] if each != "x"]
    assert all(len(each) == 9 and each.isalnum() for each in ours)
    assert conversation.gpt_turns == 3


async def test_what_the_model_is_asked(stage: Stage) -> None:
    conversation = stage.open(
        [DONE],
        given=[Message(role="user", content="earlier"), Message(role="assistant", content="yes")],
        system_text="from the row",
        ephemeral_system_prompt="from the run",
        prefill=(Message(role="user", content="p"), Message(role="assistant", content="q")),
        seed=7,
        response_format=None,
        task_id="t",
        row_key="id:t",
        sample_index=2,
    )
    await conversation.run()
    (request,) = stage.model.requests
    assert [(message.role, message.content) for message in request.messages] == [
        ("system", "from the run\n\nfrom the row"),
        ("user", "p"),
        ("assistant", "q"),
        ("user", "earlier"),
        ("assistant", "yes"),
        ("user", "go"),
    ]
    assert (request.seed, request.task_id, request.row_key, request.sample_index) == (7, "t", "id:t", 2)
    assert [spec.name for spec in request.tools] == [tool.spec.name for tool in TOOLS]
    assert [message.content for message in conversation.messages] == ["earlier", "yes", "go", "done"]


async def test_a_cut_text_is_continued_by_a_turn_that_is_never_kept(stage: Stage) -> None:
    cut = [{"content": text, "reasoning": f"r{text}", "finish_reason": "length"} for text in ("a", "b")]
    conversation = stage.open([*cut, calls(call("echo", text="x"), content="c"), DONE])
    await conversation.run()
    assert [message.role for message in stage.model.requests[2].messages] == ["user", "assistant", "user"]
    assert stage.model.requests[2].messages[1].content == "ab"
    assert [message.role for message in conversation.messages] == ["user", "assistant", "tool", "assistant"]
    assert (conversation.messages[1].content, conversation.messages[1].reasoning) == ("abc", "ra\n\nrb")
    assert len(stage.model.requests[3].messages) == 3


async def test_a_cut_text_stays_whatever_comes_after_it(stage: Stage) -> None:
    cut = {"content": "half", "finish_reason": "length"}
    limited = stage.open([cut, DONE], max_turns=1)
    assert await limited.run() == End(status="max_turns", reason="max_turns")
    assert limited.messages[-1].content == "half"
    failed = stage.open([cut, {"error": {"status": 400, "message": "no"}}])
    assert (await failed.run()).status == "failed"
    assert failed.messages[-1].content == "half"
    filtered = stage.open([cut, {"finish_reason": "content_filter"}])
    assert (await filtered.run()).status == "partial"
    assert filtered.gpt_turns == 1


async def test_an_empty_reply_to_a_continuation_is_its_end(stage: Stage) -> None:
    conversation = stage.open([{"content": "all of it", "finish_reason": "length"}, {"content": " "}])
    assert await conversation.run() == End(status="completed")
    assert conversation.final_response.strip() == "all of it"


async def test_empty_replies_are_counted_anew_after_a_good_turn(stage: Stage) -> None:
    nothing = {"content": ""}
    conversation = stage.open([nothing, nothing, calls(call("echo")), nothing, nothing, DONE])
    assert (await conversation.run()).status == "completed"
    assert conversation.api_calls == 6


@pytest.mark.parametrize("arguments", [f'{{"text": {json.dumps(KEY)}}}', {"text": KEY}])
async def test_secrets_are_struck_out_of_arguments_before_anything_runs(arguments: Any, stage: Stage) -> None:
    turn = calls({"name": "echo", "arguments": arguments}, content=f"use {KEY}", reasoning=f"{KEY} it is")
    conversation = stage.open([turn, DONE])
    await conversation.run()
    said = conversation.messages[1]
    assert said.tool_calls[0].arguments == {"text": "[REDACTED:KEY]"}
    assert (said.content, said.reasoning) == ("use [REDACTED:KEY]", "[REDACTED:KEY] it is")
    assert results(conversation) == [{"said": "[REDACTED:KEY]"}]


async def test_secrets_in_results_and_errors(stage: Stage) -> None:
    tools = [Named("leak", lambda _: {"deep": [{"text": f"<{KEY}>"}]}), Named("fail", raising(ValueError(KEY)))]
    conversation = stage.open(
        [calls(call("leak"), call("fail")), {"error": {"status": 400, "message": KEY}}], tools=tools
    )
    end = await conversation.run()
    assert results(conversation) == [{"deep": [{"text": "<[REDACTED:KEY]>"}]}, {"error": "ValueError: [REDACTED:KEY]"}]
    assert KEY not in end.error
    assert "[REDACTED:KEY]" in end.error


async def test_what_no_file_may_hold_is_replaced_where_it_enters(stage: Stage) -> None:
    tools = [ECHO, Named("odd", lambda _: {"text": "\ud800 and \0"})]
    turn = calls({"name": "echo", "arguments": r'{"text": "a\ud800b"}'}, call("odd"))
    conversation = stage.open([turn, DONE], tools=tools)
    await conversation.run()
    assert results(conversation) == [{"said": "a\ufffdb"}, {"text": "\ufffd and \ufffd"}]
    assert conversation.messages[1].tool_calls[0].arguments == {"text": "a\ufffdb"}


async def test_calls_in_text_are_run_only_where_that_is_on(stage: Stage) -> None:
    text = 'I will.\n<tool_call>{"name": "echo", "arguments": {"text": "x"}}</tool_call>'
    off = stage.open([{"content": text}, DONE])
    assert (await off.run()).reason == "text_tool_call"
    assert off.final_response == off.messages[-1].content == text
    on = stage.open([{"content": text}, DONE], parse_text_tool_calls=True)
    assert (await on.run()).status == "completed"
    assert results(on) == [{"said": "x"}]
    assert on.messages[1].content == "I will."


async def test_only_the_last_call_of_a_cut_reply_counts_as_cut(stage: Stage) -> None:
    turn = calls(call("echo", text="whole"), {"name": "echo", "arguments": ""}, finish_reason="length")
    conversation = stage.open([turn, DONE])
    await conversation.run()
    first, second = results(conversation)
    assert first == {"said": "whole"}
    assert "cut off" in second["error"]


async def test_a_call_in_text_that_a_length_cut_parts_is_seen_whole(stage: Stage) -> None:
    head = {"content": 'I will. <tool_call>{"name": "echo", "argum', "finish_reason": "length"}
    tail = {"content": 'ents": {"text": "x"}}</tool_call>'}
    off = stage.open([head, tail])
    assert (await off.run()).reason == "text_tool_call"
    on = stage.open([head, tail, DONE], parse_text_tool_calls=True)
    assert (await on.run()).status == "completed"
    assert results(on) == [{"said": "x"}]
    assert [message.content for message in on.messages if message.role == "assistant"] == ["I will.", "done"]


async def test_a_filtered_text_is_the_final_response(stage: Stage) -> None:
    conversation = stage.open([{"content": "half of it", "finish_reason": "content_filter"}])
    assert (await conversation.run()).reason == "filtered"
    assert conversation.final_response == "half of it"


async def test_calls_that_were_cut_off_have_failed(stage: Stage) -> None:
    hang = Named("hang", lambda _: asyncio.Event().wait())
    turn = calls(call("echo", text="kept"), call("hang"), call("echo"), call("invented"))
    conversation = stage.open([turn], tools=[ECHO, hang])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(conversation.run(), 0.3)
    counted = [(event.name, event.ok) for event in conversation.events]
    assert counted == [("echo", True), ("hang", False), ("echo", False), ("invented", False)]
    assert conversation.refused_names == {"invented": 1}
    conversation.settle()
    assert len(conversation.events) == 4


async def test_a_lost_sandbox_leaves_no_call_running(stage: Stage) -> None:
    ended: list[int] = []

    async def look(arguments: dict[str, Any]) -> dict[str, Any]:
        if arguments["n"] == 1:
            raise EnvironmentLost("the sandbox is gone")
        await asyncio.sleep(0.1)
        ended.append(arguments["n"])
        return arguments

    turn = calls(call("look", n=0), call("look", n=1), call("look", n=2))
    conversation = stage.open([turn], tools=[Named("look", look, read_only=True)])
    with pytest.raises(EnvironmentLost):
        await conversation.run()
    assert ended == [0, 2]
    assert [event.ok for event in conversation.events] == [True, True, False]


async def test_an_answer_that_misses_its_schema(stage: Stage) -> None:
    schema = {"type": "object", "required": ["n"]}
    for text, status in (('{"n": 1}', "completed"), ("{}", "partial"), ("no JSON", "partial")):
        end = await stage.open([{"content": text}], response_format=schema).run()
        assert (end.status, end.reason) == (status, "" if status == "completed" else "schema_mismatch")
        assert bool(end.error) == (status == "partial")


@pytest.mark.parametrize(
    ("error", "turns_before", "end"),
    [
        ({"status": 400, "code": "context_length_exceeded"}, 0, ("failed", "context_exceeded", False)),
        ({"status": 400, "code": "context_length_exceeded"}, 1, ("partial", "context_exceeded", False)),
        ({"status": 400, "code": "content_filter"}, 1, ("partial", "filtered", False)),
        ({"status": 500}, 1, ("failed", "model_error", True)),
        ({"status": 400}, 0, ("failed", "model_error", False)),
    ],
)
async def test_a_model_that_gives_up(
    error: dict[str, Any], turns_before: int, end: tuple[str, str, bool], stage: Stage
) -> None:
    conversation = stage.open([*[calls(call("echo"))] * turns_before, {"error": error}])
    found = await conversation.run()
    assert (found.status, found.error_class, found.retryable) == end
    assert conversation.spend.requests == 1 + turns_before
    assert conversation.api_calls == turns_before


async def test_the_reply_names_the_model_and_raw_calls_need_no_id(stage: Stage) -> None:
    assert RawCall().id == ""
    conversation = stage.open([DONE])
    await conversation.run()
    assert conversation.model_name == "scripted"
