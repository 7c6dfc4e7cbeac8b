"""What the endpoint counted against what the journal says: row by row, to the request, the token and the call. Pure.

A try's requests are those that came between its beginning and its end, both of which its row tells. What came outside
of every try belongs to tries that a SIGKILL cut short: these have no row, or one that the parent wrote for them.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import zip_longest
from typing import Any

from msgspec import Struct

from tests.soak.endpoint import ANSWERED, INVENTED, Logged

ROUNDING = 0.003  # seconds: times in rows are whole milliseconds
_CUT_OFF = ("timeout", "stopped")
_WRITTEN = 15.0  # seconds after its final answer in which a row is on disk, however busy the machine
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


class Kill(Struct, frozen=True):
    """A SIGKILL. `at`: Unix time just before it; `worker`: the process, 0 for all of them or any."""

    at: float
    worker: int


class CutTry(Struct, frozen=True):
    """A try without an end: its requests, the worker that sent them (0: not known), the last one's time, whether that
    brought the final answer, and when the row was next tried (None: never)."""

    prompt: str
    sum: Sum
    worker: int
    last_at: float
    is_answered: bool
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
    calls: Counter[str]  # that replies asked for, by kind


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
    return _Try(row, ended - row["duration_seconds"], ended, Sum(), Counter())


def _end(each: _Try) -> float:
    return each.ended


def _arrival(logged: Logged) -> float:
    return logged.at


def _settle(found: Account, prompt: str, tries: Sequence[_Try], requests: Sequence[Logged]) -> None:
    cut: dict[int, list[Logged]] = defaultdict(list)  # by the number of the try that follows
    for logged in requests:
        following = sum(each.ended + ROUNDING < logged.at for each in tries)
        if following < len(tries) and tries[following].began - ROUNDING <= logged.at:
            tries[following].counted.add(logged)
            tries[following].calls.update(logged.calls)
        elif following and _is_late(tries[following - 1], logged):
            tries[following - 1].counted.add(logged)
        else:
            cut[following].append(logged)
    for each in tries:
        _check(found, prompt, each)
    for number, group in cut.items():
        following_at = tries[number].began if number < len(tries) else None
        found.cut += _cut_tries(prompt, group, following_at)


def _cut_tries(prompt: str, requests: Sequence[Logged], following_at: float | None) -> Iterator[CutTry]:
    """Each worker's requests are a try of their own; one that is not known belongs to the try before."""
    tries: list[list[Logged]] = []
    for logged in requests:
        if tries and (not logged.worker or _worker(tries[-1]) in (0, logged.worker)):
            tries[-1].append(logged)
        else:
            tries.append([logged])
    for each, following in zip_longest(tries, tries[1:]):
        total = Sum()
        for logged in each:
            total.add(logged)
        next_at = following[0].at if following else following_at
        yield CutTry(prompt, total, _worker(each), each[-1].at, _is_final(each[-1]), next_at)


def _is_final(logged: Logged) -> bool:
    return logged.kind in ANSWERED and not logged.calls


def _worker(requests: Iterable[Logged]) -> int:
    return next((logged.worker for logged in requests if logged.worker), 0)


def _is_late(each: _Try, logged: Logged) -> bool:
    """Sent just before the row's end cancelled it."""
    return logged.kind == "gone" and each.row["status"] != "completed" and logged.at - each.ended < _LATE


def _check(found: Account, prompt: str, each: _Try) -> None:
    what = f"{prompt} ({each.row['status']} {each.row['reason']}, attempt {each.row['attempt']})"
    usage = each.row["usage"]
    said = Sum(each.row["requests"], usage["input_tokens"], usage["output_tokens"])
    if each.row["status"] in _CUT_OFF and said.requests == each.counted.requests + 1:
        each.counted.requests += 1  # cancelled while it was being sent: a busy endpoint never sees it
    if said != each.counted:
        found.wrong.append(f"{what}: the row says {said}, the endpoint {each.counted}")
    called, asked = _called(each.row), _asked(each.calls)
    is_whole = each.row["status"] in ("completed", "discarded")  # any other end may have come before a call's
    if called != asked if is_whole else not called <= asked:
        found.wrong.append(f"{what}: the row says it called {dict(called)}, the endpoint asked for {dict(asked)}")
    found.tries.requests += each.counted.requests
    found.tries.input_tokens += each.counted.input_tokens
    found.tries.output_tokens += each.counted.output_tokens


def _called(row: Mapping[str, Any]) -> Counter[str]:
    """By tool, invented ones too."""
    known = Counter({name: tally["count"] for name, tally in row["tool_stats"].items() if tally["count"]})
    return known + Counter({each["name"]: each["count"] for each in json.loads(row["unknown_tools"])})


def _asked(calls: Counter[str]) -> Counter[str]:
    return +Counter({"terminal": calls["good"] + calls["malformed"], INVENTED: calls["invented"]})


def unexplained(cut: Iterable[CutTry], kills: Sequence[Kill]) -> list[CutTry]:
    """Those that no kill of the worker that held the row cut short."""
    return [each for each in cut if not any(_explains(kill, each) for kill in kills)]


def _explains(kill: Kill, cut: CutTry) -> bool:
    until = min(
        cut.next_at if cut.next_at is not None else float("inf"),
        cut.last_at + _WRITTEN if cut.is_answered else float("inf"),
    )
    who = not (kill.worker and cut.worker) or kill.worker == cut.worker
    return who and cut.last_at - _LATE <= kill.at <= until
