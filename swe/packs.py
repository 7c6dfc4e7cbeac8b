"""Packs of git objects on their way into a sandbox: out of a bare repository here, from git to git."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

from swe import git
from swe.git import GitFailed
from tools.environments.base import Environment


def cached_commit(repository: Path, commit: str) -> AsyncGenerator[bytes, None]:
    """A commit with its tree and nothing of its past, as a pack. Raises GitFailed."""
    words = (f"--git-dir={repository}", "pack-objects", "--quiet", "--stdout", "--revs", "--window=0", "--threads=1")
    return git.stream(*words, stdin=f"--shallow {commit}\n{commit}\n".encode())


async def unpack(
    environment: Environment, command: str, pack: AsyncGenerator[bytes, None], *, cwd: str, seconds: float
) -> None:
    """Streams a pack into a command of the sandbox, which has `seconds` from its end on: neither side holds it whole.
    Raises GitFailed, ToolError, EnvironmentLost."""
    async with aclosing(pack) as pieces:
        process = await environment.start(command, cwd=cwd)
        async for piece in pieces:
            if process.exit_code() is not None:
                break
            await process.write(piece)
        await process.close_stdin()
        if await process.wait(seconds) != 0:
            raise GitFailed(f"git index-pack: {process.output().strip()[-500:]}")
