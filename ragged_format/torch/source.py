"""Random access to the records of a source, as runs that can be gathered."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from ragged_format.arguments import list_of
from ragged_format.compact.files import CompactReader
from ragged_format.dataset import Dataset
from ragged_format.digest import digest
from ragged_format.errors import (
    OutOfRangeError,
    SchemaMismatchError,
    UnsupportedFeatureError,
    Where,
)
from ragged_format.files import FileReader
from ragged_format.lists import offsets_of
from ragged_format.local_files import local_path
from ragged_format.parse import parse_schema
from ragged_format.snapshot import Snapshot
from ragged_format.sources import open_source
from ragged_format.streams import StreamReader
from ragged_format.torch.cache import CachedDataset
from ragged_format.torch.gather import Runs
from ragged_format.torch.kept_views import DECODED_BYTES, KeptViews
from ragged_format.torch.plan import Plan, plan_of
from ragged_format.torch.stream_source import StreamShard
from ragged_format.torch.views import View, open_view

if TYPE_CHECKING:
    from ragged_format.schema import RaggedSchema

__all__ = ["Located", "Opened", "Records", "SourceLike", "join", "open_random_access"]

Int64 = npt.NDArray[np.int64]
SourceLike: TypeAlias = (
    str | os.PathLike[str] | Dataset | FileReader | pa.RecordBatch | pa.Table
    | Sequence[pa.RecordBatch] | CachedDataset
)  # fmt: skip


class Shard(Protocol):
    """Record batches that can be had by number; ``ragged_format.snapshot.ShardReader`` is one."""

    @property
    def path(self) -> Path | str | None:
        """The file, or its name, if it is one."""
        ...

    @property
    def bounds(self) -> Int64:
        """First record of each batch, and their number, (batches + 1,) int64."""
        ...

    @property
    def decodes(self) -> bool:
        """Whether batches are decoded into memory of their own."""
        ...

    def batch(self, index: int, *, keep: bool = True) -> pa.RecordBatch:
        """Return one batch; without `keep`, the caller keeps it if it is decoded."""
        ...


class Shards(Protocol):
    """What holds the shards; ``ragged_format.snapshot.Snapshot`` is one."""

    @property
    def bounds(self) -> Int64:
        """First record of each shard, and their number, (shards + 1,) int64."""
        ...

    def reader(self, number: int) -> Shard:
        """Return one shard, opening it the first time."""
        ...


class Opened(NamedTuple):
    """A source that is open.

    Attributes
    ----------
    schema : RaggedSchema
    fingerprint : str
        Identity of the content.
    shards : Shards
    """

    schema: RaggedSchema
    fingerprint: str
    shards: Shards


class _Single:
    """A file, a stream, or batches in memory, as the only shard."""

    def __init__(
        self,
        bounds: Int64,
        batch: Callable[[int], pa.RecordBatch],
        path: Path | None = None,
        *,
        decodes: bool = False,
    ) -> None:
        self.path = path
        self.bounds = bounds
        self.decodes = decodes
        self._batch = batch

    def batch(self, index: int, *, keep: bool = True) -> pa.RecordBatch:  # noqa: ARG002
        return self._batch(index)


class _Only:
    def __init__(self, shard: _Single) -> None:
        self._shard = shard
        self.bounds = shard.bounds[[0, -1]]

    def reader(self, number: int) -> _Single:  # noqa: ARG002 - there is one
        return self._shard


def open_random_access(source: SourceLike, *, verify: bool, in_order: bool = False) -> Opened:
    """Open what :class:`ragged_format.torch.RaggedLoader` accepts.

    A stream at a path is accepted where records are read `in_order`.

    Raises
    ------
    UnsupportedFeatureError
        The source can only be read from its beginning.
    SchemaMismatchError
        Batches in memory differ in schema, or there is none.
    """
    found: Any = source
    if isinstance(source, str | os.PathLike):
        found = open_source(source)
    elif isinstance(source, pa.RecordBatch):
        found = [source]
    elif isinstance(source, pa.Table):
        found = source.to_batches() or [pa.RecordBatch.from_pylist([], schema=source.schema)]
    if isinstance(found, Dataset):
        # Readers of its own: those of the caller's object belong to the caller's thread.
        shards = found.snapshot.reopened(verify=verify)
        return Opened(found.ragged_schema, shards.manifest.fingerprint, shards)
    if isinstance(found, CachedDataset):
        shards = found.snapshot(verify=verify)
        manifest = shards.manifest
        return Opened(manifest.known.ragged, manifest.fingerprint, shards)
    if isinstance(found, FileReader):
        file = FileReader(found.path, verify=verify)
        bounds = offsets_of(np.asarray(file.rows_per_batch, np.int64))
        only = _Only(_Single(bounds, file.batch, file.path))
        return Opened(found.ragged_schema, file.trailer.digest, only)
    if isinstance(found, CompactReader):
        compact = CompactReader(found.path, verify=verify)
        bounds = offsets_of(np.asarray(compact.rows_per_batch, np.int64))
        batch = partial(compact.batch, keep=False)
        only = _Only(_Single(bounds, batch, compact.path, decodes=True))
        return Opened(found.ragged_schema, compact.trailer.digest, only)
    if isinstance(found, StreamReader):
        if isinstance(source, str | os.PathLike):
            found.close()
        if in_order and isinstance(source, str | os.PathLike):
            stream = StreamShard(local_path(source), verify=verify)
            only = _Only(_Single(stream.bounds, stream.batch, stream.path, decodes=True))
            return Opened(stream.ragged_schema, stream.digest, only)
    if isinstance(found, list | tuple):
        return _in_memory(found)
    is_stream = isinstance(found, StreamReader)
    raise UnsupportedFeatureError(
        "a stream is read in order, by its path" if is_stream else
        "the source has no random access",
        expected="a dataset, a file or record batches", got=type(found).__name__,
        remedy="write it to a dataset first (rf.Writer); RaggedLoader and RaggedIterable take the "
        "path of a stream, with shuffle=False and outside a mixture",
    )  # fmt: skip


def join(parts: Sequence[Opened], fingerprint: str) -> Opened:
    """Return several sources as one whose records come source after source.

    Raises
    ------
    SchemaMismatchError
        Their schemas differ (``RF-S010``).
    """
    schema = parts[0].schema
    for number, part in enumerate(parts):
        if part.schema != schema:
            raise SchemaMismatchError(
                "the datasets of a mixture have one schema", code="RF-S010",
                expected=schema, got=f"{part.schema} (dataset {number})",
                remedy="load the columns that all have, or convert the datasets",
            )  # fmt: skip
    return Opened(schema, fingerprint, _Joined([part.shards for part in parts]))


class _Joined:
    """The shards of several sources, one after the other."""

    def __init__(self, parts: list[Shards]) -> None:
        self._parts = parts
        counts = np.array([len(part.bounds) - 1 for part in parts], np.int64)
        self._firsts = offsets_of(counts)
        self.bounds = offsets_of(np.concatenate([np.diff(part.bounds) for part in parts]))

    def reader(self, number: int) -> Shard:
        part = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return self._parts[part].reader(number - int(self._firsts[part]))

    def watch(self, on_evict: Callable[[int], None]) -> None:
        for part, first in zip(self._parts, self._firsts.tolist(), strict=False):
            _watch(part, partial(_shifted, on_evict, first))


def _shifted(on_evict: Callable[[int], None], first: int, number: int) -> None:
    on_evict(first + number)


def _watch(shards: Shards, on_evict: Callable[[int], None]) -> None:
    if isinstance(shards, _Joined):
        shards.watch(on_evict)
    elif isinstance(shards, Snapshot):
        shards.on_evict = on_evict


def _in_memory(batches: Sequence[pa.RecordBatch]) -> Opened:
    batches = list_of("batches", pa.RecordBatch, batches)
    if not batches:
        raise SchemaMismatchError(
            "at least one record batch is needed", expected=">= 1", got=0,
            remedy="pass an empty batch of the schema for no records",
        )  # fmt: skip
    schema = parse_schema(batches[0].schema)
    whole = xxhash.xxh3_128()
    for number, batch in enumerate(batches):
        other = parse_schema(batch.schema)
        if other != schema:
            raise SchemaMismatchError(
                "the batches of one source have one schema", code="RF-S010",
                where=Where(batch=number), expected=schema, got=other,
            )  # fmt: skip
        whole.update(digest(batch))
    bounds = offsets_of(np.array([batch.num_rows for batch in batches], np.int64))
    shard = _Single(bounds, batches.__getitem__)
    return Opened(schema, whole.hexdigest(), _Only(shard))


class Located(NamedTuple):
    """Where records lie: the key of their batch, and their row in it."""

    batches: list[int]
    rows: list[int]


class Records:
    """The records of a source as runs for :mod:`ragged_format.torch.gather`.

    Opens a shard, and a record batch, when one of its records is first wanted, and keeps its view.
    Not thread-safe: one thread gathers at a time.

    Parameters
    ----------
    source : Opened
    columns : iterable of str, optional
        Columns wanted. Default: all.
    max_decoded_bytes : int
        Most bytes of decoded batches that are kept, of compact shards and streams.

    Raises
    ------
    SchemaMismatchError
        A column does not exist (``RF-S003``).
    """

    def __init__(
        self,
        source: Opened,
        columns: Iterable[str] | None = None,
        *,
        max_decoded_bytes: int = DECODED_BYTES,
    ) -> None:
        schema = source.schema
        self.schema = schema
        self.plan: Plan = plan_of(schema if columns is None else schema.select(columns))
        self._shards = source.shards
        self._bounds = source.shards.bounds
        self.num_rows = int(self._bounds[-1])
        self.kept = KeptViews(max_decoded_bytes)
        self._mapped = self.kept.mapped
        # The batch that was read last: the next span mostly begins there.
        self._around = (0, 0, View(0, [], []))
        # Of the shards opened so far: the first record and the key of every batch, in order.
        self._opened: dict[int, tuple[Int64, Int64]] = {}
        self._starts: Int64 = np.zeros(0, np.int64)
        # The same starts, and those of shards, for looking up one: numpy's calls cost much more.
        self._start_list: list[int] = []
        self._shard_starts: list[int] = self._bounds[:-1].tolist()
        self._keys: Int64 = np.zeros(0, np.int64)
        self._places: list[tuple[int, int]] = []
        _watch(source.shards, self._forget)

    def locate(self, records: Int64) -> Located:
        """Return where these records, (n,) int64, lie."""
        self._open(np.unique(np.searchsorted(self._bounds, records, side="right") - 1))
        found = np.searchsorted(self._starts, records, side="right") - 1
        return Located(self._keys[found].tolist(), (records - self._starts[found]).tolist())

    def singles(self, located: Located) -> Runs:
        """Return one run for each record: for records in random order."""
        views = list(map(self.view, located.batches))
        return Runs(views, located.rows, [row + 1 for row in located.rows])

    def span(self, first: int, last: int) -> Runs:
        """Return the runs of the consecutive records ``[first, last)``, one for each batch."""
        views, firsts, lasts = runs = Runs([], [], [])
        while first < last:
            begin, end, view = self._around
            if not begin <= first < end:
                begin, view = self._batch_of(first)
                end = begin + view.num_rows
                self._around = begin, end, view
            stop = min(last, end)
            views.append(view)
            firsts.append(first - begin)
            lasts.append(stop - begin)
            first = stop
        return runs

    def _batch_of(self, record: int) -> tuple[int, View]:
        """Return the first record and the view of the batch that holds a record."""
        shard = bisect_right(self._shard_starts, record) - 1
        if shard not in self._opened:
            self._open(np.array([shard]))
        found = bisect_right(self._start_list, record) - 1
        return self._start_list[found], self.view(int(self._keys[found]))

    def view(self, key: int) -> View:
        """Return the view of one record batch."""
        view = self._mapped.get(key) or self.kept.get(key)
        if view is None:
            number, index = self._places[key]
            shard = self._shards.reader(number)
            file = None if shard.path is None else str(shard.path)
            batch = shard.batch(index, keep=False)
            view = open_view(batch, self.plan, Where(file, index))
            self.kept.add(key, view, max(1, batch.nbytes) if shard.decodes else 0)
        return view

    def _forget(self, shard: int) -> None:
        """Let go of the views of a shard that is being removed."""
        self.kept.forget(lambda key: self._places[key][0] == shard)
        self._around = (0, 0, View(0, [], []))

    def check(self, records: Int64) -> None:
        """Raise ``RF-L002`` for a record outside the source."""
        if len(records) and (records.min() < 0 or records.max() >= self.num_rows):
            bad = records[(records < 0) | (records >= self.num_rows)][0]
            raise OutOfRangeError(
                "there is no such record", expected=f"0 <= index < {self.num_rows}", got=int(bad),
                remedy="ask len() first; only dataset[-1] counts from the end",
            )  # fmt: skip

    def _open(self, shards: Int64) -> None:
        new = [number for number in shards.tolist() if number not in self._opened]
        if not new:
            return
        for number in new:
            bounds = self._shards.reader(number).bounds
            filled = np.flatnonzero(np.diff(bounds))
            keys = np.arange(len(self._places), len(self._places) + len(filled))
            self._places.extend((number, index) for index in filled.tolist())
            self._opened[number] = bounds[filled] + self._bounds[number], keys
        parts = [self._opened[number] for number in sorted(self._opened)]
        self._starts = np.concatenate([starts for starts, _ in parts])
        self._start_list = self._starts.tolist()
        self._keys = np.concatenate([keys for _, keys in parts])
