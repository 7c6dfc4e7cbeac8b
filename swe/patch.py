"""What an agent changed in a repository, as the patch that git writes of it.

Taken inside the sandbox in a private git directory that only borrows the repository's objects. So nothing that the
agent did to the repository's own configuration, hooks, locks, index, branches or replaced objects has a say, and
nothing of the repository is changed but this: what is no file (a named pipe) and stands where git would open one is
removed, for git would wait for it without an end. The patch is written to a file there and read as bytes: it is exactly
what git wrote. What it is against is kept aside before the agent comes: its history may be gone by the time of the
patch.

What counts is what stands in the working tree, against a tree: tracked files, files that are not ignored, and
ignored ones that the agent added to its index. A repository that the agent made within it (without declaring a
submodule) counts as the files it holds: as a link to a commit that nobody else has they would be lost.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence, Set
from typing import TypeVar

import msgspec
from msgspec import Struct

from swe import patch_scripts as scripts
from swe.git import GitFailed
from swe.packs import unpack
from tools.environments.base import CommandResult, Environment
from tools.environments.script import quote, words
from tools.errors import ToolError

_T = TypeVar("_T")
Origin = Callable[[], AsyncGenerator[bytes, None]]
"""Gives a pack with the base's objects. Raises GitFailed."""

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
_HEADER = 260  # bytes at most before a file's first line in a patch, but for its name
_NOTHING = "/dev/null"
_GONE = "gone"
_CANNOT_ADD = 128  # git's code when it died: nothing was added
_ENCODED = re.compile(r"'(.+)' (?:from|if encoded as) ")
_AS_IT_IS = b"%s !working-tree-encoding\n"
_ALL_AS_THEY_ARE = _AS_IT_IS % b"*"
_ENCODINGS = 20  # files whose encoding git cannot follow, one by one


class Patch(Struct, frozen=True):
    """`data` is the patch, b"" if nothing changed or none could be had. It is UTF-8 without NUL: files that are not are
    in it as binary. `problem` is "" or one line: why there is no patch, or what is wrong with this one."""

    data: bytes = b""
    problem: str = ""


class Base(Struct, frozen=True):
    """What a patch is against. `cwd`: the repository's top directory. `bases`: commits (or their trees), to one of
    which it has to apply. What `keep` found: the `tree` that stood there before, untracked files that were too `large`
    to be in it, what stands `apart` in submodules' own folders, problems that are `known`, and the folder in the
    sandbox where all that is needed is `kept`."""

    cwd: str
    bases: tuple[str, ...]
    tree: str = ""
    large: frozenset[bytes] = frozenset()
    known: tuple[str, ...] = ()
    kept: str = ""
    apart: frozenset[bytes] = frozenset()


class _Refused(Exception):
    """There is no patch; the text says why."""


class _Change(Struct, frozen=True):
    """A line of `git diff --raw`: what a file is now (`mode`, `blob`) and what became of it."""

    mode: str
    blob: str
    status: str
    name: bytes


async def take(
    environment: Environment,
    base: Base,
    *,
    exclude: Sequence[str] = (),
    seconds: float = _SECONDS,
    origin: Origin | None = None,
) -> Patch:
    """The patch from the base to what stands in the working tree; what was kept for it is removed. What `exclude`
    matches is left out: patterns as git's pathspecs have them, where `*` matches `/` too, or with `**` only that does;
    see `excluding`.
    `origin` is asked where the base is neither in the repository nor in what was kept of it.
    Raises EnvironmentLost; all else that goes wrong is told in the patch's `problem`."""
    try:
        return await _in_time(_taken(environment, base, exclude, origin), seconds)
    except (_Refused, ToolError) as error:
        return Patch(problem=str(error))


async def keep(environment: Environment, *, cwd: str, bases: Sequence[str]) -> Base:
    """Keeps aside, outside of the working tree, what a later `take` has to know of it as it is now: what stands there
    already is no part of that patch. Raises ToolError where there is no repository with one of the commits."""
    try:
        return await _in_time(_kept(environment, cwd, bases), _SECONDS)
    except _Refused as error:
        raise ToolError(str(error)) from error


