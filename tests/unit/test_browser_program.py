"""Which browser is found, what is left of it, and small words."""

import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from playwright.async_api import Error

from tools.base import ToolContext
from tools.browser.engine import Limits, explained
from tools.browser.folder import BrowserFolder, Record, reap
from tools.browser.program import find_program, lacks_browser
from tools.browser.tools import Tab, _answer, key_name
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


def test_a_program_that_is_no_chromium_is_refused(tmp_path: Path) -> None:
    for number, (script, is_one) in enumerate(
        (("echo Chromium 150.0", True), ("echo Google Chrome 150", True), ("exit 1", False), ("echo Firefox", False))
    ):
        named = program(tmp_path / f"browser{number}")
        named.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {script}\n')
        lack = lacks_browser(ToolSettings(browser_program=str(named)), {"PATH": "/usr/bin:/bin"})
        assert ("does not say that it is one" in lack) != is_one, lack
    broken = program(tmp_path / "broken")
    broken.write_bytes(b"\x7fELF")
    assert "--browser_program" in lacks_browser(ToolSettings(browser_program=str(broken)), {})


def test_a_program_that_does_not_answer_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.browser.program.VERSION_SECONDS", 0.2)
    named = program(tmp_path / "hangs")
    named.write_text("#!/bin/sh\nsleep 300 & sleep 300\n")
    began = time.monotonic()
    lack = lacks_browser(ToolSettings(browser_program=str(named)), {"PATH": "/usr/bin:/bin"})
    assert "does not say" in lack
    assert time.monotonic() - began < 5


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


class Page:
    """What Playwright says to each navigation in turn, "" if it goes well. It stays where it is. The session, too."""

    url = "http://e.com/"

    def __init__(self, *says: str) -> None:
        self.says = list(says)
        self.waited = 0

    async def goto(self, url: str, **_: Any) -> str:
        if said := self.says.pop(0):
            raise Error(f"Page.goto: {said}")
        return "the answer"

    def expect_error_page(self) -> None:
        self.expects = True

    async def error_page(self, limits: Limits) -> None:
        assert self.expects
        self.expects = False
        self.waited += 1


CHANGED = "net::ERR_NETWORK_CHANGED at http://e.com/"
TO = 'Navigation to "http://e.com" is interrupted by another navigation to '


@pytest.mark.parametrize(
    ("says", "answer"),
    [
        ([""], "the answer"),
        ([CHANGED, ""], "the answer"),
        ([CHANGED, f'{TO}"chrome-error://chromewebdata/"', ""], "the answer"),
        ([f'{TO}"chrome-error://chromewebdata/"', CHANGED, ""], "the answer"),
        ([f'{TO}"http://e.com/"'], None),
        ([f'{TO}"http://e.com/other"', ""], "the answer"),
        ([f'{TO}"http://e.com/other"'] * 3, None),
        ([CHANGED] * 3, Error),
        ([CHANGED, CHANGED, f'{TO}"chrome-error://chromewebdata/"'], Error),
        (["net::ERR_FAILED at http://e.com/"], Error),
    ],
)
async def test_a_navigation_is_tried_again_where_another_came_between(says: list[str], answer: Any) -> None:
    """Also to the page where one is already: that it is still there means nothing."""
    page: Any = Page(*says)
    tab = Tab(ToolContext(page, 1.0), page, Limits(), page)
    if answer is Error:
        with pytest.raises(Error):
            await _answer(tab, "http://e.com")
    else:
        assert await _answer(tab, "http://e.com") == answer
    assert page.says == []
    assert page.waited == says[:-1].count(CHANGED)


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
