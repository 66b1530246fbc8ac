"""Containers byte by byte: with any options, also with the faults that a writer never makes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from ragged_format.digest import digest, schema_digest
from ragged_format.errors import InvariantError
from ragged_format.known_schemas import known_schema
from ragged_format.manifest import MANIFEST_NAME, Manifest, Shard
from ragged_format.trailer import Tally, batch_metadata

EMPTY_DIGEST = bytes(16)
Metadata = Mapping[bytes, bytes]
Tree = dict[str, bytes]


def empty(schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch without rows, also of a schema that is not of this format."""
    arrays = [pa.array([], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def content_digest(batch: pa.RecordBatch) -> bytes:
    """Return the digest of a batch; data with nulls where none may be has none."""
    try:
        return digest(batch)
    except InvariantError:
        return EMPTY_DIGEST


def container(
    schema: pa.Schema,
    batches: Sequence[pa.RecordBatch],
    *,
    file: bool = False,
    compression: str | None = None,
    metadata: Sequence[Metadata] = (),
    digests: Sequence[bytes] | None = None,
    trailer: bool = True,
    trailer_edits: Metadata | None = None,
) -> bytes:
    """Return a stream or file as plain Arrow writes it, with digests and trailer.

    `digests` replaces the batch digests, as if they were those of other content.
    """
    options = pa.ipc.IpcWriteOptions(compression=compression)
    sink = io.BytesIO()
    tally = Tally()
    new = pa.ipc.new_file if file else pa.ipc.new_stream
    with new(sink, schema, options=options) as writer:
        for number, batch in enumerate(batches):
            content = content_digest(batch) if digests is None else digests[number]
            own: Metadata = metadata[number] if metadata else {}
            writer.write_batch(batch, custom_metadata=batch_metadata(content, own))
            tally.add(content, batch.num_rows, own)
        if trailer:
            closing = tally.trailer(schema_digest(schema).hex())
            stated: dict[bytes, bytes] = {**closing.to_metadata(), **(trailer_edits or {})}
            writer.write_batch(empty(schema), custom_metadata=stated)
    return sink.getvalue()


def replaced(data: bytes, old: bytes, new: bytes, *, count: int = 1) -> bytes:
    """Return `data` with all `count` occurrences of `old` replaced by `new` of the same length."""
    if len(old) != len(new) or data.count(old) != count:
        msg = f"{data.count(old)} occurrences of {len(old)} bytes, {len(new)} new ones"
        raise ValueError(msg)
    return data.replace(old, new)


def int64s(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)


def messages(stream: bytes) -> list[bytes]:
    """Return the messages of an uncompressed stream, the end-of-stream mark last."""
    out = []
    at = 0
    while at < len(stream):
        size = int.from_bytes(stream[at + 4 : at + 8], "little")
        end = at + 8 + size
        if size:
            end += pa.ipc.read_message(pa.py_buffer(stream[at:])).body.size
        out.append(stream[at:end])
        at = end
    return out


def shard(
    number: int, batch: pa.RecordBatch, *, compact: bytes | None = None
) -> tuple[Shard, bytes]:
    """Return a shard's entry in the manifest, and its bytes; `compact` is it in that encoding."""
    data = container(batch.schema, [batch], file=True) if compact is None else compact
    tally = Tally()
    tally.add(digest(batch), batch.num_rows, {})
    name = f"shard-00000000deadbeef-{number:05d}.arrow"
    encoding = "hot" if compact is None else "compact"
    return Shard(name, batch.num_rows, len(data), tally.hexdigest(), encoding), data


def dataset(
    schema: pa.Schema,
    *shards: tuple[Shard, bytes],
    lineage: Mapping[str, Any] | None = None,
) -> Tree:
    """Return the files of a dataset, as after its third commit."""
    listed = tuple(entry for entry, _ in shards)
    manifest = Manifest(known_schema(schema), listed, 3, dict(lineage or {}))
    return {MANIFEST_NAME: manifest.to_json()} | {entry.name: data for entry, data in shards}
