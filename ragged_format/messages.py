"""One batch as one Arrow IPC message: the cheapest form, and what streams and files consist of."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from ragged_format.arguments import check_size
from ragged_format.canonical import as_batch
from ragged_format.errors import CorruptError, LimitExceededError, NotRaggedError, TruncatedError
from ragged_format.flatbuffer import BATCH, Layout, layout_of, parse_header, prefix_size
from ragged_format.parse import not_a_schema
from ragged_format.soundness import check_arrays

__all__ = [
    "MAX_MESSAGE_BYTES",
    "decode_batch",
    "decode_message",
    "encode_message",
]

# Largest message that a reader takes by default; a batch of this library is about 32 MiB.
MAX_MESSAGE_BYTES = 1 << 30


def decode_batch(
    message: pa.Buffer,
    schema: pa.Schema,
    layout: Layout,
    *,
    max_bytes: int,
) -> pa.RecordBatch:
    """Return the batch of one message, zero-copy where it is not compressed.

    Parameters
    ----------
    message : pyarrow.Buffer
        The whole message; its body begins at a multiple of 8 in memory.
    schema : pyarrow.Schema
        Schema of the batch.
    layout : Layout
        Of the message.
    max_bytes : int
        Largest decompressed size, where the body is compressed.

    Raises
    ------
    LimitExceededError
        The declared sizes exceed `max_bytes`; nothing was decompressed.
    CorruptError
        Arrow cannot decode the message.
    """
    if layout.compressed and (size := _declared_bytes(layout)) > max_bytes:
        raise LimitExceededError(
            "a batch is larger than the limit when decompressed",
            expected=f"<= {max_bytes} bytes", got=size, remedy="raise max_message_bytes",
        )  # fmt: skip
    try:
        return pa.ipc.read_record_batch(message, schema)
    except (pa.ArrowException, OSError, OverflowError, MemoryError) as err:
        raise CorruptError(
            "Arrow cannot decode a record batch", expected="a batch of the schema", got=str(err)
        ) from err


def _declared_bytes(layout: Layout) -> int:
    """Return the size that compressed buffers declare for when they are decompressed."""
    total = 0
    for offset, length in zip(layout.buffers[::2], layout.buffers[1::2], strict=True):
        if not length:
            continue
        prefix = layout.body[offset : offset + 8] if offset >= 0 else b""
        declared = int.from_bytes(prefix, "little", signed=True)
        if length < 0 or len(prefix) < 8 or declared < -1:
            raise CorruptError(
                "a compressed buffer is malformed", expected="its size, then its data",
                got=f"{length} bytes at {offset}, size {declared}",
            )  # fmt: skip
        total += length if declared == -1 else declared  # -1: stored as it is
    return total


def encode_message(batch: pa.RecordBatch) -> pa.Buffer:
    """Return a batch as one Arrow IPC record-batch message: the cheapest form, for queues.

    Guarantees: a copy that holds only what the batch shows, however large its parent is. The schema
    is not in it, and neither a digest nor a trailer: both sides know the schema, and the transport
    delivers whole messages.

    Examples
    --------
    >>> from ragged_format import sample_schema
    >>> schema = sample_schema(vocab_size=10, columns=[])
    >>> row = {"sample_id": "a", "input_ids": [1, 2], "completion_mask": [0, 1]}
    >>> batch = pa.RecordBatch.from_pylist([row], schema=schema)
    >>> decode_message(encode_message(batch), schema).equals(batch)
    True
    """
    return as_batch(batch).serialize()


def decode_message(
    message: Any, schema: pa.Schema, *, max_bytes: int = MAX_MESSAGE_BYTES
) -> pa.RecordBatch:
    """Return the batch of one message; the inverse of :func:`encode_message`.

    Guarantees: zero-copy where the message lies at a multiple of 8 in memory and is not compressed;
    the batch's arrays are valid (:func:`check_arrays`).

    Parameters
    ----------
    message : bytes-like
        One whole record-batch message.
    schema : pyarrow.Schema
        Schema of the batch, as the producer had it.
    max_bytes : int
        Largest decompressed size.

    Raises
    ------
    TruncatedError, CorruptError, LimitExceededError, InvariantError
    """
    if not isinstance(schema, pa.Schema):
        raise not_a_schema(schema)
    check_size("max_bytes", max_bytes)
    try:
        buffer = message if isinstance(message, pa.Buffer) else pa.py_buffer(message)
    except TypeError as err:
        raise NotRaggedError(
            "a message is bytes", expected="a bytes-like object", got=type(message).__name__,
            remedy="pass what rf.encode_message returned",
        ) from err  # fmt: skip
    view = memoryview(buffer).cast("B")
    size = prefix_size(view[:8]) if len(view) >= 8 else 0
    if not size or len(view) < 8 + size:
        raise TruncatedError(
            "a message ends inside its metadata", expected=8 + size or "a message", got=len(view),
            remedy="pass the whole of what rf.encode_message returned",
        )  # fmt: skip
    metadata = view[8 : 8 + size]
    header = parse_header(metadata)
    if header.kind != BATCH:
        raise CorruptError("the message is not a record batch", expected=BATCH, got=header.kind)
    if len(view) - 8 - size < header.body_bytes:
        raise TruncatedError(
            "a message ends inside its body", expected=header.body_bytes, got=len(view) - 8 - size
        )
    if buffer.address % 8:
        buffer = aligned_copy(view)
    layout = layout_of(metadata, header, view[8 + size :])
    batch = decode_batch(buffer, schema, layout, max_bytes=max_bytes)
    check_arrays(batch)
    return batch


def aligned_copy(data: memoryview) -> pa.Buffer:
    """Return a copy of `data` in memory that Arrow aligns to 64 bytes."""
    out = pa.allocate_buffer(len(data))
    memoryview(out).cast("B")[:] = data
    return out
