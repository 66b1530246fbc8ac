"""Files of other systems as inputs of a conversion: found, fingerprinted, and cut into ranges.

Plain JSON lines are cut at line ends, so that one file keeps several tasks busy; Parquet files and
Hugging Face datasets are cut at row groups and record batches; all else is one range a file.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from ragged_format.adapters.conversion import find_files, read_payloads
from ragged_format.digest import canonical_json, text_digest
from ragged_format.errors import ConversionError, CorruptError, JobError, Where
from ragged_format.local_files import local_path
from ragged_format.record_files import (
    STDIN,
    Line,
    find_inputs,
    is_compressed,
    is_document,
    read_lines,
    read_range,
)
from ragged_format.schema import NAMESPACE
from ragged_format.storage import is_remote

if TYPE_CHECKING:
    from ragged_format.adapters.registry import Reader

__all__ = ["ForeignFile", "ForeignInputs", "find_foreign", "first_record"]

Kind = Literal["lines", "whole", "parquet", "arrow", "own"]
PARQUET = ".parquet"
# Files that a Hugging Face dataset consists of, and where it lists them.
HF_STATE, HF_SPLITS = "state.json", "dataset_dict.json"
_CHUNK = 4 << 20
# How many times larger compressed files are when they are read, about.
EXPANSION = 4
# Rows of a table that become records at once.
_ROWS = 64


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """One file, or one directory that an adapter reads as a whole.

    Attributes
    ----------
    path : str
        Where it is on this machine.
    shown : str
        How errors and reports call it: as it was given.
    name : str
        Name for the plan, without the directories above what was given.
    kind : {"lines", "whole", "parquet", "arrow", "own"}
        How it is read: plain JSON lines; JSON otherwise; a table; by the adapter.
    """

    path: str
    shown: str
    name: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class _Range:
    """Part of a file: bytes of lines, row groups or batches of a table, or all (stop -1)."""

    start: int
    stop: int
    first_row: int
    weight: int


def find_foreign(reader: Reader, places: Sequence[str]) -> list[ForeignFile]:
    """Return the files at these places, in order; directories stand for what is in them.

    Raises
    ------
    DatasetNotFoundError
        A place does not exist or has nothing to read (``RF-C008``).
    """
    out: list[ForeignFile] = []
    for place in places:
        if is_remote(place):
            out += _remote(reader, place)
            continue
        root = local_path(place)
        place = str(root)
        if reader.payloads is not None:
            paths = find_files(reader, [place])
            out += [ForeignFile(p, p, _name(p, root), "own") for p in paths]
        elif (tables := _hf_files(root)) is not None:
            out += [ForeignFile(str(p), str(p), _name(str(p), root), "arrow") for p in tables]
        else:
            for path in find_inputs([place], (*reader.suffixes, PARQUET)):
                out.append(ForeignFile(path, path, _name(path, root), _kind(path)))
    return out


def _remote(reader: Reader, place: str) -> list[ForeignFile]:
    """Return the files at a URL: local copies that are shown as what they are copies of."""
    from ragged_pipeline.stores.copies import local_copy

    root = local_copy(place)
    found = find_foreign(reader, [str(root)])
    return [
        replace(file, shown=f"{place.rstrip('/')}/{file.name}" if root.is_dir() else place)
        for file in found
    ]


def _name(path: str, root: Path) -> str:
    return Path(path).relative_to(root).as_posix() if root.is_dir() and str(root) != path else (
        Path(path).name
    )  # fmt: skip


def _kind(path: str) -> Kind:
    if path.endswith(PARQUET):
        return "parquet"
    if path == STDIN:
        return "lines"
    with Path(path).open("rb") as file:
        head = file.read(8)
    return "whole" if is_document(path) or is_compressed(head) else "lines"


def _hf_files(root: Path) -> list[Path] | None:
    """Return the files of a dataset that Hugging Face's ``save_to_disk`` wrote, or ``None``."""
    if (root / HF_SPLITS).is_file():
        splits = _listed(root / HF_SPLITS, lambda data: data["splits"])
        return [path for split in splits for path in _hf_files(root / split) or ()]
    if not (root / HF_STATE).is_file():
        return None
    files = _listed(root / HF_STATE, lambda data: [f["filename"] for f in data["_data_files"]])
    return [root / Path(name).name for name in files]


