"""The loop: one model call, all its tool calls checked, one result each, until a reply without calls. Nothing else.

A `Conversation` is whole after every step: whoever cancels it (time, interrupt) takes what happened so far from it.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from agent.calls import CheckedCall, check_call, split_calls
from agent.clock import RowClock
from agent.errors import ModelError, RunStopped, Stopping
from agent.faults import Done, guarded
from agent.models.base import Model, ModelRequest
from agent.schema import problem_in_time
from agent.sentinel import says
from agent.text import Redactor, clean, json_text
from agent.types import NO_SPEND, Message, RawCall, Reply, Spend, ToolCall
from tools.base import Tool, ToolContext, ToolSpec
from tools.errors import DiskFull, ToolError
from tools.limits import UNLIMITED, limits_in, rooms, shortened
from tools.result_files import spilled
from tools.text import told

CONTINUATIONS = 3  # a cut text is asked to go on this often
EMPTY_RETRIES = 2  # an empty reply is asked again this often
BAD_TURNS = 3  # turns in a row with nothing but refused calls
ENDED = "Not run: the task had ended with the call before."
GO_ON = "Your last message was cut off. Go on exactly where it stopped, without repeating anything."


class ConversationOptions(Struct, frozen=True, kw_only=True):
    """What a run decides for all its conversations, and a row for its own. `sentinel`: the conversation is complete
    once a terminal command that says this word (see `says`) ends with exit code 0, and it is the first line printed."""

    max_turns: int = 30
    system_text: str = ""
    ephemeral_system_prompt: str = ""
    prefill: tuple[Message, ...] = ()
    response_format: dict[str, Any] | None = None
    parse_text_tool_calls: bool = False
    seed: int | None = None
    task_id: str = ""
    row_key: str = ""
    sample_index: int = 0
    sentinel: str = ""


class End(Struct, frozen=True, kw_only=True):
    """How a conversation ended; `status` is a value of the journal's column before any policy."""

    status: str
    reason: str = ""
    error: str = ""
    error_class: str = ""
    retryable: bool = False


class Noted(Struct, frozen=True):
    """A result of the turn that goes on, without secrets: its call's tool, its size as JSON text, its message."""

    name: str
    size: int
    place: int
    result: dict[str, Any]


class ToolEvent(Struct, frozen=True):
    """One call's verdict, taken when the tool returned."""

    name: str
    ok: bool


def _is_good(result: Mapping[str, Any]) -> bool:
    """The verdict on a tool's result."""
    return not result.get("error") and result.get("success") is not False


