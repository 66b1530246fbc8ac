"""Arrow IPC streams that say when they are complete: for sockets, HTTP bodies, pipes and logs.

Byte layout, in order: the schema message; for every batch one record batch message with its digest
in custom metadata; the trailer (:mod:`ragged_format.trailer`), a record batch message without rows;
Arrow's end-of-stream mark ``FF FF FF FF 00 00 00 00``; nothing after it. There are no dictionary
batches, metadata version is 5, data is little-endian. Body buffers may be compressed (lz4, zstd) as
Arrow defines it; this library writes them uncompressed. Around the whole there may be zstd frames,
which readers recognise by their magic number; never use both compressions.

A writer that fails writes neither the trailer nor the mark, so that no reader takes what it has for
the whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Literal, Self

from ragged_format.arguments import check_choice, check_size
from ragged_format.byte_source import (
    ByteSource,
    byte_sink,
    byte_source,
    describe,
    next_body,
    next_head,
    skip_body,
)
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
from ragged_format.encoding import Encoder, trailer_head
from ragged_format.errors import (
    CorruptError,
    LimitExceededError,
    MissingEndOfStreamError,
    NotRaggedError,
    RaggedError,
    TruncatedError,
    Where,
)
from ragged_format.flatbuffer import CONTINUATION, END_OF_STREAM, rows_of
from ragged_format.known_schemas import KnownSchema, read_schema_message
from ragged_format.local_files import NewFile, local_path, open_binary
from ragged_format.messages import MAX_MESSAGE_BYTES
from ragged_format.trailer import TRAILER_KEY, Tally, Trailer
from ragged_format.writer_state import EndsWithBlock, WriterState, require_open

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.schema import RaggedSchema

__all__ = ["StreamReader", "StreamWriter", "read_stream", "write_stream"]


class StreamWriter(EndsWithBlock):
    """Write one stream, batch by batch.

    Use it as a context manager: leaving the block writes the trailer and the end-of-stream mark,
    unless an exception leaves it. A file at a path appears only then, whole and durable. After a
    write that failed on the way nothing more can be written, and closing raises.

    Parameters
    ----------
    sink : path or binary file object
        A file object needs ``write`` only; it is flushed if it can be and stays open.
    schema : pyarrow.Schema
        Schema of this format.
    validate : {"full", "structural", "off"}
        What is checked of every batch before it is written. Arrow's own validity always is.
    """

    def __init__(
        self,
        sink: str | os.PathLike[str] | BinaryIO,
        schema: pa.Schema,
        *,
        validate: Validation = "off",
    ) -> None:
        path = local_path(sink) if isinstance(sink, str | os.PathLike) else None
        self._name = getattr(sink, "name", None) if path is None else str(path)
        self._encoder = Encoder(schema, validate=validate, name=self._name)
        self._new = None if path is None else NewFile(path)
        self._sink: Any = sink if self._new is None else self._new.file
        self._put = byte_sink(self._sink)
        self.trailer: Trailer | None = None
        with nullcontext() if self._new is None else self._new.removed_on_error():
            self._put(self._encoder.known.message)
        self._state: WriterState = "open"

    def write(
        self, batch: pa.RecordBatch, metadata: Mapping[str | bytes, str | bytes] | None = None
    ) -> None:
        """Write one batch.

        Parameters
        ----------
        batch : pyarrow.RecordBatch
            Of the stream's schema.
        metadata : mapping, optional
            Custom metadata of this batch, for instance a cursor. Covered by the running digest.

        Raises
        ------
        SchemaMismatchError
            The batch has another schema (``RF-S010``), or a metadata key is reserved (``RF-S009``).
        InvariantError
            The batch is invalid.
        DatasetExistsError
            The writer was closed, or an earlier write failed on the way (``RF-C009``).
        """
        if self._state != "open":
            require_open(self._state, self._name)
        self._write(*self._encoder.encode(batch, metadata))

    def write_message(
        self, message: pa.Buffer, metadata: Mapping[str | bytes, str | bytes] | None = None
    ) -> None:
        """Write a message of this schema as it is: whoever reads compares it with its digest."""
        require_open(self._state, self._name)
        self._write(*self._encoder.encoded(message, metadata))

    def _write(self, head: bytes, body: memoryview) -> None:
        self._state = "failed"
        self._put(head)
        self._put(body)
        self._state = "open"

    def close(self) -> Trailer:
        """Write the trailer and the end-of-stream mark, once, and return the trailer."""
        if self.trailer is None:
            require_open(self._state, self._name)
            try:
                trailer, head, body = self._encoder.finish()
                self._put(b"".join((head, body, END_OF_STREAM)))
                if self._new is not None:
                    self._new.commit()
                elif hasattr(self._sink, "flush"):
                    self._sink.flush()
            except BaseException:
                self.abort()
                raise
            self._state = "closed"
            self.trailer = trailer
        return self.trailer

    def abort(self) -> None:
        """Stop: the sink has no trailer, a path nothing; does nothing after :meth:`close`."""
        if self._state == "closed":
            return
        self._state = "aborted"
        if self._new is not None:
            self._new.abort()


def write_stream(
    sink: str | os.PathLike[str] | BinaryIO,
    batches: Batches,
    schema: pa.Schema | None = None,
    *,
    validate: Validation = "off",
) -> Trailer:
    """Write batches as one stream and return its trailer.

    Guarantees: on an exception, no trailer and no end-of-stream mark is written; a path then does
    not exist or keeps its old content. A path is replaced atomically and durably.

    Parameters
    ----------
    sink : path or binary file object
        A file object needs ``write`` only; it stays open.
    batches : iterable of RecordBatch or Table, or one of these
        A stream of no batches is valid and needs `schema`.
    schema : pyarrow.Schema, optional
        Defaults to that of the first batch.
    validate : {"full", "structural", "off"}
        What is checked of every batch before it is written. Arrow's own validity always is.

    Raises
    ------
    SchemaMismatchError, NotRaggedError, InvariantError

    Examples
    --------
    >>> import io
    >>> import pyarrow as pa
    >>> from ragged_format import sample_schema
    >>> schema = sample_schema(vocab_size=10, columns=[])
    >>> row = {"sample_id": "a", "input_ids": [1, 2], "completion_mask": [0, 1]}
    >>> batch = pa.RecordBatch.from_pylist([row], schema=schema)
    >>> sink = io.BytesIO()
    >>> write_stream(sink, [batch]).rows
    1
    >>> [b.num_rows for b in read_stream(sink.getvalue())]
    [1]
    >>> list(read_stream(sink.getvalue()[:-8]))
    Traceback (most recent call last):
    ...
    ragged_format.errors.MissingEndOfStreamError: [RF-C003] the end-of-stream mark is missing
      where:    batch 1
      expected: ff ff ff ff 00 00 00 00
      got:      end of data
      remedy:   fetch it again; its writer or the transport stopped early
    """
    schema, parts = with_schema(batches, schema)
    with StreamWriter(sink, schema, validate=validate) as writer:
        for batch in parts:
            writer.write(batch)
    return writer.close()


class StreamReader:
    """The batches of one stream, in order: an iterator of :class:`pyarrow.RecordBatch`.

    The schema is read at once, each batch when it is asked for; the trailer is checked before the
    iteration ends. An iteration that ends without an exception has delivered everything that the
    writer wrote. After an error each further step raises the same error.

    Attributes
    ----------
    metadata : dict of bytes to bytes
        Custom metadata that the writer gave to the batch returned last.
    message : pyarrow.Buffer or None
        The whole message of that batch, as it came; a view if the source is bytes in memory.
    content : Content or None
        What that message holds: its digest, and where its arrays lie.
    trailer : Trailer or None
        Set when the end was reached.
    num_rows : None
        Unknown before the end.
    is_random_access : bool
        False.
    """

    num_rows: int | None = None
    is_random_access = False
    _file: IO[bytes] | None = None
    _source: ByteSource = byte_source(b"")

    def __init__(
        self,
        source: Any,
        *,
        columns: Sequence[str] | None = None,
        verify: bool = True,
        validate: Validation = "off",
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_bytes: int | None = None,
        trailing: Literal["error", "leave"] = "error",
    ) -> None:
        check_choice("validate", validate, VALIDATIONS)
        check_choice("trailing", trailing, ("error", "leave"))
        check_size("max_message_bytes", max_message_bytes)
        if max_bytes is not None:
            check_size("max_bytes", max_bytes)
        self._name: str | None = None
        if isinstance(source, str | os.PathLike):
            self._name = os.fspath(source)
            source = self._file = open_binary(local_path(source))
        self._verify = verify
        self._validate: Validation = validate
        self._max_message_bytes = max_message_bytes
        self._max_bytes = max_bytes
        self._trailing = trailing
        self._tally = Tally()
        self._failure: RaggedError | None = None
        self.metadata: dict[bytes, bytes] = {}
        self.message: pa.Buffer | None = None
        self.content: Content | None = None
        self.trailer: Trailer | None = None
        try:
            self._source = byte_source(source)
            self._known = self._read_schema()
            self._projection = Projection(self._known.ragged, self._known.schema, columns)
        except BaseException as err:
            self.close()
            if isinstance(err, RaggedError):
                raise err.at(Where(file=self._name)) from err.__cause__
            raise

    @property
    def schema(self) -> pa.Schema:
        """Schema of the batches that are returned."""
        return self._projection.schema

    @property
    def ragged_schema(self) -> RaggedSchema:
        """Declarations of the batches that are returned."""
        return self._projection.ragged

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> StreamReader:
        return self

    def __next__(self) -> pa.RecordBatch:
        if self._failure is not None:
            raise self._failure
        if self.trailer is not None:
            raise StopIteration
        try:
            batch = self._advance()
        except RaggedError as err:
            self._failure = err.at(Where(self._name, len(self._tally.rows_per_batch)))
            self.close()
            raise
        if batch is None:
            self.close()
            raise StopIteration
        return batch

    def batches(self, *, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Return the batches that are left, with these columns only if some are named."""
        projection = Projection(self.ragged_schema, self.schema, columns)
        return map(projection.apply, self)

    def close(self) -> None:
        """Close the file if the reader opened it; another source stays open."""
        self._source.close()
        if self._file is not None:
            self._file.close()

    def __del__(self) -> None:
        if self._file is not None:
            self._file.close()

    def _read_schema(self) -> KnownSchema:
        prefix = bytes(self._source.read(8))
        if not prefix:
            raise TruncatedError("the input is empty", expected="an Arrow stream", got="no bytes")
        if not prefix.startswith(CONTINUATION[: len(prefix)]):
            raise NotRaggedError(
                "the input is not an Arrow stream", expected="an Arrow IPC stream",
                got=describe(prefix), remedy="open it with rf.open_source, or import it",
            )  # fmt: skip
        head = next_head(self._source, prefix, max_bytes=self._max_message_bytes)
        if head is None:
            raise TruncatedError(
                "the stream ends before its schema", expected="a schema", got="the end of stream"
            )
        return read_schema_message(head)

    def _advance(self) -> pa.RecordBatch | None:
        source = self._source
        prefix = source.read(8)
        if not prefix:
            raise TruncatedError(
                "the stream ends without its trailer: it was cut between two messages",
                expected="more batches, or the trailer", got="end of data",
                remedy="fetch it again; its writer or the transport stopped early",
            )  # fmt: skip
        head = next_head(source, prefix, max_bytes=self._max_message_bytes)
        if head is None:
            raise TruncatedError(
                "the stream ends without its trailer: its writer is not of this format, or failed",
                expected="more batches, or the trailer", got="the end of stream",
                remedy="import data of other writers",
            )  # fmt: skip
        if self._verify and TRAILER_KEY in head:
            trailer = self._tally.trailer(self._known.digest)
            if head == trailer_head(trailer, self._known):
                # Exactly the expected one: there is nothing left to parse or to compare.
                skip_body(source, self._known.empty.header.body_bytes)
                self._finish(trailer)
                return None
        message = next_body(source, head, max_bytes=self._max_message_bytes)
        if self._max_bytes is not None and source.position > self._max_bytes:
            raise LimitExceededError(
                "the stream is larger than the limit", expected=f"<= {self._max_bytes} bytes",
                got=f">= {source.position}", remedy="raise max_bytes",
            )  # fmt: skip
        if TRAILER_KEY in message.header.metadata:
            trailer = Trailer.from_metadata(message.header.metadata)
            check_trailer(trailer, self._known, self._tally, verify=self._verify)
            if rows := rows_of(message.flatbuffer, message.header):
                raise CorruptError("the trailer has rows", expected=0, got=rows)
            self._finish(trailer)
            return None
        content = self.content = decode(
            message, self._known, self._tally, verify=self._verify, validate=self._validate,
            max_bytes=self._max_message_bytes,
        )  # fmt: skip
        self.metadata = content.metadata
        self.message = message.buffer
        return self._projection.apply(content.batch)

    def _finish(self, trailer: Trailer) -> None:
        """Check what follows the trailer."""
        ends = self._trailing == "error"
        rest = bytes(self._source.read(9 if ends else 8))  # one byte more than there may be
        mark = rest[:8]
        if len(mark) < 8:
            raise MissingEndOfStreamError(
                "the end-of-stream mark is missing",
                expected=END_OF_STREAM.hex(" "), got=mark.hex(" ") or "end of data",
                remedy="fetch it again; its writer or the transport stopped early",
            )  # fmt: skip
        if mark != END_OF_STREAM:
            raise CorruptError(
                "something follows the trailer",
                expected=END_OF_STREAM.hex(" "), got=mark.hex(" "),
            )  # fmt: skip
        if len(rest) > 8:
            raise CorruptError(
                "there are bytes after the end-of-stream mark", expected="end of data",
                got=rest[8:].hex(),
                remedy="pass trailing='leave' where streams follow each other",
            )  # fmt: skip
        self.trailer = trailer


