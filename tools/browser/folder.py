"""One browser's folder on this machine, with the record by which it can be removed when its maker is dead."""

import os
import secrets
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from tools.environments.base import Owner
from tools.environments.hosted import remove_tree
from tools.environments.owner import current_owner, is_dead
from tools.environments.processes import all_pids, kill_call

_PREFIX = "batch-browser-"
_RECORD = "owner"
_LONGEST = 30  # characters: of 107, the rest is for names of ours and Chromium's
_NOBODYS = 60.0  # seconds after which a folder without a record is nobody's


class Record(Struct, frozen=True):
    """The file `owner`. `token` marks the browser's processes; `profile` is a folder that the driver has made."""

    owner: Owner
    token: str
    profile: str = ""


class BrowserFolder:
    """Made at once. The browser's home, temporary files and downloads lie in it."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(6)
        self._profile = ""
        self.path = _places()[0] / f"{_PREFIX}{self.token}"
        self.path.mkdir(0o700)
        self._write()
        for part in ("home", "downloads", "artifacts"):
            (self.path / part).mkdir(0o700)

    def keep_profile(self, profile: str) -> None:
        """A folder elsewhere that goes with this one."""
        self._profile = profile
        self._write()

    def _write(self) -> None:
        record = Record(current_owner("browser"), self.token, self._profile)
        whole = self.path / f"{_RECORD}.new"
        whole.write_bytes(msgspec.json.encode(record))
        whole.replace(self.path / _RECORD)

    def remove(self) -> None:
        """With the browser's processes, where some are left."""
        _remove(self.path, Record(current_owner("browser"), self.token, self._profile))


def reap() -> int:
    """Removes what browsers of dead makers have left; how many those were."""
    stale = [(folder, record) for folder in _folders() if (record := _stale(folder))]
    for folder, record in stale:
        _remove(folder, record)
    for folder in filter(_is_nobodys, _folders()):
        remove_tree(folder)
    return len(stale)


def _folders() -> list[Path]:
    """Our own alone: a record says what to delete, and anybody may write to the place where they lie."""
    return [folder for place in _places() for folder in place.glob(f"{_PREFIX}*") if _is_ours(folder)]


def _places() -> list[Path]:
    """Where such folders are made, and where they may be. Chromium makes sockets there, whose path has to be short."""
    usual, short = tempfile.gettempdir(), "/tmp"  # noqa: S108 - a folder of our own is made in it
    places = [short, usual] if len(usual) > _LONGEST else [usual, short]
    return [Path(place) for place in dict.fromkeys(places)]


def _is_ours(folder: Path) -> bool:
    with suppress(OSError):
        return folder.lstat().st_uid == os.getuid()
    return False


def _stale(folder: Path) -> Record | None:
    with suppress(OSError, msgspec.DecodeError):  # being made or removed just now, or another user's
        record = msgspec.json.decode((folder / _RECORD).read_bytes(), type=Record)
        return record if is_dead(record.owner) else None
    return None


def _is_nobodys(folder: Path) -> bool:
    """Whether its maker died before there was a record."""
    with suppress(OSError):
        return folder.stat().st_mtime < time.time() - _NOBODYS and not (folder / _RECORD).exists()
    return False


def _remove(folder: Path, record: Record) -> None:
    kill_call(f"{record.token}.", all_pids)
    if record.profile:
        remove_tree(Path(record.profile))
    remove_tree(folder)
