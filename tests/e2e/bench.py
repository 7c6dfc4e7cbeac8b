"""A run directory, its dataset and the endpoint that answers it: what tests that stop and resume runs need."""

import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.e2e.program import Program, journal, run_program, write_dataset
from tests.endpoint import EndpointProcess, tool_call

VOLATILE = ("completed_at", "duration_seconds", "total_batches", "run_name")
"""What an interruption may change in statistics.json."""
STEP = {"content": "", "reasoning_content": "So.", "tool_calls": [tool_call("terminal", {"command": "echo"})]}
"""A reply that goes on."""


class Bench:
    """`run` starts the program on `rows` of the folder's dataset with the settings of the moment; later flags win."""

    def __init__(self, folder: Path, endpoint: EndpointProcess, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self.folder = folder
        self.endpoint = endpoint
        self.dataset = folder / "prompts.jsonl"
        self.directory = folder / "run"
        self.model = "m"
        self.settings = {"container_backend": "local", "enabled_toolsets": "terminal", "num_workers": "1"}
        self.temp = folder / "temp"
        self.temp.mkdir()
        endpoint.reset()
        endpoint.set_rules([])
        self.write(rows)

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """The dataset, anew."""
        write_dataset(self.dataset, list(rows))

    def flags(self, *more: str) -> list[str]:
        """The command line."""
        settings = {
            "dataset_file": str(self.dataset),
            "output": str(self.directory),
            "model": self.model,
            "base_url": self.endpoint.url,
            **self.settings,
        }
        given = {flag.removeprefix("--").partition("=")[0] for flag in more}
        return [*(f"--{name}={value}" for name, value in settings.items() if name not in given), *more]

    def start(self, *more: str) -> Program:
        """The program, running."""
        return Program(*self.flags(*more), home=self.folder, TMPDIR=str(self.temp))

    def run(self, *more: str, timeout: float = 60) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        return run_program(*self.flags(*more), home=self.folder, timeout=timeout, TMPDIR=str(self.temp))

    def finish(self, *more: str, code: int = 0) -> str:
        """Runs to the end, with that exit code; stderr."""
        found, out, err = self.run(*more)
        assert found == code, f"exit {found}\n{out}\n{err}"
        return err

    def asked(self) -> Counter[str]:
        """Requests by prompt."""
        return Counter(self.endpoint.stats()["prompts"])

    def asked_by(self, *more: str, code: int = 0) -> Counter[str]:
        """Requests by prompt of one invocation."""
        before = self.asked()
        self.finish(*more, code=code)
        return self.asked() - before

    def ended(self) -> list[dict[str, Any]]:
        """The journal's whole lines, as they are while the run goes on."""
        return [json.loads(line) for line in whole_lines(self.directory)]

    def sandboxes(self) -> list[str]:
        """What sandboxes left on this machine."""
        return [str(path.parent) for path in self.temp.glob("*/owner")]

    def journal(self) -> list[dict[str, Any]]:
        """The journal of a run that rests."""
        return journal(self.directory)

    def last_tries(self) -> dict[str, dict[str, Any]]:
        """task_id -> the row of its last try."""
        return {row["task_id"]: row for row in sorted(self.journal(), key=lambda row: int(row["attempt"]))}

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the run directory."""
        found: dict[str, Any] = json.loads((self.directory / name).read_bytes())
        return found

    def outcome(self) -> dict[str, Any]:
        """statistics.json without what an interruption may change."""
        return {name: value for name, value in self.read("statistics.json").items() if name not in VOLATILE}


def whole_lines(directory: Path) -> list[bytes]:
    """Lines with their newline, of every batch file."""
    files = sorted(directory.glob("batch_*.jsonl"))
    return [line for path in files for line in path.read_bytes().split(b"\n")[:-1] if line]


def prompts(count: int, name: str = "row") -> list[dict[str, Any]]:
    """Rows with ids."""
    return [{"id": f"{name}{number}", "prompt": f"{name} {number}"} for number in range(count)]


def pause(random_: random.Random, most: float) -> None:
    """A random moment."""
    time.sleep(random_.uniform(0, most))


def ids(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Their task ids."""
    return [str(row["task_id"]) for row in rows]
