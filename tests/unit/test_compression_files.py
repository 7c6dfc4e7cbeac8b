"""What the compressor reads and writes, piece by piece."""

import asyncio
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from agent.types import Spend, Usage
from batch.rows import RowProblem
from compression.inputs import drawn, readable, rows, sample_size
from compression.merge import with_metrics
from compression.metrics import RowName, RunFacts, Totals
from compression.run import Room
from compression.store import Ended, Paid, RowKey, WorkFolder, output_file, record_line
from compression.types import RowMetrics
from tools.environments.owner import current_owner
from tools.errors import UsageProblem

SPEND = Spend(requests=2, usage=Usage(input_tokens=5, total_tokens=5), cost_usd=0.5)


# --- rows


@pytest.mark.parametrize(
    "line", [b"{}", b' { "a" : 1 } ', b'{"compression_metrics": 1, "a": 1}', b'{"a": {"compression_metrics": 1}}']
)
def test_metrics_become_the_last_field(line: bytes) -> None:
    told = json.loads(with_metrics(line, RowMetrics(region_start_idx=3)))
    assert list(told)[-1] == "compression_metrics"
    assert told["compression_metrics"]["compression_region"] == {"start_idx": 3, "end_idx": -1, "turns_count": 0}
    assert {"original_tokens", "was_compressed", "tokenizer"} <= told["compression_metrics"].keys()
    before = {name: value for name, value in json.loads(line).items() if name != "compression_metrics"}
    assert {name: value for name, value in told.items() if name != "compression_metrics"} == before


def test_all_rows_have_the_same_fields_of_the_same_types() -> None:
    def shape(value: object) -> object:
        return {name: shape(each) for name, each in value.items()} if isinstance(value, dict) else type(value)

    full = RowMetrics(original_tokens=3, compression_ratio=0.5, was_compressed=True, error="e", tokenizer="t")
    assert shape(json.loads(with_metrics(b"{}", full))) == shape(json.loads(with_metrics(b"{}", RowMetrics())))
    assert b'"compression_ratio":1.0' in with_metrics(b"{}", RowMetrics())


def test_a_lone_surrogate_is_written_anew_and_nothing_else_is() -> None:
    assert readable(b'{ "a":"\\ud83d\\ude00" }') == b'{ "a":"\\ud83d\\ude00" }'
    assert json.loads(readable(b'{"a":"\\ud83d"}')) == {"a": "\ufffd"}
    assert readable(b'{ "a":"x\xed\xa0\x80y\xed\x9f\xbf" }') == '{"a":"x\ufffdy\ud7ff"}'.encode()
    assert readable(b'{"a":"\xed\xa0\xbd\xed\xb8\x80"}') == '{"a":"\U0001f600"}'.encode()
    assert list(rows(io.BytesIO(b'{"\xed\xbf\xbf":1}\n'))) == ['{"\ufffd":1}'.encode()]
    with pytest.raises(RowProblem):
        readable(b'{"a":"\xed\xa0\x80\xff"}')


# --- samples


@given(st.integers(0, 300), st.floats(0.001, 100), st.integers(0, 5))
def test_a_sample_has_its_size_and_is_the_seeds(count: int, percent: float, seed: int) -> None:
    taken = list(drawn(count, percent, str(seed)))
    assert len(taken) == count
    assert sum(taken) == sample_size(count, percent) <= count
    assert taken == list(drawn(count, percent, str(seed)))


@pytest.mark.parametrize(
    ("count", "percent", "size"),
    [(1000, 32.3, 323), (1000, 0.7, 7), (100, 29.0, 29), (3, 1.0, 1), (0, 50.0, 0), (7, None, 7), (10**7, 1e-5, 1)],
)
def test_a_sample_is_as_large_as_its_percent_says(count: int, percent: float | None, size: int) -> None:
    assert sample_size(count, percent) == size


def test_every_row_is_drawn_as_often_as_any_other() -> None:
    counts = [sum(each) for each in zip(*(drawn(10, 30, str(seed)) for seed in range(1000)), strict=True)]
    assert all(200 < each < 400 for each in counts)


# --- the journal


