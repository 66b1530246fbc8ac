"""Engine output in files: JSON and JSON lines, plain, gzip or zstd, single or in directories.

JSON lines are read line by line. A ``.json`` file is read whole: it holds one record or a list.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import zstandard

from ragged_format.errors import (
    ConversionError,
    CorruptError,
    DatasetNotFoundError,
    LimitExceededError,
    TruncatedError,
    Where,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "STDIN",
    "Line",
    "find_inputs",
    "is_compressed",
    "is_document",
    "read_lines",
    "read_range",
    "total_bytes",
]

STDIN = "-"
MAX_LINE_BYTES = 1 << 30
_CHUNK = 1 << 18
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_COMPRESSED = ("", ".gz", ".zst")


class Line(NamedTuple):
    """One record of the input.

    Attributes
    ----------
    where : Where
        File, and index of the line or list element.
    record : bytes or object
        The JSON text of a line, or the parsed value from a ``.json`` file.
    """

    where: Where
    record: Any


def find_inputs(paths: Iterable[str], suffixes: tuple[str, ...] = JSON_SUFFIXES) -> list[str]:
    """Return the files to read: a directory stands for all such files in it, below it too, sorted.

    Parameters
    ----------
    paths : iterable of str
        Files are taken whatever their names are.
    suffixes : tuple of str
        Names of files in directories end so; those of JSON also with .gz or .zst. Empty: a
        directory is one input itself.

    Raises
    ------
    DatasetNotFoundError
        A path does not exist or a directory has no such file (``RF-C008``).
    """
    names = tuple(
        suffix + packed
        for suffix in suffixes
        for packed in (_COMPRESSED if suffix in JSON_SUFFIXES else ("",))
    )
    out = []
    for path in paths:
        if path == STDIN or Path(path).is_file() or (Path(path).is_dir() and not suffixes):
            out.append(path)
            continue
        if not Path(path).exists():
            raise DatasetNotFoundError(
                "there is no input file", where=Where(file=path), expected="a file or directory",
                got="nothing", remedy="check the path",
            )  # fmt: skip
        inside = sorted(str(p) for p in _files_in(path) if p.name.endswith(names))
        if not inside:
            raise DatasetNotFoundError(
                "the directory has no input file", where=Where(file=path),
                expected=", ".join("*" + name for name in names), got="none",
            )  # fmt: skip
        out.extend(inside)
    return out


def _files_in(directory: str) -> Iterator[Path]:
    return (path for path in Path(directory).rglob("*") if path.is_file())


def total_bytes(files: Iterable[str]) -> int | None:
    """Return the size of the files on disk, or ``None`` if stdin is one of them."""
    if STDIN in (files := list(files)):
        return None
    return sum(Path(file).stat().st_size for file in files)


def read_lines(files: Iterable[str], advance: Callable[[int], None]) -> Iterator[Line]:
    """Yield every record of the files as JSON bytes, or as the value of a ``.json`` file.

    Compression is told by the first bytes. Empty lines are skipped.

    Parameters
    ----------
    files : iterable of str
        Paths, or ``-`` for stdin.
    advance : callable
        Called with the number of bytes read since the last call.

    Raises
    ------
    ConversionError
        A ``.json`` file is not JSON.
    TruncatedError
        A compressed file ends early (``RF-C002``).
    CorruptError
        A compressed file cannot be decompressed (``RF-C001``).
    LimitExceededError
        A line is longer than 1 GiB (``RF-L001``).
    """
    for file in files:
        with nullcontext(sys.stdin.buffer) if file == STDIN else Path(file).open("rb") as raw:
            chunks = _decompressed(raw, file, advance)
            if is_document(file):
                yield from _document(b"".join(chunks), file)
            else:
                yield from _numbered(chunks, file, 0)


def read_range(
    path: str, name: str, start: int, stop: int, first_row: int, advance: Callable[[int], None]
) -> Iterator[Line]:
    """Yield the records of a part of a plain file of JSON lines; errors as :func:`read_lines`.

    Parameters
    ----------
    path, name : str
        Of the file, and how errors call it.
    start, stop : int
        Bytes; both are the beginning of a line, or the end of the file.
    first_row : int
        Lines before `start`.
    advance : callable
        Called with the number of bytes read since the last call.
    """
    with Path(path).open("rb", buffering=0) as raw:
        raw.seek(start)
        yield from _numbered(_chunks(raw, stop - start, advance), name, first_row)


def _numbered(chunks: Iterable[bytes], file: str, first_row: int) -> Iterator[Line]:
    for row, line in enumerate(_lines(chunks, file), first_row):
        if line and not line.isspace():
            yield Line(Where(file=file, row=row), line)


def _chunks(raw: IO[bytes], size: int, advance: Callable[[int], None]) -> Iterator[bytes]:
    while size > 0 and (data := raw.read(min(size, _CHUNK))):
        advance(len(data))
        size -= len(data)
        yield data


def is_document(file: str) -> bool:
    """Return whether a file holds one JSON document rather than lines, by its name."""
    return file.removesuffix(".gz").removesuffix(".zst").endswith(".json")


def is_compressed(head: bytes) -> bool:
    """Return whether a file is gzip or zstd data, by its first bytes."""
    return any(head.startswith(magic) for magic in _DECODERS)


def _decompressed(raw: IO[bytes], file: str, advance: Callable[[int], None]) -> Iterator[bytes]:
    data = raw.read(_CHUNK)
    new = next((make for magic, make in _DECODERS.items() if data.startswith(magic)), None)
    decoder: Any = None
    while data:
        advance(len(data))
        if new is None:
            yield data
        else:
            while data:  # members and frames follow each other
                decoder = decoder or new()
                try:
                    yield decoder.decompress(data)
                except (zlib.error, zstandard.ZstdError) as err:
                    raise CorruptError(
                        "the compressed input is damaged", where=Where(file=file),
                        expected="gzip or zstd data", got=err,
                    ) from err  # fmt: skip
                data = decoder.unused_data if decoder.eof else b""
                decoder = None if decoder.eof else decoder
        data = raw.read(_CHUNK)
    if decoder is not None:
        raise TruncatedError(
            "the compressed input ends early", where=Where(file=file),
            expected="the end mark of the compression", got="end of input",
        )  # fmt: skip


_DECODERS: dict[bytes, Callable[[], Any]] = {
    b"\x1f\x8b": lambda: zlib.decompressobj(wbits=31),
    b"\x28\xb5\x2f\xfd": lambda: zstandard.ZstdDecompressor().decompressobj(),
}


def _lines(chunks: Iterable[bytes], file: str) -> Iterator[bytes]:
    pieces: list[bytes] = []
    size = 0
    for chunk in chunks:
        first, *rest = chunk.split(b"\n")
        pieces.append(first)
        size += len(first)
        if size > MAX_LINE_BYTES:
            raise LimitExceededError(
                "a line is too long", where=Where(file=file),
                expected=f"at most {MAX_LINE_BYTES} bytes", got=size,
                remedy="write one record a line; a file with one record ends in .json",
            )  # fmt: skip
        if rest:
            yield b"".join(pieces)
            yield from rest[:-1]
            pieces, size = [rest[-1]], len(rest[-1])
    yield b"".join(pieces)


def _document(text: bytes, file: str) -> Iterator[Line]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise ConversionError(
            "the file is not JSON", where=Where(file=file), expected="a JSON object or list",
            got=err, remedy="name a file of one record a line .jsonl",
        ) from err  # fmt: skip
    if not isinstance(value, list):
        yield Line(Where(file=file), value)
        return
    for row, record in enumerate(value):
        yield Line(Where(file=file, row=row), record)
