"""`on_task_done`: called with each ended row's task object as it stands in the journal, in order, on one thread."""

import asyncio
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from agent.checkers import Plugin
from agent.faults import Fault, attempted
from agent.row import decode_row
from agent.task_object import task_object
from batch.messages import PromptEnded
from batch.store import RowFiles, RunDirectory

LAST_CALLS = 60.0  # seconds that the hook has for what still waits when the run is over


class Hook:
    """Calls a function, sync or async, for every row, without holding up the run; what it raises is logged."""

    def __init__(self, function: Plugin, directory: RunDirectory, log: Callable[[str], None]) -> None:
        self._function = function
        self._directory = directory
        self._log = log
        self._queue: queue.SimpleQueue[PromptEnded | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="on_task_done", daemon=True)
        self._thread.start()

    def ended(self, message: PromptEnded) -> None:
        """A row is on disk."""
        self._queue.put(message)

    def close(self) -> None:
        """Waits, but not for ever, until all have been called."""
        self._queue.put(None)
        self._thread.join(LAST_CALLS)
        if self._thread.is_alive():
            self._log(f"on_task_done: still busy after {LAST_CALLS:.0f} s; left behind")

    def _run(self) -> None:
        with RowFiles(self._directory) as files, asyncio.Runner() as runner:  # one event loop for all calls
            while (message := self._queue.get()) is not None:
                task = task_object(decode_row(files.line(message.batch_num, message.offset)))
                outcome = attempted(partial(self._call, runner, task), through=())
                if isinstance(outcome, Fault):
                    self._log(f"on_task_done: {message.task_id}: {outcome}")

    def _call(self, runner: asyncio.Runner, task: dict[str, Any]) -> None:
        answer = self._function(task)
        if inspect.isawaitable(answer):
            runner.run(_awaited(answer))


async def _awaited(answer: Awaitable[object]) -> None:
    await answer
