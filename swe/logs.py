"""Test logs -> what became of each test. Pure.

Names are those of the published instances: pytest's node ids; for unittest the text before ` ... `, which is
`test_x (module.Class.test_x)`, or the first line of the test's docstring where it has one (then both names are there).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

Result = Literal["passed", "failed", "skipped", "error", "xfail"]
Results = Mapping[str, Result]

START, END, EXIT_CODE = (f">>>>> {mark}" for mark in ("Start Test Output", "End Test Output", "Test Exit Code"))
"""What the SWE-bench harness puts around the tests' own output, and behind it."""
RESET_FAILED = ">>>>> Reset Failed"
_SPOILT = (">>>>> Patch Apply Failed", RESET_FAILED, ">>>>> Tests Errored", ">>>>> Tests Timed Out")

STATUSES: Mapping[str, Result] = {
    "PASSED": "passed",
    "FAILED": "failed",
    "SKIPPED": "skipped",
    "ERROR": "error",
    "XFAIL": "xfail",
}
"""pytest's words, which are the harness's too."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_STATUS = "|".join(STATUSES)
_STATUS_FIRST = re.compile(rf"({_STATUS})\s+(\S.*)")
_STATUS_LAST = re.compile(rf"(\S+::\S+)\s+({_STATUS})(?:\s.*)?")
_SKIP_COUNT = re.compile(r"\[\d+\]\s")  # `SKIPPED [2] file.py:3: why` sums up; it names no test

_UNITTEST: Mapping[str, Result] = {
    "ok": "passed",
    "FAIL": "failed",
    "ERROR": "error",
    "skipped": "skipped",
    "expected failure": "xfail",
}
_DOTS = " ... "
_METHOD = re.compile(r"\w+ \([\w.]+\)")
_HEADING = re.compile(r"(FAIL|ERROR): (\w+ \([\w.]+\))")
_NO_RUNNER = re.compile(r"^\S*python[\d.]*(?:\.exe)?: No module named (\S+)$", re.MULTILINE)  # of `python -m`
_CANNOT_RUN = ("126", "127")  # a shell's codes: found but no program, not found
_TRACE = "+"  # before what a shell says that it runs
_EXIT = re.compile(rf"^{EXIT_CODE}: *(-?\d+)", re.MULTILINE)


def read_log(
    log: str, parse: Callable[[str], Results] | None = None, *, silent: re.Pattern[str] | None = None
) -> Results | None:
    """What the marked part of a log says, else the whole of it; None where it is no log of tests that came to their
    end, or names tests and no failure although their command failed: then it does not tell what happened. `silent`: by
    what to know a log that names no test and is good all the same, however its command ended, as the harness has it."""
    if START not in log or END not in log or any(mark in log for mark in _SPOILT):
        return None
    parse = parse or parse_log
    results = parse(log.split(START)[1].split(END, maxsplit=1)[0]) or parse(log)
    code = _EXIT.search(log)
    if results and code and code[1] != "0" and not {"failed", "error"}.intersection(results.values()):
        return None
    return results if results or (silent and silent.search(log)) else None


def runner_problem(log: str) -> str:
    """Why the tests' command did not even start, "" if it may have."""
    code = _EXIT.search(log)
    if not code or code[1] == "0":
        return ""
    if code[1] in _CANNOT_RUN:
        return f"the tests' command cannot be run (exit code {code[1]})"
    missing = _NO_RUNNER.search(_marked(log))
    return f"the tests' runner is missing here: there is no module {missing[1]}" if missing else ""


def reset_problem(log: str) -> str:
    """Why the tests were not put in place, "" if they were."""
    before, failed, _ = log.partition(RESET_FAILED)
    errors = [line for line in before.split("\n") if line.startswith(("error:", "fatal:"))]
    return f"the test patch does not apply: {errors[-1] if errors else ''}"[:300].rstrip(": ") if failed else ""


def last_line(log: str) -> str:
    """The last thing that the tests' command printed, "" if nothing."""
    lines = (line.strip() for line in reversed(_marked(log).split("\n")))
    return next((line for line in lines if line and not line.startswith(_TRACE)), "")[-300:]


def _marked(log: str) -> str:
    """What stands between the marks; behind one of them it is the shell's own."""
    return log.rpartition(START)[2].partition(END)[0].removeprefix("'")


def parse_log(log: str) -> Results:
    """The output of pytest (`-rA` or `-v`) or of unittest (`-v`), whichever it is."""
    lines = [_COLOURS.sub("", line).rstrip("\r") for line in log.split("\n")]
    return {**dict(_unittest(lines)), **dict(_pytest(lines))}


def _pytest(lines: list[str]) -> Iterator[tuple[str, Result]]:
    """A name with blanks ends at the first of them, as published names do; one that passed is there in full too, unless
    a line says anything else of it."""
    told = [(found[2].rstrip(), STATUSES[found[1]]) for line in lines if (found := _STATUS_FIRST.match(line))]
    others = tuple(text for text, result in told if result != "passed")
    for text, result in told:
        if not _SKIP_COUNT.match(text):
            yield text.split(" - ", 1)[0].split(maxsplit=1)[0], result  # behind ` - ` is the reason
        if result == "passed" and " " in text and not any(f"{each} ".startswith(f"{text} ") for each in others):
            yield text, result
    for line in lines:
        if found := _STATUS_LAST.fullmatch(line):
            yield found[1], STATUSES[found[2]]


def _unittest(lines: list[str]) -> Iterator[tuple[str, Result]]:
    """A result may stand below its test, behind what the test printed. A failure's heading has the last word."""
    names: list[str] = []
    before = ""
    headings: list[tuple[str, Result]] = []
    for line in map(str.strip, lines):
        name, told = _told(line)
        if name:
            names = [name, before] if _METHOD.fullmatch(before) and not _METHOD.match(name) else [name]
        if names and told:
            yield from ((name, told) for name in names)
            names = []
        if found := _HEADING.match(line):
            headings.append((found[2], _UNITTEST[found[1]]))
        before = line
    yield from headings


def _told(line: str) -> tuple[str, Result | None]:
    """The test that a line names ("" for none), and the result that it ends with or is. A docstring may hold dots of
    its own; behind a method's name they are what the test printed."""
    name, dots, word = line.partition(_DOTS)
    if not _METHOD.fullmatch(name):
        name, dots, word = line.rpartition(_DOTS)
    result = _UNITTEST.get(word.partition(" '")[0].partition(' "')[0])
    return (name if result else line.partition(_DOTS)[0]) if dots else "", result
