"""What the same work costs without a program around it: `python -m benchmarks.bare_loop URL DATASET TRANSPORT TOOLS
AT_ONCE`.

The same requests with `AsyncOpenAI().chat.completions.create`, AT_ONCE conversations at once in one event loop, each
command with a bare `bash -c`. DATASET is JSONL; TRANSPORT is `default` or `aiohttp`, openai's own; TOOLS is a JSON file
of the requests' `tools`. Nothing is checked, limited, retried or written. Children are waited for by pidfd, as Python
3.12 and later do by themselves: before, asyncio had a thread for each.
"""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, DefaultAioHttpClient


async def shell(command: str) -> str:
    """What a command prints."""
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await process.communicate()
    return out.decode()


async def converse(client: AsyncOpenAI, prompt: str, tools: Any) -> None:
    """One prompt to its answer."""
    messages: list[Any] = [{"role": "user", "content": prompt}]
    while True:
        reply = await client.chat.completions.create(model="bench", messages=messages, tools=tools)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_unset=True))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            assert call.type == "function"
            output = await shell(json.loads(call.function.arguments)["command"])
            result = json.dumps({"output": output, "exit_code": 0})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def wait_by_pidfd() -> None:
    """From now on, where the system has it and Python would not do it."""
    if sys.version_info < (3, 12) and _has_pidfd():
        asyncio.set_child_watcher(asyncio.PidfdChildWatcher())


def _has_pidfd() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # of Python's build, or of the kernel
        return False
    return True


async def main(url: str, prompts: Sequence[str], transport: str, tools: Any, at_once: int) -> None:
    """All prompts."""
    http = DefaultAioHttpClient() if transport == "aiohttp" else None
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=http)
    left = iter(prompts)

    async def slot() -> None:
        for prompt in left:
            await converse(client, prompt, tools)

    await asyncio.gather(*(slot() for _ in range(at_once)))
    await client.close()


if __name__ == "__main__":
    lines = Path(sys.argv[2]).read_bytes().splitlines()
    offered = json.loads(Path(sys.argv[4]).read_bytes())
    texts = [json.loads(line)["prompt"] for line in lines]
    wait_by_pidfd()
    asyncio.run(main(sys.argv[1], texts, sys.argv[3], offered, int(sys.argv[5])))
