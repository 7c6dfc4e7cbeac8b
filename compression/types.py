"""The values that compression is made of. A leaf; all of them cross between processes."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from msgspec import Meta, Struct

Role = Literal["system", "human", "gpt", "tool"]
Strategy = Literal["summary", "mask", "drop"]
Number = Annotated[int, Meta(ge=0, lt=1 << 32)]


class Turn(Struct, frozen=True, kw_only=True):
    """One turn of a row in either form. `text` is what is counted and summarized; `raws` are the JSON objects that it
    was read from: one, or, in `messages` form, the results of one assistant message."""

    role: Role
    text: str
    raws: tuple[dict[str, Any], ...]


class Policy(Struct, frozen=True, kw_only=True):
    """What decides the result of a row, and nothing else does."""

    target_max_tokens: int = 29_000
    summary_target_tokens: int = 750
    first_system: bool = True
    first_human: bool = True
    first_gpt: bool = True
    first_tool: bool = True
    last_n_turns: int = 4
    strategy: Strategy = "summary"
    shorten_turns: bool = False
    skip_under_target: bool = True
    add_summary_notice: bool = True
    summary_notice_text: str = ""
    window: int = 32_000  # tokens that a summary's request and reply may have together
    summary_model: str = ""


class Count(Struct, frozen=True):
    """Tokens of a row: `turns` per turn, template overhead included; `total` the whole row."""

    total: int
    turns: tuple[int, ...]


class Counter(Protocol):
    """Counts tokens. `name` goes into the metrics."""

    name: str

    def text(self, text: str) -> int:
        """Tokens of a bare text; special tokens are plain text."""

    def row(self, turns: Sequence[Turn]) -> Count:
        """Tokens of a row as its chat template spells it."""


class RowMetrics(Struct, frozen=True, kw_only=True):
    """`compression_metrics` of a row: ORIGINAL's fields, then ours. Every row has every key, with one type."""

    original_tokens: Number = 0
    compressed_tokens: Number = 0
    tokens_saved: int = 0
    compression_ratio: float = 1.0  # compressed / original, 4 decimals
    original_turns: Number = 0
    compressed_turns: Number = 0
    turns_removed: int = 0
    region_start_idx: int = -1  # of the first folded region, in the original's turns
    region_end_idx: int = -1
    region_turns_count: Number = 0
    was_compressed: bool = False
    still_over_limit: bool = False
    skipped_under_target: bool = False
    failed: bool = False  # it needed a summary and got none, or could not be read or counted: the row is unchanged
    error: str = ""
    summarization_api_calls: Number = 0
    summarization_errors: Number = 0
    passes: Number = 0
    shortened_turns: Number = 0
    tool_calls_before: Number = 0
    tool_calls_after: Number = 0
    strategy: str = ""
    summary_model: str = ""
    tokenizer: str = ""


class Ask(Struct, frozen=True, kw_only=True, tag=True):
    """A summary is wanted. `prompt` is the user message for the summarizer, within its window; `metrics` are those of
    the row as it stands, for the case that none is to be had."""

    prompt: str
    prompt_tokens: int
    max_tokens: int  # of the reply
    metrics: RowMetrics


class Rejected(Struct, frozen=True, kw_only=True, tag=True):
    """The last summary is none: empty, too long, or with tool tags in it. `problem` says what, in a few words."""

    problem: str


class Done(Struct, frozen=True, kw_only=True, tag=True):
    """A row's end. `line` is the row as JSON without its metrics and without a line end: the input's bytes where
    nothing was changed."""

    line: bytes
    metrics: RowMetrics


Step = Ask | Rejected | Done
