"""What every request of a run carries. A leaf: crosses process borders."""

from typing import Literal

from msgspec import Struct

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra"]
ProviderSort = Literal["price", "throughput", "latency"]


class RequestOptions(Struct, frozen=True, kw_only=True):
    """None or empty: not sent. Seconds, and USD per 1,000,000 tokens."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    reasoning_effort: ReasoningEffort | None = None
    reasoning_disabled: bool = False
    providers_allowed: tuple[str, ...] = ()
    providers_ignored: tuple[str, ...] = ()
    providers_order: tuple[str, ...] = ()
    provider_sort: ProviderSort | None = None
    request_timeout: float = 600.0  # one try, headers and body
    request_retries: int = 5  # tries of one call
    trim_context: bool = False
    price_in: float | None = None
    price_out: float | None = None
