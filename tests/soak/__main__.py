"""The soak: hours of bad weather in minutes. See `make soak`.

    python -m tests.soak [--seconds 600] [--prompts 2000] [--report FILE.json]

For each backend that works here (docker from 300 seconds on; it says what it leaves out): the program runs against an
endpoint in bad weather, storm after storm. In all but the last its workers are killed at random, and it is itself ended
while rows run, by a kill of everything and by SIGTERM in turn; then it is resumed, with more prompts. How many follows
from what the machine has done so far, so that there are fewer on a slow one rather than fair weather: this comes when
few rows of the last storm have no end, and after it the program is resumed until nothing is pending.

Then every row must be there once, and whatever run.log told of rows while they ran must be in the journal. Nothing else
must be left, neither parent nor workers have grown. Requests, tokens and tool calls must be those that the endpoint
counted: each row's own, and in metrics.json and statistics.json the sums. A try without a row must have been held by a
worker that was killed. Each kind of bad weather must have been as frequent as meant. Exits with 1 and says what was
wrong otherwise.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.interrupts import heed
from tests.e2e.program import Program, journal, merged, statistics, wait_until, write_dataset
from tests.endpoint import EndpointProcess
from tests.soak.account import Account, Kill, account, unexplained
from tests.soak.endpoint import IMPATIENT, Logged
from tests.soak.memory import Role, Watch
from tests.soak.report import Report, print_weather, text
from tests.soak.told import FOR_GOOD, broken, own_kills, read_told
from tools.environments.cgroup import usable_bases
from tools.environments.table import load_backend

SHARES = {"bubblewrap": 0.7, "local": 0.15, "docker": 0.15}  # of time and prompts
STORMS = 0.85  # of a backend's time; the rest is for finishing
STORM_SECONDS = 60.0  # of one, at the most; there are three at least
START_WITHIN = 30.0  # seconds
DOCKER_FROM = 300.0  # seconds in all: its share of less is over before it has begun
LOOK = 0.5  # seconds between looks at the processes
KILL_FIRST, KILL_EVERY = (0.5, 1.5), (1.0, 6.0)  # seconds
SLOTS = 16  # rows at once
KEYS = ",".join(
    f"key{number}" for number in range(8)
)  # a 429 slows all requests of its key: one alone would do nothing
FEW = SLOTS // 2  # rows without an end at which a storm is over: they still run
CALM_AT = 0.95  # share of rows with an end at which fair weather comes
PATIENCE = 60.0  # seconds of the last storm beyond its time, after which it comes anyway
MET = 0.9  # share of prompts that have to meet the weather with tools
FIRST_PACE = 4.0  # rows a second that are expected before any were seen
MORE, LESS = 1.5, 0.7  # times the rows that are expected: what a storm leaves is for the next, but for the last one's
MEASURED_FROM = 120.0  # seconds of a backend's from which some processes live long enough to be looked at
FINISHES = 4
END_WITHIN = 90.0  # seconds that an interrupted run may take: 30 of grace, 12 to cut, 15 to exit, and a merge
KNOWN_FILES = ("batch_", "trajectories.jsonl", "statistics.json", "metrics.json", "failures.jsonl", "checkpoint.json")
KEPT = ("completed", "max_turns", "timeout", "partial")
MEMORY = Path("/dev/shm")
FAIR_REPLY: dict[str, Any] = {
    "message": {"content": "done", "reasoning_content": "So."},
    "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
}


class BadWeather(EndpointProcess):
    """`tests.soak.endpoint` as a process."""

    module = "tests.soak.endpoint"

    def __init__(self, log: Path) -> None:
        super().__init__()
        self._arguments = ["--log", str(log)]


class Soak:
    """One backend's. Of `prompts` only as many are run as there is time for."""

    def __init__(self, backend: str, folder: Path, prompts: int, seconds: float) -> None:
        self.report = Report(backend=backend)
        self._seconds = seconds
        self._folder = folder
        self._run = folder / f"soak-{os.getpid()}"
        self._temp = folder / "temp"
        self._log = folder / "requests.jsonl"
        self._dice = random.Random(backend)
        self._stormed = 0.0  # seconds
        self._temp.mkdir(parents=True)
        self._every = _prompts(prompts)
        self._size = 0  # prompts that have been given to the program
        rows = [
            {"id": name, "prompt": text, **({"timeout_seconds": 2} if text.startswith(IMPATIENT) else {})}
            for name, text in self._every.items()
        ]
        write_dataset(folder / "prompts.jsonl", rows)

    def run(self) -> Report:
        began = time.monotonic()
        self._log.touch()
        with BadWeather(self._log) as endpoint:
            self._storms(endpoint)
            if finished := self._finish(endpoint):
                self._asks_nothing_more(endpoint)
        if finished:
            self._check()
        self.report.prompts = self._size
        self.report.seconds = round(time.monotonic() - began, 1)
        return self.report

    @property
    def _prompts(self) -> dict[str, str]:
        """task_id -> prompt, of those that were given to the program."""
        return dict(islice(self._every.items(), self._size))

    # --- the storms

    def _storms(self, endpoint: EndpointProcess) -> None:
        whole = STORMS * self._seconds
        each, until = whole / max(3, round(whole / STORM_SECONDS)), time.monotonic() + whole
        for end in cycle((self._kill_all, self._interrupt)):
            if until - time.monotonic() < 1.5 * each:
                break
            self._grow(MORE * each, 2 * SLOTS)
            self._storm(endpoint, each, end)
            if self._size == len(self._every) and self._pending() <= FEW:
                break
        self._grow(LESS * max(until - time.monotonic(), 0.0), SLOTS)
        self._last_storm(endpoint, until)

    def _grow(self, seconds: float, fewest: int) -> None:
        """As many more prompts as so much time is enough for, or a few."""
        ended = len(self._ended_rows())
        pace = ended / self._stormed if self._stormed else FIRST_PACE
        self._size = min(len(self._every), max(self._size, ended + max(fewest, int(pace * seconds))))

    def _storm(self, endpoint: EndpointProcess, seconds: float, end: Callable[[Program], None]) -> None:
        """Until the time, which begins with the first request, is up, or few rows have no end: while some run. At
        least one worker is killed."""
        with self._begun(endpoint) as (program, watch):
            until, kills = time.monotonic() + seconds, len(self.report.kills)
            kill_at = self._next_kill(KILL_FIRST)
            while program.process.poll() is None and (
                len(self.report.kills) == kills or (time.monotonic() < until and self._pending() > FEW)
            ):
                time.sleep(LOOK)
                self._look_at(program, watch)
                if time.monotonic() >= kill_at:
                    self._kill_a_worker(program)
                    kill_at = self._next_kill(KILL_EVERY)
            if program.process.poll() is None:
                end(program)
            else:
                self._ended(program, 0, 1)

    def _last_storm(self, endpoint: EndpointProcess, until: float) -> None:
        """Its workers grow old."""
        with self._begun(endpoint) as (program, watch):
            while program.process.poll() is None and not self._may_be_calm(until):
                time.sleep(LOOK)
                self._look_at(program, watch)
            endpoint.set_rules([FAIR_REPLY])
            self._until_over(program)
            self._ended(program, 0, 1)

    def _may_be_calm(self, until: float) -> bool:
        """Once hardly a row is left for fair weather; if time is up, once few are."""
        now, ended = time.monotonic(), (self._size - self._pending()) / self._size
        return ended >= CALM_AT or (ended >= MET and now >= until) or now >= until + PATIENCE

    @contextmanager
    def _begun(self, endpoint: EndpointProcess) -> Iterator[tuple[Program, Watch]]:
        """The program, from its first request on, and who looks at its memory."""
        self.report.storms += 1
        size, watch = self._log.stat().st_size, Watch(self.report.storms)
        with self._program(endpoint) as program:
            wait_until(lambda: self._log.stat().st_size > size or program.process.poll() is not None, START_WITHIN)
            began = time.monotonic()
            yield program, watch
            self._stormed += time.monotonic() - began
        self.report.growths += watch.growths()
        self.report.worker_mb = max(self.report.worker_mb, round(watch.most / 2**20, 1))

    def _ended_rows(self) -> set[str]:
        return {each.task_id for each in read_told(self._run_log()) if each.status != "stopped"}

    def _pending(self) -> int:
        return self._size - len(self._ended_rows())

    def _run_log(self) -> str:
        try:
            return (self._run / "run.log").read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    # --- the run

    def _flags(self, endpoint: EndpointProcess) -> list[str]:
        return [
            *("--resume", "--quiet", "--model=m", f"--base_url={endpoint.url}", f"--api_key={KEYS}"),
            *(f"--container_backend={self.report.backend}", "--enabled_toolsets=terminal"),
            *(f"--dataset_file={self._folder / 'prompts.jsonl'}", f"--output={self._run}"),
            *("--num_workers=2", f"--concurrency={SLOTS}", "--batch_size=5", "--max_attempts=100"),
            *("--request_timeout=3", "--timeout=120", "--retry=all", "--memory_mb=512"),
            f"--max_samples={self._size}",
        ]

    @contextmanager
    def _program(self, endpoint: EndpointProcess) -> Iterator[Program]:
        with Program(*self._flags(endpoint), home=self._folder, TMPDIR=str(self._temp)) as program:
            yield program

    def _next_kill(self, within: tuple[float, float]) -> float:
        return time.monotonic() + self._dice.uniform(*within)

    def _kill_all(self, program: Program) -> None:
        self.report.kills.append(Kill(time.time(), 0))
        program.kill_all()
        program.end(END_WITHIN)
        self.report.invocations.append(program.process.returncode)

    def _interrupt(self, program: Program) -> None:
        program.interrupt(signal.SIGTERM)
        self._ended(program, 143)

    def _finish(self, endpoint: EndpointProcess) -> bool:
        for _ in range(FINISHES):
            with self._program(endpoint) as program:
                self._until_over(program)
                if self._ended(program, 0, 1) == 0:
                    return True
        self.report.faults.append(f"rows are still pending or failed after {FINISHES} invocations in fair weather")
        return False

    def _until_over(self, program: Program) -> None:
        while program.process.poll() is None:
            time.sleep(LOOK)
            self._bury()

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

    def _look_at(self, program: Program, watch: Watch) -> None:
        self._bury()
        now = time.time()
        roles: list[tuple[Role, psutil.Process]] = [("worker", each) for each in program.workers()]
        with suppress(psutil.NoSuchProcess):
            roles.append(("parent", psutil.Process(program.process.pid)))
        for role, process in roles:
            with suppress(psutil.Error, FileNotFoundError, ProcessLookupError):
                watch.look_at(role, process, now - process.create_time())

    def _kill_a_worker(self, program: Program) -> None:
        workers = program.workers()
        if workers:
            with suppress(psutil.NoSuchProcess):
                kill = Kill(time.time(), (worker := self._dice.choice(workers)).pid)
                worker.kill()
                self.report.kills.append(kill)

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
        found += [str(each) for each in self._temp.iterdir() if not self._is_nobodys(each)]
        found += [str(owner.parent) for owner in MEMORY.glob("batch-sandbox-*/owner") if self._is_ours(owner)]
        groups = sorted({logged.sandbox for logged in self._requests() if logged.sandbox})
        found += [f"cgroup {name}" for name in groups if any((base / name).exists() for base in _cgroup_bases())]
        found += [f"container {each}" for each in self._containers()]
        allowed = (*KNOWN_FILES, "run.json", "run.log", "run.lock")
        return found + [str(each) for each in self._run.iterdir() if not each.name.startswith(allowed)]

    def _is_nobodys(self, place: Path) -> bool:
        """A sandbox that was only begun when its worker was killed: the program cannot tell it from one that is just
        being made, and removes it once it is old."""
        try:
            within = {each.name: each.stat().st_size for each in place.iterdir()}
        except OSError:
            return not place.exists()  # removed just now
        return place.name.startswith("batch-sandbox-") and within in ({}, {"owner": 0})

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
        rows, log, prompts = journal(self._run), self._requests(), self._prompts
        last = {row["task_id"]: row for row in sorted(rows, key=_place) if row["status"] != "stopped"}
        self.report.tries = len(rows)
        self._check_rows(rows, last)
        self._check_merged({row["task_id"] for row in rows if row["status"] in KEPT})
        self._check_told(rows, log)
        self._check_counts(account(rows, log, prompts))
        self._check_statistics(last)
        self._check_weather(last, log)
        self._check_memory()
        if not self.report.killed()[0]:
            self.report.faults.append("no worker was killed while rows ran")

    def _check_rows(self, rows: Sequence[dict[str, Any]], last: Mapping[str, dict[str, Any]]) -> None:
        faults = self.report.faults
        ended = [row for row in rows if row["status"] != "stopped"]
        self.report.by_status.update(row["status"] for row in last.values())
        if missing := self._prompts.keys() - last.keys():
            faults.append(f"{len(missing)} rows have no end: {sorted(missing)[:5]}")
        doubled = Counter((row["task_id"], row["attempt"]) for row in ended)
        faults += [f"attempt {attempt} of {name} ended twice" for (name, attempt), n in doubled.items() if n > 1]
        completed = Counter(row["task_id"] for row in ended if row["status"] in FOR_GOOD)
        faults += [f"{name} was completed {n} times" for name, n in completed.items() if n > 1]
        point = json.loads((self._run / "checkpoint.json").read_bytes())
        if point["pending_tasks"] or point["completed_tasks"] != len(self._prompts):
            faults.append(f"checkpoint.json: {point['pending_tasks']} pending, {point['completed_tasks']} completed")

    def _check_merged(self, kept: set[str]) -> None:
        names = [row["task_id"] for row in merged(self._run)]
        if names != [name for name in self._prompts if name in kept]:
            self.report.faults.append(f"trajectories.jsonl holds {len(names)} rows, not the {len(kept)} kept in order")

    def _check_told(self, rows: Sequence[dict[str, Any]], log: Sequence[Logged]) -> None:
        told = read_told(self._run_log())
        self.report.told = len(told)
        self.report.faults += broken(told, rows, log, self._prompts)[:20]
        if len(told) < len(rows) / 2:  # only what was written just before a kill of everything may be untold
            self.report.faults.append(f"run.log tells of {len(told)} ends, the journal of {len(rows)}")

    def _check_counts(self, found: Account) -> None:
        report = self.report
        report.cut_requests = sum(each.sum.requests for each in found.cut)
        report.cut_tries, report.held = len(found.cut), sum(bool(each.worker) for each in found.cut)
        report.faults += found.wrong[:20]
        kills = [*report.kills, *own_kills(self._run_log(), report.kills)]
        report.faults += [f"no kill explains the lack of {each}" for each in unexplained(found.cut, kills)]
        metrics = json.loads((self._run / "metrics.json").read_bytes())
        usage = metrics["usage"]
        report.said = (metrics["requests"], usage["input_tokens"], usage["output_tokens"])
        report.counted = (found.tries.requests, found.tries.input_tokens, found.tries.output_tokens)
        if report.said != report.counted:
            report.faults.append("metrics.json does not say what the endpoint counted")

    def _check_statistics(self, last: Mapping[str, dict[str, Any]]) -> None:
        """The sums over rows, each of whose calls `account` has compared with the endpoint's."""
        said, rows = statistics(self._run), last.values()
        parts: dict[str, tuple[object, object]] = {
            "total_prompts": (said["total_prompts"], len(self._prompts)),
            "by_status": (said["by_status"], Counter(row["status"] for row in rows)),
            "unknown_tools": (said["unknown_tools"], _times(json.loads(row["unknown_tools"]) for row in rows)),
            "tool_statistics": (_tallies([said["tool_statistics"]]), _tallies(row["tool_stats"] for row in rows)),
        }
        self.report.faults += [
            f"statistics.json: {name} is {there}, by the rows {here}"
            for name, (there, here) in parts.items()
            if there != here
        ]

    def _check_weather(self, last: Mapping[str, dict[str, Any]], log: Sequence[Logged]) -> None:
        report = self.report
        report.requests = len(log)
        report.answers.update(logged.kind for logged in log)
        report.calls.update(call for logged in log for call in logged.calls)
        report.met = len({logged.prompt for logged in log if logged.calls})
        report.calm = sum(row["final_response"] == FAIR_REPLY["message"]["content"] for row in last.values())
        if report.met < MET * self._size:
            report.faults.append(f"only {report.met} of {self._size} prompts met the weather with tools")

    def _check_memory(self) -> None:
        self.report.faults += [fault for each in self.report.growths if (fault := each.fault())]
        missing = {"parent", "worker"} - {each.role for each in self.report.growths}
        if missing and self._seconds >= MEASURED_FROM:
            self.report.faults.append(f"no {' and no '.join(sorted(missing))} was there long enough to be measured")


