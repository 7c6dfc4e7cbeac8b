"""Rows to turns and back: `from/value` conversations and OpenAI `messages` alike. Pure.

A field that nobody changed keeps its bytes. Turns with lone surrogates are cleaned as at every other border. Text that
is put into a turn keeps the turn's own spelling: a string, or the list of parts that `messages` allow.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from agent.text import clean
from agent.trajectory import without_tags
from compression.types import Role, Turn

Json = dict[str, Any]

_FROM: dict[Any, Role] = {"system": "system", "human": "human", "gpt": "gpt", "tool": "tool"}
_ROLES: dict[Any, Role] = {
    "system": "system",
    "developer": "system",
    "user": "human",
    "assistant": "gpt",
    "tool": "tool",
}
_CALL = re.compile(r"<tool_call>.*?</tool_call>", re.DOTALL)
_RESPONSE = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)

_FIELDS = msgspec.json.Decoder(dict[str, Raw])
_compact = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_spoken = json.JSONEncoder(ensure_ascii=False).encode


class Reading(Struct, frozen=True, kw_only=True):
    """A row read. `fields` holds the JSON bytes of every field in order, `field` is the one with the turns."""

    fields: dict[str, bytes]
    field: str
    turns: tuple[Turn, ...]


class _Said(Struct, frozen=True, forbid_unknown_fields=True):
    """A `from/value` turn as nearly all of them are."""

    sender: Role = msgspec.field(name="from")
    value: str


class Result(Struct, frozen=True, kw_only=True):
    """One result of a tool turn.

    `text` is its content as text and `envelope` what else there is of it. `spelling` says how the content stands in the
    turn: `plain` text, a JSON `string` or other `json` inside a block, `parts` of text, parts with `media` among them,
    or in some way that is left alone (`fixed`).
    """

    text: str
    envelope: tuple[str, str] = ("", "")
    spelling: Literal["plain", "string", "json", "parts", "media", "fixed"] = "plain"
    span: tuple[int, int] = (0, 0)  # of envelope and content in a `from/value` turn


_SAID = msgspec.json.Decoder(list[_Said])

# --- rows


def fields_of(line: bytes) -> dict[str, bytes]:
    """The JSON bytes of each field of a row. ValueError, one line, if it is no JSON object."""
    try:
        return {name: bytes(raw) for name, raw in _FIELDS.decode(line).items()}
    except msgspec.DecodeError:  # NaN and lone surrogates are no JSON there
        row = clean(json.loads(line))
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - a fault of the line's
    return {name: _compact(value).encode() for name, value in row.items()}


def read(fields: dict[str, bytes]) -> Reading | None:
    """The turns of a row, from `conversations` or else `messages`; None if it is of neither form.

    ValueError, one line, for an entry that is no object or whose role is unknown.
    """
    if plain := _plain_turns(fields.get("conversations", b"")):
        return Reading(fields=fields, field="conversations", turns=plain)
    name, entries = _told(fields)
    if not name:
        return None
    key, roles = ("from", _FROM) if entries and "from" in entries[0] else ("role", _ROLES)
    said = [(_role(entry, place, key, roles), entry) for place, entry in enumerate(entries)]
    return Reading(fields=fields, field=name, turns=tuple(_grouped(said, together=key == "role")))


def texts(fields: dict[str, bytes]) -> list[str]:
    """The texts of a row whose turns cannot be read, one for each entry."""
    return [_text(entry) if isinstance(entry, dict) else _compact(entry) for entry in _told(fields)[1]]


def _told(fields: dict[str, bytes]) -> tuple[str, list[Any]]:
    """Name and entries of the field with the turns; ("", []) if there is none."""
    found = {name: _entries(fields[name]) for name in ("conversations", "messages") if name in fields}
    told: dict[str, list[Any]] = {name: entries for name, entries in found.items() if entries is not None}
    name = next(filter(told.get, told), next(iter(told), ""))
    return name, told.get(name, [])


def _plain_turns(field: bytes) -> tuple[Turn, ...]:
    """Read in a third of the time; none if anything is unusual."""
    try:
        said = _SAID.decode(field)
    except msgspec.DecodeError:
        return ()
    return tuple([Turn(role=t.sender, text=t.value, raws=({"from": t.sender, "value": t.value},)) for t in said])


def write(reading: Reading, turns: Sequence[Turn]) -> bytes:
    """The row with other turns, all other fields untouched; without a line end."""
    raws = _compact([raw for turn in turns for raw in turn.raws]).encode()
    fields = reading.fields | {reading.field: raws}
    return b"{" + b",".join(_compact(name).encode() + b":" + value for name, value in fields.items()) + b"}"


def _entries(field: bytes) -> list[Any] | None:
    """The list of turns that a field holds, if it does."""
    try:
        value = msgspec.json.decode(field)
    except msgspec.DecodeError:
        value = json.loads(field)
    if not isinstance(value, list) or (
        value and not (isinstance(value[0], dict) and value[0].keys() & {"from", "role"})
    ):
        return None
    return value


def _role(entry: Any, place: int, key: str, roles: Mapping[Any, Role]) -> Role:
    if not isinstance(entry, dict):
        raise ValueError(f"turn {place} is no object")  # noqa: TRY004 - a fault of the row's, as the others are
    name = entry.get(key)
    role = roles.get(name) if isinstance(name, str) else None
    if role is None:
        raise ValueError(f"unknown role {_compact(name)[:100]} in turn {place}")
    return role


def _grouped(said: Sequence[tuple[Role, Json]], *, together: bool) -> list[Turn]:
    """One turn each, but for `messages`' results: those in a row are one."""
    if not together:
        return [_turn(role, (raw,)) for role, raw in said]
    turns: list[Turn] = []
    for role, group in groupby(said, lambda each: each[0]):
        raws = tuple(raw for _, raw in group)
        turns += [_turn(role, raws)] if role == "tool" else [_turn(role, (raw,)) for raw in raws]
    return turns


