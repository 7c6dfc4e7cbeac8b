"""What must never be written: the keys in use, and what the environment or a URL holds beside them."""

from collections.abc import Mapping, Sequence

from agent.models.table import ModelSpec
from agent.text import Redactor, secrets_from
from tools.services import IMAGE_KEY, SEARCH_KEY, ToolSettings


def redactor_for(
    models: Sequence[ModelSpec],
    environ: Mapping[str, str],
    tools: ToolSettings = ToolSettings(),  # noqa: B008 - frozen
) -> tuple[Redactor, list[str]]:
    """The redactor of a run with these models, and the names of keys that are too short to be told from other text."""
    targets = [target for spec in models for target in spec.targets]
    names = {SEARCH_KEY, IMAGE_KEY, *(target.key_variable for target in targets)}
    urls = {f"BASE_URL_{number}": target.base_url for number, target in enumerate(targets)}
    urls.update(SEARCH_URL=tools.search_url, IMAGE_BASE_URL=tools.image_base_url)
    secrets, short = secrets_from({**urls, **environ}, {name: environ[name] for name in names if name in environ})
    return Redactor(secrets), short
