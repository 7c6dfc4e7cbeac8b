"""Child conversations: what `delegate_task` gives them to do, and the rows that they leave."""

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from agent.clock import RowClock
from agent.conversation import Conversation, ConversationOptions, End
from agent.ends import failed_end, fault_end, stopped_end, timeout_end
from agent.errors import RunStopped, Stopping
from agent.faults import Done, guarded
from agent.models.base import Model
from agent.outcome import Outcome, row_of
from agent.partner import ConversationPartner
from agent.prompt import Prompt
from agent.row import ChildRow, Row, child_name
from agent.text import Redactor, clean
from agent.types import NO_SPEND, Message, Spend
from tools.base import Delivery, Errand, Tool, ToolContext
from tools.environments.base import Environment
from tools.environments.ending import to_the_end
from tools.errors import RowFailed, ToolError, UsageProblem
from tools.services import Services
from tools.toolsets import Catalog

MAX_TURNS = 50  # model calls of a child
AT_ONCE = 3
MAX_CHILDREN = 24  # of one row
DEFAULT_TOOLSETS = ("terminal", "file", "web")
SYSTEM_TEXT = (
    "You do one task for another agent. It sees nothing of your work but your last message: put into that all that the "
    "task asks for, the paths of files that you made or changed, and what you could not do. The sandbox and its "
    "current directory are shared with others who work at the same time: use absolute paths, and touch only what the "
    "task is about. Nobody can answer questions."
)
_DELEGATE = "delegate_task"


class Family(Struct, frozen=True, kw_only=True):
    """What children share with their parent. `options`, `tools`: the parent's."""

    model: Model
    eye: Model | None
    tools: Sequence[Tool]
    catalog: Catalog
    environment: Environment
    services: Services
    command_timeout: float
    options: ConversationOptions
    clock: RowClock
    redactor: Redactor
    stopping: Callable[[], Stopping]


class Child:
    """One errand under way. Without an `end` it was cut off, as its row was."""

    def __init__(self, index: int, errand: Errand, tools: Sequence[Tool], family: Family) -> None:
        self.index = index
        self.errand = errand
        self.tools = tools
        self.end: End | None = None
        self.task_id = child_name(family.options.task_id, index)
        self._context = ToolContext(family.environment, family.command_timeout, family.services, self.task_id)
        self.conversation = Conversation(
            family.model,
            tools,
            self._context,
            [Message(role="user", content=self.text)],
            self._options(family.options),
            clock=family.clock,
            redactor=family.redactor,
            stopping=family.stopping,
        )
        self._context.partner = ConversationPartner(self.conversation, family.eye)
        self._began = time.monotonic()
        self._seconds: float | None = None

    def _options(self, parent: ConversationOptions) -> ConversationOptions:
        return msgspec.structs.replace(
            parent,
            max_turns=MAX_TURNS,
            system_text=SYSTEM_TEXT,
            response_format=None,
            sentinel="",
            task_id=self.task_id,
            row_key=child_name(parent.row_key, self.index),
        )

    @property
    def text(self) -> str:
        """Its prompt."""
        return "\n\n".join(part for part in (self.errand.goal, self.errand.context) if part)

    @property
    def seconds(self) -> float:
        """Since it began, as long as it runs."""
        return time.monotonic() - self._began if self._seconds is None else self._seconds

    async def run(self) -> None:
        """To its end. Raises what ends the row with it: RowFailed of the sandbox, RunStopped."""
        try:
            outcome = await guarded(self.conversation.run())
            self.end = outcome.value if isinstance(outcome, Done) else fault_end(outcome)
        except RowFailed as failed:
            self.end = failed_end(failed)
            raise
        except RunStopped as stop:
            self.end = stopped_end(stop)
            raise
        except TimeoutError:
            self.end = timeout_end()
        finally:
            self._seconds = self.seconds
            if self._context.has_ends:
                await to_the_end(self._context.close())

    def delivery(self) -> Delivery:
        """What its parent hears of one that has ended."""
        end, conversation = self.end or timeout_end(), self.conversation
        error = end.error or (f"it used up its {MAX_TURNS} model calls" if end.status == "max_turns" else "")
        return Delivery(
            status=end.status,
            text=conversation.final_response or _last_words(conversation),
            api_calls=conversation.api_calls,
            seconds=self.seconds,
            error="" if end.status == "completed" else error or end.reason or end.status,
        )


