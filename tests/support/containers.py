"""Small data for container tests, and plain-Python models of the byte layouts."""

import io
import json
import struct

import numpy as np
import pyarrow as pa
import xxhash

import ragged_format as rf
from ragged_format.schema import RECORD
from ragged_format.testing import fill_batch

SMALL = ("group_id", "reward", "rollout_log_probs", "candidate_counts", "candidate_ids")


def small_schema(columns=SMALL):
    return rf.sample_schema(vocab_size=1000, columns=columns)


def small_batch(lengths=(5, 0, 3), *, seed=0, prefix="s", schema=None):
    return fill_batch(
        schema or small_schema(), np.random.default_rng(seed), lengths, prefix=prefix, nulls=0.3
    )


def three_batches():
    return [small_batch(seed=i, prefix=f"b{i}-") for i in range(3)]


def stream_bytes(batches, schema=None):
    sink = io.BytesIO()
    rf.write_stream(sink, batches, schema)
    return sink.getvalue()


def messages(stream):
    """Return where each message of a stream begins, and where the last ends."""
    bounds, place = [0], 0
    while place < len(stream):
        mark, size = struct.unpack_from("<4si", stream, place)
        assert mark == b"\xff\xff\xff\xff"
        body = 0
        if size:
            message = pa.ipc.read_message(pa.py_buffer(stream[place:]))
            body = message.body.size
        place += 8 + size + body
        bounds.append(place)
    return bounds


def equal(left, right):
    """Equal values and nulls, floats by their bits."""
    return [rf.digest(b) for b in left] == [rf.digest(b) for b in right]


NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}
FORMATS = {
    "int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint8": "B", "uint16": "H",
    "uint32": "I", "uint64": "Q", "float16": "e", "float32": "f", "float64": "d",
}  # fmt: skip


def digest_input(batch):
    """Return the byte sequence of a batch digest, as the specification words it."""
    schema = rf.parse_schema(batch.schema)
    out = b""
    for column in schema:
        kind = NAMES.get(str(column.type), str(column.type))
        shape = "[" + ",".join(str(n) for n in column.shape) + "]" if column.shape else ""
        text = f"{column.name}:{column.axis}:{kind}{shape}{'?' if column.nullable else ''}".encode()
        out += struct.pack("<I", len(text)) + text
    out += struct.pack("<Q", batch.num_rows)
    for column in schema:
        kind = NAMES.get(str(column.type), str(column.type))
        values = batch.column(column.name).to_pylist()
        if column.axis != RECORD:
            out += offsets(len(record) for record in values)
            values = [value for record in values for value in record]
        if column.nullable:
            out += bytes(value is not None for value in values)
        if kind in ("string", "binary"):
            texts = [v.encode() if isinstance(v, str) else v or b"" for v in values]
            out += offsets(len(text) for text in texts) + b"".join(texts)
        else:
            zero = [0] * column.width if column.shape else 0
            for value in values:
                value = zero if value is None else value
                for number in value if column.shape else [value]:
                    out += struct.pack("<" + FORMATS[kind], number)
    return out


def offsets(lengths):
    out, place = struct.pack("<Q", 0), 0
    for length in lengths:
        place += length
        out += struct.pack("<Q", place)
    return out


def model_digest(batch):
    return xxhash.xxh3_128(digest_input(batch)).digest()


def model_schema_digest(schema):
    def kind(type_):
        if pa.types.is_fixed_size_list(type_):
            field = type_.value_field
            return {
                "fixed_size_list": kind(field.type), "nullable": field.nullable,
                "size": type_.list_size,
            }  # fmt: skip
        if pa.types.is_large_list(type_):
            return {"list": kind(type_.value_type), "nullable": type_.value_field.nullable}
        return NAMES.get(str(type_), str(type_))

    def text(metadata):
        return {k.decode(): v.decode() for k, v in (metadata or {}).items()}

    value = {
        "fields": [
            {
                "name": f.name,
                "nullable": f.nullable,
                "type": kind(f.type),
                "metadata": text(f.metadata),
            }
            for f in schema
        ],
        "metadata": text(schema.metadata),
    }
    data = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    return xxhash.xxh3_128(data).digest()
