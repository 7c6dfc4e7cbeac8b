"""Files of predictions, as the SWE-bench harness reads them
(https://www.swebench.com/SWE-bench/guides/evaluation/): written whole, read and checked.

`all_preds.jsonl` has one object a line, `preds.json` one object that maps ids to such objects. Both are ASCII, so that
no reader's idea of encodings or line ends can harm them.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Struct
from msgspec.structs import asdict

from batch.store import replacing
from swe import git
from swe.git import GitFailed
from swe.repository import cached
from swe.types import Instance, Prediction
from tools.errors import UsageProblem

KEYS = Prediction.__struct_fields__
LINES, MAPPING = "all_preds.jsonl", "preds.json"

_GIT_SECONDS = 60.0


class Predictions(Struct, frozen=True):
    """What a file holds: its predictions in order, and a line for each thing that is wrong with its form."""

    predictions: list[Prediction]
    faults: list[str]


def write_predictions(run_dir: Path, rows: Iterable[tuple[str, str, bytes]], formats: Sequence[str]) -> list[Path]:
    """Replaces the run's files of predictions by (instance id, model, patch) rows, in their order; a patch is UTF-8.
    `all_preds.jsonl` comes always, `preds.json` if "json" is among the formats. Returns their paths. Raises RunStopped
    if the disk refuses."""
    paths = [run_dir / LINES, *([run_dir / MAPPING] if "json" in formats else [])]
    with ExitStack() as stack:
        lines, *mapping = [stack.enter_context(replacing(path)) for path in paths]
        count = 0
        for name, model, patch in rows:
            text = _text(Prediction(instance_id=name, model_name_or_path=model, model_patch=patch.decode()))
            lines.write(text + b"\n")
            for file in mapping:
                _map(file, name, text, first=not count)
            count += 1
        for file in mapping:
            file.write(b"\n}\n" if count else b"{}\n")
    return paths


def _text(prediction: Prediction) -> bytes:
    return json.dumps(asdict(prediction)).encode()


def _map(file: BinaryIO, name: str, text: bytes, *, first: bool) -> None:
    file.write(b"%s%s: %s" % (b"{\n" if first else b",\n", json.dumps(name).encode(), text))


# --- reading


def read_predictions(path: Path) -> Predictions:
    """A `.jsonl` file, or a `.json` file with a list or a mapping. Raises UsageProblem if it cannot be read."""
    predictions, faults = [], []
    try:
        for where, value in _values(path):
            problems = [value.problem] if isinstance(value, _Unreadable) else list(_faults(value))
            if not problems:
                predictions.append(Prediction(**dict(value)))
            faults += [f"{where}: {problem}" for problem in problems]
    except OSError as error:
        raise UsageProblem(f"validate_predictions: {path}: {error.strerror}") from error
    return Predictions(predictions, faults)


class _Unreadable(Struct, frozen=True):
    problem: str


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    """What stands in the file, and where."""
    if path.suffix == ".jsonl":
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield f"line {number}", _value(line)
    elif path.suffix == ".json":
        yield from _members(_value(path.read_bytes()))
    else:
        yield path.name, _Unreadable("the name of a file of predictions ends in .jsonl or .json")


def _value(data: bytes) -> Any:
    """JSON, an object as a list of pairs."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_Pairs)
    except UnicodeDecodeError as error:
        return _Unreadable(f"not UTF-8 at byte {error.start + 1}")
    except json.JSONDecodeError as error:
        return _Unreadable(f"no JSON: {error}" if data.strip() else "empty")
    except RecursionError:
        return _Unreadable("nested too deeply")
    except ValueError as error:
        return _Unreadable(f"no JSON that can be read: {error}")


class _Pairs(list[tuple[str, Any]]):
    """An object, with the keys that it has twice."""


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _Pairs):
        for key, member in value:
            named = dict(member).get("instance_id") if isinstance(member, _Pairs) else None
            yield key, member if named in {key, None} else _Unreadable(f"it stands for another id, {named!r}")
    elif isinstance(value, list):
        yield from ((f"item {number}", member) for number, member in enumerate(value, 1))
    else:
        unfit = value if isinstance(value, _Unreadable) else _Unreadable("neither a list nor a mapping of predictions")
        yield "file", unfit


