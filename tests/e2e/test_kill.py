"""SIGKILL at any moment, damage to files, resume: every row ends once, nothing is paid for twice."""

import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
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
    wait_until(lambda: not program.tree())  # orphans end by themselves


def kill_a_worker(program: Program) -> None:
    for worker in program.workers()[:1]:
        with suppress(psutil.NoSuchProcess):
            worker.kill()
    assert program.end()[0] in (0, 1)


def kill_everything(program: Program) -> None:
    program.kill_all()


ROWS = 24


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, endpoint: EndpointProcess) -> dict[str, Any]:
    bench = Bench(tmp_path_factory.mktemp("uninterrupted"), endpoint, prompts(ROWS))
    bench.finish("--batch_size=2")
    return bench.outcome()


@pytest.mark.parametrize("kill", [kill_parent, kill_a_worker, kill_everything])
def test_a_run_killed_again_and_again_ends_as_one_that_was_not(
    kill: Callable[[Program], None], uninterrupted: dict[str, Any], bench: Bench
) -> None:
    dice = random.Random(kill.__name__)
    bench.write(prompts(ROWS))
    bench.settings |= {"num_workers": "2", "concurrency": "2", "batch_size": "2"}
    settled: Counter[str] = Counter()  # requests for rows that had ended, when they had
    for _ in range(7):
        before, left = bench.asked(), ROWS - len(settled)
        with bench.start("--resume") as program:
            wait_until(lambda: bench.asked() != before or program.process.poll() is not None)
            pause(dice, 0.015 * left)
            kill(program)
        asked, ended = bench.asked(), [row for row in bench.ended() if row["status"] == "completed"]
        assert len(ended) == len(set(ids(ended)))
        assert all(asked[prompt] == requests for prompt, requests in settled.items())
        settled = Counter({row["prompt"]: asked[row["prompt"]] for row in prompts(ROWS) if row["id"] in ids(ended)})
        print(left, len(settled))
    assert all(bench.asked_by("--resume")[prompt] == 0 for prompt in settled)
    assert ids(merged(bench.directory)) == [f"row{number}" for number in range(ROWS)]
    assert bench.outcome() == uninterrupted
