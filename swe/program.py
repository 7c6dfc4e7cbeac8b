"""mini_swe_runner's command line: words in, exit code out."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from batch.cli import Page, show
from batch.exits import FINISHED, USAGE, exit_code
from batch.invocation import run
from batch.progress import counted, plain, print_lines
from swe.kind import SWE, instances_of
from swe.predictions import validate_predictions
from swe.settings import PREFIX, SweSettings, load_settings, swe_options

NOTES = f"""\
Names may be written with dashes. Lists are separated by commas. Every setting may also stand in the --config file
(setting: value) or in the environment ({PREFIX}SETTING).
Exit codes: 0 every task has an end and none failed; 1 some failed; 2 a mistake in what was asked for, nothing
spent; 3 stopped early (budget, endpoint, disk); 130/143 interrupted; 70 a fault of the program."""
ACTIONS = {
    "help": "this text",
    "version": "the program's version",
    "list_backends": "sandbox backends: ready here or not, and why",
    "list_providers": "model providers: endpoint, key variables",
}


def page() -> Page:
    """What its help is made of."""
    return Page(
        program=SWE.command,
        usage=f"{SWE.command} (--task TEXT | --prompts_file FILE | --dataset NAME) --model MODEL [--SETTING VALUE ...]",
        options=swe_options(),
        actions=ACTIONS,
        notes=NOTES,
    )


def invoke(words: Sequence[str]) -> int:
    """The exit code of one invocation."""
    return exit_code(lambda: _invoke(words))


def _invoke(words: Sequence[str]) -> int:
    settings, action = load_settings(words, os.environ)
    if action != "run":
        show(action, os.environ, page(), settings)
        return FINISHED
    if settings.validate_predictions:
        return _validate(settings)
    return run(settings, words, os.environ, SWE)


def _validate(settings: SweSettings) -> int:
    """Prints what is wrong with a file of predictions."""
    instances = instances_of(settings) if settings.dataset else None
    cache = Path(settings.repo_cache) if settings.repo_cache else None
    checked = validate_predictions(Path(settings.validate_predictions), instances, cache)
    told = counted(len(checked.faults), "fault") if checked.faults or checked.untried else "ready to submit"
    lines = [f"{settings.validate_predictions}: {told}", *checked.faults]
    if checked.untried:
        patches = counted(checked.untried, "patch was", "patches were")
        lines.append(f"{patches} not tried on the base commit: {checked.why}")
    print_lines(map(plain, lines), sys.stdout)
    return USAGE if checked.faults else FINISHED
