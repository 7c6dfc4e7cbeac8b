"""Sandboxes in containers of Docker's engine, or Podman's: one a task, labelled, gone with the process that made it.

We hold the stdin of the container's main process, which is a shell that does nothing but read it: if we die, however
that happens, the engine closes that stdin (`StdinOnce`), the shell ends, and the engine removes the container
(`AutoRemove`). Channels are further shells in it (`docker exec`). Nothing but /bin/sh is asked of an image. Networks
are never made: all containers are in the engine's own, or in one that is there.

The engine's API: https://docs.docker.com/reference/api/engine/.
"""

import asyncio
import json
import os
import posixpath
import re
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.environments.base import DEFAULT_IMAGE, Backend, BackendSettings, Environment, EnvironmentSpec
from tools.environments.channel import OpenChannel, base_variables
from tools.environments.docker_archive import archived_file
from tools.environments.docker_container import (
    DEADLINE,
    DEFAULT_CWD,
    PRIVATE,
    container_config,
    is_for_root,
    mount_of,
    refuse_without_gpus,
    refuse_without_limits,
    writable_workspace,
)
from tools.environments.docker_engine import (
    Clients,
    EngineChannel,
    EngineStream,
    NotAnEngine,
    engine_errors,
    open_channel,
)
from tools.environments.docker_host import connected, is_here, not_running
from tools.environments.docker_images import Images, object_of
from tools.environments.ending import uninterrupted
from tools.environments.images import FOREIGN, PULL_SECONDS, for_another, platform_of
from tools.environments.owner import LABEL, decode, is_dead
from tools.environments.shell import ShellEnvironment
from tools.errors import EnvironmentLost, ImagePullFailed, SandboxRefused, SetupFailed, SetupTimeout

if TYPE_CHECKING:
    from aiodocker import Docker
    from aiodocker.containers import DockerContainer

_CHECK_SECONDS = {"docker": 10.0, "podman": 20.0}  # podman looks through all it has before it answers
_START_SECONDS = 120.0
_CHANNEL_SECONDS = 30.0
_REMOVE_SECONDS = 15.0
_HOPELESS = re.compile("unable to find (user|group) ")  # status 500 of docker, 409 of podman


