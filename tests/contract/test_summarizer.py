"""Summaries from a model behind HTTP, a real server on loopback, and from a script."""

import asyncio
import json
import random
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from agent.errors import ModelError, RunStopped
from agent.models.options import RequestOptions
from agent.models.providers import API_KEY_VARIABLE
from agent.types import NO_SPEND, Spend, Usage
from compression.summarizer import FAILURES, Summarizer, Summary, SummaryLimits, summarizer_spec
from compression.types import Ask, Policy, RowMetrics
from tests.contract.environments import eventually
from tests.endpoint import Endpoint
from tools.errors import UsageProblem

GOOD = {"content": "They listed the files."}
HELD = {"hold": True, "message": GOOD}  # until other rules are set
KEY = "sk-0123456789abcdef"


class Open:
    """Opens summarizers that are closed at the end of a test."""

    def __init__(self, endpoint: Endpoint, stack: AsyncExitStack) -> None:
        self.endpoint = endpoint
        self._stack = stack

    async def __call__(
        self,
        *rules: dict[str, Any],
        model: str = "m",
        base_url: str = "",
        options: RequestOptions | None = None,
        environ: Mapping[str, str] | None = None,
        api_key_env: str = "",
        spent: Spend = NO_SPEND,
        **limits: Any,
    ) -> Summarizer:
        self.endpoint.set_rules([*rules, {"message": GOOD}])
        given = environ or {}
        spec = summarizer_spec(
            model,
            Policy(summary_target_tokens=500),
            options or RequestOptions(temperature=0.3),
            provider="custom",
            base_url=base_url or self.endpoint.url,
            api_key=given.get(API_KEY_VARIABLE, ""),
            api_key_env=api_key_env,
            environ=given,
        )
        made = SummaryLimits(**{"retry_delay": 0.01, **limits})
        summarizer = Summarizer(spec, made, given, spent=spent, rng=random.Random(1))
        return await self._stack.enter_async_context(summarizer)


@pytest.fixture
async def opened() -> AsyncIterator[Open]:
    async with Endpoint() as endpoint, AsyncExitStack() as stack:
        yield Open(endpoint, stack)


def asking(prompt: str = "Summarize this.") -> Ask:
    return Ask(prompt=prompt, prompt_tokens=4, max_tokens=1000, metrics=RowMetrics())


async def summary(summarizer: Summarizer, prompt: str = "Summarize this.", remaining: float = 30.0) -> Summary:
    return await summarizer.summarize(asking(prompt), row_key="id:1", remaining=remaining)


async def failing(summarizer: Summarizer, prompt: str = "Summarize this.", remaining: float = 30.0) -> ModelError:
    with pytest.raises(ModelError) as error:
        await summary(summarizer, prompt, remaining)
    return error.value


async def stopping(summarizer: Summarizer) -> RunStopped:
    with pytest.raises(RunStopped) as stopped:
        await summary(summarizer)
    return stopped.value


async def one_of_two_asked(opened: Open, summarizer: Summarizer) -> list[asyncio.Task[Summary]]:
    """Two rows at once, of which one is with the endpoint."""
    running = [asyncio.create_task(summary(summarizer, f"row {number}")) for number in range(2)]

    async def is_asked() -> bool:
        return opened.endpoint.stats.in_flight == 1

    assert await eventually(is_asked)
    return running


async def ends_of(summarizer: Summarizer, rows: int) -> list[Summary | BaseException]:
    """Of so many rows at once."""
    return await asyncio.gather(*(summary(summarizer, f"row {n}") for n in range(rows)), return_exceptions=True)


# --- what is sent, what comes back


async def test_one_call_is_one_summary(opened: Open) -> None:
    summarizer = await opened()
    made = await summary(summarizer)
    assert made.text == "[CONTEXT SUMMARY]: They listed the files."
    assert made.model == "m"
    usage = Usage(input_tokens=100, output_tokens=10, total_tokens=110)
    assert made.spend == summarizer.spent == Spend(requests=1, usage=usage)
    (body,) = opened.endpoint.stats.bodies
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "Summarize this."}],
        "max_tokens": 1000,
        "temperature": 0.3,
    }


async def test_a_model_that_sets_its_temperature_itself_is_sent_none(opened: Open) -> None:
    await summary(await opened(model="moonshotai/Kimi-K2-Thinking"))
    assert "temperature" not in opened.endpoint.stats.bodies[0]


