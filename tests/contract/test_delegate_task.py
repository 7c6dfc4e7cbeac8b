"""Child conversations in a real sandbox: what they share with their parent, what they get, and how they end."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.clock import RowClock
from agent.conversation import Conversation, ConversationOptions, End
from agent.delegation import AT_ONCE, MAX_CHILDREN, MAX_TURNS, SYSTEM_TEXT, Child, Delegation, Family
from agent.errors import RunStopped, Stopping
from agent.models.base import Model, ModelRequest
from agent.models.gate import RunGate
from agent.models.options import RequestOptions
from agent.models.table import ModelSpec, open_model
from agent.outcome import Outcome, RolloutPolicy
from agent.partner import ConversationPartner
from agent.prompt import Prompt, Try
from agent.row import ChildRow
from agent.text import Redactor
from agent.types import Message, Reply
from tests.contract.environments import open_sandbox, printed
from tools.base import Delivery, Errand, Tool, ToolContext, ToolSpec
from tools.environments.base import Environment
from tools.errors import EnvironmentLost, ToolError
from tools.services import Services, ToolSettings
from tools.toolsets import Catalog, load_tool

SECRET = "secret-that-must-not-show"
TOOLS = ("terminal", "process", "read_file", "write_file", "todo", "execute_code", "delegate_task")
USAGE = {"input_tokens": 10, "output_tokens": 5}


class Own:
    """A tool of the run's own: does what a function does with its context."""

    read_only = False

    def __init__(self, name: str, act: Callable[[ToolContext], Any]) -> None:
        self.spec = ToolSpec(name, f"does {name}", {"type": "object", "properties": {}, "required": []})
        self._act = act

    def parse(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return arguments

    async def call(self, context: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
        value = self._act(context)
        result: dict[str, Any] = await value if asyncio.iscoroutine(value) else value
        return result


def lose(_: ToolContext) -> dict[str, Any]:
    raise EnvironmentLost("the sandbox is gone")


class Watched:
    """The scripted model: what it was asked, and how many of its replies were under way at once."""

    def __init__(self, model: Model) -> None:
        self.name = model.name
        self.requests: list[ModelRequest] = []
        self.most = self._now = 0
        self._model = model

    async def reply(self, request: ModelRequest) -> Reply:
        self.requests.append(request)
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            return await self._model.reply(request)
        finally:
            self._now -= 1

    async def close(self) -> None:
        await self._model.close()


class House:
    """A row's sandbox, its conversation and its children. `run` plays the parent, `give` its tool alone."""

    def __init__(self, environment: Environment, folder: Path) -> None:
        self.environment = environment
        self.folder = folder
        self.stop: Stopping = ""
        self.closed: list[str] = []
        self.model: Watched
        self.conversation: Conversation
        self.delegation: Delegation

    def open(self, *rules: dict[str, Any], own: tuple[Own, ...] = (), names: tuple[str, ...] = TOOLS) -> None:
        script = self.folder / "script.yaml"
        script.write_text(yaml.safe_dump({"rules": list(rules), "default": {"turns": [says("done")]}}))
        spec = ModelSpec(
            model=f"scripted:{script}", options=RequestOptions(request_retries=1, price_in=1.0, price_out=1.0)
        )
        self.model = Watched(open_model(spec, RunGate()))
        tools: list[Tool] = [*map(load_tool, names), *own]
        options = ConversationOptions(
            task_id="t", row_key="id:t", max_turns=5, ephemeral_system_prompt="Be brief.", system_text="The row's own."
        )
        clock, redactor, services = RowClock(60), Redactor({"KEY": SECRET}), Services(ToolSettings(), {})
        catalog = Catalog({tool.spec.name: tool for tool in own}, {"mine": [tool.spec.name for tool in own]})
        family = Family(
            model=self.model,
            eye=None,
            tools=tools,
            catalog=catalog,
            environment=self.environment,
            services=services,
            command_timeout=20.0,
            options=options,
            clock=clock,
            redactor=redactor,
            stopping=lambda: self.stop,
        )
        self.delegation = Delegation(family)
        context = ToolContext(self.environment, 20.0, services, "t")
        message = Message(role="user", content="parent")
        self.conversation = Conversation(
            self.model, tools, context, [message], options, clock=clock, redactor=redactor, stopping=lambda: self.stop
        )
        context.partner = ConversationPartner(self.conversation, None, self.delegation.delegate)

    async def give(self, *goals: str, **errand: Any) -> list[Delivery]:
        return await self.delegation.delegate([Errand(goal=goal, **errand) for goal in goals])

    async def run(self) -> End:
        return await self.conversation.run()

    def rows(self, end: End) -> list[ChildRow]:
        parent = Outcome(
            prompt=Prompt(text="parent"),
            which=Try(
                prompt_index=3, task_id="t", row_key="id:t", row_sha="sha", sample_index=1, attempt=2, batch_num=4
            ),
            policy=RolloutPolicy(),
            tools=(),
            redactor=Redactor({"KEY": SECRET}),
            model="m",
            conversation=self.conversation,
            beside=self.delegation.spend,
        )
        return self.delegation.rows(parent, end)

    def tools_asked_with(self, name: str) -> set[str]:
        request = next(each for each in self.model.requests if each.task_id == name)
        return {tool.name for tool in request.tools}


def says(content: str, **more: Any) -> dict[str, Any]:
    return {"reasoning": "I know.", "content": content, "usage": USAGE, **more}


def calls(name: str, **arguments: Any) -> dict[str, Any]:
    return {"reasoning": "I do.", "tool_calls": [{"name": name, "arguments": arguments}], "usage": USAGE}


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with open_sandbox("local") as environment:
        yield House(environment, tmp_path)


async def test_a_child_works_in_its_parents_sandbox_and_answers(sandbox: Environment, tmp_path: Path) -> None:
    house = House(sandbox, tmp_path)
    house.open(
        {"prompt": "write it", "turns": [calls("terminal", command="echo from child >made.txt"), says("it is there")]},
        {"equals": "parent", "turns": [calls("delegate_task", goal="write it", context="now"), says("thanks")]},
    )
    assert (await house.run()).status == "completed"
    assert await printed(sandbox, "cat made.txt") == "from child\n"
    result = house.conversation.messages[2].content
    assert '{"results":[{"status":"completed","summary":"it is there","api_calls":2,' in result.replace(
        ", ", ","
    ).replace(": ", ":")
    assert [event.ok for event in house.conversation.events] == [True]
    assert (house.conversation.api_calls, house.conversation.spend.requests) == (2, 2)
    assert (house.delegation.spend.requests, house.delegation.spend.usage.total_tokens) == (2, 30)


async def test_a_child_is_told_its_task_alone(house: House) -> None:
    house.open()
    await house.give("look", context="it is in /x")
    (request,) = house.model.requests
    system, prompt = request.messages
    assert (system.content, prompt.content) == (f"Be brief.\n\n{SYSTEM_TEXT}", "look\n\nit is in /x")
    assert (request.task_id, request.row_key, request.turn) == ("t.child_0", "id:t.child_0", 1)


async def test_a_child_has_a_memory_of_its_own(house: House) -> None:
    todo = [{"id": "1", "content": "mine"}]
    house.open(
        {"task": "child_0$", "turns": [calls("todo", todos=todo), says("written")]},
        {"task": "child_1$", "turns": [calls("todo"), says("read")]},
    )
    await house.give("a", toolsets=("todo",))
    await house.give("b", toolsets=("todo",))
    first, second = (child.conversation.messages[2].content for child in house.delegation.children)
    assert "mine" in first
    assert "mine" not in second


async def test_what_a_childs_tools_opened_is_closed_at_its_end(house: House) -> None:
    async def close() -> None:
        house.closed.append("closed")

    def opening(context: ToolContext) -> dict[str, Any]:
        context.at_end(close)
        return {"task": context.task_id}

    house.open({"prompt": "a", "turns": [calls("opens"), says("ok")]}, own=(Own("opens", opening),))
    await house.give("a", toolsets=("mine",))
    assert house.closed == ["closed"]
    assert '"t.child_0"' in house.delegation.children[0].conversation.messages[2].content


@pytest.mark.parametrize(
    ("toolsets", "given"),
    [
        ((), {"terminal", "process", "read_file", "write_file"}),
        (("file",), {"read_file", "write_file"}),
        (("read_file", "browser"), {"read_file"}),
        (("code_execution", "delegation"), {"execute_code"}),
        (("mine", "bash"), {"own", "terminal", "process"}),
    ],
)
async def test_which_tools_a_child_gets(house: House, toolsets: tuple[str, ...], given: set[str]) -> None:
    house.open(own=(Own("own", lambda _: {}),))
    await house.give("a", toolsets=toolsets)
    assert house.tools_asked_with("t.child_0") == given


@pytest.mark.parametrize(
    ("toolsets", "told"),
    [
        (("browser",), "None of your tools is in browser. You can give: terminal, process"),
        (("delegation",), "None of your tools"),
        (("termnal",), "did you mean terminal"),
    ],
)
async def test_tools_that_cannot_be_given(house: House, toolsets: tuple[str, ...], told: str) -> None:
    house.open()
    with pytest.raises(ToolError, match=told):
        await house.delegation.delegate([Errand(goal="fine"), Errand(goal="not", toolsets=toolsets)])
    assert not house.model.requests
    assert not house.delegation.children


async def test_a_child_cannot_delegate(house: House) -> None:
    async def passed_on(context: ToolContext) -> dict[str, Any]:
        return {"deliveries": len(await context.partner.delegate([Errand(goal="deeper")]))}

    turns = [calls("delegate_task", goal="deeper"), calls("passes"), says("no")]
    house.open({"prompt": "a", "turns": turns}, own=(Own("passes", passed_on),))
    await house.give("a", toolsets=("delegation", "mine"))
    assert len(house.delegation.children) == 1
    refused, told = (house.delegation.children[0].conversation.messages[place].content for place in (2, 4))
    assert "There is no tool 'delegate_task'" in refused
    assert "A child cannot delegate" in told


async def test_three_at_once_and_answers_in_order(house: House) -> None:
    rules = [{"prompt": f"^{n}$", "turns": [says(f"answer {n}", delay=0.02 * (8 - n))]} for n in range(8)]
    house.open(*rules)
    deliveries = await house.give(*map(str, range(8)))
    assert [each.text for each in deliveries] == [f"answer {n}" for n in range(8)]
    assert house.model.most == AT_ONCE == 3


async def test_a_row_has_so_many_children_and_no_more(house: House) -> None:
    house.open()
    for _ in range(2):
        await house.give(*map(str, range(11)))
    with pytest.raises(ToolError, match="at most 24 children; 2 can follow"):
        await house.give("a", "b", "c")
    await house.give("a", "b")
    with pytest.raises(ToolError, match="none can follow"):
        await house.give("a")
    assert len(house.model.requests) == len(house.delegation.children) == MAX_CHILDREN


# --- ends


async def test_a_child_that_does_not_come_to_an_end_says_what_it_said_last(house: House) -> None:
    on_and_on = {**calls("todo"), "content": "still at it"}
    house.open({"prompt": "endless", "repeat": True, "turns": [on_and_on]})
    (delivery,) = await house.give("endless", toolsets=("todo",))
    assert (delivery.status, delivery.api_calls, delivery.text) == ("max_turns", MAX_TURNS, "still at it")
    assert delivery.error == "it used up its 50 model calls"


async def test_a_child_that_fails_is_the_parents_to_know(house: House) -> None:
    def fail(_: ToolContext) -> dict[str, Any]:
        raise RuntimeError("a fault of the tool's")

    house.open(
        {"prompt": "refused", "turns": [{"error": {"status": 400, "message": "no such thing"}}]},
        {"prompt": "faulty", "turns": [calls("fail"), says("survived")]},
        own=(Own("fail", fail),),
    )
    refused, faulty = await house.give("refused", "faulty", toolsets=("mine",))
    assert (refused.status, refused.text) == ("failed", "")
    assert "no such thing" in refused.error
    assert (faulty.status, faulty.text, faulty.error) == ("completed", "survived", "")


async def test_secrets_stay_out_of_children(house: House) -> None:
    own = Own("leak", lambda _: {"text": SECRET})
    house.open({"prompt": "a", "turns": [calls("leak"), says(f"it is {SECRET}")]}, own=(own,))
    (delivery,) = await house.give(f"a {SECRET}", toolsets=("mine",))
    assert SECRET not in delivery.text
    (row,) = house.rows(End(status="completed"))
    assert SECRET not in repr(row)
    assert row.goal == "a [REDACTED:KEY]"


async def test_a_lost_sandbox_ends_the_row_and_all_of_its_children(house: House) -> None:
    house.open(
        {"equals": "parent", "turns": [calls("delegate_task", tasks=[{"goal": "lost", "toolsets": ["mine"]}] * 5)]},
        {"task": "child_1$", "turns": [calls("lose")]},
        {"prompt": "lost", "turns": [says("ended by itself", delay=0.05)]},
        own=(Own("lose", lose),),
    )
    with pytest.raises(EnvironmentLost):
        await house.run()
    ends = [(child.index, child.end and child.end.status) for child in house.delegation.children]
    assert ends == [(0, "completed"), (1, "failed"), (2, "completed")]
    rows = house.rows(End(status="failed", error_class="environment_lost"))
    assert [(row.status, row.error_class) for row in rows][1] == ("failed", "environment_lost")


async def test_a_run_that_stops_stops_children_too(house: House) -> None:
    def stopping(_: ToolContext) -> dict[str, Any]:
        house.stop = "interrupt"
        return {"said": True}

    house.open(
        {"equals": "parent", "turns": [calls("delegate_task", goal="go on", toolsets=["mine"])]},
        {"prompt": "go on", "repeat": True, "turns": [calls("stopping")]},
        own=(Own("stopping", stopping),),
    )
    with pytest.raises(RunStopped):
        await house.run()
    (row,) = house.rows(End(status="stopped", reason="interrupt"))
    assert (row.status, row.reason, row.api_calls, row.requests) == ("stopped", "interrupt", 1, 1)


async def test_children_that_are_cut_off_are_kept_as_they_stand(house: House) -> None:
    house.open(
        {"prompt": "slow", "turns": [calls("terminal", command="sleep 31.5"), says("late")]},
        {"prompt": "quick", "turns": [says("quick answer")]},
    )
    doing = asyncio.create_task(house.give("slow", "quick", "slow"))
    until = asyncio.get_running_loop().time() + 10
    while not _is_busy(house.delegation.children):
        assert asyncio.get_running_loop().time() < until
        await asyncio.sleep(0.01)
    doing.cancel()
    with suppress(asyncio.CancelledError):
        await doing
    assert doing.cancelled()
    assert not [task for task in asyncio.all_tasks() if "Delegation" in repr(task)]
    rows = house.rows(End(status="timeout", reason="timeout", error="the row's time ran out", retryable=True))
    assert [(row.task_id, row.status) for row in rows] == [
        ("t.child_0", "timeout"),
        ("t.child_1", "completed"),
        ("t.child_2", "timeout"),
    ]
    assert [turn.sender for turn in rows[0].conversations] == ["system", "human", "gpt", "tool"]
    assert "did not finish" in rows[0].conversations[-1].value
    assert rows[0].tool_stats["terminal"].failure == 1
    assert sum(row.requests for row in rows) == house.delegation.spend.requests == 3
    assert [row.status for row in house.rows(End(status="completed"))] == ["timeout", "completed", "timeout"]


def _is_busy(children: list[Child]) -> bool:
    return [len(child.conversation.messages) for child in children] == [2, 2, 2] and children[1].end is not None


async def test_a_childs_row(house: House) -> None:
    house.open({"prompt": "count", "turns": [calls("terminal", command="echo 3"), says("three")]})
    await house.give("count the files", context="in .")
    (row,) = house.rows(End(status="completed"))
    assert (row.parent_row_key, row.child_index, row.goal) == ("id:t", 0, "count the files")
    assert (row.row_key, row.task_id, row.row_sha) == ("id:t.child_0", "t.child_0", "sha")
    assert (row.prompt_index, row.sample_index, row.attempt, row.metadata.batch_num) == (3, 1, 2, 4)
    assert (row.status, row.final_response, row.api_calls, row.requests) == ("completed", "three", 2, 2)
    assert (row.usage.total_tokens, row.toolsets_used) == (30, ["file", "terminal"])
    assert [turn.sender for turn in row.conversations] == ["system", "human", "gpt", "tool", "gpt"]
    system, human = row.conversations[:2]
    assert system.value.endswith(SYSTEM_TEXT)
    assert "Be brief." not in system.value
    assert '"name":"terminal"' in system.value.replace('": "', '":"')
    assert "delegate_task" not in system.value
    assert human.value == "count the files\n\nin ."
    assert (row.tool_stats["terminal"].count, row.dataset_row) == (1, "{}")
