"""Gates, and how requests end that went through them."""

import asyncio
import random
from collections.abc import Sequence

from agent.models.account import Account, Budget, Minute
from agent.models.base import Lease, Verdict
from agent.models.gate import RunGate

OK = Verdict(kind="ok")
LIMITED = Verdict(kind="rate_limited", reason="rate_limited", message="slow down")
BAD_KEY = Verdict(kind="condemned", reason="auth", message="no such key")
LOST = Verdict(kind="unreachable", reason="unreachable", message="refused")
FAULT = Verdict(kind="row_fault", reason="bad_request")
GONE = Verdict(kind="abandoned")


def gate_of(
    targets: Sequence[int], concurrency: int, minute: Minute | None = None, budget: Budget | None = None, **waits: float
) -> RunGate:
    account = Account(minute or Minute(), budget or Budget())
    return RunGate(targets, concurrency, account, rng=random.Random(1), **waits)


async def once(gate: RunGate, verdict: Verdict, tokens: int = 0) -> Lease:
    lease = await gate.acquire(tokens)
    gate.release(lease, verdict)
    return lease


async def always(gate: RunGate, verdict: Verdict) -> None:
    while True:
        await once(gate, verdict)


async def blocked(gate: RunGate) -> bool:
    """Whether a request would have to wait; it leaves nothing behind."""
    try:
        async with asyncio.timeout(0):
            lease = await gate.acquire(0)
    except TimeoutError:
        return True
    gate.release(lease, GONE)
    return False
