"""run.json: what a run is, and every invocation that worked on it. Pure.

`settings`, `dataset`, `versions`, `backend` are those of the latest invocation; each invocation keeps what it changed.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from tools.errors import UsageProblem

FORMAT = 1

FIXED = (
    "model",
    "fallback_model",
    "vision_model",
    "image_model",
    "distribution",
    "enabled_toolsets",
    "disabled_toolsets",
    "tools_module",
    "mcp_servers",
    "ephemeral_system_prompt",
    "prefill_messages_file",
    "max_tokens",
    "context_window",
    "temperature",
    "top_p",
    "reasoning_effort",
    "reasoning_disabled",
    "deterministic",
    "seed",
    "shuffle",
    "image",
    "cwd",
    "network",
)
"""Settings that decide what the data is: they may not change while a run grows. So too the resolved backend."""


_MADE_OF = ("prefill_sha256", "tools_sha256", "own_toolsets")

Moment = Annotated[datetime, Meta(tz=True)]


class _Entry(Struct):
    started_at: Moment
    seconds: float
    end: str


class _Dataset(Struct):
    path: str


class _Shape(Struct):
    """What is relied on of a manifest that was read back."""

    started_at: Moment
    backend: str
    settings: dict[str, Any]
    dataset: _Dataset
    invocations: Annotated[list[_Entry], Meta(min_length=1)]


def checked(manifest: Any) -> dict[str, Any]:
    """What run.json holds, as it is. msgspec.ValidationError if that is no manifest."""
    msgspec.convert(manifest, _Shape)
    found: dict[str, Any] = manifest
    return found


class Invocation(Struct, frozen=True, kw_only=True):
    """What one start of the program brings. `settings` without secrets; `dataset` is path, size, sha256, rows; times
    are YYYY-MM-DDTHH:MM:SS.mmmZ; `prefill_sha256` and `tools_sha256` are of the content of the prefill file and of the
    module of tools, "" without one; `own_toolsets`: the run's own, with the names of their tools."""

    run_name: str
    settings: Mapping[str, Any]
    dataset: Mapping[str, Any]
    versions: Mapping[str, str]
    backend: str
    started_at: str
    host: str
    prefill_sha256: str = ""
    tools_sha256: str = ""
    own_toolsets: Mapping[str, Sequence[str]] = {}


def differences(manifest: Mapping[str, Any], invocation: Invocation | Mapping[str, Any]) -> list[str]:
    """`name: before -> now`, for everything that may not change and did. What an earlier version did not know is no
    change."""
    given = msgspec.structs.asdict(invocation) if isinstance(invocation, Invocation) else invocation
    before, now = _fixed(manifest), _fixed(given)
    return [
        f"{name}: {before[name][:200]} -> {now[name][:200]}" for name in now if before.get(name, now[name]) != now[name]
    ]


def refuse_changed(changed: Sequence[str]) -> None:
    """UsageProblem that names every one of these differences, if there are any."""
    if changed:
        raise UsageProblem(
            "this run was started otherwise:\n  "
            + "\n  ".join(changed)
            + "\ngive the same settings, another run_name, or --allow_config_change to go on with the new ones"
        )


def begun(manifest: Mapping[str, Any] | None, invocation: Invocation, *, allow_change: bool) -> dict[str, Any]:
    """The manifest with one more invocation. UsageProblem names every difference that is not allowed."""
    changed = differences(manifest, invocation) if manifest else []
    if not allow_change:
        refuse_changed(changed)
    now = msgspec.to_builtins(invocation)
    entry = {
        "started_at": now["started_at"],
        "host": now["host"],
        "ended_at": "",
        "seconds": 0.0,
        "end": "",
        "changed": changed,
    }
    earlier = list(manifest.get("invocations", ())) if manifest else []
    first = manifest or {}
    return {
        "format": FORMAT,
        "run_name": now["run_name"],
        "started_at": first.get("started_at", now["started_at"]),
        "host": first.get("host", now["host"]),
        **{key: now[key] for key in ("backend", "settings", "dataset", "versions", *_MADE_OF)},
        "seed": now["settings"].get("seed", 0),
        "invocations": [*earlier, entry],
    }


def ended(manifest: Mapping[str, Any], *, ended_at: str, seconds: float, end: str) -> dict[str, Any]:
    """The manifest with its latest invocation closed; `end` is a short word on how (finished, interrupt, budget …)."""
    *earlier, latest = manifest["invocations"]
    closed = {**latest, "ended_at": ended_at, "seconds": round(seconds, 3), "end": end}
    return {**manifest, "invocations": [*earlier, closed]}


def closed_at(manifest: Mapping[str, Any], last_seen: str) -> dict[str, Any]:
    """The manifest, its latest invocation closed if that could not do so itself: it lived until `last_seen` at least, a
    time like its own ("": unknown)."""
    latest = manifest["invocations"][-1]
    if latest["end"] or last_seen <= latest["started_at"]:  # of one width, so that texts compare as times do
        return dict(manifest)
    lived = datetime.fromisoformat(last_seen) - datetime.fromisoformat(latest["started_at"])
    return ended(manifest, ended_at=last_seen, seconds=lived.total_seconds(), end="cut off")


def seconds_so_far(manifest: Mapping[str, Any] | None) -> float:
    """Wall time of all invocations that are closed."""
    return sum(float(entry.get("seconds", 0.0)) for entry in (manifest or {}).get("invocations", ()))


def _fixed(manifest: Mapping[str, Any]) -> dict[str, str]:
    """As JSON texts, which is what a manifest that was read back has in common with one that was not."""
    settings = manifest.get("settings", {})
    values = {name: settings[name] for name in FIXED if name in settings}
    values["prefill_messages_file"] = manifest.get("prefill_sha256", "")
    values["tools_module"] = manifest.get("tools_sha256", "")
    values["container_backend"] = manifest.get("backend", "")
    return {name: msgspec.json.encode(value).decode() for name, value in values.items()}
