"""The agent for Python programs: one prompt, one sandbox, one answer. The batch runner runs the same rollout."""

import asyncio
import os
import uuid
from collections import ChainMap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from agent.checkers import Plugin
from agent.models.base import Model
from agent.models.gate import RunGate
from agent.models.options import RequestOptions
from agent.models.providers import API_KEY_VARIABLE, resolve_targets
from agent.models.table import ModelSpec, is_local, open_model
from agent.outcome import RolloutPolicy
from agent.prompt import Prompt, Try
from agent.rollout import Rollout, Surroundings
from agent.row import Row
from agent.secrets import redactor_for
from agent.task_object import task_object
from agent.text import clean
from tools.environments.base import Backend
from tools.environments.owner import current_owner
from tools.environments.table import load_backend, resolve_backend
from tools.errors import UsageProblem
from tools.services import Services, close_all
from tools.toolsets import Catalog, find_lacking

CLOSE = 5.0  # seconds for connections and browsers at a conversation's end


class AIAgent:
    """A model with tools in a sandbox of its own for every conversation.

    `toolsets` are toolset or tool names, or one of them. `container_backend` is a name, or what `load_backend` gave for
    one that has to be told something (hosts). A key given stays within the agent. Conversations that run at once on one
    event loop share the limits that the endpoint sets. Raises UsageProblem where the model, the key, a tool or the
    backend cannot be had.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str = "",
        provider: str = "",
        api_key: str = "",
        toolsets: str | Sequence[str] = ("terminal", "file"),
        container_backend: str | Backend = "auto",
        options: RequestOptions = RequestOptions(),  # noqa: B008 - frozen
        policy: RolloutPolicy = RolloutPolicy(),  # noqa: B008 - frozen
        success_checker: Plugin | None = None,
    ) -> None:
        own: dict[str, str] = {API_KEY_VARIABLE: api_key} if api_key else {}
        self._environ: Mapping[str, str] = ChainMap(own, os.environ)
        targets = () if is_local(model) else resolve_targets(model, provider, base_url, api_key, environ=os.environ)
        self._spec = ModelSpec(model=model, targets=targets, options=options)
        tools = msgspec.structs.replace(policy.tools, sees=policy.tools.sees or ("" if is_local(model) else model))
        self._policy = msgspec.structs.replace(policy, keep_no_reasoning=True, keep_unknown_tools=True, tools=tools)
        self._catalog = Catalog(lacking=find_lacking(tools, self._environ))
        self._toolsets = self._tool_names(toolsets)
        self._requested_backend = container_backend
        self._checker = success_checker
        self._gates: WeakKeyDictionary[asyncio.AbstractEventLoop, RunGate] = WeakKeyDictionary()

    def run_conversation(self, prompt: str, **settings: Any) -> dict[str, Any]:
        """The twin of `arun_conversation` for programs without an event loop."""
        return asyncio.run(self.arun_conversation(prompt, **settings))

    async def arun_conversation(
        self,
        prompt: str,
        *,
        task_id: str = "",
        tools: str | Sequence[str] = (),
        container_image: str = "",
        max_turns: int | None = None,
    ) -> dict[str, Any]:
        """One conversation. `tools` are tool or toolset names (or one), instead of the agent's; `max_turns` its model
        calls. Raises UsageProblem.

        Returns the task object (`agent.task_object`) with `conversations` (from/value), `completed`, `partial` and
        `api_calls` beside it.
        """
        if not prompt.strip():
            raise UsageProblem("the prompt is blank")
        if max_turns is not None and max_turns < 1:
            raise UsageProblem(f"max_turns must be at least 1, not {max_turns}")
        names = self._tool_names(tools) or self._toolsets
        backend = self._requested_backend
        if isinstance(backend, str):
            backend = load_backend(await resolve_backend(backend, bool(container_image)))
        which = Try(
            prompt_index=0, task_id=task_id or f"task_{uuid.uuid4().hex[:12]}", row_key=f"id:{task_id}", row_sha=""
        )
        row_prompt = Prompt(text=clean(prompt), image=container_image, tools=names, max_turns=max_turns)
        model = open_model(self._spec, self._gate(), self._environ)
        services = Services(self._policy.tools, self._environ)
        around = Surroundings(
            model=model,
            backend=backend,
            owner=current_owner("agent"),
            redactor=redactor_for([self._spec], self._environ, self._policy.tools)[0],
            catalog=self._catalog,
            services=services,
            eye=model if self._policy.tools.sees else None,
            checker=self._checker,
            stopping=lambda: "",
        )
        try:
            return _result(await Rollout(row_prompt, which, self._policy, around).run())
        finally:
            await _close(model, services)

    def _gate(self) -> RunGate:
        """That of the running loop; a new one after a stop, for what stopped may have been mended since."""
        loop = asyncio.get_running_loop()
        gate = self._gates.get(loop)
        if gate is None or gate.stopped:
            gate = self._gates[loop] = RunGate(self._spec.keys)
        return gate

    def _tool_names(self, given: str | Sequence[str]) -> tuple[str, ...]:
        names = (given,) if isinstance(given, str) else tuple(given)
        if absent := self._catalog.missing(names):
            raise UsageProblem("; ".join(f"{name}: {lack}" for name, lack in absent.items()))
        return names


async def _close(model: Model, services: Services) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(close_all([model.close(), services.close()]), CLOSE)


def _result(row: Row) -> dict[str, Any]:
    return {
        **task_object(row),
        "conversations": msgspec.to_builtins(row.conversations),
        "completed": row.completed,
        "partial": row.partial,
        "api_calls": row.api_calls,
    }
