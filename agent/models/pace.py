"""How fast an endpoint takes requests, learned from its 429s. Pure: times are given, in seconds.

A 429 tells that an endpoint is full, and the seconds before it how much that is: the most requests that it took in one.
From then on requests leave evenly, at first a little slower than that. When that rate is reached again and no 429 has
come, it doubles and doubles, for the limit may have grown. (Up to there it is the curve of CUBIC, RFC 9438, 4.1.)
A rate that is learned again and again is tested less and less often.

Where an endpoint is full because of requests at once, a second of a burst would teach too slow a pace if they are
answered within it: then only seconds with few of them at once teach.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from msgspec import Struct

WINDOW = 1.0
KEPT = 2.0  # whose busiest second counts: a rate that is too high corrects itself sooner than one that is too low
LEAST = 5  # requests in the window: fewer make no rate
BELOW = 0.03  # of the learned rate is left free at first
PLATEAU_FIRST = 15.0  # until the learned rate is reached again; doubled each time that it is learned anew
PLATEAU_LONGEST = 120.0
DOUBLED = 5.0  # seconds in which the rate doubles, once the plateau is over
SAME = 0.1  # rates that differ by less, in parts of the one before, are the same
MOST_DOUBLINGS = 20  # then it is no pace any more
QUICK = 0.5  # replies that come sooner
SLACK = 0.01  # that late requests make up for


class Sent(Struct, eq=False):
    """A request that an endpoint took, or has not answered yet."""

    at: float
    answered_at: float = float("inf")
    refused: bool = False


class Pace:
    """Of one key. `due`: when the next request belongs, in the past as long as there is no pace."""

    def __init__(self) -> None:
        self.due = 0.0
        self._sent: deque[Sent] = deque()
        self._rate: float | None = None
        self._since = 0.0
        self._plateau = PLATEAU_FIRST
        self._most = 0  # requests at once when it was full
        self._full_at: float | None = None  # a 429 from which nothing has been learned yet

    @property
    def is_learned(self) -> bool:
        """Whether requests leave evenly."""
        return self._rate is not None

    def free_at(self, now: float) -> float:
        """When the next request may go: `now` or later. Not to be asked while a pause goes on: by its end all requests
        of the same moment have been refused or taken."""
        if self._full_at is not None:
            self._learn(self._full_at, now)
        return max(now, self.due)

    def send(self, now: float) -> Sent:
        """A request goes."""
        while self._sent and self._sent[0].at < now - KEPT:
            self._sent.popleft()
        sent = Sent(now)
        self._sent.append(sent)
        if self._rate is not None:
            self._since += max(0.0, now - self.due)  # what did not have to wait tests no rate
            self.due = max(self.due, now - SLACK) + 1 / self._rate_at(self._rate, now)
        return sent

    def held_to(self, now: float) -> float:
        """Requests a second, 0 if none has to wait."""
        return self._rate_at(self._rate, now) if self._rate is not None and self.due > now else 0.0

    def _rate_at(self, learned: float, now: float) -> float:
        past = now - self._since - self._plateau
        if past < 0:
            return learned * (1 + BELOW * (past / self._plateau) ** 3)
        return learned * math.exp2(min(past / DOUBLED, MOST_DOUBLINGS))

    def refuse(self, sent: Sent) -> None:
        """Its answer is a 429."""
        sent.refused = True
        self._full_at = sent.at if self._full_at is None else self._full_at

    def _learn(self, full_at: float, now: float) -> None:
        self._full_at = None
        self._since = self.due = now
        taken = [sent for sent in self._sent if sent.at <= full_at and not sent.refused]
        at_once = sum(full_at < sent.answered_at < sent.at + QUICK for sent in taken)
        self._most = max(self._most, at_once)
        most = _busiest([sent.at for sent in taken])
        if most >= LEAST and 2 * at_once <= min(most, self._most):
            self._take(most / WINDOW)

    def _take(self, rate: float) -> None:
        is_same = self._rate is not None and abs(rate - self._rate) <= SAME * self._rate
        self._plateau = min(PLATEAU_LONGEST, 2 * self._plateau) if is_same else PLATEAU_FIRST
        self._rate = rate


def _busiest(times: Sequence[float]) -> int:
    """The most within a second. It is taken a little short: they may have come less close together than they left."""
    return max((bisect_left(times, at + WINDOW - SLACK) - place for place, at in enumerate(times)), default=0)
