"""One definition of a run's settings serves flags, YAML, environment, manifest and help."""

import json
import re
import shlex
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch.cli import help_text, page, settings_table_markdown
from batch.options import Option, by_name
from batch.settings import (
    RunSettings,
    for_the_record,
    load_settings,
    recorded,
    records_file,
    resume_command,
    run_directory,
    run_options,
)
from tests.unit.command_lines import CommandLine
from tools.errors import UsageProblem

BASE = ["--dataset_file=d.jsonl", "--run_name=r", "--model=m"]
LINE = CommandLine(load_settings, BASE)
load, refused = LINE.load, LINE.refused


def yaml_file(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return f"--config={path}"


@pytest.mark.parametrize(
    "argv",
    [
        ["--dataset_file", "x"],
        ["--dataset-file", "x"],
        ["--dataset_file=x"],
        ["--dataset-file=x"],
        ["--input", "x"],
        ["--input=x"],
    ],
)
def test_every_spelling_of_a_flag_is_the_same(argv: list[str]) -> None:
    settings, _ = load_settings([*argv, "--run-name=r", "--model=m"], {})
    assert settings.dataset_file == "x"


@pytest.mark.parametrize(
    ("name", "alias"),
    [
        ("max_turns", "max_iterations"),
        ("max_turns", "max_steps"),
        ("output_dir", "trajectory_dir"),
        ("container_backend", "environment"),
        ("container_backend", "env"),
        ("container_backend", "backend"),
    ],
)
def test_aliases_in_flags_yaml_and_environment(name: str, alias: str, tmp_path: Path) -> None:
    value = "7"
    assert str(getattr(load(f"--{alias}", value), name)) == value
    assert str(getattr(load(yaml_file(tmp_path, f"{alias.replace('_', '-')}: '7'")), name)) == value
    assert str(getattr(load(**{f"BATCH_RUNNER_{alias.upper()}": value}), name)) == value


@pytest.mark.parametrize(
    ("argv", "on"),
    [
        (["--resume"], True),
        (["--resume=true"], True),
        (["--resume=false"], False),
        (["--no-resume"], False),
        (["--no_resume"], False),
        (["--resume", "--quiet"], True),
        ([], False),
    ],
)
def test_booleans(argv: list[str], *, on: bool) -> None:
    assert load(*argv).resume is on


def test_a_boolean_that_is_on_can_be_switched_off() -> None:
    assert load().save_all
    assert not load("--no-save-all").save_all


def test_precedence_flag_file_environment_default(tmp_path: Path) -> None:
    config = yaml_file(tmp_path, "max-turns: 5\nbatch_size: 6\n")
    environ = {"BATCH_RUNNER_BATCH_SIZE": "8", "BATCH_RUNNER_CONCURRENCY": "9", "BATCH_RUNNER_MAX_TURNS": "3"}
    settings = load(config, "--max_steps=4", **environ)
    assert (settings.max_turns, settings.batch_size, settings.concurrency, settings.max_attempts) == (4, 6, 9, 3)


WHOLE = [option for option in run_options() if "whole number" in option.expected]


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**40])
@pytest.mark.parametrize("option", WHOLE, ids=lambda option: str(option.name))
def test_no_whole_number_exceeds_64_bits(option: Option, number: int) -> None:
    with pytest.raises(UsageProblem, match=f"{option.name}: expected a whole number"):
        load_settings([f"--{option.name}={number}", "--help"], {})


def test_foreign_variables_are_left_alone() -> None:
    assert load(TERMINAL_ENV="docker", HERMES_HOME="x", OPENAI_API_KEY="k").container_backend == "auto"


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--btch_size=3"], ["--btch_size", "--batch_size"]),
        (["--max-iteratons", "3"], ["--max-iteratons", "--max_iterations"]),
        (["--list_toolset"], ["--list_toolsets"]),
        (["--no-max_turns"], ["--no-max_turns"]),
        (["--no-resume=true"], ["--no-resume=true"]),
        (["--zzzzzz"], ["--zzzzzz", "--help"]),
        (["stray"], ["'stray'"]),
        (["--resume", "yes"], ["--resume=true|false"]),
        (["--max_turns"], ["--max_turns", "whole number >= 1"]),
        (["--max_turns", "--resume"], ["--max_turns", "needs a value"]),
        (["--max_turns=0"], ["--max_turns", ">= 1", "'0'"]),
        (["--max_steps=many"], ["--max_steps", "max_turns", "whole number", "'many'"]),
        (["--resume=maybe"], ["--resume", "true or false"]),
        (["--temperature=nan"], ["--temperature", "a number >= 0"]),
        (["--timeout=inf"], ["--timeout", "a number > 0"]),
        (["--retry=failed,never"], ["--retry", "incomplete", "never"]),
        (["--max_turns=3", "--max_iterations=4"], ["max_turns is given twice", "--max_iterations"]),
        (["--model=other"], ["model is given twice"]),
        (["--command_timeout=601"], ["<= 600"]),
        (["-v"], ["'-v'"]),
    ],
)
def test_mistakes_on_the_command_line_are_named(argv: list[str], parts: list[str]) -> None:
    message = refused(*argv)
    assert all(part in message for part in parts), message


