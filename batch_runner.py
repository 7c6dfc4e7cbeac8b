"""Batch runner: a file of prompts in, trajectories of tool-using agents out. `python batch_runner.py --help`."""

import sys
from collections.abc import Sequence

from batch.start import start


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of one invocation."""
    return start("batch.program", argv)


if __name__ == "__main__":
    sys.exit(main())
