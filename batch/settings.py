"""A run's settings: one frozen definition that serves flags, YAML, environment, help, the manifest and the README.

A flag beats the `--config` file, the file beats the environment (`BATCH_RUNNER_<SETTING>`), that beats the default.
Every mistake is a `UsageProblem` of one line that names the setting, where it came from and what is expected.
"""

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args
from urllib.parse import urlsplit, urlunsplit

import msgspec
from msgspec import Meta, Struct, field

from agent.models.options import ProviderSort, ReasoningEffort
from agent.text import clean
from batch.messages import ERROR_HEAD
from batch.options import (
    Given,
    Option,
    about,
    by_name,
    merge,
    options_of,
    read_all,
    read_flags,
    read_mapping,
)
from tools.environments.script import HELD, IS_HELD
from tools.errors import UsageProblem
from tools.mcp import servers
from tools.mcp.servers import McpServer, as_meant, check_servers

MOST = 10**12  # sums and products of such numbers stay within the 64 bits of files and messages
Count = Annotated[int, Meta(ge=1, le=MOST)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]

OutputFormat = Literal["sharegpt", "json", "jsonl", "turns"]
Retry = Literal["none", "failed", "timeout", "incomplete", "all"]
PullPolicy = Literal["missing", "always", "never"]
SearchProvider = Literal["searxng", "brave", "tavily", "exa", "serper", "firecrawl", "ddgs"]

Action = Literal[
    "run",
    "help",
    "version",
    "list_distributions",
    "list_toolsets",
    "list_backends",
    "list_providers",
    "check_backend",
]


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_workers() -> int:
    """As many worker processes as there are cores, four at most."""
    return min(4, cores())


INPUT, OUTPUT, RESUME, RUN = "Prompts", "Results", "Resuming", "Running"
TOOLS, MODEL, BUDGET, SANDBOX, DISPLAY = "Tools", "Model", "Limits and budget", "Sandbox", "Display"


class RunSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a run can be told. As `load_settings` returns it for a run, `run_name` is filled in, values agree
    with each other, and `keep_no_reasoning` is on where `reasoning_disabled` is.

    `SOURCES`: the settings of which one says where rows come from, and how to give it."""

    SOURCES: ClassVar[Mapping[str, str]] = {"prompt": "--prompt TEXT", "dataset_file": "--dataset_file FILE"}

    dataset_file: Annotated[
        str,
        about(
            INPUT,
            "file of prompts: JSONL (also .gz, .zst), a JSON array, Parquet; - is stdin",
            "input",
            shown="required unless prompt",
        ),
    ] = ""
    prompt: Annotated[str, about(INPUT, "one prompt instead of a file; the answer goes to stdout")] = ""
    max_samples: Annotated[Count | None, about(INPUT, "the first N rows only (after the shuffle)", shown="all")] = None
    shuffle: Annotated[bool, about(INPUT, "run the rows in an order drawn by `seed`")] = False
    seed: Annotated[
        Annotated[int, Meta(ge=-(10**18), le=10**18)], about(INPUT, "decides shuffle and the toolsets of every row")
    ] = 0
    samples_per_prompt: Annotated[
        Annotated[int, Meta(ge=1, le=10_000)],
        about(INPUT, "independent tries of each row: same tools, the sent seed differs"),
    ] = 1
    spread: Annotated[str, about(INPUT, "a toolset: rows that ask for it are interleaved evenly")] = ""
    skip_bad_rows: Annotated[bool, about(INPUT, "count bad rows and go on instead of stopping")] = False

    run_name: Annotated[
        str, about(OUTPUT, "names the run: one path component of [A-Za-z0-9._-]", shown="required unless output")
    ] = ""
    output_dir: Annotated[str, about(OUTPUT, "the run directory is output_dir/run_name", "trajectory_dir")] = "data"
    output: Annotated[
        str, about(OUTPUT, "the run directory itself; F.jsonl with output_format=jsonl: directory F, and that file too")
    ] = ""
    output_format: Annotated[
        tuple[OutputFormat, ...],
        about(OUTPUT, "json is a file per task, jsonl those records in one file, turns a line per turn"),
    ] = ("sharegpt",)
    save_all: Annotated[
        bool, about(OUTPUT, "merge rows that ended early too (max_turns, timeout, partial); off: completed ones only")
    ] = True
    keep_no_reasoning: Annotated[bool, about(OUTPUT, "keep samples without reasoning in any turn")] = False
    keep_unknown_tools: Annotated[bool, about(OUTPUT, "keep samples that called an invented tool")] = False
    success_checker: Annotated[str, about(OUTPUT, "judges every row: path/file.py:function or module.function")] = ""
    on_task_done: Annotated[str, about(OUTPUT, "called after every row: path/file.py:function or module.function")] = ""
    finalize: Annotated[bool, about(OUTPUT, "rebuild every derived file of a run, without a model call")] = False

    resume: Annotated[bool, about(RESUME, "go on with a run directory that holds results")] = False
    retry: Annotated[
        tuple[Retry, ...], about(RESUME, "which ended rows to try again; incomplete is max_turns and partial")
    ] = ("failed",)
    only_ids: Annotated[tuple[str, ...], about(RESUME, "run these task ids only, whatever their end was")] = ()
    max_attempts: Annotated[
        Annotated[int, Meta(ge=1, le=250)], about(RESUME, "tries of one row over all invocations")
    ] = 3
    allow_config_change: Annotated[
        bool, about(RESUME, "resume although settings that shape the data, or rows, have changed")
    ] = False
    checkpoint_interval: Annotated[Count, about(RESUME, "ended rows between checkpoints")] = 10
    steal_lock: Annotated[bool, about(RESUME, "take over a run directory whose owner cannot be seen to be dead")] = (
        False
    )

    batch_size: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)], about(RUN, "rows per batch file, the unit of dispatch")
    ] = 10
    num_workers: Annotated[
        Annotated[int, Meta(ge=0, le=1000)], about(RUN, "worker processes; 0 runs in the parent", shown="min(4, cores)")
    ] = field(default_factory=default_workers)
    concurrency: Annotated[Annotated[int, Meta(ge=1, le=100_000)], about(RUN, "prompts in flight over all workers")] = (
        16
    )
    max_sandboxes: Annotated[
        Count | None, about(RUN, "sandboxes open at the same time over all workers", shown="concurrency")
    ] = None
    max_turns: Annotated[
        Annotated[int, Meta(ge=1, le=10_000)], about(RUN, "model calls per prompt", "max_iterations", "max_steps")
    ] = 30
    timeout: Annotated[Positive, about(RUN, "seconds for a whole prompt: set-up, loop, checker, clean-up")] = 3600.0
    dry_run: Annotated[bool, about(RUN, "check everything, show what would run; no model call, no file")] = False

    distribution: Annotated[str, about(TOOLS, "named distribution that every row's toolsets are drawn from")] = (
        "default"
    )
    enabled_toolsets: Annotated[
        tuple[str, ...], about(TOOLS, "these toolsets or tools for every row, instead of a distribution")
    ] = ()
    disabled_toolsets: Annotated[tuple[str, ...], about(TOOLS, "never offer these toolsets or tools")] = ()
    allow_missing_toolsets: Annotated[bool, about(TOOLS, "run without the tools that are not available here")] = False
    tools_module: Annotated[
        str, about(TOOLS, "Python file with tools, toolsets and distributions of one's own: path/file.py")
    ] = ""
    mcp_servers: Annotated[
        dict[str, McpServer],
        about(TOOLS, "MCP servers, each a toolset: name -> command or url …; a text is JSON, YAML or a file of either"),
    ] = {}
    search_provider: Annotated[
        SearchProvider | None, about(TOOLS, "web search by this service", shown="the first that can be had")
    ] = None
    search_url: Annotated[str, about(TOOLS, "address of a SearXNG server, or of a service of one's own")] = ""
    search_api_key: Annotated[
        str, about(TOOLS, "key of the search service", shown="the service's variable", secret=True)
    ] = ""
    allow_private_urls: Annotated[
        bool, about(TOOLS, "web and browser may open private, loopback and metadata addresses")
    ] = False
    browser_program: Annotated[str, about(TOOLS, "the Chromium to be used", shown="one that is found")] = ""
    vision_model: Annotated[
        str, about(TOOLS, "model that answers questions about pictures", shown="the run's model")
    ] = ""
    vision_base_url: Annotated[str, about(TOOLS, "its endpoint", shown="the run's, or its provider's")] = ""
    vision_api_key: Annotated[str, about(TOOLS, "its key", shown="the provider's variable", secret=True)] = ""
    image_model: Annotated[str, about(TOOLS, "model that makes pictures", shown="the provider's usual one")] = ""
    image_base_url: Annotated[
        str, about(TOOLS, "endpoint of an OpenAI-compatible image service", shown="OpenAI's or FAL's, by key")
    ] = ""
    image_api_key: Annotated[str, about(TOOLS, "its key", shown="OPENAI_API_KEY or FAL_KEY", secret=True)] = ""
    parse_text_tool_calls: Annotated[bool, about(TOOLS, "execute tool calls that the model wrote into its text")] = (
        False
    )

    model: Annotated[
        str,
        about(MODEL, "model name; scripted:FILE.yaml plays a script, replay:RUN_DIR an earlier run", shown="required"),
    ] = ""
    provider: Annotated[str, about(MODEL, "provider of --list_providers", shown="from base_url, model and keys")] = ""
    base_url: Annotated[str, about(MODEL, "endpoint, up to and with /v1", shown="the provider's")] = ""
    api_key: Annotated[
        str, about(MODEL, "key, or several with commas", shown="the provider's variable", secret=True)
    ] = ""
    fallback_model: Annotated[tuple[str, ...], about(MODEL, "models tried in order when the model is unavailable")] = ()
    max_fallback_attempts: Annotated[
        Annotated[int, Meta(ge=0, le=MOST)], about(MODEL, "how many of the fallback models may be tried")
    ] = 3
    max_tokens: Annotated[Count | None, about(MODEL, "length limit of one reply", shown="not sent")] = None
    temperature: Annotated[NotNegative | None, about(MODEL, "sampling temperature", shown="not sent")] = None
    top_p: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, about(MODEL, "nucleus sampling", shown="not sent")] = (
        None
    )
    deterministic: Annotated[
        bool, about(MODEL, "temperature 0, a fixed seed sent, toolsets and order fixed by `seed`")
    ] = False
    reasoning_effort: Annotated[
        ReasoningEffort | None,
        about(MODEL, "how much reasoning to ask for", shown="not sent"),
    ] = None
    reasoning_disabled: Annotated[bool, about(MODEL, "ask for no reasoning; implies keep_no_reasoning")] = False
    ephemeral_system_prompt: Annotated[str, about(MODEL, "system text used in requests, never saved")] = ""
    prefill_messages_file: Annotated[
        str, about(MODEL, "JSON array of {role, content} put before the prompt in requests, never saved")
    ] = ""
    context_window: Annotated[
        Count | None,
        about(MODEL, "tokens that the model takes: large tool results are cut to shares of it", shown="none"),
    ] = None
    trim_context: Annotated[bool, about(MODEL, "shorten old tool results in requests when the context overflows")] = (
        False
    )
    providers_allowed: Annotated[tuple[str, ...], about(MODEL, "OpenRouter: only these upstream providers")] = ()
    providers_ignored: Annotated[tuple[str, ...], about(MODEL, "OpenRouter: never these upstream providers")] = ()
    providers_order: Annotated[tuple[str, ...], about(MODEL, "OpenRouter: upstream providers in this order")] = ()
    provider_sort: Annotated[ProviderSort | None, about(MODEL, "OpenRouter: how upstream providers are sorted")] = None

    request_timeout: Annotated[Positive, about(BUDGET, "seconds for one model call in total")] = 600.0
    request_retries: Annotated[Annotated[int, Meta(ge=1, le=1000)], about(BUDGET, "tries per model call")] = 5
    endpoint_wait: Annotated[NotNegative, about(BUDGET, "seconds to wait for an endpoint that went away")] = 300.0
    rate_limit_wait: Annotated[NotNegative, about(BUDGET, "seconds to wait under rate limits without one success")] = (
        900.0
    )
    rpm: Annotated[Count | None, about(BUDGET, "requests a minute over all workers")] = None
    tpm: Annotated[Count | None, about(BUDGET, "tokens a minute over all workers")] = None
    max_cost: Annotated[Positive | None, about(BUDGET, "USD that the whole run may spend")] = None
    max_total_tokens: Annotated[Count | None, about(BUDGET, "tokens that the whole run may use")] = None
    price_in: Annotated[
        NotNegative | None, about(BUDGET, "USD per 1,000,000 input tokens", shown="the price table")
    ] = None
    price_out: Annotated[
        NotNegative | None, about(BUDGET, "USD per 1,000,000 output tokens", shown="the price table")
    ] = None

    container_backend: Annotated[
        str, about(SANDBOX, "backend of --list_backends, or auto", "environment", "env", "backend")
    ] = "auto"
    image: Annotated[str, about(SANDBOX, "container image of rows that name none", shown="python:3.11-slim")] = ""
    cwd: Annotated[
        str, about(SANDBOX, "working directory in the sandbox", shown="/workspace; local, ssh: a folder of its own")
    ] = ""
    cpus: Annotated[Positive, about(SANDBOX, "processor cores of one sandbox")] = 1.0
    memory_mb: Annotated[Count, about(SANDBOX, "memory of one sandbox in MiB")] = 5120
    network: Annotated[
        str, about(SANDBOX, "on (or default), none; docker, podman: or the name of a network that is there")
    ] = "on"
    command_timeout: Annotated[
        Annotated[float, Meta(gt=0, le=600)], about(SANDBOX, "seconds for one command that asks for no other time")
    ] = 180.0
    volumes: Annotated[tuple[str, ...], about(SANDBOX, "HOST:SANDBOX or HOST:SANDBOX:ro, comma-separated")] = ()
    env_allow: Annotated[tuple[str, ...], about(SANDBOX, "names of variables that are handed into the sandbox")] = ()
    pull_policy: Annotated[
        PullPolicy, about(SANDBOX, "docker, podman: which images to pull; always: each once a worker")
    ] = "missing"
    prefetch_images: Annotated[bool, about(SANDBOX, "all rows' images are made ready before the first row starts")] = (
        False
    )
    container_user: Annotated[
        str, about(SANDBOX, "docker, podman: run as NAME or UID[:GID]", shown="the image's user")
    ] = ""
    read_only_root: Annotated[
        bool, about(SANDBOX, "docker, podman: only the workspace, /tmp, /var/tmp and /run can be written to")
    ] = False
    gpus: Annotated[str, about(SANDBOX, "docker: all, a number, or device=ID,ID", shown="none")] = ""
    ssh_hosts: Annotated[tuple[str, ...], about(SANDBOX, "ssh: [user@]host[:port] in turn, comma-separated")] = ()
    ssh_key: Annotated[str, about(SANDBOX, "ssh: file of the private key", shown="those of ~/.ssh and the agent")] = ""
    ssh_known_hosts: Annotated[
        str, about(SANDBOX, "ssh: file of host keys; a host that is not in it is refused", shown="~/.ssh/known_hosts")
    ] = ""
    ssh_capacity: Annotated[Count, about(SANDBOX, "ssh: sandboxes that one host holds at once")] = 16
    singularity_cache: Annotated[
        str, about(SANDBOX, "singularity: folder of built images", shown="batch-runner in Apptainer's own")
    ] = ""

    log_prefix_chars: Annotated[
        Annotated[int, Meta(ge=0, le=ERROR_HEAD)],
        about(DISPLAY, "characters of a row's prompt and of its error in the log line of its end"),
    ] = 100
    verbose: Annotated[bool, about(DISPLAY, "more on stderr")] = False
    quiet: Annotated[bool, about(DISPLAY, "no progress")] = False
    json_summary: Annotated[bool, about(DISPLAY, "the final summary as one JSON object")] = False


URLS = ("base_url", "search_url", "vision_base_url", "image_base_url")
PREFIX = "BATCH_RUNNER_"
ACTIONS: tuple[Action, ...] = get_args(Action)[1:]
CONFIG = Option(
    name="config",
    group=RUN,
    meaning="YAML file of settings; a flag beats it, it beats the environment",
    aliases=(),
    kind=str,
    expected="text",
    default="",
    shown="none",
    secret=False,
)
CHECK = msgspec.structs.replace(CONFIG, name="check_backend", group=SANDBOX, meaning="", expected="a backend's name")
"""An action's flag that has a value: the backend."""


