"""Who serves models: the table in `providers.yaml`, and which endpoint, key and habits a model's name means."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from tools.errors import UsageProblem
from tools.names import did_you_mean

API_KEY_VARIABLE = "BATCH_RUNNER_API_KEY"
"""The variable that carries a key given as a setting to the process that uses it."""

CUSTOM = "custom"
_ANY_VENDOR = "*/"


class Quirks(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an endpoint wants otherwise than the rest."""

    reasoning_replay: bool = True  # assistant turns go back with the reasoning fields they came with
    reasoning_style: Literal["effort", "object", "thinking", "budget", "template", "none"] = "effort"
    max_tokens_field: str = "max_tokens"
    routing: bool = False  # takes OpenRouter's `provider` object
    temperature: bool = True  # false: the model's own, never sent


class Target(Struct, frozen=True, kw_only=True):
    """One endpoint's model. `key_variable` names the environment's variable with its comma-separated keys, "" where
    none is needed; `keys` is how many they are, at least 1."""

    model: str
    provider: str
    base_url: str
    key_variable: str = ""
    keys: int = 1
    quirks: Quirks = Quirks()


class Provider(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of the table."""

    base_url: str
    keys: tuple[str, ...]
    keyless: bool = False
    models: tuple[str, ...] = ()
    quirks: Quirks = Quirks()

    def key_variable(self, environ: Mapping[str, str]) -> str:
        """The first of its variables that holds a key; "" if none does."""
        return next((name for name in self.keys if split_keys(environ.get(name, ""))), "")

    def serves(self, model: str) -> bool:
        """Whether a model's name implies this row."""
        return any(
            "/" in model if start == _ANY_VENDOR else model.lower().startswith(start.lower()) for start in self.models
        )


class ListedProvider(Struct, frozen=True):
    """A row of `--list_providers`."""

    name: str
    base_url: str
    key_variables: tuple[str, ...]
    key_set: bool
    keyless: bool


class _Table(Struct, frozen=True, forbid_unknown_fields=True):
    fixed_temperature: tuple[str, ...]
    providers: dict[str, Provider]


def resolve_targets(
    model: str,
    provider: str | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    fallback_models: Sequence[str] = (),
    *,
    environ: Mapping[str, str],
    key_variable: str = API_KEY_VARIABLE,
) -> tuple[Target, ...]:
    """The model's endpoint, then those of its fallbacks. Raises UsageProblem, naming the variable of a missing key.

    A fallback is a model of the same endpoint, or `provider:model`. A key given as a setting is not in a Target: its
    user puts it into the environment of the processes that open the model, as `key_variable`.
    """
    name = provider or _provider_of(model, base_url, environ)
    main = _target(model, name, base_url, api_key, environ, key_variable)
    return main, *(_fallback(entry, main, api_key, environ) for entry in fallback_models)


def resolve_beside(
    entry: str,
    base_url: str,
    api_key: str,
    *,
    main: Target | None,
    main_key: str,
    environ: Mapping[str, str],
    key_variable: str,
) -> Target:
    """Another model of the same run, which may have an endpoint and a key of its own. Without a `base_url` it is a
    model of the main one's endpoint, or `provider:model`; where there is no main one, its name and the keys set tell.

    Raises UsageProblem. `key_variable` is for `api_key`, as in `resolve_targets`; `main_key` is that of the main model.
    """
    name, _, model = entry.partition(":")
    named = bool(model) and name in _table().providers and not base_url
    provider, model = (name, model) if named else (None, entry)
    if base_url or main is None or (named and provider != main.provider):
        return resolve_targets(model, provider, base_url, api_key, environ=environ, key_variable=key_variable)[0]
    key, variable = (api_key, key_variable) if api_key else (main_key, API_KEY_VARIABLE)
    return _target(model, main.provider, main.base_url, key, environ, variable)


def split_keys(text: str) -> list[str]:
    """The keys in a variable: separated by commas."""
    return [key for part in text.split(",") if (key := part.strip())]


def listing(environ: Mapping[str, str]) -> list[ListedProvider]:
    """All providers, in the table's order."""
    return [
        ListedProvider(name, row.base_url, row.keys, bool(row.key_variable(environ)), row.keyless)
        for name, row in _table().providers.items()
    ]


def _target(
    model: str,
    name: str,
    base_url: str | None,
    api_key: str | None,
    environ: Mapping[str, str],
    key_variable: str = API_KEY_VARIABLE,
) -> Target:
    row = _row(name)
    url = (base_url or row.base_url).rstrip("/").removesuffix("/chat/completions")
    _check_url(name, url)
    keys = split_keys(api_key or "")
    variable = key_variable if keys else row.key_variable(environ)
    if not variable and not row.keyless:
        setting = key_variable.removeprefix("BATCH_RUNNER_").lower()
        raise UsageProblem(f"provider {name}: no key; set {' or '.join(row.keys)}, or give {setting}")
    fixed = any(part in model.lower() for part in _table().fixed_temperature)
    return Target(
        model=model,
        provider=name,
        base_url=url,
        key_variable=variable,
        keys=max(1, len(keys or split_keys(environ.get(variable, "")))),
        quirks=msgspec.structs.replace(row.quirks, temperature=False) if fixed else row.quirks,
    )


def _fallback(entry: str, main: Target, api_key: str | None, environ: Mapping[str, str]) -> Target:
    name, _, model = entry.partition(":")
    if model and name in _table().providers:
        own = name == main.provider
        return _target(model, name, main.base_url if own else None, api_key if own else None, environ)
    return _target(entry, main.provider, main.base_url, api_key, environ)


def _provider_of(model: str, base_url: str | None, environ: Mapping[str, str]) -> str:
    """The row that a base_url, or else the model's name and the keys that are set, imply."""
    table = _table().providers
    if base_url:
        host = urlsplit(base_url).netloc
        return next(
            (name for name, row in table.items() if row.base_url and urlsplit(row.base_url).netloc == host), CUSTOM
        )
    named = [name for name, row in table.items() if row.serves(model)]
    keyed = [name for name, row in table.items() if row.key_variable(environ) and name != CUSTOM]
    implied = [name for name in named if name in keyed] or ([] if named else keyed)
    if implied and (named or len(implied) == 1):
        return implied[0]
    if named:
        return named[0]
    raise UsageProblem(f"model {model}: no provider implied by its name and the keys set; give provider or base_url")


def _row(name: str) -> Provider:
    table = _table().providers
    if name not in table:
        raise UsageProblem(f"unknown provider {name}; known: {', '.join(table)}{_nearest(name, table)}")
    return table[name]


def _nearest(name: str, known: Iterable[str]) -> str:
    question = did_you_mean(name, known)
    return f"; {question}" if question else ""


def _check_url(name: str, url: str) -> None:
    if not url:
        raise UsageProblem(f"provider {name} needs a base_url")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageProblem("base_url must start with http:// or https:// and name a host")


@cache
def _table() -> _Table:
    import yaml  # noqa: PLC0415 - workers know their targets and do not read the table

    text = Path(__file__).with_name("providers.yaml").read_text(encoding="utf-8")
    return msgspec.convert(yaml.safe_load(text), _Table)
