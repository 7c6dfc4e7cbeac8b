"""What every model does, and what only one behind HTTP can show: each against a real server on loopback."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from agent.clock import RowClock
from agent.errors import ModelError, RunStopped
from agent.models.account import Account, Budget
from agent.models.base import Model, ModelRequest
from agent.models.gate import START_WAIT, RunGate
from agent.models.options import RequestOptions
from agent.models.providers import Quirks, Target
from agent.models.table import ModelSpec, open_model
from agent.types import Message, ToolCall
from tests.contract.environments import eventually
from tests.endpoint import Endpoint, EndpointProcess
from tools.base import ToolSpec
from tools.errors import UsageProblem

TERMINAL = ToolSpec("terminal", "runs a command", {"type": "object", "properties": {"command": {"type": "string"}}})


class Chat:
    """A model behind an endpoint, with its gate."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.gate = RunGate()
        self._opened: list[Model] = []

    def open(
        self,
        *,
        targets: tuple[Target, ...] = (),
        quirks: Quirks | None = None,
        gate: dict[str, Any] | None = None,
        **options: Any,
    ) -> Model:
        targets = targets or (self.target(quirks=quirks or Quirks()),)
        spec = ModelSpec(model=targets[0].model, targets=targets, options=RequestOptions(**options))
        self.gate = RunGate(spec.keys, **(gate or {}))
        self._opened.append(open_model(spec, self.gate))
        return self._opened[-1]

    def target(self, model: str = "m", **fields: Any) -> Target:
        return Target(model=model, provider="custom", base_url=self.endpoint.url, **fields)

    async def close(self) -> None:
        for model in self._opened:
            await model.close()
        assert self.gate.in_flight == 0


@pytest.fixture
async def chat() -> AsyncIterator[Chat]:
    async with Endpoint(calls=1) as endpoint:
        chat = Chat(endpoint)
        yield chat
        await chat.close()


def asking(*messages: Message, prompt: str = "hi", seconds: float = 60, **request: Any) -> ModelRequest:
    return ModelRequest(messages=[Message(role="user", content=prompt), *messages], clock=RowClock(seconds), **request)


async def failing(model: Model, request: ModelRequest | None = None) -> ModelError:
    with pytest.raises(ModelError) as error:
        await model.reply(request or asking())
    return error.value


async def stopping(model: Model, request: ModelRequest | None = None) -> RunStopped:
    with pytest.raises(RunStopped) as stopped:
        await model.reply(request or asking())
    return stopped.value


# --- every model


@pytest.fixture(params=["endpoint", "scripted", "replay"])
async def any_model(request: pytest.FixtureRequest, chat: Chat, tmp_path: Path) -> Model:
    if request.param == "endpoint":
        return chat.open()
    if request.param == "scripted":
        path = tmp_path / "script.yaml"
        call = '{name: terminal, arguments: {command: "echo step 1 of hi"}}'
        path.write_text(
            f"default: {{turns: [{{reasoning: r, tool_calls: [{call}]}}, {{reasoning: r, content: 'done: hi'}}]}}"
        )
        return open_model(ModelSpec(model=f"scripted:{path}"), chat.gate)
    call = '<tool_call>\n{"name": "terminal", "arguments": {"command": "echo step 1 of hi"}}\n</tool_call>'
    said = [
        {"from": "system", "value": ""},
        {"from": "human", "value": "hi"},
        {"from": "gpt", "value": f"<think>\nr\n</think>\n{call}"},
        {
            "from": "tool",
            "value": '<tool_response>\n{"tool_call_id": "1", "name": "terminal", "content": {}}\n</tool_response>',
        },
        {"from": "gpt", "value": "<think>\nr\n</think>\ndone: hi"},
    ]
    (tmp_path / "batch_0.jsonl").write_text(json.dumps({"row_key": "id:1", "conversations": said}) + "\n")
    return open_model(ModelSpec(model=f"replay:{tmp_path}"), chat.gate)


