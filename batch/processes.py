"""Worker processes, forked from a server that has imported what is heavy: each costs milliseconds and little memory.

Forked from there, not from the parent, whose threads would leave locks behind that nobody opens.
"""

import multiprocessing
import os
import signal
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec

from batch.worker import SIGNALS, WorkerSpec, worker_main

LONGEST_TEMPORARY = 70  # bytes; see _quietly
IMPORTED = ("batch.cli", "batch.invocation", "tools.terminal", "tools.files", "tools.search")


def start_server(heavy: Sequence[str]) -> None:
    """Early, so that the server imports while the parent reads its dataset. `heavy`: modules of this run's own. Workers
    have the environment of this moment."""
    forkserver.set_forkserver_preload([*IMPORTED, *heavy])
    with _quietly():
        forkserver.ensure_running()


def start_worker(spec: WorkerSpec, connection: socket.socket) -> BaseProcess:
    """A worker at the other end of a socket. Blocks; one at a time."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=worker_main, args=(msgspec.msgpack.encode(spec), connection), daemon=False)
    with _quietly():
        process.start()
    connection.close()
    return process


@contextmanager
def _quietly() -> Iterator[None]:
    """Blocks this thread's signals: one to the group must not hit a child that is not ready for it. The worker unblocks
    them; the fork server, which must outlive it, never does.

    The server makes a socket in the temporary directory, whose whole path may have 107 bytes; and it finds our modules
    wherever the program was started.
    """
    resource_tracker.ensure_running()  # would unblock them
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    temporary, path = tempfile.tempdir, os.environ.get("PYTHONPATH")
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TEMPORARY:
        tempfile.tempdir = "/tmp"  # noqa: S108 - a folder with a random name is made in it
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *([path] if path else [])])
    try:
        yield
    finally:
        tempfile.tempdir = temporary
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
