"""Scans and merges a run, timed: `python -m benchmarks.journal_probe RUN_DIR DATASET` prints a `Probe` as JSON."""

import re
import sys
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from batch.dataset import Selection, open_dataset, scan
from batch.index import scan_journal
from batch.store import RunDirectory
from batch.summary import SummaryOptions, finalize


class Step(Struct, frozen=True):
    """What one step took: wall and CPU seconds, and the most memory of the process until its end."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


class Probe(Struct, frozen=True):
    """The steps, and the rows in the merged file."""

    dataset: Step
    scan: Step
    merge: Step
    rows: int


class Clock:
    """Tells what each step took since the last one."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def step(self) -> Step:
        """The step that ends now."""
        wall, cpu = time.perf_counter(), time.process_time()
        step = Step(wall - self._wall, cpu - self._cpu, _peak())
        self._wall, self._cpu = wall, cpu
        return step


def _peak() -> int:
    """Bytes, resident."""
    (found,) = re.findall(r"(?m)^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(encoding="utf-8"))
    return int(found) << 10


def probe(directory: RunDirectory, dataset_file: str) -> Probe:
    """See the module."""
    clock = Clock()
    dataset = open_dataset(dataset_file)
    scan(dataset, lambda names: None)
    order = Selection().order(dataset)
    read = clock.step()
    index = scan_journal(directory, dataset, order)
    scanned = clock.step()
    options = SummaryOptions(run_name="run", distribution="default", model="bench", batch_size=10, duration_seconds=1.0)
    summary = finalize(directory, index, options)
    return Probe(read, scanned, clock.step(), summary.kept)


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(probe(RunDirectory(Path(sys.argv[1])), sys.argv[2])).decode())
