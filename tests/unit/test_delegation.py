"""Delegation without a sandbox: what the tool takes and gives, and which children belong to the tries that are kept."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.delegation import as_child
from agent.errors import ModelError
from agent.models.gate import RunGate
from agent.models.table import ModelSpec, open_model
from agent.row import ChildRow, Row, Turn, child_name, decode_child, decode_row, encode_row
from batch.dataset import Dataset
from batch.facts import MergePolicy
from batch.index import scan_journal
from batch.store import RunDirectory
from batch.summary import finalize
from tests.unit.made import THOUGHT, THOUGHTLESS, dataset_of, read_lines, row_of_job, write_batch
from tests.unit.test_scripted import asking, script
from tests.unit.test_summary import OPTIONS
from tools.base import Delivery, Errand, Picture, ToolContext, ToolSpec
from tools.delegation import DELEGATE_TASK, MAX_SUMMARY
from tools.errors import ToolError, UsageProblem

# --- the tool


class Office:
    """A partner that takes errands."""

    def __init__(self, *deliveries: Delivery) -> None:
        self.errands: list[Errand] = []
        self._deliveries = deliveries

    async def look(self, question: str, picture: Picture) -> str:
        raise AssertionError

    async def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError

    def inner_tools(self) -> Sequence[ToolSpec]:
        raise AssertionError

    async def delegate(self, errands: Sequence[Errand]) -> Sequence[Delivery]:
        self.errands.extend(errands)
        return self._deliveries or [delivery() for _ in errands]


def delivery(text: str = "found", **changes: Any) -> Delivery:
    return msgspec.structs.replace(Delivery(status="completed", text=text, api_calls=2, seconds=1.23456), **changes)


async def delegated(office: Office, **arguments: Any) -> dict[str, Any]:
    context = ToolContext(None, 1.0)  # type: ignore[arg-type]  # the tool itself has no use for a sandbox
    context.partner = office
    return await DELEGATE_TASK.call(context, DELEGATE_TASK.parse(arguments))


async def test_one_goal_is_one_errand() -> None:
    office = Office()
    result = await delegated(office, goal=" look ", context="in /x", toolsets="file")
    assert office.errands == [Errand(goal="look", context="in /x", toolsets=("file",))]
    assert result == {
        "results": [{"status": "completed", "summary": "found", "api_calls": 2, "duration_seconds": 1.235}]
    }


async def test_tasks_take_what_they_do_not_say_from_beside_them() -> None:
    office = Office()
    tasks = [{"goal": "a"}, {"goal": "b", "context": "own", "toolsets": ["web"]}]
    result = await delegated(office, tasks=tasks, context="all", toolsets=["file"])
    assert office.errands == [
        Errand(goal="a", context="all", toolsets=("file",)),
        Errand(goal="b", context="own", toolsets=("web",)),
    ]
    assert len(result["results"]) == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "Give goal, or tasks"),
        ({"goal": " \n"}, "Give goal, or tasks"),
        ({"goal": "a", "tasks": [{"goal": "b"}]}, "not both"),
        ({"tasks": [{"goal": "a"}, {"goal": ""}]}, "has no goal"),
        ({"tasks": [{"goal": str(number)} for number in range(9)]}, "at most 8 tasks; these are 9"),
        ({"tasks": [{"context": "a"}]}, "goal"),
        ({"goal": "a", "depth": 3}, "unknown argument `depth`"),
    ],
)
async def test_what_cannot_be_done_is_told_before_anything_is(arguments: dict[str, Any], told: str) -> None:
    office = Office()
    with pytest.raises(ToolError, match=told):
        await delegated(office, **arguments)
    assert not office.errands


async def test_a_long_answer_is_cut_in_its_middle() -> None:
    long = "a" * 20_000 + "b" * 20_000
    (shown,) = (await delegated(Office(delivery(long)), goal="x"))["results"]
    assert 23_900 < len(shown["summary"]) <= MAX_SUMMARY
    assert (shown["summary"][0], shown["summary"][-1]) == ("a", "b")
    assert "16060 characters left out" in shown["summary"]
    (shown,) = (await delegated(Office(delivery(long[:MAX_SUMMARY])), goal="x"))["results"]
    assert shown["summary"] == long[:MAX_SUMMARY]


async def test_the_call_fails_only_where_all_have_failed() -> None:
    failed, cut = delivery(status="failed", error="no model"), delivery(status="max_turns", error="50 calls")
    result = await delegated(Office(failed, cut), tasks=[{"goal": "a"}, {"goal": "b"}])
    assert [each["error"] for each in result["results"]] == ["no model", "50 calls"]
    assert "error" not in result
    assert (await delegated(Office(failed), goal="a"))["error"] == "no model"
    assert (await delegated(Office(failed, failed), tasks=[{"goal": "a"}, {"goal": "b"}]))["error"]


# --- children of kept tries


def child_of(row: Row, index: int, **changes: Any) -> ChildRow:
    own = msgspec.structs.replace(
        row, task_id=child_name(row.task_id, index), row_key=child_name(row.row_key, index), **changes
    )
    return as_child(own, parent_row_key=row.row_key, child_index=index, goal=f"goal {index}")


class Folder:
    """A run directory of three rows."""

    def __init__(self, path: Path) -> None:
        self.dataset = dataset_of(path / "d", [{"prompt": "a"}, {"prompt": "b", "id": "named"}, {"prompt": "c"}])
        self.directory = RunDirectory(path / "run")

    def row(self, number: int, **changes: Any) -> Row:
        return row_of_job(self.dataset.job(number, 0, changes.pop("attempt", 1)), **changes)

    def write(self, number: int, rows: Sequence[Row], children: Sequence[ChildRow], more: bytes = b"") -> None:
        write_batch(self.directory, number, rows)
        self.directory.children_path(number).write_bytes(b"".join(map(encode_row, children)) + more)

    def merge(self, dataset: Dataset | None = None, **policy: Any) -> list[dict[str, Any]]:
        dataset = dataset or self.dataset
        index = scan_journal(self.directory, dataset, range(len(dataset)), policy=MergePolicy(**policy))
        try:
            finalize(self.directory, index, OPTIONS)
        finally:
            index.close()
        return read_lines(self.directory.merged_children_path)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def names(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, int]]:
    return ((row["task_id"], row["metadata"]["batch_num"]) for row in rows)


def test_a_child_row_is_a_row_with_three_columns_more(folder: Folder) -> None:
    line = encode_row(child_of(folder.row(1), 2))
    assert decode_child(line).goal == "goal 2"
    assert (decode_row(line).task_id, decode_row(line).row_key) == ("named.child_2", "id:named.child_2")
    columns = list(msgspec.json.decode(line))
    assert columns[-3:] == ["parent_row_key", "child_index", "goal"]
    assert columns[:-3] == list(msgspec.json.decode(encode_row(folder.row(1))))


def test_children_stand_in_dataset_order_as_they_were_written(folder: Folder) -> None:
    rows = [folder.row(number) for number in (2, 0, 1)]
    children = [child_of(row, index) for row in rows for index in range(2)]
    folder.write(0, rows, children)
    merged = folder.merge()
    assert [name for name, _ in names(merged)] == [
        f"{name}.child_{n}" for name in ("task_0", "named", "task_2") for n in (0, 1)
    ]
    assert sorted(folder.directory.merged_children_path.read_bytes().splitlines()) == sorted(
        encode_row(child).strip() for child in children
    )


def test_a_run_without_children_has_no_file_of_them(folder: Folder) -> None:
    write_batch(folder.directory, 0, [folder.row(0)])
    index = scan_journal(folder.directory, folder.dataset, range(3))
    finalize(folder.directory, index, OPTIONS)
    index.close()
    assert not folder.directory.merged_children_path.exists()


def test_children_of_other_tries_are_left_overs(folder: Folder) -> None:
    def made(number: int, batch_num: int, **changes: Any) -> tuple[Row, ChildRow]:
        row = folder.row(number, batch_num=batch_num, **changes)
        return row, child_of(row, 0, status="completed", end_status="completed")

    stopped, cut = made(0, 0, status="stopped")
    _, never = made(1, 0)
    failed, before = made(2, 0, status="failed", attempt=1)
    again, after = made(2, 0, attempt=2)
    folder.write(0, [stopped, failed, again], [cut, never, before, after])
    killed = made(1, 1)[1]
    folder.write(1, [], [killed], more=encode_row(killed)[:-9])
    ended = [made(0, 2), made(1, 2)]
    folder.write(2, [row for row, _ in ended], [child for _, child in ended], more=b"{}\nno row\n")
    merged = folder.merge()
    assert list(names(merged)) == [("task_0.child_0", 2), ("named.child_0", 2), ("task_2.child_0", 0)]
    assert merged[2]["attempt"] == 2


def test_children_go_by_the_policy_that_rows_go_by(folder: Folder) -> None:
    row = folder.row(0)
    thoughtless = [Turn("system", "s"), Turn("human", "h"), Turn("gpt", THOUGHTLESS)]
    children = [
        child_of(row, 0, status="discarded", reason="no_reasoning", end_status="completed", conversations=thoughtless),
        child_of(row, 1, status="failed", end_status="failed"),
        child_of(row, 2, status="timeout", end_status="timeout"),
    ]
    folder.write(0, [row], children)
    assert [name for name, _ in names(folder.merge())] == ["task_0.child_2"]
    assert folder.merge(save_all=False) == []
    kept = folder.merge(keep_no_reasoning=True)
    assert [(each["child_index"], each["status"], each["reason"]) for each in kept] == [
        (0, "completed", ""),
        (2, "timeout", ""),
    ]


def test_children_follow_their_row_to_another_place(folder: Folder, tmp_path: Path) -> None:
    rows = [folder.row(number) for number in range(3)]
    folder.write(0, rows, [child_of(row, 0) for row in rows])
    other = dataset_of(tmp_path / "other", [{"prompt": "b", "id": "named"}, {"prompt": "c"}, {"prompt": "a"}])
    merged = folder.merge(other)
    assert [(row["prompt_index"], row["task_id"]) for row in merged] == [
        (0, "named.child_0"),
        (1, "task_1.child_0"),
        (2, "task_2.child_0"),
    ]
    assert [row["parent_row_key"] for row in merged] == [
        row["row_key"] for row in read_lines(folder.directory.trajectories_path)
    ]


def test_files_of_children_are_no_batch_files_but_take_a_number(folder: Folder) -> None:
    folder.write(3, [folder.row(0)], [])
    folder.directory.children_path(7).write_bytes(b'{"torn')
    assert (folder.directory.batch_numbers(), folder.directory.children_numbers()) == ([3], [3, 7])
    assert folder.directory.next_batch_number() == 8
    assert folder.directory.mend().cut == ("batch_7.children.jsonl",)
    assert folder.directory.children_path(7).read_bytes() == b""
    assert (folder.directory.batch_numbers(), folder.directory.children_numbers()) == ([3], [3, 7])


# --- models that play


async def test_a_script_tells_children_by_their_names(tmp_path: Path) -> None:
    rules = """
