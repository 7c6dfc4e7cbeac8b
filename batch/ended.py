"""Rows that ended: what the parent is told of one on disk, and the row of one that killed its worker."""

import msgspec

from agent.conversation import End
from agent.outcome import Outcome, RolloutPolicy, row_of
from agent.rollout import offered_tools
from agent.row import Row, ToolCount
from agent.text import Redactor
from agent.types import Spend
from batch.messages import ERROR_HEAD, Job, PromptEnded, try_of
from batch.rows import parse_row
from tools.toolsets import Catalog


def ended_message(row: Row, offset: int, length: int) -> PromptEnded:
    """What the parent is told of a row on disk."""
    return PromptEnded(
        batch_num=row.metadata.batch_num,
        offset=offset,
        length=length,
        prompt_index=row.prompt_index,
        task_id=row.task_id,
        row_key=row.row_key,
        sample_index=row.sample_index,
        attempt=row.attempt,
        status=row.status,
        reason=row.reason,
        error=row.error[:ERROR_HEAD],
        error_class=row.error_class,
        retryable=row.retryable,
        row_fault=row.error_class in ("filtered", "internal") or row.reason == "bad_request",
        has_reasoning=row.reason != "no_reasoning",
        spend=Spend(requests=row.requests, usage=row.usage, cost_usd=row.cost_usd, unreported=row.unreported),
        api_calls=row.api_calls,
        tool_stats=_tallies(row),
        duration_seconds=row.duration_seconds,
        start_retries=row.environment.start_retries,
    )


def _tallies(row: Row) -> dict[str, tuple[int, int, int]]:
    """Calls, successes and failures of the tools that were called, also of the run's own."""
    extra = msgspec.json.decode(row.extra_tool_stats, type=dict[str, ToolCount])
    every = {**row.tool_stats, **extra}
    return {name: (count.count, count.success, count.failure) for name, count in every.items() if count.count}


def dead_row(
    job: Job, batch_num: int, cause: str, policy: RolloutPolicy, *, model: str, catalog: Catalog, redactor: Redactor
) -> Row:
    """The row that the parent writes for a job whose worker died of it."""
    prompt = parse_row(job.line)
    outcome = Outcome(
        prompt=prompt,
        which=try_of(job, batch_num),
        policy=policy,
        tools=offered_tools(prompt, policy, job.row_key, catalog),
        redactor=redactor,
        model=model,
        catalog=catalog,
    )
    error = f"worker_died {cause}"
    return row_of(
        outcome, End(status="failed", reason="worker_died", error=error, error_class="worker_died", retryable=True)
    )
