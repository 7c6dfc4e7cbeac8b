"""Sandboxes of Modal (https://modal.com): one a task, tagged, and ended by the service itself after the task's time.

The sandbox's main process does nothing but reap; channels are further shells in it (`Sandbox.exec`). Nothing but
/bin/sh, and `cat` to read files, is asked of an image.

The SDK: https://modal.com/docs/sdk/py/latest.
"""

import asyncio
import math
import posixpath
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING

from tools.environments.base import DEFAULT_IMAGE, Environment, EnvironmentSpec, Owner
from tools.environments.channel import Channel, base_variables
from tools.environments.ending import uninterrupted
from tools.environments.images import PULL_SECONDS
from tools.environments.modal_connection import (
    UNREACHED,
    ModalChannel,
    State,
    connected,
    open_channel,
    service_errors,
    start_errors,
)
from tools.environments.owner import current_owner, is_dead
from tools.environments.shell import ShellEnvironment
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
    from modal import App, Client, Image
    from modal import Sandbox as ModalSandbox

APP = "batch-runner"
DEFAULT_CWD = "/workspace"
_TAG = "batch-runner-"
_DAY = 86_400  # seconds that a sandbox may live, as the service has it
_SPARE = 300
_CHECK_SECONDS = 6.0  # to connect, and for an answer: who lists the backends waits for ten
_START_SECONDS = 120.0
_CHANNEL_SECONDS = 30.0
_REMOVE_SECONDS = 9.0
_SLOW_REMOVE_SECONDS = 4.0  # where the service was too slow before
_REAP_SECONDS = 60.0
_REAP_SILENT_SECONDS = 10.0  # a run waits for it before it ends
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@/-]*", re.ASCII)  # it becomes a line of a Dockerfile
_MAIN = "trap '' HUP INT TERM; while sleep 86400 & wait; do :; done; while read -r _; do :; done"


class ModalBackend:
    """See `Backend`."""

    name = "modal"
    takes_images = True
    isolates = True

    def __init__(self, build_seconds: float = PULL_SECONDS) -> None:
        self._build_seconds = build_seconds
        self._unremoved: list[str] = []

    async def check(self) -> str:
        """See `Backend.check`. The service is asked."""
        try:
            client = await connected(_CHECK_SECONDS)
            with start_errors():
                async with asyncio.timeout(_CHECK_SECONDS):
                    await client.hello.aio()  # type: ignore[no-untyped-call]
        except SetupTimeout:
            return UNREACHED
        except RowFailed as problem:
            return str(problem)
        return ""

    def warnings(self) -> Sequence[str]:
        """See `Outspoken`."""
        return ("modal does not limit processes: root, as which most images run, may start any number",)

    async def prepare(self, image: str) -> None:
        """See `Backend.prepare`: the service builds it from its registry, once. SetupFailed without the service."""
        await self._built(image or DEFAULT_IMAGE)

    async def _built(self, image: str) -> "tuple[App, Image]":
        """The image as the service has it, and our app there. Raises ImageUnavailable, ImagePullFailed, SetupFailed."""
        if not _IMAGE.fullmatch(image):
            raise ImageUnavailable(f"{image[:200]!r} is not the name of an image")
        client = await connected()
        import modal  # noqa: PLC0415 - an optional package and slow, imported when used

        with start_errors():
            async with asyncio.timeout(_START_SECONDS):
                app = await modal.App.lookup.aio(APP, client=client, create_if_missing=True)
        wanted = modal.Image.from_registry(image, setup_dockerfile_commands=["ENTRYPOINT []"])
        try:
            with start_errors():
                async with asyncio.timeout(self._build_seconds):
                    return app, await _image(wanted, app, image)
        except SetupTimeout:
            raise ImagePullFailed(f"image {image}: not built within {self._build_seconds:g} s") from None

    @asynccontextmanager
    async def open(self, spec: EnvironmentSpec) -> AsyncIterator[Environment]:
        """See `Backend.open`."""
        _check_spec(spec)
        app, image = await self._built(spec.image or DEFAULT_IMAGE)
        state = State()
        async with AsyncExitStack() as stack:
            with start_errors():
                async with asyncio.timeout(_START_SECONDS):
                    made = await _created(app, image, spec, stack, state, self._unremoved.append)
                    sandbox = Sandbox(spec, made, state)
                    environment = await sandbox.environment()
                    stack.push_async_callback(environment.leave)
                    stack.callback(state.end)
                    await environment.enter()
            yield environment

    async def reap(self) -> int:
        """See `Backend.reap`: sandboxes that were made from this machine. Others end by themselves soon after their
        deadline. Nobody waits long for a service that is silent."""
        try:
            async with asyncio.timeout(_REAP_SECONDS), asyncio.timeout(_REAP_SILENT_SECONDS) as silence:
                return await _reaped(await connected(), silence)
        except (RowFailed, TimeoutError):
            return 0

    def unremoved(self) -> tuple[str, ...]:
        """See `Rented`."""
        names, self._unremoved[:] = tuple(self._unremoved), ()
        return names

    async def remove(self, name: str) -> bool:
        """See `Rented`; the name is the service's."""
        try:
            client = await connected(_CHECK_SECONDS)
            with service_errors():
                async with asyncio.timeout(_REMOVE_SECONDS):
                    return await _terminated(name, client)
        except RowFailed:
            return False


