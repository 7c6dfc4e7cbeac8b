"""`--plot`: how long rows were and are. matplotlib is an extra."""

from array import array
from pathlib import Path

from batch.store import replacing

BINS = 60


def plot(path: Path, before: "array[int]", after: "array[int]", target: int) -> None:
    """Two histograms of tokens a row, one over the other, with the target as a line. RunStopped if the disk refuses."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra, and 0.3 s

    figure = Figure(figsize=(9, 6), layout="constrained")
    most = max([target, *(max(side, default=1) for side in (before, after))])
    upper, lower = figure.subplots(2, 1, sharex=True, sharey=True)
    for axes, side, title in ((upper, before, "before"), (lower, after, "after")):
        axes.hist(side, bins=BINS, range=(0, most))
        axes.axvline(target, color="black", linestyle="--", label=f"target: {target:,}")
        over = sum(tokens > target for tokens in side)
        axes.set_title(f"{title}: {len(side):,} rows, {over:,} over the target")
        axes.set_ylabel("rows")
        axes.legend()
    lower.set_xlabel("tokens")
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix("."))