def _listed(path: Path, pick: Callable[[Any], list[str]]) -> list[str]:
    try:
        return [str(name) for name in pick(json.loads(path.read_bytes()))]
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        raise CorruptError(
            "the description of a Hugging Face dataset is malformed", where=Where(file=str(path)),
            expected="what save_to_disk writes", got=repr(err),
        ) from err  # fmt: skip


class ForeignInputs:
    """Files of one system as the inputs of a conversion.

    Parameters
    ----------
    files : sequence of ForeignFile
    task_bytes : int
        Ranges of plain JSON lines are about this long.
    ranges : bool
        Read everything now, to fingerprint and cut it; workers need not.
    states : sequence of [size, time of change], optional
        Of the files when they were fingerprinted. Default: as they are now.
    """

    def __init__(
        self, files: Sequence[ForeignFile], *, task_bytes: int, ranges: bool = True,
        states: Sequence[Sequence[int]] | None = None,
    ) -> None:  # fmt: skip
        self.files = list(files)
        self._facts: list[tuple[str, int]] = []
        self._states = [_state(file) for file in self.files] if states is None else list(states)
        self._ranges: list[list[_Range]] = []
        for file in self.files if ranges else ():
            digest, size, parts = _examined(file, task_bytes)
            self._facts.append((digest, size))
            self._ranges.append(parts)

    def to_json(self) -> list[dict[str, Any]]:
        """Return what the plan states: names and content of all files, digested."""
        listed = [
            [file.name, file.kind, digest, size]
            for file, (digest, size) in zip(self.files, self._facts, strict=True)
        ]
        return [{
            "kind": "files", "files": len(listed), "bytes": sum(size for _, size in self._facts),
            "fingerprint": text_digest(canonical_json(listed)).hex(),
            "names": sorted({file.name for file in self.files})[:16],
        }]  # fmt: skip

    def refs(self) -> list[dict[str, Any]]:
        """Return what another process of this machine needs to open the same files."""
        return [
            {"path": f.path, "shown": f.shown, "name": f.name, "kind": f.kind, "state": list(state)}
            for f, state in zip(self.files, self._states, strict=True)
        ]

    @classmethod
    def from_refs(cls, refs: Sequence[Mapping[str, Any]]) -> ForeignInputs:
        """Open the files that :meth:`refs` describes."""
        files = [
            ForeignFile(**{key: value for key, value in ref.items() if key != "state"})
            for ref in refs
        ]
        states = [ref["state"] for ref in refs]
        return cls(files, task_bytes=1, ranges=False, states=states)

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return sum(size for _, size in self._facts)

    def tasks(self, task_bytes: int) -> tuple[list[list[list[int]]], list[int]]:
        """Group all ranges, in order, into runs of about `task_bytes`; return them and weights.

        A range is [file, start, stop, first row].
        """
        runs: list[list[list[int]]] = []
        weights: list[int] = []
        room = 0
        for number, parts in enumerate(self._ranges):
            for part in parts:
                if not runs or room < part.weight // 2:
                    runs.append([])
                    weights.append(0)
                    room = task_bytes
                runs[-1].append([number, part.start, part.stop, part.first_row])
                weights[-1] += part.weight
                room -= part.weight
        return runs, weights

    def read(
        self, ranges: Sequence[Sequence[int]], reader: Reader, advance: Callable[[int], None]
    ) -> Iterator[Line]:
        """Yield the records of ranges, each with its place."""
        for number, start, stop, first_row in ranges:
            file = self.files[number]
            if file.kind == "lines" and stop >= 0:
                yield from read_range(file.path, file.shown, start, stop, first_row, advance)
            elif file.kind in ("parquet", "arrow"):
                yield from _table_rows(file, start, stop, first_row)
                advance(0)
            elif file.kind == "own" and reader.payloads is not None:
                yield from _shown(read_payloads(reader.payloads, [file.path], advance), file)
            else:
                yield from _shown(read_lines([file.path], advance), file)
            _require_unchanged(file, self._states[number])


