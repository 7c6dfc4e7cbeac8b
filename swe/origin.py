"""Where the base of a patch is to be had once more when an agent took it out of its sandbox, beside what was kept of it
there: the cache of repositories here, or the sandbox's image, opened anew. Nothing is asked of either before."""

import shlex
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

from swe.git import GitFailed
from swe.packs import cached_commit
from swe.patch import Base, keep
from swe.repository import cached
from tools.environments.base import BackendSettings, Environment, EnvironmentSpec, Limits
from tools.environments.owner import current_owner
from tools.environments.table import load_backend
from tools.errors import RowFailed, ToolError, UsageProblem

_SECONDS = 120.0  # that the second sandbox may live
_PACK = """\
for c in {trees}; do echo "$c"; done |
git -c safe.directory='*' --git-dir={folder}/git pack-objects -q --stdout --revs --window=0 --threads=1 2>/dev/null"""


async def origin(
    environment: Environment, base: Base, instance: Mapping[str, str], cache: Path | None, settings: BackendSettings
) -> AsyncGenerator[bytes, None]:
    """A pack of the base commit's objects, or of what stands in the image; what a set-up made is in neither. Raises
    GitFailed."""
    if cache is not None and instance:
        pack = cached_commit(_repository(cache, instance["repo"]), instance["base_commit"])
    elif environment.image:
        pack = _image_trees(environment, base, settings)
    else:
        raise GitFailed("it came neither from a cache nor from an image")
    async for piece in pack:
        yield piece


def _repository(cache: Path, repo: str) -> Path:
    try:
        return cached(cache, repo)
    except UsageProblem as error:
        raise GitFailed(str(error)) from error


async def _image_trees(environment: Environment, base: Base, settings: BackendSettings) -> AsyncGenerator[bytes, None]:
    spec = EnvironmentSpec(
        task_id="base",
        owner=current_owner("base"),
        deadline=time.time() + _SECONDS,
        image=environment.image,
        limits=Limits(network="none"),
    )
    try:
        async with load_backend(environment.backend, settings).open(spec) as fresh:
            found = await keep(fresh, cwd=base.cwd, bases=base.bases)
            command = _PACK.format(folder=shlex.quote(found.kept), trees=" ".join((*found.bases, found.tree)))
            packed = await fresh.start(command, cwd="/", piped=True)
            while piece := await packed.read():
                yield piece
            if code := await packed.wait(_SECONDS):
                raise GitFailed(f"git pack-objects ended with {code}")
    except (RowFailed, ToolError) as error:
        raise GitFailed(f"its image: {error}") from error
