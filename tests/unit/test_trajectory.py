"""The trajectory format against turns written by hand, and for any text there and back."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from agent.row import Turn
from agent.trajectory import (
    format_trajectory,
    has_reasoning,
    normal_form,
    parse_trajectory,
    reasoning_counts,
    system_turn,
    validate,
)
from agent.types import Message, ToolCall
from tools.base import ToolSpec

DATA = Path(__file__).parents[1] / "data"
TERMINAL = ToolSpec("terminal", "Runs a command.", {"type": "object"})


def golden(name: str) -> list[Any]:
    cases = [json.loads(line) for line in (DATA / name).read_bytes().decode().split("\n") if line]
    return [pytest.param(case, id=case["case"]) for case in cases]


def messages_of(case: dict[str, Any]) -> list[Message]:
    return msgspec.convert(case["messages"], list[Message])


# --- by hand


@pytest.mark.parametrize("case", golden("golden_turns.jsonl"))
def test_turns_are_those_written_by_hand(case: dict[str, Any]) -> None:
    system, *turns = format_trajectory(messages_of(case), [TERMINAL])
    assert system == Turn("system", system_turn([TERMINAL]))
    assert msgspec.to_builtins(turns) == case["turns"]


@pytest.mark.parametrize("case", golden("golden_turns.jsonl"))
def test_hand_written_turns_read_back_as_their_messages(case: dict[str, Any]) -> None:
    turns = msgspec.convert(case["turns"], list[Turn])
    assert parse_trajectory(turns).messages == normal_form(messages_of(case))


@pytest.mark.parametrize("case", golden("golden_system.jsonl"))
def test_system_turn(case: dict[str, Any]) -> None:
    tools = msgspec.convert(case["tools"], list[ToolSpec])
    value = system_turn(tools, case["system_text"])
    assert f"Here are the available tools:\n<tools>\n{case['tools_json']}\n</tools>\n" in value
    schema = (
        ":\n{'title': 'FunctionCall', 'type': 'object', 'properties': {'name': {'title': 'Name', 'type': 'string'}, "
        "'arguments': {'title': 'Arguments', 'type': 'object'}}, 'required': ['name', 'arguments']}\n"
    )
    assert schema in value
    example = ".\nExample:\n<tool_call>\n{'name': <function-name>,'arguments': <args-dict>}\n</tool_call>"
    assert value.endswith(example + case["after"])
    read = parse_trajectory([Turn("system", value)])
    assert read.tools == tools
    assert [message.content for message in read.messages] == ([case["system_text"]] if case["system_text"] else [])


def test_a_system_message_stands_behind_the_tools_wherever_it_came_from() -> None:
    user = Message(role="user", content="q")
    first, second = Message(role="system", content="one"), Message(role="system", content="two")
    turns = format_trajectory([first, user, second], [TERMINAL])
    assert turns == [Turn("system", system_turn([TERMINAL], "one\n\ntwo")), Turn("human", "q")]
    assert format_trajectory([user, second], [TERMINAL], system_text="one") == turns
    assert parse_trajectory(turns).messages == [Message(role="system", content="one\n\ntwo"), user]


def test_a_system_turn_worded_otherwise_is_read() -> None:
    value = system_turn([TERMINAL], "Be brief.").replace("You are", "Thou art").replace("Put each", "Place every")
    read = parse_trajectory([Turn("system", value)])
    assert (read.tools, read.messages[0].content) == ([TERMINAL], "Be brief.")
    assert parse_trajectory([Turn("system", "plain")]).messages == [Message(role="system", content="plain")]


def test_turns_of_other_writers_are_read() -> None:
    turns = [
        Turn("human", "q"),
        Turn("gpt", 'no thought <tool_call>{"name": "t", "arguments": {"a": 1}}</tool_call>'),
        Turn("tool", '<tool_response> {"name": "t", "content": {"b": 2}} </tool_response>'),
        Turn("gpt", "<think>quick</think>done"),
    ]
    call = ToolCall(id="call_1_0", name="t", arguments={"a": 1})
    assert parse_trajectory(turns).messages == [
        Message(role="user", content="q"),
        Message(role="assistant", content="no thought", tool_calls=(call,)),
        Message(role="tool", content='{"b":2}', tool_call_id="call_1_0", name="t"),
        Message(role="assistant", content="done", reasoning="quick"),
    ]


def test_results_without_ids_answer_in_order() -> None:
    calls = tuple(ToolCall(id="", name=name) for name in ("a", "b"))
    said = [Message(role="assistant", tool_calls=calls)]
    said += [Message(role="tool", content=text) for text in ("1", "2")]
    assert [(m.name, m.content, m.tool_call_id) for m in normal_form(said)[1:]] == [
        ("a", "1", "call_1_0"),
        ("b", "2", "call_1_1"),
    ]


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_arguments_that_json_cannot_hold(number: float) -> None:
    call = ToolCall(id="c", name="terminal", arguments={"timeout": number}, problem="no number")
    said = [Message(role="user"), Message(role="assistant", tool_calls=(call,), wire={"reasoning": "r"})]
    turns = format_trajectory(said, [])
    assert '"arguments": {}' in turns[2].value
    assert parse_trajectory(turns).messages == normal_form(said)


@pytest.mark.parametrize(
    "content", ['{"a":1e999}', "[" * 5000 + "]" * 5000, '{"a":' + "9" * 5000 + "}", "{", "\ufeff{}"]
)
def test_a_result_that_only_looks_like_json_stays_text(content: str) -> None:
    said = [
        Message(role="user"),
        Message(role="assistant", tool_calls=(ToolCall(id="c", name="t"),)),
        Message(role="tool", content=content, tool_call_id="c"),
    ]
    turns = format_trajectory(said, [])
    payload = json.loads(turns[3].value.split("\n")[1])
    assert payload["content"] == content
    assert parse_trajectory(turns).messages[-1].content == content


def test_a_common_result_comes_back_byte_for_byte() -> None:
    content = msgspec.json.encode(
        {"output": "é\u2028<tools>\\", "exit_code": 0, "seconds": 1.5, "error": None}
    ).decode()
    said = [
        Message(role="assistant", tool_calls=(ToolCall(id="c", name="t"),)),
        Message(role="tool", content=content, tool_call_id="c"),
    ]
    assert parse_trajectory(format_trajectory(said, [])).messages[1].content == content


def test_the_same_tools_are_told_alike_and_changed_ones_are_not() -> None:
    tools = [ToolSpec(f"t{n}", "", {"n": n}) for n in range(300)]
    told = [system_turn([tool]) for tool in tools]
    assert told == [system_turn((tool,)) for tool in tools]
    assert len(set(told)) == 300
    assert system_turn(tools[:2]) != system_turn(tools[1::-1])


# --- any text

PIECES = [
    "<",
    ">",
    "&",
    "amp;",
    "lt;",
    "/",
    "\\",
    '"',
    "\n",
    " ",
    "\0",
    "\ud83d",
    "\ude00",
    "\u2028",
    "{",
    "[",
    "]",
    "}",
]
TAGS = [f"<{slash}{tag}>" for tag in ("think", "tools", "tool_call", "tool_response") for slash in ("", "/")]
texts: SearchStrategy[str] = st.one_of(
    st.lists(st.sampled_from(PIECES + TAGS + [tag[1:] for tag in TAGS]) | st.text(max_size=4), max_size=12).map(
        "".join
    ),
    st.text(st.characters(), max_size=20),
    st.sampled_from(["", "{}", "[1]", ' {"a": "<think>"}', "null", '"x"', '{"a":1,"a":2}', '{"\\ud800":[1.0,-0,1e5]}']),
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
calls_made = st.builds(
    ToolCall, id=st.sampled_from("abc"), name=texts, arguments=st.dictionaries(texts, values, max_size=3)
)
results = st.builds(
    Message,
    role=st.just("tool"),
    content=texts | values.map(json.dumps),
    tool_call_id=st.sampled_from("abcd"),
    name=texts,
)
spoken = st.builds(
    Message,
    role=st.just("assistant"),
    content=texts,
    reasoning=texts,
    tool_calls=st.lists(calls_made, max_size=3).map(tuple),
)
given_texts = st.builds(Message, role=st.sampled_from(["user", "system"]), content=texts)
conversations = st.lists(spoken | results | given_texts, max_size=8)
specs = st.lists(st.builds(ToolSpec, texts, texts, st.dictionaries(texts, st.none() | texts, max_size=2)), max_size=2)


@given(conversations, specs)
def test_any_conversation_comes_back_in_normal_form(said: list[Message], tools: list[ToolSpec]) -> None:
    turns = format_trajectory(said, tools)
    normal = normal_form(said)
    read = parse_trajectory(msgspec.json.decode(msgspec.json.encode(turns), type=list[Turn]))
    assert read.messages == normal
    assert format_trajectory(read.messages, read.tools) == turns
    assert normal_form(normal) == normal
    assert not [turn for turn in turns if "\0" in turn.value]


@given(conversations)
def test_blocks_can_be_counted_by_their_tags(said: list[Message]) -> None:
    turns = format_trajectory(said, [])
    by_tag = [turn.value.count("<tool_call>") for turn in turns if turn.sender == "gpt"]
    assert by_tag == [len(message.tool_calls) for message in said if message.role == "assistant"]
    assert sum(turn.value.count("<tool_response>") for turn in turns if turn.sender == "tool") == sum(by_tag)
    assert all(turn.value.count("<think>") == 1 for turn in turns if turn.sender == "gpt")


@given(st.lists(spoken, max_size=4))
def test_every_orderly_conversation_is_valid(replies: list[Message]) -> None:
    said = [Message(role="user", content="q")]
    for reply in replies:
        said += [reply, Message(role="user", content="<tool_call>")]
    assert validate(format_trajectory(said, [TERMINAL])) == []


@given(specs, texts)
def test_any_tools_and_system_text_come_back(tools: list[ToolSpec], system_text: str) -> None:
    read = parse_trajectory([Turn("system", system_turn(tools, system_text))])
    again = parse_trajectory([Turn("system", system_turn(read.tools, system_text))])
    assert again == read
    assert [tool.name.encode() for tool in read.tools] == [
        tool.name.encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\0", "\ufffd").encode()
        for tool in tools
    ]


# --- counting and checking

THOUGHT = Turn("gpt", "<think>\nso\n</think>\nyes")
PLACEHOLDER = Turn("gpt", "<think>\n</think>\nyes")
CALLING = Turn("gpt", '<think>\n</think>\n<tool_call>\n{"name": "t", "arguments": {}}\n</tool_call>')
ANSWER = Turn("tool", '<tool_response>\n{"tool_call_id": "call_1_0", "name": "t", "content": ""}\n</tool_response>')
HEAD = [Turn("system", "s"), Turn("human", "h")]


def test_reasoning_is_what_the_think_block_holds() -> None:
    assert has_reasoning(THOUGHT.value)
    assert not has_reasoning(PLACEHOLDER.value)
    assert not has_reasoning("<think>\n \n</think>\nthinking hard")
    assert not has_reasoning("the words <think>are</think> these")


def test_reasoning_counts_leave_out_what_was_given() -> None:
    turns = [*HEAD, THOUGHT, Turn("human", "<think>x</think>"), PLACEHOLDER, THOUGHT]
    assert reasoning_counts(turns) == (3, 2)
    assert reasoning_counts(turns, skip=4) == (2, 1)
    assert reasoning_counts([], skip=1) == (0, 0)


def test_valid_trajectories() -> None:
    assert validate([*HEAD]) == []
    assert validate([*HEAD, THOUGHT]) == []
    assert validate([*HEAD, CALLING, ANSWER]) == []
    assert validate([*HEAD, CALLING, ANSWER, THOUGHT, HEAD[1], PLACEHOLDER]) == []


TWICE = Turn("tool", f"{ANSWER.value}\n{ANSWER.value}")
OTHER_NAME = Turn("tool", ANSWER.value.replace('"t"', '"u"'))


@pytest.mark.parametrize(
    ("turns", "problem"),
    [
        ([], "no system and human turn"),
        ([HEAD[1], THOUGHT], "turn 0: 'human' stands where system belongs"),
        ([HEAD[0], THOUGHT], "turn 1: 'gpt' stands where human belongs"),
        ([*HEAD, HEAD[0]], "turn 2: 'system' stands where"),
        ([*HEAD, Turn("assistant", "")], "turn 2: 'assistant' stands where"),
        ([*HEAD, HEAD[1]], "turn 2: a second human turn in a row"),
        ([*HEAD, THOUGHT, THOUGHT], "turn 3: a second gpt turn in a row"),
        ([*HEAD, Turn("gpt", "yes")], "turn 2: no think block in front"),
        ([*HEAD, Turn("gpt", "<think>no end")], "turn 2: no think block in front"),
        ([*HEAD, Turn("gpt", THOUGHT.value + THOUGHT.value)], "turn 2: a tag outside its place"),
        ([*HEAD, Turn("gpt", THOUGHT.value + "</tool_response>")], "turn 2: a tag outside its place"),
        ([*HEAD, Turn("gpt", THOUGHT.value + "<tool_call>")], "turn 2: a tag outside its place"),
        ([*HEAD, CALLING], "the last call has no answer"),
        ([*HEAD, CALLING, HEAD[1]], "turn 3: answers [] to calls of ['t']"),
        ([*HEAD, THOUGHT, ANSWER], "turn 3: answers ['t'] to calls of []"),
        ([*HEAD, CALLING, TWICE], "turn 3: answers ['t', 't'] to calls of ['t']"),
        ([*HEAD, CALLING, OTHER_NAME], "turn 3: answers ['u'] to calls of ['t']"),
        ([*HEAD, CALLING, ANSWER, ANSWER], "turn 4: a second tool turn in a row"),
        ([*HEAD, Turn("gpt", CALLING.value.replace("{}", "[]")), ANSWER], "turn 2: Expected `object`, got `array`"),
        ([*HEAD, Turn("gpt", CALLING.value.replace("{}", "}")), ANSWER], "turn 2: JSON is malformed"),
        ([*HEAD, Turn("gpt", CALLING.value + "\nlater"), ANSWER], "turn 2: text beside a block"),
        ([*HEAD, CALLING, Turn("tool", ANSWER.value.replace('""', '"</think>"'))], "turn 3: a tag outside"),
        ([*HEAD, CALLING, Turn("tool", "so: " + ANSWER.value)], "turn 3: text beside a block"),
        ([*HEAD, THOUGHT, Turn("tool", "")], "turn 3: answers [] to calls of []"),
    ],
)
def test_problems_are_named(turns: list[Turn], problem: str) -> None:
    assert [found for found in validate(turns) if found.startswith(problem)], validate(turns)


@pytest.mark.parametrize(
    ("turns", "problem"),
    [
        ([*HEAD, Turn("observation", "")], "turn 2: 'observation' does not belong here"),
        ([*HEAD, HEAD[0]], "turn 2: 'system' does not belong here"),
        ([Turn("system", "<tools>\n[{]\n</tools>\n")], "turn 0: JSON is malformed"),
        ([Turn("gpt", "<tool_call>\n[]\n</tool_call>")], "turn 0: Expected `object`, got `array`"),
        ([Turn("gpt", "<tool_call>no end")], "turn 0: text beside a block: <tool_call>no end"),
        ([Turn("gpt", CALLING.value + "then")], "turn 0: text beside a block: then"),
        ([Turn("tool", "plain")], "turn 0: text beside a block: plain"),
    ],
)
def test_what_cannot_be_read_is_said(turns: list[Turn], problem: str) -> None:
    with pytest.raises(ValueError, match=r"^turn \d: ") as caught:
        parse_trajectory(turns)
    assert str(caught.value).startswith(problem)
