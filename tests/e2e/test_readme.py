"""Every command and program of the README, run; its table of settings, compared; its map, looked up."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from batch.cli import page, settings_table_markdown
from compression.program import page as compressor_page
from swe.settings import swe_options
from tests.e2e.program import ROOT, environment, read_lines
from tests.endpoint import EndpointProcess
from tools.toolsets import TOOLSETS

README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL_BLOCKS = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like the repository after `make run`, for runs that write into it."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    for name in ("batch_runner.py", "trajectory_compressor.py", "toolset_distributions.py", "datagen-config-examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def run(command: list[str], folder: Path, **variables: str) -> str:
    """In a shell in which the README's first command was given."""
    words = ["bash", "-euc", f"{SHELL_BLOCKS[0]}\n{shlex.join(command)}"]
    env = environment(folder, PYTHONPATH=str(ROOT), **variables)
    done = subprocess.run(
        words, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_there_is_something_to_run() -> None:
    assert SHELL_BLOCKS[0].strip() == ". .venv/bin/activate"
    assert len(SHELL_BLOCKS) == 6
    assert len(PYTHON_BLOCKS) == 2


@pytest.mark.parametrize("block", SHELL_BLOCKS[1:], ids=["first", "config", "listings", "swe", "compressor"])
def test_commands(block: str, checkout: Path) -> None:
    with EndpointProcess(calls=1) as endpoint:
        for command in re.sub(r"=\.\.\.", "=a-key-for-the-readme", block).strip().splitlines():
            program = "TRAJECTORY_COMPRESSOR" if command.startswith("trajectory") else "BATCH_RUNNER"
            more = {f"{program}_BASE_URL": endpoint.url} if "gpt-5" in command else {}
            run(["bash", "-euc", command], checkout, OPENAI_API_KEY="a-key-for-the-readme", **more)
    for path in [*checkout.glob("data/*/trajectories.jsonl"), *checkout.glob("data/*.jsonl")]:
        assert read_lines(path)


@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=["agent", "run"])
def test_programs(block: str, checkout: Path) -> None:
    (checkout / "program.py").write_text(block, encoding="utf-8")
    said = run(["python", "program.py"], checkout)
    assert said
    for expected in re.findall(r"^# (.*)$", block, re.MULTILINE):
        assert expected in said.splitlines()


def test_the_table_of_settings_is_the_definitions() -> None:
    table = README.partition("<!-- settings -->\n")[2].partition("<!-- /settings -->")[0]
    assert table == settings_table_markdown(page().options)


def test_the_table_of_the_compressors_settings_is_the_definitions() -> None:
    table = README.partition("<!-- compressor settings -->\n")[2].partition("<!-- /compressor settings -->")[0]
    assert table == settings_table_markdown(compressor_page().options)


def test_the_table_of_the_swe_settings_is_what_differs() -> None:
    table = README.partition("<!-- swe settings -->\n")[2].partition("<!-- /swe settings -->")[0]
    usual = {option.name: option for option in page().options}
    assert table == settings_table_markdown([each for each in swe_options() if usual.get(each.name) != each])


def test_the_example_output_is_what_a_run_prints(checkout: Path) -> None:
    config = "datagen-config-examples/quickstart.yaml"
    shown = run(["python", "batch_runner.py", "--config", config, "--run_name", "shown"], checkout)
    before, name, after = re.sub(r"quickstart-\d+T\d+Z", "shown", README).partition("Run shown finished")
    example = before.rpartition("```\n")[2] + name + after.partition("```")[0]
    first = "sandboxes: bubblewrap\n14 prompts to run on bubblewrap\n"  # from make, and beside the output
    assert example == f"{first}{shown}trajectories: data/shown/trajectories.jsonl\n"


def test_the_table_of_toolsets_is_the_programs() -> None:
    rows = [line.split("|") for line in README.partition("## Toolsets\n")[2].partition("\n```\n")[0].splitlines()]
    table = {row[1].strip(" `"): tuple(re.findall(r"`(\w+)`", row[2])) for row in rows if len(row) > 3}
    assert {name: tools for name, tools in table.items() if name in TOOLSETS} == TOOLSETS


@pytest.mark.parametrize("folder", [".", "swe", "compression", "batch", "agent", "tools"])
def test_the_map_names_every_module_in_its_folder(folder: str) -> None:
    present = sorted(path.name for path in (ROOT / folder).glob("*.py") if path.name != "__init__.py")
    assert sorted(_modules_on_the_map()[folder]) == present


def _modules_on_the_map() -> dict[str, list[str]]:
    """The modules on the map's lines, by the folder under whose line they stand."""
    named: dict[str, list[str]] = {".": []}
    folder = "."
    for line in README.partition("## Map\n")[2].partition("```\n")[2].partition("```")[0].splitlines():
        if heading := re.match(r"([a-z.-]+)/", line):
            folder = heading[1]
        named.setdefault(folder, []).extend(re.findall(r"\b[a-z_]+\.py\b", line))
    return named
