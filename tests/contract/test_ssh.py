"""What is true of sandboxes over SSH alone: hosts and their keys, connections, capacity, and what a lost one leaves."""

import asyncio
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.environments import eventually, make_spec, printed
from tests.contract.ssh_server import SshServer
from tests.contract.test_environments_end import left_over
from tools.environments.base import Backend, BackendSettings, Environment, Lenient, Limits, Outspoken
from tools.environments.table import load_backend, resolve_backend
from tools.errors import EnvironmentLost, SetupFailed, SetupTimeout, UsageProblem


@pytest.fixture(scope="module")
def server() -> Iterator[SshServer]:
    server = SshServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def small() -> Iterator[SshServer]:
    """One that takes three sessions on a connection, from an ordinary user without control groups."""
    server = SshServer("guest", options="MaxSessions 3")
    yield server
    server.close()


@pytest.fixture
def seconds() -> str:
    return f"{random.randrange(10**4, 10**6)}.125"


def ssh(settings: BackendSettings) -> Backend:
    return load_backend("ssh", settings)


async def open_ends(server: SshServer) -> bool:
    return not server.connections()


# hosts


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ssh_known_hosts": "empty"}, "its host key is in no line of .*/empty: add it .ssh-keyscan -p .*fingerprint"),
        ({"ssh_known_hosts": "changed"}, "its host key is not the one in .*/changed: somebody may be in between"),
        ({"ssh_known_hosts": "none"}, "known hosts .*/none is not there"),
        ({"ssh_key": "stranger"}, "does not accept .*/stranger: add its .pub to ~/.ssh/authorized_keys"),
        ({"ssh_key": "locked"}, "locked cannot be used .*ssh-agent"),
        ({"ssh_key": "none"}, "ssh_key: .*/none is not there"),
    ],
)
async def test_what_is_not_trusted_is_refused(server: SshServer, changes: dict[str, str], words: str) -> None:
    backend = ssh(server.settings(**{name: str(server.folder / file) for name, file in changes.items()}))
    with pytest.raises(SetupFailed, match=words) as refused:
        async with backend.open(make_spec()):
            pass
    assert await backend.check() == str(refused.value)
    assert await backend.reap() == 0


async def test_hosts_that_are_none(server: SshServer) -> None:
    assert "--ssh_hosts" in await ssh(BackendSettings()).check()
    assert "'a b' is not user@host:port" in await ssh(server.settings(ssh_hosts=("a b",))).check()
    gone = ssh(server.settings(ssh_hosts=(server.host, "127.0.0.1:1")))
    assert "127.0.0.1:1 cannot be reached" in await gone.check()
    with pytest.raises(EnvironmentLost, match="cannot be reached"):
        async with ssh(server.settings(ssh_hosts=("127.0.0.1:1",))).open(make_spec()):
            pass
    for _ in range(3):  # the other host serves meanwhile
        async with gone.open(make_spec()) as sandbox:
            assert await printed(sandbox, "echo ok") == "ok\n"


async def test_a_run_starts_with_the_hosts_that_answer(server: SshServer, small: SshServer) -> None:
    known = server.folder / "without_guest"
    known.write_text((server.folder / "known").read_text())
    nobody = "127.0.0.1:1"
    backend = ssh(server.settings(ssh_hosts=(server.host, nobody)))
    assert isinstance(backend, Lenient)
    assert isinstance(backend, Outspoken)
    assert await backend.hindrance() == ""
    assert backend.warnings() == []
    await backend.reap()
    (warning,) = backend.warnings()
    assert warning.startswith("the run goes on without a host that does not answer: 127.0.0.1:1 cannot be reached")
    for hosts, words in (
        ((nobody, "127.0.0.1:2"), "127.0.0.1:1 cannot be reached .*; 127.0.0.1:2 cannot be reached"),
        ((server.host, nobody, small.host), f"ssh: {small.host}: its host key is in no line of [^;]*$"),  # no outage
    ):
        settings = server.settings(ssh_hosts=hosts, ssh_known_hosts=str(known))
        with pytest.raises(UsageProblem, match=words):
            await resolve_backend("ssh", False, settings)


