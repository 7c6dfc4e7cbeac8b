"""What is docker's own: images of every kind, limits, containers that go away, an engine that does."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiodocker
import pytest
from msgspec.structs import replace

from tools.environments.base import EnvironmentSpec, Limits
from tools.environments.docker import DOCKER, DockerBackend, is_stale
from tools.environments.owner import current_owner, encode
from tools.errors import EnvironmentLost, ImageUnavailable, SetupFailed, ToolError

PY, SH, BOX, USER = (f"batch-runner-test:{kind}" for kind in ("py", "sh", "box", "user"))


def spec(image: str = PY, task: str = "", **changes: Any) -> EnvironmentSpec:
    task = task or f"test-{os.getpid()}-{time.monotonic_ns()}"
    return EnvironmentSpec(
        task_id=task, owner=current_owner("test"), deadline=time.time() + 600, image=image, **changes
    )


@pytest.fixture
async def engine() -> AsyncIterator[aiodocker.Docker]:
    async with aiodocker.Docker() as client:
        yield client


async def containers(engine: aiodocker.Docker, task: str) -> list[dict[str, object]]:
    found = await engine.containers.list(all=1, filters=f'{{"label": ["batch-runner.task={task}"]}}')
    return [container._container for container in found]


async def gone(engine: aiodocker.Docker, task: str, seconds: float = 10) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while await containers(engine, task):  # noqa: ASYNC110 - another process removes it
                await asyncio.sleep(0.05)
            return True
    return False


@pytest.mark.parametrize("image", [SH, BOX])
async def test_an_image_needs_nothing_but_a_shell(image: str) -> None:
    data = bytes(range(256)) * 700 + b"%s\\n'\"\n"
    async with DOCKER.open(spec(image)) as sandbox:
        assert (await sandbox.run("echo $((6*7)); export A=b", timeout=20)).output == "42\n"
        assert (await sandbox.run("echo $A; read x; echo [$x]; exit 3", timeout=20)).exit_code == 3
        await sandbox.write("/workspace/a file", data)
        assert b"".join([piece async for piece in sandbox.read("/workspace/a file")]) == data
        slow = await sandbox.run("echo before; while :; do :; done", timeout=2)
        assert (slow.output, slow.exit_code, slow.timed_out) == ("before\n", 124, True)
        assert (await sandbox.run("echo $A", timeout=20)).output == "b\n"


async def test_reading_without_cat_tells_what_is_wrong_and_stays_inside() -> None:
    async with DOCKER.open(spec(SH)) as sandbox:
        for path, reason in [("none", "no such file"), ("/bin", "is a directory")]:
            with pytest.raises(ToolError, match=reason):
                await anext(aiter(sandbox.read(path)))


async def test_an_image_of_an_ordinary_user_with_an_entry_point_of_its_own() -> None:
    async with DOCKER.open(spec(USER)) as sandbox:
        result = await sandbox.run("id -un; pwd; touch here && echo $HOME; mktemp >/dev/null && echo ok", timeout=20)
        assert result.output == "agent\n/workspace\n/home/agent\nok\n"
    async with DOCKER.open(spec(USER, cwd="made/here")) as sandbox:
        assert (await sandbox.run("touch x && pwd", timeout=20)).output == "/workspace/made/here\n"


async def test_limits_hold_inside() -> None:
    limits = Limits(cpus=0.5, memory_mb=128, pids=40, network="none")
    async with DOCKER.open(spec(limits=limits)) as sandbox:
        memory = await sandbox.run("python3 -c 'x = bytearray(300_000_000)'; echo $?", timeout=60)
        assert memory.output.endswith("137\n")
        forks = await sandbox.run("for i in $(seq 60); do sleep 1 & done; wait", timeout=30)
        assert "Resource temporarily unavailable" in forks.output
        network = await sandbox.run("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '", timeout=20)
        assert network.output == "lo\n"
        busy = "import time; e = time.time() + 1\nwhile time.time() < e: pass\nprint(time.process_time() < .75)"
        assert (await sandbox.run(f'python3 -c "{busy}"', timeout=60)).output == "True\n"


async def test_volumes(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("given")
    volumes = (f"{tmp_path}:/data", f"{tmp_path}:/fixed:ro")
    async with DOCKER.open(spec(volumes=volumes)) as sandbox:
        result = await sandbox.run("cat /fixed/in; echo out >/data/out; touch /fixed/no", timeout=20)
    assert "given" in result.output
    assert "Read-only file system" in result.output
    assert (tmp_path / "out").read_text() == "out\n"


async def test_a_volume_in_place_of_the_working_directory_keeps_its_mode(tmp_path: Path) -> None:
    async with DOCKER.open(spec(PY, volumes=(f"{tmp_path}:/workspace",))) as sandbox:
        await sandbox.run("chmod 755 .", timeout=20)
    async with DOCKER.open(spec(USER, volumes=(f"{tmp_path}:/workspace",))) as sandbox:
        assert (await sandbox.run("stat -c %a .", timeout=20)).output == "755\n"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"volumes": ("/nowhere-at-all:/data",)}, "bind source path does not exist"),
        ({"volumes": ("/tmp",)}, "HOST:SANDBOX"),
        ({"limits": Limits(cpus=4096)}, "CPUs"),
    ],
)
async def test_what_the_engine_refuses_is_said_in_one_line(
    engine: aiodocker.Docker, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(SetupFailed, match=reason) as caught:
        async with DOCKER.open(spec(task="refused", **changes)):
            pass
    assert "\n" not in str(caught.value)
    assert await gone(engine, "refused")


async def test_an_image_without_a_shell_or_that_is_none(engine: aiodocker.Docker, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tar = await asyncio.create_subprocess_shell(f"tar -C {tmp_path} -c . | docker import - batch-runner-test:none")
    assert await tar.wait() == 0
    try:
        with pytest.raises(SetupFailed, match=r"none: /bin/sh does not run in it .*No such file"):
            async with DOCKER.open(spec("batch-runner-test:none", task="no-shell")):
                pass
    finally:
        await engine.images.delete("batch-runner-test:none")
    assert await gone(engine, "no-shell")
    with pytest.raises(ImageUnavailable):
        async with DOCKER.open(spec("no such image")):
            pass


async def test_labels_say_whose_it_is(engine: aiodocker.Docker) -> None:
    wanted = spec(task="labelled")
    async with DOCKER.open(wanted):
        (container,) = await containers(engine, "labelled")
    labels = container["Labels"]
    assert isinstance(labels, dict)
    assert labels["batch-runner.run"] == "test"
    assert labels["batch-runner.owner"] == encode(wanted.owner)
    assert float(labels["batch-runner.deadline"]) == pytest.approx(wanted.deadline, abs=1)


@pytest.mark.parametrize("after", [0.0, 0.005, 0.02, 0.1, 0.2, 0.5])
async def test_cancelled_at_any_moment_it_leaves_nothing(engine: aiodocker.Docker, after: float) -> None:
    task = f"cancelled-{after}"

    async def work() -> None:
        async with DOCKER.open(spec(task=task)) as sandbox:
            await sandbox.run("sleep 60", timeout=60)

    running = asyncio.ensure_future(work())
    await asyncio.sleep(after)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not await containers(engine, task)


async def test_an_exception_inside_leaves_nothing(engine: aiodocker.Docker) -> None:
    async def work() -> None:
        async with DOCKER.open(spec(task="raised")) as sandbox:
            await sandbox.run("sleep 60 &", timeout=10)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await work()
    assert not await containers(engine, "raised")


_OWNER = """
import asyncio, sys, time
from tools.environments.base import EnvironmentSpec
from tools.environments.docker import DOCKER
from tools.environments.owner import current_owner

