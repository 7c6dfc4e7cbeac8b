import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec
import pytest

from batch.lock import LockRecord
from batch.store import RunDirectory
from tools.environments.base import Owner
from tools.environments.owner import current_owner
from tools.errors import UsageProblem

HOLDER = """
import sys
from pathlib import Path
import msgspec
from batch.store import RunDirectory
from tools.environments.base import Owner
from tools.environments.owner import current_owner
directory = RunDirectory(Path(sys.argv[1]))
if len(sys.argv) > 2:
    lock = directory.join(msgspec.json.decode(sys.argv[2], type=Owner))
else:
    lock = directory.own(current_owner("r"))
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(directory: RunDirectory, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has the lock, as owner or as worker, until it is killed."""
    command = [sys.executable, "-c", HOLDER, str(directory.path), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def here() -> Owner:
    return current_owner("r")


def record(directory: RunDirectory) -> LockRecord:
    return msgspec.json.decode(directory.lock_path.read_bytes(), type=LockRecord)


def test_the_record_says_who_owns_the_run(directory: RunDirectory) -> None:
    lock = directory.own(here())
    assert record(directory) == LockRecord(host=socket.gethostname(), owner=here())
    lock.release()
    lock.release()


def test_a_second_process_is_refused_by_pid_and_host(directory: RunDirectory) -> None:
    with holder(directory) as process, pytest.raises(UsageProblem) as refused:
        directory.own(here())
    assert f"process {process.pid} on {socket.gethostname()}" in str(refused.value)


def test_an_owner_that_was_killed_leaves_the_run_free(directory: RunDirectory) -> None:
    with holder(directory) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        directory.own(here()).release()


def test_the_record_can_be_read_while_it_is_written(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.path.mkdir()
    directory.lock_path.write_bytes(msgspec.json.encode(LockRecord(host="x" * 500, owner=here())) + b"\n")
    read: list[bytes] = []
    truncate = os.ftruncate

    def watched(descriptor: int, length: int) -> None:
        read.append(directory.lock_path.read_bytes())
        truncate(descriptor, length)
        read.append(directory.lock_path.read_bytes())

    monkeypatch.setattr(os, "ftruncate", watched)
    directory.own(here()).release()
    now = LockRecord(host=socket.gethostname(), owner=here())
    assert [msgspec.json.decode(each.split(b"\n")[0], type=LockRecord) for each in read] == [now, now]
    assert len(read[1]) < len(read[0])


def test_a_record_with_the_rest_of_a_longer_one_is_read(directory: RunDirectory) -> None:
    owner = here()
    lock = directory.own(owner)
    with directory.lock_path.open("ab") as file:
        file.write(b'end of a longer one"}\n')
    directory.join(owner).release()
    lock.release()


def test_a_released_run_is_free(directory: RunDirectory) -> None:
    directory.own(here()).release()
    with holder(directory):
        pass


def test_a_worker_shares_the_lock_and_outlives_its_owner(directory: RunDirectory) -> None:
    owner = here()
    lock = directory.own(owner)
    with holder(directory, msgspec.json.encode(owner).decode()):
        lock.release()
        with pytest.raises(UsageProblem, match="in use"):
            directory.own(owner)


def test_a_dead_owners_worker_is_waited_for(directory: RunDirectory) -> None:
    with holder(directory) as owner:
        recorded = record(directory).owner
        with holder(directory, msgspec.json.encode(recorded).decode()) as worker:
            owner.kill()
            owner.wait()
            with pytest.raises(UsageProblem, match=f"process {recorded.pid}"):
                directory.own(here(), patience=0.3)
            worker_end = _kill_later(worker, 0.4)
            began = time.monotonic()
            directory.own(here(), patience=10).release()
            assert 0.2 < time.monotonic() - began < 8
            worker_end.wait()


def _kill_later(process: subprocess.Popen[str], seconds: float) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds}; kill -9 {process.pid}"])


def test_a_worker_of_a_former_owner_is_refused(directory: RunDirectory) -> None:
    lock = directory.own(here())
    former = msgspec.structs.replace(here(), pid=1)
    with pytest.raises(UsageProblem, match="in use"):
        directory.join(former)
    directory.join(here()).release()
    lock.release()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageProblem, match="cannot be written"):
        RunDirectory(tmp_path / "file" / "run").own(here())


def test_a_lock_file_that_was_taken_away_is_not_locked(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    removed: list[int] = []

    def remove_first(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append(descriptor)
            directory.lock_path.unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    lock = directory.own(here())
    assert record(directory).owner == here()
    lock.release()


# --- a file system without flock


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int | IO[bytes], operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


Change = Callable[[LockRecord], LockRecord]


def elsewhere(record: LockRecord) -> LockRecord:
    return msgspec.structs.replace(record, host="elsewhere")


def dead(record: LockRecord) -> LockRecord:
    return msgspec.structs.replace(record, owner=msgspec.structs.replace(record.owner, start_time=1))


def restarted(record: LockRecord) -> LockRecord:
    return msgspec.structs.replace(record, owner=msgspec.structs.replace(record.owner, boot_id="another"))


def contained(record: LockRecord) -> LockRecord:
    return msgspec.structs.replace(record, owner=msgspec.structs.replace(record.owner, pid_namespace="pid:[1]"))


@pytest.mark.usefixtures("no_flock")
@pytest.mark.parametrize(
    ("change", "checkpoint_age", "free"),
    [
        (lambda record: record, None, False),
        (dead, 0, True),
        (restarted, 0, True),
        (contained, None, False),
        (elsewhere, 0, False),
        (elsewhere, 61, True),
        (elsewhere, None, True),
    ],
)
def test_without_flock_the_record_decides(
    directory: RunDirectory, change: Change, checkpoint_age: float | None, free: bool
) -> None:
    directory.path.mkdir()
    before = change(LockRecord(host=socket.gethostname(), owner=here()))
    directory.lock_path.write_bytes(msgspec.json.encode(before))
    if checkpoint_age is not None:
        directory.checkpoint_path.write_text("{}")
        written = time.time() - checkpoint_age
        os.utime(directory.checkpoint_path, (written, written))
    if free:
        directory.own(here()).release()
    else:
        with pytest.raises(UsageProblem, match="in use by process"):
            directory.own(here())
        directory.own(here(), steal=True).release()
    assert record(directory).owner == here()


def test_a_damaged_record_is_no_owner(directory: RunDirectory) -> None:
    directory.path.mkdir()
    directory.lock_path.write_bytes(b'{"host"')
    directory.own(here()).release()
    assert json.loads(directory.lock_path.read_bytes())["host"] == socket.gethostname()
