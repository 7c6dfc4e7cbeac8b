"""What the tools of one process share: the run's choices for them, its keys, and what is opened once for all tasks."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from msgspec import Struct

T = TypeVar("T")

SEARCH_KEY, IMAGE_KEY = "BATCH_RUNNER_SEARCH_API_KEY", "BATCH_RUNNER_IMAGE_API_KEY"
"""The variables that carry keys given as settings to the processes that use them."""


class ToolSettings(Struct, frozen=True, kw_only=True):
    """What a run decides for its tools. Crosses the process border: plain values, never a key. "" means: as found."""

    search_provider: str = ""
    search_url: str = ""
    allow_private_urls: bool = False
    browser_program: str = ""
    sees: str = ""  # the model that answers questions about pictures, "" if there is none
    image_model: str = ""
    image_base_url: str = ""
    context_window: int = 0  # tokens that the model takes, 0 = not known; see `tools.limits`
    artifacts: str = ""  # folder for what tasks make beside their rows; "" = none is kept


class Closing(Protocol):
    """What has to be closed at the end of the process."""

    async def close(self) -> None:
        """Ends it; what it cannot end within a few seconds stays."""


class Services:
    """One per process. Parts are made on first use, once, and closed together."""

    def __init__(self, settings: ToolSettings, environ: Mapping[str, str]) -> None:
        self.settings = settings
        self.environ = environ
        self._parts: dict[Any, Closing] = {}

    def part(self, kind: "Callable[[Services], T]") -> T:
        """The process's one value of a type (a `Closing`), made of these services."""
        if kind not in self._parts:
            made: Any = kind(self)
            self._parts[kind] = made
        part: Any = self._parts[kind]
        value: T = part
        return value

    async def close(self) -> None:
        """Closes every part."""
        parts, self._parts = list(self._parts.values()), {}
        await close_all(part.close() for part in parts)


async def close_all(ends: Iterable[Awaitable[None]]) -> None:
    """Awaits all of them; what one of them raises has no reader any more."""
    await asyncio.gather(*ends, return_exceptions=True)
