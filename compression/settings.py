"""The compressor's settings: one frozen definition that serves flags, YAML, environment, help and the README.

In a YAML file a setting stands under its own name, or in the section and under the key that its `place` says. A flag
beats the `--config` file, the file beats the environment (`TRAJECTORY_COMPRESSOR_<SETTING>`), that beats the default.
"""

import importlib.util
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct, field

from agent.models.options import ReasoningEffort, RequestOptions
from batch.options import Option, about, merge, options_of, read_all, read_flags
from batch.settings import CONFIG, Count, NotNegative, Positive, cores, refuse, refuse_one_price, without_user
from compression.summary import prompt_limit
from compression.types import Policy, Strategy

Action = Literal["run", "help", "version"]

INPUT, COUNTING, PLAN, SUMMARY = "Files", "Counting", "What is folded", "Summaries"
BUDGET, METRICS, RUN = "Limits and budget", "Metrics", "Running and display"

SMALLEST_PROMPT = 1000  # tokens that a request for a summary needs to be of use
NOTICE = "\n\nParts of this conversation may have been replaced by a summary of what happened in them."
PLOT_FORMATS = (".png", ".svg", ".pdf")


class CompressorSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that the compressor can be told. As `load_settings` returns it for a run, values agree."""

    input: Annotated[
        str,
        about(
            INPUT,
            "a run directory, a JSONL file (also .gz, .zst), a directory of them, a glob, or - for stdin",
            shown="required",
        ),
    ] = ""
    output: Annotated[
        str,
        about(INPUT, "file, or directory where there are several; .gz and .zst compress", shown="input + suffix"),
    ] = ""
    output_suffix: Annotated[
        str, about(INPUT, "what an output's name has more than its input's", place="output.output_suffix")
    ] = "_compressed"
    save_over_limit: Annotated[
        bool,
        about(
            INPUT,
            "keep rows that cannot be brought to the target; off: leave them out",
            place="processing.save_over_limit",
        ),
    ] = True
    sample_percent: Annotated[
        Annotated[float, Meta(gt=0, le=100)] | None,
        about(INPUT, "only so many percent of each file's rows, drawn by `seed`, at least one", shown="all"),
    ] = None
    seed: Annotated[Annotated[int, Meta(ge=-(10**18), le=10**18)], about(INPUT, "decides which rows are drawn")] = 42

    tokenizer: Annotated[
        str,
        about(
            COUNTING,
            "a tiktoken encoding or model, a tokenizer.json or its folder, a Hugging Face name",
            "name",
            place="tokenizer.name",
        ),
    ] = "cl100k_base"
    trust_remote_code: Annotated[
        bool,
        about(
            COUNTING,
            "accepted, and never made use of: a tokenizer's own code is not run",
            place="tokenizer.trust_remote_code",
        ),
    ] = False
    chat_template: Annotated[
        str,
        about(
            COUNTING,
            "Jinja file, or tokenizer_config.json, by which rows are counted exactly",
            place="tokenizer.chat_template",
            shown="a constant a turn",
        ),
    ] = ""

    target_max_tokens: Annotated[
        Count, about(PLAN, "tokens that a row may have", place="compression.target_max_tokens")
    ] = 29_000
    strategy: Annotated[
        Strategy,
        about(
            PLAN,
            "what becomes of old turns: a summary, old tool results masked, or pairs of turns dropped",
            place="compression.strategy",
        ),
    ] = "summary"
    shorten_turns: Annotated[
        bool,
        about(PLAN, "shorten tool results that alone are too large", place="compression.shorten_turns"),
    ] = False
    skip_under_target: Annotated[
        bool,
        about(PLAN, "leave rows within the target as they are", place="processing.skip_under_target"),
    ] = True
    first_system: Annotated[bool, about(PLAN, "keep the first system turn", place="protected_turns.first_system")] = (
        True
    )
    first_human: Annotated[bool, about(PLAN, "keep the first human turn", place="protected_turns.first_human")] = True
    first_gpt: Annotated[bool, about(PLAN, "keep the first gpt turn", place="protected_turns.first_gpt")] = True
    first_tool: Annotated[bool, about(PLAN, "keep the first tool turn", place="protected_turns.first_tool")] = True
    last_n_turns: Annotated[
        Annotated[int, Meta(ge=0, le=1_000_000)],
        about(PLAN, "last turns that are kept", place="protected_turns.last_n_turns"),
    ] = 4
    add_summary_notice: Annotated[
        bool, about(PLAN, "say in the system turn that there is a summary", place="output.add_summary_notice")
    ] = True
    summary_notice_text: Annotated[
        str,
        about(PLAN, "what it says, appended as it is", place="output.summary_notice_text", shown="a sentence"),
    ] = NOTICE

    summarization_model: Annotated[
        str,
        about(
            SUMMARY,
            "the model that writes summaries; scripted:FILE.yaml plays a script",
            "model",
            place="summarization.model",
            shown="required",
        ),
    ] = ""
    summary_target_tokens: Annotated[
        Count, about(SUMMARY, "tokens that a summary should have", place="compression.summary_target_tokens")
    ] = 750
    summary_window: Annotated[
        Count,
        about(SUMMARY, "tokens that a request and its reply may have together", place="summarization.summary_window"),
    ] = 32_000
    provider: Annotated[
        str,
        about(
            SUMMARY,
            "provider of batch-runner --list_providers",
            place="summarization.provider",
            shown="from base_url, model and keys",
        ),
    ] = ""
    base_url: Annotated[
        str,
        about(SUMMARY, "endpoint, up to and with /v1", place="summarization.base_url", shown="the provider's"),
    ] = ""
    api_key_env: Annotated[
        str,
        about(
            SUMMARY,
            "variable that holds the key, or several with commas",
            place="summarization.api_key_env",
            shown="the provider's",
        ),
    ] = ""
    api_key: Annotated[
        str,
        about(SUMMARY, "the key itself", place="summarization.api_key", shown="the variable's", secret=True),
    ] = ""
    temperature: Annotated[
        NotNegative | None,
        about(SUMMARY, "sampling temperature, unless the model fixes its own", place="summarization.temperature"),
    ] = 0.3
    reasoning_effort: Annotated[
        ReasoningEffort | None,
        about(SUMMARY, "how much reasoning to ask for", place="summarization.reasoning_effort", shown="not sent"),
    ] = None
    max_retries: Annotated[
        Annotated[int, Meta(ge=1, le=1000)],
        about(SUMMARY, "tries of one summary", place="summarization.max_retries"),
    ] = 3
    retry_delay: Annotated[
        NotNegative,
        about(
            SUMMARY, "seconds before the second try, doubled for each further one", place="summarization.retry_delay"
        ),
    ] = 2.0

    max_concurrent_requests: Annotated[
        Annotated[int, Meta(ge=1, le=100_000)],
        about(BUDGET, "model calls under way at once", place="processing.max_concurrent_requests"),
    ] = 50
    per_trajectory_timeout: Annotated[
        Positive,
        about(BUDGET, "seconds for one row, then it stays as it is", place="processing.per_trajectory_timeout"),
    ] = 300.0
    request_timeout: Annotated[
        Positive, about(BUDGET, "seconds for one model call", place="processing.request_timeout")
    ] = 120.0
    endpoint_wait: Annotated[
        NotNegative,
        about(BUDGET, "seconds to wait for an endpoint that went away", place="processing.endpoint_wait"),
    ] = 300.0
    rate_limit_wait: Annotated[
        NotNegative,
        about(BUDGET, "seconds to wait under rate limits without one success", place="processing.rate_limit_wait"),
    ] = 900.0
    rpm: Annotated[Count | None, about(BUDGET, "requests a minute", place="processing.rpm")] = None
    tpm: Annotated[Count | None, about(BUDGET, "tokens a minute", place="processing.tpm")] = None
    max_cost: Annotated[
        Positive | None, about(BUDGET, "USD that the whole run may spend", place="processing.max_cost")
    ] = None
    price_in: Annotated[
        NotNegative | None,
        about(BUDGET, "USD per 1,000,000 input tokens", place="processing.price_in", shown="the price table"),
    ] = None
    price_out: Annotated[
        NotNegative | None,
        about(BUDGET, "USD per 1,000,000 output tokens", place="processing.price_out", shown="the price table"),
    ] = None

    metrics: Annotated[bool, about(METRICS, "write the file of metrics", "enabled", place="metrics.enabled")] = True
    per_trajectory: Annotated[
        bool, about(METRICS, "add compression_metrics to every row", place="metrics.per_trajectory")
    ] = True
    output_file: Annotated[
        str,
        about(
            METRICS,
            "the metrics file's name, in the output's folder",
            place="metrics.output_file",
            shown="compression_metrics.json; beside a file STEM_metrics.json",
        ),
    ] = ""
    plot: Annotated[
        str, about(METRICS, "draw the distribution of tokens before and after into this .png", place="metrics.plot")
    ] = ""

    resume: Annotated[bool, about(RUN, "go on with a run that was stopped, and try failed rows again")] = False
    steal_lock: Annotated[bool, about(RUN, "take over a work folder whose owner cannot be seen to be dead")] = False
    num_workers: Annotated[
        Annotated[int, Meta(ge=0, le=1000)],
        about(RUN, "processes that count; 0 counts in the parent", place="processing.num_workers", shown="cores"),
    ] = field(default_factory=cores)
    dry_run: Annotated[bool, about(RUN, "count everything, tell what it would take; no model call, no file")] = False
    quiet: Annotated[bool, about(RUN, "no progress")] = False
    json_summary: Annotated[bool, about(RUN, "the final report as one JSON object")] = False


PREFIX = "TRAJECTORY_COMPRESSOR_"
ACTIONS: tuple[Action, ...] = get_args(Action)[1:]
OPTIONS_CONFIG = msgspec.structs.replace(CONFIG, group=RUN)


def compressor_options() -> tuple[Option, ...]:
    """The settings as options, in the order of the definition, and `config`."""
    return (*options_of(CompressorSettings), OPTIONS_CONFIG)


def load_settings(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[CompressorSettings, Action]:
    """Command line (without the program's name) and environment -> what is to be done, and how. Raises UsageProblem."""
    options = options_of(CompressorSettings)
    flags, asked = read_flags(argv, [*options, OPTIONS_CONFIG], ACTIONS)
    action: Action = next((each for each in ACTIONS if each in asked), "run")
    settings = CompressorSettings(**merge(read_all(flags, OPTIONS_CONFIG, options, environ, PREFIX)))
    if action == "run":
        _check(settings)
    return settings, action


def _check(settings: CompressorSettings) -> None:
    refuse(not settings.input, "no trajectories: give --input RUN_DIRECTORY, FILE, GLOB or -")
    refuse(settings.output == "-", "output: expected a file or a directory, not -")
    refuse("/" in settings.output_suffix, f"output_suffix: expected part of a name, got {settings.output_suffix!r}")
    refuse(
        bool(settings.output_file) and Path(settings.output_file).name != settings.output_file,
        f"output_file: expected a name, got {settings.output_file!r}",
    )
    needless = settings.dry_run or settings.strategy != "summary"
    refuse(not settings.summarization_model and not needless, "no model: give --summarization_model NAME")
    _check_sizes(settings)
    refuse_one_price(settings.price_in, settings.price_out)
    if settings.base_url:
        web = urlsplit(settings.base_url).scheme in {"http", "https"}
        refuse(not web, "base_url: expected a URL that starts with http:// or https://")
    if settings.plot:
        _check_plot(settings.plot)


def _check_sizes(settings: CompressorSettings) -> None:
    if settings.strategy != "summary":
        return
    size, target, window = settings.summary_target_tokens, settings.target_max_tokens, settings.summary_window
    refuse(size >= target, f"summary_target_tokens {size}: must be below target_max_tokens {target}")
    refuse(
        prompt_limit(policy_of(settings)) < SMALLEST_PROMPT,
        f"summary_window {window}: too small for summaries of {size} tokens (summary_target_tokens)",
    )


def _check_plot(plot: str) -> None:
    refuse(Path(plot).suffix not in PLOT_FORMATS, f"plot {plot}: expected a name that ends in .png")
    missing = importlib.util.find_spec("matplotlib") is None
    refuse(missing, "plot needs matplotlib: pip install -e '.[plot]'")


def policy_of(settings: CompressorSettings) -> Policy:
    """What decides the result of a row."""
    same = [item.name for item in msgspec.structs.fields(Policy) if hasattr(settings, item.name)]
    return Policy(
        window=settings.summary_window,
        summary_model=settings.summarization_model if settings.strategy == "summary" else "",
        **{name: getattr(settings, name) for name in same},
    )


def request_options(settings: CompressorSettings) -> RequestOptions:
    """What every request for a summary carries."""
    same = [item.name for item in msgspec.structs.fields(RequestOptions) if hasattr(settings, item.name)]
    return RequestOptions(**{name: getattr(settings, name) for name in same})


def shaping(settings: CompressorSettings) -> dict[str, Any]:
    """The settings that decide what the result is, by name: they may not change while a run is gone on with."""
    policy = [item.name for item in msgspec.structs.fields(Policy) if hasattr(settings, item.name)]
    more = ("summary_window", "tokenizer", "sample_percent", "seed")
    names = [*policy, *more]
    if settings.strategy == "summary":
        names += ["summarization_model", "temperature", "reasoning_effort"]
    return {name: getattr(settings, name) for name in names}


ONCE_ONLY = {"resume", "dry_run", "steal_lock", "api_key"}


def resume_command(settings: CompressorSettings, argv: Sequence[str], program: str) -> str:
    """The shell command that goes on with this run: the flags of `argv` without keys, and `--resume`. `settings.input`
    is where the input can be read again."""
    words = []
    for given in read_flags(argv, compressor_options(), ACTIONS)[0]:
        name, value = given.option.name, str(given.value)
        if name not in ONCE_ONLY:
            value = without_user(value) if name == "base_url" else settings.input if name == "input" else value
            words.append(f"--{name}" if given.option.is_flag and value == "true" else f"--{name}={value}")
    return " ".join([program, *(shlex.quote(word) for word in [*words, "--resume"])])
