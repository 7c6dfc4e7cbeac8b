"""What a sandbox may use and see."""

import os
from pathlib import Path

import pytest

from tests.contract.environments import (
    BACKENDS,
    ISOLATING,
    LEAST_MEMORY,
    MOUNTING,
    UNCOUNTED,
    bytes_of,
    open_sandbox,
    printed,
)
from tools.environments.base import Limits
from tools.errors import SetupFailed, ToolError

FORK = """
import os, signal, sys, time
children = []
try:
    for _ in range(500):
        child = os.fork()
        if not child:
            time.sleep(60)
        children.append(child)
except OSError as error:
    print(error.strerror, len(children))
if sys.argv[1:] != ["leave"]:
    for child in children:
        os.kill(child, signal.SIGKILL)
"""


async def test_memory(backend_name: str) -> None:
    memory = LEAST_MEMORY.get(backend_name, 100)
    async with open_sandbox(backend_name, limits=Limits(memory_mb=memory)) as sandbox:
        hungry = f"head -c {3 * memory}M /dev/zero | tail -c {2 * memory}M >/dev/null; echo ${{PIPESTATUS[1]}}"
        assert (await printed(sandbox, hungry, timeout=60)).endswith("137\n")
        assert await printed(sandbox, "echo usable") == "usable\n"


@pytest.mark.parametrize("backend_name", [name for name in BACKENDS if name not in UNCOUNTED], indirect=True)
async def test_processes(backend_name: str) -> None:
    async with open_sandbox(backend_name, limits=Limits(pids=64, memory_mb=1024)) as sandbox:
        await sandbox.write("fork.py", FORK.encode())
        reason, count = (await printed(sandbox, "python3 fork.py")).rsplit(" ", 1)
        assert reason == "Resource temporarily unavailable"
        assert 30 < int(count) < 64
        assert await printed(sandbox, "echo usable") == "usable\n"


@pytest.mark.parametrize("name", ["local", "bubblewrap", "singularity"])
async def test_a_full_process_table_does_not_lose_the_sandbox(name: str) -> None:
    async with open_sandbox(name, limits=Limits(pids=64, memory_mb=1024)) as sandbox:
        await sandbox.write("fork.py", FORK.encode())
        result = await sandbox.run("python3 fork.py leave", timeout=20)
        assert "unavailable" in result.output
        assert await printed(sandbox, "echo usable") == "usable\n"


@pytest.mark.parametrize("backend_name", [name for name in BACKENDS if name not in LEAST_MEMORY], indirect=True)
async def test_cpu(backend_name: str) -> None:
    spin = "import time; e = time.time() + 1\nwhile time.time() < e: pass\nprint(time.process_time())"
    async with open_sandbox(backend_name, limits=Limits(cpus=0.3, memory_mb=1024)) as sandbox:
        await sandbox.write("spin.py", spin.encode())
        assert float(await printed(sandbox, "python3 spin.py")) < 0.6


@pytest.mark.parametrize("name", ISOLATING)
async def test_no_network(name: str) -> None:
    names = "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '"
    async with open_sandbox(name, limits=Limits(network="none", memory_mb=1024)) as sandbox:
        interfaces = set((await printed(sandbox, names)).split())
        assert "lo" in interfaces
        assert not any(interface.startswith(("eth", "en")) for interface in interfaces)


async def test_local_refuses_what_it_cannot_do() -> None:
    refused: list[dict[str, object]] = [
        {"limits": Limits(network="none")},
        {"volumes": ("/usr:/mnt",)},
        {"cwd": "/no/such/place"},
    ]
    for changes in refused:
        with pytest.raises(SetupFailed, match=r"the local backend"):
            async with open_sandbox("local", **changes):
                pass


@pytest.mark.parametrize("name", MOUNTING)
async def test_volumes(name: str, tmp_path: Path) -> None:
    for folder in ("in", "out"):
        (tmp_path / folder).mkdir()
    (tmp_path / "in" / "f").write_text("given")
    volumes = (f"{tmp_path}/in:/data/in:ro", f"{tmp_path}/out:/data/out")
    async with open_sandbox(name, volumes=volumes) as sandbox:
        assert await printed(sandbox, "cat /data/in/f; cp /data/in/f /data/out/g") == "given"
        with pytest.raises(ToolError, match="read-only"):
            await sandbox.write("/data/in/new", b"x")
    assert (tmp_path / "out" / "g").read_text() == "given"
    with pytest.raises(SetupFailed):
        async with open_sandbox(name, volumes=(f"{tmp_path}/none:/data",)):
            pass


async def test_bubblewrap_shows_a_small_view() -> None:
    async with open_sandbox("bubblewrap") as sandbox:
        assert await printed(sandbox, "ls / | tr '\\n' ' '") in (
            "bin dev etc home lib lib32 lib64 libx32 proc run sbin tmp usr workspace ",
            "bin dev etc home lib lib64 proc run sbin tmp usr workspace ",
        )
        assert await printed(sandbox, "id -u; ls /tmp ~ /workspace") == "1000\n/home/user:\n\n/tmp:\n\n/workspace:\n"
        assert (await sandbox.run("touch /usr/x /etc/x /x", timeout=20)).exit_code == 1
        assert "CapEff:\t0000000000000000" in await printed(sandbox, "cat /proc/self/status")
        assert int(await printed(sandbox, "ls /proc | grep -c '^[0-9]'")) < 12


async def test_bubblewrap_makes_a_working_directory_anywhere() -> None:
    async with open_sandbox("bubblewrap", cwd="/repo/src") as sandbox:
        assert await printed(sandbox, "touch here; pwd") == "/repo/src\n"


async def test_bubblewrap_bears_a_signal_to_every_shell() -> None:
    async with open_sandbox("bubblewrap") as sandbox:
        await sandbox.run("export A=1; for p in /proc/[0-9]*; do kill -TERM ${p#/proc/}; done", timeout=20)
        await sandbox.run("for p in /proc/[0-9]*; do [ $p = /proc/1 ] || kill -TERM ${p#/proc/}; done", timeout=20)
        assert await printed(sandbox, "echo usable") == "usable\n"


async def test_bubblewrap_resolves_no_link_outside(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    async with open_sandbox("bubblewrap") as sandbox:
        await printed(sandbox, f"ln -s {tmp_path}/secret s; ln -s {tmp_path}/new n")
        with pytest.raises(ToolError, match="no such file"):
            await bytes_of(sandbox, "s")
        with pytest.raises(ToolError):
            await sandbox.write("n", b"x")
    assert os.listdir(tmp_path) == ["secret"]  # noqa: PTH208 - names are all it asks
