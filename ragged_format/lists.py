"""The one place that turns Arrow lists into (flat values, offsets) and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ragged_format.errors import InvariantError, SchemaMismatchError, Where

if TYPE_CHECKING:
    from ragged_format.schema import Column

__all__ = ["Flat", "flat", "offsets_of", "ranges", "segment_sums", "to_list", "to_numpy"]

Int64 = npt.NDArray[np.int64]


class Flat(NamedTuple):
    """One list column as flat values and offsets.

    Attributes
    ----------
    values : pyarrow.Array
        All elements end to end, ``offsets[-1]`` of them; a view of the source.
    offsets : (n + 1,) int64
        Non-decreasing, ``offsets[0] == 0``; list ``i`` is ``values[offsets[i]:offsets[i + 1]]``.
    """

    values: pa.Array
    offsets: Int64

    @property
    def lengths(self) -> Int64:
        """Lengths of the lists, (n,) int64."""
        return np.diff(self.offsets)

    def numpy(self) -> npt.NDArray[Any]:
        """Return the values as a read-only array, (t,) or (t, width) for fixed-size elements."""
        return to_numpy(self.values)


def to_numpy(values: pa.Array) -> npt.NDArray[Any]:
    """Return non-null numbers as a read-only view: (t,), or (t, width) for fixed-size lists.

    Raises
    ------
    InvariantError
        There is a null (``RF-I002``).
    """
    fixed = pa.types.is_fixed_size_list(values.type)
    # flatten() skips null elements, so it must not see any.
    inner = values.flatten() if fixed and not values.null_count else values
    if inner.null_count:
        raise InvariantError("a value is null", code="RF-I002", expected="no nulls", got="null")
    out: npt.NDArray[Any] = inner.to_numpy(zero_copy_only=True)
    return out.reshape(len(values), values.type.list_size) if fixed else out


def flat(array: pa.Array | pa.ChunkedArray) -> Flat:
    """Return the values and offsets of a list column, the slice respected, offsets from 0.

    Guarantees: values are a view (input of more than one chunk and list views are copied once);
    32-bit lists are widened, so that no offset overflows.

    Parameters
    ----------
    array : pyarrow list, large list, list view or chunked array of these
        Without null lists.

    Raises
    ------
    InvariantError
        A list is null (``RF-I002``), or offsets lie outside the values (``RF-I001``).
    SchemaMismatchError
        The array is not a list (``RF-S004``).

    Examples
    --------
    >>> values, offsets = flat(pa.array([[1], [2, 3], [], [4]])[1:])
    >>> values.to_pylist(), offsets.tolist()
    ([2, 3, 4], [0, 2, 2, 3])
    """
    kind = array.type
    is_list = pa.types.is_large_list(kind) or pa.types.is_list(kind)
    views = not is_list and (pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))
    if not (is_list or views):
        raise SchemaMismatchError(
            "the array is not a list", expected="list or large_list", got=kind
        )
    if array.null_count:
        raise InvariantError(
            "a list is null",
            code="RF-I002",
            where=Where(row=pc.index(array.is_null(), True).as_py()),
            expected="no nulls",
            got="null",
        )
    if isinstance(array, pa.ChunkedArray):
        parts = [flat(chunk) for chunk in array.chunks]
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return Flat(pa.array([], kind.value_type), np.zeros(1, np.int64))
        values = pa.concat_arrays([part.values for part in parts])
        return Flat(values, offsets_of(np.concatenate([part.lengths for part in parts])))
    if views:
        # Not array.cast: that of pyarrow 26 gives the last list a wrong end.
        starts, sizes = (part.cast(pa.int64()).to_numpy() for part in (array.offsets, array.sizes))
        return Flat(array.values.take(pa.array(ranges(starts, sizes))), offsets_of(sizes))
    if len(array) == 0:
        return Flat(array.values.slice(0, 0), np.zeros(1, np.int64))
    offsets = array.offsets.to_numpy(zero_copy_only=True)
    first, last = int(offsets[0]), int(offsets[-1])
    values = array.values
    if not 0 <= first <= last <= len(values):
        raise InvariantError(
            "list offsets lie outside the values",
            code="RF-I001",
            expected=f"0 <= first <= last <= {len(values)}",
            got=f"first {first}, last {last}",
            remedy="do not use the data: its producer wrote broken lists",
        )
    if first or last != len(values):
        values = values.slice(first, last - first)
    if first or offsets.dtype != np.int64:
        offsets = offsets.astype(np.int64) - first
    return Flat(values, offsets)


def to_list(values: pa.Array | npt.NDArray[Any], offsets: Int64, column: Column) -> pa.Array:
    """Return a list column of the type that `column` declares; the inverse of :func:`flat`.

    Guarantees: zero-copy for arrays of the right type. Others are cast: integers must fit, floats
    are rounded to the width that the column declares.

    Parameters
    ----------
    values : pyarrow.Array or (t,) or (t, width) ndarray
        Elements end to end.
    offsets : (n + 1,) int64
        Non-decreasing; ``offsets[-1] <= t``.
    column : Column
        Declaration; not on the record axis.
    """
    wanted = column.arrow_type
    if isinstance(values, np.ndarray):
        if column.shape:
            child = pa.array(np.ascontiguousarray(values).reshape(-1), column.type)
            values = pa.FixedSizeListArray.from_arrays(child, type=column.value_type)
        else:
            values = pa.array(values, column.type)
    elif values.type != column.value_type:
        values = values.cast(column.value_type)
    return pa.LargeListArray.from_arrays(pa.array(offsets), values, type=wanted)


def offsets_of(lengths: Int64) -> Int64:
    """Return the offsets, (n + 1,) int64 from 0, of lists with these lengths."""
    out = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=out[1:])
    return out


def ranges(starts: Int64, lengths: Int64) -> Int64:
    """Return the integers of ``[starts[i], starts[i] + lengths[i])`` for every i, end to end.

    Examples
    --------
    >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total, dtype=np.int64)


def segment_sums(values: npt.NDArray[Any], offsets: Int64) -> Int64:
    """Return the sum of ``values[offsets[i]:offsets[i + 1]]`` for every i, as int64."""
    sums = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=sums[1:])
    return sums[offsets[1:]] - sums[offsets[:-1]]
