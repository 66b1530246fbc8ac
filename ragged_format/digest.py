"""Digests over logical content: the same for a slice, a copy and a rewrite by another tool.

Every digest is xxh3-128 of a byte sequence, stored as 32 lower-case hexadecimal digits (of the
big-endian form that xxHash calls canonical). They detect corruption, not tampering.

**Batch digest.** The sequence is, all integers little-endian:

1. for every column, in schema order, u32 length and UTF-8 bytes of its declaration
   ``name:axis:type``, where ``type`` is ``int8`` … ``uint64``, ``float16``, ``float32``,
   ``float64``, ``string`` or ``binary``, followed by ``[n]`` or ``[n,m,…]`` if the column has a
   fixed shape and by ``?`` if it is nullable;
2. u64 number of records n;
3. for every column, in schema order:

   a. on an axis below the record: u64 offsets of the n lists, (n + 1) of them, counted in elements
      from 0. t, below, is the last one; on the record axis t = n;
   b. if the column is nullable: t bytes, 1 for a value and 0 for a null;
   c. strings and binary: u64 offsets of the t values, (t + 1) of them, counted in bytes from 0,
      then their bytes end to end. A null has length 0;
   d. numbers: the t values (times the size of the shape) as they are in memory. A null is all
      zeros.

Floats are taken bit by bit: 0.0 and -0.0 differ, and NaNs with the same bits agree. Nothing
physical enters: neither slicing, nor the first offset, nor the width of offsets, nor chunking, nor
schema metadata, nor what lies under a null. The digest of a record is that of the batch that holds
only this record; equal sample_id and digest is a duplicate, unequal digest a conflict.

**Schema digest.** The sequence is the canonical JSON text of::

    {"fields": [{"metadata": {key: value, …}, "name": …, "nullable": …, "type": …}, …],
     "metadata": {key: value, …}}

with all metadata, whoever wrote it. A type is its name as above, or ``{"list": type, "nullable":
…}``, or ``{"fixed_size_list": type, "nullable": …, "size": …}``; names of list children do not
enter, as tools rename them. Canonical JSON is UTF-8 without whitespace, keys sorted by code point,
non-ASCII characters unescaped.
"""

from __future__ import annotations

import json
import struct
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from ragged_format.canonical import as_batch, canonical
from ragged_format.errors import InvariantError, SchemaMismatchError, Where
from ragged_format.flatbuffer import Layout, layout_of, parse_header, prefix_size
from ragged_format.lists import Int64, offsets_of, ranges
from ragged_format.parse import not_a_schema, parse_schema
from ragged_format.schema import RECORD, Column
from ragged_format.soundness import check_arrays

__all__ = [
    "DigestPlan",
    "canonical_json",
    "digest",
    "digest_plan",
    "message_digest",
    "message_record_digests",
    "record_digests",
    "schema_digest",
    "text_digest",
]

Bytes = npt.NDArray[np.uint8]

_TYPE_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}
_u64 = struct.Struct("<Q").pack
_i32_pair = struct.Struct("<ii").unpack
_pair = struct.Struct("<qq").pack
_ONES = memoryview(b"\1" * (1 << 16))
_EMPTY = memoryview(b"")


class _Plan(NamedTuple):
    """Where a column lies in a message, and how to digest it."""

    plain: bool  # a list of scalars without nulls
    nulls: int  # place of its null count among the nodes
    values_nulls: int  # the same of its values
    offsets: int  # places among the buffers: of the list's offsets
    validity: int  # of the values' validity; text offsets or data and text data follow
    width: int  # size of one element in bytes, 0 for text
    is_list: bool
    column: Column


class DigestPlan(NamedTuple):
    """How to digest batches of one schema.

    Attributes
    ----------
    schema : pyarrow.Schema
        The schema.
    start : xxhash.xxh3_128
        A hasher that has seen the declarations.
    columns : list
        How to digest each column.
    sizes : (int, int)
        Entries of nodes and of buffers in a message.
    """

    schema: pa.Schema
    start: Any
    columns: list[_Plan]
    sizes: tuple[int, int]


_recent: list[DigestPlan] = []


def digest(batch: pa.RecordBatch) -> bytes:
    """Return the digest of a batch's logical content, 16 bytes.

    Guarantees: 32-bit lists are digested as what they hold. Copies the batch once.

    Raises
    ------
    NotRaggedError, SchemaMismatchError
        The schema is not one of this format.
    InvariantError
        An array is not valid, or something is null that may not be (``RF-I001``, ``RF-I002``).

    Examples
    --------
    >>> from ragged_format import sample_schema
    >>> schema = sample_schema(vocab_size=10, columns=[])
    >>> row = {"sample_id": "a", "input_ids": [1, 2], "completion_mask": [0, 1]}
    >>> batch = pa.RecordBatch.from_pylist([row, row | {"sample_id": "b"}], schema=schema)
    >>> digest(batch.slice(1)).hex()
    '4f92e1770a433729d5eeddc9c02f1ca7'
    """
    return message_digest(*_serialize(batch))


