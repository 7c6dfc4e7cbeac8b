"""What the docker command was told of registries: `docker login` and its helper programs.

Formats: config.json, https://docs.docker.com/reference/cli/docker/#configuration-files; the helpers' protocol,
https://github.com/docker/docker-credential-helpers.
"""

import asyncio
import base64
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

_HUB = "https://index.docker.io/v1/"
_HUB_NAMES = ("docker.io", "index.docker.io", "registry-1.docker.io")
_HELPER_SECONDS = 30.0


async def credentials(image: str) -> tuple[dict[str, str], str]:
    """What the engine is to show the image's registry, {} for nothing; and why a helper gave nothing, or "".

    Secrets are in the first only.
    """
    registry, config = _registry(image), _docker_config()
    if helper := _helper(registry, config):
        return await _asked(helper, registry)
    return _kept(registry, config), ""


def _registry(image: str) -> str:
    """As config.json names it."""
    host, _, rest = image.partition("/")
    named = rest and ("." in host or ":" in host or host == "localhost")
    return host if named and host not in _HUB_NAMES else _HUB


def _docker_config() -> dict[str, Any]:
    """The docker command's own settings ($DOCKER_CONFIG or ~/.docker, config.json), or {}."""
    folder = os.environ.get("DOCKER_CONFIG")
    path = (Path(folder) if folder else Path.home() / ".docker") / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return {}
    return config if isinstance(config, dict) else {}


def _helper(registry: str, config: Mapping[str, Any]) -> str:
    """The name after `docker-credential-` of the program that knows the registry, or ""."""
    helpers = config.get("credHelpers")
    names = (registry, *(_HUB_NAMES if registry == _HUB else ()))
    own = next((helpers[name] for name in names if name in helpers), "") if isinstance(helpers, dict) else ""
    name = str(own or config.get("credsStore") or "")
    return name if re.fullmatch(r"[A-Za-z0-9._-]+", name) else ""


async def _asked(helper: str, registry: str) -> tuple[dict[str, str], str]:
    program = f"docker-credential-{helper}"
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            "get",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:
        return {}, f"{program}: {error.strerror}"
    try:
        async with asyncio.timeout(_HELPER_SECONDS):
            answer, _ = await process.communicate(registry.encode() + b"\n")
    except TimeoutError:
        return {}, f"{program}: no answer within {_HELPER_SECONDS:g} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:  # also for a registry that it does not know
        return {}, f"{program}: it has nothing for {registry}, or failed with exit code {process.returncode}"
    return _answered(answer) or ({}, f"{program}: its answer is not as it should be")


def _answered(answer: bytes) -> tuple[dict[str, str], str] | None:
    try:
        found = msgspec.json.decode(answer, type=dict[str, str])
        user, secret = found["Username"], found["Secret"]
    except (msgspec.DecodeError, KeyError):
        return None
    return ({"identitytoken": secret} if user == "<token>" else {"username": user, "password": secret}), ""


def _kept(registry: str, config: Mapping[str, Any]) -> dict[str, str]:
    """What `auths` holds; its names may be addresses."""
    auths = config.get("auths")
    named = {**auths} if isinstance(auths, dict) else {}
    entry = named.get(registry) or next((named[name] for name in named if _host(name) == registry), None)
    if not isinstance(entry, dict):
        return {}
    if token := entry.get("identitytoken"):
        return {"identitytoken": str(token)}
    user, separator, password = _decoded(entry.get("auth")).partition(":")
    return {"username": user, "password": password} if separator else {}


def _host(name: str) -> str:
    host = re.sub(r"^https?://", "", name).partition("/")[0]
    return _HUB if host in _HUB_NAMES else host


def _decoded(text: object) -> str:
    try:
        return base64.b64decode(str(text)).decode()
    except ValueError:
        return ""