async def test_what_it_cannot_do_is_refused(server: SshServer) -> None:
    for changes in ({"limits": Limits(network="none")}, {"volumes": ("/usr:/mnt",)}, {"cwd": "/no/such/place"}):
        with pytest.raises(SetupFailed, match="the ssh backend"):
            async with ssh(server.settings()).open(make_spec(**changes)):
                pass
    assert server.sandboxes() == []


# connections


async def test_one_connection_carries_all(server: SshServer) -> None:
    backend = ssh(server.settings())

    async def use(number: int) -> str:
        async with backend.open(make_spec()) as sandbox:
            process = await sandbox.start("cat")
            await printed(sandbox, f"export N={number}; sleep 0.3")
            assert len(server.connections()) == 1
            await process.close_stdin()
            return await printed(sandbox, "echo $N")

    assert await asyncio.gather(*(use(number) for number in range(3))) == ["0\n", "1\n", "2\n"]
    assert server.sandboxes() == []
    assert await eventually(lambda: open_ends(server))


async def test_a_server_that_allows_few_sessions_gets_more_connections(small: SshServer) -> None:
    backend = ssh(small.settings())

    async def use(sandbox: Environment) -> int:
        started = [await sandbox.start("cat") for _ in range(3)]
        assert await printed(sandbox, "echo ok") == "ok\n"
        for process in started:
            await process.close_stdin()
        return sum([await process.wait(10) or 0 for process in started])

    async with backend.open(make_spec()) as first, backend.open(make_spec()) as second:
        assert sum(await asyncio.gather(use(first), use(second))) == 0
        assert 3 <= len(small.connections()) <= 6
        for _ in range(10):  # sessions that ended make room
            await use(first)
        assert len(small.connections()) <= 6
    assert small.sandboxes() == []
    assert await eventually(lambda: open_ends(small))


async def test_many_at_once_leak_nothing(small: SshServer) -> None:
    backend = ssh(small.settings())

    async def use(number: int) -> str:
        async with backend.open(make_spec()) as sandbox:
            await printed(sandbox, f"export N={number}; sleep 0.2")
            return await printed(sandbox, "echo $N")

    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - it counts itself too, both times
    assert await asyncio.gather(*(use(number) for number in range(16))) == [f"{number}\n" for number in range(16)]
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208 - as above
    assert small.sandboxes() == []


async def test_cancelled_openings_take_no_room(small: SshServer) -> None:
    backend = ssh(small.settings())
    async with backend.open(make_spec()) as held:
        for delay in (0.001, 0.005, 0.01, 0.02, 0.04, 0.08):
            opening = asyncio.create_task(_printed_in(backend, "sleep 10"))
            await asyncio.sleep(delay)
            opening.cancel()
            await asyncio.wait({opening})
        assert await printed(held, "echo ok") == "ok\n"

        async def alone() -> bool:
            return len(small.sandboxes()) == 1

        assert await eventually(alone)
    assert await eventually(lambda: open_ends(small))


async def test_a_lost_connection_is_a_lost_environment(server: SshServer, seconds: str) -> None:
    backend = ssh(server.settings())
    async with backend.open(make_spec()) as other:
        async with backend.open(make_spec()) as sandbox:
            await sandbox.start(f"setsid sleep {seconds}")
            command = asyncio.create_task(sandbox.run(f"sleep {seconds}", timeout=60))

            async def both() -> bool:
                return left_over(seconds) == 2

            assert await eventually(both)
            for pid in server.connections():
                os.kill(pid, signal.SIGKILL)
            for attempt in (command, sandbox.run("true", timeout=5), sandbox.write("f", b""), other.list(".")):
                with pytest.raises(EnvironmentLost):
                    await attempt

            async def ended() -> bool:
                return not left_over(seconds)

            assert await eventually(ended), "the host itself ends what has lost its maker"
        assert len(server.sandboxes()) == 1, "it was removed over another connection"
    assert server.sandboxes() == []


# several hosts