# --- turns


def is_from_value(turn: Turn) -> bool:
    """Whether it is of the `from/value` form."""
    return "from" in turn.raws[0]


def human_turn(text: str, like: Turn) -> Turn:
    """A human turn in the form of another turn."""
    raw = {"from": "human", "value": text} if is_from_value(like) else {"role": "user", "content": text}
    return _turn("human", (raw,))


def joined(turns: Sequence[Turn], base: Turn, separator: str = "\n\n") -> Turn:
    """`base` with the texts of all `turns` (itself among them) in their order; turns without any text do not count."""
    told = [turn for turn in turns if turn.text]
    if is_from_value(base):
        changed = {"value": separator.join(turn.text for turn in told)}
        return _turn(base.role, (base.raws[0] | changed,))
    contents = [turn.raws[0].get("content") for turn in told]
    if not any(isinstance(content, list) for content in contents):
        changed = {"content": separator.join(turn.text for turn in told)}
        return _turn(base.role, (base.raws[0] | changed,))
    between = [_text_part(separator)] if separator else []
    parts = [part for content in contents for part in (*between, *_parts(content))]
    return _turn(base.role, (base.raws[0] | {"content": parts[len(between) :]},))


def calls_in(turn: Turn) -> int:
    """How many calls a gpt turn makes."""
    if turn.role != "gpt":
        return 0
    if is_from_value(turn):
        if "<tool_call>" not in turn.text:
            return 0
        _, closed, after = turn.text.partition("</think>")
        return len(_CALL.findall(after if closed and turn.text.startswith("<think>") else turn.text))
    calls = turn.raws[0].get("tool_calls")
    return len(calls) if isinstance(calls, list) else 0


def results_in(turn: Turn) -> list[Result]:
    """The results of a tool turn in their order."""
    if turn.role != "tool":
        return []
    if not is_from_value(turn):
        return list(map(_message_result, turn.raws))
    if not isinstance(turn.raws[0].get("value"), str):
        return [Result(text=turn.text, spelling="fixed")]
    blocks = [_block_result(found[1], found.start(1)) for found in _RESPONSE.finditer(turn.text)]
    return blocks or [Result(text=turn.text, span=(0, len(turn.text)))]


