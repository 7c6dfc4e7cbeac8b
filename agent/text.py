"""The borders where text enters: what no file may hold is replaced, our own secrets are struck out. A leaf.

"JSON values" are what `json.loads` gives: None, booleans, numbers, strings, lists, and dicts with string keys.
Nothing here recurses, so no depth of nesting can end a row.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

T = TypeVar("T")

MIN_SECRET_LENGTH = 12
_SECRET_NAME = re.compile(r"(?:.*_)?(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)", re.IGNORECASE | re.DOTALL)
_URL_USER = re.compile(r"\b[a-z][a-z0-9+.-]{0,30}://([^\s/?#:@]*:[^\s/?#]*)@", re.IGNORECASE)
_PLACEHOLDER = re.compile(
    r"(?:[a-z]{2,8}[-_])?[x*.0_-]+"  # xxxxxxxxxxxx, sk-xxxx-xxxx, ************
    r"|(.)\1*"
    r"|<.*>|\$\{?\w+\}?|\$?\{\{.*\}\}|%\w+%"  # <api key>, $KEY, ${KEY}, {{ key }}, %KEY%
    r"|(?:please[-_ ]?)?change[-_ ]?(?:me|this|it)(?:[-_ ]?(?:please|now))?|replace[-_ ]?(?:me|this|with).*"
    r"|(?:[a-z]{2,8}[-_])?your[-_ ].*(?:key|token|secret|password|credentials)(?:[-_ ]?here)?"
    r"|(?:insert|enter|put|paste|add|set)[-_ ].*here"
    r"|(?:[a-z]{2,8}[-_])?(?:none|null|empty|no|not|dummy|fake|placeholder)"
    r"(?:[-_ ]?(?:api|key|needed|required|set|token|used))*",
    re.IGNORECASE | re.DOTALL,
)


def clean(value: T) -> T:
    """A text or JSON value (dict keys too) with lone surrogates and NUL as U+FFFD; the same object if it has none."""
    if _is_clean(value) if isinstance(value, str) else all(map(_is_clean, _strings(value))):
        return value
    changed: T = _mapped(value, _clean_text, keys=True)
    return changed


def json_text(value: object) -> str:
    """The compact JSON text of a cleaned JSON value, non-ASCII kept. ValueError for NaN and infinity."""
    return json.dumps(clean(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def secrets_from(environ: Mapping[str, str], keys_in_use: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Name -> secret, and the names of keys in use that are too short to be struck out safely.

    A secret is a key in use (several may be joined by commas), the value of a variable whose name is or ends in a
    word such as KEY or TOKEN, or the user:password of a URL in any variable, if it has at least 12 characters and is
    no number, existing path or placeholder. A name's further secrets are called NAME_2, NAME_3 …
    """
    labels: dict[str, str] = {}
    for name, candidate in _candidates(environ, keys_in_use):
        if len(candidate) >= MIN_SECRET_LENGTH and not _is_harmless(candidate):
            labels.setdefault(candidate, name)
    secrets: dict[str, str] = {}
    for secret, label in labels.items():
        secrets[_free_name(label, secrets)] = secret
    return secrets, sorted(name for name, keys in keys_in_use.items() if any(map(_is_short, _parts(keys))))


class Redactor:
    """Writes `[REDACTED:NAME]` over every secret of a name -> secret mapping."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        named = {clean(secret): name for name, secret in reversed(list(secrets.items())) if secret}
        self._names = {secret: named[secret] for secret in sorted(named, key=lambda secret: (-len(secret), secret))}
        self._pattern = re.compile("|".join(map(re.escape, self._names)))  # longest first: the first branch wins

    def text(self, text: str) -> str:
        """A plain text; never hand it serialized JSON, where an escaped secret would not be found."""
        if not any(secret in text for secret in self._names):
            return text
        return self._pattern.sub(self._mark, text)

    def value(self, value: T) -> T:
        """A JSON value with every string in it redacted; dict keys stay."""
        if not self._names:
            return value
        redacted: T = _mapped(value, self.text, keys=False)
        return redacted

    def _mark(self, found: re.Match[str]) -> str:
        return f"[REDACTED:{self._names[found[0]]}]"


def _is_clean(text: str) -> bool:
    if "\0" in text:
        return False
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _clean_text(text: str) -> str:
    if _is_clean(text):
        return text
    # by way of UTF-16, so that the two halves of one character, joined from two pieces, become that character
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").replace("\0", "\ufffd")


def _strings(value: Any) -> Iterator[str]:
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            yield from item
            todo.extend(item.values())
        elif isinstance(item, list):
            todo.extend(item)


def _mapped(value: Any, convert: Callable[[str], str], *, keys: bool) -> Any:
    """A copy of a JSON value in which every string went through `convert`."""
    root = [value]
    todo: list[Any] = [root]
    while todo:
        box = todo.pop()
        for place, item in list(box.items() if isinstance(box, dict) else enumerate(box)):
            if isinstance(item, str):
                box[place] = convert(item)
            elif isinstance(item, dict | list):
                box[place] = copy = _copied(item, convert if keys else None)
                todo.append(copy)
    return root[0]


def _copied(box: dict[str, Any] | list[Any], key: Callable[[str], str] | None) -> dict[str, Any] | list[Any]:
    if isinstance(box, dict) and key:
        return {key(name): item for name, item in box.items()}
    return box.copy()


def _candidates(environ: Mapping[str, str], keys_in_use: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, keys in keys_in_use.items():
        yield from ((name, part) for part in _parts(keys))
    for name, value in environ.items():
        if _SECRET_NAME.fullmatch(name):
            yield from ((name, part) for part in _parts(value))
        yield from ((name, part) for user in _URL_USER.findall(value) for part in _user_parts(user))


def _parts(keys: str) -> list[str]:
    """The whole, and what stands between commas."""
    return list(dict.fromkeys(part.strip() for part in (keys, *keys.split(","))))


def _user_parts(user: str) -> list[str]:
    """user:password as it stands and decoded, and the password alone."""
    spelt = list(dict.fromkeys((user, unquote(user))))
    return spelt + [part.partition(":")[2] for part in spelt]


def _free_name(label: str, taken: Mapping[str, str]) -> str:
    name, number = label, 1
    while name in taken:
        number += 1
        name = f"{label}_{number}"
    return name


def _is_short(key: str) -> bool:
    return 0 < len(key) < MIN_SECRET_LENGTH and not _PLACEHOLDER.fullmatch(key)


def _is_harmless(text: str) -> bool:
    return bool(_PLACEHOLDER.fullmatch(text)) or _is_number(text) or _is_path(text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_path(text: str) -> bool:
    try:
        return Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, a home that nobody has: no path then
        return False