MODAL = ModalBackend()


def _check_spec(spec: EnvironmentSpec) -> None:
    """Raises SandboxRefused for what the service does not have."""
    if spec.volumes:
        raise SandboxRefused(f"volume {spec.volumes[0]!r}: the modal backend shows no folders of this machine")
    if spec.deadline - time.time() > _DAY:
        raise SandboxRefused("the modal backend's sandboxes live 24 hours at most: set a shorter timeout")


async def _image(wanted: "Image", app: "App", name: str) -> "Image":
    from modal.exception import ImageBuildError, InvalidError, NotFoundError  # noqa: PLC0415 - as above

    try:
        return await wanted.build.aio(app)
    except ImageBuildError as error:
        kind = ImagePullFailed if re.search(r"terminated due to|timed out", str(error)) else ImageUnavailable
        raise kind(f"image {name}: {one_line(str(error))}") from None
    except (InvalidError, NotFoundError) as error:
        raise ImageUnavailable(f"image {name}: {one_line(str(error))}") from None


async def _terminated(name: str, client: "Client") -> bool:
    import modal  # noqa: PLC0415 - an optional package and slow, imported when used
    from modal.exception import NotFoundError  # noqa: PLC0415 - as above

    with suppress(NotFoundError):
        sandbox = await modal.Sandbox.from_id.aio(name, client=client)
        await sandbox.terminate.aio()
        await sandbox.detach.aio()  # type: ignore[no-untyped-call]
    return True


async def _created(
    app: "App",
    image: "Image",
    spec: EnvironmentSpec,
    stack: AsyncExitStack,
    state: State,
    left: Callable[[str], None],
) -> "ModalSandbox":
    """A sandbox that `stack` removes, also if its creation is interrupted: the service may still be at it. `left` is
    told its name if that fails."""
    import modal  # noqa: PLC0415 - an optional package and slow, imported when used

    limits = spec.limits
    creating = asyncio.ensure_future(
        modal.Sandbox.create.aio(
            *("/bin/sh", "-c", _MAIN),
            app=app,
            image=image,
            tags=tags_of(spec),
            timeout=lifetime(spec, time.time()),
            cpu=(limits.cpus, limits.cpus),
            memory=(limits.memory_mb, limits.memory_mb),
            block_network=limits.network == "none",
        )
    )

    async def remove() -> None:
        name = ""
        try:
            with suppress(EnvironmentLost), service_errors():
                sandbox = await creating
                name = sandbox.object_id
                await sandbox.terminate.aio()
                name = ""
                await sandbox.detach.aio()  # type: ignore[no-untyped-call]
        finally:
            if name:
                left(name)

    stack.push_async_callback(lambda: uninterrupted(remove(), _SLOW_REMOVE_SECONDS if state.slow else _REMOVE_SECONDS))
    return await asyncio.shield(creating)


def lifetime(spec: EnvironmentSpec, now: float) -> int:
    """Seconds after which the service ends the sandbox by itself: more than the task has, as far as it goes."""
    return math.ceil(min(max(spec.deadline - now, 0) + _SPARE, _DAY))


