"""Which browser is run, and how: the system's Chromium, with few rights and no variable of ours."""

import importlib.util
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from tools.services import ToolSettings

_NAMES = ("chromium", "chromium-browser", "google-chrome")
VERSION_SECONDS = 5.0
USUAL_PATH = "/usr/local/bin:/usr/bin:/bin"
_PLAYWRIGHTS_OWN = (
    *("chromium-*/chrome-linux*/chrome", "chromium_headless_shell-*/*/headless_shell"),
    "chromium_headless_shell-*/*/chrome-headless-shell",
)

SWITCHES = (
    *("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    "--disable-auto-reload",  # of a page that could not be opened, in the middle of what comes next
    # Nothing goes around the gateway: no packet of WebRTC (newer Chromium knows the first name, older the second), no
    # question to a name server, nor what the browser itself would ask of its maker.
    *(f"--{name}=disable_non_proxied_udp" for name in ("webrtc-ip-handling-policy", "force-webrtc-ip-handling-policy")),
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)


def lacks_browser(settings: ToolSettings, environ: Mapping[str, str]) -> str:
    """See `tools.toolsets.NEEDS`."""
    if importlib.util.find_spec("playwright") is None:
        return "the package playwright: pip install -e '.[browser]'"
    program = find_program(settings, environ)
    if not settings.browser_program:
        return "" if program else "a browser: apt-get install chromium, or name one by --browser_program"
    if not program:
        return f"the program {settings.browser_program} that --browser_program names"
    if not _is_chromium(program, environ.get("PATH", USUAL_PATH)):
        return f"a Chromium: {settings.browser_program}, which --browser_program names, does not say that it is one"
    return ""


@cache
def _is_chromium(program: str, path: str) -> bool:
    """Whether it says so when it is asked for its version."""
    try:
        asked = subprocess.Popen(  # noqa: S603 - the program that the user names
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": path, "HOME": "/nonexistent"},
            start_new_session=True,
        )
    except OSError:
        return False
    with asked:
        try:
            said = asked.communicate(timeout=VERSION_SECONDS)[0]
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(OSError):
                os.killpg(asked.pid, signal.SIGKILL)
    return b"Chrom" in said


def find_program(settings: ToolSettings, environ: Mapping[str, str]) -> str:
    """The path of the browser to run: the one named, else one on PATH, else what `playwright install` has brought; ""
    if there is none."""
    path = environ.get("PATH", USUAL_PATH)
    if settings.browser_program:
        return shutil.which(settings.browser_program, path=path) or ""
    found = (shutil.which(name, path=path) for name in _NAMES)
    return next(filter(None, found), "") or _playwrights_own(environ)


def _playwrights_own(environ: Mapping[str, str]) -> str:
    home = Path(environ.get("HOME", "/nonexistent"))
    place = Path(environ.get("PLAYWRIGHT_BROWSERS_PATH") or home / ".cache/ms-playwright")
    for pattern in _PLAYWRIGHTS_OWN:
        if found := sorted(place.glob(pattern)):
            return str(found[-1])
    return ""


def may_use_sandbox() -> bool:
    """Whether Chromium's own sandbox is left on: it does not start as root."""
    return os.geteuid() != 0
