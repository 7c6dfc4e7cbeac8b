"""What the command line prints about itself."""

import pytest

from batch.cli import page, print_table, show
from batch.settings import ACTIONS, Action


@pytest.mark.parametrize(
    ("action", "parts"),
    [
        ("help", ["--dataset_file", "Exit codes"]),
        ("version", ["batch-runner"]),
        ("list_distributions", ["terminal_tasks"]),
        ("list_toolsets", ["terminal, process"]),
        ("list_backends", ["local", "bubblewrap", "docker"]),
        ("list_providers", ["https://openrouter.ai/api/v1", "OPENROUTER_API_KEY", " set "]),
    ],
)
def test_every_action_prints_to_stdout(action: Action, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert action in ACTIONS
    show(action, {"OPENROUTER_API_KEY": "sk-not-to-be-shown"}, page())
    shown = capsys.readouterr()
    assert all(part in shown.out for part in parts), shown.out
    assert "sk-not" not in shown.out
    assert not shown.err


def test_tables_are_not_cut_where_stdout_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 300
    print_table("Long", ("a", "b"), [("[not markup]", long)])
    assert "[not markup]" in (out := capsys.readouterr().out)
    assert long in out
    assert "\x1b" not in out
