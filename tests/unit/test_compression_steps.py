"""A row's steps to its target: for rows made up, every promise; for rows by hand, each way that it may go."""

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.text import clean
from compression.counting import open_counter
from compression.forms import calls_in, fields_of, read, results_in
from compression.plan import protected
from compression.rebuild import MASK
from compression.steps import MAX_PASSES, advance, unchanged
from compression.summary import PREFIX
from compression.types import Ask, Count, Counter, Done, Policy, Rejected, RowMetrics, Step, Turn
from compression.validator import problems
from tests.unit.trajectories import NOTICE, WordCounter, trajectories, trajectory

COUNTER = WordCounter()
POLICY = Policy(
    target_max_tokens=6000, summary_target_tokens=100, summary_notice_text=NOTICE, window=8000, summary_model="small"
)


def line_of(row: Any) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode()


def turns_of(line: bytes) -> tuple[Turn, ...]:
    reading = read(fields_of(line))
    assert reading
    return reading.turns


def finished(line: bytes, policy: Policy, *sizes: int, counter: Counter = COUNTER) -> tuple[Done | Rejected, list[Ask]]:
    """The end of a row whose summaries have these lengths in words, the last of them for all further ones."""
    summaries: list[str] = []
    asks: list[Ask] = []
    while isinstance(step := advance(line, summaries, policy, counter), Ask):
        asks.append(step)
        summaries.append("sum " * (sizes or (60,))[min(len(summaries), len(sizes or (1,)) - 1)])
        assert len(asks) <= MAX_PASSES
    return step, asks


def done(line: bytes, policy: Policy, *sizes: int) -> Done:
    step, _ = finished(line, policy, *sizes)
    assert isinstance(step, Done)
    return step


def conversation(*words: int, ending: int = 3) -> dict[str, Any]:
    """system, human, then a call and a result of so many words each, an answer."""
    turns = [{"from": "system", "value": "be good"}, {"from": "human", "value": "do it"}]
    for n, size in enumerate(words):
        call = '<tool_call>\n{"name": "t", "arguments": {}}\n</tool_call>'
        content = json.dumps(f"r{n} " * size)
        turns.append({"from": "gpt", "value": f"<think>\nstep {n}\n</think>\n{call}"})
        result = f'{{"tool_call_id": "call_{n + 1}_0", "name": "t", "content": {content}}}'
        turns.append({"from": "tool", "value": f"<tool_response>\n{result}\n</tool_response>"})
    turns.append({"from": "gpt", "value": "<think>\n</think>\n" + "end " * ending})
    return {"id": 7, "conversations": turns, "score": 1.0}


# --- promises for rows of every kind


def check(line: bytes, policy: Policy, step: Done) -> None:
    """Whatever was done to a row, this holds."""
    before, after, told = turns_of(line), turns_of(step.line), step.metrics
    total = COUNTER.row(after).total if after else 0
    assert problems(before, after, policy) == []
    assert told.was_compressed == (step.line != line)
    assert not told.failed, told.error
    assert told.still_over_limit == (total > policy.target_max_tokens)
    assert told.compressed_tokens == total
    assert told.original_tokens == (COUNTER.row(before).total if before else 0)
    assert total < told.original_tokens or step.line == line
    assert told.tokens_saved == told.original_tokens - total
    assert (told.original_turns, told.compressed_turns) == (len(before), len(after))
    assert told.tool_calls_after == sum(map(calls_in, after)) <= told.tool_calls_before
    old, new = json.loads(line), json.loads(step.line)
    assert list(old) == list(new)
    assert {k: v for k, v in old.items() if k not in ("conversations", "messages")} == {
        k: v for k, v in new.items() if k not in ("conversations", "messages")
    }
    if told.was_compressed and not told.still_over_limit:
        again = advance(step.line, [], replace(policy, skip_under_target=True), COUNTER)
        assert isinstance(again, Done)
        assert (again.line, again.metrics.skipped_under_target) == (step.line, True)


