"""Edits of text: a replacement or a V4A patch found in a file's lines, and the unified diff of what changed. Pure."""

import difflib
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct

from tools.errors import ToolError

_NUMBERED = re.compile(r"^\s*\d+\|", re.MULTILINE)
_FILE = re.compile(r"^\*\*\*\s*(Update|Add|Delete) File:\s*(.+?)\s*$")
_MOVE_TO = re.compile(r"^\*\*\*\s*Move to:\s*(.+?)\s*$")
_MOVE_FILE = re.compile(r"^\*\*\*\s*Move File:\s*(.+?)\s*->\s*(.+?)\s*$")
_RANGE = re.compile(r"^@@ -(\d+)(,\d+)? \+(\d+)(,\d+)? @@")
_UNIFIED_HEADER = re.compile(r"^-\d+(,\d+)? \+\d+(,\d+)? @@")

_QUOTES = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201a\u201b", "'"),
        **dict.fromkeys("\u201c\u201d\u201e\u201f", '"'),
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
    }
)


def _loose(line: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", line).translate(_QUOTES).split())


_LEVELS: tuple[Callable[[str], str], ...] = (str, str.rstrip, str.strip, _loose)
"""How lines are compared, strictest first: as they are, but for white space at the end, but for indentation, but for
the kind of quotes, dashes and blanks."""

Line = tuple[str, str]  # (" " keep, "-" remove, "+" add; the text without its newline)


class Hunk(Struct, frozen=True):
    """Lines to change. `hints` are lines that stand at or above them, outermost first; `at_end`: at the file's end."""

    hints: tuple[str, ...]
    lines: tuple[Line, ...]
    at_end: bool = False

    def old(self) -> list[str]:
        """The lines that must be there."""
        return [text for sign, text in self.lines if sign != "+"]


class FileChange(Struct, frozen=True):
    """One file of a patch. `kind` is update, add or delete; `target` is where an update moves the file, if it does."""

    kind: str
    path: str
    hunks: tuple[Hunk, ...] = ()
    content: str = ""
    target: str = ""


def replace_text(text: str, old: str, new: str, replace_all: bool = False) -> str:
    """The text with `old` replaced: where it stands literally, else where whole lines of it stand up to white space,
    quotes or the `NUM|` that read_file puts before lines. Raises ToolError unless it is found, and found once."""
    if not old:
        raise ToolError("old_string is empty; to make a file use write_file")
    if old == new:
        raise ToolError("old_string and new_string are equal: nothing to change")
    if count := text.count(old):
        if count > 1 and not replace_all:
            raise ToolError(_ambiguous(count, _line_numbers(text, old)))
        return text.replace(old, new)
    edited = _replace_lines(text, old, new, replace_all)
    if edited is not None:
        return edited
    bare = _NUMBERED.sub("", old)
    if bare.strip() and all(_NUMBERED.match(line) for line in old.split("\n") if line):
        return replace_text(text, bare, _NUMBERED.sub("", new), replace_all)
    raise ToolError("old_string was not found in the file" + _nearest(text, old))


def _replace_lines(text: str, old: str, new: str, replace_all: bool) -> str | None:
    if old.endswith("\n") and (not new or new.endswith("\n")):
        old, new = old[:-1], new[:-1]
    hunk = Hunk(hints=(), lines=tuple(_as_lines(old.split("\n"), new.split("\n") if new else [])))
    lines = text.split("\n")
    found, level = _find(lines, hunk.old())
    if not found:
        return None
    if len(found) > 1 and not replace_all:
        raise ToolError(_ambiguous(len(found), [at + 1 for at in found]))
    for at in reversed(_apart(found, len(hunk.old()))):
        lines[at : at + len(hunk.old())] = _spliced(lines, at, hunk.lines, level)
    return "\n".join(lines)


def _as_lines(old: Sequence[str], new: Sequence[str]) -> Iterator[Line]:
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            yield from ((" ", text) for text in old[i1:i2])
        else:
            yield from (("-", text) for text in old[i1:i2])
            yield from (("+", text) for text in new[j1:j2])


def _find(lines: Sequence[str], wanted: Sequence[str], start: int = 0) -> tuple[list[int], int]:
    """Where the wanted lines stand from `start` on, by the strictest level at which they stand anywhere."""
    if not any(text.strip() for text in wanted):
        return [], 0
    for level, same in enumerate(_LEVELS):
        have, want = [same(line) for line in lines], [same(text) for text in wanted]
        last = len(have) - len(want)
        found = [at for at in range(start, last + 1) if have[at] == want[0] and have[at : at + len(want)] == want]
        if found:
            return found, level
    return [], 0


def _apart(found: Sequence[int], length: int) -> list[int]:
    kept: list[int] = []
    for at in found:
        if not kept or at >= kept[-1] + length:
            kept.append(at)
    return kept


def _spliced(lines: Sequence[str], at: int, changes: Sequence[Line], level: int) -> list[str]:
    """The lines that stand there afterwards. Kept lines stay as the file has them; added ones are indented as the file
    is, where only that differed."""
    old = [text for sign, text in changes if sign != "+"]
    given, real = _indentation(old), _indentation(lines[at : at + len(old)])
    shift = level >= 2 and given != real
    result = []
    for sign, text in changes:
        if sign == "+":
            result.append(real + text[len(given) :] if shift and text.strip() and text.startswith(given) else text)
            continue
        if sign == " ":
            result.append(lines[at])
        at += 1
    return result


def _indentation(lines: Sequence[str]) -> str:
    first = next((line for line in lines if line.strip()), "")
    return first[: len(first) - len(first.lstrip())]


def _ambiguous(count: int, numbers: Sequence[int]) -> str:
    places = ", ".join(map(str, numbers[:10]))
    return (
        f"old_string stands {count} times in the file (lines {places}): give more of its surroundings, or replace_all"
    )


def _line_numbers(text: str, part: str) -> list[int]:
    numbers: list[int] = []
    at = text.find(part)
    while at >= 0 and len(numbers) < 10:
        numbers.append(text.count("\n", 0, at) + 1)
        at = text.find(part, at + len(part))
    return numbers


def _nearest(text: str, old: str) -> str:
    wanted = next((line.strip() for line in old.split("\n") if line.strip()), "")
    numbers = [str(number) for number, line in enumerate(text.split("\n"), 1) if wanted and wanted == line.strip()]
    return f"; its first line alone stands in line {', '.join(numbers[:5])}" if numbers else ""


def parse_patch(patch: str) -> tuple[FileChange, ...]:
    """The files of a V4A patch, in order. Raises ToolError that names the line."""
    return tuple(_Parser(patch).changes())


class _Parser:
    """Reads a patch line by line; what stands before `*** Begin Patch` and after `*** End Patch` is not looked at."""

    def __init__(self, patch: str) -> None:
        self._lines = patch.replace("\r\n", "\n").split("\n")
        begin = next((n for n, line in enumerate(self._lines) if line.strip() == "*** Begin Patch"), -1)
        self._at = begin + 1

    def changes(self) -> list[FileChange]:
        changes = []
        while (line := self._line()) is not None and line.strip() != "*** End Patch":
            if line.strip():
                changes.append(self._change(line))
            else:
                self._at += 1
        if not changes:
            raise ToolError("The patch names no file: it needs `*** Update File: PATH`, `*** Add File:` or the like")
        return changes

    def _line(self) -> str | None:
        return self._lines[self._at] if self._at < len(self._lines) else None

    def _problem(self, what: str) -> ToolError:
        return ToolError(f"Patch line {self._at + 1}: {what}: {(self._line() or '')[:200]!r}")

    def _change(self, line: str) -> FileChange:
        if found := _MOVE_FILE.match(line):
            self._at += 1
            return FileChange(kind="update", path=found[1], target=found[2])
        if not (found := _FILE.match(line)):
            raise self._problem("expected a line like `*** Update File: PATH`")
        self._at += 1
        kind, path = found[1].lower(), found[2]
        if kind == "delete":
            return FileChange(kind=kind, path=path)
        if kind == "add":
            return FileChange(kind=kind, path=path, content=self._content())
        return self._update(path)

    def _content(self) -> str:
        added = [text for _, text in self._body("+")]
        return "".join(f"{text}\n" for text in added)

    def _update(self, path: str) -> FileChange:
        target = ""
        if found := _MOVE_TO.match(self._line() or ""):
            target = found[1]
            self._at += 1
        hunks = []
        while (line := self._line()) is not None and not line.startswith("***"):
            hunks.append(self._hunk())
        hunks = [hunk for hunk in hunks if hunk.lines]
        if not hunks and not target:
            raise self._problem(f"no change for {path} above this line")
        return FileChange(kind="update", path=path, hunks=tuple(hunks), target=target)

    def _hunk(self) -> Hunk:
        hints = []
        while (line := self._line()) is not None and line.startswith("@@"):
            self._at += 1
            hint = line[2:].strip()
            hint = _UNIFIED_HEADER.sub("", hint).removesuffix("@@").strip()
            if hint:
                hints.append(hint)
        lines = tuple(self._body(" -+"))
        at_end = (self._line() or "").strip() == "*** End of File"
        self._at += at_end
        return Hunk(hints=tuple(hints), lines=lines, at_end=at_end)

    def _body(self, signs: str) -> list[Line]:
        """Signed lines up to the next mark. A wholly empty line is an empty kept (or added) one, unless it is the last:
        then it only sets blocks apart."""
        body: list[Line] = []
        blanks = 0
        while (line := self._line()) is not None and not line.startswith(("@@", "***")):
            if line and line[0] not in signs:
                raise self._problem(f"expected one of {', '.join(map(repr, signs))} at the start of the line")
            blanks = 0 if line else blanks + 1
            body.append((line[0], line[1:]) if line else (signs[0], ""))
            self._at += 1
        return body[: len(body) - blanks]


def apply_hunks(text: str, hunks: Sequence[Hunk]) -> str:
    """The text after the hunks. A hunk stands below the one before it and below its hints; where it is not there, or
    has no hint that is, it must be the only such place. Raises ToolError for what is not found or not clear."""
    lines = text.split("\n")
    cursor = 0
    for hunk in hunks:
        at, level = _place(lines, hunk, cursor)
        spliced = _spliced(lines, at, hunk.lines, level)
        lines[at : at + len(hunk.old())] = spliced
        cursor = at + len(spliced)
    return "\n".join(lines)


def _place(lines: Sequence[str], hunk: Hunk, cursor: int) -> tuple[int, int]:
    """Where the hunk's old lines begin, and the level at which they are the file's."""
    hinted = _below(lines, hunk.hints, cursor)
    old = hunk.old()
    if not old:
        return _insertion(lines, hunk, hinted), 0
    found, level = _find(lines, old, cursor if hinted is None else hinted)
    if found and (hinted is not None or hunk.at_end):
        return found[-1 if hunk.at_end else 0], level
    if not found:
        found, level = _find(lines, old)
    if not found:
        raise ToolError("these lines are not in the file:\n" + "\n".join(old)[:1000])
    if len(found) > 1:
        places = ", ".join(str(at + 1) for at in found[:10])
        raise ToolError(f"the lines of a hunk stand in several places (lines {places}); add context or an @@ hint")
    return found[0], level


def _below(lines: Sequence[str], hints: Sequence[str], start: int) -> int | None:
    """The line of the last hint, each looked for below the one before; None if there is no hint or one is not found."""
    at = None
    for hint in hints:
        rest = range(start, len(lines))
        equal = (n for n in rest if lines[n].strip() == hint)
        holding = (n for n in rest if hint in lines[n])
        at = next(equal, next(holding, None))
        if at is None:
            return None
        start = at
    return at


def _insertion(lines: Sequence[str], hunk: Hunk, hinted: int | None) -> int:
    if hunk.at_end or not hunk.hints:
        return len(lines) - (not lines[-1])
    if hinted is None:
        raise ToolError(f"no line holds the hint {hunk.hints[-1]!r}")
    return hinted + 1


def unified_diff(before: str | None, after: str | None, path: str) -> str:
    """How the file changed, in unified format with three lines of context; None stands for no file. Only what lies
    between the first and the last change is compared, so a small edit of a large file costs little."""
    old, new = _ended(before or ""), _ended(after or "")
    shorter = min(len(old), len(new))
    head = next((n for n in range(shorter) if old[n] != new[n]), shorter)
    tail = next((n for n in range(shorter - head) if old[-1 - n] != new[-1 - n]), shorter - head)
    skip, keep = max(0, head - 3), max(0, tail - 3)
    name = path.lstrip("/")
    difference = difflib.unified_diff(
        old[skip : len(old) - keep],
        new[skip : len(new) - keep],
        "/dev/null" if before is None else f"a/{name}",
        "/dev/null" if after is None else f"b/{name}",
    )
    return "".join(_RANGE.sub(lambda found: _moved(found, skip), line) for line in difference)


def _ended(text: str) -> list[str]:
    lines = [f"{line}\n" for line in text.split("\n")]
    last = lines.pop()
    return lines if last == "\n" else [*lines, f"{last}\\ No newline at end of file\n"]


def _moved(found: re.Match[str], by: int) -> str:
    return f"@@ -{int(found[1]) + by}{found[2] or ''} +{int(found[3]) + by}{found[4] or ''} @@"
