"""The tool `search_files`: looks inside the sandbox, with ripgrep where it has it, else with find and grep."""

import posixpath
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from tools.arguments import TypedTool
from tools.base import ToolContext
from tools.environments.base import CommandResult
from tools.errors import ToolError
from tools.files import LINE_CUT, located
from tools.text import shorten

MAX_FILES = 500  # files with matches that are looked into
MAX_NAMES = 10_000  # files that are only named
MAX_BYTES = 2_000_000  # of what the search prints
MAX_LIMIT = 500  # results of a page
MAX_SHOWN = 500  # characters of a line

_PROGRAMS = ("rg", "grep -P", "grep -E")
_FILE = "\x1f"  # begins a line that names a file
_LINE = re.compile(r"^(\d+)([:-])(.*)$", re.DOTALL)
_GLOB_PART = re.compile(r"(\*\*/|\*\*|\*|\?|\[!?[^\[\]\\]+\])")
_EXPRESSIONS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
_BRACES = re.compile(r"^(.*?)\{([^{}]*)\}(.*)$", re.DOTALL)


class SearchArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What `search_files` takes."""

    pattern: Annotated[
        str, Meta(description="content: a regular expression, matched line by line; files: a glob such as *.py")
    ]
    target: Annotated[
        Literal["content", "files"], Meta(description="content: search in files; files: search for file names")
    ] = "content"
    path: Annotated[str, Meta(description="Directory or file to search in")] = "."
    file_glob: Annotated[str, Meta(description="content: only in files of such a name, for example *.{c,h}")] = ""
    limit: Annotated[int, Meta(description="Results to return")] = 50
    offset: Annotated[int, Meta(description="Results to skip")] = 0
    output_mode: Annotated[
        Literal["content", "files_only", "count"],
        Meta(description="content: matching lines; files_only: their files; count: matches per file"),
    ] = "content"
    context: Annotated[int, Meta(description="Lines to show before and after each match")] = 0


class Program:
    """What this sandbox searches with: found out once per task."""

    def __init__(self) -> None:
        self.name = ""

    async def find(self, context: ToolContext) -> str:
        """rg, or grep with the richest regular expressions it knows; the plainest one where the sandbox did not say."""
        if not self.name:
            probe = "command -v rg >/dev/null && echo rg || { echo a | grep -qP a && echo grep -P || echo grep -E; }"
            found = await context.environment.run(f"{probe} 2>/dev/null", timeout=30)
            self.name = next((line for line in reversed(found.output.splitlines()) if line in _PROGRAMS), "")
        return self.name or _PROGRAMS[-1]


Printed = tuple[str, list[str]]  # a file, and the lines that were printed for it


async def search_files(context: ToolContext, arguments: SearchArguments) -> dict[str, Any]:
    """`{total_count, truncated, …}` with `matches` [{path, line, content}], `files` or `counts` [{path, count}]; where
    there is more, `limit_reason` and `hint`. What is hidden, or below a hidden directory in `path`, is left out."""
    _check(arguments)
    root = await located(context.environment, arguments.path)
    root = root if root.startswith("/") else f"./{root}"
    if arguments.target == "files":
        script = _names_script(root, _relative(arguments.pattern))
    else:
        script = _content_script(await context.memory(Program).find(context), root, arguments)
    ended = await context.environment.run(script, timeout=context.command_timeout, max_chars=MAX_BYTES + 1_000)
    if ended.exit_code and not ended.timed_out:
        raise ToolError(shorten(ended.output.strip(), 2_000) or f"The search failed with exit code {ended.exit_code}")
    return _result(arguments, _by_file(ended.output), _cut(ended))


def _check(arguments: SearchArguments) -> None:
    if not arguments.pattern:
        raise ToolError("pattern is empty")
    if any("\0" in text for text in (arguments.pattern, arguments.path, arguments.file_glob)):
        raise ToolError("pattern, path and file_glob cannot hold a NUL character")


def _relative(pattern: str) -> str:
    return pattern.removeprefix("./").lstrip("/")


def _names_script(root: str, pattern: str) -> str:
    if "/" in pattern:
        glob = pattern.replace("**/", "*").replace("**", "*")
        return _script(root, f'find "$@" -type f {_either("-path", _alternatives(f"*/{glob}"))} -print', MAX_NAMES)
    return _script(root, f'find "$@" -type f {_either("-name", _alternatives(pattern))} -print', MAX_NAMES)


def _matching(pattern: str, printed: Sequence[Printed]) -> Sequence[Printed]:
    """Those whose path ends as a glob with slashes says; `find` lets a star run over slashes."""
    if "/" not in pattern:
        return printed
    globs = [_GLOB_PART.split(glob) for glob in _alternatives(pattern)]
    try:
        ends = re.compile("|".join(f"(?:^|/){''.join(map(_expression, parts))}$" for parts in globs))
    except re.error as error:
        raise ToolError(f"pattern is no glob: {error}") from error
    return [one for one in printed if ends.search(one[0])]


def _expression(part: str) -> str:
    if part.startswith("[") and part.endswith("]"):
        return f"[^{part[2:]}" if part.startswith("[!") else part
    return _EXPRESSIONS.get(part, re.escape(part))


def _content_script(program: str, root: str, arguments: SearchArguments) -> str:
    pattern = arguments.pattern
    if program == "grep -E":
        pattern = pattern.replace(r"\d", "[0-9]")
    wanted = f"-e {shlex.quote(pattern)}"
    globs = _alternatives(arguments.file_glob) if arguments.file_glob else []
    if program == "rg":
        chosen = " ".join(f"-g {shlex.quote(glob)}" for glob in globs)
        files = f"rg -l --no-ignore --no-messages {chosen} {wanted} -- {shlex.quote(root)}"
        program = "rg --no-filename --no-heading --color never"
    else:
        files = f'find "$@" -type f {_either("-name", globs)} -exec {program} -lIs {wanted} {{}} +'
    valid = f"echo | {program} {wanted} - >/dev/null; [ $? -lt 2 ] || exit 2\n"
    if arguments.output_mode == "files_only":
        return valid + _script(root, files, MAX_NAMES)
    how = "-c" if arguments.output_mode == "count" else f"-n -C {_context(arguments)}"
    return valid + _script(root, files, MAX_FILES, f'{program} {how} {wanted} -- "$f"')


def _script(root: str, files: str, most: int, each: str = ":") -> str:
    """Prints every file that `files` names, in order, and what `each` prints for it. For `find`, the positional
    parameters say where to look: below a directory, without what is hidden, or at a single file."""
    quoted = shlex.quote(root)
    return (
        'for f in find sort head; do command -v $f >/dev/null || { echo "The sandbox has no $f"; exit 2; }; done\n'
        f"[ -e {quoted} ] || {{ printf 'No such file or directory: %s' {quoted}; exit 2; }}\n"
        f"if [ -d {quoted} ]; then set -- {quoted}/. -name '.?*' -prune -o; else set -- {quoted}; fi\n"
        f"{{ {files}; }} 2>/dev/null | LC_ALL=C sort | head -n {most + 1} |\n"
        f"while IFS= read -r f; do printf '\\037%s\\n' \"$f\"; {each}; done 2>/dev/null | head -c {MAX_BYTES}\n"
    )


def _either(test: str, globs: Sequence[str]) -> str:
    return f"\\( {' -o '.join(f'{test} {shlex.quote(glob)}' for glob in globs)} \\)" if globs else ""


def _alternatives(glob: str) -> list[str]:
    """The globs that one with {a,b} stands for."""
    if not (found := _BRACES.match(glob)):
        return [glob]
    return [other for part in found[2].split(",") for other in _alternatives(f"{found[1]}{part}{found[3]}")]


def _context(arguments: SearchArguments) -> int:
    return min(max(0, arguments.context), 50)


def _cut(ended: CommandResult) -> str:
    """Why what was printed is not all there is, "" if it is."""
    if ended.timed_out:
        return "timeout"
    return "output" if len(ended.output.encode()) >= MAX_BYTES else ""


def _by_file(output: str) -> list[Printed]:
    printed: list[Printed] = []
    for line in output.split("\n")[:-1]:  # the last one is empty, or cut off
        if line.startswith(_FILE):
            printed.append((posixpath.normpath(line[1:]), []))
        elif printed:
            printed[-1][1].append(line)
    return printed


def _result(arguments: SearchArguments, printed: list[Printed], cut: str) -> dict[str, Any]:
    start = max(0, arguments.offset)
    stop = start + min(max(1, arguments.limit), MAX_LIMIT)
    most = MAX_FILES
    if arguments.target == "files" or arguments.output_mode == "files_only":
        most = MAX_NAMES
        named = printed[:most]
        total, page = _names(
            _matching(_relative(arguments.pattern), named) if arguments.target == "files" else named, start, stop
        )
    elif arguments.output_mode == "count":
        total, page = _counts(printed[:most], start, stop)
    else:
        total, page = _matches(printed[:most], start, stop, _context(arguments))
    more = page.pop("more")
    reason = cut or ("files" if len(printed) > most else "") or ("limit" if more else "")
    result = {"total_count": total, **page, "truncated": bool(reason)}
    if reason:
        result["limit_reason"] = reason
        result["hint"] = f"There is more: repeat with offset={stop}" if more else "Narrow the search to see all"
    return result


def _names(printed: Sequence[Printed], start: int, stop: int) -> tuple[int, dict[str, Any]]:
    return len(printed), {"files": [path for path, _ in printed[start:stop]], "more": len(printed) > stop}


def _counts(printed: Sequence[Printed], start: int, stop: int) -> tuple[int, dict[str, Any]]:
    counts = [(path, int(lines[0])) for path, lines in printed if _counted(lines)]
    page = [{"path": path, "count": count} for path, count in counts[start:stop]]
    return sum(count for _, count in counts), {"counts": page, "more": len(counts) > stop}


def _matches(printed: Sequence[Printed], start: int, stop: int, context: int) -> tuple[int, dict[str, Any]]:
    found = [line for one in printed for line in _lines(one)]
    total = sum(matches for _, _, matches, _ in found)
    return total, {"matches": list(_shown(found, start, stop, context)), "more": total > stop}


def _counted(lines: Sequence[str]) -> bool:
    return bool(lines) and lines[0].isdigit() and lines[0] != "0"


Line = tuple[str, int, bool, str]  # file, number, whether it matches or stands around a match, text


def _lines(printed: Printed) -> Iterator[Line]:
    path, lines = printed
    for line in lines:
        if found := _LINE.match(line):
            yield path, int(found[1]), found[2] == ":", found[3]


def _shown(found: Sequence[Line], start: int, stop: int, context: int) -> Iterator[dict[str, Any]]:
    """The page's matches, and the lines around them, as objects."""
    page = [(path, number) for path, number, matches, _ in found if matches][start:stop]
    near = {(path, number + shift) for path, number in page for shift in range(-context, context + 1)}
    for path, number, matches, text in found:
        if (path, number) not in near:
            continue
        content = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}{LINE_CUT}"
        around = {} if matches else {"around": True}
        yield {"path": path, "line": number, "content": content.removesuffix("\r").replace("\0", "\ufffd"), **around}


SEARCH_FILES = TypedTool(
    "search_files",
    "Search the sandbox: target=content finds lines by regular expression, target=files finds files by name. "
    "Hidden files and directories are left out unless path names one. Results come in pages by limit and offset.",
    SearchArguments,
    search_files,
    read_only=True,
)
