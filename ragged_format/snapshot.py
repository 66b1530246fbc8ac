"""The shards of one manifest: opened when first needed, checked against it, addressed by record."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import pyarrow as pa

from ragged_format.canonical import require_same
from ragged_format.compact.files import CompactReader
from ragged_format.decoding import Projection, conform
from ragged_format.errors import (
    BrokenShardError,
    CorruptError,
    DatasetNotFoundError,
    LimitExceededError,
    MissingShardError,
    NotRaggedError,
    RaggedError,
    SchemaMismatchError,
    Where,
)
from ragged_format.files import FileReader
from ragged_format.lists import Int64, offsets_of
from ragged_format.ragged import concat

if TYPE_CHECKING:
    from ragged_format.manifest import Manifest, Shard
    from ragged_format.shard_cache import ShardCache
    from ragged_format.storage import Storage

__all__ = ["Place", "ShardReader", "Snapshot", "open_cached", "resized"]


# Bytes from which copying a record as a slice is faster than Arrow's take, which goes element by
# element (measured: 4 to 7 times faster at 90 KB a record, 3 times slower at 2 KB).
LARGE_RECORD = 6 << 10
# Records per batch below which the fixed cost of a take per batch is higher, whatever their size.
FEW_RECORDS = 4


class Place(NamedTuple):
    """Where a record lies: shard, batch within it, row within that."""

    shard: int
    batch: int
    row: int


class ShardReader:
    """One shard that is the one that the manifest lists.

    Parameters
    ----------
    file : Path
        The shard, or a copy of it on this machine.
    shard : Shard
    manifest : Manifest
    verify : bool
        Compare every batch with its digest when it is first used.
    name : str, optional
        What errors call the shard when the file is a copy.

    Attributes
    ----------
    file : Path
    path : Path or str
        The file, or its name.
    nbytes : int
        Size of the file.

    Raises
    ------
    MissingShardError
        The file is not there (``RF-C006``).
    BrokenShardError
        Its size, rows or digest are not those listed, or it cannot be opened (``RF-C005``).
    """

    def __init__(
        self,
        file: Path,
        shard: Shard,
        manifest: Manifest,
        *,
        verify: bool,
        name: str | None = None,
    ) -> None:
        self.file = file
        self.path: Path | str = file if name is None else name
        self._known = manifest.known
        self._is_known = False
        self.nbytes = shard.bytes
        where = Where(file=str(self.path))
        try:
            self._check("size in bytes", shard.bytes, file.stat().st_size)
            self._file: FileReader | CompactReader = (
                CompactReader(file, verify=verify)
                if shard.encoding == "compact"
                else FileReader(file, verify=verify)
            )
        except (FileNotFoundError, DatasetNotFoundError) as err:
            raise MissingShardError(
                "a shard that the manifest lists is not there", where=where, expected=shard.name,
                got="no file", remedy="restore the file, or open the dataset anew if it was swept",
            ) from err  # fmt: skip
        except (
            CorruptError, LimitExceededError, NotRaggedError, SchemaMismatchError,
        ) as err:  # fmt: skip
            if isinstance(err, BrokenShardError):
                raise
            raise BrokenShardError(
                f"a shard cannot be opened: {err.what}", where=where, expected=err.expected,
                got=err.got, remedy="restore the file from a copy",
            ) from err  # fmt: skip
        self._check("number of records", shard.rows, self._file.num_rows)
        self._check("digest", shard.digest, self._file.trailer.digest)
        self.bounds: Int64 = offsets_of(np.array(self._file.rows_per_batch, np.int64))

    def _check(self, what: str, expected: object, got: object) -> None:
        if expected != got:
            raise BrokenShardError(
                f"the {what} of a shard is not what the manifest lists",
                where=Where(file=str(self.path)), expected=expected, got=got,
                remedy="restore the file from a copy",
            )  # fmt: skip

    @property
    def decodes(self) -> bool:
        """Whether batches are decoded into memory of their own."""
        return isinstance(self._file, CompactReader)

    def batch(self, index: int, *, keep: bool = True) -> pa.RecordBatch:
        """Return one batch under the dataset's schema, a view.

        Of decoded batches the last few are kept, unless the caller keeps what it needs.
        """
        with self._named():
            if isinstance(self._file, CompactReader):
                batch = self._file.batch(index, keep=keep)
            else:
                batch = self._file.batch(index)
        return conform(batch, self._known, Where(str(self.path), index))

    def rows(
        self, index: int, rows: Int64, projection: Projection, *, copy: bool = False
    ) -> pa.RecordBatch:
        """Return some records of a batch that is decoded, with these columns.

        No other records are decoded where they are few.

        Parameters
        ----------
        index : int
        rows : (k,) int64
            Ascending, repeats allowed; at least one.
        projection : Projection
        copy : bool
            Return nothing that keeps a whole batch in memory.
        """
        file = cast("CompactReader", self._file)
        columns = self._columns(index, projection)
        with self._named():
            batch = file.rows(index, rows, columns=columns, copy=copy)
        return pa.RecordBatch.from_arrays(batch.columns, schema=projection.schema)

    def _projected(self, index: int, projection: Projection | None) -> pa.RecordBatch:
        """Return one batch; of one that is decoded, no other columns are."""
        if projection is None:
            return self.batch(index)
        if not isinstance(self._file, CompactReader):
            return projection.apply(self.batch(index))
        columns = self._columns(index, projection)
        with self._named():
            batch = self._file.batch(index, columns=columns)
        return pa.RecordBatch.from_arrays(batch.columns, schema=projection.schema)

    def _columns(self, index: int, projection: Projection) -> tuple[str, ...] | None:
        """Return the names of columns after comparing the schema of the file."""
        if not self._is_known:
            require_same(self._known.ragged, self._file.ragged_schema, Where(str(self.path), index))
            self._is_known = True
        whole = projection.ragged is self._known.ragged
        return None if whole else tuple(projection.ragged.columns)

    def batches(
        self, *, verify: bool = False, projection: Projection | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Return an iterator over all batches, under the dataset's schema or with some columns."""
        if not verify:
            for index in range(len(self.bounds) - 1):
                yield self._projected(index, projection)
            return
        scan = self._file.scan()
        for index in itertools.count():
            with self._named():
                batch = next(scan, None)
            if batch is None:
                return
            batch = conform(batch, self._known, Where(str(self.path), index))
            yield batch if projection is None else projection.apply(batch)

    def verify(self) -> None:
        """Read everything and compare it with all digests."""
        for _ in self.batches(verify=True):
            pass

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Have errors of the file show the name of the shard instead of that of a copy."""
        try:
            yield
        except RaggedError as err:
            err.where = replace(err.where, file=str(self.path))
            raise


def open_cached(
    cache: ShardCache,
    name: str,
    fetch: Callable[[Path], object],
    shard: Shard,
    manifest: Manifest,
    *,
    verify: bool,
    label: str | None = None,
) -> ShardReader:
    """Open the copy of a shard, and check all of its content when it was just fetched.

    Parameters
    ----------
    cache : ShardCache
    name : str
        Name of the copy in the cache.
    fetch : callable
        ``fetch(path)`` copies the shard to that path.
    shard, manifest, verify
        As :class:`ShardReader` takes them.
    label : str, optional
        What errors call the shard.
    """

    def opener(path: Path, fresh: bool) -> ShardReader:  # noqa: FBT001 - the cache's contract
        reader = ShardReader(path, shard, manifest, verify=verify, name=label)
        if fresh:
            reader.verify()
        return reader

    return cache.open(name, shard.bytes, fetch, opener)


class Snapshot:
    """All shards of one manifest.

    Parameters
    ----------
    storage : Storage
        Where the shards lie.
    manifest : Manifest
        What they are.
    verify : bool
        Compare every batch with its digest when it is first used.
    opened : dict of str to ShardReader, optional
        Readers of an earlier snapshot; those that this one lists are used again.

    Attributes
    ----------
    opened : dict of str to ShardReader
        Readers by the name of their shard. Where the storage limits them, in the order of their
        last use.
    on_evict : callable, optional
        Told the number of each shard that is about to be closed to make room.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        *,
        verify: bool,
        opened: dict[str, ShardReader] | None = None,
    ) -> None:
        self.storage = storage
        self.manifest = manifest
        self.bounds: Int64 = offsets_of(np.array([s.rows for s in manifest.shards], np.int64))
        self.on_evict: Callable[[int], None] | None = None
        self._verify = verify
        self._limit = storage.max_open_bytes
        self._numbers = {shard.name: n for n, shard in enumerate(manifest.shards)}
        self.opened = {n: r for n, r in (opened or {}).items() if n in self._numbers}
        self._nbytes = sum(reader.nbytes for reader in self.opened.values())

    def reopened(self, *, verify: bool) -> Snapshot:
        """Return the same snapshot with readers of its own, for another thread."""
        return Snapshot(self.storage, self.manifest, verify=verify)

    def reader(self, number: int) -> ShardReader:
        """Return the reader of one shard, opening it if it is not open."""
        shard = self.manifest.shards[number]
        reader = self.opened.get(shard.name)
        if reader is None:
            self._make_room(shard.bytes)
            reader = self.storage.open_shard(shard, self.manifest, verify=self._verify)
            self.opened[shard.name] = reader
            self._nbytes += shard.bytes
        elif self._limit is not None and next(reversed(self.opened)) != shard.name:
            self.opened[shard.name] = self.opened.pop(shard.name)
            with suppress(FileNotFoundError):  # other processes have removed the copy
                os.utime(reader.file)
        return reader

    def _make_room(self, nbytes: int) -> None:
        """Close the shards not used for longest until so many bytes fit."""
        while self._limit is not None and self.opened and self._nbytes + nbytes > self._limit:
            name = next(iter(self.opened))
            if self.on_evict is not None:
                self.on_evict(self._numbers[name])
            self._nbytes -= self.opened.pop(name).nbytes

    def place(self, position: int) -> Place:
        """Return where a record lies."""
        number = int(np.searchsorted(self.bounds, position, side="right")) - 1
        row = position - int(self.bounds[number])
        bounds = self.reader(number).bounds
        batch = int(np.searchsorted(bounds, row, side="right")) - 1
        return Place(number, batch, row - int(bounds[batch]))

    def record(self, position: int, projection: Projection) -> pa.RecordBatch:
        """Return one record with these columns; a view where batches are."""
        shard, index, row = self.place(position)
        reader = self.reader(shard)
        if reader.decodes:
            return reader.rows(index, np.array([row]), projection)
        return projection.apply(reader.batch(index).slice(row, 1))

    def take(self, positions: Int64, projection: Projection) -> pa.RecordBatch:
        """Return records in the order of `positions`; only their batches are touched."""
        if not len(positions):
            return pa.RecordBatch.from_pylist([], schema=projection.schema)
        # Records of one batch, by ascending position.
        order = np.argsort(positions, kind="stable")
        ordered = positions[order]
        groups: list[tuple[pa.RecordBatch, Int64]] = []
        cuts = np.searchsorted(ordered, self.bounds)
        for number in np.flatnonzero(np.diff(cuts)).tolist():
            rows = ordered[cuts[number] : cuts[number + 1]] - self.bounds[number]
            reader = self.reader(number)
            inner = np.searchsorted(rows, reader.bounds)
            for index in np.flatnonzero(np.diff(inner)).tolist():
                picked = rows[inner[index] : inner[index + 1]] - reader.bounds[index]
                if reader.decodes:
                    batch = reader.rows(index, picked, projection, copy=True)
                    picked = np.arange(len(picked))
                else:
                    batch = projection.apply(reader.batch(index))
                groups.append((batch, picked))
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        in_order = bool((back[1:] > back[:-1]).all())
        first = groups[0][0]
        large = first.nbytes >= LARGE_RECORD * first.num_rows
        if in_order or large or len(positions) < FEW_RECORDS * len(groups):
            pieces = [p for batch, rows in groups for p in _pieces(batch, rows, runs=in_order)]
            return concat(pieces if in_order else [pieces[i] for i in back.tolist()])
        joined = concat([batch.take(pa.array(rows)) for batch, rows in groups])
        return joined.take(pa.array(back))

    def batches(self, projection: Projection, *, verify: bool) -> Iterator[pa.RecordBatch]:
        """Return an iterator over all batches as they are stored, views."""
        for number in range(len(self.manifest.shards)):
            yield from self.reader(number).batches(verify=verify, projection=projection)


def _pieces(batch: pa.RecordBatch, rows: Int64, *, runs: bool) -> Iterator[pa.RecordBatch]:
    """Return views of the rows: one each, or one for each run of consecutive ones."""
    starts = np.arange(len(rows))
    if runs:
        starts = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) != 1)
    counts = np.diff(starts, append=len(rows))
    for row, count in zip(rows[starts].tolist(), counts.tolist(), strict=True):
        yield batch.slice(row, count)


def resized(batches: Iterator[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
    """Return the same records in batches of `size`, the last one excepted."""
    pending: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        start = 0
        while start < batch.num_rows:
            part = batch.slice(start, size - rows)
            start += part.num_rows
            rows += part.num_rows
            pending.append(part)
            if rows == size:
                yield concat(pending)
                pending, rows = [], 0
    if pending:
        yield concat(pending)
