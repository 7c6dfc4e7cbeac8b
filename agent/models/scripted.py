"""`scripted:FILE.yaml`: a model that plays a script. Needs no network; its delays and failures are scripted too.

    model: scripted-1            # the name its replies carry; "scripted" without
    rules:
      - prompt: 'count .* files'     # searched in the prompt (a regular expression), or
        equals: count the files      # the whole prompt
        task: 'child_0$'             # searched in the task id, too. A child's is its row's with `.child_N` (N from 0
                                     # over all children of the row); its prompt is its goal and context
        repeat: true                 # past the last turn, that turn again; without, the row ends `script_ended`
        turns:
          - reasoning: Let me look.
            content: ''
            tool_calls:
              - {name: terminal, arguments: {command: ls}}   # an object, or the raw text: '{"command": "l'
            usage: {input_tokens: 10, output_tokens: 5}
            finish_reason: tool_calls        # without: tool_calls if there are any, else stop
            delay: 0.2                       # seconds
            error: {status: 429, retry_after: 1, times: 2}   # answered twice before the reply; without times: always
    default:
      turns: [{content: done}]

A conversation's n-th call gets the n-th turn of its rule: the first one that fits the latest user message that any rule
fits. An error has the `status` of an HTTP answer (0: no connection) and, as the endpoint's, `code` and `message`; it
goes the way of a real one, through the gate.
"""

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from agent import pricing
from agent.models.base import Gate, Lease, ModelRequest, Verdict
from agent.models.calling import Caller, CallFailed
from agent.models.failures import http_failure, request_timed_out, unreachable
from agent.models.options import RequestOptions
from agent.types import RawCall, Reply, Spend, Usage
from tools.errors import UsageProblem


