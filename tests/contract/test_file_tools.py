"""`read_file`, `write_file`, `patch` and `search_files` in a real sandbox."""

import posixpath
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.contract.toolbox import Toolbox, open_toolbox
from tools.search import Program


@pytest.fixture
async def call() -> AsyncIterator[Toolbox]:
    async with open_toolbox("files") as toolbox:
        yield toolbox


class TestRead:
    async def test_a_short_file(self, call: Toolbox) -> None:
        await call.environment.write("a.txt", b"one\ntwo\n")
        assert await call("read_file", path="a.txt") == {
            "content": "1|one\n2|two",
            "total_lines": 2,
            "file_size": 8,
            "truncated": False,
            "is_binary": False,
            "is_image": False,
        }

    async def test_a_long_file_is_read_on_where_it_was_cut(self, call: Toolbox) -> None:
        await call.shell("seq 100000 >long")
        size = int(await call.shell("wc -c <long"))
        first = await call("read_file", path="long", limit=1000)
        assert (first["total_lines"], first["file_size"], first["truncated"]) == (100_000, size, True)
        assert (first["truncated_by"], first["next_offset"]) == ("lines", 1001)
        assert "offset=1001" in first["hint"]
        again = await call("read_file", path="long", offset=first["next_offset"], limit=1)
        assert again["content"] == "1001|1001"
        most = await call("read_file", path="long", limit=10**9)
        assert most["next_offset"] == 2001
        last = await call("read_file", path="long", offset=99_999, limit=10)
        assert last["content"] == "99999|99999\n100000|100000"
        assert not last["truncated"]
        beyond = await call("read_file", path="long", offset=100_001)
        assert beyond["content"] == ""
        assert "100000 lines" in beyond["hint"]
        assert (await call("read_file", path="long", offset=-5, limit=0))["content"] == "1|1"

    async def test_a_file_larger_than_one_read(self, call: Toolbox) -> None:
        await call.shell("yes $(printf %01000d 7) | head -n 300 >wide")
        result = await call("read_file", path="wide")
        assert result["truncated_by"] == "characters"
        assert len(result["content"]) <= 100_000
        assert result["next_offset"] == result["content"].count("\n") + 2
        assert result["total_lines"] == 300

    async def test_an_equal_read_gives_an_equal_result(self, call: Toolbox) -> None:
        await call.environment.write("a", b"x\n")
        results = [await call("read_file", path="a") for _ in range(5)]
        assert results == [results[0]] * 5

    async def test_binary_files_and_images(self, call: Toolbox) -> None:
        await call.environment.write("b", bytes(range(256)) * 100)
        await call.environment.write("i.png", b"\x89PNG\r\n\x1a\n\0\0")
        binary, image = await call("read_file", path="b"), await call("read_file", path="i.png")
        assert (binary["is_binary"], binary["is_image"], binary["file_size"]) == (True, False, 25_600)
        assert (image["is_binary"], image["is_image"], image["content"]) == (True, True, "")
        assert "error" not in image

    async def test_a_missing_file_names_similar_ones(self, call: Toolbox) -> None:
        await call.environment.write("src/parser.py", b"")
        await call.environment.write("src/other.txt", b"")
        result = await call("read_file", path="src/parsr.py")
        assert result["error"]
        assert result["similar_files"] == ["src/parser.py"]
        assert "similar_files" not in await call("read_file", path="nowhere/at/all")

    async def test_what_is_no_file(self, call: Toolbox) -> None:
        for path in ("/", "", " ", "a\0b", "/dev/zero"):
            result = await call("read_file", path=path)
            assert result["error"], path
            assert "similar_files" not in result

    async def test_home(self, call: Toolbox) -> None:
        await call.shell('mkdir -p "$HOME/d" && echo x >"$HOME/d/f"')
        assert (await call("read_file", path="~/d/f"))["content"] == "1|x"


