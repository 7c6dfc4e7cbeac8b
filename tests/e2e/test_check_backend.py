"""`--check_backend`: whether a machine is fit for a backend, as a table and as an exit code."""

import json
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e2e.program import Program, run_program, wait_until
from tools.environments.hosted import Record

pytestmark = pytest.mark.timeout(300)
NOWHERE = "unix:///nowhere/docker.sock"


def checked(home: Path, *flags: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code, and what was found by the check's name."""
    code, out, err = run_program(*flags, "--json_summary", home=home, timeout=300)
    assert err == ""
    return code, {finding["check"]: finding for finding in json.loads(out)}


def test_a_backend_that_is_fit(tmp_path: Path) -> None:
    code, found = checked(tmp_path, "--check_backend", "local", "--cpus", "2")
    assert len(found) == 21
    assert found["network none"]["state"] == "refused"
    assert "choose bubblewrap or docker" in found["network none"]["note"]
    assert "the limit is 2" in found["processors"]["note"]
    assert found.pop("processors")["state"] in ("ok", "not tried")  # another program may have them
    late = found.pop("time-out of 1 s, SIGTERM ignored")  # a machine may be too busy for it
    assert {finding["state"] for finding in found.values()} == {"ok", "refused"}, found
    assert code == int(late["state"] == "failed")
    assert all(finding["seconds"] >= 0 for finding in found.values())
    assert not list(tmp_path.iterdir())


def test_the_table_of_one_that_is_not(tmp_path: Path) -> None:
    code, out, err = run_program("--check-backend=docker", home=tmp_path, DOCKER_HOST=NOWHERE)
    assert (code, err) == (1, "")
    (row,) = [line for line in out.splitlines() if "ready here" in line]
    assert "FAILED: docker is not running: " in row
    assert row.rstrip("│ ").endswith(" s")
    assert "sandbox starts" not in out


@pytest.mark.parametrize(
    ("flags", "check", "said"),
    [
        (["--volumes=/usr:/mnt"], "sandbox starts", "has no volumes"),
        (["--network=none"], "sandbox starts", "cannot take the network away"),
        (["--cwd=/no/such/place"], "sandbox starts", "/no/such/place"),
    ],
)
def test_the_settings_of_a_run_apply(flags: list[str], check: str, said: str, tmp_path: Path) -> None:
    code, found = checked(tmp_path, "--check_backend=local", *flags)
    assert code == 1
    assert list(found)[-1] == check
    assert found[check]["state"] == "failed"
    assert said in found[check]["note"]


def test_a_file_of_settings_applies(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("container_backend: docker\nvolumes: [/usr:/mnt]\n")
    code, found = checked(tmp_path, "--check_backend=local", f"--config={config}")
    assert (code, list(found)[-1]) == (1, "sandbox starts")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--check_backend"], "--check_backend needs a value"),
        (["--check_backend", "--quiet"], "--check_backend needs a value"),
        (["--check_backend", "dokcer"], "did you mean docker"),
        (["--check_backend", "auto"], "'auto' is unknown"),
        (["--check_backend", "local", "--image", "x"], "local takes no images"),
        (["--check_backend", "local", "--container_backend", "docker"], "container_backend is given twice"),
        (["--check_backend", "local", "--volumes", "x"], "volumes: expected HOST:/SANDBOX"),
        (["--check_backend", "local", "--cpus", "0"], "--cpus: expected a number > 0"),
        (["--check_backend", "local", "--gpus", "all"], "gpus: not with container_backend local, only with docker"),
        (["--check_backend", "bubblewrap", "--read_only_root"], "read_only_root: not with container_backend bubble"),
        (["--check_backend", "singularity", "--network", "nosuch"], "network nosuch: not with container_backend sing"),
    ],
)
def test_wrong_usage(flags: list[str], said: str, tmp_path: Path) -> None:
    code, out, err = run_program(*flags, home=tmp_path)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_cleans_up(number: signal.Signals, code: int, tmp_path: Path) -> None:
    places: list[Path] = []

    def begun() -> bool:
        for record in tmp_path.glob("batch-sandbox-*/owner"):
            try:
                found = msgspec.json.decode(record.read_bytes(), type=Record)
            except (OSError, msgspec.DecodeError):  # it is being written
                continue
            places.extend(Path(folder) for folder in (*found.folders, *found.cgroup))
        return bool(places)

    with Program("--check_backend", "local", home=tmp_path, TMPDIR=str(tmp_path)) as program:
        wait_until(lambda: begun() or program.process.poll() is not None, 100)
        assert places, program.end()
        program.interrupt(number)
        ended, out, err = program.end()
    assert (ended, err) == (code, "")
    assert "ready here" in out, "what was found so far"
    assert not any(place.exists() for place in places)
    assert not list(tmp_path.iterdir())