def test_a_variable_nobody_knows_is_refused_with_the_nearest() -> None:
    assert "did you mean BATCH_RUNNER_MAX_TURNS" in refused(BATCH_RUNNER_MAX_TURN="3")
    assert "BATCH_RUNNER_MAX_TURNS" in refused(BATCH_RUNNER_MAX_TURNS="x")
    assert "given twice" in refused(BATCH_RUNNER_MAX_TURNS="3", BATCH_RUNNER_MAX_STEPS="3")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("max_turn: 3", ["'max_turn'", "did you mean max_turns"]),
        ("max_turns: many", ["run.yaml", "max_turns", "whole number", "'many'"]),
        ("max_turns: true", ["max_turns", "whole number"]),
        ("timeout: .nan", ["timeout"]),
        ("max_turns: 3\nmax-turns: 4", ["given twice"]),
        ("max_turns: 3\nmax_turns: 4", ["given twice"]),
        ("max_turns: 3\nmax_steps: 4", ["given twice"]),
        ("environment:\n  type: docker", ["environment", "got a mapping"]),
        ("env: {type: docker}", ["got a mapping"]),
        ("- a", ["mapping"]),
        ("text", ["mapping"]),
        ("a: [", ["not YAML"]),
        ("a: 1\n---\nb: 2", ["not YAML"]),
        ("enabled_toolsets: {terminal: 1}", ["enabled_toolsets", "a comma list"]),
        ("prompt: [a]", ["text"]),
        ("2: 3", ["'2'"]),
    ],
)
def test_mistakes_in_yaml_are_named(text: str, parts: list[str], tmp_path: Path) -> None:
    message = refused(yaml_file(tmp_path, text))
    assert all(part in message for part in parts), message


def test_a_config_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in refused(f"--config={tmp_path / 'none.yaml'}")
    for content in (b"a: \xff\xfe\n", b"\xff\xfe"):
        (tmp_path / "bytes.yaml").write_bytes(content)
        assert "not YAML" in refused(f"--config={tmp_path / 'bytes.yaml'}")


def test_yaml_values(tmp_path: Path) -> None:
    text = """
environment: local
network: on
retry: none
only_ids: [7, "8"]
enabled-toolsets: terminal, file
volumes: [/a:/b, /c:/d:ro]
temperature: 1
save_all: no
max_cost: null
"""
    settings = load(yaml_file(tmp_path, text))
    assert settings.container_backend == "local"
    assert settings.network == "on"
    assert settings.retry == ("none",)
    assert settings.only_ids == ("7", "8")
    assert settings.enabled_toolsets == ("terminal", "file")
    assert settings.volumes == ("/a:/b", "/c:/d:ro")
    assert settings.temperature == 1.0
    assert not settings.save_all
    assert settings.max_cost is None
    assert load(yaml_file(tmp_path, "network: off")).network == "none"


def test_docker_calls_the_usual_network_default(tmp_path: Path) -> None:
    given = (load("--network=default"), load(yaml_file(tmp_path, "network: default")))
    assert [each.network for each in (*given, load(BATCH_RUNNER_NETWORK="default"))] == ["on"] * 3


def test_an_empty_config_file_says_nothing(tmp_path: Path) -> None:
    assert load(yaml_file(tmp_path, "# nothing\n")) == load()


