"""Steps of a run's own around every conversation: what another program over the same rollout adds to it."""

import asyncio
import time
from collections.abc import Awaitable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from agent.clock import RowClock
from agent.errors import RunStopped
from agent.faults import Done, Fault, attempted, guarded
from agent.prompt import Prompt, Try
from tools.environments.base import Environment
from tools.errors import DiskFull, RowFailed, ToolError, UsageProblem

LEAVING = 60.0  # seconds that the step behind a conversation has
TOO_LONG = "the step behind the conversation took too long"
CUT_LEAVING = 8.0  # seconds that it has once the row is cut off: less than the row's end is waited for


class Steps(Protocol):
    """Both see the open sandbox. Made once in each worker: called for many rows at once."""

    async def before(self, environment: Environment, prompt: Prompt, which: Try) -> None:
        """Once the row's files are placed and its setup command has run. Raises what ends the row: SetupFailed,
        SetupTimeout, EnvironmentLost; or ToolError, which counts as SetupFailed."""

    async def after(self, environment: Environment, prompt: Prompt, which: Try) -> None:
        """On every way out of the conversation, also when it was cut off, before the checker. What it raises does not
        change the row's end, but stands in its `error`; only a RowFailed (the sandbox is gone) and a RunStopped (the
        disk is full) end a row so whose conversation came to an end by itself."""


class Left(Struct, frozen=True):
    """How the step behind the conversation went. `cancelled`: it was asked to hurry, and whoever awaits it to end."""

    problem: str = ""
    failed: RowFailed | RunStopped | None = None
    cancelled: bool = False


def load_steps(name: str, options: Mapping[str, str], run_dir: Path) -> Steps:
    """`module:NAME`, called with the options and the run directory. Raises UsageProblem where it cannot be had."""
    module, _, attribute = name.partition(":")
    made = attempted(lambda: getattr(import_module(module), attribute)(options, run_dir))
    if isinstance(made, Fault):
        raise UsageProblem(f"cannot load {name}: {made}")
    steps: Steps = made.value
    return steps


async def leave(after: Awaitable[None], clock: RowClock, *, cut: bool) -> Left:
    """Awaits the step to its end, whoever is cancelled meanwhile, but not for ever."""
    step = asyncio.ensure_future(guarded(after))
    until = time.monotonic() + min(LEAVING, CUT_LEAVING + (0.0 if cut else clock.remaining()))
    cancelled = False
    while not step.done() and (seconds := until - time.monotonic()) > 0:
        try:
            await asyncio.wait({step}, timeout=seconds)
        except asyncio.CancelledError:
            cancelled = True
            until = min(until, time.monotonic() + CUT_LEAVING)
    if not step.done():
        step.cancel()
        return Left(TOO_LONG, cancelled=cancelled)
    return _left(step, cancelled=cancelled)


def _left(step: "asyncio.Future[Done[None] | Fault]", *, cancelled: bool) -> Left:
    try:
        outcome = step.result()
    except (RowFailed, RunStopped) as failed:
        return Left(str(failed), failed, cancelled)
    except DiskFull as full:
        return Left(str(full), RunStopped("disk", str(full)), cancelled)
    except (ToolError, UsageProblem, TimeoutError, asyncio.CancelledError) as error:
        return Left(str(error) or type(error).__name__, cancelled=cancelled)
    problem = f"{outcome}\n{outcome.trace}" if isinstance(outcome, Fault) else ""
    return Left(problem, cancelled=cancelled)
