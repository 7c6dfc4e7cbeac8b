"""The cache of bare repositories: fetched once, whole or not at all, by nobody's settings."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swe.git import without_user
from swe.repository import fetch
from swe.types import Instance
from tests.contract.repositories import commit, git, make_repository
from tools.errors import UsageProblem

ROOT = Path(__file__).parents[2]


def instance(base_commit: str, url: object, repo: str = "owner/name") -> Instance:
    return Instance(instance_id="owner__name-1", repo=repo, base_commit=base_commit, repo_url=str(url))


def names(folder: Path) -> set[str]:
    return {place.name for place in folder.iterdir()} - {".owner__name.git.lock"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_repository(tmp_path / "source")


def test_a_repository_is_fetched_once_and_again_only_for_what_is_new(tmp_path: Path, source: Path) -> None:
    cache = tmp_path / "deep" / "cache"
    first = commit(source, a=b"1")
    second = commit(source, a=b"2")
    fetch(cache, [instance(second, source), instance(first, source)])
    assert names(cache) == {"owner__name.git"}
    place = cache / "owner__name.git"
    assert git(place, "rev-parse", "--is-bare-repository") == "true"

    gone = source.rename(tmp_path / "moved")
    fetch(cache, [instance(first, source)])  # needs no source any more
    third = commit(gone, a=b"3")
    with pytest.raises(UsageProblem) as caught:
        fetch(cache, [instance(third, source)])
    assert str(source) in str(caught.value)
    fetch(cache, [instance(third, f"file://{gone}")])
    assert git(place, "cat-file", "-t", third) == "commit"
    assert git(place, "rev-parse", "trunk") == third


def test_a_commit_on_no_branch_is_asked_for_by_its_hash(tmp_path: Path, source: Path) -> None:
    commit(source, a=b"1")
    fetch(tmp_path / "cache", [instance(git(source, "rev-parse", "HEAD"), source)])
    lost = commit(source, a=b"2")
    git(source, "reset", "--quiet", "--hard", "HEAD~1")
    git(source, "config", "uploadpack.allowAnySHA1InWant", "true")
    fetch(tmp_path / "cache", [instance(lost, f"file://{source}")])
    assert git(tmp_path / "cache" / "owner__name.git", "show", f"{lost}:a") == "2"
    fetch(tmp_path / "new", [instance(lost, f"file://{source}")])
    assert git(tmp_path / "new" / "owner__name.git", "show", f"{lost}:a") == "2"


def test_a_cache_without_the_right_to_write_serves_what_it_has(tmp_path: Path, source: Path) -> None:
    """Nothing is written for what is there: not even the lock."""
    base = commit(source, a=b"1")
    git(tmp_path, "clone", "--quiet", "--bare", str(source), "cache/owner__name.git")
    fetch(tmp_path / "cache", [instance(base, tmp_path / "nowhere")])
    assert {place.name for place in (tmp_path / "cache").iterdir()} == {"owner__name.git"}


@pytest.mark.parametrize(
    ("base_commit", "url", "repo", "said"),
    [
        ("f" * 40, "{source}", "owner/name", "the repository owner/name cannot be had from {source} for {cache}/owner"),
        ("0" * 39 + "1", "{tmp}/nothing", "owner/name", "the repository owner/name cannot be had from {tmp}/nothing"),
        ("0" * 39 + "1", "--upload-pack=touch {tmp}/done", "owner/name", "cannot be had from --upload-pack"),
        ("0" * 39 + "1", "ext::sh -c touch% {tmp}/done", "owner/name", "transport 'ext' not allowed"),
        ("0" * 39 + "1", "custom::x", "owner/name", "transport 'custom' not allowed"),
        ("0" * 39 + "1", "http://user:pass@127.0.0.1:9/x", "owner/name", "cannot be had from http://127.0.0.1:9/x "),
        ("0" * 39 + "1", "http://user:p@pass@127.0.0.1:9/x", "owner/name", "cannot be had from http://127.0.0.1:9/x "),
        ("0" * 39 + "1", "http://user:p/pass@127.0.0.1:9/x", "owner/name", "cannot be had from http://127.0.0.1:9/x "),
        ("--help", "{source}", "owner/name", "owner__name-1: base_commit '--help' is not 40 hex digits"),
        ("HEAD", "{source}", "owner/name", "base_commit 'HEAD' is not"),
        ("", "{source}", "owner/name", "base_commit '' is not"),
        ("1" * 40, "{source}", "../../x", "repo '../../x' is not of the form owner/name"),
        ("1" * 40, "{source}", "-o/n", "repo '-o/n' is not"),
        ("1" * 40, "{source}", "", "repo '' is not"),
    ],
)
def test_what_cannot_be_had_is_one_line_and_leaves_nothing(
    tmp_path: Path, source: Path, base_commit: str, url: str, repo: str, said: str
) -> None:
    commit(source, a=b"1")
    cache = tmp_path / "cache"
    places = {"source": source, "tmp": tmp_path, "cache": cache}
    with pytest.raises(UsageProblem) as caught:
        fetch(cache, [instance(base_commit, url.format(**places), repo)])
    told = str(caught.value)
    assert said.format(**places) in told
    assert "\n" not in told
    assert "pass" not in told
    assert not (tmp_path / "done").exists()
    assert not cache.exists() or names(cache) <= {"owner__name.git"}
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:p@ssw0rd@host/x.git", "http://host/x.git"),
        ("to 'https://user@h:80/o/n@v'; me@h", "to 'https://h:80/o/n@v'; me@h"),
        ("https://user:p?w#@h", "https://h"),
        ("https://user:p/w@h:80/x", "https://h:80/x"),
        ("http://h:80/o/n@v http://[::1]:80/a@b", "http://h:80/o/n@v http://[::1]:80/a@b"),
        ("file:///a:b/c@d", "file:///a:b/c@d"),
    ],
)
def test_addresses_name_no_user(text: str, shown: str) -> None:
    assert without_user(text) == shown


def test_the_cache_does_not_say_where_it_came_from(tmp_path: Path, source: Path) -> None:
    """As an address may hold a password."""
    first = commit(source, a=b"1")
    fetch(tmp_path / "cache", [instance(first, f"file://user:pass@localhost{source}")])
    fetch(tmp_path / "cache", [instance(commit(source, a=b"2"), f"file://user:pass@localhost{source}")])
    held = [file.read_bytes() for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    assert held
    assert not any(str(source).encode() in each or b"pass@" in each for each in held)


def test_what_is_no_repository_is_not_taken_for_one(tmp_path: Path, source: Path) -> None:
    base = commit(source, a=b"1")
    (tmp_path / "cache" / "owner__name.git").mkdir(parents=True)
    with pytest.raises(UsageProblem, match="not a git repository"):
        fetch(tmp_path / "cache", [instance(base, source)])


def test_two_sources_of_one_repository(tmp_path: Path, source: Path) -> None:
    first = commit(source, a=b"1")
    git(tmp_path, "clone", "--quiet", str(source), "fork")
    second = commit(tmp_path / "fork", a=b"2")
    fetch(tmp_path / "cache", [instance(first, source), instance(second, tmp_path / "fork")])
    assert git(tmp_path / "cache" / "owner__name.git", "cat-file", "-t", second) == "commit"


def test_nobodys_hooks_and_settings(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = commit(source, a=b"1")
    fetch(tmp_path / "cache", [instance(base, source)])
    place = tmp_path / "cache" / "owner__name.git"
    second = commit(source, a=b"2")
    ran = tmp_path / "ran"
    hook = place / "hooks" / "reference-transaction"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {ran}\n")
    hook.chmod(0o755)
    settings = tmp_path / "gitconfig"
    settings.write_text('[url "/nowhere/"]\n\tinsteadOf = /\n[core]\n\tfsmonitor = false\n')
    for name, value in {"GIT_CONFIG_GLOBAL": str(settings), "GIT_DIR": "/nowhere", "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / ".gitconfig").write_text(settings.read_text())
    fetch(tmp_path / "cache", [instance(second, source)])
    assert not ran.exists()


FETCH = """
import sys
from pathlib import Path
from swe.repository import fetch
from swe.types import Instance
cache, commit, url = sys.argv[1:]
print("begin", flush=True)
fetch(Path(cache), [Instance(instance_id="i", repo="owner/name", base_commit=commit, repo_url=url)])
"""


def fetching(cache: Path, base_commit: str, url: str, path: str = "") -> "subprocess.Popen[str]":
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path + os.environ["PATH"]}
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, str(cache), base_commit, url], env=environ, stdout=subprocess.PIPE, text=True
    )


def stub_git(folder: Path, before: str, after: str = "") -> str:
    """A `git` that runs a line of shell before and after each clone; the front of PATH."""
    folder.mkdir()
    real = subprocess.run(["which", "git"], capture_output=True, text=True, check=True).stdout.strip()
    clone = f'{before}\n{real} "$@" || exit\n{after}\nexit'
    (folder / "git").write_text(f'#!/bin/sh\ncase " $* " in *" clone "*) {clone};; esac\nexec {real} "$@"\n')
    (folder / "git").chmod(0o755)
    return f"{folder}:"


def test_processes_that_want_the_same_at_once_fetch_it_once(tmp_path: Path, source: Path) -> None:
    base = commit(source, a=b"1")
    path = stub_git(tmp_path / "bin", f"echo >>{tmp_path}/clones; sleep 0.3")
    running = [fetching(tmp_path / "cache", base, str(source), path) for _ in range(4)]
    assert [process.communicate(timeout=60) and process.returncode for process in running] == [0] * 4
    assert (tmp_path / "clones").read_text() == "\n"
    assert names(tmp_path / "cache") == {"owner__name.git"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_fetch_that_is_cut_off_leaves_nothing_half(tmp_path: Path, source: Path, number: int) -> None:
    base = commit(source, a=b"1")
    before = f"eval 'dir=$'$#; mkdir $dir; echo half >$dir/half; touch {tmp_path}/begun; sleep 2"
    path = stub_git(tmp_path / "bin", before, f"touch {tmp_path}/ended")
    first = fetching(tmp_path / "cache", base, str(source), path)
    while not (tmp_path / "begun").exists():
        time.sleep(0.02)
    first.send_signal(number)
    first.communicate(timeout=60)
    assert first.returncode != 0
    if number == signal.SIGINT:
        assert names(tmp_path / "cache") == set()
    second = fetching(tmp_path / "cache", base, str(source))
    second.communicate(timeout=60)
    assert second.returncode == 0
    assert (tmp_path / "ended").exists() == (number == signal.SIGKILL)  # a git that lives on is waited for
    assert names(tmp_path / "cache") == {"owner__name.git"}
    assert git(tmp_path / "cache" / "owner__name.git", "cat-file", "-t", base) == "commit"
