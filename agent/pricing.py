"""What tokens cost. Prices are USD per 1,000,000 tokens, from `prices.yaml` beside this file or from the user."""

import re
from functools import cache, lru_cache
from pathlib import Path

import msgspec
from msgspec import Struct

from agent.types import Usage

MILLION = 1_000_000
_DATE = re.compile(r"-(\d{4}-\d\d-\d\d|\d{3,8})$")  # or a build; a single digit would be another version


class Price(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Input read from or written to a cache has prices of its own where the provider charges so."""

    input: float
    output: float
    cache_read: float | None = None
    cache_write: float | None = None


@lru_cache
def price_of(model: str, price_in: float | None = None, price_out: float | None = None) -> Price | None:
    """The price of a model; None if unknown. The user's two prices beat the table (one alone: the other is 0).

    A router's prefix (`openai/gpt-4o`), a variant (`:free` is not one: its name is its own) and a date at the end
    (`gpt-4o-2024-08-06`) are looked through; `4.5` and `4-5` are the same version.
    """
    if price_in is not None or price_out is not None:
        return Price(input=price_in or 0.0, output=price_out or 0.0)
    name, table = _plain(model.lower().rsplit("/", 1)[-1]), _table()
    return table.get(name) or table.get(_DATE.sub("", name))


def cost(usage: Usage, model: str, price_in: float | None = None, price_out: float | None = None) -> float | None:
    """USD for a usage; None if the model's price is unknown."""
    price = price_of(model, price_in, price_out)
    if price is None:
        return None
    cached = price.input if price.cache_read is None else price.cache_read
    written = price.input if price.cache_write is None else price.cache_write
    fresh = max(0, usage.input_tokens - usage.cache_read_tokens - usage.cache_write_tokens)
    total = (
        fresh * price.input
        + usage.cache_read_tokens * cached
        + usage.cache_write_tokens * written
        + usage.output_tokens * price.output
    )
    return total / MILLION


def _plain(name: str) -> str:
    return name.replace(".", "-")


@cache
def _table() -> dict[str, Price]:
    import yaml  # noqa: PLC0415 - 20 ms that a run with given prices need not pay

    text = Path(__file__).with_name("prices.yaml").read_text(encoding="utf-8")
    prices = msgspec.convert(yaml.safe_load(text), dict[str, Price])
    return {_plain(name): price for name, price in prices.items()}
