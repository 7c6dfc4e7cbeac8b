"""Resume: what is run again and what is not, whatever became of the files, the dataset and the settings meanwhile."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.bench import Bench, ids, prompts
from tests.e2e.program import merged
from tests.endpoint import EndpointProcess, tool_call

REASONED = {"reasoning_content": "Thinking."}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[EndpointProcess]:
    with EndpointProcess(calls=0) as process:
        yield process


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory, endpoint: EndpointProcess) -> Path:
    """Four rows, two batches, all completed."""
    bench = Bench(tmp_path_factory.mktemp("finished"), endpoint, prompts(4))
    bench.finish("--batch_size=2")
    return bench.directory


@pytest.fixture
def bench(tmp_path: Path, endpoint: EndpointProcess) -> Bench:
    made = Bench(tmp_path, endpoint, prompts(4))
    made.settings |= {"batch_size": "2", "num_workers": "0"}  # without processes of workers it is done in half the time
    return made


@pytest.fixture
def finished(bench: Bench, finished_run: Path) -> Bench:
    """A copy of the finished run: run directories may be moved."""
    shutil.copytree(finished_run, bench.directory)
    bench.endpoint.reset()
    return bench


def drop_row(bench: Bench, batch_num: int, line: int) -> bytes:
    """Takes a row out of the journal, as if it had never ended; its line."""
    path = bench.directory / f"batch_{batch_num}.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:line] + lines[line + 1 :]))
    return lines[line]


# --- damage


@pytest.mark.parametrize(
    "fragment",
    [
        b"{",
        b'{"prompt_index":1,"conv',
        '{"prompt_index":1,"conversations":[{"from":"€'.encode()[:-1],
        b"\x00" * 50,
        b"1",
    ],
    ids=["brace", "half", "half-character", "zeros", "number"],
)
def test_a_torn_tail_is_cut_and_its_row_run_again(fragment: bytes, finished: Bench) -> None:
    line = drop_row(finished, 0, 1)
    path = finished.directory / "batch_0.jsonl"
    good = path.read_bytes()
    path.write_bytes(good + fragment)
    assert finished.asked_by("--resume") == {json.loads(line)["conversations"][1]["value"]: 1}
    assert path.read_bytes() == good
    assert fragment in (finished.directory / "batch_0.jsonl.torn").read_bytes()
    assert ids(merged(finished.directory)) == [f"row{number}" for number in range(4)]


def test_a_whole_row_without_its_newline_is_kept(finished: Bench) -> None:
    path = finished.directory / "batch_1.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert not finished.asked_by("--resume")
    assert path.read_bytes() == whole
    assert len(merged(finished.directory)) == 4


@pytest.mark.parametrize("left", ["", "half", "garbage", "missing"])
def test_a_damaged_checkpoint_costs_nothing(left: str, finished: Bench) -> None:
    path = finished.directory / "checkpoint.json"
    whole = path.read_bytes()
    if left == "missing":
        path.unlink()
    else:
        path.write_bytes({"": b"", "half": whole[: len(whole) // 2], "garbage": b"\xff[]"}[left])
    drop_row(finished, 1, 1)
    assert finished.asked_by("--resume").total() == 1
    found = finished.read("checkpoint.json")
    assert (found["completed_tasks"], found["failed_tasks"], found["pending_tasks"], found["total_tasks"]) == (
        4,
        0,
        0,
        4,
    )


def test_left_over_temporary_files_are_removed(finished: Bench) -> None:
    left = finished.directory / "trajectories.jsonl.tmp"
    left.write_bytes(b"{")
    finished.finish("--resume")
    assert not left.exists()


def test_every_derived_file_can_be_made_anew_from_the_journal(finished: Bench) -> None:
    derived = ("trajectories.jsonl", "statistics.json", "metrics.json", "failures.jsonl", "checkpoint.json")
    before = {name: (finished.directory / name).read_bytes() for name in derived}
    outcome, metrics = finished.outcome(), finished.read("metrics.json")
    for name in derived:
        (finished.directory / name).unlink()
    assert not finished.asked_by("--finalize")
    assert (finished.directory / "trajectories.jsonl").read_bytes() == before["trajectories.jsonl"]
    assert (finished.directory / "failures.jsonl").read_bytes() == before["failures.jsonl"]
    assert (finished.outcome(), finished.read("metrics.json")) == (outcome, metrics)
    assert finished.read("checkpoint.json")["completed_tasks"] == 4


# --- nothing twice, nothing lost


def test_a_resume_with_nothing_left_still_merges(finished: Bench) -> None:
    whole = (finished.directory / "trajectories.jsonl").read_bytes()
    (finished.directory / "trajectories.jsonl").unlink()
    outcome = finished.outcome()
    assert not finished.asked_by("--resume")
    assert (finished.directory / "trajectories.jsonl").read_bytes() == whole
    assert finished.outcome() == outcome


def test_without_resume_a_directory_with_results_is_refused(finished: Bench) -> None:
    assert "--resume" in finished.finish(code=2)
    assert not finished.asked()


def test_batch_numbers_go_on_and_earlier_batches_keep_their_statistics(bench: Bench) -> None:
    bench.finish("--max_samples=2")
    before = bench.read("checkpoint.json")["batch_stats"]
    first = (bench.directory / "batch_0.jsonl").read_bytes()
    bench.write(prompts(6))
    bench.finish("--resume")
    after = bench.read("checkpoint.json")["batch_stats"]
    assert (bench.directory / "batch_0.jsonl").read_bytes() == first
    assert list(after) == ["0", "1", "2"]
    assert after["0"] == before["0"]
    assert sum(stats["processed"] for stats in after.values()) == 6
    assert {row["metadata"]["batch_num"] for row in bench.journal()} == {0, 1, 2}


def test_statistics_are_those_of_the_whole_run(bench: Bench) -> None:
    usage = {"prompt_tokens": 60, "completion_tokens": 40, "total_tokens": 100}
    bench.endpoint.set_rules([{"message": {"content": "4", **REASONED}, "usage": usage}])
    bench.finish("--max_samples=1")
    bench.finish("--resume", "--max_samples=3")
    bench.finish("--resume")
    metrics = bench.read("metrics.json")
    assert (metrics["rows"], metrics["completed"], metrics["api_calls"], metrics["requests"]) == (4, 4, 4, 4)
    assert metrics["usage"]["total_tokens"] == 400
    assert bench.read("statistics.json")["reasoning_statistics"]["total_assistant_turns"] == 4
    assert len(bench.read("run.json")["invocations"]) == 3


def test_equal_prompts_are_each_run_once(bench: Bench) -> None:
    bench.write([{"prompt": "say hi"}] * 5)
    bench.finish("--max_samples=2")
    assert bench.asked_by("--resume") == {"say hi": 3}
    assert ids(merged(bench.directory)) == [f"task_{number}" for number in range(5)]
    assert len({row["row_key"] for row in bench.journal()}) == 5


def test_samples_may_grow(bench: Bench) -> None:
    bench.finish("--samples_per_prompt=1")
    assert set(bench.asked_by("--resume", "--samples_per_prompt=3").values()) == {2}
    assert Counter(row["sample_index"] for row in merged(bench.directory)) == {0: 4, 1: 4, 2: 4}


def test_discarded_rows_are_not_paid_for_again(bench: Bench) -> None:
    bench.endpoint.set_rules([{"prompt": "row [012]", "message": {"content": "4"}}])
    bench.finish()
    assert not bench.asked_by("--resume")
    assert not bench.asked_by("--resume", "--retry=all")
    assert bench.outcome()["filtered"] == {"no_reasoning": 3}
    assert ids(merged(bench.directory)) == ["row3"]
    assert not bench.asked_by("--finalize", "--keep_no_reasoning")
    assert ids(merged(bench.directory)) == [f"row{number}" for number in range(4)]


# --- which ends are repeated


def answer(content: str = "4", **more: Any) -> dict[str, Any]:
    return {"content": content, **REASONED, **more}


ENDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "final": ({"message": answer()}, "completed", ""),
    "refusal": ({"message": answer("", refusal="I will not.")}, "completed", ""),
    "calls": (
        {"message": answer("", tool_calls=[tool_call("terminal", {"command": "true"})])},
        "max_turns",
        "incomplete",
    ),
    "bad_calls": ({"message": answer("", tool_calls=[tool_call("terminal", "{")])}, "partial", "incomplete"),
    "cut": (
        {"prompt": "", "has": "end cut", "message": answer("and"), "finish_reason": "length"},
        "partial",
        "incomplete",
    ),
    "text_call": (
        {"message": answer('<tool_call>{"name":"terminal","arguments":{"command":"ls"}}</tool_call>')},
        "partial",
        "incomplete",
    ),
    "filter": ({"message": answer("I"), "finish_reason": "content_filter"}, "partial", "incomplete"),
    "slow": ({"turn": 2, "stall": True}, "timeout", "timeout"),
    "bare": ({"message": {"content": "4"}}, "discarded", ""),
    "invented": ({"turn": 1, "message": answer("", tool_calls=[tool_call("fly", {})])}, "discarded", ""),
    "broken": ({"status": 500}, "failed", "failed"),
    "nothing": ({"message": answer("")}, "failed", "failed"),
    "context": (
        {"status": 400, "error": {"message": "maximum context length", "code": "context_length_exceeded"}},
        "failed",
        "all",
    ),
    "flagged": ({"status": 400, "error": {"message": "no such field", "code": "bad_request"}}, "failed", "all"),
    "setup": ({}, "failed", "all"),
}
"""Name of the row -> how the endpoint answers it, its status, the class of `retry` that repeats it."""


def row_of(name: str) -> dict[str, Any]:
    more: dict[str, dict[str, Any]] = {"slow": {"timeout_seconds": 1.5}, "setup": {"setup": "exit 3"}}
    return {"id": name, "prompt": f"end {name}", "max_turns": 4, **more.get(name, {})}


def test_every_end_is_repeated_by_its_class_alone(bench: Bench) -> None:
    bench.write(row_of(name) for name in ENDS)
    call = {"turn": 1, "prompt": "slow", "message": answer("", tool_calls=[tool_call("terminal", {"command": "true"})])}
    bench.endpoint.set_rules(
        [call, *({"prompt": f"^end {name}$", **rule} for name, (rule, _, _) in ENDS.items() if rule)]
    )
    bench.settings |= {"request_retries": "1", "max_attempts": "9"}
    bench.finish(code=1)
    rows = bench.last_tries()
    assert {name: rows[name]["status"] for name in ENDS} == {name: status for name, (_, status, _) in ENDS.items()}
    failed = {name for name, row in rows.items() if row["status"] == "failed"}
    assert {name for name in failed if rows[name]["retryable"]} == {
        n for n, (_, _, by) in ENDS.items() if by == "failed"
    }
    tried = Counter(dict.fromkeys(ENDS, 1))
    for retry in ("none", "failed", "timeout", "incomplete", "all", "failed,timeout"):
        bench.finish("--resume", f"--retry={retry}", code=1)
        classes = set(retry.split(","))
        tried.update(name for name, (_, _, by) in ENDS.items() if by and (by in classes or "all" in classes))
        assert Counter(ids(bench.journal())) == tried, retry


def test_only_ids_runs_these_rows_whatever_their_end(finished: Bench) -> None:
    finished.settings["max_attempts"] = "1"
    assert finished.asked_by("--resume", "--only_ids=row3,row0") == {"row 3": 1, "row 0": 1}
    assert [row["attempt"] for row in finished.journal() if row["task_id"] in ("row0", "row3")] == [1, 1, 2, 2]
    assert ids(merged(finished.directory)) == [f"row{number}" for number in range(4)]
    assert "nobody" in finished.finish("--resume", "--only_ids=nobody", code=2)


def test_after_max_attempts_a_row_stays_failed_until_it_is_asked_for(bench: Bench) -> None:
    bench.write(prompts(1))
    bench.endpoint.set_rules([{"status": 500}])
    bench.settings |= {"request_retries": "1", "max_attempts": "2"}
    bench.finish(code=1)
    assert bench.asked_by("--resume", code=1).total() == 1
    assert not bench.asked_by("--resume", code=1)
    last = bench.last_tries()["row0"]
    assert (last["attempt"], last["status"], last["retryable"], last["error_class"]) == (
        2,
        "failed",
        False,
        "model_error",
    )
    bench.endpoint.set_rules([])
    assert bench.asked_by("--resume", "--max_attempts=3", "--retry=all") == {"row 0": 1}
    assert bench.last_tries()["row0"]["status"] == "completed"
    assert not (bench.directory / "failures.jsonl").read_bytes()


# --- another place, other settings, another dataset


def test_a_run_that_was_moved_goes_on_where_it_is(finished: Bench, tmp_path: Path) -> None:
    line = drop_row(finished, 0, 0)
    finished.directory = finished.directory.rename(tmp_path / "elsewhere")
    moved = tmp_path / "other.jsonl"
    finished.dataset = finished.dataset.rename(moved)
    assert finished.asked_by("--resume") == {json.loads(line)["conversations"][1]["value"]: 1}
    assert ids(merged(finished.directory)) == [f"row{number}" for number in range(4)]
    assert not (tmp_path / "run").exists()


CHANGES = {
    "model": "n",
    "fallback_model": "n",
    "distribution": "science",
    "enabled_toolsets": "file",
    "disabled_toolsets": "search_files",
    "ephemeral_system_prompt": "Be brief.",
    "max_tokens": "100",
    "context_window": "32000",
    "top_p": "0.5",
    "reasoning_disabled": "true",
    "deterministic": "true",
    "seed": "1",
    "shuffle": "true",
    "container_backend": "bubblewrap",
    "cwd": "/tmp",
}


def test_what_shapes_the_data_may_not_change_unnoticed(finished: Bench, tmp_path: Path) -> None:
    prefill = tmp_path / "prefill.json"
    prefill.write_text('[{"role": "user", "content": "hello"}]')
    changes = {**CHANGES, "prefill_messages_file": str(prefill)}
    flags = [f"--{name}={value}" for name, value in changes.items()]
    message = finished.finish("--resume", *flags, code=2)
    assert not [name for name in changes if f"{name}: " not in message]
    assert "--allow_config_change" in message
    other = finished.finish("--resume", "--temperature=0.5", "--reasoning_effort=low", code=2)
    assert "temperature: null -> 0.5" in other
    assert 'reasoning_effort: null -> "low"' in other
    assert "model: " not in other
    assert not finished.asked()


def test_a_change_that_is_allowed_is_recorded(finished: Bench) -> None:
    drop_row(finished, 1, 1)
    finished.finish("--resume", "--model=n", "--temperature=0.5", "--allow_config_change")
    first, second = finished.read("run.json")["invocations"]
    assert (first["changed"], len(second["changed"])) == ([], 2)
    assert finished.read("run.json")["settings"]["model"] == "n"
    assert Counter(row["metadata"]["model"] for row in merged(finished.directory)) == {"m": 3, "n": 1}


def test_how_a_run_is_run_may_change(finished: Bench) -> None:
    drop_row(finished, 1, 1)
    free = (
        "num_workers=2 concurrency=3 batch_size=7 max_attempts=9 retry=all request_retries=9 request_timeout=9 rpm=999"
    )
    more = "timeout=60 max_total_tokens=100000 output_format=sharegpt,turns max_turns=9 checkpoint_interval=1"
    flags = [f"--{each}" for each in f"{free} {more}".split()]
    assert finished.asked_by("--resume", *flags).total() == 1


def test_a_dataset_may_grow_and_be_reordered(bench: Bench) -> None:
    rows = [{"prompt": f"row {number}"} for number in range(4)]
    bench.write(rows)
    bench.finish()
    bench.write([{"prompt": "new"}, *reversed(rows)])
    assert bench.asked_by("--resume") == {"new": 1}
    found = merged(bench.directory)
    assert [row["conversations"][1]["value"] for row in found] == ["new", "row 3", "row 2", "row 1", "row 0"]
    assert [row["prompt_index"] for row in found] == list(range(5))
    assert ids(found) == [f"task_{number}" for number in range(5)]


def test_an_edited_row_without_id_is_a_new_one(bench: Bench) -> None:
    bench.write([{"prompt": "a"}, {"prompt": "b"}])
    bench.finish()
    bench.write([{"prompt": "a"}, {"prompt": "c"}])
    assert bench.asked_by("--resume") == {"c": 1}
    assert [row["conversations"][1]["value"] for row in merged(bench.directory)] == ["a", "c"]
    assert bench.outcome()["filtered"] == {"not_in_dataset": 1}


def test_an_id_with_other_content_is_refused_by_name(finished: Bench) -> None:
    rows = prompts(4)
    rows[2]["prompt"] = "something else"
    finished.write(rows)
    message = finished.finish("--resume", code=2)
    assert "row2" in message
    assert "row1" not in message
    assert finished.asked_by("--resume", "--allow_config_change") == {"something else": 1}
    assert [row["conversations"][1]["value"] for row in merged(finished.directory)][2] == "something else"


def test_resume_of_nothing_starts_the_run(bench: Bench) -> None:
    assert "nothing to resume" in bench.finish("--resume")
    assert len(merged(bench.directory)) == 4


def test_a_damaged_manifest_is_named(finished: Bench) -> None:
    (finished.directory / "run.json").write_bytes(b"{")
    assert "run.json" in finished.finish("--resume", code=2)
