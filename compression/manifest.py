"""run.json of a work folder: what a run was told and what it read. Pure but for the files by which rows
are counted, which it reads."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from agent.outcome import utc_text
from agent.tokens import tokenizer_file
from compression.counting import tokens_beside
from compression.run import File
from compression.settings import CompressorSettings, shaping
from tools.errors import UsageProblem

FORMAT = 1


def begun(
    known: Mapping[str, Any] | None, settings: CompressorSettings, files: Sequence[File], began: float
) -> dict[str, Any]:
    """The manifest of a run that begins, or goes on: `known` is what it was until now. UsageProblem if it is another
    run by what shapes its result."""
    inputs = [
        {"path": str(each.source.path.resolve()), "size": each.scanned.size, "sha256": each.scanned.sha256}
        for each in files
    ]
    told = {
        "format": FORMAT,
        "started_at": utc_text(began),
        "seconds": 0.0,
        "settings": {**shaping(settings), **_files(settings)},
        "inputs": inputs,
        "written": [],
    }
    if known is None:
        return told
    _refuse_changes(known, told)
    return {**told, **{name: known[name] for name in ("started_at", "seconds", "inputs", "written")}}


def _files(settings: CompressorSettings) -> dict[str, str]:
    """What the files hold that decide how rows are counted."""
    template = Path(settings.chat_template).expanduser() if settings.chat_template else None
    told = {"chat_template": _sha("chat_template", template) if template else ""}
    if tokenizer := tokenizer_file(settings.tokenizer):
        told["tokenizer_file"] = _sha("tokenizer", tokenizer)
    if template and (beside := tokens_beside(template)):
        told["tokenizer_config"] = _sha("chat_template", beside)
    return told


def _sha(what: str, file: Path) -> str:
    try:
        return sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageProblem(f"{what} {file} cannot be read: {error.strerror}") from error


def _refuse_changes(known: Mapping[str, Any], told: Mapping[str, Any]) -> None:
    if known.get("format") != FORMAT:
        raise UsageProblem("the work folder is of another version of this program: choose another output")
    before, now = known["settings"], told["settings"]
    for name, value in now.items():
        if before.get(name) != value:
            raise UsageProblem(
                f"{name} was {before.get(name)!r} when the run began and is {value!r} now: a run is gone on with as it"
                " began; choose another output"
            )
    if len(known["inputs"]) != len(told["inputs"]):
        raise UsageProblem(f"the run began with {len(known['inputs'])} inputs, now there are {len(told['inputs'])}")
    for then, file in zip(known["inputs"], told["inputs"], strict=True):
        if (then["size"], then["sha256"]) != (file["size"], file["sha256"]):
            before = "it" if then["path"] == file["path"] else then["path"]
            raise UsageProblem(f"{file['path']} is not what {before} was when the run began")
