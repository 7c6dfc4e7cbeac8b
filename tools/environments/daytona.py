"""Sandboxes of the Daytona service: one a task, labelled with its owner, deleted with the task.

The service deletes one by itself some time after its deadline, so that nothing is paid for long when this machine dies.
Commands and files go through terminals (`daytona_channel`), which is the one stream in both directions that the service
has; its own file and command calls take a request each and know neither descendants nor bytes.
"""

import asyncio
import math
import posixpath
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from tools.environments import daytona_script as script
from tools.environments.base import DEFAULT_IMAGE, Backend, Environment, EnvironmentSpec, Limits
from tools.environments.channel import OpenChannel, base_variables
from tools.environments.daytona_channel import Door
from tools.environments.daytona_connection import Clients, Unreachable, service_errors
from tools.environments.ending import to_the_end
from tools.environments.images import is_refusal
from tools.environments.owner import LABEL, decode, encode, is_dead
from tools.environments.shell import ShellEnvironment, new_token
from tools.errors import (
    EnvironmentLost,
    ImagePullFailed,
    ImageUnavailable,
    RowFailed,
    SandboxRefused,
    SetupFailed,
    SetupTimeout,
)
from tools.text import one_line

if TYPE_CHECKING:
    from daytona import AsyncDaytona, AsyncSandbox, CreateSandboxFromImageParams

_OF_AN_IMAGE = re.compile(r"\b(image|manifest|pull|registry|repository|snapshot)", re.IGNORECASE)
_OURS = "batch-runner"
_RUN, _TASK, _DEADLINE = (f"batch-runner.{key}" for key in ("run", "task", "deadline"))
_CHECK_SECONDS = 20.0
_MAKE_SECONDS = 600  # the service may have to build an image that it has not seen before
_SET_UP_SECONDS = 60
_REMOVE_SECONDS = 9.0
_REAP_SECONDS = 60.0
_SPARE_MINUTES = 10  # after the deadline, until the service itself deletes a sandbox


class DaytonaBackend:
    """See `Backend`."""

    name = "daytona"
    takes_images = True
    isolates = True

    def __init__(self) -> None:
        self._clients = Clients()
        self._unremoved: list[str] = []

    async def check(self) -> str:
        """See `Backend.check`: the service is asked."""
        try:
            async with self._clients.use() as client:
                with service_errors():
                    async with asyncio.timeout(_CHECK_SECONDS):
                        await _listed(client, 1)
        except RowFailed as problem:
            return str(problem)
        return ""

    async def prepare(self, image: str) -> None:
        """Nothing: the service builds an image when a sandbox is made of it, and keeps it."""

    @asynccontextmanager
    async def open(self, spec: EnvironmentSpec) -> AsyncIterator[Environment]:
        """See `Backend.open`."""
        if spec.volumes:
            raise SandboxRefused("the daytona backend has no volumes: choose docker")
        if spec.limits.network not in ("on", "none"):
            raise SandboxRefused(f"the daytona backend has no network {spec.limits.network!r}: on or none")
        async with self._clients.use() as client, AsyncExitStack() as stack:
            sandbox = await _made(client, spec, stack, self._unremoved.append)
            place = Place(spec, sandbox)
            stack.push_async_callback(lambda: to_the_end(place.close()))
            environment = await place.environment()
            stack.push_async_callback(environment.leave)
            stack.callback(place.drop)
            await environment.enter()
            yield environment

    async def reap(self) -> int:
        """See `Backend.reap`; 0 where the service does not answer."""
        try:
            async with self._clients.use() as client:
                with service_errors():
                    async with asyncio.timeout(_REAP_SECONDS):
                        found = await _listed(client)
                stale = [sandbox for sandbox in found if is_stale(sandbox.labels, time.time())]
                gone = await asyncio.gather(*(_deleted(sandbox) for sandbox in stale))
        except RowFailed:
            return 0
        self._unremoved += [sandbox.name for sandbox, is_gone in zip(stale, gone, strict=True) if not is_gone]
        return sum(gone)

    def unremoved(self) -> tuple[str, ...]:
        """See `Rented`."""
        names, self._unremoved[:] = tuple(self._unremoved), ()
        return names

    async def remove(self, name: str) -> bool:
        """See `Rented`."""
        try:
            async with self._clients.use() as client:
                return await _deleted_by_name(client, name)
        except RowFailed:
            return False