class DockerBackend:
    """Containers of the engine `name` (docker or podman): see `docker_host.connected` for which one that is."""

    takes_images = True
    isolates = True

    def __init__(
        self,
        settings: BackendSettings = BackendSettings(),  # noqa: B008 - frozen
        *,
        name: str = "docker",
        pull_seconds: float = PULL_SECONDS,
    ) -> None:
        self.name = name
        self._settings = settings
        self._images = Images(settings.pull_policy, pull_seconds)
        self._clients = Clients(lambda: connected(name, settings))

    async def check(self) -> str:
        """ "" or why no container can be started here, and how to mend it."""
        try:
            async with asyncio.timeout(_CHECK_SECONDS[self.name]), self._clients.use() as engine:
                with engine_errors(self.name):
                    await self._refuse_what_it_lacks(engine)
        except SetupFailed as problem:
            return str(problem)
        except NotAnEngine as problem:
            return str(problem)
        except (EnvironmentLost, TimeoutError) as problem:
            return not_running(self.name, str(problem) or f"no answer within {_CHECK_SECONDS[self.name]:g} s")
        return ""

    async def _refuse_what_it_lacks(self, engine: "Docker") -> None:
        info = await self._clients.info(engine, again=True)
        refuse_without_limits(self.name, info)
        refuse_without_gpus(self.name, info, self._settings.gpus)
        network = self._settings.network
        if network in ("on", "none"):
            return
        if network not in {object_of(each).get("Name") for each in await engine.networks.list()}:
            raise SandboxRefused(f"network {network!r}: {self.name} has none of that name (see {self.name} network ls)")

    async def prepare(self, image: str) -> None:
        """Pulls the image as the settings say. Raises ImageUnavailable, ImagePullFailed; SetupFailed without engine."""
        image = image or DEFAULT_IMAGE
        async with self._clients.use() as engine:
            try:
                with engine_errors(self.name):
                    await self._images.ready(engine, image)
            except EnvironmentLost as problem:
                raise ImagePullFailed(f"image {image}: {problem}") from None

    def open(self, spec: EnvironmentSpec) -> AbstractAsyncContextManager[Environment]:
        """A container of its own, removed at the end whatever happens."""
        return self._open(spec)

    @asynccontextmanager
    async def _open(self, spec: EnvironmentSpec) -> AsyncIterator[Environment]:
        async with self._clients.use() as engine, AsyncExitStack() as stack:
            with engine_errors(self.name):
                image = await self._images.ready(engine, spec.image or DEFAULT_IMAGE)
                info = await self._clients.info(engine)
            refuse_without_limits(self.name, info)
            refuse_without_gpus(self.name, info, self._settings.gpus)
            config = container_config(spec, self._settings)
            if self.name == "podman" and is_here(self.name):
                _refuse_missing_sources(spec)
            with _start_errors(self.name):
                async with asyncio.timeout(_START_SECONDS):
                    container = await _created(engine, config, stack)
                    own_user = object_of(image.get("Config") or {}).get("User")
                    user = self._settings.container_user or str(own_user or "root")
                    opened = not is_for_root(spec, user)
                    if opened and not self._settings.read_only_root:
                        await container.put_archive("/", writable_workspace())  # type: ignore[no-untyped-call]
                    sandbox = Sandbox(self.name, spec, container)
                    environment = await sandbox.started(stack, user, _strangeness(image, info), platform_of(info))
                    if opened and self._settings.read_only_root:
                        await sandbox.open_workspace()
                    stack.push_async_callback(sandbox.end)
                    stack.push_async_callback(environment.leave)
                    stack.callback(sandbox.ending.set)
                    await environment.enter()
            yield environment

    async def reap(self) -> int:
        """Removes the containers of dead runs and those past their deadline; 0 where no engine answers."""
        try:
            async with self._clients.use() as engine:
                with engine_errors(self.name):
                    async with asyncio.timeout(_CHECK_SECONDS[self.name]):
                        containers = await engine.containers.list(all=1, filters=json.dumps({"label": [LABEL]}))
                    stale = [each for each in containers if is_stale(object_of(each["Labels"] or {}), time.time())]
                return sum(await asyncio.gather(*(_removed(container) for container in stale)))
        except (SetupFailed, EnvironmentLost):
            return 0


DOCKER: Backend = DockerBackend()


@cache
def open_docker(settings: BackendSettings) -> Backend:
    """Docker's engine, told these settings."""
    return DockerBackend(settings)


@cache
def open_podman(settings: BackendSettings) -> Backend:
    """Podman's, through the service that speaks the same API."""
    return DockerBackend(settings, name="podman")


def _refuse_missing_sources(spec: EnvironmentSpec) -> None:
    """Podman makes an empty folder of a source that is not there; docker refuses, and so do we."""
    for source in (mount_of(volume)["Source"] for volume in spec.volumes):
        if not Path(source).exists():
            raise SandboxRefused(f"volume {source}: bind source path does not exist")


def _strangeness(image: Mapping[str, Any], info: Mapping[str, Any]) -> str:
    """Says of an image for other machines what it is, "" of one for the engine's."""
    wanted, here = platform_of(image), platform_of(info)
    if not wanted or not here or wanted == here:
        return ""
    return (
        f"the image is for {wanted}, the engine's machine is {here}: take one for that, or install emulation (binfmt)"
    )


