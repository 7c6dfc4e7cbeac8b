"""The new row: a region as a summary, old results masked, old units dropped, results shortened. Pure."""

from collections.abc import Container, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from compression.forms import Result, human_turn, joined, results_in, spelled, with_results
from compression.plan import Part, Region, counted_places, joins, units, wants_notice
from compression.shorten import shortened
from compression.types import Counter, Policy, Role, Turn

MASK = "[This old result was left out.]"
SHORTEST_RESULT = 200  # tokens that a result keeps at least

Parts = tuple[Part, ...]


# --- a summary


def folded(parts: Sequence[Part], region: Region, text: str, policy: Policy) -> Parts:
    """The row with a region as a human turn of its own, or joined to the human turns that count as beside it.

    A joined turn is guarded if one of its pieces was. A system turn in front that is folded leaves one with the notice.
    """
    beside = joins(parts, counted_places([part.turn for part in parts]), region.start, region.end)
    summary = Part(human_turn(text, like=parts[0].turn), guarded=False, made=True)
    before = [parts[place] for place in beside if place < region.start]
    pieces = [*before, summary, *(parts[place] for place in beside if place >= region.end)]
    base = max(pieces, key=lambda piece: (piece.guarded, not piece.made))
    turn = joined([piece.turn for piece in pieces], base.turn)
    middle = Part(turn, guarded=any(piece.guarded for piece in pieces), made=True)
    gone = {*beside[1:], *range(region.start, region.end)} - {place := (beside or [region.start])[0]}
    left = [middle if n == place else part for n, part in enumerate(parts) if n not in gone]
    if region.start == 0 and parts[0].turn.role == "system":
        notice = human_turn(policy.summary_notice_text.strip(), like=parts[0].turn)
        left.insert(0, Part(joined([notice], parts[0].turn), guarded=True))
    return with_notice(tuple(left), policy)


def with_notice(parts: Parts, policy: Policy) -> Parts:
    """The notice at the end of the first system turn, if it is wanted and not there."""
    if not lacks_notice(parts, policy):
        return parts
    place = _system_place(parts)
    system = parts[place].turn
    noticed = joined([system, human_turn(policy.summary_notice_text, like=system)], system, separator="")
    return (*parts[:place], replace(parts[place], turn=noticed), *parts[place + 1 :])


def lacks_notice(parts: Sequence[Part], policy: Policy) -> bool:
    """Whether a summary brings a notice with it."""
    place, notice = _system_place(parts), policy.summary_notice_text.strip()
    is_there = 0 <= place < len(parts) - 1  # the last turn stays as it is, whatever it be
    return wants_notice(policy) and is_there and notice not in parts[place].turn.text


def _system_place(parts: Sequence[Part]) -> int:
    return next((place for place, part in enumerate(parts) if part.turn.role == "system"), -1)


# --- without a summary


def masked(parts: Parts, need: int, counter: Counter) -> Parts:
    """The row with its oldest unguarded results replaced by a note, until about `need` tokens are saved.

    Never by one that takes as much. The same parts if there is nothing to replace.
    """
    changed = list(parts)
    for place, part in enumerate(parts):
        if need > 0 and not part.guarded:
            notes, saved = _masks(part.turn, need, counter)
            need -= saved
            changed[place] = replace(part, turn=with_results(part.turn, notes)) if notes else part
    return tuple(changed)


def _masks(turn: Turn, need: int, counter: Counter) -> tuple[dict[int, str], int]:
    notes: dict[int, str] = {}
    saved = 0
    for number, result in enumerate(results_in(turn)):
        gain = counter.text(spelled(result, result.text)) - counter.text(spelled(result, MASK))
        shorter = gain > 0 and len(MASK) < len(result.text.strip())
        if saved < need and shorter and result.spelling != "fixed":
            notes[number] = MASK
            saved += gain
    return notes, saved


def dropped(parts: Parts, tokens: Sequence[int], need: int) -> Parts:
    """The row without its oldest unguarded gpt turns and their results, until `need` tokens are saved.

    Human turns stay, but where two would become neighbours, as they stand or as strict templates count: then the one
    before the gpt turn goes with it, or the one after it. A unit that could only go at the cost of the order of roles
    stays. The same parts if none can go.
    """
    left = units([part.turn.role for part in parts])
    counted = frozenset(counted_places([part.turn for part in parts]))
    place = 0
    while need > 0 and place < len(left):
        going = _going_with(parts, left, place, counted)
        need -= sum(tokens[n] for unit in left[going.start : going.stop] for n in unit)
        del left[going.start : going.stop]
        place = going.start if going else place + 1
    return tuple(parts[n] for unit in left for n in unit)


