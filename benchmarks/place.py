"""Where the measured program is, and the surroundings that measured processes get."""

import os
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]


def surroundings(folder: Path) -> dict[str, str]:
    """Variables of a measured process: nothing of the user's, a home and a place for temporary files in `folder`. SHELL
    is what every user has: without it the bare loop's shells would be slower than theirs."""
    temp = folder / "temp"
    temp.mkdir(exist_ok=True)
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "SHELL": shutil.which("bash") or "/bin/sh",
        "TMPDIR": str(temp),
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(ROOT),
    }
