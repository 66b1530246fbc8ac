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
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from ragged_format.canonical import canonical
from ragged_format.errors import InvariantError, SchemaMismatchError, Where
from ragged_format.lists import Flat, Int64, flat, offsets_of, ranges
from ragged_format.parse import parse_schema
from ragged_format.schema import RECORD, Column

__all__ = ["canonical_json", "digest", "record_digests", "schema_digest", "text_digest"]

Bytes = npt.NDArray[np.uint8]

_TYPE_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}
_u64 = struct.Struct("<Q").pack
_i64 = struct.Struct("<q").unpack_from
_NOTHING = np.empty(0, np.uint8)


class _Plan(NamedTuple):
    """How to digest one column: `width` is the size of one element in bytes, 0 for text."""

    column: Column
    width: int
    plain: bool  # a list of scalars without nulls


class _Known(NamedTuple):
    schema: pa.Schema
    start: Any  # a hasher that has seen the declarations
    plans: list[_Plan]


_recent: list[_Known] = []


def digest(batch: pa.RecordBatch) -> bytes:
    """Return the digest of a batch's logical content, 16 bytes.

    Guarantees: reads only, memory-safe also on arrays that were not validated. 32-bit lists and
    string views are digested as what they hold.

    Raises
    ------
    NotRaggedError, SchemaMismatchError
        The schema is not one of this format.
    InvariantError
        A list is null, or a buffer is shorter than its array says (``RF-I001``, ``RF-I002``).

    Examples
    --------
    >>> from ragged_format import sample_schema
    >>> schema = sample_schema(vocab_size=10, columns=[])
    >>> row = {"sample_id": "a", "input_ids": [1, 2], "completion_mask": [0, 1]}
    >>> batch = pa.RecordBatch.from_pylist([row, row | {"sample_id": "b"}], schema=schema)
    >>> digest(batch.slice(1)).hex()
    '4f92e1770a433729d5eeddc9c02f1ca7'
    """
    known, batch = _prepare(batch)
    hasher = known.start.copy()
    update = hasher.update
    update(_u64(batch.num_rows))
    for plan, array in zip(known.plans, batch.columns, strict=True):
        if plan.plain and _update_plain(update, array, plan.width):
            continue
        if plan.column.axis != RECORD:
            array, lists = _flat(array, plan)
            update(lists)
        valid, offsets, data = _values(array, plan)
        if valid is not None:
            update(valid)
        if offsets is not None:
            update(offsets)
        update(data)
    return bytes(hasher.digest())


def _update_plain(update: Callable[[Any], None], array: pa.Array, width: int) -> bool:
    """Digest the common form of a list straight from its buffers; False if this is not it."""
    rows, values = len(array), array.values
    missing, offsets, holes, data = array.buffers()
    size = 8 * rows
    if not rows or missing or holes or array.offset or values.offset or offsets.size < size + 8:
        return False
    view = memoryview(offsets).cast("B")
    used = _i64(view, size)[0] * width
    if _i64(view, 0)[0] != 0 or not 0 <= used <= (data.size if data else 0):
        return False
    update(view[: size + 8])
    if used:
        update(memoryview(data).cast("B")[:used])
    return True


def record_digests(batch: pa.RecordBatch) -> Bytes:
    """Return the digest of every record, (n, 16) uint8: row i is ``digest(batch.slice(i, 1))``.

    One pass: columns are prepared once, then each record costs two updates per column.
    """
    known, batch = _prepare(batch)
    rows = batch.num_rows
    pieces: list[tuple[memoryview, list[int]]] = []
    for plan, array in zip(known.plans, batch.columns, strict=True):
        pieces.extend(_record_pieces(plan, array))
    one = known.start.copy()
    one.update(_u64(1))
    out = bytearray()
    for row in range(rows):
        hasher = one.copy()
        update = hasher.update
        for data, bounds in pieces:
            update(data[bounds[row] : bounds[row + 1]])
        out += hasher.digest()
    return np.frombuffer(out, np.uint8).reshape(rows, 16)


