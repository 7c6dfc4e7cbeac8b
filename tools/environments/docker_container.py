"""What a container is asked to be: the body of the engine's containers/create, made of the spec and the settings.

The engine's API: https://docs.docker.com/reference/api/engine/.
"""

import io
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.environments.base import DEFAULT_IMAGE, BackendSettings, EnvironmentSpec, Limits
from tools.environments.owner import LABEL, encode
from tools.errors import SandboxRefused

DEFAULT_CWD = "/workspace"
PRIVATE = "/.batch-runner"  # a tmpfs for the channels' own files
RUN, TASK, DEADLINE = (f"batch-runner.{key}" for key in ("run", "task", "deadline"))
_WRITABLE = ("/tmp", "/var/tmp", "/run")  # noqa: S108 - of the container, where its root is read-only
# The main process answers what we have to know of the image, then waits for the end of its stdin. Signals that a
# command sends to every `sh` it sees are not for it.
_MAIN = f"""\
trap '' HUP INT TERM
[ -d "$HOME" ] || HOME=/; [ -w "$HOME" ] || HOME={DEFAULT_CWD}; t=/tmp; [ -d "$t" ] || t={PRIVATE}
echo "$HOME"; echo "$t"; command -v cat || echo; echo ready
while read -r _; do :; done"""


def container_config(spec: EnvironmentSpec, settings: BackendSettings) -> dict[str, Any]:
    """The body of containers/create: the main process is a shell that reads its stdin, which ends with us.

    Raises SandboxRefused for what cannot be meant.
    """
    return {
        "Image": spec.image or DEFAULT_IMAGE,
        "Entrypoint": ["/bin/sh"],
        "Cmd": ["-c", _MAIN],
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "OpenStdin": True,
        "StdinOnce": True,
        "WorkingDir": DEFAULT_CWD,  # the engine makes it
        "Healthcheck": {"Test": ["NONE"]},
        "StopTimeout": 1,
        "Labels": {
            RUN: spec.owner.run_id,
            TASK: spec.task_id,
            LABEL: encode(spec.owner),
            DEADLINE: f"{spec.deadline:.0f}",
        },
        **({"User": settings.container_user} if settings.container_user else {}),
        "HostConfig": {
            **_limits(spec.limits),
            **_gpus(settings.gpus),
            "Init": True,
            "AutoRemove": True,
            "LogConfig": {"Type": "none"},
            "SecurityOpt": ["no-new-privileges"],
            **_places(spec, read_only_root=settings.read_only_root),
        },
    }


def _limits(limits: Limits) -> dict[str, Any]:
    memory = limits.memory_mb * 1024 * 1024
    return {
        "NanoCpus": round(limits.cpus * 1e9),
        "Memory": memory,
        "MemorySwap": memory,
        "PidsLimit": limits.pids,
        "NetworkMode": "default" if limits.network == "on" else limits.network,
    }


def _gpus(wanted: str) -> dict[str, Any]:
    """`all`, a number, or `device=ID,ID`, as for `docker run --gpus`."""
    if not wanted:
        return {}
    request: dict[str, Any] = {"Driver": "", "Capabilities": [["gpu"]]}
    if devices := wanted.removeprefix("device=") if wanted.startswith("device=") else "":
        return {"DeviceRequests": [{**request, "Count": 0, "DeviceIDs": devices.split(",")}]}
    if wanted != "all" and not re.fullmatch(r"[1-9][0-9]{0,3}", wanted):
        raise SandboxRefused(f"gpus {wanted!r}: all, a number or device=ID,ID expected")
    return {"DeviceRequests": [{**request, "Count": -1 if wanted == "all" else int(wanted)}]}


def _places(spec: EnvironmentSpec, *, read_only_root: bool) -> dict[str, Any]:
    """What is mounted. With a read-only root the workspace is a volume of the container's own, which goes with it."""
    mounts = [mount_of(volume) for volume in spec.volumes]
    tmpfs = {PRIVATE: "rw,exec,mode=1777,size=64m"}
    if read_only_root:
        taken = {mount["Target"] for mount in mounts}
        mounts += [{"Type": "volume", "Target": path} for path in (DEFAULT_CWD,) if path not in taken]
        tmpfs |= {path: "rw,exec,mode=1777" for path in _WRITABLE if path not in taken}
    return {"ReadonlyRootfs": read_only_root, "Mounts": mounts, "Tmpfs": tmpfs}


def mount_of(volume: str) -> dict[str, Any]:
    """HOST:SANDBOX[:ro] as a bind mount, whose source has to exist. Raises SandboxRefused."""
    source, separator, rest = volume.partition(":")
    target, _, mode = rest.partition(":")
    if not separator or not target.startswith("/") or mode not in ("", "ro", "rw"):
        raise SandboxRefused(f"volume {volume!r}: HOST:SANDBOX[:ro] expected, SANDBOX an absolute path")
    return {
        "Type": "bind",
        "Source": str(Path(source).expanduser().absolute()),
        "Target": target,
        "ReadOnly": mode == "ro",
    }


def refuse_without_limits(name: str, info: Mapping[str, Any]) -> None:
    """Raises SandboxRefused where the engine would drop a limit and start the container all the same."""
    flags = {"memory": "MemoryLimit", "cpu": "CpuCfsQuota", "process": "PidsLimit"}
    missing = [limit for limit, flag in flags.items() if info.get(flag) is False]
    if missing:
        limits = ", ".join(missing)
        raise SandboxRefused(f"{name} cannot limit a container here ({limits}): see {name} info, cgroups")


def refuse_without_gpus(name: str, info: Mapping[str, Any], wanted: str) -> None:
    """Raises SandboxRefused where the engine has none to hand in, or would drop the request."""
    if not wanted:
        return
    if name != "docker":
        raise SandboxRefused(f"gpus: {name} takes no GPUs by this API: choose docker")
    found = [str(device.get("ID")) for device in info.get("DiscoveredDevices") or []]
    if "nvidia" not in (info.get("Runtimes") or {}) and not any(each.startswith("nvidia.com/gpu") for each in found):
        raise SandboxRefused(
            "gpus: docker has no nvidia runtime: install nvidia-container-toolkit on the engine's machine, then"
            " nvidia-ctk runtime configure --runtime=docker and restart docker"
        )


def is_for_root(spec: EnvironmentSpec, user: str) -> bool:
    """Whether /workspace may be left as the engine makes it: for root. A volume there is never touched."""
    mounted = any(volume.split(":")[1:2] == [DEFAULT_CWD] for volume in spec.volumes)
    return mounted or user.partition(":")[0] in ("root", "0")


def writable_workspace() -> bytes:
    """A tar archive of a workspace that everybody may write to, for images that run as an ordinary user."""
    entry = tarfile.TarInfo(DEFAULT_CWD.strip("/"))
    entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(entry)
    return archive.getvalue()