async def test_a_conversation_of_two_calls(any_model: Model, chat: Chat) -> None:
    first = await any_model.reply(asking(tools=[TERMINAL], row_key="id:1"))
    assert first.reasoning
    assert first.finish_reason == "tool_calls"
    assert json.loads(first.tool_calls[0].arguments) == {"command": "echo step 1 of hi"}
    call = ToolCall(id="c", name="terminal", arguments=json.loads(first.tool_calls[0].arguments))
    turn = Message(role="assistant", reasoning=first.reasoning, tool_calls=(call,), wire=first.wire)
    result = Message(role="tool", content="{}", tool_call_id="c", name="terminal")
    last = await any_model.reply(asking(turn, result, tools=[TERMINAL], row_key="id:1", turn=2))
    assert (last.content, last.tool_calls, last.finish_reason) == ("done: hi", (), "stop")
    assert (last.spend.requests, chat.gate.spent.requests) == (1, 2)


async def test_every_model_asks_the_gate(any_model: Model, chat: Chat) -> None:
    chat.gate.stop("interrupt", "Ctrl-C")
    assert (await stopping(any_model, asking(row_key="id:1"))).reason == "interrupt"
    assert chat.endpoint.stats.requests == 0


# --- requests


async def test_what_is_sent(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-1")
    model = chat.open(targets=(chat.target(key_variable="SOME_KEY"),), max_tokens=7, temperature=0.5)
    reply = await model.reply(asking(seed=3))
    assert chat.endpoint.stats.bodies[0] == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 7,
        "temperature": 0.5,
        "seed": 3,
    }
    assert chat.endpoint.stats.keys == {"sk-1": 1}
    assert (reply.spend.usage.total_tokens, reply.model) == (110, "m")


async def test_without_a_key_none_is_sent_and_a_missing_one_is_named(chat: Chat) -> None:
    await chat.open().reply(asking())
    assert chat.endpoint.stats.keys == {"": 1}
    address = chat.endpoint.url.replace("http://", "http://me:pass@")
    named = Target(model="m", provider="custom", base_url=address)
    await chat.open(targets=(named,)).reply(asking())
    assert chat.endpoint.stats.keys == {"": 1, "Basic bWU6cGFzcw==": 1}
    with pytest.raises(UsageProblem, match="NO_SUCH_KEY is not set"):
        chat.open(targets=(chat.target(key_variable="NO_SUCH_KEY"),))


async def test_reasoning_goes_back_by_default_and_not_where_it_is_refused(chat: Chat) -> None:
    refuse = {"status": 400, "error": {"message": "unknown field reasoning_content"}}
    turn = Message(role="assistant", content="a", wire={"reasoning_content": "why"})
    chat.endpoint.set_rules([{"has": "reasoning_content"}, refuse])
    assert (await chat.open().reply(asking(turn))).content == "done: hi"
    chat.endpoint.set_rules([{"has": "reasoning_content", **refuse}])
    assert (await chat.open(quirks=Quirks(reasoning_replay=False)).reply(asking(turn))).content == "done: hi"


async def test_hundreds_of_requests_are_in_flight_at_once_over_kept_connections() -> None:
    async with Endpoint(latency=0.3) as endpoint:
        chat = Chat(endpoint)
        model = chat.open(gate={"concurrency": 300})
        for _ in range(2):
            await asyncio.gather(*(model.reply(asking()) for _ in range(300)))
        await chat.close()
    assert endpoint.stats.peak == 300
    assert endpoint.stats.connections == 300


# --- tries


