"""What a line of the journal says about its try, without the trajectory, and what that means under a policy. Pure."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec
from msgspec import Struct

from agent.row import ToolCount, decode_row
from agent.types import Unreported, Usage

_GPT = b'{"from":"gpt","value":"'
_AFTER_TURNS = b'],"metadata":{'
_GPT_WITHOUT_REASONING = _GPT + b"<think>\\n</think>"


class Started(Struct, frozen=True, gc=False):
    """Of the column `environment`."""

    start_retries: int = 0


class Facts(Struct, frozen=True, kw_only=True, gc=False):
    """The columns that say what became of a try, what it cost, and what a summary tells of it."""

    prompt_index: int
    task_id: str
    row_key: str
    row_sha: str
    attempt: int
    status: str
    end_status: str
    sample_index: int = 0
    reason: str = ""
    retryable: bool = False
    api_calls: int = 0
    unknown_tools: str = "[]"
    context_turns: int = 0
    usage: Usage = Usage()
    requests: int = 0
    cost_usd: float = 0.0
    unreported: Unreported = Unreported()
    duration_seconds: float = 0.0
    tool_stats: msgspec.Raw = msgspec.Raw(b"{}")
    error: str = ""
    error_class: str = ""
    success: bool = False
    final_response: str = ""
    extra_tool_stats: str = "{}"
    inner_tool_stats: str = "{}"
    tools_offered: str = ""
    dataset_row: str = "{}"
    environment: Started = Started()


class MergePolicy(Struct, frozen=True, kw_only=True):
    """Which tries may stand in the merged file. `toolsets`: the run's own, each with the tools that a row may mean by
    its name."""

    keep_no_reasoning: bool = False
    keep_unknown_tools: bool = False
    save_all: bool = True
    toolsets: Mapping[str, Sequence[str]] = {}

    def keeps(self, status: str) -> bool:
        """Whether a try that has this status under this policy stands in the merged file."""
        return status == "completed" or (self.save_all and status in ("max_turns", "timeout", "partial"))


class Tools(Struct, frozen=True, eq=False):
    """The tools of the columns `tool_stats` and `extra_tool_stats` that were called. Equal columns mostly give the same
    object."""

    tallies: Mapping[str, ToolCount]
    calls: Mapping[str, int]


class Tried(Struct, frozen=True, gc=False):
    """A try read back, as it counts under the present policy."""

    facts: Facts
    line: bytes
    status: str
    reason: str
    turns: int  # gpt turns that are the model's doing
    turns_with_reasoning: int
    tools: Tools
    own_toolsets: Mapping[str, Sequence[str]] = {}

    @classmethod
    def read(cls, line: bytes, policy: MergePolicy) -> "Tried":
        """From a line of the journal. msgspec.DecodeError for one that is no row."""
        facts = decode_facts(line)
        turns, with_reasoning = gpt_turns(facts, line)
        status, reason = status_under(policy, facts, with_reasoning)
        tools = _tools(bytes(facts.tool_stats), facts.extra_tool_stats)
        return cls(facts, line, status, reason, turns, with_reasoning, tools, policy.toolsets)


decode_facts = msgspec.json.Decoder(Facts).decode
_decode_tools = msgspec.json.Decoder(dict[str, ToolCount]).decode


def status_under(policy: MergePolicy, facts: Facts, turns_with_reasoning: int) -> tuple[str, str]:
    """A try's status and reason under a policy, which may be another one than that which it was run with."""
    if facts.end_status in ("failed", "stopped"):
        return facts.status, facts.reason
    if not policy.keep_no_reasoning and not turns_with_reasoning:
        return "discarded", "no_reasoning"
    if not policy.keep_unknown_tools and facts.unknown_tools != "[]":
        return "discarded", "unknown_tool"
    return facts.end_status, facts.reason if facts.status == facts.end_status else ""


def gpt_turns(facts: Facts, line: bytes) -> tuple[int, int]:
    """gpt turns of a try that are the model's doing, and how many of them have reasoning.

    Counted in the bytes: bare quotes cannot stand inside a JSON string, and our rows are written without blanks.
    """
    end = line.find(_AFTER_TURNS)
    turns = line.count(_GPT, 0, end)
    empty = line.count(_GPT_WITHOUT_REASONING, 0, end)
    if facts.context_turns:
        given = decode_row(line).conversations[1 : 1 + facts.context_turns]
        spoken = [turn.value for turn in given if turn.sender == "gpt"]
        turns -= len(spoken)
        empty -= sum(value.startswith("<think>\n</think>") for value in spoken)
    return turns, turns - empty


@lru_cache(maxsize=4096)  # the same few texts come again and again
def _tools(tool_stats: bytes, extra: str) -> Tools:
    every = _decode_tools(tool_stats)
    if extra != "{}":
        every.update(_decode_tools(extra.encode()))
    tallies = {name: tally for name, tally in every.items() if tally.count}
    return Tools(tallies, {name: tally.count for name, tally in tallies.items()})
