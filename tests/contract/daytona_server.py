"""The stand-in for Daytona that all tests of a process share; the service itself with `--live`."""

import functools
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from tests.contract.daytona_service import KEY


class DaytonaServer:
    """The stand-in, as a process of its own that ends with this one."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.daytona_service"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        ready = self.process.stdout.readline().split()
        assert ready[:1] == ["ready"], ready
        self.url = ready[1]

    def variables(self) -> dict[str, str]:
        return {"DAYTONA_API_KEY": KEY, "DAYTONA_API_URL": f"{self.url}/api"}

    def set_faults(self, **faults: object) -> None:
        """What goes wrong from now on, see `daytona_service`."""
        self._asked("/test/faults", json.dumps(faults).encode())

    def requests(self) -> list[dict[str, Any]]:
        """What was created so far, the service's words."""
        requests: list[dict[str, Any]] = self._asked("/test/requests", None)
        return requests

    def sandboxes(self) -> list[str]:
        """The names of those that are there."""
        names: list[str] = self._asked("/test/sandboxes", None)
        return names

    def _asked(self, path: str, body: bytes | None) -> Any:
        with urllib.request.urlopen(self.url + path, body, timeout=60) as answer:
            return json.load(answer)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def close(self) -> None:
        self.process.communicate()


@functools.cache
def _own_server() -> DaytonaServer:
    return DaytonaServer()


def _is_live() -> bool:
    return "BATCH_RUNNER_TEST_LIVE" in os.environ and "DAYTONA_API_KEY" in os.environ


def use_shared() -> None:
    """Lets the backend find it, here and in the programs that are started from here; with `--live` it finds the service
    itself where there is a key."""
    if os.environ.get("DAYTONA_API_KEY") != KEY and not _is_live():
        os.environ.update(_own_server().variables())


def shared() -> DaytonaServer:
    """The stand-in itself, for what only it can be told."""
    use_shared()
    return _own_server()


def close_shared() -> None:
    if _own_server.cache_info().currsize:
        _own_server().close()
        _own_server.cache_clear()
        for name in ("DAYTONA_API_KEY", "DAYTONA_API_URL"):
            del os.environ[name]
