"""Sandboxes of Linux namespaces, made by `bwrap`: the machine's programs, but files and processes of their own."""

import asyncio
import functools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tools.environments.base import Environment, EnvironmentSpec
from tools.environments.channel import base_variables, locale_beside
from tools.environments.door import DoorEnvironment, limit_processes
from tools.environments.hosted import Host, bound_volumes, failure_of, making, open_on, reap_folders
from tools.environments.shell import new_token

_PARTS = ("workspace", "home", "door", "etc")
_HOME = "/home/user"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = (
    "alternatives",
    "ca-certificates",
    "ca-certificates.conf",
    "crypto-policies",
    "debian_version",
    "fonts",
    "gai.conf",
    "host.conf",
    "hosts",
    "java",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "magic",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "perl",
    "pki",
    "protocols",
    "resolv.conf",
    "services",
    "ssl",
    "timezone",
)
_USERS = {
    "passwd": f"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:{_HOME}:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n",
}


class BubblewrapEnvironment(DoorEnvironment):
    """A `bwrap` process, and channels through its door."""

    def __init__(self, spec: EnvironmentSpec, host: Host) -> None:
        with making(str(host.folder)):
            for name, text in _USERS.items():
                (host.folder / "etc" / name).write_text(text)
        locale = locale_beside(spec.variables)
        super().__init__(
            spec,
            host,
            backend="bubblewrap",
            image="",
            private="/run/batch/",
            variables=base_variables(home=_HOME, temp="/tmp", user="user", locale=locale),  # noqa: S108 - the sandbox's own
            door="/run/door",
            argv=arguments(spec, host.folder),
            environ={"PATH": _PATH},
        )

    async def open_up(self) -> None:
        """See `Hosted`."""
        await self.open_door(limit_processes(self._host))
        await self.enter()


def arguments(spec: EnvironmentSpec, folder: Path) -> list[str]:
    """The `bwrap` command whose child is the door."""
    network = ["--unshare-net"] if spec.limits.network == "none" else []
    size = str(spec.limits.memory_mb << 20)
    return [
        "bwrap",
        *("--unshare-user", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL"),
        *("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--hostname", "sandbox", *network),
        *("--die-with-parent", "--new-session", "--clearenv", "--setenv", "PATH", _PATH),
        *_system_view(),
        *("--ro-bind", f"{folder}/etc/passwd", "/etc/passwd", "--ro-bind", f"{folder}/etc/group", "/etc/group"),
        *("--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/tmp"),  # noqa: S108 - the sandbox's own
        *("--perms", "0700", "--tmpfs", "/run/batch", "--ro-bind", f"{folder}/door", "/run/door"),
        *("--bind", f"{folder}/workspace", "/workspace", "--bind", f"{folder}/home", _HOME),
        *_volumes(spec.volumes),
        *("--chdir", "/workspace", "sh"),
    ]


def _volumes(volumes: tuple[str, ...]) -> list[str]:
    """HOST:SANDBOX[:ro] as mounts. Raises SetupFailed."""
    mounts = []
    for source, target, read_only in bound_volumes(volumes):
        mounts += ["--ro-bind" if read_only else "--bind", source, target]
    return mounts


@functools.cache
def _system_view() -> tuple[str, ...]:
    view = ["--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM:
        place = Path(name)
        if place.is_symlink():
            view += ["--symlink", str(place.readlink()), name]
        elif place.exists():
            view += ["--ro-bind", name, name]
    for name in _ETC:
        place = Path("/etc", name)
        if place.exists():
            view += ["--ro-bind", str(place.resolve()), str(place)]
    return tuple(view)


class BubblewrapBackend:
    """See `Backend`."""

    name = "bubblewrap"
    takes_images = False
    isolates = True

    async def check(self) -> str:
        """See `Backend.check`."""
        if not shutil.which("bwrap"):
            return (
                "bubblewrap is not installed: install the package bubblewrap (its program is `bwrap`), or choose docker"
            )
        command = ("bwrap", "--unshare-all", *_system_view(), "--proc", "/proc", "--dev", "/dev", "true")
        said = await failure_of(command)
        if not said:
            return ""
        return f"bubblewrap cannot make user namespaces here ({said}): allow them in the kernel, or choose docker"

    async def prepare(self, image: str) -> None:
        """Nothing: it takes no images."""

    @asynccontextmanager
    async def open(self, spec: EnvironmentSpec) -> AsyncIterator[Environment]:
        """See `Backend.open`."""
        host = Host(spec, new_token(), _PARTS)
        async with open_on(host, functools.partial(BubblewrapEnvironment, spec)) as environment:
            yield environment

    async def reap(self) -> int:
        """See `Backend.reap`."""
        return await asyncio.to_thread(reap_folders)


BUBBLEWRAP = BubblewrapBackend()
