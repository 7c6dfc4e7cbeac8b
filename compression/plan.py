"""Which turns stay, and which of the others are folded next. Pure.

A gpt turn and the results that follow it are one unit, so that no call is ever parted from its results. Units that hold
no protected turn may be folded; between protected units they form runs. The oldest run goes first, from its start.

Strict chat templates count human turns and gpt turns without calls, and want these to alternate. So a summary is joined
to the counted turn before it if that is human, else to the one after it if that is; else it is a turn of its own.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from msgspec import Struct

from compression.forms import calls_in
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
    """The turns of a row, those guarded that `protected` names and those of one unit with them (`mask`: they alone)."""
    kept = protected(turns, policy)
    if policy.strategy == "mask":
        return tuple(Part(turn, place in kept) for place, turn in enumerate(turns))
    return tuple(
        Part(turns[place], not kept.isdisjoint(unit)) for unit in units([t.role for t in turns]) for place in unit
    )


def protected(turns: Sequence[Turn], policy: Policy) -> frozenset[int]:
    """The first turn of each role that is to be kept, and the last N.

    The last turn is always among them; if nothing but human turns were, what they answer is too: a summary that stood
    right before the last turn could only be joined to it. A system turn in front goes only where one with the notice
    takes its place.
    """
    roles = [turn.role for turn in turns]
    system = policy.first_system or (roles[:1] == ["system"] and not wants_notice(policy))
    switches = (system, policy.first_human, policy.first_gpt, policy.first_tool)
    wanted = [role for role, on in zip(("system", "human", "gpt", "tool"), switches, strict=True) if on]
    tail = max(0, len(roles) - max(1, policy.last_n_turns))
    while tail and all(role == "human" for role in roles[tail:]):
        tail -= 1
    return frozenset([roles.index(role) for role in wanted if role in roles] + list(range(tail, len(roles))))


def wants_notice(policy: Policy) -> bool:
    """Whether a row with a summary is to say so."""
    return policy.add_summary_notice and bool(policy.summary_notice_text.strip())


def counted_places(turns: Sequence[Turn]) -> list[int]:
    """Places of the turns that strict chat templates count."""
    return [n for n, turn in enumerate(turns) if turn.role == "human" or (turn.role == "gpt" and not calls_in(turn))]


def joins(parts: Sequence[Part], counted: Sequence[int], start: int, end: int) -> list[int]:
    """Places of the human turns that a summary of the parts `start` to `end` is joined to; none if it is one itself."""
    before, after = _humans_beside(parts, counted, start, end)
    return [*before, *after] if before == [start - 1] and after == [end] else before or after


def _humans_beside(parts: Sequence[Part], counted: Sequence[int], start: int, end: int) -> tuple[list[int], list[int]]:
    """Place of the last counted turn before, if it is human, and of the first one after."""
    first, last = bisect_left(counted, start), bisect_left(counted, end)
    before, after = counted[:first][-1:], counted[last : last + 1]
    return [n for n in before if parts[n].turn.role == "human"], [n for n in after if parts[n].turn.role == "human"]


def summary_cost(policy: Policy) -> int:
    """Tokens that a summary takes if it is as long as was asked for."""
    return policy.summary_target_tokens + SUMMARY_OVERHEAD


def next_region(parts: Sequence[Part], tokens: Sequence[int], need: int, cost: int) -> Region | None:
    """The oldest units of the oldest run whose tokens are `need` together, or the whole run if it has fewer; a few more
    or fewer where a summary of just these would break the order of roles.

    Never one that takes no more than the summary itself would (`cost`, below `need`), nor an earlier summary alone.
    """
    return next((region for region in _regions(parts, tokens, need) if region.tokens > cost), None)


def most_saved(parts: Sequence[Part], tokens: Sequence[int], cost: int) -> int:
    """Tokens that are saved if every run that is worth it becomes a summary that takes `cost`."""
    return sum(max(0, region.tokens - cost) for region in _regions(parts, tokens, sum(tokens) + 1))


def _regions(parts: Sequence[Part], tokens: Sequence[int], need: int) -> Iterator[Region]:
    """Of each run that has one."""
    counted = counted_places([part.turn for part in parts])
    for run in _runs(parts):
        start, taken, found = run[0].start, 0, None
        for unit in run:
            taken += sum(tokens[unit.start : unit.stop])
            fresh = any(not parts[place].made for place in range(start, unit.stop))
            if fresh and _fits(parts, counted, start, unit.stop):
                found = Region(start, unit.stop, taken)
                if taken >= need:
                    break
        if found:
            yield found


def _fits(parts: Sequence[Part], counted: Sequence[int], start: int, end: int) -> bool:
    """Whether the roles are in order with a summary in place of the parts `start` to `end`, as far as they were."""
    before, after = _humans_beside(parts, counted, start, end)
    joined = joins(parts, counted, start, end)
    if len(parts) - 1 in joined:  # the last turn stays as it is
        return False
    if before and after and len(joined) == 1:  # nothing counted would be left between the two
        asked = counted[bisect_left(counted, before[0]) : bisect_left(counted, end) + 1]
        if not any(parts[one].turn.role == parts[two].turn.role for one, two in pairwise(asked)):
            return False
    return not joined or start - 1 in joined or end in joined or _closes(parts, start, end)


def _closes(parts: Sequence[Part], start: int, end: int) -> bool:
    """Whether what stands before and after a region may stand side by side."""
    left, right = parts[start - 1].turn.role if start else "system", parts[end].turn.role
    first = next((part.turn.role for part in parts[start:end] if part.turn.role != "system"), right)
    return right not in ("tool", left) and (left != "system" or right in ("human", first))


def _runs(parts: Sequence[Part]) -> Iterator[list[range]]:
    """Neighbouring units that may be folded; not those of nothing but earlier summaries."""
    for guarded, run in groupby(units([part.turn.role for part in parts]), lambda unit: parts[unit.start].guarded):
        found = list(run)
        if not guarded and not all(parts[unit.start].made for unit in found):
            yield found