async def main():
    spec = EnvironmentSpec(task_id=sys.argv[1], owner=current_owner("r"), deadline=time.time() + 600, image=sys.argv[2])
    async with DOCKER.open(spec) as sandbox:
        if "background" in sys.argv:
            await sandbox.run("setsid sleep 1000 & setsid sh -c 'trap : TERM HUP; sleep 1000' &", timeout=10)
        print("open", flush=True)
        await sandbox.run("trap '' TERM HUP; sleep 1000", timeout=1000)

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("what", ["background", "foreground"])
async def test_the_container_goes_with_its_owner(engine: aiodocker.Docker, number: signal.Signals, what: str) -> None:
    task = f"orphan-{number.name}-{what}"
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _OWNER, task, PY, what, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert owner.stdout
    assert await owner.stdout.readline() == b"open\n"
    assert await containers(engine, task)
    owner.send_signal(number)
    await owner.wait()
    assert await gone(engine, task)  # without anybody's `reap`


async def test_reap_removes_what_dead_owners_left_and_nothing_else(engine: aiodocker.Docker) -> None:
    ours, now = current_owner("r"), time.time()
    dead = await asyncio.create_subprocess_exec("true")
    await dead.wait()
    owners = {
        "dead": (replace(ours, pid=dead.pid), now + 600),
        "late": (ours, now - 1),
        "other-boot": (replace(ours, pid=dead.pid, boot_id="x"), now + 600),
        "alive": (ours, now + 600),
    }
    made = {}
    for name, (owner, deadline) in owners.items():
        labels = {"batch-runner.owner": encode(owner), "batch-runner.deadline": str(deadline)}
        made[name] = await engine.containers.create(
            {"Image": SH, "Cmd": ["/bin/sh"], "Labels": {**labels, "batch-runner.task": f"reap-{name}"}}
        )
    try:
        await DOCKER.reap()  # perhaps another test's came first
        left = {name for name in owners if await containers(engine, f"reap-{name}")}
        assert left == {"other-boot", "alive"}
    finally:
        for name in ("other-boot", "alive"):
            await made[name].delete(force=True)


