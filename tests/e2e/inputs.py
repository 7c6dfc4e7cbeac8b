"""What small runs need: a scripted model, a dataset, and flags that keep to plain folders and the terminal."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.e2e.program import write_dataset

PLAIN = ("--container_backend=local", "--enabled_toolsets=terminal")
USAGE = {"input_tokens": 10, "output_tokens": 5}


def says(content: str, **more: Any) -> dict[str, Any]:
    """A turn that answers."""
    return {"reasoning": "I know.", "content": content, "usage": USAGE, **more}


def runs(command: str, **more: Any) -> dict[str, Any]:
    """A turn that calls the terminal."""
    call = {"name": "terminal", "arguments": {"command": command}}
    return {"reasoning": "I look.", "tool_calls": [call], "usage": USAGE, **more}


def write_script(folder: Path, rules: Sequence[Mapping[str, Any]] = (), name: str = "script.yaml") -> str:
    """A script file (JSON is YAML); the value of --model. What no rule fits is answered `the answer`."""
    path = folder / name
    path.write_text(json.dumps({"rules": rules, "default": {"turns": [says("the answer")]}}), encoding="utf-8")
    return f"--model=scripted:{path}"


def small_run(
    folder: Path,
    rows: Sequence[Mapping[str, Any]] = ({"prompt": "first"}, {"prompt": "second"}),
    rules: Sequence[Mapping[str, Any]] = (),
) -> list[str]:
    """The flags of a run of these rows, named r."""
    dataset = write_dataset(folder / "prompts.jsonl", rows)
    return [*PLAIN, write_script(folder, rules), f"--dataset_file={dataset}", "--run_name=r"]
