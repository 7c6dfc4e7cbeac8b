"""Steps of a run's own around a conversation: entered once, left on every way out, in bounded time."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import agent.steps
from agent.errors import RunStopped
from agent.models.gate import RunGate
from agent.models.table import ModelSpec, open_model
from agent.outcome import RolloutPolicy
from agent.prompt import Prompt, Try
from agent.rollout import Rollout, Surroundings
from agent.row import Row
from agent.steps import load_steps
from agent.text import Redactor
from tests.contract.environments import eventually
from tools.environments.base import Environment
from tools.environments.owner import current_owner
from tools.environments.table import load_backend
from tools.errors import DiskFull, EnvironmentLost, SetupFailed, ToolError, UsageProblem

WHICH = Try(prompt_index=0, task_id="t", row_key="id:t", row_sha="0" * 64)
TALK = [{"tool_calls": [{"name": "terminal", "arguments": {"command": "echo talk >>log"}}]}, {"content": "bye"}]
SLEEP = [{"tool_calls": [{"name": "terminal", "arguments": {"command": "echo talk >>log; sleep 60"}}]}]


class Noting:
    """Writes into the sandbox's log, and reads it back at the end."""

    def __init__(self, options: Any = None, run_dir: Path | None = None) -> None:
        self.options, self.run_dir = options, run_dir
        self.seen: list[str] = []
        self.entering: Callable[[], Any] = lambda: None
        self.leaving: Callable[[], Any] = lambda: None

    async def before(self, environment: Environment, prompt: Prompt, which: Try) -> None:
        await environment.run("echo before >>log", timeout=10)
        await _done(self.entering)

    async def after(self, environment: Environment, prompt: Prompt, which: Try) -> None:
        self.seen = (await environment.run("cat log", timeout=10)).output.split()
        await _done(self.leaving)


async def _done(act: Callable[[], Any]) -> None:
    made = act()
    if asyncio.iscoroutine(made):
        await made


def raising(error: BaseException) -> Callable[[], Any]:
    def act() -> None:
        raise error

    return act


def rollout(tmp_path: Path, steps: Noting, turns: list[Any], *, checker: Any = None, **policy: Any) -> Rollout:
    script = tmp_path / "script.yaml"
    script.write_text(yaml.safe_dump({"default": {"turns": turns}}))
    around = Surroundings(
        model=open_model(ModelSpec(model=f"scripted:{script}"), RunGate()),
        backend=load_backend("local"),
        owner=current_owner("steps"),
        redactor=Redactor({}),
        checker=checker,
        steps=steps,
        stopping=lambda: "",
    )
    settings = RolloutPolicy(enabled_toolsets=("terminal",), keep_no_reasoning=True, **policy)
    return Rollout(Prompt(text="go", setup="echo setup >>log"), WHICH, settings, around)


async def row_of(tmp_path: Path, steps: Noting, turns: list[Any], **more: Any) -> Row:
    return await rollout(tmp_path, steps, turns, **more).run()


async def test_they_stand_between_setup_and_checker(tmp_path: Path) -> None:
    steps, judged = Noting(), list[str]()

    async def check(_: Any, environment: Environment) -> bool:
        judged.extend(steps.seen)
        return True

    row = await row_of(tmp_path, steps, TALK, checker=check)
    assert (row.status, row.error, row.success) == ("completed", "", True)
    assert judged == ["setup", "before", "talk"]


@pytest.mark.parametrize(
    ("turns", "policy", "status"),
    [
        (TALK, {"max_turns": 1}, "max_turns"),
        (SLEEP, {"timeout": 1.5}, "timeout"),
        ([TALK[0], {"error": {"status": 400}}], {}, "failed"),
        ([TALK[0], {"error": {"status": 401}}], {}, "stopped"),
    ],
)
async def test_they_are_left_on_every_way_out(tmp_path: Path, turns: Any, policy: Any, status: str) -> None:
    steps = Noting()
    row = await row_of(tmp_path, steps, turns, **policy)
    assert (row.status, steps.seen) == (status, ["setup", "before", "talk"])


