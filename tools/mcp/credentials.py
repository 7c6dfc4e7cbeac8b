"""Where keys stand in what a user writes of an MCP server, told by the names they are given. Pure; a leaf.

A name is a credential's if it ends in token, secret, password, passwd, passphrase, credential(s), authorization; if its
last word is pwd, pass, pat, bearer, cookie; or key, after api, access, secret … (`--api-key`, not `--sort-key`). Words
are parted by `-`, `_` or a capital letter. In names of variables and headers any key is one, as in the environment.
"""

import re
from collections.abc import Iterator, Sequence

from msgspec import Struct

_KINDS = (
    "access|account|admin|api|app|application|auth|client|consumer|deploy|encryption|license|master|private|secret|"
    "security|service|session|shared|signing|storage|subscription|webhook"
)
_CREDENTIAL = re.compile(
    rf"(?!no-)(?:(?:.*-)?(?:(?:{_KINDS})-?key|pwd|pass|pat|bearer|cookie)|x-(?:.*-)?key|"
    r".*(?:token|secret|password|passwd|passphrase|credentials?|authorization))"
)
_ANY_KEY = re.compile(r"(?:.*-)?key")
_OPTION = re.compile(r"--?([A-Za-z][\w-]*)")  # its value is the next word
_NO_VALUE = re.compile(r"--[A-Za-z_-]+(?:=.*)?", re.DOTALL)  # looks like an option rather than like a key
_HEADER_OPTION = re.compile(r"-H|--?(?:[\w-]+[_-])?headers?", re.IGNORECASE)
_SHELL_OPTION = re.compile(r"-[a-z]*c|/c|--?command", re.IGNORECASE)
_ASSIGNMENT = re.compile(r"(?:--?)?([A-Za-z][\w-]*)=(.*)", re.DOTALL)  # --token=X, TOKEN=X
_HEADER = re.compile(r"(?:--?[\w-]+=)?[\"']?([A-Za-z][\w-]*):\s*(.*)", re.DOTALL)  # Authorization: Bearer X
_IN_JSON = re.compile(r"(\\?[\"'])([A-Za-z][\w-]*)\1\s*:\s*(\\?[\"'])((?:\\.|.)*?)\3", re.DOTALL)
_IN_QUERY = re.compile(r"(?<=[?&])([^=&#\s]+)=([^&#\s\"']*)")
_USER = re.compile(r"\b([a-z][a-z0-9+.-]{0,30})://([^\s/?#:@]*)(?::([^\s/?#]*))?@", re.IGNORECASE)
_SHELL_WORD = re.compile(r"(?:\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s;&|()<>\"']|[\"'])+", re.DOTALL)
_SCHEME = re.compile(r"(?:(?:Bearer|Basic|Token)\s+)?", re.IGNORECASE)


class Credential(Struct, frozen=True, kw_only=True):
    """A key in a text, from `start` to `end`. `is_sure`: not if it may as well be an option of the program."""

    name: str
    start: int
    end: int
    is_sure: bool = True


def is_credential(name: str) -> bool:
    """Whether what is called so is a key, also among a program's options."""
    return _CREDENTIAL.fullmatch(_dashed(name)) is not None if not name.isupper() else is_credential_variable(name)


def is_credential_variable(name: str) -> bool:
    """Whether a variable or a header of this name holds a key."""
    dashed = _dashed(name)
    return name != "PWD" and bool(_CREDENTIAL.fullmatch(dashed) or _ANY_KEY.fullmatch(dashed))


def _dashed(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).replace("_", "-").lower()


