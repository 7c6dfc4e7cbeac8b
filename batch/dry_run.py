"""`--dry_run`: what a run would do, and roughly what it would cost. Reads a sample of the rows, writes nothing."""

import math
from collections.abc import Iterator
from itertools import islice

import msgspec
from msgspec import Struct

from agent.pricing import cost, price_of
from agent.prompt import Prompt
from agent.rollout import offered_tools
from agent.types import Usage
from batch.plan import Plan
from batch.progress import count_text, counted
from batch.rows import parse_row
from tools.base import Tool

SAMPLE = 1000  # rows that the estimate looks at
CHARACTERS = 4  # a token's, as a rule of thumb for English and code
REPLY = 200  # tokens of one reply: reasoning, text and call
RESULT = 400  # tokens of a call's result
TYPICAL_CALLS = 8  # model calls of a prompt that needs tools


class Estimate(Struct, frozen=True, kw_only=True):
    """Tokens and cost if every prompt took `calls_per_prompt` model calls; `cost_usd` is -1 where no price is known."""

    calls_per_prompt: int
    requests: int
    input_tokens: int
    output_tokens: int
    cost_usd: float


class DryRun(Struct, frozen=True, kw_only=True):
    """What would run. `basis` says what the estimates rest on."""

    run_name: str
    directory: str
    dataset: str
    rows: int
    bad_rows: int
    selected_rows: int
    samples_per_prompt: int
    pending: int
    toolsets: str
    tools: list[str]
    backend: str
    image: str
    model: str
    endpoints: list[str]
    estimates: list[Estimate]
    basis: list[str]


def dry_run(plan: Plan, pending: int) -> DryRun:
    """The run that the plan would be; `pending` rows and samples have no end yet."""
    settings, found = plan.settings, plan.scan
    tokens, tools = _first_request(plan)
    targets = [target for spec in plan.models for target in spec.targets]
    calls = dict.fromkeys((1, min(TYPICAL_CALLS, settings.max_turns), settings.max_turns))
    return DryRun(
        run_name=settings.run_name,
        directory=str(plan.directory),
        dataset=plan.dataset.path or "--prompt",
        rows=found.rows,
        bad_rows=found.bad_rows,
        selected_rows=len(plan.order),
        samples_per_prompt=settings.samples_per_prompt,
        pending=pending,
        toolsets=_toolsets(plan),
        tools=tools,
        backend=plan.backend,
        image=_image(plan),
        model=settings.model,
        endpoints=[f"{each.model} at {each.base_url}{_key(each.key_variable)}" for each in targets],
        estimates=[_estimate(plan, pending, tokens, each) for each in calls],
        basis=_basis(plan, tokens),
    )


def as_text(report: DryRun) -> str:
    """For people."""
    tries = f", {report.samples_per_prompt} samples each" if report.samples_per_prompt > 1 else ""
    left_out = f", {counted(report.bad_rows, 'bad row')} left out" if report.bad_rows else ""
    lines = [
        f"Dry run of {report.run_name}: no model was called, nothing was written",
        f"  prompts    {report.selected_rows} of {report.rows} rows of {report.dataset}{tries}{left_out};"
        f" {report.pending} to run",
        f"  directory  {report.directory}",
        f"  model      {report.model}",
        *(f"  endpoint   {each}" for each in report.endpoints),
        f"  toolsets   {report.toolsets}",
        f"  tools      {', '.join(report.tools) or 'none'}",
        f"  backend    {report.backend}" + (f", image {report.image}" if report.image else ""),
        *(f"  estimate   {_estimate_text(each)}" for each in report.estimates),
        *(f"  basis      {each}" for each in report.basis),
    ]
    return "\n".join(lines) + "\n"


def as_json(report: DryRun) -> str:
    """For programs."""
    return msgspec.json.encode(report).decode() + "\n"


def _toolsets(plan: Plan) -> str:
    settings = plan.settings
    if settings.enabled_toolsets:
        drawn = ", ".join(settings.enabled_toolsets)
    else:
        chances = plan.catalog.distribution(settings.distribution).toolsets
        drawn = f"distribution {settings.distribution} (" + ", ".join(f"{k} {v:g}%" for k, v in chances.items()) + ")"
    return drawn + (f", without {', '.join(settings.disabled_toolsets)}" if settings.disabled_toolsets else "")


def _image(plan: Plan) -> str:
    own = f"{plan.scan.images} rows name their own" if plan.scan.images else ""
    return "; ".join(each for each in (plan.settings.image, own) if each)


def _key(variable: str) -> str:
    return f" (key in {variable})" if variable else ""


def _sample(plan: Plan) -> Iterator[tuple[Prompt, tuple[Tool, ...]]]:
    """Rows at even distances, and the tools that each is offered."""
    step = max(1, len(plan.order) // SAMPLE)
    for index in islice(plan.order, 0, step * SAMPLE, step):
        job = plan.dataset.job(index)
        prompt = parse_row(job.line)
        yield prompt, offered_tools(prompt, plan.policy, job.row_key, plan.catalog)


def _first_request(plan: Plan) -> tuple[int, list[str]]:
    """Tokens of a prompt's first request, in the mean, and the tools that any of the rows is offered."""
    policy = plan.policy
    always = len(policy.ephemeral_system_prompt) + sum(len(message.content) for message in policy.prefill)
    characters, rows, names = 0, 0, set[str]()
    for prompt, tools in _sample(plan):
        given = sum(len(message.content) + len(message.reasoning) for message in prompt.context)
        described = sum(len(msgspec.json.encode(tool.spec)) for tool in tools)
        characters += always + len(prompt.text) + len(prompt.system_text) + given + described
        names.update(tool.spec.name for tool in tools)
        rows += 1
    return math.ceil(characters / CHARACTERS / max(1, rows)), sorted(names)


def _estimate(plan: Plan, pending: int, first: int, calls: int) -> Estimate:
    """Every request carries what came before it: the first one's text, and each reply and result since."""
    settings = plan.settings
    grown = (REPLY + RESULT) * calls * (calls - 1) // 2
    usage = Usage(input_tokens=pending * (calls * first + grown), output_tokens=pending * calls * REPLY)
    usd = cost(usage, plan.settings.model, settings.price_in, settings.price_out)
    return Estimate(
        calls_per_prompt=calls,
        requests=pending * calls,
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        cost_usd=-1.0 if usd is None else round(usd, 4),
    )


def _estimate_text(each: Estimate) -> str:
    price = "cost unknown" if each.cost_usd < 0 else f"${each.cost_usd:.2f}"
    return (
        f"{price} with {counted(each.calls_per_prompt, 'model call')} per prompt: {counted(each.requests, 'request')},"
        f" {count_text(each.input_tokens)} tokens in, {count_text(each.output_tokens)} out"
    )


def _basis(plan: Plan, first: int) -> list[str]:
    settings = plan.settings
    looked_at = min(SAMPLE, len(plan.order))
    price = price_of(settings.model, settings.price_in, settings.price_out)
    known = f"${price.input:g} in and ${price.output:g} out for 1,000,000 tokens" if price else ""
    return [
        f"first request {first} tokens in the mean of {looked_at} rows, at {CHARACTERS} characters a token:"
        " prompt, context and tool descriptions",
        f"{REPLY} tokens a reply, {RESULT} a tool result, all sent again with every later call; nothing cached",
        known or "the model's price is not known: give --price_in and --price_out",
    ]
