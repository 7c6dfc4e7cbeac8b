"""Worker processes, forked from a server that has imported what is heavy: each costs milliseconds and little memory.

Forked from there, not from the parent, whose threads would leave locks behind that nobody opens.
"""

import gc
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec

from batch.signals import SIGNALS
from batch.worker import WorkerSpec, worker_main
from tools.environments.base import Owner
from tools.environments.owner import encode, folders_of_the_dead

LONGEST_TEMPORARY = 70  # bytes; see _quietly
_OWNER = "owner.json"
IMPORTED = ("batch.uncollected", "batch.cli", "batch.invocation", "tools.terminal", "tools.files", "tools.search")


def start_server(heavy: Sequence[str], owner: Owner) -> None:
    """Early, so that the server imports while the parent reads its dataset. `heavy`: modules of this run's own.
    `owner`: this process. Workers have the environment of this moment."""
    forkserver.set_forkserver_preload([*IMPORTED, *heavy])
    with _quietly():
        _remove_folders_of_the_dead()
        forkserver.ensure_running()
        (Path(util.get_temp_dir()) / _OWNER).write_text(encode(owner), encoding="utf-8")


def _remove_folders_of_the_dead() -> None:
    """The folder with the server's socket goes with its owner's end, unless that was a SIGKILL."""
    for folder in folders_of_the_dead(Path(tempfile.gettempdir()), f"pymp-*/{_OWNER}"):
        with suppress(OSError):  # another invocation is at it too
            shutil.rmtree(folder)


def start_worker(spec: WorkerSpec, connection: socket.socket) -> BaseProcess:
    """A worker at the other end of a socket. Blocks; one at a time."""
    context = multiprocessing.get_context("forkserver")
    arguments = (msgspec.msgpack.encode(spec), connection, _variables())
    process = context.Process(target=_worker, args=arguments, daemon=False)
    with _quietly():
        process.start()
    connection.close()
    return process


def _worker(spec: bytes, connection: socket.socket, variables: Mapping[str, str | None]) -> None:
    gc.freeze()  # what was imported is neither looked through again nor copied for that
    gc.enable()
    _restore(variables)  # what was for the server is not for the plug-ins' own subprocesses
    worker_main(spec, connection)


def _variables() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in ("PYTHONPATH", "PYTHONSAFEPATH")}


def _restore(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is not None:
            os.environ[name] = value
        elif name in os.environ:
            del os.environ[name]


@contextmanager
def _quietly() -> Iterator[None]:
    """Blocks this thread's signals: one to the group must not hit a child that is not ready for it. The worker unblocks
    them; the fork server, which must outlive it, never does.

    The server makes a socket in the temporary directory, whose whole path may have 107 bytes; and it finds our modules,
    and no others of their names, wherever the program was started.
    """
    resource_tracker.ensure_running()  # would unblock them
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    temporary, before = tempfile.tempdir, _variables()
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST_TEMPORARY:
        tempfile.tempdir = "/tmp"  # noqa: S108 - a folder with a random name is made in it
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), before["PYTHONPATH"]]))
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        tempfile.tempdir = temporary
        _restore(before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
