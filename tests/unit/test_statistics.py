import json
from functools import reduce
from operator import add
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.row import Row, ToolCount, Turn, encode_row
from agent.types import Usage
from batch.dataset import Dataset, scan
from batch.facts import MergePolicy, Tried
from batch.statistics import Spread, Statistics, TryTotals
from tests.unit.made import THOUGHT, THOUGHTLESS, row_of_job
from tools.toolsets import BUILT_IN, BUILT_IN_TOOLS

DATASET = Dataset.of_prompt("x")
scan(DATASET, BUILT_IN.resolve_names)


def a_row(**changes: Any) -> Row:
    return row_of_job(DATASET.job(0), **changes)


def tried(row: Row) -> Tried:
    """As it was run."""
    return msgspec.structs.replace(Tried.read(encode_row(row), MergePolicy()), status=row.status, reason=row.reason)


def statistics_of(*rows: Row) -> Statistics:
    total = Statistics()
    for row in rows:
        total.take(tried(row))
    return total


def tools(**tallies: tuple[int, int, int]) -> dict[str, ToolCount]:
    return {name: ToolCount(*tallies.get(name, (0, 0, 0))) for name in BUILT_IN_TOOLS}


# --- spreads


@given(st.lists(st.integers(0, 50)))
def test_a_spread_is_exact_for_few_values(values: list[int]) -> None:
    spread = Spread()
    for value in values:
        spread.add(value)
    told = spread.to_dict()
    ranked = sorted(values)
    assert told["p50"] == (ranked[(len(values) + 1) // 2 - 1] if values else 0)
    assert told["p95"] == (ranked[-(-19 * len(values) // 20) - 1] if values else 0)
    assert told["mean"] == pytest.approx(sum(values) / len(values) if values else 0, abs=0.001)


def test_a_spread_whose_values_were_all_taken_away_tells_of_none() -> None:
    spread = Spread()
    spread.add(3.0)
    spread.add(3.0, -1)
    assert spread.to_dict() == Spread().to_dict() == {"mean": 0.0, "p50": 0.0, "p95": 0.0}


def test_a_spread_of_many_values_stays_small_and_near() -> None:
    spread = Spread()
    for n in range(50_000):
        spread.add(100 + n * 0.01)
    assert len(spread.counts) < 2000
    told = spread.to_dict()
    assert told["p50"] == pytest.approx(350, rel=0.01)
    assert told["p95"] == pytest.approx(575, rel=0.01)
    assert told["mean"] == pytest.approx(349.995)
    assert (spread + spread).to_dict() == told


# --- sums


COUNTS = st.integers(0, 9)
ROWS = st.lists(
    st.builds(
        a_row,
        status=st.sampled_from(["completed", "failed", "partial", "stopped", "discarded"]),
        reason=st.sampled_from(["", "no_reasoning", "truncated"]),
        success=st.booleans(),
        conversations=st.lists(st.sampled_from([THOUGHT, THOUGHTLESS]), max_size=4).map(
            lambda values: [Turn("system", "s"), Turn("human", "h"), *(Turn("gpt", value) for value in values)]
        ),
        tool_stats=st.tuples(COUNTS, COUNTS).map(lambda n: tools(terminal=(n[0] + n[1], *n), patch=(n[0], n[0], 0))),
        unknown_tools=st.sampled_from(["[]", '[{"name":"frob","count":2}]']),
        extra_tool_stats=st.sampled_from(["{}", '{"mine":{"count":3,"success":1,"failure":2}}']),
        inner_tool_stats=st.sampled_from(["{}", '{"terminal":{"count":2,"success":2,"failure":0}}']),
        dataset_row=st.sampled_from(["{}", '{"expected_tools":["bash","mine"]}', '{"expected_tools":null}']),
        error=st.sampled_from(["", "[REDACTED:KEY]"]),
    ),
    max_size=8,
)


@given(rows=ROWS, cut=st.integers(0, 8))
def test_statistics_add_up_however_they_are_cut(rows: list[Row], cut: int) -> None:
    whole = statistics_of(*rows)
    assert (statistics_of(*rows[:cut]) + statistics_of(*rows[cut:])).to_dict() == whole.to_dict()
    assert reduce(add, (Statistics.of(tried(row)) for row in rows), Statistics()) == whole
    assert statistics_of(*reversed(rows)).metrics(TryTotals()) == whole.metrics(TryTotals())


@given(rows=ROWS)
def test_statistics_count_what_is_there(rows: list[Row]) -> None:
    told = statistics_of(*rows).to_dict()
    values = [turn.value for row in rows for turn in row.conversations if turn.sender == "gpt"]
    assert told["reasoning_statistics"] == {
        "total_assistant_turns": len(values),
        "turns_with_reasoning": values.count(THOUGHT),
        "turns_without_reasoning": values.count(THOUGHTLESS),
    }
    assert sum(told["by_status"].values()) == len(rows)
    calls = sum(row.tool_stats["terminal"].count for row in rows)
    assert told["tool_statistics"].get("terminal", {"count": 0})["count"] == calls
    assert told["redactions"] == sum("REDACTED" in row.error for row in rows)


def test_rates_are_percentages_with_two_places() -> None:
    told = statistics_of(
        a_row(tool_stats=tools(terminal=(3, 2, 1))), a_row(tool_stats=tools(patch=(1, 0, 1)))
    ).to_dict()
    assert told["tool_statistics"] == {
        "patch": {"count": 1, "success": 0, "failure": 1, "success_rate": 0.0, "failure_rate": 100.0},
        "terminal": {"count": 3, "success": 2, "failure": 1, "success_rate": 66.67, "failure_rate": 33.33},
    }


def test_calls_that_tools_made_are_counted_apart() -> None:
    inner = '{"mine":{"count":1,"success":0,"failure":1},"terminal":{"count":2,"success":2,"failure":0}}'
    rows = [a_row(tool_stats=tools(terminal=(1, 1, 0)), inner_tool_stats=inner), a_row(inner_tool_stats=inner), a_row()]
    statistics = statistics_of(*rows)
    told = statistics.to_dict()
    assert told["inner_tool_statistics"] == {
        "mine": {"count": 2, "success": 0, "failure": 2, "success_rate": 0.0, "failure_rate": 100.0},
        "terminal": {"count": 4, "success": 4, "failure": 0, "success_rate": 100.0, "failure_rate": 0.0},
    }
    assert told["tool_statistics"].keys() == {"terminal"}
    assert statistics.metrics(TryTotals())["tool_calls"]["mean"] == told["tool_statistics"]["terminal"]["count"] / 3
    for row in rows[:2]:
        statistics.take(tried(row), -1)
    assert (Statistics() + statistics).to_dict()["inner_tool_statistics"] == {}


def test_expected_tools_are_known_by_their_other_names() -> None:
    rest = json.dumps({"expected_tools": ["bash", "web", "read_file"]})
    rows = [
        a_row(dataset_row=rest, tool_stats=tools(terminal=(1, 1, 0), web_search=(1, 1, 0))),
        a_row(dataset_row=rest),
    ]
    assert statistics_of(*rows).to_dict()["expected_tools"] == {
        "bash": {"rows": 2, "used": 2},
        "read_file": {"rows": 2, "used": 0},
        "web": {"rows": 2, "used": 1},
    }


def test_a_secret_struck_out_of_the_last_answer_counts_once() -> None:
    turns = [Turn("system", "s"), Turn("human", "h"), Turn("gpt", "<think>\n[REDACTED:A]\n</think>\n[REDACTED:B]")]
    row = a_row(conversations=turns, final_response="[REDACTED:B]")
    assert statistics_of(row).redactions == 2


def test_turns_that_came_with_the_row_do_not_count() -> None:
    given_turns = [Turn("human", "a"), Turn("gpt", THOUGHT), Turn("human", "b"), Turn("gpt", THOUGHTLESS)]
    turns = [Turn("system", "s"), *given_turns, Turn("human", "c"), Turn("gpt", THOUGHTLESS)]
    read = Tried.read(encode_row(a_row(conversations=turns, context_turns=4)), MergePolicy())
    assert (read.turns, read.turns_with_reasoning) == (1, 0)
    assert (read.status, read.reason) == ("discarded", "no_reasoning")


def test_text_that_looks_like_a_turn_is_none() -> None:
    trap = '],"metadata":{"from":"gpt","value":"<think>\n</think>'
    turns = [Turn("system", trap), Turn("human", trap), Turn("gpt", THOUGHT + trap), Turn("gpt", THOUGHT)]
    row = a_row(conversations=turns, final_response=trap, dataset_row=json.dumps({"trap": trap}), error=trap)
    read = Tried.read(encode_row(row), MergePolicy())
    assert (read.turns, read.turns_with_reasoning) == (2, 2)


# --- policies


@pytest.mark.parametrize(
    ("changes", "policy", "expected"),
    [
        ({"reason": "refusal"}, {}, ("completed", "refusal")),
        ({"status": "partial", "reason": "truncated"}, {}, ("partial", "truncated")),
        ({"status": "failed", "reason": "model_error"}, {}, ("failed", "model_error")),
        ({"status": "stopped", "reason": "budget"}, {"keep_no_reasoning": True}, ("stopped", "budget")),
        ({"unknown_tools": '[{"name":"x","count":1}]'}, {}, ("discarded", "unknown_tool")),
        ({"unknown_tools": '[{"name":"x","count":1}]'}, {"keep_unknown_tools": True}, ("completed", "")),
        (
            {"status": "discarded", "end_status": "max_turns", "reason": "unknown_tool", "unknown_tools": '[{"n":1}]'},
            {"keep_unknown_tools": True},
            ("max_turns", ""),
        ),
    ],
)
def test_a_status_follows_from_the_end_and_the_policy(
    changes: dict[str, Any], policy: dict[str, Any], expected: tuple[str, str]
) -> None:
    read = Tried.read(encode_row(a_row(**changes)), MergePolicy(**policy))
    assert (read.status, read.reason) == expected


# --- metrics


def test_metrics() -> None:
    rows = [
        a_row(),
        a_row(success=False),
        a_row(status="failed", success=False),
        a_row(status="stopped", success=False),
    ]
    totals = TryTotals()
    for row in rows:
        usage = Usage(input_tokens=10, output_tokens=5, total_tokens=15)
        totals.add_facts(tried(msgspec.structs.replace(row, usage=usage)).facts)
    told = statistics_of(*rows).metrics(totals)
    assert (told["rows"], told["completed"], told["success_rate"]) == (3, 2, 0.3333)
    assert told["turns"] == {"mean": 1.0, "p50": 1.0, "p95": 1.0}
    assert told["duration_seconds"] == {"mean": 1.5, "p50": 1.5, "p95": 1.5}
    assert told["usage"]["total_tokens"] == 60
    assert (told["cost_usd"], told["api_calls"], told["requests"], told["tries"]) == (2.0, 8, 12, 4)
    assert totals.spend.requests == 12
