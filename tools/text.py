"""Text that goes to the model: bounded, and without terminal control sequences. A leaf."""

import json
import re
from math import isfinite
from typing import Any

import msgspec

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\)"  # OSC, DCS, SOS, PM, APC up to their end
    r"|\x1b[ -/]*[0-~]",  # two- and three-character sequences
    re.DOTALL,
)

MAX_TOLD = 2_000  # characters of an exception's text that a model is told
_MOST_DIGITS = 300  # of an integer that msgspec reads
_MARKER = 50  # the line of `shorten`


def without_escapes(text: str) -> str:
    """The text as a reader would see it: no ANSI escape sequences, U+FFFD for NUL."""
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    return text.replace("\0", "\ufffd")


def without_halves(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair that has no other half."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def decoded_json(data: bytes | str) -> Any:
    """The JSON value, U+FFFD for what is no character in its texts, null for a number that is none (NaN, 1e999). Raises
    ValueError, RecursionError."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        pass  # also for half a pair in one text of many
    text = data.decode("utf-8-sig", "replace") if isinstance(data, bytes) else data
    value = json.loads(text, parse_constant=_number, parse_float=_number, parse_int=_integer)
    return msgspec.json.decode(without_halves(json.dumps(value, ensure_ascii=False)))


def _number(text: str) -> float | None:
    number = float(text)
    return number if isfinite(number) else None


def _integer(text: str) -> int | None:
    return int(text) if len(text) <= _MOST_DIGITS else None


def shorten(text: str, max_chars: int) -> str:
    """At most `max_chars` of the text's characters, head 40 % and tail 60 %; a line between counts what is left out."""
    if len(text) <= max_chars:
        return text
    head = max_chars * 2 // 5
    tail = max_chars - head
    return f"{text[:head]}\n[... {len(text) - max_chars} characters left out ...]\n{text[len(text) - tail :]}"


def one_line(text: str) -> str:
    """The text as one line of at most 300 characters."""
    return " ".join(text.split())[:300]


def told(error: object) -> str:
    """An exception's text, at most MAX_TOLD characters."""
    text = str(error)
    return text if len(text) <= MAX_TOLD else shorten(text, MAX_TOLD - _MARKER)
