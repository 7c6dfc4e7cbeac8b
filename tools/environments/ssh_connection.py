"""Connections to one SSH host: who it is, whether it may be trusted, and the sessions that are opened on it."""

import asyncio
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from tools.environments.base import BackendSettings
from tools.errors import EnvironmentLost, SetupFailed, UsageProblem

if TYPE_CHECKING:
    from asyncssh import SSHClientConnection, SSHReader, SSHWriter

MISSING_PACKAGE = "ssh needs the package asyncssh: pip install -e '.[ssh]'"
_CONNECT_SECONDS = 15.0
_OPEN_SECONDS = 30.0
_KEEPALIVE = 10.0  # seconds between signs of life; the connection is lost when three in a row are not answered
_TRIES = 4  # a busy server drops some of those who knock at the same moment (MaxStartups)
_READ = 65_536
_WINDOW = 512 << 10
_EXIT_SECONDS = 0.1
_HOST = re.compile(
    r"(?:(?P<user>[^@\s]+)@)?(?:\[(?P<six>[0-9a-fA-F:.%\w]+)\]|(?P<host>[^\s:@\[\]]+))(?::(?P<port>\d+))?"
)


class Target(Struct, frozen=True):
    """One host of `ssh_hosts`; what is not given is for ~/.ssh/config, or the usual."""

    host: str
    port: int = 0
    user: str = ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (f"{self.user}@" if self.user else "") + host + (f":{self.port}" if self.port else "")


def parse_target(text: str) -> Target:
    """[user@]host[:port]; IPv6 in brackets. Raises UsageProblem."""
    found = _HOST.fullmatch(text.strip())
    port = int((found and found["port"]) or 0)
    if not found or port > 65_535:
        raise UsageProblem(f"ssh_hosts: {text!r} is not user@host:port")
    return Target(found["six"] or found["host"], port, found["user"] or "")


class SshChannel:
    """A session on a connection: a shell at the other end, its stdin and stdout."""

    def __init__(
        self, connection: "SSHClientConnection", writer: "SSHWriter[bytes]", reader: "SSHReader[bytes]"
    ) -> None:
        self._connection = connection
        self._writer = writer
        self._reader = reader
        self.is_dropped = False
        """Whoever set it knows that the shell's end is somebody else's work: `close` need not look after it."""

    @property
    def takes_room(self) -> bool:
        """Whether the server still counts it."""
        return not self._writer.channel.is_closing() and not self.is_cut

    @property
    def is_cut(self) -> bool:
        """Whether its connection is lost."""
        return bool(self._connection.is_closed())

    async def write(self, data: bytes) -> None:
        """See `Channel.write`."""
        with _session_errors():
            self._writer.write(data)
            await self._writer.drain()

    async def end_input(self) -> None:
        """See `Channel.end_input`."""
        if not self._writer.channel.is_closing():
            with _session_errors():
                self._writer.write_eof()

    async def read(self) -> bytes:
        """See `Channel.read`."""
        try:
            with _session_errors():
                return await self._reader.read(_READ)
        except EnvironmentLost:
            return b""

    async def close(self) -> None:
        """See `Channel.close`."""
        channel = self._writer.channel
        if channel.is_closing():
            return
        if not self.is_dropped and not self.is_cut:
            await self._leave(channel)
        channel.abort()

    async def _leave(self, channel: Any) -> None:
        """The shell ends with its stdin, or is killed with what it waits for."""
        try:
            with _session_errors():
                if not channel.is_closing():
                    self._writer.write_eof()
                async with asyncio.timeout(_EXIT_SECONDS):
                    while channel.get_exit_status() is None and await self._reader.read(_READ):
                        pass
        except (EnvironmentLost, TimeoutError):
            pass
        if channel.get_exit_status() is None and not channel.is_closing() and not self.is_cut:
            channel.send_signal("KILL")


class _Link:
    """A connection, and how many sessions its server allows on it, once that is known."""

    def __init__(self, connection: "SSHClientConnection") -> None:
        self.connection = connection
        self._sessions: list[SshChannel] = []
        self._opening = 0
        self._room = 1 << 30
        self._has_served = False

    def has_room(self) -> bool:
        """Whether another session may be asked for."""
        return not self.connection.is_closed() and self._used() < self._room

    def _used(self) -> int:
        self._sessions = [session for session in self._sessions if session.takes_room]
        return self._opening + len(self._sessions)

    async def open(self, command: str) -> SshChannel | None:
        """None where the server allows no more on this connection. Raises EnvironmentLost."""
        import asyncssh  # noqa: PLC0415 - an optional package, imported when used

        self._opening += 1
        try:
            with _session_errors():
                async with asyncio.timeout(_OPEN_SECONDS):
                    session = await self._session(command)
        except EnvironmentLost as lost:
            is_alone = not self._has_served and self._opening == 1
            if is_alone or not isinstance(lost.__cause__, asyncssh.ChannelOpenError):
                raise
            self._room = max(1, self._used() - 1)  # the server may count what has just ended here
            return None
        finally:
            self._opening -= 1
        self._has_served = True
        self._sessions.append(session)
        return session

    async def _session(self, command: str) -> SshChannel:
        """Who is cancelled meanwhile leaves no session: the server may still be at it."""
        opening = asyncio.ensure_future(self.connection.open_session(command, encoding=None, window=_WINDOW))
        try:
            writer, reader, _ = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_abort)
            raise
        return SshChannel(self.connection, writer, reader)


