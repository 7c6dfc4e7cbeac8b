"""Sandboxes that are paid for by time and could not be removed when their rows ended: tried again beside the run."""

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress

from tools.environments.base import Backend, Rented

_PAUSES = (1.0, 2.0, 4.0, 8.0)  # seconds before each try
_SECONDS = 20.0  # for all tries of one sandbox: as long as a run may have to wait at its end


def unremoved(backend: Backend) -> tuple[str, ...]:
    """Names of sandboxes that `backend` could not remove, without those that it has named before."""
    return backend.unremoved() if isinstance(backend, Rented) else ()


def warning_of(backend: Backend, names: Iterable[str]) -> str:
    """What the user is told of those that are still there at the end."""
    return f"warning: {backend.name} may still hold sandboxes that could not be removed: {', '.join(names)}"


class Leftovers:
    """Those of one backend, in one event loop."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._left: set[str] = set()
        self._tries: dict[str, asyncio.Task[None]] = {}
        self._is_given_up = False

    def add(self, names: Iterable[str]) -> None:
        """Begins to try to remove these again."""
        for name in names:
            self._left.add(name)
            self._begin(name, _PAUSES)

    def _begin(self, name: str, pauses: Sequence[float]) -> None:
        if not self._is_given_up and (name not in self._tries or self._tries[name].done()):
            self._tries[name] = asyncio.create_task(self._try(name, pauses))

    async def _try(self, name: str, pauses: Sequence[float]) -> None:
        assert isinstance(self._backend, Rented)
        with suppress(TimeoutError):
            async with asyncio.timeout(_SECONDS):
                for pause in pauses:
                    await asyncio.sleep(pause)
                    if await self._backend.remove(name):
                        self._left.discard(name)
                        return

    def give_up(self) -> None:
        """Nothing more is tried."""
        self._is_given_up = True
        for task in self._tries.values():
            task.cancel()

    async def close(self) -> tuple[str, ...]:
        """Names of those that are still there, after one more try of each that is no longer tried."""
        for name in self._left:
            self._begin(name, (0.0,))
        await asyncio.gather(*self._tries.values(), return_exceptions=True)
        return tuple(sorted(self._left))