def test_the_journal_says_what_was_paid_for(tmp_path: Path) -> None:
    folder = WorkFolder(tmp_path)
    failed = RowMetrics(failed=True, error="no summary")
    records: list[Ended | Paid] = [
        Paid(file=0, row=0, sha="s", text="one", model="m", spend=SPEND),
        Paid(file=0, row=0, sha="s", problem="too long", model="m", spend=SPEND),
        Ended(file=0, row=0, sha="s", metrics=failed, spend=SPEND, errors=2),
        Ended(file=1, row=2, sha="t", metrics=RowMetrics(was_compressed=True), line=Raw(b'{"a": "\xc3\xa9"}')),
        Paid(file=1, row=1, sha="u", text="two", spend=SPEND),
        Ended(file=1, row=1, sha="u", metrics=RowMetrics(passes=1)),
        Paid(file=1, row=0, sha="v", problem="empty"),
        Ended(file=7, row=0, sha="x", metrics=RowMetrics()),
    ]
    lines = [record_line(each) for each in records]
    folder.journal_path.write_bytes(b"".join([*lines, b"{}\n"]))
    found = folder.records([1, 3])
    assert (found.ended, found.failed, found.errors, found.foreign) == (3, 1, 6, 2)
    assert found.spent == Spend(requests=8, usage=Usage(input_tokens=20, total_tokens=20), cost_usd=2.0)
    assert [found.paid(RowKey(0, 0)), found.paid(RowKey(1, 1)), found.paid(RowKey(1, 0))] == [
        [0],
        [],
        [sum(map(len, lines[:6]))],
    ]
    reader = folder.reader()
    ended = reader.read(found.place(RowKey(1, 2)))
    assert isinstance(ended, Ended)
    assert (bytes(ended.line), ended.metrics) == (b'{"a": "\xc3\xa9"}', RowMetrics(was_compressed=True))
    assert found.place(RowKey(1, 0)) == -1
    found.retry_failed()
    assert (found.ended, found.failed, found.place(RowKey(0, 0))) == (2, 0, -1)
    reader.close()


@pytest.mark.parametrize(
    "more",
    [
        "file",
        "row",
        "errors",
        "metrics.original_tokens",
        "metrics.passes",
        "spend.requests",
        "spend.usage.input_tokens",
    ],
)
def test_a_record_with_a_number_below_nothing_is_foreign(more: str, tmp_path: Path) -> None:
    folder = WorkFolder(tmp_path)
    record = {"type": "row", "file": 0, "row": 0, "sha": "s", "metrics": {}}
    *objects, name = more.split(".")
    value: Any = {name: -1}
    for each in reversed(objects):
        value = {each: value}
    folder.journal_path.write_text(f"{json.dumps(record)}\n{json.dumps(record | value)}\n")
    found = folder.records([1])
    assert (found.ended, found.foreign) == (1, 1)


@pytest.mark.parametrize("lacks", ["written", "inputs", "settings", "seconds", "started_at", "format"])
def test_a_manifest_that_lacks_something_cannot_be_read(lacks: str, tmp_path: Path) -> None:
    folder = WorkFolder(tmp_path)
    told = {"format": 1, "started_at": "", "seconds": 0.0, "settings": {}, "inputs": [], "written": []}
    folder.journal_path.write_text("{}\n")
    folder.manifest_path.write_text(json.dumps(told))
    assert folder.known_manifest() == told
    del told[lacks]
    folder.manifest_path.write_text(json.dumps(told))
    with pytest.raises(UsageProblem, match=r"run\.json cannot be read"):
        folder.known_manifest()


def test_a_failed_end_is_among_what_a_row_goes_on_from(tmp_path: Path) -> None:
    folder, key = WorkFolder(tmp_path), RowKey(0, 0)
    told: list[Ended | Paid] = [
        Paid(sha="s", text="one", spend=SPEND),
        Paid(sha="s", problem="too long", tries=2, withdraws=True),
        Ended(file=0, row=0, sha="s", metrics=RowMetrics(failed=True), spend=SPEND, errors=2),
        Paid(sha="s", problem="interrupted", spend=SPEND, tries=0),
    ]
    folder.journal_path.write_bytes(b"".join([record_line(each) for each in told]))
    found = folder.records([1])
    found.retry_failed()
    reader = folder.reader()
    assert [reader.read(place) for place in found.paid(key)] == told[2:]
    reader.close()


