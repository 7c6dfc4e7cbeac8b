"""One prompt, start to end: sample its toolsets, open its sandbox, set it up, converse, check, close: a row."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import msgspec
from msgspec import Struct, field

from agent.checkers import Judgement, Plugin, judge
from agent.clock import RowClock
from agent.conversation import Conversation, ConversationOptions, End
from agent.delegation import Delegation, Family
from agent.ends import failed_end, fault_end, stopped_end, timeout_end
from agent.errors import RunStopped, Stopping, StopReason
from agent.faults import Done, guarded
from agent.models.base import Model
from agent.outcome import Outcome, RolloutPolicy, row_of
from agent.partner import ConversationPartner
from agent.prompt import Prompt, Try
from agent.row import ChildRow, Row, RowEnvironment
from agent.steps import Left, Steps, leave
from agent.task_object import task_object
from agent.text import Redactor
from agent.types import NO_SPEND, Message
from tools.base import Tool, ToolContext
from tools.distributions import draw, row_rng
from tools.environments.base import Backend, Environment, EnvironmentSpec, Owner
from tools.environments.ending import to_the_end
from tools.environments.starts import Starts
from tools.errors import DiskFull, RowFailed, SetupFailed, SetupTimeout, ToolError
from tools.services import Services, ToolSettings
from tools.toolsets import BUILT_IN, Catalog, load_tool_at

_REASON_HEAD = 500  # characters
CLEAN_UP = 60.0  # seconds that a sandbox may outlive its row's deadline before anybody may remove it


class Surroundings(Struct, frozen=True, kw_only=True):
    """What all rollouts of a process share. `log` takes a line about a try."""

    model: Model
    backend: Backend
    owner: Owner
    redactor: Redactor
    checker: Plugin | None = None
    steps: Steps | None = None
    catalog: Catalog = BUILT_IN
    services: Services = Services(ToolSettings(), {})
    eye: Model | None = None  # answers questions about pictures
    starts: Starts = field(default_factory=Starts)
    log: Callable[[Try, str], None] = lambda _which, _text: None
    stopping: Callable[[], Stopping]


def offered_tools(prompt: Prompt, policy: RolloutPolicy, row_key: str, catalog: Catalog = BUILT_IN) -> tuple[Tool, ...]:
    """Those that are to be had here, by name. A row's own tools beat the run's explicit set and what the run disables;
    that set beats the distribution, which is sampled by (seed, row_key) alone."""
    return tuple(_as_the_run_has_it(tool, policy) for tool in _chosen_tools(prompt, policy, row_key, catalog))


def _chosen_tools(prompt: Prompt, policy: RolloutPolicy, row_key: str, catalog: Catalog) -> tuple[Tool, ...]:
    if prompt.tools:
        return catalog.select(catalog.resolve_names(prompt.tools))
    toolsets = policy.enabled_toolsets or draw(catalog.distribution(policy.distribution), row_rng(policy.seed, row_key))
    return catalog.select(catalog.resolve_toolsets(toolsets), policy.disabled_toolsets)


def _as_the_run_has_it(tool: Tool, policy: RolloutPolicy) -> Tool:
    place = policy.own_tools.get(tool.spec.name)
    return load_tool_at(place) if place else tool


def _check_place(path: str, backend: Backend) -> None:
    if not backend.isolates and (path.startswith("/") or ".." in path.split("/")):
        raise SetupFailed(f"files: {path} is outside the row's own folder, and {backend.name} keeps nothing apart")


class Rollout:
    """One try. `run` always gives a row; `stop`, `time_out` and `abandon` make it do so early."""

    def __init__(self, prompt: Prompt, which: Try, policy: RolloutPolicy, around: Surroundings) -> None:
        self.prompt = prompt
        self.which = which
        self.policy = policy
        self.around = around
        self.tools = offered_tools(prompt, policy, which.row_key, around.catalog)
        self.clock = RowClock(prompt.timeout_seconds or policy.timeout)
        self._began = time.monotonic()
        self._conversation: Conversation | None = None
        self._delegation: Delegation | None = None
        self._end: End | None = None
        self._final_end: End | None = None  # once `run` has given the row
        self._environment = RowEnvironment()
        self._judgement: Judgement | None = None
        self._left = Left()
        self._stop_reason: Stopping = ""
        self._abandoned = asyncio.get_running_loop().create_future()
        self._work: asyncio.Task[End] | None = None

    # --- from outside

    def stop(self, reason: StopReason) -> None:
        """Cuts the row off: it ends as `stopped`."""
        self._stop_reason = self._stop_reason or reason
        self._cancel()

    def time_out(self) -> None:
        """Cuts the row off for its time: it ends as its own clock would have ended it."""
        self._cancel()

    def _cancel(self) -> None:
        if self._work is not None:
            self._work.cancel()

    def abandon(self) -> None:
        """Gives the row as it stands; whatever still hangs in it is left behind."""
        if not self._abandoned.done():
            self._abandoned.set_result(None)

    async def run(self) -> Row:
        """The row of this try. Raises nothing but CancelledError."""
        self._work = asyncio.create_task(self._guarded())
        await asyncio.wait({self._work, self._abandoned}, return_when=asyncio.FIRST_COMPLETED)
        end = self._work.result() if self._work.done() and not self._work.cancelled() else self._cut_off()
        if self._conversation is not None:  # an abandoned one has not come to it
            self._conversation.settle()
        self._final_end = end = self._with_problem(end)
        return self.row(end)

    def children(self) -> list[ChildRow]:
        """The rows of its child conversations, once `run` has given its own."""
        if self._delegation is None or self._final_end is None:
            return []
        return self._delegation.rows(self._outcome(), self._final_end)

    # --- start to end

    async def _guarded(self) -> End:
        try:
            outcome = await guarded(self._in_time())
        except RowFailed as failed:
            return failed_end(failed)
        except RunStopped as stop:
            return stopped_end(stop)
        except DiskFull as full:
            return stopped_end(RunStopped("disk", str(full)))
        except TimeoutError:
            return self._out_of_time()
        except asyncio.CancelledError:
            return self._cut_off()
        return outcome.value if isinstance(outcome, Done) else fault_end(outcome)

    async def _in_time(self) -> End:
        async with self.clock.timeout:
            await self._image_ready()
            async with self._sandbox() as environment:
                self._environment = msgspec.structs.replace(
                    self._environment, backend=environment.backend, image=environment.image
                )
                await self._set_up(environment)
                end = await self._converse(environment)
                await self._check(end, environment)
                return end

    async def _image_ready(self) -> None:
        image = self.prompt.image or self.policy.image
        if image and self.around.backend.takes_images:
            await self.around.backend.prepare(image)

    def _sandbox(self) -> AbstractAsyncContextManager[Environment]:
        return self.around.starts.open(
            self.around.backend, self._environment_spec, waiting=self.clock.paused, failed=self._start_failed
        )

    def _start_failed(self, reason: str) -> None:
        if stopped := self._stopping():
            raise RunStopped(stopped, "the run stopped before the row's sandbox could be started")
        retries = self._environment.start_retries + 1
        self._environment = RowEnvironment(start_retries=retries)
        why = " ".join(reason.split())[:_REASON_HEAD]
        self.around.log(self.which, f"{self.which.task_id}: its sandbox is started again ({retries}): {why}")

    def _environment_spec(self) -> EnvironmentSpec:
        policy, prompt = self.policy, self.prompt
        return EnvironmentSpec(
            task_id=f"{self.which.task_id}.{self.which.sample_index}",
            owner=self.around.owner,
            deadline=time.time() + self.clock.remaining() + CLEAN_UP,
            image=prompt.image or policy.image,
            cwd=prompt.cwd or policy.cwd,
            limits=policy.limits,
            volumes=policy.volumes,
            variables={**policy.variables, **prompt.variables},
            command_timeout=policy.command_timeout,
        )

    async def _set_up(self, environment: Environment) -> None:
        try:
            for path, data in self.prompt.files.items():
                _check_place(path, self.around.backend)
                await environment.write(path, data)
            if self.prompt.setup:
                await self._run_setup(environment)
            if self.around.steps is not None:
                await self.around.steps.before(environment, self.prompt, self.which)
        except (ToolError, SetupFailed) as error:  # the row's fault, unless this machine has no room for it
            await environment.check_room(sum(map(len, self.prompt.files.values())))
            if isinstance(error, SetupFailed):
                raise
            raise SetupFailed(f"the row's files cannot be placed: {error}") from error

    async def _run_setup(self, environment: Environment) -> None:
        result = await environment.run(self.prompt.setup, timeout=self.clock.remaining())
        if result.timed_out:
            raise SetupTimeout("the row's setup command took longer than the row had")
        if result.exit_code != 0:
            raise SetupFailed(f"the row's setup command ended with {result.exit_code}: {result.output[-500:]}")

    async def _converse(self, environment: Environment) -> End:
        conversation, context = self._open_conversation(environment)
        try:
            self._end = end = await conversation.run()
        finally:
            if (steps := self.around.steps) is not None:
                after = steps.after(environment, self.prompt, self.which)
                self._left = await leave(after, self.clock, cut=bool(self._stop_reason))
            if context.has_ends:
                await to_the_end(context.close())
        if self._left.failed is not None:
            raise self._left.failed
        if self._left.cancelled:
            raise asyncio.CancelledError
        return end

    def _with_problem(self, end: End) -> End:
        """What went wrong behind the conversation is told beside how that ended."""
        errors = dict.fromkeys(text for text in (end.error, self._left.problem) if text)
        return msgspec.structs.replace(end, error="\n".join(errors))

    def _open_conversation(self, environment: Environment) -> tuple[Conversation, ToolContext]:
        around = self.around
        context = ToolContext(environment, self.policy.command_timeout, around.services, self.which.task_id)
        self._conversation = Conversation(
            around.model,
            self.tools,
            context,
            [*self.prompt.context, Message(role="user", content=self.prompt.text)],
            self._conversation_options(),
            clock=self.clock,
            redactor=around.redactor,
            stopping=self._stopping,
        )
        self._delegation = Delegation(self._family(environment))
        context.partner = ConversationPartner(self._conversation, around.eye, self._delegation.delegate)
        return self._conversation, context

    def _stopping(self) -> Stopping:
        return self._stop_reason or self.around.stopping()

    def _family(self, environment: Environment) -> Family:
        around = self.around
        return Family(
            model=around.model,
            eye=around.eye,
            tools=self.tools,
            catalog=around.catalog,
            environment=environment,
            services=around.services,
            command_timeout=self.policy.command_timeout,
            options=self._conversation_options(),
            clock=self.clock,
            redactor=around.redactor,
            stopping=self._stopping,
        )

    def _conversation_options(self) -> ConversationOptions:
        policy, prompt, which = self.policy, self.prompt, self.which
        return ConversationOptions(
            max_turns=prompt.max_turns or policy.max_turns,
            system_text=prompt.system_text,
            ephemeral_system_prompt=policy.ephemeral_system_prompt,
            prefill=policy.prefill,
            response_format=prompt.response_format,
            parse_text_tool_calls=policy.parse_text_tool_calls,
            seed=policy.seed + which.sample_index if policy.send_seed else None,
            task_id=which.task_id,
            row_key=which.row_key,
            sample_index=which.sample_index,
            sentinel=policy.sentinel,
        )

    async def _check(self, end: End, environment: Environment) -> None:
        if self.around.checker is None or end.status in ("failed", "stopped"):
            return
        try:
            self._judgement = await judge(self.around.checker, task_object(self.row(end)), environment)
        except asyncio.CancelledError:
            self._judgement = Judgement(success=False, reason="the checker was cut off by the row's time")
            raise

    def row(self, end: End) -> Row:
        """Everything that this try left behind, as it stands."""
        return row_of(self._outcome(), end)

    def _outcome(self) -> Outcome:
        return Outcome(
            prompt=self.prompt,
            which=self.which,
            policy=self.policy,
            tools=self.tools,
            redactor=self.around.redactor,
            model=self.around.model.name,
            catalog=self.around.catalog,
            conversation=self._conversation,
            environment=self._environment,
            judgement=self._judgement,
            seconds=time.monotonic() - self._began,
            beside=self._delegation.spend if self._delegation else NO_SPEND,
        )

    # --- ends that come from outside the conversation

    def _cut_off(self) -> End:
        if self._stop_reason:
            return End(status="stopped", reason=self._stop_reason, retryable=True)
        return self._out_of_time()

    def _out_of_time(self) -> End:
        if self._end is not None and self._left.failed is None:  # only the checker or the clean-up was too slow
            return self._end
        if self._conversation is None:
            return failed_end(SetupTimeout("making the sandbox ready took longer than the row had"))
        return timeout_end()
