"""A page as text: the browser's accessibility snapshot, made shorter and cut by whole lines. Pure.

A line is `- role "name" [attribute]… [ref=e5] [box=x,y,w,h]: text`, its depth is its indentation. Text of the page can
stand in names and behind the colon only, so that no page can forge a ref.
"""

import re
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct

MAX_SNAPSHOT = 15_000  # characters
MAX_LINE = 1_000  # characters
MAX_MARKS = 150
MAX_SOURCE = 5_000_000  # characters

INTERACTIVE = frozenset(
    (
        *("button", "link", "textbox", "searchbox", "combobox", "listbox", "option", "checkbox", "radio", "switch"),
        *("slider", "spinbutton", "tab", "menuitem", "menuitemcheckbox", "menuitemradio", "treeitem"),
    )
)

_LINE = re.compile(
    r"""(?P<indent>\ *)-\ (?P<key>'(?:[^']|'')*'|(?:"(?:[^"\\]|\\.)*"|[^":])*|[^:]*)(?P<rest>:.*)?""", re.VERBOSE
)
_KEY = re.compile(r"""(?P<role>[\w-]+)(?P<name>\ "(?:[^"\\]|\\.)*")?(?P<attributes>(?:\ \[[^\]]*\])*)""", re.VERBOSE)
_ATTRIBUTE = re.compile(r"\[([^\]]*)\]")
_REF = re.compile(r"@?((?:f\d+)?e\d+)")

Box = tuple[float, float, float, float]
"""Left, top, width, height, in pixels from the view's corner."""


class Line(Struct, frozen=True):
    """One line. `rest` is what stands behind the key: `:`, `: text` or nothing; of a line that is no element `raw` is
    all that stands behind its dash."""

    depth: int
    role: str = ""
    name: str = ""
    attributes: tuple[str, ...] = ()
    rest: str = ""
    ref: str = ""
    box: Box | None = None
    raw: str = ""

    def __str__(self) -> str:
        indent = "  " * self.depth
        if not self.role:
            return f"{indent}- {self.raw}"
        attributes = [*self.attributes, *([f"ref={self.ref}"] if self.ref else ())]
        return f"{indent}- {self.role}{self.name}{''.join(f' [{each}]' for each in attributes)}{self.rest}"


class Mark(Struct, frozen=True):
    """Where an element is seen."""

    ref: str
    box: Box


class Cut(Struct, frozen=True):
    """A snapshot as it is shown. `left_out` elements are not in it."""

    text: str
    left_out: int


def parse_ref(text: str) -> str:
    """`e12` for `@e12`, `e12` or `[ref=e12]`; "" for what is no ref."""
    found = _REF.fullmatch(text.strip().removeprefix("[").removesuffix("]").removeprefix("ref="))
    return found[1] if found else ""


def parse_snapshot(text: str) -> list[Line]:
    """The lines of a snapshot with boxes, these counted from the view's corner also within frames. What is behind
    MAX_SOURCE characters is left out."""
    if len(text) > MAX_SOURCE:
        text = text[:MAX_SOURCE].rpartition("\n")[0]
    return list(_placed([_parse_line(line) for line in text.split("\n") if line.strip()]))