class TestWrite:
    async def test_the_result(self, call: Toolbox) -> None:
        here = (await call.shell("pwd")).strip()
        result = await call("write_file", path="new/dir/./f", content="wörld\n")
        assert result == {
            "bytes_written": 7,
            "dirs_created": True,
            "resolved_path": f"{here}/new/dir/f",
            "files_modified": [f"{here}/new/dir/f"],
        }
        assert await call.read("new/dir/f") == "wörld\n".encode()
        again = await call("write_file", path=f"{here}/new/dir/f", content="")
        assert (again["bytes_written"], again["dirs_created"]) == (0, False)
        assert await call.read("new/dir/f") == b""

    async def test_relative_paths_follow_the_current_directory(self, call: Toolbox) -> None:
        here = (await call.shell("mkdir sub && cd sub && pwd")).strip()
        assert (await call("write_file", path="f", content="x"))["resolved_path"] == f"{here}/f"
        assert await call.read(f"{here}/f") == b"x"

    async def test_odd_names_and_odd_text(self, call: Toolbox) -> None:
        name, text = "a 'b\" $(c) ü\n*.txt", "$(x) `y` \\n 'z' \"\r\n\ttab\u2028 no newline"
        assert "error" not in await call("write_file", path=name, content=text)
        assert await call.read(name) == text.encode()

    async def test_numbers_are_text(self, call: Toolbox) -> None:
        assert (await call("write_file", path="n", content=42))["bytes_written"] == 2

    async def test_what_cannot_be_written(self, call: Toolbox) -> None:
        await call.environment.write("f", b"")
        for path in ("/", "f/g", "a\0.txt", ""):
            assert (await call("write_file", path=path, content="x"))["error"], path


