"""A row's own set-up on every backend: its files, variables, directory and command, and what becomes of a row whose
set-up fails or takes too long."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from agent.models.gate import RunGate
from agent.models.table import ModelSpec, open_model
from agent.outcome import RolloutPolicy
from agent.prompt import Prompt, Try
from agent.rollout import Rollout, Surroundings
from agent.row import Row
from agent.text import Redactor
from tests.contract.environments import IMAGES, RUN_ID, backend_of
from tools.environments.base import Limits
from tools.environments.owner import current_owner

SETUP = "read -r line <'given here/a.txt'; echo \"$line, $ROW, ${PWD##*/}\" >made; export KEPT=kept"
LOOK = "cat made; echo \"${PWD##*/} [$KEPT] $ROW\"; wc -c <'given here/b'; export LATER=1"
SECRET = "it's\n$HOME"


async def row_of(backend_name: str, tmp_path: Path, **prompt: Any) -> Row:
    """The row of one prompt; its model looks at what the set-up left."""
    calls = [{"name": "terminal", "arguments": {"command": LOOK}}]
    script = tmp_path / "script.yaml"
    script.write_text(yaml.safe_dump({"default": {"turns": [{"tool_calls": calls}, {"content": "seen"}]}}))
    around = Surroundings(
        model=open_model(ModelSpec(model=f"scripted:{script}"), RunGate()),
        backend=backend_of(backend_name),
        owner=current_owner(RUN_ID),
        redactor=Redactor({}),
        stopping=lambda: "",
    )
    policy = RolloutPolicy(
        enabled_toolsets=("terminal",),
        keep_no_reasoning=True,
        image=IMAGES.get(backend_name, ""),
        limits=Limits(memory_mb=1024, pids=256),
    )
    which = Try(prompt_index=0, task_id="t", row_key="id:t", row_sha="0" * 64)
    return await Rollout(Prompt(text="look", **prompt), which, policy, around).run()


def result_of(row: Row) -> dict[str, Any]:
    """What the terminal said."""
    (turn,) = [turn for turn in row.conversations if turn.sender == "tool"]
    text = turn.value.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
    content: dict[str, Any] = msgspec.json.decode(text)["content"]
    return content


async def test_the_model_finds_what_the_row_set_up(backend_name: str, tmp_path: Path) -> None:
    row = await row_of(
        backend_name,
        tmp_path,
        files={"given here/a.txt": b"from a file\n", "given here/b": bytes(range(256)) * 300},
        variables={"ROW": SECRET},
        cwd="of the row/inner",
        setup=SETUP,
    )
    assert (row.status, row.error, row.final_response) == ("completed", "", "seen")
    assert row.environment.backend == backend_name
    shown = ["from a file, it's", "$HOME, inner", "inner [kept] it's", "$HOME", "76800"]
    assert result_of(row)["output"].splitlines() == shown


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({"setup": "echo broken >&2; exit 3"}, "the row's setup command ended with 3: broken"),
        ({"files": {"a": b"", "a/b": b""}}, "the row's files cannot be placed: a/b"),
        ({"cwd": "/proc/none"}, "/proc/none"),
        ({"variables": {"A-B": "x"}}, "A-B"),
    ],
)
async def test_a_set_up_that_fails(backend_name: str, prompt: dict[str, Any], said: str, tmp_path: Path) -> None:
    row = await row_of(backend_name, tmp_path, **prompt)
    assert (row.status, row.error_class, row.retryable) == ("failed", "setup_failed", False), row.error
    assert said in row.error
    assert row.requests == 0


async def test_a_set_up_that_takes_too_long(backend_name: str, tmp_path: Path) -> None:
    row = await row_of(backend_name, tmp_path, setup="trap '' TERM; echo begun; sleep 300", timeout_seconds=2.0)
    assert (row.status, row.error_class, row.retryable) == ("failed", "setup_timeout", True), row.error
    assert row.requests == 0
    assert row.duration_seconds < 60
