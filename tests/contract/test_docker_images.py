"""Images are made ready once, within a limit, and what cannot be had says so by its class."""

import asyncio
import base64
import json
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.engine_stub import StubEngine, stub_engine
from tools.environments.base import EnvironmentSpec
from tools.environments.docker import DockerBackend
from tools.environments.owner import current_owner
from tools.errors import ImagePullFailed, ImageUnavailable, SetupFailed


@pytest.fixture
async def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StubEngine]:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/engine")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    async with stub_engine(tmp_path / "engine") as stub:
        yield stub


async def test_an_image_that_is_there_is_not_pulled(engine: StubEngine) -> None:
    engine.present.add("here:1")
    await DockerBackend().prepare("here:1")
    assert engine.pulls == []


async def test_four_processes_pull_an_image_once(engine: StubEngine) -> None:
    code = "import asyncio; from tools.environments.docker import DOCKER; asyncio.run(DOCKER.prepare('new:1'))"
    processes = [await asyncio.create_subprocess_exec(sys.executable, "-c", code) for _ in range(4)]
    assert [await process.wait() for process in processes] == [0] * 4
    assert engine.pulls == ["new:1"]


async def test_tasks_of_one_process_pull_an_image_once(engine: StubEngine) -> None:
    backend = DockerBackend()
    await asyncio.gather(*(backend.prepare("new:2") for _ in range(8)), backend.prepare("new:3"))
    assert sorted(engine.pulls) == ["new:2", "new:3"]


@pytest.mark.parametrize("image", ["none:1", "private:1"])
async def test_an_image_that_cannot_be_had_is_not_retryable(engine: StubEngine, image: str) -> None:
    with pytest.raises(ImageUnavailable, match=image) as caught:
        await DockerBackend().prepare(image)
    assert not caught.value.retryable
    assert engine.pulls == [image]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "image", ["-rm", "a b", "a\nb", "../../containers/create", "x/../../info", "x?y", "x#y", "x;id", "é"]
)
async def test_what_is_no_name_never_reaches_the_engine(engine: StubEngine, image: str) -> None:
    with pytest.raises(ImageUnavailable, match="not the name of an image"):
        await DockerBackend().prepare(image)
    assert engine.pulls == []


async def test_what_another_try_can_mend_is_tried_three_times(engine: StubEngine) -> None:
    images = ["offline:1", "limited:1", "cut:1"]
    ends = await asyncio.gather(*(DockerBackend().prepare(image) for image in images), return_exceptions=True)
    assert [type(end) for end in ends] == [ImagePullFailed] * 3
    assert "no such host" in str(ends[0])
    assert "rate limit" in str(ends[1])
    assert sorted(engine.pulls) == sorted(images * 3)


async def test_a_pull_that_broke_once_goes_on(engine: StubEngine) -> None:
    await DockerBackend().prepare("flaky:1")
    assert engine.pulls == ["flaky:1"] * 2


async def test_a_pull_has_a_limit_of_its_own_and_the_next_may_try(engine: StubEngine) -> None:
    with pytest.raises(ImagePullFailed, match=r"slow:1: pull not finished within 0\.3 s"):
        await DockerBackend(pull_seconds=0.3).prepare("slow:1")
    ends = await asyncio.gather(
        *(DockerBackend(pull_seconds=0.3).prepare("slow:1") for _ in range(3)), return_exceptions=True
    )
    assert [type(end) for end in ends] == [ImagePullFailed] * 3  # also those that only waited for the lock


async def test_there_is_no_limit_of_connections(engine: StubEngine) -> None:
    backend = DockerBackend()  # each channel holds a connection; aiohttp's own limit is 100
    pulls = [asyncio.ensure_future(backend.prepare(f"slow:{n}")) for n in range(120)]
    async with asyncio.timeout(20):
        while len(engine.pulls) < 120:  # noqa: ASYNC110 - the stub counts, it does not signal
            await asyncio.sleep(0.02)
        engine.present.add("here:1")
        await backend.prepare("here:1")
    for pull in pulls:
        pull.cancel()
    await asyncio.wait(pulls)


@pytest.mark.parametrize(
    ("registry", "image"),
    [
        ("https://index.docker.io/v1/", "tool:1"),
        ("https://index.docker.io/v1/", "me/tool"),
        ("registry.example:5000", "registry.example:5000/tool:1"),
    ],
)
async def test_credentials_of_the_docker_command_go_to_their_registry_only(
    engine: StubEngine, tmp_path: Path, registry: str, image: str
) -> None:
    auths = {registry: {"auth": base64.b64encode(b"me:pass:word").decode()}}
    (tmp_path / "config.json").write_text(json.dumps({"auths": auths}))
    backend = DockerBackend()
    await backend.prepare(image)
    await backend.prepare("other.example/tool:1")
    assert engine.credentials == [{"username": "me", "password": "pass:word"}, {}]


@pytest.mark.parametrize("settings", ["", "[]", '{"auths": 3}', '{"auths": {"registry.example": {"auth": "%"}}}'])
async def test_settings_without_use_are_no_obstacle(engine: StubEngine, tmp_path: Path, settings: str) -> None:
    (tmp_path / "config.json").write_text(settings)
    await DockerBackend().prepare("registry.example/tool")
    assert engine.credentials == [{}]
    assert engine.pulls == ["registry.example/tool:latest"]


async def test_an_engine_that_drops_limits_gets_no_container(engine: StubEngine) -> None:
    engine.present.add("here:1")
    engine.info = {"MemoryLimit": False, "CpuCfsQuota": True, "PidsLimit": False}
    problem = "cannot limit a container here (memory, process)"
    assert problem in await DockerBackend().check()
    spec = EnvironmentSpec(task_id="t", owner=current_owner("r"), deadline=2e9, image="here:1")
    with pytest.raises(SetupFailed, match=re.escape(problem)):
        async with DockerBackend().open(spec):
            pass
