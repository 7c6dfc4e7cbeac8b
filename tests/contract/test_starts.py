"""Starts of sandboxes: how many at once, what is tried again, and what is told of it."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.conversation import End
from agent.errors import Stopping
from agent.models.gate import RunGate
from agent.models.table import ModelSpec, open_model
from agent.outcome import RolloutPolicy
from agent.prompt import Prompt, Try
from agent.rollout import Rollout, Surroundings
from agent.row import RowEnvironment
from agent.text import Redactor
from tests.contract.environments import make_spec
from tools.environments.base import Environment, EnvironmentSpec
from tools.environments.local import LOCAL
from tools.environments.owner import current_owner
from tools.environments.starts import TRIES, Starts
from tools.errors import EnvironmentLost, ImageUnavailable, SandboxRefused, SetupFailed, SetupTimeout


class Faulty:
    """The local backend, whose starts fail first, or wait until they are let go."""

    name, takes_images, isolates = "local", False, False
    check, prepare, reap = LOCAL.check, LOCAL.prepare, LOCAL.reap

    def __init__(self, faults: Sequence[Exception] = ()) -> None:
        self.faults = list(faults)
        self.starts = 0
        self.starting = 0
        self.go = asyncio.Event()
        self.go.set()

    @asynccontextmanager
    async def open(self, spec: EnvironmentSpec) -> AsyncIterator[Environment]:
        self.starts += 1
        self.starting += 1
        try:
            await self.go.wait()
            if self.faults:
                raise self.faults.pop(0)
        finally:
            self.starting -= 1
        async with LOCAL.open(spec) as environment:
            yield environment


@pytest.mark.parametrize("fault", [SetupFailed("no room"), EnvironmentLost("refused")])
async def test_a_start_that_fails_is_tried_again_and_told(fault: Exception) -> None:
    told: list[str] = []
    backend = Faulty([fault] * (TRIES - 1))
    async with Starts(pause=0.01).open(backend, make_spec, failed=told.append) as environment:
        assert (await environment.run("echo works", timeout=20)).output == "works\n"
    assert told == [str(fault)] * (TRIES - 1)
    assert backend.starts == TRIES


async def test_the_last_failure_is_the_end() -> None:
    told: list[str] = []
    backend = Faulty([SetupFailed(f"{number}") for number in range(9)])
    with pytest.raises(SetupFailed, match="2"):
        async with Starts(pause=0.01).open(backend, make_spec, failed=told.append):
            pass
    assert (backend.starts, told) == (3, ["0", "1"])


@pytest.mark.parametrize("fault", [SandboxRefused("x"), ImageUnavailable("x"), SetupTimeout("x"), OSError("x")])
async def test_what_another_try_would_not_mend_is_not_tried_again(fault: Exception) -> None:
    backend = Faulty([fault])
    with pytest.raises(type(fault)):
        async with Starts(pause=0.01).open(backend, make_spec):
            pass
    assert backend.starts == 1


async def test_what_fails_inside_is_no_start() -> None:
    backend = Faulty()
    with pytest.raises(SetupFailed, match="the row's own"):
        async with Starts(pause=0.01).open(backend, make_spec):
            raise SetupFailed("the row's own")
    assert backend.starts == 1


async def test_what_the_listener_raises_ends_it() -> None:
    def stopped(_: str) -> None:
        raise KeyError

    backend = Faulty([SetupFailed("x")])
    with pytest.raises(KeyError):
        async with Starts(pause=0.01).open(backend, make_spec, failed=stopped):
            pass
    assert backend.starts == 1


async def test_a_place_is_free_while_a_failed_start_pauses_and_after_it_is_cancelled() -> None:
    starts = Starts(at_once=1, pause=600)
    failed = asyncio.Event()
    first = asyncio.create_task(opened(starts, Faulty([SetupFailed("x")]), failed))
    await failed.wait()
    await opened(starts, Faulty())
    first.cancel()
    await asyncio.wait({first})
    assert first.cancelled()


async def opened(starts: Starts, backend: Faulty, failed: asyncio.Event | None = None) -> None:
    async with starts.open(backend, make_spec, failed=lambda _: failed.set() if failed else None):
        pass


async def test_few_start_at_once_and_those_who_wait_are_told_so() -> None:
    waiting, four_wait = 0, asyncio.Event()

    @contextmanager
    def count() -> Iterator[None]:
        nonlocal waiting
        waiting += 1
        if waiting == 4:
            four_wait.set()
        yield
        waiting -= 1

    async def row() -> None:
        async with starts.open(backend, make_spec, waiting=count):
            await asyncio.sleep(0)

    starts, backend = Starts(at_once=2), Faulty()
    backend.go.clear()
    rows = [asyncio.create_task(row()) for _ in range(6)]
    await four_wait.wait()
    assert (backend.starting, waiting) == (2, 4)
    rows[-1].cancel()
    backend.go.set()
    await asyncio.wait(rows)
    assert [each.cancelled() for each in rows] == [False] * 5 + [True]
    assert backend.starts == 5


# --- of a row


def rollout(tmp_path: Path, backend: Faulty, starts: Starts, stopping: Stopping = "", **policy: Any) -> Rollout:
    script = tmp_path / "script.yaml"
    script.write_text(yaml.safe_dump({"default": {"turns": [{"content": "bye"}]}}))
    around = Surroundings(
        model=open_model(ModelSpec(model=f"scripted:{script}"), RunGate()),
        backend=backend,
        owner=current_owner("starts"),
        redactor=Redactor({}),
        starts=starts,
        stopping=lambda: stopping,
    )
    which = Try(prompt_index=0, task_id="t", row_key="id:t", row_sha="0" * 64)
    settings = RolloutPolicy(enabled_toolsets=("terminal",), keep_no_reasoning=True, **policy)
    return Rollout(Prompt(text="go"), which, settings, around)


async def test_a_row_says_how_often_its_sandbox_was_started_again(tmp_path: Path) -> None:
    row = await rollout(tmp_path, Faulty([SetupFailed("x")]), Starts(pause=0.01)).run()
    assert (row.status, row.environment) == ("completed", RowEnvironment(backend="local", start_retries=1))
    row = await rollout(tmp_path, Faulty([EnvironmentLost("x")] * 3), Starts(pause=0.01)).run()
    assert (row.status, row.error_class, row.error) == ("failed", "environment_lost", "x")
    assert row.environment == RowEnvironment(start_retries=2)


async def test_a_row_that_stops_is_not_started_again(tmp_path: Path) -> None:
    backend = Faulty([SetupFailed("x")])
    row = await rollout(tmp_path, backend, Starts(pause=600), stopping="interrupt").run()
    assert (row.status, row.reason, backend.starts) == ("stopped", "interrupt", 1)


async def test_a_row_is_cut_off_while_it_pauses(tmp_path: Path) -> None:
    backend = Faulty([SetupFailed("x")])
    cut = rollout(tmp_path, backend, Starts(pause=600))
    row = asyncio.create_task(cut.run())
    while not cut.row(End(status="stopped")).environment.start_retries:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.01)
    cut.stop("interrupt")
    assert ((await row).status, backend.starts) == ("stopped", 1)


async def test_pauses_are_the_rows_time(tmp_path: Path) -> None:
    row = await rollout(tmp_path, Faulty([SetupFailed("x")]), Starts(pause=600), timeout=0.2).run()
    assert (row.status, row.error_class) == ("failed", "setup_timeout")
    assert row.environment.start_retries == 1


async def test_waiting_for_others_is_not_the_rows_time(tmp_path: Path) -> None:
    starts, slow = Starts(at_once=1), Faulty()
    slow.go.clear()
    first = asyncio.create_task(opened(starts, slow))
    await asyncio.sleep(0)
    second = rollout(tmp_path, Faulty(), starts, timeout=20)
    row = asyncio.create_task(second.run())
    while not second.clock.pauses:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    slow.go.set()
    await first
    assert (await row).status == "completed"
    assert second.clock.waited >= 0.2
