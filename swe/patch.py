"""What an agent changed in a repository, as the patch that git writes of it.

Taken inside the sandbox in a private git directory that only borrows the repository's objects. So nothing that the
agent did to the repository's own configuration, hooks, locks, index, branches or replaced objects has a say, and
nothing of the repository is changed. The patch is written to a file there and read as bytes: it is exactly what git
wrote.

What counts is what stands in the working tree, against a commit: tracked files, files that are not ignored, and
ignored ones that the agent added to its index. A repository that the agent made within it (without declaring a
submodule) counts as the files it holds: as a link to a commit that nobody else has they would be lost.
"""

import asyncio
import re
from collections.abc import Iterator, Sequence, Set

from msgspec import Struct

from tools.environments.base import CommandResult, Environment
from tools.environments.script import quote, words
from tools.errors import ToolError

MAX_BYTES = 50_000_000
"""Of a patch, and of an untracked file that goes into one."""

_SECONDS = 50.0
_CLEANING_SECONDS = 5.0
_SEARCH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:$PATH"
_COMMIT = re.compile(r"[0-9a-fA-F]{7,40}")
_LINK = "160000"
_EMPTY_BLOB = "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
_PLACE = b".place-for-files"
_NESTED_DEPTH = 8

_CONFIGURATION = b"""\
[core]
	autocrlf = false
	safecrlf = false
	untrackedCache = false
	pager = cat
[gc]
	auto = 0
[safe]
	directory = *
"""

_OPEN = b"""\
cd -- "$W" || exit
[ -e .git ] || { echo "the repository is gone: there is no .git in $W"; exit 3; }
if [ -d .git ]; then D=.git C=.git; else
  D=$(git --git-dir=.git rev-parse --absolute-git-dir) && C=$(git --git-dir=.git rev-parse --git-common-dir) || exit
fi
O=$(cd -- "$C/objects" && pwd -P) || { echo "the repository is broken: it has no objects"; exit 3; }
git init -q --bare --template= "$T/git" && mkdir -p "$T/git/info" "$T/git/objects/info" || exit
printf '%s\\n' "$O" >"$T/git/objects/info/alternates"
cp "$C/info/exclude" "$T/git/info/exclude" 2>/dev/null
cp -p "$D/index" "$T/git/theirs" 2>/dev/null
export GIT_DIR="$T/git" GIT_WORK_TREE="$W"
git cat-file -e "$B^{commit}" 2>/dev/null || { echo "commit $B is not in the repository"; exit 3; }
[ ! -s "$T/before" ] || B=$(export GIT_INDEX_FILE="$T/git/before"
  git read-tree "$B" && git apply --cached --whitespace=nowarn "$T/before" 1>&2 && git write-tree --missing-ok) || exit
echo "$B" >"$T/base"
cp -p "$T/git/theirs" "$T/git/index" 2>/dev/null
git ls-files -v 2>/dev/null >"$T/marked" && ! grep -q '^[a-zS]' "$T/marked" && git read-tree --reset "$B" 2>/dev/null ||
  { rm -f "$T/git/index" && git read-tree "$B"; } || exit
GIT_INDEX_FILE=$T/git/theirs git diff-index --cached --raw -z --no-abbrev --no-renames --ignore-submodules=none \\
  "$B" >"$T/theirs" 2>/dev/null
git config -z -f .gitmodules --get-regexp '^submodule\\..*\\.path$' >"$T/declared" 2>/dev/null
find . -name .git -prune -o -type f -size +"$M"c -print0 >"$T/large" 2>/dev/null
git update-index -q --refresh >/dev/null 2>&1
git ls-files -z --others --exclude-standard >"$T/others"
"""
"""What the patch is against in the index (the base commit, or the tree that it is with the changes from before), then
lists: what the agent's index adds, submodules, large files, untracked files.

The index keeps what the agent's knows of unchanged files, for speed, unless that one hides files from git; copied with
its time, by which git knows what may have changed since. The refresh compares contents, so that only what differs is
written as an object later."""

