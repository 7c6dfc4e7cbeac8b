"""The batch runner's command line: words in, exit code out."""

import os
from collections.abc import Sequence

from batch.cli import page, show
from batch.exits import FINISHED, exit_code
from batch.invocation import run
from batch.settings import load_settings


def invoke(words: Sequence[str]) -> int:
    """The exit code of one invocation."""
    return exit_code(lambda: _invoke(words))


def _invoke(words: Sequence[str]) -> int:
    settings, action = load_settings(words, os.environ)
    if action == "check_backend":
        from batch.qualify import check_backend  # noqa: PLC0415 - only this action needs it

        return check_backend(settings, os.environ)
    if action != "run":
        show(action, os.environ, page(), settings)
        return FINISHED
    return run(settings, words, os.environ)
