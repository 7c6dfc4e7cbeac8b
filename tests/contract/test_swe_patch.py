"""The patch of what was done to a real repository in a real sandbox: on a clean checkout it gives the same files."""

import asyncio
import os
import re
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest

from swe import patch, patch_scripts
from swe.patch import Base, Patch, keep, take
from tests.contract.environments import ISOLATING, open_sandbox
from tools.environments.base import Environment
from tools.errors import ToolError

COMMIT = "git -c user.name=a -c user.email=a@b commit -q"
MADE = rf"""
mkdir repo && cd repo && git init -q -b main .
mkdir src tests docs
printf 'def f():\n    return 1\n' >src/a.py
printf 'no final newline' >src/end.txt
printf 'one\r\ntwo\r\n' >crlf.txt
printf '# caf\351\nx = 1\n' >src/latin.py
printf 'gone\n' >gone.txt
printf 'moved\nmoved\nmoved\n' >'old name.txt'
printf '\211PNG\r\n\032\n\000\000\377\376' >docs/i.png
printf '#!/bin/sh\n' >run.sh
printf 'assert 1\n' >tests/test_a.py
printf 'build/\n*.log\n' >.gitignore
ln -s src/a.py link
git add -A && {COMMIT} -m base
"""


@pytest.fixture
async def sandbox() -> AsyncIterator[Environment]:
    async with open_sandbox("local") as environment:
        await shell(environment, MADE)
        yield environment


async def shell(environment: Environment, command: str) -> str:
    result = await environment.run(f"set -e\n{command}", timeout=30)
    assert result.exit_code == 0, result
    return result.output.strip()


async def here(environment: Environment) -> Path:
    return Path(await shell(environment, "pwd -P"))


async def taken(environment: Environment, work: str, exclude: Sequence[str] = ()) -> Patch:
    """The patch after `work` was done in the repository."""
    cwd = await shell(environment, "pwd -P")
    commit = await shell(environment, "git rev-parse HEAD")
    await shell(environment, f"rm -rf {cwd}.clean; cp -a {cwd} {cwd}.clean; {work}")
    return await take(environment, Base(cwd, (commit,)), exclude=exclude)


def files(root: Path) -> dict[Path, tuple[str, bytes]]:
    """Path -> (mode, content) of all that is no part of a `.git`."""
    found = {}
    for path in root.rglob("*"):
        relative = path.relative_to(root)
        if path.is_symlink():
            found[relative] = ("link", os.fsencode(path.readlink()))
        elif path.is_file() and ".git" not in relative.parts:
            found[relative] = ("x" if path.stat().st_mode & 0o100 else "-", path.read_bytes())
    return found