def _record_pieces(plan: _Plan, array: pa.Array) -> list[tuple[memoryview, list[int]]]:
    """Return bytes and where each record's share of them begins; the last bound is the end."""
    rows = len(array)
    bounds = np.arange(rows + 1, dtype=np.int64)
    pieces: list[tuple[npt.NDArray[Any], Int64]] = []
    if plan.column.axis != RECORD:
        array, bounds = _flat(array, plan)
        own = np.zeros((rows, 2), np.int64)
        own[:, 1] = np.diff(bounds)
        pieces.append((own, np.arange(rows + 1, dtype=np.int64) * 16))
    valid, offsets, data = _values(array, plan)
    if valid is not None:
        pieces.append((valid, bounds))
    if offsets is None:
        pieces.append((data, bounds * plan.width))
    else:
        entries = np.diff(bounds) + 1
        firsts = np.repeat(offsets[bounds[:-1]], entries)
        pieces.append((offsets[ranges(bounds[:-1], entries)] - firsts, offsets_of(entries) * 8))
        pieces.append((data, offsets[bounds]))
    return [
        (data.reshape(-1).data.cast("B"), bounds.tolist()) for data, bounds in pieces if data.size
    ]


def _flat(array: pa.Array, plan: _Plan) -> Flat:
    _check(array, plan)
    return flat(array)


def _values(array: pa.Array, plan: _Plan) -> tuple[Bytes | None, Int64 | None, Bytes]:
    """Return validity, text offsets and bytes of the elements, nulls made empty or zero."""
    _check(array, plan)
    count = len(array)
    valid = None
    if plan.column.nullable:
        valid = np.ones(count, np.uint8)
        if array.null_count:
            valid = array.is_valid().to_numpy(zero_copy_only=False).view(np.uint8)
    if plan.width:
        if plan.column.shape:
            array = array.flatten()
        if not count:
            return valid, None, _NOTHING
        start = array.offset * (array.type.bit_width // 8)
        data = np.frombuffer(array.buffers()[1], np.uint8, count * plan.width, start)
        if array.null_count and valid is not None:
            data = (data.reshape(count, plan.width) * valid[:, None]).reshape(-1)
        return valid, None, data
    if array.null_count:
        array = pc.fill_null(array, pa.scalar("").cast(array.type))
    if not count:
        return valid, np.zeros(1, np.int64), _NOTHING
    _, ends, text = array.buffers()
    offsets = np.frombuffer(ends, np.int32, count + 1, 4 * array.offset).astype(np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    data = np.frombuffer(text, np.uint8, last - first, first) if last > first else _NOTHING
    return valid, offsets - first, data


def _check(array: pa.Array, plan: _Plan) -> None:
    """Raise unless buffers may be read as the array says."""
    where = Where(column=plan.column.name)
    try:
        array.validate(full=True)
    except (pa.ArrowInvalid, pa.ArrowIndexError) as err:
        raise InvariantError(
            "an Arrow array is invalid", where=where, got=str(err),
            expected="non-decreasing offsets inside their child, whole buffers, UTF-8 text",
        ) from err  # fmt: skip
    nested = plan.column.axis != RECORD and pa.types.is_large_list(array.type)
    if array.null_count and (nested or not plan.column.nullable):
        raise InvariantError(
            "a value is null", code="RF-I002", where=where, expected="no nulls", got="null"
        )


def schema_digest(schema: pa.Schema) -> bytes:
    """Return the digest of a schema with all its metadata, 16 bytes."""
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


def _prepare(batch: pa.RecordBatch) -> tuple[_Known, pa.RecordBatch]:
    schema = batch.schema
    for known in _recent:
        if known.schema is schema or known.schema.equals(schema, check_metadata=True):
            return known, batch
    if any(pa.types.is_list(field.type) for field in schema):
        return _prepare(canonical(batch))
    start, plans = xxhash.xxh3_128(), []
    for column in parse_schema(schema):
        shape = f"[{','.join(map(str, column.shape))}]" if column.shape else ""
        mark = "?" if column.nullable else ""
        text = f"{column.name}:{column.axis}:{_type_name(column.type)}{shape}{mark}".encode()
        start.update(struct.pack("<I", len(text)) + text)
        is_text = pa.types.is_string(column.type) or pa.types.is_binary(column.type)
        width = 0 if is_text else column.type.bit_width // 8 * column.width
        plain = column.axis != RECORD and bool(width) and not (column.nullable or column.shape)
        plans.append(_Plan(column, width, plain))
    known = _Known(schema, start, plans)
    _recent.insert(0, known)
    del _recent[8:]
    return known, batch
