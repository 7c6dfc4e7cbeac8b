"""What is true of Modal's sandboxes alone: its token, images, lifetimes, tags, and a service that is gone or stalls."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import msgspec
import pytest

from tests.contract.environments import eventually, make_spec, printed
from tests.contract.modal_server import ModalServer, speaking_with, use_service
from tools.environments import modal as ours
from tools.environments import modal_connection, shell
from tools.environments.base import Limits, Owner
from tools.environments.modal import MODAL, is_stale, lifetime, tags_of
from tools.environments.owner import current_owner
from tools.errors import EnvironmentLost, ImageUnavailable, SandboxRefused, SetupFailed, SetupTimeout


@pytest.fixture(autouse=True)
def service() -> None:
    use_service()


@pytest.fixture
async def server() -> AsyncIterator[ModalServer]:
    """One of the test's own, to be maltreated."""
    server = ModalServer()
    async with speaking_with({**server.variables()}):
        yield server
    server.close()


# the token and the service


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"MODAL_TOKEN_ID": None, "MODAL_TOKEN_SECRET": None}, "^modal takes no such token: run `modal token new`"),
        ({"MODAL_TOKEN_SECRET": "wrong"}, "^modal takes no such token: .*MODAL_TOKEN_SECRET.*secret wrong"),
        ({"MODAL_SERVER_URL": "http://127.0.0.1:1"}, "^modal cannot be reached: .*is the service up"),
    ],
)
async def test_what_is_missing_is_said_in_one_line(
    variables: dict[str, str | None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "MODAL_SERVER_URL" in variables:
        monkeypatch.setattr(modal_connection, "_CONNECT_SECONDS", 1.0)
    async with speaking_with(variables):
        for attempt in (MODAL.prepare(""), _printed("true")):
            with pytest.raises(SetupFailed, match=words) as refused:
                await attempt
            assert ("token" in words) == isinstance(refused.value, SandboxRefused), "no other try would help"
        assert await MODAL.check() == str(refused.value)
        assert "\n" not in str(refused.value)
        assert await MODAL.reap() == 0
    monkeypatch.undo()
    assert await MODAL.check() == ""


async def _printed(command: str, **changes: object) -> str:
    async with MODAL.open(make_spec(**changes)) as sandbox:
        return await printed(sandbox, command)


async def test_what_is_not_the_service_is_named_as_such() -> None:
    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as somebody:
        port = somebody.sockets[0].getsockname()[1]
        async with speaking_with({"MODAL_SERVER_URL": f"http://127.0.0.1:{port}"}):
            problem = await MODAL.check()
    assert problem.startswith("modal cannot be reached: ")
    assert "MODAL_SERVER_URL" in problem
    assert "\n" not in problem


# images, and what there is not


@pytest.mark.parametrize(
    ("image", "words"),
    [("no/such:image", "image no/such:image: .*not found"), ("a\nRUN b", "is not the name"), ("-x", "-x")],
)
async def test_images_that_cannot_be_had(image: str, words: str) -> None:
    for attempt in (MODAL.prepare(image), _printed("true", image=image)):
        with pytest.raises(ImageUnavailable, match=words) as missing:
            await attempt
        assert not missing.value.retryable
        assert "\n" not in str(missing.value)


@pytest.mark.parametrize("image", ["batch-runner-test:sh", "batch-runner-test:box", "batch-runner-test:user"])
async def test_images_with_little_in_them(image: str) -> None:
    await MODAL.prepare(image)
    async with MODAL.open(make_spec(image=image, cwd="/tmp")) as sandbox:
        assert await printed(sandbox, "export A=1; cd /; echo ok") == "ok\n"
        await sandbox.write("/tmp/f", b"a\n\n")
        assert b"".join([piece async for piece in sandbox.read("/tmp/f")]) == b"a\n\n"
        result = await sandbox.run("while :; do :; done", timeout=2)
        assert result.timed_out
        assert await printed(sandbox, "echo $A; pwd") == "1\n/\n"


async def test_what_the_service_does_not_have_is_refused() -> None:
    for changes in ({"volumes": ("/usr:/mnt",)}, {"deadline": time.time() + 100_000}):
        with pytest.raises(SandboxRefused, match="the modal backend"):
            async with MODAL.open(make_spec(**changes)):
                pass


async def test_processes_are_limited_as_far_as_the_kernel_there_does_it() -> None:
    assert await _printed("ulimit -u", limits=Limits(pids=77, memory_mb=512)) == "77\n"


# lifetimes and tags


def of_the_dead(**changes: object) -> Owner:
    return msgspec.structs.replace(current_owner("dead"), start_time=1, **changes)


def test_a_sandbox_lives_longer_than_its_task_has() -> None:
    now = 1000.0
    assert lifetime(make_spec(deadline=now + 3600.5), now) == 3901
    assert lifetime(make_spec(deadline=now - 50), now) == 300
    assert lifetime(make_spec(deadline=now + 86_399), now) == 86_400


def test_tags_say_who_is_dead() -> None:
    now, owner = time.time(), current_owner("run/1 ü")
    tags = tags_of(make_spec(owner=owner, deadline=now + 100, task_id="a b" * 50))
    assert all(len(value) <= 60 and value.isascii() and " " not in value for value in tags.values())
    assert not is_stale(tags, now)
    assert is_stale(tags, now + 101)
    for changes, stale in (
        ({"start": "1"}, True),
        ({"pid": "4999999"}, True),
        ({"pid": "4999999", "boot": "another"}, False),
        ({"pid": "4999999", "namespace": "another"}, False),
        ({"pid": "x"}, False),
        ({"deadline": ""}, False),
    ):
        assert is_stale(tags | {f"batch-runner-{name}": value for name, value in changes.items()}, now) == stale
    assert not is_stale({}, now)


async def test_only_what_is_nobodys_is_removed() -> None:
    await MODAL.reap()
    far = of_the_dead(boot_id="another")
    async with MODAL.open(make_spec()) as mine, MODAL.open(make_spec(owner=far)) as others:
        async with AsyncExitStack() as stack:
            opened = [
                MODAL.open(make_spec(owner=of_the_dead())) for _ in range(6)
            ]  # more than the service lists at once
            stale = await asyncio.gather(*map(stack.enter_async_context, opened))
            assert await MODAL.reap() == 6
            for sandbox in stale:
                with pytest.raises(EnvironmentLost):
                    await sandbox.run("true", timeout=5)
        assert [await printed(sandbox, "echo ok") for sandbox in (mine, others)] == ["ok\n"] * 2


# a service that goes away


async def test_a_sandbox_that_ended_is_lost() -> None:
    await MODAL.reap()
    async with MODAL.open(make_spec(owner=of_the_dead())) as sandbox:
        process = await sandbox.start("cat")
        command = asyncio.create_task(sandbox.run("sleep 1000", timeout=100))
        assert await MODAL.reap() == 1
        with pytest.raises(EnvironmentLost):
            await command
        assert await process.wait(60) is not None
        for attempt in (sandbox.run("true", timeout=5), sandbox.write("f", b""), sandbox.list(".")):
            with pytest.raises(EnvironmentLost):
                await attempt


async def test_a_sandbox_that_cannot_be_ended_is_named_and_can_be_ended_later(server: ModalServer) -> None:
    MODAL.unremoved()
    async with MODAL.open(make_spec()):
        server.tell("keep")
    (name,) = MODAL.unremoved()
    assert MODAL.unremoved() == ()
    assert not await MODAL.remove(name)
    assert server.sandboxes() == 1
    server.tell("go")
    assert await MODAL.remove(name)
    assert server.sandboxes() == 0
    assert await MODAL.remove(name), "it has ended"
    assert await MODAL.remove(name[:-2] + name[:-3:-1]), "there is none"


async def test_a_service_that_dies_is_a_lost_sandbox(server: ModalServer) -> None:
    async with MODAL.open(make_spec()) as sandbox:
        await printed(sandbox, "true")
        assert server.sandboxes() == 1
        command = asyncio.create_task(sandbox.run("sleep 1000", timeout=100))
        server.kill()
        with pytest.raises(EnvironmentLost):
            await command

    async def ended() -> bool:
        return server.sandboxes() == 0

    assert await eventually(ended, 30)


async def test_a_command_does_not_wait_for_a_service_that_stalls(
    server: ModalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with MODAL.open(make_spec()) as sandbox:
        await printed(sandbox, "true")
        server.tell("stall")
        for name in ("_SILENT_SECONDS", "_ANSWER_SECONDS"):
            monkeypatch.setattr(modal_connection, name, 1.0)
        monkeypatch.setattr(ours, "_CHANNEL_SECONDS", 1000.0)  # nobody opens one any more
        monkeypatch.setattr(shell, "_KILL_SECONDS", 1000.0)
        for attempt in (sandbox.run("sleep 1000", timeout=1000), sandbox.run("true", timeout=1000), sandbox.list(".")):
            with pytest.raises(EnvironmentLost):
                await attempt


async def test_nothing_waits_for_a_service_that_stalls(server: ModalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with MODAL.open(make_spec()) as sandbox:
        await printed(sandbox, "true")
        server.tell("stall")
        monkeypatch.setattr(shell, "_KILL_SECONDS", 1.0)
        for name in ("_SILENT_SECONDS", "_ANSWER_SECONDS", "_KILL_SECONDS"):
            monkeypatch.setattr(modal_connection, name, 1.0)
        names = ("_CHANNEL_SECONDS", "_CHECK_SECONDS", "_REAP_SILENT_SECONDS", "_REMOVE_SECONDS", "_START_SECONDS")
        for name in names:
            monkeypatch.setattr(ours, name, 2.0)
        with pytest.raises(EnvironmentLost):
            await sandbox.run("sleep 1000", timeout=1)
        with pytest.raises(SetupTimeout):
            async with MODAL.open(make_spec()):
                pass
        assert await MODAL.check() == modal_connection.UNREACHED
        assert await MODAL.reap() == 0
    server.tell("go")
    monkeypatch.undo()
    assert await _printed("echo ok") == "ok\n"
