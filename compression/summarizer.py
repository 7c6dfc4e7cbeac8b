"""The summarizer: one call of a model per summary, in the parent, with limits, tries and a budget of its own."""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
from msgspec import Struct

from agent.clock import RowClock
from agent.errors import ModelError, RunStopped, StopReason
from agent.models.account import Account, Budget, Minute
from agent.models.base import ModelRequest, Tally
from agent.models.calling import CallFailed
from agent.models.gate import RunGate
from agent.models.options import RequestOptions
from agent.models.providers import Target, resolve_targets
from agent.models.table import ModelSpec, is_local, open_model
from agent.pricing import cost
from agent.secrets import redactor_for
from agent.text import clean
from agent.types import NO_SPEND, Message, Reply, Spend, Usage
from compression.summary import PREFIX, WINDOW_MARGIN, as_turn_text, reply_limit
from compression.types import Ask, Policy
from tools.errors import UsageProblem

FAILURES = 20  # summaries in a row that cannot be had: then none can
LONGEST_PAUSE = 30.0  # seconds between two tries, unless the endpoint asks for more
REFUSAL_SHOWN = 200  # characters
UNKNOWN = 2.0  # times our count that its own may be, of calls beside others before the first answer tells


class Summary(Struct, frozen=True, kw_only=True):
    """A summary as it stands in a row, what it cost, failed tries included, and how much of the row's time it took."""

    text: str
    spend: Spend
    model: str
    seconds: float = 0.0
    tries: int = 1  # requests, but for those that a rate limit or a lost endpoint sent back


class SummaryLimits(Struct, frozen=True, kw_only=True):
    """`tries` of one summary, at least 1, with `retry_delay` seconds after the first, doubled for each further one. The
    rest as the settings of the same names of a batch run."""

    concurrency: int = 50
    tries: int = 3
    retry_delay: float = 2.0
    rpm: int | None = None
    tpm: int | None = None
    max_cost: float | None = None
    max_total_tokens: int | None = None
    rate_limit_wait: float = 900.0
    endpoint_wait: float = 300.0


def summarizer_spec(
    model: str,
    policy: Policy,
    options: RequestOptions,
    *,
    provider: str = "",
    base_url: str = "",
    api_key: str = "",
    api_key_env: str = "",
    environ: Mapping[str, str],
) -> ModelSpec:
    """The summarizer's model. UsageProblem where its endpoint or key is not known.

    `api_key_env` names the variable that holds the key; a key given as `api_key` its user puts into the `environ` of
    the Summarizer, as `agent.models.providers.API_KEY_VARIABLE`. A reply's length and the tries of a call are not
    those of `options`.
    """
    options = msgspec.structs.replace(options, max_tokens=reply_limit(policy), request_retries=1)
    if is_local(model):
        return ModelSpec(model=model, options=options)
    if api_key or not api_key_env:
        return ModelSpec(
            model=model, targets=resolve_targets(model, provider, base_url, api_key, environ=environ), options=options
        )
    if not environ.get(api_key_env, "").strip(" ,"):
        raise UsageProblem(f"api_key_env: {api_key_env} is not set")
    targets = resolve_targets(model, provider, base_url, environ[api_key_env], environ=environ)
    return ModelSpec(model=model, targets=tuple(_with_key(each, api_key_env) for each in targets), options=options)


def _with_key(target: Target, variable: str) -> Target:
    return msgspec.structs.replace(target, key_variable=variable)


