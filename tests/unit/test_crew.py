"""Whatever happens to a worker: every row comes back, in order, and only the guilty one failed."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from batch.exits import InternalFaultError
from compression.counting import open_counter
from compression.crew import Crew
from compression.types import Ask, Done, Policy, Step
from compression.worker import Item
from tools.errors import UsageProblem

ROOT = Path(__file__).parents[2]
STAND_IN = "tests.unit.crew_rows:advance"
POLICY = Policy(summary_target_tokens=77)


def crew(workers: int = 1, *, row_seconds: float = 60.0, function: str = STAND_IN, tokenizer: str = "gpt-4") -> Crew:
    return Crew(workers, POLICY, tokenizer, row_seconds=row_seconds, function=function)


def items(*lines: str) -> list[Item]:
    return [(line.encode(), ()) for line in lines]


def done(step: Step) -> Done:
    assert isinstance(step, Done)
    return step


def errors(steps: list[Step]) -> list[str]:
    """Of each row; every failed one is as it was."""
    found = [done(step).metrics for step in steps]
    assert all(metrics.failed == bool(metrics.error) for metrics in found)
    return [metrics.error for metrics in found]


async def worker_of(members: Crew) -> int:
    """A worker's process."""
    (step,) = await members.advance(items("echo"))
    return done(step).metrics.passes


