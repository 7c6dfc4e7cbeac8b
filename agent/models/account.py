"""What all requests of a run count against, whichever model they ask: limits per minute, and the budget.

Pure: times are given, in seconds.
"""

from collections import deque

from msgspec import Struct, field

from agent.types import NO_SPEND, Spend

REMEMBERED = 100  # replies by which what requests count is judged
MINUTE = 60.5  # seconds: requests that leave a minute apart may arrive a little less apart


class Entry(Struct, eq=False):
    """What one request counts against a limit per minute, for as long as it is `counted`."""

    at: float
    tokens: int  # an estimate while it is out
    is_out: bool = True
    counted: bool = False


class Minute:
    """Requests and tokens of the last 60 seconds. Nothing is ever above a limit within any 60 seconds, but for one
    request that alone counts more tokens than `tpm`, and for replies that are longer than those before."""

    def __init__(self, rpm: int | None = None, tpm: int | None = None) -> None:
        self._rpm = rpm
        self._tpm = tpm
        self._entries: deque[Entry] = deque()
        self._tokens = 0
        self._out = 0  # entries that are no more than estimates
        self._replies = 0
        self._beyond = 0.0  # tokens that requests had beyond their estimates, in the mean

    def is_new(self) -> bool:
        """Whether no reply has told yet what requests count."""
        return self._tpm is not None and not self._replies

    def free_at(self, now: float, estimate: int) -> float:
        """When a request of about so many tokens may go: `now` or later."""
        while self._entries and self._entries[0].at <= now - MINUTE:
            self._forget(self._entries.popleft())
        if not self._entries:
            return now
        return max(now, self._requests_free_at(now), self._tokens_free_at(now, estimate))

    def add(self, now: float, estimate: int) -> Entry:
        """Counts a request, for now with an estimate of its tokens."""
        entry = Entry(now, estimate, counted=self._rpm is not None or self._tpm is not None)
        if entry.counted:
            self._entries.append(entry)
            self._tokens += estimate
            self._out += 1
        return entry

    def answer(self, entry: Entry, tokens: int) -> None:
        """A request is over, and had so many tokens, 0 if nobody knows."""
        if tokens:
            self._replies += 1
            self._beyond += (tokens - entry.tokens - self._beyond) / min(self._replies, REMEMBERED)
        if entry.counted:
            self._out -= 1
            self._tokens += (tokens or entry.tokens) - entry.tokens
        entry.tokens = tokens or entry.tokens
        entry.is_out = False

    def _forget(self, entry: Entry) -> None:
        self._tokens -= entry.tokens
        self._out -= entry.is_out
        entry.counted = False

    def _requests_free_at(self, now: float) -> float:
        if self._rpm is None or len(self._entries) < self._rpm:
            return now
        return self._entries[len(self._entries) - self._rpm].at + MINUTE

    def _tokens_free_at(self, now: float, estimate: int) -> float:
        if self._tpm is None:
            return now
        over = self._tokens + estimate + (self._out + 1) * self._beyond - self._tpm
        for entry in self._entries:
            if over <= 0:
                break
            over -= entry.tokens + entry.is_out * self._beyond
            now = entry.at + MINUTE
        return now


class Budget:
    """What the whole run may spend, over all its invocations. `spent`, `ended_rows`: what earlier ones count."""

    def __init__(
        self,
        max_cost: float | None = None,
        max_total_tokens: int | None = None,
        spent: Spend = NO_SPEND,
        ended_rows: int = 0,
    ) -> None:
        self._max_cost = max_cost
        self._max_total_tokens = max_total_tokens
        self.spent = spent
        self._ended = spent if ended_rows else NO_SPEND
        self._ended_rows = ended_rows

    def reached(self) -> bool:
        """Whether no further call may be made."""
        return self._is_above(self.spent.all_cost, self.spent.all_tokens)

    def add(self, spend: Spend) -> None:
        """Counts what a request cost."""
        self.spent += spend

    def row_ended(self, spend: Spend) -> None:
        """Counts towards the mean cost of a row."""
        self._ended += spend
        self._ended_rows += 1

    def has_room(self, running: int) -> bool:
        """Whether one more row may start beside those running, each taken to cost the mean of those ended."""
        ahead = running / self._ended_rows if self._ended_rows else 0.0
        return not self._is_above(
            self.spent.all_cost + self._ended.all_cost * ahead,
            self.spent.all_tokens + self._ended.all_tokens * ahead,
        )

    def _is_above(self, cost: float, tokens: float) -> bool:
        too_dear = self._max_cost is not None and cost >= self._max_cost
        return too_dear or (self._max_total_tokens is not None and tokens >= self._max_total_tokens)


class Account(Struct, frozen=True):
    """Both. Gates that share one let no more go together than one of them would."""

    minute: Minute = field(default_factory=Minute)
    budget: Budget = field(default_factory=Budget)
