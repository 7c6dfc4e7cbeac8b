"""Images made ready before any row needs them."""

import asyncio
from collections.abc import Iterable

from tools.environments.base import Backend
from tools.errors import RowFailed

PULLS_AT_ONCE = 4


async def prefetch(images: Iterable[str], backend: Backend) -> list[str]:
    """Makes each of them ready, a few at once; why some cannot be had, sorted, each naming its image."""
    free = asyncio.Semaphore(PULLS_AT_ONCE)
    faults: list[str] = []

    async def one(image: str) -> None:
        async with free:
            try:
                await backend.prepare(image)
            except RowFailed as error:
                faults.append(str(error) if image in str(error) else f"image {image}: {error}")

    if backend.takes_images:
        await asyncio.gather(*(one(image) for image in dict.fromkeys(images) if image))
    return sorted(faults)