def assert_whole(result: Patch, cwd: Path, *, but: str = "no such name") -> None:
    """`git apply` makes of a clean checkout the files that the patch was taken from; text all through."""
    assert result.problem == ""
    assert "\0" not in result.data.decode()
    clean = cwd.with_name("repo.clean")
    for words in (["git", "apply", "--check"], ["git", "apply"]):
        done = subprocess.run(words, input=result.data, cwd=clean, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
    assert files(clean) == {path: value for path, value in files(cwd).items() if path.parts[0] != but}


WORK = {
    "text": "printf '    # more\\n' >>src/a.py",
    "no final newline": "printf ' still' >>src/end.txt; printf 'none here either' >new.txt",
    "crlf": "printf 'three\\r\\n' >>crlf.txt; printf 'a\\r\\nb\\r\\n' >new-crlf.txt; printf 'a\\rb\\r' >cr.txt",
    "latin-1": "printf '# caf\\351\\nx = 2\\n# \\374\\n' >src/latin.py; printf '\\344\\n' >'src/new [1]*?.py'",
    "png": "printf '\\211PNG\\r\\n\\032\\n\\000new\\000' >docs/i.png; head -c 5000 /dev/urandom >docs/new.png",
    "deleted and moved": "rm gone.txt; git mv 'old name.txt' 'new name.txt'; rm docs/i.png",
    "modes": "chmod +x src/a.py; chmod -x run.sh",
    "links": "ln -sf src/end.txt link; ln -s nowhere dangling; rm src/a.py; ln -s latin.py src/a.py",
    "file and directory": "rm gone.txt; mkdir gone.txt; echo a >gone.txt/a; rm -r docs; echo b >docs",
    "odd names": "for n in ü 'a b' $'new\\nline' 'quo\"te' \"apo'strophe\" -dash $'tab\\t' 'back\\slash' ':(top)' "
    "'*' ' '; do printf 'x\\n' >\"./$n\"; done",
    "a name of other bytes": "printf 'x\\n' >$'caf\\351'; printf 'y\\n' >ü; printf '\\377\\n' >$'\\351 \"[b]\"'",
    "binary by a false promise": "echo '*.bin diff' >.gitattributes; printf 'a\\000b\\n\\377' >x.bin",
    "text kept for binary": "echo '*.py -diff' >.gitattributes; echo more >>src/a.py",
    "as large and as old": "touch gone.txt; git add gone.txt; git status -s; printf 'lost\\n' >gone.txt",
    "empty files": "touch empty; : >src/a.py; mkdir -p nothing",
    "committed": f"echo 1 >>src/a.py; git add -A; {COMMIT} -m one; echo 2 >>src/a.py; {COMMIT} -am two; echo 3 >new",
    "detached and reset": f"git checkout -q --detach; echo 1 >n; git add n; {COMMIT} -m n; git reset -q --soft HEAD~1",
    "another history": f"git checkout -q --orphan other; echo 1 >n; git add -A; {COMMIT} -m n; git branch -q -D main",
    "stashed": "echo 1 >n; git add n; git -c user.name=a -c user.email=a@b stash -q; echo 2 >m",
    "in a merge": f"git checkout -q -b b; echo 1 >gone.txt; {COMMIT} -am b; git checkout -q main; echo 2 >gone.txt; "
    f"{COMMIT} -am c; ! git merge b",
    "replaced objects": "git replace -f HEAD:gone.txt HEAD:run.sh; echo more >>gone.txt",
    "added although ignored": f"mkdir build; echo 1 >build/b; echo 2 >x.log; git add -f build x.log; "
    f"{COMMIT} -m i; rm x.log",
    "marked as unchanged": "git update-index --assume-unchanged src/a.py; git update-index --skip-worktree run.sh; "
    "echo 1 >>src/a.py; echo 2 >>run.sh",
    "a repository within": f"mkdir -p n/m; cd n; git init -q; echo f >f; cd m; git init -q; echo g >g; "
    f"git add g; {COMMIT} -m g",
    "a repository within, added": f"mkdir n; cd n; git init -q; echo f >f; git add f; {COMMIT} -m f; cd ..; git add n",
    "a repository over files": f"cd src; git init -q; git add -A; {COMMIT} -m f; echo 1 >>a.py; echo 2 >new.py",
    "an odd place for temporary files": "mkdir tmp; echo 1 >tmp/mine; export TMPDIR=$PWD/tmp",
    "nested in an odd directory": "mkdir -p $'\\351 \\n\"'; cd $'\\351 \\n\"'; git init -q; echo 1 >f",
    "a large patch": "seq 1 500000 >large.txt",
}


@pytest.mark.parametrize("what", WORK)
async def test_it_gives_the_same_files(sandbox: Environment, what: str) -> None:
    cwd = await here(sandbox)
    result = await taken(sandbox, WORK[what])
    assert result.data
    assert_whole(result, cwd)
    if what == "a large patch":
        assert len(result.data) > 3_000_000


TAMPERING = {
    "another diff": "git config diff.external /bin/false; git config diff.noprefix true; git config color.ui always; "
    "git config diff.mnemonicPrefix true; git config diff.renames copies; git config diff.context 0",
    "text converters": "git config diff.py.textconv 'tr a-z A-Z <'; echo '*.py diff=py' >.git/info/attributes",
    "filters": "git config filter.f.clean 'tr a-z A-Z'; git config filter.f.required true; "
    "echo '*.py filter=f' >.git/info/attributes; git config core.autocrlf true; git config core.safecrlf true",
    "hooks and monitors": "printf '#!/bin/sh\\necho ran >>\"$HOME/ran\"; exit 1\\n' >.git/hooks/pre-commit; "
    "chmod +x .git/hooks/pre-commit; cp .git/hooks/pre-commit .git/hooks/post-index-change; "
    'git config core.fsmonitor "$PWD/.git/hooks/pre-commit"',
    "locks": "touch .git/index.lock .git/HEAD.lock .git/config.lock",
    "a broken index": "echo broken >.git/index",
    "a broken configuration": "echo '[broken' >.git/config",
    "no HEAD": "rm .git/HEAD; rm -r .git/refs",
    "variables": "export GIT_DIR=/nowhere GIT_INDEX_FILE=/nowhere/i GIT_WORK_TREE=/ GIT_EXTERNAL_DIFF=false "
    "GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=color.ui GIT_CONFIG_VALUE_0=always GIT_DIFF_OPTS=-u0 PATH=/nowhere",
    "another git first on the path": "mkdir $HOME/bin; printf '#!/bin/sh\\necho no\\n' >$HOME/bin/git; "
    "chmod +x $HOME/bin/git; export PATH=$HOME/bin:$PATH; git() { echo no; }; export -f git",
    "settings at home": "printf '[color]\\nui=always\\n[core]\\nautocrlf=true\\n"
    'excludesFile=%s/x\\n\' "$HOME" >$HOME/.gitconfig; '
    "echo '*.py' >$HOME/x",
    "a directory that is gone": "mkdir $HOME/d; cd $HOME/d; rmdir $HOME/d",
    "another owner": "chown -R 12345 .",
    "a moved git directory": 'mv .git $HOME/there; echo "gitdir: $HOME/there" >.git',
}


@pytest.mark.parametrize("what", TAMPERING)
async def test_nothing_that_the_agent_set_has_a_say(sandbox: Environment, what: str) -> None:
    plain = await taken(sandbox, "printf '    # more\\n' >>src/a.py; echo new >src/n.py")
    cwd, commit = await here(sandbox), await shell(sandbox, "git rev-parse HEAD")
    await shell(sandbox, TAMPERING[what])
    before = files(cwd / ".git")
    assert await take(sandbox, Base(str(cwd), (commit,))) == plain
    assert files(cwd / ".git") == before
    assert not (cwd.parents[1] / "home" / "ran").exists()


async def test_nothing_of_the_repository_is_changed_and_nothing_is_left_over(sandbox: Environment) -> None:
    cwd, commit = await here(sandbox), await shell(sandbox, "git rev-parse HEAD")
    path = await shell(sandbox, "echo $PATH")
    await shell(sandbox, "echo 1 >>src/a.py; echo 2 >new; git add new; echo 3 >other")
    before = files(cwd / ".git"), files(cwd)
    assert (await take(sandbox, Base(str(cwd), (commit,)))).data
    assert (files(cwd / ".git"), files(cwd)) == before
    assert await shell(sandbox, "ls -A $TMPDIR; pwd -P; echo $PATH") == f"{cwd}\n{path}"


async def test_a_second_working_tree(sandbox: Environment) -> None:
    await shell(sandbox, "git worktree add -q -b two ../two; cd ../two")
    result = await taken(sandbox, "echo 1 >>gone.txt; mkdir build; echo 2 >build/b; git add -f build; echo 3 >new")
    assert result.problem == ""
    assert result.data.count(b"diff --git ") == 3


async def test_files_are_left_out_by_pattern(sandbox: Environment) -> None:
    work = "echo 1 >>src/a.py; echo 1 >>tests/test_a.py; mkdir deep; echo 1 >deep/reproduce_it.py; echo 1 >'it s.txt'"
    result = await taken(sandbox, work, ["tests", "*reproduce*", "it s.txt", ""])
    assert result.problem == ""
    assert b"src/a.py" in result.data
    assert result.data.count(b"diff --git ") == 1
    again = await take(
        sandbox,
        Base(str(await here(sandbox)), (await shell(sandbox, "git rev-parse HEAD"),)),
        exclude=["tests/**", "**/reproduce*", "**/it s.*", ":x"],
    )
    assert again == result


@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("/m.py", ["deep/m.py", "deep/sub/m.py", "src/m.py"]),
        ("/*.py", ["deep/m.py", "deep/sub/m.py", "src/m.py"]),
        ("/de*", ["m.py", "src/m.py"]),
        ("/deep/", ["m.py", "src/m.py"]),
        ("/deep/*", ["m.py", "src/m.py"]),
        ("/deep/*.py", ["deep/sub/m.py", "m.py", "src/m.py"]),
        ("/**/sub/**", ["deep/m.py", "m.py", "src/m.py"]),
        ("/m", ["deep/m.py", "deep/sub/m.py", "m.py", "src/m.py"]),
    ],
)
async def test_a_pattern_may_begin_at_the_top(sandbox: Environment, pattern: str, left: list[str]) -> None:
    result = await taken(sandbox, "mkdir -p deep/sub; for d in . src deep deep/sub; do echo >$d/m.py; done", [pattern])
    assert result.problem == ""
    assert re.findall(r"^diff --git a/(\S+) ", result.data.decode(), re.MULTILINE) == left


