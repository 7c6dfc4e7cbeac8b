"""Repositories for tests of what is done with them, made by git with nobody's settings."""

from pathlib import Path

from tests import made_repositories


def git(folder: Path, *words: str, stdin: bytes | None = None) -> str:
    """What git prints; it must succeed."""
    return made_repositories.git(folder, *words, stdin=stdin).decode().strip()


def make_repository(folder: Path) -> Path:
    """An empty repository on the branch `trunk`."""
    folder.mkdir(parents=True)
    git(folder, "init", "--quiet", "--initial-branch=trunk")
    return folder


def commit(folder: Path, **files: bytes) -> str:
    """The hash of a commit of everything, files given by their names written first."""
    for name, data in files.items():
        (folder / name).write_bytes(data)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message=change")
    return git(folder, "rev-parse", "HEAD")