async def test_hosts_take_turns_up_to_their_capacity(server: SshServer, small: SshServer) -> None:
    known = server.folder / "both"
    known.write_text((server.folder / "known").read_text() + (small.folder / "known").read_text())
    (small.folder / "authorized").write_text((server.folder / "authorized").read_text())
    backend = ssh(server.settings(ssh_hosts=(server.host, small.host), ssh_known_hosts=str(known), ssh_capacity=1))
    places = []
    for _ in range(4):  # one after the other
        async with backend.open(make_spec()) as sandbox:
            places.append((await printed(sandbox, "pwd")).startswith(str(server.tmp)))
    assert places in ([True, False, True, False], [False, True, False, True])
    async with backend.open(make_spec()), backend.open(make_spec()) as second:
        assert (len(server.sandboxes()), len(small.sandboxes())) == (1, 1)
        with pytest.raises(SetupTimeout, match="ssh_capacity"):
            async with backend.open(make_spec(deadline=time.time() - 1)):
                pass
        waiting = asyncio.create_task(_printed_in(backend, "echo third"))
        await printed(second, "sleep 0.2")
        assert not waiting.done()
    assert await waiting == "third\n"
    assert server.sandboxes() == small.sandboxes() == []


async def _printed_in(backend: Backend, command: str) -> str:
    async with backend.open(make_spec()) as sandbox:
        return await printed(sandbox, command)


# limits without control groups


async def test_an_ordinary_user_without_control_groups(small: SshServer, seconds: str) -> None:
    (small.folder / "authorized").write_text((small.folder / "id.pub").read_text())
    backend = ssh(small.settings())
    hungry = "import sys; a = bytearray(int(sys.argv[1]) << 20); print(len(a))"
    forks = "ulimit -u; nproc; mkdir -m 0 locked locked/in 2>/dev/null; mkdir -p a/b; touch a/b/c; chmod 500 a a/b"
    async with backend.open(make_spec(limits=Limits(memory_mb=200, pids=100))) as sandbox:
        assert await printed(sandbox, f"python3 -c '{hungry}' 50") == "52428800\n"
        assert "MemoryError" in (await sandbox.run(f"python3 -c '{hungry}' 300", timeout=20)).output
        assert await printed(sandbox, forks) == "100\n1\n"
        await sandbox.start(f"setsid sleep {seconds}")
        assert (await sandbox.run(f"sleep {seconds} & sleep {seconds}", timeout=0.5)).timed_out
        assert left_over(seconds) == 1
        assert await printed(sandbox, "id -un; stat -c %a ../../batch-ssh-*") == "guest\n700\n"
    assert left_over(seconds) == 0
    assert small.sandboxes() == []
    with pytest.raises(SetupFailed, match=r"cannot limit 0.5 processors"):
        async with backend.open(make_spec(limits=Limits(cpus=0.5))):
            pass
    assert small.sandboxes() == []


# what dead runs left


async def test_directories_without_a_record(server: SshServer) -> None:
    backend = ssh(server.settings())
    new, old, others = (server.tmp / f"batch-ssh-{digit * 12}" for digit in "abc")
    for place in (new, old, others):
        (place / "workspace").mkdir(parents=True)
    link = server.tmp / f"batch-ssh-{'d' * 12}"
    link.symlink_to(others)
    for place in (old, others):
        os.utime(place, (time.time() - 100,) * 2)
    os.chown(others, 65534, -1)
    assert await backend.reap() == 1
    assert [place.exists() for place in (new, old, others)] == [True, False, True]
    link.unlink()
    for place in (new, others):
        (place / "workspace").rmdir()
        place.rmdir()


async def test_the_record_stays_with_what_cannot_be_removed(server: SshServer) -> None:
    backend = ssh(server.settings())
    async with backend.open(make_spec(deadline=time.time() - 1)) as sandbox:
        folder = Path((await printed(sandbox, "pwd")).strip()).parent
        await _call("mount", "-t", "tmpfs", "none", str(folder / "workspace"))
    try:
        assert await backend.reap() == 0
        assert (folder / "owner").exists()
    finally:
        await _call("umount", str(folder / "workspace"))
    assert await backend.reap() == 1
    assert server.sandboxes() == []


async def _call(*words: str) -> None:
    await asyncio.to_thread(subprocess.run, words, check=True)