async def _in_time(work: Awaitable[_T], seconds: float) -> _T:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise _Refused(f"the patch could not be taken within {seconds:.0f} s") from None


async def _taken(environment: Environment, base: Base, exclude: Sequence[str], origin: Origin | None) -> Patch:
    try:
        patterns = [spec for each in exclude if each for spec in excluding(each)]
        work = await _open_work(environment, base, patterns, origin)
        try:
            return await work.patch()
        finally:
            await _remove(environment, work.folder)
    finally:
        if base.kept:
            await _remove(environment, base.kept)


async def _kept(environment: Environment, cwd: str, bases: Sequence[str]) -> Base:
    work = await _open_work(environment, Base(cwd, tuple(bases)), [], None)
    try:
        return await work.keep()
    except BaseException:
        await _remove(environment, work.folder)
        raise


async def _open_work(environment: Environment, base: Base, exclude: list[str], origin: Origin | None) -> "_Work":
    if not base.bases or not all(map(_COMMIT.fullmatch, base.bases)):
        raise _Refused(f"no base commit to take a patch against: {', '.join(map(repr, base.bases)) or 'none'}")
    command = f"({_SEARCH}; {scripts.FOLDER.format(cwd=_word(base.cwd), kept=_word(base.kept), gone=_GONE)})"
    where = await environment.run(command, timeout=_SECONDS, cwd="/")
    if where.exit_code != 0:
        raise _Refused(_last_line(where, "no directory for the patch"))
    *before, top, folder = where.output.splitlines()
    problems = [f"{top} was gone: all its files count as deleted"] if _GONE in before else []
    return _Work(environment, msgspec.structs.replace(base, cwd=top), folder, exclude, origin, problems)


async def _remove(environment: Environment, folder: str) -> None:
    await environment.run(f"({_SEARCH}; rm -rf -- {_word(folder)})", timeout=_CLEANING_SECONDS, cwd="/")


