"""The store: takes requests from any thread, makes them durable in groups, and gives them back.

One writer thread owns the order of the log and the id index. It takes all requests that wait,
writes what is new of them, syncs once and answers all. While it syncs, the next group gathers, so
that the group's size follows from the disk's speed. A second thread seals, merges and removes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from ragged_format.errors import RaggedError
from ragged_format.known_schemas import KnownSchema
from ragged_server.store.admission import Group, Waiting, closed_store, future_of_answer, queue_full
from ragged_server.store.counters import Counters
from ragged_server.store.cursors import encode_cursor, position_of
from ragged_server.store.errors import (
    ClosedStoreError,
    QueueFullError,
    StorageFailedError,
    StorageFullError,
)
from ragged_server.store.file_layer import FileLayer, RealFiles
from ragged_server.store.index import IdIndex, Table
from ragged_server.store.ledger import Ledger
from ragged_server.store.log import Log
from ragged_server.store.prepare import newest_version
from ragged_server.store.reading import read_page
from ragged_server.store.records import (
    Appended,
    AppendRequest,
    Page,
    Recovery,
    StoreSettings,
    StoreStatus,
    Tell,
)
from ragged_server.store.recovery import DirectoryLock, recover, unwritable
from ragged_server.store.share import check_share
from ragged_server.store.upkeep import Upkeep

__all__ = ["Store"]

# How often the writer looks whether the open segment has become too old.
_TICK_S = 1.0
_log = logging.getLogger("ragged_server.store.store")


class Store:
    """A durable log of samples in a directory that is, sealed, a dataset.

    Parameters
    ----------
    directory : Path
        Of the dataset; made if it does not exist.
    settings : StoreSettings
        How the store behaves.
    layer : FileLayer, optional
        File operations; tests replace them.
    clock : callable, optional
        Seconds since 1970.

    Examples
    --------
    >>> import tempfile
    >>> from ragged_format import sample_schema
    >>> from ragged_server.store.prepare import prepare
    >>> schema = sample_schema(vocab_size=10, columns=[])
    >>> row = {"sample_id": "a", "input_ids": [1, 2], "completion_mask": [0, 1]}
    >>> batch = pa.RecordBatch.from_pylist([row], schema=schema)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = Store(Path(folder), StoreSettings())
    ...     recovery = store.open()
    ...     first = store.append(prepare(schema, [batch])).result()
    ...     again = store.append(prepare(schema, [batch])).result()
    ...     page = store.read(None, max_bytes=1 << 20)
    ...     store.close()
    >>> first.stored, again.stored, again.duplicates, page.records
    (1, 0, 1, 1)
    """

    def __init__(
        self,
        directory: Path,
        settings: StoreSettings,
        *,
        layer: FileLayer | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directory = Path(directory)
        self.settings = settings
        self._layer: FileLayer = RealFiles() if layer is None else layer
        self._clock = clock
        self._queue: deque[Waiting] = deque()
        self._queue_bytes = 0
        self._busy: list[Waiting] = []
        self._changed = threading.Condition()
        self._committed = threading.Condition()
        self._callbacks: tuple[Callable[[], None], ...] = ()
        self._state = "new"
        self._failure: str | None = None
        self._counters = Counters()
        self._recovery: Recovery | None = None
        self._lock: DirectoryLock | None = None

    def open(self) -> Recovery:
        """Recover the log and start the threads.

        Raises
        ------
        StoreBusyError
            Another server has the directory.
        LogDamagedError
            Acknowledged records are missing or damaged.
        SchemaMismatchError
            The directory has other columns than the settings ask for, or holds no samples.
        StorageFailedError
            The directory cannot be written.
        """
        if self._state != "new":
            raise closed_store(self._state)
        started = time.monotonic()
        folder = self.directory / "log"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = DirectoryLock(folder)
        except (PermissionError, FileExistsError, NotADirectoryError) as err:
            raise unwritable(self.directory, err) from err
        except OSError as err:
            if isinstance(err, RaggedError):
                raise
            raise unwritable(self.directory, err) from err
        try:
            found = recover(self.directory, self.settings, self._layer, self._clock)
        except BaseException as err:
            self._lock.release()
            if isinstance(err, OSError) and not isinstance(err, RaggedError):
                raise unwritable(self.directory, err) from err
            raise
        self.log_id = found.log_id
        self._log: Log = found.log
        self._index: IdIndex = found.index
        self._table: Table | None = found.table
        self._ledger: Ledger = found.ledger
        self._known: KnownSchema | None = found.known
        self._recovery = Recovery(
            found.log.end_sequence - found.log.first_sequence, found.segments, found.cut_bytes,
            found.cut_batches, tuple(found.removed), found.rebuilt_index,
            time.monotonic() - started,
        )  # fmt: skip
        self._upkeep = Upkeep(
            self.directory, found.log_id, self.settings, self._log, self._index, self._ledger,
            self._layer, self._clock,
        )  # fmt: skip
        self._state = "open"
        self._writer = threading.Thread(target=self._write, name="ragged-writer", daemon=True)
        self._writer.start()
        self._upkeep.start()
        return self._recovery

    @property
    def schema(self) -> pa.Schema | None:
        """Columns of the log; None until the first request if the settings name none."""
        known = self._known
        return None if known is None else known.schema

    def append(self, request: AppendRequest) -> Future[Appended]:
        """Queue a request; the future resolves when its records are on disk.

        The future's errors: `ConflictError`, `IdempotencyMismatchError`, `SchemaMismatchError`,
        `QuotaExceededError`, `StorageFullError`, `StorageFailedError`; then nothing of the request
        is stored.

        Raises
        ------
        QueueFullError
            Too much waits for the disk.
        ClosedStoreError
            The store is not open.
        """
        future, tell = future_of_answer()
        self.append_all([request], [tell])
        if future.done() and isinstance(
            error := future.exception(), QueueFullError | ClosedStoreError
        ):
            raise error
        return future

    def append_all(self, requests: Sequence[AppendRequest], tells: Sequence[Tell]) -> None:
        """Queue requests, each by itself, in a way that one commit can take them all.

        Parameters
        ----------
        requests : sequence of AppendRequest
        tells : sequence of callable
            For each request, what is called once with the answer and None, or with None and one of
            the errors of :meth:`append`: by the writer's thread, or before this returns. It must
            not wait for anything.
        """
        entries = [
            Waiting(request, tell, request.nbytes)
            for request, tell in zip(requests, tells, strict=True)
        ]
        refused: list[tuple[Waiting, RaggedError]] = []
        with self._changed:
            for entry in entries:
                error = self._why_refused(entry)
                if error is not None:
                    refused.append((entry, error))
                    continue
                self._queue.append(entry)
                self._queue_bytes += entry.nbytes
            self._changed.notify()
        for entry, error in refused:
            entry.fail(error)

    def _why_refused(self, entry: Waiting) -> RaggedError | None:
        settings = self.settings
        if self._state != "open":
            return closed_store(self._state)
        if self._queue and (
            len(self._queue) >= settings.queue_requests
            or self._queue_bytes + entry.nbytes > settings.queue_bytes
        ):
            return queue_full(settings, len(self._queue), self._queue_bytes)
        return None

    def read(
        self,
        after: str | None,
        *,
        max_bytes: int,
        rank: int = 0,
        world_size: int = 1,
        min_policy_version: int | None = None,
    ) -> Page:
        """Return records after a cursor.

        Guarantees: never waits for appends, nor they for it; at most `max_bytes` of records, unless
        the first one alone is larger; batches are views of mapped files where nothing was filtered.

        Parameters
        ----------
        after : str, optional
            A cursor; None begins with the oldest record retained.
        max_bytes : int
            Of records.
        rank, world_size : int
            Only the records of this share: groups stay whole.
        min_policy_version : int, optional
            Only records of this version, a newer one or none.

        Raises
        ------
        CursorError
            The cursor is malformed, of another log, or beyond the end.
        CursorExpiredError
            Records after it were removed.
        """
        check_share(rank, world_size)
        parts, end = self._snapshot()
        first = parts[0].first_sequence if parts else end
        start = position_of(after, self.log_id, first, end)
        return read_page(
            parts, start, end, self.log_id, max_bytes=max_bytes, rank=rank, world_size=world_size,
            min_policy_version=min_policy_version,
        )  # fmt: skip

    def wait(self, after: str | None, timeout_s: float) -> bool:
        """Wait until there are records after a cursor; return whether there are."""
        deadline = time.monotonic() + timeout_s
        with self._committed:
            while True:
                first, end = self._log.first_sequence, self._log.end_sequence
                if position_of(after, self.log_id, first, end) < end:
                    return True
                left = deadline - time.monotonic()
                if left <= 0 or self._state != "open":
                    return False
                self._committed.wait(left)

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after each commit, from the writer's thread; return what ends that."""

        def end() -> None:
            with self._changed:
                self._callbacks = tuple(other for other in self._callbacks if other is not entry)

        def entry() -> None:
            callback()

        with self._changed:
            self._callbacks = (*self._callbacks, entry)
        return end

    def status(self) -> StoreStatus:
        """Return the store's state."""
        parts, end = self._snapshot()
        log, index, counters = self._log, self._index, self._counters
        segments = log.segments
        shards = log.shards
        times = [segment.times for segment in segments if segment.times]
        first_s = shards[0].facts.first_s if shards else times[0][0] if times else None
        last_s = times[-1][1] if times else shards[-1].facts.last_s if shards else None
        first = parts[0].first_sequence if parts else end
        with self._changed:
            queued = len(self._queue) + len(self._busy)
            queued_bytes = self._queue_bytes + sum(entry.nbytes for entry in self._busy)
        return StoreStatus(
            log_id=self.log_id.hex(),
            records=end - first,
            bytes=sum(part.nbytes for part in parts),
            segments=len(segments),
            shards=len(shards),
            oldest_sequence=first,
            next_sequence=end,
            commits=log.commits,
            first_commit_s=first_s,
            last_commit_s=last_s,
            queue_requests=queued,
            queue_bytes=queued_bytes,
            failure=self._failure,
            poisoned_segments=log.poisoned,
            policy_version=log.policy_version,
            stored=counters.stored,
            duplicates=counters.duplicates,
            conflicts=counters.conflicts,
            tokens=counters.tokens,
            scored_tokens=counters.scored_tokens,
            set_widths=tuple(counters.set_widths.tolist()),
            staleness=tuple(counters.staleness.tolist()),
            index_ids=index.num_ids,
            index_runs=len(index.runs),
            index_bytes=index.nbytes,
            recovery=self._recovery,
            upkeep_failure=self._upkeep.failure,
        )

    def close(self, *, seal_while: Callable[[], bool] | None = None) -> None:
        """Commit what waits, stop the threads and let go of the directory; once.

        Parameters
        ----------
        seal_while : callable, optional
            Seal what is in the log as well, while this returns True. By default, or where that
            fails, records that are not sealed stay in the log.
        """
        with self._changed:
            if self._state != "open":
                self._state = "closed"
                return
            self._state = "closing"
            self._changed.notify_all()
        self._writer.join()
        self._upkeep.stop()
        self._log.close_segment()
        if seal_while is not None:
            self._upkeep.seal_rest(seal_while)
        self._state = "closed"
        with self._committed:
            self._committed.notify_all()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _snapshot(self) -> tuple[tuple[Any, ...], int]:
        if self._state == "new":
            raise closed_store(self._state)
        # The end first: what it counts is in the parts that are taken after it.
        end = self._log.end_sequence
        return self._log.parts, end

    def _cursor(self, sequence: int) -> str:
        return encode_cursor(self.log_id, sequence)

    # The writer's thread.

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._queue and self._state == "open":
                    self._changed.wait(_TICK_S)
                    if not self._queue:
                        break
                waiting = self._busy = self._take()
                if not waiting and self._state != "open":
                    return
            if waiting:
                try:
                    self._commit(waiting)
                except Exception as err:  # noqa: BLE001 - those who wait must hear of any fault
                    self._fail_all(waiting, err)
                with self._changed:
                    self._busy = []
                waiting = []  # bodies must not stay until the next group
            else:
                self._roll()
                if self._failure is not None and self._log.probe():
                    self._failure = None

    def _take(self) -> list[Waiting]:
        out: list[Waiting] = []
        size = 0
        while self._queue and (not out or size < self.settings.group_bytes):
            entry = self._queue.popleft()
            size += entry.nbytes
            out.append(entry)
        self._queue_bytes -= size
        return out

    def _commit(self, waiting: list[Waiting]) -> None:
        log = self._log
        group = Group(self._known, self._index, self._ledger, log.end_sequence, self._clock())
        group.admit(waiting)
        self._counters.duplicates += group.duplicates
        self._counters.conflicts += group.conflicts
        if group.is_empty or group.known is None:
            group.succeed(self._cursor, log.end_sequence)
            return
        newest = newest_version(log.policy_version, group.requests)
        try:
            commit = log.append(group.known, group.requests, group.keys, group.accounts, newest)
        except (StorageFullError, StorageFailedError) as err:
            self._failure = str(err)
            group.fail(err, self._cursor, log.end_sequence)
            return
        self._failure = None
        self._known = group.known
        segment = log.open_segment
        if segment is not None and (
            self._table is None or self._table.first_sequence != segment.first_sequence
        ):
            self._table = Table(segment.first_sequence)
            self._index.add_table(self._table)
        if self._table is not None:
            self._table.ids.update(group.added)
        self._upkeep.apply(commit)
        self._counters.add(group.requests, newest)
        self._roll()
        group.succeed(self._cursor, log.end_sequence)
        with self._committed:
            self._committed.notify_all()
        for callback in self._callbacks:
            try:
                callback()
            except Exception:  # noqa: BLE001 - it must not stop the writer
                _log.exception("a subscriber failed")

    def _fail_all(self, waiting: list[Waiting], err: Exception) -> None:
        failure = StorageFailedError(
            f"the writer failed: {err!r}", expected="a group that is committed or refused",
            got=type(err).__name__, remedy="report it; the log of the server has the traceback",
        )  # fmt: skip
        failure.__cause__ = err
        self._failure = str(failure)
        _log.error("the writer failed", exc_info=err)
        for entry in waiting:
            if not entry.is_told:
                entry.fail(failure)

    def _roll(self) -> None:
        segment = self._log.open_segment
        settings = self.settings
        if segment is None:
            self._upkeep.wake()
            return
        if segment.times and (
            segment.size >= settings.segment_bytes
            or segment.rows >= settings.segment_records
            # Of either sign: a clock that was put back must not keep it open for ever.
            or abs(self._clock() - segment.times[0]) >= settings.segment_age_s
        ):
            self._log.close_segment()
            self._upkeep.wake()
