"""Records for the server, cut into requests of bounded size and dealt to replicas."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
import zstandard

from ragged_format.errors import SchemaMismatchError
from ragged_format.lists import Int64
from ragged_format.ragged import concat, take
from ragged_format.sources import Source, open_source
from ragged_format.streams import write_stream

__all__ = ["Batches", "Parcel", "encode", "opened_batches", "parcels", "record_bytes"]


@dataclass(frozen=True, slots=True)
class Parcel:
    """The records of one request.

    Attributes
    ----------
    replica : int
        Index of the server that it goes to.
    batch : RecordBatch
    """

    replica: int
    batch: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches of one schema, and whether they are all there already and may be joined."""

    parts: Iterable[pa.RecordBatch]
    joins: bool


def opened_batches(source: Any) -> Batches:
    """Return the batches of whatever holds samples.

    Batches of an iterator or a stream go out as they come; those of a dataset, file, table or list
    may be joined.
    """
    if isinstance(source, pa.RecordBatch):
        return Batches([source], joins=True)
    if isinstance(source, pa.Table):
        return Batches(source.to_batches(), joins=True)
    if isinstance(source, list | tuple):
        return Batches(list(_batches_only(source)), joins=True)
    if isinstance(source, str | os.PathLike) or hasattr(source, "read"):
        source = open_source(source)
    if isinstance(source, Source):
        return Batches(source.batches(), joins=source.is_random_access)
    if hasattr(source, "__arrow_c_stream__"):
        return Batches(pa.RecordBatchReader.from_stream(source), joins=True)
    if isinstance(source, Iterable):
        return Batches(_batches_only(source), joins=False)
    raise SchemaMismatchError(
        "this cannot be pushed", expected="batches, or what rf.open_source opens",
        got=type(source).__name__,
    )  # fmt: skip


def _batches_only(items: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    for item in items:
        if not isinstance(item, pa.RecordBatch):
            raise SchemaMismatchError(
                "this cannot be pushed", expected="record batches in the iterable",
                got=type(item).__name__, remedy="push datasets, files and streams one by one",
            )  # fmt: skip
        yield item


def record_bytes(batch: pa.RecordBatch) -> Int64:
    """Return about how many bytes each record takes in a stream: (n,) int64.

    Examples
    --------
    >>> from ragged_format import sample_schema
    >>> schema = sample_schema(vocab_size=10, columns=[])
    >>> record = {"sample_id": "ab", "input_ids": [1, 2], "completion_mask": [0, 1]}
    >>> record_bytes(pa.RecordBatch.from_pylist([record], schema=schema)).tolist()
    [34]
    """
    size = np.zeros(batch.num_rows, np.int64)
    for column in batch.columns:
        size += _element_bytes(column)
    return size


def _element_bytes(array: pa.Array) -> Any:
    """Return the bytes of each element: (n,) or a scalar where all are equal."""
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return 6 + _lengths(array, np.int32)
    if pa.types.is_large_list(kind) or pa.types.is_large_string(kind):
        lengths = _lengths(array, np.int64)
        if not pa.types.is_large_list(kind):
            return 8 + lengths
        values = array.values
        # A mean will do where elements differ: items of members only.
        width = np.mean(_element_bytes(values)) if len(values) else 0
        return 8 + (lengths * width).astype(np.int64)
    if pa.types.is_fixed_size_list(kind):
        return kind.list_size * kind.value_type.bit_width // 8
    return -(-kind.bit_width // 8)


def _lengths(array: pa.Array, dtype: type[np.signedinteger[Any]]) -> Int64:
    offsets = np.frombuffer(array.buffers()[1] or b"", dtype)
    part = offsets[array.offset : array.offset + len(array) + 1]
    return np.diff(part).astype(np.int64) if len(part) else np.zeros(len(array), np.int64)


def parcels(
    batches: Batches, *, replicas: int, max_records: int, max_bytes: int
) -> Iterator[Parcel]:
    """Yield the records as requests, in order for each replica.

    A request has at most `max_records` records and about `max_bytes` bytes, or a single record.
    A record goes to replica ``xxh3_64(sample_id) % replicas``, always the same, because each
    replica tells duplicates for itself.
    """
    queues = [_Queue(n, max_records, max_bytes) for n in range(replicas)]
    for batch in batches.parts:
        for replica, part in _dealt(batch, replicas):
            yield from queues[replica].add(part, flush=not batches.joins)
    for queue in queues:
        yield from queue.flush()


class _Queue:
    """Records on their way to one replica."""

    def __init__(self, replica: int, max_records: int, max_bytes: int) -> None:
        self._replica = replica
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._waiting: list[pa.RecordBatch] = []
        self._records = self._bytes = 0

    def add(self, batch: pa.RecordBatch, *, flush: bool) -> Iterator[Parcel]:
        sizes = np.cumsum(record_bytes(batch))
        start = 0
        while start < batch.num_rows:
            before = int(sizes[start - 1]) if start else 0
            room = before + self._max_bytes - self._bytes
            end = int(np.searchsorted(sizes, room, side="right"))
            end = min(end, start + self._max_records - self._records, batch.num_rows)
            if end <= start and self._waiting:
                yield from self.flush()
                continue
            end = max(end, start + 1)
            self._waiting.append(batch.slice(start, end - start))
            self._records += end - start
            self._bytes += int(sizes[end - 1]) - before
            start = end
            if self._records >= self._max_records or self._bytes >= self._max_bytes:
                yield from self.flush()
        if flush:
            yield from self.flush()

    def flush(self) -> Iterator[Parcel]:
        if self._waiting:
            batch = self._waiting[0] if len(self._waiting) == 1 else concat(self._waiting)
            self._waiting, self._records, self._bytes = [], 0, 0
            yield Parcel(self._replica, batch)


def _dealt(batch: pa.RecordBatch, replicas: int) -> Iterator[tuple[int, pa.RecordBatch]]:
    if replicas == 1 or not batch.num_rows:
        yield 0, batch
        return
    if "sample_id" not in batch.schema.names:
        raise SchemaMismatchError(
            "records without sample_id cannot be dealt to replicas", expected="profile sample",
            got=", ".join(batch.schema.names),
        )  # fmt: skip
    ids = batch.column("sample_id").to_pylist()
    homes = np.array([xxhash.xxh3_64_intdigest(name.encode()) % replicas for name in ids])
    for replica in range(replicas):
        rows = np.flatnonzero(homes == replica)
        if len(rows) == batch.num_rows:
            yield replica, batch
        elif len(rows):
            yield replica, take(batch, rows)


def encode(batch: pa.RecordBatch, level: int | None) -> bytes:
    """Return a batch as a whole stream, under zstd where a level is given."""
    sink = io.BytesIO()
    write_stream(sink, batch)
    return sink.getvalue() if level is None else zstandard.compress(sink.getbuffer(), level)