def _abort(opening: "asyncio.Future[Any]") -> None:
    if not opening.cancelled() and not opening.exception():
        opening.result()[0].channel.abort()


class Links:
    """The connections of this event loop to one host: one, as long as its server allows so many sessions on it
    (MaxSessions), then another."""

    def __init__(self, target: Target, settings: BackendSettings) -> None:
        self.target = target
        self._settings = settings
        self._links: list[_Link] = []
        self._connecting: asyncio.Task[None] | None = None

    async def open(self, command: str) -> SshChannel:
        """A session that runs a command. Raises SetupFailed where the host may not be used, EnvironmentLost."""
        while True:
            self._links = [link for link in self._links if not link.connection.is_closed()]
            for link in self._links:
                if link.has_room() and (session := await link.open(command)):
                    return session
            await self._connected()

    async def _connected(self) -> None:
        """One more link, once for all who wait for it: who is cancelled leaves the others waiting."""
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(self._no_longer)
        await asyncio.shield(self._connecting)

    async def _connect(self) -> None:
        connection = await connect(self.target, self._settings)
        self._links.append(_Link(connection))

    def _no_longer(self, task: "asyncio.Task[None]") -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # nobody may be left to ask for it

    async def close(self) -> None:
        """Ends every connection."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        links, self._links = self._links, []
        for link in links:
            link.connection.close()
        await asyncio.gather(*(link.connection.wait_closed() for link in links))


async def connect(target: Target, settings: BackendSettings) -> "SSHClientConnection":
    """A connection to a host whose key is known. Raises SetupFailed, EnvironmentLost for what may pass."""
    import asyncssh  # noqa: PLC0415 - an optional package, imported when used

    known_hosts = _known_hosts(settings)
    options: dict[str, Any] = {"client_keys": [str(_key(settings))]} if settings.ssh_key else {}
    if target.port:
        options["port"] = target.port
    if target.user:
        options["username"] = target.user
    for attempt in range(1, _TRIES + 1):
        try:
            return await asyncssh.connect(
                target.host,
                known_hosts=known_hosts,
                connect_timeout=_CONNECT_SECONDS,
                login_timeout=_CONNECT_SECONDS,
                keepalive_interval=_KEEPALIVE,
                keepalive_count_max=3,
                preferred_auth="publickey",
                **options,
            )
        except asyncssh.HostKeyNotVerifiable:
            raise SetupFailed(_untrusted(target, known_hosts)) from None
        except asyncssh.PermissionDenied:
            raise SetupFailed(_denied(target, settings)) from None
        except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
            name = settings.ssh_key or "a key in ~/.ssh"
            raise SetupFailed(
                f"{target}: {name} cannot be used ({error}): one with a passphrase has to be in an ssh-agent"
            ) from None
        except (asyncssh.ConnectionLost, ConnectionResetError) as error:
            if attempt == _TRIES:
                raise EnvironmentLost(f"{target}: the server hangs up: {_said(error)}") from None
            await asyncio.sleep(random.uniform(0.2, 0.6) * attempt)  # noqa: S311 - not a secret
        except (asyncssh.Error, OSError, TimeoutError) as error:
            raise EnvironmentLost(
                f"{target} cannot be reached ({_said(error)}): is sshd running there, at this address and port?"
            ) from None
    raise AssertionError


def _known_hosts(settings: BackendSettings) -> str:
    """An existing file. Raises SetupFailed: without one every host would be unknown."""
    path = Path(settings.ssh_known_hosts or "~/.ssh/known_hosts").expanduser()
    if not path.is_file():
        raise SetupFailed(
            f"the file of known hosts {path} is not there: make it with ssh-keyscan, or set ssh_known_hosts"
        )
    return str(path)


def _key(settings: BackendSettings) -> Path:
    path = Path(settings.ssh_key).expanduser()
    if not path.is_file():
        raise SetupFailed(f"ssh_key: {path} is not there")
    return path


def _untrusted(target: Target, known_hosts: str) -> str:
    import asyncssh  # noqa: PLC0415 - an optional package, imported when used

    known = asyncssh.match_known_hosts(known_hosts, target.host, "", target.port or 22)
    if known[0] or known[1]:
        return (
            f"{target}: its host key is not the one in {known_hosts}: somebody may be in between; if it was changed on"
            f" purpose, take the old one out (ssh-keygen -R)"
        )
    scan = f"ssh-keyscan {f'-p {target.port} ' if target.port else ''}{target.host} >>{known_hosts}"
    return (
        f"{target}: its host key is in no line of {known_hosts}: add it ({scan}) once you have compared its fingerprint"
    )


def _denied(target: Target, settings: BackendSettings) -> str:
    key = settings.ssh_key or "no key of ~/.ssh or the agent"
    told = f"does not accept {key}" if settings.ssh_key else f"accepts {key}"
    return f"{target} {told}: add its .pub to ~/.ssh/authorized_keys there, or set another user or ssh_key"


@contextmanager
def _session_errors() -> Iterator[None]:
    """Whatever goes wrong on a connection, as EnvironmentLost."""
    import asyncssh  # noqa: PLC0415 - an optional package, imported when used

    try:
        yield
    except (asyncssh.Error, OSError) as error:
        raise EnvironmentLost(f"ssh: {_said(error)}") from error


def _said(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
