"""Hot files: Arrow IPC files, uncompressed, for memory mapping and random access.

Byte layout: that of an Arrow IPC file (``ARROW1``, two zero bytes, a stream as in
:mod:`ragged_format.streams` up to and including its end-of-stream mark, the footer, its size as
little-endian int32, ``ARROW1``). The last record batch that the footer lists is the trailer.
Buffers are aligned to 8 bytes and not compressed; a reader accepts compressed ones, at the cost of
a copy.

Files are immutable: they are written under a temporary name (``….tmp-…``), made durable and
renamed, so that a path holds the old file or the whole new one, and whoever has the old one mapped
keeps it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from ragged_format.arguments import check_choice
from ragged_format.byte_source import BufferSource, Message, describe, next_head, only_message
from ragged_format.decoding import (
    VALIDATIONS,
    Batches,
    Content,
    Projection,
    Validation,
    check_trailer,
    decode,
    with_schema,
)
from ragged_format.encoding import Encoder
from ragged_format.errors import (
    ChecksumError,
    CorruptError,
    NotRaggedError,
    RaggedError,
    TruncatedError,
    Where,
)
from ragged_format.flatbuffer import END_OF_STREAM, blocks_before, footer_of, rows_of
from ragged_format.known_schemas import KnownSchema, read_schema_message
from ragged_format.local_files import NewFile, local_path, open_binary
from ragged_format.shard_file import ShardFile, ShardFileWriter
from ragged_format.trailer import TRAILER_KEY, Tally, Trailer
from ragged_format.writer_state import require_open

__all__ = ["FileReader", "FileWriter", "read_file", "write_file"]

MAGIC = b"ARROW1"
# After the footer: its size and the magic.
_TAIL = 4 + len(MAGIC)
# Decoded batches that a reader keeps for random access; each is a few kilobytes of views.
_KEPT = 256


class FileWriter(ShardFileWriter):
    """Write one hot file, batch by batch.

    Use it as a context manager: leaving the block writes the trailer and publishes the file under
    its name, durably, unless an exception leaves it; then nothing remains. After a write that
    failed on the way, as on a full disk, nothing more can be written, and closing raises.

    Parameters
    ----------
    path : path
        Final name. An existing file is replaced when the new one is complete.
    schema : pyarrow.Schema
        Schema of this format.
    validate : {"full", "structural", "off"}
        What is checked of every batch before it is written. Arrow's own validity always is.
    """

    def __init__(
        self, path: str | os.PathLike[str], schema: pa.Schema, *, validate: Validation = "off"
    ) -> None:
        self.path = local_path(path)
        self._encoder = Encoder(schema, validate=validate, name=str(self.path))
        self._blocks: list[tuple[int, int, int]] = []
        self._state = "open"
        self._new = NewFile(self.path)
        self._file = self._new.file
        with self._new.removed_on_error():
            self._file.write(MAGIC.ljust(8, b"\0") + self._encoder.known.message)

    def write(
        self, batch: pa.RecordBatch, metadata: Mapping[str | bytes, str | bytes] | None = None
    ) -> None:
        """Write one batch; parameters and errors as :meth:`StreamWriter.write`."""
        require_open(self._state, str(self.path))
        self._put(*self._encoder.encode(batch, metadata))

    def _finish(self) -> Trailer:
        trailer, head, body = self._encoder.finish()
        self._put(head, body)
        footer = footer_of(self._encoder.known.message, self._blocks)
        size = len(footer).to_bytes(4, "little")
        self._file.write(b"".join((END_OF_STREAM, footer, size, MAGIC)))
        return trailer

    def _put(self, head: bytes, body: bytes | memoryview) -> None:
        self._state = "failed"
        self._blocks.append((self._file.tell(), len(head), len(body)))
        self._file.write(head)
        self._file.write(body)
        self._state = "open"


def write_file(
    path: str | os.PathLike[str],
    batches: Batches,
    schema: pa.Schema | None = None,
    *,
    validate: Validation = "off",
) -> Trailer:
    """Write batches as one hot file and return its trailer.

    Guarantees: the path holds the old file or the whole, durable new one.

    Parameters
    ----------
    path : path
        Name of the file, by convention ``….arrow``.
    batches : iterable of RecordBatch or Table, or one of these
        Become the batches of the file as they are: see :class:`ragged_format.Writer` for one that
        re-batches. None at all needs `schema`.
    schema : pyarrow.Schema, optional
        Defaults to that of the first batch.
    validate : {"full", "structural", "off"}
        What is checked of every batch before it is written. Arrow's own validity always is.
    """
    schema, parts = with_schema(batches, schema)
    with FileWriter(path, schema, validate=validate) as writer:
        for batch in parts:
            writer.write(batch)
    return writer.close()


class FileReader(ShardFile):
    """A hot file, memory-mapped: batches are views of the mapping.

    Opening reads the footer, the schema and the trailer only. The mapping lives as long as any
    batch of it. Pickles as its path and options.

    Attributes
    ----------
    path : Path
    trailer : Trailer
    num_rows, num_batches : int
    rows_per_batch : tuple of int
    is_random_access : bool
        True.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        verify: bool = True,
        validate: Validation = "off",
    ) -> None:
        check_choice("validate", validate, VALIDATIONS)
        self.path = local_path(path)
        self._options: dict[str, Any] = {
            "columns": columns, "verify": verify, "validate": validate,
        }  # fmt: skip
        self._verify = verify
        self._validate: Validation = validate
        self._kept: dict[int, Content] = {}
        try:
            self._open()
            self._projection = Projection(self._known.ragged, self._known.schema, columns)
        except RaggedError as err:
            raise err.at(Where(file=str(self.path))) from err.__cause__

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(FileReader, **self._options), (self.path,)

    def __repr__(self) -> str:
        return f"FileReader({str(self.path)!r}, rows={self.num_rows}, batches={self.num_batches})"

    def batch(self, index: int) -> pa.RecordBatch:
        """Return one batch, a view of the file.

        When it is first asked for, its arrays are checked, and its digest if the reader verifies.

        Raises
        ------
        OutOfRangeError
            There is no such batch (``RF-L002``).
        ChecksumError, CorruptError, InvariantError
        """
        return self._projection.apply(self._load(index).batch)

    def metadata(self, index: int) -> dict[bytes, bytes]:
        """Return the custom metadata that the writer gave to a batch."""
        return dict(self._load(index).metadata)

    def batches(self, *, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Return an iterator over all batches, with these columns only if some are named.

        A reader that verifies compares each batch with its digest, and the whole with the trailer
        before the iteration ends.
        """
        projection = Projection(self.ragged_schema, self.schema, columns)
        return map(projection.apply, map(self._projection.apply, self.scan(verify=self._verify)))

    def scan(self, *, verify: bool = True) -> Iterator[pa.RecordBatch]:
        """Return an iterator over all batches with all columns, nothing kept."""
        tally = Tally()
        for index in range(self.num_batches):
            yield self._decode(index, tally, verify=verify).batch
        try:
            check_trailer(self.trailer, self._known, tally, verify=verify)
        except RaggedError as err:
            raise err.at(Where(file=str(self.path))) from err.__cause__

    def _load(self, index: int) -> Content:
        self._check_index(index)
        loaded = self._kept.get(index)
        if loaded is None:
            loaded = self._decode(index, Tally(), verify=self._verify)
            if len(self._kept) >= _KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[index] = loaded
        return loaded

    def _decode(self, index: int, tally: Tally, *, verify: bool) -> Content:
        try:
            content = decode(
                self._message(index), self._known, tally, verify=verify, validate=self._validate
            )
            if content.batch.num_rows != self.rows_per_batch[index]:
                raise ChecksumError(
                    "a batch has not the records that the trailer states",
                    expected=self.rows_per_batch[index], got=content.batch.num_rows,
                )  # fmt: skip
        except RaggedError as err:
            raise err.at(Where(file=str(self.path), batch=index)) from err.__cause__
        return content

    def _message(self, index: int) -> Message:
        offset, size = self._blocks[index]
        return only_message(self._buffer.slice(offset, size))

    def _open(self) -> None:
        with open_binary(self.path) as file:
            size = os.fstat(file.fileno()).st_size
        if not size:
            raise TruncatedError("the file is empty", expected="an Arrow IPC file", got="no bytes")
        self._buffer = pa.memory_map(os.fspath(self.path)).read_buffer()
        head = self._buffer[:8].to_pybytes()
        if not head.startswith(MAGIC[: len(head)]):
            raise NotRaggedError(
                "the file is not an Arrow IPC file", expected=MAGIC.decode(), got=describe(head),
                remedy="open it with rf.open_source, or import it",
            )  # fmt: skip
        tail = self._buffer[-_TAIL:].to_pybytes()
        footer_size = int.from_bytes(tail[:4], "little", signed=True)
        start = size - _TAIL - footer_size
        if size < 8 + _TAIL or tail[4:] != MAGIC or footer_size <= 0 or start < 8:
            raise TruncatedError(
                "the file does not end with its footer",
                expected=f"the footer, its size and {MAGIC.decode()}", got=tail.hex(" "),
                remedy="fetch it again; its writer or the transport stopped early",
            )  # fmt: skip
        footer = self._buffer.slice(start, footer_size)
        try:
            shown = pa.ipc.open_file(self._buffer).schema
        except (pa.ArrowException, OSError) as err:
            raise CorruptError(
                "Arrow cannot read the footer", expected="an Arrow IPC file", got=str(err)
            ) from err
        self._blocks = blocks_before(memoryview(footer).cast("B"), start)
        self._known = self._read_schema(start)
        if not shown.equals(self._known.schema, check_metadata=True):
            raise CorruptError("the schemas of file and footer differ", expected=self._known.schema,
                               got=shown)  # fmt: skip
        self.trailer = self._read_trailer()

    def _read_schema(self, end: int) -> KnownSchema:
        source = BufferSource(self._buffer.slice(8, end - 8))
        head = next_head(source, source.read(8), max_bytes=end)
        if head is None:
            raise CorruptError("the file has no schema", expected="a schema", got="the end")
        return read_schema_message(head)

    def _read_trailer(self) -> Trailer:
        message = self._message(len(self._blocks) - 1) if self._blocks else None
        if message is None or TRAILER_KEY not in message.header.metadata:
            raise TruncatedError(
                "the file has no trailer: its writer is not of this format",
                expected="the trailer as last batch", got=f"{len(self._blocks)} batches",
                remedy="import data of other writers",
            )  # fmt: skip
        trailer = Trailer.from_metadata(message.header.metadata)
        if rows := rows_of(message.flatbuffer, message.header):
            raise CorruptError("the trailer has rows", expected=0, got=rows)
        facts = [
            ("number of batches", trailer.batches, len(self._blocks) - 1),
            ("schema digest", trailer.schema_digest, self._known.digest),
        ]
        for what, expected, got in facts:
            if expected != got:
                raise ChecksumError(
                    f"the {what} is not what the trailer states", expected=expected, got=got
                )
        return trailer


def read_file(
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    verify: bool = True,
    validate: Validation = "off",
) -> FileReader:
    """Open a hot file: iterate over it, or take batches by index.

    Guarantees: the file is memory-mapped and batches are views of it; nothing is read before it is
    asked for, except the footer, the schema and the trailer.

    Parameters
    ----------
    path : path
        A file of :func:`write_file`, or a shard of a dataset.
    columns : sequence of str, optional
        Columns to return; the counts that their axes need come with them.
    verify : bool
        Compare every batch with its digest before it is returned.
    validate : {"off", "structural", "full"}
        Invariants to check besides.

    Raises
    ------
    DatasetNotFoundError
        The path does not exist (``RF-C008``).
    NotRaggedError
        Not an Arrow file, or one without this format's metadata (``RF-S001``).
    TruncatedError
        The footer or the trailer is missing (``RF-C002``).
    ChecksumError, CorruptError
        Content differs from its digest (``RF-C004``), or the bytes are malformed (``RF-C001``).

    Examples
    --------
    >>> import tempfile
    >>> import pyarrow as pa
    >>> from ragged_format import sample_schema
    >>> schema = sample_schema(vocab_size=10, columns=[])
    >>> row = {"sample_id": "a", "input_ids": [1, 2], "completion_mask": [0, 1]}
    >>> batch = pa.RecordBatch.from_pylist([row], schema=schema)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trailer = write_file(f"{folder}/a.arrow", [batch, batch])
    ...     file = read_file(f"{folder}/a.arrow")
    >>> file.num_rows, file.batch(1).equals(batch)
    (2, True)
    """
    return FileReader(path, columns=columns, verify=verify, validate=validate)
