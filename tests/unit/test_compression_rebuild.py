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
ROLES = {"s": "system", "h": "human", "g": "gpt", "a": "gpt", "t": "tool"}  # a: without a call
WIRE = {"s": "system", "h": "user", "g": "assistant", "a": "assistant", "t": "tool"}
CALL = "<tool_call></tool_call>"
POLICY = Policy(summary_notice_text=NOTICE)
QUIET = Policy()


def turns_of(row: Any) -> tuple[Turn, ...]:
    reading = read(fields_of(json.dumps(row).encode()))
    assert reading
    return reading.turns


def named(order: str, form: str = "conversations") -> tuple[Turn, ...]:
    """Turns whose text is their letter and place; those of `g` make a call."""
    told: list[dict[str, Any]] = []
    for n, letter in enumerate(order):
        if form == "messages":
            calls: dict[str, Any] = {"tool_calls": [{}]} if letter == "g" else {}
            told.append({"role": WIRE[letter], "content": f"{letter}{n}"} | calls)
        else:
            told.append({"from": ROLES[letter], "value": f"{letter}{n}" + CALL * (letter == "g")})
    return turns_of({form: told})


def parts(order: str, guarded: str, form: str = "conversations") -> tuple[Part, ...]:
    return tuple(Part(turn, mark == "#") for turn, mark in zip(named(order, form), guarded, strict=True))


def texts(found: Sequence[Part]) -> list[str]:
    return [part.turn.text.replace(CALL, "").replace("\n[{}]", "") for part in found]


def guards(found: Sequence[Part]) -> str:
    return "".join("#" if part.guarded else "*" if part.made else "." for part in found)


# --- summaries


