"""A worker process of the crew: reads chunks of rows from its parent, counts and plans them, sends a step for each.

It speaks over a socket that is its standard input: frames of a length, 8 bytes, and MessagePack. First its task comes
in and `Opened` goes out, then chunks come in, and for each of their rows, in order, an answer goes out as soon as it is
known: so whoever waits sees at which row a worker died or stands still. It ends when its parent is gone.
"""

import importlib
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import BinaryIO, cast

import msgspec
from msgspec import Struct

from agent.faults import Fault, attempted
from batch.signals import SIGNALS
from compression.counting import open_counter
from compression.types import Counter, Done, Policy, Step

LENGTH = 8  # bytes, big-endian

Item = tuple[bytes, tuple[str, ...]]  # a row and its summaries so far
Advance = Callable[[bytes, Sequence[str], Policy, Counter], Step]


class Task(Struct, frozen=True, kw_only=True):
    """What a worker is for. `function`: "module:name" of an Advance."""

    policy: Policy
    tokenizer: str
    chat_template: str
    function: str


class Opened(Struct, frozen=True, tag=True):
    """Rows may come. `name` is the counter's."""

    name: str


class Failed(Struct, frozen=True, tag=True):
    """The tokenizer cannot be opened, or the row raises. `usage`: it is the user's mistake."""

    error: str
    usage: bool = False


class Same(Struct, frozen=True, tag=True):
    """A Done whose line is the row's: large, and known to whoever sent it."""

    done: Done


Answer = Step | Same | Failed
FromWorker = Opened | Answer


class Rows:
    """Steps rows on. Raises what `open_counter` and the import of the function raise."""

    def __init__(self, task: Task) -> None:
        module, _, name = task.function.partition(":")
        self._advance: Advance = getattr(importlib.import_module(module), name)
        self._policy = task.policy
        self._counter = open_counter(task.tokenizer, task.chat_template)
        self.name = self._counter.name

    def step(self, item: Item) -> Step | Failed:
        """A fault of ours is the row's end, not that of its neighbours."""
        line, summaries = item
        found = attempted(partial(self._advance, line, summaries, self._policy, self._counter), through=())
        return Failed(str(found)) if isinstance(found, Fault) else found.value


def main() -> None:
    """The process. Signals are still blocked, so that none of them came too early."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    channel = socket.socket(fileno=0)
    threading.Thread(target=_end_with, args=(channel.fileno(),), daemon=True).start()
    with suppress(ConnectionError), channel.makefile("rwb") as wire:  # who is gone needs no answer
        _serve(cast("BinaryIO", wire))


def _end_with(parent: int) -> None:
    hung_up = select.poll()
    hung_up.register(parent, select.POLLRDHUP)
    hung_up.poll()
    os._exit(0)  # whatever it was at, nobody wants it any more


def _serve(wire: BinaryIO) -> None:
    task = msgspec.msgpack.decode(_read(wire), type=Task)
    opened = attempted(partial(Rows, task), through=())
    if isinstance(opened, Fault):
        _write(wire, msgspec.msgpack.encode(_refusal(opened)))
        return
    _write(wire, msgspec.msgpack.encode(Opened(opened.value.name)))
    decoder = msgspec.msgpack.Decoder(list[Item])
    while chunk := _read(wire):
        for item in decoder.decode(chunk):
            _write(wire, _answer(opened.value, item))


def _refusal(fault: Fault) -> Failed:
    if fault.kind == "UsageProblem":
        return Failed(fault.message, usage=True)
    return Failed(f"{fault}\n{fault.trace}")


def _answer(rows: Rows, item: Item) -> bytes:
    step: Answer = rows.step(item)
    if isinstance(step, Done) and step.line == item[0]:
        step = Same(msgspec.structs.replace(step, line=b""))
    encoded = attempted(partial(msgspec.msgpack.encode, step), through=())
    return msgspec.msgpack.encode(Failed(str(encoded))) if isinstance(encoded, Fault) else encoded.value


def _read(wire: BinaryIO) -> bytes:
    return wire.read(int.from_bytes(wire.read(LENGTH)))


def _write(wire: BinaryIO, frame: bytes) -> None:
    wire.write(len(frame).to_bytes(LENGTH))
    wire.write(frame)
    wire.flush()
