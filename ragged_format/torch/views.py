"""A batch of records opened for gathering: plain arrays over its buffers, no Arrow object left.

A view is made once per record batch and kept. Gathering then costs a few slices per column, not an
Arrow object per record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ragged_format.errors import InvariantError, SchemaMismatchError, Where
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
        For each part of the plan its values in this batch, one-dimensional: the elements of
        fixed-shape columns end to end, offsets of text not rebased, validity as uint8.
    """

    num_rows: int
    marks: list[Sequence[int]]
    arrays: list[Array]


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
    place = where or Where()
    known: dict[str, Int64] = {}
    parts: dict[tuple[str, str], Array] = {}
    for column in plan.schema:
        here = Where(column=column.name).inside(place)
        if column.name not in batch.schema.names:
            raise SchemaMismatchError(
                "the data lacks a column", code="RF-S003", where=here,
                expected=column.name, got=", ".join(batch.schema.names),
            )  # fmt: skip
        values = batch.column(column.name)
        if column.axis != RECORD:
            values, offsets = flat(values)
            _check_offsets(offsets, len(values), here)
            if not np.array_equal(known.setdefault(column.axis, offsets), offsets):
                _fail_lengths(plan, column, known[column.axis], offsets, here)
        _open_column(parts, column, values, here)
    for axis in plan.axes[1:]:
        if axis not in known:
            # Nothing that is loaded lies on the axis: its lengths follow from what opens it.
            opened = plan.schema.axes[axis]
            counts = parts["values", str(opened.counts)].astype(np.int64)
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


def _open_column(
    parts: dict[tuple[str, str], Array], column: Column, values: pa.Array, where: Where
) -> None:
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
            span = slice(values.offset, values.offset + len(values) + 1)
            offsets = np.frombuffer(bounds, np.int32)[span]
        content = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
        if offsets[0] < 0 or offsets[-1] > len(content) or (offsets[1:] < offsets[:-1]).any():
            _fail_offsets(len(content), where)
        parts["text_offsets", column.name] = offsets
        parts["values", column.name] = content
        return
    if values.null_count:
        # What lies under a null is undefined; a float that is not there must not pass for one.
        missing = float("nan") if pa.types.is_floating(values.type) else column.fill
        values = pc.fill_null(values, pa.scalar(missing, values.type))
    parts["values", column.name] = to_numpy(values).reshape(-1)


def _check_offsets(offsets: Int64, total: int, where: Where) -> None:
    if offsets[0] != 0 or offsets[-1] != total or (offsets[1:] < offsets[:-1]).any():
        _fail_offsets(total, where)


def _fail_offsets(total: int, where: Where) -> NoReturn:
    raise InvariantError(
        "offsets decrease or leave their values", code="RF-I001", where=where,
        expected=f"non-decreasing offsets in [0, {total}]", got="others",
        remedy="do not use the data: its producer wrote broken lists",
    )  # fmt: skip


def _fail_lengths(
    plan: Plan, column: Column, known: Int64, got: Int64, where: Where
) -> NoReturn:  # fmt: skip
    row = int(np.argmax(np.diff(known) != np.diff(got)))
    raise InvariantError(
        f"columns of axis {column.axis!r} differ in length",
        code="RF-I003" if plan.schema.axes[column.axis].counts is None else "RF-I005",
        where=Where(row=row).inside(where),
        expected=int(known[row + 1] - known[row]), got=int(got[row + 1] - got[row]),
    )  # fmt: skip
