"""What is true of Daytona alone: the account, what is asked of the service, terminals as channels, and its faults."""

import asyncio
import random
import re
import socket
import time
from collections.abc import Iterator

import pytest

from tests.contract.daytona_server import DaytonaServer, shared
from tests.contract.environments import bytes_of, eventually, make_spec, open_sandbox, printed
from tests.contract.no_service import answering
from tests.contract.test_environments_end import left_over
from tools.environments import daytona, daytona_channel, daytona_script
from tools.environments.base import Limits
from tools.environments.daytona import DAYTONA, is_stale
from tools.environments.daytona_script import Chunks, Facts, frames, read_facts, ready, unbounded
from tools.environments.owner import LABEL, current_owner, encode
from tools.errors import EnvironmentLost, ImagePullFailed, ImageUnavailable, SandboxRefused, SetupFailed, SetupTimeout


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[DaytonaServer]:
    """The stand-in that all tests share, also with `--live`: what goes wrong here cannot be had of the service."""
    server = shared()
    for name, value in server.variables().items():
        monkeypatch.setenv(name, value)
    yield server
    server.set_faults()


@pytest.fixture
def seconds() -> str:
    return f"{random.randrange(10**4, 10**6)}.375"


# the account


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("DAYTONA_API_KEY", "", "daytona needs a key: set DAYTONA_API_KEY .made at https"),
        ("DAYTONA_API_KEY", "wrong", r"daytona: http.* refuses the key in DAYTONA_API_KEY \(.*Invalid credentials\)$"),
        ("DAYTONA_API_URL", "http://127.0.0.1:PORT/api", "daytona: http.* cannot be reached or does not answer"),
    ],
)
async def test_check_says_how_to_mend(
    server: DaytonaServer, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    assert await DAYTONA.check() == ""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv(name, value.replace("PORT", str(nobody.getsockname()[1])))
        problem = await DAYTONA.check()
        assert re.search(words, problem)
        assert "\n" not in problem
        with pytest.raises(SetupFailed, match=words):
            async with DAYTONA.open(make_spec()):
                pass
        assert await DAYTONA.reap() == 0


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (502, b"<html>Bad Gateway</html>", "status 502"),
        (502, "café".encode("latin-1"), "status 502"),
        (500, b"", "status 500"),
        (404, b"nothing here", "status 404"),
        (200, b"{}", "not what its API says"),
    ],
)
async def test_what_is_not_the_service_is_named_as_such(
    server: DaytonaServer, monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, words: str
) -> None:
    async with answering(status, "application/json" if status == 200 else "text/html", body) as port:
        url = f"http://127.0.0.1:{port}/registry/api"  # the word is not about an image
        monkeypatch.setenv("DAYTONA_API_URL", url)
        expected = f"daytona: {url} does not answer as the service ({words}): is it up, and DAYTONA_API_URL right?"
        assert await DAYTONA.check() == expected
        with pytest.raises(SetupFailed, match=re.escape(expected)):
            async with DAYTONA.open(make_spec()):
                pass


async def test_check_does_not_wait_for_ever(server: DaytonaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daytona, "_CHECK_SECONDS", 0.5)
    monkeypatch.setattr(daytona, "_REAP_SECONDS", 0.5)
    server.set_faults(stall=True)
    assert "does not answer" in await DAYTONA.check()
    assert await DAYTONA.reap() == 0


# what is asked of the service


async def test_limits_are_rounded_up_and_the_service_ends_it_by_itself(server: DaytonaServer) -> None:
    spec = make_spec(limits=Limits(cpus=1.2, memory_mb=1025, network="none"), deadline=time.time() + 3600)
    async with DAYTONA.open(spec):
        asked = server.requests()[-1]
        assert (asked["cpu"], asked["memory"], asked["networkBlockAll"]) == (2, 2, True)
        assert (asked["autoStopInterval"], asked["autoDeleteInterval"]) == (0, 0)
        assert 60 < asked["ttlMinutes"] <= 71
        assert asked["labels"][LABEL] == encode(spec.owner)
        assert asked["labels"]["batch-runner.task"] == "task_0"
        assert asked["name"] in server.sandboxes()
    assert asked["name"] not in server.sandboxes()


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"volumes": ("/usr:/mnt",)}, "no volumes"), ({"limits": Limits(network="mine")}, "no network 'mine'")],
)
async def test_what_it_cannot_do_is_refused(server: DaytonaServer, changes: dict[str, object], words: str) -> None:
    with pytest.raises(SandboxRefused, match=words):
        async with open_sandbox("daytona", **changes):
            pass


