"""Runs with pictures: the model that looks at them, what it costs, and what happens when it cannot be had."""

import base64
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.against import Ran, called, results_of, run_against, said, script
from tests.e2e.program import Program, journal, run_program, statistics, wait_until, write_dataset
from tests.endpoint import EndpointProcess, tool_call
from tests.picture_service import PictureServiceProcess, png

PNG = png(40, 30)
URL = "data:image/png;base64," + base64.b64encode(PNG).decode()
KEY = "vision-key-1234567"
TOOLS = "--enabled_toolsets=vision,terminal"


def row(prompt: str) -> dict[str, Any]:
    files = {"a.png": {"base64": base64.b64encode(PNG).decode()}}
    return {"id": prompt, "prompt": prompt, "files": files}


def looks(prompt: str, times: int = 1) -> list[dict[str, Any]]:
    """The rules of a model that looks so often, all at once, then says so."""
    call = {"image_url": "a.png", "question": f"what is in {prompt}?"}
    calls = [tool_call("vision_analyze", call, f"call_{number}") for number in range(times)]
    return script(prompt, called(*calls), then=said(f"seen {prompt}", reasoning_content="I saw it."))


def metrics(ran: Ran) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ran.directory / "metrics.json").read_bytes())
    return found


def test_an_eye_of_its_own_is_counted_and_leaves_text_only(tmp_path: Path) -> None:
    prompts = [f"row {number}" for number in range(4)]
    rules = [rule for prompt in prompts for rule in looks(prompt, 2)]
    answer = {"message": {"content": f"a cat, and {KEY}"}, "usage": {"prompt_tokens": 1000, "completion_tokens": 7}}
    limits: list[dict[str, Any]] = [
        {"times": 2, "status": 429, "headers": {"retry-after-ms": "100"}},
        {"status": 500, "times": 1},
    ]
    with EndpointProcess(rules) as endpoint, EndpointProcess([*limits, {"key": KEY, **answer}]) as eye:
        flags = [TOOLS, "--vision_model=see", f"--vision_base_url={eye.url}", f"--vision_api_key={KEY}"]
        ran = run_against(endpoint.url, tmp_path, [row(prompt) for prompt in prompts], *flags, "--num_workers=2")
        own, seen = endpoint.stats(), eye.stats()
    assert ran.code == 0, ran.err
    assert seen["statuses"]["200"] == 8
    assert seen["statuses"]["429"] == 2
    assert own["requests"] == 8
    shown = seen["bodies"][-1]["messages"]
    assert shown[0]["content"][1] == {"type": "image_url", "image_url": {"url": URL}}
    assert "tools" not in seen["bodies"][-1]
    for each in ran.rows.values():
        result = {"success": True, "analysis": "a cat, and [REDACTED:BATCH_RUNNER_VISION_API_KEY]"}
        assert results_of(each) == [result] * 2
        assert (each["api_calls"], each["usage"]["total_tokens"]) == (2, 2 * 110 + 2 * 1007)
        assert "base64," not in json.dumps(each["conversations"])
    assert sum(each["requests"] for each in ran.rows.values()) == own["requests"] + seen["requests"]
    assert metrics(ran)["requests"] == own["requests"] + seen["requests"]
    assert statistics(ran.directory)["tool_statistics"]["vision_analyze"]["success"] == 8
    assert KEY.encode() not in ran.bytes()


def test_an_eye_may_spend_the_budget(tmp_path: Path) -> None:
    rules = [*looks("one"), *looks("two")]
    usage = {"prompt_tokens": 5000, "completion_tokens": 1, "total_tokens": 5001}
    with EndpointProcess(rules) as endpoint, EndpointProcess([{"message": {"content": "x"}, "usage": usage}]) as eye:
        flags = [TOOLS, "--vision_model=see", f"--vision_base_url={eye.url}", "--max_total_tokens=5000"]
        ran = run_against(endpoint.url, tmp_path, [row("one"), row("two")], *flags, "--concurrency=1")
        asked = endpoint.stats()["requests"] + eye.stats()["requests"]
    assert ran.code == 3, ran.err
    assert (ran.rows["one"]["status"], ran.rows["one"]["reason"]) == ("stopped", "budget")
    assert ran.rows["one"]["requests"] == asked == 2
    assert "two" not in ran.rows
    assert "budget" in ran.err


