"""The way back from an arena to a record batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ragged_format.schema import RECORD
from ragged_format.torch.plan import is_text

if TYPE_CHECKING:
    from ragged_format.schema import Column
    from ragged_format.torch.plan import Kind, Plan

__all__ = ["record_batch"]

Array = npt.NDArray[Any]


def record_batch(plan: Plan, arrays: dict[tuple[Kind, str], Array]) -> pa.RecordBatch:
    """Return the parts of an arena as a record batch over the same memory.

    Parameters
    ----------
    plan : Plan
        Of what parts the arena consists.
    arrays : dict of (kind, name) to ndarray
        Each part, as :class:`Plan` describes it.
    """
    columns = []
    for column in plan.schema:
        values = _values(column, arrays)
        if column.axis != RECORD:
            offsets = pa.array(arrays["offsets", column.axis])
            values = pa.LargeListArray.from_arrays(offsets, values, type=column.arrow_type)
        columns.append(values)
    schema = plan.schema.to_arrow()
    # Plans are shared by all data of one identity: metadata beyond it may be of other data.
    own = {k: v for k, v in schema.metadata.items() if k.decode() not in plan.schema.metadata}
    return pa.RecordBatch.from_arrays(columns, schema=schema.with_metadata(own))


def _values(column: Column, arrays: dict[tuple[Kind, str], Array]) -> pa.Array:
    """Return the elements of a column end to end."""
    data = arrays["values", column.name]
    # Arrow keeps validity as it keeps booleans: a bit each.
    there = pa.array(arrays["valid", column.name]).buffers()[1] if column.nullable else None
    if is_text(column):
        offsets = arrays["text_offsets", column.name].astype(np.int32)
        buffers = [there, pa.py_buffer(offsets), pa.py_buffer(data)]
        return pa.Array.from_buffers(column.type, len(offsets) - 1, buffers)
    flat = pa.Array.from_buffers(column.type, data.size, [None, pa.py_buffer(data)])
    if column.shape:
        return pa.Array.from_buffers(column.value_type, len(data), [there], children=[flat])
    return flat if there is None else pa.Array.from_buffers(
        column.type, len(data), [there, pa.py_buffer(data)]
    )  # fmt: skip
