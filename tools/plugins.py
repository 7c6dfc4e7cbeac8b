"""Python files of a user's own, as modules."""

import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from tools.errors import UsageProblem


def module_at(path_text: str) -> ModuleType:
    """The file as a module, run anew. What it raises itself is raised. UsageProblem if there is no such file."""
    path = Path(path_text).resolve()
    name = f"plugin_{sha256(os.fsencode(path)).hexdigest()[:16]}"  # two files may have one name
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UsageProblem(f"there is no Python file {path_text}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with _beside_the_output(), _staying():
        spec.loader.exec_module(module)
    return module


@contextmanager
def _beside_the_output() -> Iterator[None]:
    """What the file and its children write on descriptor 1 goes to stderr: programs read what stdout has."""
    streams = {stream for stream in (sys.stdout, sys.__stdout__) if stream is not None}
    kept = os.dup(1)
    try:
        for stream in streams:
            stream.flush()
        os.dup2(2, 1)
        yield
    finally:
        for stream in streams:
            stream.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def _staying() -> Iterator[None]:
    """Meanwhile `os._exit` raises SystemExit, or the file could end the whole program without a word. On other threads
    and in processes that the file forks it does what it always does."""
    leave, here = os._exit, (os.getpid(), threading.get_ident())

    def refuse(status: int) -> NoReturn:
        if (os.getpid(), threading.get_ident()) != here:
            leave(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = leave
