"""Success checkers and hooks: plug-ins named `path/file.py:function` or `module.function`.

A checker is called with the task object (`agent.task_object`) and, if it takes a second argument, with the task's open
environment. It returns `(success, reason)`, a bool, a number (a reward; above 0 is success), or a mapping with
`success` and any of `reason`, `reward`, `rewards` (a list of {name, value}). It may be sync (then it runs in a thread)
or async.
"""

import asyncio
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from agent.faults import Done, Fault, attempted, fault_of, guarded
from tools.environments.base import Environment
from tools.errors import RowFailed, UsageProblem
from tools.plugins import module_at
from tools.threads import in_thread

Plugin = Callable[..., Any]


class Judgement(Struct, frozen=True, kw_only=True):
    """A checker's verdict; `rewards` is a JSON list of {name, value}."""

    success: bool
    reason: str = ""
    reward: float = 0.0
    rewards: str = "[]"
    raised: bool = False


def load_plugin(name: str) -> Plugin:
    """The function of that name. Raises UsageProblem when it cannot be had."""
    through = (UsageProblem, KeyboardInterrupt)
    found = attempted(lambda: _from_file(name) if ".py:" in name else _from_module(name), through=through)
    if isinstance(found, Fault):
        raise UsageProblem(f"cannot load {name}: {' '.join(str(found).split())}")
    if not callable(found.value):
        raise UsageProblem(f"{name} is no function")
    function: Plugin = found.value
    return function


def _from_file(name: str) -> Any:
    path, function = name.rsplit(":", 1)
    if not Path(path).is_file():
        raise UsageProblem(f"cannot load {name}: there is no file {path}")
    return getattr(module_at(path), function)


def _from_module(name: str) -> Any:
    module, _, function = name.rpartition(".")
    if not module:
        raise UsageProblem(f"{name}: write path/file.py:function or module.function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # behind everything: a file here must not shadow a package
    return getattr(importlib.import_module(module), function)


async def judge(checker: Plugin, task: Mapping[str, Any], environment: Environment | None) -> Judgement:
    """Asks a checker. What it raises, or an answer that cannot be read, is a judgement too."""
    if _names_environment(checker):
        checker = partial(checker, environment=environment)
    arguments: tuple[Any, ...] = (task, environment) if _takes_environment(checker) else (task,)
    outcome = await guarded(_judgement(checker, arguments), through=(RowFailed, asyncio.CancelledError))
    return outcome.value if isinstance(outcome, Done) else Judgement(success=False, reason=str(outcome), raised=True)


async def judge_afterwards(checker: Plugin, task: Mapping[str, Any], seconds: float) -> Judgement:
    """Asks a checker when the environment is gone (it gets None). On a thread and a loop of its own, so that not even
    one that blocks takes longer than `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await in_thread(lambda: asyncio.run(judge(checker, task, None)))
    except TimeoutError:
        return Judgement(success=False, reason=f"the checker took more than {seconds:g} s", raised=True)
    except RowFailed as error:
        return Judgement(success=False, reason=str(fault_of(error)), raised=True)


async def _judgement(checker: Plugin, arguments: tuple[Any, ...]) -> Judgement:
    return _read(await _call(checker, arguments))


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):  # JSON has no form for it
        raise ValueError(f"{number} is no finite number")
    return number


def _takes_environment(checker: Plugin) -> bool:
    parameters = inspect.signature(checker).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in kinds for parameter in parameters) > 1


def _names_environment(checker: Plugin) -> bool:
    named = inspect.signature(checker).parameters.get("environment")
    return named is not None and named.kind is inspect.Parameter.KEYWORD_ONLY


async def _call(checker: Plugin, arguments: tuple[Any, ...]) -> Any:
    if inspect.iscoroutinefunction(checker):
        return await checker(*arguments)
    answer = await in_thread(checker, *arguments)
    return await answer if inspect.isawaitable(answer) else answer


def _read(answer: Any) -> Judgement:
    if isinstance(answer, bool):
        return Judgement(success=answer, reward=float(answer))
    if isinstance(answer, int | float):
        return Judgement(success=answer > 0, reward=_finite(answer))
    if isinstance(answer, tuple | list) and len(answer) == 2:
        return Judgement(success=bool(answer[0]), reason=str(answer[1]), reward=float(bool(answer[0])))
    if isinstance(answer, Mapping) and "success" in answer:
        return _read_mapping(answer)
    return Judgement(success=False, reason=f"the checker answered {answer!r:.200}, not (success, reason)", raised=True)


def _read_mapping(answer: Mapping[str, Any]) -> Judgement:
    success = bool(answer["success"])
    try:
        reward = _finite(answer.get("reward", success))
        rewards = [{"name": str(each["name"]), "value": _finite(each["value"])} for each in answer.get("rewards") or ()]
    except (TypeError, ValueError, KeyError) as error:
        return Judgement(success=False, reason=f"the checker's rewards cannot be read: {error}", raised=True)
    return Judgement(
        success=success,
        reason=str(answer.get("reason", "")),
        reward=reward,
        rewards=msgspec.json.encode(rewards).decode(),
    )
