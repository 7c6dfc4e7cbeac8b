from pathlib import Path

import pytest

from agent.errors import RunStopped
from batch.updating import updating

MB = 1 << 20
WHOLE = b"".join(b"%07d\n" % number for number in range(3 * MB // 8 + 5))


def update(path: Path, content: bytes, step: int = 100_000) -> None:
    with updating(path) as write:
        for start in range(0, len(content), step):
            write(content[start : start + step])


@pytest.mark.parametrize("content", [b"", b"x", WHOLE[:MB], WHOLE])
def test_a_file_that_holds_it_already_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "f"
    update(path, content)
    before = path.stat()
    update(path, content, step=3 * MB)
    assert path.read_bytes() == content
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize(
    "old",
    [
        b"",
        WHOLE + b"x",
        WHOLE[:-1],
        WHOLE[:MB],
        b"x" + WHOLE[1:],
        WHOLE[:-1] + b"x",
        WHOLE[: 2 * MB] + b"x" + WHOLE[2 * MB + 1 :],
        WHOLE[: MB + 5] + WHOLE[MB + 13 :],
    ],
)
@pytest.mark.parametrize("step", [1000, 5 * MB])
def test_any_other_file_is_replaced(tmp_path: Path, old: bytes, step: int) -> None:
    path = tmp_path / "f"
    path.write_bytes(old)
    with path.open("rb") as before:
        update(path, WHOLE, step)
        assert before.read() == old
    assert path.read_bytes() == WHOLE
    assert [each.name for each in tmp_path.iterdir()] == ["f"]


def test_a_shorter_content_replaces_a_longer_one(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for content in (WHOLE[: 2 * MB], b"", WHOLE, WHOLE[:9]):
        update(path, content)
        assert path.read_bytes() == content


def test_a_link_is_replaced_and_what_it_names_is_not_touched(tmp_path: Path) -> None:
    path, other = tmp_path / "f", tmp_path / "other"
    other.write_bytes(b"x")
    path.symlink_to(other)
    update(path, b"x")
    assert (path.is_symlink(), path.read_bytes(), other.read_bytes()) == (False, b"x", b"x")


def test_a_fault_half_way_leaves_the_file_of_before(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(WHOLE)

    def break_off() -> None:
        with updating(path) as write:
            write(WHOLE[:MB])
            write(b"x" * 2 * MB)
            raise RunStopped("interrupt", "enough")

    with pytest.raises(RunStopped, match="enough"):
        break_off()
    assert path.read_bytes() == WHOLE
    assert [each.name for each in tmp_path.iterdir()] == ["f"]


def test_a_file_cut_while_it_is_compared_is_not_taken_for_whole(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(WHOLE)

    def cut() -> None:
        with updating(path) as write:
            write(WHOLE[: 2 * MB])
            path.write_bytes(b"")
            write(WHOLE[2 * MB :])

    with pytest.raises(RunStopped, match="shorter"):
        cut()
    assert path.read_bytes() == b""
