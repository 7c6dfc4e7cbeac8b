"""The compressor's main road: what it must hold on a thousand trajectories, and what each setting does."""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.row import Turn
from agent.trajectory import validate
from tests.e2e.compressing import (
    SMALL,
    SUMMARY,
    all_text,
    compress,
    file_metrics,
    metrics_of,
    row,
    rows,
    summarizer,
    turns,
    without_metrics,
)
from tests.e2e.program import ROOT, read_lines, write_dataset
from tests.endpoint import EndpointProcess
from tests.unit.trajectories import lines, trajectories

ROLES = {"user": "human", "assistant": "gpt", "system": "system", "tool": "tool"}
TARGET = 4000


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A thousand generated rows and what became of them."""
    folder = tmp_path_factory.mktemp("thousand")
    (folder / "in.jsonl").write_bytes(lines(trajectories(1000, seed=4)))
    code, out, err = compress(
        "--input=in.jsonl",
        "--output=out.jsonl",
        f"--target_max_tokens={TARGET}",
        "--summary_target_tokens=200",
        summarizer(folder),
        home=folder,
        timeout=110,
    )
    assert code == 0, out + err
    return folder


def roles(said: Sequence[dict[str, Any]]) -> list[str]:
    return [str(turn.get("from") or ROLES[turn["role"]]) for turn in said]


def text(turn: dict[str, Any]) -> str:
    return str(turn.get("value") or turn.get("content") or "")


def calls_and_results(said: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """Of each gpt turn: calls in it, results behind it."""
    found: list[list[int]] = []
    for turn, role in zip(said, roles(said), strict=True):
        if role == "gpt":
            found.append([len(turn.get("tool_calls") or ()) or text(turn).count("<tool_call>\n{"), 0])
        elif role == "tool" and found:
            found[-1][1] += max(1, text(turn).count("<tool_response>\n")) if "from" in turn else 1
    return [(calls, results) for calls, results in found]


def problems(said: Sequence[dict[str, str]]) -> set[str]:
    """What is wrong with a trajectory of ours, whichever turn it is that has it."""
    return {each.partition(": ")[2] for each in validate(msgspec.convert(said, list[Turn]))}


def neighbours(said: Sequence[str]) -> list[str]:
    """Roles that stand twice in a row; results may."""
    return [one for one, other in pairwise(said) if one == other != "tool"]


@pytest.mark.timeout(120)
def test_no_row_is_lost_reordered_or_changed_beside_its_turns(thousand: Path) -> None:
    before, after = read_lines(thousand / "in.jsonl"), read_lines(thousand / "out.jsonl")
    assert [each["prompt_index"] for each in after] == list(range(1000))
    for one, other in zip(before, after, strict=True):
        metrics = other["compression_metrics"]
        fields = without_metrics(other)
        assert list(fields) == list(one)
        assert not metrics["failed"], metrics
        if metrics["was_compressed"]:
            assert metrics["compressed_tokens"] < metrics["original_tokens"]
            assert metrics["compressed_tokens"] <= TARGET or metrics["still_over_limit"]
        else:
            assert fields == one
            assert metrics["original_tokens"] <= TARGET or metrics["still_over_limit"]
    assert sum(each["compression_metrics"]["was_compressed"] for each in after) > 300


def test_compressed_rows_can_be_trained_on(thousand: Path) -> None:
    before, after = read_lines(thousand / "in.jsonl"), read_lines(thousand / "out.jsonl")
    for one, other in zip(before, after, strict=True):
        form = "conversations" if "conversations" in one else "messages"
        was, now = one[form], other[form]
        if was == now:
            continue
        assert len(neighbours(roles(now))) <= len(neighbours(roles(was)))
        assert now[-1] == was[-1]
        assert roles(now).count("system") == roles(was).count("system")
        if "system" in roles(was):
            assert text(now[0]).startswith(text(was[0]))
        first_human = next((text(turn) for turn, role in zip(was, roles(was), strict=True) if role == "human"), "")
        humans = [text(turn) for turn, role in zip(now, roles(now), strict=True) if role == "human"]
        assert any(first_human in each for each in humans)  # summaries may stand on both sides of it
        assert set(calls_and_results(now)) <= set(calls_and_results(was)), other["prompt_index"]
        if form == "conversations":
            assert problems(now) <= problems(was), other["prompt_index"]


def test_each_kept_call_still_has_the_result_it_had(thousand: Path) -> None:
    """In `messages` form ids say so."""
    for each in read_lines(thousand / "out.jsonl"):
        called = [call["id"] for turn in each.get("messages", ()) for call in turn.get("tool_calls", ())]
        answered = [turn["tool_call_id"] for turn in each.get("messages", ()) if turn["role"] == "tool"]
        assert called == answered


def test_compressing_again_changes_nothing(thousand: Path) -> None:
    flags = [f"--target_max_tokens={TARGET}", "--summary_target_tokens=200", summarizer(thousand)]
    (thousand / "part.jsonl").write_bytes(b"".join((thousand / "out.jsonl").read_bytes().splitlines(True)[:60]))
    code, *_ = compress("--input=part.jsonl", "--output=again.jsonl", *flags, home=thousand)
    assert code == 0
    for one, other in zip(read_lines(thousand / "part.jsonl"), read_lines(thousand / "again.jsonl"), strict=True):
        if not one["compression_metrics"]["still_over_limit"]:
            assert without_metrics(other) == without_metrics(one)
            assert not other["compression_metrics"]["was_compressed"]


def test_the_metrics_add_up(thousand: Path) -> None:
    told, rows_ = file_metrics(thousand / "out_metrics.json"), metrics_of(thousand / "out.jsonl")
    assert told["summary"]["total_trajectories"] == 1000
    assert told["summary"]["trajectories_compressed"] == sum(each["was_compressed"] for each in rows_)
    assert told["summary"]["trajectories_still_over_limit"] == sum(each["still_over_limit"] for each in rows_)
    assert told["tokens"]["total_before"] == sum(each["original_tokens"] for each in rows_)
    assert told["tokens"]["total_after"] == sum(each["compressed_tokens"] for each in rows_)
    assert told["summarization"]["total_api_calls"] == sum(each["summarization_api_calls"] for each in rows_)
    assert told["summarization"]["usage"]["total_tokens"] == 120 * told["summarization"]["requests"]
    assert told["tokenizer"] == "cl100k_base"
    assert {each["tokenizer"] for each in rows_} == {"cl100k_base"}
    assert {each["summary_model"] for each in rows_ if each["passes"]} == {"summary-1"}
    assert sum(bucket["before"] for bucket in told["histogram"]) == 1000


# --- one small file


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Three long rows and a short one."""
    write_dataset(tmp_path / "in.jsonl", [row(0), row(1, exchanges=1), row(2), row(3)])
    return tmp_path