async def test_a_probe_of_a_key_that_only_fails_uses_no_try(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", "good,bad")
    limited = {"key": "good", "status": 429, "times": 1, "headers": {"retry-after": "5"}}
    chat.endpoint.set_rules([{"key": "bad", "status": 500}, limited])
    model = chat.open(targets=(chat.target(key_variable="KEYS", keys=2),), request_retries=4)
    assert (await model.reply(asking())).content == "done: hi"


async def test_5xx_is_tried_again(chat: Chat) -> None:
    chat.endpoint.set_rules([{"status": 500, "times": 2}])
    reply = await chat.open().reply(asking())
    assert (reply.content, reply.spend.requests) == ("done: hi", 3)


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ({"body": {"choices": []}}, "no_choices"),
        ({"body": {"choices": None}}, "no_choices"),
        ({"message": None}, "null_message"),
        ({"error": {"message": "overloaded"}}, "error_body"),
        ({"drop": "body"}, "connection_lost"),
        ({"drop": "before"}, "connection_lost"),
        ({"raw": '{"choices": [{"mess'}, "invalid_body"),
        ({"finish_reason": "malformed_function_call", "message": {"content": None}}, "malformed_function_call"),
        ({"status": 503}, "server_error"),
    ],
)
async def test_every_malformed_reply_is_named_and_tried_again(chat: Chat, rule: dict[str, Any], reason: str) -> None:
    chat.endpoint.set_rules([{**rule, "times": 2}])
    error = await failing(chat.open(request_retries=2))
    assert (error.reason, error.error_class, error.retryable, error.spend.requests) == (reason, "model_error", True, 2)
    assert (await chat.open().reply(asking())).content == "done: hi"


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": 5}])
async def test_absent_usage_is_estimated_in_the_gate_and_zero_in_the_row(chat: Chat, usage: Any) -> None:
    chat.endpoint.set_rules([{"usage": usage}])
    reply = await chat.open(price_in=1.0, price_out=1.0).reply(asking(prompt="x" * 4000))
    if usage is None:
        assert (reply.spend.usage.total_tokens, reply.spend.cost_usd, reply.spend.unreported.replies) == (0, 0.0, 1)
        assert reply.spend.all_tokens > 1000
        assert reply.spend.all_cost == pytest.approx(reply.spend.all_tokens * 1e-6)
    else:
        assert (reply.spend.all_tokens, reply.spend.unreported.replies) == (5, 0)
    assert reply.spend == chat.gate.spent


@pytest.mark.parametrize("rule", [{"stall": True}, {"drip": 0.1}, {"drop": "body", "drip": 0.05}])
async def test_requests_that_hang_end_with_their_deadline(chat: Chat, rule: dict[str, Any]) -> None:
    chat.endpoint.set_rules([{**rule, "raw": " " * 1000}])
    began = time.monotonic()
    error = await failing(chat.open(request_timeout=0.4, request_retries=1))
    assert error.reason == "request_timeout"
    assert time.monotonic() - began < 30


async def test_the_rows_end_cancels_the_request_and_frees_its_place(chat: Chat) -> None:
    chat.endpoint.set_rules([{"stall": True, "times": 1}])
    model = chat.open(gate={"concurrency": 1})
    request = asking(seconds=0.2)
    with pytest.raises(TimeoutError):
        async with request.clock.timeout:
            await model.reply(request)
    assert (await model.reply(asking())).content == "done: hi"


def _requests_reach(chat: Chat, number: int) -> Callable[[], Awaitable[bool]]:
    async def reached() -> bool:
        return chat.endpoint.stats.requests >= number

    return reached


async def test_what_a_cancelled_call_cost_is_told(chat: Chat) -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    chat.endpoint.set_rules([{"call": 1, "status": 500}, {"call": 2, "body": {"usage": usage}}, {"stall": True}])
    request = asking()
    call = asyncio.create_task(chat.open().reply(request))
    assert await eventually(_requests_reach(chat, 3))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (request.tally.spend.requests, request.tally.spend.usage.total_tokens) == (3, 7)
    assert chat.gate.spent == request.tally.spend


# --- rate limits


@pytest.mark.parametrize("header", ["retry-after", "retry-after-ms", "date"])
async def test_the_wait_that_a_429_asks_for_is_kept_and_costs_no_try(chat: Chat, header: str) -> None:
    asked = {"retry-after": "1", "retry-after-ms": "1000", "date": formatdate(time.time() + 2, usegmt=True)}[header]
    headers = {"retry-after" if header == "date" else header: asked}
    chat.endpoint.set_rules([{"status": 429, "headers": headers, "times": 1}])
    request = asking(seconds=0.9)
    async with request.clock.timeout:
        reply = await chat.open(request_retries=1).reply(request)
    first, second = chat.endpoint.stats.times
    assert second - first >= 0.99
    assert reply.spend.requests == 2


