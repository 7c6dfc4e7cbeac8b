"""What must never be written: the keys in use, and what the environment or a URL holds beside them."""

from collections.abc import Mapping

from agent.models.table import ModelSpec
from agent.text import Redactor, secrets_from


def redactor_for(spec: ModelSpec, environ: Mapping[str, str]) -> tuple[Redactor, list[str]]:
    """The redactor of a run, and the names of keys that are too short to be told from other text."""
    names = {target.key_variable for target in spec.targets if target.key_variable}
    urls = {f"BASE_URL_{number}": target.base_url for number, target in enumerate(spec.targets)}
    secrets, short = secrets_from({**urls, **environ}, {name: environ[name] for name in names if name in environ})
    return Redactor(secrets), short
