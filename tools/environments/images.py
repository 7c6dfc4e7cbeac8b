"""What is said of images, whoever pulls them: by registries for good, and of the machines they are for. A leaf."""

import re
from collections.abc import Mapping
from typing import Any

PULL_SECONDS = 600.0  # that a pull or a build may take
REFUSED = re.compile(
    r"not found|(manifest|name) unknown|not known|denied|unauthorized|authentication required|does not exist"
    r"|no basic auth credentials|invalid (reference|repository)|must be lower|no matching manifest",
    re.IGNORECASE,
)
"""What registries, and engines for them, say of an image that cannot be had."""
_RATE_LIMIT = re.compile(r"toomanyrequests|rate limit", re.IGNORECASE)
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "i686": "386", "i386": "386", "armv7l": "arm", "armv6l": "arm"}
FOREIGN = re.compile("exec format error", re.IGNORECASE)
"""What a kernel says of a program for another kind of processor, or of a file that is none."""


def is_refusal(trouble: str) -> bool:
    """Whether a registry said of an image what another try will not change."""
    return bool(REFUSED.search(trouble) and not _RATE_LIMIT.search(trouble))


def platform_of(known: Mapping[str, Any]) -> str:
    """OS/ARCHITECTURE of an image or of an engine, in the words of images; "" where that is not said."""
    machine = str(known.get("Architecture") or "")
    system = str(known.get("Os") or known.get("OSType") or "")
    return f"{system}/{_MACHINES.get(machine, machine)}" if machine and system else ""


def for_another(machine: str) -> str:
    """Says of an image why its shell is no program for that machine, and what to do."""
    return f"it is no program for {machine}: take an image for that, or install emulation (binfmt)"
