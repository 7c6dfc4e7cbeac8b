"""The program as a user runs it: a subprocess with its own environment, files in, files and exit code out."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

ROOT = Path(__file__).parents[2]


def environment(home: Path, **more: str) -> dict[str, str]:
    """Nothing of the developer's: no keys, a home of its own."""
    return {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **more}


def write_dataset(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """A JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A JSONL file's rows, split as the program promises: on newlines alone."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def journal(directory: Path) -> list[dict[str, Any]]:
    """All rows of all batch files."""
    return [row for path in sorted(directory.glob("batch_*[0-9].jsonl")) for row in read_lines(path)]


def merged(directory: Path) -> list[dict[str, Any]]:
    """The merged file."""
    return read_lines(directory / "trajectories.jsonl")


def statistics(directory: Path) -> dict[str, Any]:
    """statistics.json."""
    found: dict[str, Any] = json.loads((directory / "statistics.json").read_bytes())
    return found


class Program:
    """A program of ours, started; `tree` are its processes as they were last seen."""

    def __init__(
        self,
        *flags: str,
        home: Path,
        stdin: bytes | None = None,
        script: str = "batch_runner.py",
        **variables: str,
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / script), *flags],
            cwd=home,
            env=environment(home, **variables),
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._heard = b""
        if stdin is not None and self.process.stdin is not None:
            self.process.stdin.write(stdin)
            self.process.stdin.close()
            self.process.stdin = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()
        self.process.communicate()

    def tree(self) -> list[psutil.Process]:
        """Every process of its session: workers hang off the fork server, which may outlive the parent a moment."""
        mine = self.process.pid
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return found

    def workers(self) -> list[psutil.Process]:
        """Its worker processes."""
        marks = ("forkserver", "resource_tracker", "semaphore_tracker")
        return [each for each in self.tree() if _is_worker(each, self.process.pid, marks)]

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """As Ctrl-C in a terminal does: to every process of the group. The parent has taken it then: a second
        one of the same number would be lost otherwise."""
        os.killpg(self.process.pid, number)
        wait_until(lambda: not _is_pending(self.process.pid, number))

    def hear(self, words: str) -> None:
        """Waits until they stand on stderr."""
        assert self.process.stderr is not None
        while words.encode() not in self._heard:
            more = os.read(self.process.stderr.fileno(), 1 << 16)
            assert more, self._heard.decode()
            self._heard += more

    def kill_all(self) -> None:
        """SIGKILL to everything at once."""
        for process in self.tree():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    def end(self, timeout: float = 60) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out.decode(), (self._heard + err).decode()


def _is_pending(pid: int, number: int) -> bool:
    """Whether a signal waits for the process to take it; what has ended takes none."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    fields = dict(line.split(":", 1) for line in text.splitlines())
    pending = int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)
    return not fields["State"].strip().startswith("Z") and bool(pending >> (number - 1) & 1)


def _is_worker(process: psutil.Process, parent: int, marks: Sequence[str]) -> bool:
    """A child of the fork server. What a worker is just starting looks like a worker, but is a child of one."""
    try:
        server = process.parent()
        above = server and server.parent()
        return (
            process.pid != parent
            and server is not None
            and "forkserver" in " ".join(server.cmdline())
            and (above is None or "forkserver" not in " ".join(above.cmdline()))
            and not any(mark in " ".join(process.cmdline()) for mark in marks[1:])
        )
    except psutil.NoSuchProcess:
        return False


def run_program(
    *flags: str, home: Path, timeout: float = 60, stdin: bytes | None = None, **variables: str
) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of a whole run."""
    with Program(*flags, home=home, stdin=stdin, **variables) as program:
        return program.end(timeout)


def started_with(folder: Path, code: str) -> str:
    """PYTHONPATH of a program that runs this code first."""
    (folder / "first").mkdir()
    (folder / "first" / "sitecustomize.py").write_text(code)
    return f"{folder / 'first'}{os.pathsep}{ROOT}"


def is_gone(pid: int) -> bool:
    """Whether the process has ended."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def wait_until(true: Callable[[], object], seconds: float = 60) -> None:
    """Looks until it is true."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not come true in time"
        time.sleep(0.02)
