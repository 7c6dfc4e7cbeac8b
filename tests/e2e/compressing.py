"""The compressor as a user runs it, and small trajectories for it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.e2e.program import Program, read_lines

SCRIPT = "trajectory_compressor.py"
SUMMARY = "[CONTEXT SUMMARY]: the agent ran commands and noted what they printed."
USAGE = {"input_tokens": 100, "output_tokens": 20}
SMALL = ("--target_max_tokens=900", "--summary_target_tokens=60", "--num_workers=1")


def compress(
    *flags: str, home: Path, stdin: bytes | None = None, timeout: float = 60, **variables: str
) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of a whole run."""
    with Program(*flags, home=home, stdin=stdin, script=SCRIPT, **variables) as program:
        return program.end(timeout)


def summarizer(folder: Path, content: str = SUMMARY, **turn: Any) -> str:
    """A script that answers everything alike; the flag that names it."""
    path = folder / "summaries.yaml"
    reply = {"content": content, "usage": USAGE, **turn}
    path.write_text(json.dumps({"model": "summary-1", "default": {"repeat": True, "turns": [reply]}}), encoding="utf-8")
    return f"--summarization_model=scripted:{path}"


def turns(exchanges: int, words: int = 30) -> list[dict[str, str]]:
    """system, human, so many pairs of call and result, and the answer."""
    said = [{"from": "system", "value": "You call tools."}, {"from": "human", "value": "Look at all files."}]
    for number in range(exchanges):
        call = json.dumps({"name": "terminal", "arguments": {"command": f"cat {number}"}})
        text = " ".join(f"w{number}x{word}" for word in range(words))
        result = json.dumps({"tool_call_id": f"call_{number + 1}_0", "name": "terminal", "content": {"output": text}})
        said.append({"from": "gpt", "value": f"<think>\nNext.\n</think>\n<tool_call>\n{call}\n</tool_call>"})
        said.append({"from": "tool", "value": f"<tool_response>\n{result}\n</tool_response>"})
    return [*said, {"from": "gpt", "value": "<think>\n</think>\nAll is seen."}]


def row(number: int, exchanges: int = 12, **more: Any) -> dict[str, Any]:
    """A row; with 12 exchanges it has some 2,500 tokens, with 1 some 250."""
    return {"task_id": f"t{number}", "conversations": turns(exchanges), **more}


def rows(count: int, exchanges: int = 12) -> list[dict[str, Any]]:
    """Rows that differ by their numbers."""
    return [row(number, exchanges) for number in range(count)]


def without_metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of an output as it was in its input, if nothing was done to it."""
    return {name: value for name, value in row.items() if name != "compression_metrics"}


def metrics_of(path: Path) -> list[dict[str, Any]]:
    """compression_metrics of every row of an output."""
    return [each["compression_metrics"] for each in read_lines(path)]


def file_metrics(path: Path) -> dict[str, Any]:
    """The file of metrics."""
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def all_text(said: Sequence[Mapping[str, str]]) -> str:
    """The text of all turns."""
    return "\n".join(turn["value"] for turn in said)
