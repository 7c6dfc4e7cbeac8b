"""Opens a dataset, whatever it comes in, as a seekable file of lines.

Plain JSONL is read where it is. All else is written out as lines first: to an unnamed temporary file, or, for what can
be read only once (standard input, a pipe), to a place that a resume can name.
"""

import base64
import gzip
import json
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from tools.errors import UsageProblem

_GZIP, _ZSTD, _PARQUET, _BOM = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1", b"\xef\xbb\xbf"
_CHUNK = 1 << 20


def open_lines(path: str, spool_to: Path | None) -> tuple[BinaryIO, str]:
    """The lines, and the path by which they can be opened again. Raises UsageProblem."""
    try:
        if path == "-":
            return _copied(sys.stdin.buffer, "standard input", spool_to)
        source = Path(path)
        if source.is_dir():
            raise UsageProblem(f"the dataset {path} is a directory: name a file")
        file = source.open("rb")
        if not stat.S_ISREG(source.stat().st_mode):
            with file:
                return _copied(file, path, spool_to)
        return _as_lines(file, path), _lasting_name(path)
    except OSError as error:
        raise UsageProblem(f"the dataset {path} cannot be read: {error.strerror or error}") from error


def _lasting_name(path: str) -> str:
    """/dev/stdin and its like mean another file in another process."""
    return str(Path(path).resolve()) if path.startswith(("/dev/", "/proc/")) else path


def _copied(source: IO[bytes], path: str, spool_to: Path | None) -> tuple[BinaryIO, str]:
    if spool_to is None:
        copy = _temporary()
        shutil.copyfileobj(source, copy, _CHUNK)
        return _as_lines(copy, path), path
    spool_to.parent.mkdir(parents=True, exist_ok=True)
    partial = spool_to.with_name(spool_to.name + ".tmp")
    with partial.open("wb") as file:
        shutil.copyfileobj(source, file, _CHUNK)
    partial.replace(spool_to)
    return _as_lines(spool_to.open("rb"), path), str(spool_to)


def _as_lines(file: BinaryIO, path: str) -> BinaryIO:
    """The file itself if it is plain JSONL. Compressed contents may again be any of the others."""
    try:
        lines = _rewritten(file, path)
    except BaseException:
        file.close()
        raise
    if lines is None:
        file.seek(0)
        return file
    file.close()
    return lines


def _rewritten(file: BinaryIO, path: str) -> BinaryIO | None:
    file.seek(0)
    head = file.read(16)
    file.seek(0)
    if head.startswith(_GZIP):
        return _as_lines(_expanded(_gzip_chunks(file), path), path)
    if head.startswith(_ZSTD):
        return _as_lines(_expanded(_zstd_chunks(file), path), path)
    if head.startswith(_PARQUET):
        return _written(_parquet_rows(file, path))
    if head.removeprefix(_BOM).lstrip()[:1] in (b"[", b"") and (rows := _array(file)) is not None:
        return _written(rows)
    return None


def _spooled(chunks: Iterable[bytes]) -> BinaryIO:
    file = _temporary()
    try:
        file.writelines(chunks)
    except BaseException:
        file.close()
        raise
    return file


def _temporary() -> BinaryIO:
    return cast("BinaryIO", tempfile.TemporaryFile())


def _expanded(chunks: Iterable[bytes], path: str) -> BinaryIO:
    import zstandard  # noqa: PLC0415  only for compressed datasets

    try:
        return _spooled(chunks)
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise UsageProblem(f"the dataset {path} is damaged: {error}") from error


def _gzip_chunks(file: BinaryIO) -> Iterator[bytes]:
    with gzip.open(file) as source:
        while chunk := source.read(_CHUNK):
            yield chunk


def _zstd_chunks(file: BinaryIO) -> Iterator[bytes]:
    """Frame after frame. (The package's own reader takes a file that was cut off for a whole one.)"""
    import zstandard  # noqa: PLC0415  only for .zst

    frame, chunk = zstandard.ZstdDecompressor().decompressobj(), file.read(_CHUNK)
    while chunk:
        yield frame.decompress(chunk)
        chunk = frame.unused_data or file.read(_CHUNK)
        if frame.eof and chunk:
            frame = zstandard.ZstdDecompressor().decompressobj()
    if not frame.eof:
        raise EOFError("it ends within a frame")


def _written(rows: Iterable[Any]) -> BinaryIO:
    return _spooled(json.dumps(row, default=_plain).encode() + b"\n" for row in rows)


def _array(file: BinaryIO) -> list[Any] | None:
    """The elements if the whole file is one JSON array; None for lines that only begin with a bracket."""
    first = file.readline().removeprefix(_BOM)
    if _is_json(first) and file.read(_CHUNK).strip():
        return None
    file.seek(0)
    try:
        value = json.loads(file.read().decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) else None


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _parquet_rows(file: BinaryIO, path: str) -> Iterator[Any]:
    try:
        from pyarrow import (  # type: ignore[import-untyped]  # noqa: PLC0415  an extra
            ArrowException,
            parquet,
        )
    except ImportError as error:
        raise UsageProblem(f"the dataset {path} is Parquet, which needs: pip install -e '.[parquet]'") from error
    try:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=256):
            yield from batch.to_pylist()
    except ArrowException as error:
        raise UsageProblem(f"the dataset {path} is damaged: {error}") from error


def _plain(value: Any) -> Any:
    """A Parquet value that JSON has no type for."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    raise UsageProblem(f"a value of the type {type(value).__name__} in the dataset has no form in JSON")