def test_a_secret_is_never_quoted_in_an_error(tmp_path: Path) -> None:
    message = refused(yaml_file(tmp_path, "api_key: [sk-12345]"))
    assert "api_key" in message
    assert "12345" not in message


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--run_name=r", "--model=m"], "--dataset_file"),
        (["--dataset_file=d", "--prompt=p", "--run_name=r", "--model=m"], "one of them"),
        (["--prompt=  ", "--run_name=r", "--model=m"], "no prompts"),
        (["--dataset_file=d", "--run_name=r"], "--model"),
        (["--dataset_file=d", "--model=m"], "--run_name"),
        (["--prompt=p", "--model=m", "--resume"], "--run_name"),
        (["--dataset_file=d", "--model=m", "--output=a/b", "--run_name=c"], "'b'"),
        (["--dataset_file=d", "--model=m", "--output=a/b", "--output_dir=c"], "output_dir"),
        (["--dataset_file=d", "--model=m", "--output=a/b.jsonl"], "output_format=jsonl"),
        (["--dataset_file=d", "--model=m", "--output=a/b c"], "'b c'"),
    ],
)
def test_what_a_run_cannot_do_without(argv: list[str], part: str) -> None:
    assert part in refused(*argv, base=[])


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--price_in=1"], "price_out"),
        (["--deterministic", "--temperature=0.7"], "temperature"),
        (["--reasoning_disabled", "--reasoning_effort=high"], "reasoning_effort"),
        (["--retry=none,failed"], "none stands alone"),
        (["--retry="], "retry"),
        (["--output_format=,"], "output_format"),
        (["--env_allow=A B"], "env_allow"),
        (["--env_allow=A,SHELLOPTS"], "env_allow: SHELLOPTS: the sandbox's shell holds it itself"),
        (["--volumes=/a"], "HOST:/SANDBOX"),
        (["--network=a/b"], "network: expected on, none or a network's name"),
        (["--container_user=me:them"], "container_user: expected NAME or UID[:GID]"),
        (["--gpus=some"], "gpus: expected all, a number or device=ID,ID"),
        (["--base_url=localhost:1"], "http"),
        (["--finalize", "--dry_run"], "exclude"),
        (["--verbose", "--quiet"], "exclude"),
        (["--ephemeral_system_prompt=a\0b"], "text"),
    ],
)
def test_settings_that_do_not_agree(argv: list[str], part: str) -> None:
    assert part in refused(*argv)


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ".", "a b", "é", "", "x" * 201, "a\n"])
def test_a_run_name_is_one_path_component(name: str) -> None:
    assert "run_name" in refused(f"--run_name={name}", base=["--dataset_file=d", "--model=m"])


@given(st.text(max_size=12))
def test_no_run_name_leaves_the_output_directory(name: str) -> None:
    try:
        settings, _ = load_settings(["--dataset_file=d", "--model=m", f"--run_name={name}"], {})
    except UsageProblem:
        return
    assert run_directory(settings).parent == Path("data")
    assert run_directory(settings).name == name


def test_where_the_run_directory_is() -> None:
    assert run_directory(load("--trajectory_dir=out")) == Path("out/r")
    settings, _ = load_settings(["--input=d", "--model=m", "--output=a/b/"], {})
    assert (run_directory(settings), settings.run_name, records_file(settings)) == (Path("a/b"), "b", None)
    settings, _ = load_settings(["--input=d", "--model=m", "--output=a/F.jsonl", "--output_format=jsonl"], {})
    assert (run_directory(settings), settings.run_name) == (Path("a/F"), "F")
    assert records_file(settings) == Path("a/F.jsonl")


def test_finalize_needs_neither_prompts_nor_model() -> None:
    settings, action = load_settings(["--finalize", "--run_name=r"], {})
    assert (settings.finalize, action) == (True, "run")


def test_one_prompt_names_its_run_by_the_time() -> None:
    settings, _ = load_settings(["--prompt=-- hello", "--model=m"], {})
    assert re.fullmatch(r"prompt-\d{8}T\d{6}\.\d{3}Z", settings.run_name)
    assert settings.prompt == "-- hello"


def test_reasoning_disabled_keeps_samples_without_reasoning() -> None:
    assert load("--reasoning_disabled").keep_no_reasoning
    assert not load().keep_no_reasoning


def test_lists_lose_blanks_and_repetitions() -> None:
    assert load("--only_ids= a, b,,a").only_ids == ("a", "b")
    assert load("--output_format=json,turns").output_format == ("json", "turns")


@pytest.mark.parametrize("flag", ["--list_toolsets", "--list-backends", "--help", "-h", "--version"])
def test_actions_need_nothing_else(flag: str) -> None:
    _, action = load_settings([flag], {})
    assert action == (flag.lstrip("-").replace("-", "_") if flag != "-h" else "help")


def test_the_manifest_has_every_setting_and_no_secret() -> None:
    settings = load(
        "--api_key=sk-secret",
        "--vision_api_key=sk-secret",
        "--base_url=https://me:hunter2@host:8/v1?x=1",
        "--vision_base_url=https://me:hunter2@eye:8/v1",
        "--ephemeral_system_prompt=say sk-secret",
    )
    saved = for_the_record(settings, lambda text: text.replace("sk-secret", "[REDACTED:KEY]"))
    text = json.dumps(saved)
    assert "hunter2" not in text
    assert "sk-secret" not in text
    assert saved["base_url"] == "https://host:8/v1?x=1"
    assert saved["ephemeral_system_prompt"] == "say [REDACTED:KEY]"
    assert list(saved) == [option.name for option in run_options() if not option.secret]


@pytest.mark.parametrize("name", ["base_url", "search_url", "vision_base_url", "image_base_url"])
def test_addresses_are_of_the_web(name: str) -> None:
    with pytest.raises(UsageProblem, match=f"{name}: expected a URL"):
        load(f"--{name}=ftp://host")


