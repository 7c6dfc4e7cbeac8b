"""How large a tool's result may be in a conversation, and what stays in it of a larger one. Pure.

Results are JSON objects without lone surrogates; sizes are characters of their text as `as_json` writes it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

MAX_RESULT = 100_000
MAX_TURN = 200_000  # all results of one turn
SHOWN = 20_000  # stays of a larger one
LEAST_SHOWN = 2_000  # however many they are
LEAST_RESULT, LEAST_TURN = 8_000, 16_000  # however small the model's context is
RESULT_SHARE, TURN_SHARE = 0.15, 0.30  # of the characters that fit into it
CHARACTERS = 4  # a token's
UNLIMITED = frozenset({"read_file"})  # has a limit of its own, and is how the rest is looked at
NOT_KEPT = "the rest was not kept"

_PART = 60  # so much is shown of a part at least, beside its marker
_ITEM = 400  # so much an item is to have, if it needs it and would not take more than its share of the room
_SHARES = {list: 8, dict: 16}  # of a dict rather all keys are shown, of a list rather whole items
_WORDY = 4  # a marker says where the rest is if that leaves so many times its size
_DEPTH = 8  # what lies deeper is cut as text
_BRACKETS = 2
_MANY = 10**9

as_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class ResultLimits(Struct, frozen=True):
    """`result` and `turn`: what one result and all of a turn may have; `shown`: what stays of a larger one."""

    result: int = MAX_RESULT
    turn: int = MAX_TURN
    shown: int = SHOWN


def limits_in(context_window: int) -> ResultLimits:
    """Those of a model that takes so many tokens, 0 if that is not known."""
    if not context_window:
        return ResultLimits()
    characters = context_window * CHARACTERS
    result = min(MAX_RESULT, max(LEAST_RESULT, int(characters * RESULT_SHARE)))
    turn = min(MAX_TURN, max(LEAST_TURN, int(characters * TURN_SHARE)))
    return ResultLimits(result=result, turn=turn, shown=min(SHOWN, result // 2))


class Shortened(Struct, frozen=True):
    """What stays of a result. `text` is the one string that was cut, None when that is not all that is missing."""

    result: dict[str, Any]
    text: str | None


class _Item(Struct, frozen=True):
    """One item of a dict or list, with its size and that of what stands around it (key, colon, comma)."""

    key: str | None
    value: Any
    size: int
    frame: int


def rooms(sizes: Sequence[tuple[str, int]], limits: ResultLimits = ResultLimits()) -> dict[int, int]:  # noqa: B008 - frozen
    """Of one turn's results, given as tool and size: which are too large, and what may stay of each. Those over the
    limit of a result, then the largest until all together are within that of a turn."""
    total = sum(size for _, size in sizes)
    cut: dict[int, int] = {}
    if total <= limits.result:  # as nearly always
        return cut
    room = max(LEAST_SHOWN, min(limits.shown, limits.turn // len(sizes)))
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place][1]):
        name, size = sizes[place]
        if name not in UNLIMITED and size > room and (size > limits.result or total > limits.turn):
            cut[place] = room
            total -= size - room
    return cut


def shortened(result: Mapping[str, Any], room: int, where: str = NOT_KEPT) -> Shortened:
    """A larger result within `room`: of its longest strings head and tail, of what has too many items the first and the
    last, and between them a marker that says how many are left out, and where there is room for that `where` the whole
    is; one at least says so, if any can. All else stays as it is."""
    scissors = _Scissors(where)
    kept = scissors.box(dict(result), room, 0)
    is_one = len(scissors.texts) == 1 and not scissors.more_is_left_out
    return Shortened(kept, scissors.texts[0] if is_one else None)


class _Scissors:
    def __init__(self, where: str) -> None:
        self.texts: list[str] = []  # that were cut
        self.more_is_left_out = False
        self._where = f"; {where}"
        self._said_where = False
        self._least = _size(_marker(_MANY, "characters")) + _PART

    def _place(self, room: int) -> str:
        """What the next marker in a room of that size says of where the rest is."""
        long = _size(_marker(_MANY, "characters", self._where))
        if room < (_WORDY * long if self._said_where else long + _PART):
            return ""
        self._said_where = True
        return self._where

    def _fit(self, value: Any, room: int, depth: int) -> Any:
        """A larger value in at most `room` characters, which are enough for a marker."""
        if isinstance(value, dict | list) and depth < _DEPTH:
            return self.box(value, room, depth)
        if isinstance(value, str):
            self.texts.append(value)
            return self._text(value, room)
        self.more_is_left_out = True
        return self._text(as_json(value), room)

    def _text(self, text: str, room: int) -> str:
        where = self._place(room)
        keep = max(0, room - _size(f"\n{_marker(len(text), 'characters', where)}\n"))
        head = _prefix(text, keep // 2)
        tail = _prefix(text[: -keep - 1 : -1], keep + _BRACKETS - _size(head))[::-1]
        return f"{head}\n{_marker(len(text) - len(head) - len(tail), 'characters', where)}\n{tail}"

    def box(self, box: Any, room: int, depth: int) -> Any:
        """A dict or list in at most `room` characters, every item there at least in part if there is room for that."""
        pairs: list[tuple[str | None, Any]] = (
            list(box.items()) if isinstance(box, dict) else [(None, item) for item in box]
        )
        room -= _BRACKETS
        least = max(self._least, min(_ITEM, room // _SHARES[dict if isinstance(box, dict) else list]))
        head, tail = _taken(pairs, room, least), list[_Item]()
        key = where = ""
        if len(head) < len(pairs):
            self.more_is_left_out = True
            key, where = _free_key(box), self._place(room)
            room -= _size(key) + _size(_marker(len(pairs), "items", where)) + _BRACKETS
            head = _taken(pairs, room // 2, least)
            tail = _taken(reversed(pairs), room - sum(_cost(item, least) for item in head), least)[::-1]
        level = _level([item.size for item in (*head, *tail)], room - sum(item.frame for item in (*head, *tail)))
        ends = [
            [(item.key, item.value if item.size <= level else self._fit(item.value, level, depth + 1)) for item in end]
            for end in (head, tail)
        ]
        left_out = len(pairs) - len(head) - len(tail)
        marker = [(key, _marker(left_out, "items", where))] if left_out else []
        together: list[tuple[str | None, Any]] = [*ends[0], *marker, *ends[1]]
        return dict(together) if isinstance(box, dict) else [item for _, item in together]


def _marker(count: int, what: str, where: str = "") -> str:
    return f"[... {count:,} {what} left out{where} ...]"


def _taken(pairs: Iterable[tuple[str | None, Any]], room: int, least: int) -> list[_Item]:
    """The first ones for which there is room if a large one gets the least."""
    items: list[_Item] = []
    for key, value in pairs:
        item = _Item(key, value, _size(value), 1 if key is None else _size(key) + _BRACKETS)
        room -= _cost(item, least)
        if room < 0:
            break
        items.append(item)
    return items


def _cost(item: _Item, least: int) -> int:
    return item.frame + min(item.size, least)


def _size(value: Any) -> int:
    return len(as_json(value))


def _prefix(text: str, room: int) -> str:
    """The longest beginning whose JSON text has at most `room` characters between its quotes."""
    text = text[:room]
    if _size(text) <= room + _BRACKETS:
        return text
    fits, too_long = 0, len(text)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        fits, too_long = (middle, too_long) if _size(text[:middle]) <= room + _BRACKETS else (fits, middle)
    return text[:fits]


def _level(sizes: Sequence[int], room: int) -> int:
    """What each may have at most, so that all are within `room`."""
    for rank, size in enumerate(sorted(sizes)):
        share = room // (len(sizes) - rank)
        if size > share:
            return share
        room -= size
    return max(sizes, default=0)


def _free_key(box: Any) -> str:
    key = "[...]"
    while key in box:
        key += "."
    return key