async def test_nothing_changed_is_an_empty_patch(sandbox: Environment) -> None:
    assert await taken(sandbox, "touch src/a.py; mkdir build; echo 1 >build/x; echo 1 >a.log") == Patch()
    assert await taken(sandbox, "echo 1 >n; git add n; rm n; git rm -q --cached gone.txt") == Patch()
    assert await taken(sandbox, "echo 1 >>tests/test_a.py", ["tests/"]) == Patch()


@pytest.mark.parametrize(
    ("work", "problem"),
    [
        ("rm -rf .git", "the repository is gone"),
        ("rm -rf .git; git init -q", "is not in the repository"),
        ("rm -rf .git/objects", "broken"),
        ("cd ..; rm -rf repo", "repo"),
        ("rm -rf .git; echo nonsense >.git", "invalid gitfile format"),
    ],
)
async def test_without_a_repository_there_is_no_patch_and_it_is_said(
    sandbox: Environment, work: str, problem: str
) -> None:
    result = await taken(sandbox, f"echo 1 >>src/a.py; {work}")
    assert result.data == b""
    assert problem in result.problem
    assert "\n" not in result.problem


async def test_a_commit_has_to_be_one(sandbox: Environment) -> None:
    for commit in ("", "HEAD", "--help", "0" * 40):
        result = await take(sandbox, Base(await shell(sandbox, "pwd -P"), (commit,)))
        assert result.data == b""
        assert "commit" in result.problem


