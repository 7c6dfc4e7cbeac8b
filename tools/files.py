"""The tools `read_file`, `write_file` and `patch`: the sandbox's files through the sandbox."""

import asyncio
import difflib
import posixpath
from collections.abc import Callable
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from tools.arguments import Meaningless, TypedTool
from tools.base import ToolContext
from tools.environments.base import Environment
from tools.errors import ToolError
from tools.patching import FileChange, apply_hunks, parse_patch, replace_text, unified_diff
from tools.text import shorten

MAX_LINES = 2_000
MAX_LINE = 2_000  # characters
MAX_READ = 100_000  # characters
MAX_PATCHED = 20_000_000  # bytes
MAX_DIFF = 50_000  # characters
LINE_CUT = "… [line cut]"

_IMAGES = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM", b"II*\0", b"MM\0*")


class ReadArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What `read_file` takes."""

    path: Annotated[str, Meta(description="The file; relative paths start at the current directory")]
    offset: Annotated[int, Meta(description="First line to show, counted from 1")] = 1
    limit: Annotated[int, Meta(description=f"Lines to show, at most {MAX_LINES}")] = 500


class WriteArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What `write_file` takes."""

    path: Annotated[str, Meta(description="The file; its directories are made")]
    content: Annotated[str, Meta(description="The whole new content")]
    cross_profile: Meaningless = None


class PatchArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What `patch` takes."""

    mode: Annotated[
        Literal["replace", "patch"],
        Meta(description="replace: old_string becomes new_string in path; patch: a V4A patch over one or more files"),
    ] = "replace"
    path: Annotated[str, Meta(description="replace: the file to edit")] = ""
    old_string: Annotated[
        str, Meta(description="replace: text that stands once in the file; add lines around it to make it so")
    ] = ""
    new_string: Annotated[str, Meta(description="replace: what stands there afterwards; empty deletes")] = ""
    replace_all: Annotated[bool, Meta(description="replace: every place instead of the only one")] = False
    patch: Annotated[
        str,
        Meta(
            description="patch: `*** Begin Patch`, then per file `*** Update File: PATH` with hunks (`@@ line above`, "
            "lines that start with blank, - or +), `*** Add File: PATH` with + lines, `*** Delete File: PATH`, "
            "or `*** Move File: FROM -> TO`, then `*** End Patch`"
        ),
    ] = ""
    cross_profile: Meaningless = None


class Window:
    """Reads a file's bytes in chunks and keeps the lines asked for, numbered; counts the rest. Memory is bounded by
    MAX_READ and MAX_LINE whatever the file holds."""

    def __init__(self, offset: int, limit: int) -> None:
        self.size = 0
        self.binary = False
        self.image = False
        self.shown: list[str] = []
        self.cut_by = ""  # what ended it before the file's end: lines | characters
        self._first = offset
        self._limit = limit
        self._newlines = 0
        self._characters = 0
        self._line = b""
        self._head = b""
        self._last = b"\n"

    def feed(self, chunk: bytes) -> None:
        """The next bytes of the file."""
        if not chunk:
            return
        if len(self._head) < 8192:
            self._look_at(chunk)
        self.size += len(chunk)
        newlines = chunk.count(b"\n")
        wanted = self._newlines + newlines + 1 >= self._first
        if wanted and not self.cut_by and not self.binary:
            self._take(chunk)
        self._newlines += newlines
        self._last = chunk[-1:]

    def end(self) -> None:
        """The file has no more bytes."""
        if self._last != b"\n":
            self._newlines += 1
            if self._newlines >= self._first and not self.cut_by and not self.binary:
                self._show(self._newlines)

    @property
    def total_lines(self) -> int:
        """Lines of the whole file, the last one with or without its newline; 0 for a binary one."""
        return 0 if self.binary else self._newlines

    @property
    def next_line(self) -> int:
        """Number of the line after the last shown one."""
        return self._first + len(self.shown)

    def _look_at(self, chunk: bytes) -> None:
        self._head += chunk[: 8192 - len(self._head)]
        self.binary = b"\0" in self._head
        if self.binary:
            self.shown.clear()
            webp = self._head[:4] == b"RIFF" and self._head[8:12] == b"WEBP"
            self.image = webp or self._head.startswith(_IMAGES)

    def _take(self, chunk: bytes) -> None:
        room = 4 * MAX_LINE + 4  # enough bytes to see that a line is too long
        pieces = chunk.split(b"\n")
        for number, piece in enumerate(pieces, self._newlines + 1):
            if number < self._first:
                continue
            if len(self._line) < room:
                self._line += piece[: room - len(self._line)]
            if number <= self._newlines + len(pieces) - 1:
                self._show(number)
                if self.cut_by:
                    return

    def _show(self, number: int) -> None:
        text = self._line.decode("utf-8", "replace").replace("\0", "\ufffd").removesuffix("\r")
        self._line = b""
        if len(text) > MAX_LINE:
            text = text[:MAX_LINE] + LINE_CUT
        line = f"{number}|{text}"
        if len(self.shown) == self._limit:
            self.cut_by = "lines"
        elif self._characters + len(line) > MAX_READ:
            self.cut_by = "characters"
        else:
            self.shown.append(line)
            self._characters += len(line) + 1


async def read_file(context: ToolContext, arguments: ReadArguments) -> dict[str, Any]:
    """`{content, total_lines, file_size, truncated, is_binary, is_image}`, content as `NUM|text` lines; where there is
    more, `truncated_by`, `next_offset` and `hint`. A file that cannot be read: `error`, and `similar_files` if any."""
    window = Window(max(1, arguments.offset), min(max(1, arguments.limit), MAX_LINES))
    path = await located(context.environment, arguments.path)
    try:
        async for chunk in context.environment.read(path):
            window.feed(chunk)
    except ToolError as error:
        similar = await _similar(context.environment, path)
        return {**_shown(window), "error": str(error), **({"similar_files": similar} if similar else {})}
    window.end()
    return {**_shown(window), **_continuation(window)}


def _shown(window: Window) -> dict[str, Any]:
    return {
        "content": "\n".join(window.shown),
        "total_lines": window.total_lines,
        "file_size": window.size,
        "truncated": bool(window.cut_by),
        "is_binary": window.binary,
        "is_image": window.image,
    }


def _continuation(window: Window) -> dict[str, Any]:
    if window.binary:
        return {"hint": f"This is {'an image' if window.image else 'a binary file'}; its content is not shown"}
    if window.cut_by:
        return {
            "truncated_by": window.cut_by,
            "next_offset": window.next_line,
            "hint": f"There is more: read on with offset={window.next_line}",
        }
    if window.total_lines and not window.shown:
        return {"hint": f"The file ends before that line; it has {window.total_lines} lines"}
    return {}


async def _similar(environment: Environment, path: str) -> list[str]:
    directory, name = posixpath.split(path)
    try:
        entries = await environment.list(directory or ".")
    except ToolError:
        return []
    names = [entry.name for entry in entries]
    close = [] if name in names else difflib.get_close_matches(name, names, n=5)
    return [posixpath.join(directory, other) for other in close]


async def located(environment: Environment, path: str) -> str:
    """The path with a leading `~` read as the sandbox's home. Raises ToolError for an empty one."""
    if not path.strip():
        raise ToolError("path is empty")
    if path == "~" or path.startswith("~/"):
        home = await environment.run('printf %s "$HOME"', timeout=30)
        return home.output + path[1:]
    return path


