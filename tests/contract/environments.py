"""Sandboxes to test: every backend of this list has to pass the same suite."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import pytest

from tests.contract.daytona_server import use_shared as use_daytona
from tests.contract.modal_server import use_service as use_modal
from tests.contract.ssh_server import shared_settings
from tools.environments.base import Backend, BackendSettings, Environment, EnvironmentSpec, Limits
from tools.environments.owner import current_owner
from tools.environments.table import load_backend

BACKENDS = ("local", "bubblewrap", "docker", "podman", "singularity", "ssh", "daytona", "modal")
ISOLATING = tuple(name for name in BACKENDS if name not in ("local", "ssh"))
MOUNTING = tuple(name for name in ISOLATING if name not in ("daytona", "modal"))
UNCOUNTED = ("modal",)  # `ulimit -u` is all there is, and the root of the stand-in's containers escapes it
LEAST_MEMORY = {"daytona": 1024}  # MiB: a service sells no less
RUN_ID = "conformance"
IMAGES = {"singularity": "/var/tmp/batch-runner-test-images/py"}  # made by apptainer.sh: its usual one is a registry's


def make_spec(**changes: object) -> EnvironmentSpec:
    settings: dict[str, object] = {
        "task_id": "task_0",
        "owner": current_owner(RUN_ID),
        "deadline": time.time() + 600,
        "limits": Limits(memory_mb=1024, pids=256),
        **changes,
    }
    return EnvironmentSpec(**settings)  # type: ignore[arg-type]


def backend_of(name: str) -> Backend:
    """The backend with what it has to be told to work here."""
    if name == "daytona":
        use_daytona()
    if name == "modal":
        use_modal()
    return load_backend(name, shared_settings() if name == "ssh" else BackendSettings())


def open_sandbox(name: str, **changes: object) -> AbstractAsyncContextManager[Environment]:
    return backend_of(name).open(make_spec(**{"image": IMAGES.get(name, ""), **changes}))


async def printed(environment: Environment, command: str, timeout: float = 20) -> str:
    """What a command that has to succeed prints."""
    result = await environment.run(command, timeout=timeout)
    assert result.exit_code == 0, result
    return result.output


async def bytes_of(environment: Environment, path: str) -> bytes:
    return b"".join([chunk async for chunk in environment.read(path)])


async def eventually(holds: Callable[[], Awaitable[bool]], seconds: float = 60) -> bool:
    """Whether a condition comes true in time."""
    until = time.monotonic() + seconds
    while not await holds():
        if time.monotonic() > until:
            return False
        await asyncio.sleep(0.03)
    return True


@pytest.fixture(params=BACKENDS)
def backend_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    backend_of(name)  # what is started for it is there for programs that the test starts, too
    return name


@pytest.fixture
async def sandbox(backend_name: str) -> AsyncIterator[Environment]:
    async with open_sandbox(backend_name) as environment:
        yield environment
