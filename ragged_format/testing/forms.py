"""One logical batch in the physical forms that producers hand over."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import pyarrow as pa

from ragged_format.lists import flat
from ragged_format.parse import parse_schema
from ragged_format.schema import RECORD

__all__ = ["variants"]


def variants(batch: pa.RecordBatch, *, same_schema: bool = False) -> dict[str, Any]:
    """Return physical variants of `batch`, by name; all hold the same logical records.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
        Batch of this format.
    same_schema : bool
        Only the variants that are record batches with the schema of `batch`, so that they are
        input of every operation without :func:`ragged_format.canonical`.

    Returns
    -------
    dict
        ``"itself"``; ``"slice"``: cut out of a larger parent; ``"first offset"``: lists that start
        behind unused values; ``"unused tail"``: values behind the last list; ``"ipc"``: read back
        from a stream. Without `same_schema` also ``"table"``: a table of that one batch;
        ``"chunks"``: one chunk per record, between empty ones; ``"no chunks"`` for an empty batch;
        ``"32-bit"``: lists with 32-bit offsets; ``"nullable"``: everything declared nullable;
        ``"bare"``: no metadata; ``"reversed"``: columns in another order; ``"polars"``: through
        polars, where it is installed. These need `schema` in :func:`ragged_format.canonical`.
    """
    out: dict[str, Any] = {
        "itself": batch,
        "slice": _slice(batch),
        "first offset": _shifted(batch, front=1, back=0),
        "unused tail": _shifted(batch, front=0, back=1),
        "ipc": _through_ipc(batch),
    }
    if same_schema:
        return out
    table = pa.Table.from_batches([batch])
    empty = batch.slice(0, 0)
    parts = [part for i in range(batch.num_rows) for part in (empty, batch.slice(i, 1))]
    out["table"] = table
    out["chunks"] = pa.Table.from_batches([*parts, empty])
    if batch.num_rows == 0:
        out["no chunks"] = pa.Table.from_batches([], batch.schema)
    out["32-bit"] = _narrow(batch)
    out["nullable"] = _nullable(batch)
    out["bare"] = table.cast(_bare(batch.schema))
    out["reversed"] = table.select(table.schema.names[::-1])
    # Importing polars starts its thread pool; whoever asks for its form has it installed.
    if importlib.util.find_spec("polars") is not None:
        out["polars"] = importlib.import_module("polars").from_arrow(table, rechunk=False)
    return out


def _slice(batch: pa.RecordBatch) -> pa.RecordBatch:
    rows = batch.num_rows
    order = np.r_[rows - 1 : rows, 0:rows, 0:1] if rows else np.zeros(0, np.int64)
    return batch.take(pa.array(order)).slice(1 if rows else 0, rows)


def _shifted(batch: pa.RecordBatch, *, front: int, back: int) -> pa.RecordBatch:
    """Return the batch with `front` lists of unused values before the first, `back` behind."""
    rows = batch.num_rows
    order = np.r_[np.arange(rows)[-front:] if front else [], 0:rows, np.arange(rows)[:back]]
    grown = batch.take(pa.array(order.astype(np.int64)))
    arrays = []
    for column in parse_schema(batch.schema):
        array = grown.column(column.name)
        if column.axis == RECORD:
            arrays.append(batch.column(column.name))
            continue
        start = min(front, rows)
        offsets = array.offsets[start : start + rows + 1]
        # A fresh list array, so that only its offsets, not its Arrow offset, start late.
        own = pa.array(offsets.to_numpy().copy())
        arrays.append(pa.LargeListArray.from_arrays(own, array.values, type=column.arrow_type))
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def _through_ipc(batch: pa.RecordBatch) -> pa.RecordBatch:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    with pa.ipc.open_stream(sink.getvalue()) as reader:
        return reader.read_next_batch()


def _narrow(batch: pa.RecordBatch) -> pa.RecordBatch:
    arrays, fields = [], []
    for field, array in zip(batch.schema, batch.columns, strict=True):
        if pa.types.is_large_list(field.type):
            values, offsets = flat(array)
            narrow = pa.list_(field.type.value_field)
            array = pa.ListArray.from_arrays(
                pa.array(offsets.astype(np.int32)), values, type=narrow
            )
            field = field.with_type(narrow)
        arrays.append(array)
        fields.append(field)
    return pa.RecordBatch.from_arrays(
        arrays, schema=pa.schema(fields, metadata=batch.schema.metadata)
    )


def _nullable(batch: pa.RecordBatch) -> pa.RecordBatch:
    fields = []
    for field in batch.schema:
        if pa.types.is_large_list(field.type):
            item = field.type.value_field.with_nullable(True)  # noqa: FBT003
            field = field.with_type(pa.large_list(item))
        fields.append(field.with_nullable(True))  # noqa: FBT003
    schema = pa.schema(fields, metadata=batch.schema.metadata)
    arrays = [_as(array, field) for array, field in zip(batch.columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _as(array: pa.Array, field: pa.Field) -> pa.Array:
    if not pa.types.is_large_list(field.type):
        return array
    values, offsets = flat(array)
    return pa.LargeListArray.from_arrays(pa.array(offsets), values, type=field.type)


def _bare(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(f.name, f.type, nullable=f.nullable) for f in schema])