async def test_root_whom_no_limit_of_processes_binds_is_refused(server: DaytonaServer) -> None:
    server.set_faults(root=True)
    before = server.sandboxes()
    with pytest.raises(SandboxRefused, match="cannot limit the number of processes in this sandbox: its user is root"):
        async with open_sandbox("daytona"):
            pass
    assert server.sandboxes() == before


@pytest.mark.parametrize(
    ("uid", "uid_map", "most", "binds"),
    [("0", "0 0", "max", False), ("0", "0 0", "64", True), ("0", "0 165536", "max", True), ("7", "0 0", "max", True)],
)
def test_whom_ulimit_binds(uid: str, uid_map: str, most: str, binds: bool) -> None:
    facts = Facts("/f", "/w", "/h", "/tmp", "user", uid, uid_map, most, "env -i sh")
    assert unbounded(facts, 64) is not binds


async def test_an_image_that_cannot_be_had(server: DaytonaServer) -> None:
    before = server.sandboxes()
    with pytest.raises(ImageUnavailable, match=r"image batch-runner-test:none: .*repository does not exist"):
        async with open_sandbox("daytona", image="batch-runner-test:none"):
            pass
    assert server.sandboxes() == before


async def test_a_build_that_broke_may_work_another_time(server: DaytonaServer) -> None:
    server.set_faults(build="toomanyrequests: You have reached your pull rate limit")
    with pytest.raises(ImagePullFailed, match="pull rate limit"):
        async with open_sandbox("daytona", image="batch-runner-test:none"):
            pass


async def test_an_image_without_programs(server: DaytonaServer) -> None:
    with pytest.raises(SetupFailed, match=r"the image lacks base64: the daytona backend needs `sh` and coreutils"):
        async with open_sandbox("daytona", image="batch-runner-test:sh"):
            pass


def test_what_a_first_command_may_say() -> None:
    assert "lacks mkfifo stty" in str(read_facts("lacks mkfifo stty\n"))
    assert "no folder" in str(read_facts("nowhere\n"))
    assert read_facts("sh: not\nfound") == "the sandbox's first command failed: sh: not found"
    assert read_facts("") == "the sandbox's first command failed: it said nothing"


async def test_a_service_out_of_order(server: DaytonaServer) -> None:
    server.set_faults(status=503)
    with pytest.raises(SetupFailed, match=r"daytona made no sandbox: .*Out of order"):
        async with open_sandbox("daytona"):
            pass


async def test_a_sandbox_that_cannot_be_deleted_is_named_and_can_be_deleted_later(server: DaytonaServer) -> None:
    there = daytona.DaytonaBackend()
    async with there.open(make_spec()):
        name = server.requests()[-1]["name"]
        server.set_faults(undeletable=2)
    assert there.unremoved() == (name,)
    assert there.unremoved() == ()
    assert not await there.remove(name)
    assert name in server.sandboxes()
    assert await there.remove(name)
    assert name not in server.sandboxes()
    assert await there.remove(name), "there is none"
    server.set_faults(status=503)
    assert not await there.remove(name), "who knows"


async def test_what_the_dead_left_is_named_if_it_cannot_be_deleted(server: DaytonaServer) -> None:
    there = daytona.DaytonaBackend()
    async with there.open(make_spec(deadline=time.time() - 1)):
        name = server.requests()[-1]["name"]
        server.set_faults(undeletable=1)
        assert await there.reap() == 0
        assert name in there.unremoved()
    assert there.unremoved() == ()


async def test_a_service_that_takes_too_long(server: DaytonaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daytona, "_MAKE_SECONDS", 1)
    monkeypatch.setattr(daytona, "_REMOVE_SECONDS", 1.0)
    server.set_faults(stall=True)
    with pytest.raises(SetupTimeout, match="does not answer"):
        async with open_sandbox("daytona"):
            pass


def test_whose_sandboxes_are_stale() -> None:
    mine = {LABEL: encode(current_owner("r")), "batch-runner.deadline": "100"}
    assert not is_stale(mine, 99)
    assert is_stale(mine, 101)
    assert not is_stale({**mine, "batch-runner.deadline": "soon"}, 101)
    assert not is_stale({}, 101)


# channels


def test_any_byte_is_framed() -> None:
    for data in (b"", b"plain\n", bytes(range(256)), bytes(range(256)) * 500, b"\\0101%s\n\\" * 9):
        told = b"".join(_told(frame) for frame in frames(data))
        assert told == data
        assert all(len(frame) < 64 << 10 for frame in frames(data))


