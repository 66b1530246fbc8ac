"""Segments: the files of the log that are not sealed yet, Arrow streams that end with a commit.

A segment is ``segment-<first sequence, 20 digits>.arrows``: the schema message, then the messages
of the samples as they came, after each group of them a commit (:mod:`ragged_server.store.commits`).
Whatever lies behind the last valid commit was never acknowledged.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from ragged_format.byte_source import BufferSource, next_body, next_head
from ragged_format.decoding import decode
from ragged_format.digest import text_digest
from ragged_format.errors import CorruptError, RaggedError, Where
from ragged_format.flatbuffer import BATCH, rows_of
from ragged_format.known_schemas import KnownSchema, read_schema_message
from ragged_format.messages import MAX_MESSAGE_BYTES, decode_message
from ragged_format.trailer import Tally
from ragged_server.store.commits import CHECKSUM_KEY, COMMIT_KEY, Commit
from ragged_server.store.share import share_hashes

__all__ = ["Scan", "Segment", "StoredBatch", "scan_segment", "segment_name", "segment_sequence"]

_NAME = re.compile(r"segment-(\d{20})\.arrows")
# Canonical JSON of a commit begins with its first key.
_COMMIT_TEXT = rb'\{"(?:accounts|batches)":'
# An account may be named so that its commit seems to begin twice more.
_STARTS = 3


def segment_name(first_sequence: int) -> str:
    """Return the file name of the segment that begins with this record."""
    return f"segment-{first_sequence:020d}.arrows"


def segment_sequence(name: str) -> int | None:
    """Return the first sequence of the segment with this name, None for other files."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


class StoredBatch(NamedTuple):
    """Where a batch of a segment lies.

    Attributes
    ----------
    offset, size : int
        Of its message in the file.
    sequence, rows : int
        First record and number of records.
    """

    offset: int
    size: int
    sequence: int
    rows: int


@dataclass(slots=True)
class Scan:
    """What a segment file holds.

    Attributes
    ----------
    path : Path
    first_sequence : int
    file_bytes : int
    known : KnownSchema, optional
        None if not even the schema is whole.
    batches : list of StoredBatch
        That commits cover.
    commits : list of Commit
    ends : list of int
        Position in the file after each commit.
    fault : str, optional
        Why the scan stopped before the end of the file.
    pending : int
        Whole batches behind the last commit.
    later : Commit, optional
        A valid commit behind the fault: then the fault is damage, not an interrupted write.
    """

    path: Path
    first_sequence: int
    file_bytes: int
    known: KnownSchema | None = None
    batches: list[StoredBatch] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    fault: str | None = None
    pending: int = 0
    later: Commit | None = None

    @property
    def end_sequence(self) -> int:
        """Sequence after the last record."""
        return self.commits[-1].end if self.commits else self.first_sequence

    @property
    def end_bytes(self) -> int:
        """Position after the last commit; 0 without one."""
        return self.ends[-1] if self.ends else 0

    def cut_before(self, sequence: int) -> None:
        """Leave out the commits that begin at this record or later."""
        while self.commits and (
            self.commits[-1].sequence >= sequence or self.commits[-1].end > sequence
        ):
            commit = self.commits.pop()
            self.ends.pop()
            if commit.batches:
                del self.batches[-commit.batches :]


def scan_segment(path: Path, log_key: str | None) -> Scan:
    """Read a segment up to its last valid commit; every byte of it is compared with its digest.

    Parameters
    ----------
    path : Path
        Of the segment.
    log_key : str, optional
        Key that its commits must have; None takes that of the first one.
    """
    first = segment_sequence(path.name)
    scan = Scan(path, first or 0, path.stat().st_size)
    if not scan.file_bytes:
        scan.fault = "the file is empty"
        return scan
    data = pa.memory_map(str(path)).read_buffer()
    source = BufferSource(data)
    position = 0
    try:
        head = next_head(source, source.read(8), max_bytes=MAX_MESSAGE_BYTES)
        if head is None:
            raise CorruptError("the segment has no schema", expected="a schema", got="the end")
        scan.known = read_schema_message(head)
        position = source.position
        for commit, batches in _groups(source, scan, log_key):
            scan.commits.append(commit)
            scan.batches.extend(batches)
            position = source.position
            scan.ends.append(position)
    except RaggedError as err:
        scan.fault = f"{err.what} ({err.got})" if err.got is not None else err.what
        key = scan.commits[0].log_key if scan.commits else log_key
        scan.later = _later_commit(data.slice(position), key, scan.end_sequence)
    return scan


