"""What was measured: figures with their targets, as a table for people and as JSON for programs."""

import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.place import ROOT

Number = int | float


class Figure(Struct, frozen=True, kw_only=True):
    """One measured figure. `target` is the most it may be, or the least where `at_least`; None: there is none.
    `value` is None where it could not be measured; `note` then says why, else how it came about. `values` is what it
    was made of."""

    name: str
    value: float | None
    unit: str
    target: float | None = None
    at_least: bool = False
    note: str = ""
    values: Mapping[str, Number | Sequence[Number]] = {}

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without one, or without a value."""
        if self.target is None or self.value is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target


def machine() -> dict[str, str | int | list[float]]:
    """What the figures were taken on, and how busy it was just then."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def code() -> dict[str, str | bool] | None:
    """The commit that was measured, and whether its files were changed since; None where git does not know."""
    if not (ROOT / ".git").exists():  # nor is it about a repository further up
        return None
    words = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S603 - our own words
    except (OSError, subprocess.CalledProcessError):
        return None
    told = done.stdout.splitlines()
    (commit,) = (line.split()[2] for line in told if line.startswith("# branch.oid "))
    return {"commit": commit, "changed": any(not line.startswith("#") for line in told)}


def as_json(figures: Sequence[Figure], about: Mapping[str, object]) -> bytes:
    """{...about, figures: [{..., met}]}, indented."""
    listed = [{**msgspec.to_builtins(figure), "met": figure.met} for figure in figures]
    return msgspec.json.format(msgspec.json.encode({**about, "figures": listed}), indent=2) + b"\n"


HEAD = ("figure", "measured", "target", "met", "how")


def lines(figures: Sequence[Figure]) -> Iterator[str]:
    """The table, line by line."""
    rows = [HEAD, *map(_cells, figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([*cells, row[-1]]).rstrip()


def _cells(figure: Figure) -> tuple[str, ...]:
    sign = "≥" if figure.at_least else "≤"
    value, target = _texts(figure.value, figure.target)
    return (
        figure.name,
        f"{value} {figure.unit}" if value else "not measured",
        f"{sign} {target} {figure.unit}" if target else "",
        {True: "yes", False: "NO", None: ""}[figure.met],
        figure.note,
    )


def _texts(value: float | None, target: float | None) -> tuple[str, str]:
    """Short, but different where they differ; "" for None."""
    texts = ("" if value is None else _short(value), "" if target is None else _short(target))
    if value is None or target is None:
        return texts
    digits = 0
    while value != target and float(texts[0]) == float(texts[1]):
        digits += 1
        texts = f"{value:.{digits}f}", f"{target:.{digits}f}"
    return texts


def _short(value: float) -> str:
    if value == int(value) and abs(value) < 1e9:
        return f"{int(value)}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
