"""`python -m benchmarks`: measures the program, prints the figures beside their targets, writes them as JSON."""

import argparse
import importlib
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from msgspec import structs

from benchmarks.bench import Bench
from benchmarks.interrupts import heed, interrupt_before
from benchmarks.place import ROOT
from benchmarks.program import remove_dead
from benchmarks.report import Figure, as_json, code, lines, machine
from benchmarks.sizes import FULL, NORMAL, QUICK, Sizes

FIGURES = (
    *("cpu", "wall", "in_flight", "limits", "memory", "start", "commands", "sandboxes"),
    *("journal", "stream", "counting"),
)
"""Modules of `benchmarks.figures`, in the order in which they are taken."""
BROKEN = "broken:"
WHOLE, PARTIAL = "bench.json", "bench-partial.json"


def main(argv: Sequence[str]) -> int:
    """1 if something could not be measured because it broke; 2, before anything is, for figures that cannot be kept.
    SystemExit at an interrupt: no figures are written."""
    options = _options(argv)
    if problem := _unwritable(options.json):
        sys.stderr.write(f"error: --json: {problem}\n")
        return 2
    heed()
    remove_dead()
    sizes = _sizes(options)
    about = _about(sizes, options.only)
    began = time.monotonic()
    figures = _measured(options.only or FIGURES, Bench(sizes))
    about |= {"seconds": round(time.monotonic() - began, 1), "load_afterwards": machine()["load"]}
    options.json.write_bytes(as_json(figures, about))
    _say(*lines(figures), f"{options.json} has them as JSON; {about['machine']}, {about['seconds']} s")
    if not sizes.measures:
        _say("sizes were tiny: no figure says how fast anything is")
    return int(any(figure.name.startswith(BROKEN) for figure in figures))


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--full", action="store_true", help="a million streamed prompts, not a hundred thousand")
    size.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, measures nothing")
    parser.add_argument("--only", nargs="+", choices=FIGURES, metavar="NAME", help=f"of {', '.join(FIGURES)}")
    parser.add_argument(
        "--json", type=Path, help=f"where to write them (build/{WHOLE}; with --quick or --only build/{PARTIAL})"
    )
    options = parser.parse_args(argv)
    options.json = options.json or ROOT / "build" / (PARTIAL if options.quick or options.only else WHOLE)
    return options


def _about(sizes: Sizes, only: Sequence[str] | None) -> dict[str, object]:
    """What the figures are of."""
    taken_at = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    return {"taken_at": taken_at, "sizes": sizes.name, "only": only, "code": code(), "machine": machine()}


def _unwritable(path: Path) -> str:
    """Why figures cannot be written there, or ""; its folder is made, and what was there stays."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    return ""


def _sizes(options: argparse.Namespace) -> Sizes:
    return FULL if options.full else QUICK if options.quick else NORMAL


def _measured(names: Sequence[str], bench: Bench) -> list[Figure]:
    figures = []
    for figure in (figure for name in names for figure in _of(name, bench)):
        _say(*list(lines([figure]))[1:])
        figures.append(figure)
    return figures


def _of(name: str, bench: Bench) -> Iterator[Figure]:
    """A module's figures; a run that breaks costs no others."""
    try:
        for figure in importlib.import_module(f"benchmarks.figures.{name}").measure(bench):
            yield figure if bench.sizes.measures else structs.replace(figure, target=None)
    except (RuntimeError, OSError) as broken:
        if interrupt := interrupt_before(broken):
            raise interrupt from broken
        yield Figure(name=f"{BROKEN} {name}", value=None, unit="", note=str(broken))


def _say(*texts: str) -> None:
    for text in texts:
        sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
