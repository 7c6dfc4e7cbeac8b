"""The soak: hours of bad weather in minutes. See `make soak`.

    python -m tests.soak [--seconds 600] [--prompts 2000] [--report FILE.json]

For each backend that works here (docker from 300 seconds on; it says what it leaves out): the program runs against an
endpoint in bad weather while its workers are killed at random. Some time later all of it is killed at once, and
resumed; when the time is up it is interrupted, and resumed in fair weather until nothing is pending. Then every
row must be there once, nothing else must be left, the parent must not have grown, and requests and tokens must be those
that the endpoint counted: each row's own, and in metrics.json the sum of all tries that have a row. Every kind of bad
weather must have happened to one of the backends. Exits with 1 and says what was wrong otherwise.
"""

import argparse
import asyncio
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec import Struct, field

from tests.e2e.program import Program, journal, merged, wait_until, write_dataset
from tests.endpoint import EndpointProcess
from tests.soak.account import Account, account, unexplained
from tests.soak.endpoint import IMPATIENT, WEATHER, Logged
from tools.environments.cgroup import usable_bases
from tools.environments.table import load_backend

SHARES = {"bubblewrap": 0.7, "local": 0.15, "docker": 0.15}  # of time and prompts
STORM, SECOND_STORM = 0.55, 0.15  # of a backend's time; the rest is for finishing
START_WITHIN = 30.0  # seconds
DOCKER_FROM = 300.0  # seconds in all: its share of less is over before it has begun
LOOK = 0.5  # seconds between looks at the processes
KILL_EVERY = (1.0, 5.0)  # seconds
PROMPTS_A_SECOND = 10  # what the machine may be able to do, at the most
MAX_GROWTH = 10 << 20  # bytes of the parent
MAX_MORE_FILES = 8  # descriptors of the parent
FINISHES = 4
END_WITHIN = 90.0  # seconds that an interrupted run may take: 30 of grace, 12 to cut, 15 to exit, and a merge
KNOWN_FILES = ("batch_", "trajectories.jsonl", "statistics.json", "metrics.json", "failures.jsonl", "checkpoint.json")
KEPT = ("completed", "max_turns", "timeout", "partial")
MEMORY = Path("/dev/shm")
FAIR = {
    "message": {"content": "done", "reasoning_content": "So."},
    "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
}


class Sample(Struct, frozen=True):
    """The parent at one moment."""

    bytes: int
    files: int


class Report(Struct, kw_only=True):
    """What one backend's soak came to; `faults` are why it failed."""

    backend: str
    prompts: int = 0
    seconds: float = 0.0
    invocations: list[int] = field(default_factory=list)  # their exit codes
    kills: list[float] = field(default_factory=list)
    by_status: Counter[str] = field(default_factory=Counter)
    tries: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    odd: Counter[str] = field(default_factory=Counter)  # replies
    requests: int = 0
    said: tuple[int, int, int] = (0, 0, 0)  # metrics.json: requests, input and output tokens
    counted: tuple[int, int, int] = (0, 0, 0)  # the endpoint, of the same tries
    cut_requests: int = 0
    cut: dict[str, int] = field(default_factory=dict)
    parent_mb: list[float] = field(default_factory=list)  # after the first quarter, at the end, the most
    worker_mb: float = 0.0
    faults: list[str] = field(default_factory=list)


class BadWeather(EndpointProcess):
    """`tests.soak.endpoint` as a process."""

    module = "tests.soak.endpoint"

    def __init__(self, log: Path) -> None:
        super().__init__()
        self._arguments = ["--log", str(log)]