def in_words(words: Sequence[str]) -> list[list[Credential]]:
    """Those of a command, word by word: `--token X`, `--api-key=X`, `TOKEN=X`, `--header "Authorization: Bearer X"`,
    `--header Authorization "Bearer X"`, `--headers '{"Authorization": "Bearer X"}'`, a shell's line with such words,
    and those of URLs."""
    found: list[list[Credential]] = []
    owing = ""  # the name of the credential that this word is
    for place, word in enumerate(words):
        before = words[place - 1] if place else ""
        named = _OPTION.fullmatch(word) if place else None
        names_one = named is not None and is_credential(named[1])
        assigned = owing and word.startswith("-") and _in_word(word, before)
        if owing and not names_one and not assigned:
            sure = not _NO_VALUE.fullmatch(word)
            found.append([_whole(owing, word, 0, len(word), is_sure=sure)])
            owing = ""
            continue
        found.append(assigned or _in_word(word, before))
        is_header = _HEADER_OPTION.fullmatch(before) and re.fullmatch(r"[A-Za-z][\w-]*", word)
        owing = named[1] if named and names_one else word if is_header and is_credential_variable(word) else ""
    return [[each for each in word if each.start < each.end] for word in found]


def in_value(name: str, text: str) -> list[Credential]:
    """Those of a variable's or a header's value: all of it but a scheme, or what stands in it under other names."""
    found = [_whole(name, text, 0, len(text))] if is_credential_variable(name) else _inside(text)
    return [each for each in found if each.start < each.end]


def in_url(url: str) -> list[Credential]:
    """The user's password and the keys among the parameters."""
    return [each for each in _inside(url) if each.start < each.end]


def _in_word(word: str, before: str) -> list[Credential]:
    option_value = before.startswith("-") and not _SHELL_OPTION.fullmatch(before)
    if not word.startswith("-") and not option_value and not _is_header(word) and len(spans := _shell_words(word)) > 1:
        return _in_line(word, spans)
    for form in (_ASSIGNMENT, _HEADER):
        told = form.fullmatch(word)
        if told and is_credential(told[1]):
            return [_whole(told[1], word, told.start(2), told.end(2))]
    return _inside(word)


def _is_header(word: str) -> bool:
    told = _HEADER.fullmatch(word)
    return bool(told and is_credential(told[1]))


def _shell_words(line: str) -> list[tuple[int, int]]:
    """Where the words of a line for a shell stand; one, if it is none."""
    if not re.search(r"\s", line):
        return [(0, len(line))]
    return [_unquoted(line, each.start(), each.end()) for each in _SHELL_WORD.finditer(line)]


def _in_line(line: str, spans: Sequence[tuple[int, int]]) -> list[Credential]:
    words = ["", *(line[start:end] for start, end in spans)]  # the first may be an assignment
    return [
        Credential(name=each.name, start=start + each.start, end=start + each.end, is_sure=each.is_sure)
        for (start, _), found in zip(spans, in_words(words)[1:], strict=True)
        for each in found
    ]


def _whole(name: str, text: str, start: int, end: int, *, is_sure: bool = True) -> Credential:
    """What stands there, without quotes and without the scheme of an Authorization."""
    start, end = _unquoted(text, start, end)
    scheme = _SCHEME.match(text, start, end)
    return Credential(name=name, start=scheme.end() if scheme else start, end=end, is_sure=is_sure)


def _unquoted(text: str, start: int, end: int) -> tuple[int, int]:
    if end - start > 1 and text[start] in "\"'" and text[start] == text[end - 1]:
        return start + 1, end - 1
    return start, end


def _inside(text: str) -> list[Credential]:
    """Those of URLs and of JSON in a text."""
    found: list[Credential] = []
    for each in sorted((*_in_urls(text), *_in_json(text)), key=lambda one: one.start):
        if not found or each.start >= found[-1].end:
            found.append(each)
    return found


def _in_urls(text: str) -> Iterator[Credential]:
    for told in _USER.finditer(text):
        if told[3] is not None:
            yield Credential(name="password", start=told.start(3), end=told.end(3))
        elif told[1].lower() in ("http", "https"):  # a token may stand alone there
            yield Credential(name="user", start=told.start(2), end=told.end(2))
    if "://" in text or text.startswith("${"):
        for told in _IN_QUERY.finditer(text):
            if is_credential(told[1]) or told[1].lower() == "key":
                yield Credential(name=told[1], start=told.start(2), end=told.end(2))


def _in_json(text: str) -> Iterator[Credential]:
    for told in _IN_JSON.finditer(text):
        if is_credential(told[2]):
            yield _whole(told[2], text, told.start(4), told.end(4))
