"""The compressor's settings: one definition, nested in YAML, flat in flags, the same everywhere."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from batch.cli import help_text, settings_table_markdown
from batch.options import Option, by_name
from compression.program import page
from compression.settings import (
    CompressorSettings,
    compressor_options,
    load_settings,
    policy_of,
    request_options,
    resume_command,
    shaping,
)
from compression.types import Policy
from tests.unit.command_lines import CommandLine

ROOT = Path(__file__).parents[2]
BASE = ["--input=x.jsonl", "--summarization_model=m"]
REFERENCE = {
    "tokenizer": ("name", "trust_remote_code"),
    "compression": ("target_max_tokens", "summary_target_tokens"),
    "protected_turns": ("first_system", "first_human", "first_gpt", "first_tool", "last_n_turns"),
    "summarization": ("model", "base_url", "api_key_env", "temperature", "max_retries", "retry_delay"),
    "output": ("add_summary_notice", "summary_notice_text", "output_suffix"),
    "processing": (
        *("num_workers", "max_concurrent_requests", "skip_under_target", "save_over_limit"),
        "per_trajectory_timeout",
    ),
    "metrics": ("enabled", "per_trajectory", "output_file"),
}
"""The reference system's file."""

LINE = CommandLine(load_settings, BASE)
load, refused = LINE.load, LINE.refused


def config(folder: Path, told: Any) -> str:
    path = folder / "c.yaml"
    path.write_text(told if isinstance(told, str) else json.dumps(told), encoding="utf-8")
    return f"--config={path}"


def other(option: Option) -> Any:
    """A value that is not the default's."""
    default = option.default
    if option.name == "target_max_tokens":
        return 20_000
    if option.name == "base_url":
        return "http://127.0.0.1:1/v1"
    if isinstance(default, bool):
        return not default
    return default + 1 if isinstance(default, int | float) else "other"


@pytest.mark.parametrize("place", [f"{section}.{key}" for section, keys in REFERENCE.items() for key in keys])
def test_every_key_of_the_reference_works_in_its_place_and_as_a_flag(place: str, tmp_path: Path) -> None:
    (option,) = [each for each in compressor_options() if each.place == place]
    section, key = place.split(".")
    value = other(option)
    told = str(value).lower() if isinstance(value, bool) else str(value)
    base = ["--input=x.jsonl"] + ([] if option.name == "summarization_model" else ["--summarization_model=m"])
    flags = [[config(tmp_path, {section: {key: value}})], [f"--{key}={told}"], [f"--{option.name}={told}"]]
    for given in flags:
        assert getattr(load_settings([*base, *given], {})[0], option.name) == value
    variable = {f"TRAJECTORY_COMPRESSOR_{option.name.upper()}": told}
    assert getattr(load_settings(base, variable)[0], option.name) == value


def test_the_reference_files_own_keys_are_all_there() -> None:
    told = {option.place for option in compressor_options()}
    assert {f"{section}.{key}" for section, keys in REFERENCE.items() for key in keys} <= told


def test_flags_beat_the_file_which_beats_the_environment(tmp_path: Path) -> None:
    file = config(tmp_path, {"compression": {"target_max_tokens": 5000}})
    variable = {"TRAJECTORY_COMPRESSOR_TARGET_MAX_TOKENS": "6000"}
    assert load(**variable).target_max_tokens == 6000
    assert load(file, **variable).target_max_tokens == 5000
    assert load(file, "--target_max_tokens=4000", **variable).target_max_tokens == 4000


def test_a_section_may_share_its_name_with_a_setting(tmp_path: Path) -> None:
    told = "output: o.jsonl\ntokenizer: o200k_base\nmetrics: false\n"
    settings = load(config(tmp_path, told))
    assert (settings.output, settings.tokenizer, settings.metrics) == ("o.jsonl", "o200k_base", False)
    nested = "output: {output-suffix: _s}\ntokenizer: {name: o200k_base}\nmetrics: {enabled: no}\ncompression:\n"
    settings = load(config(tmp_path, nested))
    assert (settings.output_suffix, settings.tokenizer, settings.metrics) == ("_s", "o200k_base", False)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("compression: {target_max_token: 5}", "did you mean compression.target_max_tokens?"),
        ("compression: {temperature: 0.5}", "did you mean summarization.temperature?"),
        ("output: {quiet: true}", "did you mean quiet?"),
        ("compresion: {target_max_tokens: 5}", "did you mean compression?"),
        ("target_max_token: 5", "did you mean target_max_tokens?"),
        ("compression: 5", "compression: expected a mapping of settings, got 5"),
        ("compression: {target_max_tokens: many}", "compression.target_max_tokens: expected a whole number >= 1"),
        ("compression: {target_max_tokens: 5, target_max_tokens: 6}", "given twice"),
        ("compression: {target_max_tokens: 5}\ntarget_max_tokens: 5", "given twice"),
        ("output: {output: {output_suffix: x}}", "output.output"),
        ("[1]", "must be a mapping"),
    ],
)
def test_mistakes_in_a_file_are_named(told: str, said: str, tmp_path: Path) -> None:
    assert said in refused(config(tmp_path, told))