def run_options() -> tuple[Option, ...]:
    """The settings as options, in the order of the definition."""
    return options_of(RunSettings)


def load_settings(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[RunSettings, Action]:
    """Command line (without the program's name) and environment -> what is to be done, and how.

    Reads the `--config` file. For an action other than `run` settings are read but not checked against each other.
    """
    values, action = read_sources(argv, environ, run_options(), ACTIONS, PREFIX)
    settings = RunSettings(**values)
    if action == "check_backend":
        _check_sandbox(settings)
    return (agreed(settings) if action == "run" else settings), action


def read_sources(
    argv: Sequence[str],
    environ: Mapping[str, str],
    options: Sequence[Option],
    actions: Sequence[Action],
    prefix: str,
) -> tuple[dict[str, Any], Action]:
    """Typed values by name of a program with these options, and what it is to do."""
    flags, asked = read_flags(argv, *_with_check([*options, CONFIG], actions))
    flags, asked = _as_backend(flags, asked, options)
    action: Action = next((each for each in actions if each in asked), "run")
    sources = read_all(flags, CONFIG, options, environ, prefix)
    return merge([_as_meant(given) for given in source] for source in sources), action


def _with_check(options: Sequence[Option], actions: Sequence[Action]) -> tuple[list[Option], list[Action]]:
    """What flags there are, with a value and without."""
    plain = [action for action in actions if action != CHECK.name]
    return [*options, *([CHECK] if CHECK.name in actions else [])], plain


def _as_backend(flags: Sequence[Given], asked: set[str], options: Sequence[Option]) -> tuple[list[Given], set[str]]:
    """`--check_backend NAME` asks for that action, and is the setting `container_backend`."""
    if not any(given.option is CHECK for given in flags):
        return list(flags), asked
    backend = by_name(options)["container_backend"]
    meant = [Given(backend, given.value, given.origin) if given.option is CHECK else given for given in flags]
    return meant, {*asked, CHECK.name}


def _as_meant(given: Given) -> Given:
    if given.option.name == "network":  # YAML reads a bare `on` as true, and docker calls it `default`
        words = {True: "on", False: "none", "default": "on"}
        meant = words.get(given.value, given.value) if isinstance(given.value, bool | str) else given.value
        return Given(given.option, meant, given.origin)
    if given.option.name == "container_backend" and isinstance(given.value, dict):
        raise UsageProblem(f"{given.origin}: expected the name of a backend, got a mapping")
    if given.option.name != "mcp_servers":
        return given
    value = read_mapping(given) if isinstance(given.value, str) else given.value
    return Given(given.option, as_meant(clean(value)), given.origin)


Settings = TypeVar("Settings", bound=RunSettings)


def agreed(settings: Settings) -> Settings:
    """Settings that agree with each other, the run's name filled in. Raises UsageProblem."""
    for check in (_check_input, _check_model, _check_sandbox):
        check(settings)
    check_servers(settings.mcp_servers)
    return msgspec.structs.replace(
        settings,
        run_name=_run_name(settings),
        keep_no_reasoning=settings.keep_no_reasoning or settings.reasoning_disabled,
    )


def refuse(wrong: bool, message: str) -> None:
    """Raises UsageProblem if so."""
    if wrong:
        raise UsageProblem(message)


def _check_input(settings: RunSettings) -> None:
    given = [name for name in settings.SOURCES if getattr(settings, name)]
    flags = [settings.SOURCES[name].partition(" ")[0] for name in given]
    refuse(len(given) > 1, f"{' and '.join(flags)}: give one of them")
    refuse(settings.finalize and bool(settings.prompt), "finalize works on a run's files: it takes no prompt")
    refuse(settings.finalize and settings.dry_run, "finalize and dry_run exclude each other")
    refuse(settings.verbose and settings.quiet, "verbose and quiet exclude each other")
    refuse(len(settings.retry) > 1 and "none" in settings.retry, "retry: none stands alone")
    refuse(not settings.retry, "retry: expected at least one of none, failed, timeout, incomplete, all")
    refuse(not settings.output_format, "output_format: expected at least one of sharegpt, json, jsonl, turns")
    missing = not settings.finalize and not any(getattr(settings, name).strip() for name in given)
    refuse(missing, f"no prompts: give {' or '.join(settings.SOURCES.values())}")


def _check_model(settings: RunSettings) -> None:
    refuse(not settings.model and not settings.finalize, "no model: give --model NAME")
    warm = settings.deterministic and bool(settings.temperature)
    refuse(warm, f"deterministic sends temperature 0: leave out temperature {settings.temperature}")
    effort = settings.reasoning_disabled and settings.reasoning_effort not in {None, "none"}
    refuse(effort, "reasoning_disabled and reasoning_effort exclude each other")
    for name in URLS:
        wrong = urlsplit(getattr(settings, name) or "http:").scheme not in {"http", "https"}
        refuse(wrong, f"{name}: expected a URL that starts with http:// or https://")
    refuse_one_price(settings.price_in, settings.price_out)


def refuse_one_price(price_in: float | None, price_out: float | None) -> None:
    """Raises UsageProblem for one without the other."""
    refuse((price_in is None) != (price_out is None), "price_in and price_out belong together: give both")


def _check_sandbox(settings: RunSettings) -> None:
    for name, what in {"network": "on, none or a network's name", "container_user": "NAME or UID[:GID]"}.items():
        given = getattr(settings, name)
        wrong = given and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*" + "(:[0-9]+)?" * (name != "network"), given)
        refuse(bool(wrong), f"{name}: expected {what}, got {given!r}")
    wrong = settings.gpus and not re.fullmatch(r"all|[1-9][0-9]{0,3}|device=[^,\s]+(,[^,\s]+)*", settings.gpus)
    refuse(bool(wrong), f"gpus: expected all, a number or device=ID,ID, got {settings.gpus!r}")
    for name in settings.env_allow:
        refuse(not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name), f"env_allow: {name!r} is no variable's name")
        refuse(name in HELD, f"env_allow: {name}: {IS_HELD}")
    for volume in settings.volumes:
        shape = re.fullmatch(r"[^:]+:/[^:]*(:ro|:rw)?", volume)
        refuse(shape is None, f"volumes: expected HOST:/SANDBOX or HOST:/SANDBOX:ro, got {volume!r}")