class TestPatch:
    async def test_a_replacement(self, call: Toolbox) -> None:
        await call.environment.write("a.py", b"x = 1\ny = 2\n")
        result = await call("patch", mode="replace", path="a.py", old_string="y = 2", new_string="y = 3")
        assert result == {
            "success": True,
            "diff": "--- a/a.py\n+++ b/a.py\n@@ -1,2 +1,2 @@\n x = 1\n-y = 2\n+y = 3\n",
            "files_modified": ["a.py"],
            "files_created": [],
            "files_deleted": [],
        }
        assert await call.read("a.py") == b"x = 1\ny = 3\n"

    async def test_a_refused_replacement_changes_nothing(self, call: Toolbox) -> None:
        await call.environment.write("a", b"x\nx\n")
        for old in ("x", "z", ""):
            assert (await call("patch", path="a", old_string=old, new_string="y"))["error"]
        assert (await call("patch", old_string="x", new_string="y"))["error"]
        assert "no such file" in (await call("patch", path="b", old_string="x", new_string="y"))["error"].lower()
        assert await call.read("a") == b"x\nx\n"

    async def test_line_ends_and_foreign_bytes_stay(self, call: Toolbox) -> None:
        await call.environment.write("dos", b"a\r\nb\xff\r\nc\r\n")
        result = await call("patch", path="dos", old_string="a\nb", new_string="A\nx\nb")
        assert await call.read("dos") == b"A\r\nx\r\nb\xff\r\nc\r\n"
        assert " b\ufffd\n" in result["diff"]
        await call("patch", path="dos", old_string="x\r\n", new_string="")
        assert await call.read("dos") == b"A\r\nb\xff\r\nc\r\n"
        await call.environment.write("mixed", b"a\r\nb\nc\n")
        await call("patch", path="mixed", old_string="b", new_string="B")
        assert await call.read("mixed") == b"a\r\nB\nc\n"

    async def test_a_patch_over_several_files(self, call: Toolbox) -> None:
        for name, content in {"a": b"1\n2\n3\n", "gone": b"g\n", "old": b"o\np\n", "twice": b"u\nv\n"}.items():
            await call.environment.write(name, content)
        patch = (
            "*** Begin Patch\n*** Update File: a\n@@\n 1\n-2\n+two\n 3\n"
            "*** Add File: d/new\n+n\n*** Delete File: gone\n"
            "*** Update File: old\n*** Move to: moved\n-o\n+O\n*** Update File: twice\n-u\n+U\n*** Update File: twice\n"
            " U\n-v\n+V\n*** End Patch\n"
        )
        result = await call("patch", mode="patch", patch=patch)
        assert result["success"] is True
        assert result["files_modified"] == ["a", "twice"]
        assert result["files_created"] == ["d/new", "moved"]
        assert result["files_deleted"] == ["gone", "old"]
        assert await call.shell("cat a d/new moved twice; ls") == "1\ntwo\n3\nn\nO\np\nU\nV\na\nd\nmoved\ntwice\n"
        assert result["diff"].count("--- ") == 6
        assert "--- /dev/null\n+++ b/d/new\n@@ -0,0 +1 @@\n+n\n" in result["diff"]

    @pytest.mark.parametrize(
        ("last", "problem"),
        [
            ("*** Update File: a\n-nope\n+x", "a: these lines are not in the file"),
            ("*** Update File: nowhere\n-x\n+y", "nowhere: no such file"),
            ("*** Delete File: nowhere", "nowhere: no such file"),
            ("*** Add File: a\n+x", "a: the file exists already"),
            ("*** Move File: a -> b", "a: the file exists already"),
            ("*** Delete File: a\n*** Update File: a\n-1\n+2", "a: the file is deleted above"),
            ("*** Update File: a\n-1\nx", "Patch line"),
        ],
    )
    async def test_where_one_edit_does_not_fit_nothing_is_written(self, call: Toolbox, last: str, problem: str) -> None:
        await call.environment.write("a", b"1\n")
        await call.environment.write("b", b"1\n")
        patch = f"*** Begin Patch\n*** Update File: b\n-1\n+2\n{last}\n*** End Patch"
        result = await call("patch", mode="patch", patch=patch)
        assert problem in result["error"]
        assert await call.shell("cat a b") == "1\n1\n"

    async def test_a_file_that_cannot_be_written_says_what_was(self, call: Toolbox) -> None:
        await call.environment.write("a", b"1\n")
        patch = "*** Begin Patch\n*** Update File: a\n-1\n+2\n*** Add File: a/b\n+x\n*** End Patch"
        result = await call("patch", mode="patch", patch=patch)
        assert result["error"].startswith("a/b: ")
        assert result["error"].endswith("changed before it: a")

    async def test_a_move_alone_and_one_that_changes_nothing(self, call: Toolbox) -> None:
        await call.environment.write("a", b"1\r\n")
        result = await call("patch", mode="patch", patch="*** Move File: a -> d/b")
        assert (result["files_created"], result["files_deleted"]) == (["d/b"], ["a"])
        assert await call.read("d/b") == b"1\r\n"
        same = await call("patch", mode="patch", patch="*** Update File: d/b\n-1\n+1")
        assert same["error"] == "The patch changes nothing"

    async def test_a_large_file(self, call: Toolbox) -> None:
        await call.shell("seq 200000 >big")
        result = await call("patch", path="big", old_string="\n150000\n", new_string="\nhere\n")
        assert "@@ -149997,7 +149997,7 @@" in result["diff"]
        assert await call.shell("sed -n 150000p big; wc -l <big") == "here\n200000\n"


FILES = {
    "src/a.py": "import os\n\ndef first():\n    return 10\n",
    "src/deep/b.py": "def second():\n    return 20\n",
    "src/c.txt": "def in text\n",
    "it's odd:3:.py": "def odd():\n",
    ".hidden/x.py": "def hidden():\n",
    "src/.secret.py": "def secret():\n",
    "src/bin.py": "def\0binary\n",
}
PROGRAMS = ["grep -P", "grep -E", *(name for name in ("rg", "busybox") if shutil.which(name))]


@pytest.fixture
async def tree(call: Toolbox) -> Toolbox:
    """A sandbox with files."""
    for name, content in FILES.items():
        await call.environment.write(name, content.encode())
    return call


