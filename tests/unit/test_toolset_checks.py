"""Toolsets that cannot be had: which runs they keep from starting, and what is said of them."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from batch.invocation import run
from batch.manifest import Invocation, begun
from batch.plan import Plan, file_sha, make_plan
from batch.settings import for_the_record, load_settings
from tools.errors import UsageProblem

Planned = Callable[..., Plan]


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planned:
    """Plans a run over rows that name these tools; only terminal, file, todo and the like can be had."""
    for name in ("OPENAI_API_KEY", "FAL_KEY", "TAVILY_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.yaml").write_text("default: {turns: [{content: done}]}", encoding="utf-8")

    def plan(
        rows: Sequence[Sequence[str]],
        *flags: str,
        known: dict[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Plan:
        lines = [json.dumps({"prompt": f"go {number}", "tools": names}) for number, names in enumerate(rows)]
        Path("rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
        usual = ["--dataset_file=rows.jsonl", "--run_name=r", "--dry_run"]
        usual += [] if any(flag.startswith("--model=") for flag in flags) else ["--model=scripted:script.yaml"]
        lacking = ["--browser_program=no-such-browser", "--search_provider=tavily", "--container_backend=local"]
        settings, _ = load_settings([*usual, *lacking, *flags], {})
        return asyncio.run(make_plan(settings, environ or {}, binding=known))

    return plan


def refusal(planned: Planned, *given: Any, **more: Any) -> str:
    with pytest.raises(UsageProblem) as caught:
        planned(*given, **more)
    return str(caught.value)


def test_a_distribution_that_no_row_draws_from_may_lack_what_it_wants(planned: Planned) -> None:
    plan = planned([["terminal"], ["read_file", "todo"]], "--distribution=default")
    assert (plan.absent, plan.toolless) == ({}, 0)
    assert planned([["terminal"]], "--enabled_toolsets=vision").absent == {}
    told = refusal(planned, [["terminal"], []], "--distribution=default")
    assert told.startswith("distribution default: web lacks ")
    told = refusal(planned, [["terminal"], ["image_gen"]], "--distribution=default")
    assert told.startswith("rows of rows.jsonl: image_gen lacks a service that makes pictures")
    assert "web" not in told.partition(". Mend it")[0]


def test_names_that_nobody_knows_are_refused_all_the_same(planned: Planned) -> None:
    assert "'terminel'" in refusal(planned, [["terminal"]], "--enabled_toolsets=terminel")
    assert "'terminel'" in refusal(planned, [["terminal"]], "--disabled_toolsets=terminel")


def test_what_is_done_without_is_known_and_so_are_rows_without_any_tool(planned: Planned) -> None:
    rows = [["vision"], ["vision_analyze"], ["terminal"], []]
    plan = planned(rows, "--enabled_toolsets=file,image_gen", "--allow_missing_toolsets")
    assert set(plan.absent) == {"image_gen", "vision", "vision_analyze"}
    assert plan.toolless == 2
    plan = planned(rows, "--enabled_toolsets=image_gen", "--allow_missing_toolsets")
    assert plan.toolless == 3


def test_a_dry_run_says_what_is_done_without(planned: Planned, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--enabled_toolsets=file,image_gen", "--allow_missing_toolsets"]
    for rows, more, told in (
        ([["vision"], []], ["--json_summary"], "; 1 row has no tool left\n"),
        ([[]], [], "\n"),
        ([[]], ["--quiet"], ""),
    ):
        plan = planned(rows, *flags, *more)
        assert run(plan.settings, [], {}) == 0
        shown = capsys.readouterr()
        assert shown.err == (f"warning: {plan.absence}\n" if told else "")
        assert plan.absence.startswith("not offered: image_gen lacks a service that makes pictures")
        assert shown.err.endswith(told)
        assert "not offered" not in shown.out
    assert planned([["terminal"]], *flags).absence == ""


@pytest.mark.parametrize(
    ("rows", "flag"),
    [
        ([["vision"], ["image_gen"]], "--enabled_toolsets=file"),
        ([[], []], "--enabled_toolsets=vision,image_gen"),
        ([[], ["vision"]], "--enabled_toolsets=image_gen"),
    ],
)
def test_a_run_whose_rows_all_have_no_tool_is_refused(planned: Planned, rows: list[list[str]], flag: str) -> None:
    told = refusal(planned, rows, flag, "--allow_missing_toolsets")
    assert told.endswith("no row is left a tool")
    assert "--allow_missing_toolsets" not in told


def test_keys_and_variables_are_those_of_the_mapping(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--model=gpt-x", "--provider=openai", "--env_allow=GREETING", "--enabled_toolsets=web"]
    given = {"OPENAI_API_KEY": "one,two", "TAVILY_API_KEY": "three", "GREETING": "hello"}
    plan = planned([[]], *flags, environ=given)
    assert [(each.key_variable, each.keys) for each in plan.model.targets] == [("OPENAI_API_KEY", 2)]
    assert (plan.absent, plan.policy.variables, plan.environ) == ({}, {"GREETING": "hello"}, given)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert "provider openai: no key" in refusal(planned, [[]], *flags)
    assert "enabled_toolsets: web lacks" in refusal(planned, [[]], *flags, environ={"OPENAI_API_KEY": "one"})
    assert planned([[]], "--enabled_toolsets=terminal", "--env_allow=GREETING").policy.variables == {}


def test_a_resume_says_first_which_settings_changed(planned: Planned, tmp_path: Path) -> None:
    flags = ["--enabled_toolsets=terminal", "--env_allow=HOME"]
    plan = planned([[]], *flags)
    invocation = Invocation(
        run_name="r",
        settings=for_the_record(plan.settings),
        dataset={},
        versions={},
        backend="local",
        started_at="2026-01-01T00:00:00.000Z",
        host="h",
    )
    known = msgspec.to_builtins(begun(None, invocation, allow_change=False))
    assert planned([[]], *flags, known=known).toolless == 0
    told = refusal(planned, [[]], "--distribution=default", "--temperature=1", known=known)
    assert told.startswith("this run was started otherwise:")
    assert 'enabled_toolsets: ["terminal"] -> []' in told
    assert "temperature: null -> 1.0" in told
    (tmp_path / "tools.py").write_text("TOOLS = []", encoding="utf-8")
    told = refusal(planned, [[]], *flags, "--tools_module=tools.py", known=known)
    assert f'tools_module: "" -> "{file_sha("tools.py")}"' in told
    assert "no-file.py cannot be read" in refusal(planned, [[]], *flags, "--tools_module=no-file.py", known=known)
