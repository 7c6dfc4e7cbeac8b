"""The schema of a row's answer."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from agent import schema
from agent.schema import problem_in_time, schema_fault, schema_problem

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
WORD = {"type": "object", "properties": {"w": {"type": "string", "pattern": "^[a-z]+$"}}}
HELD = {"$ref": "#/$defs/n", "$defs": {"n": NUMBER}}
NAMED = {"properties": {"a": {"$ref": "other"}}, "$defs": {"o": {"$id": "other", "type": "integer"}}}
TREE = {"properties": {"next": {"$ref": "#"}}, "type": "object"}


@pytest.mark.parametrize(
    ("wanted", "fault"),
    [
        (NUMBER, ""),
        (WORD, ""),
        (HELD, ""),
        (NAMED, ""),
        (TREE, ""),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"a": {}}, **HELD}, ""),
        ({"type": "json_object"}, "'json_object' is not valid"),
        ({"$schema": 7}, "$schema is no text"),
        ({"$ref": "#/$defs/none"}, "refers to"),
        ({"properties": {"a": {"items": {"$ref": "#nowhere"}}}}, "refers to"),
        ({"anyOf": [{}, {"$ref": "https://example.com/schema.json"}]}, "refers to 'https://example.com/schema.json'"),
        ({"$ref": "#"}, "refers to itself"),
        ({"pattern": "("}, "is not a 'regex'"),
    ],
)
def test_what_is_wrong_with_a_schema(wanted: dict[str, Any], fault: str) -> None:
    found = schema_fault(wanted)
    assert fault in found
    assert bool(found) == bool(fault)


@pytest.mark.parametrize(
    ("text", "wanted", "problem"),
    [
        ('{"n": 1}', NUMBER, ""),
        ('{"n": 1}', HELD, ""),
        ("{}", HELD, "'n' is a required property at $"),
        ('{"a": "x"}', NAMED, "'x' is not of type 'integer' at $.a"),
        ('{"next": {"next": 1}}', TREE, "at $.next.next"),
        ("n", NUMBER, "not JSON"),
        ("1", {"$ref": "https://example.com/a"}, "Unresolvable"),
    ],
)
def test_what_an_answer_misses(text: str, wanted: dict[str, Any], problem: str) -> None:
    found = schema_problem(text, wanted)
    assert problem in found
    assert bool(found) == bool(problem)


async def test_patterns_are_looked_for_in_a_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit(3)")
    assert await problem_in_time('{"w": "word"}', WORD) == ""
    assert "'Wörd' does not match" in await problem_in_time('{"w": "Wörd"}', WORD)


@pytest.mark.parametrize("how", ["late", "cancelled"])
async def test_a_pattern_that_takes_for_ever_holds_nobody_up(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "TIME_LIMIT", 1.0 if how == "late" else 60.0)
    wanted = {"type": "string", "pattern": "^(a+)+$"}
    began = time.monotonic()
    check = asyncio.create_task(problem_in_time(f'"{"a" * 60}!"', wanted))
    if how == "cancelled":
        for _ in range(30):
            await asyncio.sleep(0.01)
        assert not check.done(), "the loop goes on beside it"
        check.cancel()
        with pytest.raises(asyncio.CancelledError):
            await check
    else:
        assert await check == "the answer could not be checked against its schema within 1 s"
    assert time.monotonic() - began < 10, "left to itself it ends after 11"