class Summarizer:
    """Opens its model at once; `async with` closes it."""

    def __init__(
        self,
        spec: ModelSpec,
        limits: SummaryLimits,
        environ: Mapping[str, str],
        *,
        spent: Spend = NO_SPEND,
        rng: random.Random | None = None,
    ) -> None:
        """`environ` holds the keys. `spent` is what earlier invocations count in the budget. Raises UsageProblem."""
        _check_price(spec, limits)
        self._limits = limits
        self._spec = spec
        self._rng = rng or random.Random()  # noqa: S311 - jitter, not a secret
        self._gate = RunGate(
            spec.keys,
            limits.concurrency,
            Account(Minute(limits.rpm, limits.tpm), Budget(spent=spent)),
            rate_limit_wait=limits.rate_limit_wait,
            endpoint_wait=limits.endpoint_wait,
        )
        self._model = open_model(spec, self._gate, environ)
        self.redactor = redactor_for([spec], environ)[0]
        self._failures = 0
        self._under_way: list[_Size] = []
        self._counts_more = _Size(0.0, 0.0)  # times what we count that it has reported at most; 0: no answer so far
        self._freed = asyncio.Event()
        self._out_of_budget: RunStopped | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._model.close()

    @property
    def spent(self) -> Spend:
        """All requests of all invocations, failed ones too."""
        return self._gate.spent

    @property
    def stopped(self) -> RunStopped | None:
        """Why no further summary is to be had; None while they are."""
        return self._gate.stopped or self._out_of_budget

    @property
    def cooling(self) -> float:
        """Seconds until requests may go on; 0 while nothing holds all of them up."""
        until = self._gate.cooling_until
        return max(0.0, until - asyncio.get_running_loop().time()) if until else 0.0

    @property
    def cooling_reason(self) -> str:
        """What they wait for."""
        return self._gate.cooling_reason

    def stop(self, reason: StopReason, message: str) -> None:
        """No further request is sent; those under way may end."""
        self._gate.stop(reason, message)
        self._freed.set()

    def judged(self, problem: str) -> None:
        """What became of a summary: it was taken, or refused because of a problem, which counts as a failure."""
        self._failures = self._failures + 1 if problem else 0
        if self._failures >= FAILURES:
            self.stop("row_faults", f"{FAILURES} summaries in a row could not be had, the last for: {problem}")

    async def summarize(
        self, ask: Ask, *, row_key: str, remaining: float, tried: int = 0, tally: Tally | None = None
    ) -> Summary:
        """The summary, within so many seconds; waiting for a rate limit or for room in the budget does not count.
        `tried`: tries that went into answers which were refused; of one more summary at least one is made. `tally`
        tells whoever cancels it what it has cost.

        Raises ModelError, if this one cannot be had, and RunStopped, if no further one can: each with what the tries
        cost and with a text that holds no secret.
        """
        self._check_stopped()
        if remaining <= 0:
            raise ModelError("no time is left for a summary", reason="timeout")
        call = _Call(ask, row_key, remaining, tried)
        try:
            return await self._in_time(call)
        except asyncio.CancelledError:
            if tally:
                tally.spend += call.spend
            raise
        except ModelError as error:
            self.judged(str(error))
            raise

    def _check_stopped(self) -> None:
        if self.stopped is not None:
            raise RunStopped(self.stopped.reason, self.redactor.text(clean(self.stopped.message)))

    async def _in_time(self, call: "_Call") -> Summary:
        try:
            async with call.clock.timeout:
                return await self._tries(call)
        except TimeoutError as late:
            raise ModelError("no summary within the row's time", reason="timeout", spend=call.spend) from late
        except ModelError as error:
            raise _told_again(error, self.redactor.text(clean(str(error))), call.spend) from error
        except RunStopped as stop:
            raise RunStopped(stop.reason, self.redactor.text(clean(stop.message)), call.spend) from stop

    async def _tries(self, call: "_Call") -> Summary:
        while True:
            call.tries += 1
            tries = call.tried + call.tries
            try:
                reply = await self._reply(call)
            except ModelError as error:
                pause = self._pause(tries, _asked_to_wait(error))
                if not error.retryable or tries >= self._limits.tries or pause > call.clock.remaining():
                    raise
                await asyncio.sleep(pause)
            else:
                text = as_turn_text(self.redactor.text(clean(reply.content)))
                return Summary(text=text, spend=call.spend, model=reply.model, seconds=call.seconds, tries=call.tries)

    async def _reply(self, call: "_Call") -> Reply:
        """One try. A reply that is no summary is a ModelError too."""
        try:
            async with self._room_for(call):
                reply = await self._asked(call)
        except (ModelError, RunStopped) as error:
            call.book(error.spend)
            raise
        call.book(reply.spend)
        if problem := _problem_of(reply):
            raise problem
        return reply

    @asynccontextmanager
    async def _room_for(self, call: "_Call") -> AsyncIterator[None]:
        """Waits until the budget has room for the dearest that a try can be, beside all that are under way. RunStopped
        once none of them could make room any more."""
        size = _Size(call.ask.prompt_tokens, call.ask.max_tokens)
        with call.clock.paused():
            while self._is_too_much(size):
                if not self._under_way:
                    self._out_of_budget = RunStopped("budget", "the budget has no room for another summary")
                self._check_stopped()
                self._freed.clear()
                await self._freed.wait()
        self._under_way.append(size)
        try:
            yield
        finally:
            self._under_way.remove(size)
            self._freed.set()

    async def _asked(self, call: "_Call") -> Reply:
        """A reply, from which is learnt how the summarizer counts."""
        reply = await self._model.reply(call.request())
        of, usage, ask = self._counts_more, reply.spend.usage, call.ask
        tokens_in = usage.input_tokens or reply.spend.unreported.input_tokens
        self._counts_more = _Size(
            max(1.0, of.tokens_in, tokens_in / max(1, ask.prompt_tokens)),
            max(1.0, of.tokens_out, (usage.total_tokens - usage.input_tokens) / ask.max_tokens),
        )
        return reply

    def _most(self, sizes: Sequence["_Size"]) -> Spend:
        """What so many calls can cost."""
        known = self._counts_more
        more = known if known.tokens_in else _Size(UNKNOWN, UNKNOWN) if len(sizes) > 1 else _Size(1.0, 1.0)
        tokens_in = math.ceil(sum(each.tokens_in for each in sizes) * more.tokens_in * (1 + 1 / WINDOW_MARGIN))
        tokens_out = math.ceil(sum(each.tokens_out for each in sizes) * more.tokens_out)
        usage = Usage(input_tokens=tokens_in, output_tokens=tokens_out, total_tokens=tokens_in + tokens_out)
        return Spend(usage=usage, cost_usd=max(_cost(usage, name, self._spec) or 0.0 for name in _names(self._spec)))

    def _is_too_much(self, more: "_Size") -> bool:
        limits = self._limits
        if limits.max_cost is None and limits.max_total_tokens is None:
            return False
        total = self.spent + self._most([*self._under_way, more])
        too_dear = limits.max_cost is not None and total.all_cost > limits.max_cost
        return too_dear or (limits.max_total_tokens is not None and total.all_tokens > limits.max_total_tokens)

    def _pause(self, tries: int, asked: float) -> float:
        longest = min(LONGEST_PAUSE, self._limits.retry_delay * 2.0 ** (tries - 1))
        return max(asked, longest * self._rng.uniform(0.5, 1.0))