DAYTONA: Backend = DaytonaBackend()


def request(spec: EnvironmentSpec, name: str) -> "CreateSandboxFromImageParams":
    """What is asked of the service: it outlives the row's deadline, and is deleted as soon as it stops."""
    from daytona import CreateSandboxFromImageParams, Resources  # noqa: PLC0415 - an optional package

    cpus, memory = whole(spec.limits)
    return CreateSandboxFromImageParams(
        name=name,
        image=spec.image or DEFAULT_IMAGE,
        resources=Resources(cpu=cpus, memory=memory),
        network_block_all=spec.limits.network == "none",
        auto_stop_interval=0,
        auto_delete_interval=0,
        ttl_minutes=max(1, math.ceil((spec.deadline - time.time()) / 60)) + _SPARE_MINUTES,
        labels={
            _OURS: "sandbox",
            _RUN: spec.owner.run_id,
            _TASK: spec.task_id,
            LABEL: encode(spec.owner),
            _DEADLINE: f"{spec.deadline:.0f}",
        },
    )


def whole(limits: Limits) -> tuple[int, int]:
    """(processors, GiB of memory) as the service sells them: rounded up."""
    return max(1, math.ceil(limits.cpus)), max(1, math.ceil(limits.memory_mb / 1024))


async def _made(
    client: "AsyncDaytona", spec: EnvironmentSpec, stack: AsyncExitStack, left: Callable[[str], None]
) -> "AsyncSandbox":
    """A sandbox that `stack` deletes, also if its making is interrupted: the service may still be at it. `left` is told
    its name if that fails.

    Raises ImageUnavailable, ImagePullFailed, SetupFailed, SetupTimeout.
    """
    name = f"batch-runner-{new_token()}"
    making = asyncio.ensure_future(client.create(request(spec, name), timeout=_MAKE_SECONDS))

    async def remove() -> None:
        is_gone = False
        try:
            await asyncio.wait({making}, timeout=_REMOVE_SECONDS)
            if making.done() and not making.cancelled() and not making.exception():
                is_gone = await _deleted(making.result())
            else:
                making.cancel()
                is_gone = await _deleted_by_name(client, name)
        finally:
            if not is_gone:
                left(name)

    stack.push_async_callback(lambda: to_the_end(remove()))
    try:
        with service_errors():
            return await asyncio.shield(making)
    except Unreachable as lost:
        raise SetupTimeout(str(lost)) if _took_too_long(lost) else SetupFailed(str(lost)) from None
    except EnvironmentLost as lost:
        raise await _reason(client, name, spec.image or DEFAULT_IMAGE, str(lost)) from None


def _took_too_long(lost: Unreachable) -> bool:
    from daytona import DaytonaTimeoutError  # noqa: PLC0415 - an optional package, imported when used

    return isinstance(lost.__cause__, DaytonaTimeoutError | TimeoutError)


async def _reason(client: "AsyncDaytona", name: str, image: str, fault: str) -> RowFailed:
    """Why no sandbox came: what the service says of it, where it is still there."""
    state, reason = "", ""
    with suppress(RowFailed), service_errors():
        async with asyncio.timeout(_CHECK_SECONDS):
            sandbox = await client.get(name)
            state, reason = str(sandbox.state and sandbox.state.value), sandbox.error_reason or ""
    reason = one_line(reason or fault)
    failed_build = state == "build_failed" or "build_failed" in fault.lower()
    if is_refusal(reason) and (failed_build or _OF_AN_IMAGE.search(reason)):
        return ImageUnavailable(f"image {image}: {reason}")
    if failed_build:
        return ImagePullFailed(f"image {image}: {reason}")
    return SetupFailed(f"daytona made no sandbox: {reason}")