class Soak:
    """One backend's."""

    def __init__(self, backend: str, folder: Path, prompts: int, seconds: float) -> None:
        self.report = Report(backend=backend, prompts=prompts)
        self._seconds = seconds
        self._folder = folder
        self._run = folder / f"soak-{os.getpid()}"
        self._temp = folder / "temp"
        self._log = folder / "requests.jsonl"
        self._dice = random.Random(backend)
        self._samples: list[Sample] = []
        self._temp.mkdir(parents=True)
        self._prompts = _prompts(prompts)
        rows = [
            {"id": name, "prompt": text, **({"timeout_seconds": 2} if text.startswith(IMPATIENT) else {})}
            for name, text in self._prompts.items()
        ]
        write_dataset(folder / "prompts.jsonl", rows)

    def run(self) -> Report:
        began = time.monotonic()
        self._log.touch()
        with BadWeather(self._log) as endpoint:
            self._storm(endpoint, STORM * self._seconds, self._kill_all)
            self._storm(endpoint, SECOND_STORM * self._seconds, self._interrupt)
            endpoint.set_rules([FAIR])
            if finished := self._finish(endpoint):
                self._asks_nothing_more(endpoint)
        if finished:
            self._check()
        self.report.seconds = round(time.monotonic() - began, 1)
        return self.report

    # --- the run

    def _flags(self, endpoint: EndpointProcess) -> list[str]:
        return [
            *("--resume", "--quiet", "--model=m", f"--base_url={endpoint.url}"),
            *(f"--container_backend={self.report.backend}", "--enabled_toolsets=terminal"),
            *(f"--dataset_file={self._folder / 'prompts.jsonl'}", f"--output={self._run}"),
            *("--num_workers=2", "--concurrency=16", "--batch_size=5", "--max_attempts=100"),
            *("--request_timeout=3", "--timeout=120", "--retry=all", "--memory_mb=512"),
        ]

    @contextmanager
    def _program(self, endpoint: EndpointProcess) -> Iterator[Program]:
        with Program(*self._flags(endpoint), home=self._folder, TMPDIR=str(self._temp)) as program:
            yield program

    def _storm(self, endpoint: EndpointProcess, seconds: float, end: Callable[[Program], None]) -> None:
        """Until all rows have an end or the time, which begins with the first request, is up."""
        size = self._log.stat().st_size
        with self._program(endpoint) as program:
            wait_until(lambda: self._log.stat().st_size > size or program.process.poll() is not None, START_WITHIN)
            until, kill_at = time.monotonic() + seconds, self._next_kill()
            while program.process.poll() is None and time.monotonic() < until:
                time.sleep(LOOK)
                self._look_at(program)
                if time.monotonic() >= kill_at:
                    self._kill_a_worker(program)
                    kill_at = self._next_kill()
            if program.process.poll() is None:
                end(program)
            else:
                self._ended(program, 0, 1)

    def _next_kill(self) -> float:
        return time.monotonic() + self._dice.uniform(*KILL_EVERY)

    def _kill_all(self, program: Program) -> None:
        program.kill_all()
        self.report.kills.append(time.time())
        program.end(END_WITHIN)
        self.report.invocations.append(program.process.returncode)

    def _interrupt(self, program: Program) -> None:
        program.interrupt(signal.SIGTERM)
        self._ended(program, 143)

    def _finish(self, endpoint: EndpointProcess) -> bool:
        for _ in range(FINISHES):
            with self._program(endpoint) as program:
                while program.process.poll() is None:
                    time.sleep(LOOK)
                    self._bury()
                if self._ended(program, 0, 1) == 0:
                    return True
        self.report.faults.append(f"rows are still pending or failed after {FINISHES} invocations in fair weather")
        return False

    def _asks_nothing_more(self, endpoint: EndpointProcess) -> None:
        before, file = endpoint.stats()["requests"], (self._run / "trajectories.jsonl").read_bytes()
        with self._program(endpoint) as program:
            self._ended(program, 0)
        if endpoint.stats()["requests"] != before:
            self.report.faults.append("a resume of the finished run asked the model")
        if (self._run / "trajectories.jsonl").read_bytes() != file:
            self.report.faults.append("a resume of the finished run changed trajectories.jsonl")

    def _ended(self, program: Program, *expected: int) -> int:
        try:
            code, out, err = program.end(END_WITHIN)
        except subprocess.TimeoutExpired:
            self.report.faults.append(f"the program did not end within {END_WITHIN:g} s")
            return -1
        self.report.invocations.append(code)
        finished = code not in (0, 1) or (self._run / "trajectories.jsonl").exists()
        if code not in expected or "Traceback" in err or not finished:
            self.report.faults.append(f"exit {code}, expected {expected}: {out[-2000:]}{err[-4000:]}")
            return -1
        self._leaves_nothing()
        return code

    # --- processes

    def _look_at(self, program: Program) -> None:
        self._bury()
        with suppress(psutil.Error, FileNotFoundError):
            parent = psutil.Process(program.process.pid)
            if not self.report.invocations:
                self._samples.append(Sample(parent.memory_info().rss, _open_files(parent.pid)))
            sizes = [worker.memory_full_info().pss for worker in program.workers()]
            self.report.worker_mb = max([self.report.worker_mb, *(round(size / 2**20, 1) for size in sizes)])

    def _kill_a_worker(self, program: Program) -> None:
        workers = program.workers()
        if workers:
            with suppress(psutil.NoSuchProcess):
                self._dice.choice(workers).kill()
                self.report.kills.append(time.time())

    def _bury(self) -> list[psutil.Process]:
        """Everybody's orphans are ours: takes the exit codes of the dead, gives the living."""
        living = []
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error, ChildProcessError):
                if child.status() != psutil.STATUS_ZOMBIE:
                    living.append(child)
                elif child.ppid() == os.getpid() and "multiprocessing" not in child.name():
                    os.waitpid(child.pid, os.WNOHANG)
        return living

    def _leaves_nothing(self) -> None:
        until = time.monotonic() + 2
        while (left := self._left()) and time.monotonic() < until:
            time.sleep(0.1)
        number = len(self.report.invocations)
        self.report.faults += [f"left by invocation {number}: {each}" for each in left]

    def _left(self) -> list[str]:
        processes = [_command(each) for each in self._bury()]
        found = [each for each in processes if each and BadWeather.module not in each]
        found += [str(each) for each in self._temp.iterdir()]
        found += [str(owner.parent) for owner in MEMORY.glob("batch-sandbox-*/owner") if self._is_ours(owner)]
        groups = sorted({logged.sandbox for logged in self._requests() if logged.sandbox})
        found += [f"cgroup {name}" for name in groups if any((base / name).exists() for base in _cgroup_bases())]
        found += [f"container {each}" for each in self._containers()]
        allowed = (*KNOWN_FILES, "run.json", "run.log", "run.lock")
        return found + [str(each) for each in self._run.iterdir() if not each.name.startswith(allowed)]

    def _is_ours(self, owner: Path) -> bool:
        with suppress(OSError):  # another run's, removed just now
            return str(self._temp) in owner.read_text()
        return False

    def _containers(self) -> list[str]:
        if self.report.backend != "docker":
            return []
        listed = subprocess.run(
            ["docker", "ps", "-aq", "--filter", f"label=batch-runner.run={self._run.name}"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return listed.stdout.split()

    def _requests(self) -> list[Logged]:
        lines = self._log.read_bytes().splitlines()
        return [msgspec.json.decode(line, type=Logged) for line in lines]

    # --- the files

    def _check(self) -> None:
        rows = journal(self._run)
        self.report.tries = len(rows)
        self._check_rows(rows)
        self._check_merged({row["task_id"] for row in rows if row["status"] in KEPT})
        self._check_counts(account(rows, self._requests(), self._prompts))
        self._check_parent()
        if len(self.report.kills) < 2:  # one is the last one's
            self.report.faults.append("no worker was killed while rows ran")

    def _check_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        faults = self.report.faults
        ended = [row for row in rows if row["status"] != "stopped"]
        last = {row["task_id"]: row for row in sorted(ended, key=lambda row: int(row["attempt"]))}
        self.report.by_status.update(row["status"] for row in last.values())
        if missing := self._prompts.keys() - last.keys():
            faults.append(f"{len(missing)} rows have no end: {sorted(missing)[:5]}")
        doubled = Counter((row["task_id"], row["attempt"]) for row in ended)
        faults += [f"attempt {attempt} of {name} ended twice" for (name, attempt), n in doubled.items() if n > 1]
        completed = Counter(row["task_id"] for row in ended if row["status"] in ("completed", "discarded"))
        faults += [f"{name} was completed {n} times" for name, n in completed.items() if n > 1]
        point = json.loads((self._run / "checkpoint.json").read_bytes())
        if point["pending_tasks"] or point["completed_tasks"] != len(self._prompts):
            faults.append(f"checkpoint.json: {point['pending_tasks']} pending, {point['completed_tasks']} completed")

    def _check_merged(self, kept: set[str]) -> None:
        names = [row["task_id"] for row in merged(self._run)]
        if names != [name for name in self._prompts if name in kept]:
            self.report.faults.append(f"trajectories.jsonl holds {len(names)} rows, not the {len(kept)} kept in order")

    def _check_counts(self, found: Account) -> None:
        report, log = self.report, self._requests()
        report.answers.update(logged.kind for logged in log)
        report.odd.update(odd for logged in log for odd in logged.odd)
        report.requests = len(log)
        report.cut_requests = sum(each.sum.requests for each in found.cut)
        for each in found.cut:
            report.cut[each.prompt] = report.cut.get(each.prompt, 0) + each.sum.requests
        report.faults += found.wrong[:20]
        report.faults += [f"no kill explains the lack of {each}" for each in unexplained(found.cut, report.kills)]
        metrics = json.loads((self._run / "metrics.json").read_bytes())
        usage = metrics["usage"]
        report.said = (metrics["requests"], usage["input_tokens"], usage["output_tokens"])
        report.counted = (found.tries.requests, found.tries.input_tokens, found.tries.output_tokens)
        if report.said != report.counted:
            report.faults.append("metrics.json does not say what the endpoint counted")

    def _check_parent(self) -> None:
        samples = self._samples[len(self._samples) // 4 :]
        if not samples:
            self.report.faults.append("the run was over before anything could be measured")
            return
        first, last, most = samples[0], samples[-1], max(sample.bytes for sample in samples)
        self.report.parent_mb = [round(size / 2**20, 1) for size in (first.bytes, last.bytes, most)]
        if most - first.bytes > MAX_GROWTH:
            self.report.faults.append(f"the parent grew: {self.report.parent_mb} MB")
        if last.files - first.files > MAX_MORE_FILES:
            self.report.faults.append(f"the parent's open files grew from {first.files} to {last.files}")


def _prompts(count: int) -> dict[str, str]:
    """task_id -> prompt."""
    return {f"r{number}": f"{IMPATIENT if number % 50 == 7 else 'row'} {number}" for number in range(count)}


def _command(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"process {process.pid}: {' '.join(process.cmdline())[:300]}"
    return ""


def _open_files(pid: int) -> int:
    """Descriptors, but for the batch files: a bounded number of these is kept open to be read."""
    found = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            found += not link.readlink().name.startswith("batch_")
    return found


def _cgroup_bases() -> Sequence[Path]:
    bases = usable_bases()
    return bases.folders if bases else ()


def _why_not(backend: str, seconds: float) -> str:
    """Why a backend is left out, or ""."""
    if backend == "local":
        return ""
    if backend == "docker" and seconds < DOCKER_FROM:
        return f"it takes --seconds {DOCKER_FROM:g} or more"
    if backend == "bubblewrap":
        command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
    else:
        command = ["docker", "image", "inspect", "python:3.11-slim"]
    works = bool(shutil.which(command[0])) and not subprocess.run(command, check=False, capture_output=True).returncode
    return "" if works else f"`{' '.join(command)}` does not work here"


@contextmanager
def _cut_off_cleanly(backends: Sequence[str]) -> Iterator[None]:
    """Who cuts the soak off finds no sandbox of the program that was killed with it."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        for backend in backends:
            asyncio.run(load_backend(backend).reap())
        raise


def _adopt_orphans() -> None:
    """Whatever our descendants leave running becomes our child, whoever started it."""
    set_child_subreaper = 36
    if ctypes.CDLL(None, use_errno=True).prctl(set_child_subreaper, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--backends", default=",".join(SHARES))
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs is ended, what was written is removed
    _adopt_orphans()
    left_out = {each: _why_not(each, options.seconds) for each in options.backends.split(",")}
    for backend, why in left_out.items():
        if why:
            print(f"{backend} is left out: {why}", flush=True)
    backends = [each for each, why in left_out.items() if not why]
    whole = sum(SHARES[each] for each in backends)
    prompts = min(options.prompts, int(options.seconds * PROMPTS_A_SECOND))
    reports = []
    with tempfile.TemporaryDirectory() as folder, _cut_off_cleanly(backends):
        for backend in backends:
            share = SHARES[backend] / whole
            soak = Soak(backend, Path(folder, backend), int(prompts * share), options.seconds * share)
            reports.append(soak.run())
            print(_text(reports[-1]), flush=True)
    if options.report:
        options.report.write_bytes(msgspec.json.format(msgspec.json.encode(reports)))
    calm = _calm(reports)
    if calm:
        print(f"FAULT the storm did not happen: no {', '.join(calm)}")
    return int(bool(calm) or any(report.faults for report in reports))


def _calm(reports: Sequence[Report]) -> list[str]:
    """The kinds of weather that nobody saw."""
    return [kind for kind in WEATHER if not any(report.answers[kind] + report.odd[kind] for report in reports)]


def _text(report: Report) -> str:
    first, last, most = report.parent_mb or (0, 0, 0)
    cut = " ".join(f"{prompt}:{requests}" for prompt, requests in report.cut.items())
    return "\n".join([
        f"{report.backend}: {report.prompts} prompts in {report.seconds:.0f} s, {report.tries} tries,"
        f" {len(report.kills)} workers killed, invocations ended with {report.invocations}",
        f"  rows: {dict(report.by_status)}",
        f"  requests: {report.requests} {dict(report.answers)}; replies with strange calls: {dict(report.odd)}",
        f"  requests, input and output tokens of tries with a row: metrics.json says {report.said}, the endpoint"
        f" counted {report.counted}",
        f"  of these {report.cut_requests} of tries that a SIGKILL cut short: {cut}",
        f"  parent {first} MB, {last} MB at the end, {most} MB at most; a worker {report.worker_mb} MB at most",
        *(f"  FAULT {each}" for each in report.faults),
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
