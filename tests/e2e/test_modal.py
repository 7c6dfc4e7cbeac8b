"""Sandboxes of Modal through the program: its workers find the service, and what cannot be had is said at once."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.contract.modal_server import ModalServer
from tests.e2e.against import called, results_of, run_against, said, script
from tests.e2e.program import Program, journal, run_program, wait_until, write_dataset
from tests.endpoint import EndpointProcess, tool_call

_SLEEP = "14141"


@pytest.fixture(scope="module")
def server() -> Iterator[ModalServer]:
    server = ModalServer()
    yield server
    server.close()


def test_a_row_runs_there(server: ModalServer, tmp_path: Path) -> None:
    command = "cat /proc/1/cmdline | tr '\\0' ' '; pwd"
    rules = script("far", called(tool_call("terminal", {"command": command})), said("done"))
    variables: dict[str, Any] = {**server.variables()}
    with EndpointProcess(rules) as endpoint:
        ran = run_against(endpoint.url, tmp_path, ["far"], "--container_backend=modal", **variables)
    row = ran.rows["far"]
    assert (row["status"], row["environment"]["backend"]) == ("completed", "modal"), row["error"]
    (result,) = results_of(row)
    assert result["output"].startswith("/sbin/docker-init")
    assert result["output"].endswith("/workspace\n")
    assert server.sandboxes() == 0


def test_a_wrong_token_is_refused_before_a_row_starts(server: ModalServer, tmp_path: Path) -> None:
    wrong: dict[str, Any] = {**server.variables(), "MODAL_TOKEN_SECRET": "wrong"}
    with EndpointProcess(script("far", said("never"))) as endpoint:
        ran = run_against(endpoint.url, tmp_path, ["far"], "--container_backend=modal", **wrong)
    assert ran.code == 2
    assert "container_backend modal: modal takes no such token: run `modal token new`" in ran.err
    assert "Traceback" not in ran.err


def _sleeps() -> bool:
    return any(process.info["cmdline"] == ["sleep", _SLEEP] for process in psutil.process_iter(["cmdline"]))


@pytest.mark.timeout(300)
def test_it_ends_though_the_service_is_silent(tmp_path: Path) -> None:
    call = tool_call("terminal", {"command": f"sleep {_SLEEP}", "timeout": 3})
    server = ModalServer()
    variables: dict[str, Any] = {**server.variables()}
    try:
        with EndpointProcess(script("far", then=called(call))) as endpoint:
            dataset = write_dataset(tmp_path / "r.jsonl", [{"id": "far", "prompt": "far"}])
            flags = [f"--base_url={endpoint.url}", f"--dataset_file={dataset}", f"--output_dir={tmp_path / 'out'}"]
            flags += ["--model=m", "--run_name=r", "--num_workers=1", "--max_attempts=1", "--timeout=200"]
            flags += ["--container_backend=modal", "--enabled_toolsets=terminal"]
            with Program(*flags, home=tmp_path, **variables) as program:
                program.hear("warning: modal does not limit processes")
                wait_until(_sleeps)
                server.freeze()
                wait_until(lambda: bool(journal(tmp_path / "out" / "r")), 100)
                ended = time.monotonic()
                code, _, err = program.end(120)
                assert time.monotonic() - ended < 90  # it waits for the service for 20 s or so
    finally:
        server.close()
    (row,) = journal(tmp_path / "out" / "r")
    assert (code, row["status"], row["reason"]) == (1, "failed", "environment_lost"), row["error"]
    assert err.count("does not limit processes") == 1
    assert "Traceback" not in err


def test_whether_it_is_ready_is_listed(server: ModalServer, tmp_path: Path) -> None:
    def state(**variables: Any) -> str:
        code, out, _ = run_program("--list_backends", home=tmp_path, **variables)
        assert code == 0
        return next(line for line in out.splitlines() if " modal " in line)

    assert "ready" in state(**server.variables())
    assert "modal takes no such token" in state()
