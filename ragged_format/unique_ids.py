"""Whether sample ids are unique over any number of records, in bounded memory.

What is compared are their hashes (:mod:`ragged_format.hash_runs`). Ids whose hashes agree are read
again and compared themselves, so that the answer is exact.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from ragged_format.compact.files import CompactReader
from ragged_format.errors import InvariantError, Where
from ragged_format.files import FileReader
from ragged_format.hash_runs import HashRuns, UInt64, id_hashes, repeated, shared
from ragged_format.shard_file import ShardFile

if TYPE_CHECKING:
    import os

    from ragged_format.dataset import Dataset
    from ragged_format.manifest import Manifest, Shard
    from ragged_format.storage import Storage

__all__ = [
    "SAMPLE_ID",
    "Ids",
    "OnDuplicate",
    "PlacedIds",
    "SeenIds",
    "TakenIds",
    "file_ids",
    "ids_of",
    "numbered",
    "require_new",
    "require_unique",
    "shard_ids",
    "source_ids",
]

# What becomes of a record whose id another one has: nothing is written, or both are kept.
OnDuplicate: TypeAlias = Literal["error", "keep"]
ON_DUPLICATE: tuple[OnDuplicate, ...] = ("error", "keep")

# Ids of many batches, each with the place of its batch, or of its first record.
PlacedIds: TypeAlias = "Iterable[tuple[Where, pa.Array]]"

SAMPLE_ID = "sample_id"


@dataclass(frozen=True)
class Ids:
    """The ids of many records: their hashes, and where they can be read again.

    Attributes
    ----------
    hashes : sequence of (n,) uint64
        Each sorted.
    read : callable
        Returns all ids with their places.
    """

    hashes: Sequence[UInt64]
    read: Callable[[], PlacedIds]


def ids_of(read: Callable[[], PlacedIds], folder: str | os.PathLike[str] | None = None) -> Ids:
    """Return the ids that a function reads, hashed; `folder` as for :class:`HashRuns`."""
    runs = HashRuns(folder)
    for _, ids in read():
        runs.add(ids)
    return Ids(runs.parts(), read)


class SeenIds:
    """Ids that come by once, to be compared at the end, in bounded memory.

    Parameters
    ----------
    again : callable, optional
        Returns all of them once more with their places. Default: they are kept in a file without a
        name, about as long as their text.
    """

    def __init__(self, again: Callable[[], PlacedIds] | None = None) -> None:
        self._runs = HashRuns()
        self._again = again
        self._places: list[Where] = []
        self._file: IO[bytes] | None = None
        self._writer: pa.RecordBatchStreamWriter | None = None

    def add(self, ids: pa.Array, where: Where) -> None:
        """Add the ids of a batch."""
        self._runs.add(ids)
        if self._again is not None:
            return
        batch = pa.record_batch([ids], [SAMPLE_ID])
        if self._file is None or self._writer is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed when this goes
            weakref.finalize(self, self._file.close)
            self._writer = pa.ipc.new_stream(self._file, batch.schema)
        self._writer.write_batch(batch)
        self._places.append(where)

    def require_unique(self) -> None:
        """Raise if two of them are the same; nothing can be added afterwards.

        Raises
        ------
        InvariantError
            With both places (``RF-I006``).
        """
        if self._writer is not None:
            self._writer.close()
        require_unique(Ids(self._runs.parts(), self._again or self._kept))

    def _kept(self) -> Iterator[tuple[Where, pa.Array]]:
        if self._file is None:
            return
        self._file.seek(0)
        batches = pa.ipc.open_stream(self._file)
        for place, batch in zip(self._places, batches, strict=True):
            yield place, batch.column(0)


def file_ids(
    path: Path, *, compact: bool, name: str | None = None
) -> Iterator[tuple[Where, pa.Array]]:
    """Yield the ids of a file of samples with the places of their batches.

    Parameters
    ----------
    path : Path
    compact : bool
        It is a compact file.
    name : str, optional
        What errors call the file.
    """
    reader = (CompactReader if compact else FileReader)(path, columns=[SAMPLE_ID], verify=False)
    for number, batch in enumerate(reader.batches()):
        yield Where(file=name or str(path), batch=number), batch.column(SAMPLE_ID)


def shard_ids(
    storage: Storage, manifest: Manifest, shards: Sequence[Shard] | None = None
) -> Iterator[tuple[Where, pa.Array]]:
    """Yield the ids of shards with the places of their batches; by default all of a manifest."""
    for shard in manifest.shards if shards is None else shards:
        reader = storage.open_shard(shard, manifest, verify=False)
        is_compact = shard.encoding == "compact"
        yield from file_ids(reader.file, compact=is_compact, name=str(reader.path))


def source_ids(
    source: Dataset | ShardFile, *, name: str | None = None
) -> Iterator[tuple[Where, pa.Array]]:
    """Yield the ids of a dataset or a file with the places of their batches.

    Parameters
    ----------
    source : Dataset, FileReader or CompactReader
    name : str, optional
        What errors call the file.
    """
    if isinstance(source, ShardFile):
        return file_ids(source.path, compact=isinstance(source, CompactReader), name=name)
    return shard_ids(source.snapshot.storage, source.snapshot.manifest)


def numbered(batches: PlacedIds, file: str) -> Iterator[tuple[Where, pa.Array]]:
    """Yield the same ids, their places counted over all batches under one name."""
    row = 0
    for _, ids in batches:
        yield Where(file=file, row=row), ids
        row += len(ids)


def require_unique(ids: Ids, *, remedy: str = "give every record its own id") -> None:
    """Raise if two records have one id.

    Parameters
    ----------
    ids : Ids
        Read again only if hashes agree.
    remedy : str, optional
        What the caller can do.

    Raises
    ------
    InvariantError
        With both places (``RF-I006``).
    """
    for suspects in repeated(ids.hashes):
        seen: dict[str, Where] = {}
        for place, sample_id in _suspects(suspects, ids.read()):
            first = seen.setdefault(sample_id, place)
            if first is not place:
                raise _twice(place, sample_id, first, remedy)


def require_new(old: Ids, new: Ids, *, remedy: str = "give every record its own id") -> None:
    """Raise if a new record has the id of an old one; parameters as of :func:`require_unique`.

    Raises
    ------
    InvariantError
        With both places (``RF-I006``).
    """
    for suspects in shared(old.hashes, new.hashes):
        there = {sample_id: place for place, sample_id in _suspects(suspects, old.read())}
        for place, sample_id in _suspects(suspects, new.read()):
            if sample_id in there:
                raise _twice(place, sample_id, there[sample_id], remedy)


def _suspects(hashes: UInt64, batches: PlacedIds) -> Iterator[tuple[Where, str]]:
    for where, ids in batches:
        rows = np.flatnonzero(np.isin(id_hashes(ids), hashes))
        for row in rows.tolist():
            place = Where(row=(where.row or 0) + row, column=SAMPLE_ID)
            yield place.inside(where), str(ids[row].as_py())


def _twice(place: Where, sample_id: str, first: Where, remedy: str) -> InvariantError:
    return InvariantError(
        "a sample_id is not unique", code="RF-I006", where=place,
        expected="an id that no other record has", got=f"{sample_id!r}, also at {first}",
        remedy=remedy,
    )  # fmt: skip


class TakenIds:
    """Whether new ids are those of no record of the dataset that they are appended to.

    Parameters
    ----------
    storage : Storage
        Of the dataset.
    new : Ids
    folder : path, optional
        As for :class:`HashRuns`.
    leaving : iterable of str, optional
        Names of shards that the commit takes from the list.
    """

    def __init__(
        self,
        storage: Storage,
        new: Ids,
        folder: str | os.PathLike[str] | None = None,
        *,
        leaving: Iterable[str] = (),
    ) -> None:
        self._storage, self._new, self._folder = storage, new, folder
        self._done = set(leaving)

    def compare(self, manifest: Manifest | None) -> None:
        """Compare with the shards of a manifest that were not compared yet.

        Raises
        ------
        InvariantError
            A new record has the id of one that is there (``RF-I006``).
        """
        if manifest is None or SAMPLE_ID not in manifest.known.ragged:
            return
        shards = [shard for shard in manifest.shards if shard.name not in self._done]
        if shards:
            old = ids_of(lambda: shard_ids(self._storage, manifest, shards), self._folder)
            require_new(
                old, self._new,
                remedy="leave out what is there already, or pass on_duplicate='keep'",
            )  # fmt: skip
            self._done |= {shard.name for shard in shards}
