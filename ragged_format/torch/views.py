"""A batch of records opened for gathering: plain arrays over its buffers, no Arrow object left.

A view is made once per record batch and kept. Gathering then costs a few slices per column, not an
Arrow object per record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ragged_format.errors import InvariantError, RaggedError, SchemaMismatchError, Where
from ragged_format.lists import Int64, flat, offsets_of, to_numpy
from ragged_format.schema import RECORD, Column
from ragged_format.torch.plan import Plan, is_text

__all__ = ["View", "open_view", "view_of"]

Array = npt.NDArray[Any]


@dataclass(slots=True)
class View:
    """One batch of records as arrays; all of them are views of its buffers where possible.

    Attributes
    ----------
    num_rows : int
    marks : list of sequence of int
        For each space of the plan, the first element of each record, and the end; fast to index
        one by one.
    arrays : list of ndarray
        For each part of the plan its content in this batch: offsets as (n + 1,) int64 or, for
        text, int32 that need not begin at 0; everything else as bytes, (t * nbytes,) uint8.
    buffers : list of memoryview
        The same as buffers, of which slices cost less.
    """

    num_rows: int
    marks: list[Sequence[int]]
    arrays: list[Array]
    buffers: list[memoryview] = field(init=False)

    def __post_init__(self) -> None:
        self.buffers = [memoryview(cast("Any", array)) for array in self.arrays]


def open_view(batch: pa.RecordBatch, plan: Plan, where: Where | None = None) -> View:
    """Return the view of a record batch that has at least the columns of the plan.

    Guarantees: numbers without nulls are not copied. Offsets are checked to be safe to slice by:
    non-decreasing, inside their values, equal on all columns of an axis. Values are not checked.

    Raises
    ------
    SchemaMismatchError
        The batch lacks a column (``RF-S003``).
    InvariantError
        Offsets are not safe (``RF-I001``, ``RF-I003``, ``RF-I005``).
    """
    try:
        return _open(batch, plan)
    except RaggedError as err:
        raise err.at(where or Where()) from err.__cause__


def _open(batch: pa.RecordBatch, plan: Plan) -> View:
    known: dict[str, Int64] = {}
    parts: dict[tuple[str, str], Array] = {}
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for column in plan.schema:
        values = columns.get(column.name)
        if values is None:
            raise SchemaMismatchError(
                "the data lacks a column", code="RF-S003", where=Where(column=column.name),
                expected=column.name, got=", ".join(columns),
            )  # fmt: skip
        if column.axis != RECORD:
            values, offsets = flat(values)
            _check_offsets(offsets, len(values), column)
            first = known.setdefault(column.axis, offsets)
            if first is not offsets and not np.array_equal(first, offsets):
                _fail_lengths(plan, column, first, offsets)
        _open_column(parts, column, values)
    for axis in plan.axes[1:]:
        if axis not in known:
            # Nothing that is loaded lies on the axis: its lengths follow from what opens it.
            opened = plan.schema.axes[axis]
            counts = to_numpy(flat(columns[str(opened.counts)]).values).astype(np.int64)
            known[axis] = offsets_of(counts)[known[opened.parent]]
        parts["offsets", axis] = known[axis]
    return view_of(plan, batch.num_rows, [parts[part.kind, part.name] for part in plan.parts])


def view_of(plan: Plan, num_rows: int, arrays: list[Array]) -> View:
    """Return the view whose parts are these arrays."""
    marks: list[Sequence[int]] = [range(num_rows + 1)]
    for part, array in zip(plan.parts, arrays, strict=True):
        if part.over == 0:
            marks.append(_marks(array))
        elif part.over > 0:
            # Text below the record axis: the bytes of a record are those of all its elements.
            per_record = arrays[plan.index["offsets", plan.axes[part.over]]]
            marks.append(_marks(array[per_record]))
    return View(num_rows, marks, arrays)


def _marks(array: Array) -> Sequence[int]:
    return cast("Sequence[int]", memoryview(cast("Any", array)))


def _open_column(parts: dict[tuple[str, str], Array], column: Column, values: pa.Array) -> None:
    if values.null_count and not column.nullable:
        raise InvariantError(
            "a value is null", code="RF-I002", where=Where(column=column.name),
            expected="no nulls in this column", got=f"{values.null_count} of {len(values)}",
            remedy="repair the data: ragged_format.validate names the record",
        )  # fmt: skip
    if column.nullable:
        parts["valid", column.name] = (
            values.is_valid().to_numpy(zero_copy_only=False).view(np.uint8)
            if values.null_count
            else np.ones(len(values), np.uint8)
        )
    if is_text(column):
        _, bounds, data = values.buffers()
        offsets = np.zeros(1, np.int32)
        if len(values):
            start = values.offset
            offsets = np.frombuffer(bounds, np.int32)[start : start + len(values) + 1]
        content = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
        _check_offsets(offsets, len(content), column, whole=False)
        parts["text_offsets", column.name] = offsets
        parts["values", column.name] = content
        return
    if values.null_count:
        # What lies under a null is undefined; a float that is not there must not pass for one.
        missing = float("nan") if pa.types.is_floating(values.type) else column.fill
        values = pc.fill_null(values, pa.scalar(missing, values.type))
    parts["values", column.name] = to_numpy(values).reshape(-1).view(np.uint8)


def _check_offsets(offsets: Array, total: int, column: Column, *, whole: bool = True) -> None:
    first, last = int(offsets[0]), int(offsets[-1])
    fits = (first, last) == (0, total) if whole else first >= 0 and last <= total
    if not fits or (offsets[1:] < offsets[:-1]).any():
        raise InvariantError(
            "offsets decrease or leave their values", code="RF-I001",
            where=Where(column=column.name),
            expected=f"non-decreasing offsets in [0, {total}]", got=f"from {first} to {last}",
            remedy="do not use the data: its producer wrote broken lists",
        )  # fmt: skip


def _fail_lengths(plan: Plan, column: Column, known: Int64, got: Int64) -> NoReturn:
    row = int(np.argmax(np.diff(known) != np.diff(got)))
    raise InvariantError(
        f"columns of axis {column.axis!r} differ in length",
        code="RF-I003" if plan.schema.axes[column.axis].counts is None else "RF-I005",
        where=Where(row=row, column=column.name),
        expected=int(known[row + 1] - known[row]), got=int(got[row + 1] - got[row]),
    )  # fmt: skip