async def test_a_huge_untracked_file_is_left_out_and_said(
    sandbox: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch, "MAX_BYTES", 1_000_000)
    result = await taken(
        sandbox, "echo 1 >>src/a.py; seq 1 200000 >'huge one'; mkdir n; cd n; git init -q; seq 200000 >h"
    )
    assert result.data.count(b"diff --git ") == 1
    assert result.problem == "left out, as larger than 1 MB: huge one, n/h"


async def test_a_huge_patch_leaves_out_the_largest_new_files(
    sandbox: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch, "MAX_BYTES", 1_000_000)
    work = "seq 1 90000 >one; seq 1 120000 >two; git add two; head -c 700000 /dev/zero >zero; echo 1 >>src/a.py"
    result = await taken(sandbox, work)
    assert result.problem == "left out, as the patch would be larger than 1 MB: two"
    assert sorted(_named(result)) == ["one", "src/a.py", "zero"]
    result = await taken(sandbox, "seq 1 50000 >three")
    assert result.problem == "left out, as the patch would be larger than 1 MB: two", "with its signs it is enough"
    result = await taken(sandbox, "head -c 900000 /dev/urandom >a.bin; head -c 2000000 /dev/zero >b.bin; rm one two")
    assert result.problem == (
        "left out, as larger than 1 MB: b.bin; left out, as the patch would be larger than 1 MB: a.bin"
    )
    result = await taken(sandbox, "seq 1 200000 >gone.txt")
    assert result.problem.endswith("the patch is larger than 1 MB")


def _named(result: Patch) -> list[str]:
    return [line.rpartition(" b/")[2] for line in result.data.decode().splitlines() if line.startswith("diff --git ")]


async def test_what_the_set_up_left_may_be_as_large_as_it_likes(
    sandbox: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch, "MAX_BYTES", 1_000_000)
    await shell(sandbox, "seq 1 200000 >huge; for i in 1 2 3; do seq 1 90000 >l$i; done; printf b >odd.u; "
                "echo '*.u working-tree-encoding=none' >.gitattributes")  # fmt: skip
    base = await kept(sandbox)
    await shell(sandbox, "echo 1 >>src/a.py; echo 1 >>huge; rm l2; seq 1 150000 >l3")
    result = await take(sandbox, base)
    assert (result.problem, _named(result)) == ("left out, as the patch would be larger than 1 MB: l3", ["src/a.py"])


async def test_it_ends_in_time(sandbox: Environment) -> None:
    cwd = str(await here(sandbox))
    lent = "mkdir -p ../lent/info; mkfifo ../lent/info/alternates; echo $PWD/../lent >.git/objects/info/alternates"
    commit = await shell(sandbox, f"git rev-parse HEAD; {lent}")
    began = time.monotonic()
    result = await take(sandbox, Base(cwd, (commit,)), seconds=1)
    assert result == Patch(problem="the patch could not be taken within 1 s")
    assert time.monotonic() - began < 30
    assert await shell(sandbox, "ls -A $TMPDIR") == ""


PIPES = [
    *(".git/info/exclude", ".git/index", ".git/HEAD", ".git/config", ".git/refs/heads/main", ".git/packed-refs"),
    *(".git/objects/info/alternates", ".git/objects/info/commit-graph", ".git/objects/pack/pack-1.idx", ".git/shallow"),
    *(".gitmodules", ".gitattributes", "src/.gitattributes", "src/.gitignore", "n/.git/HEAD", "n/.git/config"),
]


