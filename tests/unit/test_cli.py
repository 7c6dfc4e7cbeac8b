"""What the command line prints about itself."""

import asyncio
import json
import socket
from pathlib import Path

import pytest

from batch import cli
from batch.cli import page, print_table, show
from batch.settings import ACTIONS, Action, RunSettings
from tools.environments import table
from tools.errors import UsageProblem
from tools.toolsets import TOOLSETS


@pytest.mark.parametrize(
    ("action", "parts"),
    [
        ("help", ["--dataset_file", "Exit codes", "--check_backend NAME"]),
        ("version", ["batch-runner"]),
        ("list_distributions", ["terminal_tasks"]),
        ("list_toolsets", ["terminal\tready\tterminal,process\n"]),
        ("list_backends", ["local", "bubblewrap", "docker", "singularity", "ssh"]),
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
    long = "x" * 3000
    print_table("Long", ("a", "b"), [("[not markup]", long)])
    assert "[not markup]" in (out := capsys.readouterr().out)
    assert long in out
    assert "\x1b" not in out


def test_toolsets_in_a_pipe_are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    show("list_toolsets", {}, page())
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert sorted(TOOLSETS) == [name for name, *_ in rows]
    assert {name: tuple(tools.split(",")) for name, _, tools in rows} == TOOLSETS
    states = {name: state for name, state, _ in rows}
    assert states["terminal"] == "ready"
    assert states["vision"] == "a model that sees pictures: give --vision_model"


@pytest.mark.parametrize("action", ["list_toolsets", "list_distributions"])
def test_what_a_module_prints_stands_in_no_listing(
    action: Action, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = tmp_path / "mine.py"
    module.write_text("print('hello')\nTOOLSETS = {'mine': ['terminal']}\nDISTRIBUTIONS = {'own': {'mine': 100}}\n")
    show(action, {}, page(), RunSettings(tools_module=str(module), json_summary=True))
    shown = capsys.readouterr()
    assert {"mine", "own"} & {next(iter(each.values())) for each in json.loads(shown.out)}
    assert shown.err == "hello\n"


@pytest.mark.parametrize("action", ["list_distributions", "list_providers"])
def test_a_listing_into_a_pipe_begins_with_its_table(action: Action, capsys: pytest.CaptureFixture[str]) -> None:
    show(action, {}, page())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("┏")
    assert all(line == line.rstrip() for line in lines)


@pytest.mark.parametrize(
    ("action", "record"),
    [
        ("list_toolsets", {"toolset": "terminal", "tools": ["terminal", "process"], "state": "ready"}),
        (
            "list_providers",
            {
                "provider": "openrouter",
                "base_url": "https://openrouter.ai/api/v1",
                "key_variables": ["OPENROUTER_API_KEY"],
                "key": "not set",
            },
        ),
        (
            "list_distributions",
            {
                "distribution": "terminal_only",
                "description": "Terminal and files, nothing else",
                "toolsets": {"terminal": 100, "file": 100},
            },
        ),
    ],
)
def test_a_listing_as_json_is_a_list_of_objects(
    action: Action, record: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    show(action, {}, page(), RunSettings(json_summary=True))
    assert record in json.loads(capsys.readouterr().out)


def test_backends_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    show("list_backends", {}, page(), RunSettings(json_summary=True))
    assert {"backend": "local", "state": "ready"} in json.loads(capsys.readouterr().out)


class Unlike:
    """A backend whose check does something else than to answer."""

    def __init__(self, does: str) -> None:
        self._does = does

    async def check(self) -> str:
        if self._does == "hangs":
            await asyncio.sleep(600)
        if self._does == "breaks":
            raise ZeroDivisionError("of its own")
        if self._does == "fails":
            raise UsageProblem("say where")
        return ""


def test_how_to_mend_a_service_that_is_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {"docker": "DOCKER_HOST", "podman": "CONTAINER_HOST", "daytona": "DAYTONA_API_URL"}
    monkeypatch.setattr(table, "BACKENDS", {name: table.BACKENDS[name] for name in variables})
    monkeypatch.setattr(cli, "STATE_SECONDS", 0.3)
    monkeypatch.setenv("DAYTONA_API_KEY", "key")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name, variable in variables.items():
            scheme = "http" if name == "daytona" else "tcp"
            monkeypatch.setenv(variable, f"{scheme}://127.0.0.1:{silent.getsockname()[1]}")
        show("list_backends", {}, page(), RunSettings(json_summary=True))
    states = {each["backend"]: each["state"] for each in json.loads(capsys.readouterr().out)}
    for name, variable in variables.items():
        assert states[name].startswith("no answer within 0.3 s: ")
        assert variable in states[name]


def test_a_backend_that_hangs_or_breaks_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["hangs", "breaks", "hangs too", "fails", "works"]
    monkeypatch.setattr(table, "BACKENDS", dict.fromkeys(names, ""))
    monkeypatch.setattr(table, "load_backend", lambda name, _: Unlike(name.removesuffix(" too")))
    monkeypatch.setattr(cli, "STATE_SECONDS", 0.5)
    show("list_backends", {}, page(), RunSettings(json_summary=True))
    states = {each["backend"]: each["state"] for each in json.loads(capsys.readouterr().out)}
    silent = "no answer within 0.5 s"
    broken = "ZeroDivisionError: of its own"
    assert states == {"hangs": silent, "breaks": broken, "hangs too": silent, "fails": "say where", "works": "ready"}
    assert list(states) == names
