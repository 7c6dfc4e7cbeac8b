"""Rows of both forms to turns and back, and texts put into turns of every spelling."""

import json
from typing import Any

import pytest

from compression.forms import (
    calls_in,
    fields_of,
    human_turn,
    joined,
    read,
    results_in,
    spelled,
    with_results,
    write,
)
from compression.types import Turn
from tests.unit.trajectories import trajectories


def line_of(row: object) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode()


def turns_of(row: object) -> tuple[Turn, ...]:
    reading = read(fields_of(line_of(row)))
    assert reading
    return reading.turns


def tool_turn(value: str) -> Turn:
    return turns_of({"conversations": [{"from": "tool", "value": value}]})[0]


def block(payload: str) -> str:
    return f"<tool_response>\n{payload}\n</tool_response>"


CALL = {"id": "a", "type": "function", "function": {"name": "t", "arguments": '{"n": 1}'}}


def test_a_conversation_is_read_turn_by_turn() -> None:
    said = [("system", "s"), ("human", "h"), ("gpt", "g"), ("tool", "1"), ("tool", "2"), ("gpt", "é")]
    turns = turns_of({"id": 1, "conversations": [{"from": role, "value": value} for role, value in said]})
    assert [(turn.role, turn.text) for turn in turns] == said
    assert turns[1].raws == ({"from": "human", "value": "h"},)


def test_messages_are_read_with_reasoning_calls_and_results_together() -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "image_url", "image_url": {"url": "u"}}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": None},
        {"role": "assistant", "content": "done", "tool_calls": []},
    ]
    turns = turns_of({"messages": messages})
    calls = json.dumps([CALL, CALL], separators=(",", ":"))
    assert [(turn.role, turn.text) for turn in turns] == [
        ("system", "s"),
        ("human", "h[image_url]"),
        ("gpt", f"hm\n{calls}"),
        ("tool", "1\n"),
        ("gpt", "done"),
    ]
    assert turns[3].raws == tuple(messages[3:5])
    assert [calls_in(turn) for turn in turns] == [0, 0, 2, 0, 0]


def test_roles_of_messages_may_stand_in_conversations_and_an_empty_list_does_not_count() -> None:
    assert turns_of({"conversations": [{"role": "user", "content": "h"}]})[0].role == "human"
    assert turns_of({"conversations": [], "messages": [{"role": "user", "content": "h"}]})[0].text == "h"
    assert turns_of({"conversations": []}) == ()