class Sandbox:
    """A sandbox of the service and what opens channels into it."""

    def __init__(self, spec: EnvironmentSpec, sandbox: "ModalSandbox", state: State) -> None:
        self._spec = spec
        self._sandbox = sandbox
        self._state = state
        self._first: ModalChannel | None = None

    async def environment(self) -> ShellEnvironment:
        """What acts in it. Raises SetupFailed if no shell runs there."""
        image = self._spec.image or DEFAULT_IMAGE
        try:
            with service_errors():
                self._first, facts = await open_channel(self._sandbox, self._spec.limits.pids, self._state)
        except EnvironmentLost as lost:
            if isinstance(lost.__cause__, TimeoutError):
                raise
            raise SetupFailed(f"image {image}: /bin/sh does not run in it ({lost})") from None
        home, temp, private, user = facts
        return ShellEnvironment(
            self._spec,
            backend="modal",
            image=image,
            cwd=posixpath.join(DEFAULT_CWD, self._spec.cwd),
            private=f"{private}.batch-",
            variables=base_variables(home=home, temp=temp, user=user),
            open_channel=self._open_channel,
        )

    async def _open_channel(self) -> Channel:
        """One more shell in it. Raises EnvironmentLost."""
        first, self._first = self._first, None
        if first:
            return first
        self._state.refuse_lost()
        with service_errors():
            try:
                async with asyncio.timeout(_CHANNEL_SECONDS):
                    channel, _ = await open_channel(self._sandbox, self._spec.limits.pids, self._state)
            except TimeoutError:
                self._state.lose()
                raise
        return channel


def tags_of(spec: EnvironmentSpec) -> dict[str, str]:
    """The owner and the deadline, in words that any service takes as tags."""
    owner = spec.owner
    texts = {
        "run": owner.run_id,
        "task": spec.task_id,
        "boot": owner.boot_id,
        "namespace": owner.pid_namespace,
        "pid": f"{owner.pid}",
        "start": f"{owner.start_time}",
        "deadline": f"{spec.deadline:.0f}",
    }
    return {f"{_TAG}{name}": _word(text) for name, text in texts.items()}


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-")[:60] or "none"


def is_stale(tags: Mapping[str, str], now: float) -> bool:
    """Whether nobody needs a sandbox with these tags: its owner is known to be dead, or its deadline has passed."""
    here = current_owner("")
    found = {name: tags.get(f"{_TAG}{name}", "") for name in ("boot", "namespace", "pid", "start", "deadline")}
    try:
        pid, start, deadline = (int(found[name]) for name in ("pid", "start", "deadline"))
    except ValueError:
        return False
    same = (found["boot"], found["namespace"]) == (_word(here.boot_id), _word(here.pid_namespace))
    owner = Owner(run_id="", boot_id=here.boot_id, pid_namespace=here.pid_namespace, pid=pid, start_time=start)
    return deadline < now or (same and bool(is_dead(owner)))


async def _reaped(client: "Client", silence: asyncio.Timeout) -> int:
    """How many sandboxes of the dead were ended. Every answer puts off the end of `silence`."""
    import modal  # noqa: PLC0415 - an optional package and slow, imported when used
    from modal.exception import NotFoundError  # noqa: PLC0415 - as above

    with service_errors():
        try:
            app = await modal.App.lookup.aio(APP, client=client)
        except NotFoundError:  # nothing was ever made there
            return 0
        ours = {f"{_TAG}boot": _word(current_owner("").boot_id)}
        found = []
        async for sandbox in modal.Sandbox.list.aio(app_id=app.app_id, tags=ours, client=client):
            _put_off(silence)
            found.append(sandbox)
    return sum(await asyncio.gather(*(_ended(sandbox, silence) for sandbox in found)))


async def _ended(sandbox: "ModalSandbox", silence: asyncio.Timeout) -> bool:
    """Whether it was stale, and is gone now."""
    try:
        with service_errors():
            tags = await sandbox.get_tags.aio()
            _put_off(silence)
            if not is_stale(tags, time.time()):
                return False
            await sandbox.terminate.aio(wait=True)
            _put_off(silence)
            await sandbox.detach.aio()  # type: ignore[no-untyped-call]
    except EnvironmentLost:
        return False
    return True


def _put_off(silence: asyncio.Timeout) -> None:
    """The service has answered."""
    if not silence.expired():
        silence.reschedule(asyncio.get_running_loop().time() + _REAP_SILENT_SECONDS)
