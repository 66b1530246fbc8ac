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

__all__ = ["FileRecords", "Records"]

# Records of this many bytes are copied faster as slices than by Arrow's take, which goes element by
# element; so are runs of more than a few.
LARGE_RECORD = 6 << 10
FEW = 4
# Files that are mapped at once, of many.
OPEN_FILES = 64


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
        return float(sum(batch.nbytes for batch in self._batches)) / max(len(self), 1)

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return int(self._mean_bytes * len(self))


class FileRecords:
    """Records of many hot files, numbered through; a few files are open at a time.

    Parameters
    ----------
    paths : sequence of Path
    counts : sequence of int
        Records of each file.
    schema : pyarrow.Schema
        Of the records that are returned.
    columns : sequence of str, optional
        Columns of `schema`, if these are not all.
    """

    def __init__(
        self, paths: Sequence[Path], counts: Sequence[int], schema: pa.Schema,
        columns: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        self.schema = schema
        self._paths, self._columns = paths, columns
        self._bounds = offsets_of(np.array(counts, np.int64))
        self._open: dict[int, Records] = {}

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def take(self, numbers: Int64) -> pa.RecordBatch:
        """Return records in this order as one batch."""
        if not len(numbers):
            return pa.RecordBatch.from_pylist([], schema=self.schema)
        file = np.searchsorted(self._bounds, numbers, side="right") - 1
        cuts = np.flatnonzero(np.diff(file, prepend=-1))[1:]
        parts = [
            self._file(int(file[at])).take(part - self._bounds[file[at]])
            for at, part in zip([0, *cuts.tolist()], np.split(numbers, cuts), strict=True)
        ]
        return parts[0] if len(parts) == 1 else concat(parts)

    def _file(self, number: int) -> Records:
        found = self._open.pop(number, None)
        if found is None:
            if len(self._open) >= OPEN_FILES:
                self._open.pop(next(iter(self._open)))
            reader = FileReader(self._paths[number], columns=self._columns, verify=False)
            found = Records(reader.batches(), reader.schema)
        self._open[number] = found
        return found
