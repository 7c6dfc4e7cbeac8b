"""The tool `todo`: a model's list of what it has to do, kept while the task lasts."""

from collections import Counter
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from tools.arguments import TypedTool
from tools.base import ToolContext
from tools.errors import ToolError

MAX_ITEMS = 256
MAX_CONTENT = 4_000  # characters
STATES = ("pending", "in_progress", "completed", "cancelled")


class TodoItem(Struct, frozen=True, forbid_unknown_fields=True):
    """One entry as given; with merge, what is left out stays."""

    id: Annotated[str, Meta(description="A name for the entry, of your choice")]
    content: Annotated[str, Meta(description="What has to be done; an entry that is there already can go without")] = ""
    status: Annotated[
        Literal["pending", "in_progress", "completed", "cancelled"] | None,
        Meta(description="pending where it is not given"),
    ] = None


class TodoArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What `todo` takes."""

    todos: Annotated[list[TodoItem], Meta(description="The entries to write; without them the list is read")] | None = (
        None
    )
    merge: Annotated[
        bool, Meta(description="true changes and adds entries by their id; false puts these in the place of all")
    ] = False


class Todos:
    """The list of one task."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, str]] = {}

    def write(self, items: list[TodoItem], *, merge: bool) -> None:
        """All of the items or, where one of them cannot be, none. Raises ToolError."""
        entries = dict(self._entries) if merge else {}
        for item in items:
            entries[item.id] = _entry(item, entries.get(item.id, {}))
        if len(entries) > MAX_ITEMS:
            raise ToolError(f"The list has room for {MAX_ITEMS} entries; these would make {len(entries)}")
        self._entries = entries

    def shown(self) -> dict[str, Any]:
        """The tool's result."""
        counts = Counter(entry["status"] for entry in self._entries.values())
        summary = {"total": len(self._entries), **{state: counts[state] for state in STATES}}
        return {"todos": [dict(entry) for entry in self._entries.values()], "summary": summary}


def _entry(item: TodoItem, before: dict[str, str]) -> dict[str, str]:
    content = item.content.strip() or before.get("content", "")
    if not item.id.strip() or not content:
        raise ToolError(f"Entry {item.id!r} needs {'content' if item.id.strip() else 'an id'}")
    if len(content) > MAX_CONTENT:
        raise ToolError(f"Entry {item.id!r} has {len(content)} characters of content; {MAX_CONTENT} are the most")
    return {"id": item.id, "content": content, "status": item.status or before.get("status", "pending")}


async def todo(context: ToolContext, arguments: TodoArguments) -> dict[str, Any]:
    """`{todos: [{id, content, status}], summary: {total, pending, in_progress, completed, cancelled}}`: the whole list
    after what was written."""
    todos = context.memory(Todos)
    if arguments.todos is not None:
        todos.write(arguments.todos, merge=arguments.merge)
    return todos.shown()


TODO = TypedTool(
    "todo",
    "Your list of what has to be done in this task, in the order of work. Write entries with todos, or call it without "
    "to read the list; every call returns the whole list. Keep one entry in_progress at a time, and mark entries "
    "completed as soon as they are.",
    TodoArguments,
    todo,
)
