"""Names: those of files that are made for a task, and the known one that a wrong one is near. A leaf."""

import hashlib
import re
from collections.abc import Iterable
from urllib.parse import quote

NAME_BYTES = 150
_SAMPLE_SUFFIX = re.compile(r"__s\d+$")
_HASH_DIGITS = 16
_PLACES = {".": "%2E", "..": "%2E%2E"}  # the names that mean a folder which is there already


def file_name(task_id: str, sample_index: int = 0) -> str:
    """The task's name as files and folders have it, without an ending: of letters, digits, `.`, `_`, `-` and `%` alone,
    at most 150 bytes; further samples of a row end in `__sK`."""
    name = quote(task_id, safe="").replace("~", "%7E")
    name = _PLACES.get(name, name)
    if _SAMPLE_SUFFIX.search(name):  # or it would be another row's sample
        name = "%5F_".join(name.rsplit("__", 1))
    suffix = f"__s{sample_index}" if sample_index else ""
    if len(name) + len(suffix) > NAME_BYTES:
        digest = hashlib.sha256(task_id.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_DIGITS]
        name = f"{name[: NAME_BYTES - len(suffix) - len(digest) - 1]}-{digest}"
    return name + suffix


def nearest(name: str, known: Iterable[str], most: int = 1) -> list[str]:
    """The known names that were probably meant, the likeliest first."""
    import difflib  # noqa: PLC0415 - only for messages

    return difflib.get_close_matches(name, list(known), n=most)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The question that names the nearest of the known names; "" where none is near."""
    return "".join(f"did you mean {near}?" for near in nearest(name, known))