def _faults(value: Any) -> Iterator[str]:
    """What keeps a value from being a prediction."""
    if not isinstance(value, _Pairs):
        yield f"not an object with {', '.join(KEYS)}"
        return
    keys = Counter(key for key, _ in value)
    yield from (f"{key} is missing" for key in KEYS if key not in keys)
    yield from (f"{key} does not belong here" for key in keys if key not in KEYS)
    yield from (f"{key} is there {count} times" for key, count in keys.items() if count > 1)
    for key, member in value:
        if key not in KEYS:
            continue
        if member is None and key == "model_patch":
            yield 'model_patch is null: "" stands for no patch'
        elif not isinstance(member, str):
            yield f"{key} is no text"
        elif not member and key != "model_patch":
            yield f"{key} is empty"
        elif not _is_text(member):
            yield f"{key} holds half a surrogate pair"


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- checking


class Checked(Struct, frozen=True):
    """A line for each fault of a file; how many of its patches were not tried on their base commit, and why."""

    faults: list[str]
    untried: int
    why: str


def validate_predictions(path: Path, instances: Sequence[Instance] | None, cache: Path | None) -> Checked:
    """What keeps a file from being submitted: its form; ids that are there twice, unknown or missing among `instances`;
    patches that are malformed or do not apply to the base commit, or whose repository is not in the cache that is
    given. An empty patch is none. Raises UsageProblem if the file cannot be read."""
    read = read_predictions(path)
    known = None if instances is None else {instance.instance_id: instance for instance in instances}
    patches = [prediction for prediction in read.predictions if prediction.model_patch]
    faults = [*read.faults, *_id_faults(read.predictions, known), *_patch_faults(patches, known or {}, cache)]
    if not read.predictions and not read.faults:
        faults.insert(0, "it holds no predictions")
    if instances is None or cache is None:
        return Checked(faults, len(patches), "give --dataset and --repo_cache")
    nowhere = [each for each in patches if (found := (known or {}).get(each.instance_id)) and not found.repo]
    return Checked(faults, len(nowhere), "their instances name no repo")


def _id_faults(predictions: Sequence[Prediction], known: dict[str, Instance] | None) -> Iterator[str]:
    counts = Counter(prediction.instance_id for prediction in predictions)
    yield from (f"{name}: {count} predictions" for name, count in counts.items() if count > 1)
    if known is not None:
        yield from (f"{name}: no such instance" for name in counts if name not in known)
        yield from (f"{name}: no prediction" for name in known if name not in counts)


def _patch_faults(predictions: Sequence[Prediction], known: dict[str, Instance], cache: Path | None) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        for prediction in predictions:
            instance = known.get(prediction.instance_id)
            source = cached(cache, instance.repo) if cache and instance and instance.repo else None
            if problem := _problem(prediction, instance, source, Path(folder)):
                yield f"{prediction.instance_id}: {problem}"


def _problem(prediction: Prediction, instance: Instance | None, source: Path | None, folder: Path) -> str:
    patch = prediction.model_patch.encode()
    try:
        if instance is None or source is None:
            _apply(_borrowing(folder / "none", None), "--numstat", patch)
            return ""
        if not source.exists():
            return f"the patch cannot be tried: its repository is not in the cache, there is no {source}"
        words = _borrowing(folder / source.name, source)
        git.run(*words, "read-tree", f"{instance.base_commit}^{{tree}}", seconds=_GIT_SECONDS)
        _apply(words, "--check", patch)
    except GitFailed as error:
        return f"the patch cannot be applied: {error}"
    return ""


def _apply(words: Sequence[str], how: str, patch: bytes) -> None:
    """To the index of the repository that `words` name, without a word on white space, which would quote the patch."""
    words = (*words, "apply", "--cached", how, "--whitespace=nowarn")
    git.run(*words, seconds=_GIT_SECONDS, stdin=patch, must_be_whole=True)


def _borrowing(place: Path, source: Path | None) -> tuple[str, ...]:
    """git in a repository at `place` that has an index of its own and the objects of another."""
    if not place.exists():
        git.run("init", "--quiet", "--bare", "--template=", str(place), seconds=_GIT_SECONDS)
        (place / "objects" / "info").mkdir(exist_ok=True)
        if source:
            (place / "objects" / "info" / "alternates").write_text(f"{(source / 'objects').resolve()}\n")
    return (f"--git-dir={place}", f"--work-tree={place}")
