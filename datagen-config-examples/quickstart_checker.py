"""Judges the rows of quickstart.jsonl by what they left in their sandbox.

A row's `metadata.check` names a `command` to run there, the `output` that it must print, and perhaps an `answer` that
the model's last message must contain. Write your own in the same form: `--success_checker FILE.py:FUNCTION`.
"""

from collections.abc import Mapping
from typing import Any

SECONDS = 60.0  # for the command


async def check(task: Mapping[str, Any], environment: Any) -> tuple[bool, str]:
    """`task` is the row's record (id, prompt, final_response, messages, metadata, …); the sandbox is still open."""
    expected = task["metadata"]["check"]
    result = await environment.run(expected["command"], timeout=SECONDS)
    if result.output.strip() != expected["output"]:
        return False, f"{expected['command']} printed {result.output[-200:]!r}"
    if expected.get("answer", "") not in task["final_response"]:
        return False, f"the answer does not say {expected['answer']}"
    return True, ""
