"""What Docker's engine and Podman's are told alike: where they are, networks, users, a read-only root, registries."""

import asyncio
import base64
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.engine_front import engine_front
from tests.contract.image_registry import foreign_shell, registry, saved, with_architecture
from tests.contract.no_service import answering
from tests.contract.ssh_server import shared_settings
from tests.contract.tls_front import tls_front
from tools.environments.base import BackendSettings, EnvironmentSpec, Limits
from tools.environments.docker import DockerBackend
from tools.environments.docker_container import container_config
from tools.environments.docker_engine import engine_errors
from tools.environments.owner import current_owner
from tools.environments.starts import Starts
from tools.environments.table import resolve_backend
from tools.errors import EnvironmentLost, ImagePullFailed, ImageUnavailable, SandboxRefused, SetupFailed, UsageProblem

PY, SH, USER = (f"batch-runner-test:{kind}" for kind in ("py", "sh", "user"))
LOGIN = "me:pass:w0rd-that-nobody-may-see"
MINE = "batch-runner-test-"  # networks that tests make
both = pytest.mark.parametrize("engine", ["docker", "podman"])


def spec(image: str = PY, **changes: Any) -> EnvironmentSpec:
    task = f"engines-{os.getpid()}-{time.monotonic_ns()}"
    return EnvironmentSpec(
        task_id=task, owner=current_owner("test"), deadline=time.time() + 600, image=image, **changes
    )


def backend(engine: str, **settings: Any) -> DockerBackend:
    return DockerBackend(BackendSettings(**settings), name=engine)


def said(engine: str, *words: str) -> list[str]:
    """The lines that the engine's own command prints."""
    return subprocess.run([engine, *words], capture_output=True, text=True, check=True).stdout.split("\n")[:-1]


async def printed(backend: DockerBackend, command: str, **changes: Any) -> str:
    async with backend.open(spec(**changes)) as sandbox:
        return (await sandbox.run(command, timeout=60)).output


# where the engine is


async def test_an_engine_behind_tls_is_as_good_as_one_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tls_front(tmp_path) as host:
        monkeypatch.setenv("DOCKER_HOST", f"tcp://{host}")
        monkeypatch.setenv("DOCKER_TLS_VERIFY", "yes")
        monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path))
        assert await DockerBackend().check() == ""
        async with DockerBackend().open(spec()) as sandbox:
            assert (await sandbox.run("echo out; exit 3", timeout=60)).exit_code == 3
            process = await sandbox.start("wc -c; seq 30000")
            await process.write(b"x" * 300_000)
            await process.close_stdin()
            assert await process.wait(60) == 0
            assert process.output().startswith("300000\n1\n")
            assert process.output().endswith("30000\n")
        monkeypatch.delenv("DOCKER_TLS_VERIFY")
        assert "docker is not running" in await DockerBackend().check()