@pytest.mark.parametrize("form", ["conversations", "messages"])
@pytest.mark.parametrize("strategy", ["summary", "mask", "drop"])
@pytest.mark.parametrize("shorten", [False, True])
def test_trajectories_reach_the_target_or_say_so(form: str, strategy: Any, shorten: bool) -> None:
    policy = replace(POLICY, strategy=strategy, shorten_turns=shorten)
    ended = []
    for row in trajectories(24, 11, form):
        line = line_of(row)
        step, asks = finished(line, policy, 120, 60)
        if isinstance(step, Rejected):  # of 120 words in a small place
            continue
        check(line, policy, step)
        assert unanswered(line) == unanswered(step.line)
        assert len(asks) == step.metrics.passes
        assert strategy == "summary" or not asks
        assert finished(line, policy, 120, 60)[0] == step
        ended.append((step.metrics.was_compressed, step.metrics.still_over_limit))
    assert (True, False) in ended
    assert (False, False) in ended
    assert shorten or (False, True) in ended


def unanswered(line: bytes) -> int:
    turns = turns_of(line)
    return sum(map(calls_in, turns)) - sum(len(results_in(turn)) for turn in turns)


def odd_row(draw: random.Random) -> dict[str, Any]:
    """Roles in any order, texts of any kind, calls without results and results without calls."""
    roles = draw.choices(("system", "human", "gpt", "tool"), weights=(1, 4, 6, 6), k=draw.randint(0, 25))
    form = draw.choice((odd_turn, odd_message))
    told = [form(draw, role) for role in roles]
    return {"a": 1, "conversations" if form is odd_turn else "messages": told, "z": [None]}


def words(draw: random.Random) -> str:
    return " ".join(draw.choices(("alpha", "<|im_end|>", "x=1", "<b>", "é"), k=draw.choice((0, 1, 5, 30, 100))))


def odd_turn(draw: random.Random, role: str) -> dict[str, Any]:
    value: Any = words(draw)
    if role == "gpt" and draw.random() < 0.7:
        value = "<think>\n</think>\n" + value + '\n<tool_call>\n{"name": "t", "arguments": {}}\n</tool_call>'
    if role == "tool" and draw.random() < 0.8:
        contents = [draw.choice((json.dumps(words(draw)), json.dumps({"o": words(draw)}), "nonsense")) for _ in "ab"]
        value = "\n".join(f'<tool_response>\n{{"name": "t", "content": {c}}}\n</tool_response>' for c in contents)
    return {"from": role, "value": None if draw.random() < 0.05 else value}


def odd_message(draw: random.Random, role: str) -> dict[str, Any]:
    content: Any = draw.choice((words(draw), None, [{"type": "text", "text": words(draw)}, {"type": "image_url"}]))
    told: dict[str, Any] = {"role": {"human": "user", "gpt": "assistant"}.get(role, role), "content": content}
    if role == "gpt" and draw.random() < 0.6:
        told["tool_calls"] = draw.choice(([{"id": "a"}], [{}, {}], None, "none", [1]))
    return told | ({"tool_call_id": draw.choice(("a", None, 3))} if role == "tool" else {})


POLICIES = st.builds(
    Policy,
    target_max_tokens=st.sampled_from((50, 200, 400, 800)),
    summary_target_tokens=st.sampled_from((10, 30)),
    first_system=st.booleans(),
    first_human=st.booleans(),
    first_gpt=st.booleans(),
    first_tool=st.booleans(),
    last_n_turns=st.integers(0, 5),
    strategy=st.sampled_from(("summary", "summary", "mask", "drop")),
    shorten_turns=st.booleans(),
    skip_under_target=st.booleans(),
    add_summary_notice=st.booleans(),
    summary_notice_text=st.just(NOTICE),
)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), POLICIES, st.lists(st.integers(1, 60), min_size=1, max_size=4))
def test_no_order_of_roles_and_no_policy_breaks_a_row(seed: int, policy: Policy, sizes: list[int]) -> None:
    line = line_of(odd_row(random.Random(seed)))
    check(line, policy, done(line, policy, *sizes))


class Strict(WordCounter):
    """As Mistral's templates: tool turns and calls are not counted, the others take turns, the user first."""

    def row(self, turns: Sequence[Turn]) -> Count:
        told = [turn.role for turn in turns if turn.role == "human" or (turn.role == "gpt" and not calls_in(turn))]
        if any((role == "human") != (n % 2 == 0) for n, role in enumerate(told)):
            raise ValueError("roles must alternate user/assistant/user/assistant/...")
        return super().row(turns)


