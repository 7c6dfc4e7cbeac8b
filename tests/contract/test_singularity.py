"""What Apptainer's sandboxes alone have to prove: their images, and how little of the machine they show."""

import asyncio
import os
import pwd
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.environments import IMAGES, bytes_of, eventually, open_sandbox, printed
from tests.contract.image_registry import foreign_shell, registry, saved
from tools.environments import singularity_images
from tools.environments.base import BackendSettings
from tools.environments.hosted import failure_of
from tools.environments.singularity import SingularityBackend, _refuse_without_limits
from tools.environments.table import load_backend
from tools.errors import EnvironmentLost, ImagePullFailed, ImageUnavailable, SandboxRefused, SetupFailed, ToolError

ROOT = Path(__file__).parents[2]
SINGULARITY = SingularityBackend()
USER = "batch-runner-test"
BOX = "batch-runner-test:box"
SHELL = str(Path(IMAGES["singularity"]).with_name("sh"))
PREPARE = """
import asyncio, sys
from tools.environments.hosted import failure_of
from tools.environments.singularity import SingularityBackend
asyncio.run(SingularityBackend().prepare(sys.argv[1]))
"""
ORDINARY = """
import asyncio, concurrent.futures.thread, os, pwd, sys  # what comes late may be out of that user's reach
import tools.environments.singularity as backend
from tests.contract.environments import IMAGES, make_spec, printed
from tools.environments.base import Limits

async def main():
    singularity = backend.SingularityBackend()
    assert await singularity.check() == ""
    await singularity.reap()
    spec = make_spec(image=IMAGES["singularity"], limits=Limits(memory_mb=300, pids=64, network="none"))
    async with singularity.open(spec) as sandbox:
        print(await printed(sandbox, sys.stdin.read()))

me = pwd.getpwnam(sys.argv[1])
os.initgroups(me.pw_name, me.pw_gid)
os.setgid(me.pw_gid)
os.setuid(me.pw_uid)
os.environ.update(HOME=me.pw_dir, USER=me.pw_name)
asyncio.run(main())
"""
TAKE_EVERYTHING = """
id -u; chown 5:5 . && mkdir locked && chmod 0 locked && chown 6:6 locked
tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '
head -c 700000000 /dev/zero 2>/dev/null | tail -c 690000000 2>&1 >/dev/null
exec python3 -c 'import os, time
try:
    while os.fork(): pass
    time.sleep(5)
except OSError as error: print(error.strerror)'
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where images are built in these tests."""
    monkeypatch.setenv("APPTAINER_CACHEDIR", str(tmp_path / "cache"))
    monkeypatch.setenv("APPTAINER_NOHTTPS", "true")
    return tmp_path / "cache" / "batch-runner"