class _Size(NamedTuple):
    """Of a request and of the longest reply to it, in tokens; or how many times so many."""

    tokens_in: float
    tokens_out: float


class _Call:
    """One summary on its way: its time and what it has cost."""

    def __init__(self, ask: Ask, row_key: str, remaining: float, tried: int) -> None:
        self.ask = ask
        self.tried = tried
        self.tries = 0
        self._message = Message(role="user", content=ask.prompt)
        self._row_key = row_key
        self._given = remaining
        self._ended = NO_SPEND
        self._under_way = Tally()
        self.clock = RowClock(remaining)

    @property
    def spend(self) -> Spend:
        """Of all tries, that under way included as far as it is known."""
        return self._ended + self._under_way.spend

    @property
    def seconds(self) -> float:
        """Of the row's time, so far."""
        return self._given - self.clock.remaining()

    def request(self) -> ModelRequest:
        """The next try."""
        return ModelRequest(
            messages=(self._message,),
            row_key=self._row_key,
            counted=self.ask.prompt_tokens,
            clock=self.clock,
            tally=self._under_way,
        )

    def book(self, spend: Spend) -> None:
        """The try under way has ended, and that is what it cost."""
        self._ended += spend
        self._under_way = Tally()


def _check_price(spec: ModelSpec, limits: SummaryLimits) -> None:
    if limits.max_cost is None:
        return
    for name in _names(spec):
        if _cost(Usage(), name, spec) is None:
            raise UsageProblem(f"max_cost: the price of {name} is not known; give --price_in and --price_out")


def _names(spec: ModelSpec) -> list[str]:
    """Of the models that may be asked."""
    return [target.model for target in spec.targets] or [spec.model]


def _cost(usage: Usage, name: str, spec: ModelSpec) -> float | None:
    return cost(usage, name, spec.options.price_in, spec.options.price_out)


def _problem_of(reply: Reply) -> ModelError | None:
    """Why a reply cannot be a summary. A further try may mend all but what the model or its provider will not say."""
    if reply.finish_reason == "content_filter":
        return ModelError(
            "a content filter cut the summary off", error_class="filtered", reason="filtered", retryable=False
        )
    if reply.refusal:
        refusal = " ".join(reply.content[:REFUSAL_SHOWN].split())
        return ModelError(f"the model refused: {refusal}", reason="refusal", retryable=False)
    if reply.tool_calls:
        return ModelError("the summarizer called a tool instead of answering", reason="tool_calls")
    if reply.finish_reason == "length":
        usage = reply.spend.usage
        thought = f", {usage.reasoning_tokens} of them reasoning" if usage.reasoning_tokens else ""
        return ModelError(f"the summary was cut off after {usage.output_tokens} tokens{thought}", reason="truncated")
    if as_turn_text(reply.content) == PREFIX:
        return ModelError("the summary is empty", reason="empty")
    return None


def _asked_to_wait(error: ModelError) -> float:
    """Seconds that the endpoint asked for with its failure."""
    failure = error.__cause__
    return (failure.verdict.retry_after or 0.0) if isinstance(failure, CallFailed) else 0.0


def _told_again(error: ModelError, message: str, spend: Spend) -> ModelError:
    return ModelError(
        message, error_class=error.error_class, reason=error.reason, retryable=error.retryable, spend=spend
    )
