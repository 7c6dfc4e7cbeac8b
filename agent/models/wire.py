"""A request's body, in the words of an endpoint. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from agent.models.base import ModelRequest
from agent.models.options import RequestOptions
from agent.models.providers import Quirks, Target
from agent.models.replies import REASONING_FIELDS, content_text
from agent.text import json_text
from agent.types import Message, ToolCall
from tools.base import ToolSpec

THINKING_BUDGET = {
    "minimal": 1024,
    "low": 2048,
    "medium": 8192,
    "high": 16384,
    "xhigh": 32000,
    "max": 64000,
    "ultra": 64000,
}
"""Tokens of thinking that an effort means to an endpoint that wants a number."""

TRIM_LEVELS = (8000, 2000, 500)
"""Characters that old tool results keep in requests that did not fit, one step after the other."""
_NEWEST_KEPT = 2  # tool results that only the last step shortens

CHARACTERS_PER_TOKEN = 4
TOKENS_OF_A_PICTURE = 1000
"""What a request's size is guessed by where nothing better is known."""


def request_body(request: ModelRequest, target: Target, options: RequestOptions, trim: int = 0) -> bytes:
    """The JSON of a chat completion request. `trim`: how many steps of TRIM_LEVELS to take."""
    body: dict[str, Any] = {
        "model": target.model,
        "messages": list(wire_messages(trimmed(request.messages, trim), target.quirks)),
    }
    if request.tools:
        body["tools"] = [_tool(spec) for spec in request.tools]
    body.update(_sampling(request, target.quirks, options))
    body.update(_reasoning(target.quirks, options))
    if request.response_format is not None:
        schema = {"name": "answer", "schema": request.response_format}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if target.quirks.routing and (routing := _routing(options)):
        body["provider"] = routing
    return msgspec.json.encode(body)


def estimated_tokens(request: ModelRequest, body: bytes) -> int:
    """What a request counts, roughly; a picture's tokens do not come from the length of its bytes."""
    if request.counted:
        return request.counted
    pictures = [url for message in request.messages for url in message.pictures]
    text = len(body) - sum(map(len, pictures))
    return text // CHARACTERS_PER_TOKEN + TOKENS_OF_A_PICTURE * len(pictures)


def wire_messages(messages: Iterable[Message], quirks: Quirks) -> Iterator[dict[str, Any]]:
    """The messages as endpoints take them; an assistant turn with neither text nor calls is left out."""
    for message in messages:
        match message.role:
            case "assistant" if message.content or message.tool_calls:
                yield _assistant(message, quirks)
            case "assistant":
                continue
            case "tool":
                yield {"role": "tool", "tool_call_id": message.tool_call_id, "content": message.content}
            case role if message.pictures:
                pictures = [{"type": "image_url", "image_url": {"url": url}} for url in message.pictures]
                yield {"role": role, "content": [{"type": "text", "text": message.content}, *pictures]}
            case role:
                yield {"role": role, "content": message.content}


def trimmed(messages: Sequence[Message], level: int) -> list[Message]:
    """The messages with old tool results shortened to their head and tail, by so many steps of TRIM_LEVELS."""
    results = [place for place, message in enumerate(messages) if message.role == "tool"]
    spared = 0 if level == len(TRIM_LEVELS) else _NEWEST_KEPT
    old = set(results[: len(results) - spared]) if level else set()
    return [
        _shortened(message, TRIM_LEVELS[level - 1]) if place in old else message
        for place, message in enumerate(messages)
    ]


def _shortened(message: Message, keep: int) -> Message:
    left_out = len(message.content) - keep
    if left_out <= 0:
        return message
    half = keep // 2
    text = f"{message.content[:half]}\n[{left_out} characters left out]\n{message.content[-half:]}"
    return msgspec.structs.replace(message, content=text)


def _assistant(message: Message, quirks: Quirks) -> dict[str, Any]:
    body: dict[str, Any] = {"role": "assistant", "content": message.content or None}
    if quirks.reasoning_replay:
        body.update((name, message.wire[name]) for name in REASONING_FIELDS if name in message.wire)
        if (
            "content" in message.wire and content_text(message.wire["content"]) == message.content
        ):  # else the turn was continued or mended
            body["content"] = message.wire["content"]
    if message.tool_calls:
        body["tool_calls"] = list(_calls(message.tool_calls, message.wire.get("tool_calls", [])))
    return body


def _calls(calls: Sequence[ToolCall], extras: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for place, call in enumerate(calls):
        function = {"name": call.name, "arguments": json_text(call.arguments)}
        extra = extras[place] if place < len(extras) else {}
        yield {**extra, "id": call.id, "type": "function", "function": function}


def _tool(spec: ToolSpec) -> dict[str, Any]:
    function = {"name": spec.name, "description": spec.description, "parameters": spec.parameters}
    return {"type": "function", "function": function}


def _sampling(request: ModelRequest, quirks: Quirks, options: RequestOptions) -> dict[str, Any]:
    values = {
        quirks.max_tokens_field: options.max_tokens,
        "temperature": options.temperature if quirks.temperature else None,
        "top_p": options.top_p,
        "seed": request.seed,
    }
    return {name: value for name, value in values.items() if value is not None}


def _reasoning(quirks: Quirks, options: RequestOptions) -> dict[str, Any]:
    effort = "none" if options.reasoning_disabled else options.reasoning_effort
    if effort is None or quirks.reasoning_style == "none":
        return {}
    enabled = effort != "none"
    switch: dict[str, Any] = {"type": "enabled" if enabled else "disabled"}
    match quirks.reasoning_style:
        case "effort":
            return {"reasoning_effort": effort}
        case "object":
            return {"reasoning": {"effort": effort} if enabled else {"enabled": False}}
        case "thinking":
            return {"thinking": switch}
        case "budget":
            return {"thinking": switch | ({"budget_tokens": THINKING_BUDGET[effort]} if enabled else {})}
        case "template":
            return {"chat_template_kwargs": {"enable_thinking": enabled}}


def _routing(options: RequestOptions) -> dict[str, Any]:
    values = {
        "only": options.providers_allowed,
        "ignore": options.providers_ignored,
        "order": options.providers_order,
        "sort": options.provider_sort,
    }
    return {name: value for name, value in values.items() if value}
