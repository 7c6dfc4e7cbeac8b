"""Where a task's tools act: the protocol that every backend fulfils, and the values it speaks in."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

from msgspec import Struct

DEFAULT_IMAGE = "python:3.11-slim"


class Limits(Struct, frozen=True, kw_only=True):
    """What one sandbox may use."""

    cpus: float = 1.0
    memory_mb: int = 5120
    pids: int = 512
    network: str = "on"  # on | none | the name of a network that the engine has (docker, podman)


class Owner(Struct, frozen=True, kw_only=True):
    """Who made a sandbox: enough for a later run to know that its maker is dead."""

    run_id: str
    boot_id: str
    pid_namespace: str
    pid: int
    start_time: int  # /proc/PID/stat field 22, clock ticks after boot


class EnvironmentSpec(Struct, frozen=True, kw_only=True):
    """One sandbox to open. `deadline` is a Unix time after which anybody may remove it."""

    task_id: str
    owner: Owner
    deadline: float
    image: str = ""
    cwd: str = ""  # "" = the backend's default
    limits: Limits = Limits()
    volumes: tuple[str, ...] = ()  # HOST:SANDBOX[:ro]
    variables: Mapping[str, str] = {}
    command_timeout: float = 180.0


class BackendSettings(Struct, frozen=True, kw_only=True):
    """What a backend is told once, not with each sandbox. Plain values: files by their paths, keys never."""

    network: str = "on"  # docker, podman: a named one has to be there
    pull_policy: str = "missing"  # docker, podman: missing | always | never
    container_user: str = ""  # docker, podman: NAME or UID[:GID]; "" = the image's
    read_only_root: bool = False  # docker, podman: only the workspace, /tmp, /var/tmp and /run can be written to
    gpus: str = ""  # docker: all | a number | device=ID,ID
    ssh_hosts: tuple[str, ...] = ()  # [user@]host[:port]
    ssh_key: str = ""  # a file; "" = the usual ones, and the agent's
    ssh_known_hosts: str = ""  # a file; "" = ~/.ssh/known_hosts
    ssh_capacity: int = 16  # sandboxes that one host holds at once
    singularity_cache: str = ""  # a folder; "" = ours in Apptainer's own cache


class CommandResult(Struct, frozen=True, kw_only=True):
    """What a foreground command left. `output` is stdout and stderr as one stream, decoded with U+FFFD for bytes that
    are no UTF-8; where it was too long, head and tail with a marker between them that states `omitted_chars`."""

    output: str
    exit_code: int  # 124 after a time-out, 128 + N after signal N
    timed_out: bool = False
    omitted_chars: int = 0
    background: bool = False  # processes of this command live on


class Entry(Struct, frozen=True, kw_only=True):
    """One name in a directory."""

    name: str
    kind: str  # file | directory | link | other
    size: int  # bytes


class Process(Protocol):
    """A program started in the background. It ends with the task at the latest."""

    pid: int

    def output(self) -> str:
        """The last 200,000 characters printed so far."""

    def exit_code(self) -> int | None:
        """None while it runs."""

    async def read(self) -> bytes:
        """What it printed next, no byte lost; b"" at the end. Only of one that was started `piped`: `output` is empty
        then, and it waits while nobody reads."""

    async def wait(self, timeout: float) -> int | None:
        """Its exit code, or None if it still runs after `timeout` seconds."""

    async def write(self, data: bytes) -> None:
        """To its stdin. Raises ToolError when that is closed."""

    async def close_stdin(self) -> None:
        """Its stdin ends."""

    async def kill(self) -> None:
        """It and every descendant, at once."""


class Environment(Protocol):
    """One task's sandbox. Paths may be relative to the current directory, which commands change.

    File methods raise ToolError for what the model can mend (no such file, a directory, not permitted, NUL in a path);
    every method raises EnvironmentLost when the sandbox is gone; `run` and `write` raise DiskFull where what they were
    told is that a disk is full, and it is the one of this machine that the sandbox stands on.
    """

    backend: str
    image: str
    temp: str
    """The folder for temporary files, absolute: what $TMPDIR is at the start."""

    async def run(
        self, command: str, *, timeout: float, cwd: str | None = None, max_chars: int = 50_000
    ) -> CommandResult:
        """One command in a fresh child shell. The current directory and exported variables carry over to the next;
        `cwd` is for this command alone. After `timeout` seconds every descendant of this command is killed, none of
        earlier ones."""

    async def start(self, command: str, *, cwd: str | None = None, pty: bool = False, piped: bool = False) -> Process:
        """One command in the background, its stdin open. `piped`: see `Process.read`."""

    def read(self, path: str) -> AsyncIterator[bytes]:
        """The file's bytes in chunks: a reader that stops early leaves nothing behind."""

    async def write(self, path: str, data: bytes) -> bool:
        """Replaces or makes the file, its parents too. True if a parent directory had to be made."""

    async def list(self, path: str) -> Sequence[Entry]:
        """A directory's entries, sorted by name."""

    async def delete(self, path: str) -> None:
        """One file or link."""

    async def check_room(self, size: int) -> None:
        """Raises DiskFull if the sandbox stands on a disk of this machine without room for so many bytes."""


class Backend(Protocol):
    """A kind of sandbox. Importing its module does nothing; what it needs is looked for by `check`."""

    name: str
    takes_images: bool
    isolates: bool

    async def check(self) -> str:
        """ "" when sandboxes of this kind can be opened here, else what is missing and how to mend it, in one line."""

    async def prepare(self, image: str) -> None:
        """Makes the image ready, once over all processes of this machine. Raises ImageUnavailable."""

    def open(self, spec: EnvironmentSpec) -> AbstractAsyncContextManager[Environment]:
        """A sandbox, removed whatever happens inside. Raises SetupFailed, ImageUnavailable, EnvironmentLost,
        DiskFull."""

    async def reap(self) -> int:
        """Removes what dead runs left on this machine; how many sandboxes that were."""


@runtime_checkable
class Outspoken(Protocol):
    """A backend that has something to tell a run."""

    def warnings(self) -> Sequence[str]:
        """What the user is told once, at a run's start, when it has reaped."""


@runtime_checkable
class Rented(Protocol):
    """A backend whose sandboxes are paid for as long as they are there."""

    def unremoved(self) -> tuple[str, ...]:
        """Names of those that could not be removed, each told once; nobody else will try it before the next `reap`."""

    async def remove(self, name: str) -> bool:
        """Tries it again, within a bound: whether there is none of that name now."""


@runtime_checkable
class Lenient(Protocol):
    """A backend whose `check` also says what keeps no run from starting."""

    async def hindrance(self) -> str:
        """What does: "" or one line, as of `Backend.check`."""
