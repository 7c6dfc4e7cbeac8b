"""The short form of `make soak`."""

import os
import signal
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.program import environment, wait_until
from tests.soak.account import Kill, account, unexplained
from tests.soak.endpoint import Logged
from tests.soak.memory import Growth, Sample
from tests.soak.peers import Peers
from tests.soak.told import broken, own_kills, read_told

ROOT = Path(__file__).parents[2]
NEW_YEAR = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
AT_11: dict[str, Any] = {"metadata": {"batch_num": 3, "timestamp": "2026-01-01T00:00:11.500Z"}}
SOAK = [sys.executable, "-m", "tests.soak", "--seconds", "60"]


@pytest.mark.timeout(400)
def test_a_minute_of_bad_weather_loses_doubles_and_leaves_nothing() -> None:
    done = subprocess.run(SOAK, cwd=ROOT, capture_output=True, text=True, timeout=390, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "docker is left out: it takes --seconds 300 or more\n" in done.stdout


# --- what it would notice


PROMPTS = {"r1": "row 1", "r2": "row 2"}


def _told(task_id: str, status: str, at: str = "10.000") -> str:
    return f"2026-01-01T00:00:{at}Z [B3:P1] {task_id} {status}, 2 calls, 1.2 s\n"


def _row(task_id: str, status: str, **columns: Any) -> dict[str, Any]:
    return {"task_id": task_id, "status": status, "metadata": {"batch_num": 3}, **columns}


def _whole_row(**columns: Any) -> dict[str, Any]:
    """Of two requests from second 5 to 10, and one call."""
    return {
        **_row("r1", "completed", reason="", attempt=1, requests=2, duration_seconds=5.0),
        "metadata": {"batch_num": 3, "timestamp": "2026-01-01T00:00:10.000Z"},
        "usage": {"input_tokens": 0, "output_tokens": 0},
        "tool_stats": {"terminal": {"count": 1, "success": 1, "failure": 0}},
        "unknown_tools": "[]",
        **columns,
    }


def _request(second: float, worker: int = 7, *calls: str) -> Logged:
    return Logged(at=NEW_YEAR + second, prompt="row 1", call=1, kind="ok", worker=worker, calls=calls)


def test_a_row_that_was_told_of_and_is_in_its_journal_keeps_the_promise() -> None:
    told = read_told(
        _told("r1", "completed") + _told("r2", "failed (server_error)") + "2026-01-01T00:00:11.000Z other\n"
    )
    assert [(each.task_id, each.status) for each in told] == [("r1", "completed"), ("r2", "failed")]
    rows = [_row("r1", "completed"), _row("r2", "failed")]
    assert not broken(told, rows, [_request(9.5)], PROMPTS)


def test_a_row_that_was_told_of_and_is_nowhere_is_noticed() -> None:
    told = read_told(_told("r1", "completed") + _told("r2", "stopped"))
    found = broken(told, [_row("r1", "timeout")], [], PROMPTS)
    assert [each.split(" was")[0] for each in found] == ["r1", "r2"]


@pytest.mark.parametrize(("status", "number"), [("completed", 1), ("discarded", 1), ("timeout", 0)])
def test_a_row_that_is_done_is_asked_no_more(status: str, number: int) -> None:
    found = broken(read_told(_told("r1", status)), [_row("r1", status)], [_request(11.0)], PROMPTS)
    assert len(found) == number


@pytest.mark.parametrize(
    ("kill", "number"),
    [
        (Kill(NEW_YEAR + 9, 7), 0),
        (Kill(NEW_YEAR + 9, 0), 0),
        (Kill(NEW_YEAR + 9, 8), 1),  # another worker's
        (Kill(NEW_YEAR + 12, 7), 1),  # too late
    ],
)
def test_only_a_kill_of_the_worker_that_held_a_row_explains_its_lack(kill: Kill, number: int) -> None:
    requests = [_request(5.0), _request(8.0), _request(11.0, 8, "good")]
    found = account([_whole_row(requests=1, duration_seconds=1.0, **AT_11)], requests, {"r1": "row 1"})
    assert not found.wrong
    assert [each.sum.requests for each in found.cut] == [2]
    assert len(unexplained(found.cut, [kill])) == number


def test_each_worker_that_held_a_row_has_to_be_killed() -> None:
    found = account([], [_request(1.0, 7), _request(2.0, 0), _request(5.0, 8)], {})
    assert [each.worker for each in found.cut] == [7, 8]
    assert [each.worker for each in unexplained(found.cut, [Kill(NEW_YEAR + 3, 7)])] == [8]


@pytest.mark.parametrize(("calls", "number"), [((), 1), (("good",), 0)])
def test_a_kill_long_after_its_final_answer_does_not_explain_the_lack_of_a_row(
    calls: tuple[str, ...], number: int
) -> None:
    found = account([], [_request(1.0, 7, *calls)], {})
    assert len(unexplained(found.cut, [Kill(NEW_YEAR + 21, 7)])) == number


def test_a_worker_that_the_program_ended_itself_is_known_from_the_log() -> None:
    text = "".join(
        f"2026-01-01T00:00:0{second}.000Z a worker died: x; 8 of its rows have no end\n" for second in (2, 4)
    )
    assert own_kills(text, [Kill(NEW_YEAR + 1, 7)]) == [Kill(NEW_YEAR + 4, 0)]


@pytest.mark.parametrize(
    ("calls", "columns", "number"),
    [
        (("good",), {}, 0),
        (("malformed",), {}, 0),
        (("good", "good"), {}, 1),
        (("good", "good"), {"status": "timeout"}, 0),
        ((), {"status": "timeout"}, 1),
        (("good",), {"requests": 3, "status": "timeout"}, 0),  # the third was cancelled before it was seen
        (("good",), {"requests": 3}, 1),
        (("good",), {"requests": 4, "status": "timeout"}, 1),
        (("good", "invented"), {}, 1),
        (("good", "invented"), {"unknown_tools": '[{"name": "teleport", "count": 1}]'}, 0),
    ],
)
def test_a_row_says_the_calls_that_replies_asked_for_and_the_requests_that_came(
    calls: tuple[str, ...], columns: dict[str, Any], number: int
) -> None:
    found = account([_whole_row(**columns)], [_request(6.0, 7, *calls), _request(7.0)], {"r1": "row 1"})
    assert len(found.wrong) == number, found.wrong


@pytest.mark.parametrize(
    ("megabytes", "files", "fault"),
    [
        (42, 13, ""),
        (31, 7, ""),
        (51, 10, "a worker in storm 2 grew by 11.0 MB to 51.0"),
        (40, 51, "a worker in storm 2 had 10 files open, then 51"),
    ],
)
def test_growth_is_a_fault_from_a_bound_on(megabytes: int, files: int, fault: str) -> None:
    growth = Growth(role="worker", storm=2, first=Sample(40 << 20, 10), last=Sample(megabytes << 20, files))
    assert growth.fault() == fault


def test_the_peer_of_a_connection_is_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        there, _ = server.accept()
        with there:
            assert Peers().pid(*(each.getsockname()[1] for each in (client, server))) == os.getpid()


# --- cut off


@pytest.mark.timeout(200)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=["term", "hup", "int"])
def test_a_soak_that_is_cut_off_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    def sandboxes() -> list[Path]:
        return [*Path("/dev/shm").glob("batch-sandbox-*"), *tmp_path.glob("*/*/temp/batch-sandbox-*")]

    def ours() -> list[Path]:
        return [place for place in sandboxes() if str(tmp_path) in _record(place)]

    soak = subprocess.Popen(
        ["env", "--default-signal", *SOAK, "--backends", "local"],  # the tests may be run by nohup
        cwd=ROOT,
        env=environment(tmp_path, TMPDIR=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    with soak:
        try:
            wait_until(ours, 90)
            soak.send_signal(number)
            said, _ = soak.communicate(timeout=90)
        finally:
            soak.kill()
    assert soak.returncode == 128 + number, said.decode()
    assert "Traceback" not in said.decode()
    assert not ours()
    wait_until(lambda: not any(str(tmp_path) in str(each.info["cmdline"]) for each in psutil.process_iter(["cmdline"])))
    assert not list(tmp_path.glob("tmp*"))


def _record(sandbox: Path) -> str:
    try:
        return (sandbox / "owner").read_text()
    except OSError:  # made or removed just now
        return ""
