"""SWE-bench instances: read from a file or from the published data sets, checked, and chosen from."""

import difflib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from batch.progress import counted
from batch.rows import RowProblem, RowReader
from batch.spool import open_lines
from swe.types import Instance
from tools.errors import UsageProblem

SUBSETS = {
    "lite": "SWE-bench/SWE-bench_Lite",
    "verified": "SWE-bench/SWE-bench_Verified",
    "full": "SWE-bench/SWE-bench",
    "multilingual": "SWE-bench/SWE-bench_Multilingual",
}
"""The published data sets by their short names."""

SHOWN = 10  # faults of a file that are named
_FAMILY = {
    "mini-swe-bench": "verified",
    "swe-bench": "full",
    "swe-bench/swe-bench": "full",
    "princeton-nlp/swe-bench": "full",
}
"""Names that `--subset` chooses among, and what they mean without it."""

_SUFFIXES = (".json", ".jsonl", ".parquet", ".gz", ".zst")
_BOM = b"\xef\xbb\xbf"
_NAMES = {
    "FAIL_TO_PASS": "fail_to_pass",
    "PASS_TO_PASS": "pass_to_pass",
    "image_name": "image",
    "docker_image": "image",
}
_TESTS = ("fail_to_pass", "pass_to_pass")
_TEXTS = frozenset(Instance.__struct_fields__) - {*_TESTS, "pictures", "rest"}
_ASSETS = "image_assets"
_ID = re.compile(r"[^\s/\\\x00-\x1f]+")


# --- loading


def load_instances(name_or_path: str, split: str = "", subset: str = "", *, to_work: bool = False) -> list[Instance]:
    """The instances of a file (.json with an array or an object by id, .jsonl, .parquet; gzip and zstandard too) or of
    a data set of the Hugging Face hub, in its order.

    Of a file whose rows have a field `split`, those of this split ("" = all); of a published one "" is `test`.
    `to_work`: each has to state its problem. Raises UsageProblem, whose text names the first faults by file:line (in an
    array or a table: by the element's number).
    """
    published = "" if is_file(name_or_path) else _published_name(name_or_path, subset)
    if published:
        return _checked(published, _published_lines(published, split or "test"), "", to_work=to_work)
    if subset:
        raise UsageProblem(f"--subset {subset} is for the published data sets, not for the file {name_or_path}")
    return _checked(name_or_path, _lines(name_or_path), split, to_work=to_work)


def read_instance(row: dict[str, Any]) -> Instance:
    """A row's fields, each of its type; null is as good as none. Raises RowProblem."""
    given: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in row.items():
        name = _NAMES.get(key, key)
        if name not in _TEXTS and name not in _TESTS:
            rest[key] = value
        elif value is not None:
            read = _tests(key, value) if name in _TESTS else _text(key, value)
            if given.setdefault(name, read) != read:
                raise RowProblem(f"{key} is given twice, in two spellings that contradict each other")
    if "instance_id" not in given:
        raise RowProblem("no instance_id")
    if not _ID.fullmatch(given["instance_id"]):
        raise RowProblem(f"instance_id {given['instance_id']!r} is blank or holds white space or a slash")
    return Instance(**given, pictures=_pictures(row.get(_ASSETS)), rest=rest)


def _pictures(value: Any) -> tuple[str, ...]:
    """Those of the problem, of an object (or the JSON text of one) as multimodal instances have it. Those that belong
    to the patches stay where they are: they show the solution."""
    try:
        assets = msgspec.json.decode(value) if isinstance(value, str) and value.strip() else value or {}
    except msgspec.DecodeError as error:
        raise RowProblem(f"{_ASSETS} is neither an object nor the JSON text of one ({error})") from error
    addresses = (assets.get("problem_statement") or []) if isinstance(assets, dict) else None
    if not isinstance(addresses, list) or not all(isinstance(each, str) for each in addresses):
        raise RowProblem(f"{_ASSETS} must be an object whose problem_statement is a list of addresses")
    return tuple(dict.fromkeys(addresses))


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RowProblem(f"{key} must be a string, not {value!r:.60}")
    return value


def _tests(key: str, value: Any) -> tuple[str, ...]:
    """A list of test names, or the JSON text of one."""
    try:
        names = msgspec.json.decode(value) if isinstance(value, str) and value.strip() else value or []
    except msgspec.DecodeError as error:
        raise RowProblem(f"{key} is neither a list nor the JSON text of one ({error})") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RowProblem(f"{key} must be a list of test names, not {value!r:.60}")
    return tuple(names)


def _checked(source: str, lines: Iterable[tuple[int, bytes]], split: str, *, to_work: bool) -> list[Instance]:
    reader = RowReader()
    instances: list[Instance] = []
    splits: Counter[str] = Counter()
    first: dict[str, int] = {}
    faults: list[str] = []
    for number, line in lines:
        try:
            instance = read_instance(reader.read(line)[0])
        except RowProblem as problem:
            faults.append(f"{source}:{number}: {problem}")
            continue
        splits[own := str(instance.rest.get("split") or "")] += 1
        if split and own not in ("", split):
            continue
        if (before := first.setdefault(instance.instance_id, number)) != number:
            faults.append(f"{source}:{number}: instance_id {instance.instance_id!r} is also that of {before}")
        if to_work and not instance.problem_statement.strip():
            faults.append(f"{source}:{number}: {instance.instance_id} has no problem_statement")
        instances.append(instance)
    if faults:
        raise UsageProblem(_faults_text(faults))
    if not instances:
        others = f" of the split {split!r}; it has {', '.join(sorted(splits))}" if splits else ""
        raise UsageProblem(f"{source} holds no instances{others}")
    return instances