@both
async def test_an_engine_behind_ssh_is_as_good_as_one_here(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = shared_settings()
    path = "/run/podman/podman.sock" if engine == "podman" else ""
    variable = "CONTAINER_HOST" if engine == "podman" else "DOCKER_HOST"
    monkeypatch.setenv(variable, f"ssh://{known.ssh_hosts[0]}{path}")
    there = DockerBackend(known, name=engine)
    await asyncio.gather(*(_counts_its_input(there) for _ in range(6)))  # more streams than a connection has sessions
    monkeypatch.setenv(variable, "ssh://me:password@host")
    problem = await DockerBackend(known, name=engine).check()
    assert problem == f"{variable}: expected ssh://[user@]host[:port][/socket]"


@both
async def test_addresses_that_are_none_name_their_variable(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = "CONTAINER_HOST" if engine == "podman" else "DOCKER_HOST"
    monkeypatch.setenv(variable, "nonsense://me:password@host")
    expected = "unix://, tcp://, https:// or ssh:// expected"
    assert await backend(engine).check() == f"{variable}: the scheme 'nonsense' is unknown: {expected}"
    monkeypatch.setenv(variable, "me:password@host")
    assert await backend(engine).check() == f"{variable}: it has no scheme: {expected}"
    monkeypatch.setenv(variable, "ssh://me@127.0.0.1:1")
    problem = await backend(engine, ssh_known_hosts=str(tmp_path / "none")).check()
    assert problem.startswith(f"{engine} at me@127.0.0.1:1 ({variable}): the file of known hosts {tmp_path}/none is ")


@both
@pytest.mark.parametrize(
    ("status", "kind", "body"),
    [
        (500, "application/json", b'{"cause":"x"}'),
        (500, "application/json", b""),
        (500, "application/json", b'["a"]'),
        (500, "application/json", b'{"message":{"a":1}}'),
        (502, "text/html", "café bad gateway".encode("latin-1")),
        (502, "text/html", b"<html>bad gateway</html>"),
        (200, "application/json", b"[]"),
        (200, "application/json", b"{}"),
        (200, "text/html", b"<html>welcome</html>"),
    ],
)
async def test_what_is_no_engine_is_named_as_such(
    engine: str, status: int, kind: str, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = "CONTAINER_HOST" if engine == "podman" else "DOCKER_HOST"
    async with answering(status, kind, body) as port:
        monkeypatch.setenv(variable, f"tcp://me:password@127.0.0.1:{port}")
        words = f"{engine} at tcp://127.0.0.1:{port} does not answer as an engine: see what listens there, or set"
        problem = await backend(engine).check()
        assert problem == f"{words} {variable} to one's address"
        for asked in (engine, *(["auto"] if engine == "docker" else [])):
            with pytest.raises(UsageProblem, match="does not answer as an engine"):
                await resolve_backend(asked, wants_image=True)
        if status != 200:  # else it may well say of an image that it is there
            with pytest.raises(EnvironmentLost, match=words):
                await printed(backend(engine), "true")
            with pytest.raises(ImagePullFailed, match=words):
                await backend(engine).prepare(PY)
        assert await backend(engine).reap() == 0


@pytest.mark.parametrize("spoiled", ["create", "start", "exec"])
async def test_a_start_that_something_in_between_spoils_is_tried_again(
    spoiled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/engine")
    async with engine_front(tmp_path / "engine") as front:
        front.spoiled.append(spoiled)
        async with Starts(pause=0.01).open(backend("docker"), spec, failed=told.append) as sandbox:
            assert (await sandbox.run("echo works", timeout=60)).output == "works\n"
    (why,) = told
    assert why.startswith(f"docker at unix://{tmp_path}/engine does not answer as an engine: ")


async def test_a_fault_of_our_own_is_none_of_the_engines() -> None:
    with pytest.raises(KeyError), engine_errors():
        raise KeyError("ours")


@both
async def test_a_user_that_the_image_has_not_is_refused_at_once(engine: str) -> None:
    assert "unable to find user nobodyhere" in await _refusal(backend(engine, container_user="nobodyhere"))
    assert "unable to find group nowhere" in await _refusal(backend(engine, container_user="1000:nowhere"))


async def _counts_its_input(there: DockerBackend) -> None:
    async with there.open(spec()) as sandbox:
        assert (await sandbox.run("echo out; exit 3", timeout=60)).exit_code == 3
        process = await sandbox.start("wc -c")
        await process.write(b"x" * 100_000)
        await process.close_stdin()
        assert await process.wait(60) == 0
        assert process.output() == "100000\n"


async def test_certificates_that_are_not_there_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path))
    assert str(tmp_path) in await DockerBackend().check()
    assert "No such file" in await DockerBackend().check()


async def test_podman_is_where_its_variable_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await backend("podman").check() == ""
    monkeypatch.setenv("CONTAINER_HOST", "unix:///run/podman/podman.sock")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    assert await backend("podman").check() == ""
    monkeypatch.setenv("CONTAINER_HOST", f"unix://{tmp_path}/none")
    problem = await backend("podman").check()
    assert problem.startswith("podman is not running: start its service (systemctl start podman.socket")
    assert "\n" not in problem


# networks


@pytest.mark.parametrize(("engine", "tasks"), [("docker", 20), ("podman", 5)])
async def test_all_tasks_share_the_engines_network(engine: str, tasks: int) -> None:
    def networks() -> set[str]:
        return {name for name in said(engine, "network", "ls", "--format", "{{.Name}}") if not name.startswith(MINE)}

    before, one = networks(), backend(engine)
    free = asyncio.Semaphore(5)

    async def task() -> str:
        async with free:
            return await printed(one, "while read -r x; do echo $x; done </proc/net/dev", image=SH)

    outputs = await asyncio.gather(*(task() for _ in range(tasks)))
    assert all("eth0:" in output for output in outputs)
    assert networks() == before


@pytest.fixture
def network() -> Iterator[str]:
    name = f"{MINE}{os.getpid()}"
    said("docker", "network", "create", name)
    yield name
    said("docker", "network", "rm", name)


async def test_a_network_by_its_name(network: str) -> None:
    there = backend("docker", network=network)
    assert await there.check() == ""
    async with there.open(spec(limits=Limits(network=network))):
        inside = json.loads("".join(said("docker", "network", "inspect", network)))[0]["Containers"]
        assert len(inside) == 1


@both
async def test_a_network_that_is_not_there(engine: str) -> None:
    assert await backend(engine, network="no-such").check() == (
        f"network 'no-such': {engine} has none of that name (see {engine} network ls)"
    )
    with pytest.raises(SetupFailed, match="no-such") as caught:
        await printed(backend(engine), "true", limits=Limits(network="no-such"))
    assert "\n" not in str(caught.value)


async def test_what_another_backend_would_drop_is_refused() -> None:
    settings = BackendSettings(network="mine", pull_policy="always", read_only_root=True)
    problem = (
        r"^pull_policy, read_only_root, network mine: not with container_backend local, only with docker and podman"
    )
    with pytest.raises(UsageProblem, match=problem):
        await resolve_backend("local", wants_image=False, settings=settings)
    gpus = BackendSettings(gpus="all", read_only_root=True)
    with pytest.raises(UsageProblem, match=r"^gpus, .*: not with container_backend bubblewrap, only with docker$"):
        await resolve_backend("bubblewrap", wants_image=False, settings=gpus)
    assert await resolve_backend("podman", wants_image=True, settings=BackendSettings(pull_policy="never")) == "podman"


# what a container may


@both
async def test_a_user_by_name_or_number(engine: str) -> None:
    who = "id -u; id -g; touch here $HOME/there $TMPDIR/too && pwd"
    assert await printed(backend(engine, container_user="agent"), who) == "1000\n1000\n/workspace\n"
    assert await printed(backend(engine, container_user="4321:1234"), who) == "4321\n1234\n/workspace\n"


@both
@pytest.mark.parametrize("image", [PY, USER])
async def test_a_read_only_root_has_a_workspace(engine: str, image: str) -> None:
    wanted = spec(image)
    async with backend(engine, read_only_root=True).open(wanted) as sandbox:
        result = await sandbox.run("touch /usr/x /etc/x; touch $HOME/a b /tmp/c /var/tmp/d && echo all", timeout=60)
        assert result.output.count("Read-only file system") == 2
        assert result.output.endswith("all\n")
        await sandbox.write("sub/file", b"data")
        listing = said(engine, "ps", "--format", "{{.ID}}", "--filter", f"label=batch-runner.task={wanted.task_id}")
        (state,) = json.loads("\n".join(said(engine, "inspect", *listing)))
        volumes = [mount["Name"] for mount in state["Mounts"] if mount["Type"] == "volume"]
    assert len(volumes) == 1
    assert volumes[0] not in said(engine, "volume", "ls", "--format", "{{.Name}}"), "the workspace goes with the task"


@both
async def test_gpus_where_there_are_none(engine: str) -> None:
    for problem in (await backend(engine, gpus="all").check(), await _refusal(backend(engine, gpus="2"))):
        assert problem.startswith("gpus: ")
        assert "nvidia" in problem or "choose docker" in problem
        assert "\n" not in problem


async def _refusal(backend: DockerBackend) -> str:
    with pytest.raises(SandboxRefused) as caught:
        await printed(backend, "true")
    return str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "request_for"),
    [
        ("all", {"Count": -1}),
        ("2", {"Count": 2}),
        ("device=0,GPU-3a23", {"Count": 0, "DeviceIDs": ["0", "GPU-3a23"]}),
    ],
)
def test_gpus_are_asked_for_as_the_docker_command_does(wanted: str, request_for: dict[str, object]) -> None:
    host = container_config(spec(), BackendSettings(gpus=wanted))["HostConfig"]
    assert host["DeviceRequests"] == [{"Driver": "", "Capabilities": [["gpu"]], **request_for}]