class ScriptCall(Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call. `arguments` as the endpoint would send it: usually text; an object becomes JSON text."""

    name: str = ""
    arguments: Any = None
    id: str = ""


class ScriptError(Struct, frozen=True, forbid_unknown_fields=True):
    """A failure in place of the reply, or before it if it comes only so many `times`."""

    status: int
    code: str = ""
    message: str = "scripted"
    retry_after: float | None = None
    times: int | None = None


class ScriptTurn(Struct, frozen=True, forbid_unknown_fields=True):
    """One reply."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ScriptCall, ...] = ()
    usage: Usage = Usage()
    finish_reason: str = ""
    refusal: bool = False
    delay: float = 0.0
    error: ScriptError | None = None


class ScriptRule(Struct, frozen=True, forbid_unknown_fields=True):
    """Turns for the prompts that fit `prompt` or `equals`, of tasks that fit `task`."""

    turns: tuple[ScriptTurn, ...]
    prompt: str = ""
    equals: str | None = None
    task: str = ""
    repeat: bool = False

    def fits(self, text: str, task_id: str) -> bool:
        """Whether this rule is for a prompt of a task."""
        if self.task and not re.search(self.task, task_id):
            return False
        return text == self.equals if self.equals is not None else re.search(self.prompt, text) is not None


class Script(Struct, frozen=True, forbid_unknown_fields=True):
    """A whole script file."""

    model: str = "scripted"
    rules: tuple[ScriptRule, ...] = ()
    default: ScriptRule | None = None


def load_script(path: Path) -> Script:
    """Reads a script. Raises UsageProblem naming the file and the place in it."""
    import yaml  # noqa: PLC0415 - only scripted runs read YAML in a worker

    try:
        script = msgspec.convert(yaml.safe_load(path.read_bytes()), Script)
    except OSError as problem:
        raise UsageProblem(f"{path}: cannot read the script: {problem.strerror}") from problem
    except msgspec.ValidationError as problem:
        raise UsageProblem(f"{path}: {problem}") from problem
    except (yaml.YAMLError, ValueError) as problem:  # ValueError: a date that is none, a number of thousands of digits
        raise UsageProblem(f"{path}: not YAML: {' '.join(str(problem).split())}") from problem
    except RecursionError as problem:
        raise UsageProblem(f"{path}: nested too deeply") from problem
    for number, rule in enumerate(script.rules):
        _check_pattern(path, number, rule)
    return script


def _check_pattern(path: Path, number: int, rule: ScriptRule) -> None:
    for name, pattern in (("prompt", rule.prompt), ("task", rule.task)):
        try:
            re.compile(pattern)
        except re.error as problem:
            raise UsageProblem(f"{path}: rules[{number}].{name} is no regular expression: {problem}") from problem


class ScriptedModel:
    """Plays a script. Its requests stand in the gate as a real model's do."""

    def __init__(self, script: Script, gate: Gate, options: RequestOptions) -> None:
        self.name = script.model
        self._script = script
        self._options = options
        self._caller = Caller(gate, options.request_retries)

    async def reply(self, request: ModelRequest) -> Reply:
        """The turn of the script. Raises ModelError where it has none."""
        turn = self._turn(request)
        failures = 0 if turn.error is None else (turn.error.times if turn.error.times is not None else -1)

        async def send(_: Lease) -> tuple[Reply, Verdict]:
            nonlocal failures
            await self._delay(turn)
            if turn.error is not None and failures:
                failures -= 1
                raise _failure(turn.error)
            reply = self._reply(turn)
            return reply, Verdict(kind="ok", spend=reply.spend, tokens=reply.spend.usage.total_tokens)

        return await self._caller.call(request, turn.usage.input_tokens + turn.usage.output_tokens, send)

    async def close(self) -> None:
        """Nothing is open."""

    def _turn(self, request: ModelRequest) -> ScriptTurn:
        rule = self._rule(request)
        if rule is None:
            raise CallFailed(
                Verdict(kind="row_fault", message="no rule of the script fits the prompt"),
                reason="no_rule",
                retryable=False,
            ).ends_row(Spend())
        if request.turn > len(rule.turns) and rule.repeat and rule.turns:
            return rule.turns[-1]
        if request.turn > len(rule.turns):
            raise CallFailed(
                Verdict(kind="row_fault", message=f"the script ends after {len(rule.turns)} turns"),
                reason="script_ended",
                retryable=False,
            ).ends_row(Spend())
        return rule.turns[request.turn - 1]

    def _rule(self, request: ModelRequest) -> ScriptRule | None:
        for message in reversed(request.messages):
            if message.role == "user":
                for rule in self._script.rules:
                    if rule.fits(message.content, request.task_id):
                        return rule
        return self._script.default

    async def _delay(self, turn: ScriptTurn) -> None:
        try:
            async with asyncio.timeout(self._options.request_timeout):
                await asyncio.sleep(turn.delay)
        except TimeoutError:
            raise request_timed_out(self._options.request_timeout) from None

    def _reply(self, turn: ScriptTurn) -> Reply:
        calls = tuple(
            RawCall(id=call.id, name=call.name, arguments=_arguments_text(call.arguments)) for call in turn.tool_calls
        )
        usage = turn.usage
        if not usage.total_tokens:
            usage = msgspec.structs.replace(usage, total_tokens=usage.input_tokens + usage.output_tokens)
        usd = pricing.cost(usage, self.name, self._options.price_in, self._options.price_out) or 0.0
        return Reply(
            content=turn.content,
            reasoning=turn.reasoning,
            tool_calls=calls,
            finish_reason=turn.finish_reason or ("tool_calls" if calls else "stop"),
            refusal=turn.refusal,
            model=self.name,
            wire={"reasoning_content": turn.reasoning} if turn.reasoning else {},
            spend=Spend(requests=1, usage=usage, cost_usd=usd),
        )


def _failure(error: ScriptError) -> CallFailed:
    if not error.status:
        return unreachable(error.message)
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    body = msgspec.json.encode({"error": {"message": error.message, "code": error.code}})
    return http_failure(error.status, headers, body, now=0.0)


def _arguments_text(arguments: Any) -> Any:
    return msgspec.json.encode(arguments).decode() if isinstance(arguments, dict) else arguments
