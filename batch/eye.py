"""The model that answers questions about pictures, where the run has one apart from its own."""

from collections.abc import Mapping

from agent.models.gate import RunGate
from agent.models.options import RequestOptions
from agent.models.providers import Target, resolve_beside
from agent.models.table import ModelSpec, is_local, open_model
from agent.pricing import price_of
from batch.settings import RunSettings
from tools.errors import UsageProblem

VISION_KEY = "BATCH_RUNNER_VISION_API_KEY"
"""The variable that carries a key given as a setting to the processes that use it."""


def eye_spec(settings: RunSettings, own: ModelSpec, environ: Mapping[str, str]) -> ModelSpec | None:
    """That model; None where the run's `own` model sees, or nothing does. Raises UsageProblem, also for a script that
    is none."""
    if not (settings.vision_model or settings.vision_base_url or settings.vision_api_key):
        return None
    model = settings.vision_model or settings.model
    if not settings.vision_model and is_local(model):
        raise UsageProblem("vision_base_url, vision_api_key: give vision_model too; the run's own model sees nothing")
    if is_local(model):
        spec = ModelSpec(model=model, options=_options(settings, model))
        open_model(spec, RunGate())  # reads the script
        return spec
    main = own.targets[0] if own.targets else None
    target = _target(settings, model, main, environ)
    if target == main:
        return None
    return ModelSpec(model=target.model, targets=(target,), options=_options(settings, target.model))


def _target(settings: RunSettings, model: str, main: Target | None, environ: Mapping[str, str]) -> Target:
    elsewhere = settings.vision_base_url != settings.base_url
    try:
        return resolve_beside(
            model,
            settings.vision_base_url if elsewhere else "",
            settings.vision_api_key,
            main=main,
            main_key=settings.api_key,
            environ=environ,
            key_variable=VISION_KEY,
        )
    except UsageProblem as problem:
        raise UsageProblem(f"vision_model {model}: {problem}") from problem


def _options(settings: RunSettings, model: str) -> RequestOptions:
    """The run's prices are for the run's model: here they stand in where the table has none."""
    known = price_of(model) is not None
    return RequestOptions(
        temperature=0.0 if settings.deterministic else None,
        request_timeout=settings.request_timeout,
        request_retries=settings.request_retries,
        price_in=None if known else settings.price_in,
        price_out=None if known else settings.price_out,
    )