def compressed(folder: Path, *flags: str, name: str = "out.jsonl") -> list[dict[str, Any]]:
    """The output's rows."""
    given = [flag for flag in SMALL if not any(flag.split("=")[0] == other.split("=")[0] for other in flags)]
    model = [] if any("summarization_model" in flag for flag in flags) else [summarizer(folder)]
    code, out, err = compress("--input=in.jsonl", f"--output={name}", *given, *model, *flags, home=folder)
    assert code == 0, out + err
    return read_lines(folder / name)


def test_a_row_that_needs_nothing_keeps_its_bytes(small: Path) -> None:
    odd = b'{ "conversations" : [{"from":"human","value":"caf\\u00e9"}] ,"n":1.50 }'
    (small / "in.jsonl").write_bytes(odd + b"\r\n\n" + b'{"no": "turns"}')
    code, *_ = compress("--input=in.jsonl", *SMALL, summarizer(small), "--no-per_trajectory", home=small)
    assert code == 0
    assert (small / "in_compressed.jsonl").read_bytes() == odd + b'\n{"no": "turns"}\n'


def test_metrics_stand_behind_everything_else_of_the_row_and_only_once(small: Path) -> None:
    (small / "in.jsonl").write_bytes(b'{ "a" : 1, "compression_metrics": {"old": 1}, "b": [2] }\n{}\n')
    compressed(small)
    first, second = (small / "out.jsonl").read_bytes().splitlines()
    assert first.count(b'"compression_metrics"') == 1
    assert first.startswith(b'{"a":1,"b":[2],"compression_metrics":{"original_tokens":')
    assert second.startswith(b'{"compression_metrics":{"original_tokens":0,')