@pytest.mark.parametrize("form", ["conversations", "messages"])
@pytest.mark.parametrize(
    ("order", "guarded", "region", "expected", "left"),
    [
        ("shgtgta", "####..#", (4, 6), ["s0", "h1\n\nS", "g2", "t3", "a6"], "#####"),  # though calls stand between
        ("shgtgta", "##....#", (2, 4), ["s0", "h1\n\nS", "g4", "t5", "a6"], "##..#"),
        ("shgtaha", "####..#", (4, 6), ["s0", "h1\n\nS", "g2", "t3", "a6"], "#####"),
        ("shahgta", "###...#", (3, 4), ["s0", "h1", "a2", "S", "g4", "t5", "a6"], "###*..#"),
        ("shahgta", "###...#", (3, 6), ["s0", "h1", "a2", "S", "a6"], "###*#"),
        ("shahagtha", "###...###", (3, 5), ["s0", "h1", "a2", "g5", "t6", "S\n\nh7", "a8"], "###.###"),
        ("shahaha", "###..##", (3, 5), ["s0", "h1", "a2", "S\n\nh5", "a6"], "#####"),
        ("shahaha", "###...#", (3, 5), ["s0", "h1", "a2", "S\n\nh5", "a6"], "###*#"),
        ("shaha", "##.##", (2, 3), ["s0", "h1\n\nS\n\nh3", "a4"], "###"),
        ("shgta", "#...#", (1, 2), ["s0", "S", "g2", "t3", "a4"], "#*..#"),
        ("hgta", "#..#", (1, 3), ["h0\n\nS", "a3"], "##"),
        ("gtgta", "....#", (0, 2), ["S", "g2", "t3", "a4"], "*..#"),
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
def test_a_folded_system_turn_leaves_one_with_the_notice(form: str) -> None:
    notice = NOTICE.strip()
    for region, expected in {
        (0, 1): [notice, "S\n\nh1", "g2", "t3", "a4"],
        (0, 2): [notice, "S", "g2", "t3", "a4"],
        (0, 4): [notice, "S", "a4"],
    }.items():
        after = folded(parts("shgta", "....#", form), Region(*region, 9), "S", POLICY)
        assert texts(after) == expected
        assert (after[0].turn.role, after[0].guarded) == ("system", True)
        assert after[0].turn.raws[0].keys() == parts("s", "#", form)[0].turn.raws[0].keys()
    again = folded(folded(parts("shgta", "....#", form), Region(0, 2, 9), "S", POLICY), Region(1, 4, 9), "S2", POLICY)
    assert texts(again) == [notice, "S2", "a4"]


@pytest.mark.parametrize("form", ["conversations", "messages"])
def test_the_notice_stands_in_the_system_turn_once(form: str) -> None:
    once = folded(parts("shgtgtgta", "####....#", form), Region(4, 6, 9), "S", POLICY)
    twice = folded(once, Region(4, 6, 9), "S2", POLICY)
    assert once[0].turn.text == twice[0].turn.text == f"s0{NOTICE}"
    assert texts(twice)[1:] == ["h1\n\nS\n\nS2", "g2", "t3", "a8"]
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


def test_each_turn_is_masked_or_not_for_itself() -> None:
    turns = exchange([LONG], [LONG])
    for first_tool, masks in ((False, [True, False]), (True, [False, True])):
        for first_gpt in (False, True):
            policy = Policy(strategy="mask", last_n_turns=1, first_tool=first_tool, first_gpt=first_gpt)
            after = [part.turn for part in masked(parts_of(turns, policy), 50, COUNTER)]
            assert [MASK in turn.text for turn in after if turn.role == "tool"] == masks
            assert not problems(turns, after, policy)


def test_a_result_of_white_space_is_no_text_to_mask() -> None:
    class Letters(WordCounter):
        def text(self, text: str) -> int:
            return len(text)

    blank = turns_of({"conversations": [{"from": "tool", "value": " \n" * 500}, {"from": "gpt", "value": "x"}]})
    assert masked(guard_ends(blank, 0), 10_000, Letters())[0].turn == blank[0]


@pytest.mark.parametrize(
    ("order", "guarded", "need", "expected"),
    [
        ("shgtgtgta", "##......#", 1, "s0 h1 g4 t5 g6 t7 a8"),
        ("shgtgtgta", "##......#", 20, "s0 h1 g6 t7 a8"),
        ("shgtgtgta", "##......#", 10**6, "s0 h1 a8"),
        ("shgtgtgta", "####....#", 1, "s0 h1 g2 t3 g6 t7 a8"),
        ("shgtahgta", "####....#", 1, "s0 h1 g2 t3 g6 t7 a8"),  # else two questions would have nothing between
        ("shgtahgta", "####.#..#", 10**6, "s0 h1 g2 t3 a4 h5 a8"),
        ("shgtaha", "#.##..#", 1, "s0 h1 g2 t3 a6"),
        ("shahgta", "####..#", 10**6, "s0 h1 a2 h3 a6"),
        ("shahaha", "##....#", 1, "s0 h1 a4 h5 a6"),  # the question before is protected: the one after goes
        ("shahaha", "#.....#", 1, "s0 h3 a4 h5 a6"),  # with the question before
        ("shahgta", "##.####", 10**6, "s0 h1 a2 h3 g4 t5 a6"),  # both neighbours are protected
        ("sgtgta", "#....#", 1, "s0 g3 t4 a5"),
        ("shaaa", "##..#", 1, "s0 h1 a3 a4"),
        ("shtgta", "##...#", 1, "s0 h1 g3 t4 a5"),  # results of nothing
        ("gtah", "####", 10**6, "g0 t1 a2 h3"),
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


def test_the_last_turn_is_not_shortened() -> None:
    turns = exchange([LONG * 9], [LONG * 9])[:-1]
    before = parts_of(turns, Policy())
    after = with_shorter_results(before, 10**6, COUNTER)
    assert after[-1] == before[-1]
    assert after[3] != before[3]
    assert shortenable(before, COUNTER) == shortenable(before[:-1], COUNTER) > 500


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
        ([S, H, G1, T1, summary(), END], "do not alternate"),  # tool turns and calls are not counted
        ([S, H, G1, T1, summary(), G3, T3, END], "do not alternate"),
        ([S, H, G1, T1, text_changed(T2, T2.text.replace("word", "", 1))], "last turn"),
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
        [noticed, text_changed(H, f"{H.text}\n\nS"), G1, T1, END],
        [noticed, text_changed(H, f"S\n\n{H.text}\n\nS"), G1, T1, G3, T3, END],
        [S, H, G1, T1, G3, T3, END],
    ):
        assert problems(GOOD, after, SHORT_TAIL) == []
    joined_row = [S, text_changed(H, f"{H.text}\n\nS"), G3, T3, END]
    assert problems(GOOD, joined_row, Policy(first_gpt=False, first_tool=False, last_n_turns=1)) == []
    policy = Policy(first_system=False, summary_notice_text=NOTICE)
    told = [text_changed(H, f"S\n\n{H.text}"), *GOOD[2:]]
    assert problems(GOOD, [text_changed(S, NOTICE.strip()), *told], policy) == []
    assert problems(GOOD, [text_changed(S, "Other."), *told], policy) == ["the system turn has changed"]
    assert "the system turn is not the first" in problems(GOOD, told, policy)
    assert "protected turn 0 (system) is not there unbroken" in problems(GOOD, told, Policy(first_system=False))


def test_our_own_format_is_kept() -> None:
    thoughtless = [S, H, G1, T1, text_changed(G2, G2.text.replace("<think>", "", 1)), T2, END]
    assert any("think block" in problem for problem in problems(GOOD, thoughtless, SHORT_TAIL))
    unasked = [S, G1, T1, END]
    policy = replace(SHORT_TAIL, first_human=False)
    assert "a turn stands where another role belongs" in problems(GOOD, unasked, policy)
    assert problems([S, G1, T1, G2, T2, END], unasked, policy) == []  # as it was before


@pytest.mark.parametrize(
    ("before", "after", "wrong"),
    [
        ("ghgsh", (1, 3, 4), ["turns 0 and 1 are both human"]),
        ("hgsh", (0, 2, 3), ["a human turn stands right before a system turn", "turns 0 and 1 are both human"]),
        ("hgsga", (0, 2, 4), ["a human turn stands right before a system turn"]),
        ("hgsga", (0, 1, 2, 4), []),
        ("hsgga", (0, 1, 4), []),
        ("hshgsa", (0, 1, 2, 4, 5), ["a human turn stands right before a system turn"]),
    ],
)
def test_around_a_system_turn_that_is_not_the_first(before: str, after: tuple[int, ...], wrong: list[str]) -> None:
    turns = named(before, "messages")
    found = problems(turns, [turns[place] for place in after], replace(QUIET, last_n_turns=1, first_gpt=False))
    assert [each for each in found if each in wrong] == wrong
    assert bool(found) == bool(wrong)
