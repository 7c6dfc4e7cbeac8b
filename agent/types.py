"""The values a conversation is made of. A leaf."""

from typing import Any, Literal

from msgspec import Struct

Role = Literal["system", "user", "assistant", "tool"]


class Usage(Struct, frozen=True, kw_only=True):
    """Tokens. `total_tokens` is the endpoint's own sum where it gives one, else input + output."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0
    total_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cache_read_tokens=self.cache_read_tokens + other.cache_read_tokens,
            cache_write_tokens=self.cache_write_tokens + other.cache_write_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
            total_tokens=self.total_tokens + other.total_tokens,
        )


class Unreported(Struct, frozen=True, kw_only=True):
    """What replies that reported no usage are taken to have cost."""

    replies: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float = 0.0

    def __add__(self, other: "Unreported") -> "Unreported":
        return Unreported(
            replies=self.replies + other.replies,
            input_tokens=self.input_tokens + other.input_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cost_usd=self.cost_usd + other.cost_usd,
        )


NOTHING_UNREPORTED = Unreported()


class Spend(Struct, frozen=True, kw_only=True):
    """What model calls cost: all HTTP requests, retries too, and what each reply reported. `unreported` is on top."""

    requests: int = 0
    usage: Usage = Usage()
    cost_usd: float = 0.0
    unreported: Unreported = NOTHING_UNREPORTED

    def __add__(self, other: "Spend") -> "Spend":
        return Spend(
            requests=self.requests + other.requests,
            usage=self.usage + other.usage,
            cost_usd=self.cost_usd + other.cost_usd,
            unreported=self.unreported + other.unreported if other.unreported.replies else self.unreported,
        )

    @property
    def all_tokens(self) -> int:
        """Reported or else estimated: what budgets count."""
        return self.usage.total_tokens + self.unreported.input_tokens + self.unreported.output_tokens

    @property
    def all_cost(self) -> float:
        """As `all_tokens`, in USD."""
        return self.cost_usd + self.unreported.cost_usd


NO_SPEND = Spend()


class ToolCall(Struct, frozen=True, kw_only=True):
    """A call as the conversation keeps it. `problem` says why it must not run; `arguments` is {} where what came was no
    JSON object."""

    id: str  # as it goes over the wire; unique in the conversation
    name: str
    arguments: dict[str, Any] = {}
    problem: str = ""


class Message(Struct, frozen=True, kw_only=True):
    """One turn. A tool message holds one result: `content` is the JSON text of the tool's result object."""

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    pictures: tuple[str, ...] = ()  # data URLs that go with a user's text; never in a trajectory
    wire: dict[str, Any] = {}  # an assistant turn's reasoning fields as they came, to be sent back


class RawCall(Struct, frozen=True, kw_only=True):
    """A tool call as the endpoint sent it."""

    id: str = ""
    name: str = ""
    arguments: Any = None  # a string, usually; some servers send the object


class Reply(Struct, frozen=True, kw_only=True):
    """One accepted answer of a model. Text and reasoning are clean (no inline think tags, no surrogates or NUL)."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[RawCall, ...] = ()
    finish_reason: str = ""  # stop | tool_calls | length | content_filter | …
    refusal: bool = False  # `content` is then the refusal
    model: str = ""
    wire: dict[str, Any] = {}
    context_trimmed: bool = False  # old tool results were shortened in the request
    spend: Spend = NO_SPEND