def _place(row: Mapping[str, Any]) -> int:
    return int(row["attempt"])


def _tallies(each: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, tuple[int, int, int]]:
    """Sums by tool: calls, successes, failures; of those that were called."""
    sums: dict[str, tuple[int, int, int]] = {}
    for tools in each:
        for name, tally in tools.items():
            calls, good, bad = sums.get(name, (0, 0, 0))
            sums[name] = (calls + tally["count"], good + tally["success"], bad + tally["failure"])
    return {name: tally for name, tally in sums.items() if tally[0]}


def _times(each: Iterable[Sequence[Mapping[str, Any]]]) -> dict[str, int]:
    """Sums by name of {name, count}."""
    sums: Counter[str] = Counter()
    for names in each:
        sums.update({one["name"]: one["count"] for one in names})
    return dict(sums)


def _prompts(count: int) -> dict[str, str]:
    """task_id -> prompt."""
    return {f"r{number}": f"{IMPATIENT if number % 50 == 7 else 'row'} {number}" for number in range(count)}


def _command(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"process {process.pid}: {' '.join(process.cmdline())[:300]}"
    return ""


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
    except SystemExit:
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
    heed()  # what runs is ended then, what was written is removed
    _adopt_orphans()
    left_out = {each: _why_not(each, options.seconds) for each in options.backends.split(",")}
    for backend, why in left_out.items():
        if why:
            print(f"{backend} is left out: {why}", flush=True)
    backends = [each for each, why in left_out.items() if not why]
    whole = sum(SHARES[each] for each in backends)
    reports = []
    with tempfile.TemporaryDirectory() as folder, _cut_off_cleanly(backends):
        for backend in backends:
            share = SHARES[backend] / whole
            soak = Soak(backend, Path(folder, backend), max(1, int(options.prompts * share)), options.seconds * share)
            reports.append(soak.run())
            print(text(reports[-1]), flush=True)
    if options.report:
        options.report.write_bytes(msgspec.json.format(msgspec.json.encode(reports)))
    odd = print_weather(reports)
    return int(odd or any(report.faults for report in reports))


if __name__ == "__main__":
    sys.exit(main())
