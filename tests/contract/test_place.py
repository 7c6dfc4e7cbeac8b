"""An instance's repository in the sandbox, on every backend: this commit, all of it, and nothing else."""

import asyncio
import random
import shutil
import time
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest

from swe import git as host
from swe.repository import fetch, place
from swe.types import Instance
from tests.contract.environments import ISOLATING, bytes_of, open_sandbox, printed
from tests.contract.repositories import commit, git, make_repository
from tools.environments.base import Environment
from tools.errors import SetupFailed

ODD = 'dir ü/it\'s "odd"\n$(touch x).txt'
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"


class Cached:
    """A repository with a past and a future, in a cache."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self.source = make_repository(folder / "source")
        self.past = commit(self.source, **{"answer.txt": b"past\n"})
        self.mixed = git(self.source, "hash-object", "-w", "--stdin", stdin=b"x\r\ny\n")  # as no rule would have it
        self._base_with_all_kinds_of_files()
        self.base = git(self.source, "rev-parse", "HEAD")
        self.tree = git(self.source, "rev-parse", f"{self.base}^{{tree}}")
        self.future = commit(self.source, **{"answer.txt": b"the fix\n"})
        git(self.source, "tag", "--annotate", "v2", "--message=fixed")
        instance = Instance(instance_id="i", repo="owner/name", base_commit=self.base, repo_url=str(self.source))
        fetch(self.cache, [instance])

    def _base_with_all_kinds_of_files(self) -> None:
        source = self.source
        (source / ODD).parent.mkdir()
        files = {
            ODD: b"odd\n",
            "run.sh": b"#!/bin/sh\necho ran\n",
            "crlf.txt": b"a\r\nb\r\n",
            "no-end.txt": b"no newline at the end",
            "image.bin": bytes(range(256)) * 50,
            "empty": b"",
            "kept.log": b"ignored, but in the repository\n",
            ".gitignore": b"*.log\n",
            ".gitattributes": b"*.bat eol=crlf\nsecret.txt export-ignore\n*.big filter=lfs\n",
            "start.bat": b"echo 1\r\necho 2\r\n",
            "secret.txt": b"left out of archives: $Format:%H$\n",
            "weights.big": LFS,
        }
        for name, data in files.items():
            (source / name).write_bytes(data)
        (source / "run.sh").chmod(0o755)
        (source / "link").symlink_to("run.sh")
        (source / "dangling").symlink_to("/no/such/place")
        git(source, "add", "--all", "--force")
        git(source, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},vendored")
        git(source, "update-index", "--add", "--cacheinfo", f"100644,{self.mixed},mixed.bat")
        (source / "answer.txt").write_bytes(b"base\n")
        git(source, "add", "answer.txt")
        git(source, "commit", "--quiet", "--message=base")

    async def place(self, environment: Environment, cwd: str = "", base: str = "", repo: str = "owner/name") -> None:
        await place(
            environment, repo=repo, base_commit=base or self.base, repo_url="file:///x", cache=self.cache, cwd=cwd
        )


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Cached:
    """For all tests, which only read it."""
    return Cached(tmp_path_factory.mktemp("cached"))


async def test_the_checkout_is_the_commit_and_clean(sandbox: Environment, cached: Cached) -> None:
    before = await printed(sandbox, "pwd; export -p | grep -v BATCH_CALL")
    await cached.place(sandbox, "repo")
    assert await printed(sandbox, "pwd; export -p | grep -v BATCH_CALL") == before
    await printed(sandbox, "cd repo")
    assert await printed(sandbox, "git status --porcelain --ignored") == ""
    assert await printed(sandbox, "git rev-parse HEAD; git branch --show-current") == f"{cached.base}\nmain\n"
    assert await printed(sandbox, "git rev-parse HEAD^{tree}; git write-tree") == f"{cached.tree}\n" * 2
    assert await printed(sandbox, "cat answer.txt; ./run.sh; ./link; readlink dangling") == (
        "base\nran\nran\n/no/such/place\n"
    )
    modes = await printed(sandbox, "stat -c '%a %F' run.sh crlf.txt link vendored; ls -A vendored")
    assert modes == "755 regular file\n644 regular file\n777 symbolic link\n755 directory\n"
    for name in ("crlf.txt", "start.bat", "no-end.txt", "image.bin", "empty", "kept.log", "secret.txt", ODD):
        assert await bytes_of(sandbox, name) == (cached.source / name).read_bytes()
    assert await bytes_of(sandbox, "weights.big") == LFS


async def test_what_nobody_touched_is_no_change_later(sandbox: Environment, cached: Cached) -> None:
    """Also a file whose line ends are not as its rule has them, which git would else mend by and by."""
    await cached.place(sandbox, "repo")
    await printed(sandbox, "cd repo")
    assert await printed(sandbox, "git rev-parse HEAD:mixed.bat") == f"{cached.mixed}\n"
    assert await bytes_of(sandbox, "mixed.bat") == b"x\r\ny\r\n"
    await printed(sandbox, "echo new >new.txt; git add -A; git status >/dev/null; git add -A")
    assert await printed(sandbox, "git diff --cached --name-only HEAD; git diff --name-only") == "new.txt\n"


async def test_nothing_that_came_later_or_earlier_is_there(sandbox: Environment, cached: Cached) -> None:
    await cached.place(sandbox, "repo")
    await printed(sandbox, "cd repo")
    for other in (cached.future, cached.past, f"{cached.future}^{{tree}}", "v2", "trunk", "HEAD~1"):
        assert (await sandbox.run(f"git cat-file -e '{other}'", timeout=20)).exit_code != 0
    kinds = await printed(sandbox, "git cat-file --batch-all-objects --batch-check='%(objecttype)' | sort | uniq -c")
    assert "1 commit" in kinds
    assert "tag" not in kinds
    assert await printed(sandbox, "git for-each-ref --format='%(refname)'; git remote") == "refs/heads/main\n"
    assert await printed(sandbox, "git log --all --oneline | wc -l; git fsck --no-progress 2>&1") == "1\n"
    assert "the fix" not in await printed(sandbox, "git grep 'the fix' $(git rev-list --all) -- ; git stash list; true")
    identity = "-c user.name=a -c user.email=a@b"
    await printed(sandbox, f"echo more >>answer.txt; git {identity} commit -qam mine")
    assert (await printed(sandbox, f"git diff --stat {cached.base} HEAD")).startswith(" answer.txt | 1 +\n")


async def test_a_repository_that_is_there_stays(sandbox: Environment, cached: Cached) -> None:
    identity = "-c user.name=a -c user.email=a@b"
    await printed(sandbox, f"git init -q repo; cd repo; echo own >f; git add f; git {identity} commit -qm own; cd ..")
    before = await printed(sandbox, "git -C repo rev-parse HEAD")
    await cached.place(sandbox, "repo")
    assert await printed(sandbox, "git -C repo rev-parse HEAD; ls repo") == before + "f\n"


async def test_the_current_directory_and_odd_ones(sandbox: Environment, cached: Cached) -> None:
    await printed(sandbox, "mkdir here; cd here")
    await cached.place(sandbox)
    assert await printed(sandbox, "cat answer.txt; ls -d .git") == "base\n.git\n"
    await printed(sandbox, "mkdir ../there; cd ../there")
    odd = "-a b'/$(touch bad)\"c"
    await cached.place(sandbox, odd)
    assert await bytes_of(sandbox, f"{odd}/answer.txt") == b"base\n"
    assert [entry.name for entry in await sandbox.list(".")] == ["-a b'"]


async def test_the_sandboxs_own_settings_have_no_say(sandbox: Environment, cached: Cached) -> None:
    settings = '[core]\n\tautocrlf = true\n\tautocrlf = true\n[filter "lfs"]\n\tsmudge = false\n\trequired = true\n'
    home = (await printed(sandbox, "echo $HOME")).strip()
    await sandbox.write(f"{home}/.gitconfig", settings.encode())
    await cached.place(sandbox, "repo")
    assert await bytes_of(sandbox, "repo/no-end.txt") == b"no newline at the end"
    assert await bytes_of(sandbox, "repo/answer.txt") == b"base\n"
    assert await bytes_of(sandbox, "repo/weights.big") == LFS
    await printed(sandbox, "cd repo; rm answer.txt; git checkout -q answer.txt; cd ..")
    assert await bytes_of(sandbox, "repo/answer.txt") == b"base\n"


async def test_what_cannot_be_placed(sandbox: Environment, cached: Cached) -> None:
    async def refused(said: str, **arguments: str) -> None:
        with pytest.raises(SetupFailed) as caught:
            await cached.place(sandbox, **arguments)
        assert said in str(caught.value)

    await printed(sandbox, "mkdir full; echo 1 >full/f; echo 1 >file; ln -s nowhere link")
    await refused("it holds files, but no repository", cwd="full")
    assert await printed(sandbox, "ls -A full") == "f\n"
    await refused("file", cwd="file")
    await refused("it was not fetched from file:///x", cwd="a", repo="owner/other")
    await refused("not of the form owner/name", cwd="b", repo="../name")
    await refused("40 hex digits", cwd="c", base="--all")
    await refused("bad object", cwd="d", base="2" * 40)


async def test_a_damaged_cache_is_no_half_checkout(sandbox: Environment, cached: Cached, tmp_path: Path) -> None:
    shutil.copytree(cached.cache, tmp_path, dirs_exist_ok=True)
    blob = git(cached.source, "rev-parse", f"{cached.base}:answer.txt")
    damaged = tmp_path / "owner__name.git" / "objects" / blob[:2] / blob[2:]
    damaged.chmod(0o644)
    damaged.write_bytes(b"damaged")
    with pytest.raises(SetupFailed, match="cannot be placed"):
        await place(sandbox, repo="owner/name", base_commit=cached.base, repo_url="", cache=tmp_path, cwd="repo")


@pytest.mark.parametrize("name", ISOLATING)
async def test_the_usual_directory(name: str, cached: Cached) -> None:
    async with open_sandbox(name, cwd="/testbed") as environment:
        await cached.place(environment, "/testbed")
        assert await printed(environment, "pwd; git status --porcelain; cat answer.txt") == "/testbed\nbase\n"


async def test_a_sandbox_without_git(cached: Cached) -> None:
    async with open_sandbox("docker", image="batch-runner-test:sh") as environment:
        with pytest.raises(SetupFailed, match="the sandbox has no git"):
            await cached.place(environment, "repo")


async def test_several_at_once_and_a_large_one(tmp_path: Path) -> None:
    source = make_repository(tmp_path / "source")
    data = random.Random(1).randbytes(8_000_000)
    base = commit(source, big=data)
    fetch(tmp_path, [Instance(instance_id="i", repo="o/n", base_commit=base, repo_url=str(source))])

    async def one() -> None:
        async with open_sandbox("local") as environment:
            await place(environment, repo="o/n", base_commit=base, repo_url="", cache=tmp_path, cwd="repo")
            assert await printed(environment, "stat -c %s repo/big; cd repo; git status --porcelain") == "8000000\n"

    await asyncio.gather(*(one() for _ in range(4)))
    assert not [child for child in psutil.Process().children() if child.name() == "git"]


# this machine's git


async def test_a_reader_that_stops_early_ends_git(tmp_path: Path) -> None:
    source = make_repository(tmp_path / "source")
    commit(source, big=random.Random(1).randbytes(2_000_000))
    words = (f"--git-dir={source}/.git", "cat-file", "--batch-all-objects", "--batch")
    async with aclosing(host.stream(*words, stdin=b"")) as pieces:
        assert await anext(pieces)
        assert [child.name() for child in psutil.Process().children() if child.name() == "git"] == ["git"]
    assert not [child for child in psutil.Process().children() if child.name() == "git"]


def test_no_wait_for_git_is_without_an_end() -> None:
    """Nor for what it started, which holds its output."""
    began = time.monotonic()
    for alias in ("!sleep 61.25; :", "!sleep 61.25 & :"):
        with pytest.raises(host.GitFailed, match="took longer than 0 s"):
            host.run("-c", f"alias.wait={alias}", "wait", seconds=0.4)
    assert time.monotonic() - began < 10
    assert not [each for each in psutil.process_iter(["cmdline"]) if "61.25" in (each.info["cmdline"] or [])]


def test_without_git_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(host.GitFailed, match="git is not installed on this machine"):
        host.run("version", seconds=5)
