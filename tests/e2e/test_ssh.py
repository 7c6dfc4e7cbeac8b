"""Sandboxes on an SSH host through the program: what it is told reaches the workers, and nothing is left there."""

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.contract.ssh_server import SshServer
from tests.e2e.against import called, results_of, run_against, said, script
from tests.e2e.program import Program, journal, run_program, wait_until, write_dataset
from tests.e2e.test_sandboxes import processes_with
from tests.endpoint import EndpointProcess, tool_call


@pytest.fixture(scope="module")
def server() -> Iterator[SshServer]:
    server = SshServer()
    yield server
    server.close()


def told(server: SshServer) -> Sequence[str]:
    files = (f"--ssh_key={server.folder / 'id'}", f"--ssh_known_hosts={server.folder / 'known'}")
    return ("--container_backend=ssh", f"--ssh_hosts={server.host}", *files)


def test_a_row_runs_on_the_host(server: SshServer, tmp_path: Path) -> None:
    rules = script("far", called(tool_call("terminal", {"command": "echo $SSH_CLIENT; pwd"})), said("done"))
    with EndpointProcess(rules) as endpoint:
        ran = run_against(endpoint.url, tmp_path, ["far"], *told(server))
    row = ran.rows["far"]
    assert (row["status"], row["environment"]["backend"]) == ("completed", "ssh"), row["error"]
    (result,) = results_of(row)
    assert result["output"].strip().startswith(f"{server.tmp}/batch-ssh-")
    assert server.sandboxes() == []


def test_whether_it_is_ready_is_listed(server: SshServer, tmp_path: Path) -> None:
    def state(*flags: str) -> str:
        code, out, _ = run_program("--list_backends", *flags, home=tmp_path)
        assert code == 0
        return next(line for line in out.splitlines() if " ssh " in line)

    assert "ready" in state(*told(server))
    assert "--ssh_hosts" in state()


def test_a_run_goes_on_without_a_host_that_is_down(server: SshServer, tmp_path: Path) -> None:
    key, known = told(server)[2:]
    hosts = f"--ssh_hosts={server.host},127.0.0.1:1"
    rules = [rule for each in ("a", "b") for rule in script(each, said("done"))]
    with EndpointProcess(rules) as endpoint:
        flags = ("--container_backend=ssh", hosts, key, known)
        ran = run_against(endpoint.url, tmp_path, ["a", "b"], *flags)
    assert [row["status"] for row in ran.rows.values()] == ["completed", "completed"], ran.err
    assert ran.code == 0
    assert ran.err.count("warning: the run goes on without a host that does not answer: 127.0.0.1:1") == 1


def test_a_host_that_is_not_known_is_refused_before_a_row_starts(server: SshServer, tmp_path: Path) -> None:
    unknown = f"--ssh_known_hosts={server.folder / 'empty'}"
    with EndpointProcess(script("far", said("never"))) as endpoint:
        ran = run_against(endpoint.url, tmp_path, ["far"], *told(server)[:-1], unknown)
    assert ran.code == 2
    assert "container_backend ssh: " in ran.err
    assert "its host key is in no line of" in ran.err


def test_what_a_killed_run_left_is_gone_once_the_next_one_starts(server: SshServer, tmp_path: Path) -> None:
    mark = f"304.{os.getpid()}"
    ids = ["a", "b", "c"]
    rules = [
        rule
        for each in ids
        for rule in script(each, called(tool_call("terminal", {"command": f"setsid sleep {mark} & sleep {mark}"})))
    ] + script("next", said("done"))
    with EndpointProcess(rules) as endpoint:
        dataset = write_dataset(tmp_path / "d.jsonl", [{"id": each, "prompt": each} for each in ids])
        base = [f"--base_url={endpoint.url}", "--model=m", f"--dataset_file={dataset}", "--run_name=killed"]
        more = ["--num_workers=2", "--concurrency=3", "--enabled_toolsets=terminal", f"--output_dir={tmp_path / 'out'}"]
        with Program(*base, *more, *told(server), home=tmp_path) as program:
            wait_until(lambda: len(processes_with(mark)) >= 6)
            assert len(server.connections()) <= 2, "one of each worker"
            program.kill_all()
        wait_until(lambda: not processes_with(mark))
        assert len(server.sandboxes()) == 3, "until somebody looks"
        ran = run_against(endpoint.url, tmp_path, ["next"], *told(server))
    assert ran.rows["next"]["status"] == "completed"
    assert "removed what dead runs left: 3 sandboxes" in ran.err
    assert server.sandboxes() == []


def test_a_lost_connection_ends_the_row_as_lost(server: SshServer, tmp_path: Path) -> None:
    mark = f"305.{os.getpid()}"
    rules = script("cut", called(tool_call("terminal", {"command": f"sleep {mark}"})), said("not reached"))
    with EndpointProcess(rules) as endpoint:
        dataset = write_dataset(tmp_path / "d.jsonl", [{"id": "cut", "prompt": "cut"}])
        flags = [f"--base_url={endpoint.url}", "--model=m", f"--dataset_file={dataset}", "--run_name=cut"]
        more = [
            "--num_workers=1",
            "--keep_no_reasoning",
            "--enabled_toolsets=terminal",
            f"--output_dir={tmp_path / 'out'}",
        ]
        with Program(*flags, *more, *told(server), home=tmp_path) as program:
            wait_until(lambda: len(processes_with(mark)) >= 1)
            for pid in server.connections():
                os.kill(pid, signal.SIGKILL)
            program.end()
    lost, again = journal(tmp_path / "out" / "cut")
    assert (lost["error_class"], again["status"]) == ("environment_lost", "completed"), "another try is made"
    assert not processes_with(mark)
    assert server.sandboxes() == []
