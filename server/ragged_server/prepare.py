"""From validated batches to a request that the writer only has to append.

All work that grows with the data is done here, off the writer's thread: messages, digests, shares,
statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from ragged_format.decoding import conform
from ragged_format.digest import record_digests, text_digest
from ragged_format.encoding import Encoder
from ragged_format.errors import RaggedError, SchemaMismatchError, Where
from ragged_format.flatbuffer import BATCH, layout_of, parse_header, prefix_size
from ragged_format.known_schemas import KnownSchema, known_schema
from ragged_format.lists import flat
from ragged_format.ragged import take
from ragged_format.schema import NAMESPACE
from ragged_format.trailer import DIGEST_KEY
from ragged_server.errors import RepeatedIdError
from ragged_server.records import BUCKETS, AppendRequest, Bytes, Statistics
from ragged_server.share import share_hashes

__all__ = ["NO_VERSION", "id_digests", "policy_versions", "prepare", "subset"]

# Stands for a policy_version that is null.
NO_VERSION = np.iinfo(np.int64).min


def prepare(
    schema: pa.Schema,
    batches: Sequence[pa.RecordBatch],
    *,
    messages: Sequence[pa.Buffer] = (),
    log_schema: pa.Schema | None = None,
    account: str | None = None,
    idempotency_key: str | None = None,
) -> AppendRequest:
    """Return the request that stores batches, all of them or none.

    Parameters
    ----------
    schema : pyarrow.Schema
        Of the batches.
    batches : sequence of pyarrow.RecordBatch
        Samples, validated in full by the caller.
    messages : sequence of pyarrow.Buffer, optional
        The message of each batch as it came, already compared with its digest. They are stored as
        they are, unless they are compressed or carry metadata that only this library may write.
    log_schema : pyarrow.Schema, optional
        Schema of the log (:attr:`Store.schema`), None if it has none yet.
    account, idempotency_key : str, optional
        See :class:`AppendRequest`.

    Raises
    ------
    RepeatedIdError
        A sample_id is there twice.
    SchemaMismatchError
        The profile is not sample (``RF-S010``), or the columns are not those of the log.

    Examples
    --------
    >>> from ragged_format import sample_schema
    >>> schema = sample_schema(vocab_size=10, columns=[])
    >>> row = {"sample_id": "a", "input_ids": [1, 2], "completion_mask": [0, 1]}
    >>> request = prepare(schema, [pa.RecordBatch.from_pylist([row], schema=schema)])
    >>> request.rows, request.statistics.scored_tokens
    (1, 1)
    """
    known = known_schema(schema if log_schema is None else log_schema)
    if known.ragged.profile != "sample":
        raise SchemaMismatchError(
            "the log holds samples", code="RF-S010", expected="profile 'sample'",
            got=f"profile {known.ragged.profile!r}", remedy="send samples, pack them afterwards",
        )  # fmt: skip
    if log_schema is not None and not batches:
        # A request without records is held to the columns as well.
        conform(pa.RecordBatch.from_pylist([], schema=schema), known, Where())
    kept, encoded = [], []
    verbatim = messages or (None,) * len(batches)
    for number, (batch, message) in enumerate(zip(batches, verbatim, strict=True)):
        batch = conform(batch, known, Where(batch=number))
        if batch.num_rows:
            kept.append(batch)
            usable = message is not None and _is_plain(message)
            encoded.append(message if usable else encode(batch, known))
    return _request(known, tuple(kept), tuple(encoded), account, idempotency_key)


def _request(
    known: KnownSchema,
    batches: tuple[pa.RecordBatch, ...],
    messages: tuple[pa.Buffer, ...],
    account: str | None,
    idempotency_key: str | None,
) -> AppendRequest:
    ids = _joined([id_digests(batch) for batch in batches])
    _require_unique(ids, batches)
    records = _joined(
        [_content_digests(batch, own) for batch, own in zip(batches, messages, strict=True)]
    )
    shares = [share_hashes(batch) for batch in batches]
    versions = [policy_versions(batch) for batch in batches]
    return AppendRequest(
        known.schema,
        batches,
        messages,
        tuple(text_digest(message) for message in messages),
        ids,
        records,
        np.concatenate([np.zeros(0, np.uint64), *shares]),
        np.concatenate([np.zeros(0, np.int64), *versions]),
        _statistics(batches),
        account,
        idempotency_key,
        text_digest(ids.tobytes() + records.tobytes()),
    )


def subset(request: AppendRequest, keep: npt.NDArray[np.bool_]) -> AppendRequest:
    """Return the request with only the records where `keep` is true; its identity stays."""
    known = known_schema(request.schema)
    batches, messages, start = [], [], 0
    for batch, message in zip(request.batches, request.messages, strict=True):
        mine = keep[start : start + batch.num_rows]
        start += batch.num_rows
        if mine.all():
            batches.append(batch)
            messages.append(message)
        elif mine.any():
            part = take(batch, np.flatnonzero(mine))
            batches.append(part)
            messages.append(encode(part, known))
    return replace(
        request,
        batches=tuple(batches),
        messages=tuple(messages),
        message_digests=tuple(text_digest(message) for message in messages),
        id_digests=request.id_digests[keep],
        record_digests=request.record_digests[keep],
        share_hashes=request.share_hashes[keep],
        policy_versions=request.policy_versions[keep],
        statistics=_statistics(tuple(batches)),
    )


def id_digests(batch: pa.RecordBatch) -> Bytes:
    """Return xxh3-128 of each sample_id, (n, 16) uint8."""
    ids = batch.column("sample_id").cast(pa.binary()).to_pylist()
    raw = b"".join(map(xxhash.xxh3_128_digest, ids))
    return np.frombuffer(raw, np.uint8).reshape(len(ids), 16)


def policy_versions(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Return policy_version of each record, (n,), `NO_VERSION` where it is null or no column."""
    out: npt.NDArray[np.int64]
    if "policy_version" not in batch.schema.names:
        return np.full(batch.num_rows, NO_VERSION)
    out = batch.column("policy_version").fill_null(NO_VERSION).to_numpy(zero_copy_only=False)
    return out


