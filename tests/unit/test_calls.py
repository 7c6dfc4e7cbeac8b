"""Which calls may run: names, arguments, and text that only looks like a call."""

import pytest

from agent.calls import check_call, split_calls
from agent.text import clean
from agent.types import RawCall
from tools.toolsets import BUILT_IN

TOOLS = {tool.spec.name: tool for tool in BUILT_IN.select(["terminal", "write_file"])}


def check(arguments: object, name: str = "terminal", *, cut: bool = False) -> tuple[str, dict[str, object]]:
    checked = check_call(RawCall(id="a", name=name, arguments=arguments), "a", TOOLS, cut=cut, purge=clean)
    assert bool(checked.call.problem) == bool(checked.problem_kind) == (checked.tool is None)
    return checked.problem_kind, checked.call.arguments


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ('{"command": "ls"}', {"command": "ls"}),
        ({"command": "ls"}, {"command": "ls"}),
        ('{"command": "a\nb"}', {"command": "a\nb"}),
    ],
)
def test_good_arguments(arguments: object, kept: dict[str, object]) -> None:
    assert check(arguments) == ("", kept)


def test_missing_arguments_are_an_empty_object() -> None:
    for nothing in (None, "", "  "):
        assert check(nothing) == ("invalid_arguments", {})  # terminal needs a command


@pytest.mark.parametrize(
    "text", ['{"path": "a.txt", "content": "xx', '{"path": "a.txt", "content":', '{"path": "a.txt"', "{"]
)
@pytest.mark.parametrize("cut", [True, False])
def test_cut_arguments_are_told_from_wrong_ones(text: str, cut: bool) -> None:
    assert check(text, "write_file", cut=cut) == ("truncated", {})


@pytest.mark.parametrize("text", ['{"command": list_windows"}', "[1, 2]", "null", '"ls"', "7", "{'command': 'ls'}"])
def test_wrong_arguments(text: str) -> None:
    assert check(text) == ("invalid_arguments", {})


def test_problems_quote_the_first_200_characters() -> None:
    text = '{"command": oops' + "x" * 1000 + '"}'
    problem = check_call(RawCall(name="terminal", arguments=text), "a", TOOLS, cut=False, purge=clean).call.problem
    assert text[:200] in problem
    assert text[:201] not in problem


def test_an_empty_argument_of_a_cut_reply_is_cut() -> None:
    assert check("", cut=True) == ("truncated", {})


@pytest.mark.parametrize("name", ["", "no_such_tool", "read_file", "Terminal"])
def test_unknown_names_keep_their_arguments(name: str) -> None:
    assert check('{"a": 1}', name) == ("invalid_tool", {"a": 1})


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("arguments", ['{"a": oops}', '{"a": "x', "[1]", ""])
def test_an_unknown_name_comes_before_what_is_wrong_with_its_arguments(arguments: str, cut: bool) -> None:
    assert check(arguments, "no_such_tool", cut=cut) == ("invalid_tool", {})


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name":"terminal","arguments":{"command":"ls"}}</tool_call>',
        'Let me look.\n<tool_call>\n{"name": "terminal", "arguments": {"command": "ls"}}\n</tool_call>',
        '{"name": "terminal", "arguments": {"command": "ls"}}',
        '```json\n{"name": "terminal", "arguments": {"command": "ls"}}\n```',
        "<function=terminal>\n<parameter=command>\nls\n</parameter>\n</function>",
        '<function=terminal>{"command": "ls"}</function>',
        "<tool_call>\n<function=terminal>\n<parameter=command>ls</parameter>\n</function>\n</tool_call>",
    ],
)
def test_calls_written_as_text(text: str) -> None:
    (found,), prose = split_calls(text, ["terminal"])
    assert prose in ("", "Let me look.")
    assert check_call(found, "a", TOOLS, cut=False, purge=clean).call.arguments == {"command": "ls"}
    assert split_calls(text, ["read_file"]) == ((), text)


@pytest.mark.parametrize(
    "text", ["", "The name of the tool is terminal.", '{"a": 1}', "<tool_call>", "{", "<function="]
)
def test_prose_is_no_call(text: str) -> None:
    assert split_calls(text, ["terminal"]) == ((), text)


CALL = '{"name": "terminal", "arguments": {"command": "ls"}}'


@pytest.mark.parametrize(
    ("text", "prose"),
    [
        (f"Let me look. <tool_call>{CALL}</tool_call> ", "Let me look."),
        (CALL, ""),
        (f"Let me look.\n```json\n{CALL}\n```\nThen on.", "Let me look.\n\nThen on."),
        (f'```json\n{{"a": 1}}\n```\n```json\n{CALL}\n```', '```json\n{"a": 1}\n```'),
    ],
)
def test_the_prose_around_calls_remains(text: str, prose: str) -> None:
    found, rest = split_calls(text, ["terminal"])
    assert (len(found), rest) == (1, prose)
