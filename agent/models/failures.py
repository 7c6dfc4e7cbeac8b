"""What a failed request means: the verdict for the gate and the end of the row. Pure.

Codes and wordings are those of OpenAI, Anthropic, Gemini, OpenRouter, DeepSeek, Moonshot, vLLM and llama.cpp.
"""

import email.utils
import math
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from agent.models.base import Verdict
from agent.models.calling import CallFailed
from agent.types import Spend

LONGEST_MESSAGE = 500  # characters of an endpoint's message that are kept
Meaning = Literal["context", "filtered", "auth", "quota", "model", "rate", "transient", "bad_request"]

_ONE_REQUEST = Spend(requests=1)
_QUOTA_CODES = re.compile(
    r"insufficient_quota|billing|insufficient_balance|exceeded_current_quota|credit_limit|budget_exceeded"
)
_QUOTA_TEXT = re.compile(r"insufficient (balance|credits|funds)|credit balance|budget has been exceeded")
_CONTEXT = re.compile(
    r"context_length_exceeded|exceed_context_size|(maximum|max|model's) context|context (length|window|size)"
    r"|(prompt|input|request) is too (long|large)|input token count.*exceeds|too many (input |prompt )?tokens"
    r"|request_too_large"
)
_FILTERED = re.compile(
    r"content_filter|content_policy|content management policy|content policy|moderation|flagged|safety (system|filter)"
    r"|usage policy"
)
_UNKNOWN_MODEL = re.compile(
    r"model_not_found|invalid_model|not a valid model|unknown model|no such model"
    r"|model\b.{0,120}?\b(not exist|not found|is not supported|isn't supported|unavailable)"
)
_BAD_KEY = re.compile(r"invalid_api_key|api_key_invalid|api key not valid|authentication_error|invalid api key")
_MAX_TOKENS = re.compile(r"max_(completion_|output_|new_)?tokens|maxoutputtokens")
_PROMPT_TOKENS = re.compile(
    r"(input|prompt) (tokens|contains|length)|in the messages|messages resulted|your (request|prompt|messages)"
    r"|input_tokens|prompt_tokens"
)
_PICTURES = re.compile(r"image|vision|multimodal|modalit")
_BODY_DELAY = re.compile(r'"retryDelay"\s*:\s*"(\d+(?:\.\d+)?)s"')


class EndpointError(Struct, frozen=True):
    """The parts of an error body that tell something, each "" where missing."""

    message: str = ""
    code: str = ""
    kind: str = ""
    param: str = ""
    moderated: bool = False

    @property
    def text(self) -> str:
        """All of it, in lower case, to be searched."""
        return " ".join((self.code, self.kind, self.param, self.message)).lower()


def http_failure(status: int, headers: Mapping[str, str], body: bytes, now: float) -> CallFailed:
    """The failure an HTTP status of 300 and above stands for. `now` is Unix time, for dates in headers.

    A redirect is not followed: the key is for the address that it was given for, and every request would take two.
    """
    if status < 400:
        return _redirected(status, headers.get("location", ""))
    error = read_error(body)
    seconds = retry_after(headers, now)
    if seconds is None and (found := _BODY_DELAY.search(body.decode("utf-8", "replace"))):
        seconds = float(found[1])
    return failure_of(status, error, seconds)


def _redirected(status: int, address: str) -> CallFailed:
    told = f"the endpoint redirects to {address[:LONGEST_MESSAGE]}: set base_url" if address else "no answer"
    return CallFailed(Verdict(kind="condemned", reason="model", message=f"HTTP {status}: {told}", spend=_ONE_REQUEST))


def failure_of(status: int, error: EndpointError, seconds: float | None = None) -> CallFailed:
    """The failure for a status and what came with it."""
    meaning = _meaning(status, error)
    message = f"HTTP {status}: {error.message[:LONGEST_MESSAGE] or error.code or 'no message'}"
    verdict = _verdict(meaning, message, seconds)
    match meaning:
        case "context":
            return CallFailed(verdict, error_class="context_exceeded", reason="context_exceeded", retryable=False)
        case "filtered":
            return CallFailed(verdict, error_class="filtered", reason="filtered", retryable=False)
        case "auth" | "quota":
            return CallFailed(verdict, error_class=meaning)
        case "bad_request":
            return CallFailed(verdict, reason="bad_request", retryable=False)
        case _:
            return CallFailed(verdict)


def about_pictures(failure: CallFailed) -> CallFailed:
    """The failure of a request that shows pictures: one that says so concerns this request alone, not the model, which
    goes on answering requests without pictures."""
    verdict = failure.verdict
    if verdict.reason not in ("model", "server_error") or not _PICTURES.search(verdict.message.lower()):
        return failure
    verdict = Verdict(kind="row_fault", reason="bad_request", message=verdict.message, spend=verdict.spend)
    return CallFailed(verdict, reason="bad_request", retryable=False)


