"""The program run against the fake endpoint, and what a run left behind."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from agent.row import Turn
from agent.trajectory import parse_trajectory
from agent.types import Message
from tests.e2e.program import journal, run_program, write_dataset

LOCAL = ("--container_backend=local", "--enabled_toolsets=terminal")


@dataclass(frozen=True)
class Ran:
    """A run that ended. `rows` are the journal's by task id: of several tries the last."""

    code: int
    out: str
    err: str
    directory: Path

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["task_id"]: row for row in journal(self.directory)}

    def bytes(self) -> bytes:
        """All that the run wrote, anywhere."""
        files = [path.read_bytes() for path in self.directory.rglob("*") if path.is_file()]
        return b"\n".join([*files, self.out.encode(), self.err.encode()])


def run_against(
    url: str,
    home: Path,
    prompts: Sequence[str | Mapping[str, Any]],
    *flags: str,
    name: str = "r",
    timeout: float = 60,
    **variables: Any,
) -> Ran:
    """One invocation. A prompt that is a text is its own id."""
    rows = [{"id": prompt, "prompt": prompt} if isinstance(prompt, str) else prompt for prompt in prompts]
    dataset = write_dataset(home / f"{name}.jsonl", rows)
    base = ["--model=m", f"--base_url={url}", f"--dataset_file={dataset}", f"--output_dir={home / 'out'}"]
    base += [f"--run_name={name}", "--keep_no_reasoning", "--num_workers=1"]
    chosen = [flag for flag in base if not any(flag.split("=")[0] == other.split("=")[0] for other in flags)]
    given = any(flag.startswith("--container_backend") for flag in flags)
    tools = any(flag.startswith(("--enabled_toolsets", "--distribution")) for flag in flags)
    defaults = [flag for flag, there in zip(LOCAL, (given, tools), strict=True) if not there]
    code, out, err = run_program(*chosen, *defaults, *flags, home=home, timeout=timeout, **variables)
    return Ran(code, out, err, home / "out" / name)


def script(prompt: str, *replies: Mapping[str, Any], then: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Rules of the endpoint: the n-th request with this prompt gets the n-th reply; `then` answers all later ones."""
    exactly = f"^{re.escape(prompt)}$"
    rules = [{"prompt": exactly, "call": number, **reply} for number, reply in enumerate(replies, 1)]
    return rules if then is None else [*rules, {"prompt": exactly, **then}]


def said(text: str, **more: Any) -> dict[str, Any]:
    """A reply of text; `finish_reason` and `usage` are the rule's, other keys the message's."""
    return _reply({"content": text}, more)


def called(*calls: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A reply of tool calls (see `tests.endpoint.tool_call`)."""
    return _reply({"content": "", "tool_calls": list(calls)}, {"finish_reason": "tool_calls", **more})


def _reply(message: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    of_rule = {key: value for key, value in more.items() if key in ("finish_reason", "usage", "delay", "times")}
    of_message = {key: value for key, value in more.items() if key not in of_rule}
    return {"message": {**message, **of_message}, **of_rule}


def messages_of(row: Mapping[str, Any]) -> Sequence[Message]:
    """A row's trajectory, read back."""
    return parse_trajectory(msgspec.convert(row["conversations"], list[Turn])).messages


def results_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The results of a row's tool calls, in order."""
    return [json.loads(message.content) for message in messages_of(row) if message.role == "tool"]


def bodies_of(stats: Mapping[str, Any], prompt: str) -> list[dict[str, Any]]:
    """The requests that the endpoint had for a prompt, oldest first (of the 200 that it keeps)."""
    return [
        body
        for body in stats["bodies"]
        if next(each["content"] for each in body["messages"] if each["role"] == "user") == prompt
    ]
