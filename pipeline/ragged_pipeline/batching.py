"""Records in even batches, as the dataset writer stores them, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ragged_format.messages import decode_message, encode_message
from ragged_format.ragged import concat

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["BATCH_BYTES", "BATCH_ROWS", "rebatched"]

BATCH_ROWS = 1024
BATCH_BYTES = 32 << 20


def rebatched(
    batches: Iterable[pa.RecordBatch], *, rows: int = BATCH_ROWS, nbytes: int = BATCH_BYTES
) -> Iterator[pa.RecordBatch]:
    """Yield the same records in batches of at most so many records and bytes.

    Guarantees: the same batches in give the same batches out; a batch is larger than `nbytes` only
    if it has one record. Memory: about two batches.

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
        All of one schema.
    rows, nbytes : int
        Limits of a batch.
    """
    pending: list[pa.RecordBatch] = []
    held = size = 0
    for batch in batches:
        start = 0
        while start < batch.num_rows:
            part = batch.slice(start, rows - held)
            taken = _fitting(part, nbytes - size)
            if taken == 0 and not pending:
                taken = 1
            if taken:
                part = part.slice(0, taken)
                pending.append(_owned(part))
                held += taken
                size += part.nbytes
                start += taken
            if pending and (taken == 0 or held >= rows or size >= nbytes):
                yield concat(pending)
                pending, held, size = [], 0, 0
    if pending:
        yield concat(pending)


def _fitting(batch: pa.RecordBatch, room: int) -> int:
    """Return how many of the first records have at most `room` bytes together."""
    if batch.nbytes <= room:
        return int(batch.num_rows)
    low, high = 0, batch.num_rows  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        if batch.slice(0, middle).nbytes <= room:
            low = middle
        else:
            high = middle
    return low


def _owned(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a copy if the batch is a small view of much larger memory."""
    size = batch.nbytes
    if batch.get_total_buffer_size() <= 2 * size + (1 << 16):
        return batch
    return decode_message(encode_message(batch), batch.schema)