@pytest.fixture(params=PROGRAMS)
async def searched(tree: Toolbox, request: pytest.FixtureRequest) -> Toolbox:
    """A sandbox with files, and the program to search them with."""
    program = str(request.param)
    if program == "busybox":  # its grep cannot leave binary files out
        await tree.environment.delete("src/bin.py")
        await tree.shell(f"mkdir .bb; {shutil.which('busybox')} --install -s .bb; export PATH=$PWD/.bb")
        program = "grep -E"
        assert await tree.context.memory(Program).find(tree.context) == program
    tree.context.memory(Program).name = program
    return tree


class TestSearch:
    async def test_what_else_a_sandbox_says_is_no_program(self, call: Toolbox) -> None:
        await call.environment.write("bin/grep", b"#!/bin/sh\necho '; touch made'\n")
        await call.shell("chmod +x bin/grep; export PATH=$PWD/bin")
        assert await call.context.memory(Program).find(call.context) == "grep -P"
        await call.environment.write("bin/rg", b"#!/bin/sh\n")
        await call.shell("/bin/chmod +x bin/rg")
        assert await Program().find(call.context) == "rg"

    async def test_lines_by_regular_expression(self, searched: Toolbox) -> None:
        result = await searched("search_files", pattern=r"^def \w+\(")
        assert result == {
            "total_count": 3,
            "matches": [
                {"path": "it's odd:3:.py", "line": 1, "content": "def odd():"},
                {"path": "src/a.py", "line": 3, "content": "def first():"},
                {"path": "src/deep/b.py", "line": 1, "content": "def second():"},
            ],
            "truncated": False,
        }

    async def test_digits(self, searched: Toolbox) -> None:
        result = await searched("search_files", pattern=r"return \d+$", path="src")
        assert [match["content"] for match in result["matches"]] == ["    return 10", "    return 20"]

    async def test_only_files_of_a_name(self, searched: Toolbox) -> None:
        for glob, expected in {"*.txt": ["src/c.txt"], "{a,c}.*": ["src/a.py", "src/c.txt"], "*.md": []}.items():
            result = await searched("search_files", pattern="def", file_glob=glob)
            assert [match["path"] for match in result["matches"]] == expected

    async def test_files_and_counts(self, searched: Toolbox) -> None:
        files = await searched("search_files", pattern="return|def", path="src", output_mode="files_only")
        assert files == {"total_count": 3, "files": ["src/a.py", "src/c.txt", "src/deep/b.py"], "truncated": False}
        counts = await searched("search_files", pattern="return|def", path="src", output_mode="count", limit=2)
        assert counts["total_count"] == 5
        assert counts["counts"] == [{"path": "src/a.py", "count": 2}, {"path": "src/c.txt", "count": 1}]
        assert (counts["truncated"], counts["limit_reason"]) == (True, "limit")
        assert "offset=2" in counts["hint"]

    async def test_pages(self, searched: Toolbox) -> None:
        pages = [await searched("search_files", pattern="def", limit=1, offset=n) for n in range(5)]
        assert [[match["path"] for match in page["matches"]] for page in pages] == [
            ["it's odd:3:.py"],
            ["src/a.py"],
            ["src/c.txt"],
            ["src/deep/b.py"],
            [],
        ]
        assert [page["truncated"] for page in pages] == [True, True, True, False, False]
        assert {page["total_count"] for page in pages} == {4}

    async def test_lines_around(self, searched: Toolbox) -> None:
        await searched.environment.write("n", "".join(f"{n}\n" for n in range(1, 31)).encode())
        result = await searched("search_files", pattern="^(10|11|20)$", path="n", context=1, limit=2)
        assert result["total_count"] == 3
        assert result["matches"] == [
            {"path": "n", "line": 9, "content": "9", "around": True},
            {"path": "n", "line": 10, "content": "10"},
            {"path": "n", "line": 11, "content": "11"},
            {"path": "n", "line": 12, "content": "12", "around": True},
        ]

    async def test_hidden_and_single_files_where_they_are_named(self, searched: Toolbox) -> None:
        for path in (".hidden", ".hidden/x.py", "./.hidden/"):
            result = await searched("search_files", pattern="def", path=path)
            assert [match["path"] for match in result["matches"]] == [".hidden/x.py"], path

    async def test_patterns_that_look_like_something_else(self, searched: Toolbox) -> None:
        await searched.environment.write("-odd", b"-e x '$(id)' \"`id`\"\n")
        for pattern in ("-e x", r"'\$\(id\)'", '"`id`"'):
            result = await searched("search_files", pattern=pattern)
            assert [match["path"] for match in result["matches"]] == ["-odd"], pattern
        assert (await searched("search_files", pattern="x", path="-odd"))["total_count"] == 1

    async def test_errors(self, searched: Toolbox) -> None:
        assert "No such file" in (await searched("search_files", pattern="x", path="nowhere"))["error"]
        assert (await searched("search_files", pattern="(x"))["error"]
        assert (await searched("search_files", pattern=""))["error"]
        assert "NUL" in (await searched("search_files", pattern="a\0"))["error"]

    async def test_a_sandbox_that_has_nothing_to_search_with_says_so(self, tree: Toolbox) -> None:
        await tree.shell("mkdir .none; export PATH=$PWD/.none")
        for target in ("content", "files"):
            assert (await tree("search_files", pattern="def", target=target))["error"]

    async def test_long_lines_are_cut(self, tree: Toolbox) -> None:
        await tree.environment.write("long", b"needle" + b"x" * 1_000_000 + b"\n")
        (match,) = (await tree("search_files", pattern="needle"))["matches"]
        assert 500 <= len(match["content"]) < 600

    async def test_more_than_can_be_shown(self, tree: Toolbox) -> None:
        await tree.shell("mkdir many; seq 510 | while read n; do echo hit >many/$n; done")
        result = await tree("search_files", pattern="hit", limit=10**6)
        assert (len(result["matches"]), result["total_count"], result["truncated"]) == (500, 500, True)
        await tree.shell("seq 300000 >numbers")
        result = await tree("search_files", pattern="^", path="numbers")
        assert (result["limit_reason"], len(result["matches"])) == ("output", 50)


