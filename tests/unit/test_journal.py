import asyncio
import contextlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.errors import RunStopped
from agent.row import Row, Turn, encode_row
from agent.types import Spend, Usage
from batch.checkpoint import write_checkpoint
from batch.dataset import Dataset
from batch.facts import MergePolicy, Tried
from batch.index import JournalIndex, scan_journal
from batch.journal import JournalWriter, Place, mend_tail
from batch.messages import PromptEnded
from batch.reading import Found, Reader, Totals, read_files
from batch.statistics import Statistics
from batch.store import RowFiles, RunDirectory, replace_file, replacing
from tests.unit.made import THOUGHTLESS, dataset_of, read_lines, row_of_job, write_batch
from tools.errors import UsageProblem

# --- tails

LINES = [
    json.dumps({"row": n, "text": text}, ensure_ascii=False).encode() for n, text in enumerate(["a", "€ü", "{}\n", ""])
]
CONTENT = b"".join(line + b"\n" for line in LINES)


@given(cut=st.integers(0, len(CONTENT)), zeros=st.integers(0, 3))
def test_a_file_cut_anywhere_keeps_its_whole_rows_and_takes_more(cut: int, zeros: int) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "batch_0.jsonl"
        path.write_bytes(CONTENT[:cut] + b"\0" * zeros)
        mend_tail(path)
        mend_tail(path)
        whole = [
            n
            for n, line in enumerate(LINES)
            if cut >= len(b"\n".join(LINES[: n + 1])) and (zeros == 0 or _ends(n, cut))
        ]
        with path.open("ab") as file:
            file.write(b'{"row":"new"}\n')
        assert [row["row"] for row in read_lines(path)] == [*whole, "new"]
        torn = path.with_name("batch_0.jsonl.torn")
        kept = torn.read_bytes() if torn.exists() else b""
        assert kept == _fragment(cut, zeros)


def _ends(number: int, cut: int) -> bool:
    """Whether the line's newline is there too: with zeros behind it, a row without one is as good as a fragment."""
    return cut > len(b"\n".join(LINES[: number + 1]))


def _fragment(cut: int, zeros: int) -> bytes:
    tail = CONTENT[:cut].rpartition(b"\n")[2] + b"\0" * zeros
    return tail + b"\n" if tail and tail not in LINES else b""


def test_a_fragment_longer_than_what_is_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "batch_0.jsonl"
    path.write_bytes(b'{"row":0}\n{"text":"' + b"x" * 1_000_000)
    assert mend_tail(path).cut == 1_000_009
    assert path.read_bytes() == b'{"row":0}\n'


def test_two_fragments_are_both_kept(tmp_path: Path) -> None:
    path = tmp_path / "batch_0.jsonl"
    for fragment in (b'{"a', b'{"b'):
        path.write_bytes(fragment)
        mend_tail(path)
    assert path.with_name("batch_0.jsonl.torn").read_bytes() == b'{"a\n{"b\n'


# --- writing


