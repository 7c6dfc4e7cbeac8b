"""Sandboxes in Docker containers: one a task, labelled, gone with the process that made it.

We hold the stdin of the container's main process, which is a shell that does nothing but read it: if we die, however
that happens, the engine closes that stdin (`StdinOnce`), the shell ends, and the engine removes the container
(`AutoRemove`). Channels are further shells in it (`docker exec`). Nothing but /bin/sh is asked of an image.

The engine's API: https://docs.docker.com/reference/api/engine/.
"""

import asyncio
import io
import json
import os
import posixpath
import secrets
import tarfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.environments.base import Backend, Environment, EnvironmentSpec, Limits
from tools.environments.channel import base_variables
from tools.environments.docker_archive import archived_file
from tools.environments.docker_engine import (
    NOT_RUNNING,
    Clients,
    EngineChannel,
    EngineStream,
    engine_errors,
    open_channel,
    uninterrupted,
)
from tools.environments.docker_images import PULL_SECONDS, ready_image
from tools.environments.owner import LABEL, decode, encode, is_dead
from tools.environments.shell import ShellEnvironment
from tools.errors import EnvironmentLost, ImagePullFailed, SetupFailed, SetupTimeout

if TYPE_CHECKING:
    from aiodocker import Docker
    from aiodocker.containers import DockerContainer

DEFAULT_IMAGE = "python:3.11-slim"
DEFAULT_CWD = "/workspace"
_PRIVATE = "/.batch-runner"  # a tmpfs for the channels' own files
_RUN, _TASK, _DEADLINE = (f"batch-runner.{key}" for key in ("run", "task", "deadline"))
_CHECK_SECONDS = 5.0
_START_SECONDS = 120.0
_CHANNEL_SECONDS = 30.0
_REMOVE_SECONDS = 15.0
# The main process answers what we have to know of the image, then waits for the end of its stdin. Signals that a
# command sends to every `sh` it sees are not for it.
_MAIN = f"""\
trap '' HUP INT TERM
[ -d "$HOME" ] || HOME=/; t=/tmp; [ -d "$t" ] || t={_PRIVATE}
echo "$HOME"; echo "$t"; command -v cat || echo; echo ready
while read -r _; do :; done"""


class DockerBackend:
    """Containers of the engine that DOCKER_HOST or the docker context names."""

    name = "docker"
    takes_images = True
    isolates = True

    def __init__(self, pull_seconds: float = PULL_SECONDS) -> None:
        self._pull_seconds = pull_seconds
        self._clients = Clients()

    async def check(self) -> str:
        """ "" or why no container can be started here, and how to mend it."""
        try:
            async with asyncio.timeout(_CHECK_SECONDS), self._clients.use() as engine:
                with engine_errors():
                    _refuse_without_limits(await self._clients.info(engine))
        except SetupFailed as problem:
            return str(problem)
        except (EnvironmentLost, TimeoutError) as problem:
            return f"{NOT_RUNNING} ({str(problem) or f'no answer within {_CHECK_SECONDS:g} s'})"
        return ""

    async def prepare(self, image: str) -> None:
        """Pulls the image if it is not there. Raises ImageUnavailable, ImagePullFailed; SetupFailed without docker."""
        image = image or DEFAULT_IMAGE
        async with self._clients.use() as engine:
            try:
                with engine_errors():
                    await ready_image(engine, image, self._pull_seconds)
            except EnvironmentLost as problem:
                raise ImagePullFailed(f"image {image}: {problem}") from None

    def open(self, spec: EnvironmentSpec) -> AbstractAsyncContextManager[Environment]:
        """A container of its own, removed at the end whatever happens."""
        return self._open(spec)

    @asynccontextmanager
    async def _open(self, spec: EnvironmentSpec) -> AsyncIterator[Environment]:
        async with self._clients.use() as engine, AsyncExitStack() as stack:
            with engine_errors():
                image = await ready_image(engine, spec.image or DEFAULT_IMAGE, self._pull_seconds)
                _refuse_without_limits(await self._clients.info(engine))
            config = container_config(spec)
            with _start_errors():
                async with asyncio.timeout(_START_SECONDS):
                    container = await _created(engine, config, stack)
                    user = (image.get("Config") or {}).get("User") or "root"
                    if _workspace_is_for_root(spec, user):
                        await container.put_archive("/", _writable_directory(DEFAULT_CWD))  # type: ignore[no-untyped-call]
                    sandbox = Sandbox(spec, container)
                    environment = await sandbox.started(stack, user)
                    stack.push_async_callback(sandbox.end)
                    stack.push_async_callback(environment.leave)
                    stack.callback(sandbox.ending.set)
                    await environment.enter()
            yield environment

    async def reap(self) -> int:
        """Removes the containers of dead runs and those past their deadline; 0 where no engine answers."""
        try:
            async with self._clients.use() as engine:
                with engine_errors():
                    async with asyncio.timeout(_CHECK_SECONDS):
                        containers = await engine.containers.list(all=1, filters=json.dumps({"label": [LABEL]}))
                stale = [container for container in containers if is_stale(container["Labels"], time.time())]
                return sum(await asyncio.gather(*(_removed(container) for container in stale)))
        except (SetupFailed, EnvironmentLost):
            return 0