def test_an_eye_that_refuses_ends_no_run(tmp_path: Path) -> None:
    prompts = [f"row {number}" for number in range(4)]
    rules = [rule for prompt in prompts for rule in looks(prompt)]
    with EndpointProcess(rules) as endpoint, EndpointProcess([{"status": 401}]) as eye:
        flags = [TOOLS, "--vision_model=see", f"--vision_base_url={eye.url}", "--vision_api_key=wrong-key-123456"]
        ran = run_against(endpoint.url, tmp_path, [row(prompt) for prompt in prompts], *flags, "--concurrency=1")
        asked, refused = endpoint.stats()["requests"], eye.stats()["requests"]
    assert ran.code == 0, ran.err
    assert {each["status"] for each in ran.rows.values()} == {"completed"}
    assert all("cannot be had: HTTP 401" in results_of(each)[0]["error"] for each in ran.rows.values())
    assert (asked, refused) == (8, 1)
    assert metrics(ran)["requests"] == asked + refused
    assert ran.err.count("pictures can no longer be looked at: HTTP 401") == 1


def test_looks_that_are_cut_off_or_tried_again_are_counted(tmp_path: Path) -> None:
    rules = [*looks("slow"), *looks("late"), *looks("fine")]
    eye_rules: list[dict[str, Any]] = [
        {"prompt": "slow", "stall": True},
        {"prompt": "late", "status": 500},
        {"message": {"content": " "}},
    ]
    with EndpointProcess(rules) as endpoint, EndpointProcess(eye_rules) as eye:
        flags = [TOOLS, "--vision_model=see", f"--vision_base_url={eye.url}", "--request_retries=2"]
        rows = [{**row("slow"), "timeout_seconds": 1.5}, row("late"), row("fine")]
        ran = run_against(endpoint.url, tmp_path, rows, *flags)
        asked, seen = endpoint.stats()["requests"], eye.stats()["requests"]
    assert ran.code == 0, ran.err
    assert [ran.rows[name]["requests"] for name in ("slow", "late", "fine")] == [2, 4, 3]
    assert metrics(ran)["requests"] == asked + seen == 9
    assert ran.rows["slow"]["status"] == "timeout"
    assert "gave no answer: HTTP 500" in results_of(ran.rows["late"])[0]["error"]
    assert "empty answer" in results_of(ran.rows["fine"])[0]["error"]


def test_the_runs_own_model_looks_and_may_be_blind(tmp_path: Path) -> None:
    blind = {"error": {"message": "No endpoints found that support image input", "code": 404}}
    rules: list[dict[str, Any]] = [
        {"has": '"type":"image_url"', "prompt": "what is in one", "message": {"content": "a cat"}},
        {"has": '"type":"image_url"', "status": 404, "body": blind},
        *looks("one"),
        *looks("two"),
        *looks("three"),
    ]
    with EndpointProcess(rules) as endpoint:
        rows = [row("one"), row("two"), row("three")]
        ran = run_against(endpoint.url, tmp_path, rows, TOOLS, "--concurrency=1", "--rpm=1000")
        stats = endpoint.stats()
    assert ran.code == 0, ran.err
    assert results_of(ran.rows["one"]) == [{"success": True, "analysis": "a cat"}]
    for name in ("two", "three"):
        assert results_of(ran.rows[name])[0]["success"] is False
        assert "support image input" in results_of(ran.rows[name])[0]["error"]
    assert stats["requests"] == metrics(ran)["requests"] == 9
    assert {each["status"] for each in ran.rows.values()} == {"completed"}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--model=scripted:SCRIPT", "--base_url="], "a model that sees pictures: give --vision_model"),
        (["--vision_model=openai:gpt-4o"], "OPENAI_API_KEY, or give vision_api_key"),
        (["--vision_model=see", "--max_cost=1", "--model=gpt-4o"], "the price of see is not known"),
    ],
)
def test_what_is_missing_is_found_before_anything_is_spent(tmp_path: Path, flags: list[str], told: str) -> None:
    (tmp_path / "s.yaml").write_text("default: {turns: [{content: done}]}")
    flags = [flag.replace("SCRIPT", str(tmp_path / "s.yaml")) for flag in flags]
    with EndpointProcess() as endpoint:
        ran = run_against(endpoint.url, tmp_path, [row("one")], TOOLS, *flags)
        assert endpoint.stats()["requests"] == 0
    assert ran.code == 2, ran.err
    assert told in ran.err