def message_digest(plan: DigestPlan, layout: Layout) -> bytes:
    """Return the digest of the batch that an uncompressed message holds, 16 bytes.

    Guarantees: no copy; memory-safe whatever the message says.

    Raises
    ------
    InvariantError
        The buffers do not hold what the message says (``RF-I001``), or something is null that may
        not be (``RF-I002``).
    """
    rows, nodes, buffers, body, _ = layout
    if (len(nodes), len(buffers)) != plan.sizes:
        raise _broken(f"{len(nodes) // 2} nodes, {len(buffers) // 2} buffers")
    hasher = plan.start.copy()
    update = hasher.update
    update(_u64(rows))
    bounds = _bounds_of(rows)
    size = bounds.size
    last_offset = len(body) - size
    for of_column in plan.columns:
        plain, nulls, values_nulls, place, validity, width, is_list, column = of_column
        if plain and rows and not (nodes[nulls] or nodes[values_nulls]):
            # Lists of numbers, whole and from offset 0: both buffers in one, as Arrow writes them.
            start, data = buffers[place], buffers[validity + 2]
            if data == start + size == start + buffers[place + 1] and 0 <= start <= last_offset:
                first, used = bounds.unpack_from(body, start)
                end = data + used * width
                part = body[start:end]
                if not first and size <= len(part) == end - start <= size + buffers[validity + 3]:
                    update(part)
                    continue
        elif width and not (is_list or nodes[values_nulls]) and rows <= len(_ONES):
            # Numbers of the record axis without nulls.
            data, used = buffers[validity + 2], rows * width
            values = body[data : data + used] if data >= 0 else _EMPTY
            if len(values) == used <= buffers[validity + 3]:
                if column.nullable:
                    update(_ONES[:rows])
                update(values)
                continue
        elif rows == 1 and not is_list:
            value = _one_value(of_column, layout)
            if value is not None:
                update(value)
                continue
        first, count = 0, rows
        if is_list:
            lists = _list_offsets(of_column, layout)
            first, count = int(lists[0]), int(lists[-1] - lists[0])
            update(lists - first)
        for piece in _values(of_column, layout, first, count):
            if piece is not None and len(piece):
                update(piece)
    return bytes(hasher.digest())


def _one_value(plan: _Plan, layout: Layout) -> bytes | None:
    """Return what one record's value adds, None where the general way has to look."""
    buffers, body, column = layout.buffers, layout.body, plan.column
    at, validity, is_null = plan.validity, b"", False
    if layout.nodes[plan.values_nulls]:
        # The count says that it is null; what counts is the bit.
        offset, size = buffers[at : at + 2]
        if not column.nullable or size < 1 or not 0 <= offset < len(body):
            return None
        is_null = not body[offset] & 1
    if column.nullable:
        validity = b"\0" if is_null else b"\1"
    offset, size = buffers[at + 2 : at + 4]
    if plan.width:
        if not is_null or size < plan.width or not 0 <= offset <= len(body) - plan.width:
            return None
        return validity + bytes(plan.width)
    if size < 8 or not 0 <= offset <= len(body) - 8:
        return None
    start, stop = _i32_pair(body[offset : offset + 8])
    offset, size = buffers[at + 4 : at + 6]
    if not (0 <= start <= stop <= size and 0 <= offset <= len(body) - stop):
        return None
    if is_null:
        return validity + _pair(0, 0)
    return b"".join((validity, _pair(0, stop - start), body[offset + start : offset + stop]))


def record_digests(batch: pa.RecordBatch) -> Bytes:
    """Return the digest of every record, (n, 16) uint8: row i is ``digest(batch.slice(i, 1))``.

    One pass: columns are prepared once, then each record costs two updates per column.
    """
    return message_record_digests(*_serialize(batch))


def message_record_digests(plan: DigestPlan, layout: Layout) -> Bytes:
    """Return the digest of every record that an uncompressed message holds, (n, 16) uint8.

    Guarantees: no copy of its values.

    Raises
    ------
    InvariantError
        As :func:`message_digest` does.
    """
    pieces: list[tuple[memoryview, list[int]]] = []
    for of_column in plan.columns:
        pieces.extend(_record_pieces(of_column, layout))
    one = plan.start.copy()
    one.update(_u64(1))
    out = bytearray()
    for row in range(layout.rows):
        hasher = one.copy()
        update = hasher.update
        for data, bounds in pieces:
            update(data[bounds[row] : bounds[row + 1]])
        out += hasher.digest()
    return np.frombuffer(out, np.uint8).reshape(layout.rows, 16)


