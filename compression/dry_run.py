"""`--dry_run`: every row that has no end is read, counted and planned, as a run would; nothing is asked or written."""

import asyncio
from collections.abc import Sequence

from agent.pricing import cost
from agent.types import Usage
from compression.inputs import sample_size
from compression.report import DryRun
from compression.run import File, Job, Stream, asked_so_far, crew_for
from compression.settings import CompressorSettings
from compression.store import JournalReader, Records
from compression.types import Ask, Done, Rejected, Step


async def dry_run(
    settings: CompressorSettings, files: Sequence[File], records: Records, journal: JournalReader, output: str
) -> DryRun:
    """What a run would do, going on from `records`. A row that would need a second summary is told with its first."""
    count = _Count(settings)
    stream = Stream(settings, files, records)
    async with crew_for(settings) as crew, asyncio.TaskGroup() as group:

        async def counted(jobs: Sequence[Job]) -> None:
            items = [(job.line, tuple(asked_so_far(job, records, journal).summaries)) for job in jobs]
            for (line, summaries), first in zip(items, await crew.advance(items), strict=True):
                step, left = first, summaries
                while isinstance(step, Rejected):
                    left = left[:-1]
                    (step,) = await crew.advance([(line, left)], first=True)
                count.take(step)
                stream.room.leave(len(line))

        async for chunk in stream.chunks():
            group.create_task(counted(chunk))
    usage = Usage(input_tokens=count.prompt_tokens, output_tokens=count.requests * settings.summary_target_tokens)
    usd = cost(usage, settings.summarization_model, settings.price_in, settings.price_out)
    return DryRun(
        files=len(files),
        rows=sum(sample_size(each.scanned.rows, settings.sample_percent) for each in files),
        done=records.ended,
        tokens=count.tokens,
        over_target=count.over,
        out_of_reach=count.out_of_reach,
        failed=count.failed,
        requests=count.requests,
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cost_usd=round(usd, 4) if usd is not None else 0.0 if not count.requests else -1.0,
        tokenizer=crew.tokenizer,
        target_max_tokens=settings.target_max_tokens,
        strategy=settings.strategy,
        model=settings.summarization_model,
        output=output,
    )


class _Count:
    """Sums over the first steps of all rows."""

    def __init__(self, settings: CompressorSettings) -> None:
        self._target = settings.target_max_tokens
        self.tokens = self.over = self.out_of_reach = self.failed = self.requests = self.prompt_tokens = 0

    def take(self, step: Step) -> None:
        """One row's."""
        assert isinstance(step, Ask | Done), "no summary was given that could be refused"
        self.tokens += step.metrics.original_tokens
        self.over += step.metrics.original_tokens > self._target
        if isinstance(step, Ask):
            self.requests += 1
            self.prompt_tokens += step.prompt_tokens
        else:
            self.out_of_reach += step.metrics.still_over_limit and not step.metrics.failed
            self.failed += step.metrics.failed
