"""Text that goes to the model: bounded, and without terminal control sequences. A leaf."""

import re

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\)"  # OSC, DCS, SOS, PM, APC up to their end
    r"|\x1b[ -/]*[0-~]",  # two- and three-character sequences
    re.DOTALL,
)


def without_escapes(text: str) -> str:
    """The text as a reader would see it: no ANSI escape sequences, U+FFFD for NUL."""
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    return text.replace("\0", "\ufffd")


def shorten(text: str, max_chars: int) -> str:
    """At most `max_chars` of the text's characters, head 40 % and tail 60 %; a line between counts what is left out."""
    if len(text) <= max_chars:
        return text
    head = max_chars * 2 // 5
    tail = max_chars - head
    return f"{text[:head]}\n[... {len(text) - max_chars} characters left out ...]\n{text[len(text) - tail :]}"
