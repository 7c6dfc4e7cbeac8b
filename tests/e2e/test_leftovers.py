"""Many tasks, SIGKILL for workers and programs in between: once the next run has started, no backend has anything left.

Slow backends get fewer tasks here than was promised; `LEFTOVER_TASKS=200` gives as many to all:

    LEFTOVER_TASKS=200 make test PYTEST_ARGS='tests/e2e/test_leftovers.py -s'
"""

import asyncio
import json
import os
import random
import subprocess
import time
import zlib
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import yaml

from tests.contract.environments import BACKENDS, backend_of
from tests.contract.ssh_server import shared_settings
from tests.e2e.bench import ids, pause, prompts, whole_lines
from tests.e2e.program import Program, journal, wait_until, write_dataset
from tests.e2e.test_sandboxes import IMAGES, processes_with
from tools.environments.base import BackendSettings
from tools.environments.cgroup import usable_bases

TASKS = {"local": 200, "bubblewrap": 200, "ssh": 40, "singularity": 40}
FEW = 24  # where each task takes a container
KILLS = ("worker", "all", "worker", "parent", "worker", "all")
SERVICES = ("MODAL_", "DAYTONA_")  # how variables begin by which programs find a service
SECONDS = 600  # in which rows have to come to an end, and engines to remove what they were told to


class Field:
    """The runs of one test, on one backend, and what they left on it."""

    def __init__(self, backend: str, folder: Path) -> None:
        self.backend = backend
        self.tasks = int(os.environ.get("LEFTOVER_TASKS", TASKS.get(backend, FEW)))
        self.directory = folder / "run"
        self.temp = folder / "temp"
        self.temp.mkdir()
        self.mark = f"900.{os.getpid()}{zlib.crc32(str(folder).encode())}"
        self.tokens: set[str] = set()
        self._folder = folder
        self._settings = shared_settings() if backend == "ssh" else BackendSettings()
        self._access = backend_of(backend)
        self._variables = {name: value for name, value in os.environ.items() if name.startswith(SERVICES)}
        self._before = self._remote()
        script = folder / "script.yaml"
        script.write_text(yaml.safe_dump({"default": {"turns": [*map(self._turn, (0, 0.1)), {"content": "done"}]}}))
        self.model = f"scripted:{script}"

    def _turn(self, delay: float) -> dict[str, object]:
        call = {"name": "terminal", "arguments": {"command": f"setsid sleep {self.mark} & echo begun"}}
        return {"reasoning": "So.", "content": "", "tool_calls": [call], "delay": delay}

    def start(self, directory: Path, tasks: int) -> Program:
        """A run, or its resumption. Its tasks are called by the mark."""
        dataset = write_dataset(self._folder / f"{directory.name}.jsonl", prompts(tasks, self.mark))
        settings = {
            "dataset_file": dataset,
            "output": directory,
            "model": self.model,
            "enabled_toolsets": "terminal",
            "container_backend": self.backend,
            "num_workers": 2,
            "concurrency": 8,
            "batch_size": 4,
            "max_attempts": 50,
            **({"image": IMAGES[self.backend]} if self.backend in IMAGES else {}),
            **_changed(self._settings),
        }
        flags = [f"--{name}={value}" for name, value in settings.items()]
        variables: dict[str, Any] = {**self._variables, "TMPDIR": str(self.temp)}
        return Program(*flags, "--resume", "--quiet", home=self._folder, **variables)

    def finish(self, directory: Path, tasks: int) -> None:
        """To its end."""
        with self.start(directory, tasks) as program:
            code, out, err = program.end(SECONDS)
            assert code == 0, out + err

    def ended(self) -> int:
        """Rows on disk."""
        return len(whole_lines(self.directory))

    def sandboxes(self) -> list[str]:
        """All that are there, by any process's doing: folders, control groups, containers, directories of hosts."""
        folders = [*self._folders(), *(path for path in self._remote() if path not in self._before)]
        self.tokens |= {path.parent.name.rpartition("-")[2] for path in folders}
        return [*map(str, folders), *self._groups(), *self._containers()]

    def left(self) -> list[str]:
        """Those, and processes of them."""
        return [*self.sandboxes(), *processes_with(f"sleep {self.mark}")]

    def dead(self) -> int:
        """Sandboxes that a service of this test's own still has of programs that are no more."""
        is_service = self.backend.upper().startswith(tuple(name.strip("_") for name in SERVICES))
        return asyncio.run(self._access.reap()) if is_service else 0

    def _folders(self) -> list[Path]:
        """A record names all folders of its sandbox."""
        places = [*self.temp.glob("batch-sandbox-*/owner"), *Path("/dev/shm").glob("batch-sandbox-*/owner")]
        return [path for path in places if any(Path(each).parent == self.temp for each in _folders_of(path))]

    def _groups(self) -> list[str]:
        bases = usable_bases()
        return [
            f"{base}/batch-{token}"
            for base in (bases.folders if bases else ())
            for token in self.tokens
            if Path(f"{base}/batch-{token}").exists()
        ]

    def _containers(self) -> list[str]:
        if self.backend not in ("docker", "podman"):
            return []
        words = [self.backend, "ps", "-a", "--filter", "label=batch-runner.owner", "--format", "{{.Names}} {{.Labels}}"]
        listed = subprocess.run(words, capture_output=True, text=True, check=True)
        return [line for line in listed.stdout.splitlines() if self.mark in line]

    def _remote(self) -> list[Path]:
        if not self._settings.ssh_key:
            return []
        places = (Path(self._settings.ssh_key).parent / "tmp").glob("batch-ssh-*/owner")
        return [path for path in places if _size(path)]


