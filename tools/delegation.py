"""The tool `delegate_task`: parts of a task given to child conversations, which answer with what they found."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from tools.arguments import Meaningless, TypedTool
from tools.base import Delivery, Errand, ToolContext
from tools.errors import ToolError
from tools.text import shorten

MAX_TASKS = 8  # of one call
MAX_SUMMARY = 24_000  # characters, with what says that there were more
_NOTE = 60  # characters that say so

_GOAL = "What the child is to do, and what its answer must hold"
_CONTEXT = "What it has to know: it sees nothing of this conversation"
_TOOLSETS = "Toolsets or tools of yours that it gets; without: terminal, file and web"


class TaskArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """One of several errands."""

    goal: Annotated[str, Meta(description=_GOAL)]
    context: Annotated[str, Meta(description=_CONTEXT)] = ""
    toolsets: Annotated[tuple[str, ...], Meta(description=_TOOLSETS)] = ()
    role: Meaningless = None  # leaf or orchestrator: no child delegates


class DelegateArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What `delegate_task` takes."""

    goal: Annotated[str, Meta(description=f"{_GOAL}; for one task")] = ""
    context: Annotated[str, Meta(description=f"{_CONTEXT}; also for tasks without one")] = ""
    toolsets: Annotated[tuple[str, ...], Meta(description=f"{_TOOLSETS}; also for tasks without any")] = ()
    tasks: Annotated[
        tuple[TaskArguments, ...],
        Meta(description=f"Instead of goal: up to {MAX_TASKS} tasks that do not wait for each other's results"),
    ] = ()
    role: Meaningless = None


async def delegate_task(context: ToolContext, arguments: DelegateArguments) -> dict[str, Any]:
    """`{results: [{status, summary, api_calls, duration_seconds}]}` in the order of the tasks; where one did not
    complete also its `error`, where all have failed an `error` beside the results. Raises ToolError."""
    deliveries = await context.partner.delegate(_errands(arguments))
    result: dict[str, Any] = {"results": [_shown(each) for each in deliveries]}
    if all(each.status == "failed" for each in deliveries):
        result["error"] = deliveries[0].error if len(deliveries) == 1 else "All of the tasks failed"
    return result


def _errands(arguments: DelegateArguments) -> list[Errand]:
    if arguments.goal.strip() and arguments.tasks:
        raise ToolError("Give goal for one task, or tasks for several, not both")
    if len(arguments.tasks) > MAX_TASKS:
        raise ToolError(f"One call takes at most {MAX_TASKS} tasks; these are {len(arguments.tasks)}")
    tasks = arguments.tasks or (TaskArguments(goal=arguments.goal),)
    if any(not task.goal.strip() for task in tasks):
        raise ToolError("A task in tasks has no goal" if arguments.tasks else "Give goal, or tasks")
    return [
        Errand(
            goal=task.goal.strip(),
            context=(task.context or arguments.context).strip(),
            toolsets=task.toolsets or arguments.toolsets,
        )
        for task in tasks
    ]


def _shown(delivery: Delivery) -> dict[str, Any]:
    shown = {
        "status": delivery.status,
        "summary": _summary(delivery.text),
        "api_calls": delivery.api_calls,
        "duration_seconds": round(delivery.seconds, 3),
    }
    return {**shown, "error": delivery.error} if delivery.error else shown


def _summary(text: str) -> str:
    return text if len(text) <= MAX_SUMMARY else shorten(text, MAX_SUMMARY - _NOTE)


DELEGATE_TASK = TypedTool(
    "delegate_task",
    "Give parts of the task to child agents and wait for their answers. Each works for itself, with a context of its "
    "own: it knows only its goal and context, so put into them all that it needs, and you see only its last message. "
    "Give goal for one child, or tasks for several at once. Children work in your sandbox, three at a time, and share "
    "its files and the current directory of its shell with you and each other: name files by absolute paths. A child "
    "cannot delegate.",
    DelegateArguments,
    delegate_task,
)
