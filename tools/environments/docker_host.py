"""Where the engine is, and the client of it: Docker's own, or Podman's service that speaks the same API.

Variables: https://docs.docker.com/reference/cli/docker/#environment-variables, and CONTAINER_HOST of podman(1).
"""

import os
import re
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tools.environments.base import BackendSettings
from tools.environments.ssh_connection import Target, connect, parse_target
from tools.errors import SandboxRefused, SetupFailed, UsageProblem
from tools.text import one_line

if TYPE_CHECKING:
    from aiodocker import Docker

MISSING_PACKAGE = "{0} needs the package aiodocker: pip install -e '.[docker]'"
_TO_START = {
    "docker": "start it (systemctl start docker, or Docker Desktop), or set DOCKER_HOST",
    "podman": "start its service (systemctl start podman.socket, or podman system service -t 0 &), or set"
    " CONTAINER_HOST",
}
_API = {"docker": "auto", "podman": "v1.41"}  # to ask podman takes a second or two; it speaks older ones always
_SOCKETS = {"docker": "/var/run/docker.sock", "podman": "/run/podman/podman.sock"}
_VARIABLES = {"docker": "DOCKER_HOST", "podman": "CONTAINER_HOST"}
_SCHEMES = ("unix", "tcp", "http", "https", "ssh", "npipe")


def not_running(name: str, detail: str = "") -> str:
    """How to mend that the engine of this name does not answer, in one line."""
    return f"{name} is not running: {_TO_START[name]}" + (f" ({detail})" if detail else "")


def not_an_engine(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """What is at the engine's address says other things than its API has: how to mend that, in one line."""
    place = re.sub("//.*@", "//", _url(name, environ))[:200]  # there may be a password
    where = f"{name} at {place}" if place else name
    return f"{where} does not answer as an engine: see what listens there, or set {_VARIABLES[name]} to one's address"


@asynccontextmanager
async def connected(
    name: str, settings: BackendSettings, environ: Mapping[str, str] = os.environ
) -> AsyncIterator["Docker"]:
    """A client of the engine `docker` (that of DOCKER_HOST, else of the docker context) or `podman` (that of
    CONTAINER_HOST, else of the service of this user or of this machine), for any number of streams at once.

    Raises SetupFailed where there is none, SandboxRefused for an address that is none, EnvironmentLost where SSH does
    not get there.
    """
    url = _url(name, environ)
    _refuse_scheme(name, url)
    async with AsyncExitStack() as stack:
        if url.startswith("ssh://"):
            url = await stack.enter_async_context(_forwarded(name, url, settings))
        client = _client(name, url, environ)
        stack.push_async_callback(client.close)
        yield client


def _refuse_scheme(name: str, url: str) -> None:
    """Raises SandboxRefused, which shows no more of the address: there may be a password."""
    scheme, separator, _ = url.partition("://")
    if url and (not separator or scheme not in _SCHEMES):
        told = f"the scheme {scheme[:50]!r} is unknown" if separator else "it has no scheme"
        raise SandboxRefused(f"{_VARIABLES[name]}: {told}: unix://, tcp://, https:// or ssh:// expected")


def _client(name: str, url: str, environ: Mapping[str, str]) -> "Docker":
    try:
        import aiodocker  # noqa: PLC0415 - an optional package, imported when used
    except ImportError:
        raise SetupFailed(MISSING_PACKAGE.format(name)) from None
    try:
        client = aiodocker.Docker(**_address(url, environ), api_version=_API[name])
    except (AssertionError, ValueError, aiodocker.DockerError) as error:  # AssertionError: there is no socket to guess
        raise SetupFailed(not_running(name, one_line(str(error)))) from None
    client.connector._limit = 0  # each channel holds a connection; aiohttp's 100 would be a dead end
    return client


def _url(name: str, environ: Mapping[str, str]) -> str:
    """ "" where the docker context says it."""
    return environ.get(_VARIABLES[name], "") or ("" if name == "docker" else _podman_socket(environ))


def is_here(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether it is known that the engine's files are this machine's: it is reached by a socket file."""
    return _url(name, environ).startswith("unix://")


@asynccontextmanager
async def _forwarded(name: str, url: str, settings: BackendSettings) -> AsyncIterator[str]:
    """The address of a socket here that stands for the engine's there, over one connection: sshd allows ten sessions on
    it (what `docker system dial-stdio` would take), but any number of such streams."""
    if find_spec("asyncssh") is None:
        raise SandboxRefused(f"{_VARIABLES[name]}=ssh://… needs asyncssh: pip install -e '.[ssh]'")
    host, _, path = url.removeprefix("ssh://").partition("/")
    target = _target(name, host)
    try:
        connection = await connect(target, settings)
    except SetupFailed as problem:
        raise SetupFailed(f"{name} at {target} ({_VARIABLES[name]}): {problem}") from None
    try:
        with TemporaryDirectory(prefix="batch-engine-") as folder:  # nobody else may open it
            async with await connection.forward_local_path(f"{folder}/socket", f"/{path}" if path else _SOCKETS[name]):
                yield f"unix://{folder}/socket"
    finally:
        connection.close()
        await connection.wait_closed()


def _target(name: str, host: str) -> Target:
    """Raises SandboxRefused, which shows nothing: there may be a password."""
    with suppress(UsageProblem):
        if ":" not in (target := parse_target(host)).user:
            return target
    raise SandboxRefused(f"{_VARIABLES[name]}: expected ssh://[user@]host[:port][/socket]")


def _podman_socket(environ: Mapping[str, str]) -> str:
    """Of the user's own service if that runs, else of the machine's."""
    own = Path(environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}") / "podman/podman.sock"
    return f"unix://{own if own.is_socket() and os.getuid() else _SOCKETS['podman']}"


def _address(url: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """The client's arguments: as the docker command does, TLS is wanted where DOCKER_TLS_VERIFY is not empty."""
    scheme, _, rest = url.partition("://")
    if scheme == "https" or (scheme in ("tcp", "http") and environ.get("DOCKER_TLS_VERIFY")):
        return {"url": f"https://{rest}", "ssl_context": _certificates(environ)}
    return {"url": url} if url else {}


def _certificates(environ: Mapping[str, str]) -> ssl.SSLContext:
    """ca.pem, cert.pem and key.pem of DOCKER_CERT_PATH; without that those of the docker command's folder that are
    there. Raises SandboxRefused."""
    named = environ.get("DOCKER_CERT_PATH")
    folder = Path(named or environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    authority, certificate, key = (folder / f"{part}.pem" for part in ("ca", "cert", "key"))
    try:
        context = ssl.create_default_context(cafile=authority if named or authority.exists() else None)
        if named or certificate.exists():
            context.load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError is one
        problem = one_line(error.strerror or str(error))
        raise SandboxRefused(f"DOCKER_CERT_PATH {folder}: no use of its ca.pem, cert.pem, key.pem: {problem}") from None
    return context
