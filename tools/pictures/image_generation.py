"""The tool `image_generate`: a picture made by the run's image service, kept in the sandbox and beside the rows."""

import asyncio
import hashlib
import posixpath
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from tools.arguments import TypedTool
from tools.base import Picture, ToolContext
from tools.errors import DiskFull, ToolError
from tools.names import file_name
from tools.pictures.image_services import (
    Aspect,
    ImageFailed,
    ImageRequest,
    ImageService,
    KeyTurns,
    failure_of,
    find_service,
    host_of,
    lacks_image_service,
    picture_url,
    request_for,
)
from tools.pictures.pictures import KINDS, bounded, data_of, download, fitted, load_picture, picture_of
from tools.services import Services

if TYPE_CHECKING:
    import aiohttp

TRY_SECONDS = 120.0  # after which no further try begins
ALL_SECONDS = 240.0  # for everything, downloads too
CONNECT_SECONDS = 15.0
PAUSE_FIRST, PAUSE_LONGEST = 1.0, 30.0  # before another try, doubled each time
LARGEST_ANSWER = 100 * 1024 * 1024  # bytes
MOST_REFERENCES = 8


class ImageArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What `image_generate` takes."""

    prompt: Annotated[str, Meta(description="What the picture is to show")]
    aspect_ratio: Annotated[Aspect, Meta(description="The picture's form")] = "landscape"
    image_url: Annotated[
        str, Meta(description="A picture to be changed: a web address, a data: URL, or a path in the environment")
    ] = ""
    reference_image_urls: Annotated[
        tuple[str, ...], Meta(description=f"Pictures to go by, given in the same ways; at most {MOST_REFERENCES}")
    ] = ()


async def image_generate(context: ToolContext, arguments: ImageArguments) -> dict[str, Any]:
    """`{success: true, image, modality}`, `image` being a path in the sandbox; or
    `{success: false, image: null, error, error_type}`."""
    given = [place for place in (arguments.image_url, *arguments.reference_image_urls) if place.strip()]
    try:
        async with asyncio.timeout(ALL_SECONDS):
            path = await _made(context, arguments, given)
    except TimeoutError:
        return _failed("timeout", f"the picture was not there within {ALL_SECONDS:g} s")
    except ImageFailed as failure:
        return _failed(failure.kind, str(failure))
    return {"success": True, "image": path, "modality": "image-to-image" if given else "text-to-image"}


def _failed(kind: str, message: str) -> dict[str, Any]:
    return {"success": False, "image": None, "error": message, "error_type": kind}


async def _made(context: ToolContext, arguments: ImageArguments, given: list[str]) -> str:
    if not arguments.prompt.strip():
        raise ImageFailed("bad_request", "the prompt is blank")
    if len(given) > MOST_REFERENCES:
        raise ImageFailed("bad_request", f"{len(given)} pictures are given; {MOST_REFERENCES} are the most")
    try:
        references = [await fitted(await load_picture(context, place)) for place in given]
    except ToolError as error:
        raise ImageFailed("bad_request", str(error)) from error
    client = context.services.part(ImageClient)
    picture = await client.make(context, arguments, references)
    try:
        return await _kept(context, picture)
    except ToolError as error:
        raise ImageFailed("not_saved", str(error)) from error


# --- asking the service


class ImageClient:
    """A process's connections to its image service."""

    def __init__(self, services: Services) -> None:
        self._service = find_service(services.settings, services.environ)
        self._refused: set[str] = set()  # keys
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """See `tools.services.Closing`."""
        if self._session is not None:
            await self._session.close()

    async def make(self, context: ToolContext, arguments: ImageArguments, references: list[Picture]) -> Picture:
        """A picture. Raises ImageFailed."""
        service = self._service
        if service is None:
            raise ImageFailed("auth", lacks_image_service(context.services.settings, {}))
        request = request_for(service, arguments.prompt, arguments.aspect_ratio, references)
        url = picture_url(await self._answer(service, request))
        try:
            return picture_of(await self._bytes_at(context, service, url))
        except ToolError as error:
            raise ImageFailed("bad_answer", f"the picture that was made: {error}") from error

    async def _answer(self, service: ImageService, request: ImageRequest) -> bytes:
        """The body of a good answer. Only what surely made no picture is tried again."""
        began, longer = time.monotonic(), PAUSE_FIRST
        turns = KeyTurns(service.keys, self._refused)
        while True:
            try:
                data = await self._post(request, service.authorization(turns.key))
            except ImageFailed as failure:
                again = turns.failed(failure)
                pause = 0.0 if turns.at_once(failure) else max(failure.retry_after, min(PAUSE_LONGEST, longer))
                if not again or time.monotonic() - began + pause > TRY_SECONDS:
                    raise
                longer *= 2 if pause else 1
            else:
                turns.taken()
                return data
            await asyncio.sleep(pause)

    async def _post(self, request: ImageRequest, headers: Mapping[str, str]) -> bytes:
        import aiohttp  # noqa: PLC0415 - see `_open`

        body: dict[str, Any] = {"data": _form(request)} if request.files else {"json": request.fields}
        try:
            async with self._open().post(request.url, headers=headers, allow_redirects=False, **body) as answer:
                data = await bounded(answer.content.iter_any(), LARGEST_ANSWER)
                if answer.status >= 300:
                    raise failure_of(answer.status, answer.headers.get("retry-after", ""), data)
                return data
        except ToolError as error:
            raise ImageFailed("bad_answer", f"the image service's answer: {error}") from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ImageFailed("unreachable", f"no connection to {host_of(request.url)}", again=True) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ImageFailed("connection_lost", f"{type(error).__name__}: {error}") from error

    async def _bytes_at(self, context: ToolContext, service: ImageService, url: str) -> bytes:
        """The picture at a URL of the answer. The service's own host may be reached whatever its address, any other as
        tasks may."""
        if url.startswith("data:"):
            return data_of(url)
        if host_of(url) != host_of(service.base_url):
            return await download(context, url)
        import aiohttp  # noqa: PLC0415 - see `_open`

        try:
            async with self._open().get(url, allow_redirects=False) as answer:
                if answer.status != 200:
                    raise ToolError(f"HTTP {answer.status} from {host_of(url)}")
                return await bounded(answer.content.iter_any())
        except (aiohttp.ClientError, OSError) as error:
            raise ToolError(f"{type(error).__name__}: {error}") from error

    def _open(self) -> "aiohttp.ClientSession":
        import aiohttp  # noqa: PLC0415 - 0.2 s that a run without pictures need not pay

        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
            self._session = aiohttp.ClientSession(timeout=timeout, trust_env=True)
        return self._session


