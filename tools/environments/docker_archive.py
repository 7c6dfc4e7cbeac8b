"""Files of a container by way of the engine: for images without `cat`, since `sh` alone cannot read a NUL.

The engine answers with a tar stream of one member, preceded by extended headers where its name needs them.
"""

import posixpath
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tools.environments.docker_engine import engine_errors
from tools.environments.docker_images import Misread
from tools.errors import EnvironmentLost, ToolError

if TYPE_CHECKING:
    from aiodocker.containers import DockerContainer
    from aiohttp import StreamReader

_BLOCK = tarfile.BLOCKSIZE
_CHUNK = 65_536
_LINKS = 40


async def archived_file(container: "DockerContainer", path: str, name: str) -> AsyncIterator[bytes]:
    """The bytes of a file by its absolute path, links followed inside the container only; `name` is the engine's.

    Raises ToolError, EnvironmentLost.
    """
    target = path
    for _ in range(_LINKS):
        query = container.docker._query(f"containers/{container.id}/archive", params={"path": target})
        with engine_errors(name), _missing(path):
            async with query as reply:
                try:
                    member = await _member(reply.content)
                    if member.isreg():
                        async for chunk in _content(reply.content, member.size):
                            yield chunk
                        return
                finally:
                    reply.close()
        if not member.issym():
            raise ToolError(f"{path}: {'is a directory' if member.isdir() else 'is not a regular file'}")
        target = posixpath.join(posixpath.dirname(target), member.linkname)
    raise ToolError(f"{path}: too many levels of symbolic links")


@contextmanager
def _missing(path: str) -> Iterator[None]:
    """What the engine says of a path that is not there, as ToolError."""
    from aiodocker import DockerError  # noqa: PLC0415 - an optional package, imported when used

    try:
        yield
    except DockerError as error:
        if error.status == 404 and "such container" not in error.message:
            raise ToolError(f"{path}: no such file or directory") from None
        raise


async def _member(content: "StreamReader") -> tarfile.TarInfo:
    """The member's header; the extended ones before it hold nothing we need. Raises Misread."""
    while True:
        try:
            header = tarfile.TarInfo.frombuf(await content.readexactly(_BLOCK), "utf-8", "surrogateescape")
        except (tarfile.HeaderError, EOFError):
            raise Misread from None
        if header.type not in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            return header
        await content.readexactly(-(-header.size // _BLOCK) * _BLOCK)


async def _content(content: "StreamReader", size: int) -> AsyncIterator[bytes]:
    while size:
        chunk = await content.read(min(size, _CHUNK))
        if not chunk:
            raise EnvironmentLost("the engine broke off while it sent a file")
        size -= len(chunk)
        yield chunk