def _run_name(settings: RunSettings) -> str:
    """The run's name, wherever it comes from, checked."""
    name = settings.run_name
    if settings.output:
        if settings.output_dir != "data":
            raise UsageProblem("output is the run directory itself: leave out output_dir")
        last = Path(os.path.abspath(run_directory(settings))).name  # noqa: PTH100 - resolve() would follow links
        if name and name != last:
            raise UsageProblem(f"output ends in {last!r} but run_name is {name!r}: leave out one of them")
        name = last
    elif not name and settings.prompt and not settings.resume and not settings.finalize:
        name = f"prompt-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}"[:-3] + "Z"
    refuse(not name, "no run_name: give --run_name NAME (or --output DIRECTORY)")
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", name) or name in {".", ".."}:
        raise UsageProblem(f"run_name: expected one path component of [A-Za-z0-9._-], got {name[:60]!r}")
    return name


def at_once(settings: RunSettings) -> int:
    """Rows that run at the same time: each has one sandbox from its start to its end."""
    return min(settings.concurrency, settings.max_sandboxes or settings.concurrency)


def run_directory(settings: RunSettings) -> Path:
    """Where the run's files are."""
    if not settings.output:
        return Path(settings.output_dir) / settings.run_name
    if settings.output.endswith(".jsonl"):
        if "jsonl" not in settings.output_format:
            raise UsageProblem(f"output {settings.output}: a .jsonl file needs output_format=jsonl")
        return Path(settings.output.removesuffix(".jsonl"))
    return Path(settings.output)


