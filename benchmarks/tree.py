"""A command's whole process tree, measured: CPU, wall time, and memory as PSS, sampled, by the part that it plays."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from benchmarks.interrupts import held
from benchmarks.processes import descendants, read

LIMIT = 4 * 3600.0  # seconds for one command
KILL_WITHIN = 10.0  # seconds until a tree is dead
_FORK_SERVER = "multiprocessing.forkserver"


class Cost(Struct, frozen=True, kw_only=True):
    """What a command cost. `seconds` is wall time, `began` monotonic, `user` and `system` CPU seconds of the tree."""

    code: int
    seconds: float
    user: float
    system: float
    began: float
    output: str  # stdout and stderr

    @property
    def cpu(self) -> float:
        """CPU seconds."""
        return self.user + self.system


class Sample(Struct, frozen=True, kw_only=True):
    """Memory at one moment: PSS in bytes. `workers` are those forked from the fork server, one entry each; `sandboxes`
    everything that is no process of the program itself."""

    at: float  # seconds since the start
    parent: int
    fork_server: int
    workers: tuple[int, ...]
    sandboxes: int
    sandbox_processes: int

    @property
    def program(self) -> int:
        """All but the sandboxes."""
        return self.parent + self.fork_server + sum(self.workers)


def measure(command: Sequence[str], folder: Path, environ: Mapping[str, str]) -> Cost:
    """Runs it to its end. RuntimeError after LIMIT."""
    return sampled(command, folder, environ, LIMIT)[0]


def sampled(
    command: Sequence[str], folder: Path, environ: Mapping[str, str], interval: float
) -> tuple[Cost, list[Sample]]:
    """The same, with its memory every `interval` seconds. What is cut off is killed, whole; so it is when this process
    dies."""
    report, output = folder / "cost", folder / "output"
    reaper = [sys.executable, "-m", "benchmarks.reaper", str(report), *command]
    process = None
    try:
        with output.open("wb") as file, held():
            process = subprocess.Popen(  # noqa: S603 - our own words
                reaper,
                cwd=folder,
                env=dict(environ),
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        samples = _watch(process, interval)
    finally:
        if process is not None:
            _end(process)
    code, seconds, user, system, began = report.read_text(encoding="ascii").split()
    cost = Cost(
        code=int(code),
        seconds=float(seconds),
        user=float(user),
        system=float(system),
        began=float(began),
        output=output.read_text(encoding="utf-8", errors="replace"),
    )
    return cost, samples


def _watch(process: "subprocess.Popen[bytes]", interval: float) -> list[Sample]:
    began, samples = time.monotonic(), []
    while time.monotonic() - began < LIMIT:
        try:
            process.wait(interval)
        except subprocess.TimeoutExpired:
            samples.append(_sample(process.pid, time.monotonic() - began))
        else:
            return samples
    raise RuntimeError(f"{process.args!r} took longer than {LIMIT:.0f} s")


class _Process(Struct, frozen=True):
    pid: int
    parent: int
    words: bytes  # of its command line


def _sample(reaper: int, at: float) -> Sample:
    tree = [_Process(pid, parent, read(f"/proc/{pid}/cmdline")) for pid, parent in descendants(reaper)]
    known = {each.pid: each for each in tree}
    parent = next((each.pid for each in tree if each.parent == reaper and not _is_server(each)), 0)
    servers = {each.pid for each in tree if _is_server(each) and not _is_server(known.get(each.parent))}
    workers = {each.pid for each in tree if each.parent in servers and _is_server(each)}
    ours = {parent, *servers, *workers}
    others = [each for each in tree if each.pid not in ours and not _is_python(each)]
    return Sample(
        at=at,
        parent=_pss(parent),
        fork_server=sum(map(_pss, servers)),
        workers=tuple(map(_pss, sorted(workers))),
        sandboxes=sum(_pss(each.pid) for each in others),
        sandbox_processes=len(others),
    )


def _is_server(process: _Process | None) -> bool:
    """The fork server, or what was forked from it: they have one command line."""
    return process is not None and _FORK_SERVER.encode() in process.words


def _is_python(process: _Process) -> bool:
    """Also a child of a worker that has not become another program yet: it would count its parent's memory twice."""
    return os.path.basename(process.words.split(b"\0")[0]).startswith(b"python")  # noqa: PTH119 - bytes


def _pss(pid: int) -> int:
    for line in read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) << 10
    return 0


def _end(reaper: "subprocess.Popen[bytes]") -> None:
    """At the end of its input it kills its tree, to which all orphans belong, and ends when it has waited for all."""
    assert reaper.stdin is not None
    reaper.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        reaper.wait(KILL_WITHIN)
    reaper.kill()
    reaper.wait()
