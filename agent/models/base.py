"""What a model is to the loop, and what it asks before every request."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct, field

from agent.clock import RowClock
from agent.types import NO_SPEND, Message, Reply, Spend
from tools.base import ToolSpec


class Tally(Struct):
    """What a call has cost before its last try ended: for whoever cancels it."""

    spend: Spend = NO_SPEND


class ModelRequest(Struct, frozen=True, kw_only=True):
    """One call. The messages are all that the model is to see, ephemeral system text and prefill included."""

    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    task_id: str = ""
    row_key: str = ""
    sample_index: int = 0
    turn: int = 1  # number of this call within the conversation, from 1
    seed: int | None = None
    response_format: dict[str, Any] | None = None
    counted: int = 0  # tokens of the messages, where somebody has counted them
    clock: RowClock
    tally: Tally = field(default_factory=Tally)


class Model(Protocol):
    """Raises ModelError for what ends the row, RunStopped for what ends the run."""

    name: str

    async def reply(self, request: ModelRequest) -> Reply:
        """The model's answer within the row's and the request's time."""

    async def close(self) -> None:
        """Connections end."""


class Lease(Struct, frozen=True, kw_only=True):
    """Leave to send one request: to which target (0 = the model, then the fallbacks) with which of its keys. `probes`:
    it only failed of late, and another might not."""

    id: int
    target: int = 0
    key: int = 0
    probes: bool = False


class Verdict(Struct, frozen=True, kw_only=True):
    """How a leased request ended.

    ok; rate_limited (429); condemned (this key or model will not answer: 401, 402, quota, unknown model, …);
    unreachable (no connection); row_fault (may concern this row alone); transient (5xx, malformed, cut off,
    time-out); abandoned (cancelled by us).
    """

    kind: Literal["ok", "rate_limited", "condemned", "unreachable", "row_fault", "transient", "abandoned"]
    reason: str = ""  # auth | quota | model | … of a condemned one
    message: str = ""
    retry_after: float | None = None  # seconds, as the endpoint asked
    spend: Spend = NO_SPEND
    tokens: int = 0  # what it counts against a tokens-per-minute limit: reported, else estimated


class Gate(Protocol):
    """One gate for the whole run. Requests stand in it, not rows."""

    async def acquire(self, tokens: int) -> Lease:
        """Waits for a free place, a key that is not cooling down, the minute's allowance. `tokens` is an estimate.
        Raises RunStopped once the run is to end."""

    def release(self, lease: Lease, verdict: Verdict) -> None:
        """Every lease is given back exactly once."""
