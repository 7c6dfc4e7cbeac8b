"""The part of a file that `read_file` keeps, whatever the chunks its bytes come in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.files import LINE_CUT, Window


def window(data: bytes, offset: int = 1, limit: int = 500, chunk: int = 65_536) -> Window:
    result = Window(offset, limit)
    for at in range(0, len(data), chunk):
        result.feed(data[at : at + chunk])
    result.end()
    return result


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"", []),
        (b"a", ["1|a"]),
        (b"a\n", ["1|a"]),
        (b"a\n\n", ["1|a", "2|"]),
        (b"\n", ["1|"]),
        (b"a\r\nb\r\n", ["1|a", "2|b"]),
        ("a\u2028b\x0cc\x85\n".encode(), ["1|a\u2028b\x0cc\x85"]),
        (b"\xff\xe2\x82\n", ["1|\ufffd\ufffd"]),
    ],
)
def test_real_lines_only(data: bytes, shown: list[str]) -> None:
    found = window(data)
    assert found.shown == shown
    assert found.total_lines == len(shown)
    assert found.size == len(data)
    assert not found.cut_by


@given(
    lines=st.lists(st.text(st.characters(exclude_characters="\n\r\0", codec="utf-8"), max_size=6), max_size=30),
    ends=st.booleans(),
    offset=st.integers(1, 35),
    limit=st.integers(1, 35),
    chunk=st.integers(1, 20),
)
def test_any_window_in_any_chunks(lines: list[str], ends: bool, offset: int, limit: int, chunk: int) -> None:
    data = "\n".join(lines).encode() + b"\n" * (ends and bool(lines))
    if data and not ends and not lines[-1]:
        lines = lines[:-1]  # an empty last line without its newline is no line
    found = window(data, offset, limit, chunk)
    real = lines if data else []
    assert found.total_lines == len(real)
    assert found.size == len(data)
    assert found.shown == [f"{n}|{text}" for n, text in enumerate(real, 1)][offset - 1 : offset - 1 + limit]
    assert found.cut_by == ("lines" if offset - 1 + limit < len(real) else "")
    assert found.next_line == offset + len(found.shown)


@pytest.mark.parametrize("chunk", [1_000, 65_536, 10**7])
def test_long_lines_are_cut_and_cost_no_memory(chunk: int) -> None:
    data = ("€" * 2_000 + "\n" + "€" * 2_001 + "\n" + "x" * 1_000_000).encode()
    found = window(data, chunk=chunk)
    assert found.shown == ["1|" + "€" * 2_000, "2|" + "€" * 2_000 + LINE_CUT, "3|" + "x" * 2_000 + LINE_CUT]
    assert found.total_lines == 3


def test_a_read_ends_at_a_line_before_100000_characters() -> None:
    found = window(b"x" * 999 + b"\n" + (b"y" * 999 + b"\n") * 999, limit=2_000)
    assert found.cut_by == "characters"
    assert found.total_lines == 1_000
    assert 99_000 < len("\n".join(found.shown)) <= 100_000
    assert found.next_line == len(found.shown) + 1


@pytest.mark.parametrize(
    ("data", "image"),
    [
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", True),
        (b"\xff\xd8\xff\xe0\0\x10JFIF", True),
        (b"GIF89a\1\0\1\0", True),
        (b"RIFF\x10\0\0\0WEBPVP8 ", True),
        (b"BM\x46\0\0\0", True),
        (b"\x7fELF\2\1\1\0", False),
        (b"text\0", False),
        ("utf-16".encode("utf-16"), False),
    ],
)
@pytest.mark.parametrize("chunk", [1, 65_536])
def test_binary_files_and_images_are_told_and_not_shown(data: bytes, image: bool, chunk: int) -> None:
    found = window(data + b"\n" * 9000, chunk=chunk)
    assert (found.binary, found.image) == (True, image)
    assert (found.shown, found.total_lines, found.size) == ([], 0, len(data) + 9000)


def test_text_that_begins_like_an_image_is_text() -> None:
    assert window(b"BMW\n").shown == ["1|BMW"]
    assert window(b"GIF89a is a format\n").shown == ["1|GIF89a is a format"]