def read_stream(
    source: Any,
    *,
    columns: Sequence[str] | None = None,
    verify: bool = True,
    validate: Validation = "off",
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_bytes: int | None = None,
    trailing: Literal["error", "leave"] = "error",
) -> StreamReader:
    """Return an iterator over the batches of a stream; trailers are never among them.

    Guarantees: whatever is wrong with the bytes raises a :class:`RaggedError`, at the latest where
    the iteration would end. Batches are valid Arrow data, aligned in memory, and do not change if
    the source changes later; they are views if `source` is bytes in memory. Memory is bounded by
    one message.

    Parameters
    ----------
    source : path, bytes-like or binary file object
        A file object needs ``read`` only, no seeking. Data in zstd frames is decompressed.
    columns : sequence of str, optional
        Columns to return; the counts that their axes need come with them.
    verify : bool
        Compare every batch with its digest before it is returned, and the whole with the trailer.
        Without it, only completeness, row counts and the schema digest are checked.
    validate : {"off", "structural", "full"}
        Invariants to check besides; "full" for data of writers that you do not trust.
    max_message_bytes : int
        Largest message, also when decompressed.
    max_bytes : int, optional
        Largest stream, as decompressed from zstd frames.
    trailing : {"error", "leave"}
        Whether bytes after the end of the stream are an error or left unread in the source. A
        source that stays open after the stream, such as a socket, needs "leave".

    Raises
    ------
    DatasetNotFoundError
        The path does not exist (``RF-C008``).
    NotRaggedError
        Not an Arrow stream, or one without this format's metadata (``RF-S001``).
    UnsupportedVersionError, UnsupportedFeatureError
        ``RF-V001``, ``RF-V002``; big-endian data as well.
    TruncatedError, MissingEndOfStreamError
        The data ends early (``RF-C002``), or only the end-of-stream mark is missing (``RF-C003``).
    ChecksumError, CorruptError
        Content differs from its digest (``RF-C004``), or the bytes are malformed (``RF-C001``).
    InvariantError
        The content is what the writer wrote, but broken.
    LimitExceededError
        ``RF-L001``.
    """
    return StreamReader(
        source, columns=columns, verify=verify, validate=validate,
        max_message_bytes=max_message_bytes, max_bytes=max_bytes, trailing=trailing,
    )  # fmt: skip
