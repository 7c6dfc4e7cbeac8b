"""A disk that stands still for a while: nothing is lost, nothing is killed or run again for it."""

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.bench import Bench, ids, prompts
from tests.e2e.program import merged, wait_until
from tests.endpoint import EndpointProcess

FROZEN = 3.0  # seconds
ROWS = 30


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    image, place = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(16 << 20)
    place.mkdir()
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


@contextmanager
def frozen(disk: Path) -> Iterator[None]:
    """Every write waits."""
    subprocess.run(["fsfreeze", "--freeze", str(disk)], check=True)
    thaw = threading.Timer(FROZEN + 10, subprocess.run, [["fsfreeze", "--unfreeze", str(disk)]])
    thaw.start()  # whoever waits for the disk cannot be killed: not even a failed test may leave it so
    try:
        yield
    finally:
        thaw.cancel()
        subprocess.run(["fsfreeze", "--unfreeze", str(disk)], check=True)


def test_a_disk_that_stands_still_holds_the_run_up_and_costs_nothing(disk: Path, tmp_path: Path) -> None:
    with EndpointProcess(calls=1, latency=0.05) as endpoint:
        bench = Bench(tmp_path, endpoint, [{**row, "timeout_seconds": 10} for row in prompts(ROWS)])
        bench.directory = disk / "run"
        bench.settings |= {"num_workers": "2", "concurrency": "4", "batch_size": "3", "checkpoint_interval": "1"}
        with bench.start() as program:
            wait_until(lambda: len(bench.ended()) > 2)
            with frozen(disk):
                before = len(bench.ended())
                time.sleep(FROZEN)
                assert len(bench.ended()) == before < ROWS
            code, out, err = program.end()
        asked = bench.asked()
    assert code == 0, out + err
    assert sorted(ids(merged(bench.directory))) == sorted(f"row{number}" for number in range(ROWS))
    assert [row["attempt"] for row in bench.journal()] == [1] * ROWS
    assert set(asked.values()) == {2}
    assert "died" not in (bench.directory / "run.log").read_text()