def test_a_missing_file_is_an_error_and_none_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cannot read" in refused(f"--config={tmp_path / 'no.yaml'}")
    monkeypatch.chdir(ROOT)
    assert load().target_max_tokens == 29_000


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--targt_max_tokens=5"], "did you mean --target_max_tokens?"),
        (["--max_retries=0"], "a whole number >= 1"),
        (["--sample_percent=0"], "> 0"),
        (["--sample_percent=101"], "<= 100"),
        (["--strategy=fold"], "drop, mask, summary"),
        (["--summary_target_tokens=29000"], "must be below target_max_tokens"),
        (["--summary_window=2500"], "summary_window"),
        (["--price_in=1"], "give both"),
        (["--base_url=x"], "http://"),
        (["--plot=p.txt"], ".png"),
        (["--last_n_turns=-1"], ">= 0"),
    ],
)
def test_mistakes_in_flags_are_named(flags: list[str], said: str) -> None:
    assert said in refused(*flags)


def test_unknown_variables_are_refused() -> None:
    assert "TRAJECTORY_COMPRESSOR_STRATEGY?" in refused(TRAJECTORY_COMPRESSOR_STRATGY="drop")


def test_a_model_is_wanted_only_where_one_is_asked() -> None:
    base = ["--input=x"]
    assert "--summarization_model" in refused(base=base)
    for flag in ("--dry_run", "--strategy=drop", "--strategy=mask"):
        load_settings([*base, flag], {})
    assert "--input" in refused(base=["--summarization_model=m"])


def test_the_policy_is_made_of_the_settings() -> None:
    settings = load("--target_max_tokens=5000", "--no-first_gpt", "--summary_window=9000", "--last_n_turns=2")
    policy = policy_of(settings)
    assert (policy.target_max_tokens, policy.first_gpt, policy.window, policy.last_n_turns) == (5000, False, 9000, 2)
    assert policy.summary_notice_text.startswith("\n\n")
    assert policy_of(load()).target_max_tokens == Policy().target_max_tokens == 29_000
    assert (request_options(load()).temperature, request_options(load()).request_timeout) == (0.3, 120.0)
    assert {"target_max_tokens", "first_gpt", "tokenizer", "seed"} <= shaping(settings).keys()


def test_the_example_file_is_the_defaults() -> None:
    example = ROOT / "datagen-config-examples" / "trajectory_compression.yaml"
    settings, _ = load_settings(["--input=x", f"--config={example}"], {})
    usual, told = CompressorSettings(), yaml.safe_load(example.read_bytes())
    departures = [name for name in usual.__struct_fields__ if getattr(settings, name) != getattr(usual, name)]
    assert departures == ["input", "summarization_model", "output_file"]
    for section, keys in REFERENCE.items():
        shown = example.read_text(encoding="utf-8").partition(f"\n{section}:")[2].partition("\n\n")[0]
        assert section in told
        assert all(f"{key}:" in shown for key in keys)


def test_the_resume_command_reads_back() -> None:
    argv = [*BASE, "--api-key=secret-key-0123", "--base_url=http://me:pw@h/v1", "--no-first_gpt", "--output=a b.jsonl"]
    settings, _ = load_settings([*argv, "--resume", "--quiet"], {})
    command = resume_command(settings, [*argv, "--resume", "--quiet"], "python x.py")
    assert "secret" not in command
    assert "me:pw" not in command
    words = shlex.split(command)
    assert words[:2] == ["python", "x.py"]
    assert words[-1] == "--resume"
    again, _ = load_settings(words[2:], {})
    assert (again.output, again.first_gpt, again.quiet, again.resume) == ("a b.jsonl", False, True, True)


def test_help_and_readme_table_name_every_setting() -> None:
    text, table = help_text(page()), settings_table_markdown(page().options)
    for option in compressor_options():
        assert re.search(rf"^  --{option.name} ", text, re.MULTILINE)
        assert f"| `{option.name}` |" in table
        assert all(f"--{alias}" in text for alias in option.aliases)
    assert all(len(entry) <= 115 for entry in text.splitlines())


def test_no_two_settings_share_a_name_or_a_place() -> None:
    options = compressor_options()
    assert len(by_name(options)) == sum(1 + len(option.aliases) for option in options)
    places = [option.place for option in options if option.place]
    assert len(set(places)) == len(places)