@lru_cache(maxsize=64)
def _bounds_of(rows: int) -> struct.Struct:
    """Return what unpacks the first and the last of (rows + 1) offsets."""
    return struct.Struct(f"<q{8 * (rows - 1)}xq") if rows else struct.Struct("<q")


def _list_offsets(plan: _Plan, layout: Layout) -> Int64:
    if layout.nodes[plan.nulls]:
        raise _null(plan)
    if not layout.rows:
        return np.zeros(1, np.int64)
    offsets = _array(layout, plan.offsets, np.int64, layout.rows + 1)
    if offsets[0] < 0 or offsets[-1] < offsets[0]:
        raise _broken(f"offsets from {offsets[0]} to {offsets[-1]}")
    return offsets


def _values(plan: _Plan, layout: Layout, first: int, count: int) -> tuple[Bytes | None, Any, Any]:
    """Return validity, text offsets and bytes of the elements, nulls made empty or zero."""
    nulls = layout.nodes[plan.values_nulls]
    valid = None
    if plan.column.nullable:
        valid = np.ones(count, np.uint8)
        if nulls and count:
            bits = _array(layout, plan.validity, np.uint8, (first + count + 7) // 8)
            valid = np.unpackbits(bits, bitorder="little")[first : first + count]
    elif nulls:
        raise _null(plan)
    data: Any
    if plan.width:
        data = _view(layout, plan.validity + 2, first * plan.width, count * plan.width)
        if valid is not None and nulls:
            whole = np.frombuffer(data, np.uint8).reshape(count, plan.width)
            data = np.ascontiguousarray(whole * valid[:, None]).reshape(-1)
        return valid, None, data
    if not count:
        return valid, np.zeros(1, np.int64), b""
    if count == 1 and not first and not nulls:  # one record; numpy would take longer
        start, stop = _i32_pair(_view(layout, plan.validity + 2, 0, 8))
        if 0 <= start <= stop:
            data = _view(layout, plan.validity + 4, start, stop - start)
            return valid, _pair(0, stop - start), data
    ends = _array(layout, plan.validity + 2, np.int32, first + count + 1)[first:]
    offsets = ends.astype(np.int64)
    start, stop = int(offsets[0]), int(offsets[-1])
    if start < 0 or stop < start:
        raise _broken(f"text offsets from {start} to {stop}")
    data = _view(layout, plan.validity + 4, start, stop - start)
    offsets -= start
    if valid is not None and nulls:
        lengths = np.diff(offsets)
        if (lengths < 0).any():
            raise _broken("decreasing text offsets")
        data = np.frombuffer(data, np.uint8)[np.repeat(valid.astype(bool), lengths)]
        offsets = offsets_of(lengths * valid.astype(np.int64))
    return valid, offsets, data


def _record_pieces(plan: _Plan, layout: Layout) -> list[tuple[memoryview, list[int]]]:
    """Return bytes and where each record's share of them begins; the last bound is the end."""
    rows = layout.rows
    bounds = np.arange(rows + 1, dtype=np.int64)
    pieces: list[tuple[Any, Int64]] = []
    if plan.is_list:
        lists = _list_offsets(plan, layout)
        bounds = lists - lists[0]
        own = np.zeros((rows, 2), np.int64)
        own[:, 1] = np.diff(bounds)
        pieces.append((own.reshape(-1), np.arange(rows + 1, dtype=np.int64) * 16))
    first = int(lists[0]) if plan.is_list else 0
    valid, offsets, data = _values(plan, layout, first, int(bounds[-1]))
    if valid is not None:
        pieces.append((valid, bounds))
    if offsets is None:
        pieces.append((data, bounds * plan.width))
    else:
        offsets = np.frombuffer(offsets, np.int64)
        entries = np.diff(bounds) + 1
        firsts = np.repeat(offsets[bounds[:-1]], entries)
        pieces.append((offsets[ranges(bounds[:-1], entries)] - firsts, offsets_of(entries) * 8))
        pieces.append((data, offsets[bounds]))
    return [(memoryview(data).cast("B"), ends.tolist()) for data, ends in pieces if len(data)]


def _view(layout: Layout, index: int, start: int, size: int) -> memoryview:
    """Return bytes of a buffer; raises unless it holds them."""
    offset, length = layout.buffers[index], layout.buffers[index + 1]
    begin = offset + start
    end = begin + size
    if offset < 0 or not 0 <= start <= start + size <= length or end > len(layout.body):
        raise _broken(f"{size} bytes at {start} of a buffer of {length} at {offset}")
    return layout.body[begin:end]


def _array(layout: Layout, index: int, dtype: Any, count: int) -> npt.NDArray[Any]:
    """Return the first elements of a buffer."""
    return np.frombuffer(_view(layout, index, 0, count * np.dtype(dtype).itemsize), dtype)


def _broken(detail: str) -> InvariantError:
    return InvariantError(
        "an Arrow array is invalid", got=detail,
        expected="non-decreasing offsets inside their child, whole buffers",
    )  # fmt: skip


def _null(plan: _Plan) -> InvariantError:
    return InvariantError(
        "a value is null", code="RF-I002", where=Where(column=plan.column.name),
        expected="no nulls", got="null",
    )  # fmt: skip


def schema_digest(schema: pa.Schema) -> bytes:
    """Return the digest of a schema with all its metadata, 16 bytes."""
    if not isinstance(schema, pa.Schema):
        raise not_a_schema(schema)
    fields = [
        {
            "name": field.name,
            "nullable": field.nullable,
            "type": _type_json(field.type),
            "metadata": _metadata_json(field.metadata),
        }
        for field in schema
    ]
    return text_digest(
        canonical_json({"fields": fields, "metadata": _metadata_json(schema.metadata)})
    )


def canonical_json(value: Any) -> bytes:
    """Return the canonical JSON text of plain values, UTF-8."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def text_digest(data: bytes) -> bytes:
    """Return xxh3-128 of some bytes."""
    return bytes(xxhash.xxh3_128_digest(data))


def _type_name(kind: pa.DataType) -> str:
    return _TYPE_NAMES.get(str(kind), str(kind))


def _type_json(kind: pa.DataType) -> Any:
    if pa.types.is_fixed_size_list(kind):
        item = kind.value_field
        return {
            "fixed_size_list": _type_json(item.type), "nullable": item.nullable,
            "size": kind.list_size,
        }  # fmt: skip
    if pa.types.is_large_list(kind):
        item = kind.value_field
        return {"list": _type_json(item.type), "nullable": item.nullable}
    return _type_name(kind)


def _metadata_json(metadata: dict[bytes, bytes] | None) -> dict[str, str]:
    try:
        return {key.decode(): value.decode() for key, value in (metadata or {}).items()}
    except UnicodeDecodeError as err:
        raise SchemaMismatchError(
            "metadata is UTF-8", code="RF-S009", expected="UTF-8 text", got=str(err)
        ) from err


def _serialize(batch: pa.RecordBatch) -> tuple[DigestPlan, Layout]:
    """Return the content of a batch in Arrow's serialised form, where slices are cut out."""
    batch = as_batch(batch)
    plan = _find(batch.schema)
    if plan is None:
        if any(pa.types.is_list(kind) for kind in batch.schema.types):
            batch = canonical(batch)
        plan = digest_plan(batch.schema)
    check_arrays(batch)
    view = memoryview(batch.serialize()).cast("B")
    size = prefix_size(view[:8])
    flatbuffer = view[8 : 8 + size]
    return plan, layout_of(flatbuffer, parse_header(flatbuffer), view[8 + size :])


def _find(schema: pa.Schema) -> DigestPlan | None:
    for plan in _recent:
        if plan.schema is schema or plan.schema.equals(schema, check_metadata=True):
            return plan
    return None


def digest_plan(schema: pa.Schema) -> DigestPlan:
    """Return how to digest batches of a schema; the last few are remembered."""
    if plan := _find(schema):
        return plan
    start, plans = xxhash.xxh3_128(), []
    node = buffer = 0
    for column in parse_schema(schema):
        shape = f"[{','.join(map(str, column.shape))}]" if column.shape else ""
        mark = "?" if column.nullable else ""
        text = f"{column.name}:{column.axis}:{_type_name(column.type)}{shape}{mark}".encode()
        start.update(struct.pack("<I", len(text)) + text)
        is_text = pa.types.is_string(column.type) or pa.types.is_binary(column.type)
        width = 0 if is_text else column.type.bit_width // 8 * column.width
        # Arrow's order: a list has validity and offsets, a fixed-size list validity, then the
        # values validity, for text offsets, and data.
        is_list = column.axis != RECORD
        values_node = node + is_list + bool(column.shape)
        validity = buffer + 2 * is_list + bool(column.shape)
        plain = is_list and not (is_text or column.nullable or column.shape)
        plans.append(
            _Plan(
                plain, 2 * node + 1, 2 * values_node + 1, 2 * buffer + 2, 2 * validity, width,
                is_list, column,
            )
        )  # fmt: skip
        node = values_node + 1
        buffer = validity + 2 + is_text
    plan = DigestPlan(schema, start, plans, (2 * node, 2 * buffer))
    _recent.insert(0, plan)
    del _recent[8:]
    return plan