def unreachable(message: str) -> CallFailed:
    """No connection: nothing was sent."""
    return CallFailed(Verdict(kind="unreachable", reason="unreachable", message=message))


def transient(reason: str, message: str, spend: Spend = _ONE_REQUEST) -> CallFailed:
    """A failure that another try may mend."""
    tokens = spend.usage.total_tokens
    return CallFailed(Verdict(kind="transient", reason=reason, message=message, spend=spend, tokens=tokens))


def request_timed_out(seconds: float) -> CallFailed:
    """The request's own deadline passed."""
    return transient("request_timeout", f"no complete answer within {seconds:g} s")


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds that `retry-after-ms` or `retry-after` (seconds or an HTTP date) ask to wait; None without a usable one.

    `headers` has lower-case names or compares names without case.
    """
    milliseconds = _number(headers.get("retry-after-ms"))
    if milliseconds is not None:
        return max(0.0, milliseconds / 1000)
    value = headers.get("retry-after")
    seconds = _number(value)
    if seconds is not None:
        return max(0.0, seconds)
    date = email.utils.parsedate_tz(value) if value else None
    return None if date is None else max(0.0, email.utils.mktime_tz(date) - now)


def read_error(body: bytes) -> EndpointError:
    """An error body in any of the usual shapes; text that is no JSON is the message."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return EndpointError(message=body.decode("utf-8", "replace").strip()[:LONGEST_MESSAGE])
    if isinstance(value, list) and value:  # Gemini
        value = value[0]
    if not isinstance(value, dict):
        return EndpointError(message=str(value))
    return error_of(value.get("error") or value)


def error_of(error: Any) -> EndpointError:
    """The value of an `error` key."""
    if not isinstance(error, dict):
        return EndpointError(message=str(error))
    details = error.get("metadata")
    details = details if isinstance(details, dict) else {}
    said = [error.get("message") or error.get("detail"), details.get("raw")]
    return EndpointError(
        message=": ".join(_text(part) for part in said if part),
        code=_text(error.get("code")),
        kind=_text(error.get("type") or error.get("status")),
        param=_text(error.get("param")),
        moderated="reasons" in details or "flagged_input" in details,
    )


_BY_STATUS: dict[int, Meaning] = {
    401: "auth",
    402: "quota",
    404: "model",
    408: "transient",
    409: "transient",
    413: "context",
    425: "transient",
}


def _meaning(status: int, error: EndpointError) -> Meaning:
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status == 429:
        return "quota" if _is_quota(error) else "rate"
    if status == 403:
        return "filtered" if error.moderated or _FILTERED.search(error.text) else "auth"
    if 400 <= status < 500:
        return _meaning_of_bad_request(error, error.text)
    return "transient"


def _is_quota(error: EndpointError) -> bool:
    codes = f"{error.code} {error.kind}".lower()
    return bool(_QUOTA_CODES.search(codes) or _QUOTA_TEXT.search(error.text))


def _meaning_of_bad_request(error: EndpointError, text: str) -> Meaning:
    about_limit = bool(_MAX_TOKENS.search(text)) and error.code != "context_length_exceeded"
    if about_limit and not _PROMPT_TOKENS.search(text):
        return "model"  # the same for every row: max_tokens is above what the model can do, or not known to it
    if _CONTEXT.search(text) or about_limit:
        return "context"
    if error.moderated or _FILTERED.search(text):
        return "filtered"
    if _BAD_KEY.search(text):
        return "auth"
    if _is_quota(error):
        return "quota"
    return "model" if _UNKNOWN_MODEL.search(text) else "bad_request"


def _verdict(meaning: Meaning, message: str, seconds: float | None) -> Verdict:
    match meaning:
        case "rate":
            return Verdict(
                kind="rate_limited", reason="rate_limited", message=message, retry_after=seconds, spend=_ONE_REQUEST
            )
        case "transient":
            return Verdict(
                kind="transient", reason="server_error", message=message, retry_after=seconds, spend=_ONE_REQUEST
            )
        case "auth" | "quota" | "model":
            return Verdict(kind="condemned", reason=meaning, message=message, spend=_ONE_REQUEST)
        case _:
            return Verdict(kind="row_fault", reason=meaning, message=message, spend=_ONE_REQUEST)


def _number(text: str | None) -> float | None:
    try:
        number = None if text is None else float(text)
    except ValueError:
        return None
    return number if number is not None and math.isfinite(number) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)
