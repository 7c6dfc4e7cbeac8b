"""This machine's git: nobody's settings, no hooks, no prompts, no shell, and no wait without an end."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress

_KEPT = (
    *("PATH", "HOME", "TMPDIR", "SSH_AUTH_SOCK"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "GIT_SSL_CAINFO", "CURL_CA_BUNDLE"),
    *("http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"),
)
_OURS = {
    "LC_ALL": "C",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_SSH_COMMAND": "ssh -o BatchMode=yes -o ConnectTimeout=30",
    "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_NO_LAZY_FETCH": "1",
}
_SETTINGS = (
    *("-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false"),
    *("-c", "gc.auto=0", "-c", "maintenance.auto=false", "-c", "fetch.recurseSubmodules=false"),
    *("-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=60"),
)
_CHUNK = 65_536
_ASK_SECONDS = 60.0
_PASSED_OVER = re.compile(rb"^error:", re.MULTILINE)
_USER = re.compile(r"://(?:[^\s/]*|[^\s/@:\[]*:(?!\d*(?:[\s/?#'\"]|$))[^\s@]*)@")
"""User and password: all up to the last `@` before the path, or, where the password holds a slash, up to the first."""


class GitFailed(Exception):
    """What git said, in one line without credentials."""


def run(
    *words: str, seconds: float, stdin: bytes = b"", keep: Sequence[int] = (), must_be_whole: bool = False
) -> bytes:
    """What git prints. It and all it starts are killed after `seconds`; `keep` are descriptors that they hold too.
    `must_be_whole`: an error that git tells and passes over, as `git apply` does a damaged binary patch, counts.
    Raises GitFailed."""
    with _started(words, keep) as process:
        try:
            output, said = process.communicate(stdin, timeout=seconds)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise GitFailed(f"git {words[0]} took longer than {seconds:.0f} s") from None
            raise
    if process.returncode or (must_be_whole and _PASSED_OVER.search(said)):
        raise GitFailed(_reason(said, process.returncode))
    return output


def refusal_of(pathspecs: Sequence[str]) -> str:
    """What git says against them, in one line; "" if it takes them, or there is none on this machine to ask."""
    if not pathspecs or not shutil.which("git"):
        return ""
    with tempfile.TemporaryDirectory() as folder:
        words = (f"--git-dir={folder}/git", f"--work-tree={folder}")
        run("init", "--quiet", "--bare", "--template=", f"{folder}/git", seconds=_ASK_SECONDS)
        try:
            run(*words, "diff", "--cached", "--quiet", "--", ".", *pathspecs, seconds=_ASK_SECONDS)
        except GitFailed as error:
            return str(error)
    return ""


async def stream(*words: str, stdin: bytes) -> AsyncGenerator[bytes, None]:
    """What git prints, in pieces; it is killed when the reader stops early. Raises GitFailed at the end."""
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            "git", *_SETTINGS, *words, stdin=pipe, stdout=pipe, stderr=pipe, env=environment()
        )
    except FileNotFoundError:
        raise GitFailed("git is not installed on this machine") from None
    assert process.stdin
    assert process.stdout
    assert process.stderr
    try:
        process.stdin.write(stdin)
        process.stdin.close()
        while piece := await process.stdout.read(_CHUNK):
            yield piece
        said = await process.stderr.read()
        if code := await process.wait():
            raise GitFailed(_reason(said, code))
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def environment() -> dict[str, str]:
    """The variables that git sees."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ} | _OURS


def without_user(text: str) -> str:
    """A text whose addresses name no user or password."""
    return _USER.sub("://", text)


def _started(words: Sequence[str], keep: Sequence[int]) -> "subprocess.Popen[bytes]":
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(  # noqa: S603  our own words, each an argument
            ["git", *_SETTINGS, *words],  # noqa: S607  the user's git
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=environment(),
            start_new_session=True,
            pass_fds=keep,
        )
    except FileNotFoundError:
        raise GitFailed("git is not installed on this machine") from None


def _reason(said: bytes, code: int) -> str:
    """The line that says what is wrong, which is not always the last."""
    lines = [line.strip() for line in without_user(said.decode(errors="replace")).splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith(("fatal:", "error:"))]
    return (fatal or lines[-1:] or [f"git ended with {code}"])[0]
