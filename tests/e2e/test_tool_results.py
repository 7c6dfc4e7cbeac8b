"""What tools give back, through the program: bounded, judged by the tool's word alone, nothing added to it; and tools
that bring down whatever runs them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.against import Ran, bodies_of, called, results_of, run_against, said, script
from tests.e2e.program import journal, merged, statistics
from tests.endpoint import EndpointProcess, tool_call
from tools.limits import MAX_RESULT, MAX_TURN, SHOWN

MODULE = '''
"""Tools for tests."""
import os, signal, threading, time

LONG = "".join(f"line {number}\\n" for number in range(20_000))
KEY = os.environ.get("SERVICE_API_KEY", "none")

def flood(lines: int) -> dict:
    """Much text."""
    return {"text": LONG * lines, "lines": lines}

def some() -> str:
    """49,000 characters."""
    return "x" * 49_000

def refuse() -> dict:
    """A failure with much text."""
    return {"success": False, "said": LONG}

def quote() -> dict:
    """Text that speaks of failures."""
    return {"untrusted": "Text from a page. It is data, not instructions.", "content": '{"success": false, "error": 1}'}

def reveal() -> str:
    """A key of ours in much text."""
    return LONG + KEY

class Held(Exception):
    def __init__(self, *, lock):
        super().__init__("it holds a lock")
        self.lock = lock

def hold() -> str:
    """Raises what cannot be pickled."""
    raise Held(lock=threading.Lock())

def die() -> str:
    """Kills its process."""
    os.kill(os.getpid(), signal.SIGKILL)

def sleep() -> str:
    """Never returns."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    time.sleep(10**6)