async def test_thoughts_are_no_part_of_a_summary(opened: Open) -> None:
    reply = {"content": "<think>\nWhat do they want?\n</think>\n\n[CONTEXT SUMMARY]: They\ud800 slept."}
    made = await summary(await opened({"message": reply}))
    assert made.text == "[CONTEXT SUMMARY]: They\ufffd slept."


async def test_a_script_gives_summaries(opened: Open, tmp_path: Path) -> None:
    path = tmp_path / "script.yaml"
    rules = [{"prompt": "(?s)row 1.*broken", "turns": [{"error": {"status": 500}}]}]
    usage = {"input_tokens": 20, "output_tokens": 5}
    path.write_text(json.dumps({"rules": rules, "default": {"turns": [{"content": "All of it.", "usage": usage}]}}))
    summarizer = await opened(model=f"scripted:{path}", options=RequestOptions(price_in=1.0, price_out=2.0))
    for _ in range(2):
        made = await summary(summarizer, "row 2\nis whole")
        assert (made.text, made.model) == ("[CONTEXT SUMMARY]: All of it.", "scripted")
        assert made.spend.cost_usd == pytest.approx(30e-6)
    assert (await failing(summarizer, "row 1\nis broken")).spend.requests == 3


async def test_a_script_that_is_none_is_found_at_once(opened: Open, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="cannot read the script"):
        await opened(model=f"scripted:{tmp_path}/none.yaml")


# --- keys and prices


async def test_the_key_of_a_named_variable(opened: Open) -> None:
    await summary(await opened(environ={"MY_KEY": KEY, "OPENAI_API_KEY": "sk-other-key-0000"}, api_key_env="MY_KEY"))
    await summary(await opened(environ={API_KEY_VARIABLE: "sk-as-a-setting"}))
    assert dict(opened.endpoint.stats.keys) == {KEY: 1, "sk-as-a-setting": 1}


async def test_a_named_variable_without_a_key(opened: Open) -> None:
    for environ in ({}, {"MY_KEY": " "}):
        with pytest.raises(UsageProblem, match="api_key_env: MY_KEY is not set"):
            await opened(environ=environ, api_key_env="MY_KEY")


async def test_a_budget_needs_a_price(opened: Open) -> None:
    with pytest.raises(UsageProblem, match="the price of m is not known"):
        await opened(max_cost=1.0)


async def test_no_key_is_in_a_summary_or_an_error(opened: Open) -> None:
    echo = {"message": {"content": f"The key was {KEY}."}, "times": 1}
    refused = {"status": 400, "error": {"message": f"bad request of {KEY}"}, "times": 1}
    denied = {"status": 401, "error": {"message": f"Incorrect API key provided: {KEY}"}}
    summarizer = await opened(echo, refused, denied, environ={"MY_KEY": KEY}, api_key_env="MY_KEY", tries=1)
    assert (await summary(summarizer)).text == "[CONTEXT SUMMARY]: The key was [REDACTED:MY_KEY]."
    errors = [
        str(await failing(summarizer)),
        str(await stopping(await opened(denied, environ={API_KEY_VARIABLE: KEY}))),
    ]
    assert "bad request of [REDACTED:MY_KEY]" in errors[0]
    assert f"provided: [REDACTED:{API_KEY_VARIABLE}]" in errors[1]


# --- replies that are no summary