def _form(request: ImageRequest) -> "aiohttp.FormData":
    import aiohttp  # noqa: PLC0415 - see above

    form = aiohttp.FormData()
    for name, value in request.fields.items():
        form.add_field(name, str(value))
    name = "image[]" if len(request.files) > 1 else "image"
    for number, picture in enumerate(request.files, 1):
        kind = picture.media_type
        form.add_field(name, picture.data, filename=f"image_{number}.{KINDS[kind]}", content_type=kind)
    return form


# --- keeping the picture


class _Made:
    """How many pictures a task has made."""

    def __init__(self) -> None:
        self.count = 0


async def _kept(context: ToolContext, picture: Picture) -> str:
    """Writes it beside the rows, where it stays even if the sandbox takes none, and into the sandbox; its path there.
    Raises ToolError, DiskFull."""
    made = context.memory(_Made)
    made.count += 1
    digest = hashlib.sha256(picture.data).hexdigest()[:8]  # no other picture has this name, in whichever try of the row
    name = f"generated_{made.count}_{digest}.{KINDS[picture.media_type]}"
    if artifacts := context.services.settings.artifacts:
        await asyncio.to_thread(_write_artifact, Path(artifacts), file_name(context.task_id), name, picture.data)
    here = await context.environment.run("pwd", timeout=30)
    path = posixpath.join(here.output.removesuffix("\n"), name)
    try:
        await context.environment.write(path, picture.data)
    except ToolError as error:
        told = str(error).removeprefix(f"{path}: ")
        raise ToolError(f"the picture was made, but it could not be written to {path}: {told}") from error
    return path


def _write_artifact(artifacts: Path, task: str, name: str, data: bytes) -> None:
    """Whole or not at all; what a dead process left half made is the run's to remove, see `batch.store`. Tries and
    samples of one task may write the same bytes under the same name at once."""
    place, half_made = artifacts / task / name, artifacts / f"{uuid.uuid4().hex}.tmp"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        half_made.write_bytes(data)
        half_made.replace(place)
    except OSError as error:
        for undo in (half_made.unlink, place.parent.rmdir, artifacts.rmdir):
            with suppress(OSError):  # folders go only if they are empty
                undo()
        raise DiskFull(f"{place} cannot be written: {error.strerror or error}") from error


IMAGE_GENERATE = TypedTool(
    "image_generate",
    "Make a picture from a description, or from other pictures and a description of what is to change. The picture is "
    "saved as a file, whose path is returned.",
    ImageArguments,
    image_generate,
)