def _faults_text(faults: Sequence[str]) -> str:
    more = len(faults) - SHOWN
    shown = [*faults[:SHOWN], *([f"… and {more} more"] if more > 0 else [])]
    return "\n".join([f"{counted(len(faults), 'bad instance')}:", *shown]) if len(faults) > 1 else faults[0]


# --- files


def is_file(name: str) -> bool:
    """Whether a dataset is a file, and none that is published."""
    return name.startswith((".", "/")) or name.endswith(_SUFFIXES) or Path(name).is_file()


def _lines(path: str) -> Iterator[tuple[int, bytes]]:
    """(number, JSON text) of each instance; numbers from 1."""
    file, _ = open_lines(path, None)
    with file:
        if (whole := _whole_object(file, path)) is not None:
            yield from enumerate(whole, 1)
            return
        file.seek(0)
        for number, line in enumerate(file, 1):
            if text := line.removeprefix(_BOM).strip():
                yield number, text


def _whole_object(file: BinaryIO, path: str) -> list[bytes] | None:
    """The instances if the file is one JSON object: an instance, or instances by their ids. None for lines."""
    if not file.read(64).removeprefix(_BOM).lstrip().startswith(b"{"):
        return None
    file.seek(0)
    first = file.readline().removeprefix(_BOM)
    if b'"instance_id"' in first and file.read(1):
        return None

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if twice := [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]:
            raise UsageProblem(f"{path}: {twice[0]!r} stands twice in one object")
        return dict(pairs)

    file.seek(0)
    try:
        value = json.loads(file.read().decode("utf-8-sig"), object_pairs_hook=unique)
    except (ValueError, RecursionError):
        return None
    return [json.dumps(row).encode() for row in _by_id(value, path)]


def _by_id(value: dict[str, Any], path: str) -> Iterator[Any]:
    if "instance_id" in value or not value or not all(isinstance(row, dict) for row in value.values()):
        yield value
        return
    for key, row in value.items():
        if row.get("instance_id", key) != key:
            raise UsageProblem(f"{path}: under {key!r} stands the instance {row['instance_id']!r}")
        yield {"instance_id": key, **row}


# --- published data sets


def _published_name(name: str, subset: str) -> str:
    if subset and subset not in SUBSETS:
        raise UsageProblem(f"--subset {subset}: there are {', '.join(SUBSETS)}")
    if name in SUBSETS and subset in ("", name):
        return SUBSETS[name]
    if meant := _FAMILY.get(name.lower()):
        return SUBSETS[subset or meant]
    if subset:
        raise UsageProblem(f"--subset {subset} does not go with the data set {name}: it chooses among swe-bench's")
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        return name
    known = ", ".join(["mini-swe-bench", "swe-bench", *SUBSETS])
    raise UsageProblem(f"the dataset {name} is neither a file nor a name of the Hugging Face hub, nor one of {known}")


def _published_lines(name: str, split: str) -> Iterator[tuple[int, bytes]]:
    try:
        import datasets  # type: ignore[import-untyped]  # noqa: PLC0415  an extra, and slow to import
        from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415  comes with it
    except ImportError as error:
        raise UsageProblem(f"the data set {name} is on the hub, which needs: pip install -e '.[datasets]'") from error
    datasets.disable_progress_bars()
    try:
        table = datasets.load_dataset(name, split=split)
    except (OSError, ValueError, HfHubHTTPError, datasets.exceptions.DatasetsError) as error:
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise UsageProblem(f"the data set {name} (split {split}) cannot be had: {said}") from error
    for number, row in enumerate(table, 1):
        yield number, json.dumps(row, default=str).encode()


# --- choosing


def choose(
    instances: Sequence[Instance],
    *,
    filter: str = "",  # noqa: A002  named as its flag
    slice: str = "",  # noqa: A002  named as its flag
    ids: Sequence[str] = (),
) -> list[Instance]:
    """Those named by `ids` (none = all), whose id the regular expression `filter` finds something in, and of these the
    Python-like `slice` A:B; always in their own order. Raises UsageProblem, also when none is left."""
    chosen = _named(instances, ids) if ids else list(instances)
    if filter:
        pattern = _pattern(filter)
        chosen = [instance for instance in chosen if pattern.search(instance.instance_id)]
        if not chosen:
            raise UsageProblem(
                f"--filter {filter!r} finds none of the instance ids, such as {instances[0].instance_id}"
            )
    if slice:
        first, last = _bounds(slice)
        found, chosen = len(chosen), chosen[first:last]
        if not chosen:
            raise UsageProblem(f"--slice {slice} leaves none of {counted(found, 'instance')}")
    return chosen


def _named(instances: Sequence[Instance], ids: Sequence[str]) -> list[Instance]:
    wanted = set(ids)
    known = [instance.instance_id for instance in instances]
    for unknown in sorted(wanted.difference(known)):
        if unknown.split() != [unknown]:
            raise UsageProblem(f"--instance_ids: {unknown!r} is no id: commas stand between ids")
        near = difflib.get_close_matches(unknown, known, n=1, cutoff=0.0)
        raise UsageProblem(f"--instance_ids: there is no {unknown!r}{f'; the nearest is {near[0]}' if near else ''}")
    return [instance for instance in instances if instance.instance_id in wanted]


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise UsageProblem(f"--filter {text!r} is no regular expression: {error}") from error


def _bounds(text: str) -> tuple[int | None, int | None]:
    found = re.fullmatch(r"\s*(-?\d+)?\s*:\s*(-?\d+)?\s*", text, re.ASCII)
    if not found:
        raise UsageProblem(f"--slice {text!r} is not of the form A:B, such as 0:20, :5 or -10:")
    first, last = (int(bound) if bound else None for bound in found.groups())
    return first, last
