"""Which turns are protected and which are folded, for orders of roles written by hand and made up."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from compression.plan import Part, Region, most_saved, next_region, parts_of, protected, units
from compression.types import Policy, Role, Turn

LETTERS: dict[str, Role] = {"s": "system", "h": "human", "g": "gpt", "a": "gpt", "t": "tool"}  # a: without a call
# a system turn stands in front or nowhere: other rows are never planned
ORDERS = st.tuples(st.sampled_from(("", "s")), st.text("hgat", max_size=30)).map("".join)
POLICIES = st.builds(
    Policy,
    first_system=st.booleans(),
    first_human=st.booleans(),
    first_gpt=st.booleans(),
    first_tool=st.booleans(),
    last_n_turns=st.integers(0, 6),
)


def turns_of(order: str) -> list[Turn]:
    texts = [f"{n}<tool_call></tool_call>" if letter == "g" else f"{n}" for n, letter in enumerate(order)]
    return [Turn(role=LETTERS[each], text=text, raws=({"from": "x"},)) for each, text in zip(order, texts, strict=True)]


def marked(order: str, guarded: str) -> list[Part]:
    """`#` marks a guarded turn, `*` an earlier summary."""
    return [Part(turn, mark == "#", mark == "*") for turn, mark in zip(turns_of(order), guarded, strict=True)]


def guards(parts: Sequence[Part]) -> str:
    return "".join("#" if part.guarded else "." for part in parts)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("shgtg", [1, 1, 2, 1]),
        ("gtttgg", [4, 1, 1]),
        ("tthtgt", [2, 1, 1, 2]),
        ("stst", [1, 1, 1, 1]),
        ("", []),
    ],
)
def test_units(order: str, expected: list[int]) -> None:
    assert [len(unit) for unit in units([LETTERS[letter] for letter in order])] == expected


@pytest.mark.parametrize(
    ("order", "changes", "expected"),
    [
        ("shgtgtgtgtg", {}, "####..#####"),  # four from the end is a call: its unit is whole
        ("shgtgtgtgtg", {"last_n_turns": 3}, "####....###"),
        ("shgtgtgtgtg", {"last_n_turns": 2}, "####....###"),
        ("shgtgtgtgtg", {"last_n_turns": 0}, "####......#"),
        ("shgtgtgtgtg", {"first_system": False, "summary_notice_text": "N"}, ".###..#####"),
        ("shgtgtgtgtg", {"first_system": False}, "####..#####"),  # nothing would take its place
        (
            "shgtgtgtgtg",
            {"first_system": False, "summary_notice_text": "N", "add_summary_notice": False},
            "####..#####",
        ),
        ("hgtsgtgtgtgtg", {"first_system": False}, "###.....#####"),
        ("shgtgtgtgtg", {"strategy": "mask", "first_tool": False}, "###....####"),  # no turn for another's sake
        ("shgtgtgtgtg", {"strategy": "mask", "first_gpt": False}, "##.#...####"),
        ("shgtgtgtgtg", {"first_human": False}, "#.##..#####"),
        ("shgtgtgtgtg", {"first_gpt": False}, "####..#####"),  # the first result keeps its call
        ("shgtgtgtgtg", {"first_gpt": False, "first_tool": False}, "##....#####"),
        ("shghghghgtgtgtg", {"last_n_turns": 1}, "###.....##....#"),  # the first result comes late: an island
        ("shgtgtgth", {"last_n_turns": 1}, "####..###"),  # what the last human turn answers
        ("hh", {"last_n_turns": 0}, "##"),
        ("thgtgtgtgtgt", {"last_n_turns": 2}, "####......##"),
    ],
)
def test_who_is_protected(order: str, changes: dict[str, Any], expected: str) -> None:
    policy = replace(Policy(), **changes)
    assert guards(parts_of(turns_of(order), policy)) == expected


@given(ORDERS, POLICIES)
def test_units_are_guarded_as_a_whole_and_every_protected_turn_is(order: str, policy: Policy) -> None:
    turns = turns_of(order)
    parts = parts_of(turns, policy)
    assert [part.turn for part in parts] == turns
    kept = protected(turns, policy)
    for unit in units([turn.role for turn in turns]):
        assert len({parts[place].guarded for place in unit}) == 1
        assert parts[unit.start].guarded == any(place in kept for place in unit)
    assert not turns or parts[-1].guarded


@given(
    ORDERS | st.lists(st.sampled_from(("gt", "gtt"))).map(lambda units: f"sh{''.join(units)}a"),
    POLICIES,
    st.integers(21, 400),
    st.data(),
)
def test_a_region_begins_and_ends_between_units_and_is_just_enough(
    order: str, policy: Policy, need: int, data: st.DataObject
) -> None:
    parts = parts_of(turns_of(order), policy)
    tokens = data.draw(st.lists(st.integers(4, 100), min_size=len(parts), max_size=len(parts)))
    cost = 20
    region = next_region(parts, tokens, need, cost)
    if region is None:
        assert most_saved(parts, tokens, cost) == 0
        return
    inside = range(region.start, region.end)
    assert inside
    assert not any(parts[place].guarded for place in inside)
    assert region.tokens == sum(tokens[place] for place in inside) > cost
    found = units([part.turn.role for part in parts])
    whole = [unit for unit in found if unit.start in inside]
    assert [place for unit in whole for place in unit] == list(inside)
    last = sum(tokens[place] for place in whole[-1])
    assert region.start == 0 or parts[region.start - 1].guarded  # from the start of its run
    if order.count("h") != 1 or policy.first_human is False:
        return  # the order of roles decides too
    assert region.tokens - last < need  # the last unit was needed
    if region.tokens < need:
        assert parts[region.end].guarded  # the whole run


@pytest.mark.parametrize(
    ("order", "guarded", "expected"),
    [
        ("shgtgtgtgta", "####....###", {1: (4, 6), 21: (4, 8), 99: (4, 8)}),
        ("shgtaha", "####..#", {1: (4, 6)}),  # not the answer alone: two questions would have nothing between
        ("shgtahgtaha", "####.....##", {1: (4, 6), 30: (4, 8), 40: (4, 8)}),  # the last answer stays
        ("shgtaha", "####.##", {1: None}),
        ("shaha", "##.##", {1: (2, 3)}),  # the two become one
        ("shaha", "##...", {1: (2, 3), 20: (2, 4)}),
        ("shgtagth", "####...#", {1: None}),
        ("shahgth", "####..#", {1: None}),
        ("shahagth", "##.....#", {1: (2, 3), 15: (2, 4), 99: (2, 4)}),
        ("shahgtgtah", "####....##", {1: (4, 6), 99: (4, 8)}),
        ("shahaah", "####..#", {1: (4, 5), 99: (4, 5)}),  # the last turn takes no summary
    ],
)
def test_regions_keep_the_order_that_strict_templates_count(
    order: str, guarded: str, expected: dict[int, tuple[int, int] | None]
) -> None:
    parts = marked(order, guarded)
    for need, region in expected.items():
        found = next_region(parts, [10] * len(order), need, cost=5)
        assert (found and (found.start, found.end)) == region, need


def test_the_oldest_run_goes_first_and_one_not_worth_a_summary_never() -> None:
    parts = marked("shgtahgtgtgta", "##.##.##....#")
    tokens = [5, 5, 10, 5, 5, 40, 5, 5, 30, 30, 30, 30, 5]
    assert next_region(parts, tokens, 50, cost=20) == Region(5, 6, 40)
    assert next_region(parts, tokens, 50, cost=40) == Region(8, 10, 60)
    assert next_region(parts, tokens, 500, cost=40) == Region(8, 12, 120)
    assert next_region(parts, tokens, 500, cost=120) is None
    assert most_saved(parts, tokens, 20) == 20 + 100


def test_an_earlier_summary_is_folded_only_with_later_turns() -> None:
    tokens = [5, 90, 30, 30, 5]
    assert next_region(marked("shgtg", "#*..#"), tokens, 50, cost=20) == Region(1, 4, 150)
    assert next_region(marked("shgtg", "#*###"), tokens, 50, cost=20) is None
    assert most_saved(marked("shgtg", "#*###"), tokens, cost=20) == 0