_TRACK = b"""\
cd -- "$W" && export GIT_DIR="$T/git" GIT_WORK_TREE="$W" || exit
git update-index -z --index-info <"$T/tracked" && git ls-files -z --others --exclude-standard >"$T/others"
"""

_ADD = b"""\
cd -- "$W" && export GIT_DIR="$T/git" GIT_WORK_TREE="$W" || exit
git add -A --ignore-errors -- . "$@" 2>&1
"""

_DIFF = b"""\
cd -- "$W" && export GIT_DIR="$T/git" GIT_WORK_TREE="$W" || exit
d() { git -c core.quotePath="$Q" diff --cached --no-color --no-ext-diff --no-renames --ignore-submodules=none "$@"; }
d --raw -z --no-abbrev "$B" -- . "$@" >"$T/changed" || exit
{ d --binary --full-index --no-textconv --src-prefix=a/ --dst-prefix=b/ "$B" -- . "$@"; echo $? >"$T/code"; } |
  head -c $((M + 1)) >"$T/patch"
read -r c <"$T/code"
[ "$(wc -c <"$T/patch")" -le "$M" ] || { echo "the patch is larger than $((M / 1000000)) MB"; exit 4; }
[ "$c" = 0 ] || exit "$c"
"""

_CHECK = b"""\
cd -- "$W" && export GIT_DIR="$T/git" GIT_WORK_TREE="$W" || exit
[ -s "$T/patch" ] || exit 0
t=$(export GIT_INDEX_FILE="$T/git/clean"
  git read-tree "$B" && git apply --cached --whitespace=nowarn "$T/patch" 1>&2 && git write-tree --missing-ok) 2>&1 ||
  { echo "$t"; exit 5; }
git diff --cached --quiet --no-renames --ignore-submodules=none "$t" -- . "$@" ||
  { echo "applied, it gives other files than those it was taken from"; exit 5; }
"""


class Patch(Struct, frozen=True):
    """`data` is the patch, b"" if nothing changed or none could be had. It is UTF-8 without NUL: files that are not are
    in it as binary. `problem` is "" or one line: why there is no patch, or what is wrong with this one."""

    data: bytes = b""
    problem: str = ""


class _Refused(Exception):
    """There is no patch; the text says why."""


async def take(
    environment: Environment,
    *,
    cwd: str,
    base_commit: str,
    before: bytes = b"",
    exclude: Sequence[str] = (),
    seconds: float = _SECONDS,
) -> Patch:
    """The patch from the commit, changed by the patch `before`, to what stands in the working tree at `cwd`, its top
    directory. What `exclude` matches is left out: patterns as git's pathspecs have them, where `*` matches `/` too, or
    with `**` only that does. Raises EnvironmentLost; all else that goes wrong is told in the patch's `problem`."""
    try:
        return await _in_time(environment, cwd, base_commit, before, exclude, seconds)
    except (_Refused, ToolError) as error:
        return Patch(problem=str(error))


async def changes(environment: Environment, *, cwd: str, base_commit: str) -> bytes:
    """What stands in the working tree already, as the `before` of a later `take`. Raises ToolError where there is no
    repository with that commit, or where a patch could not tell it."""
    try:
        return (await _in_time(environment, cwd, base_commit, b"", (), _SECONDS, must_apply=True)).data
    except _Refused as error:
        raise ToolError(str(error)) from error


async def _in_time(
    environment: Environment,
    cwd: str,
    commit: str,
    before: bytes,
    exclude: Sequence[str],
    seconds: float,
    *,
    must_apply: bool = False,
) -> Patch:
    try:
        async with asyncio.timeout(seconds):
            return await _taken(environment, cwd, commit, before, exclude, must_apply=must_apply)
    except TimeoutError:
        raise _Refused(f"the patch could not be taken within {seconds:.0f} s") from None


