"""Processes over all cores that count and plan rows, a chunk at a time each.

Killing one of them at any moment costs nothing but time: its row is done again by another one. A row at which two of
them died, or one stood still for too long, comes back as it was, failed; so does a row at which our own code raises.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec

from batch.exits import InternalFaultError
from batch.signals import SIGNALS
from compression.steps import uncounted
from compression.types import Policy, RowMetrics, Step
from compression.worker import LENGTH, Answer, Failed, FromWorker, Item, Opened, Rows, Same, Task
from tools.errors import UsageProblem
from tools.threads import in_thread

ADVANCE = "compression.steps:advance"
START = 600.0  # seconds in which a worker has to open its tokenizer, which may be a download
STARTS = 3  # workers in a row that die before they are ready: something is wrong with us
READ_AHEAD = 1 << 20  # bytes of answers that wait in this process, a worker
SEND_AHEAD = 1 << 19  # bytes that wait for a worker; the fewer the sends, the cheaper
_COMMAND = (sys.executable, "-c", "from compression.worker import main; main()")
_DECODER: "msgspec.msgpack.Decoder[FromWorker]" = msgspec.msgpack.Decoder(FromWorker)


class Crew:
    """`async with Crew(…) as crew: steps = await crew.advance(items)`: as many calls at once as there are workers,
    further ones wait for one that is free. `workers`: processes; 0: a thread of this one, which cannot be killed.
    `row_seconds`: what a row may take. `function`: what is done with a row, see `Task`.

    Entering raises UsageProblem if tokenizer or template cannot be opened.
    """

    def __init__(
        self,
        workers: int,
        policy: Policy,
        tokenizer: str,
        chat_template: str = "",
        *,
        row_seconds: float = 300.0,
        function: str = ADVANCE,
    ) -> None:
        task = Task(policy=policy, tokenizer=tokenizer, chat_template=chat_template, function=function)
        self.tokenizer = ""  # the counter's name, known once entered
        self._strategy = policy.strategy
        self._places: list[_Place] = [_Process(task, row_seconds) for _ in range(workers)]
        if not workers:
            self._places = [_Thread(task, row_seconds)]
        self._idle: asyncio.LifoQueue[_Place] = asyncio.LifoQueue()
        self._line = asyncio.Lock()  # of it one call at a time waits for a place

    async def __aenter__(self) -> Self:
        first, *others = self._places
        try:
            self.tokenizer = await first.open()  # alone: it may download what the others then find
            await asyncio.gather(*(place.open() for place in others))
        except BaseException:
            self._close()
            raise
        for place in self._places:
            self._idle.put_nowait(place)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    async def advance(self, items: Sequence[Item], *, first: bool = False) -> list[Step]:
        """One step for each row, in order. Rows of a chunk are done one after another. `first`: at most one call of
        all that wait comes before it, beside those that are `first` too."""
        async with nullcontext() if first else self._line:
            place = await self._idle.get()
        try:
            answers = await place.answers(items)
        finally:
            self._idle.put_nowait(place)
        return [self._step(line, answer) for (line, _), answer in zip(items, answers, strict=True)]

    def _step(self, line: bytes, answer: Answer) -> Step:
        match answer:
            case Same(done):
                return msgspec.structs.replace(done, line=line)
            case Failed(error):
                return uncounted(line, RowMetrics(strategy=self._strategy, tokenizer=self.tokenizer), error)
        return answer

    def _close(self) -> None:
        for place in self._places:
            place.close()


class _Place(Protocol):
    """Where rows are done, one chunk at a time."""

    async def open(self) -> str:
        """The counter's name, once it is ready."""

    async def answers(self, items: Sequence[Item]) -> list[Answer]:
        """One for each row, in order."""

    def close(self) -> None:
        """At once."""


class _Thread:
    """One thread after another. A row that takes too long is left to itself."""

    def __init__(self, task: Task, row_seconds: float) -> None:
        self._task = task
        self._row_seconds = row_seconds
        self._rows: Rows | None = None

    async def open(self) -> str:
        self._rows = await in_thread(Rows, self._task)
        return self._rows.name

    async def answers(self, items: Sequence[Item]) -> list[Answer]:
        assert self._rows is not None
        answers: list[Answer] = []
        for item in items:
            try:
                async with asyncio.timeout(self._row_seconds):
                    answers.append(await in_thread(self._rows.step, item))
            except TimeoutError:
                answers.append(_too_slow(self._row_seconds))
        return answers

    def close(self) -> None:
        self._rows = None