class TestNames:
    async def names(self, call: Toolbox, pattern: str, **more: Any) -> list[str]:
        result = await call("search_files", pattern=pattern, target="files", **more)
        files: list[str] = result["files"]
        assert result["total_count"] == len(files)
        return files

    async def test_names_by_glob(self, tree: Toolbox) -> None:
        assert await self.names(tree, "[ai]*.py") == ["it's odd:3:.py", "src/a.py"]
        assert await self.names(tree, "c.txt") == ["src/c.txt"]
        assert await self.names(tree, "*.{txt,md}") == ["src/c.txt"]
        assert await self.names(tree, "deep/*.py") == ["src/deep/b.py"]
        assert await self.names(tree, "src/**/?.py") == ["src/a.py", "src/deep/b.py"]
        assert await self.names(tree, "src/[!b]*.{py,txt}") == ["src/a.py", "src/c.txt"]
        assert await self.names(tree, "s*/b.py") == []
        assert await self.names(tree, "**/b.py") == ["src/deep/b.py"]
        assert await self.names(tree, "rc/a.py") == []
        assert await self.names(tree, "./src/*.txt") == ["src/c.txt"]
        assert await self.names(tree, "src/deep/**") == ["src/deep/b.py"]
        assert "glob" in (await tree("search_files", pattern="src/[z-a]*", target="files"))["error"]
        assert await self.names(tree, "b.*", path="src/deep") == ["src/deep/b.py"]
        assert await self.names(tree, "*.rs") == []

    async def test_absolute_paths(self, tree: Toolbox) -> None:
        here = (await tree.shell("pwd")).strip()
        assert await self.names(tree, "*.txt", path=here) == [posixpath.join(here, "src/c.txt")]