def _content_digests(batch: pa.RecordBatch, message: pa.Buffer) -> Bytes:
    if batch.num_rows != 1:
        return record_digests(batch)
    # The digest of a record is that of the batch that holds only this record.
    view = memoryview(message).cast("B")
    stated = parse_header(view[8 : 8 + prefix_size(view[:8])]).metadata[DIGEST_KEY]
    return np.frombuffer(bytes.fromhex(stated.decode()), np.uint8).reshape(1, 16)


def encode(batch: pa.RecordBatch, known: KnownSchema) -> pa.Buffer:
    """Return the batch's message with its digest."""
    encoder = Encoder(known.schema, validate="off", name=None)
    return pa.py_buffer(b"".join(encoder.encode(batch, None)))


def _is_plain(message: pa.Buffer) -> bool:
    """Return whether a message can be stored as it is."""
    view = memoryview(message).cast("B")
    if len(view) % 8:
        return False
    try:
        start = 8 + prefix_size(view[:8])
        header = parse_header(view[8:start])
        layout = layout_of(view[8:start], header, view[start:])
    except RaggedError:
        return False
    metadata = header.metadata
    reserved = {key for key in metadata if key.startswith(NAMESPACE.encode())}
    return (
        header.kind == BATCH
        and reserved == {DIGEST_KEY}
        and not layout.compressed
        and len(layout.body) == header.body_bytes
    )


def _joined(parts: list[Bytes]) -> Bytes:
    return np.concatenate(parts) if parts else np.zeros((0, 16), np.uint8)


def _require_unique(ids: Bytes, batches: tuple[pa.RecordBatch, ...]) -> None:
    raw = ids.tobytes()
    keys = [raw[start : start + 16] for start in range(0, len(raw), 16)]
    if len(set(keys)) == len(keys):
        return
    first: dict[bytes, int] = {}
    for row, key in enumerate(keys):
        if first.setdefault(key, row) != row:
            names = [name for batch in batches for name in batch.column("sample_id").to_pylist()]
            raise RepeatedIdError(
                "a sample_id is twice in one request",
                where=Where(row=row, column="sample_id"), expected="an id that no other record has",
                got=f"{names[row]!r}, also at row {first[key]}",
                remedy="give every record its own id",
            )  # fmt: skip


def _statistics(batches: tuple[pa.RecordBatch, ...]) -> Statistics:
    widths = np.zeros(BUCKETS, np.int64)
    tokens = scored = 0
    for batch in batches:
        mask = flat(batch.column("completion_mask"))
        tokens += len(mask.values)
        scored += int(np.count_nonzero(mask.numpy()))
        if "candidate_counts" in batch.schema.names:
            counts = flat(batch.column("candidate_counts")).numpy()
            # The exponent of a float is the number of bits of the integer.
            bits = np.frexp(counts.astype(np.float64))[1]
            widths += np.bincount(bits, minlength=BUCKETS)[:BUCKETS]
    return Statistics(tokens, scored, widths)
