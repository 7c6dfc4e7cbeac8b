"""Where keys stand in what a user writes of an MCP server, told by the names they are given. Pure; a leaf.

A name is a credential's if it ends in token, secret, password, passwd, passphrase, credential(s), authorization; if its
last word is pwd, pass, pat, bearer, cookie; or key, after api, access, secret … (`--api-key`, not `--sort-key`). Words
are parted by `-`, `_`, `.` or a capital letter. In names of variables and headers any key is one, as in the
environment; among the parameters of a URL so are key, sig, signature and auth. What no key looks like is none under any
name: an option, `true`, a short number, a path, a pattern of files, a `<word>`.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import unquote

from msgspec import Struct

_KINDS = (
    "access|account|admin|api|app|application|auth|client|consumer|deploy|encryption|license|master|private|secret|"
    "security|service|session|shared|signing|storage|subscription|webhook"
)
_CREDENTIAL = re.compile(
    rf"(?!no-)(?:(?:.*-)?(?:(?:{_KINDS})-?key|pwd|pass|pat|bearer|cookie)|x-(?:auth|(?:.*-)?key)|"
    r".*(?:token|secret|password|passwd|passphrase|credentials?|authorization))"
)
_ANY_KEY = re.compile(r"(?:.*-)?key")
_PARAMETER = re.compile(r"key|(?:.*-)?(?:sig|signature|auth)")
_PLAIN_OPTION = re.compile(r"-[A-Za-z]|--[a-z]+(?:[A-Z_-][a-z]+)*(?:=.*)?", re.DOTALL)  # of words: no key's look
_HARMLESS = re.compile(
    r"true|false|[+-]?\d{0,7}(?:\.\d{0,7})?"
    r"|/[A-Z]?[a-z]+(?:/[\w.@ ~-]*)*|(?:~|\.{1,2})/.*|[A-Za-z]:[\\/].*"  # /run/secrets/x, ~/x, ./x, C:\x
    r"|(?:[\w.-]+/)*\*{1,2}(?:[./][\w.*/-]*)?"  # *.txt, src/**/*.py
    r"|<[^<>]*>|\[[A-Z]+\]",  # <eos>, [PAD]
    re.DOTALL,
)
_OPTION = re.compile(r"--?([A-Za-z][\w-]*)")  # its value is the next word
_JOINED = re.compile(r"(-[eH]|--?[A-Za-z][\w-]*(?==))=?(.*)", re.DOTALL)  # -eTOKEN=X, --env=TOKEN=X
_HEADER_OPTION = re.compile(r"-H|--?(?:[\w-]+[_-])?headers?", re.IGNORECASE)
_VARIABLE_OPTION = re.compile(r"-e|--env")
_SHELL_OPTION = re.compile(r"-[a-z]*c|/c|--?command", re.IGNORECASE)
_ASSIGNMENT = re.compile(r"(?:--?)?([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)  # --token=X, TOKEN=X
_HEADER = re.compile(r"[\"']?([A-Za-z][\w-]*):\s*(.*)", re.DOTALL)  # Authorization: Bearer X
_PAIR = r"\s*([A-Za-z][\w. -]*)=\s*((?>\"[^\"]*\"|'[^']*'|[^;]*))"
_IN_PAIRS = re.compile(rf"(?:^|;){_PAIR}", re.DOTALL)  # Server=db;Password=X
_PAIRS = re.compile(rf"{_PAIR}(?:;{_PAIR})+;?\s*", re.DOTALL)
_IN_CODE = re.compile(  # "token": "X", token = 'X', environ["TOKEN"] = "X"
    r"(?<![\w-])-{0,2}([A-Za-z_][\w-]*)(?:\\?[\"'])?\]?\s*[:=]\s*(\\?[\"'])((?:\\.|.)*?)\2", re.DOTALL
)
_IN_QUERY = re.compile(r"(?<=[?&#])([^=&#\s]+)=([^&#\s\"']*)")
_USER = re.compile(
    r"\b([a-z][a-z0-9+.-]{0,30})://([^\s/?#:@\[]*)"
    r"(?::([^\s/?#]*|(?!(?:\d{1,5}|\$\{\w+\})[/?#])[^\s@\"']*))?@",  # also with / ? #, unless it begins as a port
    re.IGNORECASE,
)
_SHELL_WORD = re.compile(r"(?:\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s;&|()<>\"']|[\"'])+", re.DOTALL)
_SCHEME = re.compile(r"(?:(?:Bearer|Basic|Token)\s+)?", re.IGNORECASE)


class Credential(Struct, frozen=True, kw_only=True):
    """A key in a text, from `start` to `end`."""

    name: str
    start: int
    end: int


def is_credential(name: str) -> bool:
    """Whether what is called so is a key, also among a program's options."""
    return _CREDENTIAL.fullmatch(_dashed(name)) is not None if not name.isupper() else is_credential_variable(name)


def is_credential_variable(name: str) -> bool:
    """Whether a variable or a header of this name holds a key."""
    dashed = _dashed(name)
    return name != "PWD" and bool(_CREDENTIAL.fullmatch(dashed) or _ANY_KEY.fullmatch(dashed))


def _dashed(name: str) -> str:
    return re.sub(r"[_. ]", "-", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name)).lower()


