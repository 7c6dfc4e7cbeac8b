"""Which turns stay, and which of the others are folded next. Pure.

A gpt turn and the results that follow it are one unit, so that no call is ever parted from its results. Units that hold
no protected turn may be folded; between protected units they form runs. The oldest run goes first, from its start.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from msgspec import Struct

from compression.types import Policy, Role, Turn

SUMMARY_OVERHEAD = 16  # tokens that a summary takes beside its text: the prefix, the role, the turn's template


class Part(Struct, frozen=True):
    """One turn of a row as it stands: `guarded` stays, `made` is, or holds, a summary."""

    turn: Turn
    guarded: bool
    made: bool = False


class Region(Struct, frozen=True):
    """Parts `start` to `end` (exclusive) of a row, and their tokens."""

    start: int
    end: int
    tokens: int


def units(roles: Sequence[Role]) -> list[range]:
    """Places of the turns that only move together. Results without a gpt turn before them are a unit of their own."""
    starts = [n for n, role in enumerate(roles) if role != "tool" or n == 0 or roles[n - 1] not in ("gpt", "tool")]
    return [range(start, end) for start, end in pairwise([*starts, len(roles)])]


def parts_of(turns: Sequence[Turn], policy: Policy) -> tuple[Part, ...]:
    """The turns of a row, those guarded that `protected` names and those of one unit with them."""
    kept = protected(turns, policy)
    return tuple(
        Part(turns[place], not kept.isdisjoint(unit)) for unit in units([t.role for t in turns]) for place in unit
    )


def protected(turns: Sequence[Turn], policy: Policy) -> frozenset[int]:
    """The first turn of each role that is to be kept, and the last N.

    The last turn is always among them; if nothing but human turns were, what they answer is too: a summary that stood
    right before the last turn could only be joined to it.
    """
    roles = [turn.role for turn in turns]
    switches = (policy.first_system, policy.first_human, policy.first_gpt, policy.first_tool)
    wanted = [role for role, on in zip(("system", "human", "gpt", "tool"), switches, strict=True) if on]
    tail = max(0, len(roles) - max(1, policy.last_n_turns))
    while tail and all(role == "human" for role in roles[tail:]):
        tail -= 1
    return frozenset([roles.index(role) for role in wanted if role in roles] + list(range(tail, len(roles))))


def summary_cost(policy: Policy) -> int:
    """Tokens that a summary takes if it is as long as was asked for."""
    return policy.summary_target_tokens + SUMMARY_OVERHEAD


def next_region(parts: Sequence[Part], tokens: Sequence[int], need: int, cost: int) -> Region | None:
    """The oldest units of the oldest run whose tokens are `need` together, or the whole run if it has fewer.

    Never one that takes no more than the summary itself would (`cost`, below `need`), nor an earlier summary alone.
    """
    regions = (_oldest(run, parts, tokens, need) for run in _runs(parts))
    return next((region for region in regions if region.tokens > cost), None)


def most_saved(parts: Sequence[Part], tokens: Sequence[int], cost: int) -> int:
    """Tokens that are saved if every run that is worth it becomes a summary that takes `cost`."""
    wholes = [sum(tokens[n] for unit in run for n in unit) for run in _runs(parts)]
    return sum(max(0, whole - cost) for whole in wholes)


def _oldest(run: Sequence[range], parts: Sequence[Part], tokens: Sequence[int], need: int) -> Region:
    start, taken, fresh = run[0].start, 0, False
    for unit in run:
        taken += sum(tokens[unit.start : unit.stop])
        fresh = fresh or not parts[unit.start].made
        if taken >= need and fresh:
            break
    return Region(start, unit.stop, taken)


def _runs(parts: Sequence[Part]) -> Iterator[list[range]]:
    """Neighbouring units that may be folded; not those of nothing but earlier summaries."""
    for guarded, run in groupby(units([part.turn.role for part in parts]), lambda unit: parts[unit.start].guarded):
        found = list(run)
        if not guarded and not all(parts[unit.start].made for unit in found):
            yield found
