"""The compact encoding of a batch: exact and small.

A candidate set is stored without its sampled token, which the tokens already say, and as
differences of ranks (:mod:`ragged_format.compact.sets`); of heads, what sets and log-probs do not
say (:mod:`ragged_format.compact.heads`). Every number column is then split into byte planes (all
lowest bytes, then all second bytes, …); planes that hold one byte only are a number in the header.
Lengths are stored once per axis, not per column. What is left is compressed by the container
(Arrow's zstd): similar bytes side by side are what a general compressor is good at.

An encoded batch is one Arrow row of binary columns:

==================  ===============================================================================
``header``          JSON: ``rows``, and per block ``size`` (elements), ``dtype``, ``planes``
                    (constant byte, or null where the plane is stored), ``transform``
``record``          the columns of the record axis, and of strings elsewhere, as one IPC stream
``axis:NAME``       lengths of each record on a root axis, as planes
``column:NAME``     values of a number column end to end, as planes
``order:NAME``      ids of a set column by rank, as differences and planes
==================  ===============================================================================
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ragged_format.compact.decoder import HEADER, RECORDS
from ragged_format.compact.heads import encode_positions, encode_shared
from ragged_format.compact.planes import Block, split
from ragged_format.compact.sets import encode_sets
from ragged_format.lists import Int64, flat
from ragged_format.schema import RECORD, Axis, Column, RaggedSchema

__all__ = ["COMPACT_VERSION", "encode_batch", "encoded_schema"]

COMPACT_VERSION = 2
Values = npt.NDArray[Any]
Arrays = Mapping[str, Values]


def encoded_schema(schema: RaggedSchema) -> pa.Schema:
    """Return the Arrow schema of encoded batches of `schema`, without metadata."""
    names = [HEADER, RECORDS]
    names += [f"axis:{axis.name}" for axis in _root_axes(schema)]
    for column in _number_columns(schema):
        names.append(f"column:{column.name}")
        if is_set(column, schema):
            names.append(f"order:{column.name}")
    return pa.schema([pa.field(name, pa.large_binary(), nullable=False) for name in names])


def encode_batch(batch: pa.RecordBatch, schema: RaggedSchema) -> pa.RecordBatch:
    """Return `batch` as one row of binary columns.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
        Valid data of `schema`. Candidate sets that are not valid are stored as they are.
    schema : RaggedSchema
        Its declarations.
    """
    blocks: dict[str, Block] = {}
    stored: dict[str, bytes] = {}
    lists = {c.name: flat(batch.column(c.name)) for c in schema if c.axis != RECORD}
    numbers = _number_columns(schema)
    for axis in _root_axes(schema):
        lengths = lists[schema.on(axis.name)[0].name].lengths
        name = f"axis:{axis.name}"
        blocks[name], stored[name] = split(lengths)
    arrays = {c.name: np.ascontiguousarray(lists[c.name].numpy()).reshape(-1) for c in numbers}
    for column in numbers:
        name = f"column:{column.name}"
        values, transform = arrays[column.name], None
        if is_set(column, schema):
            values, order, transform = _encoded_set(column, schema, arrays)
            block, stored[f"order:{column.name}"] = split(order)
            blocks[f"order:{column.name}"] = replace(block, transform="differences")
        elif (inner := _encoded_head(column, schema, arrays)) is not None:
            values, transform = inner
        block, stored[name] = split(values)
        blocks[name] = replace(block, transform=transform)
    header = {"rows": batch.num_rows, "blocks": {n: b.to_json() for n, b in blocks.items()}}
    stored[HEADER] = json.dumps(header, separators=(",", ":")).encode()
    stored[RECORDS] = _pack_records(batch, schema)
    target = encoded_schema(schema)
    columns = [pa.array([stored[name]], pa.large_binary()) for name in target.names]
    return pa.RecordBatch.from_arrays(columns, schema=target)


def _encoded_set(
    column: Column, schema: RaggedSchema, arrays: Arrays
) -> tuple[Values, Values, str | None]:
    """Return what is stored of a set column, the differences of its order, and the transform."""
    values = arrays[column.name]
    sets = encode_sets(values, _counts(column.axis, schema, arrays), _sampled(schema, arrays))
    if sets is None:
        return values, np.empty(0, values.dtype), None
    return sets[0], np.diff(sets[1], prepend=0).astype(values.dtype), "ranks"


def _encoded_head(
    column: Column, schema: RaggedSchema, arrays: Arrays
) -> tuple[Values, str] | None:
    """Return what is stored of a column that repeats sets or heads, and the transform."""
    values = arrays[column.name]
    if _is_head(column, schema):
        for ids in (c for c in _number_columns(schema) if is_set(c, schema)):
            own = _counts(column.axis, schema, arrays)
            members = _counts(ids.axis, schema, arrays)
            positions = encode_positions(values, own, arrays[ids.name], members)
            if positions is not None:
                return positions, f"positions:{ids.axis}"
    if column.log_prob is not None and column.axis == "target" and not column.shape:
        for axis in _shared_axes(schema):
            rest = encode_shared(
                values, _sampled(schema, arrays), _counts(axis, schema, arrays),
                arrays[f"{axis}_ids"], arrays[f"{axis}_log_probs"],
            )  # fmt: skip
            if rest is not None:
                return rest, f"shared:{axis}"
    return None


def _is_head(column: Column, schema: RaggedSchema) -> bool:
    axis = schema.axes.get(column.axis)
    if axis is None or axis.counts is None or column.name != f"{axis.name}_ids":
        return False
    return schema[axis.counts].axis == "target" and not is_set(column, schema)


def _shared_axes(schema: RaggedSchema) -> list[str]:
    """Return the axes of heads that have ids and log-probs."""
    numbers = {column.name for column in _number_columns(schema)}
    heads = [c.axis for c in _number_columns(schema) if _is_head(c, schema)]
    return [axis for axis in heads if f"{axis}_log_probs" in numbers]


def _counts(axis: str, schema: RaggedSchema, arrays: Arrays) -> Int64:
    return arrays[str(schema.axes[axis].counts)].astype(np.int64)


def is_set(column: Column, schema: RaggedSchema) -> bool:
    """Return whether a column holds the ids of candidate sets on the target axis."""
    axis = schema.axes.get(column.axis)
    if axis is None or axis.counts is None or column.name != f"{axis.name}_ids":
        return False
    counts = schema[axis.counts]
    return bool(counts.head_kind == "set" and counts.axis == "target")


def _root_axes(schema: RaggedSchema) -> list[Axis]:
    return [a for a in schema.axes.values() if a.counts is None and schema.on(a.name)]


def _is_number(column: Column) -> bool:
    return bool(pa.types.is_integer(column.type) or pa.types.is_floating(column.type))


def _number_columns(schema: RaggedSchema) -> list[Column]:
    return [c for c in schema if c.axis != RECORD and _is_number(c) and not c.nullable]


def _pack_records(batch: pa.RecordBatch, schema: RaggedSchema) -> bytes:
    numbers = {column.name for column in _number_columns(schema)}
    plain = [name for name in batch.schema.names if name not in numbers]
    # Without metadata: the schema of the data has it.
    fields = [pa.field(name, schema[name].arrow_type) for name in plain]
    arrays = [batch.column(name) for name in plain] or [pa.nulls(batch.num_rows)]
    fields = fields or [pa.field("rows", pa.null())]
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, pa.schema(fields)) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields)))
    return sink.getvalue()


def _sampled(schema: RaggedSchema, arrays: Arrays) -> Values:
    if schema.profile == "packed":
        return arrays["target_ids"]
    out: Values = arrays["input_ids"][arrays["completion_mask"] != 0]
    return out
