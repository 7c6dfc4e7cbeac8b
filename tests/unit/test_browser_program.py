"""Which browser is found, what is left of it, and small words."""

import os
import time
from pathlib import Path

import msgspec
import pytest

from tools.browser.engine import explained
from tools.browser.folder import BrowserFolder, Record, reap
from tools.browser.program import find_program, lacks_browser
from tools.browser.tools import key_name
from tools.environments.base import Owner
from tools.environments.owner import current_owner
from tools.services import ToolSettings


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_named_one_the_one_on_path_and_playwrights_own(tmp_path: Path) -> None:
    environ = {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path / "home")}
    assert find_program(ToolSettings(), environ) == ""
    assert "apt-get install chromium" in lacks_browser(ToolSettings(), environ)
    own = program(tmp_path / "home/.cache/ms-playwright/chromium-1234/chrome-linux64/chrome")
    assert find_program(ToolSettings(), environ) == str(own)
    google = program(tmp_path / "bin/google-chrome")
    assert find_program(ToolSettings(), environ) == str(google)
    chromium = program(tmp_path / "bin/chromium")
    assert find_program(ToolSettings(), environ) == str(chromium)
    named = program(tmp_path / "elsewhere/browser")
    for name in (str(named), "google-chrome"):
        found = find_program(ToolSettings(browser_program=name), environ)
        assert found == (str(named) if "/" in name else str(google))
    assert lacks_browser(ToolSettings(), environ) == ""
    assert "--browser_program" in lacks_browser(ToolSettings(browser_program="/not/there"), environ)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tools.browser.folder._LONGEST", 1000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_removed_with_its_profile_once_its_maker_is_dead(place: Path) -> None:
    profile = place / "profile"
    (profile / "Default").mkdir(parents=True)
    folder = BrowserFolder()
    folder.keep_profile(str(profile))
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert reap() == 0
    assert profile.exists()
    record = msgspec.json.decode((folder.path / "owner").read_bytes(), type=Record)
    assert (record.owner, record.profile) == (current_owner("browser"), str(profile))
    dead = msgspec.structs.replace(record.owner, start_time=1)
    (folder.path / "owner").write_bytes(msgspec.json.encode(msgspec.structs.replace(record, owner=dead)))
    assert reap() == 1
    assert list(place.iterdir()) == []


def test_a_folder_of_another_machine_or_just_being_made_stays(place: Path) -> None:
    folder = BrowserFolder()
    elsewhere = Owner(run_id="", boot_id="another", pid_namespace="x", pid=1, start_time=1)
    (folder.path / "owner").write_bytes(msgspec.json.encode(Record(elsewhere, folder.token)))
    new, old = place / "batch-browser-new", place / "batch-browser-old"
    new.mkdir()
    old.mkdir()
    os.utime(old, (time.time() - 1000,) * 2)
    assert reap() == 0
    assert sorted(each.name for each in place.iterdir()) == sorted(["batch-browser-new", folder.path.name])


def test_a_folder_is_removed_at_the_end(place: Path) -> None:
    folder = BrowserFolder()
    folder.keep_profile(str(place / "gone"))
    folder.remove()
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "name"),
    [
        *(("enter", "Enter"), ("Enter", "Enter"), ("ctrl+a", "Control+a"), ("Control+Shift+T", "Control+Shift+T")),
        *(("esc", "Escape"), ("down", "ArrowDown"), ("PAGEDOWN", "PageDown"), ("a", "a"), ("+", "+"), (" ", " ")),
        *(("ctrl++", "Control++"), ("F5", "F5"), ("return", "Enter"), ("alt + left", "Alt+ArrowLeft"), ("", "")),
    ],
)
def test_keys(given: str, name: str) -> None:
    assert key_name(given) == name


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "Locator.click: Timeout 10000ms exceeded.\nCall log:\n  - waiting for locator\n    - retrying\n"
            '      - <div id="cover">cover</div> intercepts pointer events\n    - retrying click action\n',
            'Timeout 10000ms exceeded. (<div id="cover">cover</div> intercepts pointer events)',
        ),
        ("Page.evaluate: Error: no\n    at eval", "Error: no"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("", "RuntimeError"),
    ],
)
def test_errors_in_a_line(text: str, told: str) -> None:
    assert explained(RuntimeError(text)) == told
