"""No room where sandboxes are made: the run stops early and says where; each row is still to be run."""

from pathlib import Path

import pytest

from tests.e2e.bench import Bench, prompts
from tests.e2e.program import merged
from tests.endpoint import EndpointProcess

ROWS = 6
WITHIN = 200.0  # seconds, on however busy a machine

pytestmark = pytest.mark.timeout(500)


@pytest.mark.parametrize("backend", ["local", "bubblewrap"])
@pytest.mark.parametrize(
    ("free", "file"),
    [(0, ""), (300_000, "x" * 500_000), (8192, "x" * 8192)],
    ids=["no folder", "not the files", "hardly the folder"],
)
def test_the_run_stops_and_goes_on_once_there_is_room(
    backend: str, free: int, file: str, disk: Path, tmp_path: Path
) -> None:
    ballast = disk / "ballast"
    ballast.write_bytes(b"x" * ((2 << 20) - free))
    rows = [{**row, **({"files": {"data": file}} if file else {})} for row in prompts(ROWS)]
    with EndpointProcess(calls=0) as endpoint:
        bench = Bench(tmp_path, endpoint, rows)
        bench.temp = disk
        bench.settings |= {"container_backend": backend, "concurrency": "2"}
        code, out, err = bench.run(timeout=WITHIN)
        assert code == 3, out + err
        assert f"stopped early: {disk}, where sandboxes are made, cannot be written: No space left on device\n" in err
        assert "Traceback" not in err
        assert "--resume" in out + err
        assert {row["status"] for row in bench.journal()} <= {"stopped"}
        assert not bench.asked()
        assert not list(disk.glob("batch-sandbox-*"))
        ballast.unlink()
        code, out, err = bench.run("--resume", "--concurrency=1", timeout=WITHIN)
        assert code == 0, out + err
        assert set(bench.asked().values()) == {1}
    assert len(merged(bench.directory)) == ROWS


@pytest.mark.parametrize("flags", [(), ("--json_summary",)], ids=["text", "json"])
def test_a_full_run_directory_is_told_once(flags: tuple[str, ...], disk: Path, tmp_path: Path) -> None:
    ballast, count = disk / "ballast", 20
    ballast.write_bytes(b"x" * 1_700_000)
    rules = [{"message": {"content": "x" * 12_000, "reasoning_content": "So."}}]
    with EndpointProcess(calls=0) as endpoint:
        bench = Bench(tmp_path, endpoint, prompts(count))
        endpoint.set_rules(rules)
        bench.directory = disk / "run"
        bench.settings["concurrency"] = "2"
        code, out, err = bench.run(*flags, timeout=WITHIN)
        assert code == 3, out + err
        assert err.count("cannot be written") == 1, err
        assert f"stopped early: {bench.directory}/batch_" in err
        assert any(line.endswith(" --resume") for line in (out + err).splitlines())
        done = len(bench.ended())
        assert 0 < done < count
        ballast.unlink()
        asked = bench.asked_by("--resume", "--concurrency=1")
        assert asked.total() == count - done
    assert len(merged(bench.directory)) == count


@pytest.mark.parametrize("backend", ["local", "bubblewrap"])
def test_files_that_cannot_be_placed_on_a_disk_with_room_end_their_row_alone(
    backend: str, disk: Path, tmp_path: Path
) -> None:
    first, *others = prompts(ROWS)
    with EndpointProcess(calls=0) as endpoint:
        bench = Bench(tmp_path, endpoint, [{**first, "files": {"a": "x", "a/b": "x"}}, *others])
        bench.temp = disk
        bench.settings |= {"container_backend": backend, "concurrency": "2"}
        code, out, err = bench.run(timeout=WITHIN)
        assert code == 1, out + err
    assert bench.last_tries()["row0"]["error_class"] == "setup_failed"
    assert len(merged(bench.directory)) == ROWS - 1
