"""Sandboxes of Daytona through the program: none is left that is paid for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.daytona_server import DaytonaServer
from tests.e2e.against import called, run_against, said, script
from tests.endpoint import EndpointProcess, tool_call


@pytest.fixture
def server() -> Iterator[DaytonaServer]:
    """One of the test's own, to be maltreated."""
    server = DaytonaServer()
    yield server
    server.close()


@pytest.mark.parametrize(
    ("workers", "failures"),
    [
        (1, 2),  # the row's own, and the one at the run's end of what dead workers left
        (0, 1),
    ],
)
def test_a_sandbox_that_could_not_be_deleted_is_tried_again(
    workers: int, failures: int, server: DaytonaServer, tmp_path: Path
) -> None:
    server.set_faults(undeletable=failures)
    variables: dict[str, Any] = server.variables()
    flags = ["--container_backend=daytona", f"--num_workers={workers}"]
    with EndpointProcess(script("far", called(tool_call("terminal", {"command": "true"})), said("done"))) as endpoint:
        ran = run_against(endpoint.url, tmp_path, ["far"], *flags, timeout=180, **variables)
    assert (ran.code, ran.rows["far"]["status"]) == (0, "completed"), ran.err
    assert server.sandboxes() == []
    (name,) = [request["name"] for request in server.requests()]
    assert f"daytona: not removed yet, and tried again: {name}" in (ran.directory / "run.log").read_text()
    assert "warning" not in ran.err
