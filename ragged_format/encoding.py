"""From batches to messages with digests, and the trailer: what stream and file writers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ragged_format.arguments import check_choice
from ragged_format.decoding import NOWHERE, VALIDATIONS, Validation, conform
from ragged_format.digest import message_digest
from ragged_format.errors import ChecksumError, RaggedError, Where
from ragged_format.flatbuffer import (
    layout_of,
    parse_header,
    prefix_size,
    rows_of,
    with_metadata,
)
from ragged_format.known_schemas import KnownSchema, known_schema
from ragged_format.soundness import check_arrays
from ragged_format.trailer import DIGEST_KEY, Tally, Trailer, batch_metadata, user_metadata
from ragged_format.validate import validate_batch

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Encoder", "trailer_head"]

# Sizes of trailers whose heads are remembered for each schema.
_KEPT = 16


class Encoder:
    """Turn batches of one schema into messages, count them, and make the trailer.

    Parameters
    ----------
    schema : pyarrow.Schema
        Schema of this format.
    validate : {"full", "structural", "off"}
        What is checked of every batch. Arrow's own validity always is.
    name : str, optional
        Of the sink, for errors.
    """

    def __init__(self, schema: pa.Schema, *, validate: Validation, name: str | None) -> None:
        check_choice("validate", validate, VALIDATIONS)
        self.known = known_schema(schema)
        self._validate: Validation = validate
        self._name = name
        self._tally = Tally()

    def encode(
        self, batch: pa.RecordBatch, metadata: Mapping[str | bytes, str | bytes] | None
    ) -> tuple[bytes, memoryview]:
        """Return the head (mark to metadata) and the body of the batch's message.

        Raises
        ------
        SchemaMismatchError
            The batch has another schema (``RF-S010``), or a metadata key is reserved (``RF-S009``).
        InvariantError
            The batch is invalid.
        """
        try:
            batch = conform(batch, self.known, NOWHERE)
            check_arrays(batch)
            if self._validate != "off":
                validate_batch(batch, self.known.ragged, self._validate, NOWHERE)
            own = user_metadata(metadata) if metadata else {}
        except RaggedError as err:
            where = Where(file=self._name, batch=len(self._tally.rows_per_batch))
            raise err.at(where) from err.__cause__
        message = batch.serialize()
        view = memoryview(message).cast("B")
        start = 8 + prefix_size(view[:8])
        flatbuffer = view[8:start]
        header = parse_header(flatbuffer)
        layout = layout_of(flatbuffer, header, view[start:])
        content = message_digest(self.known.plan, layout)
        self._tally.add(content, layout.rows, own)
        return with_metadata(flatbuffer, header, batch_metadata(content, own)), layout.body

    def encoded(
        self, message: pa.Buffer, metadata: Mapping[str | bytes, str | bytes] | None
    ) -> tuple[bytes, memoryview]:
        """Return the head and the body of a message that a writer of this schema made.

        Guarantees: no copy of the body, and nothing of it is looked at; its digest is taken over,
        so that whoever reads finds what was damaged since. Metadata it had besides is left out.

        Raises
        ------
        ChecksumError
            The message has no digest (``RF-C004``).
        SchemaMismatchError
            A metadata key is reserved (``RF-S009``).
        """
        view = memoryview(message).cast("B")
        start = 8 + prefix_size(view[:8])
        flatbuffer = view[8:start]
        header = parse_header(flatbuffer)
        try:
            content = bytes.fromhex(header.metadata[DIGEST_KEY].decode())
        except (KeyError, ValueError) as err:
            raise ChecksumError(
                "the message has no digest", expected="a message of a writer of this format",
                got=sorted(header.metadata), where=Where(file=self._name),
            ) from err  # fmt: skip
        own = user_metadata(metadata)
        self._tally.add(content, rows_of(flatbuffer, header), own)
        head = with_metadata(flatbuffer, header, batch_metadata(content, own))
        return head, view[start : start + header.body_bytes]

    def finish(self) -> tuple[Trailer, bytes, bytes]:
        """Return the trailer, and the head and body of its message."""
        trailer = self._tally.trailer(self.known.digest)
        return trailer, trailer_head(trailer, self.known), self.known.empty.body


def trailer_head(trailer: Trailer, known: KnownSchema) -> bytes:
    """Return the head of the trailer's message; its body is that of a batch without rows."""
    metadata = trailer.to_metadata()
    text, checksum = metadata.values()
    around = known.trailers.get(len(text))
    if around is None:
        head = with_metadata(known.empty.flatbuffer, known.empty.header, metadata)
        before, _, rest = head.partition(text)
        between, _, after = rest.partition(checksum)
        if len(known.trailers) >= _KEPT:
            known.trailers.clear()
        around = known.trailers[len(text)] = (before, between, after)
    before, between, after = around
    return b"".join((before, text, between, checksum, after))