async def test_they_are_left_when_the_row_is_cut_off(tmp_path: Path) -> None:
    steps = Noting()
    steps.leaving = lambda: asyncio.sleep(0.3)
    one = rollout(tmp_path, steps, SLEEP)
    running = asyncio.create_task(one.run())

    async def talking() -> bool:
        return one._conversation is not None and one._conversation.api_calls > 0

    assert await eventually(talking)
    await asyncio.sleep(0.2)  # the command runs
    one.stop("interrupt")
    await asyncio.sleep(0.1)
    one.stop("interrupt")  # and again while it is left
    row = await running
    assert (row.status, row.reason, steps.seen) == ("stopped", "interrupt", ["setup", "before", "talk"])


async def test_time_that_runs_out_while_they_are_left_does_not_undo_the_end(tmp_path: Path) -> None:
    steps = Noting()
    steps.leaving = lambda: asyncio.sleep(4)
    row = await row_of(tmp_path, steps, TALK, timeout=4.0)
    assert (row.status, row.error) == ("completed", "")


async def test_a_step_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent.steps, "LEAVING", 0.3)
    steps = Noting()
    steps.leaving = lambda: asyncio.sleep(60)
    async with asyncio.timeout(50):
        row = await row_of(tmp_path, steps, TALK)
    assert (row.status, row.error) == ("completed", "the step behind the conversation took too long")


@pytest.mark.parametrize(
    ("error", "told"),
    [(ToolError("no patch"), "no patch"), (TimeoutError(), "TimeoutError"), (ZeroDivisionError("oh"), "oh")],
)
async def test_what_goes_wrong_behind_a_conversation_is_told_and_changes_nothing(
    tmp_path: Path, error: BaseException, told: str
) -> None:
    steps = Noting()
    steps.leaving = raising(error)
    row = await row_of(tmp_path, steps, TALK)
    assert (row.status, row.final_response, row.success) == ("completed", "bye", True)
    assert told in row.error
    failed = await row_of(tmp_path, steps, [TALK[0], {"error": {"status": 400, "message": "bad request"}}])
    assert failed.error_class == "model_error"
    assert "bad request" in failed.error
    assert told in failed.error


async def test_a_sandbox_that_is_lost_behind_the_conversation_fails_the_row(tmp_path: Path) -> None:
    steps = Noting()
    steps.leaving = raising(EnvironmentLost("gone"))
    row = await row_of(tmp_path, steps, TALK)
    assert (row.status, row.error_class, row.retryable, row.error) == ("failed", "environment_lost", True, "gone")


@pytest.mark.parametrize("error", [RunStopped("disk", "it is full"), DiskFull("it is full")])
async def test_a_full_disk_stops_the_row(tmp_path: Path, error: BaseException) -> None:
    steps = Noting()
    steps.leaving = raising(error)
    row = await row_of(tmp_path, steps, TALK)
    assert (row.status, row.reason) == ("stopped", "disk")


@pytest.mark.parametrize("error", [SetupFailed("no repository"), ToolError("no repository")])
async def test_a_step_that_cannot_be_taken_ends_the_row_before_the_model_is_asked(
    tmp_path: Path, error: BaseException
) -> None:
    steps = Noting()
    steps.entering = raising(error)
    row = await row_of(tmp_path, steps, TALK)
    assert (row.status, row.error_class, row.api_calls, steps.seen) == ("failed", "setup_failed", 0, [])
    assert "no repository" in row.error


def test_steps_are_loaded_by_name(tmp_path: Path) -> None:
    steps = load_steps("tests.contract.test_steps:Noting", {"a": "b"}, tmp_path)
    assert isinstance(steps, Noting)
    assert (steps.options, steps.run_dir) == ({"a": "b"}, tmp_path)
    with pytest.raises(UsageProblem, match=r"cannot load no\.such:Thing"):
        load_steps("no.such:Thing", {}, tmp_path)
