"""The log: segments that are appended to, and sealed shards before them.

One thread appends. What it appends is visible, and acknowledged, only after the sync. A write that
fails is cut off again. A sync that fails poisons the segment: nobody knows what of it is on disk,
and asking again would be answered from memory that the kernel has marked clean, so the segment gets
no further byte; the next group opens a new one. That one begins at the sequence where the poisoned
one ends for us, and recovery lets no commit count that a later segment begins before.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import xxhash

from ragged_format.errors import SchemaMismatchError, Where
from ragged_format.known_schemas import KnownSchema
from ragged_format.local_files import TEMPORARY_MARK
from ragged_server.store.commits import Commit, Remembered
from ragged_server.store.errors import StorageFailedError, StorageFullError
from ragged_server.store.file_layer import FileLayer, LogFile, write_all
from ragged_server.store.reading import Part
from ragged_server.store.records import AppendRequest
from ragged_server.store.segments import Scan, Segment, StoredBatch, segment_name
from ragged_server.store.shards import SealedShard

__all__ = ["Log"]

_log = logging.getLogger("ragged_server.store.log")
_PROBE_BYTES = 1 << 20
_FULL = {errno.ENOSPC, errno.EDQUOT}


class Log:
    """Segments and shards of one log, and the one place that writes to the segments.

    Parameters
    ----------
    folder : Path
        Where the segments lie.
    log_key : str
        32 hexadecimal digits, in every commit.
    layer : FileLayer
        File operations.
    clock : callable
        Seconds since 1970.

    Attributes
    ----------
    parts : tuple of Part
        Shards, then segments, in order; replaced as a whole.
    end_sequence : int
        Of the next record.
    commits : int
        Number of the last commit.
    policy_version : int, optional
        Newest one in the log.
    poisoned : int
        Segments given up since the log was opened.
    """

    def __init__(
        self, folder: Path, log_key: str, layer: FileLayer, clock: Callable[[], float]
    ) -> None:
        self.folder = folder
        self.parts: tuple[Part, ...] = ()
        self.end_sequence = 0
        self.commits = 0
        self.policy_version: int | None = None
        self.poisoned = 0
        self._key = log_key
        self._layer = layer
        self._clock = clock
        self._file: LogFile | None = None
        self._open: Segment | None = None
        # Two threads replace `parts`: the one that appends and the one that seals.
        self._swap = threading.Lock()

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments, the open one last."""
        return tuple(part for part in self.parts if isinstance(part, Segment))

    @property
    def shards(self) -> tuple[SealedShard, ...]:
        """The sealed shards."""
        return tuple(part for part in self.parts if isinstance(part, SealedShard))

    @property
    def open_segment(self) -> Segment | None:
        """The segment that is appended to."""
        return self._open

    @property
    def first_sequence(self) -> int:
        """Of the oldest record retained; the end if there is none."""
        parts = self.parts
        return parts[0].first_sequence if parts else self.end_sequence

    def adopt(self, scan: Scan, *, resume: bool) -> None:
        """Take a scanned segment into the log, cut behind its last commit and made durable.

        Parameters
        ----------
        scan : Scan
            With at least one commit.
        resume : bool
            Whether it is appended to from now on.
        """
        if scan.known is None or not scan.commits:
            raise ValueError("only a segment with commits can be adopted")
        file = self._layer.append(scan.path)
        try:
            if scan.file_bytes > scan.end_bytes:
                file.truncate(scan.end_bytes)
            # What a killed server wrote may be complete and yet not on disk.
            file.sync()
        except BaseException:
            file.close()
            raise
        segment = Segment(scan.path, scan.known, scan.first_sequence)
        start = 0
        for commit, end in zip(scan.commits, scan.ends, strict=True):
            part = scan.batches[start : start + commit.batches]
            start += commit.batches
            segment.publish(part, end, commit.time_s)
            segment.policy_version = commit.policy_version
        segment.closed = not resume
        if resume:
            self._file, self._open = file, segment
        else:
            file.close()
        self.parts = (*self.parts, segment)
        self.end_sequence = segment.end_sequence
        self.commits = scan.commits[-1].number
        self.policy_version = segment.policy_version

    def append(
        self,
        known: KnownSchema,
        requests: Sequence[AppendRequest],
        keys: Sequence[Remembered],
        accounts: Mapping[str, tuple[int, int]],
        policy_version: int | None,
    ) -> Commit:
        """Write the records of some requests and one commit, and sync.

        Raises
        ------
        StorageFullError, StorageFailedError
            Nothing of it counts.
        """
        segment, file = self._writable(known)
        messages = [message for request in requests for message in request.messages]
        size = sum(message.size for message in messages)
        running = xxhash.xxh3_128()
        for request in requests:
            for digest in request.message_digests:
                running.update(digest)
        batches: list[StoredBatch] = []
        offset, sequence = segment.size, self.end_sequence
        for request in requests:
            for batch, message in zip(request.batches, request.messages, strict=True):
                batches.append(StoredBatch(offset, message.size, sequence, batch.num_rows))
                offset += message.size
                sequence += batch.num_rows
        commit = Commit(
            self._key, self.commits + 1, self.end_sequence, sequence - self.end_sequence,
            len(batches), size, running.hexdigest(), int(self._clock() * 1e6), policy_version,
            tuple(keys), accounts,
        )  # fmt: skip
        text = commit.to_message(known)
        views = [memoryview(message).cast("B") for message in messages]
        try:
            write_all(file, [*views, memoryview(text)])
        except OSError as err:
            self._cut(segment, file)
            raise _failed("write", segment.path, err) from err
        try:
            file.sync()
        except OSError as err:
            self._poison(segment, file)
            raise _failed("sync", segment.path, err) from err
        hashes = [request.share_hashes for request in requests]
        segment.publish(batches, offset + len(text), commit.time_s, hashes)
        segment.policy_version = policy_version
        self.commits, self.policy_version = commit.number, policy_version
        self.end_sequence = sequence
        return commit

    def probe(self) -> bool:
        """Return whether the disk takes and syncs a small file.

        After a failure nobody may send anything until the server says that it is ready again.
        """
        path = self.folder / f"probe{TEMPORARY_MARK}0"
        try:
            self._layer.remove(path)
            file = self._layer.create(path)
            try:
                write_all(file, [memoryview(bytes(_PROBE_BYTES))])
                file.sync()
                file.truncate(0)
                self._layer.sync_directory(self.folder)
            finally:
                file.close()
                self._layer.remove(path)
        except OSError:
            return False
        return True

    def close_segment(self) -> Segment | None:
        """Append no more to the open segment; return it."""
        segment, file = self._open, self._file
        self._open = self._file = None
        if file is not None:
            file.close()
        if segment is not None:
            segment.closed = True
        return segment

    def seal(self, segment: Segment, shards: Sequence[SealedShard]) -> None:
        """Put shards in the place of a segment that they hold."""
        with self._swap:
            at = next(n for n, part in enumerate(self.parts) if part is segment)
            self.parts = (*self.parts[:at], *shards, *self.parts[at + 1 :])

    def drop(self, gone: Sequence[Part]) -> None:
        """Leave out parts."""
        marks = set(map(id, gone))
        with self._swap:
            self.parts = tuple(part for part in self.parts if id(part) not in marks)

    def _writable(self, known: KnownSchema) -> tuple[Segment, LogFile]:
        if self._open is not None and self._file is not None:
            if self._open.known.ragged != known.ragged:
                raise SchemaMismatchError(
                    "the log has other columns", code="RF-S010",
                    expected=list(self._open.known.ragged.columns),
                    got=list(known.ragged.columns),
                )  # fmt: skip
            return self._open, self._file
        path = self.folder / segment_name(self.end_sequence)
        file = None
        try:
            # One that failed before its first commit has the same name, and nothing that counts.
            self._layer.remove(path)
            file = self._layer.create(path)
            write_all(file, [memoryview(known.message)])
            self._layer.sync_directory(self.folder)
        except OSError as err:
            if file is not None:
                with suppress(OSError):
                    file.close()
            with suppress(OSError):
                self._layer.remove(path)
            raise _failed("creation", path, err) from err
        self._open, self._file = Segment(path, known, self.end_sequence), file
        with self._swap:
            self.parts = (*self.parts, self._open)
        return self._open, self._file

    def _cut(self, segment: Segment, file: LogFile) -> None:
        try:
            file.truncate(segment.size)
        except OSError:
            self._poison(segment, file)

    def _poison(self, segment: Segment, file: LogFile) -> None:
        self.poisoned += 1
        _log.error("segment given up after a failed sync", extra={"segment": segment.path.name})
        # So that a restart does not find what was refused; recovery copes if it does.
        with suppress(OSError):
            file.truncate(segment.size)
        with suppress(OSError):
            file.close()
        self._open = self._file = None
        segment.closed = True
        if not segment.times:
            self.drop([segment])


def _failed(what: str, path: Path, err: OSError) -> StorageFullError | StorageFailedError:
    if err.errno in _FULL:
        return StorageFullError(
            f"the disk is full: the {what} of a segment failed", where=Where(file=str(path)),
            expected="free space", got=str(err), retry_after_s=30.0,
            remedy="free space, or set retention limits",
        )  # fmt: skip
    return StorageFailedError(
        f"the {what} of a segment failed", where=Where(file=str(path)), expected="a healthy disk",
        got=str(err), retry_after_s=10.0, remedy="check the disk and the kernel log",
    )  # fmt: skip
