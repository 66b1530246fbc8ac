"""Sealed shards as parts of the log."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ragged_format.manifest import Manifest, Shard
from ragged_format.snapshot import ShardReader
from ragged_server.store.share import share_hashes

__all__ = ["SealedShard", "ShardFacts"]

# Share hashes of this many batches are remembered; a batch has about 1,024 records.
_KEPT = 2048


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """What the manifest's lineage says about a shard of the log.

    Attributes
    ----------
    first_sequence : int
        Of its first record.
    first_s, last_s : float
        Times of the first and the last commit in it, seconds since 1970.
    policy_version : int, optional
        Newest version in it.
    """

    first_sequence: int
    first_s: float
    last_s: float
    policy_version: int | None

    def to_json(self) -> list[Any]:
        """Return the entry of the lineage."""
        return [self.first_sequence, self.first_s, self.last_s, self.policy_version]


class _Hashes:
    """Share hashes of shards' batches, the last ones used."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int], npt.NDArray[np.uint64]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, shard: SealedShard, number: int) -> npt.NDArray[np.uint64]:
        key = (shard.name, number)
        with self._lock:
            out = self._kept.get(key)
            if out is not None:
                self._kept.move_to_end(key)
                return out
        out = share_hashes(shard.batch(number))
        with self._lock:
            self._kept[key] = out
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return out


_hashes = _Hashes()


class SealedShard:
    """One shard of the dataset that holds records of the log; opened when it is first read.

    Parameters
    ----------
    directory : Path
        Of the dataset.
    shard : Shard
        The manifest's entry.
    manifest : Manifest
        A manifest that lists it.
    facts : ShardFacts
    """

    def __init__(
        self, directory: Path, shard: Shard, manifest: Manifest, facts: ShardFacts
    ) -> None:
        self.name = shard.name
        self.rows = shard.rows
        self.nbytes = shard.bytes
        self.facts = facts
        self.first_sequence = facts.first_sequence
        self.end_sequence = facts.first_sequence + shard.rows
        self._source = (directory / shard.name, shard, manifest)
        self._opened: ShardReader | None = None
        self._lock = threading.Lock()

    @property
    def reader(self) -> ShardReader:
        """The open shard."""
        with self._lock:
            if self._opened is None:
                self._opened = ShardReader(*self._source, verify=True)
            return self._opened

    def find(self, sequence: int) -> int:
        """Return the number of the batch with this record."""
        row = sequence - self.first_sequence
        return int(np.searchsorted(self.reader.bounds, row, side="right")) - 1

    def place(self, number: int) -> tuple[int, int]:
        """Return first sequence and number of records of a batch."""
        bounds = self.reader.bounds
        return self.first_sequence + int(bounds[number]), int(bounds[number + 1] - bounds[number])

    def batch(self, number: int) -> pa.RecordBatch:
        """Return one batch, a view of the mapped file."""
        return self.reader.batch(number)

    def stored_message(self, number: int) -> None:  # noqa: ARG002
        """Return None: batches of files are encoded anew."""
        return

    def hashes(self, number: int) -> npt.NDArray[np.uint64]:
        """Return the share hashes of the records of a batch, (rows,)."""
        return _hashes.of(self, number)
