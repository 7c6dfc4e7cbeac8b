"""The patch of what was done to a real repository in a real sandbox: on a clean checkout it gives the same files."""

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from swe import patch
from swe.patch import Patch, changes, take
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
    return await take(environment, cwd=cwd, base_commit=commit, exclude=exclude)


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
    assert await take(sandbox, cwd=str(cwd), base_commit=commit) == plain
    assert files(cwd / ".git") == before
    assert not (cwd.parents[1] / "home" / "ran").exists()


async def test_nothing_of_the_repository_is_changed_and_nothing_is_left_over(sandbox: Environment) -> None:
    cwd, commit = await here(sandbox), await shell(sandbox, "git rev-parse HEAD")
    path = await shell(sandbox, "echo $PATH")
    await shell(sandbox, "echo 1 >>src/a.py; echo 2 >new; git add new; echo 3 >other")
    before = files(cwd / ".git"), files(cwd)
    assert (await take(sandbox, cwd=str(cwd), base_commit=commit)).data
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
        cwd=str(await here(sandbox)),
        base_commit=await shell(sandbox, "git rev-parse HEAD"),
        exclude=["tests/**", "**/reproduce*", "**/it s.*", ":x"],
    )
    assert again == result


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
        result = await take(sandbox, cwd=await shell(sandbox, "pwd -P"), base_commit=commit)
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


async def test_a_huge_patch_is_refused_and_said(sandbox: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch, "MAX_BYTES", 1_000_000)
    result = await taken(sandbox, "seq 1 120000 >one; seq 1 120000 >two")
    assert result == Patch(problem="the patch is larger than 1 MB")


async def test_it_ends_in_time(sandbox: Environment) -> None:
    cwd = str(await here(sandbox))
    commit = await shell(
        sandbox, "git rev-parse HEAD; mkdir -p .git/info; rm -f .git/info/exclude; mkfifo .git/info/exclude"
    )
    began = time.monotonic()
    result = await take(sandbox, cwd=cwd, base_commit=commit, seconds=1)
    assert result == Patch(problem="the patch could not be taken within 1 s")
    assert time.monotonic() - began < 5
    assert await shell(sandbox, "ls -A $TMPDIR") == ""


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
    assert moved.problem == ""
    assert moved.data.count(b"Subproject commit") == 2
    assert await taken(sandbox, "git -C lib reset -q --hard HEAD~1") == Patch()
    gone = await taken(sandbox, "rm -rf lib")
    assert gone.problem == ""
    assert b"deleted file mode 160000" in gone.data


async def test_what_was_there_before_is_no_part_of_it(sandbox: Environment) -> None:
    """Nor has it to be there still in the repository when the patch is taken."""
    cwd, commit = str(await here(sandbox)), await shell(sandbox, "git rev-parse HEAD")
    assert await changes(sandbox, cwd=cwd, base_commit=commit) == b""
    await shell(sandbox, f"{WORK['png']}; {WORK['odd names']}; echo set >>src/a.py; rm gone.txt; mkdir build; "
                "echo 1 >build/b; git add -f build; seq 9 >made.txt")  # fmt: skip
    before = await changes(sandbox, cwd=cwd, base_commit=commit)
    assert await take(sandbox, cwd=cwd, base_commit=commit, before=before) == Patch()
    await shell(sandbox, f"cp -a {cwd} {cwd}.clean; sed -i s/set/own/ src/a.py; echo 1 >>made.txt; rm -f docs/new.png; "
                "echo back >gone.txt; echo 2 >new; git gc -q --prune=now")  # fmt: skip
    result = await take(sandbox, cwd=cwd, base_commit=commit, before=before)
    assert_whole(result, Path(cwd))
    assert result.data.count(b"diff --git ") == 5


async def test_without_the_commit_nothing_can_have_been_there_before(sandbox: Environment) -> None:
    cwd = str(await here(sandbox))
    for where, commit in ((cwd, "0" * 40), (cwd, ""), (f"{cwd}/src", await shell(sandbox, "git rev-parse HEAD"))):
        with pytest.raises(ToolError):
            await changes(sandbox, cwd=where, base_commit=commit)


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