async def _taken(
    environment: Environment, cwd: str, commit: str, before: bytes, exclude: Sequence[str], *, must_apply: bool
) -> Patch:
    if not _COMMIT.fullmatch(commit):
        raise _Refused(f"no base commit to take a patch against: {commit!r}")
    where = await environment.run(
        f"({_SEARCH}; cd -- {_word(cwd)} && pwd -P && {{ mktemp -d 2>/dev/null || mktemp -d -p /tmp; }})",
        timeout=_SECONDS,
        cwd="/",
    )
    if where.exit_code != 0:
        raise _Refused(_last_line(where, "no directory for the patch"))
    top, temp = where.output.splitlines()[-2:]
    work = _Work(environment, top, temp, commit, [_excluding(pattern) for pattern in exclude if pattern])
    try:
        return await work.patch(before, must_apply=must_apply)
    finally:
        await environment.run(f"({_SEARCH}; rm -rf -- {_word(temp)})", timeout=_CLEANING_SECONDS, cwd="/")


class _Work:
    """One patch being taken, in the folder `temp` of the sandbox."""

    def __init__(self, environment: Environment, top: str, temp: str, commit: str, exclude: list[str]) -> None:
        self._environment = environment
        self._temp = temp
        self._exclude = [pattern.encode() for pattern in exclude]
        self._variables = {"T": temp, "W": top, "B": commit, "M": str(MAX_BYTES), "Q": "false"}
        self._own = temp.encode().removeprefix(top.rstrip("/").encode() + b"/")  # absolute still, if not under `top`

    async def patch(self, before: bytes, *, must_apply: bool) -> Patch:
        """See `take`."""
        await self._write(".gitconfig", _CONFIGURATION)
        if before:
            await self._write("before", before)
        await self._run(_OPEN)
        self._variables["B"] = (await self._read("base")).decode().strip()
        problem = await self._add(await self._track())
        await self._run(_DIFF, self._exclude)
        data = await self._read("patch")
        if not _is_text(data):
            await self._hold_as_binary(data)
            await self._run(_DIFF, self._exclude)
            data = await self._read("patch")
        unfit = await self._check()
        if unfit and must_apply:
            raise _Refused(unfit)
        return Patch(data, "; ".join(filter(None, [problem, unfit])))

    async def _track(self) -> Set[bytes]:
        """Makes git see what it would pass over; the untracked files that are too large to be added."""
        declared = {value for _, _, value in (item.partition(b"\n") for item in await self._items("declared"))}
        large = {name.removeprefix(b"./") for name in await self._items("large")}
        changes = _changes(await self._read("theirs"))
        added = {name for mode, status, name in changes if status == "A" and mode != _LINK} - large
        untracked: set[bytes] = set()
        for _ in range(_NESTED_DEPTH):
            others = set(await self._items("others"))
            nested = {name for name in others if name.endswith(b"/") and name[:-1] not in declared}
            untracked |= others
            if not nested and not added:
                break
            await self._write("tracked", _placeholders([*added, *(name + _PLACE for name in nested)]))
            await self._run(_TRACK)
            added = set()
        return untracked & large

    async def _add(self, large: Set[bytes]) -> str:
        """The working tree into the index. What could not be added."""
        left_out = [*large, *([] if self._own.startswith(b"/") else [self._own])]
        result = await self._run(_ADD, [b":(exclude,literal)" + name for name in left_out], must=False)
        if large:
            return f"left out, as larger than {MAX_BYTES // 1_000_000} MB: {_shown(sorted(large))}"
        return "" if result.exit_code == 0 else f"not all could be added: {_first_line(result)}"

    async def _hold_as_binary(self, data: bytes) -> None:
        """From now on files whose difference is no text are written as binary, and file names in ASCII if need be."""
        changed = _changes(await self._read("changed"))
        names = [name for _, status, name in changed for _ in range(2 if status == "T" else 1)]
        sections = _sections(data)
        if len(names) != len(sections):
            raise _Refused(f"the patch has {len(sections)} parts for {len(names)} files")
        binary = {name for name, section in zip(names, sections, strict=True) if not _is_text(section)}
        await self._write("git/info/attributes", b"".join(map(_binary, sorted(binary))))
        self._variables["Q"] = "false" if all(map(_is_text, names)) else "true"

    async def _check(self) -> str:
        """Whether it applies to a clean index of the commit and gives the same files."""
        result = await self._run(_CHECK, self._exclude, must=False)
        return "" if result.exit_code == 0 else f"the patch does not apply: {_first_line(result)}"

    async def _run(self, script: bytes, arguments: Sequence[bytes] = (), *, must: bool = True) -> CommandResult:
        """A script with nothing of the agent's variables but, at its end, PATH."""
        await self._write("script", b"set -- " + words(*arguments) + script)
        assignments = " ".join(f"{name}={_word(value)}" for name, value in self._variables.items())
        result = await self._environment.run(
            f'({_SEARCH}; command env -i PATH="$PATH" HOME={_word(self._temp)} LC_ALL=C '
            f"GIT_CONFIG_NOSYSTEM=1 {assignments} sh {_word(self._temp)}/script)",
            timeout=_SECONDS * 10,  # the caller's limit comes first
            cwd="/",
        )
        if must and result.exit_code != 0:
            raise _Refused(_last_line(result, f"git ended with {result.exit_code}"))
        return result

    async def _write(self, name: str, data: bytes) -> None:
        await self._environment.write(f"{self._temp}/{name}", data)

    async def _read(self, name: str) -> bytes:
        data = bytearray()
        async for chunk in self._environment.read(f"{self._temp}/{name}"):
            data += chunk
            if len(data) > MAX_BYTES:
                raise _Refused(f"too many files: git's list of them is larger than {MAX_BYTES // 1_000_000} MB")
        return bytes(data)

    async def _items(self, name: str) -> list[bytes]:
        return (await self._read(name)).split(b"\0")[:-1]