async def test_a_pipe_where_git_has_a_file_stops_nothing(sandbox: Environment) -> None:
    base = await kept(sandbox)
    make = "; ".join(f"mkdir -p $(dirname {pipe}); rm -f {pipe}; mkfifo {pipe}" for pipe in PIPES)
    nested = f"git init -q n; cd n; echo f >f; git add f; {COMMIT} -m n; cd .."
    await shell(sandbox, f"echo 1 >>src/a.py; {nested}; {make}; mkfifo pipe; rm run.sh; mkfifo run.sh; chmod a-w src")
    result = await take(sandbox, base)
    assert (result.problem, _named(result)) == ("", ["n/f", "run.sh", "src/a.py"])
    assert b"deleted file mode" in result.data
    assert await shell(sandbox, f"chmod u+w src; ls {' '.join(PIPES)} 2>/dev/null | cat; ls pipe") == "pipe"


@pytest.mark.parametrize("pipe", PIPES[:-2])
async def test_without_what_was_kept_neither_does_any_pipe(sandbox: Environment, pipe: str) -> None:
    cwd, commit = str(await here(sandbox)), await shell(sandbox, "git rev-parse HEAD")
    await shell(sandbox, f"echo 1 >>src/a.py; mkdir -p $(dirname {pipe}); rm -f {pipe}; mkfifo {pipe}")
    result = await take(sandbox, Base(cwd, (commit,)))
    assert (result.problem, _named(result)) == ("", ["src/a.py"])


async def test_pipes_of_a_second_working_tree(sandbox: Environment) -> None:
    await shell(sandbox, "git worktree add -q -b two ../two; cd ../two")
    base = await kept(sandbox)
    pipes = "../repo/.git/config ../repo/.git/worktrees/two/HEAD ../repo/.git/objects/info/alternates"
    await shell(sandbox, f"echo 1 >>src/a.py; rm -f {pipes}; mkfifo {pipes}")
    result = await take(sandbox, base)
    assert (result.problem, _named(result)) == ("", ["src/a.py"])


async def test_devices_and_links_where_git_has_a_file(sandbox: Environment) -> None:
    base = await kept(sandbox)
    await shell(sandbox, "echo 1 >>src/a.py; mkfifo ../pipe; for f in .git/info/exclude .git/objects/info/alternates "
                ".gitmodules; do rm -f $f; ln -s $PWD/../pipe $f; done; ln -sf /dev/null src/.gitignore; "
                "rm .git/config; ln -s /dev/zero .git/config; ln -s nowhere .gitattributes")  # fmt: skip
    result = await take(sandbox, base)
    assert (result.problem, _named(result)) == ("", [".gitattributes", "src/.gitignore", "src/a.py"])


@pytest.mark.parametrize("work", ["rm -rf /tmp", "rm -rf /tmp /var/tmp", "chmod 0 /tmp; rm -rf /var/tmp"])
@pytest.mark.parametrize("backend", ISOLATING)
async def test_no_folder_for_temporary_files_is_needed(backend: str, work: str) -> None:
    async with open_sandbox(backend) as environment:
        await shell(environment, MADE)
        base = await kept(environment)
        await environment.run(f"{work}; echo 1 >>src/a.py; rm -rf .git/HEAD", timeout=20)
        result = await take(environment, base)
        assert (result.problem, _named(result)) == ("", ["src/a.py"])


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ("*.u working-tree-encoding=UTF-16", "fatal: BOM is required in '{}' if encoded as UTF-16"),
        ("*.u working-tree-encoding=none", "fatal: failed to encode '{}' from none to UTF-8"),
        ("*.u working-tree-encoding", "fatal: true/false are no valid working-tree-encodings"),
    ],
)
async def test_an_encoding_that_git_cannot_follow_costs_nothing(
    sandbox: Environment, attributes: str, said: str
) -> None:
    good = "printf '\\377\\376a\\000\\n\\000' >good.v; echo '*.v working-tree-encoding=UTF-16' >.gitattributes"
    plain = await taken(sandbox, f"{good}; echo 1 >>src/a.py")
    assert b"+a\n" in plain.data, "as git has it"
    await shell(sandbox, "git checkout -q .; rm good.v .gitattributes")
    odd = "printf 'a\\000\\n\\000' >\"it's.u\"; printf 'b\\n' >second.u"
    result = await taken(sandbox, f"{good}; echo '{attributes}' >>.gitattributes; {odd}; echo 1 >>src/a.py")
    assert result.problem.startswith("not added as .gitattributes has it: fatal: ")
    assert said.format("it's.u") in result.problem or said.format("second.u") in result.problem
    assert set(_named(result)) == {"src/a.py", ".gitattributes", "it's.u", "second.u", "good.v"}
    assert ";" not in result.problem, "it applies"
    if said.count("{}"):
        assert b"+a\n" in result.data