def strict_row(draw: random.Random) -> dict[str, Any]:
    """system, then human turns, calls with their results, answers, as a strict template takes them."""
    orders = [draw.choice(("h", "h", "hgt", "hgtgt", "hgtgtgtgt")) + "a" for _ in range(draw.randint(1, 6))]
    order = "s" * draw.randint(0, 1) + "".join(orders)
    order = order[: len(order) - draw.randint(0, 3)]
    roles = {"s": "system", "h": "human", "g": "gpt", "a": "gpt", "t": "tool"}
    native = draw.random() < 0.5
    told: list[dict[str, Any]] = []
    for letter in order:
        text = " ".join(["word"] * draw.choice((1, 5, 30, 100)))
        call = '\n<tool_call>\n{"name": "t", "arguments": {}}\n</tool_call>' if letter == "g" else ""
        said = odd_message(random.Random(0), roles[letter]) | {"content": text} if native else {}
        said |= {"tool_calls": [{"id": "a"}]} if letter == "g" else {"tool_calls": []} if letter == "a" else {}
        told.append(said if native else {"from": roles[letter], "value": text + call})
    return {"messages" if native else "conversations": told}


def test_what_a_strict_template_takes_it_takes_afterwards() -> None:
    ended: list[type] = []

    @settings(max_examples=300, deadline=None)
    @given(st.integers(0, 10**6), POLICIES, st.lists(st.integers(1, 60), min_size=1, max_size=4))
    def holds(seed: int, policy: Policy, sizes: list[int]) -> None:
        line = line_of(strict_row(random.Random(seed)))
        step, _ = finished(line, policy, *sizes, counter=Strict())
        ended.append(type(step))
        if isinstance(step, Rejected):  # a summary in place of very little
            assert step.problem == "the row is not shorter with the summary"
            return
        check(line, policy, step)
        Strict().row(turns_of(step.line))
        assert systems(step.line) == systems(line)

    holds()
    assert ended.count(Done) >= 280


def systems(line: bytes) -> list[int]:
    return [n for n, turn in enumerate(turns_of(line)) if turn.role == "system"]


@pytest.mark.parametrize("strategy", ["summary", "mask", "drop"])
def test_strict_rows_reach_the_target(strategy: Any) -> None:
    line = line_of(conversation(10, 300, 300, 300, 10, 10))
    step, _ = finished(line, replace(POLICY, target_max_tokens=900, strategy=strategy), 60, counter=Strict())
    assert isinstance(step, Done)
    assert (step.metrics.was_compressed, step.metrics.still_over_limit) == (True, False)


def test_protected_turns_stand_there_word_for_word() -> None:
    compressed = 0
    for row in trajectories(30, 5, unusual=0.0):
        line = line_of(row)
        step = done(line, POLICY, 90)
        if not step.metrics.was_compressed:
            continue
        compressed += 1
        before, after = turns_of(line), turns_of(step.line)
        assert after[0].text == before[0].text + NOTICE
        assert after[1].text.startswith(before[1].text)
        kept = [before[n] for n in sorted(protected(before, POLICY)) if before[n].role in ("gpt", "tool")]
        assert [turn for turn in after if turn in kept] == kept
        assert after[-1] == before[-1]
    assert compressed >= 15


# --- each way by hand


def test_a_row_within_the_target_is_not_touched() -> None:
    line = b' {"conversations" : [{"from":"human","value":"hi"}] } '
    step = done(line, POLICY)
    assert step.line == line
    assert step.metrics == RowMetrics(
        original_tokens=8,
        compressed_tokens=8,
        original_turns=1,
        compressed_turns=1,
        skipped_under_target=True,
        strategy="summary",
        tokenizer="words",
    )


def test_just_enough_of_the_oldest_is_folded_and_told_in_the_human_turn_before() -> None:
    line = line_of(conversation(10, 300, 300, 300, 10, 10))
    policy = replace(POLICY, target_max_tokens=900)
    step, (ask,) = finished(line, policy, 60)
    assert isinstance(step, Done)
    told = step.metrics
    assert (told.region_start_idx, told.region_end_idx, told.region_turns_count) == (4, 8, 4)
    assert (told.was_compressed, told.passes, told.still_over_limit, told.failed) == (True, 1, False, False)
    assert (told.tool_calls_before, told.tool_calls_after) == (6, 4)
    assert (told.original_turns, told.compressed_turns, told.turns_removed) == (15, 11, 4)
    assert (told.summary_model, told.tokenizer, told.strategy) == ("small", "words", "summary")
    assert told.compression_ratio == round(told.compressed_tokens / told.original_tokens, 4)
    turns, old = json.loads(step.line)["conversations"], json.loads(line)["conversations"]
    assert turns[0]["value"] == "be good" + NOTICE
    assert turns[1] == {"from": "human", "value": f"do it\n\n{PREFIX} {'sum ' * 59}sum"}
    assert turns[2:4] == old[2:4]
    assert turns[4:] == old[8:]
    assert ask.max_tokens == 200
    assert ask.prompt_tokens == COUNTER.text(ask.prompt) <= policy.window
    assert "[Turn 4 - GPT]" in ask.prompt
    assert "[Turn 7 - TOOL]" in ask.prompt
    assert "Turn 8" not in ask.prompt


