"""Sandboxes in Apptainer containers (or Singularity's): no daemon, and no root where user namespaces are allowed.

A task's container is a process of ours, which ends when we do: its first shell reads a pipe that only we write to. Its
file system is the image's directory below a writable one of its own; nothing of the machine's is shown but the files
that name hosts and the time zone. Root gets the capabilities that Docker gives it, and the parts of /proc by which root
could command the machine are read-only; everybody else is root in a namespace of his own.

Options: https://apptainer.org/docs/user/latest/cli/apptainer_exec.html.
"""

import asyncio
import os
import platform
import posixpath
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from tools.environments.base import DEFAULT_IMAGE, Backend, BackendSettings, Environment, EnvironmentSpec
from tools.environments.cgroup import usable_bases
from tools.environments.channel import base_variables
from tools.environments.door import DoorEnvironment, limit_processes
from tools.environments.ending import to_the_end
from tools.environments.hosted import Host, bound_volumes, failure_of, reap_folders, remove_tree
from tools.environments.images import FOREIGN, PULL_SECONDS, for_another, platform_of
from tools.environments.inside import file_inside
from tools.environments.shell import new_token
from tools.environments.singularity_images import ready_image
from tools.errors import SandboxRefused, SetupFailed

_PROGRAMS = ("apptainer", "singularity")
_PARTS = ("workspace", "door", "overlay", "work")
_WORKSPACE = "/workspace"
_PRIVATE = "/.batch-runner"
_DOOR = f"{_PRIVATE}-door"
_CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE"),
    *("SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
)
_MACHINES = ("bus", "fs", "irq", "sys", "sysrq-trigger")  # in /proc, not of the sandbox's namespaces
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_NO_LIMITS = "limits need control groups that this process may make, or an ordinary user"
# What the program says of itself in a container's environment; an image's own variables stay.
_QUIET = """\
for n in BIND COMMAND CONTAINER ENVIRONMENT NAME APPNAME NO_EVAL; do unset "APPTAINER_$n" "SINGULARITY_$n"; done
unset PS1 PROMPT_COMMAND n
case ${LD_LIBRARY_PATH-} in
/.singularity.d/libs) unset LD_LIBRARY_PATH ;;
*:/.singularity.d/libs) LD_LIBRARY_PATH=${LD_LIBRARY_PATH%:/.singularity.d/libs} ;;
esac
"""


def find_program() -> str:
    """Apptainer's or Singularity's path, or ""."""
    return next((found for name in _PROGRAMS if (found := shutil.which(name))), "")


def _needed() -> str:
    """Raises SetupFailed where there is none."""
    if program := find_program():
        return program
    raise SetupFailed("neither apptainer nor singularity is installed: install the package apptainer, or choose docker")


def _environ() -> dict[str, str]:
    """Of the program itself: no variable by which the user's own containers are set up."""
    return {"PATH": os.environ.get("PATH", os.defpath), "HOME": os.environ.get("HOME", "/")}


def _container(folder: Path, network: str = "on") -> list[str]:
    """The beginning of an `exec` that shows nothing of this machine; writes to the folder's `overlay` and `work`."""
    return [
        *("-s", "exec", "--containall", "--no-home", "--no-umask", "--no-eval", "--no-mount", "sys"),
        *_rights(),
        *(("--net", "--network", "none") if network == "none" else ()),
        *("--overlay", f"{folder}/overlay", "--workdir", f"{folder}/work"),
    ]


def _rights() -> list[str]:
    if os.getuid():
        return ["--fakeroot"]
    capabilities = ",".join(f"CAP_{name}" for name in _CAPABILITIES)
    parts = [place for name in _MACHINES if Path(place := f"/proc/{name}").exists()]
    return ["--no-privs", "--add-caps", capabilities, *(word for part in parts for word in _bind(part, part, True))]


def _bind(source: str, target: str, read_only: bool = False) -> tuple[str, str]:
    """An option whose value is a line of comma-separated fields."""
    fields = ["type=bind", f"source={source}", f"destination={target}", *(["ro"] if read_only else [])]
    return "--mount", ",".join(_field(field) for field in fields)


def _field(text: str) -> str:
    quoted = text.replace('"', '""')
    return f'"{quoted}"' if any(each in text for each in ',"\n') else text


def arguments(spec: EnvironmentSpec, host: Host, image: Path) -> list[str]:
    """The `exec` command whose end is the door. Raises SetupFailed."""
    private = host.state / "private"
    private.mkdir(mode=0o700)
    volumes = [word for volume in bound_volumes(spec.volumes) for word in _bind(*volume)]
    return [
        *_container(host.folder, spec.limits.network),
        *_bind(str(private), _PRIVATE),
        *_bind(f"{host.folder}/door", _DOOR, True),
        *_bind(f"{host.folder}/workspace", _WORKSPACE),
        *volumes,
        *(str(image), "sh"),
    ]