def _last_words(conversation: Conversation) -> str:
    said = (message.content for message in reversed(conversation.messages) if message.role == "assistant")
    return next((text for text in said if text.strip()), "")


class Delegation:
    """All errands of one row."""

    def __init__(self, family: Family) -> None:
        self.children: list[Child] = []  # those that have begun
        self._family = family
        self._given = 0
        self._places = asyncio.Semaphore(AT_ONCE)
        self._broken: RowFailed | RunStopped | None = None

    @property
    def spend(self) -> Spend:
        """What all of them have cost so far."""
        return sum((child.conversation.spend for child in self.children), NO_SPEND)

    async def delegate(self, errands: Sequence[Errand]) -> list[Delivery]:
        """See `tools.base.Partner`. Whatever ends one of them, none is left running."""
        tools = [self._tools_of(errand) for errand in errands]
        left = MAX_CHILDREN - self._given
        if len(errands) > left:
            raise ToolError(f"One task has at most {MAX_CHILDREN} children; {left or 'none'} can follow")
        first = self._given
        self._given += len(errands)
        every = zip(errands, tools, strict=True)
        doing = (self._do(index, errand, tools) for index, (errand, tools) in enumerate(every, first))
        results = await asyncio.gather(*doing, return_exceptions=True)
        return [_delivered(result) for result in results]

    def _tools_of(self, errand: Errand) -> list[Tool]:
        """What it names of the parent's tools."""
        names = set(self._names(errand.toolsets or DEFAULT_TOOLSETS))
        offered = [tool for tool in self._family.tools if tool.spec.name != _DELEGATE]
        chosen = [tool for tool in offered if tool.spec.name in names]
        if errand.toolsets and not chosen:
            yours = ", ".join(tool.spec.name for tool in offered)
            raise ToolError(f"None of your tools is in {', '.join(errand.toolsets)}. You can give: {yours or 'none'}")
        return chosen

    def _names(self, toolsets: Sequence[str]) -> Sequence[str]:
        try:
            return self._family.catalog.resolve_toolsets(toolsets)
        except UsageProblem as problem:
            raise ToolError(str(problem)) from problem

    async def _do(self, index: int, errand: Errand, tools: Sequence[Tool]) -> Delivery:
        async with self._places:
            if self._broken:  # the row ends: nothing begins any more
                raise self._broken
            child = Child(index, errand, tools, self._family)
            self.children.append(child)
            try:
                await child.run()
            except (RowFailed, RunStopped) as error:
                self._broken = error
                raise
            return child.delivery()

    def rows(self, parent: Outcome, end: End) -> list[ChildRow]:
        """Those of all children that have begun, in order. `parent`, `end`: of their row; whom its end cut off ended in
        the same way."""
        return [_child_row(child, parent, end) for child in sorted(self.children, key=lambda child: child.index)]


def _delivered(result: Delivery | BaseException) -> Delivery:
    if isinstance(result, BaseException):
        raise result
    return result


def _child_row(child: Child, parent: Outcome, end: End) -> ChildRow:
    child.conversation.settle()  # one that was abandoned has not come to it
    row_key = child_name(parent.which.row_key, child.index)
    outcome = msgspec.structs.replace(
        parent,
        prompt=Prompt(text=child.text, system_text=SYSTEM_TEXT),
        which=msgspec.structs.replace(parent.which, task_id=child.task_id, row_key=row_key),
        tools=child.tools,
        conversation=child.conversation,
        beside=NO_SPEND,
        judgement=None,
        seconds=child.seconds,
    )
    return as_child(
        row_of(outcome, child.end or _end_with(end)),
        parent_row_key=parent.which.row_key,
        child_index=child.index,
        goal=parent.redactor.text(clean(child.errand.goal)),
    )


def _end_with(end: End) -> End:
    """Of a child that was cut off: its row's, unless it was a tool that gave it up and the row went on."""
    return end if end.status in ("stopped", "timeout", "failed") else timeout_end()


def as_child(row: Row, *, parent_row_key: str, child_index: int, goal: str) -> ChildRow:
    """The row with what makes it a child's."""
    columns = {name: getattr(row, name) for name in row.__struct_fields__}
    return ChildRow(**columns, parent_row_key=parent_row_key, child_index=child_index, goal=goal)