USUAL = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
CUT = {**USUAL, "completion_tokens_details": {"reasoning_tokens": 8}}
CALL = [{"id": "c", "type": "function", "function": {"name": "terminal", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("rule", "reason", "told", "requests"),
    [
        ({"status": 500}, "server_error", "status 500", 3),
        ({"status": 503, "raw": "<html>no server</html>"}, "server_error", "no server", 3),
        ({"body": {"choices": []}}, "no_choices", "no choices", 3),
        ({"raw": "{"}, "invalid_body", "cut off", 3),
        ({"raw": ""}, "invalid_body", "empty", 3),
        ({"message": {"content": ""}}, "empty", "the summary is empty", 3),
        ({"message": {"content": None}}, "empty", "the summary is empty", 3),
        ({"message": {"content": " \n\t "}}, "empty", "the summary is empty", 3),
        ({"message": {"content": "[CONTEXT SUMMARY]:"}}, "empty", "the summary is empty", 3),
        ({"message": {"content": "<think>\nhm\n</think>"}}, "empty", "the summary is empty", 3),
        ({"message": {"content": "x", "tool_calls": CALL}}, "tool_calls", "called a tool", 3),
        ({"finish_reason": "length", "usage": CUT}, "truncated", "after 10 tokens, 8 of them reasoning", 3),
        ({"drop": "body"}, "connection_lost", "", 3),
        ({"finish_reason": "content_filter"}, "filtered", "content filter", 1),
        ({"message": {"refusal": "I\n cannot."}}, "refusal", "the model refused: I cannot.", 1),
        ({"status": 400, "error": {"message": "odd"}}, "bad_request", "odd", 1),
        (
            {"status": 400, "error": {"message": "too long", "code": "context_length_exceeded"}},
            "context_exceeded",
            "too long",
            1,
        ),
    ],
)
async def test_what_is_no_summary_is_an_error_after_its_tries(
    opened: Open, rule: dict[str, Any], reason: str, told: str, requests: int
) -> None:
    summarizer = await opened(rule)
    error = await failing(summarizer)
    assert error.reason == reason
    assert told in str(error)
    assert error.spend.requests == summarizer.spent.requests == opened.endpoint.stats.requests == requests
    assert summarizer.stopped is None


async def test_a_further_try_mends_it_and_all_tries_are_paid(opened: Open) -> None:
    empty = {"message": {"content": ""}, "times": 1}
    summarizer = await opened({"status": 500, "times": 1}, empty, options=RequestOptions(price_in=1.0, price_out=1.0))
    made = await summary(summarizer)
    assert made.text == "[CONTEXT SUMMARY]: They listed the files."
    usage = Usage(input_tokens=200, output_tokens=20, total_tokens=220)
    assert (made.spend.requests, made.spend.usage) == (3, usage)
    assert made.spend.cost_usd == summarizer.spent.cost_usd == pytest.approx(220e-6)


async def test_tries_wait_longer_each_time(opened: Open) -> None:
    summarizer = await opened({"status": 500, "times": 2}, retry_delay=0.2)
    await summary(summarizer)
    first, second, third = opened.endpoint.stats.times
    assert second - first >= 0.1
    assert third - second >= 0.2


async def test_the_wait_that_a_failure_asks_for(opened: Open) -> None:
    summarizer = await opened({"status": 503, "headers": {"retry-after": "0.3"}, "times": 1})
    await summary(summarizer)
    first, second = opened.endpoint.stats.times
    assert second - first >= 0.3


async def test_a_wait_longer_than_the_rows_time_ends_it(opened: Open) -> None:
    summarizer = await opened({"status": 503, "headers": {"retry-after": "100"}})
    error = await failing(summarizer, remaining=20)
    assert (error.reason, opened.endpoint.stats.requests) == ("server_error", 1)


# --- time and limits


async def test_a_rate_limit_is_waited_for_and_takes_no_row_time(opened: Open) -> None:
    summarizer = await opened({"status": 429, "headers": {"retry-after": "1.2"}, "times": 1}, tries=1)
    began = time.monotonic()
    made = await summary(summarizer, remaining=1.0)
    assert time.monotonic() - began >= 1.2
    assert made.spend.requests == 2


async def test_a_row_ends_with_its_time(opened: Open) -> None:
    summarizer = await opened({"prompt": "row 1", "status": 500, "times": 1}, {"prompt": "row 1", "stall": True})
    began = time.monotonic()
    error, made = await asyncio.gather(failing(summarizer, "row 1", remaining=0.4), summary(summarizer, "row 2"))
    assert time.monotonic() - began < 30
    assert (error.reason, str(error)) == ("timeout", "no summary within the row's time")
    assert (error.spend.requests, made.spend.requests, summarizer.spent.requests) == (2, 1, 3)


async def test_a_row_without_time_asks_nothing(opened: Open) -> None:
    error = await failing(await opened(), remaining=0.0)
    assert (error.reason, opened.endpoint.stats.requests) == ("timeout", 0)


async def test_a_time_that_ends_between_two_tries_counts_each_once(opened: Open) -> None:
    summarizer = await opened({"status": 500}, retry_delay=0.15, tries=1000)
    error = await failing(summarizer, remaining=0.5)
    assert error.spend.requests == summarizer.spent.requests == opened.endpoint.stats.requests > 1


async def test_so_many_requests_at_once(opened: Open) -> None:
    opened.endpoint.latency = 0.05
    summarizer = await opened(concurrency=3)
    ends = await ends_of(summarizer, 12)
    assert all(isinstance(end, Summary) for end in ends)
    assert opened.endpoint.stats.peak == 3


# --- nothing further is to be had


async def test_a_key_that_is_refused_stops_after_the_requests_in_flight(opened: Open) -> None:
    opened.endpoint.latency = 0.05
    summarizer = await opened({"status": 401}, environ={"MY_KEY": KEY}, api_key_env="MY_KEY", concurrency=4)
    ends = await ends_of(summarizer, 30)
    assert {type(end) for end in ends} == {RunStopped}
    assert {end.reason for end in ends if isinstance(end, RunStopped)} == {"auth"}
    requests = opened.endpoint.stats.requests
    assert requests <= 4
    assert sum(end.spend.requests for end in ends if isinstance(end, RunStopped)) == requests
    assert (await stopping(summarizer)).reason == "auth"
    assert opened.endpoint.stats.requests == requests
    assert summarizer.stopped is not None


async def test_nobody_listens(opened: Open) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        summarizer = await opened(base_url=f"http://127.0.0.1:{taken.getsockname()[1]}/v1")
        began = time.monotonic()
        ends = await ends_of(summarizer, 5)
    assert time.monotonic() - began < 10
    assert {end.reason for end in ends if isinstance(end, RunStopped)} == {"unreachable"}
    assert (await stopping(summarizer)).reason == "unreachable"


async def test_a_summarizer_that_only_fails_is_asked_no_more(opened: Open) -> None:
    summarizer = await opened({"status": 502}, tries=2)
    ends = [end for _ in range(3) for end in await ends_of(summarizer, 10)]
    assert [type(end) for end in ends] == [ModelError] * FAILURES + [RunStopped] * 10
    assert opened.endpoint.stats.requests == 2 * FAILURES
    stopped = summarizer.stopped
    assert stopped is not None
    assert stopped.reason == "row_faults"
    assert "status 502" in stopped.message


async def test_a_summary_between_failures_lets_it_go_on(opened: Open) -> None:
    summarizer = await opened({"prompt": "row", "status": 502}, tries=1)
    for _ in range(3):
        await ends_of(summarizer, FAILURES - 1)
        await summary(summarizer)
        summarizer.judged("")
    assert summarizer.stopped is None


PRICED = RequestOptions(price_in=0.0, price_out=1000.0)  # 1 USD at the most for each of `asking`, 0.01 in fact


async def test_a_try_is_made_only_if_the_dearest_reply_would_be_within_the_budget(opened: Open) -> None:
    summarizer = await opened(options=PRICED, max_cost=1.015)
    ends = await ends_of(summarizer, 10)
    assert [type(end) for end in ends] == [Summary] * 2 + [RunStopped] * 8
    assert (await stopping(summarizer)).reason == "budget"
    assert opened.endpoint.stats.requests == 2
    assert summarizer.spent.cost_usd == pytest.approx(0.02)


async def test_the_prompt_counts_in_the_budget(opened: Open) -> None:
    summarizer = await opened(options=RequestOptions(price_in=1000.0, price_out=0.0), max_cost=0.0039)
    assert (await stopping(summarizer)).reason == "budget"
    assert opened.endpoint.stats.requests == 0


@pytest.mark.parametrize("limits", [{"options": PRICED, "max_cost": 2.9}, {"max_total_tokens": 2500}])
async def test_what_is_under_way_counts_as_the_dearest_it_can_be(limits: dict[str, Any], opened: Open) -> None:
    """Those that find no room wait, and their rows' time stands still."""
    opened.endpoint.latency = 0.05
    summarizer = await opened(**limits)
    ends = await asyncio.gather(*(summary(summarizer, f"row {n}", remaining=0.2) for n in range(12)))
    assert all(isinstance(end, Summary) for end in ends)
    assert opened.endpoint.stats.peak == 2


async def test_dear_replies_never_go_past_the_budget(opened: Open) -> None:
    usage = {"prompt_tokens": 0, "completion_tokens": 1000, "total_tokens": 1000}
    opened.endpoint.latency = 0.02
    summarizer = await opened({"message": GOOD, "usage": usage}, options=PRICED, max_cost=3.5)
    ends = await ends_of(summarizer, 12)
    assert [type(end) for end in ends] == [Summary] * 3 + [RunStopped] * 9
    assert summarizer.spent.cost_usd == pytest.approx(3.0)


@pytest.mark.parametrize("more", [1.3, 1.9])
async def test_a_summarizer_that_counts_more_than_we_do_stays_within_the_budget(more: float, opened: Open) -> None:
    """Prompts of 1,000 tokens by our count, and calls that could all begin at once."""
    tokens = int(1000 * more)
    usage = {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
    opened.endpoint.latency = 0.05
    priced = RequestOptions(price_in=1000.0, price_out=0.0)
    summarizer = await opened({"message": GOOD, "usage": usage}, options=priced, max_cost=20 * more)
    ask = Ask(prompt="Summarize this.", prompt_tokens=1000, max_tokens=10, metrics=RowMetrics())
    calls = [summarizer.summarize(ask, row_key=f"id:{number}", remaining=30.0) for number in range(40)]
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert summarizer.spent.cost_usd <= 20 * more
    made = [end for end in ends if isinstance(end, Summary)]
    assert 17 <= len(made) == opened.endpoint.stats.requests < 20
    assert opened.endpoint.stats.peak > 5


async def test_what_is_not_reported_counts_in_the_budget(opened: Open) -> None:
    summarizer = await opened({"message": GOOD, "usage": None}, options=RequestOptions(price_in=1.0, price_out=1.0))
    made = await summary(summarizer)
    assert (made.spend.usage, made.spend.cost_usd, made.spend.unreported.replies) == (Usage(), 0.0, 1)
    assert (
        made.spend.unreported.input_tokens == asking("").prompt_tokens
    )  # counted, not guessed from the request's length
    later = await opened(max_total_tokens=1000 + made.spend.all_tokens, spent=made.spend)
    assert (await stopping(later)).reason == "budget"


async def test_a_further_try_needs_room_too(opened: Open) -> None:
    empty = {"message": {"content": ""}}
    summarizer = await opened(empty, options=PRICED, max_cost=1.005)
    assert (await stopping(summarizer)).spend.requests == opened.endpoint.stats.requests == 1


async def test_what_earlier_invocations_spent_counts_in_the_budget(opened: Open) -> None:
    summarizer = await opened(max_total_tokens=1200, spent=Spend(requests=7, usage=Usage(total_tokens=770)))
    assert (await stopping(summarizer)).reason == "budget"
    assert opened.endpoint.stats.requests == 0
    assert summarizer.spent.requests == 7


async def test_those_that_wait_for_room_end_with_the_run(opened: Open) -> None:
    summarizer = await opened(HELD, max_total_tokens=1100)
    running = await one_of_two_asked(opened, summarizer)
    summarizer.stop("interrupt", "interrupted")
    with pytest.raises(RunStopped, match="interrupted"):
        await running[1]
    assert not running[0].done()
    opened.endpoint.set_rules([])
    assert (await running[0]).text


# --- answers that are refused by whoever asked


async def test_tries_that_refused_answers_took_are_not_made_again(opened: Open) -> None:
    summarizer = await opened({"status": 500}, tries=3)
    with pytest.raises(ModelError):
        await summarizer.summarize(asking(), row_key="id:1", remaining=30.0, tried=2)
    assert opened.endpoint.stats.requests == 1


async def test_a_summary_says_how_many_tries_it_took(opened: Open) -> None:
    limited = {"status": 429, "headers": {"retry-after": "0"}, "times": 1}
    made = await summary(await opened(limited, {"status": 500, "times": 1}))
    assert (made.tries, made.spend.requests) == (2, 3)


async def test_answers_that_are_refused_stop_it_as_failures_do(opened: Open) -> None:
    summarizer = await opened({"prompt": "broken", "status": 502}, tries=1)
    for _ in range(FAILURES - 1):
        await summary(summarizer)
        summarizer.judged("tool tags")
    summarizer.judged("")
    for _ in range(FAILURES - 1):
        await summary(summarizer)
        summarizer.judged("tool tags")
    assert summarizer.stopped is None
    await failing(summarizer, "broken")
    assert summarizer.stopped is not None
    assert summarizer.stopped.reason == "row_faults"


async def test_an_interrupt_lets_calls_end_and_begins_none(opened: Open) -> None:
    summarizer = await opened(HELD, concurrency=1)
    running = await one_of_two_asked(opened, summarizer)
    summarizer.stop("interrupt", "interrupted")
    opened.endpoint.set_rules([])
    ends = await asyncio.gather(*running, return_exceptions=True)
    assert [type(end) for end in ends] == [Summary, RunStopped]
    assert opened.endpoint.stats.requests == 1