def _going_with(parts: Parts, left: Sequence[range], place: int, counted: Container[int]) -> range:
    """Numbers of the units that go if the one at `place` does: it alone, or with one human turn; empty if it stays."""
    if parts[left[place].start].turn.role not in ("gpt", "tool"):
        return range(0)
    ways = (range(place, place + 1), range(place - 1, place + 1), range(place, place + 2))
    inside = (going for going in ways if going.start >= 0 and going.stop < len(left))
    can_go = (going for going in inside if _can_go(parts, left, going, place))
    return next((going for going in can_go if _still_alternate(parts, left, going, counted)), range(0))


def _still_alternate(parts: Parts, left: Sequence[range], going: range, counted: Container[int]) -> bool:
    """Whether the counted turns on both sides of the units that go are of two roles, if they all took turns before."""

    def roles(found: Iterable[range]) -> Iterator[Role]:
        return (parts[n].turn.role for unit in found for n in unit if n in counted)

    gone = list(roles(left[going.start : going.stop]))
    if not gone:
        return True
    before = next(roles(reversed(left[: going.start])), "gpt")  # a human turn comes first
    after = next(roles(left[going.stop :]), None)
    return before != after or any(one == two for one, two in pairwise([before, *gone, after]))


def _can_go(parts: Parts, left: Sequence[range], going: range, place: int) -> bool:
    firsts = {n: parts[left[n].start] for n in going}
    before = parts[left[going.start - 1].stop - 1].turn.role if going.start else "system"
    after = parts[left[going.stop].start].turn.role
    in_order = after != before and (before != "system" or after in ("human", firsts[going.start].turn.role))
    others_are_human = all(part.turn.role == "human" for n, part in firsts.items() if n != place)
    return in_order and others_are_human and not any(part.guarded for part in firsts.values())


# --- results shortened


class _Item(Struct, frozen=True):
    place: int  # of the part
    number: int  # of the result in it
    tokens: int


def shortenable(parts: Sequence[Part], counter: Counter) -> int:
    """About how many tokens the results of guarded turns can lose; the others' turns may go as a whole."""
    items = _items([part for part in parts[:-1] if part.guarded], counter)
    return sum(max(0, item.tokens - SHORTEST_RESULT) for item in items)


def with_shorter_results(parts: Parts, excess: int, counter: Counter) -> Parts:
    """The row with its longest results cut to one common length, so that about `excess` tokens go; none below the
    shortest that a result may be, and none of the last turn."""
    items = _items(parts[:-1], counter)
    level = _level([item.tokens for item in items], excess)
    changed = list(parts)
    for place in {item.place: None for item in items if item.tokens > level}:
        numbers = [item.number for item in items if item.place == place and item.tokens > level]
        changed[place] = replace(parts[place], turn=_cut(parts[place].turn, numbers, level, counter))
    return tuple(changed)


def _items(parts: Sequence[Part], counter: Counter) -> list[_Item]:
    return [
        _Item(place, number, counter.text(spelled(result, result.text)))
        for place, part in enumerate(parts)
        for number, result in enumerate(results_in(part.turn))
        if result.spelling not in ("fixed", "media")
    ]


def _level(sizes: Sequence[int], excess: int) -> int:
    """The highest level above which the sizes have `excess` tokens together, if not below the shortest result."""
    ordered = sorted(sizes, reverse=True)
    above = 0
    for count, size in enumerate(ordered, 1):
        above += size
        lower = ordered[count] if count < len(ordered) else 0
        level = (above - excess) // count
        if level >= lower:
            return max(SHORTEST_RESULT, level)
    return SHORTEST_RESULT


def _cut(turn: Turn, numbers: Sequence[int], level: int, counter: Counter) -> Turn:
    results = results_in(turn)
    texts = {n: shortened(results[n].text, level, partial(_cost, counter, results[n])) for n in numbers}
    return with_results(turn, texts)


def _cost(counter: Counter, result: Result, text: str) -> int:
    return counter.text(spelled(result, text))
