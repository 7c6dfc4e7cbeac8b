"""The measured program: its dataset, its flags, and whether it did all its work."""

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec import Struct

from benchmarks.endpoint import CALLS, EndpointProcess, Seen
from benchmarks.place import ROOT, surroundings
from benchmarks.sizes import Load
from benchmarks.tree import LIMIT, Cost, Sample, sampled
from tools.environments.owner import current_owner, encode, folders_of_the_dead
from tools.environments.table import load_backend

WORKERS = 2
_PREFIX = "batch-bench-"
_RECORD = "owner"


class Done(Struct, frozen=True):
    """A run that came to its end, and what the endpoint saw of it."""

    cost: Cost
    seen: Seen
    samples: list[Sample]


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for one run. Nothing outside of it is left by one that is cut off."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        (folder / _RECORD).write_text(encode(current_owner("bench")), encoding="utf-8")
        yield folder
    except BaseException:
        asyncio.run(load_backend("local").reap())
        raise
    finally:
        _remove(folder)


def remove_dead() -> None:
    """Removes the folders of passes that were killed. One that cannot be told to be dead stays, and what cannot be
    removed."""
    for folder in folders_of_the_dead(Path(tempfile.gettempdir()), f"{_PREFIX}*/{_RECORD}"):
        with suppress(FileNotFoundError):  # another pass is at it too
            if folder.lstat().st_uid == os.getuid():
                _remove(folder, ignore_errors=True)


def _remove(folder: Path, *, ignore_errors: bool = False) -> None:
    try:
        shutil.rmtree(folder, ignore_errors)
    except SystemExit:  # an interrupt, in the middle
        shutil.rmtree(folder, ignore_errors)
        raise


def write_prompts(path: Path, count: int) -> Path:
    """A dataset of different prompts."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            prompt = f"Task {number}: run the command a few times, look at what it prints, then say what you saw."
            file.write(json.dumps({"prompt": prompt}) + "\n")
    return path


def command(dataset: Path, *flags: str, concurrency: int = 16, backend: str = "local") -> list[str]:
    """The program on a dataset; its run directory is `run` beside the dataset."""
    return [
        sys.executable,
        str(ROOT / "batch_runner.py"),
        f"--dataset_file={dataset}",
        f"--output={dataset.parent / 'run'}",
        f"--container_backend={backend}",
        f"--num_workers={WORKERS}",
        f"--concurrency={concurrency}",
        "--enabled_toolsets=terminal",
        *flags,
    ]


def run(load: Load, *flags: str, interval: float = LIMIT, per_second: int = 0, tells: bool = False) -> Done:
    """The program, start to end, against an endpoint of its own. RuntimeError if it did not do all that it should."""
    with scratch() as folder:
        dataset = write_prompts(folder / "prompts.jsonl", load.prompts)
        with EndpointProcess(load.latency, per_second, tells=tells) as endpoint:
            flags = ("--model=bench", f"--base_url={endpoint.url}", *flags)
            words = command(dataset, *flags, concurrency=load.concurrency)
            cost, samples = sampled(words, folder, surroundings(folder), interval)
        check(cost, folder / "run", load.prompts)
        if endpoint.seen.requests != CALLS * load.prompts:
            raise RuntimeError(f"{endpoint.seen.requests} requests for {load.prompts} prompts of {CALLS} calls each")
    return Done(cost, endpoint.seen, samples)


def check(cost: Cost, directory: Path, rows: int) -> None:
    """A figure of a run that did not do its work would be none."""
    if cost.code:
        raise RuntimeError(f"the program ended with {cost.code}:\n{cost.output[-4000:]}")
    with (directory / "trajectories.jsonl").open("rb") as lines:
        kept = sum(1 for _ in lines)
    if kept != rows:
        raise RuntimeError(f"{kept} trajectories of {rows} rows:\n{cost.output[-4000:]}")


def peak(sizes: Sequence[int]) -> int:
    """The largest, 0 of none."""
    return max(sizes, default=0)
