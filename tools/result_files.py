"""Results that are too large for a conversation: the whole goes into a file of the task's sandbox."""

import asyncio
import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

from tools.environments.base import Environment
from tools.errors import ToolError
from tools.limits import as_json, shortened

FOLDER = "batch-results"  # in the sandbox's temporary folder
SECONDS = 60.0


async def spilled(environment: Environment, call_id: str, result: Mapping[str, Any], room: int) -> dict[str, Any]:
    """The result within `room` characters, with `full_result` {path, size in bytes} (`full_result_` where the tool has
    such a key itself): the file holds the one text that was cut, or else the whole result as JSON. Where the sandbox
    takes no file there is no such key, and the markers say so. A result without secrets goes in. Raises
    EnvironmentLost."""
    key = "full_result"
    while key in result:
        key += "_"
    stem = f"{environment.temp.rstrip('/')}/{FOLDER}/{file_name(call_id, result)}"
    path = f"{stem}.txt"
    kept = shortened(result, room - _announced(key, path), f"whole in {path}")
    text = kept.text
    if text is None:
        path = f"{stem}.json"
        kept = shortened(result, room - _announced(key, path), f"whole in {path}")
        text = json.dumps(result, ensure_ascii=False, indent=1)
    data = text.encode()
    try:
        async with asyncio.timeout(SECONDS):
            await environment.write(path, data)
    except (ToolError, TimeoutError):
        return shortened(result, room).result
    return {**kept.result, key: {"path": path, "size": len(data)}}


def file_name(call_id: str, result: Mapping[str, Any]) -> str:
    """The call's id and what tells it from other conversations' calls in the same sandbox."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", call_id)[:60]
    return f"{plain}-{zlib.crc32(as_json(result).encode()):08x}"


def _announced(key: str, path: str) -> int:
    return len(as_json({key: {"path": path, "size": 10**12}}))