def test_a_script_may_have_a_scripted_eye_and_makes_pictures(tmp_path: Path) -> None:
    steps = [
        {"name": "image_generate", "arguments": {"prompt": "a cat", "aspect_ratio": "square"}},
        {"name": "terminal", "arguments": {"command": "mv generated_1_*.png made.png"}},
        {"name": "vision_analyze", "arguments": {"image_url": "made.png", "question": "what?"}},
    ]
    turns = [{"reasoning": "On it.", "tool_calls": [step]} for step in steps]
    script_file, eye_file = tmp_path / "s.yaml", tmp_path / "eye.yaml"
    script_file.write_text(json.dumps({"default": {"turns": [*turns, {"content": "done"}]}}))
    usage = {"input_tokens": 70, "output_tokens": 7}
    eye_file.write_text(json.dumps({"default": {"turns": [{"content": "a red square", "usage": usage}]}}))
    rows = write_dataset(tmp_path / "d.jsonl", [{"id": f"r/{n}", "prompt": f"go {n}"} for n in range(2)])
    with PictureServiceProcess() as service:
        code, _, err = run_program(
            *(f"--model=scripted:{script_file}", f"--vision_model=scripted:{eye_file}", f"--dataset_file={rows}"),
            *(f"--image_base_url={service.url}", "--enabled_toolsets=vision,image_gen,terminal", "--run_name=r"),
            *("--container_backend=local", "--output_dir=out", "--num_workers=0"),
            home=tmp_path,
        )
        assert service.stats()["requests"] == 2
    assert code == 0, err
    for each in journal(tmp_path / "out/r"):
        made, moved, seen = results_of(each)
        assert (made["success"], moved["exit_code"]) == (True, 0)
        assert seen == {"success": True, "analysis": "a red square"}
        assert (each["requests"], each["usage"]["total_tokens"]) == (5, 77)
    kept = sorted(path.relative_to(tmp_path / "out/r/artifacts").parts for path in tmp_path.rglob("artifacts/*/*"))
    assert [folder for folder, _ in kept] == ["r%2F0", "r%2F1"]


@pytest.mark.parametrize("workers", [0, 1])
def test_pictures_that_cannot_be_kept_stop_the_run_which_goes_on_once_they_can(tmp_path: Path, workers: int) -> None:
    run = tmp_path / "out/r"
    in_the_way = f"test -e {tmp_path}/mended || printf x >{run}/artifacts"
    steps = [
        {"name": "terminal", "arguments": {"command": in_the_way}},
        {"name": "image_generate", "arguments": {"prompt": "a cat", "aspect_ratio": "square"}},
    ]
    turns = [*({"reasoning": "On it.", "tool_calls": [step]} for step in steps), {"content": "done"}]
    (tmp_path / "s.yaml").write_text(json.dumps({"default": {"turns": turns}}))
    rows = write_dataset(tmp_path / "d.jsonl", [{"id": f"r{n}", "prompt": f"go {n}"} for n in range(6)])
    with PictureServiceProcess() as service:
        flags = (
            *(f"--model=scripted:{tmp_path / 's.yaml'}", f"--dataset_file={rows}", "--run_name=r", "--concurrency=1"),
            *(f"--image_base_url={service.url}", "--enabled_toolsets=image_gen,terminal", f"--num_workers={workers}"),
            *("--container_backend=local", "--output_dir=out"),
        )
        code, _, err = run_program(*flags, home=tmp_path)
        assert code == 3, err
        assert "stopped early: out/r/artifacts/r0/generated_1_" in err
        assert {each["status"] for each in journal(run)} == {"stopped"}
        assert "cannot be written" not in json.dumps([each["conversations"] for each in journal(run)])
        (run / "artifacts").unlink()
        (tmp_path / "mended").touch()
        code, _, err = run_program(*flags, "--resume", home=tmp_path)
    assert code == 0, err
    assert sorted(path.parent.name for path in run.glob("artifacts/*/*")) == [f"r{n}" for n in range(6)]


def test_a_killed_worker_gives_back_its_place_in_the_eyes_gate(tmp_path: Path) -> None:
    rules = looks("one")
    eye_rules: list[dict[str, Any]] = [{"stall": True, "times": 1}, {"message": {"content": "a cat"}}]
    with EndpointProcess(rules) as endpoint, EndpointProcess(eye_rules) as eye:
        rows = write_dataset(tmp_path / "d.jsonl", [row("one")])
        with Program(
            *("--model=m", f"--base_url={endpoint.url}", f"--dataset_file={rows}", "--run_name=r", TOOLS),
            *("--vision_model=see", f"--vision_base_url={eye.url}", "--concurrency=1", "--num_workers=1"),
            *("--container_backend=local", "--output_dir=out"),
            home=tmp_path,
        ) as program:
            wait_until(lambda: eye.stats()["requests"] == 1)
            endpoint.set_rules(rules[-1:])
            for worker in program.workers():
                os.kill(worker.pid, signal.SIGKILL)
            wait_until(lambda: endpoint.stats()["requests"] >= 2)
            code, _, err = program.end()
    assert code == 0, err
    assert journal(tmp_path / "out/r")[-1]["status"] == "completed"
