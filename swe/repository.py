"""Instances' repositories without their images: a cache of bare repositories here, and in the sandbox a checkout.

`fetch` fills the cache, once, before a run; `place` takes one commit out of it.
"""

import asyncio
import os
import re
import shlex
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from swe import git
from swe.git import GitFailed
from swe.packs import cached_commit, unpack
from swe.types import Instance
from tools.environments.base import Environment
from tools.environments.locking import try_lock
from tools.errors import SetupFailed, SetupTimeout, ToolError, UsageProblem

FETCH_SECONDS = 3600.0  # for one repository, and for another process that fetches the same
PLACE_SECONDS = 600.0
_ASK_SECONDS = 60.0

_REPO = re.compile(r"[A-Za-z0-9_][\w.-]*(?:/[A-Za-z0-9_][\w.-]*)*", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HEADS = ("+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*")
_NO_GIT, _HAS_ONE = 3, 4

# In the sandbox, as here, git goes by nobody's settings. Both texts are for `sh`.
_PLAIN = "export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_OPTIONAL_LOCKS=0 GIT_LFS_SKIP_SMUDGE=1\n"

_BEGIN = f"""(
command -v git >/dev/null || exit {_NO_GIT}
mkdir -p -- "$D" && cd -- "$D" || exit 1
[ ! -e .git ] || exit {_HAS_ONE}
[ -z "$(ls -A)" ] || {{ echo 'it holds files, but no repository'; exit 1; }}
{_PLAIN}git init -q --template= . && git config core.autocrlf false
)"""

_CHECK_OUT = f"""(
{_PLAIN}echo "$C" >.git/shallow
git symbolic-ref HEAD refs/heads/main && git update-ref refs/heads/main "$C" && git checkout -q -f || exit
# A file whose line ends are not as its rule would have them counts as changed while its second is the index's too.
[ -z "$(git status --porcelain)" ] || {{ sleep 1; touch .git/index; }}
changes=$(git status --porcelain) || exit
[ -z "$changes" ] || {{ echo "the fresh checkout is not clean: $changes"; exit 1; }}
)"""


def cached(cache: Path, repo: str) -> Path:
    """Where the repository `owner/name` is in the cache. Raises UsageProblem for what is no such name."""
    if not _REPO.fullmatch(repo):
        raise UsageProblem(f"repo {repo!r} is not of the form owner/name")
    return cache / f"{repo.replace('/', '__')}.git"


# --- the cache


def _host_url(repo: str) -> str:
    return f"https://github.com/{repo}.git"


def fetch(cache: Path, instances: Iterable[Instance]) -> None:
    """Makes sure that the base commit of every instance is in the cache; what is there needs neither network nor the
    right to write. Several processes may do so at once. Raises UsageProblem naming what cannot be had."""
    for (repo, url), commits in wanted(instances).items():
        place = cached(cache, repo)
        try:
            _bring(place, url, list(commits))
        except (GitFailed, OSError) as error:
            shown = git.without_user(url)
            raise UsageProblem(f"the repository {repo} cannot be had from {shown} for {place}: {error}") from error


def wanted(instances: Iterable[Instance]) -> Mapping[tuple[str, str], Iterable[str]]:
    """(repository, where it is fetched from) -> base commits. Raises UsageProblem for what is no such name or no
    commit."""
    found: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for instance in instances:
        if not _COMMIT.fullmatch(instance.base_commit):
            raise UsageProblem(f"{instance.instance_id}: base_commit {instance.base_commit!r} is not 40 hex digits")
        if not _REPO.fullmatch(instance.repo):
            raise UsageProblem(f"{instance.instance_id}: repo {instance.repo!r} is not of the form owner/name")
        url = instance.repo_url or _host_url(instance.repo)
        found[instance.repo, url][instance.base_commit] = None
    return found


def _bring(place: Path, url: str, commits: Sequence[str]) -> None:
    if not _missing(place, commits):
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    with _locked(place.with_name(f".{place.name}.lock")) as lock:
        if not place.exists():
            _clone(place, url, lock)
        elif _missing(place, commits):
            _fetch(place, lock, url, *_HEADS)
        for commit in _missing(place, commits):  # on no branch: a server may give it all the same
            _fetch(place, lock, url, f"{commit}:refs/instances/{commit}")


def _missing(place: Path, commits: Sequence[str]) -> list[str]:
    if not place.exists():
        return list(commits)
    asked = "".join(f"{commit}\n" for commit in commits).encode()
    words = (f"--git-dir={place}", "cat-file", "--batch-check=%(objecttype)")
    kinds = git.run(*words, stdin=asked, seconds=_ASK_SECONDS).decode().splitlines()
    return [commit for commit, kind in zip(commits, kinds, strict=True) if kind != "commit"]


def _clone(place: Path, url: str, lock: int) -> None:
    """Whole or not at all, and without a word on where it came from: a URL may hold a password. What a clone that was
    killed left behind is removed by the next one."""
    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        git.run("clone", "--bare", "--quiet", "--", url, str(partial), seconds=FETCH_SECONDS, keep=(lock,))
        git.run(f"--git-dir={partial}", "config", "--remove-section", "remote.origin", seconds=_ASK_SECONDS)
        partial.rename(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fetch(place: Path, lock: int, url: str, *what: str) -> None:
    words = (f"--git-dir={place}", "fetch", "--quiet", "--no-tags", "--no-write-fetch-head", "--", url, *what)
    git.run(*words, seconds=FETCH_SECONDS, keep=(lock,))


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """A lock that ends with this process and the git that it started, whichever lives longer."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        until = time.monotonic() + FETCH_SECONDS
        while not try_lock(descriptor):
            if time.monotonic() > until:
                raise GitFailed(f"another process holds {path}")
            time.sleep(0.1)
        yield descriptor
    finally:
        os.close(descriptor)


# --- the sandbox


async def place(environment: Environment, *, repo: str, base_commit: str, repo_url: str, cache: Path, cwd: str) -> None:
    """Makes the sandbox's `cwd` a checkout of `base_commit`, on a branch `main` whose only commit that is: nothing that
    came later or earlier is there. A repository that is there already (an image's) stays as it is.

    Nothing is fetched: `repo_url` is for the one who reads that it was not. Raises SetupFailed, SetupTimeout,
    EnvironmentLost.
    """
    try:
        async with asyncio.timeout(PLACE_SECONDS):
            source = _cached_commit(cache, repo, base_commit, repo_url)
            await _place(environment, source, base_commit, cwd or ".")
    except TimeoutError:
        raise SetupTimeout(f"placing {repo} took longer than {PLACE_SECONDS:.0f} s") from None
    except (GitFailed, ToolError, UsageProblem) as error:
        raise SetupFailed(f"{repo} at {base_commit:.12} cannot be placed in {cwd!r}: {error}") from error


def _cached_commit(cache: Path, repo: str, commit: str, url: str) -> Path:
    source = cached(cache, repo)
    if not _COMMIT.fullmatch(commit):
        raise GitFailed("the commit is not 40 hex digits")
    if not source.exists():
        raise GitFailed(f"there is no {source}: it was not fetched from {git.without_user(url or _host_url(repo))}")
    return source


async def _place(environment: Environment, source: Path, commit: str, cwd: str) -> None:
    begun = await environment.run(f"D={shlex.quote(cwd)}\n{_BEGIN}", timeout=PLACE_SECONDS)
    if begun.exit_code == _HAS_ONE:
        return
    if begun.exit_code == _NO_GIT:
        raise GitFailed("the sandbox has no git")
    if begun.exit_code:
        raise GitFailed(begun.output.strip()[-500:])
    unpacking = f"{_PLAIN}exec git index-pack --stdin"
    await unpack(environment, unpacking, cached_commit(source, commit), cwd=cwd, seconds=PLACE_SECONDS)
    ended = await environment.run(f"C={commit}\n{_CHECK_OUT}", timeout=PLACE_SECONDS, cwd=cwd)
    if ended.exit_code:
        raise GitFailed(ended.output.strip()[-500:])
