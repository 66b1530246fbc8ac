"""Frames between worker processes and the process that has the store.

A frame is u32 size of its head, u64 size of its body, the head (JSON), the body. The head of a call
has ``id`` and ``op``; its answer has the same ``id`` and ``ok`` or ``error``. Both sides are one
program on one machine, behind a socket that only its user can open, so heads are trusted; bodies
are read as Arrow data and numbers, never as objects.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa

from ragged_format import errors as format_errors
from ragged_format.errors import RaggedError, Where
from ragged_format.known_schemas import known_schema, read_schema_message
from ragged_format.messages import decode_message
from ragged_server.store import errors as server_errors
from ragged_server.store.errors import ClosedStoreError
from ragged_server.store.records import (
    AppendRequest,
    Page,
    Recovery,
    Statistics,
    StoreStatus,
)

__all__ = [
    "error_from_json",
    "error_to_json",
    "page_from_frame",
    "page_to_frame",
    "receive",
    "request_from_frame",
    "request_to_frame",
    "send",
    "status_from_json",
]

_head = struct.Struct("<IQ")
_EXTRA = ("retry_after_s", "oldest")
# Buffers that one call may hand to the kernel.
_IOV_MAX = 512

Head = dict[str, Any]


def send(sock: socket.socket, head: Head, body: Sequence[Any] = ()) -> None:
    """Send one frame; the parts of the body are sent end to end."""
    text = json.dumps(head, separators=(",", ":")).encode()
    parts = [memoryview(part).cast("B") for part in body if len(memoryview(part))]
    prefix = _head.pack(len(text), sum(map(len, parts)))
    rest = [memoryview(prefix + text), *parts]
    while rest:
        sent = sock.sendmsg(rest[:_IOV_MAX])
        done = 0
        for view in rest:
            if sent < len(view):
                break
            sent -= len(view)
            done += 1
        rest = rest[done:]
        if sent:
            rest[0] = rest[0][sent:]


def receive(sock: socket.socket) -> tuple[Head, pa.Buffer] | None:
    """Return the next frame, None where the other side has closed."""
    prefix = bytearray(_head.size)
    if not _fill(sock, memoryview(prefix)):
        return None
    size, body_size = _head.unpack(prefix)
    text = bytearray(size)
    # Arrow's memory, so that messages in it are aligned.
    body = pa.allocate_buffer(body_size)
    if not _fill(sock, memoryview(text)) or not _fill(sock, memoryview(body).cast("B")):
        return None
    return json.loads(text), body


def _fill(sock: socket.socket, out: memoryview) -> bool:
    while len(out):
        got = sock.recv_into(out)
        if not got:
            return False
        out = out[got:]
    return True


def request_to_frame(request: AppendRequest) -> tuple[Head, list[Any]]:
    """Return head and body of an append."""
    schema = known_schema(request.schema).message
    head = {
        "op": "append",
        "schema": len(schema),
        "messages": [message.size for message in request.messages],
        "digests": [digest.hex() for digest in request.message_digests],
        "rows": request.rows,
        "tokens": request.statistics.tokens,
        "scored_tokens": request.statistics.scored_tokens,
        "set_widths": request.statistics.set_widths.tolist(),
        "account": request.account,
        "key": request.idempotency_key,
        "fingerprint": request.fingerprint.hex(),
    }
    # What must be aligned comes first: messages are multiples of 8.
    body = [
        *request.messages, request.share_hashes.tobytes(), request.policy_versions.tobytes(),
        request.id_digests.tobytes(), request.record_digests.tobytes(), schema,
    ]  # fmt: skip
    return head, body


def request_from_frame(head: Head, body: pa.Buffer) -> AppendRequest:
    """Return the request of an append."""
    start = 0

    def piece(size: int) -> pa.Buffer:
        nonlocal start
        start += size
        return body.slice(start - size, size)

    messages = tuple(piece(size) for size in head["messages"])
    rows = head["rows"]
    hashes = np.frombuffer(piece(8 * rows), np.uint64)
    versions = np.frombuffer(piece(8 * rows), np.int64)
    ids = np.frombuffer(piece(16 * rows), np.uint8).reshape(rows, 16)
    records = np.frombuffer(piece(16 * rows), np.uint8).reshape(rows, 16)
    schema = read_schema_message(piece(head["schema"]).to_pybytes()).schema
    return AppendRequest(
        schema=schema,
        batches=tuple(decode_message(message, schema) for message in messages),
        messages=messages,
        message_digests=tuple(bytes.fromhex(digest) for digest in head["digests"]),
        id_digests=ids,
        record_digests=records,
        share_hashes=hashes,
        policy_versions=versions,
        statistics=Statistics(
            head["tokens"], head["scored_tokens"], np.array(head["set_widths"], np.int64)
        ),
        account=head["account"],
        idempotency_key=head["key"],
        fingerprint=bytes.fromhex(head["fingerprint"]),
    )


def page_to_frame(page: Page, schema: pa.Schema | None) -> tuple[Head, list[Any]]:
    """Return the answer to a read, and its body."""
    stored = page.messages or (None,) * len(page.batches)
    messages = [
        batch.serialize() if message is None else message
        for batch, message in zip(page.batches, stored, strict=True)
    ]
    text = b"" if schema is None else known_schema(schema).message
    head = {
        "schema": len(text), "messages": [message.size for message in messages],
        "cursor": page.cursor, "cursors": page.cursors, "records": page.records, "lag": page.lag,
        "stored": [message is not None for message in stored],
    }  # fmt: skip
    return head, [*messages, text]


def page_from_frame(head: Head, body: pa.Buffer) -> Page:
    """Return the page of an answer."""
    sizes = head["messages"]
    batches: list[pa.RecordBatch] = []
    messages: list[pa.Buffer | None] = []
    if sizes:
        text = body.slice(sum(sizes), head["schema"]).to_pybytes()
        schema = read_schema_message(text).schema
        start = 0
        for size, is_stored in zip(sizes, head["stored"], strict=True):
            message = body.slice(start, size)
            batches.append(decode_message(message, schema))
            messages.append(message if is_stored else None)
            start += size
    return Page(
        tuple(batches), head["cursor"], tuple(head["cursors"]), head["records"], head["lag"],
        tuple(messages),
    )  # fmt: skip


def status_from_json(data: Head) -> StoreStatus:
    """Return the status whose ``to_dict`` this is."""
    values: dict[str, Any] = {
        field.name: tuple(value) if isinstance(value := data[field.name], list) else value
        for field in fields(StoreStatus)
    }
    if (found := values["recovery"]) is not None:
        values["recovery"] = Recovery(**{**found, "removed": tuple(found["removed"])})
    return StoreStatus(**values)


def error_to_json(error: BaseException) -> Head:
    """Return an error as JSON values."""
    if not isinstance(error, RaggedError):
        return {"class": "StorageFailedError", "what": f"the store failed: {error!r}", "where": {}}
    where = {name: getattr(error.where, name) for name in Where.__slots__}
    out = {
        "class": type(error).__name__, "what": error.what, "code": error.code, "where": where,
        "expected": _text(error.expected), "got": _text(error.got), "remedy": error.remedy,
    }  # fmt: skip
    return out | {name: getattr(error, name) for name in _EXTRA if hasattr(error, name)}


def error_from_json(data: Head) -> RaggedError:
    """Return the error that this describes, of the same class."""
    data = dict(data)
    name = data.pop("class")
    kind: Any = getattr(server_errors, name, getattr(format_errors, name, RaggedError))
    extra = {key: data.pop(key) for key in _EXTRA if key in data}
    error: RaggedError = kind(data.pop("what"), where=Where(**data.pop("where")), **data)
    for key, value in extra.items():
        setattr(error, key, value)
    return error


def gone(detail: str) -> ClosedStoreError:
    """Return the error of a call whose other side does not answer any more."""
    return ClosedStoreError(
        "the process that has the store does not answer", expected="an answer", got=detail,
        retry_after_s=2.0, remedy="send the request again: it may have been stored, or not",
    )  # fmt: skip


def _text(value: object) -> str | None:
    return None if value is None else str(value)
