"""Statistics that add up: of one try, of two sums, of a whole run in whatever order its tries come. Pure."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from msgspec import Struct, field

from agent.row import ToolCount
from agent.types import Spend, Usage
from batch.facts import (
    Facts,
    MergePolicy,
    SummaryFacts,
    called_tools,
    decode_summary_facts,
    gpt_turns,
    status_under,
)
from tools.errors import UsageProblem
from tools.toolsets import resolve_names

_DISTINCT = 10_000
_REDACTED = "[REDACTED:"


class Spread(Struct):
    """Values by how often they came. Exact up to 10,000 different ones, then each to three significant digits."""

    counts: Counter[float] = field(default_factory=Counter)
    total: float = 0.0
    is_coarse: bool = False

    def add(self, value: float, times: int = 1) -> None:
        """One more value, or the same one several times."""
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


class Spent(Struct):
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
    durations: Spread = field(default_factory=Spread)

    def add(self, api_calls: int, spend: Spend, duration_seconds: float) -> None:
        """One more try."""
        self._add(api_calls, spend.requests, spend.cost_usd, spend.usage)
        self.durations.add(duration_seconds)

    def add_facts(self, facts: Facts) -> None:
        """One more try, read from the journal."""
        self._add(facts.api_calls, facts.requests, facts.cost_usd, facts.usage)
        self.durations.add(facts.duration_seconds)

    def _add(self, api_calls: int, requests: int, cost_usd: float, usage: Usage) -> None:
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
        return Spend(requests=self.requests, usage=self.usage, cost_usd=self.cost_usd)


class Tried(Struct, frozen=True, kw_only=True, gc=False):
    """A try read back, as it counts under the present policy."""

    facts: SummaryFacts
    line: bytes
    status: str
    reason: str
    turns: int  # gpt turns that are the model's doing
    turns_with_reasoning: int

    @classmethod
    def read(cls, line: bytes, policy: MergePolicy) -> "Tried":
        """From a line of the journal."""
        facts = decode_summary_facts(line)
        turns, with_reasoning = gpt_turns(facts, line)
        status, reason = status_under(policy, facts, with_reasoning)
        return cls(
            facts=facts,
            line=line,
            status=status,
            reason=reason,
            turns=turns,
            turns_with_reasoning=with_reasoning,
        )


class Statistics(Struct):
    """Of the last tries of rows. A stopped try has no end yet: it counts for tools and reasoning, not as a row."""

    rows: int = 0
    completed: int = 0
    successes: int = 0
    by_status: Counter[str] = field(default_factory=Counter)
    by_reason: Counter[str] = field(default_factory=Counter)
    filtered: Counter[str] = field(default_factory=Counter)
    tools: dict[str, ToolCount] = field(default_factory=dict)
    unknown_tools: Counter[str] = field(default_factory=Counter)
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

    def take(self, tried: Tried) -> None:
        """Adds one try in place."""
        facts, line, status = tried.facts, tried.line, tried.status
        used = _tools_used(facts)
        self.gpt_turns += tried.turns
        self.turns_with_reasoning += tried.turns_with_reasoning
        self._take_tools(facts, used)
        if _REDACTED.encode() in line:
            self.redactions += line.count(_REDACTED.encode()) - facts.final_response.count(_REDACTED)
        self.by_status[status] += 1
        if tried.reason:
            self.by_reason[tried.reason] += 1
        if status != "stopped":
            self.rows += 1
            self.completed += status == "completed"
            self.successes += facts.success
            self.turns.add(tried.turns)
            self.tool_calls.add(sum(tally.count for tally in used.values()))

    def _take_tools(self, facts: SummaryFacts, used: Mapping[str, ToolCount]) -> None:
        for name, tally in used.items():
            self.tools[name] = _sum(self.tools.get(name), tally)
        if facts.unknown_tools != "[]":
            for each in json.loads(facts.unknown_tools):
                self.unknown_tools[each["name"]] += each["count"]
        if '"expected_tools"' in facts.dataset_row:
            for name in set(json.loads(facts.dataset_row).get("expected_tools") or ()):
                self.expected[name] += 1
                self.expected_and_used[name] += not used.keys().isdisjoint(_tools_named(name))

    def __add__(self, other: "Statistics") -> "Statistics":
        tools = dict(self.tools)
        for name, tally in other.tools.items():
            tools[name] = _sum(tools.get(name), tally)
        sums = {name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__ if name != "tools"}
        return Statistics(tools=tools, **sums)

    def to_dict(self) -> dict[str, Any]:
        """The part of statistics.json that follows from rows; keys sorted, so that two runs can be compared."""
        return {
            "tool_statistics": {name: _rates(self.tools[name]) for name in sorted(self.tools)},
            "reasoning_statistics": {
                "total_assistant_turns": self.gpt_turns,
                "turns_with_reasoning": self.turns_with_reasoning,
                "turns_without_reasoning": self.gpt_turns - self.turns_with_reasoning,
            },
            "by_status": dict(sorted(self.by_status.items())),
            "by_reason": dict(sorted(self.by_reason.items())),
            "filtered": dict(sorted(self.filtered.items())),
            "unknown_tools": dict(sorted(self.unknown_tools.items())),
            "expected_tools": {
                name: {"rows": self.expected[name], "used": self.expected_and_used[name]}
                for name in sorted(self.expected)
            },
            "redactions": self.redactions,
        }

    def metrics(self, spent: Spent) -> dict[str, Any]:
        """The content of metrics.json."""
        return {
            "rows": self.rows,
            "completed": self.completed,
            "success_rate": round(self.successes / self.rows, 4) if self.rows else 0.0,
            "turns": self.turns.to_dict(),
            "tool_calls": self.tool_calls.to_dict(),
            "duration_seconds": spent.durations.to_dict(),
            "usage": {name: getattr(spent.usage, name) for name in Usage.__struct_fields__},
            "cost_usd": round(spent.cost_usd, 6),
            "api_calls": spent.api_calls,
            "requests": spent.requests,
            "tries": spent.tries,
        }


def _tools_used(facts: SummaryFacts) -> Mapping[str, ToolCount]:
    used = called_tools(bytes(facts.tool_stats))
    if facts.extra_tool_stats == "{}":
        return used
    extra = {name: ToolCount(**tally) for name, tally in json.loads(facts.extra_tool_stats).items()}
    return {**used, **extra}


@cache
def _tools_named(name: str) -> frozenset[str]:
    """The tools that a row's expectation means: a toolset's or alias's any one will do."""
    try:
        return frozenset(resolve_names([name]))
    except UsageProblem:
        return frozenset({name})


def _sum(one: ToolCount | None, other: ToolCount) -> ToolCount:
    if one is None:
        return other
    return ToolCount(one.count + other.count, one.success + other.success, one.failure + other.failure)


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
        if rank <= 0:
            return float(value)
    return 0.0