async def test_no_row_fails_by_a_server_that_allows_few_requests_a_second(chat: Chat) -> None:
    chat.endpoint.set_rules([{"per_second": 40, "status": 429, "headers": {"retry-after-ms": "300"}}])
    model = chat.open(request_retries=1)
    replies = await asyncio.gather(*(model.reply(asking(prompt=str(row))) for row in range(100)))
    assert [reply.content for reply in replies] == [f"done: {row}" for row in range(100)]
    assert chat.endpoint.stats.requests < 160


async def test_keys_are_rotated_and_then_the_fallback_answers(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", "one,two")
    limited = {"status": 429, "headers": {"retry-after": "60"}}
    chat.endpoint.set_rules([{"key": "one", **limited}, {"key": "two", "status": 402}])
    main = chat.target(key_variable="KEYS", keys=2)
    reply = await chat.open(targets=(main, chat.target("spare"))).reply(asking())
    assert (reply.model, reply.spend.requests) == ("spare", 3)
    assert chat.endpoint.stats.keys == {"one": 1, "two": 1, "": 1}
    assert chat.endpoint.stats.models == {"m": 2, "spare": 1}


# --- ends of the run


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ({"status": 401}, "auth"),
        ({"status": 402}, "quota"),
        ({"status": 403}, "auth"),
        ({"status": 404}, "model"),
        ({"status": 429, "error": {"code": "insufficient_quota", "message": "no money"}}, "quota"),
        ({"status": 429, "headers": {"retry-after": "1000"}}, "quota"),
        ({"status": 400, "error": {"message": "max_tokens is too large: 9. At most 5"}}, "model"),
    ],
)
async def test_what_condemns_stops_after_one_request_per_place(chat: Chat, rule: dict[str, Any], reason: str) -> None:
    chat.endpoint.set_rules([{**rule, "delay": 0.05}])
    model = chat.open(gate={"concurrency": 4})
    ends = await asyncio.gather(*(model.reply(asking()) for _ in range(200)), return_exceptions=True)
    assert {end.reason for end in ends if isinstance(end, RunStopped)} == {reason}
    assert all(isinstance(end, RunStopped) for end in ends)
    assert chat.endpoint.stats.requests <= 4


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_named_and_no_key_goes_there(
    chat: Chat, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-1")
    async with Endpoint() as other:
        address = f"{other.url}/chat/completions"
        chat.endpoint.set_rules([{"status": status, "headers": {"Location": address}, "raw": ""}])
        stopped = await stopping(chat.open(targets=(chat.target(key_variable="SOME_KEY"),)))
        assert (stopped.reason, stopped.spend.requests, chat.endpoint.stats.requests) == ("model", 1, 1)
        assert stopped.message == f"HTTP {status}: the endpoint redirects to {address}: set base_url"
        assert other.stats.requests == 0


async def test_a_wait_that_would_outlast_the_row_ends_it_with_what_was_answered(chat: Chat) -> None:
    chat.endpoint.set_rules([{"status": 503, "headers": {"Retry-After": "100"}}])
    request = asking(seconds=30)
    began = time.monotonic()
    async with request.clock.timeout:
        error = await failing(chat.open(), request)
    assert (error.reason, error.retryable, error.spend.requests) == ("server_error", True, 1)
    assert time.monotonic() - began < 20


@pytest.fixture
def ports_of_nobody() -> Iterator[list[int]]:
    """One refuses connections; one neither refuses nor takes them: what waits there is too much already."""
    with ExitStack() as opened:
        refusing, full, *waiting = [opened.enter_context(socket.socket()) for _ in range(6)]
        for each in (refusing, full):
            each.bind(("127.0.0.1", 0))
        full.listen(0)
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        yield [refusing.getsockname()[1], full.getsockname()[1]]


async def test_an_endpoint_that_is_not_there_stops_the_run_within_five_seconds(ports_of_nobody: list[int]) -> None:
    began = time.monotonic()

    async def stop_at(port: int) -> RunStopped:
        target = Target(model="m", provider="custom", base_url=f"http://user:secret@127.0.0.1:{port}/v1")
        model = open_model(ModelSpec(model="m", targets=(target,)), RunGate())
        try:
            return await stopping(model, asking(seconds=1))
        finally:
            await model.close()

    ends = await asyncio.gather(*map(stop_at, ports_of_nobody))
    assert START_WAIT < 5
    assert time.monotonic() - began < 30
    for end in ends:
        assert (end.reason, end.spend.requests) == ("unreachable", 0)
        assert "127.0.0.1" in end.message
        assert "secret" not in end.message


async def test_a_name_that_does_not_resolve_is_unreachable_and_the_fallback_answers(chat: Chat) -> None:
    nowhere = Target(model="m", provider="custom", base_url="http://nowhere.invalid/v1")
    reply = await chat.open(targets=(nowhere, chat.target("spare"))).reply(asking())
    assert (reply.model, reply.spend.requests) == ("spare", 1)


async def test_an_endpoint_that_goes_away_and_comes_back_costs_no_row() -> None:
    async with Endpoint() as first:
        chat = Chat(first)
        model = chat.open(request_retries=2)
        await model.reply(asking())
    calls = [asyncio.create_task(model.reply(asking(prompt=str(row)))) for row in range(20)]
    await asyncio.sleep(0.5)
    async with Endpoint(port=first.port) as second:
        replies = await asyncio.gather(*calls)
        await chat.close()
    assert len(replies) == 20
    assert second.stats.requests == 20


async def test_the_budget_stops_a_model_that_never_gets_anywhere(chat: Chat) -> None:
    usage = {"prompt_tokens": 100_000, "completion_tokens": 0}
    chat.endpoint.set_rules([{"body": {"choices": [], "usage": usage}}])
    model = chat.open(price_in=10.0, price_out=10.0, gate={"account": Account(budget=Budget(max_cost=2.5))})
    stopped = await stopping(model)
    assert (stopped.reason, chat.endpoint.stats.requests, stopped.spend.cost_usd) == ("budget", 3, 3.0)


# --- ends of a row


@pytest.mark.parametrize(
    ("status", "error", "error_class"),
    [
        (403, {"message": "flagged", "metadata": {"reasons": ["x"]}}, "filtered"),
        (400, {"message": "content policy"}, "filtered"),
        (400, {"message": "bad schema"}, "model_error"),
        (400, {"code": "context_length_exceeded", "message": "too long"}, "context_exceeded"),
    ],
)
async def test_what_may_concern_one_row_ends_that_row_alone(
    chat: Chat, status: int, error: dict[str, Any], error_class: str
) -> None:
    chat.endpoint.set_rules([{"prompt": "bad", "status": status, "error": error}])
    model = chat.open()
    ended = await failing(model, asking(prompt="bad"))
    assert (ended.error_class, ended.retryable, chat.endpoint.stats.requests) == (error_class, False, 1)
    assert (await model.reply(asking(prompt="good"))).content == "done: good"


async def test_trim_context_shortens_old_results_and_says_so(chat: Chat) -> None:
    too_long = {"status": 400, "error": {"code": "context_length_exceeded", "message": "too long"}}
    chat.endpoint.set_rules([{"has": "x" * 2500, **too_long}])
    results = [Message(role="tool", content="x" * 3000, tool_call_id=str(n)) for n in range(3)]
    results += [Message(role="tool", content="short", tool_call_id=str(n)) for n in range(3, 5)]
    model = chat.open(trim_context=True)
    request = asking(*results)
    reply = await model.reply(request)
    assert (reply.context_trimmed, reply.spend.requests) == (True, 3)
    assert "[1000 characters left out]" in chat.endpoint.stats.bodies[-1]["messages"][1]["content"]
    assert (await model.reply(request)).spend.requests == 1, "the conversation stays trimmed"
    assert not (await model.reply(asking())).context_trimmed


async def test_a_context_that_no_trimming_mends_ends_the_row(chat: Chat) -> None:
    chat.endpoint.set_rules([{"status": 413}])
    ended = await failing(chat.open(trim_context=True))
    assert (ended.reason, ended.spend.requests) == ("context_exceeded", 4)


# --- the endpoint as a process


def test_the_endpoint_runs_as_a_process() -> None:
    with EndpointProcess([{"status": 404}]) as endpoint:
        assert endpoint.url.startswith("http://127.0.0.1:")
        endpoint.set_rules([])
        assert endpoint.stats()["requests"] == 0
