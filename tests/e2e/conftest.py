"""What several end-to-end tests are given."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.bench import Bench, prompts
from tests.endpoint import EndpointProcess


@pytest.fixture(scope="module")
def endpoint() -> Iterator[EndpointProcess]:
    """One call of a tool in each row."""
    with EndpointProcess(calls=1, latency=0.02) as process:
        yield process


@pytest.fixture
def bench(tmp_path: Path, endpoint: EndpointProcess) -> Bench:
    """Four rows."""
    return Bench(tmp_path, endpoint, prompts(4))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)