def appears(path: Path) -> int:
    """The process in a file, once it is there."""
    deadline = time.monotonic() + 20
    while not (path.exists() and path.read_text(encoding="utf-8")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(path.read_text(encoding="utf-8"))


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("workers", [0, 1, 2])
async def test_rows_come_back_in_order(workers: int) -> None:
    chunks = [[f"echo {'word ' * (number + chunk)}" for number in range(20)] for chunk in range(5)]
    async with crew(workers) as members:
        assert members.tokenizer == "gpt-4"
        found = await asyncio.gather(*(members.advance(items(*chunk)) for chunk in chunks))
    for number, (chunk, steps) in enumerate(zip(chunks, found, strict=True)):
        assert [done(step).line.decode() for step in steps] == chunk
        tokens = [done(step).metrics.original_tokens for step in steps]
        assert [count - 1 for count in tokens if count] == list(range(number or 1, number + 20))
    processes = {done(step).metrics.passes for steps in found for step in steps}
    assert len(processes) == max(1, workers)
    assert (os.getpid() in processes) == (not workers)


@pytest.mark.parametrize("workers", [0, 1])
async def test_every_kind_of_step_comes_back(workers: int) -> None:
    async with crew(workers) as members:
        ask, changed = await members.advance([(b"ask", ("one", "two")), (b"change me", ())])
    assert isinstance(ask, Ask)
    assert (ask.prompt, ask.max_tokens) == ("one; two", 77)
    assert done(changed).line == b"changed"


@pytest.mark.parametrize("workers", [0, 1])
async def test_a_row_that_raises_fails_alone(workers: int) -> None:
    async with crew(workers) as members:
        before, bad, after = await members.advance(items("echo a", "raise", "echo b"))
    assert errors([before, bad, after]) == ["", "RuntimeError: a fault of ours", ""]
    assert done(bad).line == b"raise"
    assert (done(bad).metrics.tokenizer, done(bad).metrics.strategy) == ("gpt-4", "summary")


async def test_an_answer_that_cannot_be_sent_fails_alone() -> None:
    async with crew() as members:
        found = errors(await members.advance(items("echo a", "odd", "echo b")))
    assert [error.partition(":")[0] for error in found] == ["", "UnicodeEncodeError", ""]


async def test_a_row_that_kills_its_worker_fails_alone(tmp_path: Path) -> None:
    lines = ["echo a", "die", "echo b", f"once {tmp_path / 'died'}", "echo c", "die"]
    async with crew() as members:
        steps = await members.advance(items(*lines))
    died = "the process that counted it was killed by SIGKILL"
    assert errors(steps) == ["", died, "", "", "", died]
    assert [done(step).line.decode() for step in steps] == lines


async def test_what_comes_first_waits_for_one_chunk_at_most() -> None:
    ended: list[str] = []

    async def call(name: str, *, first: bool) -> None:
        await members.advance(items("echo a"), first=first)
        ended.append(name)

    async with crew() as members, asyncio.TaskGroup() as group:
        for name in "abcd":
            group.create_task(call(name, first=False))
        await asyncio.sleep(0)
        for name in "xy":
            group.create_task(call(name, first=True))
    assert ended == list("abxycd")


async def test_a_killed_worker_is_replaced() -> None:
    async with crew() as members:
        first = await worker_of(members)
        os.kill(first, signal.SIGKILL)
        second = await worker_of(members)
        assert second != first
    assert not psutil.pid_exists(first)
    assert not psutil.pid_exists(second)


@pytest.mark.parametrize("workers", [0, 1])
async def test_a_row_that_stands_still_fails_alone(workers: int, tmp_path: Path) -> None:
    lines = ["echo a", f"hang {tmp_path / 'hangs'}", "echo b"]
    async with crew(workers, row_seconds=0.5) as members:
        steps = await members.advance(items(*lines))
        assert errors(steps) == ["", "it took longer than 0.5 s", ""]
        metrics = done(steps[1]).metrics  # for all that is known
        assert (metrics.still_over_limit, metrics.original_tokens) == (True, 0)
        hung = appears(tmp_path / "hangs")
        assert psutil.pid_exists(hung) == (not workers)
        assert errors(await members.advance(items("echo c"))) == [""]


async def test_signals_to_the_group_do_not_end_workers() -> None:
    async with crew() as members:
        worker = await worker_of(members)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(worker, number)
        assert await worker_of(members) == worker


async def test_the_answers_to_a_cancelled_call_are_nobodys(tmp_path: Path) -> None:
    async with crew() as members:
        call = asyncio.create_task(members.advance(items("echo a", f"hang {tmp_path / 'hangs'}", "echo b")))
        hung = await asyncio.to_thread(appears, tmp_path / "hangs")
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not psutil.pid_exists(hung)
        (step,) = await members.advance(items("echo c"))
        assert done(step).line == b"echo c"


ORPHANS = """
import asyncio, sys
from compression.crew import Crew
from compression.types import Policy

async def main():
    async with Crew(2, Policy(), "cl100k_base", function="tests.unit.crew_rows:advance") as members:
        await asyncio.gather(*(members.advance([(f"hang {path}".encode(), ())]) for path in sys.argv[1:]))

asyncio.run(main())
"""


def test_workers_end_with_their_killed_parent(tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "two"]
    parent = subprocess.Popen([sys.executable, "-c", ORPHANS, *map(str, files)], cwd=ROOT)
    try:
        hung = [appears(file) for file in files]
    finally:
        parent.kill()
        parent.wait()
    for pid in hung:
        wait_for_end(pid)


@pytest.mark.parametrize("workers", [0, 2])
async def test_a_tokenizer_that_is_none_is_the_users_mistake(workers: int) -> None:
    with pytest.raises(UsageProblem, match=r"there is no tokenizer './none'"):
        async with crew(workers, tokenizer="./none"):
            pass


async def test_workers_that_cannot_begin_end_the_program() -> None:
    with pytest.raises(InternalFaultError, match=r"No module named 'tests.unit.nothing'"):
        async with crew(2, function="tests.unit.nothing:advance"):
            pass


async def test_workers_that_die_at_their_start_end_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deadly.py").write_text("import os\nos._exit(5)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(InternalFaultError, match=r"before they are ready: .* ended with 5"):
        async with crew(function="deadly:advance"):
            pass


async def test_modules_of_the_working_directory_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "compression.py").write_text("raise SystemExit(9)\n")
    (tmp_path / "msgspec.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    async with crew() as members:
        assert await worker_of(members)


async def test_rows_are_really_counted() -> None:
    turns = [{"from": "human", "value": "Hi <|endoftext|>"}, {"from": "gpt", "value": "<think>\n</think>\nHello"}]
    line = msgspec.json.encode({"conversations": turns, "more": 1})
    async with Crew(1, Policy(), "cl100k_base") as members:
        (step,) = await members.advance([(line, ())])
    counter = open_counter("cl100k_base")
    assert done(step).line == line
    assert done(step).metrics.skipped_under_target
    assert done(step).metrics.original_tokens == 10 + sum(counter.text(turn["value"]) for turn in turns)