def records_file(settings: RunSettings) -> Path | None:
    """The one file of `output_format=jsonl` that was asked for by name."""
    return Path(settings.output) if settings.output.endswith(".jsonl") else None


def _unchanged(text: str) -> str:
    return text


def for_the_record(settings: RunSettings, redact: Callable[[str], str] = _unchanged) -> dict[str, Any]:
    """The settings as plain values for run.json, in the order of the definition: no key, no user:password of a URL;
    `redact` goes over every text."""
    options = options_of(type(settings))
    shown = {option.name: getattr(settings, option.name) for option in options if not option.secret}
    shown.update({name: without_user(getattr(settings, name)) for name in URLS})
    shown["mcp_servers"] = servers.for_the_record(settings.mcp_servers)
    return {name: _redacted(value, redact) for name, value in shown.items()}


def recorded(manifest: Mapping[str, Any], kind: type[RunSettings] = RunSettings) -> RunSettings:
    """The settings that run.json holds. UsageProblem if they are none."""
    try:
        return msgspec.convert(manifest["settings"], kind)
    except (KeyError, msgspec.ValidationError) as error:
        raise UsageProblem(f"run.json is damaged: settings: {error}") from error


def _redacted(value: Any, redact: Callable[[str], str]) -> Any:
    if isinstance(value, tuple | list):
        return [_redacted(each, redact) for each in value]
    if isinstance(value, dict):
        return {name: _redacted(each, redact) for name, each in value.items()}
    return redact(clean(value)) if isinstance(value, str) else value