rules:
  - {prompt: look, task: 'child_1$', turns: [{content: second}]}
  - {task: 'child_\\d+$', turns: [{content: any}]}
  - {prompt: look, turns: [{content: parent}]}
"""
    model = open_model(ModelSpec(model=script(tmp_path, rules)), RunGate())
    said = [await model.reply(asking("look", task_id=f"t{name}")) for name in ("", ".child_0", ".child_1", ".child_12")]
    assert [reply.content for reply in said] == ["parent", "any", "second", "any"]
    with pytest.raises(UsageProblem, match=r"rules\[0\].task is no regular expression"):
        open_model(ModelSpec(model=script(tmp_path, "rules: [{task: '(', turns: []}]")), RunGate())


@pytest.mark.parametrize("merged", [False, True])
async def test_a_replay_gives_children_their_own_turns(folder: Folder, merged: bool) -> None:
    row = folder.row(1)
    spoken = [Turn("system", "s"), Turn("human", "h"), Turn("gpt", THOUGHT.replace("done", "child"))]
    folder.write(0, [row], [child_of(row, 0, conversations=spoken)])
    if merged:
        folder.merge()
        folder.directory.batch_path(0).unlink()
        folder.directory.children_path(0).unlink()
    model = open_model(ModelSpec(model=f"replay:{folder.directory.path}"), RunGate())
    own = await model.reply(asking("h", row_key="id:named", task_id="named"))
    child = await model.reply(asking("h", row_key="id:named.child_0", task_id="named.child_0"))
    assert (own.content, child.content) == ("done", "child")
    with pytest.raises(ModelError, match="no such row"):
        await model.reply(asking("h", row_key="id:named.child_1", task_id="named.child_1"))
