"""Datasets: many immutable shards, one snapshot, random access to records.

The directory, the manifest and how a commit works are described in :mod:`ragged_format.manifest`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ragged_format.arguments import check_choice, check_size, column_names
from ragged_format.decoding import Projection
from ragged_format.errors import ManifestError, OutOfRangeError, Where
from ragged_format.manifest import Manifest
from ragged_format.snapshot import ShardReader, Snapshot, resized
from ragged_format.storage import PlaceLike, Storage, open_storage
from ragged_format.unique_ids import SAMPLE_ID, SeenIds, shard_ids
from ragged_format.validate import LEVELS, validate_batch

if TYPE_CHECKING:
    from ragged_format.lists import Int64
    from ragged_format.manifest import Shard
    from ragged_format.schema import RaggedSchema

__all__ = ["Dataset"]


class Dataset:
    """Records of all shards that the manifest lists, in order.

    Guarantees: a snapshot. Appending to the dataset, overwriting it or deleting nothing changes
    what this object returns until :meth:`refresh`. Shards are memory-mapped when they are first
    needed; batches are views of them. Objects pickle as path and snapshot, so that worker processes
    see the same data, and survive ``fork``.

    Parameters
    ----------
    path : path or ``file://`` URL
        Directory with a manifest.
    columns : sequence of str, optional
        Columns to return; the counts that their axes need come with them.
    verify : bool
        Compare every batch with its digest when it is first used.
    manifest : Manifest, optional
        Snapshot to use instead of the current one.
    storage_options : mapping, optional
        For object stores: credentials, endpoint, ``cache_dir``, ``cache_bytes`` and the like.

    Attributes
    ----------
    path : Path or str
        The place: a path, or the URL.

    Raises
    ------
    DatasetNotFoundError
        There is no manifest (``RF-C008``).
    ManifestError
        The manifest is damaged (``RF-C007``).

    Examples
    --------
    >>> import tempfile
    >>> import pyarrow as pa
    >>> import ragged_format as rf
    >>> schema = rf.sample_schema(vocab_size=10, columns=[])
    >>> rows = [
    ...     {"sample_id": name, "input_ids": [1, 2], "completion_mask": [0, 1]} for name in "abc"
    ... ]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with rf.Writer(folder, schema) as writer:
    ...         writer.write(pa.RecordBatch.from_pylist(rows, schema=schema))
    ...     dataset = Dataset(folder)
    ...     dataset.take([2, 0])["sample_id"].to_pylist()
    ['c', 'a']
    """

    is_random_access = True

    def __init__(
        self,
        path: PlaceLike,
        *,
        columns: Sequence[str] | None = None,
        verify: bool = False,
        manifest: Manifest | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._storage = open_storage(path, storage_options)
        self.path = self._storage.place
        if manifest is not None and not isinstance(manifest, Manifest):
            raise ManifestError(
                "this is no manifest", expected="a Manifest", got=type(manifest).__name__,
                remedy="leave it out: the dataset's own is read",
            )  # fmt: skip
        self._columns = column_names(columns)
        self._verify = verify
        self._adopt(self._storage.read_manifest() if manifest is None else manifest)

    def _adopt(self, manifest: Manifest, opened: dict[str, ShardReader] | None = None) -> None:
        self._snapshot = Snapshot(self._storage, manifest, verify=self._verify, opened=opened)
        self._projection = Projection(manifest.known.ragged, manifest.known.schema, self._columns)

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild = partial(_rebuild, columns=self._columns, verify=self._verify)
        return rebuild, (self._storage, self._snapshot.manifest.to_json())

    def __repr__(self) -> str:
        return (
            f"Dataset({str(self.path)!r}, rows={self.num_rows}, shards={len(self.shards)}, "
            f"generation={self.generation})"
        )

    @property
    def schema(self) -> pa.Schema:
        """Schema of the batches that are returned."""
        return self._projection.schema

    @property
    def ragged_schema(self) -> RaggedSchema:
        """Declarations of the batches that are returned."""
        return self._projection.ragged

    @property
    def num_rows(self) -> int:
        """Number of records."""
        return self._snapshot.manifest.num_rows

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The shards of the snapshot, in order."""
        return self._snapshot.manifest.shards

    @property
    def snapshot(self) -> Snapshot:
        """The shards behind this object, for readers that gather records themselves."""
        return self._snapshot

    @property
    def generation(self) -> int:
        """Number of the commit that this snapshot is."""
        return self._snapshot.manifest.generation

    @property
    def fingerprint(self) -> str:
        """Digest of schema identity and content, 32 hexadecimal digits."""
        return self._snapshot.manifest.fingerprint

    @property
    def lineage(self) -> dict[str, Any]:
        """What the writers said about where the data comes from."""
        return dict(self._snapshot.manifest.lineage)

    def __len__(self) -> int:
        return self.num_rows

    @overload
    def __getitem__(self, index: int) -> pa.RecordBatch: ...
    @overload
    def __getitem__(self, index: slice) -> pa.RecordBatch: ...
    def __getitem__(self, index: int | slice) -> pa.RecordBatch:
        """Return one record, or a slice of records, as a batch.

        One record is a view of its shard, if that is hot. Of a batch of a compact shard, only this
        record is decoded while few of the batch were asked for. Negative indices count from the
        end.

        Raises
        ------
        OutOfRangeError
            There is no such record (``RF-L002``); also an ``IndexError``.
        """
        if isinstance(index, slice):
            return self.take(range(*index.indices(self.num_rows)))
        try:
            position = operator.index(index)
        except TypeError as err:
            raise OutOfRangeError(
                "an index is an integer or a slice", where=Where(file=str(self.path)),
                expected="int or slice", got=repr(index),
                remedy="use take() for a list of indices",
            ) from err  # fmt: skip
        return self._snapshot.record(self._position(position), self._projection)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self.batches():
            for row in range(batch.num_rows):
                yield batch.slice(row, 1)

    def take(
        self, indices: npt.ArrayLike, *, columns: Sequence[str] | None = None
    ) -> pa.RecordBatch:
        """Return the records at these positions, in this order, repeats included, as one batch.

        Guarantees: a copy of these records only, unless they are one run inside one batch, which
        is a view; shards are never loaded whole. A batch of a compact shard is decoded once, and
        not whole where few of its records are asked for.

        Parameters
        ----------
        indices : (k,) int
            Positions; negative ones count from the end.
        columns : sequence of str, optional
            Fewer columns than the dataset returns.

        Raises
        ------
        OutOfRangeError
            There is no such record (``RF-L002``).
        """
        positions = self._positions(indices)
        return self._snapshot.take(positions, self._project(columns))

    def batches(
        self,
        *,
        columns: Sequence[str] | None = None,
        batch_size: int | None = None,
        verify: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """Return an iterator over all records in batches.

        Parameters
        ----------
        columns : sequence of str, optional
            Fewer columns than the dataset returns.
        batch_size : int, optional
            Records per batch, the last one excepted. By default batches are as they are stored, as
            views; of a given size they are copies where they span stored ones.
        verify : bool
            Compare every batch with its digest, and every shard with its trailer.
        """
        if batch_size is not None:
            check_size("batch_size", batch_size)
        stored = self._snapshot.batches(self._project(columns), verify=verify)
        return stored if batch_size is None else resized(stored, batch_size)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Export all records to any Arrow consumer, which reads batch by batch as it takes them.

        Guarantees: batches are views where they are views of :meth:`batches`. An error on the way
        reaches the consumer as one of its own, with this library's text.
        """
        reader = pa.RecordBatchReader.from_batches(self.schema, self.batches())
        return reader.__arrow_c_stream__(requested_schema)

    def refresh(self) -> bool:
        """Adopt the current manifest; return whether it is another generation.

        Iterators that are under way finish on the snapshot that they began with.
        """
        manifest = self._storage.read_manifest()
        if manifest.to_json() == self._snapshot.manifest.to_json():
            return False
        self._adopt(manifest, self._snapshot.opened)
        return True

    def verify(self) -> None:
        """Read everything and compare it with all digests.

        Raises
        ------
        MissingShardError, BrokenShardError, ChecksumError, CorruptError
        """
        for _ in self.batches(verify=True):
            pass

    def validate(self, level: Literal["full", "structural"] = "full") -> None:
        """Check every invariant of every batch, and that no sample id is there twice.

        Memory is bounded; ids are compared when all batches are found valid.

        Raises
        ------
        InvariantError
            With file, batch and row; for a repeated id (``RF-I006``), with both places.
        """
        check_choice("level", level, LEVELS)
        known = self._snapshot.manifest.known
        ids = None
        if level == "full" and SAMPLE_ID in known.ragged:
            snapshot = self._snapshot
            ids = SeenIds(lambda: shard_ids(snapshot.storage, snapshot.manifest))
        for number in range(len(self.shards)):
            reader = self._snapshot.reader(number)
            for index, batch in enumerate(reader.batches()):
                where = Where(file=str(reader.path), batch=index)
                validate_batch(batch, known.ragged, level, where)
                if ids is not None:
                    ids.add(batch.column(SAMPLE_ID), where)
        if ids is not None:
            ids.require_unique()

    def _project(self, columns: Sequence[str] | None) -> Projection:
        known = self._snapshot.manifest.known
        if columns is None:
            return self._projection
        columns = column_names(columns) or ()
        self.ragged_schema.select(columns)  # only columns that this object returns
        return Projection(known.ragged, known.schema, columns)

    def _position(self, index: int) -> int:
        position = index + self.num_rows if index < 0 else index
        if not 0 <= position < self.num_rows:
            raise OutOfRangeError(
                "there is no such record", where=Where(file=str(self.path)),
                expected=f"{-self.num_rows} <= index < {self.num_rows}", got=index,
                remedy="ask num_rows first",
            )  # fmt: skip
        return position

    def _positions(self, indices: npt.ArrayLike) -> Int64:
        try:
            asked = np.asarray(indices)
        except ValueError:  # nested lists of different lengths
            asked = np.asarray("lists of different lengths")
        if asked.ndim != 1 or (len(asked) and asked.dtype.kind not in "iu"):
            raise OutOfRangeError(
                "indices are a list of integers", expected="(k,) int",
                got=f"{asked.dtype} of shape {asked.shape}",
                remedy="pass a list or an array of integers",
            )  # fmt: skip
        # Compared before the cast: large unsigned integers would become negative positions.
        bad = (asked < -self.num_rows) | (asked >= self.num_rows)
        if bad.any():
            self._position(int(asked[np.argmax(bad)]))
        positions = asked.astype(np.int64)
        positions[positions < 0] += self.num_rows
        return positions


def _rebuild(
    storage: Storage, manifest: bytes, *, columns: Sequence[str] | None, verify: bool
) -> Dataset:
    return Dataset(storage, columns=columns, verify=verify, manifest=Manifest.from_json(manifest))
