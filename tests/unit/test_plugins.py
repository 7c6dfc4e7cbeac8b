"""Plug-ins by name, and what they raise."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from agent.checkers import judge, load_plugin
from agent.faults import Fault, attempted, guarded
from tools.errors import UsageProblem


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    loaded = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "plug.py").write_text(f"def name(): return {folder!r}\n", encoding="utf-8")
        loaded.append(load_plugin(f"{tmp_path}/{folder}/plug.py:name"))
    assert [function() for function in loaded] == ["a", "b"]
    assert [vars(sys.modules[function.__module__])["name"] for function in loaded] == loaded


def test_a_file_that_is_loaded_may_end_its_own_processes_alone(tmp_path: Path) -> None:
    leave = os._exit
    (tmp_path / "plug.py").write_text(
        "import os\nchild = os.fork() or os._exit(7)\nSTATUS = os.waitpid(child, 0)[1]\n"
        "def status(): return os.waitstatus_to_exitcode(STATUS)\n",
        encoding="utf-8",
    )
    assert load_plugin(f"{tmp_path}/plug.py:status")() == 7
    (tmp_path / "ends.py").write_text("import os\nos._exit(0)\n", encoding="utf-8")
    with pytest.raises(UsageProblem, match=r"SystemExit: os\._exit\(0\)"):
        load_plugin(f"{tmp_path}/ends.py:f")
    assert os._exit is leave


@pytest.mark.parametrize("raised", [KeyboardInterrupt("no"), SystemExit("no"), ValueError("no")])
@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_whatever_a_checker_raises_is_a_judgement(kind: str, raised: BaseException) -> None:
    def check(task: dict[str, Any]) -> bool:
        raise raised

    async def check_later(task: dict[str, Any]) -> bool:
        raise raised

    judgement = await judge(check if kind == "sync" else check_later, {}, None)
    assert judgement.raised
    assert judgement.reason == f"{type(raised).__name__}: no"


async def test_a_checker_on_a_thread_cancels_nobody() -> None:
    def check(task: dict[str, Any]) -> bool:
        raise asyncio.CancelledError("no")

    assert (await judge(check, {}, None)).reason == "RuntimeError: CancelledError: no"


def interrupt() -> None:
    raise KeyboardInterrupt


async def test_ctrl_c_on_the_main_thread_is_the_users_and_elsewhere_a_fault() -> None:
    async def tool() -> None:
        interrupt()

    with pytest.raises(KeyboardInterrupt):
        attempted(interrupt)
    assert isinstance(await guarded(tool()), Fault)
