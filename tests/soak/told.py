"""What a run said of its rows while it ran, in run.log, against what it has to show for it. Pure.

A row is on disk before anybody is told that it ended. So whatever was told stands in the journal, no matter what was
killed since, and a row that was told to be done for good is asked nothing any more.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from msgspec import Struct

from tests.soak.account import ROUNDING, Kill
from tests.soak.endpoint import Logged

FOR_GOOD = ("completed", "discarded")  # no resume tries these again
_ROW = re.compile(r"(\S+Z) \[B(\d+):P\d+\] (r\d+) (completed|discarded|max_turns|timeout|partial|failed|stopped)\b[, ]")
_DEATH = re.compile(r"(\S+Z) a worker died: ")


class Told(Struct, frozen=True):
    """One try's end. `at`: Unix time."""

    at: float
    batch_num: int
    task_id: str
    status: str


def read_told(text: str) -> list[Told]:
    """Of all rows in the text of a run.log."""
    matches = filter(None, map(_ROW.match, text.splitlines()))
    return [Told(_unix(match[1]), int(match[2]), match[3], match[4]) for match in matches]


def own_kills(text: str, kills: Iterable[Kill]) -> list[Kill]:
    """Workers that died without our doing, such as one whose loop stood still: which, run.log does not say."""
    deaths = [_unix(match[1]) for match in filter(None, map(_DEATH.match, text.splitlines()))]
    for kill in kills:
        after = [at for at in deaths if kill.at - ROUNDING <= at]
        if kill.worker and after:
            deaths.remove(min(after))
    return [Kill(at, 0) for at in deaths]


def _unix(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def broken(
    told: Sequence[Told], rows: Iterable[Mapping[str, Any]], log: Iterable[Logged], prompts: Mapping[str, str]
) -> list[str]:
    """The promises that were not kept, as text. `prompts`: task_id -> prompt."""
    written = Counter((row["metadata"]["batch_num"], row["task_id"], row["status"]) for row in rows)
    lost = Counter((each.batch_num, each.task_id, each.status) for each in told) - written
    found = [
        f"{name} was told to have ended as {status} in batch {batch}, which does not hold it ({times} times)"
        for (batch, name, status), times in lost.items()
    ]
    times_asked: dict[str, list[float]] = defaultdict(list)
    for logged in log:
        times_asked[logged.prompt].append(logged.at)
    for each in told:
        asked = [at for at in times_asked[prompts[each.task_id]] if at > each.at + ROUNDING]
        if each.status in FOR_GOOD and asked:
            found.append(f"{each.task_id} was told to be {each.status}, and asked {len(asked)} times after that")
    return found
