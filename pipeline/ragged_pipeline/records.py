"""Records of one task, addressed by number over all of its batches."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ragged_format.files import FileReader
from ragged_format.lists import Int64, offsets_of
from ragged_format.ragged import concat

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Records"]

# Records of this many bytes are copied faster as slices than by Arrow's take, which goes element by
# element; so are runs of more than a few.
LARGE_RECORD = 6 << 10
FEW = 4


class Records:
    """Batches, whose records are numbered through.

    Nothing is copied until records are taken; batches of hot files stay views of them.

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
    schema : pyarrow.Schema
        Theirs.
    """

    def __init__(self, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> None:
        self.schema = schema
        self._batches = [batch for batch in batches if batch.num_rows]
        rows = [batch.num_rows for batch in self._batches]
        self._bounds = offsets_of(np.array(rows, np.int64))

    @classmethod
    def of_files(cls, paths: Iterable[Path], columns: Sequence[str] | None = None) -> Records:
        """Open hot files, one after the other; there is at least one."""
        readers = [FileReader(path, columns=columns, verify=False) for path in paths]
        batches = (batch for reader in readers for batch in reader.batches())
        return cls(batches, readers[0].schema)

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def table(self, columns: Sequence[str]) -> pa.Table:
        """Return some columns of all records."""
        schema = pa.schema([self.schema.field(name) for name in columns], self.schema.metadata)
        parts = [
            pa.RecordBatch.from_arrays([batch.column(name) for name in columns], schema=schema)
            for batch in self._batches
        ]
        return pa.Table.from_batches(parts, schema=schema)

    def take(self, numbers: Int64) -> pa.RecordBatch:
        """Return records in this order as one batch: a view if they are one run of one batch."""
        if not len(numbers):
            return pa.RecordBatch.from_pylist([], schema=self.schema)
        batch = np.searchsorted(self._bounds, numbers, side="right") - 1
        rows = numbers - self._bounds[batch]
        run = (np.diff(numbers, prepend=numbers[0] - 2) != 1) | (np.diff(batch, prepend=-1) != 0)
        starts = np.flatnonzero(run)
        if len(starts) * FEW > len(numbers) and self._mean_bytes < LARGE_RECORD:
            return self._one_by_one(batch, rows)
        counts = np.diff(starts, append=len(numbers))
        parts = [
            self._batches[index].slice(row, count)
            for index, row, count in zip(
                batch[starts].tolist(), rows[starts].tolist(), counts.tolist(), strict=True
            )
        ]
        return parts[0] if len(parts) == 1 else concat(parts)

    def _one_by_one(self, batch: Int64, rows: Int64) -> pa.RecordBatch:
        """Return records that are no runs: first those of each batch, then all in their order."""
        order = np.argsort(batch, kind="stable")
        cuts = np.flatnonzero(np.diff(batch[order], prepend=-1))
        parts = [
            self._batches[int(batch[part[0]])].take(pa.array(rows[part]))
            for part in np.split(order, cuts[1:])
        ]
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return (parts[0] if len(parts) == 1 else concat(parts)).take(pa.array(back))

    @cached_property
    def _mean_bytes(self) -> float:
        return sum(batch.nbytes for batch in self._batches) / max(len(self), 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return int(self._mean_bytes * len(self))
