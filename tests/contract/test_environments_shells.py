"""Channels work with any POSIX shell: dash, busybox and bash as `sh`, with a bash for the commands or without."""

import functools
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.environments import bytes_of, make_spec, printed
from tools.environments.channel import Channel, base_variables
from tools.environments.hosted import end_process, shell_channel
from tools.environments.shell import ShellEnvironment
from tools.errors import ToolError

SHELLS = ("dash", "busybox", "bash")
PROGRAMS = ("cat", "cut", "env", "head", "mkdir", "mkfifo", "ln", "rm", "seq", "setsid", "sleep", "stat", "true", "wc")


@pytest.fixture(params=SHELLS)
def programs(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder for PATH: the shell as `sh`, no `bash`, and a few programs, busybox's own where it is the shell."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", *PROGRAMS):
        source = shutil.which(request.param if name == "sh" or request.param == "busybox" else name)
        assert source, name
        (folder / name).symlink_to(source)
    return folder


@pytest.fixture
async def plain(programs: Path, tmp_path: Path) -> AsyncIterator[ShellEnvironment]:
    (tmp_path / "state").mkdir()

    def spawn() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            ["sh"],
            executable=programs / "sh",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            env={"PATH": str(programs)},
            cwd=tmp_path,
            start_new_session=True,
        )

    async def open_channel() -> Channel:
        process = spawn()
        return shell_channel(process, functools.partial(end_process, process))

    environment = ShellEnvironment(
        make_spec(),
        backend="plain",
        image="",
        cwd="work",
        private=f"{tmp_path}/state/",
        variables=base_variables(home=str(tmp_path), temp=str(tmp_path)),
        open_channel=open_channel,
    )
    await environment.enter()
    yield environment
    await environment._kill(f"{environment.token}.")
    await environment.leave()


async def test_commands_and_state(plain: ShellEnvironment) -> None:
    text = 'a\'b\n"$HOME" \\ ü'
    result = await plain.run(
        f"export KEPT='{text.replace(chr(39), chr(39) + chr(92) + chr(39) * 2)}'; cd /; exit 3", timeout=20
    )
    assert (result.output, result.exit_code) == ("", 3)
    assert await printed(plain, 'printf %s "$KEPT"; pwd; echo "$#[$*]"') == text + "/\n0[]\n"
    assert await printed(plain, "trap 'echo bye' EXIT; cd /usr; set -C") == "bye\n"
    assert await printed(plain, "pwd; cat") == "/usr\n"
    assert (await plain.run("if", timeout=20)).exit_code == 2
    assert (await plain.run("kill -9 $$", timeout=20)).exit_code == 137
    long = "x" * 300_000
    assert await printed(plain, f"cat <<'END' | wc -c\n{long}\nEND\nexport L=1; cd /") == "300001\n"
    assert await printed(plain, "pwd; echo $L") == "/\n1\n"


async def test_any_byte_goes_in_and_out(plain: ShellEnvironment) -> None:
    data = bytes(range(256)) * 300
    assert await plain.write("made/-x'y\n", data) is True
    assert await bytes_of(plain, "made/-x'y\n") == data
    assert [(entry.name, entry.kind, entry.size) for entry in await plain.list("made")] == [
        ("-x'y\n", "file", len(data))
    ]
    await plain.delete("made/-x'y\n")
    assert await plain.list("made") == []
    for attempt in (plain.delete("none"), plain.list("none"), plain.write("made", b""), bytes_of(plain, "made")):
        with pytest.raises(ToolError, match=r"no such file|is a directory"):
            await attempt


async def test_a_timeout_kills_and_background_processes_live(plain: ShellEnvironment) -> None:
    result = await plain.run("sleep 1234.75 & echo $!", timeout=20)
    assert result.background
    background = int(result.output)
    result = await plain.run("echo said; setsid sleep 1235.75 & sleep 1235.75", timeout=2)
    assert (result.output, result.exit_code) == ("said\n", 124)
    assert not await plain._alive(f"{plain.token}.2.")
    assert await plain._alive(f"{plain.token}.1.")
    os.kill(background, 0)


async def test_started_processes(plain: ShellEnvironment) -> None:
    process = await plain.start('read a; echo "<$a>"; cat; exit 4')
    await process.write(b"one\ntwo\n")
    await process.close_stdin()
    assert await process.wait(10) == 4
    assert process.output() == "<one>\ntwo\n"
    sleeper = await plain.start("sleep 1236.75")
    await sleeper.kill()
    assert sleeper.exit_code() == 137
