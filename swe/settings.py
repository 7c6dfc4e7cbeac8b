"""The settings of a SWE run: those of every run, with what belongs to tasks and instances.

The same definition serves flags, YAML, environment (`MINI_SWE_RUNNER_<SETTING>`), help, manifest and README.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from agent.text import clean
from batch.options import Option, about, options_of
from batch.settings import (
    CONFIG,
    INPUT,
    OUTPUT,
    RUN,
    TOOLS,
    Action,
    Positive,
    RunSettings,
    agreed,
    read_sources,
    refuse,
)
from swe.instances import is_file
from tools.errors import UsageProblem

INSTANCES, PATCHES = "SWE-bench", "Patches and predictions"

PredsFormat = Literal["jsonl", "json"]
Subset = Literal["lite", "verified", "full", "multilingual"]

EVALUATION_SECONDS = 1800.0
_CHOICES = ("split", "filter", "slice", "instance_ids")


class SweSettings(RunSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a SWE run can be told. See `RunSettings`."""

    SOURCES: ClassVar[Mapping[str, str]] = {
        "prompt": "--task TEXT",
        "dataset_file": "--prompts_file FILE",
        "dataset": "--dataset NAME_OR_FILE",
    }

    dataset: Annotated[
        str, about(INSTANCES, "instances: a .json, .jsonl or .parquet file, mini-swe-bench, or a Hugging Face name")
    ] = ""
    split: Annotated[str, about(INSTANCES, "split of the dataset", shown="test; of a file, all")] = ""
    subset: Annotated[Subset | None, about(INSTANCES, "which of the published SWE-bench data sets", shown="none")] = (
        None
    )
    filter: Annotated[str, about(INSTANCES, "only instances whose id this regular expression matches")] = ""
    slice: Annotated[str, about(INSTANCES, "only instances a:b of those, as Python counts", shown="all")] = ""
    instance_ids: Annotated[tuple[str, ...], about(INSTANCES, "only these instances")] = ()
    image_template: Annotated[
        str,
        about(
            INSTANCES,
            "name of an instance's image if it names none itself",
            shown="swebench/sweb.eval.x86_64.{id_docker}:latest",
        ),
    ] = ""
    prefetch: Annotated[bool, about(INSTANCES, "pull all rows' images before the first model call")] = False
    repo_cache: Annotated[
        str, about(INSTANCES, "no images: directory of bare repositories, from which instances are checked out")
    ] = ""
    evaluate: Annotated[bool, about(INSTANCES, "run the instances' own tests on the patches afterwards")] = False
    evaluation_timeout: Annotated[
        Positive | None, about(INSTANCES, "seconds for one instance's tests", shown="the run's own, else 1800")
    ] = None

    exclude: Annotated[
        tuple[str, ...],
        about(
            PATCHES,
            "patterns of files that patches leave out, such as tests/** or, at the top, /x.py (git's pathspecs)",
        ),
    ] = ()
    preds_format: Annotated[
        tuple[PredsFormat, ...], about(PATCHES, "all_preds.jsonl is always written; json adds preds.json")
    ] = ("jsonl",)
    validate_predictions: Annotated[
        str, about(PATCHES, "check this file of predictions (against --dataset, if given); no run")
    ] = ""
    output_file: Annotated[str, about(PATCHES, "write the merged rows into this file too")] = ""

    prompt: Annotated[str, about(INPUT, "one task on the command line; the answer goes to stdout", "task")] = ""
    dataset_file: Annotated[
        str,
        about(
            INPUT,
            "tasks, a line each: JSON with `prompt` or `task`, or plain text; - is stdin",
            "prompts_file",
            "input",
            shown="none",
        ),
    ] = ""
    run_name: Annotated[
        str,
        about(
            OUTPUT, "names the run: one path component of [A-Za-z0-9._-]", shown="of output, output_file or the time"
        ),
    ] = ""
    keep_no_reasoning: Annotated[
        bool, about(OUTPUT, "keep samples without reasoning in any turn: what counts here is the patch")
    ] = True
    max_turns: Annotated[
        Annotated[int, Meta(ge=1, le=10_000)], about(RUN, "model calls per task", "max_iterations", "max_steps")
    ] = 100
    enabled_toolsets: Annotated[tuple[str, ...], about(TOOLS, "the terminal alone")] = ("terminal",)
    disabled_toolsets: Annotated[tuple[str, ...], about(TOOLS, "its companion")] = ("process",)


