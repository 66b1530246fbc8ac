"""What happens behind the writer: sealing, index runs, retention and the removal of old files."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ragged_format.errors import DatasetNotFoundError, RaggedError
from ragged_format.writer import sweep
from ragged_server.store.commits import Commit
from ragged_server.store.file_layer import FileLayer
from ragged_server.store.index import IdIndex
from ragged_server.store.ledger import Ledger, save
from ragged_server.store.log import Log
from ragged_server.store.records import StoreSettings
from ragged_server.store.retention import expired
from ragged_server.store.seal import SealingCutError, remove_left_over, seal_segment, unlist
from ragged_server.store.segments import Segment

__all__ = ["Upkeep"]

_log = logging.getLogger("ragged_server.store.upkeep")
# Seconds between two looks at ages, and after a failure.
_TICK_S = 1.0
_PAUSE_S = 5.0


class Upkeep:
    """The thread that seals closed segments, merges runs and removes what is past its time.

    Parameters
    ----------
    directory : Path
        Of the dataset.
    log_id : bytes
    settings : StoreSettings
    log : Log
    index : IdIndex
    ledger : Ledger
    layer : FileLayer
    clock : callable

    Attributes
    ----------
    failure : str, optional
        Why the last round failed.
    """

    def __init__(
        self,
        directory: Path,
        log_id: bytes,
        settings: StoreSettings,
        log: Log,
        index: IdIndex,
        ledger: Ledger,
        layer: FileLayer,
        clock: Callable[[], float],
    ) -> None:
        self.failure: str | None = None
        self._directory = directory
        self._log_id = log_id.hex()
        self._settings = settings
        self._log = log
        self._index = index
        self._ledger = ledger
        self._layer = layer
        self._clock = clock
        # Files that are removed at a time, and those of segments that are not to be removed yet.
        self._graves: list[tuple[float, Path]] = []
        self._sealed: list[Path] = []
        self._swept = -float("inf")
        self._event = threading.Event()
        self._stopped = False
        # The ledger is changed by the writer and saved here.
        self._ledger_lock = threading.Lock()
        self._merger = threading.Thread()
        self._thread = threading.Thread(target=self._run, name="ragged-upkeep", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Let the thread look for work."""
        self._event.set()

    def stop(self) -> None:
        """Finish the step at hand and end the thread."""
        self._stopped = True
        self._event.set()
        for thread in (self._thread, self._merger):
            if thread.is_alive():
                thread.join()

    def seal_rest(self, seal_while: Callable[[], bool]) -> None:
        """Seal what is in the log; for after :meth:`stop`, when no segment is appended to.

        Records whose sealing fails, or whose time is up, stay in the log: the next start has them.

        Parameters
        ----------
        seal_while : callable
            Asked before each batch.
        """
        segments = [segment for segment in self._log.segments if segment.rows]
        try:
            for segment in segments:
                self._seal(segment, seal_while)
            self._settle()  # also what an earlier failure left
            # Nothing reads them any more; shards keep their time of grace.
            for _, path in self._graves:
                if path.parent == self._log.folder:
                    self._layer.remove(path)
        except Exception as err:  # noqa: BLE001 - the server stops all the same
            self.failure = str(err) if isinstance(err, RaggedError) else repr(err)
            left = sum(segment.rows for segment in self._log.segments)
            is_cut = isinstance(err, SealingCutError)
            _log.warning(
                "not_sealed_at_stop", exc_info=None if is_cut else err,
                extra={"records": left, "reason": "no time left" if is_cut else self.failure},
            )  # fmt: skip

    def apply(self, commit: Commit) -> None:
        """Take a commit into the ledger."""
        with self._ledger_lock:
            self._ledger.apply(commit)

    def _run(self) -> None:
        while not self._stopped:
            pause = _TICK_S
            try:
                self.round()
                self.failure = None
            except Exception as err:  # noqa: BLE001 - it must go on, and be seen in the status
                self.failure = str(err) if isinstance(err, RaggedError) else repr(err)
                pause = _PAUSE_S
                _log.exception("upkeep failed; it is tried again")
            self._event.wait(pause)
            self._event.clear()

    def round(self) -> None:
        """Do all that there is to do now.

        What fails does not keep the rest from being done: on a full disk nothing can be sealed
        until what is past its time is removed.

        Raises
        ------
        Exception
            The first of the failures.
        """
        failures: list[Exception] = []
        for step in (self._bury, self._settle, self._seal_closed, self._retain, self._bury):
            try:
                step()
            except Exception as err:  # noqa: BLE001 - raised below
                failures.append(err)
        if not self._merger.is_alive():
            # By a thread of its own: sealing must not wait for a merge of very many ids.
            self._merger = threading.Thread(target=self._merge, name="ragged-merge", daemon=True)
            self._merger.start()
        if failures:
            raise failures[0]

    def _merge(self) -> None:
        try:
            while not self._stopped and self._index.merge(lambda: self._stopped):
                pass
        except Exception as err:  # noqa: BLE001 - the next round tries again
            self.failure = repr(err)
            _log.exception("merging the id index failed; it is tried again")

    def _seal_closed(self) -> None:
        for segment in self._log.segments:
            if self._stopped:
                return
            if segment.closed and segment.rows:
                self._seal(segment)

    def _seal(self, segment: Segment, seal_while: Callable[[], bool] | None = None) -> None:
        for table in self._index.tables:
            if table.first_sequence == segment.first_sequence:
                self._index.flush(table)
        shard = seal_segment(
            self._directory, segment, self._log_id, batch_rows=self._settings.batch_rows,
            batch_bytes=self._settings.batch_bytes, seal_while=seal_while,
        )  # fmt: skip
        self._log.seal(segment, [shard])
        _log.info("segment_sealed", extra={"records": segment.rows, "shard": shard.name})
        self._sealed.append(segment.path)
        self._settle()

    def _settle(self) -> None:
        """Save what is in segments besides records, keys and quotas, and let them go."""
        if self._sealed:
            self._save()
            until = time.monotonic() + self._settings.grace_s
            self._graves += [(until, path) for path in self._sealed]
            self._sealed = []

    def _save(self) -> None:
        with self._ledger_lock:
            text = self._ledger.to_json(self._log_id)
        save(self._log.folder, text)

    def _retain(self) -> None:
        now = self._clock()
        total = sum(part.nbytes for part in self._log.parts)
        gone = expired(self._log.shards, total, self._settings, now)
        if gone:
            unlist(self._directory, gone, self._log_id)
            self._log.drop(gone)
            oldest = gone[-1].end_sequence
            _log.info("shards_removed", extra={"shards": len(gone), "oldest_sequence": oldest})
            with self._ledger_lock:
                self._ledger.removed(gone[-1].end_sequence, now)
            for shard in gone:
                until = time.monotonic() + self._settings.grace_s
                self._graves.append((until, self._directory / shard.name))
        before = self._index.floor
        with self._ledger_lock:
            self._index.floor = self._ledger.raise_floor(now)
        if gone or self._index.floor != before:
            self._save()
            self._index.drop_expired()

    def _bury(self) -> None:
        now = time.monotonic()
        due = [path for until, path in self._graves if until <= now]
        self._graves = [grave for grave in self._graves if grave[0] > now]
        for path in due:
            self._layer.remove(path)
        if now - self._swept > max(self._settings.grace_s, 60.0):
            self._swept = now
            remove_left_over(self._directory, self._log_id, self._settings.grace_s)
            # What other writers left that were killed.
            with suppress(DatasetNotFoundError):
                sweep(self._directory)