class SingularityEnvironment(DoorEnvironment):
    """A container's process, and channels through its door."""

    def __init__(self, spec: EnvironmentSpec, host: Host, program: str, image: Path) -> None:
        super().__init__(
            msgspec.structs.replace(spec, cwd=posixpath.join(_WORKSPACE, spec.cwd)),
            host,
            backend="singularity",
            image=spec.image or DEFAULT_IMAGE,
            private=f"{_PRIVATE}/",
            variables=base_variables(home="/root" if (image / "root").is_dir() else "/", temp="/tmp"),  # noqa: S108
            door=_DOOR,
            argv=[program, *arguments(spec, host, image)],
            environ=_environ(),
        )
        self._catless = False

    async def open_up(self) -> None:
        """Waits for the sandbox. Raises SetupFailed, EnvironmentLost; SandboxRefused for an image of another machine's
        programs."""
        before = f"{_QUIET}{limit_processes(self._host)}cd {_WORKSPACE}\ncommand -v cat >/dev/null || echo catless\n"
        try:
            self._catless = (await self.open_door(before)).endswith("catless\n")
        except SetupFailed as problem:
            if not FOREIGN.search(str(problem)):
                raise
            here = platform_of({"Os": "linux", "Architecture": platform.machine()})
            why = for_another(f"this machine, {here}")
            raise SandboxRefused(f"image {self.image}: /bin/sh does not run in it: {why}") from None
        await self.enter()

    def read(self, path: str) -> AsyncIterator[bytes]:
        """See `Environment.read`."""
        return file_inside(self.init(), self._path(path)) if self._catless else super().read(path)


class SingularityBackend:
    """See `Backend`."""

    name = "singularity"
    takes_images = True
    isolates = True

    def __init__(self, cache: str = "", build_seconds: float = PULL_SECONDS) -> None:
        self._cache = cache
        self._build_seconds = build_seconds

    async def check(self) -> str:
        """See `Backend.check`. A container of this machine's own programs is made."""
        try:
            program = _needed()
            _refuse_without_limits(usable_bases() is not None)
        except SetupFailed as problem:
            return str(problem)
        folder = Path(tempfile.mkdtemp(prefix="batch-runner-check-"))
        try:
            words = [program, *_container(folder), *_own_programs(folder), f"{folder}/image", "true"]
            said = await failure_of(words, {**_environ(), "HOME": str(folder)})  # it makes folders there
        finally:
            remove_tree(folder)
        name = Path(program).name
        return f"{name} cannot make a container here ({said}): mend what it says, or choose docker" if said else ""

    async def prepare(self, image: str) -> None:
        """See `Backend.prepare`. SetupFailed where the program or the cache's folder is missing."""
        await self._ready_image(_needed(), image)

    async def _ready_image(self, program: str, image: str) -> Path:
        return await ready_image(program, image, self._cache, self._build_seconds)

    @asynccontextmanager
    async def open(self, spec: EnvironmentSpec) -> AsyncIterator[Environment]:
        """See `Backend.open`."""
        program = _needed()
        image = await self._ready_image(program, spec.image)
        host = Host(spec, new_token(), _PARTS)
        try:
            _refuse_without_limits(host.cgroup is not None)
            environment = SingularityEnvironment(spec, host, program, image)
        except BaseException:
            host.remove()
            raise
        try:
            await environment.open_up()
            yield environment
        finally:
            await to_the_end(environment.close())

    async def reap(self) -> int:
        """See `Backend.reap`."""
        return await asyncio.to_thread(reap_folders)


def _refuse_without_limits(has_groups: bool) -> None:
    """A limit of processes by `ulimit` does not hold root. Raises SetupFailed."""
    if not has_groups and os.getuid() == 0:
        raise SandboxRefused(f"a sandbox cannot be limited here: {_NO_LIMITS}")


def _own_programs(folder: Path) -> list[str]:
    """Makes `folder` a sandbox's whose image is empty: options that show this machine's programs in it."""
    image = folder / "image"
    for part in ("overlay", "work", "image", "image/dev", "image/etc", "image/proc", "image/tmp", "image/var/tmp"):
        (folder / part).mkdir(parents=True)
    options = [*_bind("/usr", "/usr", True)]
    for name in _SYSTEM:
        place = Path(name)
        if place.is_symlink():
            (image / name[1:]).symlink_to(place.readlink())
        elif place.exists():
            options += _bind(name, name, True)
    return options


def open_singularity(settings: BackendSettings) -> Backend:
    """The backend with this cache of images."""
    return SingularityBackend(settings.singularity_cache)
