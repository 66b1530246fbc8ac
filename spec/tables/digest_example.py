"""The worked example of the batch digest: labelled bytes of one small batch."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import xxhash

import ragged_format as rf
from ragged_format.schema import RECORD, Column, type_name

SCHEMA = rf.sample_schema(
    vocab_size=100, columns=["group_id", "reward", "candidate_counts", "candidate_ids"]
)
RECORDS: list[dict[str, Any]] = [
    {
        "sample_id": "ab", "group_id": None, "reward": 0.5, "input_ids": [5, 7, 8],
        "completion_mask": [0, 1, 1], "candidate_counts": [0, 2], "candidate_ids": [8, 30],
    },
    {
        "sample_id": "c", "group_id": "g", "reward": None, "input_ids": [],
        "completion_mask": [], "candidate_counts": [], "candidate_ids": [],
    },
]  # fmt: skip
_FORMATS = {
    "int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint8": "B", "uint16": "H",
    "uint32": "I", "uint64": "Q", "float16": "e", "float32": "f", "float64": "d",
}  # fmt: skip


def batch() -> pa.RecordBatch:
    """Return the batch of the example."""
    return pa.RecordBatch.from_pylist(RECORDS, schema=SCHEMA)


def parts() -> Iterator[tuple[str, bytes]]:
    """Yield (what it is, bytes) of the digest's input, in order, from plain values."""
    columns = list(rf.parse_schema(SCHEMA))
    for column in columns:
        text = f"{column.name}:{column.axis}:{type_name(column.type)}{'?' * column.nullable}"
        yield f"declaration `{text}`", struct.pack("<I", len(text)) + text.encode()
    yield "number of records", struct.pack("<Q", len(RECORDS))
    for column in columns:
        yield from _column(column, [record[column.name] for record in RECORDS])


def _column(column: Column, values: list[Any]) -> Iterator[tuple[str, bytes]]:
    name = f"`{column.name}`"
    if column.axis != RECORD:
        ends = [sum(map(len, values[:i])) for i in range(len(values) + 1)]
        yield f"{name}: list offsets", struct.pack(f"<{len(ends)}Q", *ends)
        values = [item for items in values for item in items]
    if column.nullable:
        yield f"{name}: validity", bytes(value is not None for value in values)
    kind = type_name(column.type)
    if kind == "string":
        texts = [(value or "").encode() for value in values]
        ends = [sum(map(len, texts[:i])) for i in range(len(texts) + 1)]
        yield f"{name}: text offsets", struct.pack(f"<{len(ends)}Q", *ends)
        yield f"{name}: text", b"".join(texts)
    else:
        numbers = [value or 0 for value in values]
        yield f"{name}: values", struct.pack(f"<{len(numbers)}{_FORMATS[kind]}", *numbers)


def result() -> str:
    """Return the digest of the example, 32 hexadecimal digits."""
    return xxhash.xxh3_128(b"".join(data for _, data in parts())).hexdigest()
