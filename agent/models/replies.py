"""The body of a chat completion -> a Reply, or a named failure that another try may mend. Pure.

Bodies as OpenAI, Anthropic's and Gemini's compatible endpoints, OpenRouter, DeepSeek, Moonshot, Mistral, vLLM and
llama.cpp send them. Every text is clean: no lone surrogates, no NUL.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeGuard

import msgspec
from msgspec.structs import replace

from agent.models.failures import error_of, failure_of, transient
from agent.text import clean
from agent.types import NO_SPEND, RawCall, Reply, Spend, Usage

PriceUsage = Callable[[Usage], float]

REASONING_FIELDS = ("reasoning", "reasoning_content", "reasoning_details")
_FINISH = {
    "end_turn": "stop",
    "eos": "stop",
    "function_call": "tool_calls",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    **dict.fromkeys(("safety", "recitation", "prohibited_content", "blocklist", "content-filter"), "content_filter"),
}
_TAG = re.compile(r"(?<!`)<(/?)(think|thinking|thought|reasoning|reasoning_scratchpad)>(?!`)", re.IGNORECASE)
_SPACE = re.compile(r"\s+")


def parse_reply(body: bytes, price_usage: PriceUsage) -> Reply:
    """The accepted answer of one request. Raises CallFailed, its verdict carrying the usage where the body has one.

    `price_usage` says what a usage costs where the endpoint does not.
    """
    value = _decode(body)
    spend = _spend(value, price_usage)
    choice, message = _first_message(value, spend)
    finish_reason = _finish_reason(choice)
    if finish_reason == "malformed_function_call":
        _fail("malformed_function_call", "the model's function call was malformed", spend)
    if finish_reason == "error" or choice.get("error"):
        _fail("error_body", error_of(choice.get("error") or "the provider broke off").message, spend)
    content, reasoning = split_thoughts(message)
    refusal = _string(message.get("refusal")) or _refusal_part(message.get("content"))
    return Reply(
        content=content or refusal,
        reasoning=reasoning,
        tool_calls=tuple(_calls(message)),
        finish_reason=finish_reason,
        refusal=bool(refusal and not content) or finish_reason == "refusal",
        model=_string(value.get("model")),
        wire=_wire(message),
        spend=spend,
    )


def parse_usage(usage: Any) -> Usage:
    """A `usage` object in any of the usual spellings; whatever is missing, null or no number counts 0."""
    usage = _dict(usage)
    inputs = _dict(usage.get("prompt_tokens_details") or usage.get("input_tokens_details"))
    outputs = _dict(usage.get("completion_tokens_details") or usage.get("output_tokens_details"))
    read = _count(
        inputs.get("cached_tokens"),
        usage.get("cache_read_input_tokens"),
        usage.get("prompt_cache_hit_tokens"),
        usage.get("cached_tokens"),
    )
    written = _count(
        inputs.get("cache_write_tokens"), inputs.get("cache_creation_tokens"), usage.get("cache_creation_input_tokens")
    )
    input_tokens = _count(usage.get("prompt_tokens"), usage.get("input_tokens"))
    if "prompt_tokens" not in usage and "cache_read_input_tokens" in usage:
        input_tokens += read + written  # Anthropic's own spelling counts only what no cache had
    output_tokens = _count(usage.get("completion_tokens"), usage.get("output_tokens"))
    return Usage(
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cache_read_tokens=read,
        cache_write_tokens=written,
        reasoning_tokens=_count(outputs.get("reasoning_tokens"), usage.get("reasoning_tokens")),
        total_tokens=_count(usage.get("total_tokens")) or input_tokens + output_tokens,
    )


def split_thoughts(message: dict[str, Any]) -> tuple[str, str]:
    """The text of an assistant's message and its reasoning: that of its fields and thinking parts, else that in inline
    tags. Beside fields or parts, tags are text, but for a block in front that says the same or nothing."""
    text = content_text(message.get("content"))
    reasoning = _joined([*_field_reasoning(message), _part_reasoning(message.get("content"))])
    if reasoning:
        return _without_repetition(text, reasoning), reasoning
    content, inline = split_inline(text)
    return content, _joined([inline])


def _without_repetition(text: str, reasoning: str) -> str:
    tag = _TAG.search(text)
    if tag is None:
        return text
    front, end = (text[: tag.start()], tag) if tag[1] else ("", _closing(text, tag))
    if end is None or (not tag[1] and text[: tag.start()].strip()):
        return text
    thought = front if tag[1] else text[tag.end() : end.start()]
    return text[end.end() :].strip() if _bare(thought) in ("", _bare(reasoning)) else text


def split_inline(text: str) -> tuple[str, list[str]]:
    """The text without inline reasoning, and the reasoning.

    A lone closing tag makes all text before it reasoning; an opening tag that nothing closes does so for all after it
    if it opens the text, and is plain text elsewhere. Tags in backticks are text.
    """
    if "<" not in text or not _TAG.search(text):
        return text, []
    said: list[str] = []
    thought: list[str] = []
    place = 0
    while tag := _TAG.search(text, place):
        if tag[1]:
            thought += [*said, text[place : tag.start()]]
            said = []
            place = tag.end()
        elif end := _closing(text, tag):
            said.append(text[place : tag.start()])
            thought.append(_TAG.sub("", text[tag.end() : end.start()]))
            place = end.end()
        else:
            break
    rest = text[place:]
    opening = _TAG.match(rest.lstrip())
    if opening and not "".join(said).strip():
        thought.append(rest.lstrip()[opening.end() :])
        rest = ""
    return "".join([*said, rest]).strip(), thought


def _closing(text: str, opening: re.Match[str]) -> re.Match[str] | None:
    """The tag that closes an opening one, past further pairs of the same name inside."""
    depth = 1
    for tag in _TAG.finditer(text, opening.end()):
        if tag[2].lower() == opening[2].lower():
            depth += -1 if tag[1] else 1
            if not depth:
                return tag
    return None


def _decode(body: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)  # refuses lone surrogates
        is_clean = rb"\u0000" not in body
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value, is_clean = _decode_loosely(body), False
    if not isinstance(value, dict):
        _fail("invalid_body", "the body is no JSON object", NO_SPEND)
    return value if is_clean else clean(value)


def _decode_loosely(body: bytes) -> Any:
    """Lone surrogates, a byte order mark and bytes that are no UTF-8 do not make a reply worthless."""
    try:
        return json.loads(body.decode("utf-8-sig", "replace"))
    except (ValueError, RecursionError):
        head = body[:200].decode("utf-8", "replace")
        _fail(
            "invalid_body", f"the body is no JSON or was cut off: {head!r}" if body else "the body is empty", NO_SPEND
        )


def _first_message(value: dict[str, Any], spend: Spend) -> tuple[dict[str, Any], dict[str, Any]]:
    choices = value.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        if value.get("error"):
            _fail_as_told(value["error"], spend)
        _fail("no_choices", "the reply has no choices", spend)
    message = choice.get("message")
    if not isinstance(message, dict):
        if choice.get("error"):
            _fail("error_body", error_of(choice["error"]).message, spend)
        if _finish_reason(choice) == "malformed_function_call":
            _fail("malformed_function_call", "the model's function call was malformed", spend)
        _fail("null_message", "the reply has no message", spend)
    return choice, message


def _fail_as_told(error: Any, spend: Spend) -> NoReturn:
    """An error body that came with 200: a status in it (OpenRouter's `code`) is believed, else it is transient."""
    told = error_of(error)
    status = int(told.code) if told.code.isascii() and told.code.isdigit() else 0
    if 400 <= status < 500 or "context_length_exceeded" in told.text:
        failure = failure_of(status or 400, told)
        failure.verdict = replace(failure.verdict, spend=spend)
        raise failure
    _fail("error_body", told.message or "an error without a message", spend)


def _fail(reason: str, message: str, spend: Spend) -> NoReturn:
    raise transient(reason, message, spend if spend.requests else Spend(requests=1))


def _spend(value: dict[str, Any], price_usage: PriceUsage) -> Spend:
    told = value.get("usage")
    usage = parse_usage(told)
    cost = _dict(told).get("cost")
    usd = float(cost) if _is_number(cost) else price_usage(_with_hidden_output(usage))
    return Spend(requests=1, usage=usage, cost_usd=usd)


def _with_hidden_output(usage: Usage) -> Usage:
    """Some endpoints leave thinking out of the output and count it in the total alone; it is paid for as output."""
    return replace(usage, output_tokens=max(usage.output_tokens, usage.total_tokens - usage.input_tokens))


def _finish_reason(choice: dict[str, Any]) -> str:
    told = " ".join(_string(choice.get(name)) for name in ("finish_reason", "native_finish_reason")).lower()
    if "malformed_function_call" in told:
        return "malformed_function_call"
    reason = _string(choice.get("finish_reason")).lower()
    return _FINISH.get(reason, reason)


def content_text(content: Any) -> str:
    """A message's text: that of a list's parts joined without a separator, thinking left out."""
    if not isinstance(content, list):
        return _string(content)
    texts = (part if isinstance(part, str) else _dict(part).get("text") for part in content if not _is_thinking(part))
    return "".join(map(_string, texts))


def _refusal_part(content: Any) -> str:
    parts = content if isinstance(content, list) else []
    return "".join(_string(_dict(part).get("refusal")) for part in parts)


def _field_reasoning(message: dict[str, Any]) -> Iterator[list[str]]:
    """Of every field its pieces."""
    yield [_deep_text(message.get("reasoning"))]
    yield [_deep_text(message.get("reasoning_content"))]
    details = message.get("reasoning_details")
    names = ("summary", "thinking", "content", "text")
    yield [_first_text(_dict(detail), names) for detail in (details if isinstance(details, list) else [])]


def _part_reasoning(content: Any) -> list[str]:
    parts = content if isinstance(content, list) else []
    return [_first_text(part, ("thinking", "text")) for part in parts if _is_thinking(part)]


def _first_text(part: dict[str, Any], names: Sequence[str]) -> str:
    return next((text for name in names if (text := _deep_text(part.get(name)))), "")


def _is_thinking(part: Any) -> bool:
    return _dict(part).get("type") in ("thinking", "reasoning", "redacted_thinking")


def _joined(sources: Sequence[list[str]]) -> str:
    """The pieces of all sources, a blank line between them. A source that another holds as a whole, be it spaced or cut
    otherwise, and a piece that another has too are left out; the pieces of one source are never weighed against each
    other."""
    kept: list[list[str]] = []
    for source in sources:
        bare = _bare(*source)
        if not bare or any(bare in _bare(*other) for other in kept):
            continue
        kept = [other for other in kept if _bare(*other) not in bare]
        told = {_bare(piece) for other in kept for piece in other}
        kept.append([piece for piece in source if _bare(piece) not in told])
    return "\n\n".join(piece.strip() for source in kept for piece in source if piece.strip())


def _bare(*pieces: str) -> str:
    return _SPACE.sub("", "".join(pieces))


def _calls(message: dict[str, Any]) -> Iterator[RawCall]:
    for entry in _call_entries(message):
        function = _dict(entry.get("function"))
        yield RawCall(
            id=_string(entry.get("id")),
            name=_string(function.get("name")),
            arguments=function.get("arguments"),
        )


def _call_entries(message: dict[str, Any]) -> list[dict[str, Any]]:
    entries = message.get("tool_calls")
    if not entries and isinstance(message.get("function_call"), dict):
        entries = [{"function": message["function_call"]}]
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _wire(message: dict[str, Any]) -> dict[str, Any]:
    """What must go back as it came: the reasoning fields, a content list that holds thinking, and, by position, what
    calls carry beside id and function (Gemini's thought signatures)."""
    wire = {name: message[name] for name in REASONING_FIELDS if message.get(name)}
    content = message.get("content")
    if isinstance(content, list) and any(map(_is_thinking, content)):
        wire["content"] = content
    extras = [
        {name: value for name, value in entry.items() if name not in ("id", "type", "function", "index")}
        for entry in _call_entries(message)
    ]
    if any(extras):
        wire["tool_calls"] = extras
    return wire


def _deep_text(value: Any) -> str:
    """The text of a string, of a part with `text`, or of a list of such."""
    if isinstance(value, list):
        return "".join(map(_deep_text, value))
    return _string(value.get("text")) if isinstance(value, dict) else _string(value)


def _string(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_number(value: Any) -> TypeGuard[float]:
    """A number that can count something: no boolean, NaN or infinity, not below 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15


def _count(*values: Any) -> int:
    """The first that is a number above 0."""
    return next((int(value) for value in values if _is_number(value) and value > 0), 0)
