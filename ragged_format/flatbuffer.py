"""The metadata of Arrow IPC messages and files: read before anything else is, and written.

A message is ``FF FF FF FF``, a little-endian int32 with the size of the metadata (padded to a
multiple of 8), the metadata (a flatbuffer ``Message``) and a body. The end-of-stream mark is
``FF FF FF FF 00 00 00 00``. This module reads sizes, kinds and custom metadata out of the
flatbuffer itself, because every size must be known, and limited, before memory is allocated or
anything is decompressed, and because Arrow's reader takes a stream that was cut at a message
boundary for a complete one. It also puts custom metadata into a serialised message without
serialising it twice: a new root table and the key-value vector are placed before the old metadata,
whose inner offsets are relative and stay valid.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from ragged_format.errors import CorruptError, LimitExceededError

__all__ = [
    "BATCH",
    "CONTINUATION",
    "END_OF_STREAM",
    "SCHEMA",
    "Header",
    "Layout",
    "blocks_before",
    "blocks_of",
    "footer_of",
    "is_big_endian",
    "layout_of",
    "parse_header",
    "prefix_size",
    "rows_of",
    "with_metadata",
]

SCHEMA, DICTIONARY, BATCH = 1, 2, 3
CONTINUATION = b"\xff\xff\xff\xff"
END_OF_STREAM = CONTINUATION + bytes(4)
# Field metadata of a schema with thousands of columns stays far below.
MAX_METADATA_BYTES = 64 << 20
_METADATA_V5 = 4

_u16 = struct.Struct("<H").unpack_from
_i32 = struct.Struct("<i").unpack_from
_u32 = struct.Struct("<I").unpack_from
_i64 = struct.Struct("<q").unpack_from
# One entry of a footer: offset, length of the metadata, length of the body.
_BLOCK = struct.Struct("<qi4xq")
_prefix = struct.Struct("<4si")
_fields = [struct.Struct(f"<{count}H").unpack_from for count in range(6)]
_ABSENT = (0,) * 5
_NO_PAIRS = memoryview(b"").cast("q")


class Header(NamedTuple):
    """What the metadata of one message says.

    Attributes
    ----------
    kind : int
        ``SCHEMA``, ``BATCH`` or another of Arrow's message types.
    body_bytes : int
        Size of the body.
    metadata : dict of bytes to bytes
        Custom metadata of the message.
    table : int
        Position of the schema or record batch table in the flatbuffer.
    """

    kind: int
    body_bytes: int
    metadata: dict[bytes, bytes]
    table: int


class Layout(NamedTuple):
    """Where the arrays of a batch message lie.

    Attributes
    ----------
    rows : int
        Number of rows.
    nodes : memoryview of int64
        Length and null count of each array, depth first, end to end.
    buffers : memoryview of int64
        Offset in the body and length of each buffer, in the order of the arrays, end to end.
    body : memoryview
        The body.
    compressed : bool
        Whether buffers may be compressed.
    """

    rows: int
    nodes: memoryview
    buffers: memoryview
    body: memoryview
    compressed: bool


def prefix_size(prefix: bytes | memoryview) -> int:
    """Return the metadata size that the 8 bytes before a message state; 0 is the end of stream.

    Raises
    ------
    CorruptError
        The bytes do not begin a message (``RF-C001``).
    LimitExceededError
        The metadata is too large (``RF-L001``).
    """
    mark, size = _prefix.unpack(prefix)
    if mark != CONTINUATION:
        raise CorruptError(
            "an Arrow message does not begin with its mark",
            expected=CONTINUATION.hex(" "), got=mark.hex(" "),
        )  # fmt: skip
    if size < 0 or size % 8:
        raise CorruptError(
            "the metadata size of an Arrow message is out of range",
            expected="0 or more bytes, in eights", got=size,
        )  # fmt: skip
    if size > MAX_METADATA_BYTES:
        raise LimitExceededError(
            "the metadata of an Arrow message is too large",
            expected=f"<= {MAX_METADATA_BYTES} bytes", got=size,
        )  # fmt: skip
    return int(size)


def parse_header(metadata: bytes | memoryview) -> Header:
    """Parse the flatbuffer of one message.

    Raises
    ------
    CorruptError
        It is not a well-formed message of metadata version 5.
    """
    try:
        own = _root.unpack_from(metadata) if len(metadata) >= _VECTOR else ()
        if own[:10] == _OWN_ROOT and own[12:13] == (_METADATA_V5,) and own[14:] == _OWN_PAIR:
            # As `with_metadata` writes it, which saves to look each field up.
            custom = _key_values(metadata, _VECTOR, own=True)
            return Header(own[13], _not_negative(own[10]), custom, own[11] + _TABLE_FIELD)
        root = _u32(metadata, 0)[0]
        fields = _vtable(metadata, root)
        version = _u16(metadata, root + fields[0])[0] if fields[0] else 0
        kind = metadata[root + fields[1]] if fields[1] else 0
        table = _child(metadata, root, fields[2]) if fields[2] else 0
        body = _i64(metadata, root + fields[3])[0] if fields[3] else 0
        vector = _child(metadata, root, fields[4]) if fields[4] else 0
        custom = _key_values(metadata, vector, own=False) if vector else {}
    except (struct.error, IndexError) as err:
        raise _malformed(err) from err
    if version != _METADATA_V5 or not table:
        raise _malformed(f"version {version}")
    return Header(kind, _not_negative(body), custom, table)


def _not_negative(body: int) -> int:
    if body < 0:
        raise _malformed(f"a body of {body} bytes")
    return body


def is_big_endian(metadata: bytes | memoryview, header: Header) -> bool:
    """Return whether a schema message declares big-endian data."""
    try:
        fields = _vtable(metadata, header.table)
        return bool(fields[0]) and _u16(metadata, header.table + fields[0])[0] != 0
    except (struct.error, IndexError) as err:
        raise _malformed(err) from err


def rows_of(metadata: bytes | memoryview, header: Header) -> int:
    """Return the number of rows that a batch message declares."""
    return layout_of(metadata, header, memoryview(b"")).rows


def layout_of(metadata: bytes | memoryview, header: Header, body: memoryview) -> Layout:
    """Return where the arrays of a batch message lie in its body."""
    try:
        table = header.table
        fields = _vtable(metadata, table)
        rows, nodes, buffers, compression, _ = fields
        view = memoryview(metadata)
        return Layout(
            _i64(metadata, table + rows)[0] if rows else 0,
            _pairs(view, table + nodes) if nodes else _NO_PAIRS,
            _pairs(view, table + buffers) if buffers else _NO_PAIRS,
            body,
            compression != 0,
        )
    except (struct.error, IndexError) as err:
        raise _malformed(err) from err


def _pairs(data: memoryview, field: int) -> memoryview:
    start = field + 4 + _u32(data, field)[0]
    size = 16 * _u32(data, start - 4)[0]
    pairs = data[start : start + size]
    if len(pairs) != size:
        raise IndexError(size)
    return pairs.cast("q")


def blocks_of(footer: bytes | memoryview) -> list[tuple[int, int]]:
    """Return ``(offset, size)`` of every record batch message that an IPC file's footer lists."""
    try:
        root = _u32(footer, 0)[0]
        fields = _vtable(footer, root)
        if fields[2] and _u32(footer, _child(footer, root, fields[2]))[0]:
            raise CorruptError(
                "the file has dictionaries", expected="no dictionary batches", got="some"
            )
        if not fields[3]:
            return []
        vector = _child(footer, root, fields[3])
        count = _u32(footer, vector)[0]
        blocks = footer[vector + 4 : vector + 4 + 24 * count]
        if len(blocks) != 24 * count:
            raise IndexError(count)
        # A file of many small batches lists thousands.
        return [(place, meta + body) for place, meta, body in _BLOCK.iter_unpack(blocks)]
    except (struct.error, IndexError) as err:
        raise _malformed(err) from err


