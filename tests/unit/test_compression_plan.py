"""Which turns are protected and which are folded, for orders of roles written by hand and made up."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from compression.plan import Part, Region, most_saved, next_region, parts_of, protected, units
from compression.types import Policy, Role, Turn

LETTERS: dict[str, Role] = {"s": "system", "h": "human", "g": "gpt", "t": "tool"}
ORDERS = st.text("shgt", max_size=30)
POLICIES = st.builds(
    Policy,
    first_system=st.booleans(),
    first_human=st.booleans(),
    first_gpt=st.booleans(),
    first_tool=st.booleans(),
    last_n_turns=st.integers(0, 6),
)


def turns_of(order: str) -> list[Turn]:
    return [Turn(role=LETTERS[letter], text=f"{n}", raws=({"from": "x"},)) for n, letter in enumerate(order)]


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
        ("shgtgtgtgtg", {"first_system": False}, ".###..#####"),
        ("shgtgtgtgtg", {"first_human": False}, "#.##..#####"),
        ("shgtgtgtgtg", {"first_gpt": False}, "####..#####"),  # the first result keeps its call
        ("shgtgtgtgtg", {"first_gpt": False, "first_tool": False}, "##....#####"),
        ("shghghghgtgtgtg", {"last_n_turns": 1}, "###.....##....#"),  # the first result comes late: an island
        ("shgtgtgth", {"last_n_turns": 1}, "####..###"),  # what the last human turn answers
        ("hh", {"last_n_turns": 0}, "##"),
        ("thgtgtgtgtgt", {"last_n_turns": 2}, "####......##"),
    ],
)
def test_who_is_protected(order: str, changes: dict[str, bool], expected: str) -> None:
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


@given(ORDERS, POLICIES, st.integers(21, 400), st.data())
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
    assert region.tokens - last < need  # the last unit was needed
    assert region.start == 0 or parts[region.start - 1].guarded  # from the start of its run
    if region.tokens < need:
        assert parts[region.end].guarded  # the whole run


def test_the_oldest_run_goes_first_and_one_not_worth_a_summary_never() -> None:
    parts = marked("shgtghgtgtgtg", "##.##.##....#")
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
