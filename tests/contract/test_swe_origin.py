"""A base that the agent removed, with all that was kept of it: had again from where the repository came from."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from swe.origin import origin
from swe.patch import Base, Patch, keep, take
from swe.repository import fetch, place
from swe.types import Instance
from tests.contract.environments import open_sandbox, printed
from tests.contract.repositories import commit, git, make_repository
from tools.environments.base import BackendSettings, Environment

EDIT = "echo more >>a.txt; echo new >n.txt"
CLEAR = "rm -rf .git /tmp/* /var/tmp/* /dev/shm/*"
PLAIN = BackendSettings()
GONE = "the repository is gone: there is no .git in"
DOCKERFILE = """\
FROM batch-runner-test:py
COPY repo /testbed
RUN cd /testbed && echo untracked >u.txt
STOPSIGNAL SIGKILL
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = make_repository(tmp_path_factory.mktemp("origin") / "repo")
    commit(repository, **{"a.txt": b"one\n"})
    return repository


@pytest.fixture(scope="module")
def image(source: Path) -> Iterator[str]:
    """One with the repository in it, and a file that is in no commit."""
    name = f"origin-{os.getpid()}:latest"
    words = ["docker", "build", "-q", "-t", name, "-f", "-", str(source.parent)]
    variables = {**os.environ, "DOCKER_BUILDKIT": "0"}
    subprocess.run(words, input=DOCKERFILE.encode(), env=variables, capture_output=True, check=True)
    yield name
    subprocess.run(["docker", "rmi", "-f", name], capture_output=True, check=False)


async def kept(environment: Environment) -> Base:
    head = (await printed(environment, "git -c safe.directory='*' rev-parse HEAD")).strip()
    return await keep(environment, cwd=(await printed(environment, "pwd -P")).strip(), bases=[head])


def names(patch: Patch) -> list[str]:
    return [line.rpartition(" b/")[2] for line in patch.data.decode().splitlines() if line.startswith("diff --git ")]


async def test_out_of_the_image(image: str) -> None:
    async with open_sandbox("docker", image=image, cwd="/testbed") as environment:
        base = await kept(environment)
        await printed(environment, f"{EDIT}; echo {CLEAR} | sh; ls -A /tmp /var/tmp /dev/shm")
        result = await take(environment, base, origin=partial(origin, environment, base, {}, None, PLAIN))
        assert (result.problem, names(result)) == ("", ["a.txt", "n.txt"]), "what the image has in no commit, too"
        assert await asyncio.to_thread(sandboxes, image) == 1, "the second one is gone"


def sandboxes(image: str) -> int:
    words = ["docker", "ps", "-aq", "--filter", f"ancestor={image}"]
    return len(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split())


async def test_an_image_that_has_no_repository_says_so() -> None:
    async with open_sandbox("docker", image="batch-runner-test:py", cwd="/testbed") as environment:
        await printed(environment, "git init -q; echo one >a.txt; git add .; "
                      "git -c user.name=n -c user.email=e commit -qm one")  # fmt: skip
        base = await kept(environment)
        await printed(environment, f"{EDIT}; {CLEAR}")
        result = await take(environment, base, origin=partial(origin, environment, base, {}, None, PLAIN))
    assert result.data == b""
    assert result.problem.startswith(f"{GONE} /testbed, nor is its base to be had from elsewhere: its image: ")


async def test_out_of_the_cache(source: Path, tmp_path: Path) -> None:
    base_commit = git(source, "rev-parse", "HEAD")
    cache = tmp_path / "cache"
    fetch(cache, [Instance(instance_id="i", repo="o/n", base_commit=base_commit, repo_url=str(source))])
    row = {"repo": "o/n", "base_commit": base_commit}
    async with open_sandbox("local") as environment:
        await place(environment, repo="o/n", base_commit=base_commit, repo_url="", cache=cache, cwd="")
        base = await kept(environment)
        await printed(environment, f"{EDIT}; rm -rf .git $TMPDIR")
        assert (await take(environment, base)).problem.startswith(GONE)
        result = await take(environment, base, origin=partial(origin, environment, base, row, cache, PLAIN))
        assert (result.problem, names(result)) == ("", ["a.txt", "n.txt"])
        await printed(environment, f"git init -q; {git_commit('-A')}; echo made >made.txt")
        base = await kept(environment)
        lost = with_commit(base, base_commit)
        await printed(environment, "rm -rf .git $TMPDIR")
        result = await take(environment, lost, origin=partial(origin, environment, lost, row, cache, PLAIN))
        assert result.problem == "what had been there before is in the patch: what was kept of it is gone"
        assert names(result) == ["a.txt", "made.txt", "n.txt"]
        nowhere = partial(origin, environment, lost, row, tmp_path / "none", PLAIN)
        assert "from elsewhere: " in (await take(environment, lost, origin=nowhere)).problem


async def test_out_of_nowhere() -> None:
    async with open_sandbox("local") as environment:
        await printed(environment, f"git init -q; echo one >a.txt; {git_commit('-A')}")
        base = await kept(environment)
        await printed(environment, f"{EDIT}; rm -rf .git $TMPDIR")
        result = await take(environment, base, origin=partial(origin, environment, base, {}, None, PLAIN))
    assert result.data == b""
    assert result.problem.endswith("from elsewhere: it came neither from a cache nor from an image")


def git_commit(added: str) -> str:
    return f"git add {added}; git -c user.name=n -c user.email=e commit -qm one"


def with_commit(base: Base, base_commit: str) -> Base:
    """As a set-up's own commit leaves it: the instance's commit is one of those that count."""
    return Base(base.cwd, (*base.bases, base_commit), base.tree, base.large, base.known, base.kept)