@contextmanager
def _start_errors(name: str) -> Iterator[None]:
    """What a container did not start for: SetupFailed, SetupTimeout, or EnvironmentLost where the engine went."""
    from aiodocker import DockerError  # noqa: PLC0415 - an optional package, imported when used

    try:
        with engine_errors(name):
            yield
    except NotAnEngine:
        raise
    except EnvironmentLost as lost:
        cause = lost.__context__
        if isinstance(cause, TimeoutError):
            raise SetupTimeout(f"{name} took too long to start a container") from None
        if isinstance(cause, DockerError) and cause.status in range(400, 600):
            is_hopeless = cause.status == 400 or _HOPELESS.search(str(lost)) or FOREIGN.search(str(lost))
            raise (SandboxRefused if is_hopeless else SetupFailed)(str(lost)) from None
        raise


class DockerEnvironment(ShellEnvironment):
    """Shell channels into a container; `catless` is the container where its image has no `cat`."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        *,
        backend: str,
        variables: Mapping[str, str],
        open_channel: OpenChannel,
        catless: "DockerContainer | None",
    ) -> None:
        super().__init__(
            spec,
            backend=backend,
            image=spec.image or DEFAULT_IMAGE,
            cwd=posixpath.join(DEFAULT_CWD, spec.cwd),
            private=f"{PRIVATE}/",
            variables=variables,
            open_channel=open_channel,
        )
        self._catless = catless

    def read(self, path: str) -> AsyncIterator[bytes]:
        """See `Environment.read`."""
        if self._catless:
            return archived_file(self._catless, os.fsdecode(self._path(path)), self.backend)
        return super().read(path)


class Sandbox:
    """A container and what opens channels into it."""

    def __init__(self, engine_name: str, spec: EnvironmentSpec, container: "DockerContainer") -> None:
        self._engine_name = engine_name
        self._spec = spec
        self._container = container
        self.ending = asyncio.Event()
        self._channels: list[EngineChannel] = []

    async def started(self, stack: AsyncExitStack, user: str, strangeness: str, here: str) -> ShellEnvironment:
        """Starts the container, its main shell's streams in our hands from the first byte on, until `stack` ends them.

        Raises SetupFailed if no shell runs in it, SandboxRefused if `strangeness` says why or its programs are not for
        `here`, the engine's machine.
        """
        image = self._spec.image or DEFAULT_IMAGE
        main = EngineStream(self._container.attach(stdin=True, stdout=True, stderr=True))
        stack.push_async_callback(main.close)
        await main.connect()
        await self._container.start()
        try:
            home, temp, cat = (await main.lines_before("ready"))[-3:]
        except EnvironmentLost as lost:
            if not strangeness and FOREIGN.search(str(lost)):
                strangeness = for_another(f"the engine's machine, {here}")
            if strangeness:
                raise SandboxRefused(f"image {image}: /bin/sh does not run in it: {strangeness}") from None
            raise SetupFailed(f"image {image}: /bin/sh does not run in it ({lost})") from None
        return DockerEnvironment(
            self._spec,
            backend=self._engine_name,
            variables=base_variables(home=home, temp=temp, user=user.partition(":")[0]),
            open_channel=self.open_channel,
            catless=None if cat else self._container,
        )

    async def open_workspace(self) -> None:
        """Everybody may write to it. Of a volume only a process inside can say so. Raises SandboxRefused."""
        execution = await self._container.exec(["chmod", "1777", DEFAULT_CWD], user="0")
        stream = EngineStream(execution.start())
        try:
            await stream.connect()
            while await stream.read():
                pass
        finally:
            await stream.close()
        if (await execution.inspect()).get("ExitCode"):
            raise SandboxRefused(f"image {self._spec.image}: read_only_root for an ordinary user takes a `chmod` in it")

    async def open_channel(self) -> EngineChannel:
        """One more shell in it. Raises EnvironmentLost."""
        with engine_errors(self._engine_name):
            async with asyncio.timeout(_CHANNEL_SECONDS):
                channel = await open_channel(self._container, self.ending)
        self._channels.append(channel)
        return channel

    async def end(self) -> None:
        """Closes what is still open, to be called when no more channels are wanted."""
        for channel in self._channels:
            await channel.close()


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
        return float(labels.get(DEADLINE, "inf")) < now or bool(owner and is_dead(owner))
    except ValueError:
        return False
