"""Token-axis columns of a packed row, where members that share a token may differ or lack it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ragged_format.lists import Int64, flat, offsets_of, ranges, segment_sums, to_numpy
from ragged_format.packing.sharing import is_set

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ragged_format.packing.report import PackReport
    from ragged_format.schema import Column, RaggedSchema

__all__ = ["Segments", "TokenColumns", "gather"]

Bools = npt.NDArray[np.bool_]
# Rows of fixed-shape elements that are gathered at a time, so that they stay in the cache.
BLOCK = 512


class Segments(NamedTuple):
    """The nodes on the members' paths, in (member, depth) order, one entry per member and node.

    Attributes
    ----------
    sources, positions, lengths : (p,) int64
        First token of the member there in the flat samples, its packed position, and how many.
    owned : (p,) bool
        Whether the node's tokens are the member's own: it is the first that has the node.
    """

    sources: Int64
    positions: Int64
    lengths: Int64
    owned: Bools


class TokenColumns:
    """Picks the copy of each token that the row keeps, per column.

    Parameters
    ----------
    samples : pyarrow.RecordBatch
        The samples.
    schema : RaggedSchema
        Their schema.
    segments : Segments
        Where the members' tokens lie in the row.
    """

    def __init__(self, samples: pa.RecordBatch, schema: RaggedSchema, segments: Segments) -> None:
        self.samples = samples
        self.schema = schema
        owned = segments.owned
        order = np.argsort(segments.positions[owned], kind="stable")
        self.first = ranges(
            segments.sources[owned][order], segments.lengths[owned][order]
        )  # (N,) flat index of the first member's copy of each packed token
        rest = ~owned
        self.shared_sources = ranges(segments.sources[rest], segments.lengths[rest])
        self.shared_positions = ranges(segments.positions[rest], segments.lengths[rest])

    def columns(
        self, columns: list[Column], report: PackReport | None
    ) -> Iterator[tuple[Column, pa.Array]]:
        """Yield each column and all columns below it, with the values of the row."""
        for column in columns:
            source = flat(self.samples.column(column.name))
            has = is_set(source, column)
            picked = self._pick(has)
            if report is not None and len(self.shared_sources):
                report.add_conflicts(column.name, self._conflicts(column, has, picked))
            whole = np.array([0, len(picked)], np.int64)
            for below, values, _ in gather(self.samples, self.schema, column, picked, whole):
                yield below, values

    def _pick(self, has: Bools) -> Int64:
        """Return the flat index of the first copy that is set, else of the first copy."""
        missing = ~has[self.first]
        if not missing.any() or not len(self.shared_sources):
            return self.first
        better = has[self.shared_sources] & missing[self.shared_positions]
        positions, index = np.unique(self.shared_positions[better], return_index=True)
        picked = self.first.copy()
        picked[positions] = self.shared_sources[better][index]
        return picked

    def _conflicts(self, column: Column, has: Bools, picked: Int64) -> int:
        set_ = has[self.shared_sources]
        mine, kept = self.shared_sources[set_], picked[self.shared_positions[set_]]
        return int(np.count_nonzero(self._differ([column], mine, kept)))

    def _differ(self, columns: list[Column], left: Int64, right: Int64) -> Bools:
        """Return where two lists of elements of one axis differ, all axes below included."""
        out = np.zeros(len(left), bool)
        for column in columns:
            values = flat(self.samples.column(column.name)).values
            out |= _unequal(values, left, right, column)
            if column.opens is not None:
                counts = to_numpy(values).astype(np.int64)
                starts = np.cumsum(counts) - counts
                same = np.flatnonzero(~out)
                sizes = counts[left[same]]
                inner = self._differ(
                    self.schema.on(column.opens),
                    ranges(starts[left[same]], sizes),
                    ranges(starts[right[same]], sizes),
                )
                out[same] |= segment_sums(inner, offsets_of(sizes)) > 0
        return out


def gather(
    batch: pa.RecordBatch, schema: RaggedSchema, column: Column, picked: Int64, offsets: Int64
) -> Iterator[tuple[Column, pa.Array, Int64]]:
    """Yield elements of a column, and those of all columns on axes that it opens.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
        Any batch of `schema`.
    column : Column
        A column that is not on the record axis.
    picked : (k,) int64
        Elements, counted over the whole batch.
    offsets : (n + 1,) int64
        Which of them make each record of the result.

    Yields
    ------
    column : Column
    values : pyarrow.Array
        A copy.
    offsets : (n + 1,) int64
    """
    queue = [(column, picked, offsets)]
    for member, indices, bounds in queue:
        values = flat(batch.column(member.name)).values
        yield member, values.take(pa.array(indices)), bounds
        if member.opens is not None:
            counts = to_numpy(values).astype(np.int64)
            starts = np.cumsum(counts) - counts
            taken = counts[indices]
            below = ranges(starts[indices], taken)
            below_bounds = offsets_of(taken)[bounds]
            queue += [(child, below, below_bounds) for child in schema.on(member.opens)]


def _unequal(values: pa.Array, left: Int64, right: Int64, column: Column) -> Bools:
    if column.fill is None:
        differ = pc.not_equal(values.take(pa.array(left)), values.take(pa.array(right)))
        text: Bools = differ.to_numpy(zero_copy_only=False)
        return text
    a: Any = to_numpy(values)
    if not column.shape:
        return _differ_by_value(a[left], a[right])
    if a.dtype.kind in "iu" and a.shape[1] * a.itemsize % 8 == 0:
        a = a.view(np.int64)  # fewer and wider comparisons
    out = np.zeros(len(left), bool)
    for start in range(0, len(left), BLOCK):
        part = slice(start, start + BLOCK)
        out[part] = _differ_by_value(a[left[part]], a[right[part]]).any(axis=1)
    return out


def _differ_by_value(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> Bools:
    unequal: Bools = a != b
    if np.issubdtype(a.dtype, np.floating):
        unequal &= ~(np.isnan(a) & np.isnan(b))
    return unequal
