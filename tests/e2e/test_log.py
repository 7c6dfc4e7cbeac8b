"""What a run says of its rows and of its files: run.log and stderr."""

from pathlib import Path

from tests.e2e.inputs import small_run
from tests.e2e.program import run_program, statistics

SECRET = "s3cr3t-that-nobody-may-read"
PROMPT = f"Look\nat {SECRET} and then {'on ' * 100}"


def ends(home: Path) -> list[str]:
    """The log lines of rows that ended, without time and counts."""
    lines = (home / "data/r/run.log").read_text(encoding="utf-8").splitlines()
    return [line.partition("; ")[2] for line in lines if ":P" in line]


def test_a_rows_line_shows_the_head_of_its_prompt_and_of_its_error(tmp_path: Path) -> None:
    rows = [{"prompt": PROMPT, "setup": "echo begun; exit 7"}, {"prompt": "short"}]
    flags = [*small_run(tmp_path, rows), "--log_prefix_chars=40", "--concurrency=1", "--verbose"]
    code, _, err = run_program(*flags, home=tmp_path, MY_TOKEN=SECRET)
    assert code == 1, err
    prompt, error = "Look at [REDACTED:MY_TOKEN] and then on", "the row's setup command ended with 7: be"
    shown = [f"prompt: {prompt}; error: {error}", "prompt: short"]
    assert ends(tmp_path) == shown
    assert all(line in err for line in shown)


def test_texts_can_be_kept_out_of_the_log(tmp_path: Path) -> None:
    assert run_program(*small_run(tmp_path), "--log_prefix_chars=0", home=tmp_path)[0] == 0
    assert ends(tmp_path) == ["", ""]
    assert "first" not in (tmp_path / "data/r/run.log").read_text(encoding="utf-8")


def test_lines_that_are_no_rows_are_said_once_and_counted(tmp_path: Path) -> None:
    flags = small_run(tmp_path)
    assert run_program(*flags, "--max_samples=1", home=tmp_path)[0] == 0
    assert statistics(tmp_path / "data/r")["foreign_lines"] == 0
    (journal,) = (tmp_path / "data/r").glob("batch_*.jsonl")
    with journal.open("ab") as file:
        file.write(b'{"no": "row"}\nnor this\n')
    code, _, err = run_program(*flags, "--resume", home=tmp_path)
    assert code == 0, err
    assert err.count("2 lines of the batch files are no rows") == 1
    assert statistics(tmp_path / "data/r")["foreign_lines"] == 2


def test_one_is_not_many(tmp_path: Path) -> None:
    flags = small_run(tmp_path, [{"prompt": "x"}])
    (tmp_path / "prompts.jsonl").write_bytes(b'{"prompt": "x"}\n{}\n')
    assert "1 bad row (" in run_program(*flags, home=tmp_path)[2]
    code, out, err = run_program(*flags, "--skip_bad_rows", home=tmp_path)
    assert code == 0, err
    assert " 1 request, " in out
    assert " 1 call, " in (tmp_path / "data/r/run.log").read_text(encoding="utf-8")
