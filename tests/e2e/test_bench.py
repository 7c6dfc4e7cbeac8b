"""`python -m benchmarks`: every figure is produced, and is what it says it is. Nothing is said about how fast."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from agent.row import decode_row
from benchmarks import report
from benchmarks.__main__ import _of, _options
from benchmarks.bench import Bench
from benchmarks.endpoint import CALLS, SLICES, Seen, slices
from benchmarks.figures import commands, cpu, in_flight, sandboxes
from benchmarks.figures.journal import BATCH, write_run
from benchmarks.figures.limits import is_told
from benchmarks.place import ROOT, surroundings
from benchmarks.report import Figure, code, lines
from benchmarks.sizes import QUICK
from benchmarks.tree import measure
from tests.e2e.program import wait_until
from tools.environments.base import BackendSettings
from tools.environments.owner import current_owner, encode
from tools.environments.table import BACKENDS

HERE = ("local", "bubblewrap", "docker", "singularity", "ssh")
WHAT = ("start", "first", "last", "bare", "1_MB_up", "1_MB_down", "stop")

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """One quick pass: its JSON, its table, its temporary folder."""
    folder = tmp_path_factory.mktemp("bench")
    file = folder / "out" / "bench.json"
    words = [sys.executable, "-m", "benchmarks", "--quick", "--json", str(file)]
    done = subprocess.run(
        words, cwd=ROOT, env=surroundings(folder), capture_output=True, text=True, timeout=560, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_bytes()), done.stdout, folder


def by_name(found: dict[str, Any], start: str) -> dict[str, Any]:
    """The one figure whose name begins so."""
    (figure,) = [figure for figure in found["figures"] if figure["name"].startswith(start)]
    assert isinstance(figure, dict)
    return figure


def test_every_figure_is_there(passed: tuple[dict[str, Any], str, Path]) -> None:
    found, table, _ = passed
    starts = [
        "CPU per model call",
        "the same against the bare loop, default",
        "the same against the bare loop, aiohttp",
    ]
    starts += ["wall time, 50 ms, 4 at once", "in flight, 50 ms, 4 at once"]
    starts += ["used of 40 requests a second, with ", "used of 40 requests a second, without", "--rpm", "--tpm"]
    starts += ["memory of a worker, 2 at once", "memory of a worker, 6 at once", "memory per prompt in flight"]
    starts += ["start to first request", "one terminal command, local", "one terminal command, bubblewrap"]
    starts += ["one terminal command, docker", *(f"command 3 in a sandbox, {name}" for name in BACKENDS)]
    starts += ["scan of the journal", "merge", "resume with nothing left"]
    starts += ["prompts streamed", "growth of the parent", "compressor's counting"]
    assert len(found["figures"]) == len(starts)
    for start in starts:
        figure = by_name(found, start)
        assert figure["value"] is not None or "in a sandbox" in start or start in ("--rpm", "--tpm"), figure
        assert figure["name"] in table
    assert len(found["machine"]["load"]) == 3
    assert (found["sizes"], found["only"]) == ("quick", None)
    assert (found["code"] is None) == (code() is None)


def test_a_quick_pass_measures_nothing(passed: tuple[dict[str, Any], str, Path]) -> None:
    found, table, _ = passed
    assert {(figure["target"], figure["met"]) for figure in found["figures"]} == {(None, None)}
    for name in ("--rpm", "--tpm"):
        figure = by_name(found, name)
        assert figure["value"] is None
        assert figure["note"].endswith(" s, which is no minute")
    assert table.endswith("sizes were tiny: no figure says how fast anything is\n")


def test_figures_have_their_targets() -> None:
    of_cpu, at_default, at_aiohttp = cpu.measure(Bench(QUICK))
    better, worse = sorted((at_default, at_aiohttp), key=lambda figure: float(str(figure.values["bare_ms"])))
    assert (of_cpu.target, better.target, worse.target) == (None, 1.0, None)
    assert commands.TARGETS == {"local": 3, "bubblewrap": 5, "docker": 6}
    for name in ("local", "modal"):
        figure = asyncio.run(sandboxes.figure(name, BackendSettings(), QUICK))
        assert figure.target == commands.TARGETS.get(name)


def test_figures_are_what_they_say(passed: tuple[dict[str, Any], str, Path]) -> None:
    found, _, _ = passed
    cpu = by_name(found, "CPU per model call")
    bare = by_name(found, "the same against the bare loop, default")
    assert 0 < cpu["values"]["endpoint_ms_per_call"] < cpu["value"]
    aiohttp = by_name(found, "the same against the bare loop, aiohttp")
    assert aiohttp["value"] == pytest.approx(cpu["value"] / aiohttp["values"]["bare_ms"])
    assert bare["value"] == pytest.approx(cpu["value"] / bare["values"]["bare_ms"])
    wall = by_name(found, "wall time")
    (load,) = QUICK.loads
    assert wall["values"]["ideal_seconds"] == load.prompts * CALLS * load.latency / load.concurrency
    assert wall["values"]["seconds"] > wall["values"]["ideal_seconds"]
    assert 1 <= wall["values"]["peak_in_flight"] <= load.concurrency
    flight = by_name(found, "in flight")
    assert 0 < flight["value"] <= 100
    assert 0 < max(flight["values"]["tenths"]) <= load.concurrency
    memory = by_name(found, "memory of a worker, 6")
    assert 10 < memory["value"] < 500
    assert memory["values"]["sandbox_processes"] > 0
    assert by_name(found, "start to first")["value"] > 0
    merge = by_name(found, "merge")
    assert merge["value"] > 0
    assert merge["values"]["peak_mb"] >= by_name(found, "scan of the journal")["values"]["peak_mb"] > 1


def test_what_a_sandbox_costs_is_told_for_each_that_runs_here(passed: tuple[dict[str, Any], str, Path]) -> None:
    found, _, _ = passed
    for name in HERE:
        figure = by_name(found, f"command 3 in a sandbox, {name}")
        if "no answer within" in figure["note"]:  # the machine is busy
            continue
        times = figure["values"]
        assert set(times) == {f"{what}_ms" for what in WHAT}, figure
        assert all(value > 0 for value in times.values())
        assert figure["value"] == pytest.approx(times["last_ms"] - times["bare_ms"])
    untold = [figure for figure in found["figures"] if figure["value"] is None]
    assert all(figure["note"] for figure in untold)


def test_nothing_is_left(passed: tuple[dict[str, Any], str, Path]) -> None:
    _, _, folder = passed
    assert list((folder / "temp").iterdir()) == []


def test_one_figure_alone(tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    words = [sys.executable, "-m", "benchmarks", "--quick", "--only", "journal", "--json", str(file)]
    subprocess.run(words, cwd=ROOT, env=surroundings(tmp_path), check=True, stdout=subprocess.DEVNULL, timeout=60)
    found = json.loads(file.read_bytes())
    assert (found["sizes"], found["only"]) == ("quick", ["journal"])
    names = [figure["name"] for figure in found["figures"]]
    assert names == ["scan of the journal, 200 rows", "merge, 200 rows", "resume with nothing left, 200 rows"]


@pytest.mark.parametrize("place", ["folder", "file/bench.json"])
def test_figures_that_could_not_be_written_are_refused_before_they_are_taken(tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    words = [sys.executable, "-m", "benchmarks", "--json", str(tmp_path / place)]
    done = subprocess.run(words, cwd=ROOT, env=surroundings(tmp_path), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: --json: {tmp_path / place} cannot be written: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_ends_it_at_once_and_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    file, environ = tmp_path / "bench.json", surroundings(tmp_path)
    temp = Path(environ["TMPDIR"])
    words = ["env", "--default-signal"]  # whoever runs the tests may ignore some
    words += [sys.executable, "-m", "benchmarks", "--only", "in_flight", "journal", "--json", str(file)]
    bench = subprocess.Popen(
        words, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    with bench:
        try:
            wait_until(lambda: list(temp.glob("batch-bench-*/temp/batch-sandbox-*")), 120)
            os.killpg(bench.pid, number)  # as a terminal does
            said, _ = bench.communicate(timeout=120)
        finally:
            bench.kill()
    assert (bench.returncode, said.decode()) == (128 + number, "")
    assert list(temp.iterdir()) == []
    assert not file.exists()
    assert processes_in(temp) == []
    assert [owner for owner in Path("/dev/shm").glob("batch-sandbox-*/owner") if str(temp) in text_of(owner)] == []


def test_a_pass_that_is_killed_takes_all_with_it_and_the_next_one_removes_what_it_wrote(tmp_path: Path) -> None:
    environ = surroundings(tmp_path)
    temp = Path(environ["TMPDIR"])
    with held(temp / "batch-bench-living") as living:
        words = [sys.executable, "-m", "benchmarks", "--json", str(tmp_path / "bench.json"), "--only"]
        bench = subprocess.Popen([*words, "in_flight"], cwd=ROOT, env=environ, start_new_session=True)
        try:
            wait_until(lambda: list(temp.glob("batch-bench-*/temp/batch-sandbox-*")), 120)
            (endpoint,) = [
                each for each in psutil.Process(bench.pid).children() if "benchmarks.endpoint" in each.cmdline()
            ]
        finally:
            bench.kill()
            bench.wait()
        wait_until(lambda: not processes_in(temp) and not endpoint.is_running(), 60)
        assert len(list(temp.glob("batch-bench-*/owner"))) == 2
        subprocess.run([*words, "journal", "--quick"], cwd=ROOT, env=environ, check=True, timeout=60)
        assert list(temp.iterdir()) == [living]


@contextmanager
def held(folder: Path) -> Iterator[Path]:
    """The folder of a pass that lives."""
    folder.mkdir()
    (folder / "owner").write_text(encode(current_owner("bench")))
    yield folder


def processes_in(temp: Path) -> list[list[str]]:
    """Command lines of those that have their temporary files there, or below."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR", "").startswith(str(temp)):
                found.append(process.cmdline())
    return found