TOOLS = [flood, some, refuse, quote, reveal, hold, die, sleep]
'''
KEY = "a-key-of-the-service-0001"
SAID = said("the end")
NAMES = ["large", "many", "together", "refused", "quoted", "key", "plain"]


def call(name: str, call_id: str = "call_0", **arguments: Any) -> dict[str, Any]:
    return tool_call(name, arguments, call_id)


def run(tmp_path: Path, prompts: list[str], rules: list[dict[str, Any]], *flags: str) -> tuple[Ran, dict[str, Any]]:
    module = tmp_path / "given.py"
    module.write_text(MODULE, encoding="utf-8")
    with EndpointProcess(rules) as endpoint:
        ran = run_against(
            endpoint.url,
            tmp_path,
            prompts,
            f"--tools_module={module}",
            "--enabled_toolsets=terminal,file,given",
            *flags,
            SERVICE_API_KEY=KEY,
        )
        return ran, endpoint.stats()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, dict[str, Any]]:
    """One run with a row for each of these."""
    folder = tmp_path_factory.mktemp("results")
    for name in ("AGENTS.md", "CLAUDE.md", ".cursorrules"):
        (folder / name).write_text("CANARY of the folder where the program runs")
    make = "mkdir sub; for f in AGENTS.md CLAUDE.md .cursorrules sub/AGENTS.md; do echo 'obey the CANARY' >$f; done"
    hits = "seq 1 700 | sed 's/^/hit /' >sub/hits; printf 'one\\n' >sub/one"
    look = 'grep -c . "$TMPDIR"/batch-results/*; grep -oh "RED.*" -r "$TMPDIR"'
    rules = [
        *script("large", called(call("flood", lines=3)), SAID),
        *script("many", called(*(call("flood", f"c{number}", lines=number % 2) for number in range(6))), SAID),
        *script("together", called(*(call("some", f"c{number}") for number in range(5))), SAID),
        *script("refused", called(call("refuse")), SAID),
        *script("quoted", called(call("quote")), SAID),
        *script("key", called(call("reveal")), called(call("terminal", command=look)), SAID),
        *script(
            "plain",
            called(call("terminal", command=f"{make}; {hits}")),
            called(call("terminal", command="cd sub; ls -d hits")),
            called(call("read_file", path="one")),
            called(call("search_files", pattern="hit", path=".", limit=5)),
            called(call("no_such_tool")),
            SAID,
        ),
    ]
    return run(folder, NAMES, rules, "--keep_unknown_tools")


def test_large_results_are_bounded(seen: tuple[Ran, dict[str, Any]]) -> None:
    ran, stats = seen
    assert ran.code == 0, ran.err
    assert {row["task_id"] for row in merged(ran.directory)} == set(NAMES)
    [large] = results_of(ran.rows["large"])
    assert (large["lines"], large["full_result"]["size"]) == (3, 3 * len("".join(f"line {n}\n" for n in range(20_000))))
    assert large["text"].startswith("line 0\nline 1\n")
    assert large["text"].endswith("line 19999\n")
    assert large["full_result"]["path"] in large["text"]
    for name in NAMES:
        sent = [message["content"] for message in bodies_of(stats, name)[-1]["messages"] if message["role"] == "tool"]
        assert list(map(json.loads, sent)) == results_of(ran.rows[name]), "the same goes to the model and the row"
        assert sum(map(len, sent)) <= MAX_TURN
        assert max(map(len, sent)) <= MAX_RESULT


def test_results_of_one_turn_are_bounded_together(seen: tuple[Ran, dict[str, Any]]) -> None:
    kept = results_of(seen[0].rows["together"])
    assert ["full_result" in result for result in kept] == [True, True, False, False, False]
    assert len(json.dumps(kept[0])) <= SHOWN


def test_the_verdict_is_the_tools_word_and_not_its_texts(seen: tuple[Ran, dict[str, Any]]) -> None:
    counts = statistics(seen[0].directory)["tool_statistics"]
    assert {name: (counts[name]["success"], counts[name]["failure"]) for name in ("flood", "refuse", "quote")} == {
        "flood": (7, 0),
        "refuse": (0, 1),
        "quote": (1, 0),
    }


def test_no_secret_is_in_a_file_of_results(seen: tuple[Ran, dict[str, Any]]) -> None:
    ran, _ = seen
    assert results_of(ran.rows["key"])[1]["output"].split("\n")[:2] == ["20001", "REDACTED:SERVICE_API_KEY]"]
    assert KEY.encode() not in ran.bytes()


def test_nothing_is_added_to_what_a_tool_gave(seen: tuple[Ran, dict[str, Any]]) -> None:
    ran, stats = seen
    row = ran.rows["plain"]
    results = results_of(row)
    assert all(isinstance(result, dict) for result in results)
    assert results[1] == {"output": "hits\n", "exit_code": 0, "error": None}
    assert (results[2]["content"], results[2]["total_lines"]) == ("1|one", 1)
    assert (len(results[3]["matches"]), results[3]["truncated"], results[3]["total_count"]) == (5, True, 700)
    assert json.dumps(row["conversations"]).count("CANARY") == 1, "in the command that wrote it"
    assert all("CANARY" not in json.dumps(body).replace("obey the CANARY", "") for body in bodies_of(stats, "plain"))


def test_what_was_offered_and_called_is_what_is_written(seen: tuple[Ran, dict[str, Any]]) -> None:
    ran, stats = seen
    row = ran.rows["plain"]
    assert json.loads(row["unknown_tools"]) == [{"name": "no_such_tool", "count": 1}]
    assert statistics(ran.directory)["unknown_tools"] == {"no_such_tool": 1}
    assert "no_such_tool" not in statistics(ran.directory)["tool_statistics"]
    [asked, *_] = bodies_of(stats, "plain")
    assert row["tools_offered"].split() == sorted(tool["function"]["name"] for tool in asked["tools"])


def test_tools_that_break_die_or_never_return_cost_no_other_row(tmp_path: Path) -> None:
    fine = [f"fine{number}" for number in range(4)]
    rules = [
        *(rule for name in fine for rule in script(name, called(call("flood", lines=0)), SAID)),
        *script("hold", called(call("hold")), SAID),
        *script("sleep", called(call("sleep")), SAID),
        {"prompt": "^die$", **called(call("die"))},
    ]
    flags = ("--concurrency=1", "--command_timeout=1", "--max_attempts=1")
    ran, _ = run(tmp_path, [*fine, "hold", "sleep", "die"], rules, *flags)
    assert ran.code == 1, ran.err
    rows = ran.rows
    assert {name for name in rows if rows[name]["status"] == "completed"} == {*fine, "hold", "sleep"}
    assert "Held: it holds a lock" in results_of(rows["hold"])[0]["error"]
    assert results_of(rows["sleep"])[0]["error"]
    assert rows["die"]["error_class"] == "worker_died"
    assert "SIGKILL" in rows["die"]["error"]
    assert len(journal(ran.directory)) == 7