def test_labels_that_nobody_understands_are_left_alone() -> None:
    assert not is_stale({}, 0)
    assert not is_stale({"batch-runner.deadline": "soon", "batch-runner.owner": "x"}, 0)
    assert not is_stale({"batch-runner.deadline": "9e9", "batch-runner.owner": "x"}, 0)


@pytest.mark.parametrize("how", ["kill", "remove"])
async def test_a_container_that_went_away_is_lost_not_made_again(engine: aiodocker.Docker, how: str) -> None:
    task = f"lost-{how}"
    async with DOCKER.open(spec(task=task)) as sandbox:
        await sandbox.run("touch here", timeout=10)
        container = engine.containers.container(str((await containers(engine, task))[0]["Id"]))
        await (container.kill() if how == "kill" else container.delete(force=True))
        for _ in range(2):
            with pytest.raises(EnvironmentLost):
                await sandbox.run("ls", timeout=10)
        with pytest.raises(EnvironmentLost):
            await sandbox.write("x", b"")
        with pytest.raises(EnvironmentLost):
            await sandbox.start("cat")
    assert await gone(engine, task)


async def test_a_container_killed_under_a_command_is_lost() -> None:
    async with DOCKER.open(spec()) as sandbox:
        with pytest.raises(EnvironmentLost):
            await sandbox.run("kill -KILL $(pgrep -x sh); sleep 30", timeout=30)


async def test_a_command_that_ends_every_shell_harms_nobody() -> None:
    async with DOCKER.open(spec()) as sandbox:
        assert (await sandbox.run("export A=1; pkill -x sh; pkill -HUP -x sh; true", timeout=10)).exit_code == 0
        assert (await sandbox.run("echo $A", timeout=10)).output == "1\n"


async def test_a_reader_that_stops_early_leaves_nothing_running() -> None:
    async with DOCKER.open(spec()) as sandbox:
        before = await sandbox.run("truncate -s 20G big; pgrep -cx cat", timeout=10)
        reader = aiter(sandbox.read("big"))
        assert len(await anext(reader)) > 0
        await reader.aclose()  # type: ignore[attr-defined]
        assert (await sandbox.run("sleep 0.3; pgrep -cx cat", timeout=10)).output == before.output


async def test_stdin_of_a_process_ends_when_it_is_closed() -> None:
    async with DOCKER.open(spec()) as sandbox:
        process = await sandbox.start("wc -c")
        await process.write(b"\0" * 100_000)
        await process.close_stdin()
        assert await process.wait(10) == 0
        assert process.output() == "100000\n"


async def test_without_an_engine_everything_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for host in (f"unix://{tmp_path}/none", "tcp://127.0.0.1:1", "nonsense"):
        monkeypatch.setenv("DOCKER_HOST", host)
        problem = await DockerBackend().check()
        assert problem.startswith("DOCKER_HOST" if host == "nonsense" else "docker is not running: start it")
        assert "\n" not in problem
        assert await DockerBackend().reap() == 0
        with pytest.raises((EnvironmentLost, SetupFailed)):
            async with DockerBackend().open(spec()):
                pass


async def test_an_engine_that_does_not_answer_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/deaf")
    silence, closed = asyncio.Event(), asyncio.Event()

    async def never(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await silence.wait()
        writer.close()
        await writer.wait_closed()
        closed.set()

    async with await asyncio.start_unix_server(never, tmp_path / "deaf"):
        begun = time.monotonic()
        assert "no answer within 10 s" in await DockerBackend().check()
        assert time.monotonic() - begun < 30
        silence.set()
        await closed.wait()


async def test_an_engine_that_dies_loses_the_environment(
    engine: aiodocker.Docker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = await asyncio.create_subprocess_exec(sys.executable, "-c", _PROXY, f"{tmp_path}/engine", stdout=-1)
    assert proxy.stdout
    await proxy.stdout.readline()
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/engine")
    async with DockerBackend().open(spec(task="engine-dies")) as sandbox:
        waiting = asyncio.ensure_future(sandbox.run("sleep 30", timeout=30))
        await asyncio.sleep(0.2)
        proxy.kill()
        await proxy.wait()
        with pytest.raises(EnvironmentLost):
            await waiting
        with pytest.raises(EnvironmentLost):
            await sandbox.run("echo", timeout=5)
    assert await gone(engine, "engine-dies")  # its stdin ended


_PROXY = """
import asyncio, sys
async def pump(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
async def serve(reader, writer):
    upstream = await asyncio.open_unix_connection("/var/run/docker.sock")
    await asyncio.gather(pump(reader, upstream[1]), pump(upstream[0], writer), return_exceptions=True)
async def main():
    server = await asyncio.start_unix_server(serve, sys.argv[1])
    print("ready", flush=True)
    await server.serve_forever()
asyncio.run(main())
"""
