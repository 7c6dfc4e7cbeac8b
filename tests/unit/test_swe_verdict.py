"""Verdicts, counts and the summary, against the harness's own code where it has one."""

import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swebench.harness.constants import EvalType  # type: ignore[import-untyped]
from swebench.harness.grading import get_eval_tests_report, get_resolution_status  # type: ignore[import-untyped]

from swe.harness import plan_tests as run_of
from swe.logs import END, EXIT_CODE, START, STATUSES, Results
from swe.types import Instance, Report, Verdict
from swe.verdict import counts_of, fingerprint, graded, run_report
from tools.errors import UsageProblem

NAMES = ["a::x", "a::y", "a::y[1]", "a::y[1-b]", "a::y[1", "a::y[", "a::z[2]"]
TESTS = st.lists(st.sampled_from(NAMES), unique=True).map(tuple)


def instance(**fields: Any) -> Instance:
    return Instance(instance_id="made__one-1", **fields)


@settings(deadline=None)
@given(
    fixes=TESTS,
    keeps=TESTS,
    results=st.dictionaries(st.sampled_from(NAMES), st.sampled_from(sorted(STATUSES.values()))),
    fail_only=st.booleans(),
)
def test_verdicts_are_those_of_the_harness(
    fixes: tuple[str, ...], keeps: tuple[str, ...], results: Results, fail_only: bool
) -> None:
    ours = graded(instance(fail_to_pass=fixes, pass_to_pass=keeps), results, fail_only=fail_only)
    words = {status: word for word, status in STATUSES.items()}
    theirs = get_eval_tests_report(
        {name: words[result] for name, result in results.items()},
        {"FAIL_TO_PASS": list(fixes), "PASS_TO_PASS": list(keeps)},
        eval_type=EvalType.FAIL_ONLY if fail_only else EvalType.PASS_AND_FAIL,
    )
    assert theirs["FAIL_TO_PASS"] == {
        "success": list(ours.fail_to_pass_passed),
        "failure": list(ours.fail_to_pass_failed),
    }
    assert theirs["PASS_TO_PASS"] == {
        "success": list(ours.pass_to_pass_passed),
        "failure": list(ours.pass_to_pass_failed),
    }
    assert (ours.verdict == "resolved") == (get_resolution_status(theirs) == "RESOLVED_FULL")


def test_a_log_that_tells_nothing_leaves_it_unresolved() -> None:
    report = graded(instance(fail_to_pass=("a::x",)), None)
    assert (report.verdict, report.patch_applied, report.fail_to_pass_failed) == ("unresolved", False, ())


def test_counts_and_summary() -> None:
    verdicts: tuple[Verdict, ...] = ("resolved", "error", "resolved", "empty", "unresolved")
    reports = [Report(instance_id=f"i-{number}", verdict=verdict) for number, verdict in enumerate(verdicts)]
    assert counts_of(reports) == {"resolved": 2, "unresolved": 1, "empty": 1, "error": 1, "resolved_rate": 0.4}
    assert counts_of([]) == {"resolved": 0, "unresolved": 0, "empty": 0, "error": 0, "resolved_rate": 0.0}
    summary = run_report([f"i-{number}" for number in range(6)], reversed(reports))
    assert summary["completed_ids"] == ["i-0", "i-2", "i-4"]
    assert summary["incomplete_ids"] == ["i-5"]
    assert (summary["total_instances"], summary["submitted_instances"]) == (6, 5)
    assert summary["empty_patch_ids"] == ["i-3"]
    assert summary["instances"] == reports
    msgspec.json.encode(summary)


def test_the_fingerprint_is_of_patch_and_instance() -> None:
    one = instance(test_command="x")
    marks = {fingerprint(one, "p"), fingerprint(one, "q"), fingerprint(instance(test_command="y"), "p")}
    assert len(marks) == 3
    assert fingerprint(instance(test_command="x"), "p") in marks
    assert fingerprint(one, "p", ["docker"]) not in marks


@pytest.mark.parametrize(
    ("log", "problem"),
    [
        (f"+ : '{START}'\n/usr/bin/python3: No module named pytest\n+ : '{END}'\n{EXIT_CODE}: 1\n", "no module pytest"),
        (f"+ : '{START}'\nx: command not found\n+ : '{END}'\n{EXIT_CODE}: 127\n", "(exit code 127)"),
        (f"+ : '{START}'\nImportError: No module named pytest\n+ : '{END}'\n{EXIT_CODE}: 4\n", ""),
        (f"+ : '{START}'\nno tests ran\n+ : '{END}'\n{EXIT_CODE}: 5\n", ""),
    ],
)
def test_a_missing_runner_is_an_error_but_not_where_the_harness_counts(log: str, problem: str) -> None:
    report = run_of(instance(), "").read(log)
    assert report.verdict == ("error" if problem else "unresolved")
    assert problem in report.error
    own = instance(rest={"eval_script": f": '{END}'", "log_parser": "parse_log_pytest"})
    assert run_of(own, "").read(log).verdict == "unresolved"