def in_words(words: Sequence[str]) -> list[list[Credential]]:
    """Those of a command, word by word: `--token X`, `--api-key=X`, `TOKEN=X`, `--env=TOKEN=X`, `--header
    "Authorization: Bearer X"`, `--header Authorization "Bearer X"`, `--headers '{"Authorization": "Bearer X"}'`, a
    shell's line with such words, pairs (`Server=db;Password=X`), code (`token = "X"`), and those of URLs."""
    found: list[list[Credential]] = []
    owing = ""  # the name of the credential that this word is
    for place, word in enumerate(words):
        before = words[place - 1] if place else ""
        named = _OPTION.fullmatch(word) if place else None
        names_one = named is not None and is_credential(named[1])
        assigned = owing and word.startswith("-") and _in_word(word, before)
        if owing and not names_one and not assigned and not _PLAIN_OPTION.fullmatch(word):
            found.append([_whole(owing, word, 0, len(word))])
            owing = ""
            continue
        found.append(assigned or _in_word(word, before))
        is_header = _HEADER_OPTION.fullmatch(before) and re.fullmatch(r"[A-Za-z][\w-]*", word)
        owing = named[1] if named and names_one else word if is_header and is_credential_variable(word) else ""
    return [_keys(inside, word) for word, inside in zip(words, found, strict=True)]


def _keys(found: Iterable[Credential], text: str) -> list[Credential]:
    """From left to right, apart from each other, without what is harmless."""
    kept: list[Credential] = []
    for each in sorted(found, key=lambda one: (one.start, -one.end)):
        is_apart = not kept or each.start >= kept[-1].end
        if is_apart and not _HARMLESS.fullmatch(text, each.start, each.end):
            kept.append(each)
    return kept


def in_value(name: str, text: str) -> list[Credential]:
    """Those of a variable's or a header's value: all of it but a scheme, or what stands in it under other names."""
    is_one = is_credential_variable(name) or _with_scheme(text)
    return _keys([_whole(name, text, 0, len(text))] if is_one else _inside(text), text)


def in_url(url: str) -> list[Credential]:
    """The user's password and the keys among the parameters."""
    return _keys(_inside(url), url)


def _in_word(word: str, before: str) -> list[Credential]:
    """`before`: the word before it, or the option that it is joined to."""
    is_line = _SHELL_OPTION.fullmatch(before) is not None
    if not is_line and _PAIRS.fullmatch(word):
        return _inside(word)
    is_value = before.startswith("-") and not is_line
    if not word.startswith("-") and not is_value and not _is_header(word) and len(spans := _shell_words(word)) > 1:
        return [*_in_line(word, spans), *_in_code(word)]
    holds_key = is_credential
    if _VARIABLE_OPTION.fullmatch(before) or _HEADER_OPTION.fullmatch(before):
        holds_key = is_credential_variable
    for form in (_ASSIGNMENT, _HEADER):
        told = form.fullmatch(word)
        if told and holds_key(told[1]):
            return [_whole(told[1], word, told.start(2), told.end(2))]
    if joined := _JOINED.fullmatch(word):
        return _moved(_in_word(joined[2], joined[1]), joined.start(2))
    return _inside(word)


def _moved(found: Iterable[Credential], by: int) -> list[Credential]:
    return [Credential(name=each.name, start=by + each.start, end=by + each.end) for each in found]


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
    return [each for (start, _), found in zip(spans, in_words(words)[1:], strict=True) for each in _moved(found, start)]


def _whole(name: str, text: str, start: int, end: int) -> Credential:
    """What stands there, without quotes and without the scheme of an Authorization."""
    start, end = _unquoted(text, start, end)
    scheme = _SCHEME.match(text, start, end)
    return Credential(name=name, start=scheme.end() if scheme else start, end=end)


def _with_scheme(text: str) -> bool:
    return re.fullmatch(r"(?:Bearer|Basic|Token)\s+\S+", text, re.IGNORECASE) is not None


def _unquoted(text: str, start: int, end: int) -> tuple[int, int]:
    if end - start > 1 and text[start] in "\"'" and text[start] == text[end - 1]:
        return start + 1, end - 1
    return start, end


def _inside(text: str) -> list[Credential]:
    return [*_in_urls(text), *_in_code(text), *_in_pairs(text)]


def _in_urls(text: str) -> Iterator[Credential]:
    for told in _USER.finditer(text):
        if told[3] is not None:
            yield Credential(name="password", start=told.start(3), end=told.end(3))
        elif told[1].lower() in ("http", "https"):  # a token may stand alone there
            yield Credential(name="user", start=told.start(2), end=told.end(2))
    if "://" in text or text.startswith("${"):
        for told in _IN_QUERY.finditer(text):
            name = unquote(told[1])
            if is_credential(name) or _PARAMETER.fullmatch(_dashed(name)):
                yield Credential(name=name, start=told.start(2), end=told.end(2))


def _in_code(text: str) -> Iterator[Credential]:
    for told in _IN_CODE.finditer(text):
        if is_credential(told[1]):
            yield _whole(told[1], text, told.start(3), told.end(3))


def _in_pairs(text: str) -> Iterator[Credential]:
    if _PAIRS.fullmatch(text):
        for told in _IN_PAIRS.finditer(text):
            if is_credential(told[1].lower() if told[1].isupper() else told[1]):  # PWD is no folder there
                yield _whole(told[1], text, told.start(2), told.end(2))
