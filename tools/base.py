"""What a tool is: a specification for the model, arguments with types, and a function that acts in the sandbox."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from tools.environments.base import Environment
from tools.errors import ToolError
from tools.services import Services, ToolSettings, close_all

T = TypeVar("T")


class ToolSpec(Struct, frozen=True):
    """A tool as models are told of it; `parameters` is a JSON schema of type object."""

    name: str
    description: str
    parameters: dict[str, Any]


class Picture(Struct, frozen=True):
    """A picture's bytes and media type (image/png, image/jpeg, image/gif or image/webp)."""

    media_type: str
    data: bytes


class Errand(Struct, frozen=True, kw_only=True):
    """What a child conversation is to do. `toolsets`: the toolsets or tools that it gets; () = the usual ones."""

    goal: str
    context: str = ""
    toolsets: tuple[str, ...] = ()


class Delivery(Struct, frozen=True, kw_only=True):
    """How an errand ended. `status` is completed, max_turns, partial, timeout or failed; `text` the child's last words,
    "" without any; `error` why it did not complete."""

    status: str
    text: str
    api_calls: int
    seconds: float
    error: str = ""


class Partner(Protocol):
    """The conversation that tools serve, as far as they may ask something of it: what costs goes through it."""

    async def look(self, question: str, picture: Picture) -> str:
        """A model's answer to a question about a picture, which is made smaller if need be. Raises ToolError."""

    async def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """The result object of one of the task's other tools, counted apart from the model's own calls."""

    def inner_tools(self) -> Sequence[ToolSpec]:
        """The tools that `call` knows."""

    async def delegate(self, errands: Sequence[Errand]) -> Sequence[Delivery]:
        """Every errand done by a conversation of its own with the same model, in the same sandbox; in their order.
        Raises ToolError, and then none was begun."""


class ToolContext:
    """What the tools of one task share: its sandbox, the limits, and what a tool has to remember between calls.

    `task_id` names the task in the file names of what it leaves behind; `partner` is there while a model is asked."""

    def __init__(
        self,
        environment: Environment,
        command_timeout: float,
        services: Services | None = None,
        task_id: str = "task",
    ) -> None:
        self.environment = environment
        self.command_timeout = command_timeout
        self.services = services or Services(ToolSettings(), {})
        self.task_id = task_id
        self._partner: Partner | None = None
        self._memory: dict[Any, Any] = {}
        self._ends: list[Callable[[], Awaitable[None]]] = []

    @property
    def partner(self) -> Partner:
        """See the class. Raises ToolError without one."""
        if self._partner is None:
            raise ToolError("this works only while a model is asked")
        return self._partner

    @partner.setter
    def partner(self, partner: Partner) -> None:
        self._partner = partner

    def memory(self, kind: Callable[[], T]) -> T:
        """This task's one value of a type, made on first use."""
        if kind not in self._memory:
            self._memory[kind] = kind()
        value: T = self._memory[kind]
        return value

    def at_end(self, end: Callable[[], Awaitable[None]]) -> None:
        """Something to be closed when the task's conversation has ended, while its sandbox is still there."""
        self._ends.append(end)

    @property
    def has_ends(self) -> bool:
        """Whether there is something to be closed."""
        return bool(self._ends)

    async def close(self) -> None:
        """Closes all of that."""
        ends, self._ends = self._ends, []
        await close_all(end() for end in ends)


class Tool(Protocol):
    """`read_only` tools of one turn may run at once."""

    spec: ToolSpec
    read_only: bool

    def parse(self, arguments: dict[str, Any]) -> Any:
        """Typed arguments, repaired where the type is plain ("5" for 5). Raises ToolError if they miss the schema."""

    def call(self, context: ToolContext, arguments: Any) -> Awaitable[dict[str, Any]]:
        """The result object. What `parse` returned goes in. Raises ToolError."""
