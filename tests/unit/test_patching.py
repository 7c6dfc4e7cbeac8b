"""Replacements, V4A patches and diffs, on texts."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.errors import ToolError
from tools.patching import FileChange, apply_hunks, parse_patch, replace_text, unified_diff

PROGRAM = """\
class A:
    def run(self):
        return 1

class B:
    def run(self):
        return 1
"""


def patched(text: str, *lines: str) -> str:
    (change,) = parse_patch("\n".join(["*** Begin Patch", "*** Update File: f", *lines, "*** End Patch"]))
    return apply_hunks(text, change.hunks)


class TestReplace:
    def test_literal_text(self) -> None:
        assert replace_text("a b c", "b", "B") == "a B c"
        assert replace_text("a\nb\n", "a\nb", "x") == "x\n"
        assert replace_text("a b c", " b", "") == "a c"

    def test_text_that_stands_more_than_once_is_refused_unless_all_are_meant(self) -> None:
        with pytest.raises(ToolError, match=r"stands 2 times in the file \(lines 3, 7\)"):
            replace_text(PROGRAM, "return 1", "return 2")
        assert replace_text(PROGRAM, "return 1", "return 2", replace_all=True).count("return 2") == 2

    @pytest.mark.parametrize(("old", "new"), [("", "x"), ("a", "a")])
    def test_what_is_no_edit_is_refused(self, old: str, new: str) -> None:
        with pytest.raises(ToolError):
            replace_text("a", old, new)

    def test_white_space_at_line_ends_does_not_matter(self) -> None:
        assert replace_text("a = 1  \nb = 2\t\nc\n", "a = 1\nb = 2\n", "a = 3\n") == "a = 3\nc\n"

    def test_indentation_is_taken_from_the_file(self) -> None:
        text = "if x:\n\t\tone()\n\t\ttwo()\nend\n"
        old, new = "    one()\n    two()", "    one()\n    if y:\n        three()\n\n    two()"
        assert replace_text(text, old, new) == "if x:\n\t\tone()\n\t\tif y:\n\t\t    three()\n\n\t\ttwo()\nend\n"

    def test_kept_lines_stay_as_the_file_has_them(self) -> None:
        assert replace_text("a  \nb\nc\n", "a\nb\nc", "a\nB\nc") == "a  \nB\nc\n"

    def test_quotes_dashes_and_blanks_of_another_kind(self) -> None:
        text = "say(\u201chi\u201d \u2013 there)\nnext\n"
        assert replace_text(text, 'say("hi" - there)', "say()") == "say()\nnext\n"

    def test_line_numbers_of_read_file_are_taken_off(self) -> None:
        assert replace_text("a\nb\nc\n", "1|a\n2|b", "1|a\n2|B") == "a\nB\nc\n"

    def test_lines_to_delete(self) -> None:
        assert replace_text("a\n  b \nc\n", "b\nc\n", "") == "a\n"

    def test_a_loose_match_in_two_places_is_refused_unless_all_are_meant(self) -> None:
        text = "  x \n  y\n  x \n  y\n"
        with pytest.raises(ToolError, match=r"2 times in the file \(lines 1, 3\)"):
            replace_text(text, "x\ny", "z")
        assert replace_text(text, "x\ny", "z", replace_all=True) == "  z\n  z\n"

    def test_places_that_overlap_are_replaced_once(self) -> None:
        assert replace_text(" a\n a\n a\n", "a \na", "b", replace_all=True) == " b\n a\n"

    def test_what_is_not_found_says_where_it_begins(self) -> None:
        with pytest.raises(ToolError, match="not found in the file; its first line alone stands in line 2, 6"):
            replace_text(PROGRAM, "def run(self):\n    return 3", "x")
        with pytest.raises(ToolError, match=r"not found in the file$"):
            replace_text(PROGRAM, "nowhere", "x")
        with pytest.raises(ToolError, match="not found"):
            replace_text(PROGRAM, "\n\n\n\n", "x")

    @given(st.text(max_size=40), st.text(min_size=1, max_size=5), st.text(max_size=5))
    def test_a_text_that_stands_once_is_replaced_as_str_replace_does(self, around: str, old: str, new: str) -> None:
        text = f"{around}{old}{around}"
        if text.count(old) == 1 and old != new:
            assert replace_text(text, old, new) == text.replace(old, new)


class TestParse:
    def test_every_kind_of_change(self) -> None:
        changes = parse_patch(
            "Here it is:\n*** Begin Patch\n*** Add File: new dir/a.py\n+x\n+\n+y\n*** Delete File: b\n"
            "*** Update File: c\n*** Move to: d\n@@ class A\n@@ def run\n a\n-b\n+B\n\n c\n*** End of File\n"
            "*** Move File: e -> f g\n*** End Patch\nDone."
        )
        assert [(change.kind, change.path, change.target) for change in changes] == [
            ("add", "new dir/a.py", ""),
            ("delete", "b", ""),
            ("update", "c", "d"),
            ("update", "e", "f g"),
        ]
        assert changes[0].content == "x\n\ny\n"
        (hunk,) = changes[2].hunks
        assert hunk.hints == ("class A", "def run")
        assert hunk.at_end
        assert hunk.lines == ((" ", "a"), ("-", "b"), ("+", "B"), (" ", ""), (" ", "c"))

    def test_ranges_of_unified_diffs_are_no_hints(self) -> None:
        (change,) = parse_patch(
            "*** Update File: f\n@@ -1,2 +1,2 @@ def run\n-a\n+b\n@@ -9 +9 @@\n-c\n+d\n@@ ... @@\n-e"
        )
        assert [hunk.hints for hunk in change.hunks] == [("def run",), (), ("...",)]

    def test_blank_lines_between_blocks_belong_to_none(self) -> None:
        changes = parse_patch(
            "*** Begin Patch\n\n*** Update File: f\n-a\n+b\n\n\n*** Add File: g\n+x\n\n*** End Patch\n"
        )
        assert [line for hunk in changes[0].hunks for line in hunk.lines] == [("-", "a"), ("+", "b")]
        assert changes[1] == FileChange(kind="add", path="g", content="x\n")

    @pytest.mark.parametrize(
        ("patch", "problem"),
        [
            ("", "names no file"),
            ("*** Begin Patch\n*** End Patch", "names no file"),
            ("*** Begin Patch\nhello", "Patch line 2: expected a line like"),
            ("*** Update File: f\n@@\n-a\nb", "Patch line 4: expected one of ' ', '-', '\\+'"),
            ("*** Update File: f\n*** End Patch", "Patch line 2: no change for f"),
            ("*** Add File: f\n+a\n b", "Patch line 3: expected one of '\\+'"),
        ],
    )
    def test_what_is_no_patch_is_told_by_line(self, patch: str, problem: str) -> None:
        with pytest.raises(ToolError, match=problem):
            parse_patch(patch)


class TestHunks:
    def test_a_hunk_without_hint_stands_where_it_is_the_only_one(self) -> None:
        assert patched(PROGRAM, " class A:", "-    def run(self):", "+    def go(self):").count("go") == 1
        with pytest.raises(ToolError, match=r"several places \(lines 3, 7\)"):
            patched(PROGRAM, "-        return 1", "+        return 2")

    def test_hints_say_which_place_is_meant(self) -> None:
        after = patched(PROGRAM, "@@ class B:", "@@ def run", "-        return 1", "+        return 2")
        assert after == PROGRAM[:-2] + "2\n"

    def test_a_hunk_stands_below_the_one_before(self) -> None:
        after = patched(PROGRAM, "-class B:", "+class C:", "@@", "-        return 1", "+        return 2")
        assert after == PROGRAM[:-2].replace("B", "C") + "2\n"

    def test_hunks_out_of_order_and_wrong_hints_are_forgiven_where_the_place_is_clear(self) -> None:
        assert patched("a\nb\nc\n", "-c", "+C", "@@", "-a", "+A") == "A\nb\nC\n"
        assert patched("a\nb\nc\n", "@@ def nothing", "-b", "+B") == "a\nB\nc\n"

    def test_lines_to_add_alone(self) -> None:
        assert patched("a\nb\n", "+c") == "a\nb\nc\n"
        assert patched("a\nb", "+c") == "a\nb\nc"
        assert patched("a\nb\n", "@@ a", "+c") == "a\nc\nb\n"
        with pytest.raises(ToolError, match="no line holds the hint 'z'"):
            patched("a\nb\n", "@@ z", "+c")

    def test_the_end_of_the_file(self) -> None:
        assert patched("a\nb\na\nb\n", " a", "-b", "+c", "*** End of File") == "a\nb\na\nc\n"

    def test_white_space_of_kept_lines_is_the_files(self) -> None:
        assert patched("\tif x: \n\t\tgo()\n", " if x:", "-    go()", "+    stop()") == "\tif x: \n\t    stop()\n"

    def test_lines_that_are_not_there(self) -> None:
        with pytest.raises(ToolError, match="these lines are not in the file:\nz"):
            patched(PROGRAM, "-z", "+y")


LINES = st.lists(st.sampled_from(["a", "b", "", " x", "\\", "-", "+", "@@ -1 +1 @@"]), max_size=25)


class TestDiff:
    def test_a_small_change_in_a_long_file(self) -> None:
        before = "".join(f"{n}\n" for n in range(1, 5001))
        after = before.replace("\n2500\n", "\nnew\n")
        assert unified_diff(before, after, "/tmp/f") == (
            "--- a/tmp/f\n+++ b/tmp/f\n@@ -2497,7 +2497,7 @@\n 2497\n 2498\n 2499\n-2500\n+new\n 2501\n 2502\n 2503\n"
        )

    def test_files_made_and_deleted_and_without_last_newline(self) -> None:
        assert unified_diff(None, "a\n", "f") == "--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+a\n"
        assert unified_diff("a", None, "f") == (
            "--- a/f\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n\\ No newline at end of file\n"
        )
        assert unified_diff("same\n", "same\n", "f") == ""

    @given(LINES, LINES, st.booleans(), st.booleans())
    def test_the_lines_of_a_diff_are_those_of_both_files(
        self, old: list[str], new: list[str], old_ends: bool, new_ends: bool
    ) -> None:
        before = "\n".join(old) + "\n" * old_ends
        after = "\n".join(new) + "\n" * new_ends
        assert applied(before, unified_diff(before, after, "f")) == after

    def test_patch_programs_take_it(self, tmp_path: Path) -> None:
        before = "".join(f"line {n}\n" for n in range(200))
        after = before.replace("line 50\n", "").replace("line 120\n", "line 120\nmore\n").removesuffix("\n")
        (tmp_path / "f").write_text(before)
        subprocess.run(
            ["git", "apply", "-"], input=unified_diff(before, after, "f"), text=True, cwd=tmp_path, check=True
        )
        assert (tmp_path / "f").read_text() == after


def applied(before: str, diff: str) -> str:
    """A patch program of the plainest kind, which believes the line numbers."""
    source = [f"{line}\n" for line in before.split("\n")]
    source[-1] = source[-1][:-1]
    result: list[str] = []
    at = 0
    sign = " "
    for line in diff.split("\n")[2:-1]:
        if line.startswith("@@"):
            old_range = line.split()[1][1:].split(",")
            start = int(old_range[0]) - (old_range[-1] != "0" or len(old_range) == 1)
            result += source[at:start]
            at = start
        elif line.startswith("\\"):
            result[-1:] = [line[:-1] for line in result[-1:]] if sign in " +" else result[-1:]
        elif line[0] == "+":
            result.append(f"{line[1:]}\n")
        else:
            assert source[at].rstrip("\n") == line[1:]
            if line[0] == " ":
                result.append(f"{line[1:]}\n")
            at += 1
        sign = line[0]
    return "".join(result + source[at:])
