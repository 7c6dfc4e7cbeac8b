"""The hook: called in order on one thread, heard on the loop, and never waited for longer than it may take."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

from agent.row import encode_row
from batch.dataset import Dataset, scan
from batch.ended import ended_message
from batch.hook import Hook
from batch.messages import PromptEnded
from batch.store import RunDirectory
from tests.unit.made import row_of_job
from tools.toolsets import BUILT_IN

DATASET = Dataset.of_prompt("x")
scan(DATASET, BUILT_IN.resolve_names)


def ended(directory: RunDirectory, **changes: Any) -> PromptEnded:
    """A row that is in the journal."""
    row = row_of_job(DATASET.job(0), **changes)
    return ended_message(row, *directory.append(row.metadata.batch_num, encode_row(row)))


class Heard:
    """Log lines, and the threads that they came from."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.threads: set[int] = set()

    def __call__(self, text: str) -> None:
        self.lines.append(text)
        self.threads.add(threading.get_ident())


async def test_what_a_hook_raises_is_heard_on_the_loop_and_it_is_called_again(tmp_path: Path) -> None:
    directory, heard, seen = RunDirectory(tmp_path), Heard(), list[str]()

    async def asynchronous() -> None:
        raise asyncio.CancelledError

    def told(task: dict[str, Any]) -> Any:
        seen.append(task["id"])
        match task["id"]:
            case "ctrl-c":
                raise KeyboardInterrupt
            case "exit":
                raise SystemExit
            case "cancelled":
                return asynchronous()
        return None

    hook = Hook(told, directory, heard)
    names = ["ctrl-c", "exit", "cancelled", "good"]
    for name in names:
        hook.ended(ended(directory, task_id=name))
    await hook.close()
    assert seen == names
    assert [line.split(": ")[1:] for line in heard.lines] == [
        ["ctrl-c", "KeyboardInterrupt"],
        ["exit", "SystemExit"],
        ["cancelled", "CancelledError"],
    ]
    assert heard.threads == {threading.get_ident()}


async def test_a_row_that_cannot_be_read_is_said_and_passed_over(tmp_path: Path) -> None:
    directory, heard, seen = RunDirectory(tmp_path), Heard(), list[str]()
    message = ended(directory, task_id="one")
    with directory.batch_path(message.batch_num).open("r+b") as file:
        file.write(b"#")
    hook = Hook(lambda task: seen.append(task["id"]), directory, heard)
    hook.ended(message)
    hook.ended(ended(directory, task_id="two"))
    await hook.close()
    assert seen == ["two"]
    assert [line.startswith("on_task_done: one: ") for line in heard.lines] == [True]


async def test_a_hook_that_hangs_is_left_behind_when_time_is_short(tmp_path: Path) -> None:
    directory, heard, free = RunDirectory(tmp_path), Heard(), threading.Event()
    hook = Hook(lambda _: free.wait(60), directory, heard)
    hook.ended(ended(directory))
    closing = asyncio.create_task(hook.close())
    began = time.monotonic()
    await asyncio.sleep(0.1)
    assert not closing.done()
    hook.hurry(30)
    await asyncio.sleep(0.1)
    assert not closing.done()
    hook.hurry(0)
    await closing
    assert time.monotonic() - began < 10
    assert heard.lines == ["on_task_done: still busy; left behind"]
    free.set()


async def test_a_hook_has_a_moment_although_the_hurry_began_long_before(tmp_path: Path) -> None:
    directory, heard, seen = RunDirectory(tmp_path), Heard(), list[int]()

    def told(_: dict[str, Any]) -> None:
        time.sleep(0.1)
        seen.append(1)

    hook = Hook(told, directory, heard)
    hook.ended(ended(directory))
    hook.hurry(0)
    await hook.close()
    assert (seen, heard.lines) == ([1], [])
