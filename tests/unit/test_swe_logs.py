"""Test logs are read as the SWE-bench harness reads them."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from swebench.harness.log_parsers import PARSER_REGISTRY  # type: ignore[import-untyped]

from swe.logs import END, EXIT_CODE, START, STATUSES, Results, parse_log, read_log

PYTEST = """\
import pytest, unittest

def test_good(): print("PASSED is only a word here")
def test_bad(): assert 1 - 1, "a - b"
@pytest.mark.skip(reason="later")
def test_skipped(): pass
@pytest.mark.xfail
def test_expected(): assert 0
@pytest.mark.parametrize("text", ["a b", "[x]", "ü", "a - b"])
def test_each(text): assert text != "ü"
@pytest.fixture
def broken(): raise OSError
def test_error(broken): pass
class TestOne:
    def test_in_class(self): pass
"""
UNITTEST = """\
import sys, unittest

class One(unittest.TestCase):
    def test_good(self): pass
    def test_bad(self): self.fail()
    def test_error(self): raise OSError
    def test_told(self):
        "it is told ... in a line"
    def test_noisy(self): print("noise ... ok", file=sys.stderr)
    def test_noisy_bad(self):
        print("ok", file=sys.stderr)
        self.fail()
    @unittest.skip("later")
    def test_skipped(self): pass
    @unittest.expectedFailure
    def test_expected(self): self.fail()
    def test_parts(self):
        for part in 0, 1:
            with self.subTest(part=part): self.assertFalse(part)

class Broken(unittest.TestCase):
    @classmethod
    def setUpClass(cls): raise OSError
    def test_never(self): pass
"""


def log_of(folder: Path, source: str, *command: str) -> str:
    (folder / "test_it.py").write_text(source)
    words = [sys.executable, "-m", *command]
    run = subprocess.run(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return run.stdout


def harness(parser: str, log: str) -> dict[str, Any]:
    found = PARSER_REGISTRY[parser](log, None)
    return {name: STATUSES[status] for name, status in found.items()}


@pytest.mark.parametrize("more", [(), ("--color=yes",), ("-v",)])
def test_pytest(tmp_path: Path, more: tuple[str, ...]) -> None:
    log = log_of(tmp_path, PYTEST, "pytest", "-rA", "-p", "no:cacheprovider", *more)
    ours = parse_log(log)
    assert ours["test_it.py::test_good"] == "passed"
    assert ours["test_it.py::test_bad"] == "failed"
    assert ours["test_it.py::test_expected"] == "xfail"
    assert ours["test_it.py::test_error"] == "error"
    assert ours["test_it.py::TestOne::test_in_class"] == "passed"
    assert ours["test_it.py::test_each[[x]]"] == "passed"
    assert not [name for name in ours if "[1]" in name]
    if not more:
        assert ours["test_it.py::test_each[a b]"] == "passed"
        assert {name: result for name, result in ours.items() if " " not in name} == harness("parse_log_pytest", log)


def test_unittest(tmp_path: Path) -> None:
    log = log_of(tmp_path, UNITTEST, "unittest", "-v")
    ours = parse_log(log)

    def name(test: str) -> str:
        return f"{test} (test_it.One.{test})"

    assert {test: ours.get(name(f"test_{test}")) for test in
            ("good", "bad", "error", "skipped", "expected", "noisy", "noisy_bad", "told", "parts")} == {
        "good": "passed", "bad": "failed", "error": "error", "skipped": "skipped", "expected": "xfail",
        "noisy": "passed", "noisy_bad": "failed", "told": "passed", "parts": "failed",
    }  # fmt: skip
    assert ours["it is told ... in a line"] == "passed"
    assert "test_never (test_it.Broken.test_never)" not in ours
    theirs = harness("parse_log_django", log)
    for test in ("good", "bad", "error", "skipped"):
        assert ours[name(f"test_{test}")] == theirs[name(f"test_{test}")]


def marked(body: str, code: int = 0) -> str:
    return f"PASSED before\n+ : '{START}'\n{body}\n+ : '{END}'\n{EXIT_CODE}: {code}\n"


def test_only_the_marked_part_is_read() -> None:
    assert read_log(marked("PASSED a::b")) == {"a::b": "passed"}
    assert read_log(marked("nothing")) == {"before": "passed"}, "runners may write past the marks"


@pytest.mark.parametrize(
    "log",
    [
        "",
        "PASSED a::b",
        f"{START}\nPASSED a::b",
        f"{END}\nPASSED a::b",
        marked("PASSED a::b") + ">>>>> Reset Failed",
        marked("PASSED a::b\n>>>>> Tests Errored"),
        marked("PASSED a::b", code=1),
        marked("").replace("PASSED before", ""),
    ],
)
def test_what_tells_nothing(log: str) -> None:
    assert read_log(log) is None


def test_a_failed_command_is_told_by_a_failed_test() -> None:
    assert read_log(marked("FAILED a::b - x\nPASSED a::c", code=1)) == {"a::b": "failed", "a::c": "passed"}
    assert read_log(marked("ERROR a.py", code=2)) == {"a.py": "error"}


def test_another_parser_reads_the_marked_part() -> None:
    def parse(log: str) -> Results:
        return {log.strip(" +:'\n"): "passed"}

    assert read_log(marked("x y"), parse) == {"x y": "passed"}


def test_a_log_without_a_test_may_be_good_where_only_failures_are_named() -> None:
    silent = re.compile(r"[1-9]\d* specs?, 0 failures")
    log = marked("3 specs, 0 failures").replace("PASSED before", "")
    assert read_log(log, silent=silent) == {}
    assert read_log(log.replace("3 specs", "0 specs"), silent=silent) is None
