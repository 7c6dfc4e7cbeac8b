import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.errors import RunStopped
from agent.row import Row, Turn, decode_row, encode_row
from batch.dataset import BadRow, Dataset
from batch.facts import MergePolicy
from batch.index import scan_journal
from batch.store import RunDirectory
from batch.summary import RunSummary, SummaryOptions, finalize
from tests.unit.made import THOUGHTLESS, dataset_of, read_lines, row_of_job, write_batch

THOUGHTLESS_TURNS = [Turn("system", "s"), Turn("human", "h"), Turn("gpt", THOUGHTLESS)]
NO_TURNS = [Turn("system", "s"), Turn("human", "h")]
OPTIONS = SummaryOptions(run_name="r", distribution="default", model="m", batch_size=10, duration_seconds=12.345)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def merge(
    directory: RunDirectory,
    dataset: Dataset,
    *,
    order: Sequence[int] | None = None,
    samples: int = 1,
    policy: MergePolicy | None = None,
    **options: Any,
) -> RunSummary:
    order = range(len(dataset)) if order is None else order
    index = scan_journal(directory, dataset, order, samples=samples, policy=policy)
    try:
        return finalize(directory, index, msgspec.structs.replace(OPTIONS, **options))
    finally:
        index.close()


def merged(directory: RunDirectory) -> list[dict[str, Any]]:
    return read_lines(directory.trajectories_path)