def blocks_before(footer: bytes | memoryview, end: int) -> list[tuple[int, int]]:
    """Return the :func:`blocks_of` a footer that begins at `end`; raises unless they lie before."""
    blocks = blocks_of(footer)
    for offset, length in blocks:
        if not 8 <= offset <= offset + length <= end or offset % 8:
            raise CorruptError(
                "the footer points outside the file",
                expected=f"8 to {end}, in eights", got=(offset, offset + length),
            )  # fmt: skip
    return blocks


def _vtable(data: bytes | memoryview, table: int) -> tuple[int, ...]:
    """Return the positions of a table's first five fields, 0 for an absent one."""
    start = table - _i32(data, table)[0]
    if start < 0:
        raise IndexError(start)
    size = _u16(data, start)[0]
    # More fields than any table here needs are those of a newer Arrow.
    count = min(max(size - 4, 0) // 2, 5)
    fields: tuple[int, ...] = _fields[count](data, start + 4)
    return fields + _ABSENT[count:]


def _child(data: bytes | memoryview, table: int, field: int) -> int:
    return table + field + int(_u32(data, table + field)[0])


def _key_values(data: bytes | memoryview, vector: int, *, own: bool) -> dict[bytes, bytes]:
    out = {}
    count = _u32(data, vector)[0]
    for place in range(vector + 4, vector + 4 + 4 * count, 4):
        table = place + _u32(data, place)[0]
        if own and _i32(data, table)[0] == table - _PAIR_VTABLE:
            key_field, value_field = 4, 8
        else:
            key_field, value_field, *_ = _vtable(data, table)
        key = _string(data, table + key_field) if key_field else b""
        if key in out:
            raise IndexError("a key is there twice")
        out[key] = _string(data, table + value_field) if value_field else b""
    return out


def _string(data: bytes | memoryview, field: int) -> bytes:
    start = field + _u32(data, field)[0]
    size = _u32(data, start)[0]
    text = bytes(data[start + 4 : start + 4 + size])
    if len(text) != size:
        raise IndexError(size)
    return text


def _malformed(detail: object) -> CorruptError:
    return CorruptError(
        "the metadata of an Arrow message is malformed",
        expected="a Message flatbuffer of version 5", got=detail,
    )  # fmt: skip


# Layout of an IPC file's footer; the schema message's flatbuffer follows at a multiple of 8.
#    0  u32  position of the root table (20)
#    4  u16 × 6  vtable: size 12, table size 20, positions of version, schema, dictionaries, batches
#   16  4 bytes of padding
#   20  root table: i32 distance to its vtable; u32 each to schema table, vector of dictionaries and
#       vector of batches; i16 version; 2 bytes of padding
#   40  u32 number of dictionaries (0)
#   44  u32 number of batches
#   48  for each: i64 offset, i32 size of head, 4 bytes of padding, i64 size of body
_footer = struct.Struct("<I6H4xiIIIh2xII")
_block = struct.Struct("<qi4xq")


def footer_of(schema_message: bytes, blocks: Sequence[tuple[int, int, int]]) -> bytes:
    """Return the footer of an IPC file.

    Parameters
    ----------
    schema_message : bytes
        The message at the start of the file.
    blocks : sequence of (int, int, int)
        Of every record batch message: its offset in the file, the size of its head (mark to
        metadata), the size of its body.
    """
    flatbuffer = schema_message[8:]
    start = _footer.size + _block.size * len(blocks)
    schema = start + parse_header(flatbuffer).table
    head = _footer.pack(
        20, 12, 20, 16, 4, 8, 12, 16, schema - 24, 40 - 28, 44 - 32, _METADATA_V5, 0, len(blocks)
    )
    return b"".join((head, *(_block.pack(*block) for block in blocks), flatbuffer))


# Layout of the metadata that `with_metadata` puts in front. All positions are relative to its
# start; the old flatbuffer follows at a multiple of 8.
#    0  u32  position of the root table (24)
#    4  u16 × 7  vtable of the root table: size 14, table size 24, then the positions of version,
#       header type, header, body length, custom metadata
#   18  6 bytes of padding
#   24  root table: i32 distance to its vtable; u32 to the key-value vector; i64 body length;
#       u32 to the header table; i16 version; u8 header type; 1 byte of padding
#   48  u16 × 4  vtable of the key-value tables: size 8, table size 12, positions of key and value
#   56  key-value vector: u32 count, u32 per table
_root = struct.Struct("<I7H6xiIqIhBx4H")
_PAIR_VTABLE, _VECTOR, _TABLE_FIELD = 48, 56, 40
_OWN_ROOT = (24, 14, 24, 20, 22, 16, 8, 4, 20, _VECTOR - 28)
_OWN_PAIR = (8, 12, 4, 8)


def with_metadata(
    flatbuffer: bytes | memoryview, header: Header, metadata: Mapping[bytes, bytes]
) -> bytes:
    """Return the head of a batch message, from its mark to its metadata, with custom metadata.

    Parameters
    ----------
    flatbuffer, header : the metadata of a message without custom metadata, and what it says
        As ``RecordBatch.serialize`` makes it.
    metadata : mapping of bytes to bytes
        Keys and values to add, in this order.
    """
    pairs = _pack_key_values(metadata)
    start = _VECTOR + len(pairs)
    head = _root.pack(
        *_OWN_ROOT, header.body_bytes, start + header.table - _TABLE_FIELD, _METADATA_V5,
        header.kind, *_OWN_PAIR,
    )  # fmt: skip
    prefix = _prefix.pack(CONTINUATION, start + len(flatbuffer))
    return b"".join((prefix, head, pairs, flatbuffer))


def _pack_key_values(metadata: Mapping[bytes, bytes]) -> bytes:
    """Return the vector at `_VECTOR`, its tables and its strings, padded to a multiple of 8."""
    texts = [text for pair in metadata.items() for text in pair]
    parts = [b""] * (2 * len(texts) + 1)
    parts[::2] = _around(tuple(map(len, texts)))
    parts[1::2] = texts
    return b"".join(parts)


@lru_cache(maxsize=64)
def _around(sizes: tuple[int, ...]) -> tuple[bytes, ...]:
    """Return what stands around texts of these sizes, keys and values in turn."""
    count = len(sizes) // 2
    tables = 4 + 4 * count
    strings = tables + 12 * count
    out = [struct.pack("<I", count)]
    out.extend(struct.pack("<I", tables + 8 * number - 4) for number in range(count))
    places = []
    for size in sizes:
        places.append(strings)
        strings += 4 + size + 4 - size % 4  # at least one NUL
    for number in range(count):
        place = tables + 12 * number
        key, value = places[2 * number : 2 * number + 2]
        out.append(struct.pack("<iII", place + 8, key - place - 4, value - place - 8))
    glue, parts = b"".join(out), []
    for size in sizes:
        parts.append(glue + struct.pack("<I", size))
        glue = bytes(4 - size % 4)
    return (*parts, glue + bytes(-strings % 8))