def _groups(
    source: BufferSource, scan: Scan, log_key: str | None
) -> Iterator[tuple[Commit, list[StoredBatch]]]:
    expected, number = scan.first_sequence, 0
    start = source.position
    batches: list[StoredBatch] = []
    running = xxhash.xxh3_128()
    while prefix := source.read(8):
        offset = source.position - 8
        scan.pending = len(batches)
        head = next_head(source, prefix, max_bytes=MAX_MESSAGE_BYTES)
        if head is None:
            raise CorruptError("a segment has no end-of-stream mark", expected="more", got="one")
        message = next_body(source, head, max_bytes=MAX_MESSAGE_BYTES)
        if message.header.kind != BATCH:
            raise CorruptError("a message is no batch", expected=BATCH, got=message.header.kind)
        rows = rows_of(message.flatbuffer, message.header)
        if COMMIT_KEY not in message.header.metadata:
            batches.append(StoredBatch(offset, source.position - offset, expected, rows))
            expected += rows
            running.update(text_digest(message.buffer))
            continue
        commit = Commit.from_metadata(message.header.metadata)
        log_key = log_key or commit.log_key
        facts = [
            ("log", commit.log_key == log_key, True),
            ("number", commit.number if number else number, number + 1 if number else number),
            ("sequence", commit.end, expected),
            ("rows", commit.rows, sum(batch.rows for batch in batches)),
            ("batches", commit.batches, len(batches)),
            ("bytes", commit.nbytes, offset - start),
            ("digest", commit.digest, running.hexdigest()),
            ("own rows", rows, 0),
        ]
        for what, stated, found in facts:
            if stated != found:
                raise CorruptError(
                    f"the {what} of a commit is not that of its batches", expected=stated, got=found
                )
        scan.pending = 0
        yield commit, batches
        number, start, batches = commit.number, source.position, []
        running = xxhash.xxh3_128()
    if batches:
        scan.pending = len(batches)
        raise CorruptError("the last batches have no commit", expected="a commit", got="the end")


def _later_commit(data: pa.Buffer, log_key: str | None, end: int) -> Commit | None:
    """Return a commit that was made after another one which is not whole.

    A commit is written when the sync of the one before was acknowledged. The one that begins at
    `end` may have been interrupted itself.
    """
    view = memoryview(data).cast("B")
    # Records may hold any number of beginnings of commits, but not the key: its sender has not got
    # it. So what is copied and digested below is what the log wrote.
    key = rb"[0-9a-f]{32}" if log_key is None else re.escape(log_key.encode())
    starts: deque[int] = deque(maxlen=_STARTS)
    for match in re.finditer(_COMMIT_TEXT + rb'|"log":"' + key + rb'"', view):
        if view[match.start()] == ord("{"):
            starts.append(match.start())
            continue
        for start in starts:
            commit = _commit_at(view, start, log_key)
            if commit is not None and commit.sequence > end:
                return commit
        starts.clear()
    return None


def _commit_at(view: memoryview, start: int, log_key: str | None) -> Commit | None:
    """Return the commit whose text begins at a position, None if none does."""
    size = int.from_bytes(view[max(start - 4, 0) : start], "little")
    text = bytes(view[start : start + size])
    checksum = text_digest(text).hex().encode()
    if checksum not in bytes(view[start + size : start + size + 256]):
        return None
    try:
        commit = Commit.from_metadata({COMMIT_KEY: text, CHECKSUM_KEY: checksum})
    except RaggedError:
        return None
    return commit if commit.log_key == (log_key or commit.log_key) else None


