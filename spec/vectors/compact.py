"""Compact files by the words of §5.5, independent of the library's encoder."""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

import ragged_format as rf
from ragged_format.digest import digest, schema_digest
from ragged_format.known_schemas import known_schema
from ragged_format.schema import RECORD, Column, RaggedSchema
from ragged_format.trailer import Tally, batch_metadata

if TYPE_CHECKING:
    from spec.vectors.build import Metadata

Header = dict[str, Any]
Columns = dict[str, bytes]
# Changes a header and the bytes of the columns of one batch, as no writer does.
Edit = Callable[[Header, Columns], None]
Flat = dict[str, list[Any]]


def compact_file(
    schema: pa.Schema,
    batches: Sequence[pa.RecordBatch],
    *,
    edit: Edit | None = None,
    metadata: Metadata | None = None,
) -> bytes:
    """Return a compact file; `metadata` replaces keys of its schema."""
    parsed = rf.parse_schema(schema)
    stated: Metadata = {
        b"ragged_format:version": b"0.1",
        b"ragged_format:required_features": b'["compact"]',
        b"ragged_format:compact_version": b"2",
        b"ragged_format:schema": base64.b64encode(known_schema(schema).message),
        **(metadata or {}),
    }
    names = _names(parsed)
    fields = [pa.field(name, pa.large_binary(), nullable=False) for name in names]
    outer = pa.schema(fields, metadata=stated)
    sink, tally = io.BytesIO(), Tally()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, outer, options=options) as writer:
        for batch in batches:
            header, columns = _encoded(batch, parsed)
            if edit is not None:
                edit(header, columns)
            columns["header"] = json.dumps(header).encode()
            row = pa.RecordBatch.from_pylist([{n: columns[n] for n in names}], schema=outer)
            writer.write_batch(row, custom_metadata=batch_metadata(digest(batch), {}))
            tally.add(digest(batch), batch.num_rows, {})
        trailer = tally.trailer(schema_digest(schema).hex())
        empty = pa.RecordBatch.from_pylist([], schema=outer)
        writer.write_batch(empty, custom_metadata=trailer.to_metadata())
    return sink.getvalue()


def _is_block(column: Column) -> bool:
    text = column.type in (pa.string(), pa.binary())
    return column.axis != RECORD and not column.nullable and not text


def _kind(column: Column, schema: RaggedSchema) -> str | None:
    """Return the head kind of the axis of which a column is the ids, below target."""
    axis = schema.axes.get(column.axis)
    if axis is None or axis.counts is None or column.name != f"{column.axis}_ids":
        return None
    counts = schema[axis.counts]
    return counts.head_kind if counts.axis == "target" else None


def _roots(schema: RaggedSchema) -> list[str]:
    return [axis for axis in schema.root_axes if any(c.axis == axis for c in schema)]


def _names(schema: RaggedSchema) -> list[str]:
    names = ["header", "record", *(f"axis:{axis}" for axis in _roots(schema))]
    for column in filter(_is_block, schema):
        names.append(f"column:{column.name}")
        if _kind(column, schema) == "set":
            names.append(f"order:{column.name}")
    return names


def _block(values: Sequence[Any], dtype: str, transform: str | None) -> tuple[list[Any], bytes]:
    raw = np.array(values, dtype).tobytes()
    width = np.dtype(dtype).itemsize
    planes = [raw[n::width] for n in range(width)]
    constants = [plane[0] if plane else 0 for plane in planes]
    is_kept = [set(plane) > {first} for plane, first in zip(planes, constants, strict=True)]
    stated = [None if kept else first for kept, first in zip(is_kept, constants, strict=True)]
    kept = [plane for plane, keep in zip(planes, is_kept, strict=True) if keep]
    return [len(values), dtype, stated, transform], b"".join(kept)


def _encoded(batch: pa.RecordBatch, schema: RaggedSchema) -> tuple[Header, Columns]:
    blocks: dict[str, list[Any]] = {}
    out: Columns = {"record": _records(batch, schema)}

    def add(name: str, values: Sequence[Any], dtype: str, transform: str | None = None) -> None:
        blocks[name], out[name] = _block(values, dtype, transform)

    for axis in _roots(schema):
        first = next(c for c in schema if c.axis == axis)
        add(f"axis:{axis}", [len(row) for row in batch[first.name].to_pylist()], "<i8")
    flat: Flat = {}
    for column in filter(_is_block, schema):
        values = [v for row in batch[column.name].to_pylist() for v in row]
        flat[column.name] = [x for v in values for x in v] if column.shape else values
    if schema.profile == "packed":
        sampled = flat["target_ids"]
    else:
        pairs = zip(flat["input_ids"], flat["completion_mask"], strict=True)
        sampled = [token for token, scored in pairs if scored]
    for column in filter(_is_block, schema):
        name, values = f"column:{column.name}", flat[column.name]
        dtype = np.dtype(column.type.to_pandas_dtype()).str
        kind = _kind(column, schema)
        if kind == "set":
            counts = flat[str(schema.axes[column.axis].counts)]
            order, steps = _ranks(values, counts, sampled)
            add(name, steps, "<u4", "ranks")
            differences = [b - a for a, b in pairwise([0, *order])]
            add(f"order:{column.name}", differences, dtype, "differences")
        elif kind is not None and "candidate_ids" in flat:
            counts = flat[str(schema.axes[column.axis].counts)]
            positions = _positions(values, counts, flat["candidate_ids"], flat["candidate_counts"])
            add(name, positions, "<u2", "positions:candidate")
        elif column.name == "rollout_log_probs" and "topk_log_probs" in flat:
            add(name, _unshared(values, sampled, flat), dtype, "shared:topk")
        else:
            add(name, values, dtype)
    return {"rows": batch.num_rows, "blocks": blocks}, out


def _records(batch: pa.RecordBatch, schema: RaggedSchema) -> bytes:
    names = [c.name for c in schema if not _is_block(c)]
    plain = pa.schema([pa.field(name, batch[name].type) for name in names])
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, plain) as writer:
        arrays = [batch[name] for name in names]
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=plain))
    return sink.getvalue()


def _pieces(values: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    ends = [0, *accumulate(counts)]
    return [list(values[a:b]) for a, b in pairwise(ends)]


def _ranks(
    values: Sequence[int], counts: Sequence[int], sampled: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the ids by rank, and the differences of the ranks of each set."""
    pairs = zip(_pieces(values, counts), sampled, strict=True)
    rest = [[i for i in ids if i != token] for ids, token in pairs]
    seen = Counter(i for ids in rest for i in ids)
    order = sorted(seen, key=lambda i: (-seen[i], i))
    steps = []
    for ids in rest:
        ranks = sorted(map(order.index, ids))
        steps += [b - a for a, b in pairwise([0, *ranks])]
    return order, steps


def _positions(
    values: Sequence[int], counts: Sequence[int], members: Sequence[int], sizes: Sequence[int]
) -> list[int]:
    pairs = zip(_pieces(values, counts), _pieces(members, sizes), strict=True)
    return [s.index(i) if i in s else i + len(s) for head, s in pairs for i in head]


def _unshared(values: Sequence[float], sampled: Sequence[int], flat: Flat) -> list[float]:
    heads = _pieces(flat["topk_ids"], flat["topk_counts"])
    rows = zip(values, sampled, heads, strict=True)
    return [value for value, token, head in rows if token not in head]