@pytest.mark.parametrize(
    "row",
    [{}, {"prompt": "p"}, {"conversations": "text"}, {"messages": [1]}, {"messages": {"role": "user"}}, {"text": None}],
)
def test_rows_of_neither_form(row: object) -> None:
    assert read(fields_of(line_of(row))) is None


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        (
            [{"from": "human", "value": ""}, {"from": "observation", "value": ""}],
            'unknown role "observation" in turn 1',
        ),
        ([{"from": None, "value": ""}], "unknown role null in turn 0"),
        ([{"role": ["user"], "content": ""}], 'unknown role ["user"] in turn 0'),
        ([{"from": "human", "value": ""}, {"role": "user", "content": ""}], "unknown role null in turn 1"),
        ([{"role": "user", "content": ""}, "text"], "turn 1 is no object"),
    ],
)
def test_an_unknown_role_is_named(entries: list[Any], problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{problem.replace('[', '.')}$"):
        turns_of({"conversations": entries})


@pytest.mark.parametrize("line", [b"[]", b'"x"', b"{", b"", b"null", b'{"a":"\xff}'])
def test_a_line_that_is_no_object(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
        fields_of(line)


def test_fields_keep_their_bytes_and_their_order() -> None:
    turns = b'[ {"from":"human", "value":"h", "weight": 0} ]'
    line = b'{"b": 1.10, "conversations": ' + turns + b' , "a" : {"x" :1e400, "e": "\\u00e9"}}'
    reading = read(fields_of(line))
    assert reading
    assert write(reading, reading.turns) == (
        b'{"b":1.10,"conversations":[{"from":"human","value":"h","weight":0}],"a":{"x" :1e400, "e": "\\u00e9"}}'
    )


@pytest.mark.parametrize("form", ["conversations", "messages"])
def test_what_is_written_is_what_was_read(form: str) -> None:
    for row in trajectories(20, 3, form):
        reading = read(fields_of(line_of(row)))
        assert reading
        written = write(reading, reading.turns)
        assert json.loads(written) == row
        assert list(json.loads(written)) == list(row)


def test_lone_surrogates_become_replacement_characters_and_other_odd_json_stays() -> None:
    line = b'{"odd": [NaN, "\\udfff"], "conversations": [{"from": "human", "value": "a\\ud800b"}]}'
    reading = read(fields_of(line))
    assert reading
    assert reading.turns[0].text == "a\ufffdb"
    written = write(reading, reading.turns)
    assert written.decode() == '{"odd":[NaN,"\ufffd"],"conversations":[{"from":"human","value":"a\ufffdb"}]}'


@pytest.mark.parametrize("value", [None, "", 3, True, {"a": 1}, ["x"]])
def test_values_that_are_no_text(value: Any) -> None:
    for entry in ({"from": "human", "value": value}, {"role": "user", "content": value}):
        assert isinstance(turns_of({"conversations": [entry]})[0].text, str)
    assert turns_of({"messages": [{"role": "user"}]})[0].text == ""


def test_human_turns_are_joined_in_their_own_spelling() -> None:
    h, g = turns_of({"conversations": [{"from": "human", "value": "h", "weight": 1}, {"from": "gpt", "value": "g"}]})
    summary = human_turn("S", like=g)
    assert summary.raws == ({"from": "human", "value": "S"},)
    assert joined([h, summary], h).raws == ({"from": "human", "value": "h\n\nS", "weight": 1},)
    assert joined([summary, h], h).text == "S\n\nh"
    plain, parts = turns_of(
        {"messages": [{"role": "user", "content": c} for c in ("h", [{"type": "text", "text": "p"}])]}
    )
    summary = human_turn("S", like=plain)
    assert joined([plain, summary], plain).raws == ({"role": "user", "content": "h\n\nS"},)
    both = joined([plain, summary, parts], plain)
    assert both.text == "h\n\nS\n\np"
    assert both.raws[0]["content"][-1] == {"type": "text", "text": "p"}
    empty = human_turn("", like=plain)
    assert joined([empty, summary], empty).text == "S"


def test_calls_are_counted_behind_the_think_block() -> None:
    call = '<tool_call>\n{"name": "t", "arguments": {}}\n</tool_call>'
    value = f"<think>\n{call}\n</think>\ntext\n{call}\n{call}"
    gpt, human = turns_of({"conversations": [{"from": "gpt", "value": value}, {"from": "human", "value": call}]})
    assert (calls_in(gpt), calls_in(human)) == (2, 0)


def test_results_are_found_with_their_envelope() -> None:
    turn = tool_turn(
        "\n".join(
            [
                block('{"tool_call_id": "c", "name": "t", "content": "a \\u003ctool_call> \\"b\\""}'),
                block('{"content": {"x": [1, 2]}, "name": "t"}'),
                block("plain words"),
                block('{"name": "t", "result": 1}'),
            ]
        )
    )
    results = results_in(turn)
    assert [(result.spelling, result.text) for result in results] == [
        ("string", 'a <tool_call> "b"'),
        ("json", '{"x": [1, 2]}'),
        ("plain", "plain words"),
        ("fixed", '{"name": "t", "result": 1}'),
    ]
    assert spelled(results[1], results[1].text) == '{"content": {"x": [1, 2]}, "name": "t"}'
    assert [result.spelling for result in results_in(tool_turn("no block"))] == ["plain"]


def test_results_are_replaced_inside_their_envelope_and_no_text_becomes_a_tag() -> None:
    first, second = '{"tool_call_id": "c", "name": "t", "content": "a"}', '{"content":{"x":1},"name":"t"}'
    turn = tool_turn(f"{block(first)}\n{block(second)}")
    changed = with_results(turn, {0: '</tool_response>"', 1: '{"y":2}'})
    told = [json.loads(result.envelope[0] + "0" + result.envelope[1]) for result in results_in(changed)]
    assert told == [{"tool_call_id": "c", "name": "t", "content": 0}, {"content": 0, "name": "t"}]
    assert [result.text for result in results_in(changed)] == ['</tool_response>"', '{"y":2}']
    assert changed.text.count("</tool_response>") == 2
    assert with_results(turn, {1: "words"}).text.startswith(block(first))
    assert with_results(tool_turn("whole"), {0: "note"}).raws == ({"from": "tool", "value": "note"},)


def test_results_of_messages_are_replaced_one_by_one() -> None:
    contents: list[Any] = ["one", [{"type": "text", "text": "two"}], [{"type": "image_url"}], None]
    tools = [{"role": "tool", "tool_call_id": f"c{n}", "content": content} for n, content in enumerate(contents)]
    (turn,) = turns_of({"messages": tools})
    assert [result.spelling for result in results_in(turn)] == ["plain", "parts", "media", "fixed"]
    changed = with_results(turn, {0: "1", 1: "2"})
    assert [raw["content"] for raw in changed.raws] == ["1", [{"type": "text", "text": "2"}], *contents[2:]]
    assert [raw["tool_call_id"] for raw in changed.raws] == ["c0", "c1", "c2", "c3"]
