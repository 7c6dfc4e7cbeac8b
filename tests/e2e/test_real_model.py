"""A real model behind a server that no one here wrote: what it says cannot be foreseen, what becomes of it can."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.row import Row
from agent.trajectory import format_trajectory, has_reasoning, parse_trajectory, validate
from tests.e2e.program import run_program, statistics, write_dataset
from tests.llama_server import CONTEXT, Counted, LlamaServer

NOTES = {"notes.txt": "The harbour opens at seven.\n"}
SCHEMA = {
    "type": "object",
    "properties": {"legs": {"type": "integer", "maximum": 9}, "colour": {"enum": ["black", "white"]}},
    "required": ["legs", "colour"],
    "additionalProperties": False,
}
PROMPTS: list[dict[str, Any]] = [
    {"id": "list", "prompt": "List the files in the current directory.", "files": NOTES},
    {"id": "cat", "prompt": "Run the command: cat notes.txt", "files": NOTES},
    {"id": "date", "prompt": "Print the current date with the date command."},
    {"id": "form", "prompt": "Describe a cat.", "tools": ["process"], "response_format": SCHEMA},
]


@pytest.fixture(scope="module")
def server() -> Iterator[LlamaServer]:
    with LlamaServer() as server:
        yield server


def run(home: Path, server: LlamaServer, prompts: list[dict[str, Any]], key: str = "") -> tuple[int, list[Row], str]:
    """Exit code, the journal, all output."""
    code, out, err = run_program(
        f"--dataset_file={write_dataset(home / 'prompts.jsonl', prompts)}",
        f"--output={home / 'out'}",
        *("--provider=llamacpp", f"--base_url={server.url}", f"--api_key={key or server.key}", "--model=smollm2"),
        *("--temperature=0.3", "--max_tokens=40", "--max_turns=3", "--num_workers=1"),
        *("--enabled_toolsets=terminal", "--disabled_toolsets=process", "--container_backend=bubblewrap"),
        home=home,
        timeout=110,
    )
    rows = [row for path in sorted((home / "out").glob("batch_*.jsonl")) for row in decoded(path)]
    return code, rows, out + err


def decoded(path: Path) -> list[Row]:
    """Every line by the row's own type, so that a missing key or a wrong type cannot pass."""
    return [msgspec.json.decode(line, type=Row, strict=True) for line in path.read_bytes().split(b"\n") if line]


def test_a_real_model_works_in_a_sandbox_and_every_token_is_counted(server: LlamaServer, tmp_path: Path) -> None:
    before = server.counted()
    code, journal, output = run(tmp_path, server, PROMPTS)
    after = server.counted()
    assert code == 0, output
    rows = {row.task_id: row for row in journal}
    assert sorted(rows) == sorted(row["id"] for row in PROMPTS)
    assert {row.end_status for row in journal} <= {"completed", "max_turns", "partial"}

    for row in journal:
        check_trajectory(row)
    check_usage(journal, Counted(after.prompt - before.prompt, after.reply - before.reply))
    check_tools(journal, statistics(tmp_path / "out"))
    first = next(turn.value for turn in rows["list"].conversations if turn.sender == "gpt")
    assert has_reasoning(first)

    form = rows["form"]  # the endpoint makes the answer fit, and lets the model write no thought
    assert set(json.loads(form.final_response)) == {"legs", "colour"}
    assert (form.status, form.reason, form.end_status) == ("discarded", "no_reasoning", "completed")

    kept = [row["id"] for row in PROMPTS if rows[row["id"]].status != "discarded"]
    assert [row.task_id for row in decoded(tmp_path / "out" / "trajectories.jsonl")] == kept
    assert "list" in kept


def check_trajectory(row: Row) -> None:
    assert validate(row.conversations) == []
    read = parse_trajectory(row.conversations)
    assert format_trajectory(read.messages, read.tools) == row.conversations


def check_usage(rows: list[Row], counted: Counted) -> None:
    """The server counts without what its cache held, and with replies that it then threw away as an error."""
    for row in rows:
        usage = row.usage
        assert usage.input_tokens > 0
        assert usage.output_tokens > 0
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    worked_on = sum(row.usage.input_tokens - row.usage.cache_read_tokens for row in rows)
    said = sum(row.usage.output_tokens for row in rows)
    asked_again = sum(row.requests - row.api_calls for row in rows)
    assert (worked_on, said) == counted or asked_again
    assert worked_on <= counted.prompt
    assert said <= counted.reply


def check_tools(rows: list[Row], found: dict[str, Any]) -> None:
    """Commands of the model's own ran, told their output, and were counted."""
    messages = [message for row in rows for message in parse_trajectory(row.conversations).messages]
    results = [json.loads(message.content) for message in messages if message.role == "tool"]
    assert [result for result in results if result.get("exit_code") == 0 and result["output"]], results
    assert {row.environment.backend for row in rows} == {"bubblewrap"}
    assert sum(stats["count"] for stats in found["tool_statistics"].values()) == len(results)


def test_a_prompt_beyond_the_context_is_told_as_such_after_one_request(server: LlamaServer, tmp_path: Path) -> None:
    code, (row,), output = run(tmp_path, server, [{"prompt": "word " * (CONTEXT + 1)}])
    assert code == 1, output
    assert (row.status, row.error_class, row.requests, row.retryable) == ("failed", "context_exceeded", 1, False)


def test_a_key_that_the_server_refuses_stops_the_run(server: LlamaServer, tmp_path: Path) -> None:
    code, rows, output = run(tmp_path, server, PROMPTS, key="not-the-right-key-0")
    assert code == 3, output
    assert {row.status for row in rows} <= {"stopped"}
    assert "401" in output
    assert "not-the-right-key-0" not in output
