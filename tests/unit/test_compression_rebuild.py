"""New rows by hand: summaries joined, results masked and shortened, units dropped; and a validator that sees faults."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.row import Turn as RowTurn
from agent.trajectory import format_trajectory, validate
from agent.types import Message, ToolCall
from compression.forms import fields_of, read, results_in
from compression.plan import Part, Region, parts_of
from compression.rebuild import MASK, SHORTEST_RESULT, dropped, folded, masked, shortenable, with_shorter_results
from compression.shorten import head_and_tail, shortened
from compression.types import Policy, Turn
from compression.validator import problems
from tests.unit.trajectories import NOTICE, TOOLS, WordCounter

COUNTER = WordCounter()
ROLES = {"s": "system", "h": "human", "g": "gpt", "t": "tool"}
WIRE = {"s": "system", "h": "user", "g": "assistant", "t": "tool"}
POLICY = Policy(summary_notice_text=NOTICE)
QUIET = Policy()


def turns_of(row: Any) -> tuple[Turn, ...]:
    reading = read(fields_of(json.dumps(row).encode()))
    assert reading
    return reading.turns


def named(order: str, form: str = "conversations") -> tuple[Turn, ...]:
    """Turns whose text is their letter and place."""
    if form == "messages":
        told = [{"role": WIRE[letter], "content": f"{letter}{n}"} for n, letter in enumerate(order)]
    else:
        told = [{"from": ROLES[letter], "value": f"{letter}{n}"} for n, letter in enumerate(order)]
    return turns_of({form: told})


def parts(order: str, guarded: str, form: str = "conversations") -> tuple[Part, ...]:
    return tuple(Part(turn, mark == "#") for turn, mark in zip(named(order, form), guarded, strict=True))


def texts(found: Sequence[Part]) -> list[str]:
    return [part.turn.text for part in found]


def guards(found: Sequence[Part]) -> str:
    return "".join("#" if part.guarded else "*" if part.made else "." for part in found)


# --- summaries


@pytest.mark.parametrize("form", ["conversations", "messages"])
@pytest.mark.parametrize(
    ("order", "guarded", "region", "expected", "left"),
    [
        ("shgtgtg", "####..#", (4, 6), ["s0", "h1", "g2", "t3", "S", "g6"], "####*#"),
        ("shgtgtg", "##....#", (2, 4), ["s0", "h1\n\nS", "g4", "t5", "g6"], "##..#"),
        ("shgtghg", "####..#", (4, 5), ["s0", "h1", "g2", "t3", "S\n\nh5", "g6"], "####*#"),
        ("shgtghg", "####.##", (4, 5), ["s0", "h1", "g2", "t3", "S\n\nh5", "g6"], "######"),
        ("shghg", "##.##", (2, 3), ["s0", "h1\n\nS\n\nh3", "g4"], "###"),
        ("shgtg", "#...#", (1, 2), ["s0", "S", "g2", "t3", "g4"], "#*..#"),
        ("hgtg", "#..#", (1, 3), ["h0\n\nS", "g3"], "##"),
        ("gtgtg", "....#", (0, 2), ["S", "g2", "t3", "g4"], "*..#"),
        (
            "shgtg",
            ".#..#",
            (0, 1),
            ["S\n\nh1", "g2", "t3", "g4"],
            "####",  # what follows can have no summary of its own
        ),
    ],
)
def test_a_summary_is_a_human_turn_or_joined_to_those_beside_it(
    form: str, order: str, guarded: str, region: tuple[int, int], expected: list[str], left: str
) -> None:
    before = parts(order, guarded, form)
    after = folded(before, Region(*region, 9), "S", QUIET)
    assert texts(after) == expected
    assert guards(after) == left
    assert after[-1].turn == before[-1].turn
    again = turns_of({form: [raw for part in after for raw in part.turn.raws]})
    assert again == tuple(part.turn for part in after)


@pytest.mark.parametrize("form", ["conversations", "messages"])
def test_the_notice_stands_in_the_system_turn_once(form: str) -> None:
    once = folded(parts("shgtgtgtg", "####....#", form), Region(4, 6, 9), "S", POLICY)
    twice = folded(once, Region(4, 7, 9), "S2", POLICY)
    assert once[0].turn.text == twice[0].turn.text == f"s0{NOTICE}"
    assert texts(twice)[1:] == ["h1", "g2", "t3", "S2", "g8"]
    without = folded(parts("hgtgtg", "#....#", form), Region(1, 3, 9), "S", POLICY)
    assert NOTICE not in "".join(texts(without))


def test_system_turns_of_other_spellings_get_the_notice_too() -> None:
    system = {"role": "system", "content": [{"type": "text", "text": "s"}], "cache": 1}
    turns = turns_of({"messages": [system, *({"role": "assistant", "content": "g"} for _ in range(3))]})
    after = folded([Part(turn, n != 1) for n, turn in enumerate(turns)], Region(1, 2, 9), "S", POLICY)
    assert after[0].turn.text == f"s{NOTICE}"
    assert after[0].turn.raws[0]["cache"] == 1


# --- masks and drops


def exchange(*results: Any) -> tuple[Turn, ...]:
    """Our own format: one exchange for each argument (results of parallel calls), then a last answer."""
    said = [Message(role="user", content="q")]
    for contents in results:
        calls = tuple(ToolCall(id=f"{n}", name="terminal", arguments={"command": "ls"}) for n in range(len(contents)))
        said.append(Message(role="assistant", tool_calls=calls))
        said += [Message(role="tool", content=c, tool_call_id=f"{n}", name="terminal") for n, c in enumerate(contents)]
    said.append(Message(role="assistant", content="done"))
    return turns_of({"conversations": [{"from": t.sender, "value": t.value} for t in format_trajectory(said, TOOLS)]})


LONG = "word " * 100
OBJECT = json.dumps({"output": LONG, "exit_code": 0})


def guard_ends(turns: Sequence[Turn], head: int = 2) -> tuple[Part, ...]:
    return tuple(Part(turn, n < head or n == len(turns) - 1) for n, turn in enumerate(turns))


def test_the_oldest_results_are_masked_just_enough_and_calls_stay() -> None:
    before = guard_ends(exchange([LONG, "short", OBJECT], [LONG], [LONG]))
    after = masked(before, 150, COUNTER)
    contents = [[result.text for result in results_in(part.turn)] for part in after]
    assert contents[3] == [MASK, "short", MASK]
    assert [part.turn for part in after[4:]] == [part.turn for part in before[4:]]
    assert [part.turn for part in after[:3]] == [part.turn for part in before[:3]]
    policy = Policy(first_gpt=False, first_tool=False, last_n_turns=1)
    assert not problems([part.turn for part in before], [part.turn for part in after], policy)
    assert [result.text for result in results_in(masked(before, 1, COUNTER)[3].turn)] == [MASK, "short", OBJECT]
    everything = masked(before, 10_000, COUNTER)
    assert masked(everything, 10_000, COUNTER) == everything


def test_a_note_never_takes_more_than_what_it_replaces() -> None:
    before = guard_ends(exchange(["", "ok", MASK, "a b c d e f g"], ["9" * 500]))
    assert masked(before, 10_000, COUNTER) == before


@pytest.mark.parametrize(
    ("order", "guarded", "need", "expected"),
    [
        ("shgtgtgtg", "##......#", 1, "s0 h1 g4 t5 g6 t7 g8"),
        ("shgtgtgtg", "##......#", 20, "s0 h1 g6 t7 g8"),
        ("shgtgtgtg", "##......#", 10**6, "s0 h1 g8"),
        ("shgtgtgtg", "####....#", 1, "s0 h1 g2 t3 g6 t7 g8"),
        ("shgtghgtg", "####....#", 1, "s0 h1 g2 t3 h5 g6 t7 g8"),
        ("shghgtg", "####..#", 10**6, "s0 h1 g2 h3 g6"),
        ("shghghg", "##....#", 1, "s0 h1 g4 h5 g6"),  # the question before is protected: the one after goes
        ("shghghg", "#.....#", 1, "s0 h3 g4 h5 g6"),  # with the question before
        ("shghgtg", "##.####", 10**6, "s0 h1 g2 h3 g4 t5 g6"),  # both neighbours are protected
        ("sgtgtg", "#....#", 1, "s0 g3 t4 g5"),
        ("shggg", "##..#", 1, "s0 h1 g3 g4"),
        ("shtgtg", "##...#", 1, "s0 h1 g3 t4 g5"),  # results of nothing
        ("gtgh", "####", 10**6, "g0 t1 g2 h3"),
    ],
)
def test_the_oldest_exchanges_are_dropped_just_enough(order: str, guarded: str, need: int, expected: str) -> None:
    after = dropped(parts(order, guarded), [6] * len(order), need)
    assert " ".join(texts(after)) == expected


# --- shorter results


@given(
    st.recursive(
        st.one_of(st.text(max_size=300), st.integers(), st.just(LONG)),
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)),
        max_leaves=8,
    ),
    st.integers(0, 200),
)
def test_shortened_texts_keep_to_the_budget(value: Any, budget: int) -> None:
    text = value if isinstance(value, str) else json.dumps(value)
    short = shortened(text, budget, len)
    assert len(short) <= max(budget, len(head_and_tail(text, 0)))
    assert len(short) <= len(text)
    assert short == text or len(text) > budget


def test_json_stays_json_with_its_keys() -> None:
    short = shortened(OBJECT, 60, COUNTER.text)
    told = json.loads(short)
    assert told["exit_code"] == 0
    assert told["output"].startswith("word ")
    assert told["output"].endswith("word ")
    assert "characters left out" in told["output"]
    assert COUNTER.text(short) <= 60
    assert "characters left out" in shortened(json.dumps(list(range(1000))), 60, COUNTER.text)


def test_only_the_longest_results_are_cut_to_one_length_in_valid_blocks() -> None:
    huge, small = "tag <tool_call> " * 400, "w " * 90
    turns = exchange([huge, small, json.dumps({"o": "x " * 3000})], [huge])
    before = parts_of(turns, Policy())
    total = COUNTER.row(turns).total
    assert shortenable(before, COUNTER) > 3000
    after = [part.turn for part in with_shorter_results(before, total - 2000, COUNTER)]
    assert COUNTER.row(after).total <= 2000
    assert COUNTER.row(after).total > 1600  # only as much as needed
    assert results_in(after[3])[1].text == small
    assert not validate_turns(after)
    assert not problems(turns, after, Policy(shorten_turns=True))
    assert problems(turns, after, Policy())


def validate_turns(turns: Sequence[Turn]) -> list[str]:
    return validate([RowTurn(turn.role, turn.text) for turn in turns])


def test_no_result_gets_shorter_than_the_shortest() -> None:
    turns = exchange(*[[LONG * 3] for _ in range(8)])
    before = parts_of(turns, Policy(last_n_turns=20))
    after = with_shorter_results(before, 10**6, COUNTER)
    sizes = [COUNTER.text(part.turn.text) for part in after if part.turn.role == "tool"]
    assert all(SHORTEST_RESULT * 0.8 < size < SHORTEST_RESULT * 1.2 for size in sizes)


# --- the validator


GOOD = exchange([LONG], [LONG, OBJECT], [LONG])


def test_what_did_not_change_is_right() -> None:
    for turns in (GOOD, named("hhtsgg"), named("shgtgtg", "messages"), ()):
        assert problems(turns, turns) == []


def summary(text: str = "S") -> Turn:
    return turns_of({"conversations": [{"from": "human", "value": text}]})[0]


def text_changed(turn: Turn, text: str) -> Turn:
    return turns_of({"conversations": [turn.raws[0] | {"value": text}]})[0]


S, H, G1, T1, G2, T2, G3, T3, END = GOOD
SHORT_TAIL = Policy(last_n_turns=1, summary_notice_text=NOTICE)


@pytest.mark.parametrize(
    ("after", "fault"),
    [
        ([H, G1, T1, G2, T2, G3, T3, END], "system"),
        ([S, S, H, G1, T1, END], "more system turns"),
        ([text_changed(S, S.text + NOTICE + NOTICE), H, G1, T1, summary(), END], "more than once"),
        ([S, H, summary(), G1, T1, END], "both human"),
        ([S, H, G1, T1, G2, G3, T3, END], "both gpt"),
        ([S, H, G1, T1, G2, summary(), G3, T3, END], "not as before"),
        ([S, H, G1, T1, T2, END], "not as before"),
        ([S, H, G1, T1, G3, T2, END], "not as before"),
        ([S, H, G1, T1, G3, T3, G2, T2, END], "not as before"),
        ([S, H, G1, T1, text_changed(G2, G2.text + "x"), T2, END], "not as before"),
        ([S, text_changed(H, "other"), G1, T1, summary(), END], "protected turn 1"),
        ([S, text_changed(H, f"a {H.text} b"), G1, T1, summary(), END], "protected turn 1"),
        ([S, H, G1, text_changed(T1, T1.text.replace("word word", "word", 1)), summary(), END], "protected turn 3"),
        ([S, H, summary(), END], "protected turn 2"),
        ([S, H, G1, T1, summary(), text_changed(END, END.text + ".")], "last turn"),
        ([S, H, G1, T1, G2, T2], "last turn"),
        ([S, H, G1, T1, END, summary()], "last turn"),
        ([], "nothing is left"),
    ],
)
def test_faults_are_seen(after: list[Turn], fault: str) -> None:
    assert any(fault in problem for problem in problems(GOOD, after, SHORT_TAIL))


def test_right_rows_are_not_blamed() -> None:
    noticed = text_changed(S, S.text + NOTICE)
    for after in (
        [noticed, H, G1, T1, summary(), END],
        [noticed, H, G1, T1, summary(), G3, T3, END],
        [S, H, G1, T1, G3, T3, END],
    ):
        assert problems(GOOD, after, SHORT_TAIL) == []
    joined_row = [S, text_changed(H, f"{H.text}\n\nS"), G3, T3, END]
    assert problems(GOOD, joined_row, Policy(first_gpt=False, first_tool=False, last_n_turns=1)) == []
    without_system = [text_changed(H, f"S\n\n{H.text}"), *GOOD[2:]]
    assert problems(GOOD, without_system, Policy(first_system=False)) == []


def test_our_own_format_is_kept() -> None:
    thoughtless = [S, H, G1, T1, text_changed(G2, G2.text.replace("<think>", "", 1)), T2, END]
    assert any("think block" in problem for problem in problems(GOOD, thoughtless, SHORT_TAIL))
    unasked = [S, G1, T1, END]
    policy = replace(SHORT_TAIL, first_human=False)
    assert problems(GOOD, unasked, policy) == ["a turn stands where another role belongs"]
    assert problems([S, G1, T1, G2, T2, END], unasked, policy) == []  # as it was before
