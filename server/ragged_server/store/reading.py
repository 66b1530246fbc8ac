"""Reading the log: pages of bounded size from whatever parts hold the records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ragged_format.errors import RaggedError
from ragged_format.ragged import concat, take
from ragged_server.store.cursors import encode_cursor
from ragged_server.store.errors import LogDamagedError, StorageFailedError
from ragged_server.store.prepare import NO_VERSION, policy_versions
from ragged_server.store.records import Page
from ragged_server.store.share import in_share

__all__ = ["Part", "find_part", "read_page", "record_sizes"]

# A page that matches little ends after this many records were looked at.
SCANNED_RECORDS = 1 << 18
# Bytes of a record from which slices are joined instead of Arrow's take, which is slower there.
LARGE_RECORD = 6 << 10


class Part(Protocol):
    """A segment or a sealed shard."""

    first_sequence: int
    end_sequence: int

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        ...

    def find(self, sequence: int) -> int:
        """Return the number of the batch with this record."""
        ...

    def place(self, number: int) -> tuple[int, int]:
        """Return first sequence and number of records of a batch."""
        ...

    def batch(self, number: int) -> pa.RecordBatch:
        """Return one batch."""
        ...

    def stored_message(self, number: int) -> pa.Buffer | None:
        """Return the message of one batch with its digest, not compressed; None if not so."""
        ...

    def hashes(self, number: int) -> npt.NDArray[np.uint64]:
        """Return the share hashes of the records of a batch."""
        ...


def find_part(parts: Sequence[Part], sequence: int) -> int:
    """Return the number of the last part that begins at this record or before."""
    low, high = 0, len(parts)
    while low < high:
        middle = (low + high) // 2
        if parts[middle].first_sequence <= sequence:
            low = middle + 1
        else:
            high = middle
    return low - 1


def read_page(
    parts: Sequence[Part],
    start: int,
    end: int,
    log_id: bytes,
    *,
    max_bytes: int,
    rank: int,
    world_size: int,
    min_policy_version: int | None,
) -> Page:
    """Return records from `start` on, all of them below `end`.

    Guarantees: at most `max_bytes` of records, unless the first one alone is larger; at most
    `SCANNED_RECORDS` and one batch are looked at.

    Parameters
    ----------
    parts : sequence of Part
        In order, with all records in [start, end).
    start, end : int
        Sequences.
    log_id : (8,) bytes
        For cursors.
    max_bytes, rank, world_size, min_policy_version
        As :meth:`Store.read`.

    Raises
    ------
    LogDamagedError
        A segment or shard is gone or damaged.
    StorageFailedError
        It cannot be read now.
    """
    try:
        return _read_page(
            parts, start, end, log_id, max_bytes, rank, world_size, min_policy_version
        )
    except (RaggedError, FileNotFoundError) as err:
        raise LogDamagedError(
            "records of the log cannot be read: a file is gone or damaged",
            expected="all segments and shards", got=type(err).__name__,
            remedy="restore the directory from a copy; the log of the server says which file",
        ) from err  # fmt: skip
    except OSError as err:
        raise StorageFailedError(
            "records of the log cannot be read now", expected="a healthy disk", got=err.strerror,
            retry_after_s=5.0, remedy="check the disk and the limit of open files",
        ) from err  # fmt: skip


def _read_page(
    parts: Sequence[Part],
    start: int,
    end: int,
    log_id: bytes,
    max_bytes: int,
    rank: int,
    world_size: int,
    min_policy_version: int | None,
) -> Page:
    position, left = start, max_bytes
    batches: list[pa.RecordBatch] = []
    messages: list[pa.Buffer | None] = []
    cursors: list[str] = []
    while position < end and left > 0 and position - start < SCANNED_RECORDS:
        part = parts[find_part(parts, position)]
        number = part.find(position)
        first, rows = part.place(number)
        low, high = position - first, min(rows, end - first)
        batch = part.batch(number)
        wanted = np.arange(low, high)
        if world_size > 1:
            wanted = wanted[in_share(part.hashes(number)[low:high], rank, world_size)]
        if min_policy_version is not None:
            versions = policy_versions(batch)[wanted]
            wanted = wanted[(versions >= min_policy_version) | (versions == NO_VERSION)]
        sizes = np.cumsum(record_sizes(batch)[wanted])
        fitting = int(np.searchsorted(sizes, left, side="right"))
        if not fitting and not batches and len(wanted):
            fitting = 1
        position = first + (high if fitting == len(wanted) else int(wanted[fitting]))
        if fitting:
            left -= int(sizes[fitting - 1])
            batches.append(_gather(batch, wanted[:fitting], int(sizes[fitting - 1])))
            messages.append(part.stored_message(number) if fitting == rows else None)
            cursors.append(encode_cursor(log_id, position))
        if fitting < len(wanted):
            break
    cursor = encode_cursor(log_id, position)
    if cursors:
        # Records behind the last batch that are not wanted are passed with it.
        cursors[-1] = cursor
    return Page(
        tuple(batches), cursor, tuple(cursors),
        sum(batch.num_rows for batch in batches), end - position, tuple(messages),
    )  # fmt: skip


def record_sizes(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Return the bytes of each record's values and offsets, (n,)."""
    sizes = np.zeros(batch.num_rows, np.int64)
    for array in batch.columns:
        kind = array.type
        if pa.types.is_large_list(kind):
            offsets = array.offsets.to_numpy()
            sizes += 8
            if _is_text(kind.value_type):
                sizes += np.diff(_offsets(array.values)[offsets]) + 4 * np.diff(offsets)
            else:
                sizes += np.diff(offsets) * _bits(kind.value_type) // 8
        elif _is_text(kind):
            sizes += np.diff(_offsets(array)) + 4
        else:
            sizes += max(_bits(kind) // 8, 1)
    return sizes


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _bits(kind: pa.DataType) -> int:
    """Return the bits of an element that is a number, or a list of a fixed number of them."""
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _bits(kind.value_type)
    return int(kind.bit_width)


def _offsets(array: pa.Array) -> npt.NDArray[np.int64]:
    """Return the offsets of a text array, (n + 1,)."""
    if not len(array):
        return np.zeros(1, np.int64)
    raw = np.frombuffer(array.buffers()[1], np.int32)
    return raw[array.offset : array.offset + len(array) + 1].astype(np.int64)


def _gather(batch: pa.RecordBatch, rows: npt.NDArray[np.int64], nbytes: int) -> pa.RecordBatch:
    """Return ascending rows of a batch: a view where they follow each other."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return batch.slice(int(rows[0]), len(rows))
    if nbytes < LARGE_RECORD * len(rows):
        return take(batch, rows)
    starts = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) != 1)
    counts = np.diff(starts, append=len(rows))
    pieces = zip(rows[starts].tolist(), counts.tolist(), strict=True)
    return concat([batch.slice(first, count) for first, count in pieces])
