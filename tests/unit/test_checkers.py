"""A checker asked when the environment is gone."""

import asyncio
import threading
import time
from typing import Any

import pytest

from agent.checkers import Plugin, judge_afterwards
from tools.errors import RowFailed

NEVER = threading.Event()


def blocks(task: dict[str, Any]) -> bool:
    return NEVER.wait(task["seconds"])


async def sleeps(task: dict[str, Any]) -> bool:
    await asyncio.sleep(task["seconds"])
    return True


async def blocks_its_loop(task: dict[str, Any]) -> bool:
    return NEVER.wait(task["seconds"])


def needs_the_environment(task: dict[str, Any], environment: Any) -> bool:
    return bool(environment.run)


def fails(task: dict[str, Any]) -> bool:
    raise RowFailed("setup_failed", "gone")


@pytest.mark.parametrize("checker", [blocks, sleeps, blocks_its_loop])
async def test_one_that_hangs_is_left_behind(checker: Plugin) -> None:
    began = time.monotonic()
    judgement = await judge_afterwards(checker, {"seconds": 5}, 0.1)
    assert time.monotonic() - began < 4
    assert (judgement.success, judgement.raised) == (False, True)
    assert judgement.reason == "the checker took more than 0.1 s"


@pytest.mark.parametrize(("checker", "said"), [(needs_the_environment, "NoneType"), (fails, "gone")])
async def test_what_one_raises_is_its_judgement(checker: Plugin, said: str) -> None:
    judgement = await judge_afterwards(checker, {}, 5)
    assert (judgement.success, judgement.raised) == (False, True)
    assert said in judgement.reason


async def test_one_that_answers_is_heard() -> None:
    assert (await judge_afterwards(sleeps, {"seconds": 0}, 5)).success
