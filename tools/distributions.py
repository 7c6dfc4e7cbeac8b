"""Named toolset distributions: which toolsets a prompt gets, each drawn on its own with a chance in percent."""

import copy
import hashlib
import random
from collections.abc import Mapping

from msgspec import Struct

from tools.errors import UsageProblem
from tools.names import did_you_mean


class Distribution(Struct, frozen=True):
    """`toolsets` maps a toolset's name to its chance in percent, above 0 and at most 100, in the order of drawing."""

    description: str
    toolsets: Mapping[str, float]


class UnknownDistribution(UsageProblem, ValueError):
    """A name that no distribution has."""


DISTRIBUTIONS: dict[str, Distribution] = {
    "default": Distribution(
        "Every toolset, for every prompt",
        {"web": 100, "vision": 100, "image_gen": 100, "terminal": 100, "file": 100, "browser": 100},
    ),
    "image_gen": Distribution(
        "Making pictures and looking at them, often with the web, sometimes with a terminal",
        {"image_gen": 90, "vision": 90, "web": 55, "terminal": 45},
    ),
    "research": Distribution(
        "Reading the web by search and browser, at times with pictures, seldom with a terminal",
        {"web": 90, "browser": 70, "vision": 50, "terminal": 10},
    ),
    "science": Distribution(
        "Computing with terminal, files and web; vision and a browser for about half of the prompts",
        {"web": 94, "terminal": 94, "file": 94, "vision": 65, "browser": 50, "image_gen": 15},
    ),
    "development": Distribution(
        "Writing programs with terminal and files, with the web now and then",
        {"terminal": 80, "file": 80, "web": 30, "vision": 10},
    ),
    "safe": Distribution(
        "Nothing that runs commands or touches files",
        {"web": 80, "browser": 70, "vision": 60, "image_gen": 60},
    ),
    "balanced": Distribution(
        "Every toolset with an even chance",
        {"web": 50, "vision": 50, "image_gen": 50, "terminal": 50, "file": 50, "browser": 50},
    ),
    "minimal": Distribution(
        "The web alone",
        {"web": 100},
    ),
    "terminal_only": Distribution(
        "Terminal and files, nothing else",
        {"terminal": 100, "file": 100},
    ),
    "terminal_web": Distribution(
        "Terminal and files, with the web to look things up",
        {"terminal": 100, "file": 100, "web": 100},
    ),
    "creative": Distribution(
        "Pictures made and looked at, with a little of the web",
        {"image_gen": 90, "vision": 90, "web": 30},
    ),
    "reasoning": Distribution(
        "Thinking with the web and files at hand and a terminal now and then",
        {"web": 90, "file": 60, "terminal": 20},
    ),
    "browser_use": Distribution(
        "A browser always, mostly with web search and vision",
        {"browser": 100, "web": 80, "vision": 70},
    ),
    "browser_only": Distribution(
        "The browser alone",
        {"browser": 100},
    ),
    "browser_tasks": Distribution(
        "Tasks done in a browser, rarely with anything beside it",
        {"browser": 97, "vision": 12, "terminal": 15},
    ),
    "terminal_tasks": Distribution(
        "Tasks done in a terminal with files and web, often with a browser too",
        {"terminal": 97, "file": 97, "web": 97, "browser": 75, "vision": 50, "image_gen": 10},
    ),
    "mixed_tasks": Distribution(
        "Tasks that need browser, terminal and files together",
        {"browser": 92, "terminal": 92, "file": 92, "web": 35, "vision": 15, "image_gen": 15},
    ),
}


NONE: Mapping[str, Distribution] = {}


def get_distribution(name: str, own: Mapping[str, Distribution] = NONE) -> Distribution:
    """The distribution of that name; `own` are further ones. Raises UnknownDistribution."""
    known = {**DISTRIBUTIONS, **own}
    if name in known:
        return known[name]
    hint = did_you_mean(name, known) or f"there are {', '.join(known)}"
    raise UnknownDistribution(f"Unknown distribution {name!r}: {hint}")


def list_distributions() -> dict[str, Distribution]:
    """A copy of them all."""
    return copy.deepcopy(DISTRIBUTIONS)


def describe_distributions(own: Mapping[str, Distribution] = NONE) -> tuple[tuple[str, str, str], ...]:
    """Them all and a run's own: name, toolsets by falling chance in percent, description."""
    return tuple((name, _by_chance(each), each.description) for name, each in {**DISTRIBUTIONS, **own}.items())


def _by_chance(distribution: Distribution) -> str:
    by_chance = sorted(distribution.toolsets.items(), key=lambda item: -item[1])
    return ", ".join(f"{toolset} {percent:g}" for toolset, percent in by_chance)


def row_rng(seed: int, row_key: str) -> random.Random:
    """A row's own source of chance: the same on every machine, in every order of rows."""
    digest = hashlib.sha256(f"{seed}:{row_key}".encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))  # noqa: S311 - sampling, no secret


def sample_toolsets(distribution: str, rng: random.Random) -> list[str]:
    """As `draw`, by name. Raises UnknownDistribution."""
    return draw(get_distribution(distribution), rng)


def draw(distribution: Distribution, rng: random.Random) -> list[str]:
    """The toolsets of one prompt, never none: where nothing is drawn, the most probable one. One number is drawn per
    toolset, in the order of the table."""
    chances = distribution.toolsets
    drawn = [toolset for toolset, percent in chances.items() if rng.random() * 100 < percent]
    return drawn or [max(chances, key=lambda toolset: chances[toolset])]
