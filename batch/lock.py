"""One process owns a run directory: `run.lock`, held by flock, with a record of who holds it.

The owner and each of its workers hold the lock shared; whoever wants to own the run must first have it alone. So a
worker that outlives its owner still keeps others out.
"""

import errno
import fcntl
import os
import socket
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from tools.environments.base import Owner
from tools.environments.owner import is_dead
from tools.errors import UsageProblem

PATIENCE = 15.0  # seconds that a dead owner's workers have to go away
FRESH = 60.0  # seconds for which a checkpoint speaks for an owner on another machine
_ORPHANS_END = 1.5  # seconds after which workers of a dead owner write no more

_NO_FLOCK = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}


class LockRecord(Struct, frozen=True, kw_only=True):
    """Who holds a run."""

    host: str
    owner: Owner

    def __str__(self) -> str:
        return f"process {self.owner.pid} on {self.host}"


class RunLock:
    """A held lock. Ends with the process, or with `release`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        os.register_at_fork(after_in_child=self.release)  # a plug-in's child must not hold the run

    def release(self) -> None:
        """More than once is fine."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def own(path: Path, owner: Owner, checkpoint: Path, *, steal: bool = False, patience: float = PATIENCE) -> RunLock:
    """Makes `owner` (this process) the run's owner. UsageProblem names the one who is.

    `checkpoint` and `steal` matter only where the file system has no flock.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if not _wait_alone(descriptor, owner, patience) and not steal:
                _judge_record(_record(descriptor), owner, checkpoint)
            if _is_file(descriptor, path):
                _set_record(descriptor, LockRecord(host=socket.gethostname(), owner=owner))
                _share(descriptor)
                return RunLock(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # whoever had it took the file away with its end: there may be another by now


def join(path: Path, owner: Owner) -> RunLock:
    """A worker's share of its owner's lock. UsageProblem if the run has another owner by now."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    record = None
    if _flock(descriptor, fcntl.LOCK_SH) is not False:
        record = _record(descriptor)
        if record is not None and record.owner == owner:
            return RunLock(descriptor)
    os.close(descriptor)
    raise _refusal(record)


def _wait_alone(descriptor: int, owner: Owner, patience: float) -> bool:
    """Whether flock said yes; False where there is none. A dead owner's workers are waited for."""
    until = time.monotonic() + patience
    while (alone := _flock(descriptor, fcntl.LOCK_EX)) is False:
        record = _record(descriptor)
        if record is None or not _is_gone(record, owner) or time.monotonic() >= until:
            raise _refusal(record)
        time.sleep(0.1)
    return alone is True


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _share(descriptor: int) -> None:
    if _flock(descriptor, fcntl.LOCK_SH) is False:  # between the two locks somebody else was quicker
        raise _refusal(_record(descriptor))


def _flock(descriptor: int, kind: int) -> bool | None:
    """True: held; False: somebody else has it; None: no flock here."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_FLOCK:
            return None
        raise
    return True


def _judge_record(record: LockRecord | None, owner: Owner, checkpoint: Path) -> None:
    if record is None:
        return
    here = record.host == socket.gethostname()
    if here and _is_gone(record, owner):
        time.sleep(_ORPHANS_END)
    elif here or _age(checkpoint) < FRESH:
        raise UsageProblem(f"{_refusal(record)}; if you know that it has ended: --steal_lock")


def _is_gone(record: LockRecord, owner: Owner) -> bool:
    """Its process has ended, or this machine was started anew since."""
    restarted = record.host == socket.gethostname() and record.owner.boot_id != owner.boot_id
    return restarted or is_dead(record.owner) is True


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _refusal(record: LockRecord | None) -> UsageProblem:
    return UsageProblem(f"the run directory is in use by {record or 'another process'}")


def _record(descriptor: int) -> LockRecord | None:
    try:
        return msgspec.json.decode(os.pread(descriptor, 4096, 0).partition(b"\n")[0], type=LockRecord)
    except msgspec.DecodeError:
        return None


def _set_record(descriptor: int, record: LockRecord) -> None:
    """Who reads meanwhile finds a whole record in the first line."""
    line = msgspec.json.encode(record) + b"\n"
    os.pwrite(descriptor, line, 0)
    os.ftruncate(descriptor, len(line))