class Conversation:
    """One prompt's exchange with a model. `messages` begins with the row's context and prompt."""

    def __init__(
        self,
        model: Model,
        tools: Sequence[Tool],
        context: ToolContext,
        messages: Sequence[Message],
        options: ConversationOptions,
        *,
        clock: RowClock,
        redactor: Redactor,
        stopping: Callable[[], Stopping] = lambda: "",
    ) -> None:
        self.messages = list(messages)
        self.given = len(self.messages)
        self.options = options
        self.api_calls = 0
        self.spend: Spend = NO_SPEND
        self.events: list[ToolEvent] = []
        self.inner_events: list[ToolEvent] = []  # of calls that tools made
        self.refused_names: Counter[str] = Counter()
        self.final_response = ""
        self.model_name = model.name
        self.context_trimmed = False
        self.model = model
        self._context = context
        self._limits = limits_in(context.services.settings.context_window)
        self._tools: Mapping[str, Tool] = {tool.spec.name: tool for tool in tools}
        self._specs: tuple[ToolSpec, ...] = tuple(tool.spec for tool in tools)
        self._clock = clock
        self._redactor = redactor
        self._stopping = stopping
        self._ids = {call.id for message in messages for call in message.tool_calls}
        self._bad_turns = 0
        self._empty_replies = 0
        self._cuts = 0
        self._last_words: str | None = None  # what a command printed behind the sentinel
        self._noted: list[Noted] = []
        self._unanswered: list[CheckedCall] = []  # calls of the last turn without a result so far
        self._cut_reply: Message | None = None  # its text so far: kept apart until it is whole

    async def run(self) -> End:
        """Until the conversation ends by itself. Raises RowFailed for the sandbox's faults, RunStopped."""
        try:
            return await self._turns()
        except ModelError as error:
            self.spend += error.spend
            return self._model_gave_up(error)
        finally:
            self.settle()

    def settle(self) -> None:
        """Once nothing can follow any more: a text that was cut becomes the turn it is, calls that got no result have
        failed."""
        for call in self._unanswered:
            self._count(call, ok=False)
        self._unanswered = []
        if self._cut_reply is not None:
            self.messages.append(self._cut_reply)
            self._cut_reply = None

    @property
    def gpt_turns(self) -> int:
        """Assistant turns beyond those that came with the row."""
        return sum(message.role == "assistant" for message in self.messages[self.given :])

    def _has_spoken(self) -> bool:
        return self.gpt_turns > 0 or self._cut_reply is not None

    async def _turns(self) -> End:
        while self.api_calls < self.options.max_turns:
            end = await self._turn(await self._ask())
            if end is not None:
                return end
        return End(status="max_turns", reason="max_turns")

    def _model_gave_up(self, error: ModelError) -> End:
        usable = error.error_class in ("context_exceeded", "filtered") and self._has_spoken()
        return End(
            status="partial" if usable else "failed",
            reason=error.reason,
            error=self._redactor.text(clean(str(error))),
            error_class=error.error_class,
            retryable=error.retryable and not usable,
        )

    # --- asking

    async def _ask(self) -> Reply:
        self._stop_if_asked()
        request = self._request()
        try:
            reply = await self.model.reply(request)
        except RunStopped as stop:
            self.spend += stop.spend
            raise
        except asyncio.CancelledError:
            self.spend += request.tally.spend
            raise
        self.api_calls += 1
        self.spend += reply.spend
        self.model_name = reply.model or self.model_name
        self.context_trimmed |= reply.context_trimmed
        return msgspec.structs.replace(
            reply, content=self._redactor.text(reply.content), reasoning=self._redactor.text(reply.reasoning)
        )

    def _stop_if_asked(self) -> None:
        reason = self._stopping()
        if reason:
            raise RunStopped(reason, "the run was stopped")

    def _request(self) -> ModelRequest:
        options = self.options
        system = "\n\n".join(text for text in (options.ephemeral_system_prompt, options.system_text) if text)
        head = [Message(role="system", content=system)] if system else []
        return ModelRequest(
            messages=[*head, *options.prefill, *self.messages, *self._to_be_continued()],
            tools=self._specs,
            task_id=options.task_id,
            row_key=options.row_key,
            sample_index=options.sample_index,
            turn=self.api_calls + 1,
            seed=options.seed,
            response_format=options.response_format,
            clock=self._clock,
        )

    def _to_be_continued(self) -> Sequence[Message]:
        if self._cut_reply is None or not self._cut_reply.content:
            return ()
        return (self._cut_reply, Message(role="user", content=GO_ON))

    # --- one reply

    async def _turn(self, reply: Reply) -> End | None:
        if reply.finish_reason == "content_filter":
            return self._filtered(reply)
        if reply.refusal:
            return self._finish(reply, End(status="completed", reason="refusal"))
        if reply.tool_calls:
            return await self._act(reply, reply.tool_calls)
        if reply.finish_reason == "length":
            return self._cut(reply)
        if not reply.content.strip() and not (self._cut_reply and self._cut_reply.content):
            return self._empty()
        written, prose = split_calls(self._joined(reply).content, tuple(self._tools))
        if written and not self.options.parse_text_tool_calls:
            return self._finish(reply, End(status="partial", reason="text_tool_call"))
        if written:
            self._cut_reply = self._cut_reply and msgspec.structs.replace(self._cut_reply, content="")
            return await self._act(msgspec.structs.replace(reply, content=prose), written)
        return await self._answer(reply)

    def _filtered(self, reply: Reply) -> End:
        if reply.content.strip():
            self.final_response = self._keep(reply).content
        return End(
            status="partial" if self._has_spoken() else "failed",
            reason="filtered",
            error="the endpoint's content filter ended the reply",
            error_class="filtered",
        )

    def _cut(self, reply: Reply) -> End | None:
        self._cut_reply = self._joined(reply)
        self._cuts += 1
        if self._cuts <= CONTINUATIONS:
            return None
        self.final_response = self._cut_reply.content
        return End(status="partial", reason="truncated", error="the reply was cut by its length, again and again")

    def _empty(self) -> End | None:
        self._empty_replies += 1
        if self._empty_replies <= EMPTY_RETRIES:
            return None
        return End(status="partial", reason="empty_reply", error="the model answered nothing", retryable=True)

    async def _answer(self, reply: Reply) -> End:
        self.final_response = self._keep(reply).content
        return await self._completed()

    async def _completed(self) -> End:
        schema = self.options.response_format
        problem = await problem_in_time(self.final_response, schema) if schema is not None else ""
        return End(status="partial", reason="schema_mismatch", error=problem) if problem else End(status="completed")

    def _finish(self, reply: Reply, end: End) -> End:
        self.final_response = self._keep(reply).content
        return end

    def _keep(self, reply: Reply, calls: tuple[ToolCall, ...] = ()) -> Message:
        message = msgspec.structs.replace(self._joined(reply), tool_calls=calls)
        self._cut_reply = None
        self._empty_replies = self._cuts = 0
        self.messages.append(message)
        return message

    def _joined(self, reply: Reply) -> Message:
        """The reply as one turn with the text that it continues."""
        before = self._cut_reply or Message(role="assistant")
        return Message(
            role="assistant",
            content=before.content + reply.content,
            reasoning="\n\n".join(text for text in (before.reasoning, reply.reasoning) if text),
            wire=before.wire or reply.wire,
        )

    # --- tool calls

    async def _act(self, reply: Reply, raw_calls: Sequence[RawCall]) -> End | None:
        cut = reply.finish_reason == "length"
        last = len(raw_calls) - 1
        checked = [
            check_call(raw, self._wire_id(raw, number), self._tools, cut=cut and number == last, purge=self.purged)
            for number, raw in enumerate(raw_calls)
        ]
        said = self._keep(reply, tuple(each.call for each in checked)).content
        self._unanswered = list(checked)
        self._noted = []
        await self._run_calls(checked)
        await self._spill()
        if self._last_words is not None:
            self.final_response = self._last_words or said
            return await self._completed()
        self._bad_turns = self._bad_turns + 1 if all(each.problem_kind for each in checked) else 0
        if self._bad_turns < BAD_TURNS:
            return None
        kinds = [each.problem_kind for each in checked]
        reason = next(kind for kind in ("truncated", "invalid_arguments", "invalid_tool") if kind in kinds)
        return End(status="partial", reason=reason, error=checked[-1].call.problem)

    def purged(self, value: Any) -> Any:
        """A JSON value without secrets and without what no file takes."""
        return self._redactor.value(clean(value))

    def _wire_id(self, raw: RawCall, number: int) -> str:
        """The endpoint's own id where it can be told apart, else nine digits (some servers take no other form)."""
        wire_id = raw.id if raw.id and raw.id not in self._ids else f"{self.api_calls:05d}{number:04d}"
        self._ids.add(wire_id)
        return wire_id

    async def _run_calls(self, checked: Sequence[CheckedCall]) -> None:
        runnable = [each for each in checked if each.tool is not None]
        if len(runnable) > 1 and all(each.tool.read_only for each in runnable if each.tool):
            await self._run_at_once(checked)
            return
        for call in checked:
            ended = self._last_words is not None
            self._note(call, {"error": ENDED} if ended else await self._result(call))
            if self._last_words is None:
                self._stop_if_asked()

    async def _run_at_once(self, checked: Sequence[CheckedCall]) -> None:
        """Whatever ends one of them, none is left running."""
        results = await asyncio.gather(*map(self._result, checked), return_exceptions=True)
        for call, result in zip(checked, results, strict=True):
            if not isinstance(result, BaseException):
                self._note(call, result)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    @property
    def offered(self) -> Sequence[ToolSpec]:
        """The tools."""
        return self._specs

    async def call_inside(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """The result of a call that a tool makes and not the model: it is no turn, and counted apart."""
        call = RawCall(name=name, arguments=arguments)
        checked = check_call(call, "", self._tools, cut=False, purge=self.purged)
        ok = False
        try:
            result: dict[str, Any] = self.purged(await self._result(checked))
            ok = _is_good(result)
        finally:
            self.inner_events.append(ToolEvent(checked.call.name, ok))
        return result

    def side_request(self, messages: Sequence[Message]) -> ModelRequest:
        """A request beside the conversation, within its time: the first of one of its own."""
        options = self.options
        return ModelRequest(
            messages=messages,
            task_id=options.task_id,
            row_key=options.row_key,
            sample_index=options.sample_index,
            turn=1,
            clock=self._clock,
        )

    async def _result(self, checked: CheckedCall) -> dict[str, Any]:
        if checked.tool is None:
            return {"error": checked.call.problem}
        try:
            outcome = await guarded(checked.tool.call(self._context, checked.arguments))
        except (ToolError, TimeoutError) as error:
            return {"error": str(error) or "The tool ran out of time."}
        except DiskFull as full:
            raise RunStopped("disk", str(full)) from full
        return outcome.value if isinstance(outcome, Done) else {"error": told(outcome)}

    def _note(self, checked: CheckedCall, result: dict[str, Any]) -> None:
        self._unanswered.remove(checked)
        self._count(checked, ok=_is_good(result))
        result, call = self.purged(result), checked.call
        text = json_text(result)
        self._noted.append(Noted(call.name, len(text), len(self.messages), result))
        if len(text) > self._limits.result and call.name not in UNLIMITED:  # whatever ends the turn before it can spill
            text = json_text(shortened(result, self._limits.shown).result)
        self.messages.append(Message(role="tool", content=text, tool_call_id=call.id, name=call.name))
        if call.name == "terminal" and says(str(call.arguments.get("command")), self.options.sentinel):
            self._listen_for_the_end(result)

    async def _spill(self) -> None:
        """Results of the turn that are too large, alone or together, go into files of the sandbox."""
        noted, self._noted = self._noted, []
        for number, room in rooms([(each.name, each.size) for each in noted], self._limits).items():
            place, result = noted[number].place, noted[number].result
            message = self.messages[place]
            try:
                short = await spilled(self._context.environment, message.tool_call_id, result, room)
            except DiskFull as full:
                raise RunStopped("disk", str(full)) from full
            self.messages[place] = msgspec.structs.replace(message, content=json_text(short))

    def _listen_for_the_end(self, result: Mapping[str, Any]) -> None:
        first, _, rest = str(result.get("output", "")).partition("\n")
        if first.rstrip() == self.options.sentinel and result.get("exit_code") == 0:
            self._last_words = rest.strip()

    def _count(self, checked: CheckedCall, *, ok: bool) -> None:
        self.events.append(ToolEvent(checked.call.name, ok))
        if checked.problem_kind == "invalid_tool":
            self.refused_names[checked.call.name] += 1