def test_a_summary_that_is_withdrawn_is_none(tmp_path: Path) -> None:
    folder, key = WorkFolder(tmp_path), RowKey(0, 0)
    told = [
        Paid(sha="s", text="one", spend=SPEND),
        Paid(sha="s", text="two", spend=SPEND, tries=2),
        Paid(sha="s", problem="too long", tries=2, withdraws=True),
        Paid(sha="s", text="three", spend=SPEND),
    ]
    lines = [record_line(each) for each in told]
    folder.journal_path.write_bytes(b"".join(lines))
    found = folder.records([1])
    assert (found.spent.requests, found.errors) == (6, 4)
    reader = folder.reader()
    assert [reader.read(place) for place in found.paid(key)] == told
    found.note(Ended(file=0, row=0, sha="s", metrics=RowMetrics(failed=True)), 1000)
    assert [reader.read(place) for place in found.paid(key)] == [told[0], told[3]]
    reader.close()


def test_a_folder_that_led_nowhere_goes_away(tmp_path: Path) -> None:
    folder = WorkFolder(tmp_path / "deep" / "o.work")
    lock = folder.own(current_owner("o"))
    folder.write_manifest({"a": 1})
    folder.spool_path.write_bytes(b"{}\n")
    folder.forget_what_led_nowhere()
    lock.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["o.jsonl.gz", "o.jsonl.zst", "o.jsonl"])
def test_the_same_rows_give_the_same_bytes(name: str, tmp_path: Path) -> None:
    written = []
    for folder in ("a", "b"):
        with output_file(tmp_path / folder / name) as file:
            file.write(b"{}\n" * 1000)
        written.append((tmp_path / folder / name).read_bytes())
    assert written[0] == written[1]
    assert (gzip.decompress(written[0]) if name.endswith("gz") else b"{}\n" * 1000) == b"{}\n" * 1000


def test_an_output_that_fails_half_way_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TypeError), output_file(tmp_path / "o.jsonl.gz") as file:
        file.writelines([b"{}", None])  # type: ignore[list-item]
    assert list(tmp_path.iterdir()) == []


# --- rows in flight


async def test_rows_wait_for_room() -> None:
    room = Room(2, 100)
    await room.enter(1000)  # alone it may be as large as it likes
    late = asyncio.create_task(room.enter(1))
    await asyncio.sleep(0)
    assert not late.done()
    room.leave(1000)
    await late
    await room.enter(1)
    assert room.is_full(1)
    room.leave(1)
    assert not room.is_full(99)
    assert room.is_full(100)


# --- metrics


def facts() -> RunFacts:
    return RunFacts(
        strategy="summary",
        target_max_tokens=9,
        requests=0,
        errors=0,
        usage=Usage(),
        cost_usd=0.0,
        start_time="",
        end_time="",
        seconds=0.0,
        files=[],
    )


def test_the_metrics_of_nothing() -> None:
    told = Totals().to_dict(facts())
    assert told["tokens"]["overall_compression_ratio"] == 1.0
    assert told["averages"]["avg_compression_ratio"] == 1.0
    assert told["averages"]["avg_tokens_saved_per_compressed"] == 0.0
    assert told["summary"]["compression_rate"] == 0.0
    assert told["summarization"]["success_rate"] == 1.0
    assert told["histogram"] == []


def test_failed_rows_count_in_the_total() -> None:
    totals = Totals()
    totals.take(
        RowName("f", 0), RowMetrics(failed=True, error="down", original_tokens=9, compressed_tokens=9), left_out=False
    )
    totals.take(
        RowName("f", 1),
        RowMetrics(
            was_compressed=True, original_tokens=1000, compressed_tokens=250, tokens_saved=750, compression_ratio=0.25
        ),
        left_out=False,
    )
    totals.take(RowName("f", 2), RowMetrics(original_tokens=257, compressed_tokens=257), left_out=True)
    totals.take(RowName("f", 3), RowMetrics(failed=True, error="late", still_over_limit=True), left_out=False)
    told = totals.to_dict(facts())
    assert told["summary"]["total_trajectories"] == 4
    assert told["summary"]["compression_rate"] == 0.25
    assert told["failed"] == [{"file": "f", "row": 0, "error": "down"}, {"file": "f", "row": 3, "error": "late"}]
    assert told["left_out"] == [{"file": "f", "row": 2, "tokens": 257}]
    assert told["tokens"] == {
        "total_before": 1266,
        "total_after": 516,
        "total_saved": 750,
        "overall_compression_ratio": 0.4076,
        "rows_not_counted": 1,
    }
    assert told["histogram"] == [
        {"up_to": 256, "before": 1, "after": 2},
        {"up_to": 512, "before": 1, "after": 1},
        {"up_to": 1024, "before": 1, "after": 0},
    ]
