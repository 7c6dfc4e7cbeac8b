"""Nothing of a sandbox is left, however it ended."""

import asyncio
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.contract.environments import BACKENDS, backend_of, eventually, open_sandbox, printed
from tools.environments import hosted
from tools.environments.hosted import Record, remove_tree
from tools.environments.table import load_backend
from tools.errors import EnvironmentLost, SetupFailed

ROOT = Path(__file__).parents[2]

HOLDER = """
import asyncio, os, sys
from tools.environments import hosted
from tests.contract.environments import open_sandbox, printed

async def main(name, seconds):
    async with open_sandbox(name) as sandbox:
        await sandbox.start(f"setsid sleep {seconds}")
        await printed(sandbox, f"setsid sleep {seconds} >/dev/null 2>&1 &")
        command = asyncio.create_task(sandbox.run(f"sleep {seconds}", timeout=60))
        await asyncio.sleep(0.3)
        print("ready", flush=True)
        await command

hosted._MEMORY = os.environ["TMPDIR"]
asyncio.run(main(*sys.argv[1:]))
"""


def left_over(seconds: str) -> int:
    """Processes on this machine, in any sandbox, that sleep so long."""
    count = 0
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            count += place.read_bytes() == f"sleep\0{seconds}\0".encode()
        except OSError:
            continue
    return count


async def gone(seconds: str) -> bool:
    async def none_left() -> bool:
        return not left_over(seconds)

    return await eventually(none_left)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the sandboxes of these tests have their folders, and nobody else's."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(hosted, "_MEMORY", str(tmp_path))
    return tmp_path


def names(folder: Path) -> list[str]:
    return [place.name for place in folder.iterdir()]


def places_of(folder: Path) -> list[Path]:
    records = [msgspec.json.decode(place.read_bytes(), type=Record) for place in folder.glob("*/owner")]
    return [Path(place) for record in records for place in (*record.cgroup, *record.folders)]


@pytest.fixture
def seconds() -> str:
    return f"{random.randrange(10**4, 10**6)}.25"


@pytest.fixture
def holder(backend_name: str, seconds: str, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that holds a sandbox in which three programs run."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, backend_name, seconds],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
        process.kill()


async def test_after_success_and_exception(backend_name: str, seconds: str, folder: Path) -> None:
    for fault in (True, False):
        with suppress(ZeroDivisionError):
            async with open_sandbox(backend_name) as sandbox:
                await printed(sandbox, f"mkdir -m 0 locked; setsid sleep {seconds} & (sleep {seconds} &)")
                await sandbox.start(f"sleep {seconds}")
                places = places_of(folder)
                1 / fault
        assert await gone(seconds)
        assert not any(place.exists() for place in places)
        assert names(folder) == []


async def test_after_cancellation(backend_name: str, seconds: str, folder: Path) -> None:
    async def hold() -> None:
        async with open_sandbox(backend_name) as sandbox:
            await sandbox.run(f"sleep {seconds}", timeout=60)

    for delay in (0.0, 0.002, 0.02, 0.05, 0.5):
        task = asyncio.create_task(hold())
        await asyncio.sleep(delay)
        task.cancel()
        await asyncio.wait({task}, timeout=15)
        assert task.cancelled()
    assert await gone(seconds)
    assert names(folder) == []


async def test_after_sigint(holder: "subprocess.Popen[bytes]", seconds: str, folder: Path) -> None:
    holder.send_signal(signal.SIGINT)
    await asyncio.to_thread(holder.wait, 20)
    assert await gone(seconds)
    assert names(folder) == []


async def test_after_sigkill(backend_name: str, holder: "subprocess.Popen[bytes]", seconds: str, folder: Path) -> None:
    backend, places = backend_of(backend_name), places_of(folder)
    await backend.reap()
    assert left_over(seconds) == 3, "a living owner's sandbox is not touched"
    holder.kill()
    await asyncio.to_thread(holder.wait, 20)
    if backend_name == "bubblewrap":
        assert await gone(seconds), "it ends with its owner"
    reaped = await backend.reap()
    assert backend_name in ("docker", "podman") or reaped == 1, "an engine removes such a container by itself"
    assert await gone(seconds)
    assert not any(place.exists() for place in places)
    assert names(folder) == []


@pytest.mark.parametrize("name", BACKENDS)
async def test_past_its_deadline(name: str) -> None:
    backend, of_an_engine = backend_of(name), name in ("docker", "podman")  # which other tests have too
    try:
        async with open_sandbox(name, deadline=time.time() - 1) as sandbox:
            assert await backend.reap() >= 1 or of_an_engine
            with pytest.raises(EnvironmentLost):
                await sandbox.run("true", timeout=5)
    except (SetupFailed, EnvironmentLost):
        assert of_an_engine, "another test's `reap` came before ours"


async def test_a_killed_sandbox_is_lost() -> None:
    async with open_sandbox("bubblewrap") as sandbox:
        command = asyncio.create_task(sandbox.run("sleep 30", timeout=20))
        await asyncio.sleep(0.3)
        (bwrap,) = [child.pid for child in psutil.Process().children() if child.name() == "bwrap"]
        os.kill(bwrap, signal.SIGKILL)
        with pytest.raises(EnvironmentLost):
            await command


@pytest.mark.parametrize("name", ["local", "bubblewrap"])
async def test_many_at_once_leak_nothing(name: str) -> None:
    async def use(number: int) -> str:
        async with open_sandbox(name) as sandbox:
            await printed(sandbox, f"export N={number}; sleep 0.2")
            return await printed(sandbox, "echo $N")

    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - it counts itself too, both times
    assert await asyncio.gather(*(use(number) for number in range(60))) == [f"{number}\n" for number in range(60)]
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208 - as above


def test_removing_a_folder_touches_nothing_beside_it(folder: Path) -> None:
    (folder / "box" / "locked" / "inner").mkdir(parents=True)
    (folder / "box" / "locked").chmod(0)
    (folder / "kept").mkdir(mode=0o755)
    (folder / "box" / "out").symlink_to(folder / "kept")
    folder.chmod(0o755)
    remove_tree(folder / "box")
    remove_tree(folder / "never")
    assert names(folder) == ["kept"]
    assert [stat.S_IMODE(place.stat().st_mode) for place in (folder, folder / "kept")] == [0o755, 0o755]


def test_the_record_stays_with_what_cannot_be_removed(folder: Path) -> None:
    box = folder / "box"
    (box / "a").mkdir(parents=True)
    (box / "owner").write_text("the record")
    subprocess.run(["mount", "-t", "tmpfs", "none", str(box / "a")], check=True)
    try:
        remove_tree(box)
        assert sorted(names(box)) == ["a", "owner"]
    finally:
        subprocess.run(["umount", str(box / "a")], check=True)
    remove_tree(box)
    assert names(folder) == []


@pytest.mark.parametrize("age", [0, 100])
@pytest.mark.parametrize("empty", [True, False])
async def test_what_died_before_it_had_a_record_is_removed_once_it_is_old(age: int, empty: bool, folder: Path) -> None:
    bare = Path(tempfile.mkdtemp(prefix="batch-sandbox-"))
    if empty:
        (bare / "owner").touch()
    os.utime(bare, (time.time() - age, time.time() - age))
    await load_backend("local").reap()
    assert (bare.name in names(folder)) == (age == 0)
