"""The first step of every program, before anything that takes long to import."""

import gc
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

from batch.signals import SIGNALS


def start(module: str, argv: Sequence[str] | None) -> int:
    """The exit code of the module's `invoke`, given the words of the command line, by default this process's. An
    interrupt while it is imported leaves no traceback."""
    before = [signal.signal(number, lambda number, _: os._exit(128 + number)) for number in SIGNALS]
    gc.disable()  # modules make no garbage, and to look for some takes a fifth of this
    program = import_module(module)
    gc.enable()
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)
    code: int = program.invoke(sys.argv[1:] if argv is None else argv)
    return code
