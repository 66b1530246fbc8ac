"""Operations on axes: take, select, slice, cut, join and concat, written once for every column.

Every operation takes and returns a record batch of this format. A column moves because of the axis
that it lies on, not because of its name. All of them accept sliced batches and lists whose first
offset is not 0, and loop over columns only.

Examples
--------
>>> from ragged_format import sample_schema
>>> schema = sample_schema(vocab_size=99, columns=["candidate_counts", "candidate_ids"])
>>> rows = [
...     {
...         "sample_id": "a",
...         "input_ids": [5, 6, 7],
...         "completion_mask": [0, 1, 1],
...         "candidate_counts": [1, 3],
...         "candidate_ids": [6, 2, 7, 9],
...     },
...     {
...         "sample_id": "b",
...         "input_ids": [5, 8],
...         "completion_mask": [0, 1],
...         "candidate_counts": [2],
...         "candidate_ids": [4, 8],
...     },
... ]
>>> batch = pa.RecordBatch.from_pylist(rows, schema=schema)
>>> take(batch, [1, 1]).column("candidate_ids").to_pylist()
[[4, 8], [4, 8]]
>>> last = select_targets(batch, np.array([False, True, True]))
>>> last.column("completion_mask").to_pylist(), last.column("candidate_ids").to_pylist()
([[0, 0, 1], [0, 1]], [[2, 7, 9], [4, 8]])
>>> cut(batch, stop=2).column("candidate_ids").to_pylist()
[[6], [4, 8]]
>>> slice_axis(batch, stop=1, axis="candidate").column("candidate_ids").to_pylist()
[[6, 2], [4]]
>>> concat([batch, batch], axis="token").column("input_ids").to_pylist()
[[5, 6, 7, 5, 6, 7], [5, 8, 5, 8]]
>>> take(batch, [2])
Traceback (most recent call last):
...
ragged_format.errors.LimitExceededError: [RF-L002] an index lies outside the record axis
  where:    position 0
  expected: 0 <= index < 2
  got:      2
  remedy:   count over the whole batch, from 0
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ragged_format.arguments import check_integer, list_of, shown
from ragged_format.canonical import as_batch, canonical, joined, require_same
from ragged_format.errors import InvariantError, LimitExceededError, SchemaMismatchError, Where
from ragged_format.lists import (
    Flat,
    Int64,
    flat,
    offsets_of,
    ranges,
    segment_sums,
    to_list,
    to_numpy,
)
from ragged_format.parse import parse_schema
from ragged_format.schema import RECORD, RaggedSchema

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragged_format.schema import Column

__all__ = [
    "AxisView",
    "Flat",
    "axis_view",
    "canonical",
    "concat",
    "cut",
    "flat",
    "join",
    "offsets_of",
    "ranges",
    "segment_sums",
    "select",
    "select_targets",
    "slice_axis",
    "take",
    "to_list",
    "to_numpy",
]


class AxisView(NamedTuple):
    """Where the elements of an axis lie in a batch.

    Attributes
    ----------
    parent_offsets : (p + 1,) int64
        Elements of this axis under each element of the parent axis.
    record_offsets : (num_rows + 1,) int64
        Elements of this axis in each record.
    """

    parent_offsets: Int64
    record_offsets: Int64


def axis_view(batch: pa.RecordBatch, axis: str, schema: RaggedSchema | None = None) -> AxisView:
    """Return the offsets of `axis` in `batch`, per parent element and per record.

    Raises
    ------
    SchemaMismatchError
        The axis does not exist, or no column of the batch lies on it and it is a root axis.
    """
    schema = schema or parse_schema(batch.schema)
    _require_axis(schema, axis)
    opened = schema.axes[axis]
    if opened.counts is None:
        for column in schema.on(axis):
            offsets = flat(batch.column(column.name)).offsets
            return AxisView(offsets, offsets)
        raise SchemaMismatchError(
            "no column lies on this axis, so its lengths are unknown",
            code="RF-S006", expected=f"a column on axis {axis!r}", got=", ".join(schema.columns),
        )  # fmt: skip
    counts, per_record = flat(batch.column(opened.counts))
    parent_offsets = offsets_of(to_numpy(counts).astype(np.int64))
    return AxisView(parent_offsets, parent_offsets[per_record])


def take(
    batch: pa.RecordBatch,
    indices: npt.ArrayLike,
    *,
    axis: str = RECORD,
    lengths: npt.ArrayLike | None = None,
) -> pa.RecordBatch:
    """Return the batch with these elements of `axis`, every axis below following.

    Guarantees: a copy; order and repeats are as in `indices`.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
        Batch of this format.
    indices : (k,) int
        Positions on `axis`, counted over the whole batch.
    axis : str
        ``"record"``, or an axis below it.
    lengths : (p,) int, optional
        For an axis below the record: how many of `indices` go to each element of the parent axis
        (each record, for a root axis), in order. They sum to k.

    Raises
    ------
    LimitExceededError
        A position lies outside the axis (``RF-L002``), or a length exceeds the type of the counts
        column (``RF-L001``).
    InvariantError
        The lengths do not fit the axis (``RF-I005``), or exceed 1 on a mask axis (``RF-I008``).
    SchemaMismatchError
        The axis does not exist (``RF-S006``), or an argument is not made of integers (``RF-S004``).
    """
    batch = as_batch(batch)
    picked = _integers(indices, "indices")
    if axis == RECORD:
        _check_positions(picked, batch.num_rows, axis)
        return batch.take(pa.array(picked))
    schema = parse_schema(batch.schema)
    view = axis_view(batch, axis, schema)
    _check_positions(picked, int(view.parent_offsets[-1]), axis)
    parents = len(view.parent_offsets) - 1
    per_parent = _integers([] if lengths is None else lengths, "lengths")
    if len(per_parent) != parents or per_parent.sum() != len(picked) or (per_parent < 0).any():
        raise InvariantError(
            "lengths has one entry >= 0 per parent element and sums to the number of indices",
            code="RF-I005", expected=f"{parents} entries >= 0, sum {len(picked)}",
            got=f"{len(per_parent)} entries, sum {per_parent.sum()}, "
            f"smallest {per_parent.min(initial=0)}",
            remedy="pass how many of the indices go to each parent element",
        )  # fmt: skip
    return _regather(batch, schema, axis, picked, per_parent)


def select(batch: pa.RecordBatch, axis: str, keep: npt.NDArray[np.bool_]) -> pa.RecordBatch:
    """Return the batch with only the elements of `axis` where `keep` is true.

    On a mask axis (targets of samples) a dropped element's mask becomes 0; its token stays.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
        Batch of this format.
    axis : str
        Any axis, the record axis included.
    keep : (k,) bool
        One entry per element of the axis in the whole batch.

    Raises
    ------
    InvariantError
        `keep` has another length than the axis (``RF-I003``).
    SchemaMismatchError
        The axis does not exist (``RF-S006``), or `keep` is not boolean (``RF-S004``).
    """
    batch = as_batch(batch)
    keep = _array(keep)
    if keep.dtype != bool and keep.size:
        raise SchemaMismatchError(
            "keep is boolean", expected="one bool per element", got=keep.dtype,
            remedy="use take for positions",
        )  # fmt: skip
    view = None if axis == RECORD else axis_view(batch, axis)
    size = batch.num_rows if view is None else int(view.parent_offsets[-1])
    if keep.shape != (size,):
        raise InvariantError(
            "keep has one entry per element of the axis",
            code="RF-I003", expected=f"({size},)", got=keep.shape,
            remedy="make it from the whole batch",
        )  # fmt: skip
    if view is None:
        return take(batch, np.flatnonzero(keep))
    per_parent = segment_sums(keep, view.parent_offsets)
    return take(batch, np.flatnonzero(keep), axis=axis, lengths=per_parent)


def select_targets(batch: pa.RecordBatch, keep: npt.NDArray[np.bool_]) -> pa.RecordBatch:
    """Return the batch with only the targets where `keep`, (m,) bool, is true."""
    return select(batch, "target", keep)


def slice_axis(
    batch: pa.RecordBatch, start: int = 0, stop: int | None = None, *, axis: str = RECORD
) -> pa.RecordBatch:
    """Return the elements ``[start, stop)`` of `axis` under each parent element.

    Guarantees: a view on the record axis, a copy on the others. ``axis="candidate", stop=8`` keeps
    the first 8 candidates of every target; ``axis="record"`` slices the batch.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
        Batch of this format.
    start, stop : int
        Non-negative; ``stop=None`` is the end.
    axis : str
        Any axis.
    """
    batch = as_batch(batch)
    check_integer("start", start, 0, code="RF-L002")
    if stop is not None:
        check_integer("stop", stop, 0, code="RF-L002")
    if axis == RECORD:
        end = batch.num_rows if stop is None else min(stop, batch.num_rows)
        begin = min(start, end)
        return batch.slice(begin, end - begin)
    schema = parse_schema(batch.schema)
    bounds = axis_view(batch, axis, schema).parent_offsets
    counts = np.diff(bounds)
    first = np.minimum(start, counts)
    last = counts if stop is None else np.minimum(stop, counts)
    per_parent = np.maximum(last - first, 0)
    picked = ranges(bounds[:-1] + first, per_parent)
    return _regather(batch, schema, axis, picked, per_parent)


def cut(batch: pa.RecordBatch, start: int = 0, stop: int | None = None) -> pa.RecordBatch:
    """Return samples cut to the tokens ``[start, stop)``, targets and their sets following.

    A right cut keeps the targets before it. A left cut drops the target that becomes position 0
    (nothing predicts it) and adds `start` to the record column ``token_offset``, which the schema
    must have for it.

    Raises
    ------
    SchemaMismatchError
        A left cut of a batch without ``token_offset``, or a batch of another profile than
        ``sample`` (``RF-S003``).
    LimitExceededError
        A negative bound (``RF-L002``).
    """
    batch = as_batch(batch)
    schema = parse_schema(batch.schema)
    if schema.profile != "sample":
        raise SchemaMismatchError(
            "only samples can be cut", code="RF-S003", expected="profile 'sample'",
            got=schema.profile, remedy="cut before packing",
        )  # fmt: skip
    out = slice_axis(batch, start, stop, axis="token")
    if start == 0:
        return out
    if "token_offset" not in schema:
        raise SchemaMismatchError(
            "a left cut records its offset", code="RF-S003", expected="column 'token_offset'",
            got=", ".join(schema.columns), remedy="add 'token_offset' to the schema's columns",
        )  # fmt: skip
    had = np.diff(axis_view(batch, "token", schema).record_offsets)
    moved = pc.add(pc.fill_null(out.column("token_offset"), 0), pa.array(np.minimum(start, had)))
    index = out.schema.get_field_index("token_offset")
    out = out.set_column(index, out.schema.field(index), moved)
    mask, offsets = flat(out.column("completion_mask"))
    firsts = offsets[:-1][np.diff(offsets) > 0]
    orphaned = np.zeros(int(offsets[-1]), bool)
    orphaned[firsts] = True
    scored = to_numpy(mask) != 0
    return select(out, "target", ~orphaned[scored])


def join(batch: pa.RecordBatch, counts: npt.ArrayLike) -> pa.RecordBatch:
    """Concatenate runs of consecutive records into one record each, on every axis.

    Guarantees: list values are views (only the outer offsets change); values of the record axis are
    those of the first record of each run.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
        Batch of this format.
    counts : (g,) int
        Records in each run, each >= 1, summing to ``batch.num_rows``.

    Raises
    ------
    InvariantError
        The counts are not so (``RF-I005``).
    """
    batch = as_batch(batch)
    runs = _integers(counts, "counts")
    if (len(runs) and runs.min() < 1) or runs.sum() != batch.num_rows:
        raise InvariantError(
            "counts are positive and sum to the number of records",
            code="RF-I005", expected=batch.num_rows, got=runs.tolist()[:8],
            remedy="pass the number of records of each run",
        )  # fmt: skip
    schema = parse_schema(batch.schema)
    bounds = offsets_of(runs)
    arrays = []
    for column in schema:
        array = batch.column(column.name)
        if column.axis == RECORD:
            arrays.append(array.take(pa.array(bounds[:-1])))
        else:
            values, offsets = flat(array)
            arrays.append(to_list(values, offsets[bounds], column))
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def concat(batches: Sequence[pa.RecordBatch], *, axis: str = RECORD) -> pa.RecordBatch:
    """Concatenate batches of one schema.

    Guarantees: a copy, except for a single batch.

    Parameters
    ----------
    batches : sequence of pyarrow.RecordBatch
        At least one, of one identity; other metadata is that of the first.
    axis : str
        ``"record"``: records after records. Any other axis: record i of the result joins record i
        of every batch end to end, on every axis below the record (lists can only grow together);
        values of the record axis are those of the first batch.

    Raises
    ------
    SchemaMismatchError
        Schemas differ (``RF-S010``), there is no batch, or no such axis (``RF-S006``).
    InvariantError
        Row counts differ for an inner axis (``RF-I003``).
    LimitExceededError
        The result does not fit one batch (``RF-L001``).
    """
    batches = list_of("batches", pa.RecordBatch, batches)
    if not batches:
        raise SchemaMismatchError(
            "concat needs at least one batch", expected=">= 1 batch", got="none",
            remedy="rf.sample_schema and pa.RecordBatch.from_pylist([], schema) make an empty one",
        )  # fmt: skip
    first = batches[0]
    if axis != RECORD:
        _require_axis(parse_schema(first.schema), axis)
    for number, batch in enumerate(batches[1:], 1):
        if not batch.schema.equals(first.schema, check_metadata=True):
            require_same(
                parse_schema(first.schema), parse_schema(batch.schema), Where(batch=number)
            )
    if len(batches) == 1:
        return first
    schema = first.schema
    whole = joined(
        [
            batch if batch.schema.equals(schema, check_metadata=True) else _under(batch, schema)
            for batch in batches
        ]
    )
    if axis == RECORD:
        return whole
    rows = {batch.num_rows for batch in batches}
    if len(rows) > 1:
        raise InvariantError(
            "batches that are joined record by record have equally many",
            code="RF-I003", expected=first.num_rows, got=sorted(rows),
        )  # fmt: skip
    order = np.arange(len(whole)).reshape(len(batches), -1).T.reshape(-1)
    return join(take(whole, order), np.full(first.num_rows, len(batches), np.int64))


def _under(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def _require_axis(schema: RaggedSchema, axis: str) -> None:
    if not isinstance(axis, str) or axis not in schema.axes:
        raise SchemaMismatchError(
            "there is no such axis", code="RF-S006",
            expected=f"one of {', '.join([RECORD, *schema.axes])}", got=shown(axis),
            remedy="choose one of these, or add the column that opens it",
        )  # fmt: skip


def _array(values: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError:  # nested lists of different lengths
        return np.asarray("lists of different lengths")


def _integers(values: npt.ArrayLike, what: str) -> Int64:
    array = _array(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise SchemaMismatchError(
            f"{what} are integers in one dimension", expected="(k,) int",
            got=f"{array.shape} {array.dtype}", remedy="pass a list or an array of integers",
        )  # fmt: skip
    return array.astype(np.int64, copy=False)


def _check_positions(picked: Int64, size: int, axis: str) -> None:
    if len(picked) and (picked.min() < 0 or picked.max() >= size):
        at = int(np.argmax((picked < 0) | (picked >= size)))
        raise LimitExceededError(
            f"an index lies outside the {axis} axis", code="RF-L002", where=Where(position=at),
            expected=f"0 <= index < {size}", got=int(picked[at]),
            remedy="count over the whole batch, from 0",
        )  # fmt: skip


def _check_counts(per_parent: Int64, counts: Column) -> None:
    largest = 1 if counts.mask else np.iinfo(counts.type.to_pandas_dtype()).max
    if len(per_parent) and per_parent.max() > largest:
        at = int(np.argmax(per_parent > largest))
        place: dict[str, Any] = {
            "where": Where(column=counts.name, position=at),
            "expected": f"<= {largest}", "got": int(per_parent[at]),
        }  # fmt: skip
        if counts.mask:
            raise InvariantError("a mask is not 0 or 1", code="RF-I008", **place)
        raise LimitExceededError("a count does not fit its column", **place)


def _regather(
    batch: pa.RecordBatch, schema: RaggedSchema, axis: str, picked: Int64, per_parent: Int64
) -> pa.RecordBatch:
    """Gather elements of `axis` and of all axes below; set the counts that open `axis`."""
    new: dict[str, pa.Array] = {}
    opened = schema.axes[axis]
    if opened.counts is None:
        per_record = per_parent
    else:
        counts = schema[opened.counts]
        offsets = flat(batch.column(counts.name)).offsets
        _check_counts(per_parent, counts)
        new[counts.name] = to_list(per_parent, offsets, counts)
        per_record = segment_sums(per_parent, offsets)
    queue = [(axis, picked, per_record)]
    for name, indices, lengths in queue:
        offsets = offsets_of(lengths)
        positions = pa.array(indices)
        for column in schema.on(name):
            values = flat(batch.column(column.name)).values.take(positions)
            new[column.name] = to_list(values, offsets, column)
            if column.opens is not None:
                old = to_numpy(flat(batch.column(column.name)).values).astype(np.int64)
                counts_taken = old[indices]
                starts = (np.cumsum(old) - old)[indices]
                queue.append((
                    column.opens, ranges(starts, counts_taken), segment_sums(counts_taken, offsets)
                ))  # fmt: skip
    arrays = [new.get(name, batch.column(name)) for name in batch.schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)