PREFIX = "MINI_SWE_RUNNER_"
ACTIONS: tuple[Action, ...] = ("help", "version", "list_backends", "list_providers")
LEFT_OUT = frozenset(
    {
        *("distribution", "enabled_toolsets", "disabled_toolsets", "allow_missing_toolsets", "spread"),
        *("search_provider", "search_url", "search_api_key", "allow_private_urls", "browser_program"),
        *("vision_model", "vision_base_url", "vision_api_key", "image_model", "image_base_url", "image_api_key"),
        *("tools_module", "mcp_servers"),
        "prefetch_images",  # what `prefetch` does, but for the refusal
    }
)
"""Settings of other runs that have no meaning where the tool is the terminal, or another name."""


def swe_options() -> tuple[Option, ...]:
    """The settings as options: what is SWE's own first."""
    inherited = {item.name for item in msgspec.structs.fields(RunSettings)}
    shown = [option for option in options_of(SweSettings) if option.name not in LEFT_OUT]
    return (*sorted(shown, key=lambda option: option.name in inherited), CONFIG)


def load_settings(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[SweSettings, Action]:
    """Command line and environment -> what is to be done, and how. See `batch.settings.load_settings`."""
    values, action = read_sources(argv, environ, swe_options()[:-1], ACTIONS, PREFIX)
    settings = SweSettings(**values)
    if action != "run":
        return settings, action
    for name in _CHOICES:
        refuse(name in values and not values[name], f"{name} is empty: leave it out to choose all")
    settings = msgspec.structs.replace(
        settings, dataset=_dataset_of(settings), repo_cache=_absolute(settings.repo_cache)
    )
    _check(settings)
    if settings.validate_predictions:
        return settings, action
    return agreed(msgspec.structs.replace(settings, run_name=_run_name(settings))), action


def _dataset_of(settings: SweSettings) -> str:
    """A subset alone says enough. A file is the same one for whoever evaluates the run later, from wherever."""
    name = settings.dataset or settings.subset or ""
    return _absolute(name) if name and is_file(name) else name


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else ""


def _check(settings: SweSettings) -> None:
    chosen = [name for name in _CHOICES if getattr(settings, name)]
    for name in [*chosen, *(name for name in ("evaluate", "repo_cache") if getattr(settings, name))]:
        needless = settings.dataset or (settings.finalize and name == "evaluate")
        refuse(not needless, f"{name} is for instances: give --dataset NAME_OR_FILE")
    try:
        re.compile(settings.filter)
    except re.error as error:
        raise UsageProblem(f"filter: {settings.filter!r} is no regular expression ({error})") from error
    for pattern in settings.exclude:
        refuse(not _names_files(pattern), f"exclude: {pattern!r} names nothing in the repository")


def _names_files(pattern: str) -> bool:
    """Whether a pattern, without the `/` that stands for the repository's top, can match something within it."""
    path = pattern.removeprefix("/")
    is_within = bool(path.strip()) and not path.startswith("/") and ".." not in path.split("/")
    return is_within and "\0" not in path and clean(path) == path


def _run_name(settings: SweSettings) -> str:
    """A run without a name is called as the file that is wanted of it."""
    if settings.run_name or settings.output or settings.prompt or not settings.output_file:
        return settings.run_name
    return Path(settings.output_file).name.removesuffix(".jsonl")
