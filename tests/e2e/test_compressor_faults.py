"""A summarizer that fails or goes away, processes that are killed, full disks: nothing is lost or paid for twice."""

import json
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.compressing import (
    SCRIPT,
    SMALL,
    SUMMARY,
    compress,
    file_metrics,
    metrics_of,
    row,
    rows,
    summarizer,
    without_metrics,
)
from tests.e2e.program import Program, read_lines, started_with, wait_until, write_dataset
from tests.endpoint import EndpointProcess
from tests.unit.tokenizers_made import make_tokenizer

QUICK = ("--retry_delay=0.01", "--max_retries=2", "--quiet", *SMALL)
SAID = {"message": {"content": SUMMARY}}


def against(url: str) -> list[str]:
    """The flags of a run against an endpoint."""
    return [f"--base_url={url}", "--summarization_model=m", "--input=in.jsonl", "--output=out.jsonl"]


def unchanged(folder: Path, name: str = "out.jsonl") -> bool:
    """Whether the output has every row as it was."""
    return [without_metrics(each) for each in read_lines(folder / name)] == read_lines(folder / "in.jsonl")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Long rows, and a short one among them."""
    write_dataset(tmp_path / "in.jsonl", [row(0), row(1, exchanges=1), row(2), row(3)])
    return tmp_path


BROKEN: dict[str, dict[str, Any]] = {
    "empty": {"message": {"content": ""}},
    "blank": {"message": {"content": " \n "}},
    "prefix": {"message": {"content": "[CONTEXT SUMMARY]:"}},
    "no choices": {"body": {"choices": []}},
    "null": {"message": {"content": None}},
    "tags": {"message": {"content": 'All. <tool_call>\n{"name": "x"}\n</tool_call>'}},
    "too long": {"message": {"content": "word and word " * 3000}},
    "cut": {"message": {"content": "It began"}, "finish_reason": "length"},
    "500": {"status": 500},
    "no JSON": {"raw": "<html>"},
}


def marked(number: int, mark: str) -> dict[str, Any]:
    """A long row whose calls have a mark, and so all that is asked about it."""
    text = json.dumps(row(number))
    assert "cat " in text
    return dict(json.loads(text.replace("cat ", f"cat {mark}/")))


@pytest.mark.parametrize("kinds", [list(BROKEN)[::2], list(BROKEN)[1::2]], ids=" and ".join)
def test_without_a_summary_a_row_stays_as_it_was_and_is_tried_again(kinds: list[str], tmp_path: Path) -> None:
    """Every row is answered in a way of its own; a short one is among them."""
    marks = [f"mark{number}" for number in range(len(kinds))]
    long = [marked(number, mark) for number, mark in enumerate(marks)]
    write_dataset(tmp_path / "in.jsonl", [long[0], row(len(long), exchanges=1), *long[1:]])
    fates = [True, False, *[True] * (len(kinds) - 1)]
    with EndpointProcess(
        rules=[{"has": mark, **BROKEN[kind]} for mark, kind in zip(marks, kinds, strict=True)]
    ) as endpoint:
        code, out, err = compress(*against(endpoint.url), *QUICK, home=tmp_path)
        assert code == 1, out + err
        assert endpoint.stats()["requests"] == len(kinds) * 2
        assert unchanged(tmp_path)
        first = metrics_of(tmp_path / "out.jsonl")
        assert [each["failed"] for each in first] == fates
        assert [bool(each["error"]) for each in first] == fates
        counts = {(each["summarization_api_calls"], each["summarization_errors"]) for each in first if each["failed"]}
        assert counts == {(2, 2)}
        assert {each["tokens_saved"] for each in first} == {0}
        told = file_metrics(tmp_path / "out_metrics.json")
        assert told["summary"]["trajectories_failed"] == len(kinds)
        assert told["summary"]["total_trajectories"] == len(kinds) + 1
        assert told["summarization"]["success_rate"] == 0.0
        assert len(told["failed"]) == len(kinds)
        endpoint.set_rules([SAID])
        again = out.splitlines()[-1]
        assert again.endswith("--resume")
        code, out, err = compress(*again.split()[2:], home=tmp_path)
        assert code == 0, out + err
        assert endpoint.stats()["requests"] == len(kinds) * 3
    rows_told = metrics_of(tmp_path / "out.jsonl")
    assert [each["summarization_api_calls"] for each in rows_told] == [3 * long for long in fates]
    assert [each["summarization_errors"] for each in rows_told] == [2 * long for long in fates]
    assert [each["was_compressed"] for each in rows_told] == fates
    assert not any(each["failed"] or each["error"] for each in rows_told)
    told = file_metrics(tmp_path / "out_metrics.json")["summarization"]
    assert (told["requests"], told["total_api_calls"]) == (len(kinds) * 3, len(kinds) * 3)
    assert (told["total_errors"], told["success_rate"]) == (len(kinds) * 2, 0.3333)


def test_a_summary_that_is_refused_is_asked_for_again(folder: Path) -> None:
    write_dataset(folder / "in.jsonl", [row(0)])
    with EndpointProcess(rules=[{**BROKEN["tags"], "times": 1}, SAID]) as endpoint:
        code, out, err = compress(*against(endpoint.url), *QUICK, home=folder)
    assert code == 0, out + err
    (told,) = metrics_of(folder / "out.jsonl")
    assert (told["was_compressed"], told["summarization_api_calls"], told["summarization_errors"]) == (True, 2, 1)


def test_failed_tries_and_refused_answers_are_counted_together(folder: Path) -> None:
    write_dataset(folder / "in.jsonl", [row(0)])
    rules = [{"call": [1, 1], "status": 500}, {"call": [3, 3], "status": 500}, BROKEN["tags"]]
    with EndpointProcess(rules=rules) as endpoint:
        flags = [flag for flag in QUICK if "max_retries" not in flag]
        code, out, err = compress(*against(endpoint.url), *flags, "--max_retries=4", home=folder)
        assert code == 1, out + err
        assert endpoint.stats()["requests"] == 4
    (told,) = metrics_of(folder / "out.jsonl")
    assert (told["summarization_api_calls"], told["summarization_errors"]) == (4, 4)


def test_a_summarizer_whose_answers_are_all_refused_is_asked_no_more(folder: Path) -> None:
    write_dataset(folder / "in.jsonl", rows(40))
    with EndpointProcess(rules=[BROKEN["tags"]]) as endpoint:
        code, out, err = compress(*against(endpoint.url), *QUICK, "--max_concurrent_requests=1", home=folder)
        assert code == 3, out + err
        assert 20 <= endpoint.stats()["requests"] < 60  # of 120; some are asked for while answers are judged
    assert "20 summaries in a row" in out
    assert unchanged(folder)


def test_requests_of_an_interrupted_row_are_counted(folder: Path) -> None:
    write_dataset(folder / "in.jsonl", [row(0)])
    with EndpointProcess(rules=[{"call": [1, 1], "status": 500}, SAID]) as endpoint:
        flags = [*against(endpoint.url), *SMALL, "--retry_delay=4"]
        with Program(*flags, home=folder, script=SCRIPT) as program:
            wait_until(lambda: endpoint.stats()["requests"] == 1)
            program.interrupt()
            code, out, err = program.end()
        assert code == 130, out + err
        assert compress(*flags, "--resume", home=folder)[0] == 0
        assert endpoint.stats()["requests"] == 2
    told = file_metrics(folder / "out_metrics.json")["summarization"]
    assert (told["total_api_calls"], told["total_errors"]) == (2, 1)


def test_rows_without_their_summary_are_not_left_out(folder: Path) -> None:
    with EndpointProcess(rules=[{"status": 500}]) as endpoint:
        code, out, err = compress(*against(endpoint.url), *QUICK, "--no-save_over_limit", home=folder)
    assert code == 1, out + err
    assert unchanged(folder)
    told = file_metrics(folder / "out_metrics.json")
    assert (told["summary"]["trajectories_failed"], told["left_out"]) == (3, [])


def test_a_long_summary_takes_a_further_pass(folder: Path) -> None:
    """It is not paid for again when the second one has to wait for a resume."""
    long = " ".join(f"fact{number}" for number in range(200))
    write_dataset(folder / "in.jsonl", [row(0, exchanges=30)])
    flags = [flag for flag in QUICK if "target_max" not in flag] + ["--target_max_tokens=2500"]
    with EndpointProcess(rules=[{"message": {"content": long}, "times": 1}, {"status": 500}]) as endpoint:
        code, out, err = compress(*against(endpoint.url), *flags, home=folder)
        assert code == 1, out + err
        assert unchanged(folder)
        assert metrics_of(folder / "out.jsonl")[0]["summarization_errors"] == 2
        endpoint.set_rules([SAID])
        code, out, err = compress(*against(endpoint.url), *flags, "--resume", home=folder)
        assert code == 0, out + err
        assert endpoint.stats()["requests"] == 4
    (told,) = metrics_of(folder / "out.jsonl")
    assert (told["passes"], told["still_over_limit"]) == (2, False)
    assert told["compressed_tokens"] <= 2500


@pytest.mark.parametrize(("rule", "requests"), [({"status": 401}, 4), ({"status": 402}, 4)])
def test_a_summarizer_that_is_down_for_good_is_asked_no_more(rule: dict[str, Any], requests: int, folder: Path) -> None:
    write_dataset(folder / "in.jsonl", [*rows(40), row(40, exchanges=1)])
    with EndpointProcess(rules=[{"call": [1, 10**6], **rule}]) as endpoint:
        code, out, err = compress(*against(endpoint.url), *QUICK, "--max_concurrent_requests=4", home=folder)
        assert code == 3, out + err
        assert 0 < endpoint.stats()["requests"] <= requests
        assert unchanged(folder)
        assert sum(each["failed"] for each in metrics_of(folder / "out.jsonl")) == 40
        assert "stopped early" in out
        assert out.splitlines()[-1].endswith("--resume")
        endpoint.set_rules([SAID])
        assert compress(*out.splitlines()[-1].split()[2:], home=folder)[0] == 0
    assert sum(each["was_compressed"] for each in metrics_of(folder / "out.jsonl")) == 40


def test_a_summarizer_that_cannot_be_reached(folder: Path) -> None:
    code, out, err = compress(*against("http://127.0.0.1:9/v1"), *QUICK, home=folder)
    assert code == 3, out + err
    assert unchanged(folder)


def test_a_budget(folder: Path) -> None:
    write_dataset(folder / "in.jsonl", rows(30))
    prices = ("--price_in=0", "--price_out=1000")  # 0.01 USD a summary; 0.12 if it were as long as it may be
    with EndpointProcess(rules=[SAID]) as endpoint:
        code, out, err = compress(*against(endpoint.url), *QUICK, *prices, "--max_cost=0.2", home=folder)
        assert code == 3, out + err
        assert endpoint.stats()["requests"] == 9
        told = file_metrics(folder / "out_metrics.json")
        assert told["summarization"]["cost_usd"] == pytest.approx(0.09)
        assert told["summary"]["trajectories_compressed"] == endpoint.stats()["requests"]
        code, out, err = compress(*against(endpoint.url), *QUICK, *prices, "--max_cost=100", "--resume", home=folder)
        assert code == 0, out + err
        assert endpoint.stats()["requests"] == 30
    assert file_metrics(folder / "out_metrics.json")["summarization"]["requests"] == 30


def test_what_is_not_reported_counts_in_the_budget_of_a_resume_too(folder: Path) -> None:
    write_dataset(folder / "in.jsonl", rows(30))
    prices = ("--price_in=100", "--price_out=100", "--max_cost=1")
    with EndpointProcess(rules=[{**SAID, "usage": None}]) as endpoint:
        code, out, err = compress(*against(endpoint.url), *QUICK, *prices, home=folder)
        assert code == 3, out + err
        requests = endpoint.stats()["requests"]
        assert 0 < requests < 30
        told = file_metrics(folder / "out_metrics.json")["summarization"]
        assert (told["cost_usd"], told["unreported"]["replies"]) == (0.0, requests)
        assert 0.7 < told["unreported"]["cost_usd"] <= 1.0
        assert f"{requests} replies without usage, by estimate" in out
        assert compress(*against(endpoint.url), *QUICK, *prices, "--resume", home=folder)[0] == 3
        assert endpoint.stats()["requests"] == requests
    assert file_metrics(folder / "out_metrics.json")["summarization"]["unreported"] == told["unreported"]


def test_a_price_that_nobody_knows(folder: Path) -> None:
    code, _, err = compress(*against("http://127.0.0.1:9/v1"), "--max_cost=1", home=folder)
    assert code == 2
    assert "--price_in" in err
    assert not (folder / "out.jsonl.work").exists()


def test_a_row_that_takes_too_long_stays_as_it_was_and_is_listed(folder: Path) -> None:
    write_dataset(folder / "in.jsonl", [row(0), row(1)])
    with EndpointProcess(rules=[{"stall": True, "times": 1}, SAID]) as endpoint:
        flags = ("--per_trajectory_timeout=4", "--max_concurrent_requests=1")
        code, out, err = compress(*against(endpoint.url), *QUICK, *flags, home=folder)
    assert code == 1, out + err
    assert sorted(each["failed"] for each in metrics_of(folder / "out.jsonl")) == [False, True]
    assert len(read_lines(folder / "out.jsonl")) == 2
    assert "time" in file_metrics(folder / "out_metrics.json")["failed"][0]["error"]


def test_as_many_requests_as_allowed_are_under_way(folder: Path) -> None:
    write_dataset(folder / "in.jsonl", rows(60))
    with EndpointProcess(rules=[{**SAID, "together": 20}]) as endpoint:
        code, out, err = compress(*against(endpoint.url), *QUICK, "--max_concurrent_requests=20", home=folder)
        assert code == 0, out + err
        assert endpoint.stats()["peak"] == 20


def test_keys_stand_nowhere(folder: Path) -> None:
    key = "sk-test-0123456789abcdef"
    refusal = {"status": 500, "error": {"message": f"bad key {key}"}}
    with EndpointProcess(rules=[refusal]) as endpoint:
        flags = [*against(endpoint.url), *QUICK, "--api_key_env=MY_OWN"]
        code, out, err = compress(*flags, home=folder, MY_OWN=key)
        assert code == 1, out + err
        assert endpoint.stats()["keys"] == {key: 6}
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert key not in out + err + written.decode()
    assert "--api_key_env=MY_OWN" in out


def test_a_key_that_is_missing(folder: Path) -> None:
    code, _, err = compress(*against("http://127.0.0.1:9/v1"), "--api_key_env=NOT_THERE", home=folder)
    assert code == 2
    assert "NOT_THERE is not set" in err
    assert not (folder / "out.jsonl.work").exists()


# --- kills


def finished(folder: Path, kind: str = "row") -> int:
    """Lines of this kind in the journal; of `summary`s those that were had, or refused."""
    journal = folder / "out.jsonl.work" / "journal.jsonl"
    return journal.read_bytes().count(b'"type":"%s"' % kind.encode()) if journal.exists() else 0


def test_killed_at_any_time_and_resumed_the_bytes_are_the_same(tmp_path: Path) -> None:
    made = [row(number, exchanges=random.Random(number).choice((1, 8, 14, 30))) for number in range(80)]
    write_dataset(tmp_path / "in.jsonl", made)
    flags = ["--input=in.jsonl", "--num_workers=2", "--max_concurrent_requests=4", "--quiet"]
    flags += ["--target_max_tokens=2000", "--summary_target_tokens=60"]
    long = " ".join(f"fact{number}" for number in range(120))  # takes further passes
    flags.append(summarizer(tmp_path, long, delay=0.05))
    code, out, err = compress(*flags, "--output=whole.jsonl", home=tmp_path)
    assert code == 0, out + err
    ends = [int(80 * share) for share in (0.0, 0.1, 0.3, 0.5, 0.8)]
    for least in ends:
        with Program(*flags, "--output=out.jsonl", "--resume", home=tmp_path, script=SCRIPT) as program:
            wait_until(lambda: finished(tmp_path) >= least or program.process.poll() is not None)  # noqa: B023
            program.kill_all()
        assert not (tmp_path / "out.jsonl").exists()
        if finished(tmp_path):
            with (tmp_path / "out.jsonl.work" / "journal.jsonl").open("ab") as journal:
                journal.write(b'{"type":"row","file":0,')  # as a write that was cut off
    code, out, err = compress(*flags, "--output=out.jsonl", "--resume", home=tmp_path)
    assert code == 0, out + err
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert max(each["passes"] for each in metrics_of(tmp_path / "whole.jsonl")) > 1


def test_what_was_paid_for_is_not_paid_for_again(folder: Path) -> None:
    write_dataset(folder / "in.jsonl", rows(40))
    with EndpointProcess(rules=[{**SAID, "delay": 0.1}]) as endpoint:
        flags = [*against(endpoint.url), *QUICK, "--max_concurrent_requests=2"]
        with Program(*flags, home=folder, script=SCRIPT) as program:
            wait_until(lambda: finished(folder) >= 10)
            program.kill_all()
        done = finished(folder, "summary")
        asked = endpoint.stats()["requests"]
        assert asked <= done + 2
        assert compress(*flags, "--resume", home=folder)[0] == 0
        assert endpoint.stats()["requests"] == asked + 40 - done


SLOW = """import time
import compression.steps as steps
advance = steps.advance
def slow(line, summaries, *rest):
    time.sleep(100 if summaries else 0)
    return advance(line, summaries, *rest)
