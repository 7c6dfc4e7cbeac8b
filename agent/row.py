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
    """The columns. What `status`, `reason` and `error_class` may be: README, "Run directory"."""

    prompt_index: int  # position among the dataset's valid rows, from 0
    conversations: list[Turn]  # the whole trajectory, the system turn first
    metadata: RowMetadata
    completed: bool = False  # the model gave its final answer, kept or discarded
    partial: bool = False  # invalid calls, truncation, empty replies … ended it
    api_calls: int = 0  # replies of the model that were taken
    toolsets_used: list[str]  # those it was offered tools of, sorted; never empty: ["none"]
    tool_stats: dict[str, ToolCount]  # every built-in tool, also without a call
    tool_error_counts: dict[str, int]  # `failure` of the same
    task_id: str  # the dataset's, else `task_` and prompt_index
    row_key: str  # what resume goes by: `id:ID`, else `sha:HASH` of the row (with `#2`, `#3` … of equal ones)
    row_sha: str  # hash of the whole row: says whether it was changed since
    sample_index: int = 0  # of samples_per_prompt
    attempt: int = 1  # this try's number, over all invocations
    status: str  # with what the settings discard
    end_status: str  # how the conversation itself ended: never `discarded`
    reason: str = ""  # a short name of why
    failed: bool = False  # `status` is that
    error: str = ""  # in words, without secrets
    error_class: str = ""  # whose fault it was
    retryable: bool = False  # resume may try it again
    success: bool = False  # the checker's verdict, else `completed`
    success_reason: str = ""  # the checker's, or what went wrong with it
    reward: float = 0.0  # the checker's
    rewards: str = "[]"  # JSON list of {name, value}, the checker's
    usage: Usage = Usage()  # tokens as reported, of pictures and children too
    requests: int = 0  # HTTP requests for them, failed ones too
    cost_usd: float = 0.0  # of `usage`
    unreported: Unreported = Unreported()  # estimates for replies without usage, on top of it
    duration_seconds: float = 0.0  # of this try
    final_response: str = ""  # the last answer, or "" without one
    environment: RowEnvironment = RowEnvironment()
    tools_offered: str = ""  # names with blanks between
    unknown_tools: str = "[]"  # JSON list of {name, count}: invented tools that were called
    extra_tool_stats: str = "{}"  # JSON, as tool_stats: tools of one's own and of MCP servers that were called
    inner_tool_stats: str = "{}"  # JSON, as tool_stats: calls that scripts of execute_code made
    context_trimmed: bool = False  # requests left out parts of old tool results that stand here whole
    context_turns: int = 0  # turns after the system's that came with the dataset's row
    dataset_row: str = "{}"  # JSON: the dataset's row without its prompt and id


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
