"""Command-line tasks and SWE-bench instances in, trajectories, patches and predictions out.
`python mini_swe_runner.py --help`."""

import sys
from collections.abc import Sequence

from batch.start import start


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of one invocation."""
    return start("swe.program", argv)


if __name__ == "__main__":
    sys.exit(main())