def test_the_summary_stands_with_the_human_turn_before_it(small: Path) -> None:
    first = compressed(small)[0]
    said, was = first["conversations"], row(0)["conversations"]
    region = first["compression_metrics"]["compression_region"]
    assert (region["start_idx"], region["turns_count"]) == (4, region["end_idx"] - 4)
    assert said[0]["value"].startswith("You call tools.\n\n")
    assert said[1] == {"from": "human", "value": f"{was[1]['value']}\n\n{SUMMARY}"}
    assert said[2:4] == was[2:4]
    assert said[4:] == was[region["end_idx"] :]


def test_what_changes_nothing_changes_no_row(small: Path) -> None:
    again = compressed(small, name="again.jsonl")
    assert compressed(small, "--num_workers=0", "--max_concurrent_requests=1") == again
    assert compressed(small, "--num_workers=3", name="three.jsonl") == again


PLACES = {
    "compression.target_max_tokens": 1200,
    "compression.summary_target_tokens": 300,
    "protected_turns.first_system": False,
    "protected_turns.first_human": False,
    "protected_turns.first_gpt": False,
    "protected_turns.first_tool": False,
    "protected_turns.last_n_turns": 9,
    "output.add_summary_notice": False,
    "output.summary_notice_text": " There is a summary.",
    "processing.skip_under_target": False,
    "processing.save_over_limit": None,
    "metrics.per_trajectory": False,
}


@pytest.mark.parametrize("place", [place for place, value in PLACES.items() if value is not None])
def test_every_key_that_shapes_rows_changes_them(place: str, tmp_path: Path) -> None:
    write_dataset(tmp_path / "in.jsonl", [row(0), row(1, exchanges=2)])
    section, key = place.split(".")
    config = tmp_path / "c.yaml"
    told: dict[str, Any] = {"compression": {"target_max_tokens": 900, "summary_target_tokens": 60}}
    if key in {"first_system", "first_human", "first_gpt", "first_tool"}:
        told["protected_turns"] = dict.fromkeys(("first_system", "first_human", "first_gpt", "first_tool"), False)
        told["protected_turns"][key] = True
    base = _rows_with(tmp_path, config, told, "base.jsonl")
    told.setdefault(section, {})[key] = PLACES[place]
    assert _rows_with(tmp_path, config, told, "changed.jsonl") != base


def _rows_with(folder: Path, config: Path, told: dict[str, Any], name: str) -> list[dict[str, Any]]:
    config.write_text(json.dumps(told))
    flags = [f"--config={config}", f"--output={name}", summarizer(folder), "--num_workers=1"]
    code, out, err = compress("--input=in.jsonl", *flags, home=folder)
    assert code == 0, out + err
    return read_lines(folder / name)


def test_rows_over_the_target_can_be_left_out(small: Path) -> None:
    write_dataset(
        small / "in.jsonl", [row(0, exchanges=1), {"conversations": turns(1, words=900)}, row(2, exchanges=1)]
    )
    kept = compressed(small, "--no-save_over_limit")
    assert [each.get("task_id") for each in kept] == ["t0", "t2"]
    told = file_metrics(small / "out_metrics.json")
    assert told["summary"]["total_trajectories"] == 3
    assert [(each["file"], each["row"]) for each in told["left_out"]] == [("in.jsonl", 1)]
    assert told["files"][0]["rows_written"] == 2


def test_a_single_large_result_can_be_shortened(small: Path) -> None:
    write_dataset(small / "in.jsonl", [{"conversations": turns(1, words=3000)}])
    (plain,) = compressed(small, name="plain.jsonl")
    assert plain["compression_metrics"]["still_over_limit"]
    assert plain["conversations"] == turns(1, words=3000)
    (short,) = compressed(small, "--shorten_turns")
    metrics = short["compression_metrics"]
    assert (metrics["shortened_turns"], metrics["still_over_limit"]) == (1, False)
    assert metrics["compressed_tokens"] <= 900
    assert metrics["summarization_api_calls"] == 0


