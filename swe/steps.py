"""What a SWE run does around every conversation: the repository is put into the sandbox, the patch is taken out."""

import hashlib
import json
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from agent.prompt import Prompt, Try
from batch.store import replace_file
from swe.origin import origin
from swe.patch import Base, keep, take
from swe.repository import place
from tools.environments.base import BackendSettings, Environment
from tools.errors import SetupFailed, ToolError
from tools.names import file_name

PATCHES = "patches"
NO_PATCH = "the patch could not be taken: "
"""What a row's error says, and why, where the conversation ended and its patch was not to be had."""
_LOOK_SECONDS = 60.0
_SETUP_SECONDS = 1800.0  # the row's own time may be shorter
_LOOK = """\
git() {{ command git -c safe.directory='*' "$@" 2>/dev/null; }}
head=$(git rev-parse --verify -q HEAD) || head=
if [ -n {base} ]; then git merge-base --is-ancestor {base} HEAD || head=
elif [ "$(git rev-parse --show-toplevel)" != "$(pwd -P)" ]; then head=
fi
printf '%s\\n' "$head"; pwd -P"""
"""Tells the commit to start from and the directory. An image's own set-up may be committed on top of the base commit;
a directory somewhere within a repository is none of ours."""


def patch_path(run_dir: Path, task_id: str, row_key: str, sample_index: int, attempt: int) -> Path:
    """Where a try's patch is. A row without an id is known by its content, for its task id follows its position."""
    name = file_name(task_id, sample_index)
    if not row_key.startswith("id:"):
        name += "-" + hashlib.sha256(row_key.encode()).hexdigest()[:12]
    return run_dir / PATCHES / f"{name}.{attempt}.diff"


def stopped_path(path: Path) -> Path:
    """Where a stopped try's patch goes when the try that makes up for it, under the same number, leaves none."""
    return path.with_suffix(".stopped.diff")


class Start(Struct, frozen=True):
    """Where a try begins. `base`: what its patch is against, without bases where there is no repository. `problem`: why
    that is not known."""

    base: Base
    problem: str = ""


class SweSteps:
    """See `agent.steps.Steps`. Options: `repo_cache` (a directory, "" for none), `exclude` (a JSON list), `instances`
    ("" if the rows are prompts, whose field `swe` is nothing of ours), `backend_settings` (JSON)."""

    def __init__(self, options: Mapping[str, str], run_dir: Path) -> None:
        self._cache = Path(options["repo_cache"]) if options["repo_cache"] else None
        self._exclude: list[str] = json.loads(options["exclude"])
        self._instances = bool(options["instances"])
        self._backend_settings = msgspec.json.decode(options["backend_settings"], type=BackendSettings)
        self._run_dir = run_dir
        self._starts: dict[tuple[str, int], Start] = {}

    async def before(self, environment: Environment, prompt: Prompt, which: Try) -> None:
        """Places an instance's repository, sets it up, and keeps aside what is checked out."""
        instance = _instance(prompt) if self._instances else {}
        if instance and self._cache is not None:
            await self._place(environment, instance)
        base = await _look(environment, instance.get("base_commit", ""))
        if setup := instance.get("setup"):
            await _run_setup(environment, setup, base.cwd)
            if not base.bases:
                base = await _look(environment, "")
        start = await _kept(environment, base) if instance or base.bases else Start(base)
        if instance and start.problem:
            raise SetupFailed(f"no patch could be taken of {base.cwd}: {start.problem}")
        self._starts[which.row_key, which.sample_index] = start

    async def _place(self, environment: Environment, instance: Mapping[str, str]) -> None:
        assert self._cache is not None
        await place(
            environment,
            repo=instance["repo"],
            base_commit=instance["base_commit"],
            repo_url=instance["repo_url"],
            cache=self._cache,
            cwd=(await _look(environment, "")).cwd,
        )

    async def after(self, environment: Environment, prompt: Prompt, which: Try) -> None:
        """Takes the patch and writes it, before the row is written."""
        start = self._starts.pop((which.row_key, which.sample_index))
        if not start.base.bases:
            return
        if start.problem:
            raise ToolError(NO_PATCH + start.problem)
        instance = _instance(prompt) if self._instances else {}
        again = partial(origin, environment, start.base, instance, self._cache, self._backend_settings)
        patch = await take(environment, start.base, exclude=self._exclude, origin=again)
        path = patch_path(self._run_dir, which.task_id, which.row_key, which.sample_index, which.attempt)
        if not patch.data and path.exists() and path.stat().st_size:
            path.replace(stopped_path(path))
        replace_file(path, [patch.data])
        if patch.problem:
            raise ToolError(patch.problem if patch.data else NO_PATCH + patch.problem)


def _instance(prompt: Prompt) -> dict[str, str]:
    found = prompt.rest.get("swe")
    return found if isinstance(found, dict) else {}


async def _look(environment: Environment, base_commit: str) -> Base:
    command = _LOOK.format(base=shlex.quote(base_commit))
    result = await environment.run(command, timeout=_LOOK_SECONDS)
    if result.exit_code != 0:
        raise SetupFailed(f"looking at the repository ended with {result.exit_code}: {result.output[-500:]}")
    head, _, cwd = result.output.partition("\n")
    return Base(cwd.removesuffix("\n"), tuple(dict.fromkeys(filter(None, [head, base_commit]))))


async def _kept(environment: Environment, base: Base) -> Start:
    try:
        return Start(await keep(environment, cwd=base.cwd, bases=base.bases))
    except ToolError as error:
        return Start(base, str(error))


async def _run_setup(environment: Environment, command: str, cwd: str) -> None:
    """Variables that it exports stay, the directory does not: the work begins in the repository."""
    result = await environment.run(command, timeout=_SETUP_SECONDS)
    if result.exit_code != 0:
        raise SetupFailed(f"the instance's setup command ended with {result.exit_code}: {result.output[-500:]}")
    await environment.run(f"cd -- {shlex.quote(cwd)}", timeout=_LOOK_SECONDS)
