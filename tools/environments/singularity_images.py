"""Images as directories that Apptainer can run: built once into a cache, over all processes that see it.

A directory needs no FUSE and no loop device, and starts quickest. An image is built in a folder beside its place and
renamed, so that what stands there is whole. Its forms: https://apptainer.org/docs/user/latest/build_a_container.html.
"""

import asyncio
import hashlib
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from tools.environments.base import DEFAULT_IMAGE
from tools.environments.hosted import remove_tree
from tools.environments.images import is_refusal
from tools.environments.locking import alone
from tools.errors import ImagePullFailed, ImageUnavailable, SetupFailed
from tools.text import one_line

_TRIES = 3
_END_SECONDS = 5.0
_REMOTE = ("docker://", "oras://", "library://", "shub://", "http://", "https://", "docker-daemon:")
_LOCAL = ("docker-archive:", "oci-archive:", "oci:")
_TAR = (".tar", ".tar.gz", ".tgz")
_FILES = (*_TAR, ".sif", ".simg")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_:@/-]|\.(?!\.))*", re.ASCII)
# The lock goes on to this shell: who waits for it finds the image, even if who began it is killed meanwhile.
_BUILD = """\
place=$1 work=$2 source=$3; shift 3
"$@" "$work/image" "$source" && chmod u+rwx "$work/image" && mv "$work/image" "$place"
code=$?
rm -rf "$work"
exit $code"""


class Source(Struct, frozen=True):
    """Where an image comes from: a directory that is one, or what `apptainer build` takes and its result's name."""

    text: str
    key: str = ""  # "" = a directory


def find_source(image: str) -> Source:
    """What a row's `image` means. Raises ImageUnavailable."""
    image = image or DEFAULT_IMAGE
    if image.startswith(_LOCAL):
        transport, _, place = image.partition(":")
        path, colon, tag = place.partition(":")
        return _of_file(f"{transport}:{_existing(path, image)}{colon}{tag}", path)
    if image.startswith(("/", "./", "../", "~")) or image.endswith(_FILES):
        path = _existing(image, image)
        if Path(path).is_dir():
            return Source(path)
        return _of_file(f"docker-archive:{path}" if path.endswith(_TAR) else path, path)
    if image.startswith(_REMOTE):
        return Source(image, _key(image, ""))
    if not _NAME.fullmatch(image):
        raise ImageUnavailable(f"{image[:200]!r} is not the name of an image")
    return Source(f"docker://{image}", _key(f"docker://{image}", ""))


def _existing(path: str, image: str) -> str:
    """Absolute."""
    found = Path(path).expanduser().absolute()
    if not found.exists():
        raise ImageUnavailable(f"image {image[:200]}: no such file or directory")
    return str(found)


def _of_file(text: str, path: str) -> Source:
    """Another image once the file is another."""
    found = Path(path).expanduser().stat()
    return Source(text, _key(text, f"{found.st_mtime_ns} {found.st_size}"))


def _key(text: str, state: str) -> str:
    name = re.sub(r"[^A-Za-z0-9.]+", "-", text)[-60:].strip("-.")
    return f"{name}-{hashlib.sha256(f'{text} {state}'.encode()).hexdigest()[:16]}"


def cache_folder(chosen: str) -> Path:
    """Where built images are: the one that was chosen, else a folder of ours in Apptainer's cache."""
    if chosen:
        return Path(chosen).expanduser().absolute()
    for name in ("APPTAINER_CACHEDIR", "SINGULARITY_CACHEDIR"):
        if place := os.environ.get(name):
            return Path(place).expanduser().absolute() / "batch-runner"
    return Path.home() / ".apptainer" / "cache" / "batch-runner"


async def ready_image(program: str, image: str, cache: str, seconds: float) -> Path:
    """The image's directory, built into `cache` (see `cache_folder`) within `seconds` where it is missing.

    Raises ImageUnavailable for what does not exist or may not be pulled, ImagePullFailed for what another try can mend,
    SetupFailed for a cache that cannot be written.
    """
    source = find_source(image)
    if not source.key:
        return Path(source.text)
    folder = cache_folder(cache)
    place = folder / source.key
    if place.is_dir():
        return place
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        async with asyncio.timeout(seconds), alone(folder / f"{source.key}.lock") as lock:
            if not place.is_dir():
                await _build_patiently(program, source, place, lock)
    except TimeoutError:
        raise ImagePullFailed(f"image {image}: not built within {seconds:g} s") from None
    except OSError as error:
        raise SetupFailed(f"the folder of built images, {folder}: {error.strerror}") from None
    return place


async def _build_patiently(program: str, source: Source, place: Path, lock: int) -> None:
    tries = _TRIES if source.text.startswith(_REMOTE) else 1
    for attempt in range(1, tries + 1):
        trouble = await _build(program, source.text, place, lock)
        if not trouble:
            return
        if is_refusal(trouble):
            raise ImageUnavailable(f"image {source.text}: {one_line(trouble)}")
        if attempt < tries:
            await asyncio.sleep(attempt)
    raise ImagePullFailed(f"image {source.text}: {one_line(trouble)}")


async def _build(program: str, text: str, place: Path, lock: int) -> str:
    """One try; "" or what went wrong."""
    work = place.with_name(f"{place.name}.building")
    await asyncio.to_thread(remove_tree, work)  # of one that was killed
    (work / "temporary").mkdir(parents=True)
    owned = () if os.getuid() == 0 else ("--fix-perms",)  # what is ours must be removable by us
    command = (program, "-s", "build", *owned, "--sandbox")
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", _BUILD, "sh"),
        *(str(place), str(work), text, *command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=_build_environ(work / "temporary"),
        start_new_session=True,
        pass_fds=(lock,),
    )
    try:
        said, _ = await process.communicate()
        return said.decode(errors="replace") or "the build failed" if process.returncode else ""
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.wait_for(process.wait(), _END_SECONDS)
            await asyncio.to_thread(remove_tree, work)


def _build_environ(temporary: Path) -> dict[str, str]:
    """Ours: proxies and the registry's credentials are in it."""
    return {**os.environ, "APPTAINER_TMPDIR": str(temporary), "SINGULARITY_TMPDIR": str(temporary)}
