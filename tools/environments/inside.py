"""Files of a sandbox that is a process of this machine, read from outside: for images without `cat`, since `sh` alone
cannot read a NUL. Links are followed inside the sandbox only, whatever it changes meanwhile. A leaf but for errors."""

import errno
import os
import stat
from collections.abc import AsyncIterator

from tools.errors import EnvironmentLost, ToolError

_CHUNK = 65_536
_LINKS = 40
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_REASONS = {
    errno.ENOENT: "no such file or directory",
    errno.ENOTDIR: "no such file or directory",
    errno.EACCES: "permission denied",
    errno.ELOOP: "too many levels of symbolic links",
    errno.EISDIR: "is a directory",
    errno.EINVAL: "is not a regular file",
}


async def file_inside(pid: int, path: bytes) -> AsyncIterator[bytes]:
    """The bytes of a file by its absolute path as process `pid` sees it. Raises ToolError, EnvironmentLost."""
    try:
        root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_CLOEXEC)
    except OSError:
        raise EnvironmentLost("the sandbox has ended") from None
    try:
        descriptor = _opened(root, path)
        try:
            while data := os.read(descriptor, _CHUNK):
                yield data
        finally:
            os.close(descriptor)
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, str(error.strerror).lower())
        raise ToolError(f"{os.fsdecode(path)}: {reason}") from None
    finally:
        os.close(root)


def _opened(root: int, path: bytes) -> int:
    """A regular file for reading. Raises OSError."""
    found = _walked(root, path)
    try:
        mode = os.fstat(found).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "")
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(found)


def _walked(root: int, path: bytes) -> int:
    """A handle on what stands there. We hold every directory on the way, so that `..` is ours to say."""
    way, names, links = [os.dup(root)], path.split(b"/")[::-1], 0
    try:
        while names:
            name = names.pop()
            if name == b"..":
                _back(way)
            elif name not in (b"", b"."):
                way.append(os.open(name, _LOOK, dir_fd=way[-1]))
                if stat.S_ISLNK(os.fstat(way[-1]).st_mode):
                    links += 1
                    if links > _LINKS:
                        raise OSError(errno.ELOOP, "")
                    target = os.readlink(b"", dir_fd=way[-1])
                    names += target.split(b"/")[::-1]
                    _back(way, len(way) if target.startswith(b"/") else 1)
        return way.pop()
    finally:
        for each in way:
            os.close(each)


def _back(way: list[int], steps: int = 1) -> None:
    """The root has no parent."""
    for _ in range(min(steps, len(way) - 1)):
        os.close(way.pop())
