"""Where the measured program is, and the surroundings that measured processes get."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def surroundings(folder: Path) -> dict[str, str]:
    """Variables of a measured process: nothing of the user's, a home and a place for temporary files in `folder`."""
    temp = folder / "temp"
    temp.mkdir(exist_ok=True)
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "TMPDIR": str(temp),
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(ROOT),
    }