class _Work:
    """One patch being taken, or what it will be against being kept, in `folder` of the sandbox."""

    def __init__(
        self,
        environment: Environment,
        base: Base,
        folder: str,
        exclude: list[str],
        origin: Origin | None,
        problems: list[str],
    ) -> None:
        self.folder = folder
        self._environment = environment
        self._base = base
        self._exclude = [pattern.encode() for pattern in exclude]
        self._origin = origin
        self._tree = base.tree
        self._quotes_names = False
        top = base.cwd.rstrip("/").encode() + b"/"
        own = (place.encode() for place in (folder, base.kept) if place)
        self._own = [place.removeprefix(top) for place in own if place.startswith(top)]
        self._attributes: list[bytes] = []
        self._broken: list[bytes] = []
        self._places: list[bytes] = []
        self._problems = problems

    async def keep(self) -> Base:
        """See `keep`."""
        await self._open()
        large = await self._track()
        await self._add(large)
        apart = frozenset(await self._apart())
        await self._run(scripts.KEEP)
        bases = tuple((await self._read("bases")).decode().split())
        tree = (await self._read("base")).decode().strip()
        return Base(self._base.cwd, bases, tree, frozenset(large), tuple(self._problems), self.folder, apart)

    async def patch(self) -> Patch:
        """See `take`."""
        await self._open()
        if self._base.tree not in ("", *self._base.bases, self._tree):
            self._problems.append("what had been there before is in the patch: what was kept of it is gone")
        large = await self._track()
        await self._add(large)
        if new := large - self._base.large:
            self._problems.append(f"left out, as larger than {_megabytes()}: {_shown(sorted(new))}")
        if apart := [item for item in await self._apart() if item not in self._base.apart]:
            shown = _shown([item.partition(b" ")[2] for item in apart])
            self._problems.append(f"not in the patch, as only the submodule's own folder has it: {shown}")
        data = await self._difference()
        if not _is_text(data):
            await self._hold_as_binary(data)
            data = await self._difference()
        await self._check()
        return Patch(data, "; ".join(each for each in self._problems if each not in self._base.known))

    async def _open(self) -> None:
        await self._write(".gitconfig", scripts.CONFIGURATION)
        opened = await self._run(scripts.OPEN, must=False)
        if opened.exit_code == scripts.NO_BASE and self._origin is not None:
            await self._receive(self._origin, _said(opened))
            opened = await self._run(scripts.OPEN, must=False)
        _refuse_failed(opened)
        await self._read_tree()
        if links := await self._links():
            await self._run(scripts.BROKEN, links)
            self._broken = await self._items("broken")
        if self._broken:
            self._problems.append(f"left as it was, as the submodule's repository is broken: {_shown(self._broken)}")

    async def _receive(self, origin: Origin, lacking: str) -> None:
        """What the base is made of into the private git directory."""
        command = f"exec {self._command(scripts.RECEIVE.format(folder=_word(self.folder)))}"
        try:
            await unpack(self._environment, f"{_SEARCH}; {command}", origin(), cwd="/", seconds=_SECONDS)
        except GitFailed as error:
            raise _Refused(f"{lacking}, nor is its base to be had from elsewhere: {error}") from error

    async def _read_tree(self) -> None:
        self._tree = (await self._read("base")).decode().strip()

    async def _track(self) -> Set[bytes]:
        """Makes git see what it would pass over; the untracked files that are too large to be added."""
        declared = {value for _, _, value in (item.partition(b"\n") for item in await self._items("declared"))}
        large = {name.removeprefix(b"./") for name in await self._items("large")}
        changes = _changes(await self._read("theirs"))
        added = {each.name for each in changes if each.status == "A" and each.mode != _LINK} - large
        broken = tuple(link + b"/" for link in self._broken)
        places = [name for name in added if not name.startswith(broken)]
        untracked: set[bytes] = set()
        for _ in range(_NESTED_DEPTH):
            await self._write("tracked", _placeholders(places))
            await self._run(scripts.TRACK)
            self._places += places
            others = set(await self._items("others"))
            untracked |= others
            places = [name + _PLACE for name in others if name.endswith(b"/") and name[:-1] not in declared]
            if not places:
                break
        return untracked & large

    async def _add(self, large: Set[bytes]) -> None:
        """The working tree into the index. A file whose encoding git cannot follow goes in as it is."""
        left_out = [b":(exclude,literal)" + name for name in (*large, *self._own, *self._broken)]
        said, kind = "", "not all could be added"
        for tried in range(_ENCODINGS + 2):
            result = await self._run(scripts.ADD, left_out, must=False)
            if said and result.exit_code != _CANNOT_ADD:
                kind = "not added as .gitattributes has it"
            said = said or (_said(result) if result.exit_code else "")
            if result.exit_code != _CANNOT_ADD or _ALL_AS_THEY_ARE in self._attributes:
                break
            found = _ENCODED.search(_said(result)) if tried < _ENCODINGS else None
            await self._set(_AS_IT_IS % _pattern(found[1].encode()) if found else _ALL_AS_THEY_ARE)
        if result.exit_code == _CANNOT_ADD:
            await self._write("untracked", b"".join(name + b"\0" for name in self._places))
            await self._run(scripts.UNTRACK)
        if said:
            self._problems.append(f"{kind}: {said}")

    async def _links(self) -> list[bytes]:
        return [item.partition(b"\t")[2] for item in await self._items("links")]

    async def _apart(self) -> list[bytes]:
        if not (links := await self._links()):
            return []
        await self._run(scripts.LINKED, links)
        return await self._items("apart")

    async def _difference(self) -> bytes:
        """The patch. As long as it is too large the largest files that the commit does not have are left out."""
        made, left_out = set(await self._items("made")), set[bytes]()
        while True:
            await self._run(scripts.DIFF, self._exclude)
            over = int(await self._read("over"))
            changes = list(_changes(await self._read("changed")))
            gone = {each.name for each in changes if each.status == "D"} & made
            large = await self._largest([each for each in changes if each.status == "A" or each.name in made], over)
            if over and not large:
                raise _Refused(f"the patch is larger than {_megabytes()}")
            if not gone | large:
                break
            left_out |= large
            await self._drop(gone | large)
        if left_out:
            shown = _shown(sorted(left_out))
            self._problems.append(f"left out, as the patch would be larger than {_megabytes()}: {shown}")
        return await self._read("patch")

    async def _largest(self, changes: Sequence[_Change], size: int) -> set[bytes]:
        """Of the files the largest, as many as leave out `size` bytes of the patch."""
        files = [each for each in changes if size and each.status != "D" and each.mode != _LINK]
        if not files:
            return set()
        await self._write("ids", b"".join(each.blob.encode() + b"\n" for each in files))
        await self._run(scripts.SIZES)
        sizes = [line.split() for line in (await self._read("sizes")).splitlines()]
        lines = {name: added for added, _, name in (item.split(b"\t", 2) for item in await self._items("lines"))}
        parts = [
            (_part(each.name, int(whole), int(packed), lines.get(each.name, b"0")), each.name)
            for each, (whole, packed) in zip(files, sizes, strict=True)
        ]
        found = set()
        for most, name in sorted(parts, reverse=True):
            if size > 0:
                found.add(name)
                size -= most
        return found

    async def _drop(self, names: Iterable[bytes]) -> None:
        """From now on they are neither in the index nor in what the patch is against."""
        await self._write("dropped", b"".join(name + b"\0" for name in names))
        await self._run(scripts.DROP)
        await self._read_tree()

    async def _hold_as_binary(self, data: bytes) -> None:
        """From now on files whose difference is no text are written as binary, and file names in ASCII if need be."""
        changed = _changes(await self._read("changed"))
        names = [each.name for each in changed for _ in range(2 if each.status == "T" else 1)]
        sections = _sections(data)
        if len(names) != len(sections):
            raise _Refused(f"the patch has {len(sections)} parts for {len(names)} files")
        binary = {name for name, section in zip(names, sections, strict=True) if not _is_text(section)}
        await self._set(*(_pattern(name) + b" -diff\n" for name in sorted(binary)))
        self._quotes_names = not all(map(_is_text, names))

    async def _set(self, *attributes: bytes) -> None:
        """More lines of git's attributes, which go before the repository's own."""
        self._attributes += attributes
        await self._write("git/info/attributes", b"".join(self._attributes))

    async def _check(self) -> None:
        """Whether it applies to a clean index and gives the same files, and applies to a base without what was there
        before."""
        result = await self._run(scripts.CHECK, self._exclude, must=False)
        if result.exit_code:
            where = "to the commit alone, without what was made before" if result.exit_code == scripts.ONLY_HERE else ""
            self._problems.append(f"the patch does not apply{where and ' '}{where}: {_said(result)}")

    async def _run(self, script: bytes, arguments: Sequence[bytes] = (), *, must: bool = True) -> CommandResult:
        """A script with nothing of the agent's variables but, at its end, PATH."""
        await self._write("script", b"set -- " + words(*arguments) + scripts.FUNCTIONS + script)
        result = await self._environment.run(
            f"({_SEARCH}; command {self._command(f'sh {_word(self.folder)}/script')})",
            timeout=_SECONDS * 10,  # the caller's limit comes first
            cwd="/",
        )
        if must:
            _refuse_failed(result)
        return result

    def _command(self, command: str) -> str:
        assignments = " ".join(f"{name}={_word(value)}" for name, value in self._variables().items())
        ours = "LC_ALL=C GIT_CONFIG_NOSYSTEM=1 GIT_ATTR_NOSYSTEM=1"
        return f'env -i PATH="$PATH" HOME={_word(self.folder)} {ours} {assignments} {command}'

    def _variables(self) -> dict[str, str]:
        """See `swe.patch_scripts`."""
        return {
            "T": self.folder,
            "W": self._base.cwd,
            "K": self._base.kept or _NOTHING,
            "R": " ".join(self._base.bases),
            "B": self._tree,
            "M": str(MAX_BYTES),
            "Q": "true" if self._quotes_names else "false",
        }

    async def _write(self, name: str, data: bytes) -> None:
        await self._environment.write(f"{self.folder}/{name}", data)

    async def _read(self, name: str) -> bytes:
        data = bytearray()
        async for chunk in self._environment.read(f"{self.folder}/{name}"):
            data += chunk
            if len(data) > MAX_BYTES:
                raise _Refused(f"too many files: git's list of them is larger than {_megabytes()}")
        return bytes(data)

    async def _items(self, name: str) -> list[bytes]:
        return (await self._read(name)).split(b"\0")[:-1]


