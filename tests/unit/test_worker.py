"""What a worker tells of a row that ended, and how it ends one that does not."""

import asyncio
import time
from pathlib import Path

import pytest
import yaml

from agent.models.gate import RunGate
from agent.models.table import ModelSpec, open_model
from agent.outcome import RolloutPolicy
from agent.prompt import Prompt, Try
from agent.rollout import Rollout, Surroundings
from agent.text import Redactor
from batch.ended import ended_message
from batch.messages import NO_ROW, Job, Log, Retire, ToParent
from batch.worker import OVERRUN, Overruns
from tests.unit.made import row_of_job
from tools.environments.base import Environment
from tools.environments.owner import current_owner
from tools.environments.table import load_backend

CANCELLED = Log(NO_ROW, 7, "past its time and its clean-up: cancelled")


@pytest.mark.parametrize(
    ("error_class", "reason", "row_fault"),
    [
        ("internal", "internal", True),
        ("filtered", "filtered", True),
        ("model_error", "bad_request", True),
        ("model_error", "server_error", False),
        ("environment_lost", "environment_lost", False),
    ],
)
def test_which_ends_count_towards_stopping_the_run(error_class: str, reason: str, row_fault: bool) -> None:
    job = Job(prompt_index=0, task_id="t", row_key="id:t", row_sha="s", sample_index=0, attempt=1, line=b"{}")
    row = row_of_job(job, status="failed", error_class=error_class, reason=reason)
    assert ended_message(row, 0, 1).row_fault == row_fault


class Slow:
    """A step that takes its time; a deaf one is not ended by a cancellation either."""

    def __init__(self, *, deaf: bool) -> None:
        self.deaf = deaf
        self.entered, self.freed = asyncio.Event(), asyncio.Event()
        self.cancelled = 0

    async def before(self, environment: Environment, prompt: Prompt, which: Try) -> None:
        self.entered.set()
        while not self.freed.is_set():
            try:
                await self.freed.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                if not self.deaf:
                    raise

    async def after(self, environment: Environment, prompt: Prompt, which: Try) -> None:
        pass


def rollout(tmp_path: Path, steps: Slow) -> Rollout:
    script = tmp_path / "script.yaml"
    script.write_text(yaml.safe_dump({"default": {"turns": [{"content": "bye"}]}}))
    around = Surroundings(
        model=open_model(ModelSpec(model=f"scripted:{script}"), RunGate()),
        backend=load_backend("local"),
        owner=current_owner("overruns"),
        redactor=Redactor({}),
        steps=steps,
        stopping=lambda: "",
    )
    which = Try(prompt_index=7, task_id="t", row_key="id:t", row_sha="0" * 64)
    return Rollout(Prompt(text="go"), which, RolloutPolicy(), around)


async def test_an_overdue_row_is_cancelled_once_and_left_once(tmp_path: Path) -> None:
    sent, deaf = list[ToParent](), Slow(deaf=True)
    overruns, late = Overruns(sent.append), rollout(tmp_path, deaf)
    running = asyncio.create_task(late.run())
    await deaf.entered.wait()

    async def beats(seconds_late: float) -> None:
        late.clock.deadline = time.monotonic() - seconds_late
        for _ in range(3):
            overruns.end([late])
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    await beats(OVERRUN - 1)
    assert (sent, deaf.cancelled) == ([], 0)
    with late.clock.paused():
        await beats(OVERRUN + 1)
    assert (sent, deaf.cancelled) == ([], 0)
    await beats(OVERRUN + 1)
    assert (sent, deaf.cancelled) == ([CANCELLED], 1)
    await beats(2 * OVERRUN + 1)
    row = await running
    assert (sent, deaf.cancelled) == ([CANCELLED, Retire()], 1)
    assert (row.status, row.error_class) == ("failed", "setup_timeout")
    deaf.freed.set()
    assert late._work
    await late._work


async def test_a_row_that_comes_back_once_it_is_cancelled_ends_by_its_time(tmp_path: Path) -> None:
    sent, slow = list[ToParent](), Slow(deaf=False)
    overruns, late = Overruns(sent.append), rollout(tmp_path, slow)
    running = asyncio.create_task(late.run())
    await slow.entered.wait()
    late.clock.deadline = time.monotonic() - OVERRUN - 1
    overruns.end([late])
    row = await running
    assert (sent, slow.cancelled, row.status, row.error_class) == ([CANCELLED], 1, "failed", "setup_timeout")
    overruns.end([])
    assert not overruns._cancelled
