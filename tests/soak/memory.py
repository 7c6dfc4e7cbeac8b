"""Whether processes grow: what each of them holds for itself, looked at again and again."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Literal

import psutil
from msgspec import Struct

WARM = 3.0  # seconds of a process's life in which it grows by what it imports
FEWEST = 8  # looks at a process from which something follows
MAX_GROWTH = 10 << 20  # bytes
MAX_MORE_FILES = {"parent": 8, "worker": 40}  # descriptors; a worker has a handful for each sandbox that is open

Role = Literal["parent", "worker"]


class Sample(Struct, frozen=True):
    """A process at one moment."""

    bytes: int
    files: int


class Growth(Struct, frozen=True, kw_only=True):
    """Of one process, from the first third of its time to the last one: medians, so that neither a large reply nor a
    moment of many connections counts as growth."""

    role: Role
    storm: int
    first: Sample
    last: Sample

    @property
    def megabytes(self) -> float:
        """May be less than nothing."""
        return round((self.last.bytes - self.first.bytes) / 2**20, 1)

    def fault(self) -> str:
        """Why that is too much, or ""."""
        who = f"a {self.role} in storm {self.storm}"
        if self.last.bytes - self.first.bytes > MAX_GROWTH:
            return f"{who} grew by {self.megabytes} MB to {self.last.bytes / 2**20:.1f}"
        if self.last.files - self.first.files > MAX_MORE_FILES[self.role]:
            return f"{who} had {self.first.files} files open, then {self.last.files}"
        return ""


class Watch:
    """The processes of one storm."""

    def __init__(self, storm: int) -> None:
        self._storm = storm
        self._samples: dict[tuple[Role, int], list[Sample]] = defaultdict(list)
        self.most = 0  # bytes of any worker

    def look_at(self, role: Role, process: psutil.Process, age: float) -> None:
        """Takes a sample, if it is old enough."""
        size = process.memory_full_info().uss
        if role == "worker":
            self.most = max(self.most, size)
        if age >= WARM:
            self._samples[role, process.pid].append(Sample(size, _open_files(process.pid)))

    def growths(self) -> list[Growth]:
        """Of all that were looked at often enough."""
        return [
            Growth(
                role=role,
                storm=self._storm,
                first=_middle(samples[: len(samples) // 3]),
                last=_middle(samples[-(len(samples) // 3) :]),
            )
            for (role, _), samples in self._samples.items()
            if len(samples) >= FEWEST
        ]


def _middle(samples: Sequence[Sample]) -> Sample:
    return Sample(int(median(each.bytes for each in samples)), int(median(each.files for each in samples)))


def _open_files(pid: int) -> int:
    """Descriptors, but for the batch files: a bounded number of these is kept open to be read and written."""
    found = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found += not link.readlink().name.startswith("batch_")
        except OSError:  # closed just now
            continue
    return found