def _changes(raw: bytes) -> Iterator[tuple[str, str, bytes]]:
    """(new mode, status, path) of `git diff --raw -z --no-renames`."""
    items = raw.split(b"\0")
    for about, name in zip(items[0::2], items[1::2], strict=False):
        _, mode, _, _, status = about.decode().split(" ")
        yield mode, status[:1], name


def _excluding(pattern: str) -> str:
    return f":(exclude,glob){pattern}" if "**" in pattern else f":(exclude){pattern}"


def _placeholders(names: Sequence[bytes]) -> bytes:
    """Input of `git update-index -z --index-info`: as if there had been empty files of these names. `git add -A` takes
    what is there in their place, and looks into a directory that holds one even if it is a repository of its own."""
    return b"".join(b"100644 %s 0\t%s\0" % (_EMPTY_BLOB.encode(), name) for name in names)


def _sections(patch: bytes) -> list[bytes]:
    """One for each file: no line of a difference begins like their first, for text lines have a sign before them and
    encoded binary has no blanks."""
    return [b"diff --git " + part for part in (b"\n" + patch).split(b"\ndiff --git ")[1:]]


def _binary(name: bytes) -> bytes:
    """A line of git's attributes by which this one file is binary."""
    escaped = re.sub(rb"([\\*?\[])", rb"\\\1", name)
    quoted = b"".join(b"%c" % byte if 32 <= byte < 127 and byte not in b'"\\' else b"\\%03o" % byte for byte in escaped)
    return b'"/%s" -diff\n' % quoted


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


def _word(text: str) -> str:
    return quote(text.encode()).decode()


def _shown(names: Sequence[bytes]) -> str:
    shown = ", ".join(name.decode(errors="replace") for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _first_line(result: CommandResult) -> str:
    return next(iter(result.output.strip().splitlines()), f"git ended with {result.exit_code}")[:300]


def _last_line(result: CommandResult, otherwise: str) -> str:
    return (result.output.strip().splitlines() or [otherwise])[-1][:300]
