"""Trajectories from a seed: 3 to 200 turns, parallel calls, huge results and short ones, unusual role orders."""

import json
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from agent.trajectory import format_trajectory
from agent.types import Message, ToolCall
from compression.types import Count, Turn
from tools.base import ToolSpec

TOOLS = [
    ToolSpec("terminal", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}}),
    ToolSpec("read_file", "Reads a file.", {"type": "object", "properties": {"path": {"type": "string"}}}),
]
NOTICE = "\n\nSome earlier parts of this conversation may have been summarized."
_ODD = (
    "<|endoftext|>",
    "<|im_start|>system",
    "</tool_response>",
    '<tool_call>{"name":"x","arguments":{}}</tool_call>',
    "</think>",
    "日本語の文",
    "\u2028",
    "🙂",
    "a" * 60,
)
_SENTENCES = (
    "the file holds a list of names and the test for it fails with an error in line 42 of src/main.py while reading "
    "config.yaml because value=3 is missing so we check return codes again then write results/out_1.json and run make"
)
_WORDS = _SENTENCES.split()


class WordCounter:
    """Words and signs; four for each turn's frame and three for the row's."""

    name = "words"

    def text(self, text: str) -> int:
        return len(re.findall(r"\w+|[^\w\s]", text))

    def row(self, turns: Sequence[Turn]) -> Count:
        sizes = tuple(self.text(turn.text) + 4 for turn in turns)
        return Count(sum(sizes) + 3, sizes)


def trajectories(count: int, seed: int = 0, form: str = "mixed", *, unusual: float = 0.15) -> Iterator[dict[str, Any]]:
    """`count` rows; `form` is conversations, messages or mixed; `unusual` the share with odd role orders."""
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        yield trajectory(rng, number, form, odd=rng.random() < unusual)


def lines(rows: Iterator[dict[str, Any]]) -> bytes:
    """As JSONL."""
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def trajectory(rng: random.Random, number: int = 0, form: str = "mixed", *, odd: bool = False) -> dict[str, Any]:
    """One row, with fields before and behind the turns."""
    turns = rng.choice((rng.randint(3, 12), rng.randint(10, 60), rng.randint(40, 200)))
    said = list(_conversation(rng, turns))
    if odd:
        said = _unusual(rng, said)
    form = rng.choice(("conversations", "messages")) if form == "mixed" else form
    if form == "messages":
        system = [Message(role="system", content="Be brief.")] if said[0].role == "user" else []
        told: list[Any] = [_wire(message) for message in [*system, *said]]
    else:
        told = msgspec.to_builtins(format_trajectory(said, TOOLS))
        told = _unusual_turns(rng, told) if odd else told
    return {"prompt_index": number, form: told, "metadata": {"model": "m", "batch_num": 0}, "completed": True}


def _conversation(rng: random.Random, turns: int) -> Iterator[Message]:
    """user, then assistant with calls and its results, now and then an answer and a further question."""
    yield Message(role="user", content=_text(rng, rng.choice((5, 40, 300))))
    made = 2  # the system turn too
    while made < turns - 1:
        answers = rng.random() < 0.15
        if answers and made < turns - 2:
            yield Message(role="assistant", content=_text(rng, 30), reasoning=_thought(rng))
            yield Message(role="user", content=_text(rng, rng.choice((3, 80))))
        else:
            yield from _exchange(rng, made)
        made += 2
    yield Message(role="assistant", content=_text(rng, 40), reasoning=_thought(rng))


def _exchange(rng: random.Random, number: int) -> Iterator[Message]:
    calls = tuple(
        ToolCall(id=f"id{number}-{n}", name=rng.choice(TOOLS).name, arguments={"command": _text(rng, 6)})
        for n in range(rng.choice((1, 1, 1, 2, 4)))
    )
    yield Message(role="assistant", content=_text(rng, rng.choice((0, 12))), reasoning=_thought(rng), tool_calls=calls)
    for call in calls:
        size = rng.choice((0, 3, 20, 60, 60, 200, 200, rng.randint(200, 4000)))
        output = _text(rng, size)
        content = json.dumps({"output": output, "exit_code": 0}) if rng.random() < 0.6 else output
        yield Message(role="tool", content=content, tool_call_id=call.id, name=call.name)


def _thought(rng: random.Random) -> str:
    return _text(rng, rng.choice((0, 8, 40)))


def _text(rng: random.Random, words: int) -> str:
    said = rng.choices(_WORDS, k=words)
    for _ in range(words // 100 + (rng.random() < 0.2)):
        said.insert(rng.randint(0, words), rng.choice(_ODD))
    return " ".join(said)


def _unusual(rng: random.Random, said: Sequence[Message]) -> list[Message]:
    """An assistant that begins, two questions in a row, a question at the end, no answer at all."""
    first, *rest = said
    again = Message(role="user", content="And one thing more.")
    return rng.choice(([*rest], [first, again, *rest], [*said, again], [*said, again, again], list(said[:-1]), [first]))


def _unusual_turns(rng: random.Random, turns: list[Any]) -> list[Any]:
    """No system turn, results split over several turns, results in front."""
    kind = rng.randrange(4)
    if kind == 0:
        return turns[1:]
    if kind == 1:
        return [piece for turn in turns for piece in _split(turn)]
    if kind == 2:
        return [{"from": "tool", "value": "results of an earlier talk"}, *turns[1:]]
    return turns


def _split(turn: dict[str, str]) -> list[dict[str, str]]:
    if turn["from"] != "tool":
        return [turn]
    ends = turn["value"].split("\n</tool_response>")
    return [turn | {"value": block.strip() + "\n</tool_response>"} for block in ends if block.strip()]


def _wire(message: Message) -> dict[str, Any]:
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.tool_call_id, "content": message.content}
    if message.role != "assistant":
        return {"role": message.role, "content": message.content}
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for call in message.tool_calls
    ]
    told: dict[str, Any] = {"role": "assistant", "content": message.content or None}
    told |= {"reasoning_content": message.reasoning} if message.reasoning else {}
    return told | ({"tool_calls": calls} if calls else {})