class Segment:
    """A segment as readers see it: what is committed, and nothing behind that.

    One thread publishes, any number read.

    Parameters
    ----------
    path : Path
    known : KnownSchema
    first_sequence : int
    """

    def __init__(self, path: Path, known: KnownSchema, first_sequence: int) -> None:
        self.path = path
        self.known = known
        self.first_sequence = first_sequence
        self.end_sequence = first_sequence
        self.size = len(known.message)
        self.batches: list[StoredBatch] = []
        self.times: list[float] = []
        self.policy_version: int | None = None
        self.closed = False
        # Share hashes of the records from a sequence on, as they came; others are made when asked.
        self._hashes = array("Q")
        self._hashes_from = first_sequence
        self._made: dict[int, npt.NDArray[np.uint64]] = {}
        self._map: pa.Buffer | None = None
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Size of the file up to the last commit."""
        return self.size

    @property
    def rows(self) -> int:
        """Number of committed records."""
        return self.end_sequence - self.first_sequence

    def publish(
        self,
        batches: list[StoredBatch],
        size: int,
        time_s: float,
        hashes: Sequence[npt.NDArray[np.uint64]] = (),
    ) -> None:
        """Make committed batches visible; the commit ends at `size`.

        Parameters
        ----------
        batches : list of StoredBatch
        size : int
            Position in the file after the commit.
        time_s : float
            Of the commit.
        hashes : sequence of (n,) uint64
            Share hashes of the batches' records; none while a segment is recovered.
        """
        if hashes and not self._hashes:
            self._hashes_from = self.end_sequence
        for values in hashes:
            self._hashes.frombytes(values.tobytes())
        self.batches.extend(batches)
        if not self.times:
            self.times = [time_s, time_s]
        self.times[1] = time_s
        self.size = size
        # Last, because it is what readers look at first.
        if batches:
            self.end_sequence = batches[-1].sequence + batches[-1].rows

    def find(self, sequence: int) -> int:
        """Return the number of the batch with this record, which must be committed."""
        low, high = 0, len(self.batches)
        while low < high:
            middle = (low + high) // 2
            if self.batches[middle].sequence <= sequence:
                low = middle + 1
            else:
                high = middle
        return low - 1

    def place(self, number: int) -> tuple[int, int]:
        """Return first sequence and number of records of a batch."""
        stored = self.batches[number]
        return stored.sequence, stored.rows

    def batch(self, number: int) -> pa.RecordBatch:
        """Return one batch, a view of the mapped file."""
        message = self.message(number)
        try:
            return decode_message(message, self.known.schema)
        except RaggedError as err:
            raise err.at(Where(file=str(self.path), batch=number)) from err.__cause__

    def message(self, number: int) -> pa.Buffer:
        """Return the message of one batch, a view of the mapped file."""
        stored = self.batches[number]
        end = stored.offset + stored.size
        with self._lock:
            if self._map is None or self._map.size < end:
                self._map = pa.memory_map(str(self.path)).read_buffer()
            return self._map.slice(stored.offset, stored.size)

    def stored_message(self, number: int) -> pa.Buffer:
        """Return the message of one batch, as :meth:`message`: all of a segment have digests."""
        return self.message(number)

    def verified(self) -> Iterator[pa.RecordBatch]:
        """Return an iterator over all batches, each compared with its digest."""
        tally = Tally()
        for number in range(len(self.batches)):
            source = BufferSource(self.message(number))
            try:
                head = next_head(source, source.read(8), max_bytes=MAX_MESSAGE_BYTES)
                message = next_body(source, head or b"", max_bytes=MAX_MESSAGE_BYTES)
                yield decode(message, self.known, tally, verify=True, validate="off")[0]
            except RaggedError as err:
                raise err.at(Where(file=str(self.path), batch=number)) from err.__cause__

    def hashes(self, number: int) -> npt.NDArray[np.uint64]:
        """Return the share hashes of the records of a batch, (rows,)."""
        stored = self.batches[number]
        start = stored.sequence - self._hashes_from
        if start >= 0 and self._hashes:
            return np.array(self._hashes[start : start + stored.rows], np.uint64)
        out = self._made.get(number)
        if out is None:
            out = self._made[number] = share_hashes(self.batch(number))
        return out