class _Process:
    """One worker after another: who dies is followed by a new one."""

    def __init__(self, task: Task, row_seconds: float) -> None:
        self._task = task
        self._row_seconds = row_seconds
        self._worker: _Worker | None = None

    async def open(self) -> str:
        for _ in range(STARTS):
            self._worker = await _Worker.started()
            try:
                async with asyncio.timeout(START):
                    await self._worker.send(msgspec.msgpack.encode(self._task))
                    return _name(await self._worker.receive())
            except (EOFError, TimeoutError) as error:
                problem = str(error) or f"not ready after {START:g} s"
                self.close()
        raise InternalFaultError(f"workers of the compressor end before they are ready: {problem}")

    async def answers(self, items: Sequence[Item]) -> list[Answer]:
        answers: list[Answer] = []
        died_at = -1
        while len(answers) < len(items):
            try:
                await self._run(items, answers)
            except TimeoutError:
                answers.append(_too_slow(self._row_seconds))
            except EOFError as death:
                if len(answers) == died_at:
                    answers.append(Failed(str(death)))
                else:
                    died_at = len(answers)
        return answers

    async def _run(self, items: Sequence[Item], answers: list[Answer]) -> None:
        """Appends answers. TimeoutError, EOFError: at the first row that has none."""
        if self._worker is None:
            await self.open()
        assert self._worker is not None
        whole = False
        try:
            async with asyncio.timeout(self._row_seconds):
                await self._worker.send(msgspec.msgpack.encode(items[len(answers) :]))
            while len(answers) < len(items):
                async with asyncio.timeout(self._row_seconds):
                    answers.append(_answer(await self._worker.receive()))
            whole = True
        finally:
            if not whole:
                self.close()  # what it would still send belongs to nobody

    def close(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None


class _Worker:
    """A process at the other end of a socket."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def started(cls) -> Self:
        """One that waits for its task."""
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_AHEAD)
        with theirs:
            process = _spawned(theirs)
        return cls(process, *await asyncio.open_connection(sock=ours, limit=READ_AHEAD))

    async def send(self, frame: bytes) -> None:
        """EOFError, which says how the process ended, if it is gone."""
        try:
            self._writer.write(len(frame).to_bytes(LENGTH))
            self._writer.write(frame)
            await self._writer.drain()
        except ConnectionError as error:
            raise EOFError(self._end()) from error

    async def receive(self) -> FromWorker:
        """As `send`."""
        try:
            length = int.from_bytes(await self._reader.readexactly(LENGTH))
            frame = await self._reader.readexactly(length)
        except (EOFError, ConnectionError) as error:
            raise EOFError(self._end()) from error
        return _DECODER.decode(frame)

    def _end(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        code = self._process.poll() or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return f"the process that counted it {how}"

    def kill(self) -> None:
        """At once: it has nothing to lose."""
        self._writer.close()
        self._process.kill()
        self._process.wait()


def _spawned(stdin: socket.socket) -> "subprocess.Popen[bytes]":
    """Its signals are blocked until it ignores them. It finds our modules, and no others of their names."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return subprocess.Popen(  # noqa: S603 - our own words
            _COMMAND, stdin=stdin.fileno(), stdout=subprocess.DEVNULL, env=_variables()
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _variables() -> Mapping[str, str]:
    path = filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
    ours = {"PYTHONPATH": os.pathsep.join(path), "PYTHONSAFEPATH": "1"}
    return os.environ | ours | {"TOKENIZERS_PARALLELISM": "false"}  # the cores are ours to share out


def _name(message: FromWorker) -> str:
    match message:
        case Opened(name):
            return name
        case Failed(error, usage):
            raise UsageProblem(error) if usage else InternalFaultError(error)
    raise InternalFaultError(f"a worker of the compressor began with {message}")


def _answer(message: FromWorker) -> Answer:
    assert not isinstance(message, Opened)
    return message


def _too_slow(seconds: float) -> Failed:
    return Failed(f"it took longer than {seconds:g} s")