async def test_what_git_cannot_add_is_said_and_costs_no_other_file(sandbox: Environment) -> None:
    declared = (
        "git init -q n; git config -f .gitmodules submodule.n.path n; git config -f .gitmodules submodule.n.url u"
    )
    result = await taken(sandbox, f"echo 1 >>src/a.py; mkfifo pipe; {declared}")
    assert result.data.count(b"diff --git ") == 2
    assert result.problem == "not all could be added: error: 'n/' does not have a commit checked out"


async def test_submodules(sandbox: Environment) -> None:
    """A declared one stays a link to its commit, as git has it."""
    cwd = await here(sandbox)
    await shell(sandbox, f"git init -q ../lib; cd ../lib; echo 1 >f; git add f; {COMMIT} -m 1; cd ../repo")
    added = await taken(sandbox, "git -c protocol.file.allow=always submodule --quiet add ../lib lib")
    assert_whole(added, cwd, but="lib")
    assert b"new file mode 160000" in added.data
    await shell(sandbox, f"{COMMIT} -m lib")
    moved = await taken(sandbox, f"cd lib; echo 2 >>f; {COMMIT} -am 2; echo 3 >g; git add g; cd ..")
    assert moved.problem == "not in the patch, as only the submodule's own folder has it: lib"
    assert moved.data.count(b"Subproject commit") == 2
    assert await taken(sandbox, "git -C lib reset -q --hard HEAD~1") == Patch()
    gone = await taken(sandbox, "rm -rf lib")
    assert gone.problem == ""
    assert b"deleted file mode 160000" in gone.data


async def test_what_only_a_submodules_folder_has_is_said(sandbox: Environment) -> None:
    lib = await shell(
        sandbox, f"git init -q ../lib; cd ../lib; echo 1 >f; git add f; {COMMIT} -m 1; git rev-parse HEAD"
    )
    await shell(sandbox, f"cd ../repo; git update-index --add --cacheinfo 160000,{lib},'a lib'; mkdir -p 'a lib'; "
                f"git update-index --add --cacheinfo 160000,{lib},other; {COMMIT} -m lib")  # fmt: skip
    result = await taken(sandbox, "echo 1 >'a lib/new'; echo 1 >>src/a.py")
    assert result.problem == "not in the patch, as only the submodule's own folder has it: a lib"
    assert _named(result) == ["src/a.py"] or b"deleted file mode 160000" in result.data
    await shell(sandbox, "git checkout -q src; rm 'a lib/new'; git clone -q ../lib 'a lib'; git clone -q ../lib other")
    assert await taken(sandbox, "echo") == Patch()
    result = await taken(sandbox, f"cd other; echo 2 >f; {COMMIT} -am 2; cd ..")
    assert result.problem == "not in the patch, as only the submodule's own folder has it: other"
    assert _named(result) == ["other"]


async def with_submodule(environment: Environment) -> None:
    await shell(environment, f"git init -q ../lib; cd ../lib; echo 1 >f; git add f; {COMMIT} -m 1; cd ../repo; "
                f"git -c protocol.file.allow=always submodule --quiet add ../lib lib; {COMMIT} -m lib")  # fmt: skip


BREAKING = {
    "its git directory is gone": "rm -rf .git",
    "its git directory is elsewhere": "mv .git ../there; echo gitdir: ../there >.git",
    "a pipe for its HEAD": "rm .git/modules/lib/HEAD; mkfifo .git/modules/lib/HEAD",
    "a pipe for its own HEAD": "rm lib/.git; mkdir lib/.git; mkfifo lib/.git/HEAD",
    "a pipe for its HEAD elsewhere": "mv .git/modules/lib ../there; echo gitdir: ../../there >lib/.git; "
    "rm ../there/config; mkfifo ../there/config; echo x >../there/index",
    "it leads nowhere": "echo gitdir: /nowhere >lib/.git",
    "it is empty": "rm lib/.git; mkdir lib/.git",
    "its index is broken": "echo x >.git/modules/lib/index",
    "its objects are gone": "rm -r .git/modules/lib/objects/*",
    "another repository takes its files": "rm -rf .git; git init -q; git add -A",
    "a repository of the agent's beside it": "echo gitdir: /nowhere >lib/.git; git init -q n; echo 1 >n/f",
    "files moved into a repository": "mv .git ../there; mkdir -p n; mv gone.txt n/f; git init -q n",
}


