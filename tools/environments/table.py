"""The backends by name."""

import importlib

from tools.environments.base import Backend, BackendSettings, Lenient
from tools.errors import UsageProblem
from tools.names import nearest

BACKENDS = {
    "bubblewrap": "tools.environments.bubblewrap:BUBBLEWRAP",
    "daytona": "tools.environments.daytona:DAYTONA",
    "docker": "tools.environments.docker:open_docker",
    "local": "tools.environments.local:LOCAL",
    "modal": "tools.environments.modal:MODAL",
    "podman": "tools.environments.docker:open_podman",
    "singularity": "tools.environments.singularity:open_singularity",
    "ssh": "tools.environments.ssh:open_ssh",
}
"""Name to "module:OBJECT"; what can be called makes a backend of the settings."""

ENGINES = ("docker", "podman")
_DEFAULTS = BackendSettings()


def load_backend(name: str, settings: BackendSettings = _DEFAULTS) -> Backend:
    """Raises UsageProblem for a name that is none, with the nearest ones."""
    if name not in BACKENDS:
        near = nearest(name, BACKENDS, most=2) or sorted(BACKENDS)
        raise UsageProblem(f"container_backend {name!r} is unknown: did you mean {' or '.join(near)}?")
    module, _, attribute = BACKENDS[name].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    backend: Backend = found(settings) if callable(found) else found
    return backend


async def resolve_backend(requested: str, wants_image: bool, settings: BackendSettings = _DEFAULTS) -> str:
    """The backend to use. `auto` is docker for images, else bubblewrap, else docker; never one that does not isolate.

    Raises UsageProblem when it cannot be used here, or has no images and one is wanted.
    """
    if requested != "auto":
        refuse_what_it_drops(requested, settings)
        return await _given(requested, wants_image, settings)
    missing = []
    for name in ("docker",) if wants_image else ("bubblewrap", "docker"):
        problem = await load_backend(name, settings).check()
        if not problem:
            refuse_what_it_drops(name, settings)
            return name
        missing.append(problem)
    raise UsageProblem(
        f"no sandbox can be opened here: {'; '.join(missing)}"
        + (
            " (images need docker)"
            if wants_image
            else ". Install one of them, or choose --container_backend=local, which runs commands on this machine"
            " unprotected"
        )
    )


def refuse_what_it_drops(name: str, settings: BackendSettings) -> None:
    """Raises UsageProblem for settings that only engines of containers know."""
    if name in ENGINES:
        return
    names = ("gpus", "pull_policy", "container_user", "read_only_root")
    dropped = [each for each in names if getattr(settings, each) != getattr(_DEFAULTS, each)]
    if settings.network not in ("on", "none"):
        dropped.append(f"network {settings.network}")
    if dropped:
        others = "docker" if dropped[0] == "gpus" else " and ".join(ENGINES)
        raise UsageProblem(f"{', '.join(dropped)}: not with container_backend {name}, only with {others}")


async def _given(name: str, wants_image: bool, settings: BackendSettings) -> str:
    backend = load_backend(name, settings)
    if wants_image and not backend.takes_images:
        others = "choose docker, podman or singularity, or leave the image out"
        raise UsageProblem(f"container_backend {name} takes no images: {others}")
    problem = await (backend.hindrance() if isinstance(backend, Lenient) else backend.check())
    if problem:
        raise UsageProblem(f"container_backend {name}: {problem}")
    return name
