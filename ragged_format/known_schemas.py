"""Schemas that this process has written or read lately, with all that follows from them.

A stream of one record spends more time on its schema than on its data, unless the work on the
schema is remembered. Batches of one source also share one schema object, which makes comparing
their schemas free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from ragged_format.digest import DigestPlan, digest_plan, schema_digest
from ragged_format.errors import CorruptError, UnsupportedFeatureError
from ragged_format.flatbuffer import SCHEMA, Header, is_big_endian, parse_header, prefix_size
from ragged_format.parse import parse_schema

if TYPE_CHECKING:
    from ragged_format.schema import RaggedSchema

__all__ = ["Empty", "KnownSchema", "known_schema", "read_schema_message"]

_KEPT = 16


class Empty(NamedTuple):
    """A message of a batch without rows: its flatbuffer, what that says, its body."""

    flatbuffer: bytes
    header: Header
    body: bytes


class KnownSchema(NamedTuple):
    """One schema.

    Attributes
    ----------
    schema : pyarrow.Schema
        As it was written or read.
    ragged : RaggedSchema
        Its declarations.
    digest : str
        Schema digest, 32 hexadecimal digits.
    plan : DigestPlan
        How to digest batches.
    message : bytes
        The Arrow schema message.
    empty : Empty
        Message of a batch without rows.
    trailers : dict of int to tuple of bytes
        What stands around the two texts of a trailer's head, by the size of the first.
    """

    schema: pa.Schema
    ragged: RaggedSchema
    digest: str
    plan: DigestPlan
    message: bytes
    empty: Empty
    trailers: dict[int, tuple[bytes, bytes, bytes]]


_recent: list[KnownSchema] = []
_by_message: dict[bytes, KnownSchema] = {}
# The last one read, to be compared with before some kilobytes are hashed.
_last: list[tuple[bytes, KnownSchema]] = []


def known_schema(schema: pa.Schema) -> KnownSchema:
    """Return what follows from a schema, checked.

    Raises
    ------
    NotRaggedError, UnsupportedVersionError, UnsupportedFeatureError, SchemaMismatchError
    """
    if not isinstance(schema, pa.Schema):
        parse_schema(schema)  # raises
    for known in _recent:
        if known.schema is schema or known.schema.equals(schema, check_metadata=True):
            return known
    ragged = parse_schema(schema)
    message = pa.RecordBatch.from_pylist([], schema=schema).serialize().to_pybytes()
    start = 8 + prefix_size(message[:8])
    empty = Empty(message[8:start], parse_header(message[8:start]), message[start:])
    known = KnownSchema(
        schema,
        ragged,
        schema_digest(schema).hex(),
        digest_plan(schema),
        schema.serialize().to_pybytes(),
        empty,
        {},
    )
    _recent.insert(0, known)
    del _recent[_KEPT:]
    return known


def read_schema_message(message: bytes) -> KnownSchema:
    """Return the schema that a schema message holds; it has no body.

    Raises
    ------
    CorruptError
        It is not a schema message.
    UnsupportedFeatureError
        The data is big-endian.
    """
    if _last and _last[0][0] == message:
        return _last[0][1]
    known = _by_message.get(message)
    if known is None:
        metadata = memoryview(message)[8:]
        header = parse_header(metadata)
        if header.kind != SCHEMA or header.body_bytes:
            raise CorruptError(
                "the data does not begin with a schema", expected=SCHEMA, got=header.kind
            )
        if is_big_endian(metadata, header):
            raise UnsupportedFeatureError(
                "the data is big-endian", expected="little-endian", got="big-endian",
                remedy="write it on a little-endian machine",
            )  # fmt: skip
        try:
            schema = pa.ipc.read_schema(pa.py_buffer(message))
        except (pa.ArrowException, OSError, ValueError, MemoryError) as err:
            raise CorruptError(
                "Arrow cannot decode the schema", expected="an Arrow schema", got=str(err)
            ) from err
        try:
            known = known_schema(schema)
        except (UnicodeDecodeError, RecursionError) as err:
            raise CorruptError(
                "names or metadata of the schema are malformed", expected="UTF-8 text", got=str(err)
            ) from err
        if len(_by_message) >= _KEPT:
            _by_message.clear()
        _by_message[message] = known
    _last[:] = [(message, known)]
    return known