steps.advance = slow
"""


@pytest.mark.parametrize("said", [SAID, BROKEN["tags"]], ids=["good", "refused"])
@pytest.mark.parametrize("signals", [0, 2])
def test_an_answer_is_kept_before_it_is_judged(said: dict[str, Any], signals: int, folder: Path) -> None:
    write_dataset(folder / "in.jsonl", rows(12))
    with EndpointProcess(rules=[said]) as endpoint:
        flags = [*against(endpoint.url), *QUICK, "--max_concurrent_requests=3"]
        with Program(*flags, home=folder, script=SCRIPT, PYTHONPATH=started_with(folder, SLOW)) as program:
            wait_until(lambda: finished(folder, "summary") == 12)
            if signals:
                program.interrupt()
                time.sleep(0.3)
                program.interrupt()
                assert program.end()[0] == 130
            program.kill_all()
        assert finished(folder) == 0
        asked = endpoint.stats()["requests"]
        endpoint.set_rules([SAID])
        assert compress(*flags, "--resume", home=folder)[0] == 0
        wanted = (asked, 0) if said is SAID else (asked + 12, asked)
        assert endpoint.stats()["requests"] == wanted[0]
    told = file_metrics(folder / "out_metrics.json")["summarization"]
    assert (told["requests"], told["total_errors"]) == wanted
    assert sum(each["summarization_api_calls"] for each in metrics_of(folder / "out.jsonl")) == told["requests"]


def test_on_a_full_disk_what_was_answered_is_kept(tmp_path: Path) -> None:
    write_dataset(tmp_path / "in.jsonl", rows(60))
    disk = tmp_path / "disk"
    with small_disk(disk, "64k"), EndpointProcess(rules=[{**SAID, "delay": 0.05}]) as endpoint:
        flags = [*against(endpoint.url)[:3], "--output=disk/out.jsonl", *QUICK, "--max_concurrent_requests=2"]
        code, out, err = compress(
            *flags, home=tmp_path, PYTHONPATH=started_with(tmp_path, SLOW.replace("100 if", "0.02 if"))
        )
        assert code == 3, out + err
        kept = finished(disk, "summary")
        asked = endpoint.stats()["requests"]
        assert 2 < kept < 60
        assert asked - kept <= 4
        subprocess.run(["mount", "-o", "remount,size=32m", str(disk)], check=True)
        code, out, err = compress(*flags, "--resume", home=tmp_path)
        assert code == 0, out + err
        assert endpoint.stats()["requests"] == asked + 60 - kept


def test_a_process_that_counts_may_be_killed(folder: Path) -> None:
    write_dataset(folder / "in.jsonl", rows(60))
    flags = ["--input=in.jsonl", "--output=out.jsonl", *SMALL, "--quiet", summarizer(folder, delay=0.05)]
    with Program(*flags, "--max_concurrent_requests=2", home=folder, script=SCRIPT) as program:
        wait_until(lambda: finished(folder) >= 5)
        killed = [each for each in program.tree() if each.pid != program.process.pid]
        for each in killed:
            each.kill()
        code, out, err = program.end()
    assert killed
    assert code == 0, out + err
    assert all(each["was_compressed"] for each in metrics_of(folder / "out.jsonl"))


@pytest.mark.parametrize(("number", "wanted"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_what_is_under_way(number: int, wanted: int, folder: Path) -> None:
    write_dataset(folder / "in.jsonl", rows(20))
    with EndpointProcess(rules=[{**SAID, "delay": 0.3}]) as endpoint:
        flags = [*against(endpoint.url), *QUICK, "--max_concurrent_requests=3"]
        with Program(*flags, home=folder, script=SCRIPT) as program:
            wait_until(lambda: finished(folder) >= 5)
            program.interrupt(number)
            code, out, err = program.end()
            assert program.tree() == []
        assert code == wanted, out + err
        assert "Traceback" not in err
        assert finished(folder) == endpoint.stats()["requests"]
        assert f"ended      {finished(folder)} of 20 rows" in out
        assert not (folder / "out.jsonl").exists()
        again = out.splitlines()[-1]
        code, out, err = compress(*again.split()[2:], home=folder)
        assert code == 0, out + err
        assert endpoint.stats()["requests"] == 20


def test_two_signals_end_it_at_once(folder: Path) -> None:
    with EndpointProcess(rules=[{"stall": True}]) as endpoint:
        with Program(*against(endpoint.url), *QUICK, home=folder, script=SCRIPT) as program:
            wait_until(lambda: endpoint.stats()["requests"] == 3)
            program.interrupt()
            time.sleep(0.3)
            began = time.monotonic()
            program.interrupt()
            code, out, err = program.end()
            assert program.tree() == []
        assert time.monotonic() - began < 25  # else it waits for 30 s
        assert code == 130, out + err
        assert out.splitlines()[-1].endswith("--resume")
        assert finished(folder, "summary") == 3
        endpoint.set_rules([SAID])
        assert compress(*against(endpoint.url), *QUICK, "--resume", home=folder)[0] == 0
        assert endpoint.stats()["requests"] == 6
    told = file_metrics(folder / "out_metrics.json")["summarization"]
    assert (told["requests"], told["total_errors"]) == (6, 3)
    assert sum(each["summarization_api_calls"] for each in metrics_of(folder / "out.jsonl")) == 6


@pytest.mark.parametrize("given", ["in.jsonl", "-"])
def test_a_run_that_is_cut_off_before_anything_names_only_what_is_there(given: str, folder: Path) -> None:
    slow = SLOW.replace("100 if summaries else 0", "100")
    flags = [f"--input={given}", "--output=out.jsonl", summarizer(folder), *SMALL]
    with Program(
        *flags,
        home=folder,
        script=SCRIPT,
        stdin=(folder / "in.jsonl").read_bytes() if given == "-" else None,
        PYTHONPATH=started_with(folder, slow),
    ) as program:
        wait_until((folder / "out.jsonl.work" / "run.json").exists)
        time.sleep(1)
        program.interrupt()
        time.sleep(0.3)
        program.interrupt()
        code, out, err = program.end()
    assert code == 130, out + err
    assert not (folder / "out.jsonl.work").exists()
    assert "journal" not in out
    assert f"--input={given} " in out.splitlines()[-1]


def test_a_signal_while_the_output_is_written(folder: Path) -> None:
    """All is paid for by then: what goes on with it asks nothing."""
    write_dataset(folder / "in.jsonl", rows(60))
    slow = "import time\nimport compression.metrics as m\ntake = m.Totals.take\n"
    slow += "m.Totals.take = lambda *a, **k: (time.sleep(0.1), take(*a, **k))[1]\n"
    with EndpointProcess(rules=[SAID]) as endpoint:
        flags = [*against(endpoint.url), *QUICK]
        with Program(*flags, home=folder, script=SCRIPT, PYTHONPATH=started_with(folder, slow)) as program:
            wait_until((folder / "out.jsonl.tmp").exists)
            program.interrupt(signal.SIGTERM)
            code, out, err = program.end()
        assert code == 143, out + err
        assert "Traceback" not in err
        assert not list(folder.glob("out*.jsonl*.tmp"))
        assert compress(*out.splitlines()[-1].split()[2:], home=folder)[0] == 0
        assert endpoint.stats()["requests"] == 60
    assert len(read_lines(folder / "out.jsonl")) == 60


def test_one_run_at_a_time(folder: Path) -> None:
    with (
        EndpointProcess(rules=[{"stall": True}]) as endpoint,
        Program(*against(endpoint.url), *QUICK, home=folder, script=SCRIPT),
    ):
        wait_until(lambda: endpoint.stats()["requests"] == 3)
        code, _, err = compress(*against(endpoint.url), *QUICK, "--resume", home=folder)
    assert code == 2
    assert "in use" in err


def test_what_has_results_wants_a_word(folder: Path) -> None:
    flags = ["--input=in.jsonl", "--output=out.jsonl", "--quiet", *SMALL]
    assert compress(*flags, summarizer(folder), home=folder)[0] == 0
    before = (folder / "out.jsonl").read_bytes()
    code, _, err = compress(*flags, summarizer(folder), home=folder)
    assert code == 2
    assert "--resume" in err
    for changed, named in (
        ("--target_max_tokens=800", "target_max_tokens was 900"),
        ("--no-first_tool", "first_tool"),
        ("--strategy=drop", "strategy"),
        ("--sample_percent=50", "sample_percent"),
    ):
        others = [flag for flag in flags if flag.split("=")[0] != changed.split("=")[0]]
        code, _, err = compress(*others, changed, summarizer(folder), "--resume", home=folder)
        assert code == 2
        assert named in err
        assert err.count("\n") == 1
    write_dataset(folder / "in.jsonl", rows(2))
    code, _, err = compress(*flags, summarizer(folder), "--resume", home=folder)
    assert code == 2
    assert "in.jsonl is not what it was" in err
    write_dataset(folder / "moved.jsonl", [row(0), row(1, exchanges=1), row(2), row(3)])
    moved = ["--input=moved.jsonl", *flags[1:], summarizer(folder), "--resume"]
    assert compress(*moved, home=folder)[0] == 0
    write_dataset(folder / "moved.jsonl", rows(2))
    code, _, err = compress(*moved, home=folder)
    assert code == 2
    assert f"{folder}/moved.jsonl is not what {folder}/in.jsonl was" in err
    assert (folder / "out.jsonl").read_bytes() == before


def test_another_tokenizer_of_the_same_name_is_another_run(folder: Path) -> None:
    made = make_tokenizer(folder)
    for number, name in enumerate((made.name, ".")):
        flags = ["--input=in.jsonl", f"--output={number}.jsonl", "--strategy=drop", f"--tokenizer=./{name}", *SMALL]
        assert compress(*flags, home=folder)[0] == 0
        assert compress(*flags, "--resume", home=folder)[0] == 0
        made.write_bytes(made.read_bytes() + b"\n")
        code, _, err = compress(*flags, "--resume", home=folder)
        assert code == 2
        assert "tokenizer_file was" in err


def test_another_template_of_the_same_name_is_another_run(folder: Path) -> None:
    template, beside = folder / "chat.jinja", folder / "tokenizer_config.json"
    template.write_text("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    flags = ["--input=in.jsonl", "--output=o.jsonl", "--strategy=drop", "--chat_template=chat.jinja", *SMALL]
    beside.write_text("{}")
    assert compress(*flags, home=folder)[0] == 0
    for path, text, named in (
        (beside, '{"bos_token": "<s>"}', "tokenizer_config was"),
        (template, "x", "chat_template"),
    ):
        before = path.read_text()
        path.write_text(text)
        code, _, err = compress(*flags, "--resume", home=folder)
        assert code == 2
        assert named in err
        path.write_text(before)
    assert compress(*flags, "--resume", home=folder)[0] == 0


def test_a_file_in_the_place_of_an_output_is_not_overwritten(folder: Path) -> None:
    for name in ("out.jsonl", "out_metrics.json"):
        with EndpointProcess(rules=[{**SAID, "hold": True}]) as endpoint:
            flags = [*against(endpoint.url), *QUICK]
            with Program(*flags, home=folder, script=SCRIPT) as program:
                wait_until(lambda: endpoint.stats()["requests"] == 3)
                (folder / name).write_text("precious")
                endpoint.set_rules([SAID])
                code, out, err = program.end()
            assert code == 3, out + err
            assert f"{name} appeared" in out + err
            code, _, err = compress(*flags, "--resume", home=folder)
            assert code == 2
            assert f"{name} exists" in err
            assert (folder / name).read_text() == "precious"
            (folder / name).unlink()
            for _ in range(2):
                code, out, err = compress(*flags, "--resume", home=folder)
                assert code == 0, out + err
            assert endpoint.stats()["requests"] == 3
        for path in (*folder.glob("out*.json*"), *folder.glob("out.jsonl.work/*")):
            if path.is_file():
                path.unlink()


# --- disks


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[None]:
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_stops_the_run_which_goes_on_when_there_is_room(tmp_path: Path) -> None:
    write_dataset(tmp_path / "in.jsonl", rows(200))
    disk = tmp_path / "disk"
    flags = ["--input=in.jsonl", "--output=disk/out.jsonl", "--strategy=drop", *SMALL, "--quiet"]
    with small_disk(disk, "256k"):
        code, out, err = compress(*flags, home=tmp_path)
        assert code == 3, out + err
        assert "No space left" in out + err
        assert out.splitlines()[-1].endswith("--resume")
        subprocess.run(["mount", "-o", "remount,size=32m", str(disk)], check=True)
        code, out, err = compress(*flags, "--resume", home=tmp_path)
        assert code == 0, out + err
        assert [each["task_id"] for each in read_lines(disk / "out.jsonl")] == [f"t{n}" for n in range(200)]


def test_a_fault_of_ours_has_its_own_code(folder: Path) -> None:
    """What no one foresaw: here a function that is broken."""
    broken = "import compression.metrics\ncompression.metrics.Totals.to_dict = lambda *_: 1 / 0\n"
    flags = ["--input=in.jsonl", "--output=out.jsonl", "--strategy=drop", *SMALL]
    code, _, err = compress(*flags, home=folder, PYTHONPATH=started_with(folder, broken))
    assert code == 70
    assert "ZeroDivisionError" in err
    assert json.loads((folder / "out.jsonl.work" / "run.json").read_bytes())["format"] == 1
