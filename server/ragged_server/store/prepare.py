"""From validated batches to a request that the writer only has to append.

All work that grows with the data is done here, off the writer's thread: messages, digests, shares,
statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from ragged_format.decoding import Content, conform
from ragged_format.digest import message_record_digests, record_digests, text_digest
from ragged_format.encoding import Encoder
from ragged_format.errors import RaggedError, SchemaMismatchError, Where
from ragged_format.flatbuffer import BATCH, layout_of, parse_header, prefix_size
from ragged_format.known_schemas import KnownSchema, known_schema
from ragged_format.lists import flat, to_numpy
from ragged_format.ragged import take
from ragged_format.schema import NAMESPACE
from ragged_format.trailer import DIGEST_KEY
from ragged_server.store.errors import RepeatedIdError
from ragged_server.store.records import BUCKETS, AppendRequest, Bytes, Statistics
from ragged_server.store.share import share_hashes

__all__ = [
    "NO_VERSION",
    "Incoming",
    "id_digests",
    "newest_version",
    "policy_versions",
    "prepare",
    "prepare_together",
    "subset",
]

# Stands for a policy_version that is null.
NO_VERSION = np.iinfo(np.int64).min
_OWN = NAMESPACE.encode()
# Values that Python converts sooner than Arrow computes; calls of Arrow let other threads in.
_FEW = 64


def prepare(
    schema: pa.Schema,
    batches: Sequence[pa.RecordBatch],
    *,
    messages: Sequence[pa.Buffer] = (),
    contents: Sequence[Content] = (),
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
    contents : sequence of Content, optional
        What each message holds, if the caller knows.
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
    known = _known(schema, log_schema)
    if log_schema is not None and not batches:
        # A request without records is held to the columns as well.
        conform(pa.RecordBatch.from_pylist([], schema=schema), known, Where())
    parts = _parts(known, batches, messages, contents)
    ids = _joined([id_digests(part.batch) for part in parts])
    _require_unique(ids, parts)
    shares = [share_hashes(part.batch) for part in parts]
    versions = [policy_versions(part.batch) for part in parts]
    return _request(
        known,
        parts,
        ids,
        np.concatenate([np.zeros(0, np.uint64), *shares]),
        np.concatenate([np.zeros(0, np.int64), *versions]),
        _statistics([part.batch for part in parts]),
        account,
        idempotency_key,
    )


class Incoming(NamedTuple):
    """One request among several of one schema; see :func:`prepare` for the fields."""

    batches: Sequence[pa.RecordBatch]
    messages: Sequence[pa.Buffer]
    contents: Sequence[Content]
    account: str | None
    idempotency_key: str | None


def prepare_together(
    requests: Sequence[Incoming], whole: pa.RecordBatch, log_schema: pa.Schema | None
) -> list[AppendRequest]:
    """Return what :func:`prepare` returns for each of some requests.

    What takes a step a column is done once for all of them.

    Parameters
    ----------
    requests : sequence of Incoming
        With messages and contents.
    whole : pyarrow.RecordBatch
        All batches end to end; every sample_id is there once.
    log_schema : pyarrow.Schema, optional
        Schema of the log, None if it has none yet.

    Raises
    ------
    SchemaMismatchError
        As :func:`prepare` raises for each of them.
    """
    known = _known(whole.schema, log_schema)
    whole = conform(whole, known, Where())
    ids, shares, versions = id_digests(whole), share_hashes(whole), policy_versions(whole)
    ends = np.cumsum([sum(batch.num_rows for batch in own.batches) for own in requests]).tolist()
    out = []
    start = 0
    for own, end, statistics in zip(requests, ends, _statistics_of(whole, ends), strict=True):
        parts = _parts(known, own.batches, own.messages, own.contents)
        out.append(
            _request(
                known, parts, ids[start:end], shares[start:end], versions[start:end], statistics,
                own.account, own.idempotency_key,
            )
        )  # fmt: skip
        start = end
    return out


class _Part(NamedTuple):
    """A batch with records, its message to be stored, and what is known of that message."""

    batch: pa.RecordBatch
    message: pa.Buffer
    content: Content | None


def _known(schema: pa.Schema, log_schema: pa.Schema | None) -> KnownSchema:
    known = known_schema(schema if log_schema is None else log_schema)
    if known.ragged.profile != "sample":
        raise SchemaMismatchError(
            "the log holds samples", code="RF-S010", expected="profile 'sample'",
            got=f"profile {known.ragged.profile!r}", remedy="send samples, pack them afterwards",
        )  # fmt: skip
    return known


def _parts(
    known: KnownSchema,
    batches: Sequence[pa.RecordBatch],
    messages: Sequence[pa.Buffer],
    contents: Sequence[Content],
) -> list[_Part]:
    parts = []
    for number, batch in enumerate(batches):
        batch = conform(batch, known, Where(batch=number))
        if not batch.num_rows:
            continue
        content = contents[number] if contents else None
        message = messages[number] if messages else None
        if message is None or not _is_plain(message, content):
            message = encode(batch, known)
        parts.append(_Part(batch, message, content))
    return parts


def _request(
    known: KnownSchema,
    parts: Sequence[_Part],
    ids: Bytes,
    shares: npt.NDArray[np.uint64],
    versions: npt.NDArray[np.int64],
    statistics: Statistics,
    account: str | None,
    idempotency_key: str | None,
) -> AppendRequest:
    records = _joined([_content_digests(part, known) for part in parts])
    return AppendRequest(
        known.schema,
        tuple([part.batch for part in parts]),
        tuple([part.message for part in parts]),
        tuple([text_digest(part.message) for part in parts]),
        ids,
        records,
        shares,
        versions,
        statistics,
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
        statistics=_statistics(batches),
    )


def id_digests(batch: pa.RecordBatch) -> Bytes:
    """Return xxh3-128 of each sample_id, (n, 16) uint8."""
    names = map(str.encode, batch.column("sample_id").to_pylist())
    raw = b"".join(map(xxhash.xxh3_128_digest, names))
    return np.frombuffer(raw, np.uint8).reshape(batch.num_rows, 16)


def policy_versions(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Return policy_version of each record, (n,), `NO_VERSION` where it is null or no column."""
    out: npt.NDArray[np.int64]
    if "policy_version" not in batch.schema.names:
        return np.full(batch.num_rows, NO_VERSION)
    column = batch.column("policy_version")
    if column.null_count and batch.num_rows <= _FEW:
        values = column.to_pylist()
        return np.array([NO_VERSION if value is None else value for value in values], np.int64)
    if column.null_count:
        column = column.fill_null(NO_VERSION)
    out = column.to_numpy(zero_copy_only=True)
    return out


