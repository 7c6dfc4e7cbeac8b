"""What a tool is: a specification for the model, arguments with types, and a function that acts in the sandbox."""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from tools.environments.base import Environment

T = TypeVar("T")


class ToolSpec(Struct, frozen=True):
    """A tool as models are told of it; `parameters` is a JSON schema of type object."""

    name: str
    description: str
    parameters: dict[str, Any]


class ToolContext:
    """What the tools of one task share: its sandbox, the limits, and what a tool has to remember between calls."""

    def __init__(self, environment: Environment, command_timeout: float) -> None:
        self.environment = environment
        self.command_timeout = command_timeout
        self._memory: dict[type, Any] = {}

    def memory(self, kind: Callable[[], T]) -> T:
        """This task's one value of a type, made on first use."""
        key: Any = kind
        if key not in self._memory:
            self._memory[key] = kind()
        value: T = self._memory[key]
        return value


class Tool(Protocol):
    """`read_only` tools of one turn may run at once."""

    spec: ToolSpec
    read_only: bool

    def parse(self, arguments: dict[str, Any]) -> Any:
        """Typed arguments, repaired where the type is plain ("5" for 5). Raises ToolError if they miss the schema."""

    def call(self, context: ToolContext, arguments: Any) -> Awaitable[dict[str, Any]]:
        """The result object. What `parse` returned goes in. Raises ToolError."""
