"""Trajectory compressor: finished trajectories in, the same within a token budget out.
`python trajectory_compressor.py --help`."""

import sys
from collections.abc import Sequence

from batch.start import start


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of one invocation."""
    return start("compression.program", argv)


if __name__ == "__main__":
    sys.exit(main())