def test_a_summary_that_came_out_long_takes_a_further_pass() -> None:
    line = line_of(conversation(10, 300, 300, 300, 300, 10, 10))
    policy = replace(POLICY, target_max_tokens=1100)
    step, asks = finished(line, policy, 600, 40)
    assert isinstance(step, Done)
    assert len(asks) == step.metrics.passes == 2
    assert asks[1].metrics.passes == 1
    assert "r4 r4" in asks[1].prompt
    assert "sum sum" not in asks[1].prompt
    assert not step.metrics.still_over_limit
    assert step.line.count(PREFIX.encode()) == 2  # both in the human turn
    assert (step.metrics.region_start_idx, step.metrics.region_end_idx) == (4, 10)


def test_a_long_summary_that_is_a_turn_of_its_own_is_folded_again() -> None:
    row = conversation(300, 300, 300, 300, 10, 10)
    row["conversations"][2:2] = [{"from": "gpt", "value": "<think>\n</think>\nyes"}, {"from": "human", "value": "on"}]
    step, asks = finished(line_of(row), replace(POLICY, target_max_tokens=1100, first_tool=False), 600, 40)
    assert isinstance(step, Done)
    assert len(asks) == step.metrics.passes == 2
    assert "sum sum" in asks[1].prompt
    assert step.line.count(PREFIX.encode()) == 1
    assert [turn["from"] for turn in json.loads(step.line)["conversations"]][:5] == [
        "system",
        "human",
        "gpt",
        "human",
        "gpt",
    ]


def test_passes_end_where_each_summary_is_longer_than_the_last() -> None:
    line = line_of(conversation(10, *[60] * 90, 10, 10))
    policy = replace(POLICY, target_max_tokens=6000, summary_target_tokens=500)
    step, asks = finished(line, policy, 1000, 1350, 1650, 1900)
    assert isinstance(step, Done)
    assert len(asks) == step.metrics.passes == MAX_PASSES
    assert (step.metrics.still_over_limit, step.metrics.was_compressed) == (True, True)
    check(line, policy, step)


def test_no_plan_means_no_call_and_no_change() -> None:
    line = line_of(conversation(10, 300, 300, 2000))
    step, asks = finished(line, replace(POLICY, target_max_tokens=1500))
    assert isinstance(step, Done)
    assert not asks
    assert step.line == line
    assert (step.metrics.still_over_limit, step.metrics.was_compressed, step.metrics.failed) == (True, False, False)


def test_a_region_that_is_no_longer_than_its_summary_is_not_paid_for() -> None:
    line = line_of(conversation(500, 20, 20, 10, 10))
    step, asks = finished(line, replace(POLICY, target_max_tokens=620))
    assert (asks, isinstance(step, Done) and step.line) == ([], line)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "empty"),
        ("  \n", "empty"),
        (PREFIX, "empty"),
        ("long " * 2000, "not shorter"),
        ("<tool_call>", "tool_call"),
    ],
)
def test_what_is_no_summary_is_rejected(text: str, problem: str) -> None:
    line = line_of(conversation(10, 300, 300, 300, 10, 10))
    step = advance(line, [text], replace(POLICY, target_max_tokens=900), COUNTER)
    assert isinstance(step, Rejected)
    assert problem in step.problem


