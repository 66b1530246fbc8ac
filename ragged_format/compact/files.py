"""Compact files: shards in the compact encoding, for cold storage and transfer.

Byte layout: an Arrow IPC file whose buffers Arrow compresses with zstd. Each record batch has one
row, an encoded batch (:mod:`ragged_format.compact.encoder`), with the digest of the batch that it
encodes in its custom metadata; the last one is the trailer, as in hot files. The Arrow schema's
metadata says what it is:

* ``ragged_format:version``, as everywhere;
* ``ragged_format:required_features``: ``["compact"]``, so that readers of plain batches refuse it;
* ``ragged_format:compact_version``: "2";
* ``ragged_format:schema``: the Arrow schema message of the encoded data, in base64.

A whole batch is decompressed for one record; of its columns only the record is decoded.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ragged_format.arguments import check_choice, column_names
from ragged_format.compact.decoder import BatchDecoder
from ragged_format.compact.encoder import COMPACT_VERSION, encode_batch, encoded_schema
from ragged_format.compact.messages import MessageFile
from ragged_format.decoding import VALIDATIONS, Projection, Validation, conform
from ragged_format.digest import digest
from ragged_format.errors import (
    ChecksumError,
    CorruptError,
    DatasetNotFoundError,
    NotRaggedError,
    RaggedError,
    TruncatedError,
    UnsupportedFeatureError,
    Where,
)
from ragged_format.known_schemas import known_schema, read_schema_message
from ragged_format.local_files import NewFile, local_path
from ragged_format.parse import parse_versions
from ragged_format.ragged import concat
from ragged_format.schema import FORMAT_VERSION, NAMESPACE
from ragged_format.shard_file import ShardFile, ShardFileWriter
from ragged_format.soundness import check_arrays
from ragged_format.trailer import DIGEST_KEY, TRAILER_KEY, Tally, Trailer
from ragged_format.validate import validate_batch
from ragged_format.writer_state import require_open

if TYPE_CHECKING:
    from ragged_format.known_schemas import KnownSchema
    from ragged_format.lists import Int64
    from ragged_format.schema import RaggedSchema

__all__ = ["FEATURE", "CompactReader", "CompactWriter", "is_compact"]

FEATURE = "compact"
# Level 9 saves 3 % more on real rollouts, at several times the cost.
ZSTD_LEVEL = 3
_ARROW_ERRORS = (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError)
_SCHEMA_KEY = f"{NAMESPACE}schema".encode()
_FEATURES_KEY = f"{NAMESPACE}required_features".encode()
_VERSION_KEY = f"{NAMESPACE}compact_version".encode()
# Batches that a reader keeps for random access, decoded and only decompressed.
_KEPT = 2
# Records that take about as long in a whole batch as the overhead of decoding some alone.
_ALONE = 4


class CompactWriter(ShardFileWriter):
    """Write one compact file; methods, guarantees and errors as :class:`FileWriter`.

    Parameters
    ----------
    path : path
        Final name.
    schema : pyarrow.Schema
        Schema of the data.
    validate : {"full", "structural", "off"}
        What is checked of every batch. Arrow's own validity always is.
    """

    def __init__(
        self, path: str | os.PathLike[str], schema: pa.Schema, *, validate: Validation = "off"
    ) -> None:
        self.path = local_path(path)
        check_choice("validate", validate, VALIDATIONS)
        self._known = known_schema(schema)
        self._validate: Validation = validate
        self._tally = Tally()
        self._state = "open"
        self._new = NewFile(self.path)
        metadata = {
            f"{NAMESPACE}version": ".".join(map(str, FORMAT_VERSION)),
            _FEATURES_KEY.decode(): f'["{FEATURE}"]',
            _VERSION_KEY.decode(): str(COMPACT_VERSION),
            _SCHEMA_KEY.decode(): base64.b64encode(self._known.message).decode(),
        }
        self._schema = encoded_schema(self._known.ragged).with_metadata(metadata)
        options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", ZSTD_LEVEL))
        self._writer = pa.ipc.new_file(self._new.file, self._schema, options=options)

    def write(self, batch: pa.RecordBatch) -> None:
        """Encode and write one batch."""
        require_open(self._state, str(self.path))
        try:
            batch = conform(batch, self._known, Where())
            check_arrays(batch)
            if self._validate != "off":
                validate_batch(batch, self._known.ragged, self._validate, Where())
        except RaggedError as err:
            where = Where(file=str(self.path), batch=len(self._tally.rows_per_batch))
            raise err.at(where) from err.__cause__
        content = digest(batch)
        encoded = encode_batch(batch, self._known.ragged)
        encoded = pa.RecordBatch.from_arrays(encoded.columns, schema=self._schema)
        self._state = "failed"
        self._writer.write_batch(encoded, custom_metadata={DIGEST_KEY: content.hex()})
        self._tally.add(content, batch.num_rows, {})
        self._state = "open"

    def _finish(self) -> Trailer:
        trailer = self._tally.trailer(self._known.digest)
        empty = pa.RecordBatch.from_pylist([], schema=self._schema)
        self._writer.write_batch(empty, custom_metadata=trailer.to_metadata())
        self._writer.close()
        return trailer


class CompactReader(ShardFile):
    """A compact file, memory-mapped; attributes and methods as :class:`FileReader`.

    Batches are decoded when they are asked for, so that they are copies; the last few are kept.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        verify: bool = True,
    ) -> None:
        self.path = local_path(path)
        self._verify = verify
        self._columns = columns
        self._kept: dict[tuple[int, tuple[str, ...] | None], pa.RecordBatch] = {}
        self._projections: dict[tuple[str, ...], Projection] = {}
        self._opened: dict[int, tuple[BatchDecoder, int]] = {}
        try:
            self._file = _open(self.path)
            self._known = _known(self._file.schema)
            self._stored = MessageFile(self.path, self._file.schema.names)
            self.trailer = self._read_trailer()
            self._projection = Projection(self._known.ragged, self._known.schema, columns)
        except RaggedError as err:
            raise err.at(Where(file=str(self.path))) from err.__cause__

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self.path, self._columns, self._verify)

    def batch(
        self, index: int, *, keep: bool = True, columns: Sequence[str] | None = None
    ) -> pa.RecordBatch:
        """Return one batch, decoded; its digest is compared if the reader verifies.

        Parameters
        ----------
        index : int
        keep : bool
            Keep the last few, unless the caller keeps what it needs.
        columns : sequence of str, optional
            Fewer columns than the reader returns; unless it verifies, no others are decoded.
        """
        self._check_index(index)
        projection = self._narrowed(columns)
        names = self._names(projection, verify=self._verify)
        batch = self._kept.get((index, names))
        if batch is None and (index, None) in self._kept:
            return projection.apply(self._kept[index, None])
        if batch is None:
            wanted = None if names is None else projection
            batch = self._decode(index, Tally(), verify=self._verify, wanted=wanted)
            if keep:
                if len(self._kept) >= _KEPT:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[index, names] = batch
        return projection.apply(batch) if names is None else batch

    def rows(
        self,
        index: int,
        rows: Int64,
        *,
        columns: Sequence[str] | None = None,
        copy: bool = False,
    ) -> pa.RecordBatch:
        """Return some records of one batch, decoding no others where they are few.

        What was decompressed is kept for the last few batches. Once as many records were asked for
        as cost about what the batch does, and where the reader verifies, it is decoded whole.

        Parameters
        ----------
        index : int
        rows : (k,) int64
            Records, ``0 <= row < records``, ascending, repeats allowed; at least one.
        columns : sequence of str, optional
            As :meth:`batch` takes them.
        copy : bool
            Return nothing that keeps a whole batch in memory.
        """
        self._check_index(index)
        runs = [[int(rows[0]), 1]] if len(rows) == 1 else _runs(rows)
        projection = self._narrowed(columns)
        names = self._names(projection, verify=self._verify)
        is_kept = (index, names) in self._kept or (index, None) in self._kept
        decoder = None
        if not (self._verify or is_kept):
            decoder = self._few(index, len(runs), len(rows), projection.ragged)
        if decoder is None:
            whole = self.batch(index, columns=columns)
            pieces = [whole.slice(first, count) for first, count in runs]
            # One piece would be a view; with an empty second one it is copied.
            return concat([*pieces, whole.slice(0, 0)] if copy else pieces)
        try:
            wanted = projection.ragged
            parts = [decoder.batch(wanted, (first, first + count)) for first, count in runs]
            batch = concat(parts)
            batch = pa.RecordBatch.from_arrays(batch.columns, schema=projection.schema)
            check_arrays(batch)
        except RaggedError as err:
            raise err.at(Where(file=str(self.path), batch=index)) from err.__cause__
        return batch

    def _few(self, index: int, runs: int, rows: int, wanted: RaggedSchema) -> BatchDecoder | None:
        """Return what decodes records of a batch alone, None where all cost about the same."""
        decoder, asked = self._opened.get(index, (None, 0))
        asked += rows + runs * _ALONE
        if asked >= self.rows_per_batch[index]:
            return None
        if decoder is None:
            try:
                decoder = BatchDecoder(self._stored.batch(index), self._known.ragged)
                if decoder.num_rows != self.rows_per_batch[index]:
                    raise _other_rows(self.rows_per_batch[index], decoder.num_rows)
            except RaggedError as err:
                raise err.at(Where(file=str(self.path), batch=index)) from err.__cause__
            if len(self._opened) >= _KEPT:
                self._opened.pop(next(iter(self._opened)))
        self._opened[index] = decoder, asked
        return None if decoder.needs_all(wanted) else decoder

    def _narrowed(self, columns: Sequence[str] | None) -> Projection:
        names = column_names(columns)
        if names is None:
            return self._projection
        known = self._projections.get(names)
        if known is None:
            self.ragged_schema.select(names)  # only columns that this reader returns
            known = Projection(self._known.ragged, self._known.schema, names)
            self._projections[names] = known
        return known

    def _names(self, projection: Projection, *, verify: bool) -> tuple[str, ...] | None:
        """Return the columns to decode, None for all: a digest is one of all columns."""
        if verify or len(projection.ragged.columns) == len(self._known.ragged.columns):
            return None
        return tuple(projection.ragged.columns)

    def batches(self, *, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Return an iterator over all batches, with these columns only if some are named."""
        projection = self._narrowed(columns)
        if self._names(projection, verify=self._verify) is None:
            return map(projection.apply, self._scan(None, verify=self._verify))
        return self._scan(projection, verify=self._verify)

    def scan(self, *, verify: bool = True) -> Iterator[pa.RecordBatch]:
        """Return an iterator over all batches with all columns, nothing kept."""
        return self._scan(None, verify=verify)

    def _scan(self, wanted: Projection | None, *, verify: bool) -> Iterator[pa.RecordBatch]:
        tally = Tally()
        for index in range(self.num_batches):
            yield self._decode(index, tally, verify=verify, wanted=wanted)
        if verify and tally.hexdigest() != self.trailer.digest:
            raise ChecksumError(
                "the batches are not those that the trailer states",
                where=Where(file=str(self.path)), expected=self.trailer.digest,
                got=tally.hexdigest(),
            )  # fmt: skip

    def _decode(
        self, index: int, tally: Tally, *, verify: bool, wanted: Projection | None
    ) -> pa.RecordBatch:
        opened = None if verify else self._opened.pop(index, None)
        stated = b""
        try:
            if opened is None:
                stored = self._stored.batch(index)
                stated = stored.metadata.get(DIGEST_KEY, b"")
            decoder = BatchDecoder(stored, self._known.ragged) if opened is None else opened[0]
            batch = decoder.batch(None if wanted is None else wanted.ragged)
            schema = self._known.schema if wanted is None else wanted.schema
            batch = pa.RecordBatch.from_arrays(batch.columns, schema=schema)
            check_arrays(batch)
            rows = self.rows_per_batch[index]
            content = digest(batch) if verify else b""
            if verify and content.hex().encode() != stated:
                raise ChecksumError(
                    "a decoded batch does not match its digest",
                    expected=stated.decode(errors="replace"), got=content.hex(),
                )  # fmt: skip
            if batch.num_rows != rows:
                raise _other_rows(rows, batch.num_rows)
        except RaggedError as err:
            where = Where(file=str(self.path), batch=index)
            raise err.at(where) from err.__cause__
        tally.add(content, batch.num_rows, {})
        return batch

    def _read_trailer(self) -> Trailer:
        last = self._file.num_record_batches - 1
        try:
            metadata = self._file.get_batch_with_custom_metadata(last)[1] if last >= 0 else None
        except _ARROW_ERRORS as err:
            raise CorruptError(
                "Arrow cannot read the trailer", expected="a record batch", got=str(err)
            ) from err
        known = dict(metadata) if metadata else {}
        if TRAILER_KEY not in known:
            raise TruncatedError("the file has no trailer", expected="a trailer", got="none")
        trailer = Trailer.from_metadata(known)
        if trailer.batches != last or trailer.schema_digest != self._known.digest:
            raise ChecksumError(
                "the trailer is that of another file",
                expected=(trailer.batches, trailer.schema_digest),
                got=(last, self._known.digest),
            )  # fmt: skip
        return trailer


def is_compact(path: str | os.PathLike[str]) -> bool:
    """Return whether an Arrow IPC file says that it is in the compact encoding."""
    place = local_path(path)
    try:
        metadata = _open(place).schema.metadata or {}
    except RaggedError:
        return False
    return _VERSION_KEY in metadata


def _runs(rows: Int64) -> list[list[int]]:
    """Return the first row and the length of each run of consecutive rows."""
    starts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
    lengths = np.diff(starts, append=len(rows))
    return [list(run) for run in zip(rows[starts].tolist(), lengths.tolist(), strict=True)]


def _other_rows(expected: int, got: int) -> ChecksumError:
    return ChecksumError(
        "a decoded batch has not the records that the trailer states", expected=expected, got=got
    )


def _reopen(path: Path, columns: Sequence[str] | None, verify: bool) -> CompactReader:  # noqa: FBT001
    return CompactReader(path, columns=columns, verify=verify)


def _open(path: Path) -> pa.ipc.RecordBatchFileReader:
    if not path.is_file():
        raise DatasetNotFoundError(
            "there is no such file", where=Where(file=str(path)), expected="a compact file",
            got="nothing",
        )  # fmt: skip
    try:
        # One thread: readers in parallel have the cores, and small batches pay for handing over.
        options = pa.ipc.IpcReadOptions(use_threads=False)
        return pa.ipc.open_file(pa.memory_map(str(path)), options=options)
    except _ARROW_ERRORS as err:
        raise CorruptError(
            "the file is not a whole Arrow file", where=Where(file=str(path)),
            expected="an Arrow IPC file", got=str(err), remedy="restore the file from a copy",
        ) from err  # fmt: skip


def _known(schema: pa.Schema) -> KnownSchema:
    metadata = schema.metadata or {}
    if _VERSION_KEY not in metadata or _SCHEMA_KEY not in metadata:
        raise NotRaggedError(
            "the file is not in the compact encoding", expected=_VERSION_KEY.decode(),
            got=sorted(key.decode(errors="replace") for key in metadata),
        )  # fmt: skip
    own = parse_versions(schema, {FEATURE})
    if own["compact_version"] != str(COMPACT_VERSION):
        raise UnsupportedFeatureError(
            "this library does not read that version of the compact encoding",
            expected=COMPACT_VERSION, got=own["compact_version"],
            remedy="use a newer library release",
        )  # fmt: skip
    try:
        message = base64.b64decode(metadata[_SCHEMA_KEY], validate=True)
    except ValueError as err:
        raise CorruptError(
            "the schema of the encoded data is malformed", expected="base64", got=str(err)
        ) from err
    known = read_schema_message(message)
    blocks = encoded_schema(known.ragged)
    if not blocks.equals(schema):
        raise CorruptError(
            "the blocks are not those of the encoded schema", expected=blocks.names, got="others"
        )
    return known
