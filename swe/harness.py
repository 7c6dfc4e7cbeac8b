"""How an instance's tests are run and their log is read: the script of the SWE-bench form, or one of our own like it.

Instances published for the harness 5 bring `eval_script`, `log_parser` and `eval_type`. For others the tests are put in
place from the test patch and run by `test_command`, else by pytest.
"""

import functools
import hashlib
import re
import shlex
from collections.abc import Callable
from typing import Any, Protocol, cast

from msgspec import Struct
from msgspec.structs import replace

from swe.logs import (
    END,
    EXIT_CODE,
    RESET_FAILED,
    START,
    STATUSES,
    Results,
    last_line,
    read_log,
    reset_problem,
    runner_problem,
)
from swe.types import Instance, Report
from swe.verdict import graded
from tools.errors import UsageProblem

_OURS = frozenset(
    f"parse_log_{name}"
    for name in ("pytest", "django", "astroid", "flask", "marshmallow", "pvlib", "pyvista", "sqlfluff", "xarray")
)  # those that read a log as ours do
_NO_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
_CHANGED = re.compile(r"^diff --git a/.* b/(.*)$(?!\ndeleted)", re.MULTILINE)
_CODE = "SWEBENCH_TEST_EXIT_CODE"
_SCRIPT = """\
#!/bin/bash
set -uxo pipefail
if [ -f /opt/miniconda3/bin/activate ]; then source /opt/miniconda3/bin/activate; conda activate testbed; fi
cd {cwd}
{tests}
: '{start}'
{command}
: '{end}'
"""
_TESTS = """\
git config --global --add safe.directory "$PWD"
tests=$(mktemp -d)
(
  export GIT_INDEX_FILE=$tests/index
  git read-tree {base} && git apply --cached --whitespace=nowarn - &&
  git diff --cached --no-renames --name-only -z --diff-filter=D {base} >$tests/gone &&
  git diff --cached --no-renames --name-only -z --diff-filter=d {base} >$tests/here &&
  xargs -0 rm -f -- <$tests/gone && git checkout-index -f -z --stdin <$tests/here
) <<'{mark}' || echo '{failed}'
{patch}
{mark}"""
# They are as the base commit and the test patch have them, whatever the model made of these files.


class PlannedTests(Struct, frozen=True, kw_only=True):
    """`script`: for bash, in the patched checkout. `read`: the verdict that its log gives."""

    script: str
    read: Callable[[str], Report]


def plan_tests(instance: Instance, cwd: str) -> PlannedTests:
    """How the tests of an instance run in its repository at `cwd`. UsageProblem where its log cannot be read here."""
    parser, fail_only = str(instance.rest.get("log_parser") or ""), instance.rest.get("eval_type") == "fail_only"
    parse = _parser(parser, instance) if parser else None
    silent = _silent() if fail_only else None

    theirs = str(instance.rest.get("eval_script") or "")

    def read(log: str) -> Report:
        results = read_log(log, parse, silent=silent)
        report = graded(instance, results, fail_only=fail_only)
        if results is not None:
            return report
        if problem := reset_problem(log):
            return replace(report, error=problem)
        if not theirs and (problem := runner_problem(log)):
            report = replace(report, verdict="error", error=problem)  # of theirs the harness counts it as unresolved
        return replace(report, error=f"{report.error}: {last_line(log)}")

    return PlannedTests(script=_with_exit_code(theirs or _script(instance, cwd)), read=read)


def _script(instance: Instance, cwd: str) -> str:
    command = instance.test_command or shlex.join(["python", "-m", "pytest", "-rA", *_test_files(instance)])
    return _SCRIPT.format(
        cwd=shlex.quote(cwd),
        tests=_tests(instance),
        start=START,
        command=f"(\n{command}\n)",  # it may end with `exit`
        end=END,
    )


def _tests(instance: Instance) -> str:
    patch = instance.test_patch.removesuffix("\n")
    if not patch:
        return ":"
    mark = f"EOF_{hashlib.sha256(patch.encode()).hexdigest()[:16]}"
    return _TESTS.format(base=shlex.quote(instance.base_commit), patch=patch, mark=mark, failed=RESET_FAILED)


def _test_files(instance: Instance) -> list[str]:
    return [name for name in _CHANGED.findall(instance.test_patch) if not name.endswith(_NO_TESTS)]


def _with_exit_code(script: str) -> str:
    """The script that also tells how its tests' command ended, outside the marked part."""
    lines = script.split("\n")
    end = next((number for number, line in enumerate(lines) if END in line), None)
    if end is not None:
        lines[end : end + 1] = [f"{_CODE}=$?", lines[end], f'echo "{EXIT_CODE}: ${_CODE}"']
    return "\n".join(lines)


# --- the harness's own parsers


class _Parser(Protocol):
    def __call__(self, log: str, test_spec: Any, /) -> dict[str, str]: ...


def _parser(name: str, instance: Instance) -> Callable[[str], Results] | None:
    """The one that the package `swebench` has by that name; None = ours will do."""
    try:
        from swebench.harness.log_parsers import PARSER_REGISTRY  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError:
        if name in _OURS:
            return None
        raise UsageProblem(f"logs for {name} are read by the package swebench: pip install 'swebench>=5'") from None
    if name not in PARSER_REGISTRY:
        raise UsageProblem(f"the package swebench has no log_parser {name!r}")
    return functools.partial(_translated, cast(_Parser, PARSER_REGISTRY[name]), instance)


def _translated(parser: _Parser, instance: Instance, log: str) -> Results:
    """Of what the harness tells its parsers they look at instance_id and version."""
    return {name: STATUSES[status] for name, status in parser(log, instance).items() if status in STATUSES}


def _silent() -> re.Pattern[str]:
    try:
        from swebench.harness.grading import SUITE_RAN  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError:
        raise UsageProblem(
            "logs that name only failures are read by the package swebench: pip install 'swebench>=5'"
        ) from None
    return cast("re.Pattern[str]", SUITE_RAN)
