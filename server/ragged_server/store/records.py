"""What goes into the store and what comes out of it: plain frozen records, no behaviour."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = [
    "AppendRequest",
    "Appended",
    "Page",
    "Quota",
    "Recovery",
    "Statistics",
    "StoreSettings",
    "StoreStatus",
    "Tell",
]

Bytes: TypeAlias = npt.NDArray[np.uint8]

# Buckets of a log2 histogram: 0, 1, 2–3, 4–7, …; the last one holds everything from 2^30 on.
BUCKETS = 32


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a request's samples look like, for the status page.

    Attributes
    ----------
    tokens, scored_tokens : int
        Sums over the records.
    set_widths : (32,) int64
        Candidate sets by width: bucket 0 counts width 0, bucket b > 0 widths 2^(b-1) .. 2^b - 1.
    """

    tokens: int
    scored_tokens: int
    set_widths: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AppendRequest:
    """One request's samples, validated and encoded by :func:`ragged_server.store.prepare.prepare`.

    Attributes
    ----------
    schema : pyarrow.Schema
        Conformed schema of the batches.
    batches : tuple of pyarrow.RecordBatch
        Fully validated, profile sample.
    messages : tuple of pyarrow.Buffer
        Encapsulated IPC record-batch message of each batch, with its digest in the metadata.
    message_digests : tuple of bytes
        xxh3-128 of each message's bytes.
    id_digests : (rows, 16) uint8
        xxh3-128 of each sample_id.
    record_digests : (rows, 16) uint8
        Logical digest of each record.
    share_hashes : (rows,) uint64
        xxh3-64 of each group_id, of sample_id where that is null.
    policy_versions : (rows,) int64
        policy_version, the smallest int64 where it is null.
    statistics : Statistics
    account : str, optional
        Name of the API key, for quotas.
    idempotency_key : str, optional
    fingerprint : bytes
        16 bytes over id and record digests in order: the payload's identity.
    """

    schema: pa.Schema
    batches: tuple[pa.RecordBatch, ...]
    messages: tuple[pa.Buffer, ...]
    message_digests: tuple[bytes, ...]
    id_digests: Bytes
    record_digests: Bytes
    share_hashes: npt.NDArray[np.uint64]
    policy_versions: npt.NDArray[np.int64]
    statistics: Statistics
    account: str | None
    idempotency_key: str | None
    fingerprint: bytes

    @property
    def rows(self) -> int:
        """Number of records."""
        return len(self.id_digests)

    @property
    def nbytes(self) -> int:
        """Bytes of the messages."""
        return sum(message.size for message in self.messages)


@dataclass(frozen=True, slots=True)
class Appended:
    """The answer to a request that is durable.

    Attributes
    ----------
    first_sequence : int
        Stored records have the sequences first_sequence .. first_sequence + stored - 1.
    stored, duplicates : int
        Records that are new, and records that the log had already.
    cursor : str
        Position after this request's records; the log's end when all were duplicates.
    replayed : bool
        Answered from a remembered Idempotency-Key.
    """

    first_sequence: int
    stored: int
    duplicates: int
    cursor: str
    replayed: bool


# Told once of each request, from any thread: the answer or None, the error or None.
Tell: TypeAlias = Callable[[Appended | None, BaseException | None], None]