def _told(frame: bytes) -> bytes:
    """What the other end makes of a frame."""
    head, _, rest = frame.partition(b"\n")
    if not head.startswith(b"."):
        assert int(head) == len(rest)
        return rest
    assert rest == b""
    assert all(32 <= byte < 127 for byte in head)
    parts = head[1:].split(b"\\0")
    return parts[0] + b"".join(bytes([int(part[:3], 8)]) + part[3:] for part in parts[1:])


def test_chunks_may_be_cut_anywhere() -> None:
    printed = b"YWJj\nZGVm\n.\n.\nAA==\n.\n"
    for size in range(1, len(printed)):
        chunks = Chunks()
        found = [each for at in range(0, len(printed), size) for each in chunks.feed(printed[at : at + size])]
        assert found == [b"abcdef", b"", b"\0"]


def test_a_greeting_is_not_ours() -> None:
    assert ready(b"$ exec sh /tmp/batch-ready 12\n") is None
    assert ready(b"Welcome\r\n$ \nbatch-ready 12\nAA==\n.\n") == ("12", b"AA==\n.\n")


async def test_who_reads_slowly_loses_nothing(server: DaytonaServer) -> None:
    async with open_sandbox("daytona") as sandbox:
        process = await sandbox.start("head -c 4000000 /dev/zero | tr '\\0' x; echo end", piped=True)
        await asyncio.sleep(0.5)  # far more was printed by now than the service lets wait
        data = b""
        while piece := await process.read():
            data += piece
        assert data == b"x" * 4_000_000 + b"end\n"


async def test_input_that_nobody_reads_holds_no_output_up(server: DaytonaServer) -> None:
    data = bytes(range(256)) * 4000
    async with open_sandbox("daytona") as sandbox:
        process = await sandbox.start("cat", piped=True)
        writing = asyncio.create_task(process.write(data))
        received = b""
        while len(received) < len(data):
            received += await process.read()
        await writing
        await process.close_stdin()
        assert received == data
        assert await process.read() == b""
        assert await process.wait(20) == 0


async def test_busybox_is_all_that_an_image_needs(server: DaytonaServer) -> None:
    data = bytes(range(256)) * 300
    async with open_sandbox("daytona", image="batch-runner-test:box") as sandbox:
        await sandbox.write("f", data)
        assert await bytes_of(sandbox, "f") == data
        assert (await sandbox.run("sleep 30", timeout=0.5)).timed_out
        assert await printed(sandbox, "cd /; export A=1; echo usable") == "usable\n"
        assert await printed(sandbox, "pwd; echo $A") == "/\n1\n"


async def test_what_the_service_sets_is_not_for_commands(server: DaytonaServer) -> None:
    async with open_sandbox("daytona") as sandbox:
        assert await printed(sandbox, "env | grep -c DAYTONA || :; pwd; echo $HOME") == "0\n/workspace\n/home/daytona\n"


# faults


async def test_a_lost_connection_is_a_lost_sandbox(server: DaytonaServer, seconds: str) -> None:
    async def runs() -> bool:
        return left_over(seconds) > 0

    async def none_left() -> bool:
        return not left_over(seconds)

    async with open_sandbox("daytona") as sandbox:
        command = asyncio.create_task(sandbox.run(f"sleep {seconds}", timeout=100))
        assert await eventually(runs, 60)
        server.set_faults(cut=True)
        with pytest.raises(EnvironmentLost):
            await command
    assert await eventually(none_left, 60)


async def test_a_service_that_does_nothing_any_more(server: DaytonaServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daytona_channel, "_PULSE_SECONDS", 0.2)
    monkeypatch.setattr(daytona_channel, "_UNANSWERED", 10**6)
    async with open_sandbox("daytona") as sandbox:
        await printed(sandbox, "true")
        server.set_faults(deaf=True)
        monkeypatch.setattr(daytona_channel, "_UNANSWERED", 5)
        with pytest.raises(EnvironmentLost):
            await sandbox.run("sleep 60", timeout=60)
        with pytest.raises(EnvironmentLost):
            await sandbox.run("true", timeout=60)


async def test_a_service_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    dying = DaytonaServer()
    for name, value in dying.variables().items():
        monkeypatch.setenv(name, value)
    async with DAYTONA.open(make_spec()) as sandbox:
        await printed(sandbox, "true")
        command = asyncio.create_task(sandbox.run("sleep 60", timeout=100))
        await asyncio.sleep(0.2)
        dying.kill()
        with pytest.raises(EnvironmentLost):
            await command
    with pytest.raises(SetupFailed, match="cannot be reached"):
        async with DAYTONA.open(make_spec()):
            pass


def test_the_window_fits_what_the_service_lets_wait() -> None:
    assert daytona_script.WINDOW * daytona_script.CHUNK * 4 / 3 < 256 * 4096 / 2
