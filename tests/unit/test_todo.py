"""The tool `todo`: what is written, merged, refused and counted; one list a task."""

from typing import Any, cast

import pytest

from tools.base import ToolContext
from tools.environments.base import Environment
from tools.errors import ToolError
from tools.todo import MAX_CONTENT, MAX_ITEMS, TODO


@pytest.fixture
def context() -> ToolContext:
    return ToolContext(cast("Environment", None), 20.0)  # the list needs no sandbox


async def todo(context: ToolContext, **arguments: Any) -> dict[str, Any]:
    return await TODO.call(context, TODO.parse(arguments))


def entry(name: str, status: str = "pending", content: str = "") -> dict[str, Any]:
    return {"id": name, "content": content or f"do {name}", "status": status}


async def test_reading_an_empty_list(context: ToolContext) -> None:
    zero = {"total": 0, "pending": 0, "in_progress": 0, "completed": 0, "cancelled": 0}
    assert await todo(context) == {"todos": [], "summary": zero}
    assert await todo(context, todos=None) == {"todos": [], "summary": zero}


async def test_writing_replaces_and_reading_shows(context: ToolContext) -> None:
    first = [entry("a", "completed"), entry("b", "in_progress"), entry("c"), entry("d", "cancelled")]
    written = await todo(context, todos=first)
    assert written["todos"] == first
    assert written["summary"] == {"total": 4, "pending": 1, "in_progress": 1, "completed": 1, "cancelled": 1}
    assert await todo(context) == written
    assert (await todo(context, todos=[entry("z")]))["todos"] == [entry("z")]
    assert (await todo(context, todos=[]))["todos"] == []


async def test_merge_changes_by_id_and_adds_at_the_end(context: ToolContext) -> None:
    await todo(context, todos=[entry("a"), entry("b")])
    changes = [{"id": "b", "status": "completed"}, {"id": "a", "content": "other"}, entry("c")]
    merged = await todo(context, todos=changes, merge=True)
    assert merged["todos"] == [entry("a", content="other"), entry("b", "completed"), entry("c")]


async def test_the_last_of_two_entries_with_one_id_counts(context: ToolContext) -> None:
    both = [entry("a"), entry("b"), {"id": "a", "status": "completed"}]
    assert (await todo(context, todos=both))["todos"] == [entry("a", "completed"), entry("b")]


async def test_results_are_not_the_list_itself(context: ToolContext) -> None:
    shown = await todo(context, todos=[entry("a")])
    shown["todos"][0]["status"] = "completed"
    assert (await todo(context))["todos"] == [entry("a")]


async def test_what_models_send_is_repaired(context: ToolContext) -> None:
    assert (await todo(context, todos={"id": 7, "content": "x"}))["todos"] == [entry("7", content="x")]
    text = '[{"id": 1, "content": "x", "status": null}, {"id": "2", "content": 5}]'
    assert (await todo(context, todos=text, merge="false"))["todos"] == [
        entry("1", content="x"),
        entry("2", content="5"),
    ]


@pytest.mark.parametrize(
    ("todos", "problem"),
    [
        ([{"id": "a"}], "'a' needs content"),
        ([{"id": " ", "content": "x"}], "needs an id"),
        ([{"content": "x"}], "missing required field `id`"),
        ([{**entry("a"), "status": "done"}], "expected one of cancelled, completed, in_progress, pending"),
        ([{**entry("a"), "note": "x"}], "unknown field `note`"),
        (["write tests"], r"todos\[0\]"),
        ([entry("a", content="x" * (MAX_CONTENT + 1))], f"{MAX_CONTENT} are the most"),
        ([entry(str(number)) for number in range(MAX_ITEMS + 1)], f"{MAX_ITEMS} entries"),
    ],
)
async def test_a_refused_list_changes_nothing(context: ToolContext, todos: list[Any], problem: str) -> None:
    await todo(context, todos=[entry("kept")])
    for merge in (False, True):
        with pytest.raises(ToolError, match=problem):
            await todo(context, todos=todos, merge=merge)
    assert (await todo(context))["todos"] == [entry("kept")]


async def test_the_limits_themselves_fit(context: ToolContext) -> None:
    most = [entry(str(number), content="x" * MAX_CONTENT) for number in range(MAX_ITEMS)]
    assert (await todo(context, todos=most))["summary"]["total"] == MAX_ITEMS
    assert (await todo(context, todos=most, merge=True))["summary"]["total"] == MAX_ITEMS


async def test_each_task_has_its_own() -> None:
    one, other = (ToolContext(cast("Environment", None), 20.0) for _ in range(2))
    await todo(one, todos=[entry("a")])
    assert (await todo(other))["todos"] == []