def test_a_row_whose_summary_is_not_to_be_had_stays_as_it_was() -> None:
    line = line_of(conversation(10, 300, 300, 300, 300, 10, 10))
    _, asks = finished(line, replace(POLICY, target_max_tokens=1100), 300, 40)
    for ask in asks:
        step = unchanged(line, replace(ask.metrics, summarization_api_calls=3, summarization_errors=3), "status 500")
        told = step.metrics
        assert step.line == line
        assert (told.failed, told.error, told.summarization_api_calls) == (True, "status 500", 3)
        assert told.compressed_tokens == told.original_tokens > 1100
        assert (told.was_compressed, told.passes, told.tokens_saved, told.region_start_idx) == (False, 0, 0, -1)
        assert told.tool_calls_after == told.tool_calls_before == 7


def test_further_summaries_than_a_row_needs_change_nothing() -> None:
    line = line_of(conversation(10, 300, 300, 300, 10, 10))
    policy = replace(POLICY, target_max_tokens=900)
    assert advance(line, ["sum"], policy, COUNTER) == advance(line, ["sum", "more"], policy, COUNTER)


def test_the_middle_of_a_short_row_is_found_by_roles() -> None:
    row = conversation(10, 2000, 5)  # seven turns and one huge result
    assert not done(line_of(row), replace(POLICY, target_max_tokens=600, last_n_turns=3), 60).metrics.still_over_limit
    late = conversation(10, 10)
    answers = [
        turn for n in range(40) for turn in ({"from": "gpt", "value": "g " * 30}, {"from": "human", "value": "h"})
    ]
    late["conversations"][2:2] = answers  # the first result comes late
    step = done(line_of(late), replace(POLICY, target_max_tokens=400), 60)
    assert (step.metrics.still_over_limit, step.metrics.was_compressed) == (False, True)


@pytest.mark.parametrize(
    ("place", "switches"),
    [(0, ["first_system"]), (1, ["first_human"]), (2, ["first_gpt", "first_tool"]), (3, ["first_gpt", "first_tool"])],
)
def test_each_switch_lets_its_turn_go(place: int, switches: list[str]) -> None:
    row = conversation(10, 10)
    row["conversations"][place]["value"] += "x " * 600 if place < 2 else ""
    if place == 2:
        row["conversations"][2]["value"] = "<think>\n" + "x " * 600 + row["conversations"][2]["value"][8:]
    if place == 3:
        row["conversations"][3]["value"] = row["conversations"][3]["value"].replace("r0", "x " * 600, 1)
    line = line_of(row)
    policy = replace(POLICY, target_max_tokens=400, last_n_turns=1)
    for off in ([], switches[:-1], switches[1:]):  # the first call and the first result are one unit
        still = replace(policy, **dict.fromkeys(off, False))
        assert done(line, still, 60).line == line
    step = done(line, replace(policy, **dict.fromkeys(switches, False)), 60)
    assert (step.metrics.was_compressed, step.metrics.still_over_limit) == (True, False)
    assert b"x x x" not in step.line


def test_without_its_skip_a_row_within_the_target_is_compressed_once() -> None:
    line = line_of(conversation(10, 300, 300, 10, 10))
    step, asks = finished(line, replace(POLICY, skip_under_target=False), 40)
    assert isinstance(step, Done)
    assert (len(asks), step.metrics.was_compressed, step.metrics.skipped_under_target) == (1, True, False)
    assert step.metrics.compressed_tokens < 400
    small = done(line_of(conversation(10)), replace(POLICY, skip_under_target=False))
    assert (small.metrics.was_compressed, small.metrics.skipped_under_target) == (False, False)


@pytest.mark.parametrize("form", ["conversations", "messages"])
def test_one_huge_group_of_results_is_shortened_where_that_is_allowed(form: str) -> None:
    results = [{"role": "tool", "tool_call_id": f"{n}", "content": "data " * 5000} for n in range(8)]
    row: dict[str, Any]
    if form == "messages":
        calls = [{"id": f"{n}", "function": {"name": "t", "arguments": "{}"}} for n in range(8)]
        assistant = {"role": "assistant", "content": "", "tool_calls": calls}
        row = {"messages": [{"role": "user", "content": "q"}, assistant, *results, {"role": "assistant"}]}
    else:
        row = conversation(5)
        blocks = ['<tool_response>\n{"name": "t", "content": "' + "data " * 5000 + '"}\n</tool_response>'] * 8
        row["conversations"][3] = {"from": "tool", "value": "\n".join(blocks)}
    line = line_of(row)
    policy = replace(POLICY, target_max_tokens=10_000)
    kept = done(line, policy)
    assert (kept.line, kept.metrics.still_over_limit) == (line, True)
    step, asks = finished(line, replace(policy, shorten_turns=True))
    assert isinstance(step, Done)
    assert not asks
    assert (step.metrics.shortened_turns, step.metrics.was_compressed, step.metrics.passes) == (1, True, 0)
    assert 9_000 < step.metrics.compressed_tokens <= 10_000
    assert step.metrics.region_start_idx == -1
    row[form] = row[form][:-1]  # now the results are the last turn, which stays as it is
    last = done(line_of(row), replace(policy, shorten_turns=True))
    assert (last.line, last.metrics.still_over_limit) == (line_of(row), True)
    for result in results_in(turns_of(step.line)[-2]):
        assert result.text.startswith("data data")
        assert result.text.endswith("data data ")
        assert "characters left out" in result.text


