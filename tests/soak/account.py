"""What the endpoint counted against what the journal says: row by row, to the request and the token. Pure.

A try's requests are those that came between its beginning and its end, both of which its row tells. What came outside
of every try belongs to tries that a SIGKILL cut short: these have no row, or one that the parent wrote for them.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct

from tests.soak.endpoint import Logged

_ROUNDING = 0.003  # seconds: times in rows are whole milliseconds
_LATE = 2.0  # seconds after which a request that nobody waits for any more is noted by a busy endpoint at the latest


class Sum(Struct):
    """Of requests."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    def add(self, logged: Logged) -> None:
        self.requests += 1
        self.input_tokens += logged.input_tokens
        self.output_tokens += logged.output_tokens


class CutTry(Struct, frozen=True):
    """A try without an end: its requests, the last one's time, and when the row's next try began (None: never)."""

    prompt: str
    sum: Sum
    last_at: float
    next_at: float | None


class Account(Struct):
    """`wrong` are rows whose numbers are not the endpoint's, as text."""

    tries: Sum
    cut: list[CutTry]
    wrong: list[str]


class _Try(Struct):
    row: Mapping[str, Any]
    began: float
    ended: float
    counted: Sum


def account(rows: Iterable[Mapping[str, Any]], log: Iterable[Logged], prompts: Mapping[str, str]) -> Account:
    """`prompts`: task_id -> prompt."""
    found = Account(Sum(), [], [])
    requests: dict[str, list[Logged]] = defaultdict(list)
    tries: dict[str, list[_Try]] = defaultdict(list)
    for logged in log:
        requests[logged.prompt].append(logged)
    for row in rows:
        tries[prompts[row["task_id"]]].append(_try(row))
    for prompt in requests.keys() | tries.keys():
        _settle(found, prompt, sorted(tries[prompt], key=_end), sorted(requests[prompt], key=_arrival))
    found.cut.sort(key=lambda each: each.last_at)
    return found


def _try(row: Mapping[str, Any]) -> _Try:
    ended = datetime.fromisoformat(row["metadata"]["timestamp"]).timestamp()
    return _Try(row, ended - row["duration_seconds"], ended, Sum())


def _end(each: _Try) -> float:
    return each.ended


def _arrival(logged: Logged) -> float:
    return logged.at


def _settle(found: Account, prompt: str, tries: Sequence[_Try], requests: Sequence[Logged]) -> None:
    cut: dict[int, list[Logged]] = defaultdict(list)  # by the number of the try that follows
    for logged in requests:
        following = sum(each.ended + _ROUNDING < logged.at for each in tries)
        if following < len(tries) and tries[following].began - _ROUNDING <= logged.at:
            tries[following].counted.add(logged)
        elif following and _is_late(tries[following - 1], logged):
            tries[following - 1].counted.add(logged)
        else:
            cut[following].append(logged)
    for each in tries:
        _check(found, prompt, each)
    for number, group in cut.items():
        total = Sum()
        for logged in group:
            total.add(logged)
        following_at = tries[number].began if number < len(tries) else None
        found.cut.append(CutTry(prompt, total, group[-1].at, following_at))


def _is_late(each: _Try, logged: Logged) -> bool:
    """Sent just before the row's end cancelled it."""
    return logged.kind == "gone" and each.row["status"] != "completed" and logged.at - each.ended < _LATE


def _check(found: Account, prompt: str, each: _Try) -> None:
    usage = each.row["usage"]
    said = Sum(each.row["requests"], usage["input_tokens"], usage["output_tokens"])
    if said != each.counted:
        what = f"{each.row['status']} {each.row['reason']}, attempt {each.row['attempt']}"
        found.wrong.append(f"{prompt} ({what}): the row says {said}, the endpoint {each.counted}")
    found.tries.requests += each.counted.requests
    found.tries.input_tokens += each.counted.input_tokens
    found.tries.output_tokens += each.counted.output_tokens


def unexplained(cut: Iterable[CutTry], kills: Sequence[float]) -> list[CutTry]:
    """Those that no kill cut short. `kills`: Unix times."""
    return [
        each
        for each in cut
        if not any(
            each.last_at - _LATE <= at <= (each.next_at if each.next_at is not None else float("inf")) for at in kills
        )
    ]
