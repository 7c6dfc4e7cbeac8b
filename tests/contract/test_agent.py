"""The agent as Python programs use it."""

import asyncio
import os
from typing import Any

import pytest

from agent.agent import AIAgent
from agent.models.providers import API_KEY_VARIABLE
from tests.contract.environments import eventually
from tests.endpoint import Endpoint
from tools.errors import UsageProblem

ONE, TWO = "sk-one-of-two-agents", "sk-two-of-two-agents"


def agent_of(endpoint: Endpoint, **changes: Any) -> AIAgent:
    return AIAgent("m", base_url=endpoint.url, container_backend="local", **{"toolsets": "terminal", **changes})


async def test_every_agent_has_its_own_key_and_strikes_it_out() -> None:
    async with Endpoint([{"message": {"content": f"{ONE} {TWO}", "reasoning": "r"}}]) as endpoint:
        agents = [agent_of(endpoint, api_key=key) for key in (ONE, TWO)]
        answers = await asyncio.gather(*(agent.arun_conversation("hi") for agent in agents))
        assert endpoint.stats.keys == {ONE: 1, TWO: 1}
    assert [answer["final_response"] for answer in answers] == [
        f"[REDACTED:{API_KEY_VARIABLE}] {TWO}",
        f"{ONE} [REDACTED:{API_KEY_VARIABLE}]",
    ]
    assert API_KEY_VARIABLE not in os.environ


async def test_a_prompt_is_cleaned() -> None:
    async with Endpoint() as endpoint:
        answer = await agent_of(endpoint).arun_conversation("a\ud800b\0")
        assert endpoint.stats.bodies[0]["messages"][-1]["content"] == "a\ufffdb\ufffd"
    assert answer["completed"]
    assert answer["conversations"][1]["value"] == "a\ufffdb\ufffd"


async def test_tools_may_be_one_name() -> None:
    async with Endpoint() as endpoint:
        await agent_of(endpoint, toolsets="file").arun_conversation("hi", tools="terminal")
        offered = [tool["function"]["name"] for tool in endpoint.stats.bodies[0]["tools"]]
    assert offered == ["terminal"]


@pytest.mark.parametrize(
    ("prompt", "settings", "problem"),
    [
        (" \n", {}, "the prompt is blank"),
        ("hi", {"max_turns": 0}, "max_turns must be at least 1"),
        ("hi", {"tools": ["no_such_tool"]}, "Unknown tool or toolset 'no_such_tool'"),
        ("hi", {"tools": ["terminal", "image_gen"]}, "image_gen: a service that makes pictures"),
    ],
)
async def test_what_cannot_be_run_is_a_usage_problem(prompt: str, settings: dict[str, Any], problem: str) -> None:
    async with Endpoint() as endpoint:
        with pytest.raises(UsageProblem, match=problem):
            await agent_of(endpoint).arun_conversation(prompt, **settings)
        assert endpoint.stats.requests == 0


async def test_conversations_at_once_share_one_gate() -> None:
    limited = {"status": 429, "headers": {"retry-after": "1"}, "times": 1}
    async with Endpoint([limited], calls=0) as endpoint:
        agent = agent_of(endpoint)

        async def limited_once() -> bool:
            return endpoint.stats.statuses[429] > 0

        first = asyncio.create_task(agent.arun_conversation("first"))
        assert await eventually(limited_once)
        others = [agent.arun_conversation(f"other {n}") for n in range(3)]
        answers = await asyncio.gather(first, *others)
        assert all(answer["completed"] for answer in answers)
        refused, *later = endpoint.stats.times
        assert min(later) - refused >= 0.99
        assert len(later) == 4


async def test_after_a_stop_the_next_conversation_asks_anew() -> None:
    async with Endpoint([{"status": 401, "times": 1}], calls=0) as endpoint:
        agent = agent_of(endpoint)
        assert (await agent.arun_conversation("one"))["status"] == "stopped"
        assert (await agent.arun_conversation("two"))["completed"]