class DaytonaEnvironment(ShellEnvironment):
    """Shells in terminals of a sandbox with these facts."""

    def __init__(self, spec: EnvironmentSpec, facts: script.Facts, open_channel: OpenChannel, token: str) -> None:
        super().__init__(
            spec,
            backend="daytona",
            image=spec.image or DEFAULT_IMAGE,
            cwd=posixpath.join(facts.cwd, spec.cwd),
            private=f"{facts.folder}/state.",
            variables=base_variables(home=facts.home, temp=facts.temp, user=facts.user),
            open_channel=open_channel,
            token=token,
        )
        self._ours = f"{facts.folder}/channel"


class Place:
    """A sandbox, its door, and what opens channels into it."""

    def __init__(self, spec: EnvironmentSpec, sandbox: "AsyncSandbox") -> None:
        self._spec = spec
        self._sandbox = sandbox
        self._door = Door()

    async def environment(self) -> ShellEnvironment:
        """What acts in it. Raises SetupFailed where the image or the service will not do, EnvironmentLost."""
        token = new_token()
        facts = await self._set_up(token)
        if script.unbounded(facts, self._spec.limits.pids):
            raise SandboxRefused(
                "daytona cannot limit the number of processes in this sandbox: its user is root of the whole machine,"
                " whom ulimit does not bind. Choose an image with another user, or a service that gives each sandbox a"
                " user namespace"
            )
        await self._door.open_door(self._sandbox, facts)
        channels = partial(self._door.open_channel, self._sandbox, facts)
        return DaytonaEnvironment(self._spec, facts, channels, token)

    async def _set_up(self, token: str) -> script.Facts:
        command = script.set_up(token, self._spec.limits.pids)
        with service_errors():
            async with asyncio.timeout(_SET_UP_SECONDS):
                answer = await self._sandbox.process.exec(command, timeout=_SET_UP_SECONDS)
        facts = script.read_facts(str(answer.result or ""))
        if isinstance(facts, str):
            raise SetupFailed(facts)
        return facts

    def drop(self) -> None:
        """Channels need not be ended one by one: the sandbox is about to be deleted."""
        self._door.lose()

    async def close(self) -> None:
        """Ends the connections."""
        await self._door.close()


async def _listed(client: "AsyncDaytona", most: int = 0) -> "list[AsyncSandbox]":
    from daytona import ListSandboxesQuery  # noqa: PLC0415 - an optional package, imported when used

    found = []
    async for sandbox in client.list(ListSandboxesQuery(labels={_OURS: "sandbox"}, limit=most or None)):
        found.append(sandbox)
        if len(found) == most:
            break
    return found


async def _deleted(sandbox: "AsyncSandbox") -> bool:
    """Whether the service has taken it on itself, or has none of it, within a bound."""
    from daytona import DaytonaNotFoundError  # noqa: PLC0415 - an optional package, imported when used

    try:
        with service_errors(), suppress(DaytonaNotFoundError):
            async with asyncio.timeout(_REMOVE_SECONDS):
                await sandbox.delete(timeout=_REMOVE_SECONDS)
    except RowFailed:
        return False
    return True


async def _deleted_by_name(client: "AsyncDaytona", name: str) -> bool:
    """As `_deleted`."""
    from daytona import DaytonaNotFoundError  # noqa: PLC0415 - an optional package, imported when used

    try:
        with service_errors():
            async with asyncio.timeout(_REMOVE_SECONDS):
                return await _deleted(await client.get(name))
    except EnvironmentLost as lost:
        return isinstance(lost.__cause__, DaytonaNotFoundError)
    except RowFailed:
        return False


def is_stale(labels: Mapping[str, str], now: float) -> bool:
    """Whether nobody needs a sandbox with these labels: its owner is known to be dead, or its deadline has passed.
    Owners on other machines are known by their deadline alone."""
    owner = decode(labels.get(LABEL, ""))
    try:
        return float(labels.get(_DEADLINE, "inf")) < now or bool(owner and is_dead(owner))
    except ValueError:
        return False
