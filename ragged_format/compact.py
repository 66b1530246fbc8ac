"""The compact encoding of a batch: exact, small, decoded a whole batch at a time.

A candidate set is stored without its sampled token, which the tokens already say, and as
differences of ranks (:mod:`ragged_format.compact_sets`); of heads, what sets and log-probs do not
say (:mod:`ragged_format.compact_heads`). Every number column is then split into byte planes (all
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
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ragged_format.compact_heads import (
    decode_positions,
    decode_shared,
    encode_positions,
    encode_shared,
)
from ragged_format.compact_planes import Block, Planes, split
from ragged_format.compact_sets import decode_sets, encode_sets
from ragged_format.errors import CorruptError, RaggedError, Where
from ragged_format.lists import Int64, flat, offsets_of, to_list
from ragged_format.schema import RECORD, Axis, Column, RaggedSchema

__all__ = ["COMPACT_VERSION", "decode_batch", "encode_batch", "encoded_schema"]

COMPACT_VERSION = 2
# What numpy, json and Arrow raise on data that was not written by the encoder.
_FOREIGN = (
    ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RecursionError,
    StopIteration, TypeError, ValueError, pa.ArrowException,
)  # fmt: skip
HEADER, RECORDS = "header", "record"
Bytes = npt.NDArray[np.uint8]
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


def decode_batch(
    encoded: pa.RecordBatch, schema: RaggedSchema, columns: list[str] | None = None
) -> pa.RecordBatch:
    """Return the batch that was encoded, bit for bit.

    Parameters
    ----------
    encoded : pyarrow.RecordBatch
        As :func:`encode_batch` makes it.
    schema : RaggedSchema
        Declarations of the encoded data.
    columns : list of str, optional
        Columns wanted. Others are not decoded, unless these need them.

    Raises
    ------
    CorruptError
        The blocks contradict the header (``RF-C001``).
    """
    wanted = schema if columns is None else schema.select(columns)
    try:
        header = json.loads(_stored(encoded, HEADER).tobytes())
        blocks = {name: Block(*block) for name, block in header["blocks"].items()}
        decoder = _Decoder(encoded, schema, blocks)
        records = decoder.records(int(header["rows"]))
        arrays = [
            decoder.list_column(c, records) if c.axis != RECORD else records.column(c.name)
            for c in wanted
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=wanted.to_arrow())
    except RaggedError:
        raise
    except _FOREIGN as err:
        raise CorruptError(
            "a compact batch contradicts its header", where=Where(), expected="whole blocks",
            got=f"{type(err).__name__}: {err}", remedy="restore the file from a copy",
        ) from err  # fmt: skip


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


def _expect_transform(block: Block, transform: str | None, name: str) -> None:
    if block.transform != transform:
        raise CorruptError(
            "a block has a transform that it cannot have", where=Where(column=name),
            expected=repr(transform), got=repr(block.transform),
        )  # fmt: skip


def _stored(encoded: pa.RecordBatch, name: str) -> Bytes:
    array = encoded.column(name)
    start, end = np.frombuffer(array.buffers()[1], np.int64, 2, array.offset * 8)
    return np.frombuffer(array.buffers()[2] or b"", np.uint8)[start:end]


def _sampled(schema: RaggedSchema, arrays: Arrays) -> Values:
    if schema.profile == "packed":
        return arrays["target_ids"]
    out: Values = arrays["input_ids"][arrays["completion_mask"] != 0]
    return out


class _Decoder:
    """Decodes columns of one batch, each array once."""

    def __init__(
        self, encoded: pa.RecordBatch, schema: RaggedSchema, blocks: dict[str, Block]
    ) -> None:
        self._encoded = encoded
        self._schema = schema
        self._blocks = blocks
        self._rows = 0
        self._values: dict[str, Values] = {}
        self._offsets: dict[str, Int64] = {}
        self._lengths: dict[str, Int64] = {}

    def records(self, rows: int) -> pa.RecordBatch:
        data = pa.py_buffer(_stored(self._encoded, RECORDS))
        batch = pa.ipc.open_stream(data).read_next_batch()
        if batch.num_rows != rows:
            raise CorruptError("records are missing", expected=rows, got=batch.num_rows)
        self._rows = rows
        return batch

    def values(self, column: Column) -> Values:
        """Return the flat values of a number column."""
        known = self._values.get(column.name)
        if known is None:
            block = self._blocks[f"column:{column.name}"]
            # Before memory is allocated: planes of one byte each say nothing about a size.
            size = int(self.offsets(column.axis)[-1]) * math.prod(column.shape)
            if block.size != size and (block.transform is None or block.size > size):
                raise CorruptError(
                    "a block has not the size of its axis", where=Where(column=column.name),
                    expected=size, got=block.size,
                )  # fmt: skip
            planes = Planes(block, _stored(self._encoded, f"column:{column.name}"))
            if block.transform is None:
                known = planes.array()
            else:
                known = self._restored(column, planes, *block.transform.partition(":")[::2])
            self._values[column.name] = known
        return known

    def _restored(self, column: Column, stored: Planes, transform: str, axis: str) -> Values:
        dtype = column.type.to_pandas_dtype()
        if transform in ("ranks", "positions") and stored.dtype.kind != "u":
            raise CorruptError(
                f"{transform} are unsigned integers", where=Where(column=column.name),
                expected="an unsigned type", got=stored.dtype.str,
            )  # fmt: skip
        if transform == "ranks":
            order = self._order(column.name)
            return decode_sets(stored, order, self._counts(column.axis), self._sampled, dtype)
        if transform == "positions":
            return decode_positions(
                stored, self._counts(column.axis), self._named(f"{axis}_ids"),
                self._counts(axis), dtype,
            )  # fmt: skip
        if transform == "shared":
            return decode_shared(
                stored.array(), self._sampled, self._counts(axis), self._named(f"{axis}_ids"),
                self._named(f"{axis}_log_probs"),
            )  # fmt: skip
        raise CorruptError(
            "a block has a transform that does not exist",
            expected="ranks, positions or shared", got=transform,
        )  # fmt: skip

    def _named(self, name: str) -> Values:
        return self.values(self._schema[name])

    def _counts(self, axis: str) -> Int64:
        known = self._lengths.get(axis)
        if known is None:
            known = self._named(str(self._schema.axes[axis].counts)).astype(np.int64)
            self._lengths[axis] = known
        return known

    def _order(self, name: str) -> Int64:
        block = self._blocks[f"order:{name}"]
        ranked = self._blocks[f"column:{name}"].size
        _expect_transform(block, "differences", f"order:{name}")
        if block.size > ranked or np.dtype(block.dtype).kind not in "iu":
            raise CorruptError(
                "ranks are of ids, at most as many as elements", where=Where(column=name),
                expected=f"at most {ranked} integers", got=f"{block.size} of {block.dtype}",
            )  # fmt: skip
        steps = Planes(block, _stored(self._encoded, f"order:{name}")).array()
        # In their own type, in which a difference may have wrapped around.
        return np.cumsum(steps, dtype=steps.dtype).astype(np.int64)

    @cached_property
    def _sampled(self) -> Values:
        if self._schema.profile == "packed":
            return self._named("target_ids")
        out: Values = self._named("input_ids")[self._named("completion_mask") != 0]
        return out

    def offsets(self, axis: str) -> Int64:
        """Return the offsets of an axis per record."""
        known = self._offsets.get(axis)
        if known is None:
            counts = self._schema.axes[axis].counts
            if counts is None:
                name = f"axis:{axis}"
                _expect_transform(self._blocks[name], None, name)
                if self._blocks[name].size != self._rows:
                    raise CorruptError(
                        "an axis has not one length for each record", where=Where(column=name),
                        expected=self._rows, got=self._blocks[name].size,
                    )  # fmt: skip
                known = offsets_of(Planes(self._blocks[name], _stored(self._encoded, name)).array())
            else:
                outer = self.offsets(self._schema[counts].axis)
                known = offsets_of(self._counts(axis))[outer]
            self._offsets[axis] = known
        return known

    def list_column(self, column: Column, records: pa.RecordBatch) -> pa.Array:
        if f"column:{column.name}" not in self._blocks:
            return records.column(column.name).cast(column.arrow_type)
        return to_list(self.values(column), self.offsets(column.axis), column)
