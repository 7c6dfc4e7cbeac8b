"""SSH servers on loopback for tests: each ends with the process that started it."""

import functools
import os
import subprocess
import tempfile
from pathlib import Path

from tools.environments.base import BackendSettings

_FOLDER, _HOST = "SSHD_OF_TESTS_FOLDER", "SSHD_OF_TESTS_HOST"
_PLACE = Path(tempfile.gettempdir())


class SshServer:
    """An sshd with keys, settings and folder of its own."""

    def __init__(self, kind: str = "own", options: str = "") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="batch-sshd-", dir=_PLACE)) / "server"
        self.folder.parent.chmod(0o711)
        self._process = subprocess.Popen(
            [Path(__file__).with_name("sshd.sh"), self.folder, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "SSHD_OPTIONS": options},
            text=True,
        )
        assert self._process.stdout is not None
        ready = self._process.stdout.readline().split()
        assert ready[:1] == ["ready"], ready
        self.host = f"{ready[2]}@127.0.0.1:{ready[1]}"
        self.tmp = self.folder / "tmp"

    def settings(self, **changes: object) -> BackendSettings:
        return settings_of(self.folder, self.host, **changes)

    def sandboxes(self) -> list[str]:
        """Directories of tasks that are there."""
        return sorted(place.name for place in self.tmp.glob("batch-ssh-*"))

    def connections(self) -> list[int]:
        """The processes that serve one each."""
        pid = (self.folder / "pid").read_text().strip()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children]

    def close(self) -> None:
        self._process.communicate()
        self.folder.parent.rmdir()


def settings_of(folder: Path, host: str, **changes: object) -> BackendSettings:
    known: dict[str, object] = {
        "ssh_hosts": (host,),
        "ssh_key": str(folder / "id"),
        "ssh_known_hosts": str(folder / "known"),
        "ssh_capacity": 100,
    }
    return BackendSettings(**{**known, **changes})  # type: ignore[arg-type]


@functools.cache
def _own_server() -> SshServer:
    server = SshServer()
    os.environ[_FOLDER], os.environ[_HOST] = str(server.folder), server.host
    return server


def shared_settings() -> BackendSettings:
    """Those of one server for all tests of this process, and for the programs that they start."""
    if _FOLDER not in os.environ:
        _own_server()
    return settings_of(Path(os.environ[_FOLDER]), os.environ[_HOST])


def close_shared() -> None:
    if _own_server.cache_info().currsize:
        _own_server().close()
        _own_server.cache_clear()
        del os.environ[_FOLDER], os.environ[_HOST]
