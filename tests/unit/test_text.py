"""What is replaced where text enters, and what is struck out."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.text import Redactor, clean, json_text, secrets_from

KEY = "sk-or-v1-0123456789abcdef"
OTHER = "hunter2-hunter2-hunter2"

# --- clean


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("plain é 漢 😀 \u2028\x1b", "plain é 漢 😀 \u2028\x1b"),
        ("a\ud800b\udc00", "a\ufffdb\ufffd"),
        ("\ud83d", "\ufffd"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\ud83d\ude00", "😀"),
        ("\ud83d\ud83d\ude00é", "\ufffd😀é"),
        ("a\0b", "a\ufffdb"),
        ("é\0\ud800", "é\ufffd\ufffd"),
        ("", ""),
    ],
)
def test_halves_of_characters_and_nul_are_replaced(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


def test_clean_goes_through_lists_dicts_and_keys() -> None:
    dirty: dict[str, Any] = {"k\0": ["a\ud800", {"b": "\0", "n": None, "i": 1, "f": 1.5, "t": True}], "ok": "ok"}
    before = json.dumps(dirty)
    assert clean(dirty) == {
        "k\ufffd": ["a\ufffd", {"b": "\ufffd", "n": None, "i": 1, "f": 1.5, "t": True}],
        "ok": "ok",
    }
    assert json.dumps(dirty) == before


def test_what_is_clean_is_not_copied() -> None:
    value = {"a": ["b", {"c": "é"}], "d": 1}
    assert clean(value) is value
    text = "é" * 1000
    assert clean(text) is text


def test_no_depth_is_too_deep() -> None:
    deep: Any = "\0"
    for _ in range(100_000):
        deep = [deep]
    cleaned = Redactor({"K": KEY}).value(clean(deep))
    while isinstance(cleaned, list):
        cleaned = cleaned[0]
    assert cleaned == "\ufffd"


@given(st.recursive(st.none() | st.text(st.characters()), lambda v: st.lists(v) | st.dictionaries(st.text(), v)))
def test_what_is_cleaned_can_be_written(value: Any) -> None:
    cleaned = clean(value)
    assert "\0" not in json.dumps(cleaned, ensure_ascii=False).encode().decode()
    assert clean(cleaned) is cleaned


def test_json_text_is_compact_clean_and_strict() -> None:
    assert json_text({"a": [1, "é\ud800"]}) == '{"a":[1,"é\ufffd"]}'
    with pytest.raises(ValueError, match="JSON compliant"):
        json_text([float("inf")])


# --- which are secrets


@pytest.mark.parametrize(
    "name",
    [
        "KEY",
        "API_KEY",
        "openai_api_key",
        "GH_TOKEN",
        "TOKEN",
        "AWS_SECRET",
        "DB_PASSWORD",
        "MY_PASSWD",
        "X_CREDENTIALS",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert secrets_from({name: OTHER}, {}) == ({name: OTHER}, [])


@pytest.mark.parametrize(
    "name",
    ["MONKEY", "APIKEY", "KEYS", "KEY_FILE", "TOKENIZER", "SECRETARY", "PASSWORD_STORE_DIR", "PATH", "_KEYS", ""],
)
def test_names_of_no_secrets(name: str) -> None:
    assert secrets_from({name: OTHER}, {}) == ({}, [])


@pytest.mark.parametrize(
    "value",
    [
        "elevenchars",
        "",
        "true",
        "123456789012345",
        "-1234567890.5e3",
        "/usr/bin/../bin",
        "changeme-please",
        "your-key-here",
        "your_api_key_here",
        "<your api key>",
        "sk-your-openai-key-here",
        "xxxxxxxxxxxxxxxx",
        "sk-xxxxxxxxxxxxxxxx",
        "xxxx-xxxx-xxxx-xxxx",
        "****************",
        "aaaaaaaaaaaaaaa",
        "${OPENAI_API_KEY}",
        "{{ secrets.KEY }}",
        "replace-me-now",
        "insert-your-key-here",
        "no-key-required",
        "sk-no-key-required",
        "not-required-key",
        "placeholder_key",
    ],
)
def test_values_that_are_no_secrets(value: str) -> None:
    assert secrets_from({"SOME_API_KEY": value}, {})[0] == {}


@pytest.mark.parametrize(
    "value",
    [
        "testsecret-123",
        "/no/such/path/here",
        "none-of-your-business",
        "12345678901a",
        "AB" * 2500,
        "a b\nc" * 9,
        "k\0" * 9,
    ],
)
def test_values_that_are_secrets(value: str) -> None:
    assert secrets_from({"SOME_API_KEY": value}, {})[0] == {"SOME_API_KEY": value}


def test_a_file_is_no_secret_and_a_name_that_is_no_file_is(tmp_path: Path) -> None:
    file = tmp_path / "credentials.json"
    assert str(file) in secrets_from({"GOOGLE_APPLICATION_CREDENTIALS": str(file)}, {})[0].values()
    file.write_text("{}")
    assert secrets_from({"GOOGLE_APPLICATION_CREDENTIALS": str(file)}, {})[0] == {}


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("postgres://admin:hunter2hunter2@db.local:5432/x", {"admin:hunter2hunter2", "hunter2hunter2"}),
        ("http://user:p%40ss@proxy:80", set()),
        ("http://proxyuser:p%40ss@proxy:80", {"proxyuser:p%40ss", "proxyuser:p@ss"}),
        ("a,redis://:longlonglong1@r/0", {":longlonglong1", "longlonglong1"}),
        ("https://x-access-token:ghp_0123456789@github.com", {"x-access-token:ghp_0123456789", "ghp_0123456789"}),
        ("https://example.org:443/path:with@sign", set()),
        ("ssh://git-very-long-user@github.com", set()),
    ],
)
def test_user_and_password_of_urls(url: str, parts: set[str]) -> None:
    assert set(secrets_from({"DATABASE_URL": url}, {})[0].values()) == parts


def test_keys_in_use_are_secrets_one_by_one_and_named_first() -> None:
    secrets, short = secrets_from({"Z_KEY": KEY, "B_KEY": OTHER}, {"api_key": f"{KEY}, {KEY}2", "B_KEY": "short,EMPTY"})
    assert secrets == {"api_key": f"{KEY}, {KEY}2", "api_key_2": KEY, "api_key_3": f"{KEY}2", "B_KEY": OTHER}
    assert short == ["B_KEY"]


def test_short_keys_are_named_but_placeholders_are_not() -> None:
    assert secrets_from({"OWN_KEY": "short"}, {"A": "sk-1", "B": "EMPTY", "C": "", "D": "none"}) == ({}, ["A"])


# --- striking them out


def test_redactor_marks_every_place() -> None:
    redactor = Redactor({"API_KEY": KEY, "DB_PASSWORD": OTHER})
    assert redactor.text(f"a {KEY}{OTHER} {KEY}") == "a [REDACTED:API_KEY][REDACTED:DB_PASSWORD] [REDACTED:API_KEY]"
    text = "nothing to hide"
    assert redactor.text(text) is text


def test_the_longest_secret_is_struck_out_first() -> None:
    redactor = Redactor({"SHORT": KEY, "LONG": KEY + "-more"})
    assert redactor.text(f"{KEY}-more {KEY}") == "[REDACTED:LONG] [REDACTED:SHORT]"


def test_the_first_of_two_names_of_one_secret_counts() -> None:
    assert Redactor({"ONE": KEY, "TWO": KEY}).text(KEY) == "[REDACTED:ONE]"


def test_secrets_are_taken_literally() -> None:
    assert Redactor({"K": "a.b*c(d[e\\"}).text("a.b*c(d[e\\ aXbbc") == "[REDACTED:K] aXbbc"
    dirty = "secret-\udc80-secret"
    assert Redactor({"K": dirty}).text(clean(f"x {dirty}")) == "x [REDACTED:K]"


def test_values_are_redacted_in_strings_and_not_in_keys() -> None:
    quoted = 'pass"word\n\\123456'
    redactor = Redactor({"API_KEY": KEY, "QUOTED": quoted})
    value = {KEY: [f"x{KEY}", {"b": quoted, "n": 1}], "c": None}
    assert redactor.value(value) == {KEY: ["x[REDACTED:API_KEY]", {"b": "[REDACTED:QUOTED]", "n": 1}], "c": None}
    assert value[KEY] == [f"x{KEY}", {"b": quoted, "n": 1}]
    assert redactor.value(KEY) == "[REDACTED:API_KEY]"


def test_without_secrets_nothing_happens() -> None:
    redactor = Redactor({})
    value = {"a": [KEY]}
    assert redactor.value(value) is value
    assert redactor.text(KEY) is KEY
    assert Redactor({"EMPTY": ""}).text("abc") == "abc"


def test_a_redactor_can_be_sent_and_does_not_show_its_secrets() -> None:
    redactor = Redactor({"API_KEY": KEY})
    assert pickle.loads(pickle.dumps(redactor)).text(KEY) == "[REDACTED:API_KEY]"
    assert KEY not in repr(redactor)


@pytest.mark.timeout(5)
@pytest.mark.parametrize(
    "value", ["placeholder" + "-api" * 30_000, "your-" + "key" * 40_000 + "z", "<" * 120_000 + "x"]
)
def test_long_variables_are_read_in_linear_time(value: str) -> None:
    secrets_from({"SOME_KEY": value, "OTHER": value}, {})