def _state(file: ForeignFile) -> list[int]:
    """Return size and time of change of a file; zeros for what is no file."""
    path = Path(file.path)
    if not path.is_file():
        return [0, 0]
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _require_unchanged(file: ForeignFile, known: Sequence[int]) -> None:
    """Raise if a file was changed since it was fingerprinted; lines may have been appended."""
    now = _state(file)
    if now != list(known) and not (file.kind == "lines" and now[0] > known[0]):
        raise JobError(
            "an input was changed while the job ran", where=Where(file=file.shown),
            expected=f"{known[0]} bytes, as it was", got=f"{now[0]} bytes, changed since",
            remedy="run the job again; leave its inputs as they are meanwhile",
        )  # fmt: skip


def _shown(lines: Iterator[Line], file: ForeignFile) -> Iterator[Line]:
    for line in lines:
        yield Line(Where(file=file.shown, row=line.where.row), line.record)


def _examined(file: ForeignFile, task_bytes: int) -> tuple[str, int, list[_Range]]:
    """Return fingerprint, size and ranges of a file; reads it once."""
    path = Path(file.path)
    if path.is_dir():
        return _directory_digest(path)
    if file.kind == "lines":
        with path.open("rb") as raw:
            if is_compressed(raw.read(8)):
                return _examined(ForeignFile(file.path, file.shown, file.name, "whole"), task_bytes)
            raw.seek(0)
            return _cut_lines(raw, task_bytes)
    with path.open("rb") as raw:
        digest, size = _digest_of(raw)
    if file.kind in ("parquet", "arrow"):
        return digest, size, _table_ranges(file, size, task_bytes)
    with path.open("rb") as raw:
        factor = EXPANSION if is_compressed(raw.read(8)) else 1
    return digest, size, [_Range(0, -1, 0, size * factor)]


def _digest_of(raw: IO[bytes]) -> tuple[str, int]:
    hasher, size = xxhash.xxh3_128(), 0
    while data := raw.read(_CHUNK):
        hasher.update(data)
        size += len(data)
    return hasher.hexdigest(), size


def _cut_lines(raw: IO[bytes], task_bytes: int) -> tuple[str, int, list[_Range]]:
    """Return digest, size, and ranges that begin and end at line ends, in one pass."""
    hasher = xxhash.xxh3_128()
    ranges: list[_Range] = []
    start = first_row = position = rows = 0
    while data := raw.read(_CHUNK):
        hasher.update(data)
        counted = 0
        while position + len(data) >= start + task_bytes:
            at = data.find(b"\n", max(start + task_bytes - position - 1, counted))
            if at < 0:
                break
            rows += data.count(b"\n", counted, at + 1)
            counted = at + 1
            stop = position + at + 1
            ranges.append(_Range(start, stop, first_row, stop - start))
            start, first_row = stop, rows
        rows += data.count(b"\n", counted)
        position += len(data)
    if position > start:
        ranges.append(_Range(start, position, first_row, position - start))
    return hasher.hexdigest(), position, ranges


def _directory_digest(path: Path) -> tuple[str, int, list[_Range]]:
    listed, total = [], 0
    for inner in sorted(p for p in path.rglob("*") if p.is_file()):
        with inner.open("rb") as raw:
            digest, size = _digest_of(raw)
        listed.append([inner.relative_to(path).as_posix(), digest, size])
        total += size
    return text_digest(canonical_json(listed)).hex(), total, [_Range(0, -1, 0, total)]


