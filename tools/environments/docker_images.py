"""Makes images ready: looked up first, else pulled, once over all processes of this machine.

Formats of the engine's API: https://docs.docker.com/reference/api/engine/ (images/NAME/json, images/create).
"""

import asyncio
import base64
import hashlib
import os
import re
import tempfile
from collections.abc import AsyncIterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tools.environments.docker_credentials import credentials
from tools.environments.images import PULL_SECONDS, REFUSED, is_refusal
from tools.environments.locking import alone
from tools.errors import ImagePullFailed, ImageUnavailable, SetupFailed
from tools.text import one_line

if TYPE_CHECKING:
    from aiodocker import Docker

_TRIES = 3
# Letters, digits and the separators of name, tag, digest and registry port: nothing that could change the URL's path.
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_:@/-]|\.(?!\.))*", re.ASCII)


class Misread(Exception):
    """An answer of the engine is not what its API says: something else may stand at its address."""


def object_of(answer: Any) -> dict[str, Any]:
    """The JSON object that was answered. Raises Misread."""
    if not isinstance(answer, dict):
        raise Misread
    return answer


class Images:
    """The images of one engine, for one process.

    `policy`, in the words of `docker run --pull`: `missing` pulls what is not there; `always` pulls every image once
    more, by the first who needs it; `never` pulls nothing.
    """

    def __init__(self, policy: str = "missing", seconds: float = PULL_SECONDS) -> None:
        self._policy = policy
        self._seconds = seconds
        self._pulled: set[str] = set()

    async def ready(self, engine: "Docker", image: str) -> dict[str, Any]:
        """What the engine knows of `image` (its `images/NAME/json`), pulled within the time where it has to be.

        Raises ImageUnavailable for a name that does not exist or may not be pulled, ImagePullFailed for what another
        try can mend, and what `engine_errors` knows.
        """
        if not _NAME.fullmatch(image):
            raise ImageUnavailable(f"{image[:200]!r} is not the name of an image")
        if known := await self._known(engine, image):
            return known
        if self._policy == "never":
            raise ImageUnavailable(f"image {image}: it is not here, and pull_policy is never")
        try:
            async with asyncio.timeout(self._seconds), alone(_lock_file(image)):
                return await self._known(engine, image) or await self._pull(engine, image)
        except TimeoutError:
            raise ImagePullFailed(f"image {image}: pull not finished within {self._seconds:g} s") from None

    async def _known(self, engine: "Docker", image: str) -> dict[str, Any]:
        """{} where it has to be pulled."""
        if self._policy == "always" and image not in self._pulled:
            return {}
        return await _inspect(engine, image)

    async def _pull(self, engine: "Docker", image: str) -> dict[str, Any]:
        known = await _pull_patiently(engine, image)
        self._pulled.add(image)
        return known


async def _inspect(engine: "Docker", image: str) -> dict[str, Any]:
    """The engine's description of a local image, or {}."""
    from aiodocker import DockerError  # noqa: PLC0415 - an optional package, imported when used

    try:
        return object_of(await engine.images.inspect(image))
    except DockerError as error:
        if error.status == 404:
            return {}
        if error.status in (400, 500) and REFUSED.search(str(error.message)):
            raise ImageUnavailable(f"image {image}: {one_line(str(error.message))}") from None
        raise


async def _pull_patiently(engine: "Docker", image: str) -> dict[str, Any]:
    shown, helpless = await credentials(image)
    header = base64.urlsafe_b64encode(msgspec.json.encode(shown)).decode()
    for attempt in range(1, _TRIES + 1):
        trouble = await _pull(engine, image, header)
        if is_refusal(trouble):
            raise ImageUnavailable(f"image {image}: {one_line(trouble)}" + (helpless and f" ({helpless})"))
        if not trouble and (known := await _inspect(engine, image)):
            return known
        if attempt < _TRIES:
            await asyncio.sleep(attempt)
    raise ImagePullFailed(f"image {image}: {one_line(trouble) or 'the pull ended without it'}")


async def _pull(engine: "Docker", image: str, credentials_header: str) -> str:
    """One try; "" or what went wrong."""
    import aiohttp  # noqa: PLC0415 - heavy, imported when used
    from aiodocker import DockerError  # noqa: PLC0415 - an optional package, imported when used

    tagged = re.search(r"[:@][^/]*$", image)
    params = {"fromImage": image} | ({} if tagged else {"tag": "latest"})  # without one: every tag there is
    headers = {"X-Registry-Auth": credentials_header}
    try:
        # Not `images.pull`: it leaves its connection open when it is cancelled.
        async with engine._query("images/create", "POST", params=params, headers=headers) as reply:
            try:
                return await _error_in(reply.content)
            finally:
                reply.close()
    except (aiohttp.ClientError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    except (Misread, ValueError):  # the progress was cut within a line, or is none
        return "what the engine answered cannot be read"
    except DockerError as error:
        return str(error.message) or f"status {error.status}"


async def _error_in(progress: AsyncIterable[bytes]) -> str:
    """The error in a stream of progress lines, each a JSON object, or ""."""
    async for line in progress:
        if message := object_of(msgspec.json.decode(line)).get("error"):
            return str(message)
    return ""


def _lock_file(image: str) -> Path:
    """Of this user on this machine. Raises SetupFailed."""
    folder = Path(tempfile.gettempdir()) / f"batch-runner-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise SetupFailed(f"{folder} belongs to another user: remove it, or set TMPDIR")
    return folder / f"pull-{hashlib.sha256(image.encode()).hexdigest()[:32]}.lock"
