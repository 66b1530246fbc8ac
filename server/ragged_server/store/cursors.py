"""Cursors: opaque text for a position of one log.

A cursor is URL-safe base64 without padding of 21 bytes: version (1), log id (8 bytes), sequence of
the next record (u64), and the first 4 bytes of xxh3-64 of these, all big-endian. It holds nothing
about files, so it stays valid when segments are sealed or shards rewritten.
"""

from __future__ import annotations

import base64
import binascii
import struct

import xxhash

from ragged_server.store.errors import CursorError, CursorExpiredError

__all__ = ["decode_cursor", "encode_cursor", "position_of"]

_VERSION = 1
_body = struct.Struct(">B8sQ")
_SIZE = _body.size + 4


def encode_cursor(log_id: bytes, sequence: int) -> str:
    """Return the cursor before the record with this sequence.

    Examples
    --------
    >>> cursor = encode_cursor(bytes(8), 1000)
    >>> cursor
    'AQAAAAAAAAAAAAAAAAAAA-i1KuJm'
    >>> decode_cursor(cursor, bytes(8))
    1000
    """
    body = _body.pack(_VERSION, log_id, sequence)
    text = base64.urlsafe_b64encode(body + xxhash.xxh3_64_digest(body)[:4])
    return text.rstrip(b"=").decode()


def decode_cursor(cursor: str, log_id: bytes) -> int:
    """Return the sequence that a cursor names.

    Raises
    ------
    CursorError
        It is malformed, of a newer version, or of another log.
    """
    try:
        data = base64.b64decode(
            cursor.encode("ascii") + b"=" * (-len(cursor) % 4), altchars=b"-_", validate=True
        )
    except (UnicodeEncodeError, AttributeError, binascii.Error) as err:
        raise _malformed(cursor) from err
    if len(data) != _SIZE or xxhash.xxh3_64_digest(data[: _body.size])[:4] != data[_body.size :]:
        raise _malformed(cursor)
    version, own, sequence = _body.unpack_from(data)
    if version != _VERSION:
        raise CursorError(
            "this server does not read that version of cursors",
            expected=_VERSION, got=version, remedy="ask the server that gave it",
        )  # fmt: skip
    if own != log_id:
        raise CursorError(
            "the cursor is of another log", expected=f"log {log_id.hex()}", got=f"log {own.hex()}",
            remedy="use the server that gave it, or read without one, from the oldest record on",
        )  # fmt: skip
    return int(sequence)


def _malformed(cursor: object) -> CursorError:
    return CursorError(
        "the cursor is malformed", expected="a cursor that this server gave",
        got=repr(cursor)[:80], remedy="take it from header Ragged-Cursor as it is",
    )  # fmt: skip


def position_of(after: str | None, log_id: bytes, first: int, end: int) -> int:
    """Return the sequence at which reading goes on after a cursor.

    Parameters
    ----------
    after : str, optional
        None begins with the oldest record.
    log_id : bytes
    first, end : int
        Sequences of the oldest record and after the newest one.

    Raises
    ------
    CursorError
        The cursor is malformed, of another log, or beyond the end.
    CursorExpiredError
        Records after it were removed.
    """
    if after is None:
        return first
    position = decode_cursor(after, log_id)
    if position > end:
        raise CursorError(
            "the cursor is beyond the end of the log", expected=f"<= {end}", got=position,
            remedy="the log lost records, or was replaced: begin without a cursor",
        )  # fmt: skip
    if position < first:
        raise CursorExpiredError(
            "what the cursor points at was removed", expected=f">= sequence {first}",
            got=position, oldest=encode_cursor(log_id, first),
            remedy="read on from the oldest cursor, or without one",
        )  # fmt: skip
    return position