@pytest.mark.parametrize("what", BREAKING)
async def test_a_broken_submodule_stays_what_it_was(sandbox: Environment, what: str) -> None:
    await with_submodule(sandbox)
    base = await kept(sandbox)
    await shell(sandbox, f"echo 1 >>src/a.py; {BREAKING[what]}")
    result = await take(sandbox, base)
    assert result.problem == "left as it was, as the submodule's repository is broken: lib"
    others = {"gone.txt", "n/f"} if "gone.txt" in BREAKING[what] else {"n/f"} if "n/f" in BREAKING[what] else set()
    assert set(_named(result)) == {"src/a.py", *others}


async def test_what_only_stands_for_files_is_in_no_patch(sandbox: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where git adds nothing at all."""
    base = await kept(sandbox)
    await shell(sandbox, "git init -q n; echo 1 >n/f; mkdir build; echo 1 >build/b; git add -f build")
    monkeypatch.setattr(patch_scripts, "ADD", b"echo 'fatal: no more'; exit 128")
    assert await take(sandbox, base) == Patch(problem="not all could be added: fatal: no more")


async def test_what_a_submodule_has_in_no_commit_is_said(sandbox: Environment) -> None:
    await with_submodule(sandbox)
    said = "not in the patch, as only the submodule's own folder has it: lib"
    assert await taken(sandbox, "echo 2 >lib/g") == Patch(problem=said)
    base = await kept(sandbox)
    assert await take(sandbox, base) == Patch(), "it was there before"
    base = await kept(sandbox)
    await shell(sandbox, "echo 3 >lib/f")
    assert await take(sandbox, base) == Patch(problem=said)


async def test_a_pipe_in_the_place_of_a_file_is_its_deletion(sandbox: Environment) -> None:
    result = await taken(sandbox, "rm gone.txt run.sh; mkfifo gone.txt untracked; mkdir run.sh; mkfifo run.sh/p")
    assert (result.problem, _named(result)) == ("", ["gone.txt", "run.sh"])
    assert result.data.count(b"\ndeleted file mode") == 2


async def _without_its_folder(backend: str, instead: str = "") -> None:
    async with open_sandbox(backend) as environment:
        await shell(environment, MADE)
        cwd = str(await here(environment))
        base = await kept(environment)
        await shell(environment, f"cd /; rm -rf {cwd}; {instead.format(cwd)}")
        result = await take(environment, base)
    assert result.problem == f"{cwd} was gone: all its files count as deleted"
    assert len(_named(result)) == result.data.count(b"\ndeleted file mode") == 11


@pytest.mark.parametrize("backend", ["local", *ISOLATING])
async def test_the_folder_itself_may_be_gone(backend: str) -> None:
    await _without_its_folder(backend)


@pytest.mark.parametrize("instead", ["echo >{}", "mkfifo {}", "ln -s /nowhere {}"])
async def test_something_else_may_be_in_its_place(instead: str) -> None:
    await _without_its_folder("local", instead)


async def kept(environment: Environment, *more: str) -> Base:
    cwd, commit = str(await here(environment)), await shell(environment, "git rev-parse HEAD")
    return await keep(environment, cwd=cwd, bases=[commit, *more])


async def test_what_was_there_before_is_no_part_of_it(sandbox: Environment) -> None:
    """Nor has it to be there still in the repository when the patch is taken."""
    cwd = str(await here(sandbox))
    await shell(sandbox, f"{WORK['png']}; {WORK['odd names']}; echo set >>src/a.py; rm gone.txt; mkdir build; "
                "echo 1 >build/b; git add -f build; seq 9 >made.txt; cp -a . ../repo.clean")  # fmt: skip
    assert await take(sandbox, await kept(sandbox)) == Patch()
    base = await kept(sandbox)
    await shell(sandbox, "sed -i s/set/own/ src/a.py; rm -f docs/new.png made.txt; echo 2 >new; git gc -q --prune=now")
    result = await take(sandbox, base)
    assert result.data.count(b"diff --git ") == 2, "what only the set-up made is no deletion of the model's"
    assert "does not apply to the commit alone, without what was made before: error: patch failed: src/a.py" in (
        result.problem
    )
    await shell(sandbox, f"rm {cwd}.clean/docs/new.png {cwd}.clean/made.txt")
    assert_whole(msgspec.structs.replace(result, problem=""), Path(cwd))


async def test_a_file_that_only_the_set_up_made_cannot_be_changed_unnoticed(sandbox: Environment) -> None:
    await shell(sandbox, "seq 9 >made.txt; mkdir both; echo 1 >both/it; seq 5 >other.txt")
    base = await kept(sandbox)
    await shell(sandbox, "rm -r other.txt both; echo 1 >both; echo 1 >>src/a.py")
    result = await take(sandbox, base)
    assert (result.problem, result.data.count(b"diff --git ")) == ("", 2)
    base = await kept(sandbox)
    await shell(sandbox, "echo more >>made.txt")
    result = await take(sandbox, base)
    assert result.data.count(b"diff --git ") == 1
    assert result.problem == (
        "the patch does not apply to the commit alone, without what was made before: "
        "error: made.txt: does not exist in index"
    )


async def test_one_of_the_commits_is_enough(sandbox: Environment) -> None:
    """A set-up may check out the one that is asked for."""
    base = await shell(sandbox, "git rev-parse HEAD")
    await shell(sandbox, f"echo later >>src/a.py; {COMMIT} -am later; git checkout -q HEAD~1")
    later = await shell(sandbox, "git rev-parse main")
    asked = await keep(sandbox, cwd=str(await here(sandbox)), bases=[later, base])
    await shell(sandbox, "echo own >>src/a.py")
    result = await take(sandbox, asked)
    assert (result.problem, result.data.count(b"\n+own")) == ("", 1)


LOST = [
    "rm -rf .git",
    "rm -rf .git; git init -q",
    "rm -rf .git/objects",
    "rm -rf .git; echo nonsense >.git",
    f"git checkout -q --orphan o; {COMMIT} -am o; git branch -D main; git reflog expire --expire=now --all; "
    "git gc -q --prune=now",
]


@pytest.mark.parametrize("work", LOST)
async def test_the_repository_may_be_gone_by_then(sandbox: Environment, work: str) -> None:
    plain = await taken(sandbox, "printf '    # more\n' >>src/a.py; echo 1 >n; rm gone.txt")
    await shell(sandbox, "git checkout -q .; rm n; echo set >made")
    base = await kept(sandbox)
    await shell(sandbox, f"printf '    # more\n' >>src/a.py; echo 1 >n; rm gone.txt; {work}")
    assert await take(sandbox, base) == plain
    assert await shell(sandbox, "ls -A $TMPDIR") == ""


async def test_what_was_kept_may_be_gone_too(sandbox: Environment) -> None:
    base = await kept(sandbox)
    await shell(sandbox, "rm -rf $TMPDIR; echo 1 >n")
    result = await take(sandbox, base)
    assert (result.problem, result.data.count(b"diff --git ")) == ("", 1)
    await shell(sandbox, "echo 1 >made")
    base = await kept(sandbox)
    await shell(sandbox, "rm -rf $TMPDIR; echo 1 >more")
    result = await take(sandbox, base)
    assert result.problem == "what had been there before is in the patch: what was kept of it is gone"
    assert result.data.count(b"diff --git ") == 3


async def test_keeping_changes_nothing(sandbox: Environment) -> None:
    await shell(sandbox, "git gc -q; echo 1 >n; git add n; echo 2 >m")
    cwd = await here(sandbox)
    before = files(cwd / ".git"), files(cwd)
    base = await kept(sandbox)
    await shell(sandbox, f"git --git-dir={base.kept}/git fsck --no-dangling {base.tree}; echo 3 >o")
    assert (await take(sandbox, base)).data
    await shell(sandbox, "rm o")
    assert (files(cwd / ".git"), files(cwd)) == before


async def test_without_the_commit_nothing_can_be_kept(sandbox: Environment) -> None:
    cwd, commit = str(await here(sandbox)), await shell(sandbox, "git rev-parse HEAD")
    for where, bases in ((cwd, ["0" * 40]), (cwd, []), (f"{cwd}/src", [commit])):
        with pytest.raises(ToolError):
            await keep(sandbox, cwd=where, bases=bases)
    assert await shell(sandbox, "ls -A $TMPDIR") == ""


@pytest.mark.parametrize("backend", ISOLATING)
async def test_in_a_sandbox_that_isolates(backend: str) -> None:
    async with open_sandbox(backend) as environment:
        await shell(environment, MADE)
        result = await taken(environment, f"{WORK['png']}; {WORK['latin-1']}; {WORK['odd names']}; {WORK['committed']}")
        assert result.problem == ""
        assert result.data.count(b"GIT binary patch") == 4
        done = await environment.run(
            "git -C ../repo.clean apply --check - <<'END'\n" + result.data.decode() + "END", timeout=20
        )
        assert done.exit_code == 0, done


async def test_many_at_once() -> None:
    async def one(number: int) -> bytes:
        async with open_sandbox("local", task_id=f"task_{number}") as environment:
            await shell(environment, MADE)
            return (await taken(environment, f"echo {number} >n")).data

    patches = await asyncio.gather(*map(one, range(6)))
    assert [f"+{number}\n".encode() in data for number, data in enumerate(patches)] == [True] * 6
