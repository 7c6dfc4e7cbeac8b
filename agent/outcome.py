"""What one try left behind, and the journal row made of it. Pure."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime

import msgspec
from msgspec import Struct

from agent.catalog import Sources
from agent.checkers import Judgement
from agent.conversation import Conversation, End, ToolEvent
from agent.prompt import Prompt, Try
from agent.row import Row, RowEnvironment, RowMetadata, ToolCount, Turn
from agent.text import Redactor, clean, json_text
from agent.trajectory import format_trajectory, reasoning_counts
from agent.types import NO_SPEND, Message, Spend
from tools.base import Tool
from tools.environments.base import Limits
from tools.services import ToolSettings
from tools.toolsets import BUILT_IN, BUILT_IN_TOOLS, Catalog

ERROR_HEAD = 2000  # characters of an error that a row keeps


class RolloutPolicy(Struct, frozen=True, kw_only=True):
    """What a run decides for all its rows. Crosses the process border: plain values, no keys. `sentinel`: see
    `ConversationOptions`; `own_tools`: name -> `module:OBJECT` of what stands in for a tool; `lacking`: tools that are
    not offered because they cannot be had here -> what they lack; `sources`: where the run's own tools come from;
    `steps` is `module:NAME` of the `agent.steps.Steps` that the run's workers take around every conversation, made with
    `steps_options`."""

    seed: int = 0
    send_seed: bool = False
    distribution: str = "default"
    enabled_toolsets: tuple[str, ...] = ()
    disabled_toolsets: tuple[str, ...] = ()
    max_turns: int = 30
    timeout: float = 3600.0
    ephemeral_system_prompt: str = ""
    prefill: tuple[Message, ...] = ()
    parse_text_tool_calls: bool = False
    image: str = ""
    cwd: str = ""
    limits: Limits = Limits()
    volumes: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    command_timeout: float = 180.0
    keep_no_reasoning: bool = False
    keep_unknown_tools: bool = False
    max_attempts: int = 3
    sentinel: str = ""
    own_tools: dict[str, str] = {}
    tools: ToolSettings = ToolSettings()
    lacking: dict[str, str] = {}
    sources: Sources = Sources()
    steps: str = ""
    steps_options: dict[str, str] = {}


class Outcome(Struct, frozen=True, kw_only=True):
    """The end of a try, its parts still apart. Without a conversation the model was never asked. `beside`: what its
    children cost."""

    prompt: Prompt
    which: Try
    policy: RolloutPolicy
    tools: Sequence[Tool]
    redactor: Redactor
    model: str
    catalog: Catalog = BUILT_IN
    conversation: Conversation | None = None
    environment: RowEnvironment = RowEnvironment()
    judgement: Judgement | None = None
    seconds: float = 0.0
    beside: Spend = NO_SPEND


def row_of(outcome: Outcome, end: End) -> Row:
    """The row, its status after policy: an end without a turn of the model's is `failed`, one without reasoning or
    with an invented tool is `discarded` unless kept."""
    turns, context_turns = _trajectory(outcome)
    end = _told_end(outcome, _usable_end(outcome, end))
    has_reasoning = reasoning_counts(turns, skip=1 + context_turns)[1] > 0
    status, reason = _after_policy(outcome, end, has_reasoning=has_reasoning)
    row = _row(outcome, end, turns, context_turns=context_turns, status=status, reason=reason)
    return judged(row, outcome.judgement, outcome.redactor) if outcome.judgement else row


def judged(row: Row, judgement: Judgement, redactor: Redactor) -> Row:
    """The row with a checker's verdict."""
    return msgspec.structs.replace(
        row,
        success=judgement.success,
        success_reason=redactor.text(clean(judgement.reason)),
        reward=judgement.reward,
        rewards=judgement.rewards,
        error_class="checker_error" if judgement.raised else row.error_class,
    )


def _row(outcome: Outcome, end: End, turns: list[Turn], *, context_turns: int, status: str, reason: str) -> Row:
    which, conversation = outcome.which, outcome.conversation
    spend = (conversation.spend if conversation else NO_SPEND) + outcome.beside
    unknown = _unknown_tools(outcome)
    stats, extra = _tool_stats(outcome)
    return Row(
        prompt_index=which.prompt_index,
        conversations=turns,
        metadata=RowMetadata(
            batch_num=which.batch_num,
            timestamp=utc_text(time.time()),
            model=conversation.model_name if conversation else outcome.model,
        ),
        completed=end.status == "completed",
        partial=end.status == "partial",
        api_calls=conversation.api_calls if conversation else 0,
        toolsets_used=sorted({outcome.catalog.toolset_of(tool.spec.name) for tool in outcome.tools}) or ["none"],
        tool_stats=stats,
        tool_error_counts={name: count.failure for name, count in stats.items()},
        task_id=which.task_id,
        row_key=which.row_key,
        row_sha=which.row_sha,
        sample_index=which.sample_index,
        attempt=which.attempt,
        status=status,
        end_status=end.status,
        reason=reason,
        failed=status == "failed",
        error=end.error,
        error_class=end.error_class,
        retryable=end.retryable,
        success=end.status == "completed",
        usage=spend.usage,
        requests=spend.requests,
        cost_usd=float(spend.cost_usd),
        unreported=spend.unreported,
        duration_seconds=round(outcome.seconds, 3),
        final_response=conversation.final_response if conversation else "",
        environment=outcome.environment,
        tools_offered=" ".join(tool.spec.name for tool in outcome.tools),
        unknown_tools=json_text([{"name": name, "count": unknown[name]} for name in sorted(unknown)]),
        extra_tool_stats=json_text(msgspec.to_builtins(extra)),
        inner_tool_stats=json_text(msgspec.to_builtins(_tallies(conversation.inner_events if conversation else ()))),
        context_trimmed=bool(conversation and conversation.context_trimmed),
        context_turns=context_turns,
        dataset_row=json_text(outcome.redactor.value(clean(outcome.prompt.rest))),
    )