def test_shortening_is_for_what_folding_leaves_too_large() -> None:
    line = line_of(conversation(10, 400, 400, 10, 2000))
    policy = replace(POLICY, target_max_tokens=1200, shorten_turns=True)
    step, asks = finished(line, policy, 60)
    assert isinstance(step, Done)
    check(line, policy, step)
    assert (len(asks), step.metrics.shortened_turns, step.metrics.still_over_limit) == (1, 1, False)
    easy = done(line, replace(policy, target_max_tokens=2600), 60)
    assert (easy.metrics.shortened_turns, easy.metrics.passes) == (0, 1)


def test_no_result_is_shortened_where_that_does_not_suffice() -> None:
    line = line_of(conversation(10, 300, 300, 300, 10, 260))
    step, asks = finished(line, replace(POLICY, target_max_tokens=800, shorten_turns=True), 800)
    assert isinstance(step, Done)
    told = step.metrics
    assert (len(asks), told.still_over_limit, told.was_compressed, told.shortened_turns) == (1, True, True, 0)


class Perverse(WordCounter):
    """Notes cost more than what they stand for, once they are in a row."""

    def row(self, turns: Sequence[Turn]) -> Count:
        count = super().row(turns)
        return Count(count.total + 5000 * any(MASK in turn.text for turn in turns), count.turns)


def test_a_row_never_gets_longer() -> None:
    line = line_of(conversation(10, 300, 300, 300, 10, 10))
    policy = replace(POLICY, target_max_tokens=10**6, strategy="mask", skip_under_target=False)
    assert done(line, policy).metrics.was_compressed
    step = advance(line, [], policy, Perverse())
    assert isinstance(step, Done)
    assert (step.line, step.metrics.was_compressed) == (line, False)


@pytest.mark.parametrize(("strategy", "calls"), [("mask", 7), ("drop", 5)])
def test_without_a_model_just_enough_goes(strategy: Any, calls: int) -> None:
    line = line_of(conversation(10, 300, 300, 300, 300, 10, 10))
    step, asks = finished(line, replace(POLICY, target_max_tokens=1200, strategy=strategy))
    assert isinstance(step, Done)
    assert not asks
    told = step.metrics
    assert (told.tool_calls_before, told.tool_calls_after, told.passes, told.summary_model) == (7, calls, 0, "")
    assert 800 < told.compressed_tokens <= 1200
    assert (told.region_start_idx, told.region_end_idx) == ((5, 8) if strategy == "mask" else (4, 8))
    assert b"r3 r3" in step.line
    assert b"r1 r1" not in step.line


@pytest.mark.parametrize("strategy", ["mask", "drop"])
def test_without_a_model_a_row_that_cannot_get_there_stays(strategy: Any) -> None:
    line = line_of(conversation(10, 300, 300, 2000))
    step = done(line, replace(POLICY, target_max_tokens=1500, strategy=strategy))
    assert (step.line, step.metrics.still_over_limit) == (line, True)


# --- odd rows


def odd_lines() -> Iterator[Any]:
    deep = "[" * 3000 + "]" * 3000
    call = {"id": "a", "function": {"name": "t", "arguments": deep}}
    yield pytest.param(b'{"text": "no turns"}', "", id="neither form")
    yield pytest.param(b'{"conversations": []}', "", id="empty")
    yield pytest.param(b'{"conversations": [{"from": "observation", "value": ""}]}', "unknown role", id="role")
    yield pytest.param(b'{"messages": [{"role": "user"}, 3]}', "turn 1 is no object", id="no object")
    yield pytest.param(b'{"x": ' + deep.encode() + b', "messages": []}', "nested too deep", id="nested")
    yield pytest.param(line_of({"messages": [{"role": "assistant", "tool_calls": [call]}]}), "", id="deep arguments")