def _changed(settings: BackendSettings) -> dict[str, object]:
    """What a backend has to be told, as flags."""
    usual, now = msgspec.structs.asdict(BackendSettings()), msgspec.structs.asdict(settings)
    changed = {name: value for name, value in now.items() if value != usual[name]}
    return {name: ",".join(value) if isinstance(value, tuple) else value for name, value in changed.items()}


def _folders_of(record: Path) -> list[str]:
    with suppress(OSError, json.JSONDecodeError):  # being made or removed just now
        folders: list[str] = json.loads(record.read_bytes())["folders"]
        return folders
    return []


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def kill(program: Program, whom: str, dice: random.Random) -> None:
    """One that has come to its end meanwhile is left as it is."""
    if whom == "worker":
        with suppress(psutil.NoSuchProcess, IndexError):  # it has ended, or there is none just now
            dice.choice(program.workers()).kill()
    elif whom == "parent":
        program.process.kill()
        wait_until(lambda: not program.tree(), SECONDS)  # orphans end by themselves
    else:
        program.kill_all()
        wait_until(lambda: not program.tree(), SECONDS)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", BACKENDS)
def test_once_the_next_run_has_started_nothing_is_left(backend: str, tmp_path: Path) -> None:
    field, dice = Field(backend, tmp_path), random.Random(backend)
    began = time.monotonic()
    share, seen = field.tasks // (len(KILLS) + 2), 0
    waiting = [(share * number + dice.randint(1, share), whom) for number, whom in enumerate(KILLS)]
    while waiting:
        with field.start(field.directory, field.tasks) as program:
            whom = ""
            while waiting and whom in ("", "worker"):
                rows, whom = waiting.pop(0)
                wait_until(lambda: field.ended() >= rows or program.process.poll() is not None, SECONDS)  # noqa: B023
                seen += len(field.left())
                pause(dice, 0.1)
                kill(program, whom, dice)
    assert seen  # it is known how to look for them
    field.finish(tmp_path / "next", 1)
    wait_until(lambda: not field.left(), SECONDS)
    assert not field.dead()
    field.finish(field.directory, field.tasks)
    wait_until(lambda: not field.left(), SECONDS)
    tries = Counter(ids([row for row in journal(field.directory) if row["status"] == "completed"]))
    assert (len(tries), set(tries.values())) == (field.tasks, {1})
    print(f"{backend}: {field.tasks} tasks, {len(KILLS)} kills, {time.monotonic() - began:.1f} s")
