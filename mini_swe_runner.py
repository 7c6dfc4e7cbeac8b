"""Command-line tasks and SWE-bench instances in, trajectories, patches and predictions out.
`python mini_swe_runner.py --help`."""

import os
import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of one invocation."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, _: os._exit(128 + number)) for number in numbers]
    from swe.program import invoke  # noqa: PLC0415 - an interrupt while this imports shall leave no traceback

    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    return invoke(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