def test_rows_stand_in_dataset_order_as_they_were_written(directory: RunDirectory, tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "d", [{"prompt": str(n)} for n in range(24)])
    rows = [row_of_job(dataset.job(n), n // 2) for n in range(24)]
    for number in range(12):
        write_batch(directory, number, reversed(rows[2 * number : 2 * number + 2]))
    summary = merge(directory, dataset, order=list(reversed(range(24))))
    assert directory.trajectories_path.read_bytes() == b"".join(map(encode_row, rows))
    assert (summary.kept, summary.counts.completed) == (24, 24)


def test_positions_and_names_are_those_of_the_present_dataset(directory: RunDirectory, tmp_path: Path) -> None:
    before = dataset_of(tmp_path / "a", [{"prompt": f"p{n}"} for n in range(12)] + [{"prompt": "q", "id": "task_x"}])
    trap = ',"task_id":"task_11",'
    rows = [row_of_job(before.job(n), final_response=trap, dataset_row=json.dumps({"t": trap})) for n in range(13)]
    write_batch(directory, 0, rows)
    after = dataset_of(
        tmp_path / "b", [{"prompt": "q", "id": "task_x"}, {"prompt": "p11"}, {"prompt": "new"}, {"prompt": "p0"}]
    )
    summary = merge(directory, after)
    expected = [(12, 0, "task_x"), (11, 1, "task_1"), (0, 3, "task_3")]
    assert [decode_row(line) for line in directory.trajectories_path.read_bytes().splitlines()] == [
        msgspec.structs.replace(rows[old], prompt_index=new, task_id=name) for old, new, name in expected
    ]
    assert summary.statistics["filtered"] == {"not_in_dataset": 10}
    assert summary.counts.pending == 1
    assert summary.metrics["api_calls"] == 2 * 13


ENDS: list[dict[str, Any]] = [
    {},
    {"status": "max_turns", "reason": "max_turns"},
    {"status": "timeout", "reason": "timeout"},
    {"status": "partial", "reason": "truncated"},
    {"status": "discarded", "end_status": "completed", "reason": "no_reasoning", "conversations": THOUGHTLESS_TURNS},
    {
        "status": "discarded",
        "end_status": "partial",
        "reason": "unknown_tool",
        "unknown_tools": '[{"name":"x","count":1}]',
    },
    {
        "status": "failed",
        "reason": "model_error",
        "error_class": "model_error",
        "error": "e" * 999,
        "conversations": NO_TURNS,
    },
    {"status": "stopped", "reason": "budget"},
]


@pytest.mark.parametrize(
    ("policy", "kept", "filtered"),
    [
        (MergePolicy(), [0, 1, 2, 3], {"failed": 1, "no_reasoning": 1, "unknown_tool": 1}),
        (
            MergePolicy(save_all=False),
            [0],
            {"failed": 1, "max_turns": 1, "no_reasoning": 1, "partial": 1, "timeout": 1, "unknown_tool": 1},
        ),
        (MergePolicy(keep_no_reasoning=True), [0, 1, 2, 3, 4], {"failed": 1, "unknown_tool": 1}),
        (MergePolicy(keep_no_reasoning=True, keep_unknown_tools=True), [0, 1, 2, 3, 4, 5], {"failed": 1}),
    ],
)
def test_what_the_policy_keeps(
    directory: RunDirectory, tmp_path: Path, policy: MergePolicy, kept: list[int], filtered: dict[str, int]
) -> None:
    dataset = dataset_of(tmp_path / "d", [{"prompt": str(n)} for n in range(9)])
    write_batch(directory, 0, [row_of_job(dataset.job(n), **end) for n, end in enumerate(ENDS)])
    summary = merge(directory, dataset, policy=policy)
    rows = merged(directory)
    assert [row["prompt_index"] for row in rows] == kept
    assert [row["status"] for row in rows] == [
        ENDS[n].get("end_status", ENDS[n].get("status", "completed")) for n in kept
    ]
    assert all(row["reason"] not in ("no_reasoning", "unknown_tool") for row in rows)
    assert summary.statistics["filtered"] == filtered
    left_out = read_lines(directory.failures_path)
    assert [line["task_id"] for line in left_out] == [f"task_{n}" for n in range(7) if n not in kept]
    assert left_out[-1] == {
        "task_id": "task_6",
        "sample_index": 0,
        "status": "failed",
        "reason": "model_error",
        "error_class": "model_error",
        "error": "e" * 200,
    }
    statuses = summary.statistics["by_status"]
    assert sum(statuses.values()) == 8
    assert statuses.get("discarded", 0) == filtered.get("no_reasoning", 0) + filtered.get("unknown_tool", 0)
    assert (summary.metrics["rows"], summary.metrics["tries"]) == (7, 8)


def test_rows_kept_under_one_policy_leave_under_another(directory: RunDirectory, tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "d", [{"prompt": "a"}, {"prompt": "b"}])
    write_batch(directory, 0, [row_of_job(dataset.job(0), conversations=THOUGHTLESS_TURNS), row_of_job(dataset.job(1))])
    summary = merge(directory, dataset, output_format=("json",))
    assert [row["prompt_index"] for row in merged(directory)] == [1]
    assert summary.statistics["by_status"] == {"completed": 1, "discarded": 1}
    assert json.loads((directory.tasks_path / "task_0.json").read_bytes())["status"] == "discarded"
    assert merge(directory, dataset, policy=MergePolicy(keep_no_reasoning=True)).kept == 2


def test_the_last_kept_try_stands_even_if_a_later_one_failed(directory: RunDirectory, tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "d", [{"prompt": "a"}])
    write_batch(directory, 0, [row_of_job(dataset.job(0), status="partial", final_response="one")])
    write_batch(directory, 1, [row_of_job(dataset.job(0, attempt=2), 1, status="timeout", final_response="two")])
    write_batch(directory, 2, [row_of_job(dataset.job(0, attempt=3), 2, status="failed")])
    summary = merge(directory, dataset, output_format=("json",))
    assert [row["final_response"] for row in merged(directory)] == ["two"]
    assert summary.statistics["by_status"] == {"failed": 1}
    assert read_lines(directory.failures_path) == []
    assert json.loads((directory.tasks_path / "task_0.json").read_bytes())["final_response"] == "two"
    assert summary.statistics["tool_statistics"]["terminal"]["count"] == 1
    assert summary.metrics["cost_usd"] == 1.5


@pytest.mark.parametrize(("save_all", "names"), [(True, {"task_0.json", "task_1.json"}), (False, {"task_0.json"})])
def test_failed_tasks_have_a_file_if_all_are_saved(
    directory: RunDirectory, tmp_path: Path, save_all: bool, names: set[str]
) -> None:
    dataset = dataset_of(tmp_path / "d", [{"prompt": str(n)} for n in range(3)])
    ends: list[dict[str, Any]] = [{}, {"status": "failed", "conversations": NO_TURNS}, {"status": "stopped"}]
    write_batch(directory, 0, [row_of_job(dataset.job(n), **end) for n, end in enumerate(ends)])
    merge(directory, dataset, policy=MergePolicy(save_all=save_all), output_format=("json",))
    assert {path.name for path in directory.tasks_path.iterdir()} == names


def test_a_judge_gives_new_verdicts(directory: RunDirectory, tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "d", [{"prompt": "a"}, {"prompt": "b"}])
    write_batch(directory, 0, [row_of_job(dataset.job(n)) for n in range(2)])

    def judge(row: Row) -> Row:
        return msgspec.structs.replace(row, success=row.prompt_index == 1, success_reason="judged anew")

    summary = merge(directory, dataset, judge=judge)
    assert [(row["success"], row["success_reason"]) for row in merged(directory)] == [
        (False, "judged anew"),
        (True, "judged anew"),
    ]
    assert summary.metrics["success_rate"] == 0.5


def test_statistics_hold_the_fields_of_the_reference_system_and_ours(directory: RunDirectory, tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "d", [{"prompt": "a"}, {"prompt": "b"}])
    write_batch(directory, 0, [row_of_job(dataset.job(0))])
    merge(directory, dataset, skipped_rows=3, skipped=(BadRow(7, "not JSON"),))
    told = json.loads(directory.statistics_path.read_bytes())
    assert list(told) == [
        "run_name",
        "distribution",
        "total_prompts",
        "total_batches",
        "batch_size",
        "model",
        "completed_at",
        "duration_seconds",
        "tool_statistics",
        "reasoning_statistics",
        "inner_tool_statistics",
        "by_status",
        "by_reason",
        "filtered",
        "unknown_tools",
        "tools_offered",
        "expected_tools",
        "redactions",
        "skipped_rows",
        "foreign_lines",
    ]
    assert (told["total_prompts"], told["total_batches"], told["duration_seconds"]) == (2, 1, 12.35)
    assert told["skipped_rows"] == {"count": 3, "rows": [{"line": 7, "reason": "not JSON"}]}
    assert json.loads(directory.metrics_path.read_bytes())["completed"] == 1
    assert json.loads(directory.checkpoint_path.read_bytes())["completed_tasks"] == 1


def test_a_run_of_nothing_has_all_its_files(directory: RunDirectory, tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "d", [{"prompt": "a"}])
    summary = merge(directory, dataset, output_format=("json", "jsonl", "turns"))
    assert (summary.kept, merged(directory), read_lines(directory.failures_path)) == (0, [], [])
    assert summary.metrics["turns"] == {"mean": 0.0, "p50": 0.0, "p95": 0.0}
    assert not list(directory.path.glob("**/*.tmp"))


def test_a_merge_that_brings_nothing_new_writes_no_trajectory_again(directory: RunDirectory, tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "d", [{"prompt": "a"}, {"prompt": "b"}])
    write_batch(directory, 0, [row_of_job(dataset.job(0)), row_of_job(dataset.job(1), status="failed")])
    files = (directory.trajectories_path, directory.failures_path)
    merge(directory, dataset)
    before = [(path.stat().st_ino, path.read_bytes()) for path in files]
    merge(directory, dataset)
    assert [(path.stat().st_ino, path.read_bytes()) for path in files] == before
    directory.trajectories_path.write_bytes(before[0][1].replace(b"done", b"d0ne"))
    merge(directory, dataset)
    assert [path.read_bytes() for path in files] == [content for _, content in before]


def test_a_full_disk_leaves_the_files_of_before(directory: RunDirectory, tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "d", [{"prompt": "a"}])
    write_batch(directory, 0, [row_of_job(dataset.job(0))])
    merge(directory, dataset)
    before = directory.trajectories_path.read_bytes()
    write_batch(directory, 1, [row_of_job(dataset.job(0, attempt=2), 1, final_response="another")])
    (directory.path / "trajectories.jsonl.tmp").symlink_to("/dev/full")
    with pytest.raises(RunStopped, match="No space left"):
        merge(directory, dataset)
    assert directory.trajectories_path.read_bytes() == before


# --- any interleaving

ROWS, SAMPLES = 4, 2
STATUSES = ["completed", "partial", "timeout", "failed", "stopped"]
TRIES = st.lists(
    st.tuples(st.integers(0, ROWS - 1), st.integers(0, SAMPLES - 1), st.sampled_from(STATUSES), st.integers(0, 2)),
    max_size=25,
)


@pytest.fixture(scope="module")
def rows_of_two_kinds(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    rows = [{"prompt": "same"}, {"prompt": "same"}, {"prompt": "c", "id": "c"}, {"prompt": "same"}]
    return dataset_of(tmp_path_factory.mktemp("d") / "d", rows)


@settings(max_examples=80, deadline=None)
@given(tries=TRIES, save_all=st.booleans(), cuts=st.sets(st.integers(0, 25), max_size=3))
def test_each_row_stands_once_in_order_whatever_happened(
    rows_of_two_kinds: Dataset, tries: list[tuple[int, int, str, int]], save_all: bool, cuts: set[int]
) -> None:
    """Tries spread over batch files of several invocations, each ended by a kill that tears the file it writes."""
    dataset, policy = rows_of_two_kinds, MergePolicy(save_all=save_all)
    kept: dict[tuple[int, int], str] = {}
    with TemporaryDirectory() as folder:
        directory = RunDirectory(Path(folder))
        first = 0
        for number, (row, sample, status, batch) in enumerate(tries):
            if number in cuts:
                torn = directory.batch_path(first)
                torn.write_bytes((torn.read_bytes() if torn.exists() else b"") + b'{"prompt_index":1,"conv')
                directory.mend()
                first = directory.next_batch_number()
            index = scan_journal(directory, dataset, range(ROWS), samples=SAMPLES)
            made = row_of_job(index.next_job(row, sample), first + batch, status=status, final_response=f"try {number}")
            index.close()
            directory.append(first + batch, encode_row(made))
            if policy.keeps(status):
                kept[row, sample] = f"try {number}"
        summary = merge(directory, dataset, samples=SAMPLES, policy=policy)
        found = [(row["prompt_index"], row["sample_index"], row["final_response"]) for row in merged(directory)]
        assert found == [(*slot, kept[slot]) for slot in itertools.product(range(ROWS), range(SAMPLES)) if slot in kept]
        assert (summary.kept, summary.metrics["tries"]) == (len(kept), len(tries))
