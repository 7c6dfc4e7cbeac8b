"""The short form of `make soak`."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.program import environment, wait_until

ROOT = Path(__file__).parents[2]
SOAK = [sys.executable, "-m", "tests.soak", "--seconds", "60"]


@pytest.mark.timeout(400)
def test_a_minute_of_bad_weather_loses_doubles_and_leaves_nothing() -> None:
    done = subprocess.run(SOAK, cwd=ROOT, capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "docker is left out: it takes --seconds 300 or more\n" in done.stdout


@pytest.mark.timeout(200)
def test_a_soak_that_is_cut_off_leaves_nothing(tmp_path: Path) -> None:
    def sandboxes() -> list[Path]:
        return [*Path("/dev/shm").glob("batch-sandbox-*"), *tmp_path.glob("*/*/temp/batch-sandbox-*")]

    def ours() -> list[Path]:
        return [place for place in sandboxes() if str(tmp_path) in _record(place)]

    soak = subprocess.Popen(
        [*SOAK, "--backends", "local"],
        cwd=ROOT,
        env=environment(tmp_path, TMPDIR=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    with soak:
        try:
            wait_until(ours, 90)
            soak.send_signal(signal.SIGTERM)
            said, _ = soak.communicate(timeout=90)
        finally:
            soak.kill()
    assert soak.returncode == 143, said.decode()
    assert not ours()
    assert not list(tmp_path.glob("tmp*"))


def _record(sandbox: Path) -> str:
    try:
        return (sandbox / "owner").read_text()
    except OSError:  # made or removed just now
        return ""