@pytest.mark.parametrize("field", ["conversations", "messages"])
def test_rows_that_cannot_be_read_are_counted(field: str) -> None:
    key, text = ("from", "value") if field == "conversations" else ("role", "content")
    told = [{key: "user" if key == "role" else "human", text: "one two"}, {key: "observation", text: "three " * 9}, [1]]
    line = line_of({field: told})
    for target, over in ((100, False), (10, True)):
        step = done(line, replace(POLICY, target_max_tokens=target))
        metrics = step.metrics
        assert (step.line, metrics.failed, metrics.still_over_limit) == (line, True, over)
        assert (metrics.original_tokens, metrics.compressed_tokens) == (14, 14)  # [1] are three
        assert (metrics.original_turns, metrics.compressed_turns) == (3, 3)


@pytest.mark.parametrize(("line", "error"), list(odd_lines()))
def test_an_odd_row_stays_as_it_is_and_says_why(line: bytes, error: str) -> None:
    step = done(line, POLICY)
    assert step.line == line
    assert error in step.metrics.error
    assert step.metrics.failed == bool(error)


@pytest.mark.parametrize("line", [b"[]", b"3", b"{", b""])
def test_a_line_that_is_no_row_is_an_error(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
        advance(line, [], POLICY, COUNTER)


def test_lone_surrogates_and_special_tokens_pass() -> None:
    row = conversation(10, 300, 300, 300, 10, 10)
    row["conversations"][1]["value"] = "<|endoftext|> \ud800 <|im_end|>"
    row["conversations"][-1]["value"] += "<|fim_prefix|>"
    row["\udfff"] = "\ud800"
    line = json.dumps(row).encode()
    step = done(line, replace(POLICY, target_max_tokens=900), 60)
    assert step.metrics.was_compressed
    told = json.loads(step.line.decode())
    assert told["conversations"][1]["value"].startswith(clean(row["conversations"][1]["value"]) + "\n\n")
    assert told["conversations"][-1] == row["conversations"][-1]
    assert list(told) == ["id", "conversations", "score", "\ufffd"]


class Refusing(WordCounter):
    """Its template takes rows of more than one turn, and none with a summary."""

    def row(self, turns: Sequence[Turn]) -> Count:
        if len(turns) == 1 or any("sum sum" in turn.text for turn in turns):
            raise ValueError("the template says: no")
        return super().row(turns)


def test_rows_that_the_template_refuses_are_kept() -> None:
    one = b'{"conversations": [{"from": "human", "value": "hi"}]}'
    step = advance(one, [], POLICY, Refusing())
    assert isinstance(step, Done)
    assert (step.line, step.metrics.error) == (one, "the template says: no")
    assert step.metrics.original_tokens == step.metrics.compressed_tokens == 1
    line = line_of(conversation(10, 300, 300, 300, 10, 10))
    later: Step = advance(line, ["sum sum"], replace(POLICY, target_max_tokens=900), Refusing())
    assert isinstance(later, Done)
    assert (later.line, later.metrics.failed) == (line, True)
    assert later.metrics.original_tokens > 900


def test_a_generated_row_is_the_same_each_time() -> None:
    assert trajectory(random.Random("x"), 1) == trajectory(random.Random("x"), 1)
    sizes = [len(row.get("conversations") or row["messages"]) for row in trajectories(60, 1)]
    assert min(sizes) < 8
    assert max(sizes) > 100


def test_a_real_tokenizer_counts_to_the_same_end() -> None:
    counter = open_counter("cl100k_base")
    policy = replace(POLICY, target_max_tokens=9000, window=32_000)
    ends = set()
    for row in trajectories(12, 8):
        line = line_of(row)
        step, _ = finished(line, policy, 80, counter=counter)
        assert isinstance(step, Done)
        assert not step.metrics.failed, step.metrics.error
        total = counter.row(turns_of(step.line)).total
        assert total == step.metrics.compressed_tokens
        assert total <= 9000 or step.metrics.still_over_limit
        ends.add((step.metrics.was_compressed, step.metrics.still_over_limit))
    assert (True, False) in ends
