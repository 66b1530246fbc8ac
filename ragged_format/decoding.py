"""From one message to one checked batch: what streams and files have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import pyarrow as pa

from ragged_format.arguments import column_names
from ragged_format.canonical import not_a_batch, require_same
from ragged_format.digest import digest, message_digest
from ragged_format.errors import (
    ChecksumError,
    CorruptError,
    InvariantError,
    SchemaMismatchError,
    Where,
)
from ragged_format.flatbuffer import BATCH, Layout, layout_of
from ragged_format.messages import MAX_MESSAGE_BYTES, decode_batch
from ragged_format.parse import parse_schema
from ragged_format.soundness import check_arrays
from ragged_format.trailer import DIGEST_KEY, Tally, Trailer
from ragged_format.validate import validate_batch

if TYPE_CHECKING:
    from ragged_format.byte_source import Message
    from ragged_format.known_schemas import KnownSchema
    from ragged_format.schema import RaggedSchema

__all__ = [
    "NOWHERE",
    "VALIDATIONS",
    "Batches",
    "Content",
    "Projection",
    "Validation",
    "check_trailer",
    "conform",
    "decode",
    "iter_batches",
    "with_schema",
]

Validation: TypeAlias = Literal["full", "structural", "off"]
Batches: TypeAlias = Iterable[pa.RecordBatch | pa.Table] | pa.RecordBatch | pa.Table


VALIDATIONS: tuple[Validation, ...] = ("full", "structural", "off")


NOWHERE = Where()


class Content(NamedTuple):
    """What one message holds.

    Attributes
    ----------
    batch : pyarrow.RecordBatch
    metadata : dict of bytes to bytes
        Custom metadata besides the digest.
    digest : bytes
        Of the batch, compared with the one stated; empty if nothing was compared.
    layout : Layout
        Where the arrays lie in the message.
    """

    batch: pa.RecordBatch
    metadata: dict[bytes, bytes]
    digest: bytes
    layout: Layout


class Projection:
    """The columns that a reader returns.

    Parameters
    ----------
    ragged, schema : RaggedSchema, pyarrow.Schema
        Schema of the data.
    columns : sequence of str, optional
        Columns wanted; the counts that their axes need come with them. None: all.
    """

    def __init__(
        self, ragged: RaggedSchema, schema: pa.Schema, columns: Sequence[str] | None
    ) -> None:
        self.ragged = ragged
        self.schema = schema
        self._positions: list[int] | None = None
        wanted = column_names(columns)
        if wanted is not None:
            self.ragged = ragged.select(wanted)
            self._positions = [schema.get_field_index(name) for name in self.ragged.columns]
            fields = [schema.field(position) for position in self._positions]
            self.schema = pa.schema(fields, metadata=schema.metadata)

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the batch with these columns; they are views."""
        if self._positions is None:
            return batch
        arrays = [batch.column(position) for position in self._positions]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def iter_batches(data: Batches) -> Iterator[pa.RecordBatch]:
    """Return the record batches of batches, tables or one of these."""
    if isinstance(data, pa.RecordBatch):
        yield data
    elif isinstance(data, pa.Table):
        yield from data.to_batches()
    elif isinstance(data, str | bytes | Mapping) or not isinstance(data, Iterable):
        raise not_a_batch(data)
    else:
        for part in data:
            if isinstance(part, pa.RecordBatch):
                yield part
            elif isinstance(part, pa.Table):
                yield from part.to_batches()
            else:
                raise not_a_batch(part)


def with_schema(
    data: Batches, schema: pa.Schema | None
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return the schema, by default that of the first batch, and all batches."""
    parts = iter_batches(data)
    if schema is None and isinstance(data, pa.RecordBatch | pa.Table):
        schema = data.schema
    if schema is None:
        first = next(parts, None)
        if first is None:
            raise SchemaMismatchError(
                "no batches without a schema", expected="at least one batch, or schema=",
                got="no batches", remedy="pass schema=",
            )  # fmt: skip
        schema = first.schema
        parts = chain((first,), parts)
    return schema, parts


def conform(batch: pa.RecordBatch, known: KnownSchema, where: Where) -> pa.RecordBatch:
    """Return the batch under the known schema; raises ``RF-S010`` if its identity is another."""
    if not isinstance(batch, pa.RecordBatch):
        raise not_a_batch(batch)
    schema = batch.schema
    if schema is known.schema or schema.equals(known.schema, check_metadata=True):
        return batch
    require_same(known.ragged, parse_schema(schema), where)
    return pa.RecordBatch.from_arrays(batch.columns, schema=known.schema)


def decode(
    message: Message,
    known: KnownSchema,
    tally: Tally,
    *,
    verify: bool,
    validate: Validation,
    max_bytes: int = MAX_MESSAGE_BYTES,
) -> Content:
    """Return what one message holds, and count it.

    Guarantees: zero-copy where the body is not compressed. The content was compared with its digest
    (if `verify`), the arrays are valid, the invariants of `validate` hold.
    """
    if message.header.kind != BATCH:
        raise CorruptError(
            "a message is not a record batch", expected=BATCH, got=message.header.kind
        )
    layout = layout_of(message.flatbuffer, message.header, message.body)
    batch = decode_batch(message.buffer, known.schema, layout, max_bytes=max_bytes)
    metadata = message.header.metadata
    stated = metadata.pop(DIGEST_KEY, None)
    found = _content_digest(batch, known, layout) if verify else b""
    if verify and stated is None:
        raise ChecksumError(
            "a batch has no digest: its writer is not of this format", expected="a digest",
            got="none", remedy="import data of other writers",
        )  # fmt: skip
    if verify and stated is not None and found.hex().encode() != stated:
        raise ChecksumError(
            "a batch does not match its digest",
            expected=stated.decode(errors="replace"),
            got=found.hex() or "arrays too broken to digest",
            remedy="fetch it again, or restore it from a copy",
        )  # fmt: skip
    check_arrays(batch)
    if validate != "off":
        validate_batch(batch, known.ragged, validate, NOWHERE)
    tally.add(found, batch.num_rows, metadata)
    return Content(batch, metadata, found, layout)


def _content_digest(batch: pa.RecordBatch, known: KnownSchema, layout: Layout) -> bytes:
    try:
        return digest(batch) if layout.compressed else message_digest(known.plan, layout)
    except InvariantError:
        return b""  # no writer digests such arrays, so their digest cannot match


def check_trailer(trailer: Trailer, known: KnownSchema, tally: Tally, *, verify: bool) -> None:
    """Raise unless the trailer states what was read."""
    facts = [
        ("schema digest", trailer.schema_digest, known.digest),
        ("records per batch", list(trailer.rows_per_batch), tally.rows_per_batch),
    ]
    if verify:
        facts.append(("running digest", trailer.digest, tally.hexdigest()))
    for what, expected, got in facts:
        if expected != got:
            raise ChecksumError(
                f"the {what} is not what the trailer states", expected=expected, got=got,
                remedy="fetch the data again, or restore it from a copy",
            )  # fmt: skip