def _parse_line(line: str) -> Line:
    found = _LINE.fullmatch(line)
    if found is None:
        return Line(depth=(len(line) - len(line.lstrip())) // 2, raw=_raw(line))
    depth, key, rest = len(found["indent"]) // 2, found["key"], found["rest"] or ""
    if key.startswith("'"):
        key = key[1:-1].replace("''", "'")
    element = _KEY.fullmatch(key)
    if element is None or key in ("text", "/url", "/placeholder"):
        return Line(depth=depth, raw=_raw(line))
    given = _ATTRIBUTE.findall(element["attributes"])
    named = dict(each.partition("=")[::2] for each in given)
    return Line(
        depth=depth,
        role=element["role"],
        name=element["name"] or "",
        attributes=tuple(each for each in given if not each.startswith(("ref=", "box="))),
        rest=rest,
        ref=named.get("ref", ""),
        box=_parse_box(named.get("box", "")),
    )


def _raw(line: str) -> str:
    return line.strip().removeprefix("- ")


def _parse_box(text: str) -> Box | None:
    try:
        left, top, width, height = map(float, text.split(","))
    except ValueError:
        return None
    return left, top, width, height


def _placed(lines: Sequence[Line]) -> Iterator[Line]:
    """What is in a frame is counted from the frame's corner by the browser."""
    frames: list[tuple[int, float, float]] = [(-1, 0.0, 0.0)]
    for line in lines:
        while frames[-1][0] >= line.depth:
            frames.pop()
        if line.box is None:
            yield line
            continue
        _, right, down = frames[-1]
        left, top, width, height = line.box
        if line.role == "iframe":
            frames.append((line.depth, left + right, top + down))
        yield msgspec.structs.replace(line, box=(left + right, top + down, width, height))


def count_elements(lines: Sequence[Line]) -> int:
    """How many can be named by a ref."""
    return sum(bool(line.ref) for line in lines)


def compact(lines: Sequence[Line]) -> list[Line]:
    """The same page in fewer characters: no addresses of links, no containers that say nothing, refs only for what one
    acts on. All text stays."""
    result: list[Line] = []
    lifted = [(-1, 0)]  # depths of containers left out, and how far what is in them moves up
    for line in lines:
        while lifted[-1][0] >= line.depth:
            lifted.pop()
        up = lifted[-1][1]
        if _says_nothing(line):
            lifted.append((line.depth, up + 1))
        elif not (line.role == "" and line.raw.startswith("/url:")):
            result.append(_plainer(msgspec.structs.replace(line, depth=line.depth - up)))
    depths = [*(line.depth for line in result), 0]
    return [_without_colon(line, holds=depths[place + 1] > line.depth) for place, line in enumerate(result)]


def _says_nothing(line: Line) -> bool:
    container = line.role in ("generic", "none", "presentation") and not line.name and line.rest in (":", "")
    return container and not _acts(line)


def _acts(line: Line) -> bool:
    return line.role in INTERACTIVE or "cursor=pointer" in line.attributes


def _plainer(line: Line) -> Line:
    if not line.role:
        return line
    if line.role == "generic" and not _acts(line) and not line.name:
        return Line(depth=line.depth, raw=f"text{line.rest}", box=line.box)
    attributes = tuple(each for each in line.attributes if each not in ("cursor=pointer", "active"))
    return msgspec.structs.replace(line, attributes=attributes, ref=line.ref if _acts(line) else "")


def _without_colon(line: Line, *, holds: bool) -> Line:
    """A colon stands for what is in the element; that may have been left out."""
    return msgspec.structs.replace(line, rest="") if line.rest == ":" and not holds else line


def cut(lines: Sequence[Line], limit: int = MAX_SNAPSHOT, whole_at: str = "") -> Cut:
    """The part of a snapshot around what is in view, at most `limit` characters: whole lines, and markers that say what
    is left out before and behind. `whole_at` is where all of it is to be read."""
    texts = [_short(str(line)) for line in lines]
    whole = "\n".join(texts)
    if len(whole) <= limit:
        return Cut(whole, 0)
    first, last = _window([len(text) + 1 for text in texts], _first_in_view(lines), limit - 400)
    before, behind = count_elements(lines[:first]), count_elements(lines[last:])
    where = f", the whole is in {whole_at}" if whole_at else ""
    head = [f"[... {first} lines with {before} elements above are left out: scroll up to see them{where} ...]"]
    tail = [
        f"[... {len(lines) - last} lines with {behind} elements below are left out: scroll down to see them{where} ...]"
    ]
    shown = [*(head if first else ()), *texts[first:last], *(tail if last < len(lines) else ())]
    return Cut("\n".join(shown), before + behind)


def _short(text: str) -> str:
    return text if len(text) <= MAX_LINE else f"{text[: MAX_LINE - 12]}… [line cut]"


def _first_in_view(lines: Sequence[Line]) -> int:
    """The line that parts best what has been scrolled past from the rest: bars that stay in view come before it, and
    elements hidden beyond the edge behind it."""
    best = most = ahead = 0
    for number, line in enumerate(lines, start=1):
        if line.box and line.box[3] > 0:
            ahead += 1 if line.box[1] + line.box[3] <= 0 else -1
        if ahead > most:
            best, most = number, ahead
    return best


def _window(lengths: Sequence[int], first: int, room: int) -> tuple[int, int]:
    """As many lines from `first` on as there is room for, and if that is all of them, some before."""
    last = first
    while last < len(lengths) and lengths[last] <= room:
        room -= lengths[last]
        last += 1
    while last == len(lengths) and first > 0 and lengths[first - 1] <= room:
        first -= 1
        room -= lengths[first]
    return first, last


def marks(lines: Sequence[Line], width: int, height: int) -> list[Mark]:
    """The elements in view that one acts on."""
    found = [
        Mark(line.ref, line.box)
        for line in lines
        if line.ref and line.box and _acts(line) and _is_seen(line.box, width, height)
    ]
    return found[:MAX_MARKS]


def _is_seen(box: Box, width: int, height: int) -> bool:
    left, top, wide, high = box
    return wide > 0 and high > 0 and left < width and top < height and left + wide > 0 and top + high > 0
