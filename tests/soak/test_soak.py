"""The short form of `make soak`."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(400)
def test_a_minute_of_bad_weather_loses_doubles_and_leaves_nothing() -> None:
    command = [sys.executable, "-m", "tests.soak", "--seconds", "60"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