def with_results(turn: Turn, texts: Mapping[int, str]) -> Turn:
    """A tool turn in which the contents of some results (by number) are other texts."""
    if not is_from_value(turn):
        raws = list(turn.raws)
        for number, text in texts.items():
            content = [_text_part(text)] if isinstance(raws[number].get("content"), list) else text
            raws[number] = raws[number] | {"content": content}
        return _turn("tool", tuple(raws))
    value, results = turn.text, results_in(turn)
    for number in sorted(texts, reverse=True):
        start, end = results[number].span
        value = value[:start] + spelled(results[number], texts[number]) + value[end:]
    return _turn("tool", (turn.raws[0] | {"value": value},))


def spelled(result: Result, text: str) -> str:
    """A result, envelope included, as it stands in its turn with another text for content."""
    if result.spelling not in ("string", "json"):
        return text
    content = text if result.spelling == "json" and is_json(text) else _spoken(text)
    return without_tags(content).join(result.envelope)


def is_json(text: str) -> bool:
    """Whether a text is a JSON object or array."""
    if text.lstrip()[:1] not in ("{", "["):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):  # only looks like it
        return False
    return True


def _turn(role: Role, raws: tuple[Json, ...]) -> Turn:
    text = _text(raws[0]) if len(raws) == 1 else "\n".join(map(_text, raws))
    return Turn(role=role, text=text, raws=raws)


def _text(raw: Json) -> str:
    """What of a turn is counted and summarized."""
    if "from" in raw:
        return _plain(raw.get("value"))
    said = _plain(raw.get("content"))
    if len(raw) <= 3 and "tool_call_id" in raw:  # most of them are results, which have no more than that
        return said
    thought = next((raw[key] for key in ("reasoning_content", "reasoning") if isinstance(raw.get(key), str)), "")
    calls = _compact(raw["tool_calls"]) if raw.get("tool_calls") else ""
    return "\n".join(filter(None, (thought, said, calls)))


def _plain(content: Any) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    if isinstance(content, list):
        return "".join(map(_part_text, content))
    return _compact(content)


def _part_text(part: Any) -> str:
    if not isinstance(part, dict):
        return part if isinstance(part, str) else _compact(part)
    return part["text"] if isinstance(part.get("text"), str) else f"[{part.get('type', 'part')}]"


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [_text_part(_plain(content))]


def _text_part(text: str) -> Json:
    return {"type": "text", "text": text}


def _message_result(raw: Json) -> Result:
    content = raw.get("content")
    spelling: Literal["plain", "parts", "media", "fixed"] = "plain" if isinstance(content, str) else "fixed"
    if isinstance(content, list):
        spelling = "parts" if all(isinstance(part, dict) and "text" in part for part in content) else "media"
    return Result(text=_plain(content), envelope=(_compact(raw.get("tool_call_id")), ""), spelling=spelling)


def _block_result(block: str, start: int) -> Result:
    payload = block.strip()
    start += len(block) - len(block.lstrip())
    span = (start, start + len(payload))
    try:
        fields = msgspec.json.decode(payload, type=dict[str, Raw])
        content = bytes(fields["content"]).decode()
        is_string = content.startswith('"')
        text = msgspec.json.decode(content, type=str) if is_string else content
    except (msgspec.DecodeError, KeyError, RecursionError):
        looks_like_json = payload[:1] in ("{", "[")
        return Result(text=payload, spelling="fixed" if looks_like_json else "plain", span=span)
    told = [f"{_spoken(name)}: {'' if name == 'content' else bytes(raw).decode()}" for name, raw in fields.items()]
    place = list(fields).index("content") + 1
    envelope = ("{" + ", ".join(told[:place]), ", ".join(["", *told[place:]]) + "}")
    return Result(text=text, envelope=envelope, spelling="string" if is_string else "json", span=span)
