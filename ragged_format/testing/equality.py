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
        _compare(name, left.column(name), right.column(name))


def _logical(kind: pa.DataType) -> pa.DataType:
    """Return the widest type of the same values."""
    if pa.types.is_dictionary(kind):
        return _logical(kind.value_type)
    if pa.types.is_string(kind) or pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary(kind) or pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_logical(kind.value_type), kind.list_size)
    return pa.large_list(_logical(kind.value_type)) if _is_list(kind) else kind


def _is_list(kind: pa.DataType) -> bool:
    tests = ("is_list", "is_large_list", "is_list_view", "is_large_list_view")
    return any(getattr(pa.types, test)(kind) for test in tests)


def _compare(name: str, left: pa.ChunkedArray, right: pa.ChunkedArray) -> None:
    if _logical(left.type) != _logical(right.type):
        raise AssertionError(f"column {name!r}: type {left.type} != {right.type}")
    rows: Any = np.arange(len(left))
    positions: Any = None
    width = 1
    while True:
        place = _Place(name, rows, positions, width)
        valid = left.is_valid().to_numpy()
        place.check(valid != right.is_valid().to_numpy(), left, right)
        if _is_list(left.type):
            lengths = pc.list_value_length(left).fill_null(0).to_numpy()
            others = pc.list_value_length(right).fill_null(0).to_numpy()
            place.check(lengths != others, left, right, [lengths, others])
            starts = np.cumsum(lengths) - lengths
            positions = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
            rows = np.repeat(rows, lengths)
            # Both skip null lists, whose lengths are 0 above.
            left, right = pc.list_flatten(left), pc.list_flatten(right)
        elif pa.types.is_fixed_size_list(left.type):
            width = left.type.list_size
            left, right = pc.list_flatten(left), pc.list_flatten(right)
            rows = np.repeat(rows[valid], width)
            if positions is not None:
                positions = np.repeat(positions[valid], width)
        else:
            wide = _logical(left.type)
            place.check(_differ(left.cast(wide), right.cast(wide)), left, right)
            return


def _differ(left: pa.ChunkedArray, right: pa.ChunkedArray) -> Any:
    if pa.types.is_floating(left.type):
        a, b = left.to_numpy(), right.to_numpy()
        same = (a == b) & (np.signbit(a) == np.signbit(b))
        return ~(same | (np.isnan(a) & np.isnan(b)))
    return pc.not_equal(left, right).fill_null(False).to_numpy()  # noqa: FBT003


class _Place:
    """Where the elements of one level of nesting lie."""

    def __init__(self, name: str, rows: Any, positions: Any, width: int) -> None:
        self.name, self.rows, self.positions, self.width = name, rows, positions, width

    def check(
        self, differ: Any, left: pa.ChunkedArray, right: pa.ChunkedArray, lengths: Any = None
    ) -> None:
        """Raise for the first true entry of `differ`."""
        if not differ.any():
            return
        at = int(np.argmax(differ))
        position = None if self.positions is None else int(self.positions[at])
        where = str(Where(row=int(self.rows[at]), column=self.name, position=position))
        if self.width > 1:
            where += f", value {at % self.width}"
        if lengths is not None:
            raise AssertionError(f"{where}: length {lengths[0][at]} != {lengths[1][at]}")
        raise AssertionError(f"{where}: {left[at].as_py()!r} != {right[at].as_py()!r}")
