"""From a model's name to the model: `scripted:FILE`, `replay:RUN_DIR`, else an OpenAI-compatible endpoint."""

import os
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from agent.models.base import Gate, Model
from agent.models.options import RequestOptions
from agent.models.providers import Target
from tools.errors import UsageProblem

SCRIPTED = "scripted:"
REPLAY = "replay:"


class ModelSpec(Struct, frozen=True, kw_only=True):
    """Which model a run uses. Crosses process borders: it holds names of variables, never a key.

    `targets` (see `providers.resolve_targets`) are the model and its fallbacks; empty for scripted and replayed ones.
    """

    model: str
    targets: tuple[Target, ...] = ()
    options: RequestOptions = RequestOptions()

    @property
    def keys(self) -> tuple[int, ...]:
        """Keys of each target: what the gate has to know."""
        return tuple(target.keys for target in self.targets) or (1,)


def is_local(model: str) -> bool:
    """Whether a model's name stands for a script or an earlier run: no endpoint, no key."""
    return model.startswith((SCRIPTED, REPLAY))


def heavy_module(model: str) -> str:
    """The module that opening this model imports."""
    kinds = {SCRIPTED: "agent.models.scripted", REPLAY: "agent.models.replay"}
    return next((kinds[kind] for kind in kinds if model.startswith(kind)), "agent.models.openai_chat")


def open_model(spec: ModelSpec, gate: Gate, environ: Mapping[str, str] | None = None) -> Model:
    """The model, in the process that uses it. Its keys are read here, from `environ` or else the process's environment.
    Raises UsageProblem."""
    if spec.model.startswith(SCRIPTED):
        from agent.models.scripted import ScriptedModel, load_script  # noqa: PLC0415 - only the model that is used

        return ScriptedModel(load_script(Path(spec.model.removeprefix(SCRIPTED))), gate, spec.options)
    if spec.model.startswith(REPLAY):
        from agent.models.replay import open_replay  # noqa: PLC0415 - only the model that is used

        return open_replay(Path(spec.model.removeprefix(REPLAY)), gate)
    if not spec.targets:
        raise UsageProblem(f"model {spec.model}: no endpoint; give a provider or a base_url")
    from agent.models.openai_chat import open_chat  # noqa: PLC0415 - openai takes 0.5 s to import

    return open_chat(spec.targets, spec.options, gate, os.environ if environ is None else environ)
