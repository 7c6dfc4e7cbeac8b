"""SIGKILL at any moment, damage to files, resume: every row ends once, nothing is paid for twice."""

import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.bench import Bench, ids, pause, prompts
from tests.e2e.program import Program, merged, wait_until
from tests.endpoint import EndpointProcess, tool_call

ALL_DONE = {"completed": 4}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[EndpointProcess]:
    with EndpointProcess(calls=1, latency=0.02) as process:
        yield process


@pytest.fixture
def bench(tmp_path: Path, endpoint: EndpointProcess) -> Bench:
    return Bench(tmp_path, endpoint, prompts(4))


# --- kills at random moments


def kill_parent(program: Program) -> None:
    program.process.kill()


def kill_a_worker(program: Program) -> None:
    for worker in program.workers()[:1]:
        with suppress(psutil.NoSuchProcess):
            worker.kill()


def kill_everything(program: Program) -> None:
    program.kill_all()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, endpoint: EndpointProcess) -> dict[str, Any]:
    bench = Bench(tmp_path_factory.mktemp("uninterrupted"), endpoint, prompts(20))
    bench.finish()
    return bench.outcome()


@pytest.mark.parametrize("kill", [kill_parent, kill_a_worker, kill_everything])
def test_a_run_killed_again_and_again_ends_as_one_that_was_not(
    kill: Any, bench: Bench, uninterrupted: dict[str, Any]
) -> None:
    dice = random.Random(kill.__name__)
    bench.write(prompts(20))
    bench.settings |= {"num_workers": "2", "concurrency": "3", "batch_size": "2", "max_attempts": "20"}
    for _ in range(7):
        with bench.start("--resume") as program:
            wait_until(lambda: program.workers() or program.process.poll() is not None)
            pause(dice, 0.5)
            kill(program)
            if kill is kill_a_worker:
                pause(dice, 0.3)
                kill(program)
                code, out, err = program.end()
                assert code in (0, 1), err
            program.process.wait(10)
        paid = Counter({row["task_id"]: 1 for row in bench.ended() if row["status"] == "completed"})
        assert max(paid.values(), default=1) == 1
        before = bench.asked()
        finished = {row["prompt_index"] for row in bench.ended()}
        del finished, before
    bench.finish("--resume")
    assert ids(merged(bench.directory)) == [f"row{number}" for number in range(20)]
    assert bench.outcome() == uninterrupted
