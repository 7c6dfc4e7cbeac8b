"""Where a run's requests may go: a target with one of its keys is a slot.

A slot is open, cooling down (429), closed (its endpoint is unreachable or its key condemned after it had worked: one
probe at a time finds out) or dead. One that only fails while another key of its target might not is doubted: requests
wait for the other, but for a probe now and then. The gate decides which; a slot says what follows for requests.
"""

from msgspec import Struct

from agent.models.base import Verdict
from agent.models.pace import Pace

FAILED = 3  # in a row: it only fails
DOUBT_FIRST = 1.0  # seconds from a failure until the next probe, doubled by each further one
DOUBT_DOUBLINGS = 4


class Closure(Struct):
    """Why a slot is closed, and when it is tried again."""

    verdict: Verdict
    probe_at: float
    give_up_at: float
    pause: float
    probe: int = 0  # the lease that probes, 0 for none


class Slot:
    """A target with one of its keys. `changed` is the number of the first lease given after its last change."""

    def __init__(self, target: int, key: int, limit: int) -> None:
        self.target = target
        self.key = key
        self.limit = limit
        self.in_flight = 0
        self.good = 0  # answers since the limit last moved
        self.late = 0.0  # time-outs, less half of the good answers
        self.failed = 0  # requests in a row that brought neither a reply nor a 429
        self.changed = 0
        self.cooling_until = 0.0
        self.pause = 0.0
        self.dry_since: float | None = None  # the first 429 since the last success
        self.answered = False
        self.worked = False
        self.pace = Pace()
        self.doubted = False
        self.doubted_until = 0.0
        self.closure: Closure | None = None
        self.dead: Verdict | None = None

    def may_send(self, now: float) -> bool:
        """Whether a request may go here now."""
        return self.is_open(now) and (self._has_place(now) or self._wants_probe(now))

    def _has_place(self, now: float) -> bool:
        return self.in_flight < self.limit and self.pace.free_at(now) <= now

    def is_open(self, now: float) -> bool:
        """Whether requests belong here, be it that they must wait for a free place."""
        if self.dead is not None or self.cooling_until > now:
            return False
        if self.closure is not None:
            return self._wants_probe(now)
        return not self.doubted or (not self.in_flight and self.doubted_until <= now)

    def opens_at(self) -> float | None:
        """When time alone makes this slot usable; None if it does not."""
        probed = self.closure.probe if self.closure is not None else self.doubted and self.in_flight
        if self.dead is not None or probed:
            return None
        probe_at = self.closure.probe_at if self.closure is not None else self.doubted * self.doubted_until
        return max(self.cooling_until, self.pace.due, probe_at)

    def fail(self, now: float) -> None:
        """A request brought neither a reply nor a 429."""
        self.failed += 1
        self.doubted_until = now + DOUBT_FIRST * 2 ** min(max(0, self.failed - FAILED), DOUBT_DOUBLINGS)

    def only_fails(self) -> bool:
        """Whether nothing else came of late, if anything may come at all."""
        return self.failed >= FAILED or self.closure is not None or self.dead is not None

    def is_hopeless(self, rate_limit_wait: float) -> bool:
        """Dead, or its next chance lies past what may be waited for one success."""
        dry = self.dry_since is not None and self.cooling_until - self.dry_since > rate_limit_wait
        return dry or self.dead is not None

    def is_lost(self) -> bool:
        """Whether it is closed because nobody answers there."""
        return self.closure is not None and self.closure.verdict.kind == "unreachable"

    def _wants_probe(self, now: float) -> bool:
        return self.closure is not None and not self.closure.probe and self.closure.probe_at <= now
