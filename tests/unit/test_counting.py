"""A row has the tokens that a trainer's chat template makes of it."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compression.counting import AROUND_MESSAGE, ROLES, open_counter
from compression.forms import fields_of, read
from compression.types import Count, Role, Turn
from tests.unit.tokenizers_made import fresh, make_tokenizer
from tools.errors import UsageProblem

CHATML = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LAST_THOUGHT_ONLY = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if loop.last %}{{ message.content }}"
    "{% else %}{{ message.content.split('</think>')[-1] | trim }}{% endif %}<|im_end|>\n{% endfor %}"
)


def turn(role: Role, text: str, messages: int = 1) -> Turn:
    return Turn(role=role, text=text, raws=({"from": role, "value": text},) * messages)


ROW = [
    turn("system", "You are the assistant."),
    turn("human", "Say hello to the user. "),
    turn("gpt", "<think>\nThe tool.\n</think>\nHello!"),
    turn("tool", "It is done."),
    turn("gpt", "<think>\nIt is done.\n</think>\nIt is."),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def template(folder: Path, text: str, **config: object) -> str:
    """A Jinja file, with a `tokenizer_config.json` beside it if it is to hold something."""
    path = folder / "chat.jinja"
    path.write_text(text, encoding="utf-8")
    if config:
        path.with_name("tokenizer_config.json").write_text(json.dumps(config))
    return str(path)


def tokens(made: Path, rendered: str) -> int:
    return len(fresh(made).encode(rendered, add_special_tokens=False))


def chatml(turns: Sequence[Turn]) -> str:
    return "".join(f"<|im_start|>{ROLES[each.role]}\n{each.text}<|im_end|>\n" for each in turns)


def test_a_row_has_more_than_its_texts() -> None:
    counter = open_counter("cl100k_base")
    count = counter.row([turn("human", "Hi"), turn("gpt", "Hello")])
    assert count == Count(2 * (1 + AROUND_MESSAGE), (1 + AROUND_MESSAGE, 1 + AROUND_MESSAGE))
    assert counter.name == "cl100k_base"
    assert counter.text("Hello") == 1


def test_several_messages_of_a_turn_have_their_surroundings_each() -> None:
    counter = open_counter("cl100k_base")
    assert counter.row([turn("tool", "a b", 3)]).total == counter.row([turn("tool", "a b")]).total + 2 * AROUND_MESSAGE


def test_the_constant_is_that_of_chatml(made: Path) -> None:
    """Where the names of roles are one token each, as in cl100k_base."""
    cl100k, other = open_counter("cl100k_base"), open_counter(str(made))
    assert [cl100k.text(name) for name in (*ROLES.values(), "\n")] == [1] * 5
    more = sum(other.text(ROLES[each.role]) - 1 for each in ROW)
    count = other.row(ROW)
    assert count.total + more == tokens(made, chatml(ROW))
    assert count.total == sum(count.turns)


def test_a_template_counts_as_a_trainer_does(made: Path, tmp_path: Path) -> None:
    counter = open_counter(str(made), template(tmp_path, CHATML))
    assert counter.name == f"{made} with chat.jinja"
    count = counter.row(ROW)
    assert count.total == sum(count.turns) == tokens(made, chatml(ROW))
    assert counter.row([]) == Count(0, ())


NATIVE = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {{ message.name }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls %}CALL {{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
)
MESSAGES: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be good."},
    {"role": "user", "content": "Say hello."},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "say", "arguments": '{"a": 1}'}}] * 2},
    {"role": "tool", "tool_call_id": "a", "name": "say", "content": "It is done."},
    {"role": "tool", "tool_call_id": "b", "name": "say", "content": "Done."},
    {"role": "assistant", "content": "Hello!"},
]


def native(messages: list[dict[str, Any]]) -> Sequence[Turn]:
    reading = read(fields_of(json.dumps({"messages": messages}).encode()))
    assert reading
    return reading.turns


def test_messages_are_rendered_as_they_are(made: Path, tmp_path: Path) -> None:
    calls = 'CALL {"name": "say", "arguments": "{\\"a\\": 1}"}' * 2
    expected = (
        "<|im_start|>developer \nBe good.<|im_end|>\n<|im_start|>user \nSay hello.<|im_end|>\n"
        f"<|im_start|>assistant \n{calls}<|im_end|>\n<|im_start|>tool say\nIt is done.<|im_end|>\n"
        "<|im_start|>tool say\nDone.<|im_end|>\n<|im_start|>assistant \nHello!<|im_end|>\n"
    )
    counter = open_counter(str(made), template(tmp_path, NATIVE))
    turns = native(MESSAGES)
    assert len(turns) == 5
    count = counter.row(turns)
    assert count.total == sum(count.turns) == tokens(made, expected)


def test_special_tokens_that_calls_spell_are_text(made: Path, tmp_path: Path) -> None:
    def spelling(text: str) -> Sequence[Turn]:
        call = {"function": {"name": "say", "arguments": {"a": [text]}}}
        return native([*MESSAGES[:2], MESSAGES[2] | {"tool_calls": [call]}, *MESSAGES[3:]])

    counter = open_counter(str(made), template(tmp_path, NATIVE))
    more = counter.text('"<|im_end|>"') - counter.text('""')
    assert counter.row(spelling("<|im_end|>")).total == counter.row(spelling("")).total + more
    assert more > 5


def test_tokens_that_the_template_names(made: Path, tmp_path: Path) -> None:
    with_bos = open_counter(str(made), template(tmp_path, CHATML, bos_token={"content": "<s>"}, pad_token=None))
    assert with_bos.row(ROW).total == tokens(made, chatml(ROW)) + 1


@pytest.mark.parametrize(
    "spelt", [CHATML, [{"name": "tool_use", "template": ""}, {"name": "default", "template": CHATML}]]
)
def test_a_template_in_a_tokenizer_config(made: Path, tmp_path: Path, spelt: object) -> None:
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"bos_token": "<s>", "eos_token": None, "chat_template": spelt}))
    assert open_counter(str(made), str(path)).row(ROW).total == tokens(made, "<s>" + chatml(ROW))


def test_special_tokens_that_a_turn_spells_are_text(made: Path, tmp_path: Path) -> None:
    plain = [turn("human", "Hello, user!"), turn("gpt", "It is.")]
    odd = [turn("human", "Hello, user!<|im_end|><s>\n<|im_start|>"), turn("gpt", "It is.<|im_end|>")]
    counter = open_counter(str(made), template(tmp_path, CHATML))
    spelt = sum(map(counter.text, ("<|im_end|><s>\n<|im_start|>", "<|im_end|>")))
    assert counter.row(odd).total == counter.row(plain).total + spelt
    assert spelt > 30


def test_a_template_that_leaves_texts_out(made: Path, tmp_path: Path) -> None:
    count = open_counter(str(made), template(tmp_path, LAST_THOUGHT_ONLY)).row(ROW * 3)
    whole = open_counter(str(made)).row(ROW * 3)
    assert whole.total - 60 < count.total < whole.total
    assert min(count.turns) >= 0
    assert count.total - len(count.turns) <= sum(count.turns) <= count.total


def test_what_templates_may_use(made: Path, tmp_path: Path) -> None:
    text = """
    {%- for message in messages %}
        {%- if loop.index0 == 1 %}{% break %}{% endif %}
        {{- message.content }}{% generation %}{{ {"a": "<é>"} | tojson }}{{ strftime_now("%Y")[:1] }}{% endgeneration %}
    {% endfor -%}
    """
    expected = ROW[0].text + '{"a": "<é>"}2'
    assert open_counter(str(made), template(tmp_path, text)).row(ROW).total == tokens(made, expected)


@pytest.mark.parametrize(
    "text",
    [
        "{{ raise_exception('roles must\nalternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ nothing.at.all }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_row_that_a_template_refuses(made: Path, tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"^the chat template does not take this row: \w+") as told:
        open_counter(str(made), template(tmp_path, text)).row(ROW)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("text", "is_blind"),
    [
        ("hello", True),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", True),
        ("{% for m in messages %}{{ m['from'] }}: {{ m['value'] }}{% endfor %}", True),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}", False),
        ("{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}", False),
    ],
)
def test_a_template_that_leaves_out_what_is_said(text: str, is_blind: bool, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="leaves out what the messages say") if is_blind else nullcontext():
        open_counter("cl100k_base", template(tmp_path, text))


def test_templates_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "none.json").write_text('{"chat_template": null}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.jinja").write_bytes(b"\xff")
    for path, words in {
        template(tmp_path, "a\n{% for %}"): "chat.jinja, line 2: ",
        str(tmp_path / "list.json"): "there is no template in it",
        str(tmp_path / "none.json"): "there is no template in it",
        str(tmp_path / "broken.json"): "broken.json: ",
        str(tmp_path / "other.jinja"): "other.jinja: ",
        str(tmp_path / "missing"): "missing cannot be read: No such file",
        str(tmp_path): "cannot be read: Is a directory",
    }.items():
        with pytest.raises(UsageProblem, match=words) as told:
            open_counter("cl100k_base", path)
        assert "\n" not in str(told.value)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.sampled_from(["Hello", "It is done.", "", "<think>", "\ud800"]), max_size=4), max_size=5))
def test_counts_do_not_depend_on_what_was_counted_before(made: Path, rows: list[list[str]]) -> None:
    counter, path = open_counter(str(made)), str(made)
    for texts in rows:
        turns = [turn("gpt", text) for text in texts]
        assert counter.row(turns) == open_counter(path).row(turns)
