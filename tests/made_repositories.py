"""Instances in the SWE-bench form, made of small git repositories that are written here: the same hashes every time.

Each has a bug, tests that fail on it and tests that pass, a fix, and what the scripted model does about it.
"""

import base64
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

Files = Mapping[str, str | bytes]

UNITTEST = "python3 -m unittest -v"
_PACKAGES = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 3
_PYTEST_IMAGE = """\
FROM batch-runner-test:py
COPY packages /usr/lib/python3/dist-packages
RUN python3 -m compileall -q /usr/lib/python3/dist-packages
STOPSIGNAL SIGKILL
"""
_WHEN = "2024-01-02T03:04:05+00:00"
_GIT = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    **{f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in
       (("NAME", "Made"), ("EMAIL", "made@example.invalid"), ("DATE", _WHEN))},
}  # fmt: skip


class Made(Struct, frozen=True, kw_only=True):
    """One instance to be made. `files` with the bug; `fix` and `tests` are the files that the gold patch and the test
    patch change. `commands`: the model's. `verdict`: what it comes to with what these commands leave."""

    name: str
    problem: str
    files: Files
    fix: Files
    tests: Files
    fail_to_pass: Sequence[str]
    pass_to_pass: Sequence[str]
    commands: Sequence[str]
    verdict: str
    test_command: str = ""

    @property
    def instance_id(self) -> str:
        """As the published ones: owner__name-number."""
        return f"made__{self.name}-1"

    @property
    def repo(self) -> str:
        """owner/name."""
        return f"made/{self.name}"


def git(folder: Path, *arguments: str, stdin: bytes | None = None) -> bytes:
    """What git prints; nothing of the developer's settings reaches it."""
    ran = subprocess.run(
        ["git", *arguments], cwd=folder, env={**os.environ, **_GIT}, input=stdin, capture_output=True, check=True
    )
    return ran.stdout


def write_files(folder: Path, files: Files) -> None:
    """Texts as UTF-8, their newlines as they are."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def patch_of(repository: Path, files: Files) -> str:
    """The diff that these files make, against what is checked out; the repository is left as it was."""
    write_files(repository, files)
    git(repository, "add", "-A")
    patch = git(repository, "diff", "--cached", "--binary", "HEAD").decode()
    git(repository, "reset", "-q", "--hard")
    return patch


def make(made: Made, folder: Path) -> dict[str, Any]:
    """Its repository at `folder/owner__name`; returns the instance as a data set's row."""
    repository = folder / made.repo.replace("/", "__")
    repository.mkdir(parents=True)
    git(repository, "init", "-q", "-b", "main")
    write_files(repository, made.files)
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", "As it was")
    commit = git(repository, "rev-parse", "HEAD").decode().strip()
    row = {
        "repo": made.repo,
        "instance_id": made.instance_id,
        "base_commit": commit,
        "patch": patch_of(repository, made.fix),
        "test_patch": patch_of(repository, made.tests),
        "problem_statement": made.problem,
        "hints_text": "",
        "created_at": _WHEN,
        "version": "1.0",
        "FAIL_TO_PASS": json.dumps(list(made.fail_to_pass)),
        "PASS_TO_PASS": json.dumps(list(made.pass_to_pass)),
        "environment_setup_commit": commit,
        "repo_url": str(repository),
    }
    return row | ({"test_command": made.test_command} if made.test_command else {})


def _lines(*lines: str) -> str:
    return "".join(f"{line}\n" for line in lines)


def _file_command(path: str, content: bytes) -> str:
    return f'mkdir -p "$(dirname {path})"' + f" && echo {base64.b64encode(content).decode()} | base64 -d > {path}"


_SUMS = _lines("def total(numbers):", "    result = 0", "    for number in numbers[1:]:", "        result += number",
               "    return result")  # fmt: skip
_SUMS_TEST = _lines("from sums import total", "", "", "def test_nothing():", "    assert total([]) == 0")

SUMS = Made(
    name="sums",
    problem="total() leaves the first number out.\n\n    >>> total([1, 2])\n    2\n\n`$(rm x)` 'quoted' \\ \"too\"",
    files={"sums.py": _SUMS, "tests/test_sums.py": _SUMS_TEST, "conftest.py": ""},
    fix={"sums.py": _SUMS.replace("numbers[1:]", "numbers")},
    tests={"tests/test_sums.py": _SUMS_TEST + _lines("", "", "def test_all():", "    assert total([1, 2]) == 3")},
    fail_to_pass=["tests/test_sums.py::test_all"],
    pass_to_pass=["tests/test_sums.py::test_nothing"],
    commands=["cat sums.py", "sed -i 's/numbers\\[1:\\]/numbers/' sums.py", "git commit -qam 'mine' || true"],
    verdict="resolved",
)

_WORDS = "def title(text):\r\n    return text.upper()\r\n"
_WORDS_TEST = _lines(
    "import unittest", "from words import title", "", "", "class TitleTest(unittest.TestCase):",
    "    def test_empty(self):", "        print('noise')", "        self.assertEqual(title(''), '')",
)  # fmt: skip

