"""A journal row: everything one try of one prompt left behind, as one JSON line.

Keys and their order follow the reference system's batch rows, then ours. Every row has every key, each with one type
whatever its content, so that `datasets` and `pyarrow.json` read any mix of files in any order: never null, floats with
a decimal point, no list that may stay empty, no object whose keys vary (those travel as JSON text).
"""

import msgspec
from msgspec import Struct, field

from agent.types import Unreported, Usage


class Turn(Struct, frozen=True):
    """One turn of a trajectory; `sender` is system, human, gpt or tool."""

    sender: str = field(name="from")
    value: str


class RowMetadata(Struct, frozen=True, kw_only=True):
    """`timestamp` is UTC, YYYY-MM-DDTHH:MM:SS.mmmZ; `model` the one that answered."""

    batch_num: int
    timestamp: str
    model: str


class ToolCount(Struct, frozen=True):
    """Calls of one tool in a row."""

    count: int = 0
    success: int = 0
    failure: int = 0


class RowEnvironment(Struct, frozen=True, kw_only=True):
    """The sandbox that was really used, and how often it had to be started again."""

    backend: str = ""
    image: str = ""
    start_retries: int = 0


class Row(Struct, frozen=True, kw_only=True):
    """See the README's table of columns."""

    prompt_index: int
    conversations: list[Turn]
    metadata: RowMetadata
    completed: bool = False
    partial: bool = False
    api_calls: int = 0
    toolsets_used: list[str]
    tool_stats: dict[str, ToolCount]
    tool_error_counts: dict[str, int]
    task_id: str
    row_key: str
    row_sha: str
    sample_index: int = 0
    attempt: int = 1
    status: str
    end_status: str
    reason: str = ""
    failed: bool = False
    error: str = ""
    error_class: str = ""
    retryable: bool = False
    success: bool = False
    success_reason: str = ""
    reward: float = 0.0
    rewards: str = "[]"
    usage: Usage = Usage()
    requests: int = 0
    cost_usd: float = 0.0
    unreported: Unreported = Unreported()
    duration_seconds: float = 0.0
    final_response: str = ""
    environment: RowEnvironment = RowEnvironment()
    tools_offered: str = ""
    unknown_tools: str = "[]"
    extra_tool_stats: str = "{}"
    inner_tool_stats: str = "{}"
    context_trimmed: bool = False
    context_turns: int = 0
    dataset_row: str = "{}"


class ChildRow(Row, frozen=True, kw_only=True):
    """A row of `batch_N.children.jsonl`: a child conversation of the try in `batch_N.jsonl` whose row_key is
    `parent_row_key`, with the same sample_index and attempt. `row_key` and `task_id`: the parent's with `.child_N`."""

    parent_row_key: str
    child_index: int
    goal: str


def child_name(parent: str, index: int) -> str:
    """What a child is called after its parent: its row_key, its task_id."""
    return f"{parent}.child_{index}"


def encode_row(row: Row) -> bytes:
    """The line of the journal, newline included."""
    return msgspec.json.encode(row) + b"\n"


decode_row = msgspec.json.Decoder(Row).decode
decode_child = msgspec.json.Decoder(ChildRow).decode