def without_user(url: str) -> str:
    """The URL without user and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if "@" in parts.netloc else url


ONCE_ONLY = {"resume", "finalize", "dry_run", "steal_lock"}


def resume_command(settings: RunSettings, argv: Sequence[str], program: str = "python batch_runner.py") -> str:
    """The shell command that goes on with this run: the flags of `argv` without keys, and `--resume`. Without `argv`
    (settings that did not come from a command line) flags for all that is not as it is by default.

    The dataset is named as the settings have it: a copy in the run directory, of stdin or a pipe, by its own name. So
    is a run name that was made up.
    """
    options = options_of(type(settings))
    flags = read_flags(argv, *_with_check([*options, CONFIG], ACTIONS))[0] if argv else _departures(settings, options)
    lasting = [given for given in flags if given.option.name not in ONCE_ONLY and not given.option.secret]
    words = [_as_flag(given, settings) for given in lasting]
    given_names = {given.option.name for given in flags}
    if settings.prompt and not given_names & {"run_name", "output"}:
        words.append(f"--run_name={settings.run_name}")
    if "dataset_file" not in given_names and settings.dataset_file == str(run_directory(settings) / "dataset.jsonl"):
        words.append(f"--dataset_file={settings.dataset_file}")
    return " ".join([program, *(shlex.quote(word) for word in [*words, "--resume"])])


def _departures(settings: RunSettings, options: Sequence[Option]) -> list[Given]:
    usual = type(settings)()
    values = [(option, getattr(settings, option.name)) for option in options]
    return [
        Given(option, _flag_value(value), f"--{option.name}")
        for option, value in values
        if value != getattr(usual, option.name)
    ]


def _flag_value(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, dict):
        return msgspec.json.encode(servers.for_the_record(value)).decode()
    return str(value).lower() if isinstance(value, bool) else str(value)


def _as_flag(given: Given, settings: RunSettings) -> str:
    name, value = given.option.name, str(given.value)
    if name == "dataset_file":
        value = settings.dataset_file
    if given.option.is_flag and value == "true":
        return f"--{name}"
    return f"--{name}={without_user(value) if name in URLS else value}"
