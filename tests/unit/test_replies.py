"""Bodies of endpoints: what becomes of them, and what failures mean."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.clock import RowClock
from agent.models.base import ModelRequest
from agent.models.calling import CallFailed
from agent.models.failures import http_failure, retry_after
from agent.models.options import RequestOptions
from agent.models.providers import Quirks, Target
from agent.models.replies import parse_reply, parse_usage, split_inline
from agent.models.wire import request_body, trimmed, wire_messages
from agent.types import Message, RawCall, Reply, ToolCall, Usage
from tools.base import ToolSpec

TAGS = ["think", "thinking", "thought", "reasoning", "REASONING_SCRATCHPAD", "Think"]


def parse(body: Any) -> Reply:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse_reply(data, lambda usage: usage.output_tokens / 1000)


def said(message: Any, finish_reason: str | None = "stop", **extra: Any) -> dict[str, Any]:
    return {"model": "m", "choices": [{"message": message, "finish_reason": finish_reason}], **extra}


def failed(body: Any) -> CallFailed:
    with pytest.raises(CallFailed) as failure:
        parse(body)
    return failure.value


# --- malformed bodies


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"choices": []}, "no_choices"),
        ({"choices": None}, "no_choices"),
        ({}, "no_choices"),
        ({"choices": [None]}, "no_choices"),
        ({"choices": "x"}, "no_choices"),
        (said(None), "null_message"),
        ({"choices": [{}]}, "null_message"),
        ({"error": {"message": "upstream"}}, "error_body"),
        ({"error": "upstream"}, "error_body"),
        ({"error": {"message": "bad gateway", "code": 502}}, "error_body"),
        (said({"content": "half"}, "error"), "error_body"),
        ({"choices": [{"message": {"content": ""}, "error": {"message": "lost"}}]}, "error_body"),
        (said({"content": None}, "malformed_function_call"), "malformed_function_call"),
        (said(None, "MALFORMED_FUNCTION_CALL"), "malformed_function_call"),
        (
            {"choices": [{"message": {}, "finish_reason": "stop", "native_finish_reason": "MALFORMED_FUNCTION_CALL"}]},
            "malformed_function_call",
        ),
        (b"", "invalid_body"),
        (b'{"choices": [{"mess', "invalid_body"),
        (b"<html>", "invalid_body"),
        (b"[]", "invalid_body"),
        (b"[" * 100_000, "invalid_body"),
    ],
)
def test_malformed_bodies_are_named_and_may_be_tried_again(body: Any, reason: str) -> None:
    failure = failed(body)
    assert (failure.verdict.kind, failure.reason) == ("transient", reason)
    assert failure.verdict.spend.requests == 1


def test_the_usage_of_a_malformed_reply_is_counted() -> None:
    usage = {"prompt_tokens": 100_000, "completion_tokens": 1000}
    failure = failed({"choices": [], "usage": usage})
    assert failure.verdict.spend.usage.total_tokens == failure.verdict.tokens == 101_000
    assert failure.verdict.spend.cost_usd == 1.0


def test_an_error_body_with_a_status_is_believed() -> None:
    assert failed({"error": {"code": 429, "message": "slow"}}).verdict.kind == "rate_limited"
    assert failed({"error": {"code": 402, "message": "pay"}}).verdict.reason == "quota"
    assert failed({"error": {"code": "context_length_exceeded"}}).reason == "context_exceeded"


@pytest.mark.parametrize(
    "usage", [None, {}, {"prompt_tokens": None}, {"prompt_tokens": "7", "total_tokens": -1}, 5, []]
)
def test_usage_that_is_absent_or_odd_is_no_error(usage: Any) -> None:
    assert parse(said({"content": "hi"}, usage=usage)).spend.usage == Usage()


# --- content, calls


def test_a_plain_reply() -> None:
    reply = parse(said({"role": "assistant", "content": " hi\n"}, usage={"prompt_tokens": 3, "completion_tokens": 2}))
    assert (reply.content, reply.finish_reason, reply.model, reply.wire) == (" hi\n", "stop", "m", {})
    assert reply.spend.usage == Usage(input_tokens=3, output_tokens=2, total_tokens=5)


def test_a_byte_order_mark_is_no_part_of_a_reply() -> None:
    body = json.dumps(said({"content": "hi\ufeff"}), ensure_ascii=False).encode("utf-8-sig")
    assert parse(body).content == "hi\ufeff"


def test_content_parts_are_joined_without_a_separator() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "output_text", "text": "c"}, None, 7, {"type": "image_url"}]
    assert parse(said({"content": parts})).content == "abc"


def test_tool_calls_in_all_their_shapes() -> None:
    calls = [
        {"id": "x", "type": "function", "function": {"name": "a", "arguments": "{}"}},
        {"id": None, "function": {"name": "b", "arguments": {"k": 1}}},
        "no object",
        {"function": None},
        {},
    ]
    assert parse(said({"content": None, "tool_calls": calls})).tool_calls == (
        RawCall(id="x", name="a", arguments="{}"),
        RawCall(name="b", arguments={"k": 1}),
        RawCall(),
        RawCall(),
    )
    legacy = parse(said({"content": None, "function_call": {"name": "a", "arguments": "{}"}}, "function_call"))
    assert (legacy.tool_calls, legacy.finish_reason) == ((RawCall(name="a", arguments="{}"),), "tool_calls")
    assert parse(said({"content": "x", "tool_calls": None})).tool_calls == ()


def test_a_refusal_is_the_text() -> None:
    assert parse(said({"content": None, "refusal": "No."})).refusal
    assert parse(said({"content": None, "refusal": "No."})).content == "No."
    assert parse(said({"content": [{"type": "refusal", "refusal": "No."}]})).refusal
    assert not parse(said({"content": "Yes.", "refusal": None})).refusal


def test_no_surrogate_no_nul_and_no_byte_that_is_no_utf8_gets_in() -> None:
    body = rb'{"choices":[{"message":{"content":"a\ud800b\u0000c","reasoning":"\udfff","tool_calls":'
    body += rb'[{"id":"\ud800","function":{"name":"\ud800","arguments":"\ud800"}}]}}]}'
    reply = parse(body)
    assert (reply.content, reply.reasoning) == ("a\ufffdb\ufffdc", "\ufffd")
    assert reply.tool_calls == (RawCall(id="\ufffd", name="\ufffd", arguments="\ufffd"),)
    assert json.dumps(reply.wire, ensure_ascii=False).encode()
    assert parse(b'{"choices":[{"message":{"content":"a\xffb"}}]}').content == "a\ufffdb"


# --- reasoning


@pytest.mark.parametrize(
    "message",
    [
        {"reasoning": "why"},
        {"reasoning_content": "why\n"},
        {"reasoning": "why", "reasoning_content": " why"},
        {"reasoning": "why", "reasoning_details": [{"type": "reasoning.text", "text": "why"}]},
        {"reasoning": "w hy", "reasoning_details": [{"text": "w"}, {"text": "hy"}]},
        {"reasoning_details": [{"summary": "why", "text": "not taken"}]},
        {"reasoning_details": [{"thinking": "why"}, {"data": "encrypted"}]},
        {"reasoning_details": [{"content": [{"text": "wh"}, {"text": "y"}]}]},
        {"content": [{"type": "thinking", "thinking": "why"}, {"type": "text", "text": "so"}]},
        {
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "why"}]},
                {"type": "text", "text": "so"},
            ]
        },
        {"reasoning": "why", "content": "<think>why</think>so"},
    ],
)
def test_reasoning_is_taken_once_wherever_it_stands(message: dict[str, Any]) -> None:
    reply = parse(said({"content": "so", **message}))
    assert reply.reasoning.replace("w hy", "why") == "why"
    assert reply.content == "so"


def test_different_reasoning_of_several_fields_is_all_kept() -> None:
    message = {"content": "", "reasoning": "one", "reasoning_details": [{"text": "two"}, {"text": "three"}]}
    assert parse(said(message)).reasoning == "one\n\ntwo\n\nthree"


def test_pieces_of_one_field_are_not_weighed_against_each_other() -> None:
    details = [{"text": text} for text in ("Look into main.py", "main.py", "Yes.", "Yes.")]
    whole = "Look into main.py\n\nmain.py\n\nYes.\n\nYes."
    assert parse(said({"content": "", "reasoning_details": details})).reasoning == whole
    assert parse(said({"content": "", "reasoning": "main.py", "reasoning_details": details})).reasoning == whole
    overlapping = parse(said({"content": "", "reasoning": "Yes.", "reasoning_details": [{"text": "Yes. No."}]}))
    assert overlapping.reasoning == "Yes. No."
    thoughts = "<think>Look at it</think>so<think>it</think>"
    assert parse(said({"content": thoughts})).reasoning == "Look at it\n\nit"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<think>why</think>so", "so"),
        (" <think>\nwh y\n</think>\nso", "so"),
        ("why</think>so", "so"),
        ("<think></think>so", "so"),
        ("<think>other</think>so", "<think>other</think>so"),
        ("Use <think>why</think> so", "Use <think>why</think> so"),
        ("<think>why", "<think>why"),
    ],
)
def test_beside_a_reasoning_field_tags_are_text_unless_they_repeat_it(text: str, content: str) -> None:
    for message in ({"reasoning": "why"}, {"reasoning_details": [{"text": "why"}]}):
        reply = parse(said({"content": text, **message}))
        assert (reply.content, reply.reasoning) == (content, "why")


@pytest.mark.parametrize("tag", TAGS)
def test_inline_tags(tag: str) -> None:
    assert split_inline(f"<{tag}>\nmulti\nline\n</{tag}>\nAnswer") == ("Answer", ["\nmulti\nline\n"])
    assert split_inline(f"before</{tag}>after") == ("after", ["before"])
    assert split_inline(f" <{tag}>cut") == ("", ["cut"])
    assert split_inline(f"text <{tag}>cut") == (f"text <{tag}>cut", [])
    assert split_inline(f"a <{tag}>b</{tag}> c <{tag}>d</{tag}>") == ("a  c", ["b", "d"])
    assert split_inline(f"<{tag}>a<{tag}>b</{tag}>c</{tag}>d") == ("d", ["abc"])


def test_quoted_tags_are_text() -> None:
    text = "Close it with `</think>` and open it with `<think>`."
    assert split_inline(text) == (text, [])


@given(st.lists(st.sampled_from(["<think>", "</think>", "<Thought>", "</thought>", "`", "a", "b", " ", "\n", "<"])))
def test_no_text_is_ever_lost(pieces: list[str]) -> None:
    text = "".join(pieces)
    content, thought = split_inline(text)
    together = content + "".join(thought)
    assert sorted(c for c in together if c in "ab`") == sorted(c for c in text if c in "ab`")
    assert split_inline(content)[0] == content or "<" in content


def test_what_must_go_back_is_kept_as_it_came() -> None:
    details = [{"type": "reasoning.encrypted", "data": "x", "signature": "s"}]
    message = {
        "content": None,
        "reasoning": "r",
        "reasoning_details": details,
        "tool_calls": [{"id": "1", "function": {"name": "a"}, "extra_content": {"google": {"thought_signature": "t"}}}],
    }
    assert parse(said(message)).wire == {
        "reasoning": "r",
        "reasoning_details": details,
        "tool_calls": [{"extra_content": {"google": {"thought_signature": "t"}}}],
    }


# --- usage


@pytest.mark.parametrize(
    ("told", "usage"),
    [
        (
            {
                "prompt_tokens": 100,
                "completion_tokens": 20,
                "total_tokens": 120,
                "prompt_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 5},
                "completion_tokens_details": {"reasoning_tokens": 8},
            },
            (100, 20, 60, 5, 8, 120),
        ),
        (
            {"input_tokens": 10, "output_tokens": 20, "cache_read_input_tokens": 60, "cache_creation_input_tokens": 30},
            (100, 20, 60, 30, 0, 120),
        ),
        ({"prompt_tokens": 100, "completion_tokens": 20, "prompt_cache_hit_tokens": 60}, (100, 20, 60, 0, 0, 120)),
        ({"prompt_tokens": 100, "completion_tokens": 20, "cached_tokens": 60}, (100, 20, 60, 0, 0, 120)),
        ({"input_tokens": 1, "output_tokens_details": {"reasoning_tokens": 3}}, (1, 0, 0, 0, 3, 1)),
        ({"prompt_tokens": 1.0, "prompt_tokens_details": None, "completion_tokens": True}, (1, 0, 0, 0, 0, 1)),
    ],
)
def test_usage_in_all_spellings(told: dict[str, Any], usage: tuple[int, ...]) -> None:
    got = parse_usage(told)
    assert (
        got.input_tokens,
        got.output_tokens,
        got.cache_read_tokens,
        got.cache_write_tokens,
        got.reasoning_tokens,
        got.total_tokens,
    ) == usage


def test_the_endpoints_own_cost_beats_the_table_and_hidden_thinking_is_paid_as_output() -> None:
    assert parse(said({"content": "x"}, usage={"completion_tokens": 1000, "cost": 0.25})).spend.cost_usd == 0.25
    hidden = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 2100}
    reply = parse(said({"content": "x"}, usage=hidden))
    assert (reply.spend.cost_usd, reply.spend.usage.output_tokens) == (2.0, 10)


# --- failures


def http(status: int, error: Any = None, **headers: str) -> CallFailed:
    return http_failure(status, headers, json.dumps({"error": error or {}}).encode(), now=0.0)


VLLM = (
    "'max_tokens' is too large: 5000. This model's maximum context length is 8192 tokens and your request has 4000 "
    "input tokens"
)


@pytest.mark.parametrize(
    ("status", "error", "kind", "reason", "error_class"),
    [
        (401, {"message": "Incorrect API key"}, "condemned", "auth", "auth"),
        (402, {"message": "Payment required"}, "condemned", "quota", "quota"),
        (403, {"message": "Forbidden"}, "condemned", "auth", "auth"),
        (403, {"message": "flagged by moderation"}, "row_fault", "filtered", "filtered"),
        (403, {"message": "no", "metadata": {"reasons": ["hate"]}}, "row_fault", "filtered", "filtered"),
        (
            404,
            {"message": "The model `x` does not exist", "code": "model_not_found"},
            "condemned",
            "model",
            "model_error",
        ),
        (400, {"message": "x is not a valid model ID"}, "condemned", "model", "model_error"),
        (400, {"message": "Model Not Exist"}, "condemned", "model", "model_error"),
        (400, {"message": "API key not valid. Please pass a valid API key."}, "condemned", "auth", "auth"),
        (400, {"message": "Your credit balance is too low"}, "condemned", "quota", "quota"),
        (429, {"message": "slow down"}, "rate_limited", "rate_limited", "model_error"),
        (
            429,
            {"message": "You exceeded your current quota", "code": "insufficient_quota"},
            "condemned",
            "quota",
            "quota",
        ),
        (
            429,
            {"message": "You exceeded your current quota", "code": 429},
            "rate_limited",
            "rate_limited",
            "model_error",
        ),
        (
            400,
            {"message": "max_tokens is too large: 99. This model supports at most 16 completion tokens"},
            "condemned",
            "model",
            "model_error",
        ),
        (400, {"message": VLLM}, "row_fault", "context_exceeded", "context_exceeded"),
        (
            400,
            {
                "code": "context_length_exceeded",
                "message": "maximum context length is 8 tokens. However, you requested 9 (5 in the messages, 4 in the"
                " completion). Please reduce max_tokens",
            },
            "row_fault",
            "context_exceeded",
            "context_exceeded",
        ),
        (
            400,
            {"message": "prompt is too long: 9 tokens > 8 maximum"},
            "row_fault",
            "context_exceeded",
            "context_exceeded",
        ),
        (413, {}, "row_fault", "context_exceeded", "context_exceeded"),
        (400, {"code": "content_filter", "message": "policy"}, "row_fault", "filtered", "filtered"),
        (400, {"message": "messages[3].content is invalid"}, "row_fault", "bad_request", "model_error"),
        (422, {"message": "unprocessable"}, "row_fault", "bad_request", "model_error"),
        (500, {}, "transient", "server_error", "model_error"),
        (529, {"type": "overloaded_error"}, "transient", "server_error", "model_error"),
        (408, {}, "transient", "server_error", "model_error"),
    ],
)
def test_what_a_status_means(status: int, error: Any, kind: str, reason: str, error_class: str) -> None:
    failure = http(status, error)
    assert (failure.verdict.kind, failure.reason, failure.error_class) == (kind, reason, error_class)
    assert failure.retryable == (kind != "row_fault")


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"<html>\xff", b'"text"', b'[{"error": {"message": "m"}}]', b'{"detail": []}']
)
def test_any_error_body_is_read(body: bytes) -> None:
    assert http_failure(429, {}, body, 0.0).verdict.kind == "rate_limited"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": "2.5"}, 2.5),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:30 GMT"}, 20.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:01 GMT"}, 0.0),
        ({"retry-after": "-5"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": ""}, None),
        ({}, None),
    ],
)
def test_retry_after(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers, now=10.0) == seconds


def test_geminis_delay_stands_in_the_body() -> None:
    body = b'[{"error": {"code": 429, "details": [{"retryDelay": "13.5s"}]}}]'
    assert http_failure(429, {}, body, 0.0).verdict.retry_after == 13.5


# --- requests


def wire(*messages: Message, **quirks: Any) -> list[dict[str, Any]]:
    return list(wire_messages(messages, Quirks(**quirks)))


def test_messages_on_the_wire() -> None:
    call = ToolCall(id="c1", name="terminal", arguments={"command": "é"})
    assert wire(
        Message(role="system", content="s"),
        Message(role="user", content="u"),
        Message(role="assistant", tool_calls=(call,), wire={"reasoning_content": "r"}),
        Message(role="tool", content='{"output": "x"}', tool_call_id="c1", name="terminal"),
        Message(role="assistant", reasoning="only thought"),
        Message(role="assistant", content="a"),
    ) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "r",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "terminal", "arguments": '{"command":"é"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": '{"output": "x"}'},
        {"role": "assistant", "content": "a"},
    ]


def test_reasoning_is_not_replayed_where_the_endpoint_refuses_it() -> None:
    message = Message(role="assistant", content="a", wire={"reasoning": "r", "reasoning_details": [1]})
    assert wire(message) == [{"role": "assistant", "content": "a", "reasoning": "r", "reasoning_details": [1]}]
    assert wire(message, reasoning_replay=False) == [{"role": "assistant", "content": "a"}]


def test_a_thinking_content_list_goes_back_unless_the_text_is_another_by_now() -> None:
    parts = [{"type": "thinking", "thinking": "t"}, {"type": "text", "text": "a"}]
    assert wire(Message(role="assistant", content="a", wire={"content": parts}))[0]["content"] == parts
    assert wire(Message(role="assistant", content="ab", wire={"content": parts}))[0]["content"] == "ab"


def test_what_calls_carried_goes_back_by_position() -> None:
    calls = (ToolCall(id="1", name="a"), ToolCall(id="2", name="b"))
    sent = wire(Message(role="assistant", tool_calls=calls, wire={"tool_calls": [{"extra_content": 5}, {}]}))
    assert [call.get("extra_content") for call in sent[0]["tool_calls"]] == [5, None]


async def body_of(options: RequestOptions, quirks: Quirks | None = None, **request: Any) -> dict[str, Any]:
    target = Target(model="m", provider="custom", base_url="http://x", quirks=quirks or Quirks())
    asked = ModelRequest(messages=[Message(role="user", content="u")], clock=RowClock(5), **request)
    body: dict[str, Any] = json.loads(request_body(asked, target, options))
    assert body.pop("messages") == [{"role": "user", "content": "u"}]
    return body


async def test_only_what_is_set_is_sent() -> None:
    assert await body_of(RequestOptions()) == {"model": "m"}
    full = RequestOptions(max_tokens=5, temperature=0.0, top_p=0.5, providers_allowed=("a",), provider_sort="price")
    assert await body_of(full, seed=0) == {"model": "m", "max_tokens": 5, "temperature": 0.0, "top_p": 0.5, "seed": 0}
    openai = Quirks(max_tokens_field="max_completion_tokens")
    assert await body_of(RequestOptions(max_tokens=5), openai) == {"model": "m", "max_completion_tokens": 5}
    routed = await body_of(full, Quirks(routing=True, temperature=False))
    assert routed["provider"] == {"only": ["a"], "sort": "price"}
    assert "temperature" not in routed


async def test_tools_and_formats() -> None:
    spec = ToolSpec("t", "does", {"type": "object"})
    body = await body_of(RequestOptions(), tools=[spec], response_format={"type": "object"})
    assert body["tools"] == [
        {"type": "function", "function": {"name": "t", "description": "does", "parameters": {"type": "object"}}}
    ]
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}


@pytest.mark.parametrize(
    ("style", "effort", "off"),
    [
        ("effort", {"reasoning_effort": "low"}, {"reasoning_effort": "none"}),
        ("object", {"reasoning": {"effort": "low"}}, {"reasoning": {"enabled": False}}),
        ("thinking", {"thinking": {"type": "enabled"}}, {"thinking": {"type": "disabled"}}),
        ("budget", {"thinking": {"type": "enabled", "budget_tokens": 2048}}, {"thinking": {"type": "disabled"}}),
        (
            "template",
            {"chat_template_kwargs": {"enable_thinking": True}},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ),
        ("none", {}, {}),
    ],
)
async def test_reasoning_as_each_endpoint_wants_it(style: Any, effort: dict[str, Any], off: dict[str, Any]) -> None:
    quirks = Quirks(reasoning_style=style)
    assert await body_of(RequestOptions(reasoning_effort="low"), quirks) == {"model": "m", **effort}
    assert await body_of(RequestOptions(reasoning_disabled=True), quirks) == {"model": "m", **off}


def test_old_tool_results_are_shortened_newest_last() -> None:
    messages = [Message(role="tool", content="x" * 10_000) for _ in range(4)] + [
        Message(role="user", content="y" * 10_000)
    ]
    assert trimmed(messages, 0) == messages
    once = trimmed(messages, 1)
    assert [len(message.content) < 9000 for message in once] == [True, True, False, False, False]
    assert "[2000 characters left out]" in once[0].content
    assert [len(message.content) < 600 for message in trimmed(messages, 3)] == [True] * 4 + [False]
