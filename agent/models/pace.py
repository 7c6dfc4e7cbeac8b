"""How fast an endpoint takes requests, learned from its 429s. Pure: times are given, in seconds.

A 429 tells that an endpoint is full, and the second before it how much that is: the requests that it took. From then on
requests leave evenly, at first a little slower than that, and after `PLATEAU` faster and faster, for its limit may have
grown; the curve is that of CUBIC (RFC 9438, section 4.1). Where it is full because of requests at once, a second of a
burst would teach too slow a pace if these are answered within it: then only seconds with few of them at once teach.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from msgspec import Struct

WINDOW = 1.0
KEPT = 2.0  # whose busiest second counts: a rate that is too high corrects itself sooner than one that is too low
LEAST = 5  # requests in the window: fewer make no rate
BELOW = 0.03  # of the learned rate is left free at first
PLATEAU = 60.0  # until the learned rate is reached again
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
        self._most = 0  # requests at once when it was full
        self._full_at: float | None = None  # a 429 from which nothing has been learned yet

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
            way = (now - self._since) / PLATEAU - 1
            self.due = max(self.due, now - SLACK) + 1 / (self._rate * (1 + BELOW * way**3))
        return sent

    def refuse(self, sent: Sent) -> None:
        """Its answer is a 429."""
        sent.refused = True
        self._full_at = sent.at if self._full_at is None else self._full_at

    def _learn(self, full_at: float, now: float) -> None:
        self._full_at = None
        self._since = self.due = now
        taken = [sent for sent in self._sent if sent.at <= full_at and not sent.refused]
        at_once = sum(full_at < sent.answered_at <= now for sent in taken)
        self._most = max(self._most, at_once)
        most = _busiest([sent.at for sent in taken])
        if most >= LEAST and 2 * at_once <= min(most, self._most):
            self._rate = most / WINDOW


def _busiest(times: Sequence[float]) -> int:
    """The most within a second. It is taken a little short: they may have come less close together than they left."""
    return max((bisect_left(times, at + WINDOW - SLACK) - place for place, at in enumerate(times)), default=0)
