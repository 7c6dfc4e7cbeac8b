"""`on_task_done`: called with each ended row's task object as it stands in the journal, in order, on one thread."""

import asyncio
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from agent.checkers import Plugin
from agent.faults import Fault, attempted
from agent.row import decode_row
from agent.task_object import task_object
from batch.messages import PromptEnded
from batch.store import RowFiles, RunDirectory

LAST_CALLS = 60.0  # seconds that the hook has for what still waits when the run is over
FEWEST = 1.0  # seconds that it has even so if a hurry began long before


class Hook:
    """Calls a function, sync or async, for every row, without holding up the run; what it raises is logged. Made, told
    and closed on the run's loop."""

    def __init__(self, function: Plugin, directory: RunDirectory, log: Callable[[str], None]) -> None:
        self._function = function
        self._directory = directory
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._until = float("inf")  # the loop's time at which `close` waits no longer
        self._patience: asyncio.Timeout | None = None  # that of `close`, while it waits
        self._over = asyncio.Event()
        self._queue: queue.SimpleQueue[PromptEnded | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="on_task_done", daemon=True).start()

    def ended(self, message: PromptEnded) -> None:
        """A row is on disk."""
        self._queue.put(message)

    def hurry(self, seconds: float) -> None:
        """From now on `close` has so long at the most, also if it waits already."""
        self._until = min(self._until, self._loop.time() + seconds)
        if self._patience is not None:
            self._patience.reschedule(self._until)

    async def close(self) -> None:
        """Waits, but not for ever, until all have been called. Once."""
        self._queue.put(None)
        self.hurry(LAST_CALLS)
        try:
            async with asyncio.timeout_at(max(self._until, self._loop.time() + FEWEST)) as self._patience:
                await self._over.wait()
        except TimeoutError:
            self._log("on_task_done: still busy; left behind")
        finally:
            self._patience = None

    def _run(self) -> None:
        try:
            with (
                RowFiles(self._directory.batch_path) as files,
                asyncio.Runner() as runner,
            ):  # one event loop for all calls
                while (message := self._queue.get()) is not None:
                    outcome = attempted(partial(self._tell, runner, files, message), through=())
                    if isinstance(outcome, Fault):
                        self._hop(partial(self._log, f"on_task_done: {message.task_id}: {outcome}"))
        finally:
            self._hop(self._over.set)

    def _hop(self, call: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed: left behind
            self._loop.call_soon_threadsafe(call)

    def _tell(self, runner: asyncio.Runner, files: RowFiles, message: PromptEnded) -> None:
        answer = self._function(task_object(decode_row(files.line(message.batch_num, message.offset))))
        if inspect.isawaitable(answer):
            runner.run(_awaited(answer))


async def _awaited(answer: Awaitable[object]) -> None:
    await answer