async def test_rows_are_on_disk_when_the_future_is_done(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    rows = [(n % 3, b'{"row":%d}\n' % n) for n in range(300)]
    places = await asyncio.gather(*(writer.append(batch_num, row) for batch_num, row in rows))
    for (batch_num, row), place in zip(rows, places, strict=True):
        with (tmp_path / f"batch_{batch_num}.jsonl").open("rb") as file:
            file.seek(place.offset)
            assert file.read(place.length) == row
    writer.close()
    assert sum(len(read_lines(tmp_path / f"batch_{n}.jsonl")) for n in range(3)) == 300


async def test_many_batches_need_few_open_files(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    for n in range(200):
        await writer.append(n % 150, b'{"row":%d}\n' % n)
    assert 0 < open_below(tmp_path) <= 64
    writer.close()
    assert open_below(tmp_path) == 0
    assert [row["row"] for row in read_lines(tmp_path / "batch_7.jsonl")] == [7, 157]


def open_below(folder: Path) -> int:
    return sum(str(folder) in _link(path) for path in Path("/proc/self/fd").iterdir())


def _link(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return str(path.readlink())
    return ""


async def test_the_first_append_mends_what_a_dead_worker_left(tmp_path: Path) -> None:
    (tmp_path / "batch_4.jsonl").write_bytes(b'{"row":0}\n{"row":1,"te')
    writer = JournalWriter(tmp_path)
    assert await writer.append(4, b'{"row":2}\n') == Place(10, 10)
    writer.close()
    assert [row["row"] for row in read_lines(tmp_path / "batch_4.jsonl")] == [0, 2]


async def test_a_full_disk_stops_every_row_from_then_on(tmp_path: Path) -> None:
    (tmp_path / "batch_1.jsonl").symlink_to("/dev/full")
    writer = JournalWriter(tmp_path)
    await writer.append(0, b'{"row":0}\n')
    for batch_num in (1, 0):
        with pytest.raises(RunStopped, match="No space left") as stopped:
            await writer.append(batch_num, b'{"row":1}\n')
        assert stopped.value.reason == "disk"
    writer.close()
    assert [row["row"] for row in read_lines(tmp_path / "batch_0.jsonl")] == [0]


async def test_nothing_is_written_once_it_is_forbidden(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    await writer.append(0, b'{"row":0}\n')
    writer.forbid()
    with pytest.raises(RunStopped, match="owner") as stopped:
        await writer.append(0, b'{"row":1}\n')
    assert stopped.value.reason == "interrupt"
    writer.close()
    assert [row["row"] for row in read_lines(tmp_path / "batch_0.jsonl")] == [0]


async def test_a_row_whose_task_was_cancelled_is_written_all_the_same(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path)
    writer.append(0, b'{"row":0}\n').cancel()
    await writer.append(0, b'{"row":1}\n')
    await asyncio.to_thread(writer.close)
    assert [row["row"] for row in read_lines(tmp_path / "batch_0.jsonl")] == [0, 1]


def test_a_writer_that_never_wrote_has_no_thread(tmp_path: Path) -> None:
    JournalWriter(tmp_path).close()
    assert not [thread for thread in threading.enumerate() if thread.name == "journal"]


# --- the run directory


def test_batch_numbers_go_on_above_every_trace(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    assert (directory.next_batch_number(), directory.holds_results()) == (0, False)
    write_batch(directory, 10, [])
    assert (directory.next_batch_number(), directory.holds_results()) == (11, False)
    directory.append(2, b'{"row":0}\n')
    (directory.path / "batch_12.jsonl.torn").write_bytes(b"x")
    (directory.path / "batch_99.txt").write_bytes(b"x")
    assert (directory.next_batch_number(), directory.batch_numbers()) == (13, [2, 10])
    assert directory.holds_results()


def test_mending_says_what_it_found(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for name, content in [("batch_0.jsonl", b'{"a":1}'), ("batch_1.jsonl", b'{"a'), ("batch_2.jsonl", b'{"a":1}\n')]:
        (tmp_path / name).write_bytes(content)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "a.json.tmp").write_bytes(b"x")
    (tmp_path / "statistics.json.tmp").write_bytes(b"x")
    mending = directory.mend()
    assert (mending.completed, mending.cut) == (("batch_0.jsonl",), ("batch_1.jsonl",))
    assert sorted(mending.removed) == ["statistics.json.tmp", "tasks/a.json.tmp"]
    assert directory.mend().removed == ()


def test_a_derived_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    replace_file(path, [b"one"])
    with pytest.raises(ZeroDivisionError):
        _break_off(path)
    assert [each.name for each in path.parent.iterdir()] == ["file"]
    assert path.read_bytes() == b"one"
    (tmp_path / "full.tmp").symlink_to("/dev/full")
    with pytest.raises(RunStopped, match="No space left"):
        replace_file(tmp_path / "full", [b"x"])
    assert not (tmp_path / "full.tmp").is_symlink()


MANIFEST: dict[str, Any] = {
    "started_at": "2026-01-01T00:00:00.000Z",
    "backend": "local",
    "settings": {"model": "m"},
    "dataset": {"path": "prompts.jsonl"},
    "invocations": [{"started_at": "2026-01-01T00:00:00.000Z", "seconds": 1, "end": ""}],
}


def _break_off(path: Path) -> None:
    with replacing(path) as file:
        file.write(b"tw")
        raise ZeroDivisionError


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.read_manifest() is None
    directory.write_manifest(MANIFEST)
    assert directory.read_manifest() == MANIFEST
    for damaged in (b'{"run_', b"{}", b"[]", b"[" * 100_000, json.dumps({**MANIFEST, "settings": 5}).encode()):
        directory.manifest_path.write_bytes(damaged)
        with pytest.raises(UsageProblem, match=r"run\.json is damaged"):
            directory.read_manifest()


@pytest.mark.parametrize(
    "told", [b"{}", b'{"last_checkpoint_at":"soon"}', b'{"x":' * 100_000, b'{"last_checkpoint_at"']
)
def test_a_damaged_checkpoint_tells_no_time(told: bytes, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.checkpoint_path.write_bytes(told)
    assert directory.last_checkpoint_at() == ""
    directory.checkpoint_path.write_bytes(b'{"last_checkpoint_at":"2026-01-01T00:00:00.000Z"}')
    assert directory.last_checkpoint_at() == "2026-01-01T00:00:00.000Z"


def test_a_folder_that_ends_in_tmp_is_the_users(tmp_path: Path) -> None:
    (tmp_path / "mine.tmp").mkdir()
    (tmp_path / "half.tmp").touch()
    (tmp_path / "dangling.tmp").symlink_to("nowhere")
    assert sorted(RunDirectory(tmp_path).mend().removed) == ["dangling.tmp", "half.tmp"]
    assert [path.name for path in tmp_path.iterdir()] == ["mine.tmp"]


def test_a_folder_in_the_place_of_a_half_made_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file.tmp").mkdir()
    with pytest.raises(RunStopped, match="file cannot be written: Is a directory"):
        replace_file(tmp_path / "file", [b"x"])


def test_rows_are_read_by_place_with_few_open_files(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    places = [directory.append(n, b'{"row":%d,"text":"%s"}\n' % (n, b"x" * 20_000)) for n in range(20)]
    with RowFiles(directory.batch_path, open_files=3) as files:
        for n in (*range(20), 0, 19):
            assert json.loads(files.line(n, places[n].offset))["row"] == n


# --- the index

ENDS = {
    # status, retryable: what each class of retry does with it
    ("completed", False): set(),
    ("max_turns", False): {"incomplete", "all"},
    ("timeout", False): {"timeout", "all"},
    ("partial", False): {"incomplete", "all"},
    ("discarded", False): set(),
    ("failed", True): {"failed", "all"},
    ("failed", False): {"all"},
    ("stopped", False): {"none", "failed", "timeout", "incomplete", "all"},
}


@pytest.mark.parametrize(("status", "retryable"), ENDS)
@pytest.mark.parametrize("retry", ["none", "failed", "timeout", "incomplete", "all"])
def test_what_a_resume_repeats(tmp_path: Path, status: str, retryable: bool, retry: str) -> None:
    dataset = dataset_of(tmp_path / "d", [{"prompt": "a"}, {"prompt": "b"}])
    directory = RunDirectory(tmp_path / "run")
    write_batch(directory, 0, [row_of_job(dataset.job(0), status=status, retryable=retryable)])
    index = scan_journal(directory, dataset, range(2))
    jobs = [(job.prompt_index, job.attempt) for job in index.pending([retry], [], 3)]
    again = [(0, 1 if status == "stopped" else 2)] if retry in ENDS[status, retryable] else []
    assert jobs == [*again, (1, 1)]
    assert index.count_pending([retry], [], 3) == len(jobs)
    limited = [job.prompt_index for job in index.pending([retry], [], 1)]
    assert limited == ([0, 1] if status == "stopped" else [1])
    assert [job.prompt_index for job in index.pending([retry], ["task_0"], 1)] == [0]


def test_only_ids_take_names_of_both_kinds_and_refuse_others(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "d", [{"prompt": "a"}, {"prompt": "b", "id": "x"}, {"prompt": "c"}])
    index = scan_journal(RunDirectory(tmp_path / "run"), dataset, range(3), samples=2)
    assert [(job.task_id, job.sample_index) for job in index.pending([], ["x", "task_0"], 3)] == [
        ("task_0", 0),
        ("task_0", 1),
        ("x", 0),
        ("x", 1),
    ]
    for unknown in ("task_1", "task_3", "y", "task_00"):
        with pytest.raises(UsageProblem, match=unknown):
            next(index.pending([], ["x", unknown], 3))


def test_stopped_is_not_an_attempt(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "d", [{"prompt": "a"}])
    directory = RunDirectory(tmp_path / "run")
    tries = [
        ("failed", 1, True),
        ("stopped", 2, False),
        ("stopped", 2, False),
        ("failed", 2, True),
        ("stopped", 3, False),
    ]
    for number, (status, attempt, retryable) in enumerate(tries):
        job = msgspec.structs.replace(dataset.job(0), attempt=attempt)
        write_batch(directory, number, [row_of_job(job, number, status=status, retryable=retryable)])
        index = scan_journal(directory, dataset, range(1))
        expected = 1 + sum(each[0] != "stopped" for each in tries[: number + 1])
        assert [job.attempt for job in index.pending(["failed"], [], 9)] == [expected]


def test_an_edited_row_with_an_id_is_reported_until_it_was_run_anew(tmp_path: Path) -> None:
    before = dataset_of(tmp_path / "a", [{"id": "x", "prompt": "one"}, {"id": "y", "prompt": "two"}])
    directory = RunDirectory(tmp_path / "run")
    write_batch(directory, 0, [row_of_job(before.job(row), api_calls=4) for row in (0, 1)])
    after = dataset_of(tmp_path / "b", [{"id": "y", "prompt": "two"}, {"id": "x", "prompt": "ONE"}])
    index = scan_journal(directory, after, range(2))
    assert index.changed() == (1, ["x"])
    assert [(job.task_id, job.attempt) for job in index.pending([], [], 3)] == [("x", 1)]
    assert (index.totals.api_calls, index.counts().pending) == (8, 1)
    write_batch(directory, 1, [row_of_job(after.job(1), 1)])
    assert scan_journal(directory, after, range(2)).changed() == (0, [])


def test_what_is_not_a_row_is_counted_and_passed_over(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "d", [{"prompt": "a"}])
    directory = RunDirectory(tmp_path / "run")
    good = encode_row(row_of_job(dataset.job(0)))
    gone = encode_row(msgspec.structs.replace(row_of_job(dataset.job(0)), row_key="id:gone"))
    beyond = encode_row(row_of_job(dataset.job(0, sample_index=1)))
    directory.path.mkdir()
    foreign = [
        b"\n",
        b"<html>\n",
        b"[]\n",
        b'{"prompt_index":1}\n',
        good.replace(b'"status":"completed"', b'"status":"odd"'),
    ]
    directory.batch_path(0).write_bytes(b"".join([*foreign, good, gone, beyond]))
    index = scan_journal(directory, dataset, range(1))
    assert (index.foreign, index.elsewhere, index.counts().completed) == (5, 2, 1)
    assert index.totals.tries == 3


def test_counts_add_up_also_under_a_smaller_selection(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "d", [{"prompt": str(n)} for n in range(6)])
    directory = RunDirectory(tmp_path / "run")
    statuses = {0: "completed", 1: "failed", 2: "stopped", 4: "timeout", 5: "stopped"}
    write_batch(directory, 0, [row_of_job(dataset.job(n), status=status) for n, status in statuses.items()])
    index = scan_journal(directory, dataset, range(4))
    counts = index.counts()
    assert (counts.total, counts.completed, counts.failed, counts.pending) == (5, 2, 1, 2)
    assert index.total == 5
    assert index.by_status() == {"completed": 1, "failed": 1, "stopped": 2, "timeout": 1}


def ended(row: Row, place: Place) -> PromptEnded:
    return PromptEnded(
        batch_num=row.metadata.batch_num,
        offset=place.offset,
        length=place.length,
        prompt_index=row.prompt_index,
        task_id=row.task_id,
        row_key=row.row_key,
        sample_index=row.sample_index,
        attempt=row.attempt,
        status=row.status,
        reason=row.reason,
        error=row.error,
        error_class=row.error_class,
        retryable=row.retryable,
        row_fault=False,
        has_reasoning=True,
        spend=Spend(requests=row.requests, usage=row.usage, cost_usd=row.cost_usd),
        api_calls=row.api_calls,
        tool_stats={"terminal": (1, 1, 0)},
        duration_seconds=row.duration_seconds,
    )


ROWS, SAMPLES = 3, 2
TRIES = st.lists(
    st.tuples(
        st.integers(0, ROWS - 1),
        st.integers(0, SAMPLES - 1),
        st.sampled_from(["completed", "max_turns", "timeout", "partial", "discarded", "failed", "stopped"]),
        st.booleans(),  # begins another batch file
    ),
    max_size=25,
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return dataset_of(
        tmp_path_factory.mktemp("d") / "d", [{"prompt": "same"}, {"prompt": "same"}, {"prompt": "c", "id": 1}]
    )


@contextlib.contextmanager
def journal(dataset: Dataset, tries: list[tuple[int, int, str, bool]]) -> Iterator[tuple[RunDirectory, JournalIndex]]:
    """The tries written one after another, and the index that has followed them live."""
    with TemporaryDirectory() as folder:
        directory = RunDirectory(Path(folder))
        live = scan_journal(directory, dataset, range(ROWS), samples=SAMPLES)
        batch_num = 0
        for row, sample, status, another in tries:
            batch_num += another
            changes: dict[str, Any] = {
                "status": status,
                "retryable": status == "failed",
                "usage": Usage(total_tokens=7),
            }
            if status == "discarded":
                changes |= {
                    "end_status": "completed",
                    "reason": "no_reasoning",
                    "conversations": [Turn("system", "s"), Turn("human", "h"), Turn("gpt", THOUGHTLESS)],
                }
            made = row_of_job(live.next_job(row, sample), batch_num, **changes)
            live.note(ended(made, directory.append(batch_num, encode_row(made))))
        yield directory, live
        live.close()


def state_of(index: JournalIndex) -> Any:
    totals = {name: getattr(index.totals, name) for name in index.totals.__struct_fields__}
    pending = [
        [(job.prompt_index, job.sample_index, job.attempt) for job in index.pending([name], [], 3)]
        for name in ("none", "failed", "timeout", "incomplete", "all")
    ]
    return (
        list(index.tries()),
        index.counts(),
        +index.tool_calls,
        totals,
        pending,
        index.by_status(),
        list(index.batches()),
    )


@settings(max_examples=60, deadline=None)
@given(tries=TRIES)
def test_a_scan_finds_what_was_followed_live(dataset: Dataset, tries: list[tuple[int, int, str, bool]]) -> None:
    with journal(dataset, tries) as (directory, live):
        shared = scan_journal(directory, dataset, range(ROWS), samples=SAMPLES, processes=3)
        assert state_of(shared) == state_of(live)
        scanned = scan_journal(directory, dataset, range(ROWS), samples=SAMPLES)
        assert state_of(scanned) == state_of(live)
        counted = Statistics()
        for _, _, place, _ in live.tries():
            counted.take(Tried.read(live.line(place), MergePolicy()))
        for index in (shared, scanned):
            assert (Statistics() + index.statistics).to_dict() == counted.to_dict()
            assert index.statistics.metrics(index.totals) == counted.metrics(live.totals)
        shared.close()
        last = {(row, sample): status for row, sample, status, _ in tries}
        assert scanned.tool_calls["terminal"] == len(last)
        assert scanned.totals.tries == len(tries)
        assert scanned.totals.usage.total_tokens == 7 * len(tries)
        never = [slot for slot in ((r, s) for r in range(ROWS) for s in range(SAMPLES)) if slot not in last]
        stopped = [slot for slot, status in last.items() if status == "stopped"]
        assert scanned.counts().pending == len(never) + len(stopped)
        scanned.close()


@settings(max_examples=60, deadline=None)
@given(tries=TRIES)
def test_the_checkpoint_is_the_index(dataset: Dataset, tries: list[tuple[int, int, str, bool]]) -> None:
    with journal(dataset, tries) as (directory, live):
        directory.write_manifest(MANIFEST)
        write_checkpoint(directory, live, "r")
        told = json.loads(directory.checkpoint_path.read_bytes())
        last = {(row, sample): status for row, sample, status, _ in tries}
        done = {slot for slot, status in last.items() if status not in ("failed", "stopped")}
        assert told["completed_prompts"] == [n for n in range(ROWS) if all((n, s) in done for s in range(SAMPLES))]
        assert told["completed_tasks"] == len(done)
        assert (
            told["completed_tasks"] + told["failed_tasks"] + told["pending_tasks"]
            == told["total_tasks"]
            == ROWS * SAMPLES
        )
        assert len(told["failed_task_ids"]) == told["failed_tasks"] == list(last.values()).count("failed")
        batches = told["batch_stats"].values()
        assert sum(batch["processed"] for batch in batches) == sum(status != "stopped" for _, _, status, _ in tries)
        assert sum(batch["discarded_no_reasoning"] for batch in batches) == sum(
            status == "discarded" for _, _, status, _ in tries
        )
        assert told["tool_usage_stats"] == ({"terminal": len(last)} if last else {})
        assert (told["run_name"], told["started_at"]) == ("r", "2026-01-01T00:00:00.000Z")
        assert told["last_updated"] == told["last_checkpoint_at"]


def test_the_checkpoint_names_failures(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "d", [{"prompt": "a"}, {"prompt": "b", "id": "x"}])
    directory = RunDirectory(tmp_path / "run")
    jobs = [dataset.job(0, attempt=3), dataset.job(1)]
    write_batch(directory, 0, [row_of_job(job, status="failed", error="é" * 999) for job in jobs])
    write_checkpoint(directory, scan_journal(directory, dataset, range(2)), "r")
    told = json.loads(directory.checkpoint_path.read_bytes())
    assert told["failed_task_ids"] == [
        {"task_id": "task_0", "error": "é" * 200, "retry_count": 2},
        {"task_id": "x", "error": "é" * 200, "retry_count": 0},
    ]


def test_discarded_tries_are_kept_where_the_policy_says_so(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "d", [{"prompt": "a"}])
    directory = RunDirectory(tmp_path / "run")
    turns = [Turn("system", "s"), Turn("human", "h"), Turn("gpt", THOUGHTLESS)]
    thoughtless: dict[str, Any] = {
        "status": "discarded",
        "end_status": "completed",
        "reason": "no_reasoning",
        "conversations": turns,
    }
    write_batch(directory, 0, [row_of_job(dataset.job(0), **thoughtless)])
    for policy in (MergePolicy(), MergePolicy(keep_no_reasoning=True)):
        index = scan_journal(directory, dataset, range(1), policy=policy)
        ((_, _, last, kept),) = index.tries()
        assert kept == (last if policy.keep_no_reasoning else 0)


def test_what_another_process_does_not_bring_to_an_end_is_read_here(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "d", [{"prompt": str(n)} for n in range(9)])
    directory, here = RunDirectory(tmp_path / "run"), os.getpid()
    for number in range(9):
        write_batch(directory, number, [row_of_job(dataset.job(number), number)])

    def path_of(number: int) -> Path:
        if os.getpid() != here and number in (4, 8):
            os.kill(os.getpid(), signal.SIGKILL)
        return directory.batch_path(number)

    make = partial(Reader, path_of, dataset, 1, MergePolicy())
    pieces = list(read_files(make, range(9), 9, processes=4))
    assert [slot for piece in pieces if isinstance(piece, Found) for slot in piece.slots] == list(range(9))
    assert sum(piece.of_tries.tries for piece in pieces if isinstance(piece, Totals)) == 9


def test_a_reading_that_is_broken_off_leaves_no_process(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "d", [{"prompt": str(n)} for n in range(2)])
    directory, here = RunDirectory(tmp_path / "run"), os.getpid()
    for number in range(2):
        write_batch(directory, number, [row_of_job(dataset.job(number), number)])

    def path_of(number: int) -> Path:
        if os.getpid() != here:
            signal.pause()
        return directory.batch_path(number)

    before = psutil.Process().children()
    pieces = read_files(partial(Reader, path_of, dataset, 1, MergePolicy()), range(2), 2, processes=2)
    assert isinstance(next(pieces), Found)
    assert len(psutil.Process().children()) == len(before) + 1
    pieces.close()
    assert psutil.Process().children() == before


def test_memory_is_19_bytes_a_row_and_sample(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path / "d", ({"prompt": str(n)} for n in range(1000)))
    index = JournalIndex(RunDirectory(tmp_path / "run"), dataset, range(1000), samples=2)
    arrays = [value for value in vars(index).values() if hasattr(value, "tobytes") or isinstance(value, bytearray)]
    assert sum(memoryview(each).nbytes for each in arrays) == 19 * 2000


def test_what_is_told_is_what_is_written_whenever_it_is_forbidden(tmp_path: Path) -> None:
    async def race() -> list[Any]:
        writer = JournalWriter(tmp_path)
        futures = [writer.append(0, b'{"row":%d}\n' % n) for n in range(5000)]
        await futures[0]
        writer.forbid()
        await asyncio.to_thread(writer.close)
        return await asyncio.gather(*futures, return_exceptions=True)

    outcomes = asyncio.run(race())
    written = [outcome for outcome in outcomes if isinstance(outcome, Place)]
    assert len(read_lines(tmp_path / "batch_0.jsonl")) == len(written)