async def _absolute(environment: Environment, path: str) -> str:
    if not path.startswith("/"):
        directory = await environment.run("pwd", timeout=30)
        path = posixpath.join(directory.output.removesuffix("\n"), path)
    return posixpath.normpath(path)


async def write_file(context: ToolContext, arguments: WriteArguments) -> dict[str, Any]:
    """`{bytes_written, dirs_created, resolved_path, files_modified}`."""
    path = await located(context.environment, arguments.path)
    data = arguments.content.encode("utf-8", "replace")
    made = await context.environment.write(path, data)
    resolved = await _absolute(context.environment, path)
    return {
        "bytes_written": len(data),
        "dirs_created": made,
        "resolved_path": resolved,
        "files_modified": [resolved],
    }


class Edits:
    """The files that one `patch` call touches, as they were and as they are to be; nothing is written before `save`.

    Texts have `\\n` line ends whatever the file has; bytes that are no UTF-8 stay as they are."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self.before: dict[str, str | None] = {}
        self.after: dict[str, str | None] = {}
        self.crlf: set[str] = set()

    async def text(self, path: str) -> str:
        """The file as edited so far. Raises ToolError if it cannot be read or is to be deleted."""
        if path not in self.after:
            self.before[path] = self.after[path] = self._decoded(path, await self._bytes(path))
        text = self.after[path]
        if text is None:
            raise ToolError("the file is deleted above")
        return text

    async def make(self, path: str, content: str) -> None:
        """A new file. Raises ToolError if there is one."""
        try:
            await self.text(path)
        except ToolError:
            self.before.setdefault(path, None)
            self.after[path] = content
        else:
            raise ToolError("the file exists already")

    async def move(self, path: str, target: str) -> None:
        """The file gets another name."""
        await self.make(target, await self.text(path))
        self.after[path] = None
        if path in self.crlf:
            self.crlf.add(target)

    def changed(self) -> list[str]:
        """The files that will differ, in the order in which they were touched."""
        return [path for path, text in self.after.items() if text != self.before[path]]

    async def save(self) -> None:
        """Writes and deletes. Raises ToolError that says what had been done before the file that could not be."""
        done: list[str] = []
        for path in self.changed():
            try:
                await self._save(path, self.after[path])
            except ToolError as error:
                raise ToolError(f"{_about(path, error)}; changed before it: {', '.join(done) or 'nothing'}") from error
            done.append(path)

    async def _save(self, path: str, text: str | None) -> None:
        if text is None:
            await self._environment.delete(path)
            return
        if path in self.crlf:
            text = text.replace("\n", "\r\n")
        await self._environment.write(path, text.encode("utf-8", "surrogateescape"))

    async def _bytes(self, path: str) -> bytes:
        data = bytearray()
        async for chunk in self._environment.read(path):
            data += chunk
            if len(data) > MAX_PATCHED:
                raise ToolError(f"the file is larger than {MAX_PATCHED:,} bytes")
        return bytes(data)

    def _decoded(self, path: str, data: bytes) -> str:
        text = data.decode("utf-8", "surrogateescape")
        if "\r\n" in text and text.count("\r\n") == text.count("\n"):
            self.crlf.add(path)
            text = text.replace("\r\n", "\n")
        return text


async def patch(context: ToolContext, arguments: PatchArguments) -> dict[str, Any]:
    """`{success, diff, files_modified, files_created, files_deleted}`. Either all edits fit, or nothing is written."""
    edits = Edits(context.environment)
    if arguments.mode == "replace":
        await _replace(context.environment, edits, arguments)
    else:
        for change in parse_patch(arguments.patch):
            try:
                await _apply(context.environment, edits, change)
            except ToolError as error:
                raise ToolError(_about(change.path, error)) from error
    changed = edits.changed()
    if not changed:
        raise ToolError("The patch changes nothing")
    await edits.save()
    diffs = [await _diff(edits.before[path], edits.after[path], path) for path in changed]
    return {
        "success": True,
        "diff": shorten("".join(diffs), MAX_DIFF),
        "files_modified": [path for path in changed if None not in (edits.before[path], edits.after[path])],
        "files_created": [path for path in changed if edits.before[path] is None],
        "files_deleted": [path for path in changed if edits.after[path] is None],
    }


def _about(path: str, error: ToolError) -> str:
    return str(error) if str(error).startswith(path) else f"{path}: {error}"


async def _replace(environment: Environment, edits: Edits, arguments: PatchArguments) -> None:
    if not arguments.path:
        raise ToolError("mode replace needs path, old_string and new_string")
    path = await located(environment, arguments.path)
    text = await edits.text(path)
    old, new = arguments.old_string, arguments.new_string
    if path in edits.crlf:
        old, new = old.replace("\r\n", "\n"), new.replace("\r\n", "\n")
    edits.after[path] = await _worked(len(text), replace_text, text, old, new, arguments.replace_all)


async def _apply(environment: Environment, edits: Edits, change: FileChange) -> None:
    path = await located(environment, change.path)
    if change.kind == "add":
        await edits.make(path, change.content)
        return
    text = await edits.text(path)
    if change.kind == "delete":
        edits.after[path] = None
        return
    edits.after[path] = await _worked(len(text), apply_hunks, text, change.hunks)
    if change.target:
        await edits.move(path, await located(environment, change.target))


async def _diff(before: str | None, after: str | None, path: str) -> str:
    size = len(before or "") + len(after or "")
    text = await _worked(size, unified_diff, before, after, path)
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


async def _worked(size: int, function: Callable[..., str], *arguments: Any) -> str:
    """The function's value; on a thread where the text is so long that the event loop would stand still."""
    if size < 200_000:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)


READ_FILE = TypedTool(
    "read_file",
    "Read a text file. Lines come as NUM|TEXT; lines above "
    f"{MAX_LINE:,} characters are cut. Long files are read in parts with offset and limit.",
    ReadArguments,
    read_file,
    read_only=True,
)
WRITE_FILE = TypedTool(
    "write_file",
    "Write a file, replacing what it held; missing directories are made. To change a part of a file use patch.",
    WriteArguments,
    write_file,
)
PATCH = TypedTool(
    "patch",
    "Edit files. mode=replace puts new_string in the place of old_string, which may differ from the file in white "
    "space; mode=patch applies a V4A patch to several files at once. Returns a unified diff.",
    PatchArguments,
    patch,
)