DOCKER: Backend = DockerBackend()


def container_config(spec: EnvironmentSpec) -> dict[str, Any]:
    """The body of containers/create: the main process is a shell that reads its stdin, which ends with us."""
    return {
        "Image": spec.image or DEFAULT_IMAGE,
        "Entrypoint": ["/bin/sh"],
        "Cmd": ["-c", _MAIN],
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "OpenStdin": True,
        "StdinOnce": True,
        "WorkingDir": DEFAULT_CWD,  # the engine makes it
        "Healthcheck": {"Test": ["NONE"]},
        "StopTimeout": 1,
        "Labels": {
            _RUN: spec.owner.run_id,
            _TASK: spec.task_id,
            LABEL: encode(spec.owner),
            _DEADLINE: f"{spec.deadline:.0f}",
        },
        "HostConfig": {
            **_limits(spec.limits),
            "Init": True,
            "AutoRemove": True,
            "LogConfig": {"Type": "none"},
            "SecurityOpt": ["no-new-privileges"],
            "Mounts": [_mount(volume) for volume in spec.volumes],
            "Tmpfs": {_PRIVATE: "rw,exec,mode=1777,size=64m"},
        },
    }


def _limits(limits: Limits) -> dict[str, Any]:
    memory = limits.memory_mb * 1024 * 1024
    return {
        "NanoCpus": round(limits.cpus * 1e9),
        "Memory": memory,
        "MemorySwap": memory,
        "PidsLimit": limits.pids,
        "NetworkMode": "none" if limits.network == "none" else "default",
    }


def _mount(volume: str) -> dict[str, Any]:
    """HOST:SANDBOX[:ro] as a bind mount, whose source has to exist. Raises SetupFailed."""
    source, separator, rest = volume.partition(":")
    target, _, mode = rest.partition(":")
    if not separator or not target.startswith("/") or mode not in ("", "ro", "rw"):
        raise SetupFailed(f"volume {volume!r}: HOST:SANDBOX[:ro] expected, SANDBOX an absolute path")
    return {
        "Type": "bind",
        "Source": str(Path(source).expanduser().absolute()),
        "Target": target,
        "ReadOnly": mode == "ro",
    }


def _refuse_without_limits(info: Mapping[str, Any]) -> None:
    """Raises SetupFailed where the engine would drop a limit and start the container all the same."""
    flags = {"memory": "MemoryLimit", "cpu": "CpuCfsQuota", "process": "PidsLimit"}
    missing = [limit for limit, flag in flags.items() if info.get(flag) is False]
    if missing:
        raise SetupFailed(f"docker cannot limit a container here ({', '.join(missing)}): see docker info, cgroups")


@contextmanager
def _start_errors() -> Iterator[None]:
    """What a container did not start for: SetupFailed, SetupTimeout, or EnvironmentLost where the engine went."""
    from aiodocker import DockerError  # noqa: PLC0415 - an optional package, imported when used

    try:
        with engine_errors():
            yield
    except EnvironmentLost as lost:
        cause = lost.__context__
        if isinstance(cause, TimeoutError):
            raise SetupTimeout("docker took too long to start a container") from None
        if isinstance(cause, DockerError) and cause.status in range(400, 600):
            raise SetupFailed(str(lost)) from None
        raise


