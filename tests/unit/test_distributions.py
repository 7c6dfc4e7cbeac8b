"""The table of distributions, sampling from it, and its listing."""

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import toolset_distributions
from tools.distributions import DISTRIBUTIONS, get_distribution, list_distributions, row_rng, sample_toolsets
from tools.errors import UsageProblem
from tools.toolsets import TOOLSETS

ROOT = Path(__file__).parents[2]
NAMES = [
    *("default", "image_gen", "research", "science", "development", "safe", "balanced", "minimal", "terminal_only"),
    *("terminal_web", "creative", "reasoning", "browser_use", "browser_only", "browser_tasks", "terminal_tasks"),
    "mixed_tasks",
]


def test_the_seventeen_names_exist() -> None:
    assert list(DISTRIBUTIONS) == NAMES


def test_a_known_distribution_has_a_description_and_toolsets() -> None:
    development = get_distribution("development")
    assert development.description
    assert development.toolsets == {"terminal": 80, "file": 80, "web": 30, "vision": 10}


@pytest.mark.parametrize("name", NAMES)
def test_every_chance_is_a_percentage_of_a_known_toolset(name: str) -> None:
    distribution = DISTRIBUTIONS[name]
    assert len(distribution.description) > 5
    assert all(0 < percent <= 100 for percent in distribution.toolsets.values())
    assert distribution.toolsets.keys() <= TOOLSETS.keys()


def test_the_listing_is_an_equal_but_separate_copy() -> None:
    copied = list_distributions()
    assert copied == DISTRIBUTIONS
    del copied["default"]
    assert copied["minimal"].toolsets is not DISTRIBUTIONS["minimal"].toolsets
    assert "default" in DISTRIBUTIONS


def test_the_program_has_the_functions_for_scripts() -> None:
    theirs = toolset_distributions
    assert (theirs.get_distribution, theirs.list_distributions) == (get_distribution, list_distributions)
    assert theirs.sample_toolsets is theirs.sample_toolsets_from_distribution is sample_toolsets


def test_an_unknown_name_is_the_users_mistake_and_names_the_nearest() -> None:
    with pytest.raises(UsageProblem, match=r"Unknown distribution 'developement': did you mean development\?"):
        sample_toolsets("developement", random.Random(1))
    with pytest.raises(ValueError, match="Unknown distribution '': there are default"):
        get_distribution("")


def test_certain_toolsets_are_always_drawn() -> None:
    rng = random.Random(3)
    for _ in range(50):
        assert sample_toolsets("default", rng) == ["web", "vision", "image_gen", "terminal", "file", "browser"]
        assert sample_toolsets("minimal", rng) == ["web"]


@pytest.mark.parametrize("name", NAMES)
def test_shares_are_close_to_the_percent(name: str) -> None:
    rng = random.Random(20_260_101)
    draws = 10_000
    counts = Counter(toolset for _ in range(draws) for toolset in sample_toolsets(name, rng))
    chances = DISTRIBUTIONS[name].toolsets
    none_drawn = 1.0
    for percent in chances.values():
        none_drawn *= 1 - percent / 100
    likeliest = max(chances, key=lambda toolset: chances[toolset])
    for toolset, percent in chances.items():
        expected = percent + (100 * none_drawn if toolset == likeliest else 0)
        assert counts[toolset] / draws * 100 == pytest.approx(expected, abs=1.5)


@given(st.sampled_from(NAMES), st.integers())
def test_a_sample_is_never_empty_and_in_the_tables_order(name: str, seed: int) -> None:
    drawn = sample_toolsets(name, random.Random(seed))
    assert drawn
    assert drawn == [toolset for toolset in DISTRIBUTIONS[name].toolsets if toolset in drawn]


class Never(random.Random):
    """Draws nothing."""

    def random(self) -> float:
        return 0.999


def test_where_nothing_is_drawn_the_most_probable_one_is_taken() -> None:
    assert sample_toolsets("image_gen", Never()) == ["image_gen"]
    assert sample_toolsets("browser_tasks", Never()) == ["browser"]
    assert sample_toolsets("balanced", Never()) == ["web"]


def test_a_rows_draw_depends_on_seed_and_key_alone() -> None:
    keys = [f"id:{n}" for n in range(200)]
    forward = {key: sample_toolsets("balanced", row_rng(7, key)) for key in keys}
    backward = {key: sample_toolsets("balanced", row_rng(7, key)) for key in reversed(keys)}
    other_seed = {key: sample_toolsets("balanced", row_rng(8, key)) for key in keys}
    assert forward == backward
    assert forward != other_seed
    assert len({tuple(drawn) for drawn in forward.values()}) > 20


def test_a_rows_draw_is_the_same_on_every_machine() -> None:
    # numbers written down once: were they others, every resumed run would draw other tools
    assert row_rng(0, "id:1").random() == 0.4525125288308929
    assert row_rng(0, "sha:ab#2").random() == 0.5155335275389785


def test_the_program_lists_every_distribution_whole() -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "toolset_distributions.py")], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "\x1b" not in ran.stdout
    for name, distribution in DISTRIBUTIONS.items():
        line = next(line for line in ran.stdout.splitlines() if line.startswith(f"│ {name} "))
        by_chance = sorted(distribution.toolsets.items(), key=lambda item: -item[1])
        assert ", ".join(f"{toolset} {percent}" for toolset, percent in by_chance) in line
        assert distribution.description in line


def test_a_listing_that_cannot_be_printed_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, str(ROOT / "toolset_distributions.py")]
        ran = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr == "the distributions cannot be printed: No space left on device\n"
