"""The batches of a compact file as they are stored: each column is decompressed when it is used.

Arrow's reader decompresses all columns of a batch, and needs a decompressor for each buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import zstandard

from ragged_format.byte_source import only_message
from ragged_format.errors import CorruptError
from ragged_format.flatbuffer import BATCH, blocks_before, layout_of

if TYPE_CHECKING:
    from pathlib import Path

    from ragged_format.byte_source import Message

__all__ = ["MessageFile", "StoredBatch"]

Bytes = npt.NDArray[np.uint8]
# The size of the footer and Arrow's magic at the end of a file.
_TAIL = 10
# Buffers of a column: validity, offsets, data.
_BUFFERS = 3
# What a column may take when it is decompressed.
MAX_COLUMN_BYTES = 1 << 32


class StoredBatch:
    """One record batch of one row of binary columns.

    Parameters
    ----------
    message : Message
        The record batch message.
    names : sequence of str
        Its columns.

    Raises
    ------
    CorruptError
        The message is no such batch (``RF-C001``).
    """

    def __init__(self, message: Message, names: list[str]) -> None:
        self.metadata = message.header.metadata
        self._layout = layout_of(message.flatbuffer, message.header, message.body)
        self._places = {name: number for number, name in enumerate(names)}
        self._columns: dict[str, Bytes] = {}
        self._zstd: zstandard.ZstdDecompressor | None = None
        layout = self._layout
        sizes = len(layout.nodes), len(layout.buffers)
        expected = 2 * len(names), 2 * _BUFFERS * len(names)
        if message.header.kind != BATCH or layout.rows != 1 or sizes != expected:
            raise _damaged(f"a batch of one row of {len(names)} columns", layout.rows)
        if layout.nodes.tolist() != [1, 0] * len(names):
            raise _damaged("columns of one value", layout.nodes.tolist())

    def __call__(self, name: str) -> Bytes:
        """Return the value of a column, (s,) uint8."""
        known = self._columns.get(name)
        if known is None:
            place = _BUFFERS * self._places[name]
            bounds, data = self._buffer(place + 1), self._buffer(place + 2)
            first, last = np.frombuffer(bounds, "<i8", 2).tolist() if len(bounds) >= 16 else (0, -1)
            if not 0 <= first <= last <= len(data):
                raise _damaged(f"a value within {len(data)} bytes", (first, last))
            self._columns[name] = known = np.frombuffer(data, np.uint8)[first:last]
        return known

    def _buffer(self, number: int) -> Any:
        start, size = self._layout.buffers[2 * number : 2 * number + 2]
        if not 0 <= start <= start + size <= len(self._layout.body):
            raise _damaged(f"a buffer within {len(self._layout.body)} bytes", (start, size))
        data = self._layout.body[start : start + size]
        if not size or not self._layout.compressed:
            return data
        declared = int.from_bytes(data[:8], "little", signed=True)
        if declared == -1:  # stored as it is
            return data[8:]
        if self._zstd is None:
            # One for all columns: to make one costs as much as to use it.
            self._zstd = zstandard.ZstdDecompressor()
        try:
            # The frame's own size is what would be allocated.
            known = zstandard.frame_content_size(data[8:])
            if not 0 <= declared <= MAX_COLUMN_BYTES or known not in (declared, -1):
                raise _damaged(f"{declared} bytes of zstd", known)
            out = self._zstd.decompress(data[8:], max_output_size=declared)
        except zstandard.ZstdError as err:
            raise _damaged("a zstd frame", str(err)) from err
        if len(out) != declared:
            raise _damaged(f"{declared} bytes of zstd", len(out))
        return out


class MessageFile:
    """The record batch messages of an Arrow IPC file that Arrow could open, memory-mapped."""

    def __init__(self, path: Path, names: list[str]) -> None:
        self._names = names
        self._buffer = pa.memory_map(str(path)).read_buffer()
        size = len(self._buffer)
        footer_size = int.from_bytes(self._buffer[size - _TAIL : size - 6].to_pybytes(), "little")
        start = size - _TAIL - footer_size
        if start < 8:
            raise _damaged("a footer", footer_size)
        footer = memoryview(self._buffer.slice(start, footer_size)).cast("B")
        self._blocks = blocks_before(footer, start)

    def batch(self, index: int) -> StoredBatch:
        """Return one batch; nothing of it is decompressed yet."""
        offset, size = self._blocks[index]
        return StoredBatch(only_message(self._buffer.slice(offset, size)), self._names)


def _damaged(expected: str, got: object) -> CorruptError:
    return CorruptError(
        "an encoded batch is damaged", expected=expected, got=got,
        remedy="restore the file from a copy",
    )  # fmt: skip
