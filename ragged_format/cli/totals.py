"""How many elements every axis has, summed over batches, and how the counts are distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ragged_format.cli.histogram import Counts
from ragged_format.lists import flat
from ragged_format.schema import RECORD, Column, RaggedSchema

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Totals"]


class Totals:
    """Elements of each axis over all batches added.

    Attributes
    ----------
    elements : dict of str to int
        By axis, records included; a root axis without columns is absent.
    counts : dict of str to Counts
        By axis that a counts column opens, masks excepted.
    """

    def __init__(self, schema: RaggedSchema) -> None:
        self._from: dict[str, str] = {}
        self.elements = {RECORD: 0}
        self.counts: dict[str, Counts] = {}
        for axis in schema.axes.values():
            if axis.counts is not None:
                self._from[axis.name] = axis.counts
                if not axis.mask:
                    self.counts[axis.name] = Counts()
            elif on_axis := schema.on(axis.name):
                # The narrowest column states the length as well as any other.
                self._from[axis.name] = min(on_axis, key=_bytes_per_element).name
        self._opened = {axis.name for axis in schema.axes.values() if axis.counts is not None}
        self.elements |= dict.fromkeys(self._from, 0)

    @property
    def columns(self) -> list[str]:
        """The columns that :meth:`add` reads."""
        return sorted(set(self._from.values()))

    def add(self, batch: pa.RecordBatch) -> None:
        """Add a batch that has at least :attr:`columns`."""
        self.elements[RECORD] += batch.num_rows
        for axis, name in self._from.items():
            column = flat(batch.column(name))
            if axis not in self._opened:
                self.elements[axis] += len(column.values)
                continue
            counts = column.numpy()
            self.elements[axis] += int(counts.sum(dtype=np.int64))
            if axis in self.counts:
                self.counts[axis].add(counts)

    def to_json(self) -> dict[str, Any]:
        """Return records, tokens and targets, and the elements of every axis by its name."""
        return {
            "records": self.elements[RECORD],
            "tokens": self.elements.get("token", 0),
            "targets": self.elements.get("target", 0),
            "elements": self.elements,
        }


def _bytes_per_element(column: Column) -> int:
    is_number = column.fill is not None
    return column.width * (int(column.type.bit_width) if is_number else 1 << 20)
