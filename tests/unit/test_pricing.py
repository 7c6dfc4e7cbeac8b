"""Prices and providers: which endpoint, which key, what it costs."""

from typing import Any

import msgspec
import pytest

from agent.models.providers import API_KEY_VARIABLE, listing, resolve_targets, split_keys
from agent.pricing import cost, price_of
from agent.types import Usage
from tools.errors import UsageProblem

PROVIDERS = [
    *("openrouter", "openai", "anthropic", "gemini", "deepseek", "moonshot", "mistral", "xai", "together", "groq"),
    *("fireworks", "nous", "zai", "ollama", "vllm", "lmstudio", "llamacpp", "custom"),
]
MILLION = Usage(input_tokens=1_000_000, output_tokens=1_000_000)


def test_the_users_prices_beat_the_table_and_an_unknown_model_has_none() -> None:
    assert cost(MILLION, "gpt-4o") == 12.5
    assert cost(MILLION, "gpt-4o", price_in=1.0, price_out=2.0) == 3.0
    assert cost(MILLION, "gpt-4o", price_in=0.0, price_out=0.0) == 0.0
    assert cost(MILLION, "nobody-knows-it") is None
    assert cost(MILLION, "nobody-knows-it", price_out=2.0) == 2.0


def test_routers_prefixes_and_dates_are_looked_through_but_no_name_is_guessed() -> None:
    assert price_of("openai/gpt-4o-2024-08-06") == price_of("GPT-4o") == price_of("gpt-4o")
    assert price_of("claude-sonnet-4-5-20250929") == price_of("claude-sonnet-4-5")
    assert price_of("gemini-2.5-flash-001") == price_of("gemini-2.5-flash")
    assert price_of("anthropic/claude-sonnet-4.5") == price_of("claude-sonnet-4-5")
    assert price_of("gpt-4o-mini") != price_of("gpt-4o")
    assert price_of("claude-sonnet-4-99") is None
    assert price_of("gpt-4o-audio-preview") is None
    assert price_of("gpt-4o:free") is None


def test_cached_input_has_its_own_price() -> None:
    usage = Usage(input_tokens=1_000_000, cache_read_tokens=400_000)
    assert cost(usage, "gpt-4o") == pytest.approx(0.6 * 2.5 + 0.4 * 1.25)
    written = Usage(input_tokens=1_000_000, cache_write_tokens=1_000_000)
    assert cost(written, "claude-sonnet-4-5") == 3.75
    assert cost(written, "gpt-4o") == 2.5


# --- providers


def test_every_provider_is_listed_and_says_whether_its_key_is_set() -> None:
    rows = {row.name: row for row in listing({"XAI_API_KEY": "k", "GROQ_API_KEY": " , "})}
    assert list(rows) == PROVIDERS
    assert (rows["xai"].key_set, rows["groq"].key_set, rows["ollama"].keyless) == (True, False, True)
    assert rows["gemini"].key_variables == ("GEMINI_API_KEY", "GOOGLE_API_KEY")


def test_keys_are_counted_but_never_in_the_target() -> None:
    environ = {"OPENAI_API_KEY": "sk-one, sk-two,,"}
    (target,) = resolve_targets("gpt-4o", environ=environ)
    assert (target.provider, target.key_variable, target.keys) == ("openai", "OPENAI_API_KEY", 2)
    assert target.base_url == "https://api.openai.com/v1"
    assert b"sk-" not in msgspec.json.encode(target)
    (target,) = resolve_targets("gpt-4o", api_key="sk-a,sk-b,sk-c", environ={})
    assert (target.key_variable, target.keys) == (API_KEY_VARIABLE, 3)
    assert b"sk-" not in msgspec.json.encode(target)
    assert split_keys(environ["OPENAI_API_KEY"]) == ["sk-one", "sk-two"]


@pytest.mark.parametrize(
    ("model", "environ", "provider"),
    [
        ("gpt-4o", {"OPENAI_API_KEY": "k", "XAI_API_KEY": "k"}, "openai"),
        ("claude-sonnet-4-5", {"ANTHROPIC_API_KEY": "k", "OPENAI_API_KEY": "k"}, "anthropic"),
        ("qwen/qwen3", {"OPENROUTER_API_KEY": "k", "TOGETHER_API_KEY": "k"}, "openrouter"),
        ("qwen/qwen3", {"TOGETHER_API_KEY": "k"}, "together"),
        ("some-model", {"XAI_API_KEY": "k"}, "xai"),
        ("gemini-2.5-pro", {"GOOGLE_API_KEY": "k"}, "gemini"),
    ],
)
def test_the_provider_that_name_and_keys_imply(model: str, environ: dict[str, str], provider: str) -> None:
    assert resolve_targets(model, environ=environ)[0].provider == provider


def test_a_base_url_needs_no_provider_and_no_key() -> None:
    (target,) = resolve_targets("any", base_url="http://127.0.0.1:1/v1/", environ={})
    assert (target.provider, target.base_url, target.key_variable, target.keys) == (
        "custom",
        "http://127.0.0.1:1/v1",
        "",
        1,
    )
    (target,) = resolve_targets("any", base_url="https://openrouter.ai/api/v1", environ={"OPENROUTER_API_KEY": "k"})
    assert (target.provider, target.quirks.routing) == ("openrouter", True)


@pytest.mark.parametrize(
    ("settings", "environ", "named"),
    [
        ({"model": "gpt-4o"}, {}, "OPENAI_API_KEY"),
        ({"model": "x", "provider": "gemini"}, {}, "GEMINI_API_KEY or GOOGLE_API_KEY"),
        ({"model": "gpt-4o", "fallback_models": ["xai:grok-4"]}, {"OPENAI_API_KEY": "k"}, "XAI_API_KEY"),
        ({"model": "x"}, {}, "give provider or base_url"),
        ({"model": "x"}, {"XAI_API_KEY": "k", "GROQ_API_KEY": "k"}, "give provider or base_url"),
        ({"model": "x", "provider": "opnai"}, {}, "did you mean openai"),
        ({"model": "x", "provider": "custom"}, {}, "base_url"),
        ({"model": "x", "base_url": "localhost:8000"}, {}, "http://"),
    ],
)
def test_what_is_missing_is_named(settings: dict[str, Any], environ: dict[str, str], named: str) -> None:
    with pytest.raises(UsageProblem, match=named):
        resolve_targets(**settings, environ=environ)


def test_fallbacks_are_models_of_the_same_endpoint_or_name_their_provider() -> None:
    environ = {"OPENAI_API_KEY": "a,b", "XAI_API_KEY": "c"}
    targets = resolve_targets("gpt-4o", fallback_models=["gpt-4o-mini", "xai:grok-4", "ft:gpt:x"], environ=environ)
    assert [(target.provider, target.model, target.keys) for target in targets] == [
        ("openai", "gpt-4o", 2),
        ("openai", "gpt-4o-mini", 2),
        ("xai", "grok-4", 1),
        ("openai", "ft:gpt:x", 2),
    ]


@pytest.mark.parametrize(("model", "sent"), [("moonshotai/Kimi-K2", False), ("kimi-k2", False), ("gpt-4o", True)])
def test_models_with_a_temperature_of_their_own(model: str, sent: bool) -> None:
    (target,) = resolve_targets(model, provider="openrouter", environ={"OPENROUTER_API_KEY": "k"})
    assert target.quirks.temperature is sent
