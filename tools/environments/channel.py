"""The one thing a backend has to supply: a channel, which is a long-lived `sh` inside the sandbox on two byte streams.

`tools.environments.shell.ShellEnvironment` makes a whole `Environment` of it::

    environment = ShellEnvironment(spec, backend="docker", image=image, cwd="/workspace", private="/.batch/",
                                   variables=base_variables(home="/root", temp="/tmp"), open_channel=open_channel)
    await environment.enter()   # first channel, variables, directory: SetupFailed if that cannot be had
    ...
    await environment.leave()   # closes every channel; what made the sandbox then removes it
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol


class Channel(Protocol):
    """A running POSIX `sh` that reads commands from its stdin; stdout and stderr may be one stream or be joined by us.

    The shell must not be process 1 of a process namespace (nobody would reap orphans), should be a session of its own,
    and needs no variables but PATH.
    """

    async def write(self, data: bytes) -> None:
        """All of `data` to its stdin. Raises EnvironmentLost when nobody can read it any more."""

    async def end_input(self) -> None:
        """Its stdin ends once what was written is read (half-close); its output goes on. May be called twice."""

    async def read(self) -> bytes:
        """What it printed next, at most about 64 KB; b"" at the end of the stream. Cancelling it loses no bytes."""

    async def close(self) -> None:
        """Ends the shell, whatever it does, within a second or so. Its children may live on. May be called twice."""


OpenChannel = Callable[[], Awaitable[Channel]]
"""Another channel into the same sandbox. Raises EnvironmentLost when the sandbox is gone."""


OVER_ANY = {"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
"""A locale where an image or a host may have set another."""

ALONE = {"LC_CTYPE": "C.UTF-8"}
"""The same where nobody else sets one: a shell reads one file for it instead of twelve."""


def locale_beside(variables: Mapping[str, str]) -> Mapping[str, str]:
    """The locale on a host that sets none: ours over one that the sandbox's own variables bring, unless they rule."""
    brought = any(name == "LANG" or name.startswith("LC_") for name in variables)
    return OVER_ANY if brought and "LC_ALL" not in variables else ALONE


def base_variables(*, home: str, temp: str, user: str = "root", locale: Mapping[str, str] = OVER_ANY) -> dict[str, str]:
    """The variables of every command, but for PATH and SHELL: PATH is the sandbox's own, or its backend sets one."""
    return {
        **locale,
        "DEBIAN_FRONTEND": "noninteractive",
        "GIT_PAGER": "cat",
        "GIT_TERMINAL_PROMPT": "0",
        "HOME": home,
        "PAGER": "cat",
        "TERM": "dumb",
        "TMPDIR": temp,
        "USER": user,
    }