@pytest.mark.parametrize("strategy", ["mask", "drop"])
def test_strategies_without_a_model(strategy: str, small: Path) -> None:
    code, out, err = compress("--input=in.jsonl", "--output=o.jsonl", *SMALL, f"--strategy={strategy}", home=small)
    assert code == 0, out + err
    first, short = read_lines(small / "o.jsonl")[:2]
    assert first["compression_metrics"]["was_compressed"] != first["compression_metrics"]["still_over_limit"]
    assert short["conversations"] == turns(1)
    assert file_metrics(small / "o_metrics.json")["summarization"]["requests"] == 0
    assert {each["strategy"] for each in metrics_of(small / "o.jsonl")} == {strategy}


def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> Any:
    """The files as a trainer reads them."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(folder / "home"))
    import datasets  # type: ignore[import-untyped] # noqa: PLC0415 - reads the variables on import

    files = [str(folder / name) for name in names]
    return datasets.load_dataset("json", data_files=files, split="train", cache_dir=str(folder / "cache"))


def test_output_loads_in_any_mix(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compressed(small)
    write_dataset(small / "short.jsonl", rows(3, exchanges=1))
    code, *_ = compress("--input=short.jsonl", "--output=short_out.jsonl", "--strategy=mask", home=small)
    assert code == 0
    table = loaded(small, monkeypatch, "short_out.jsonl", "out.jsonl")
    assert table.num_rows == 7
    assert table[3]["compression_metrics"]["was_compressed"]


def test_lone_surrogates_and_special_tokens_are_text(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = r'{"conversations":[{"from":"human","value":"<|endoftext|> \ud800 \u0000 <|im_start|>"}],"more":"\udfff"}'
    (small / "in.jsonl").write_text(odd + "\n" + json.dumps(row(1)) + "\n")
    first = compressed(small)[0]
    assert first["conversations"][0]["value"].startswith("<|endoftext|> \ufffd ")
    assert loaded(small, monkeypatch, "out.jsonl").num_rows == 2


def test_the_plot_is_a_picture(small: Path) -> None:
    code, out, err = compress(
        "--input=in.jsonl", "--output=o.jsonl", *SMALL, "--plot=p.png", "--strategy=drop", home=small
    )
    assert code == 0, out + err
    assert (small / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "p.png" in out


def test_the_example_file_runs(small: Path) -> None:
    example = ROOT / "datagen-config-examples" / "trajectory_compression.yaml"
    code, out, err = compress(
        f"--config={example}", "--input=in.jsonl", "--output=o.jsonl", summarizer(small), *SMALL, home=small
    )
    assert code == 0, out + err
    assert SUMMARY in all_text(read_lines(small / "o.jsonl")[0]["conversations"])


def test_a_dry_run_counts_and_writes_nothing(small: Path) -> None:
    before = sorted(small.iterdir())
    prices = ("--price_in=1", "--price_out=1")
    code, out, _ = compress("--input=in.jsonl", *SMALL, *prices, "--dry_run", "--json_summary", home=small)
    assert code == 0
    told = json.loads(out)
    assert (told["rows"], told["over_target"], told["requests"], told["output_tokens"]) == (4, 3, 3, 180)
    assert told["tokens"] > 3 * 2000
    assert told["cost_usd"] == pytest.approx((told["input_tokens"] + 180) / 1e6, abs=1e-4)
    assert sorted(small.iterdir()) == before
    code, out, _ = compress("--input=in.jsonl", *SMALL, "--dry_run", home=small)
    assert "3 model calls at least" in out
    assert sorted(small.iterdir()) == before


def test_a_dry_run_refuses_what_a_run_would_refuse(small: Path) -> None:
    script = summarizer(small)
    for more, said in (
        (["--summarization_model=scripted:none.yaml"], "cannot read the script"),
        (
            ["--summarization_model=m", "--base_url=http://127.0.0.1:9/v1", "--max_cost=1"],
            "the price of m is not known",
        ),
        ([script, "--output=in.jsonl"], "is an input"),
        ([script, "--output=in.jsonl/o.jsonl"], "cannot be written"),
    ):
        code, out, err = compress("--input=in.jsonl", *SMALL, "--dry_run", *more, home=small)
        assert (code, out) == (2, "")
        assert said in err
    compressed(small)
    flags = ["--input=in.jsonl", "--output=out.jsonl", script, *SMALL, "--dry_run"]
    code, _, err = compress(*flags, home=small)
    assert code == 2
    assert "go on with --resume" in err
    code, _, err = compress(*flags, "--resume", "--last_n_turns=2", home=small)
    assert code == 2
    assert "last_n_turns was 4" in err
    (small / "out.jsonl.work").rename(small / "elsewhere")
    code, _, err = compress(*flags, home=small)
    assert code == 2
    assert "out.jsonl exists" in err


def test_a_dry_run_goes_on_from_what_is_done(small: Path) -> None:
    whole = small / "whole.jsonl"
    compressed(small, name=whole.name)
    flags = ["--input=in.jsonl", "--output=whole.jsonl", summarizer(small), *SMALL, "--dry_run", "--resume"]
    journal = small / "whole.jsonl.work" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(line for line in lines if b'"row":0' in line or b'"row":1' in line))
    before = journal.read_bytes()
    code, out, err = compress(*flags, "--json_summary", home=small)
    assert code == 0, out + err
    told = json.loads(out)
    assert (told["rows"], told["done"], told["over_target"], told["requests"]) == (4, 2, 2, 2)
    code, out, err = compress(*flags, home=small)
    assert "4 in 1 file, 2 are done, the others have " in out
    assert journal.read_bytes() == before


def test_what_became_of_the_rows_adds_up(small: Path) -> None:
    odd: list[dict[str, Any]] = [
        {"text": "no turns"},
        {"conversations": turns(1, words=900)},
        {"conversations": [{"from": "x", "value": ""}]},
    ]
    write_dataset(small / "in.jsonl", [*rows(3), row(3, exchanges=1), *odd])
    code, out, err = compress("--input=in.jsonl", "--output=o.jsonl", *SMALL, summarizer(small), home=small)
    assert code == 1, out + err
    assert "7: 3 compressed, 1 within target, 1 still over target, 1 without turns, 1 failed, 0 left out" in out
    assert sum(file_metrics(small / "o_metrics.json")["states"].values()) == 7


def test_code_of_a_tokenizer_may_be_trusted_and_is_not_run(small: Path) -> None:
    code, out, err = compress("--input=in.jsonl", *SMALL, "--strategy=mask", "--trust_remote_code", home=small)
    assert code == 0, out + err
    assert err.count("trust_remote_code: nothing makes use of it") == 1


def test_requests_carry_what_the_file_says(small: Path) -> None:
    told: dict[str, dict[str, Any]] = {
        "compression": {"target_max_tokens": 900, "summary_target_tokens": 60},
        "summarization": {"model": "m-1", "temperature": 0.7},
        "metrics": {"enabled": False, "output_file": "unused.json"},
        "output": {"output_suffix": ".short"},
    }
    with EndpointProcess(rules=[{"message": {"content": SUMMARY}}]) as endpoint:
        told["summarization"]["base_url"] = endpoint.url
        (small / "c.yaml").write_text(json.dumps(told))
        code, out, err = compress("--config=c.yaml", "--input=in.jsonl", home=small)
        assert code == 0, out + err
        bodies = endpoint.stats()["bodies"]
    assert len(bodies) == 3
    for body in bodies:
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("m-1", 0.7, 120)
        (message,) = body["messages"]
        assert "about 60 tokens" in message["content"]
        assert "cat 2" in message["content"]
    assert {path.name for path in small.iterdir()} == {
        "in.jsonl", "c.yaml", "in.short.jsonl", "in.short.jsonl.work"
    }  # fmt: skip


def test_the_metrics_file_can_be_named(small: Path) -> None:
    compressed(small, "--output_file=told.json")
    assert file_metrics(small / "told.json")["summary"]["trajectories_compressed"] == 3
    assert not (small / "out_metrics.json").exists()


def test_the_summary_as_one_json_object(small: Path) -> None:
    code, out, _ = compress(
        "--input=in.jsonl", "--output=o.jsonl", *SMALL, summarizer(small), "--json_summary", "--quiet", home=small
    )
    assert code == 0
    told = json.loads(out)
    assert told["exit_code"] == 0
    assert told["metrics"]["summary"]["trajectories_compressed"] == 3
    assert told["files"] == {"output": "o.jsonl", "metrics": "o_metrics.json"}
