"""One call of a model: its tries, and what each tells the gate. The same for every model that can fail."""

import asyncio
import random
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from agent.errors import ModelError, RunStopped
from agent.models.base import Gate, Lease, ModelRequest, Verdict
from agent.types import NO_SPEND, Reply, Spend

BACKOFF_FIRST = 0.5  # seconds before the second try, doubled for each further one
BACKOFF_LONGEST = 30.0

_ONE_REQUEST = Spend(requests=1)

Send = Callable[[Lease], Awaitable[tuple[Reply, Verdict]]]
"""Sends one try. Raises CallFailed."""


class CallFailed(Exception):
    """One try that brought no reply: what the gate is told, and how the row ends if this is the last word."""

    def __init__(
        self, verdict: Verdict, *, error_class: str = "model_error", reason: str = "", retryable: bool = True
    ) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict
        self.error_class = error_class
        self.reason = reason or verdict.reason or verdict.kind
        self.retryable = retryable

    def ends_row(self, spend: Spend) -> ModelError:
        """The error that the row ends with, `spend` being that of all its tries."""
        return ModelError(
            str(self), error_class=self.error_class, reason=self.reason, retryable=self.retryable, spend=spend
        )


def _too_late(failure: CallFailed, request: ModelRequest) -> bool:
    """Whether the wait that the endpoint asks for would outlast the row."""
    verdict = failure.verdict
    return verdict.kind == "transient" and (verdict.retry_after or 0.0) > request.clock.remaining()


class Caller:
    """Sends until a reply comes, the row's fault is certain or the tries are used up.

    Only transient failures use tries, but for those of a probe. Rate limits, condemned keys and an unreachable endpoint
    are the gate's to judge: it lets the next request go elsewhere or later, or ends the run. Waiting in the gate costs
    no row time.
    """

    def __init__(self, gate: Gate, tries: int, rng: random.Random | None = None) -> None:
        self._gate = gate
        self._tries = max(1, tries)
        self._rng = rng or random.Random()  # noqa: S311 - jitter, not a secret

    async def call(self, request: ModelRequest, tokens: int, send: Send) -> Reply:
        """The reply, its spend being that of all tries. `tokens` is an estimate of what one try counts.

        Raises ModelError and RunStopped, each with the spend of the tries made.
        """
        spend = NO_SPEND
        tries = 0
        while True:
            lease = await self._acquire(request, tokens, spend)
            try:
                reply = await self._try(lease, send)
            except asyncio.CancelledError:
                request.tally.spend += _ONE_REQUEST
                raise
            except CallFailed as failure:
                spend += failure.verdict.spend
                request.tally.spend += failure.verdict.spend
                tries += failure.verdict.kind == "transient" and not lease.probes
                if failure.verdict.kind == "row_fault" or tries >= self._tries or _too_late(failure, request):
                    raise failure.ends_row(spend) from failure
                if failure.verdict.kind == "transient":
                    await asyncio.sleep(self._pause(tries, failure.verdict.retry_after))
            else:
                return replace(reply, spend=spend + reply.spend)

    async def _acquire(self, request: ModelRequest, tokens: int, spend: Spend) -> Lease:
        try:
            with request.clock.paused():
                return await self._gate.acquire(tokens)
        except RunStopped as stopped:
            raise RunStopped(stopped.reason, stopped.message, spend) from stopped

    async def _try(self, lease: Lease, send: Send) -> Reply:
        verdict = Verdict(kind="abandoned", spend=_ONE_REQUEST)
        try:
            reply, verdict = await send(lease)
        except CallFailed as failure:
            verdict = failure.verdict
            raise
        finally:
            self._gate.release(lease, verdict)
        return reply

    def _pause(self, tries: int, retry_after: float | None) -> float:
        longest = min(BACKOFF_LONGEST, BACKOFF_FIRST * 2.0 ** (max(tries, 1) - 1))
        return max(retry_after or 0.0, longest * self._rng.uniform(0.5, 1.0))