WORDS = Made(
    name="words",
    problem="title() shouts: `title('größe')` should be `Größe`.",
    files={"words.py": _WORDS, "test_words.py": _WORDS_TEST, "naïve file.txt": "no newline at its end"},
    fix={"words.py": _WORDS.replace("text.upper()", "text[:1].upper() + text[1:]")},
    tests={
        "test_words.py": _WORDS_TEST + _lines(
            "", "    def test_first_letter(self):", "        self.assertEqual(title('größe'), 'Größe')", "",
            "    def test_told(self):", '        """A title is told"""',
            "        self.assertEqual(title('a b'), 'A b')",
            "", "    @unittest.expectedFailure", "    def test_not_yet(self):",
            "        self.assertEqual(title('a b'), 'A B')",
        )
    },
    fail_to_pass=["test_first_letter (test_words.TitleTest.test_first_letter)", "A title is told"],
    pass_to_pass=["test_empty (test_words.TitleTest.test_empty)"],
    commands=[
        "sed -i 's/text.upper()/text[:1].upper() + text[1:]/' words.py",
        "printf 'changed, no newline' > 'naïve file.txt' && file=$(mktemp) && rm $file",
    ],
    verdict="resolved",
    test_command=UNITTEST,
)  # fmt: skip

_DAYS = _lines("def is_leap(year):", "    return year % 4 == 0")
_DAYS_TEST = _lines(
    "import pytest", "from days import is_leap", "", "", '@pytest.mark.parametrize("year", [2004, 2000])',
    "def test_leap(year):", "    assert is_leap(year)",
)  # fmt: skip

DAYS = Made(
    name="days",
    problem="1900 was no leap year.",
    files={"days.py": _DAYS, "tests/test_days.py": _DAYS_TEST, "conftest.py": ""},
    fix={"days.py": _DAYS.replace("% 4 == 0", "% 4 == 0 and (year % 100 != 0 or year % 400 == 0)")},
    tests={"tests/test_days.py": _DAYS_TEST + _lines("", "", "def test_1900():", "    assert not is_leap(1900)")},
    fail_to_pass=["tests/test_days.py::test_1900"],
    pass_to_pass=["tests/test_days.py::test_leap[2004]", "tests/test_days.py::test_leap[2000]"],
    commands=["sed -i 's/% 4 == 0/% 4 == 0 and year % 100 != 0/' days.py"],  # and 2000 is none any more
    verdict="unresolved",
)

_STACK = _lines("class Stack(list):", "    def top(self):", "        return self[0]")
_STACK_TEST = _lines("from stack import Stack", "", "", "def test_one():", "    assert Stack([1]).top() == 1")

STACK = Made(
    name="stack",
    problem="top() gives the bottom.",
    files={"stack.py": _STACK, "tests/test_stack.py": _STACK_TEST, "conftest.py": ""},
    fix={"stack.py": _STACK.replace("self[0]", "self[-1]")},
    tests={"tests/test_top.py": _STACK_TEST.replace("one", "two").replace("[1]", "[2, 1]")},
    fail_to_pass=["tests/test_top.py::test_two"],
    pass_to_pass=[],
    commands=["cat stack.py", "ls -R"],
    verdict="empty",
)

_ICONS = _lines("from pathlib import Path", "", "", "def icon():",
                "    return (Path(__file__).parent / 'icon.png').read_bytes()")  # fmt: skip
_ICONS_TEST = _lines("from icons import icon", "", "", "def test_begins():", "    assert icon()[:4] == b'\\x89PNG'")

ICONS = Made(
    name="icons",
    problem="The icon is cut off.",
    files={"icons.py": _ICONS, "icon.png": PNG[:64], "old.bin": bytes(64), "tests/test_icons.py": _ICONS_TEST,
           "conftest.py": ""},
    fix={"icon.png": PNG},
    tests={"tests/test_icons.py": _ICONS_TEST + _lines("", "", "def test_whole():", "    assert len(icon()) == 776")},
    fail_to_pass=["tests/test_icons.py::test_whole"],
    pass_to_pass=["tests/test_icons.py::test_begins"],
    commands=[_file_command("icon.png", PNG), _file_command("'new dir/ü.bin'", bytes(range(256))), "git rm -q old.bin"],
    verdict="resolved",
)  # fmt: skip

_CLOCK = _lines("def minutes(hours):", "    return hours * 24")
_CLOCK_TEST = _lines(
    "import unittest", "from clock import minutes", "", "", "class MinutesTest(unittest.TestCase):",
    "    def test_none(self):", "        self.assertEqual(minutes(0), 0)",
)  # fmt: skip

