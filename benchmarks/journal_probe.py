"""Scans and merges a run, timed: `python -m benchmarks.journal_probe RUN_DIR DATASET` prints a `Probe` as JSON."""

import sys
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from batch.dataset import Selection, open_dataset, scan
from batch.index import scan_journal
from batch.store import RunDirectory
from batch.summary import SummaryOptions, finalize


class Probe(Struct, frozen=True):
    """Seconds of each step, and the rows in the merged file."""

    dataset_seconds: float
    scan_seconds: float
    merge_seconds: float
    rows: int


def probe(directory: RunDirectory, dataset_file: str) -> Probe:
    """See the module."""
    began = time.perf_counter()
    dataset = open_dataset(dataset_file)
    scan(dataset, lambda names: None)
    order = Selection().order(dataset)
    read = time.perf_counter()
    index = scan_journal(directory, dataset, order)
    scanned = time.perf_counter()
    options = SummaryOptions(run_name="run", distribution="default", model="bench", batch_size=10, duration_seconds=1.0)
    summary = finalize(directory, index, options)
    return Probe(read - began, scanned - read, time.perf_counter() - scanned, summary.kept)


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(probe(RunDirectory(Path(sys.argv[1])), sys.argv[2])).decode())
