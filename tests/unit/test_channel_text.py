"""What comes out of a channel is taken apart rightly, wherever the bytes are cut; what goes in is quoted."""

import itertools
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tools.environments.output import BoundedText
from tools.environments.script import Trailer, escaped, listed, prelude, quote, words

NONCE = "abab12abab"
PIECES = st.lists(
    st.sampled_from([b"a", b"ab", b"abab1", b"abab12aba", b"2", b"\n", b"\0\xff", b"x" * 50]), max_size=12
)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(PIECES, PIECES, st.lists(st.integers(0, 500), max_size=20))
def test_trailer_is_found_wherever_the_stream_is_cut(
    before: list[bytes], after: list[bytes], places: list[int]
) -> None:
    payload, rest = (b"".join(pieces).replace(NONCE.encode(), b"") for pieces in (before, after))
    whole = payload + b"%s 3 0 /a\nb\n%s\n" % (NONCE.encode(), NONCE.encode()) + rest
    assume(whole.find(NONCE.encode()) == len(payload))  # no real nonce is begun by what stands before it
    trailer = Trailer(NONCE)
    seen, late = b"", b""
    for piece in cut(whole, places):
        if trailer.fields is None:
            seen += trailer.feed(piece)
        else:
            late += piece
    assert (seen, trailer.fields, trailer.rest + late) == (payload, b"3 0 /a\nb\n", rest)


@given(PIECES, st.lists(st.integers(0, 500), max_size=20))
def test_only_a_beginning_of_the_nonce_is_held_back(pieces: list[bytes], places: list[int]) -> None:
    payload = b"".join(pieces).replace(NONCE.encode(), b"")
    trailer = Trailer(NONCE)
    seen = b"".join(trailer.feed(piece) for piece in cut(payload, places))
    held = payload[len(seen) :]
    assert payload.startswith(seen)
    assert NONCE.encode().startswith(held)


@given(st.text(max_size=300), st.integers(1, 120), st.lists(st.integers(0, 1500), max_size=20))
def test_bounded_text_is_head_and_tail(text: str, limit: int, places: list[int]) -> None:
    data = text.encode("utf-8", "replace")
    clean = data.decode()
    bounded = BoundedText(limit)
    for piece in cut(data, places):
        bounded.feed(piece)
    bounded.feed(b"", final=True)
    if len(clean) <= limit:
        assert (bounded.text(), bounded.omitted) == (clean, 0)
        return
    head = int(limit * 0.4)
    left_out = len(clean) - limit
    marker = f"\n[... {left_out} characters left out ...]\n"
    assert bounded.text() == clean[:head] + marker + clean[len(clean) - (limit - head) :]
    assert bounded.omitted == left_out


@given(st.binary(max_size=200), st.lists(st.integers(0, 300), max_size=9))
def test_bytes_that_are_no_utf8_are_replaced_as_if_they_came_at_once(data: bytes, places: list[int]) -> None:
    bounded = BoundedText(10_000)
    for piece in cut(data, places):
        bounded.feed(piece)
    bounded.feed(b"", final=True)
    assert bounded.text() == data.decode("utf-8", "replace")


def test_the_shell_reads_back_what_was_quoted() -> None:
    data = bytes(range(1, 256)) + b"''\\'\n"
    shown = subprocess.run(["sh"], input=b"printf %s " + quote(data), stdout=subprocess.PIPE, check=True).stdout
    assert shown == data
    every = bytes(range(256)) + b"\\0000\\n\\c\\"
    shown = subprocess.run(
        ["sh"], input=words("printf", "%b", escaped(every)), stdout=subprocess.PIPE, check=True
    ).stdout
    assert shown == every


def _program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.parametrize("shell", ["dash", "bash", "busybox sh"])
@pytest.mark.parametrize(
    ("bash", "sh", "before", "found"),
    [
        ("#!/bin/sh\n", "", "", "bin/bash"),
        ("#!/no/such\n", "#!/bin/sh\n", "", "bin/sh"),
        ("#!/bin/sh\nexit 3\n", "#!/no/such\n", "", "/bin/sh"),
        ("", "", "command() { echo sh; }; ", "/bin/sh"),
    ],
)
def test_the_shell_of_commands_is_one_that_runs(
    shell: str, bash: str, sh: str, before: str, found: str, tmp_path: Path
) -> None:
    for name, text in {"bash": bash, "sh": sh}.items():
        if text:
            _program(tmp_path / "bin" / name, text)
    if shell == "busybox sh" and found == "bin/sh":
        found = "/bin/sh"  # it calls its own by a bare name
    assert _found(shell, before, tmp_path, f"{tmp_path}/bin") == str(tmp_path / found)


def test_a_folder_with_a_newline_names_no_shell(tmp_path: Path) -> None:
    _program(tmp_path / "a\nb" / "bash", "#!/bin/sh\n")
    assert _found("dash", "", tmp_path, f"{tmp_path}/a\nb") == "/bin/sh"
    assert _found("dash", "", tmp_path, f"{tmp_path}/a\nb:/usr/bin:/bin") in ("/bin/sh", "/usr/bin/sh")


def _found(shell: str, before: str, folder: Path, path: str) -> str:
    text = f'PATH={quote(path.encode()).decode()}\n{before}\n{prelude(f"{folder}/", "").decode()}\nprintf %s "$SHELL"'
    program, *arguments = shell.split()
    command = [shutil.which(program) or program, *arguments]
    done = subprocess.run(command, input=text.encode(), capture_output=True, check=True)
    assert not done.stderr
    return done.stdout.decode()


def test_listing_survives_names_with_newlines_and_numbers() -> None:
    output = b"81a4 3 ./a\n41ed 7 .\n41ed 4096 ./d\na1ff 5 ./81a4 3 \n1180 0 ./p\n"
    assert listed(output) == [
        (b"a\n41ed 7 .", "file", 3),
        (b"d", "directory", 4096),
        (b"81a4 3 ", "link", 5),
        (b"p", "other", 0),
    ]
    assert listed(b"") == []
