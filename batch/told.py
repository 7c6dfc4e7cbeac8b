"""From settings to what each layer is told: the model and its requests, the tools, the backend, every rollout."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from agent.catalog import Sources
from agent.models.options import RequestOptions
from agent.models.providers import Target, resolve_targets
from agent.models.table import ModelSpec, is_local
from agent.outcome import RolloutPolicy
from agent.types import Message
from batch.settings import RunSettings
from tools.environments.base import BackendSettings, Limits
from tools.errors import UsageProblem
from tools.services import ToolSettings
from tools.toolsets import BUILT_IN, Catalog


def model_spec(settings: RunSettings, environ: Mapping[str, str]) -> ModelSpec:
    """The model and its fallbacks with their endpoints and the names of their keys."""
    return ModelSpec(model=settings.model, targets=_targets(settings, environ), options=request_options(settings))


def _targets(settings: RunSettings, environ: Mapping[str, str]) -> tuple[Target, ...]:
    if is_local(settings.model):
        return ()
    fallbacks = settings.fallback_model[: settings.max_fallback_attempts]
    return resolve_targets(
        settings.model, settings.provider, settings.base_url, settings.api_key, fallbacks, environ=environ
    )


def request_options(settings: RunSettings) -> RequestOptions:
    """The settings that shape requests."""
    names = [field.name for field in msgspec.structs.fields(RequestOptions)]
    given = {name: getattr(settings, name) for name in names}
    if settings.deterministic:
        given["temperature"] = 0.0
    return RequestOptions(**given)


def tool_settings(settings: RunSettings, directory: Path) -> ToolSettings:
    """What the run decides for its tools."""
    return ToolSettings(
        search_provider=settings.search_provider or "",
        search_url=settings.search_url,
        allow_private_urls=settings.allow_private_urls,
        browser_program=settings.browser_program,
        sees=settings.vision_model or ("" if is_local(settings.model) else settings.model),
        image_model=settings.image_model,
        image_base_url=settings.image_base_url,
        context_window=settings.context_window or 0,
        artifacts=str(directory / "artifacts"),
    )


def backend_settings(settings: RunSettings) -> BackendSettings:
    """What backends are told."""
    return BackendSettings(
        network=settings.network,
        pull_policy=settings.pull_policy,
        container_user=settings.container_user,
        read_only_root=settings.read_only_root,
        gpus=settings.gpus,
        ssh_hosts=settings.ssh_hosts,
        ssh_key=settings.ssh_key,
        ssh_known_hosts=settings.ssh_known_hosts,
        ssh_capacity=settings.ssh_capacity,
        singularity_cache=settings.singularity_cache,
    )


def rollout_policy(
    settings: RunSettings,
    environ: Mapping[str, str],
    tools: ToolSettings = ToolSettings(),  # noqa: B008 - frozen
    catalog: Catalog = BUILT_IN,
    sources: Sources = Sources(),  # noqa: B008 - as above
) -> RolloutPolicy:
    """The settings that shape rollouts."""
    return RolloutPolicy(
        seed=settings.seed,
        send_seed=settings.deterministic or settings.samples_per_prompt > 1,
        distribution=settings.distribution,
        enabled_toolsets=settings.enabled_toolsets,
        disabled_toolsets=settings.disabled_toolsets,
        max_turns=settings.max_turns,
        timeout=settings.timeout,
        ephemeral_system_prompt=settings.ephemeral_system_prompt,
        prefill=read_prefill(settings.prefill_messages_file),
        parse_text_tool_calls=settings.parse_text_tool_calls,
        image=settings.image,
        cwd=settings.cwd,
        limits=Limits(cpus=settings.cpus, memory_mb=settings.memory_mb, network=settings.network),
        volumes=settings.volumes,
        variables={name: environ[name] for name in settings.env_allow if name in environ},
        command_timeout=settings.command_timeout,
        keep_no_reasoning=settings.keep_no_reasoning,
        keep_unknown_tools=settings.keep_unknown_tools,
        max_attempts=settings.max_attempts,
        tools=tools,
        lacking=dict(catalog.lacking),
        sources=sources,
    )


class _Prefill(Struct, forbid_unknown_fields=True):
    role: str
    content: str


def read_prefill(file: str) -> tuple[Message, ...]:
    """The messages of a prefill file: a JSON array of {role: user or assistant, content}."""
    if not file:
        return ()
    try:
        given = msgspec.json.decode(Path(file).read_bytes(), type=list[_Prefill])
    except OSError as error:
        raise UsageProblem(f"prefill_messages_file {file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise UsageProblem(f"prefill_messages_file {file}: not a JSON array of {{role, content}}: {error}") from error
    try:
        return msgspec.convert([msgspec.structs.asdict(each) for each in given], type=tuple[Message, ...])
    except msgspec.ValidationError as error:
        raise UsageProblem(f"prefill_messages_file {file}: {error}") from error
