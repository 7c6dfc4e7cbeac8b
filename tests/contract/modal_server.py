"""Stand-ins for Modal's service on loopback: each ends with the process that started it."""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import modal

from tests.contract.modal_service import LABEL, SECRET

_ROOT = Path(__file__).parents[2]
_URL = "MODAL_SERVER_URL"


class ModalServer:
    """A stand-in, see `modal_service`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.modal_service"],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        ready = self._said()
        assert ready[:1] == ["ready"], ready
        self.url = f"http://127.0.0.1:{ready[1]}"

    def _said(self) -> list[str]:
        assert self._process.stdout is not None
        return self._process.stdout.readline().split()

    def tell(self, word: str) -> None:
        """`stall`, `keep` (no sandbox can be ended) or `go`."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        assert self._said() == ["done"]

    def freeze(self) -> None:
        """It answers nothing, and no longer takes what it is sent."""
        self._process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.communicate()

    def variables(self) -> dict[str, str]:
        return {_URL: self.url, "MODAL_TOKEN_ID": "ak-1", "MODAL_TOKEN_SECRET": SECRET}

    def sandboxes(self) -> int:
        """How many there are; also those of one that was killed."""
        name = self.url.rpartition(":")[2]
        command = ["docker", "ps", "-aq", "--filter", f"label={LABEL}={name}"]
        return len(subprocess.run(command, check=True, capture_output=True).stdout.split())


@functools.cache
def _own_server() -> ModalServer:
    server = ModalServer()
    os.environ.update(server.variables())
    return server


def _is_live() -> bool:
    has_key = "MODAL_TOKEN_ID" in os.environ or Path("~/.modal.toml").expanduser().exists()
    return "BATCH_RUNNER_TEST_LIVE" in os.environ and has_key


def use_service() -> None:
    """Makes the SDK of this process, and of the programs that it starts, speak to one stand-in; with `--live`, to what
    its own settings name where there is a key."""
    if os.environ.get("MODAL_TOKEN_SECRET") != SECRET and not _is_live():
        _own_server()


@asynccontextmanager
async def speaking_with(variables: dict[str, str | None]) -> AsyncIterator[None]:
    """Lets the SDK of this process speak with another service or token meanwhile: its client is the process's."""
    use_service()
    usual = {name: os.environ.get(name) for name in variables}
    try:
        await _set(variables)
        yield
    finally:
        await _set(usual)


async def _set(variables: dict[str, str | None]) -> None:
    if modal.client._Client._client_from_env:
        client = await modal.Client.from_env.aio()
        await client.close.aio()
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def close_service() -> None:
    if _own_server.cache_info().currsize:
        server = _own_server()
        server.close()
        _own_server.cache_clear()
        for name in server.variables():
            del os.environ[name]
