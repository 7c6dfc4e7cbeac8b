"""What stays of results that are too large, and which those are."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.limits import (
    LEAST_SHOWN,
    MAX_RESULT,
    MAX_TURN,
    NOT_KEPT,
    SHOWN,
    ResultLimits,
    as_json,
    limits_in,
    rooms,
    shortened,
)

WHERE = "whole in /tmp/batch-results/call_1-0a1b2c3d.txt"
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
)


def cut(result: dict[str, Any], room: int = SHOWN) -> dict[str, Any]:
    """What stays, proven to be within the room and JSON."""
    kept = shortened(result, room, WHERE).result
    text = as_json(kept)
    assert len(text) <= room
    text.encode()
    assert json.loads(text) == kept
    return kept


def test_the_longest_string_gives_way_and_all_else_stays() -> None:
    text = "first words " + "x" * 500_000 + " last words"
    small = {"exit_code": 0, "ok": True, "rate": 0.5, "none": None, "notes": ["a", {"b": 1}], "said": "short"}
    kept = cut({"output": text, **small})
    assert {key: value for key, value in kept.items() if key != "output"} == small
    head, marker, tail = kept["output"].split("\n")
    assert text.startswith(head)
    assert head.startswith("first words")
    assert text.endswith(tail)
    assert tail.endswith("last words")
    assert marker == f"[... {len(text) - len(head) - len(tail):,} characters left out; {WHERE} ...]"
    assert len(as_json(kept)) > SHOWN * 0.95, "the room is used"
    assert shortened({"output": text, **small}, SHOWN).text == text


def test_several_strings_share_the_room() -> None:
    result = {"pages": [{"url": f"u{number}", "content": str(number) * 90_000} for number in range(5)]}
    kept = cut(result)
    lengths = [len(page["content"]) for page in kept["pages"]]
    assert [page["url"] for page in kept["pages"]] == ["u0", "u1", "u2", "u3", "u4"]
    assert min(lengths) > 3_000
    assert max(lengths) - min(lengths) < 10
    assert shortened(result, SHOWN).text is None


def test_without_a_file_the_marker_says_so() -> None:
    assert NOT_KEPT in shortened({"a": "x" * 200_000}, SHOWN).result["a"]


@pytest.mark.parametrize("item", [7, "", [], {"a": 1}, "x" * 50_000], ids=["number", "empty", "list", "dict", "text"])
def test_a_list_of_many_items_keeps_its_ends(item: Any) -> None:
    items = [["first"], *[item] * (300 if len(str(item)) > 9 else 300_000), ["last"]]
    kept = cut({"items": items, "count": 3})
    assert kept["count"] == 3
    assert kept["items"][0] == ["first"]
    assert kept["items"][-1] == ["last"]
    [marker] = [each for each in kept["items"] if isinstance(each, str) and "items left out" in each]
    shown = len(kept["items"]) - 1
    assert marker == f"[... {len(items) - shown:,} items left out; {WHERE} ...]"


def test_an_object_of_many_items_keeps_its_ends() -> None:
    kept = cut({"[...]": "mine", **{f"key {number}": number for number in range(300_000)}})
    assert next(iter(kept)) == "[...]"
    assert kept["[...]"] == "mine"
    assert kept["key 299999"] == 299_999
    assert f"{300_001 - (len(kept) - 1):,} items left out" in kept["[...]."]


@pytest.mark.parametrize(
    "value",
    [
        {"k" * 300_000: 1, "a": 2},
        {"a": {"k" * 300_000: 1, "b": [1, 2]}},
        {"a": "\x01" * 200_000},
        {"a": '"\\' * 200_000},
        {"a": "\U0001f600" * 200_000},
        {"a": "é\u2028\r\n" * 90_000},
        {"a": [["x" * 900] * 90] * 200},
    ],
    ids=range(7),
)
@pytest.mark.parametrize("room", [LEAST_SHOWN, SHOWN])
def test_odd_ones_are_bounded(value: dict[str, Any], room: int) -> None:
    cut(value, room)


def test_what_lies_deep_is_cut_as_text() -> None:
    deep: Any = "x" * 150_000
    for _ in range(600):
        deep = [deep, 1]
    kept = cut({"a": deep})
    assert "characters left out" in as_json(kept)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(result=st.dictionaries(TEXT, VALUES), copies=st.integers(1, 100), room=st.integers(LEAST_SHOWN, 4_000))
def test_any_result_is_within_its_room(result: dict[str, Any], copies: int, room: int) -> None:
    large = {"a": [result] * copies, "b": as_json(result) * copies, **result}
    if len(as_json(large)) > room:
        cut(large, room)


def test_which_ones_are_too_large() -> None:
    assert rooms([]) == {}
    assert rooms([("a", MAX_RESULT)] * 2) == {}
    assert rooms([("a", MAX_RESULT + 1), ("a", 5)]) == {0: SHOWN}
    assert rooms([("a", 70_000), ("b", 90_000), ("c", 50_000)]) == {1: SHOWN}, "the largest first"
    assert rooms([("read_file", 600_000), ("a", 10_000)]) == {}, "it has its own limit"
    assert rooms([("read_file", 150_000), ("a", 60_000)]) == {1: SHOWN}


@pytest.mark.parametrize("count", [2, 15, 100])
def test_many_together_are_within_a_turns_limit(count: int) -> None:
    size = MAX_TURN // count + 3_000
    cuts = rooms([("a", size)] * count)
    assert sum(cuts.get(place, size) for place in range(count)) <= MAX_TURN


@pytest.mark.parametrize(
    ("tokens", "result", "turn", "shown"),
    [
        (0, MAX_RESULT, MAX_TURN, SHOWN),
        (1_000_000, MAX_RESULT, MAX_TURN, SHOWN),
        (32_768, 19_660, 39_321, 9_830),
        (8_192, 8_000, 16_000, 4_000),
        (1, 8_000, 16_000, 4_000),
    ],
)
def test_a_small_context_makes_the_limits_smaller(tokens: int, result: int, turn: int, shown: int) -> None:
    limits = limits_in(tokens)
    assert limits == ResultLimits(result, turn, shown)
    assert rooms([("a", result)], limits) == {}
    assert rooms([("a", result + 1)], limits) == {0: shown}
    assert rooms([("read_file", result + 1)], limits) == {}
    many = [("a", result)] * 5
    assert sum(rooms(many, limits).get(place, result) for place in range(5)) <= turn


LONG_LISTS: dict[str, dict[str, Any]] = {
    "todos": {"todos": [{"id": str(n), "content": f"{n} has " * 500, "status": "pending"} for n in range(256)]},
    "texts": {"texts": [f"{n} has " * 500 for n in range(1_000)]},
    "pages": {"pages": [{"url": f"http://x/{n}", "text": f"{n} has " * 9_000} for n in range(40)]},
    "fields": {f"field {n}": f"{n} has " * 900 for n in range(40)},
}


@pytest.mark.parametrize("name", LONG_LISTS)
@pytest.mark.parametrize("room", [4_000, SHOWN])
@pytest.mark.parametrize("where", [WHERE, NOT_KEPT], ids=["file", "none"])
def test_of_many_cut_texts_more_is_shown_than_markers(name: str, room: int, where: str) -> None:
    text = as_json(shortened(LONG_LISTS[name], room, where).result)
    markers = re.findall(r"\[\.\.\. [^\]]* \.\.\.\]", text)
    assert len(text) > room * 0.8
    assert sum(map(len, markers)) < len(text) / 3
    assert any(where in marker for marker in markers), "it is said where the rest is"
    assert text.count(" has ") * len("123 has ") > len(text) * 0.4


def test_each_entry_that_is_shown_has_a_useful_head() -> None:
    shown = cut({**LONG_LISTS["todos"], "summary": {"total": 256}})
    entries = [entry for entry in shown["todos"] if isinstance(entry, dict)]
    assert len(entries) >= 30
    assert {entry["id"] for entry in entries} >= {"0", "255"}
    assert all(entry["status"] == "pending" for entry in entries)
    assert min(len(entry["content"].partition("\n")[0]) for entry in entries) > 100
    assert shown["summary"] == {"total": 256}