class DockerEnvironment(ShellEnvironment):
    """Shell channels into a container; `catless` is the container where its image has no `cat`."""

    catless: "DockerContainer | None" = None

    def read(self, path: str) -> AsyncIterator[bytes]:
        """See `Environment.read`."""
        return archived_file(self.catless, os.fsdecode(self._path(path))) if self.catless else super().read(path)


class Sandbox:
    """A container and what opens channels into it."""

    def __init__(self, spec: EnvironmentSpec, container: "DockerContainer") -> None:
        self._spec = spec
        self._container = container
        self.ending = asyncio.Event()
        self._channels: list[EngineChannel] = []

    async def started(self, stack: AsyncExitStack, user: str) -> ShellEnvironment:
        """Starts the container, its main shell's streams in our hands from the first byte on, until `stack` ends them.

        Raises SetupFailed if no shell runs in it.
        """
        image = self._spec.image or DEFAULT_IMAGE
        main = EngineStream(self._container.attach(stdin=True, stdout=True, stderr=True))
        stack.push_async_callback(main.close)
        await main.connect()
        await self._container.start()
        try:
            home, temp, cat = (await main.lines_before("ready"))[-3:]
        except EnvironmentLost as lost:
            raise SetupFailed(f"image {image}: /bin/sh does not run in it ({lost})") from None
        environment = DockerEnvironment(
            self._spec,
            backend="docker",
            image=image,
            cwd=posixpath.join(DEFAULT_CWD, self._spec.cwd),
            private=f"{_PRIVATE}/",
            variables=base_variables(home=home, temp=temp, user=user.partition(":")[0]),
            open_channel=self.open_channel,
        )
        environment.catless = None if cat else self._container
        return environment

    async def open_channel(self) -> EngineChannel:
        """One more shell in it. Raises EnvironmentLost."""
        with engine_errors():
            async with asyncio.timeout(_CHANNEL_SECONDS):
                channel = await open_channel(self._container, self.ending)
        self._channels.append(channel)
        return channel

    async def end(self) -> None:
        """Closes what is still open, to be called when no more channels are wanted."""
        for channel in self._channels:
            await channel.close()


def _workspace_is_for_root(spec: EnvironmentSpec, user: str) -> bool:
    """Whether the engine makes /workspace for root, who is not the image's user. A volume there is not touched."""
    mounted = any(volume.split(":")[1:2] == [DEFAULT_CWD] for volume in spec.volumes)
    return user.partition(":")[0] not in ("root", "0") and not mounted


def _writable_directory(path: str) -> bytes:
    """A tar archive of one directory that everybody may write to, for images that run as an ordinary user."""
    entry = tarfile.TarInfo(path.strip("/"))
    entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(entry)
    return archive.getvalue()


async def _created(engine: "Docker", config: dict[str, Any], stack: AsyncExitStack) -> "DockerContainer":
    """A container that `stack` removes, also if its creation is interrupted: the engine may still be at it."""
    creating = asyncio.ensure_future(engine.containers.create(config, name=f"batch-runner-{secrets.token_hex(8)}"))

    async def remove() -> None:
        with suppress(EnvironmentLost), engine_errors():
            await _removed(await creating)

    stack.push_async_callback(lambda: uninterrupted(remove(), _REMOVE_SECONDS))
    return await asyncio.shield(creating)


async def _removed(container: "DockerContainer") -> bool:
    """Whether it is gone, within a bound."""
    try:
        with engine_errors():
            async with asyncio.timeout(_REMOVE_SECONDS):
                await _delete(container)
    except EnvironmentLost:
        return False
    return True


async def _delete(container: "DockerContainer") -> None:
    """Force, with its anonymous volumes; returns when it is gone."""
    from aiodocker import DockerError  # noqa: PLC0415 - an optional package, imported when used

    while True:
        try:
            return await container.delete(force=True, v=True)
        except DockerError as error:
            if error.status == 404:
                return None
            if error.status != 409:  # 409: it is being removed at this moment
                raise
            await asyncio.sleep(0.05)


def is_stale(labels: Mapping[str, str], now: float) -> bool:
    """Whether nobody needs a container with these labels: its owner is known to be dead, or its deadline has passed."""
    owner = decode(labels.get(LABEL, ""))
    try:
        return float(labels.get(_DEADLINE, "inf")) < now or bool(owner and is_dead(owner))
    except ValueError:
        return False