def text_of(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # another run's, removed just now
        return ""


def test_what_breaks_while_things_are_put_away_hides_no_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(_: Bench) -> list[Figure]:
        try:
            sys.exit(130)
        finally:
            Path("/nowhere").rmdir()

    monkeypatch.setattr(in_flight, "measure", measure)
    with pytest.raises(SystemExit, match="130"):
        list(_of("in_flight", Bench(QUICK)))


BURN = "import time\nuntil = time.process_time() + {}\nwhile time.process_time() < until: pass\n"


def test_cpu_of_children_that_nobody_waits_for_is_counted(tmp_path: Path) -> None:
    (tmp_path / "burn.py").write_text(BURN.format(0.3))
    (tmp_path / "orphans.py").write_text(
        "import subprocess, sys\n"
        "child = 'import subprocess, sys; subprocess.Popen([sys.executable, \"burn.py\"])'\n"
        "subprocess.Popen([sys.executable, '-c', child]).wait()\n" + BURN.format(0.1)
    )
    cost = measure([sys.executable, "orphans.py"], tmp_path, surroundings(tmp_path))
    assert cost.code == 0, cost.output
    assert cost.cpu >= 0.4
    assert cost.began <= time.monotonic() - cost.seconds


def test_exit_code_and_output_are_told(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import sys; print('gone wrong', file=sys.stderr); sys.exit(3)"]
    cost = measure(words, tmp_path, surroundings(tmp_path))
    assert (cost.code, cost.output) == (3, "gone wrong\n")


def test_means_over_time() -> None:
    means = slices(array("d", [10.0, 10.5, 11.0]), array("i", [4, 2, 0]))
    assert len(means) == SLICES
    assert means[: SLICES // 2] == pytest.approx([4.0] * (SLICES // 2))
    assert means[SLICES // 2 :] == pytest.approx([2.0] * (SLICES // 2))
    assert slices(array("d", [1.0]), array("i", [1])) == []


def test_generated_runs_have_whole_rows(tmp_path: Path) -> None:
    size = write_run(tmp_path, 25)
    files = sorted((tmp_path / "run").iterdir())
    assert [len(file.read_bytes().splitlines()) for file in files] == [BATCH, BATCH, 25 - 2 * BATCH]
    assert size == sum(file.stat().st_size for file in files)
    assert {decode_row(line).row_key for file in files for line in file.read_bytes().splitlines()} == {
        f"id:r{number}" for number in range(25)
    }


def test_the_table_tells_what_was_met() -> None:
    figures = [
        Figure(name="a", value=1.0, unit="s", target=1.2),
        Figure(name="b", value=100.0, unit="MB/s", target=150, at_least=True),
        Figure(name="c", value=None, unit="ms", target=6, note="no engine"),
        Figure(name="d", value=12.34, unit="%"),
    ]
    assert [figure.met for figure in figures] == [True, False, None, None]
    assert [line.split() for line in lines(figures)][1:] == [
        ["a", "1", "s", "≤", "1.20", "s", "yes"],
        ["b", "100", "MB/s", "≥", "150", "MB/s", "NO"],
        ["c", "not", "measured", "≤", "6", "ms", "no", "engine"],
        ["d", "12.3", "%"],
    ]


def test_the_table_tells_a_figure_from_a_target_that_it_just_missed() -> None:
    figures = [
        Figure(name="a", value=0.8963, unit="x", target=0.9, at_least=True),
        Figure(name="b", value=16.32, unit="MB", target=16.336),
        Figure(name="c", value=149.9996, unit="MB/s", target=150, at_least=True),
        Figure(name="d", value=0.9, unit="x", target=0.9, at_least=True),
    ]
    assert [line.split()[1:] for line in lines(figures)][1:] == [
        ["0.896", "x", "≥", "0.900", "x", "NO"],
        ["16.32", "MB", "≤", "16.34", "MB", "yes"],
        ["149.9996", "MB/s", "≥", "150.0000", "MB/s", "NO"],
        ["0.90", "x", "≥", "0.90", "x", "yes"],
    ]


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ([], "bench.json"),
        (["--full"], "bench.json"),
        (["--quick"], "bench-partial.json"),
        (["--only", "cpu"], "bench-partial.json"),
    ],
)
def test_a_part_does_not_replace_the_figures_of_a_whole_pass(flags: list[str], name: str) -> None:
    assert _options(flags).json == ROOT / "build" / name


def test_the_commit_is_told_and_whether_it_was_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        named = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words]
        return subprocess.run(named, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setattr(report, "ROOT", tmp_path)
    assert code() is None
    file = tmp_path / "file"
    file.touch()
    git("init", "-q")
    git("add", "file")
    git("commit", "-q", "-m", "a")
    (tmp_path / "not known to git").touch()
    assert code() == {"commit": git("rev-parse", "HEAD"), "changed": False}
    file.write_text("changed")
    assert code() == {"commit": git("rev-parse", "HEAD"), "changed": True}
    (tmp_path / "below").mkdir()
    monkeypatch.setattr(report, "ROOT", tmp_path / "below")
    assert code() is None


THREADS = """
import threading
async def threads():
    child = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
    print(threading.active_count())
    await child.communicate(b"")
asyncio.run(threads())
"""


def test_the_bare_loop_has_no_thread_for_each_child() -> None:
    words = [sys.executable, "-c", f"from benchmarks.bare_loop import *; wait_by_pidfd(){THREADS}"]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == "1\n"


def test_a_short_run_says_nothing_of_a_minute_unless_it_broke_the_limit() -> None:
    nothing = {"refused": 0, "peak": 1, "cpu_seconds": 0, "body_bytes": 0, "connections": 1, "in_flight": []}
    seen = msgspec.convert({**nothing, "requests": 1180, "first": 0, "last": 59, "tenths": [2] * 590}, Seen)
    assert is_told(seen, 1180) is False
    assert is_told(seen, 1179) is True
    assert is_told(msgspec.structs.replace(seen, last=60.0), 1180) is True
