"""No room where sandboxes are made: the run stops early and says where; each row is still to be run."""

from pathlib import Path

import pytest

from agent.errors import RunStopped
from tests.contract.environments import open_sandbox
from tests.contract.toolbox import open_toolbox
from tests.e2e.bench import Bench, prompts
from tests.e2e.program import merged
from tests.endpoint import EndpointProcess, tool_call
from tests.unit.test_conversation import DONE, Named, Stage, call, calls
from tools.environments.base import Environment
from tools.errors import DiskFull, ToolError

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


def asking(name: str, **arguments: object) -> dict[str, object]:
    """A reply that calls one tool."""
    return {"content": "", "reasoning_content": "So.", "tool_calls": [tool_call(name, arguments)]}


@pytest.mark.parametrize("backend", ["local", "bubblewrap"])
@pytest.mark.parametrize("quiet", ["", " 2>/dev/null"], ids=["told by the command", "told by the file"])
def test_an_agent_that_fills_the_disk_stops_the_run(backend: str, quiet: str, disk: Path, tmp_path: Path) -> None:
    fills = asking("terminal", command=f"cat /dev/zero >fill{quiet}; : >y.txt")
    with EndpointProcess(calls=0) as endpoint:
        bench = Bench(tmp_path, endpoint, prompts(3))
        bench.temp = disk
        bench.settings |= {"container_backend": backend, "concurrency": "1", "enabled_toolsets": "terminal,file"}
        endpoint.set_rules(
            [{"turn": 1, "message": fills}, {"turn": 2, "message": asking("write_file", path="y.txt", content="y")}]
        )
        code, out, err = bench.run(timeout=WITHIN)
        assert code == 3, out + err
        assert f"stopped early: {disk}, where sandboxes are made, cannot be written: No space left on device\n" in err
        assert {(row["status"], row["reason"]) for row in bench.journal()} == {("stopped", "disk")}
        assert not list(disk.glob("batch-sandbox-*"))
        endpoint.set_rules([])
        code, out, err = bench.run("--resume", timeout=WITHIN)
        assert code == 0, out + err
    assert len(merged(bench.directory)) == 3


async def test_a_terminal_and_a_patch_tell_of_it_too(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(disk))
    async with open_toolbox("disk") as call:
        await call.environment.write("a.txt", b"a\n")
        await call.shell("cat /dev/zero >fill 2>/dev/null || :")
        with pytest.raises(DiskFull, match=str(disk)):
            await call("terminal", command="cat /dev/zero >>fill", pty=True)
        with pytest.raises(DiskFull, match=str(disk)):
            await call("patch", path="a.txt", old_string="a", new_string="b" * 10_000)
        started = await call("terminal", command="cat /dev/zero >>fill", background=True)
        with pytest.raises(DiskFull, match=str(disk)):
            await call("process", action="wait", session_id=started["session_id"])
        await call.environment.delete("fill")
        told = await call("terminal", command="echo No space left on device")
        assert told["output"] == "No space left on device\n"


async def test_a_result_that_finds_no_room_stops_the_run(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(disk))
    long = {"text": "x" * 200_000}
    async with open_toolbox("disk") as toolbox:
        await toolbox.shell("cat /dev/zero >fill 2>/dev/null || :")
        conversation = Stage(toolbox.context, tmp_path).open(
            [calls(call("give", "c")), DONE], tools=[Named("give", lambda _: long)]
        )
        with pytest.raises(RunStopped, match=str(disk)) as stopped:
            await conversation.run()
        assert stopped.value.reason == "disk"


@pytest.mark.parametrize("backend", ["local", "bubblewrap"])
async def test_another_disk_that_is_full_is_told_to_the_agent(backend: str, disk: Path) -> None:
    volumes = () if backend == "local" else (f"{disk}:/full",)
    place = disk if backend == "local" else "/full"
    async with open_sandbox(backend, volumes=volumes) as environment:
        ended = await environment.run(f"cat /dev/zero >{place}/fill", timeout=60)
        assert "No space left on device" in ended.output
        assert await _refusal(environment, f"{place}/fill") == f"{place}/fill: no space left on device"
        assert await _refusal(environment, f"{place}/new/file") == f"{place}/new/file: no space left on device"


async def _refusal(environment: Environment, path: str) -> str:
    with pytest.raises(ToolError) as refused:
        await environment.write(path, b"x" * 3_000_000)
    return str(refused.value)


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