def _trajectory(outcome: Outcome) -> tuple[list[Turn], int]:
    """All turns, and how many of them (behind the system turn) came with the row ahead of its prompt. The dataset's
    turns are cleaned of secrets here; the model's and the tools' were when they came in."""
    redactor = outcome.redactor
    prompt, conversation = outcome.prompt, outcome.conversation
    specs = [tool.spec for tool in outcome.tools]
    system_text = redactor.text(prompt.system_text)
    context = [_redacted(message, redactor) for message in prompt.context]
    said = conversation.messages[conversation.given :] if conversation else []
    messages = [*context, Message(role="user", content=redactor.text(prompt.text)), *said]
    turns = format_trajectory(messages, specs, system_text=system_text)
    context_turns = len(format_trajectory(context, specs)) - 1 if context else 0
    return turns, context_turns


def _redacted(message: Message, redactor: Redactor) -> Message:
    """A tool's content is JSON text: its secrets are looked for in the values."""
    content = message.content
    if message.role == "tool":
        with suppress(msgspec.DecodeError):
            content = json_text(redactor.value(msgspec.json.decode(content)))
    calls = (msgspec.structs.replace(call, arguments=redactor.value(call.arguments)) for call in message.tool_calls)
    return msgspec.structs.replace(
        message,
        content=redactor.text(content),
        reasoning=redactor.text(message.reasoning),
        tool_calls=tuple(calls),
    )


def _usable_end(outcome: Outcome, end: End) -> End:
    """An early end without a single turn of the model's leaves nothing to train on."""
    turns = outcome.conversation.gpt_turns if outcome.conversation else 0
    if turns or end.status not in ("partial", "max_turns", "timeout"):
        return end
    error_class = end.error_class or "model_error"
    return msgspec.structs.replace(end, status="failed", error_class=error_class, retryable=True)


def _told_end(outcome: Outcome, end: End) -> End:
    """The end as its row tells it: clean, short, and not to be tried again after the last attempt."""
    is_last = end.status == "failed" and outcome.which.attempt >= outcome.policy.max_attempts
    error = outcome.redactor.text(clean(end.error))[:ERROR_HEAD]
    return msgspec.structs.replace(end, error=error, retryable=end.retryable and not is_last)


def _after_policy(outcome: Outcome, end: End, *, has_reasoning: bool) -> tuple[str, str]:
    if end.status in ("failed", "stopped"):
        return end.status, end.reason
    if not has_reasoning and not outcome.policy.keep_no_reasoning:
        return "discarded", "no_reasoning"
    if _unknown_tools(outcome) and not outcome.policy.keep_unknown_tools:
        return "discarded", "unknown_tool"
    return end.status, end.reason


def _unknown_tools(outcome: Outcome) -> dict[str, int]:
    """Invented names: a tool that exists but was not offered is no invention."""
    called = outcome.conversation.refused_names if outcome.conversation else {}
    return {name: count for name, count in called.items() if name not in outcome.catalog.names}


def _tool_stats(outcome: Outcome) -> tuple[dict[str, ToolCount], dict[str, ToolCount]]:
    """Every built-in tool, zero-filled; and the run's own tools that were called."""
    tallies = _tallies(outcome.conversation.events if outcome.conversation else ())
    own = sorted({*(tool.spec.name for tool in outcome.tools), *outcome.catalog.names} - set(BUILT_IN_TOOLS))
    return (
        {name: tallies.get(name, ToolCount()) for name in BUILT_IN_TOOLS},
        {name: tallies[name] for name in own if name in tallies},
    )


def _tallies(events: Sequence[ToolEvent]) -> dict[str, ToolCount]:
    """Of each tool that was called, sorted by name."""
    good = Counter(event.name for event in events if event.ok)
    bad = Counter(event.name for event in events if not event.ok)
    return {name: ToolCount(good[name] + bad[name], good[name], bad[name]) for name in sorted(good | bad)}


def utc_text(seconds: float) -> str:
    """A Unix time as YYYY-MM-DDTHH:MM:SS.mmmZ."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