def _megabytes() -> str:
    return f"{MAX_BYTES // 1_000_000} MB"


def _changes(raw: bytes) -> Iterator[_Change]:
    """Of `git diff --raw -z --no-renames`."""
    items = raw.split(b"\0")
    for about, name in zip(items[0::2], items[1::2], strict=False):
        _, mode, _, blob, status = about.decode().split(" ")
        yield _Change(mode, blob, status[:1], name)


def _part(name: bytes, size: int, packed: int, lines: bytes) -> int:
    """About how many bytes a new file is in a patch, rather too many: text has a sign before each line, binary (`lines`
    is "-") is deflated, and 52 bytes of that become a line of 67."""
    return _HEADER + 3 * len(name) + (packed * 67 // 52 if lines == b"-" else size + int(lines))


def excluding(pattern: str) -> Sequence[str]:
    """The pathspecs that leave out what it matches. With a `/` before it, it is as in .gitignore: of the top directory,
    a file or a folder with all that is in it, and `*` does not match `/`."""
    if pattern.startswith("/"):
        name = pattern.removeprefix("/")
        return f":(exclude,glob){name}", f":(exclude,glob){name.rstrip('/')}/**"
    return (f":(exclude,glob){pattern}" if "**" in pattern else f":(exclude){pattern}",)


def _placeholders(names: Sequence[bytes]) -> bytes:
    """Input of `git update-index -z --index-info`: as if there had been empty files of these names. `git add -A` takes
    what is there in their place, and looks into a directory that holds one even if it is a repository of its own."""
    return b"".join(b"100644 %s 0\t%s\0" % (_EMPTY_BLOB.encode(), name) for name in names)


def _sections(patch: bytes) -> list[bytes]:
    """One for each file: no line of a difference begins like their first, for text lines have a sign before them and
    encoded binary has no blanks."""
    return [b"diff --git " + part for part in (b"\n" + patch).split(b"\ndiff --git ")[1:]]


def _pattern(name: bytes) -> bytes:
    """This one file in git's attributes."""
    escaped = re.sub(rb"([\\*?\[])", rb"\\\1", name)
    quoted = b"".join(b"%c" % byte if 32 <= byte < 127 and byte not in b'"\\' else b"\\%03o" % byte for byte in escaped)
    return b'"/%s"' % quoted


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


def _said(result: CommandResult) -> str:
    """The line that says what is wrong, which is not always the first."""
    lines = result.output.strip().splitlines() or [f"git ended with {result.exit_code}"]
    return next((line for line in lines if line.startswith(("fatal:", "error:"))), lines[0])[:300]


def _refuse_failed(result: CommandResult) -> None:
    if result.exit_code != 0:
        raise _Refused(_last_line(result, f"git ended with {result.exit_code}"))


def _last_line(result: CommandResult, otherwise: str) -> str:
    return (result.output.strip().splitlines() or [otherwise])[-1][:300]