@pytest.fixture
def calls(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for each call of the program, which waits a little first."""
    folder, log = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    log.touch()
    program = folder / "apptainer"
    program.write_text(f'#!/bin/sh\necho "$@" >>{log}\nsleep 0.5\nexec {shutil.which("apptainer")} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return log


def called(log: Path) -> list[str]:
    return log.read_text().splitlines()


def preparing(image: str) -> "subprocess.Popen[bytes]":
    """Another process that makes the image ready."""
    return subprocess.Popen([sys.executable, "-c", PREPARE, image], cwd=ROOT)


def built(cache: Path) -> list[Path]:
    return [place for place in cache.glob("*") if place.suffix != ".lock"]


async def runs(image: str) -> None:
    async with open_sandbox("singularity", image=image) as sandbox:
        assert await printed(sandbox, "echo it runs; cd /; pwd") == "it runs\n/\n"
        assert sandbox.image == image


async def test_an_image_needs_a_shell_alone(tmp_path: Path) -> None:
    await runs(SHELL)
    (tmp_path / "secret").write_bytes(b"secret")
    async with open_sandbox("singularity", image=SHELL, volumes=(f"{tmp_path}:/data",)) as sandbox:
        data = bytes(range(256)) * 1000
        await sandbox.write("b", data)
        assert await bytes_of(sandbox, "b") == await bytes_of(sandbox, "/bin/../data/../../workspace/./b") == data
        links = {"here": "b", "whole": "/workspace/b", "up": "../../../workspace/b", "out": f"{tmp_path}/secret"}
        for name, target in {**links, "in": "/data", "loop": "loop", "gone": "none/b"}.items():
            (tmp_path / name).symlink_to(target)
        assert await bytes_of(sandbox, "/data/whole") == await bytes_of(sandbox, "/data/up") == data
        assert await bytes_of(sandbox, "/data/in/in/secret") == b"secret"
        mistakes = {"out": "no such", "gone": "no such", "here": "no such", "loop": "too many", "in": "is a directory"}
        for name, message in {**mistakes, "secret/x": "no such"}.items():
            with pytest.raises(ToolError, match=message):
                await bytes_of(sandbox, f"/data/{name}")
        with pytest.raises(ToolError, match="not a regular file"):
            await bytes_of(sandbox, "/dev/null")
    with pytest.raises(EnvironmentLost):
        await bytes_of(sandbox, "b")


async def test_forms_of_an_image(cache: Path, tmp_path: Path) -> None:
    archive = await asyncio.to_thread(saved, BOX, tmp_path / "box.tar")
    packed = tmp_path / "box.sif"
    command = ["apptainer", "-s", "build", str(packed), f"docker-archive:{archive}"]
    await asyncio.to_thread(subprocess.run, command, check=True)
    forms = [str(archive), f"docker-archive:{archive}", str(packed), f"docker-daemon:{BOX}"]
    for form in forms:
        await runs(form)
    assert len(built(cache)) == 3, "the first two are one"
    os.utime(packed)
    await SINGULARITY.prepare(str(packed))
    assert len(built(cache)) == 4, "another file, another image"


async def test_an_image_of_a_registry_by_its_bare_name(cache: Path, calls: Path, tmp_path: Path) -> None:
    archive = await asyncio.to_thread(saved, BOX, tmp_path / "box.tar")
    async with registry(archive) as host:
        await runs(f"{host}/box:1")
        await runs(f"{host}/box:1")
        with pytest.raises(ImageUnavailable, match="manifest unknown"):
            await SINGULARITY.prepare(f"docker://{host}/box:none")
    await runs(f"{host}/box:1")
    pulls = [line for line in called(calls) if " build " in line]
    assert [line.rpartition(":")[2] for line in pulls] == ["1", "none"]


async def test_an_image_for_another_machine_is_refused_at_once(tmp_path: Path) -> None:
    image = tmp_path / "image"
    shutil.copytree(SHELL, image, symlinks=True)
    foreign_shell(image / "bin/sh")
    with pytest.raises(SandboxRefused, match=f"^image {image}: /bin/sh .* this machine, linux/") as caught:
        await runs(str(image))
    assert "\n" not in str(caught.value)


async def test_images_that_are_none(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for image in ("/no/such.sif", "docker-archive:/none.tar", "-x", "../none", "a b", "instance://x"):
        with pytest.raises(ImageUnavailable):
            await SINGULARITY.prepare(image)
    monkeypatch.setattr(singularity_images, "_TRIES", 1)
    with pytest.raises(ImagePullFailed, match="refused"):
        await SINGULARITY.prepare("127.0.0.1:1/box")
    assert built(cache) == []


async def test_processes_build_an_image_once(cache: Path, calls: Path) -> None:
    processes = [preparing(f"docker-daemon:{BOX}") for _ in range(4)]
    assert [await asyncio.to_thread(process.wait, 30) for process in processes] == [0] * 4
    assert len(called(calls)) == 1
    assert len(built(cache)) == 1


async def test_an_image_whose_first_builder_is_killed(cache: Path, calls: Path) -> None:
    with preparing(f"docker-daemon:{BOX}") as process:

        async def building() -> bool:
            return bool(called(calls))

        assert await eventually(building)
        process.send_signal(signal.SIGKILL)
    await runs(f"docker-daemon:{BOX}")
    assert len(called(calls)) == 2, "the build of the first, and the sandbox"
    assert len(built(cache)) == 1


async def test_a_build_has_its_time(cache: Path, calls: Path) -> None:
    with pytest.raises(ImagePullFailed, match=r"within 0\.2 s"):
        await SingularityBackend(build_seconds=0.2).prepare(f"docker-daemon:{BOX}")
    assert built(cache) == []
    await asyncio.sleep(0.6)
    assert built(cache) == [], "the program is gone"


async def test_a_cache_of_ones_own(cache: Path, tmp_path: Path) -> None:
    backend = load_backend("singularity", BackendSettings(singularity_cache=str(tmp_path / "mine")))
    await backend.prepare(f"docker-daemon:{BOX}")
    assert len(built(tmp_path / "mine")) == 1
    assert built(cache) == []


async def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("APPTAINER_CACHEDIR", str(tmp_path / "file"))
    with pytest.raises(SetupFailed, match="Not a directory"):
        await SINGULARITY.prepare(f"docker-daemon:{BOX}")


async def test_nothing_of_the_machine_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("APPTAINERENV_LEAK", "SINGULARITYENV_LEAK", "LEAK"):
        monkeypatch.setenv(name, "secret")
    for name in ("APPTAINER_BIND", "SINGULARITY_BIND", "APPTAINER_BINDPATH"):
        monkeypatch.setenv(name, f"{tmp_path}:/leak")
    async with open_sandbox("singularity") as sandbox:
        assert (await sandbox.run("env | grep secret; ls /leak 2>/dev/null", timeout=20)).output == ""
        assert await printed(sandbox, "ls -A /tmp /var/tmp ~") == "/root:\n\n/tmp:\n\n/var/tmp:\n"
        assert await printed(sandbox, "ls -A /sys; ls /dev | grep -Ec '^(vd|sd|kmsg|mem)' || :") == "0\n"
        assert int(await printed(sandbox, "ls /proc | grep -c '^[0-9]'")) < 12
        for place in ("sys/kernel/core_pattern", "sys/vm/drop_caches", "irq/default_smp_affinity"):
            assert "Read-only" in (await sandbox.run(f"echo 1 >/proc/{place}", timeout=20)).output
        assert "root" in (await sandbox.run("mount -o remount,rw /proc/sys 2>&1 || echo root", timeout=20)).output
        (held,) = [line for line in (await printed(sandbox, "cat /proc/self/status")).splitlines() if "CapBnd" in line]
        assert not int(held.split()[1], 16) & (1 << 21 | 1 << 19 | 1 << 27), "SYS_ADMIN, SYS_PTRACE, MKNOD"
        assert await printed(sandbox, "touch /usr/x f; chown 5:5 f; stat -c %u f") == "5\n"


async def test_the_image_stays_as_it_is() -> None:
    async with open_sandbox("singularity") as first:
        await printed(first, "rm -rf /usr/bin/git; echo x >/etc/new")
        async with open_sandbox("singularity") as second:
            assert await printed(second, "command -v git; ls /etc/new 2>/dev/null || :") == "/usr/bin/git\n"


def as_ordinary_user(commands: str) -> tuple[list[str], list[Path]]:
    """What they print in a sandbox of that user, and what is left of it."""
    argv = [sys.executable, "-B", "-c", ORDINARY, USER]
    done = subprocess.run(argv, check=False, cwd=ROOT, input=commands, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    user = pwd.getpwnam(USER).pw_uid
    places = [place for folder in ("/dev/shm", "/tmp") for place in Path(folder).glob("batch-sandbox-*")]
    return done.stdout.splitlines(), [place for place in places if place.exists() and place.stat().st_uid == user]


async def test_an_ordinary_user_is_root_inside_and_bounded() -> None:
    said, left = await asyncio.to_thread(as_ordinary_user, TAKE_EVERYTHING)
    assert said[:-1] == ["0", "lo", "tail: memory exhausted", "Resource temporarily unavailable"]
    assert left == []


async def test_a_container_that_is_killed_is_lost() -> None:
    async with open_sandbox("singularity") as sandbox:
        command = asyncio.create_task(sandbox.run("sleep 30", timeout=20))
        await asyncio.sleep(0.3)
        os.kill(sandbox._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(EnvironmentLost):
            await command


def test_root_without_control_groups_is_refused() -> None:
    with pytest.raises(SetupFailed, match="control groups"):
        _refuse_without_limits(has_groups=False)


async def test_a_check_that_is_cut_off_leaves_no_process(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    check = asyncio.create_task(failure_of(["sh", "-c", f"echo $$ >{told}; exec sleep 600"]))

    async def begun() -> bool:
        return told.exists() and told.read_text().endswith("\n")

    assert await eventually(begun, 30)
    check.cancel()
    await asyncio.wait({check}, timeout=30)
    assert check.cancelled()
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)


async def test_what_check_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert await SINGULARITY.check() == ""
    program = tmp_path / "singularity"
    program.write_text("#!/bin/sh\necho no such luck >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "singularity cannot make a container here (no such luck)" in await SINGULARITY.check()
    program.unlink()
    assert "neither apptainer nor singularity" in await SINGULARITY.check()
    with pytest.raises(SetupFailed, match="neither"):
        await SINGULARITY.prepare("")