@dataclass(frozen=True, slots=True)
class Page:
    """What one read of the log gives.

    Attributes
    ----------
    batches : tuple of pyarrow.RecordBatch
        In the order of the log; views of mapped files where nothing was filtered.
    cursor : str
        Read on from here; equals `after` when there was nothing new.
    cursors : tuple of str
        Cursor after each batch.
    records : int
        Records in the batches.
    lag : int
        Records in the log after `cursor`.
    messages : tuple of pyarrow.Buffer or None
        Of each batch the message that the log has, with its digest, where the batch is all of it;
        empty if there are none.
    """

    batches: tuple[pa.RecordBatch, ...]
    cursor: str
    cursors: tuple[str, ...]
    records: int
    lag: int
    messages: tuple[pa.Buffer | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Quota:
    """What one account may store in a window of time; ``None`` is no limit.

    Attributes
    ----------
    records, bytes : int, optional
        Stored records, and bytes of their messages. Duplicates do not count.
    window_s : float
        Windows begin at multiples of this many seconds since 1970.
    """

    records: int | None = None
    bytes: int | None = None
    window_s: float = 86400.0


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How a store behaves; the defaults keep everything forever and limit nobody.

    Attributes
    ----------
    schema : pyarrow.Schema, optional
        Columns of the log; by default those of the first request.
    segment_bytes, segment_records, segment_age_s : int, int, float
        An open segment that reaches one of them is closed and sealed into shards.
    group_bytes : int
        Bytes after which a group is committed without taking more requests.
    queue_bytes, queue_requests : int
        Requests that may wait for the writer; more are refused.
    batch_rows, batch_bytes : int
        Size of the batches of sealed shards.
    dedupe_window_s : float
        Seconds for which ids of removed samples are still known.
    idempotency_entries, idempotency_window_s : int, float
        How many Idempotency-Keys are remembered, and for how long.
    retain_bytes, retain_s, retain_policy_version : int, float, int, optional
        Whole shards are removed, oldest first, while the log holds more bytes, the shard's newest
        record is older, or its newest policy version is less.
    grace_s : float
        Seconds for which files that are no longer listed stay for readers that use them.
    quotas : mapping of str to Quota
        Of accounts; ``"*"`` is that of accounts without one of their own.
    """

    schema: pa.Schema | None = None
    segment_bytes: int = 256 << 20
    segment_records: int = 1 << 16
    segment_age_s: float = 300.0
    group_bytes: int = 64 << 20
    queue_bytes: int = 256 << 20
    queue_requests: int = 4096
    batch_rows: int = 1024
    batch_bytes: int = 32 << 20
    dedupe_window_s: float = 0.0
    idempotency_entries: int = 1 << 16
    idempotency_window_s: float = 86400.0
    retain_bytes: int | None = None
    retain_s: float | None = None
    retain_policy_version: int | None = None
    grace_s: float = 60.0
    quotas: Mapping[str, Quota] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recovery:
    """What opening a store found and did.

    Attributes
    ----------
    records : int
        Records in the log, sealed ones included.
    segments : int
        Segments that were read.
    cut_bytes, cut_batches : int
        What lay behind the last valid commit of a segment and was cut: never acknowledged.
    removed : tuple of str
        Files that a stopped server left over.
    rebuilt_index : bool
        Whether index files were missing or damaged and were made anew.
    seconds : float
    """

    records: int
    segments: int
    cut_bytes: int
    cut_batches: int
    removed: tuple[str, ...]
    rebuilt_index: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """The store at one moment.

    Attributes
    ----------
    log_id : str
        16 hexadecimal digits.
    records, bytes : int
        Retained records and the bytes of their files.
    segments, shards : int
    oldest_sequence, next_sequence : int
        Sequences retained are oldest_sequence .. next_sequence - 1.
    commits : int
        Since the log began.
    first_commit_s, last_commit_s : float, optional
        Time of the oldest commit retained and of the newest, seconds since 1970.
    queue_requests, queue_bytes : int
        Waiting for the writer.
    failure : str, optional
        Why the store takes nothing at the moment: a failed write or sync, a full disk.
    poisoned_segments : int
        Segments given up after a failed sync, since the store was opened.
    policy_version : int, optional
        The newest seen.
    stored, duplicates, conflicts : int
        Records, records and requests since the store was opened.
    tokens, scored_tokens : int
        Of the records stored since the store was opened.
    set_widths : tuple of int
        Their candidate sets by width, see :class:`Statistics`.
    staleness : tuple of int
        The same records by how many versions they were behind `policy_version` when they came, in
        buckets like those of `set_widths`; records without version are not counted.
    index_ids, index_runs, index_bytes : int
    recovery : Recovery, optional
    upkeep_failure : str, optional
        Why sealing, merging or retention failed the last time; samples are taken all the same.
    """

    log_id: str
    records: int
    bytes: int
    segments: int
    shards: int
    oldest_sequence: int
    next_sequence: int
    commits: int
    first_commit_s: float | None
    last_commit_s: float | None
    queue_requests: int
    queue_bytes: int
    failure: str | None
    poisoned_segments: int
    policy_version: int | None
    stored: int
    duplicates: int
    conflicts: int
    tokens: int
    scored_tokens: int
    set_widths: tuple[int, ...]
    staleness: tuple[int, ...]
    index_ids: int
    index_runs: int
    index_bytes: int
    recovery: Recovery | None
    upkeep_failure: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the status as plain JSON values."""
        out: dict[str, Any] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, Recovery):
                value = {key: _plain(getattr(value, key)) for key in value.__slots__}
            out[name] = _plain(value)
        return out


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
