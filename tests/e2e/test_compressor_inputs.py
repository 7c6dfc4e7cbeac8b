"""Where the compressor's rows come from and go to, and what it refuses before anything is spent."""

import gzip
import json
import os
from pathlib import Path

import pytest
import zstandard

from tests.e2e.compressing import SMALL, compress, file_metrics, row, rows, without_metrics
from tests.e2e.program import read_lines, write_dataset

DROP = ("--strategy=drop", "--quiet", *SMALL)


def packed(folder: Path, name: str, count: int) -> list[str]:
    """A file of rows, compressed as its name says; their ids."""
    made = [{**each, "task_id": f"{name} {number}"} for number, each in enumerate(rows(count))]
    content = "".join(json.dumps(each) + "\n" for each in made).encode()
    if name.endswith(".gz"):
        content = gzip.compress(content)
    elif name.endswith(".zst"):
        content = zstandard.ZstdCompressor().compress(content)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return [each["task_id"] for each in made]


def ids(path: Path) -> list[str]:
    """The ids of an output's rows, all of them compressed."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    elif path.suffix == ".zst":
        content = zstandard.ZstdDecompressor().decompressobj().decompress(content)
    found = [json.loads(line) for line in content.splitlines()]
    assert all(each["compression_metrics"]["was_compressed"] for each in found)
    return [each["task_id"] for each in found]


@pytest.mark.parametrize("there", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("then", ["b.jsonl", "b.jsonl.gz", "b.jsonl.zst"])
def test_files_are_compressed_as_their_names_say(there: str, then: str, tmp_path: Path) -> None:
    wanted = packed(tmp_path, there, 2)
    assert compress(f"--input={there}", f"--output={then}", *DROP, home=tmp_path)[0] == 0
    assert ids(tmp_path / then) == wanted


@pytest.mark.parametrize(
    ("there", "then"), [("a.jsonl", "a_compressed.jsonl"), ("a.b.jsonl.gz", "a.b_compressed.jsonl.gz")]
)
def test_an_output_without_a_name(there: str, then: str, tmp_path: Path) -> None:
    wanted = packed(tmp_path, there, 2)
    assert compress(f"--input={there}", *DROP, home=tmp_path)[0] == 0
    assert ids(tmp_path / then) == wanted
    stem = then.partition(".jsonl")[0]
    assert file_metrics(tmp_path / f"{stem}_metrics.json")["summary"]["trajectories_compressed"] == 2


def test_a_directory(tmp_path: Path) -> None:
    wanted = {name: packed(tmp_path / "in", name, 2) for name in ("b.jsonl", "a.jsonl.gz", "c.jsonl.zst")}
    (tmp_path / "in" / "empty.jsonl").write_bytes(b"")
    (tmp_path / "in" / "notes.txt").write_text("no rows")
    packed(tmp_path / "in" / "deeper", "d.jsonl", 1)
    assert compress("--input=in", *DROP, home=tmp_path)[0] == 0
    written = tmp_path / "in_compressed"
    assert {path.name for path in written.iterdir()} == {*wanted, "empty.jsonl", "compression_metrics.json"}
    assert {name: ids(written / name) for name in wanted} == wanted
    told = file_metrics(written / "compression_metrics.json")
    assert [each["rows"] for each in told["files"]] == [2, 2, 2, 0]
    assert (tmp_path / "in_compressed.work" / "journal.jsonl").exists()


@pytest.mark.parametrize("given", ["in", "in/*.jsonl"])
def test_a_file_with_several_names_is_taken_once(given: str, tmp_path: Path) -> None:
    wanted = packed(tmp_path / "in", "b.jsonl", 2)
    packed(tmp_path, "elsewhere.jsonl", 1)
    (tmp_path / "in" / "a.jsonl").symlink_to("b.jsonl")
    (tmp_path / "in" / "c.jsonl").hardlink_to(tmp_path / "in" / "b.jsonl")
    (tmp_path / "in" / "d.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    assert compress(f"--input={given}", "--output=out", *DROP, home=tmp_path)[0] == 0
    assert {path.name for path in (tmp_path / "out").glob("*.jsonl")} == {"b.jsonl", "d.jsonl"}
    assert ids(tmp_path / "out" / "b.jsonl") == wanted


def test_a_run_directory_is_its_merged_file_alone(tmp_path: Path) -> None:
    run = tmp_path / "data" / "run"
    wanted = packed(run, "trajectories.jsonl", 3)
    packed(run, "batch_0.jsonl", 3)
    packed(run, "failures.jsonl", 3)
    assert compress("--input=data/run", *DROP, home=tmp_path)[0] == 0
    written = tmp_path / "data" / "run_compressed"
    assert sorted(path.name for path in written.iterdir()) == ["compression_metrics.json", "trajectories.jsonl"]
    assert ids(written / "trajectories.jsonl") == wanted
    assert compress("--input=data/run/", "--output=one.jsonl", *DROP, home=tmp_path)[0] == 0
    assert ids(tmp_path / "one.jsonl") == wanted
    assert compress("--input=one.jsonl", "--output=new/", *DROP, "--no-skip_under_target", home=tmp_path)[0] == 0
    assert (tmp_path / "new" / "one.jsonl").exists()
    assert (tmp_path / "new.work" / "journal.jsonl").exists()


def test_a_run_directory_that_was_not_merged_says_how(tmp_path: Path) -> None:
    packed(tmp_path / "run", "batch_0.jsonl", 1)
    code, _, err = compress("--input=run", *DROP, home=tmp_path)
    assert code == 2
    assert "--finalize" in err


def test_a_glob(tmp_path: Path) -> None:
    wanted = [packed(tmp_path / "x", name, 1) for name in ("1.jsonl", "2.jsonl")]
    packed(tmp_path / "x", "other.jsonl", 1)
    assert compress("--input=x/[0-9].jsonl", "--output=y", *DROP, home=tmp_path)[0] == 0
    assert [ids(tmp_path / "y" / name) for name in ("1.jsonl", "2.jsonl")] == wanted
    assert not (tmp_path / "y" / "other.jsonl").exists()
    packed(tmp_path / "x" / "deep", "1.jsonl", 1)
    assert compress("--input=x/**/1.jsonl", "--output=z", *DROP, home=tmp_path)[0] == 0
    assert ids(tmp_path / "z" / "1.jsonl") == ids(tmp_path / "z" / "deep" / "1.jsonl") == ["1.jsonl 0"]


def runs(folder: Path, *names: str) -> None:
    """Run directories, each with a merged file of so many rows as it has a number."""
    for number, name in enumerate(names, 1):
        packed(folder / name, "trajectories.jsonl", number)
        for part in ("batch_0.jsonl", "failures.jsonl"):
            packed(folder / name, part, 1)
        (folder / name / "run.json").write_text("{}")


def test_of_what_matches_in_a_run_directory_the_merged_file_alone_is_taken(tmp_path: Path) -> None:
    runs(tmp_path, "rd")
    loud = [flag for flag in DROP if flag != "--quiet"]
    for more, name in ((["--dry_run"], "y/"), ([], "y/")):
        code, out, err = compress("--input=rd/*.jsonl", f"--output={name}", *loud, *more, home=tmp_path)
        assert code == 0, out + err
        assert "left out of input rd/*.jsonl: 2 in run directories, of which trajectories.jsonl alone" in err
    assert sorted(path.name for path in (tmp_path / "y").iterdir()) == [
        "compression_metrics.json",
        "trajectories.jsonl",
    ]
    code, _, err = compress("--input=rd/batch_*.jsonl", "--output=z", *DROP, home=tmp_path)
    assert code == 2
    assert "no file matches but 1 in run directories" in err


@pytest.mark.parametrize("given", ["runs/*", "runs/*/trajectories.jsonl", "runs/**", "runs/*/*.jsonl"])
def test_a_glob_over_runs_keeps_their_names(given: str, tmp_path: Path) -> None:
    runs(tmp_path / "runs", "a", "b")
    assert compress("--input=runs/a/trajectories.jsonl", "--output=runs/o.jsonl", *DROP, home=tmp_path)[0] == 0
    (tmp_path / "runs" / "o.jsonl").unlink()
    (tmp_path / "runs" / "o_metrics.json").unlink()
    code, out, err = compress(f"--input={given}", "--output=out", *DROP, home=tmp_path)
    assert code == 0, out + err
    files = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert files == {"a/trajectories.jsonl", "b/trajectories.jsonl", "compression_metrics.json"}
    assert len(ids(tmp_path / "out" / "b" / "trajectories.jsonl")) == 2


def test_a_glob_over_runs_wants_them_merged(tmp_path: Path) -> None:
    runs(tmp_path / "runs", "a", "b")
    (tmp_path / "runs" / "b" / "trajectories.jsonl").unlink()
    code, _, err = compress("--input=runs/*", "--output=out", *DROP, home=tmp_path)
    assert code == 2
    assert "--finalize --output runs/b" in err


def test_standard_input_is_kept_for_a_resume(tmp_path: Path) -> None:
    packed(tmp_path, "in.jsonl", 3)
    content = (tmp_path / "in.jsonl").read_bytes()
    code, out, err = compress("--input=-", "--output=o.jsonl", *DROP, home=tmp_path, stdin=content)
    assert code == 0, out + err
    assert compress("--input=in.jsonl", "--output=p.jsonl", *DROP, home=tmp_path)[0] == 0
    assert (tmp_path / "o.jsonl").read_bytes() == (tmp_path / "p.jsonl").read_bytes()
    again = ("--input=o.jsonl.work/stdin.jsonl", "--output=o.jsonl", "--resume")
    assert compress(*again, *DROP, home=tmp_path)[0] == 0
    code, _, err = compress("--input=-", "--output=q.jsonl", *DROP, home=tmp_path, stdin=b"no row\n")
    assert code == 2
    assert not (tmp_path / "q.jsonl.work").exists()
    code, *_ = compress("--input=-", "--output=o.jsonl", "--resume", *DROP, home=tmp_path, stdin=b"{}\n")
    assert code == 2
    assert (tmp_path / "o.jsonl.work" / "stdin.jsonl").read_bytes() == content
    before = sorted(tmp_path.iterdir())
    assert compress("--input=-", "--output=r", *DROP, "--dry_run", home=tmp_path, stdin=content)[0] == 0
    assert sorted(tmp_path.iterdir()) == before


def test_lines_of_every_kind(tmp_path: Path) -> None:
    """A byte order mark, CRLF, blank lines, no last newline, line separators of Unicode within a row."""
    first, second, third = (json.dumps(row(number, text="\u2028\u0085"), ensure_ascii=False) for number in range(3))
    (tmp_path / "in.jsonl").write_bytes(f"\ufeff{first}\r\n\r\n \n{second}\n{third}".encode())
    assert compress("--input=in.jsonl", "--output=o.jsonl", *DROP, home=tmp_path)[0] == 0
    assert ids(tmp_path / "o.jsonl") == ["t0", "t1", "t2"]
    assert {each["text"] for each in read_lines(tmp_path / "o.jsonl")} == {"\u2028\u0085"}


@pytest.mark.parametrize("output", [".", "./", "../here", "below/.."])
def test_the_folder_where_one_is(output: str, tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / "below").mkdir(parents=True)
    write_dataset(tmp_path / "in.jsonl", [row(0)])
    code, _, err = compress("--input=../in.jsonl", f"--output={output}", *DROP, home=here)
    assert code == 0, err
    assert ids(here / "in.jsonl") == ["t0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "here.work", "in.jsonl"]


@pytest.mark.parametrize(("levels", "is_bad"), [(197, False), (250, True), (900, True), (5000, True)])
def test_how_deep_a_row_may_be_nested(levels: int, is_bad: bool, tmp_path: Path) -> None:
    nested = "[" * levels + "]" * levels
    (tmp_path / "in.jsonl").write_text(f'{json.dumps(row(0))[:-1]}, "more": {nested}}}')
    code, _, err = compress("--input=in.jsonl", "--output=o.jsonl", *DROP, home=tmp_path)
    assert code == (2 if is_bad else 0), err
    assert ("in.jsonl:1: nested deeper than 200 levels" in err) == is_bad


def test_bad_rows_are_all_named_and_nothing_is_written(tmp_path: Path) -> None:
    good = json.dumps(row(0))
    bad = ["[1]", "{", '{"a": NaN}', '"text"', '{"a": 1e999}', '{"a": 1} x']
    (tmp_path / "in.jsonl").write_text("\n".join([good, "", *bad, good]))
    code, out, err = compress("--input=in.jsonl", "--output=o.jsonl", *DROP, home=tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith("error: 6 bad rows\n")
    assert [line.partition(": ")[0] for line in err.splitlines()[1:]] == [f"in.jsonl:{n}" for n in range(3, 9)]
    assert os.listdir(tmp_path) == ["in.jsonl"]  # noqa: PTH208


@pytest.mark.parametrize("content", [b"", b"\n \n"])
@pytest.mark.parametrize("flags", [(), ("--sample_percent=5",)])
def test_an_empty_file_gives_an_empty_one(content: bytes, flags: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(content)
    code, out, err = compress("--input=in.jsonl", "--strategy=drop", "--json_summary", *flags, home=tmp_path)
    assert code == 0
    assert err == "nothing to do: there is no row\n"
    assert json.loads(out)["rows"] == 0
    assert (tmp_path / "in_compressed.jsonl").read_bytes() == b""
    told = file_metrics(tmp_path / "in_compressed_metrics.json")
    assert (told["summary"]["total_trajectories"], told["files"][0]["rows_written"]) == (0, 0)
    assert not (tmp_path / "in_compressed.work").exists()
    code, out, _ = compress("--input=in.jsonl", "--output=o.jsonl", "--strategy=drop", *flags, home=tmp_path)
    assert code == 0
    assert "0 -> 0 (100.0%) " in out


def test_a_sample_keeps_the_order_and_is_the_seeds(tmp_path: Path) -> None:
    write_dataset(tmp_path / "in.jsonl", rows(40, exchanges=1))

    def drawn(name: str, *flags: str) -> list[int]:
        assert compress("--input=in.jsonl", f"--output={name}", *DROP, *flags, home=tmp_path)[0] == 0
        return [int(each["task_id"][1:]) for each in read_lines(tmp_path / name)]

    first = drawn("a.jsonl", "--sample_percent=25")
    assert len(first) == 10
    assert first == sorted(first)
    assert drawn("b.jsonl", "--sample_percent=25", "--seed=42") == first
    assert drawn("c.jsonl", "--sample_percent=25", "--seed=7") != first
    assert len(drawn("d.jsonl", "--sample_percent=1")) == 1
    assert drawn("e.jsonl", "--sample_percent=100") == list(range(40))
    was = read_lines(tmp_path / "in.jsonl")
    assert [without_metrics(each) for each in read_lines(tmp_path / "a.jsonl")] == [was[place] for place in first]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--input=no.jsonl",), "input no.jsonl does not exist"),
        (("--input=no.jsonl", "--output=o.jsonl"), "input no.jsonl does not exist"),
        (("--input=no*.jsonl",), "give --output"),
        (("--input=no*.jsonl", "--output=o"), "no file matches"),
        (("--input=empty",), "no file in it ends in"),
        (("--input=in.jsonl", "--output=in.jsonl"), "is an input"),
        (("--input=in.jsonl", "--output_suffix="), "is an input"),
        (("--input=in.jsonl", "--output_suffix=/x"), "output_suffix"),
        (("--input=-",), "--output"),
        (("--input=in.jsonl", "--output=-"), "not -"),
        (("--input=in.jsonl", "--output=/"), "output /: expected a file or a directory"),
        (("--input=/", "--output_suffix=x"), "input /: expected a file or a directory"),
        (("--input=in.jsonl", "--output=."), "is an input"),
        (("--input=in.jsonl", "--output=./two/.."), "is an input"),
        (("--input=in.jsonl", "--output=full"), "full/in.jsonl is a directory"),
        (("--input=two", "--output=o.jsonl"), "expected a directory"),
        (("--input=two", "--output=two"), "one of the inputs the next time"),
        (("--input=two/../two/", "--output=two/c/../"), "one of the inputs the next time"),
        (("--input=in.jsonl", "--output=there.jsonl"), "there.jsonl exists"),
        (("--input=in.jsonl", "--output=there.jsonl", "--resume"), "there.jsonl exists"),
        (("--input=in.jsonl", "--output=o.jsonl", "--output_file=o.jsonl"), "this name"),
        (("--input=in.jsonl", "--output=o.jsonl", "--output_file=in.jsonl"), "is an input"),
        (("--input=in.jsonl", "--output=/proc/o.jsonl"), "/proc/o.jsonl"),
        (("--input=in.jsonl", "--plot=there.jsonl/p.png"), "there.jsonl/p.png"),
        (("--input=in.png", "--output=o.jsonl", "--plot=two/../in.png"), "is an input"),
        (("--input=in.jsonl", "--output=o.png", "--plot=two/../o.png"), "this name"),
        (("--input=in.jsonl", "--output=o.jsonl", "--output_file=m.png", "--plot=./m.png"), "this name"),
        (("--input=in.jsonl", "--output=o.jsonl", "--output_file=two/m.json"), "output_file: expected a name"),
        (("--input=in.jsonl", "--output=o", "--output_file=.."), "is a directory"),
        (("--input=in.jsonl", "--output=x.jsonl"), "x_metrics.json exists"),
        (("--input=in.jsonl", "--output=x.jsonl.gz", "--resume"), "x_metrics.json exists"),
    ],
)
def test_places_that_cannot_be(flags: tuple[str, ...], told: str, tmp_path: Path) -> None:
    for name in ("in.jsonl", "in.png", "there.jsonl", "two/a.jsonl", "two/b.jsonl", "x_metrics.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_dataset(tmp_path / name, [row(0)])
    (tmp_path / "empty").mkdir()
    (tmp_path / "full" / "in.jsonl").mkdir(parents=True)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    code, out, err = compress(*flags, "--strategy=drop", home=tmp_path)
    assert (code, out) == (2, ""), err
    assert told in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == {
        path: when for path, when in before.items() if path.is_file()
    }
    assert {path.name for path in tmp_path.rglob("*")} == {path.name for path in before}