def newest_version(before: int | None, requests: Sequence[AppendRequest]) -> int | None:
    """Return the newest policy_version of some requests and of what was there before."""
    none = NO_VERSION if before is None else before
    versions = np.concatenate([[none], *(request.policy_versions for request in requests)])
    newest = int(versions.max())
    return None if newest == NO_VERSION else newest


def _content_digests(part: _Part, known: KnownSchema) -> Bytes:
    batch, message, content = part
    if batch.num_rows != 1:
        if content is None or content.layout.compressed:
            return record_digests(batch)
        return message_record_digests(known.plan, content.layout)
    # The digest of a record is that of the batch that holds only this record.
    if content is not None and content.digest:
        return np.frombuffer(content.digest, np.uint8).reshape(1, 16)
    view = memoryview(message).cast("B")
    stated = parse_header(view[8 : 8 + prefix_size(view[:8])]).metadata[DIGEST_KEY]
    return np.frombuffer(bytes.fromhex(stated.decode()), np.uint8).reshape(1, 16)


def encode(batch: pa.RecordBatch, known: KnownSchema) -> pa.Buffer:
    """Return the batch's message with its digest."""
    encoder = Encoder(known.schema, validate="off", name=None)
    return pa.py_buffer(b"".join(encoder.encode(batch, None)))


def _is_plain(message: pa.Buffer, content: Content | None) -> bool:
    """Return whether a message can be stored as it is."""
    if message.size % 8:
        return False
    if content is not None and content.digest:
        is_ours = any(key.startswith(_OWN) for key in content.metadata)
        return not (content.layout.compressed or is_ours)
    view = memoryview(message).cast("B")
    try:
        start = 8 + prefix_size(view[:8])
        header = parse_header(view[8:start])
        layout = layout_of(view[8:start], header, view[start:])
    except RaggedError:
        return False
    reserved = {key for key in header.metadata if key.startswith(_OWN)}
    return (
        header.kind == BATCH
        and reserved == {DIGEST_KEY}
        and not layout.compressed
        and len(layout.body) == header.body_bytes
    )


def _joined(parts: list[Bytes]) -> Bytes:
    return np.concatenate(parts) if parts else np.zeros((0, 16), np.uint8)


def _require_unique(ids: Bytes, parts: Sequence[_Part]) -> None:
    raw = ids.tobytes()
    keys = [raw[start : start + 16] for start in range(0, len(raw), 16)]
    if len(set(keys)) == len(keys):
        return
    first: dict[bytes, int] = {}
    for row, key in enumerate(keys):
        if first.setdefault(key, row) != row:
            names = [name for part in parts for name in part.batch.column("sample_id").to_pylist()]
            raise RepeatedIdError(
                "a sample_id is twice in one request",
                where=Where(row=row, column="sample_id"), expected="an id that no other record has",
                got=f"{names[row]!r}, also at row {first[key]}",
                remedy="give every record its own id",
            )  # fmt: skip


def _statistics(batches: Sequence[pa.RecordBatch]) -> Statistics:
    """Return the statistics of all records of some batches."""
    widths = np.zeros(BUCKETS, np.int64)
    tokens = scored = 0
    for batch in batches:
        (part,) = _statistics_of(batch, [batch.num_rows])
        tokens += part.tokens
        scored += part.scored_tokens
        widths += part.set_widths
    return Statistics(tokens, scored, widths)


def _statistics_of(batch: pa.RecordBatch, ends: Sequence[int]) -> list[Statistics]:
    """Return the statistics of the records before each end, those before the end before left out.

    The last end is the number of records.
    """
    mask, offsets = flat(batch.column("completion_mask"))
    scored, tokens = to_numpy(mask), offsets[ends].tolist()
    sets: list[int] = []
    if "candidate_counts" in batch.schema.names:
        counts, offsets = flat(batch.column("candidate_counts"))
        # The exponent of a float is the number of bits of the integer.
        bits = np.frexp(to_numpy(counts).astype(np.float64))[1]
        sets = offsets[ends].tolist()
    out = []
    begin = first = 0
    for number, end in enumerate(tokens):
        if sets:
            found = np.bincount(bits[first : sets[number]], minlength=BUCKETS)
            widths, first = found[:BUCKETS], sets[number]
        else:
            widths = np.zeros(BUCKETS, np.int64)
        out.append(Statistics(end - begin, int(np.count_nonzero(scored[begin:end])), widths))
        begin = end
    return out