async def test_a_missing_source_of_a_volume_is_not_made_by_podman(tmp_path: Path) -> None:
    with pytest.raises(SandboxRefused, match="bind source path does not exist"):
        await printed(backend("podman"), "true", volumes=(f"{tmp_path}/none:/data",))
    assert not (tmp_path / "none").exists()


# images


@pytest.fixture(params=["arm64", ""])
def foreign(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """An image whose only program is for another kind of processor, as its description says, or does not."""
    name, root = f"batch-runner-test-foreign:{os.getpid()}", tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    foreign_shell(root / "bin" / "sh")
    subprocess.run(f"tar -C {root} -c . | docker import - {name}", shell=True, check=True, capture_output=True)
    described = saved(name, tmp_path / "saved.tar")
    if request.param:
        described = with_architecture(request.param, described, tmp_path / "described.tar")
    for engine in ("docker", "podman"):
        said(engine, "load", "-q", "-i", str(described))
    yield name
    for engine in ("docker", "podman"):
        said(engine, "rmi", "-f", name)


@both
async def test_an_image_for_another_machine_is_named_as_such(engine: str, foreign: str) -> None:
    words = r"the image is for linux/arm64, the engine's machine is linux/|no program for the engine's machine, linux/"
    with pytest.raises(SandboxRefused, match=words) as caught:
        await printed(backend(engine), "true", image=foreign)
    assert foreign in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("batch-runner-test:box", tmp_path_factory.mktemp("images") / "box.tar")


@pytest.fixture
def docker_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    """Writes the docker command's settings."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))

    def write(settings: object) -> None:
        (tmp_path / "config.json").write_text(json.dumps(settings))

    return write


def a_helper(folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """docker-credential-mine, which says this of every registry, and writes down of which it was asked."""
    program = folder / "docker-credential-mine"
    program.write_text(f'#!/bin/sh\n[ "$1" = get ] || exit 1\ncat >>{folder}/asked\n{answer}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def removed(*images: str) -> None:
    for engine in ("docker", "podman"):
        subprocess.run([engine, "rmi", "-f", *images], capture_output=True, check=False)


@both
async def test_a_registry_that_wants_a_login(
    engine: str, archive: Path, docker_config: Callable[[object], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, _, secret = LOGIN.partition(":")
    async with registry(archive, login=LOGIN) as host:
        image = f"{host}/box:1"
        try:
            await _refused(engine, image)
            wrong = _basic(f"{LOGIN}x")
            docker_config({"auths": {host: {"auth": wrong}}})
            await _refused(engine, image)
            docker_config({"auths": {f"http://{host}/v2/": {"auth": _basic(LOGIN)}}})
            await backend(engine).prepare(image)
            removed(image)
            docker_config({"credHelpers": {host: "mine"}})
            assert "docker-credential-mine: No such file" in await _refused(engine, image)
            a_helper(tmp_path, monkeypatch, "echo no; exit 1")
            assert "docker-credential-mine: it has nothing" in await _refused(engine, image)
            answer = json.dumps({"ServerURL": host, "Username": user, "Secret": secret})
            a_helper(tmp_path, monkeypatch, f"echo '{answer}'")
            await backend(engine).prepare(image)
            assert (tmp_path / "asked").read_text().splitlines() == [host, host]
        finally:
            removed(image)


def _basic(login: str) -> str:
    return base64.b64encode(login.encode()).decode()


async def _refused(engine: str, image: str) -> str:
    with pytest.raises(ImageUnavailable, match=image) as caught:
        await backend(engine).prepare(image)
    said = str(caught.value)
    assert "\n" not in said
    assert not any(secret in said for secret in ("w0rd", _basic(LOGIN), _basic(f"{LOGIN}x")))
    return said


@both
async def test_what_is_pulled_when(engine: str, archive: Path) -> None:
    asked: list[str] = []
    async with registry(archive, asked=asked) as host:
        image = f"{host}/box:1"
        try:
            with pytest.raises(ImageUnavailable, match="pull_policy is never"):
                await backend(engine, pull_policy="never").prepare(image)
            assert asked == []
            await backend(engine).prepare(image)
            pulled = len(asked)
            assert pulled > 0
            for policy in ("missing", "never"):
                await backend(engine, pull_policy=policy).prepare(image)
            assert len(asked) == pulled
            always = backend(engine, pull_policy="always")
            await asyncio.gather(*(always.prepare(image) for _ in range(4)))
            once_more = len(asked)
            assert once_more > pulled
            assert await printed(always, "echo ran", image=image) == "ran\n"
            assert len(asked) == once_more, "once for all who need it"
        finally:
            removed(image)
