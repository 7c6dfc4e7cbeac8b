"""Snapshots of pages: read, made compact, cut, marked."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.browser.snapshot import (
    MAX_LINE,
    Line,
    compact,
    count_elements,
    cut,
    marks,
    parse_ref,
    parse_snapshot,
)

PAGE = """\
- generic [active] [ref=e1] [box=8,8,1264,600]:
  - heading "Lamps" [level=1] [ref=e2] [box=8,8,1264,38]
  - generic [ref=e3] [box=8,60,1264,40]:
    - generic [ref=e4] [box=8,60,600,40]:
      - text: Search
      - textbox "Search: all" [ref=e5] [box=60,60,180,20]:
        - /placeholder: a lamp
    - button "Find" [disabled] [ref=e6] [box=260,60,40,20]
  - 'link "Red: lamps [ref=e99] [box=0,0,9,9]" [ref=e7] [cursor=pointer] [box=8,110,80,20]':
    - /url: /found?q=red
  - generic [ref=e8] [cursor=pointer] [box=8,140,80,20]: press here
  - generic [ref=e9] [box=8,170,80,20]: "just: text"
  - iframe [ref=e10] [box=100,200,300,150]:
    - generic [ref=f1e1] [box=0,0,300,150]:
      - button "Inside" [ref=f1e2] [box=10,50,60,20]
  - button "Below" [ref=e11] [box=8,2000,60,20]"""


def shown(lines: list[Line]) -> str:
    return "\n".join(map(str, lines))


def test_the_whole_is_what_the_browser_said_without_boxes() -> None:
    text = shown(parse_snapshot(PAGE))
    assert "box=" not in text.replace("[box=0,0,9,9]", "")
    assert count_elements(parse_snapshot(PAGE)) == 13
    assert "        - /placeholder: a lamp" in text
    assert '- link "Red: lamps [ref=e99] [box=0,0,9,9]" [cursor=pointer] [ref=e7]:' in text


def test_compact_keeps_all_text_and_the_refs_of_what_one_acts_on() -> None:
    assert (
        shown(compact(parse_snapshot(PAGE)))
        == """\
- heading "Lamps" [level=1]
- text: Search
- textbox "Search: all" [ref=e5]:
  - /placeholder: a lamp
- button "Find" [disabled] [ref=e6]
- link "Red: lamps [ref=e99] [box=0,0,9,9]" [ref=e7]
- generic [ref=e8]: press here
- text: "just: text"
- iframe:
  - button "Inside" [ref=f1e2]
- button "Below" [ref=e11]"""
    )


def test_a_name_that_looks_like_a_ref_or_a_box_is_none() -> None:
    (line,) = [line for line in parse_snapshot(PAGE) if line.role == "link"]
    assert (line.ref, line.box) == ("e7", (8, 110, 80, 20))


def test_what_is_in_a_frame_is_placed_in_the_view() -> None:
    (inside,) = [line for line in parse_snapshot(PAGE) if line.ref == "f1e2"]
    assert inside.box == (110, 250, 60, 20)


def test_marks_are_of_what_one_acts_on_and_sees() -> None:
    assert [mark.ref for mark in marks(parse_snapshot(PAGE), 1280, 720)] == ["e5", "e6", "e7", "e8", "f1e2"]


@pytest.mark.parametrize(
    "text", ["", "\n", "- generic [ref=e1] [box=0,0,1,1]:", "no line at all", '- "unclosed [ref=e1]']
)
def test_odd_snapshots(text: str) -> None:
    lines = parse_snapshot(text)
    assert cut(lines).left_out == 0
    assert count_elements(compact(lines)) == 0


@pytest.mark.parametrize("text", ["@e12", "e12", " @e12 ", "[ref=e12]", "ref=e12"])
def test_refs(text: str) -> None:
    assert parse_ref(text) == "e12"
    assert parse_ref(text.replace("e12", "f3e12")) == "f3e12"


@pytest.mark.parametrize("text", ["", "@", "12", "@e", "e12 >> button", "@e1\n@e2", "css=a"])
def test_what_is_no_ref(text: str) -> None:
    assert parse_ref(text) == ""


def page_of(count: int, scrolled: int = 0, extra: str = "") -> list[Line]:
    """Buttons below each other, 20 pixels each, behind a heading that stays."""
    head = '- banner [ref=e0] [box=0,0,1280,10]: "stays"\n'
    rows = "\n".join(f'- button "B{n}" [ref=e{n}] [box=0,{20 * n - scrolled},80,20]' for n in range(1, count + 1))
    return parse_snapshot(f"{head}{rows}{extra}")


def test_a_short_page_is_whole_wherever_one_is() -> None:
    assert cut(page_of(20, scrolled=200)).text == shown(page_of(20))


def test_a_long_page_is_cut_behind_and_says_by_how_much() -> None:
    result = cut(page_of(2000), 2000, whole_at="/tmp/all.txt")
    lines = result.text.split("\n")
    assert len(result.text) <= 2000
    assert lines[1] == '- button "B1" [ref=e1]'
    left = 2001 - (len(lines) - 1)
    assert lines[-1] == (
        f"[... {left} lines with {left} elements below are left out: scroll down to see them, "
        "the whole is in /tmp/all.txt ...]"
    )
    assert result.left_out == left


def test_a_long_page_is_cut_around_what_is_in_view() -> None:
    hidden = '\n- link "skip" [ref=e9999] [box=-50,-50,10,10]'
    lines = cut(page_of(2000, scrolled=20_000, extra=hidden), 3000).text.split("\n")
    assert lines[0].startswith("[... 1000 lines with 1000 elements above")
    names = [int(line.split('"')[1][1:]) for line in lines[1:-1]]
    assert names[0] == 1000
    assert all(after == before + 1 for before, after in pairwise(names))


def test_the_end_of_a_long_page_fills_what_there_is_room_for() -> None:
    text = cut(page_of(2000, scrolled=39_900), 3000).text
    assert text.endswith('- button "B2000" [ref=e2000]')
    assert 2400 < len(text) <= 3000


def test_a_line_that_is_too_long_is_cut() -> None:
    text = cut(parse_snapshot(f"- paragraph [ref=e1] [box=0,0,1,1]: {'x' * 50_000}")).text
    assert len(text) == MAX_LINE
    assert text.endswith("… [line cut]")


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(-5000, 5000)), max_size=80), st.integers(600, 3000))
def test_cutting_stays_within_the_limit_and_counts_every_element(rows: list[tuple[int, int]], limit: int) -> None:
    lines = [
        Line(depth=0, role="button", name=f' "{"n" * size}"', ref=f"e{place}", box=(0, top, 10, 10))
        for place, (size, top) in enumerate(rows)
    ]
    result = cut(lines, limit)
    assert len(result.text) <= limit
    assert result.left_out + result.text.count("[ref=") == len(lines)


@given(st.text(max_size=300))
def test_any_text_is_read(text: str) -> None:
    lines = parse_snapshot(text)
    assert len(compact(lines)) <= len(lines)
    marks(lines, 1280, 720)
