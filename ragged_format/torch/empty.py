"""The row that a rank gets when there is none left for it: one token and no target."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ragged_format.lists import to_list
from ragged_format.schema import RECORD, Column, RaggedSchema

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["empty_row"]

# On these axes a model or an attention mask needs at least one element.
_ONE = ("token", "node")
# What is not the fill of the column, or not 0: the only node is a root that owns the token.
_VALUES = {"input_ids": 0, "completion_mask": 0, "position_ids": 0, "node_lengths": 1,
           "node_parents": -1}  # fmt: skip


def empty_row(schema: RaggedSchema) -> pa.RecordBatch:
    """Return one record with one token that is not scored, and nothing on any other axis.

    Text is empty, nullable columns of the record axis are null. A forward pass over it works and
    adds nothing to a loss.

    Examples
    --------
    >>> import ragged_format as rf
    >>> row = empty_row(rf.parse_schema(rf.sample_schema(vocab_size=9, columns=[])))
    >>> row.to_pylist()
    [{'sample_id': '', 'input_ids': [0], 'completion_mask': [0]}]
    """
    arrays = [_array(column, int(column.axis in _ONE)) for column in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema.to_arrow())


def _array(column: Column, length: int) -> pa.Array:
    if column.axis == RECORD:
        if column.nullable:
            return pa.nulls(1, column.arrow_type)
        value: object = "" if column.fill is None else 0
        return pa.array([[value] * column.width if column.shape else value], column.arrow_type)
    offsets = np.array([0, length], np.int64)
    if column.fill is None:
        return to_list(pa.array([""] * length, column.type), offsets, column)
    value = 0 if column.opens is not None else column.fill
    value = _VALUES.get(column.name, value)
    shape = (length, column.width) if column.shape else (length,)
    values: npt.NDArray[np.generic] = np.full(shape, value, column.type.to_pandas_dtype())
    return to_list(values, offsets, column)
