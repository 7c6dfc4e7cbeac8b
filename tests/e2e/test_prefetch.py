"""`--prefetch_images`: the images of all rows are there, or known not to be, before the first row starts."""

import asyncio
import subprocess
from pathlib import Path

from tests.contract.image_registry import registry, saved
from tests.e2e.against import called, results_of, run_against, said, script
from tests.e2e.program import journal
from tests.endpoint import EndpointProcess, tool_call


def remove_images(*images: str) -> None:
    subprocess.run(["docker", "rmi", "-f", *images], capture_output=True, check=False)


async def test_all_images_are_pulled_first_and_failures_are_named(tmp_path: Path) -> None:
    asked: list[str] = []
    look = called(tool_call("terminal", {"command": "echo here"}))
    archive = saved("batch-runner-test:box", tmp_path / "box.tar")
    async with registry(archive, asked=asked) as host:
        tags = ("one", "two", "none")
        rows = [{"id": tag, "prompt": tag, "image": f"{host}/box:{tag}"} for tag in (*tags, "two")]
        rows[-1]["id"] = "again"
        flags = ("--container_backend=docker", "--prefetch_images", "--concurrency=1", "--num_workers=1")
        try:
            with EndpointProcess([*script("one", look, said("ok")), *script("two", look, said("ok"))]) as endpoint:
                ran = await asyncio.to_thread(run_against, endpoint.url, tmp_path, rows, *flags)
        finally:
            remove_images(*(f"{host}/box:{tag}" for tag in tags))
    assert ran.code == 1, ran.err
    ended = {row["task_id"]: (row["status"], row["error_class"]) for row in journal(tmp_path / "out" / "r")}
    done = ("completed", "")
    assert ended == {"one": done, "two": done, "again": done, "none": ("failed", "image_unavailable")}
    assert results_of(ran.rows["two"])[0]["output"] == "here\n"
    assert asked.count("two") == asked.count("one"), "each once"
    log = (tmp_path / "out" / "r" / "run.log").read_text().splitlines()
    (warned,) = [number for number, line in enumerate(log) if f"warning: image {host}/box:none: " in line]
    ends = [number for number, line in enumerate(log) if "completed" in line]
    assert warned < min(ends)
