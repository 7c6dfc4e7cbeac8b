"""Texts that keep their head and their tail, with a note between on how much is gone. Pure."""

import json
from collections.abc import Callable
from typing import Any

from compression.forms import is_json

Cost = Callable[[str], int]  # what a text takes where it will stand, in tokens


def shortened(text: str, budget: int, cost: Cost) -> str:
    """The text in at most `budget` tokens, or as few as a note alone takes.

    The text of a JSON object or array stays one: the longest strings in it are shortened. Only where that does not
    suffice (many short values, or numbers) it is cut like any other text.
    """
    if cost(text) <= budget:
        return text
    if is_json(text):
        within = _json_shortened(json.loads(text), budget, cost)
        if within:
            return within
    keep = len(text)
    while keep:
        cut = head_and_tail(text, keep)
        tokens = cost(cut)
        if tokens <= budget:
            return cut
        keep = min(keep - 1, keep * budget // tokens)
    return head_and_tail(text, 0)


def head_and_tail(text: str, keep: int) -> str:
    """The first and last `keep` characters together; the text itself if the note would not make it shorter."""
    tail = keep // 2
    cut = f"{text[: keep - tail]}\n[... {len(text) - keep} characters left out ...]\n{text[len(text) - tail :]}"
    return min(text, cut, key=len)


def _json_shortened(value: Any, budget: int, cost: Cost) -> str:
    """JSON text within the budget, or ""."""
    longest = max(map(len, _strings(value)), default=0)
    while longest > 80:
        longest = longest * 3 // 4
        try:
            text = json.dumps(_with_strings(value, longest), ensure_ascii=False, separators=(",", ":"))
        except RecursionError:  # json.loads goes a little deeper than we do
            return ""
        if cost(text) <= budget:
            return text
    return ""


def _strings(value: Any) -> list[str]:
    todo, found = [value], []
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, dict | list):
            todo.extend(item.values() if isinstance(item, dict) else item)
    return found


def _with_strings(value: Any, keep: int) -> Any:
    if isinstance(value, dict):
        return {name: _with_strings(item, keep) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_strings(item, keep) for item in value]
    return head_and_tail(value, keep) if isinstance(value, str) and len(value) > keep else value
