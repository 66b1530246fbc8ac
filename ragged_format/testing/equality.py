"""Logical equality of ragged data, whatever its physical form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ragged_format.canonical import as_table
from ragged_format.errors import Where

__all__ = ["assert_ragged_equal"]


def assert_ragged_equal(actual: Any, expected: Any, *, check_schema: bool = False) -> None:
    """Raise AssertionError unless two tables hold the same columns, types and values.

    The physical form does not count: list and string width, views, dictionaries, slices, chunks,
    declared nullability, column order and metadata. Floats are equal by value; NaN equals NaN,
    whatever its payload, and 0.0 differs from -0.0.

    Parameters
    ----------
    actual, expected : RecordBatch, Table or any Arrow exporter
        What to compare.
    check_schema : bool
        Also require equal Arrow schemas: order, nullability and metadata included.

    Raises
    ------
    AssertionError
        Names the column, record and position of the first difference, and both values.

    Examples
    --------
    >>> a = pa.table({"ids": pa.array([[1], [2, 3]])})
    >>> b = pa.table({"ids": pa.array([[0], [1], [2, 4]], pa.large_list(pa.int64()))}).slice(1)
    >>> assert_ragged_equal(a, b)
    Traceback (most recent call last):
    ...
    AssertionError: row 1, column 'ids', position 1: 3 != 4
    """
    left, right = as_table(actual), as_table(expected)
    if check_schema and not left.schema.equals(right.schema, check_metadata=True):
        raise AssertionError(f"schemas differ:\n{left.schema}\n!=\n{right.schema}")
    if set(left.schema.names) != set(right.schema.names):
        raise AssertionError(f"columns {left.schema.names} != {right.schema.names}")
    if left.num_rows != right.num_rows:
        raise AssertionError(f"{left.num_rows} rows != {right.num_rows} rows")
    for name in right.schema.names:
        _compare(name, _plain(left.column(name)), _plain(right.column(name)))


def _plain(column: pa.ChunkedArray) -> pa.Array:
    """Return the column as one array of the widest type of its kind."""
    out = column.cast(_plain_type(column.type))
    return pa.concat_arrays(out.chunks) if out.num_chunks else pa.array([], out.type)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_string(kind) or pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary(kind) or pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain_type(kind.value_type), kind.list_size)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_list_view(kind):
        return pa.large_list(_plain_type(kind.value_type))
    return kind


def _compare(name: str, left: pa.Array, right: pa.Array) -> None:
    if left.type != right.type:
        raise AssertionError(f"column {name!r}: type {left.type} != {right.type}")
    rows = np.arange(len(left))
    positions = None
    width = 1
    while True:
        where = _Place(name, rows, positions, width)
        valid = left.is_valid().to_numpy(zero_copy_only=False)
        where.check(valid != right.is_valid().to_numpy(zero_copy_only=False), left, right)
        if pa.types.is_large_list(left.type):
            mine = pc.list_value_length(left).fill_null(0).to_numpy(zero_copy_only=False)
            theirs = pc.list_value_length(right).fill_null(0).to_numpy(zero_copy_only=False)
            if (mine != theirs).any():
                row = int(np.flatnonzero(mine != theirs)[0])
                raise AssertionError(
                    f"{Where(row=int(rows[row]), column=name)}: length {mine[row]} != {theirs[row]}"
                )
            starts = np.cumsum(mine) - mine
            positions = np.arange(int(mine.sum())) - np.repeat(starts, mine)
            rows = np.repeat(rows, mine)
            # Both skip null lists, whose lengths are 0 above.
            left, right = left.flatten(), right.flatten()
        elif pa.types.is_fixed_size_list(left.type):
            width = left.type.list_size
            left, right = left.drop_null().flatten(), right.drop_null().flatten()
            rows = np.repeat(rows[valid], width)
            if positions is not None:
                positions = np.repeat(positions[valid], width)
        else:
            where.check(_differ(left, right), left, right)
            return


def _differ(left: pa.Array, right: pa.Array) -> Any:
    if pa.types.is_floating(left.type):
        a, b = left.to_numpy(zero_copy_only=False), right.to_numpy(zero_copy_only=False)
        same = (a == b) & (np.signbit(a) == np.signbit(b))
        return ~(same | (np.isnan(a) & np.isnan(b)))
    unequal = pc.not_equal(left, right).fill_null(False)  # noqa: FBT003
    return unequal.to_numpy(zero_copy_only=False)


class _Place:
    def __init__(self, name: str, rows: Any, positions: Any, width: int) -> None:
        self.name, self.rows, self.positions, self.width = name, rows, positions, width

    def check(self, differ: Any, left: pa.Array, right: pa.Array) -> None:
        """Raise for the first true entry of `differ`."""
        if not differ.any():
            return
        at = int(np.flatnonzero(differ)[0])
        position = None if self.positions is None else int(self.positions[at])
        where = Where(row=int(self.rows[at]), column=self.name, position=position)
        inner = f", value {at % self.width}" if self.width > 1 else ""
        raise AssertionError(f"{where}{inner}: {left[at].as_py()!r} != {right[at].as_py()!r}")
