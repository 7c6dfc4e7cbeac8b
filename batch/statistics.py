"""Statistics that add up: of one try, of two sums, of a whole run in whatever order its tries come. Pure."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from msgspec import Struct, field, structs

from agent.row import ToolCount
from agent.types import NOTHING_UNREPORTED, Spend, Unreported, Usage
from batch.facts import Facts, Tools, Tried
from tools.errors import UsageProblem
from tools.toolsets import BUILT_IN

_DISTINCT = 10_000
_KINDS = 1024  # of tries that are gathered before they are added
_EXPECTED = '"expected_tools"'
_REDACTED = "[REDACTED:"
_REDACTED_BYTES = _REDACTED.encode()
_NO_CALLS = ToolCount()

_Alike = tuple[str, str, int, int, bool, str, Tools]  # what a try without anything special counts as


class Spread(Struct):
    """Values by how often they came. Exact up to 10,000 different ones, then each to three significant digits."""

    counts: Counter[float] = field(default_factory=Counter)
    total: float = 0.0
    is_coarse: bool = False

    def add(self, value: float, times: int = 1) -> None:
        """One more value, or the same one several times; -1 takes one away again."""
        self.counts[_coarse(value) if self.is_coarse else value] += times
        self.total += value * times
        if len(self.counts) > _DISTINCT and not self.is_coarse:
            self._coarsen()

    def __add__(self, other: "Spread") -> "Spread":
        both = Spread(self.counts + other.counts, self.total + other.total)
        if self.is_coarse or other.is_coarse or len(both.counts) > _DISTINCT:
            both._coarsen()
        return both

    def _coarsen(self) -> None:
        fine, self.counts, self.is_coarse = self.counts, Counter(), True
        for value, times in fine.items():
            self.counts[_coarse(value)] += times

    def to_dict(self) -> dict[str, float]:
        """Mean and two percentiles (nearest rank); 0.0 where there is no value."""
        size = self.counts.total()
        ranked = sorted(self.counts.items())
        return {
            "mean": round(self.total / size, 3) if size else 0.0,
            "p50": _ranked(ranked, math.ceil(0.50 * size)),
            "p95": _ranked(ranked, math.ceil(0.95 * size)),
        }


class TryTotals(Struct):
    """Sums over tries. Plain numbers, since millions are added."""

    tries: int = 0
    api_calls: int = 0
    requests: int = 0
    cost_usd: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0
    total_tokens: int = 0
    unreported: Unreported = NOTHING_UNREPORTED
    durations: Spread = field(default_factory=Spread)
    start_retries: int = 0

    def add(self, api_calls: int, spend: Spend, duration_seconds: float, start_retries: int = 0) -> None:
        """One more try."""
        self._add(api_calls, spend.requests, spend.cost_usd, spend.usage, spend.unreported)
        self.durations.add(duration_seconds)
        self.start_retries += start_retries

    def add_facts(self, facts: Facts) -> None:
        """One more try, read from the journal."""
        self._add(facts.api_calls, facts.requests, facts.cost_usd, facts.usage, facts.unreported)
        self.durations.add(facts.duration_seconds)
        self.start_retries += facts.environment.start_retries

    def _add(self, api_calls: int, requests: int, cost_usd: float, usage: Usage, unreported: Unreported) -> None:
        self.tries += 1
        self.api_calls += api_calls
        self.requests += requests
        self.cost_usd += cost_usd
        self.input_tokens += usage.input_tokens
        self.output_tokens += usage.output_tokens
        self.cache_read_tokens += usage.cache_read_tokens
        self.cache_write_tokens += usage.cache_write_tokens
        self.reasoning_tokens += usage.reasoning_tokens
        self.total_tokens += usage.total_tokens
        if unreported.replies:
            self.unreported += unreported

    def __add__(self, other: "TryTotals") -> "TryTotals":
        return TryTotals(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})

    @property
    def usage(self) -> Usage:
        """Its tokens."""
        return Usage(
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            cache_read_tokens=self.cache_read_tokens,
            cache_write_tokens=self.cache_write_tokens,
            reasoning_tokens=self.reasoning_tokens,
            total_tokens=self.total_tokens,
        )

    @property
    def spend(self) -> Spend:
        """What the tries cost."""
        return Spend(requests=self.requests, usage=self.usage, cost_usd=self.cost_usd, unreported=self.unreported)


class Statistics(Struct):
    """Of the last tries of rows. A stopped try has no end yet: it counts for tools and reasoning, not as a row."""

    rows: int = 0
    completed: int = 0
    successes: int = 0
    by_status: Counter[str] = field(default_factory=Counter)
    by_reason: Counter[str] = field(default_factory=Counter)
    filtered: Counter[str] = field(default_factory=Counter)
    tools: dict[str, ToolCount] = field(default_factory=dict)
    inner_tools: dict[str, ToolCount] = field(default_factory=dict)
    unknown_tools: Counter[str] = field(default_factory=Counter)
    offered: Counter[str] = field(default_factory=Counter)  # by the column's text
    expected: Counter[str] = field(default_factory=Counter)
    expected_and_used: Counter[str] = field(default_factory=Counter)
    gpt_turns: int = 0
    turns_with_reasoning: int = 0
    redactions: int = 0
    turns: Spread = field(default_factory=Spread)
    tool_calls: Spread = field(default_factory=Spread)

    @classmethod
    def of(cls, tried: Tried) -> "Statistics":
        """Of one try."""
        one = cls()
        one.take(tried)
        return one

    def take(self, tried: Tried, times: int = 1) -> None:
        """Adds one try in place, or several that count like it; takes one away again if `times` is -1."""
        facts, line, status = tried.facts, tried.line, tried.status
        used = tried.tools.tallies
        self.gpt_turns += times * tried.turns
        self.turns_with_reasoning += times * tried.turns_with_reasoning
        self._take_tools(tried, used, times)
        if _REDACTED_BYTES in line:
            self.redactions += times * (line.count(_REDACTED_BYTES) - facts.final_response.count(_REDACTED))
        self.by_status[status] += times
        if tried.reason:
            self.by_reason[tried.reason] += times
        if status != "stopped":
            self.rows += times
            self.completed += times * (status == "completed")
            self.successes += times * facts.success
            self.offered[facts.tools_offered] += times
            self.turns.add(tried.turns, times)
            self.tool_calls.add(sum(tally.count for tally in used.values()), times)

    def _take_tools(self, tried: Tried, used: Mapping[str, ToolCount], times: int) -> None:
        facts = tried.facts
        for name, tally in used.items():
            self.tools[name] = _sum(self.tools.get(name, _NO_CALLS), tally, times)
        for name, tally in _read_tallies(facts.inner_tool_stats).items():
            self.inner_tools[name] = _sum(self.inner_tools.get(name, _NO_CALLS), tally, times)
        if facts.unknown_tools != "[]":
            for each in json.loads(facts.unknown_tools):
                self.unknown_tools[each["name"]] += times * each["count"]
        if _EXPECTED in facts.dataset_row:
            for name in set(json.loads(facts.dataset_row).get("expected_tools") or ()):
                meant = tried.own_toolsets.get(name) or _tools_named(name)
                self.expected[name] += times
                self.expected_and_used[name] += times * (not used.keys().isdisjoint(meant))

    def __add__(self, other: "Statistics") -> "Statistics":
        """A new one, without the names of what was all taken away again."""
        tallied = ("tools", "inner_tools")
        sums: dict[str, Any] = {name: _joined(getattr(self, name), getattr(other, name)) for name in tallied}
        rest = set(self.__struct_fields__) - sums.keys()
        return Statistics(**sums, **{name: getattr(self, name) + getattr(other, name) for name in rest})

    def to_dict(self) -> dict[str, Any]:
        """The part of statistics.json that follows from rows; keys sorted, so that two runs can be compared."""
        return {
            "tool_statistics": {name: _rates(self.tools[name]) for name in sorted(self.tools)},
            "reasoning_statistics": {
                "total_assistant_turns": self.gpt_turns,
                "turns_with_reasoning": self.turns_with_reasoning,
                "turns_without_reasoning": self.gpt_turns - self.turns_with_reasoning,
            },
            "inner_tool_statistics": {name: _rates(self.inner_tools[name]) for name in sorted(self.inner_tools)},
            "by_status": dict(sorted(self.by_status.items())),
            "by_reason": dict(sorted(self.by_reason.items())),
            "filtered": dict(sorted(self.filtered.items())),
            "unknown_tools": dict(sorted(self.unknown_tools.items())),
            "tools_offered": dict(sorted(self._rows_by_offered_tool().items())),
            "expected_tools": {
                name: {"rows": self.expected[name], "used": self.expected_and_used[name]}
                for name in sorted(self.expected)
            },
            "redactions": self.redactions,
        }

    def _rows_by_offered_tool(self) -> Counter[str]:
        rows: Counter[str] = Counter()
        for names, times in self.offered.items():
            rows.update(dict.fromkeys(names.split(), times))
        return rows

    def metrics(self, totals: TryTotals) -> dict[str, Any]:
        """The content of metrics.json."""
        return {
            "rows": self.rows,
            "completed": self.completed,
            "success_rate": round(self.successes / self.rows, 4) if self.rows else 0.0,
            "turns": self.turns.to_dict(),
            "tool_calls": self.tool_calls.to_dict(),
            "duration_seconds": totals.durations.to_dict(),
            "usage": {name: getattr(totals.usage, name) for name in Usage.__struct_fields__},
            "cost_usd": round(totals.cost_usd, 6),
            "unreported": structs.asdict(totals.unreported),
            "api_calls": totals.api_calls,
            "requests": totals.requests,
            "tries": totals.tries,
            "start_retries": totals.start_retries,
        }


class Gathering:
    """Adds tries to statistics and to calls by tool, many at once: most of them count like others."""

    def __init__(self, statistics: Statistics, tool_calls: Counter[str]) -> None:
        self._statistics = statistics
        self._tool_calls = tool_calls
        self._alike: Counter[_Alike] = Counter()
        self._one_of: dict[_Alike, Tried] = {}

    def take(self, tried: Tried) -> None:
        """One more try. It is added by the next `settle` at the latest."""
        if _is_special(tried):
            self._add(tried, 1)
            return
        facts, turns = tried.facts, (tried.turns, tried.turns_with_reasoning)
        alike = (tried.status, tried.reason, *turns, facts.success, facts.tools_offered, tried.tools)
        self._alike[alike] += 1
        if alike not in self._one_of:
            self._one_of[alike] = tried
            if len(self._one_of) == _KINDS:
                self.settle()

    def settle(self) -> None:
        """Adds what has been gathered."""
        for alike, tried in self._one_of.items():
            self._add(tried, self._alike[alike])
        self._alike.clear()
        self._one_of.clear()

    def _add(self, tried: Tried, times: int) -> None:
        self._statistics.take(tried, times)
        for name, count in tried.tools.calls.items():
            self._tool_calls[name] += times * count


def _is_special(tried: Tried) -> bool:
    facts = tried.facts
    return (
        facts.inner_tool_stats != "{}"
        or facts.unknown_tools != "[]"
        or _EXPECTED in facts.dataset_row
        or _REDACTED_BYTES in tried.line
    )


def _read_tallies(text: str) -> Mapping[str, ToolCount]:
    if text == "{}":
        return {}
    return {name: ToolCount(**tally) for name, tally in json.loads(text).items()}


def _joined(one: Mapping[str, ToolCount], other: Mapping[str, ToolCount]) -> dict[str, ToolCount]:
    """Sums of both, without those that are all taken away."""
    sums = {name: _sum(one.get(name, _NO_CALLS), other.get(name, _NO_CALLS)) for name in {**one, **other}}
    return {name: tally for name, tally in sums.items() if tally.count}


@cache
def _tools_named(name: str) -> frozenset[str]:
    """The tools that a row's expectation means: a toolset's or alias's any one will do."""
    try:
        return frozenset(BUILT_IN.resolve_names([name]))
    except UsageProblem:
        return frozenset({name})


def _sum(one: ToolCount, other: ToolCount, times: int = 1) -> ToolCount:
    return ToolCount(
        one.count + times * other.count, one.success + times * other.success, one.failure + times * other.failure
    )


def _rates(tally: ToolCount) -> dict[str, float]:
    results = tally.success + tally.failure
    return {
        "count": tally.count,
        "success": tally.success,
        "failure": tally.failure,
        "success_rate": round(100 * tally.success / results, 2) if results else 0.0,
        "failure_rate": round(100 * tally.failure / results, 2) if results else 0.0,
    }


def _coarse(value: float) -> float:
    return float(f"{value:.3g}")


def _ranked(ranked: Iterable[tuple[float, int]], rank: int) -> float:
    for value, times in ranked:
        rank -= times
        if rank <= 0 < times:
            return float(value)
    return 0.0