def _table_ranges(file: ForeignFile, size: int, task_bytes: int) -> list[_Range]:
    """Return ranges of row groups or record batches."""
    rows = _group_rows(file)
    total = max(sum(rows), 1)
    ranges: list[_Range] = []
    start = first = weight = seen = 0
    for number, count in enumerate(rows):
        weight += size * EXPANSION * count // total
        seen += count
        if weight >= task_bytes or number == len(rows) - 1:
            ranges.append(_Range(start, number + 1, first, weight))
            start, first, weight = number + 1, seen, 0
    return ranges


def _group_rows(file: ForeignFile) -> list[int]:
    try:
        if file.kind == "parquet":
            metadata = pq.ParquetFile(file.path).metadata
            return [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
        with pa.memory_map(file.path) as source:
            return [batch.num_rows for batch in pa.ipc.open_stream(source)]
    except (pa.ArrowException, OSError) as err:
        raise _broken_table(file, err) from err


def _broken_table(file: ForeignFile, err: Exception) -> CorruptError:
    return CorruptError(
        "Arrow cannot read the table", where=Where(file=file.shown),
        expected=f"{'a Parquet' if file.kind == 'parquet' else 'an Arrow'} file", got=str(err),
    )  # fmt: skip


def _table_rows(file: ForeignFile, start: int, stop: int, first_row: int) -> Iterator[Line]:
    row = first_row
    try:
        for batch in _table_batches(file, start, stop):
            for record in batch.to_pylist():
                yield Line(Where(file=file.shown, row=row), record)
                row += 1
    except (pa.ArrowException, OSError) as err:
        raise _broken_table(file, err) from err


def _table_batches(file: ForeignFile, start: int, stop: int) -> Iterator[pa.RecordBatch]:
    if file.kind == "parquet":
        yield from pq.ParquetFile(file.path).iter_batches(
            batch_size=_ROWS, row_groups=list(range(start, stop)), use_threads=False
        )
        return
    with pa.memory_map(file.path) as source:
        for number, batch in enumerate(pa.ipc.open_stream(source)):
            if number >= stop:
                return
            if number >= start:
                for offset in range(0, batch.num_rows, _ROWS):
                    yield batch.slice(offset, _ROWS)


def first_record(files: Sequence[ForeignFile]) -> Line | None:
    """Return the first row of the first file that is a table, ``None`` if that is no table."""
    if not files or files[0].kind not in ("parquet", "arrow"):
        return None
    rows = _table_rows(files[0], 0, 1 << 62 if files[0].kind == "arrow" else 1, 0)
    return next(rows, None)


def is_own_table(files: Sequence[ForeignFile]) -> bool:
    """Return whether the first file is a table that states to be of this format."""
    if not files or files[0].kind not in ("parquet", "arrow"):
        return False
    try:
        if files[0].kind == "parquet":
            schema = pq.read_schema(files[0].path)
        else:
            with pa.memory_map(files[0].path) as source:
                schema = pa.ipc.open_stream(source).schema
    except (pa.ArrowException, OSError) as err:
        raise _broken_table(files[0], err) from err
    return f"{NAMESPACE}version".encode() in (schema.metadata or {})


def spooled(raw: IO[bytes], folder: str | os.PathLike[str]) -> IO[bytes]:
    """Copy a pipe into a nameless file, which can be read more than once.

    Returns the file; it vanishes when it is closed, or with the process. Others of this machine
    reach it under ``/proc/<process>/fd/<descriptor>`` meanwhile.
    """
    file = cast("IO[bytes]", tempfile.TemporaryFile(dir=folder))  # noqa: SIM115
    try:
        shutil.copyfileobj(raw, file, _CHUNK)
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


def no_records(shown: Sequence[str]) -> ConversionError:
    """Return the error for an input without a record."""
    return ConversionError(
        "the input has no records", expected="at least one", got="none",
        where=Where(file=", ".join(shown)),
    )  # fmt: skip