def test_a_test_patch_that_does_not_apply_is_said() -> None:
    log = f"error: patch failed\nerror: tests/a.py: patch does not apply\n>>>>> Reset Failed\n+ : '{START}'\nOK\n"
    report = run_of(instance(), "").read(f"{log}+ : '{END}'\n")
    assert report.verdict == "unresolved"
    assert report.error == "the test patch does not apply: error: tests/a.py: patch does not apply"


def test_where_only_failures_are_named_the_exit_code_says_nothing() -> None:
    fields = {"log_parser": "parse_log_karma", "eval_type": "fail_only"}
    log = f"{START}\nExecuted 5 of 5 SUCCESS\n{END}\n{EXIT_CODE}: 1\n"
    assert run_of(instance(fail_to_pass=("anything",), rest=fields), "").read(log).verdict == "resolved"


@pytest.mark.parametrize(
    ("lines", "verdict"),
    [
        ("PASSED t.py::a[x y z]\nFAILED t.py::a[x y] - no", "resolved"),
        ("FAILED t.py::a[x y z] - no\nPASSED t.py::a[x y]", "unresolved"),
        ("PASSED t.py::a[x y z]\nERROR t.py::a[x y z] - no", "unresolved"),
        ("ERROR t.py::a[x y z]\nPASSED t.py::a[x y z]", "unresolved"),
        ("XFAIL t.py::a[x y z] - no", "unresolved"),
        ("SKIPPED [1] t.py:3: t.py::a[x y z]", "unresolved"),
    ],
)
def test_a_name_with_blanks_may_be_given_in_full(lines: str, verdict: str) -> None:
    log = f"{START}\n{lines}\n{END}\n"
    assert run_of(instance(fail_to_pass=("t.py::a[x y z]",)), "").read(log).verdict == verdict


def test_pytest_runs_the_files_of_the_test_patch_that_are_tests() -> None:
    patch = "".join(f"diff --git a/{name} b/{name}\n" for name in ("tests/test_a.py", "tests/data.json", "t/b c.py"))
    patch += "diff --git a/tests/gone.py b/tests/gone.py\ndeleted file mode 100644\n"
    script = run_of(instance(test_patch=patch, base_commit="0" * 40), "/test bed").script
    assert "\ncd '/test bed'\n" in script
    assert "\npython -m pytest -rA tests/test_a.py 't/b c.py'\n" in script


def test_a_script_of_the_instances_own_also_tells_how_its_command_ended() -> None:
    own = "#!/bin/bash\nrun\n: '>>>>> End Test Output'\ngit checkout x\n"
    script = run_of(instance(rest={"eval_script": own, "log_parser": "parse_log_pytest"}), "").script
    assert script.split("\n") == [
        "#!/bin/bash",
        "run",
        "SWEBENCH_TEST_EXIT_CODE=$?",
        ": '>>>>> End Test Output'",
        'echo ">>>>> Test Exit Code: $SWEBENCH_TEST_EXIT_CODE"',
        "git checkout x",
        "",
    ]


def test_the_harnesss_parsers_read_what_they_are_named_for() -> None:
    log = ">>>>> Start Test Output\nok 1 - it works\n# tests 1\n>>>>> End Test Output\n"
    fields = {"log_parser": "parse_log_tap", "eval_type": "pass_and_fail"}
    assert run_of(instance(fail_to_pass=("- it works",), rest=fields), "").read(log).verdict == "resolved"
    silent = {"log_parser": "parse_log_marked", "eval_type": "fail_only"}
    for told, verdict in [("12 specs, 0 failures", "resolved"), ("browser is gone", "unresolved")]:
        log = f">>>>> Start Test Output\n{told}\n>>>>> End Test Output\n"
        assert run_of(instance(fail_to_pass=("anything",), rest=silent), "").read(log).verdict == verdict


def test_an_unknown_parser_is_named() -> None:
    with pytest.raises(UsageProblem, match="no log_parser 'parse_log_none'"):
        run_of(instance(rest={"log_parser": "parse_log_none"}), "")


def test_without_the_package_swebench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "swebench.harness.log_parsers", None)
    monkeypatch.setitem(sys.modules, "swebench.harness.grading", None)
    log = ">>>>> Start Test Output\nPASSED a::b\n>>>>> End Test Output\n"
    plain = instance(fail_to_pass=("a::b",), rest={"log_parser": "parse_log_flask", "eval_type": "pass_and_fail"})
    assert run_of(plain, "").read(log).verdict == "resolved"
    for rest in ({"log_parser": "parse_log_cargo"}, {"eval_type": "fail_only"}):
        with pytest.raises(UsageProblem, match="pip install 'swebench>=5'"):
            run_of(instance(rest=rest), "")
