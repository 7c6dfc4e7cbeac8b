"""Lists the distributions of `tools.distributions`, whose functions for scripts can be had from here too."""

import sys

from tools.distributions import get_distribution, list_distributions, sample_toolsets

__all__ = [
    "get_distribution",
    "list_distributions",
    "main",
    "sample_toolsets",
    "sample_toolsets_from_distribution",
]

sample_toolsets_from_distribution = sample_toolsets


def main() -> int:
    """Prints the distributions, each one's toolsets by falling chance."""
    from batch.cli import print_distributions  # noqa: PLC0415 - late: only the listing draws

    print_distributions()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OSError as problem:
        sys.exit(f"the distributions cannot be printed: {problem.strerror}")