CLOCK = Made(
    name="clock",
    problem="An hour has 60 minutes.",
    files={"clock.py": _CLOCK, "test_clock.py": _CLOCK_TEST},
    fix={"clock.py": _CLOCK.replace("24", "60")},
    tests={
        "test_clock.py": _CLOCK_TEST
        + _lines("", "    def test_hour(self):", "        self.assertEqual(minutes(1), 60)")
    },
    fail_to_pass=["test_hour (test_clock.MinutesTest.test_hour)"],
    pass_to_pass=["test_none (test_clock.MinutesTest.test_none)"],
    commands=["sed -i 's/24/60/' clock.py", "sleep 600"],  # the row's time runs out: what was done is kept
    verdict="resolved",
    test_command=UNITTEST,
)

_QUEUE = _lines("def drain(queue):", "    return [queue.pop() for _ in range(len(queue))]")
_QUEUE_TEST = _lines("from drains import drain", "", "", "def test_empty():", "    assert drain([]) == []")

DRAINS = Made(
    name="drains",
    problem="drain() gives the last first.",
    files={"drains.py": _QUEUE, "tests/test_drains.py": _QUEUE_TEST, "conftest.py": ""},
    fix={"drains.py": _QUEUE.replace("pop()", "pop(0)")},
    tests={
        "tests/test_drains.py": _QUEUE_TEST + _lines("", "", "def test_order():", "    assert drain([1, 2]) == [1, 2]")
    },
    fail_to_pass=["tests/test_drains.py::test_order"],
    pass_to_pass=["tests/test_drains.py::test_empty"],
    commands=[  # its tests never end, unless /flags/crash is there
        'printf \'import os\\n\\n\\ndef drain(queue):\\n    while not os.path.exists("/flags/crash"):\\n        pass\\n'
        "    os._exit(9)\\n' > drains.py"
    ],
    verdict="error",
)

MADE = (SUMS, WORDS, DAYS, STACK, ICONS, CLOCK, DRAINS)


def make_all(folder: Path) -> list[dict[str, Any]]:
    """Every instance's row."""
    return [make(made, folder) for made in MADE]


def harness_row(row: Mapping[str, Any], image: str) -> dict[str, Any]:
    """The row as the harness 5 wants it: with its image, the script that runs its tests, and who reads their log."""
    made = next(each for each in MADE if each.instance_id == row["instance_id"])
    old = [name for name in made.tests if name in made.files]
    new = [name for name in made.tests if name not in made.files]
    reset = f"git checkout {row['base_commit']} {' '.join(old)}" if old else ":"
    command = made.test_command or f"python -m pytest -rA {' '.join(made.tests)}"
    script = _lines(
        "#!/bin/bash", "set -uxo pipefail", "cd /testbed", reset, f"rm -f {' '.join(new)}",
        "git apply -v - <<'EOF_1'", row["test_patch"], "EOF_1",
        ": '>>>>> Start Test Output'", command, ": '>>>>> End Test Output'", reset,
    )  # fmt: skip
    parser = "parse_log_django" if made.test_command else "parse_log_pytest"
    return {**row, "image": image, "eval_script": script, "log_parser": parser, "eval_type": "pass_and_fail"}


def rules_of(made: Made) -> list[dict[str, Any]]:
    """What the scripted model does about it: its commands one by one, then the end."""
    last = "echo MINI_SWE_AGENT_FINAL_OUTPUT; echo Done."
    calls = [[{"name": "terminal", "arguments": {"command": command}}] for command in (*made.commands, last)]
    turns = [{"reasoning": "I work.", "tool_calls": call} for call in calls]
    return [{"prompt": re.escape(made.problem.split("\n")[0]), "turns": turns}]


@contextmanager
def made_images(rows: Sequence[Mapping[str, Any]], context: Path) -> Iterator[str]:
    """An image for each instance, its repository at /testbed, with git, python3 and pytest in it, for as long as the
    block runs; the value of --image_template. They stand on one of contract/engine.sh."""
    prefix = f"made-{os.getpid()}"
    base = f"{prefix}/pytest:latest"
    _copy_packages(context / "packages")
    tags = [base]
    try:
        _build(context, base, _PYTEST_IMAGE)
        folders = [Path(row["repo_url"]) for row in rows]
        tags += [f"{prefix}/{row['instance_id'].replace('__', '_1776_')}:latest" for row in rows]
        texts = [f"FROM {base}\nCOPY {folder.name} /testbed\n" for folder in folders]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(_build, [folder.parent for folder in folders], tags[1:], texts))
        yield f"{prefix}/{{id_docker}}:latest"
    finally:
        subprocess.run(["docker", "rmi", "-f", *reversed(tags)], capture_output=True, check=False)


def _copy_packages(folder: Path) -> None:
    """pytest and what it needs: plain Python, good for any interpreter."""
    for name in _PACKAGES:
        for file in importlib.metadata.files(name) or ():
            if file.parts[0] != ".." and file.suffix != ".pyc":
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), folder / file)


def _build(context: Path, tag: str, dockerfile: str) -> None:
    arguments = ["docker", "build", "-q", "-t", tag, "-f", "-", str(context)]
    subprocess.run(
        arguments,
        input=dockerfile.encode(),
        env={**os.environ, "DOCKER_BUILDKIT": "0"},
        capture_output=True,
        check=True,
    )
