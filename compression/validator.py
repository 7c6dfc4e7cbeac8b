"""Whether a compressed row is as good a row as the one it came from. Pure; it trusts nothing that made the row."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from agent import row, trajectory
from compression.forms import is_from_value, results_in
from compression.plan import counted_places, protected, units
from compression.types import Policy, Turn

_OUT_OF_PLACE = "a turn stands where another role belongs"
_MISPLACED = re.compile(" stands where |^no system and human turn in front")


def problems(before: Sequence[Turn], after: Sequence[Turn], policy: Policy | None = None) -> list[str]:
    """What is wrong with the turns `after` compression, in words; nothing if they may be kept.

    What was wrong before may stay so. Without a policy the default one says what was protected.
    """
    policy = policy or Policy()
    if not before or not after:
        return ["nothing is left"] if before else []
    found = [*_system(before, after, policy), *_neighbours(before, after), *_alternation(before, after)]
    found += [*_calls(before, after), *_protected(before, after, policy), *_last(before[-1], after[-1])]
    return found + (list(_format(before, after, policy)) if is_from_value(before[0]) else [])


def _system(before: Sequence[Turn], after: Sequence[Turn], policy: Policy) -> Iterator[str]:
    if before[0].role == "system" and after[0].role != "system":
        yield "the system turn is not the first"
    told = [[turn.text for turn in turns if turn.role == "system"] for turns in (before, after)]
    if len(told[1]) > len(told[0]):
        yield "there are more system turns than before"
    notice = policy.summary_notice_text.strip()
    if before[0].role == "system" and not after[0].text.startswith(before[0].text) and after[0].text != notice:
        yield "the system turn has changed"
    if _spoken_to(after) > _spoken_to(before):
        yield "a human turn stands right before a system turn"
    if notice and "\n".join(told[1]).count(notice) > max(1, "\n".join(told[0]).count(notice)):
        yield "the notice stands there more than once"


def _spoken_to(turns: Sequence[Turn]) -> int:
    return sum(one.role == "human" and two.role == "system" for one, two in pairwise(turns))


def _neighbours(before: Sequence[Turn], after: Sequence[Turn]) -> Iterator[str]:
    """Two of one role side by side, where no two such turns were; two human ones also with but a system turn between.
    Results are told by their calls."""
    yield from _twins(before, after)
    if any(turn.role == "system" for turn in after[1:]):
        spoken = [[turn for turn in turns if turn.role != "system"] for turns in (before, after)]
        yield from (each for each in _twins(*spoken) if each.endswith("human"))


def _twins(before: Sequence[Turn], after: Sequence[Turn]) -> Iterator[str]:
    were = [(a, b) for a, b in pairwise(before) if a.role == b.role]
    for place, (one, two) in enumerate(pairwise(after)):
        if one.role == two.role and not any(
            one.role == a.role and (a.role == "tool" or (a.text in one.text and b.text in two.text)) for a, b in were
        ):
            yield f"turns {place} and {place + 1} are both {one.role}"


def _alternation(before: Sequence[Turn], after: Sequence[Turn]) -> Iterator[str]:
    """What strict chat templates refuse: of human turns and gpt turns without calls, human first, two of one role."""
    if _clashes(after) > _clashes(before):
        yield "user and assistant turns do not alternate as before"


def _clashes(turns: Sequence[Turn]) -> int:
    roles = [turns[place].role for place in counted_places(turns)]
    return sum(one == two for one, two in pairwise(["gpt", *roles]))


def _calls(before: Sequence[Turn], after: Sequence[Turn]) -> Iterator[str]:
    """Every gpt turn that is left is one of those before, word for word, with the same results, in the same order."""
    rest = iter(_exchanges(before))
    for exchange in _exchanges(after):
        if exchange not in rest:
            yield f"a call and its results are not as before: {exchange[0][-100:]!r}"
            return


def _exchanges(turns: Sequence[Turn]) -> list[tuple[str, tuple[str, ...]]]:
    """The text of each gpt turn, and what its results are called."""
    exchanges = []
    for unit in units([turn.role for turn in turns]):
        first = turns[unit.start]
        if first.role in ("gpt", "tool"):
            results = [result for place in unit for result in results_in(turns[place])]
            names = tuple("".join(result.envelope) for result in results)
            exchanges.append((first.text if first.role == "gpt" else "", names))
    return exchanges


def _protected(before: Sequence[Turn], after: Sequence[Turn], policy: Policy) -> Iterator[str]:
    """Each stands there, in order. Only a human turn may hold two of them."""
    place = 0
    for number in sorted(protected(before, policy)):
        turn = before[number]
        found = next((n for n in range(place, len(after)) if _holds(after[n], turn, policy)), None)
        if found is None:
            yield f"protected turn {number} ({turn.role}) is not there unbroken"
        else:
            place = found if turn.role == "human" else found + 1


def _holds(turn: Turn, text_of: Turn, policy: Policy) -> bool:
    text, role = text_of.text, text_of.role
    if turn.role != role:
        return False
    if role == "human":
        return not text or f"\n\n{text}\n\n" in f"\n\n{turn.text}\n\n"
    if role == "system":
        return turn.text.startswith(text)
    return turn.text == text or (role == "tool" and policy.shorten_turns and _names(turn) == _names(text_of))


def _names(turn: Turn) -> list[tuple[str, str]]:
    return [result.envelope for result in results_in(turn)]


def _last(before: Turn, after: Turn) -> Iterator[str]:
    if before.raws != after.raws:
        yield "the last turn has changed"


def _format(before: Sequence[Turn], after: Sequence[Turn], policy: Policy) -> Iterator[str]:
    """What our own format's check says of the new row and did not say of the old one, wherever it stands."""
    if not policy.first_system and before[0].role == "system":
        after = [before[0], *after[1:]]  # it may be folded: then the rest is measured as if it were there
    were, are = _faults(before), _faults(after)
    if were[_OUT_OF_PLACE]:  # other turns may come to stand there
        del are[_OUT_OF_PLACE]
    yield from (are - were)


def _faults(turns: Sequence[Turn]) -> Counter[str]:
    """Faults without the place where they are and the text that they quote."""
    said = [re.sub(r"^turn \d+: ", "", problem) for problem in trajectory.validate(_rows(turns))]
    return Counter(_OUT_OF_PLACE if _MISPLACED.search(each) else re.split(": | in (?!a row)", each)[0] for each in said)


def _rows(turns: Sequence[Turn]) -> list[row.Turn]:
    return [row.Turn(turn.role, turn.text) for turn in turns]
