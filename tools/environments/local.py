"""Commands on this machine, in a folder of their own. No isolation: only for those who ask for it."""

import asyncio
import functools
import os
import shutil
import sys
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager
from pathlib import Path

from tools.environments.base import Environment, EnvironmentSpec
from tools.environments.channel import Channel, base_variables, locale_beside
from tools.environments.hosted import Host, end_process, open_on, reap_folders, shell_channel
from tools.environments.process import ShellProcess
from tools.environments.processes import all_pids, is_marked, kill_call
from tools.environments.shell import ShellEnvironment, new_token
from tools.errors import EnvironmentLost, SandboxRefused, SetupFailed

_PARTS = ("workspace", "home", "temp")
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class LocalEnvironment(ShellEnvironment):
    """Its processes are seen from here, which is quicker and surer than from a shell."""

    def __init__(self, spec: EnvironmentSpec, host: Host) -> None:
        folder = str(host.folder)
        user = os.environ.get("USER", "user")
        locale = locale_beside(spec.variables)
        variables = base_variables(home=f"{folder}/home", temp=f"{folder}/temp", user=user, locale=locale)
        super().__init__(
            spec,
            backend="local",
            image="",
            cwd=spec.cwd or f"{folder}/workspace",
            private=f"{host.state}/",
            variables=variables,
            open_channel=self._spawn,
            processes="",
            token=host.token,
        )
        self._host = host
        self._before: Set[int] = frozenset()
        self._leaves_processes = False

    async def open_up(self) -> None:
        """See `Hosted`."""
        try:
            await self.enter()
        except EnvironmentLost:
            raise SetupFailed("the sandbox's shell ended at once: it cannot be put under its limits") from None

    async def _spawn(self) -> Channel:
        host = self._host
        if not host.folder.exists():
            raise EnvironmentLost("the sandbox's folder is gone")
        environ = {"PATH": os.environ.get("PATH", _DEFAULT_PATH)}
        process = host.spawn(["sh"], environ, host.folder / "workspace")
        channel = shell_channel(process, functools.partial(end_process, process))
        await channel.write(f"{{ {host.confine()}; }} || exit 71\n".encode())
        return channel

    async def _lives_on(self, call: str, seen: bool) -> bool:
        pids = self._host.pids()
        new, self._before = pids - self._before, pids
        lives = any(is_marked(pid, call) is not False for pid in new)
        self._leaves_processes |= lives
        return lives

    async def _follow(self, process: ShellProcess, channel: Channel) -> None:
        self._leaves_processes = True  # it may end before those that it started
        await super()._follow(process, channel)

    async def _alive(self, call: str) -> bool:
        return any(is_marked(pid, call) for pid in self._host.pids())

    async def _kill(self, call: str) -> None:
        self._leaves_processes = True
        await asyncio.to_thread(kill_call, call, self._host.pids)

    async def check_room(self, size: int) -> None:
        """See `Environment.check_room`."""
        await asyncio.to_thread(self._host.check_room, size)

    async def close(self) -> None:
        """Ends all that was started here, then removes the folder."""
        await self.leave()
        if self._leaves_processes and not self._host.cgroup:
            await asyncio.to_thread(kill_call, f"{self.token}.", all_pids)
        await asyncio.to_thread(self._host.remove)


class LocalBackend:
    """See `Backend`."""

    name = "local"
    takes_images = False
    isolates = False

    async def check(self) -> str:
        """See `Backend.check`."""
        if not sys.platform.startswith("linux"):
            return "local needs Linux: choose docker"
        return "" if shutil.which("sh") else "local needs a shell named `sh` on PATH"

    async def prepare(self, image: str) -> None:
        """Nothing: it takes no images."""

    @asynccontextmanager
    async def open(self, spec: EnvironmentSpec) -> AsyncIterator[Environment]:
        """See `Backend.open`."""
        _check_spec(spec)
        host = Host(spec, new_token(), _PARTS)
        async with open_on(host, functools.partial(LocalEnvironment, spec)) as environment:
            yield environment

    async def reap(self) -> int:
        """See `Backend.reap`."""
        return await asyncio.to_thread(reap_folders)


def _check_spec(spec: EnvironmentSpec) -> None:
    if spec.limits.network == "none":
        raise SandboxRefused("the local backend cannot take the network away: choose bubblewrap or docker")
    if spec.cwd.startswith("/") and not Path(spec.cwd).is_dir():
        raise SandboxRefused(
            f"working directory {spec.cwd!r}: the local backend makes no directory outside its own folder"
        )
    if spec.volumes:
        raise SandboxRefused("the local backend has no volumes: choose bubblewrap or docker")


LOCAL = LocalBackend()
