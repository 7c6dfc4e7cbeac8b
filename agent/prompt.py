"""One prompt to run: what a dataset row asks for, and which try of it this is. A leaf but for the message type."""

from typing import Any

from msgspec import Struct

from agent.types import Message


class Prompt(Struct, frozen=True, kw_only=True):
    """A dataset row, read. `context` are the turns before `text`; `rest` the row's other fields, as they came."""

    text: str
    context: tuple[Message, ...] = ()
    system_text: str = ""
    id: str = ""
    image: str = ""
    cwd: str = ""
    variables: dict[str, str] = {}
    files: dict[str, bytes] = {}
    setup: str = ""
    tools: tuple[str, ...] = ()  # tool, toolset and alias names; empty = the run decides
    max_turns: int | None = None
    timeout_seconds: float | None = None
    expected_tools: tuple[str, ...] = ()
    response_format: dict[str, Any] | None = None
    rest: dict[str, Any] = {}


class Try(Struct, frozen=True, kw_only=True):
    """One try of one sample of a row."""

    prompt_index: int
    task_id: str
    row_key: str
    row_sha: str
    sample_index: int = 0
    attempt: int = 1
    batch_num: int = 0
