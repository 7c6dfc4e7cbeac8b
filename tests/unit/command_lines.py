"""What a program makes of its command line."""

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import pytest

from tools.errors import UsageProblem

Settings = TypeVar("Settings")


class CommandLine(Generic[Settings]):
    """A program's settings, from words that follow those of `base`, and variables."""

    def __init__(
        self, load_settings: Callable[[Sequence[str], Mapping[str, str]], tuple[Settings, str]], base: Sequence[str]
    ) -> None:
        self._load_settings = load_settings
        self._base = base

    def load(self, *argv: str, base: Sequence[str] | None = None, **environ: str) -> Settings:
        settings, action = self._load_settings([*(self._base if base is None else base), *argv], environ)
        assert action == "run"
        return settings

    def refused(self, *argv: str, base: Sequence[str] | None = None, **environ: str) -> str:
        """Why, in one line."""
        with pytest.raises(UsageProblem) as caught:
            self._load_settings([*(self._base if base is None else base), *argv], environ)
        message = str(caught.value)
        assert "\n" not in message
        return message