def test_bytes_of_the_command_line_that_are_no_text_do_not_break_the_manifest() -> None:
    saved = for_the_record(load("--ephemeral_system_prompt=a\udcffb"))
    assert msgspec.json.encode(saved["ephemeral_system_prompt"]).decode() == '"a\ufffdb"'


def test_a_manifest_can_be_read_back_as_settings() -> None:
    settings = load("--temperature=0.5", "--only_ids=a,b", "--max_cost=3", "--no-save_all")
    assert msgspec.convert(json.loads(json.dumps(for_the_record(settings))), RunSettings) == settings


def test_the_command_that_resumes() -> None:
    argv = [
        "--input",
        "my file.jsonl",
        "--run-name=r",
        "--model=m",
        "--api_key",
        "sk-1",
        "--no-save_all",
        "--steal_lock",
    ]
    argv += ["--base-url=http://u:p@h/v1", "--shuffle"]
    settings, _ = load_settings(argv, {})
    command = resume_command(settings, argv)
    assert "sk-1" not in command
    assert "u:p" not in command
    words = shlex.split(command)
    assert words[:2] == ["python", "batch_runner.py"]
    again, _ = load_settings(words[2:], {})
    expected = msgspec.structs.replace(settings, api_key="", base_url="http://h/v1", resume=True, steal_lock=False)
    assert again == expected


def test_settings_alone_make_a_command_that_resumes() -> None:
    settings = load(
        "--enabled_toolsets=file,terminal", "--no-save_all", "--shuffle", "--max_cost=2.5", "--api_key=sk-1"
    )
    words = shlex.split(resume_command(settings, []))
    assert words[2:] == [
        *("--dataset_file=d.jsonl", "--shuffle", "--run_name=r", "--save_all=false"),
        *("--enabled_toolsets=file,terminal", "--model=m", "--max_cost=2.5", "--resume"),
    ]
    assert load_settings(words[2:], {})[0] == msgspec.structs.replace(settings, api_key="", resume=True)


@given(st.integers(0, 99), st.booleans(), st.lists(st.sampled_from(["a", "b c", "d'"]), unique=True))
def test_a_manifest_gives_its_settings_back(seed: int, shuffle: bool, names: list[str]) -> None:
    settings = msgspec.structs.replace(load(), seed=seed, shuffle=shuffle, only_ids=tuple(names), temperature=0.5)
    saved = msgspec.json.decode(msgspec.json.encode({"settings": for_the_record(settings)}))
    assert recorded(saved) == settings
    with pytest.raises(UsageProblem, match="damaged"):
        recorded({"settings": {"no_such_setting": 1}})


def test_the_command_that_resumes_one_prompt_names_its_run() -> None:
    argv = ["--prompt=say 'hi'; rm -rf $HOME", "--model=m"]
    settings, _ = load_settings(argv, {})
    words = shlex.split(resume_command(settings, argv))
    again, _ = load_settings(words[2:], {})
    assert again == msgspec.structs.replace(settings, resume=True)


def test_the_command_that_resumes_names_a_copied_dataset(tmp_path: Path) -> None:
    argv = ["--dataset_file=-", "--run_name=r", "--model=m", f"--output_dir={tmp_path}"]
    settings, _ = load_settings(argv, {})
    copied = msgspec.structs.replace(settings, dataset_file=f"{tmp_path}/r/dataset.jsonl")
    for flags in (argv, argv[1:]):  # where the environment or a file named it, the command has to
        words = shlex.split(resume_command(copied, flags))
        assert words.count(f"--dataset_file={tmp_path}/r/dataset.jsonl") == 1


def test_help_and_readme_table_name_every_setting_with_its_default() -> None:
    text, table = help_text(page()), settings_table_markdown(page().options)
    for option in run_options():
        assert re.search(rf"^  --{option.name} ", text, re.MULTILINE)
        assert f"| `{option.name}` |" in table
        assert all(f"--{alias}" in text for alias in option.aliases)
    assert "[100]" in next(entry for entry in text.splitlines() if "--log_prefix_chars" in entry)
    assert all(len(entry) <= 115 for entry in text.splitlines())
    assert "| `request_timeout` |  | 600 |" in table


def test_no_two_settings_share_a_name() -> None:
    options = run_options()
    assert len(by_name(options)) == sum(1 + len(option.aliases) for option in options)


@given(st.lists(st.text(max_size=20), max_size=4))
def test_any_command_line_is_read_or_refused_in_one_line(argv: list[str]) -> None:
    said = ""
    try:
        load_settings(argv, {})
    except UsageProblem as problem:
        said = str(problem)
    assert len(said.splitlines()) <= 1
