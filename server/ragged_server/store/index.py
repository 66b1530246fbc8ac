"""The id index: which sample_ids the log has, and with which content.

Ids of segments that are not sealed are in memory, one table for each segment. When a segment closes
its table becomes a run: a sorted, memory-mapped file (:mod:`ragged_server.store.runs`). Runs are
merged four at a time, so that their number grows with the logarithm of the number of ids. A look-up
asks every table and every run, many ids at once. The index holds nothing that log and shards do
not, so a damaged or missing run is made anew.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from ragged_format.errors import CorruptError, RaggedError
from ragged_server.store.records import Bytes
from ragged_server.store.runs import Entries, Run, merge_runs, run_range, write_run

__all__ = ["IdIndex", "Table"]

# Runs of one size class that are merged, and the smallest class.
FAN_IN = 4
SMALLEST = 1 << 16
# No look-up asks more runs than this, whatever their sizes.
MOST_RUNS = 24


class Table:
    """The ids of one segment in the order of their sequences, in memory.

    Attributes
    ----------
    first_sequence : int
        Of the segment.
    ids : dict of bytes to bytes
        Id digest to record digest; insertion order is that of the log.
    """

    def __init__(self, first_sequence: int) -> None:
        self.first_sequence = first_sequence
        self.ids: dict[bytes, bytes] = {}

    @property
    def end_sequence(self) -> int:
        """Sequence after the last id."""
        return self.first_sequence + len(self.ids)

    def entries(self) -> Entries:
        """Return the ids as arrays."""
        count = len(self.ids)
        ids = np.frombuffer(b"".join(self.ids), np.uint8).reshape(count, 16)
        digests = np.frombuffer(b"".join(self.ids.values()), np.uint8).reshape(count, 16)
        sequences = np.arange(self.first_sequence, self.end_sequence)
        return Entries.of(ids, digests, sequences)


class IdIndex:
    """All ids of one log. One thread adds and looks up; another flushes and merges.

    Parameters
    ----------
    folder : Path
        Where the runs lie.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Replaced as a whole, so that the writer always sees each id in a table or in a run.
        self._state: tuple[tuple[Table, ...], tuple[Run, ...]] = ((), ())
        self._swap = threading.Lock()
        self.floor = 0

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables, oldest first."""
        return self._state[0]

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs, oldest first."""
        return self._state[1]

    @property
    def num_ids(self) -> int:
        """Number of ids, those counted that are past their time and not yet merged away."""
        tables, runs = self._state
        return sum(len(table.ids) for table in tables) + sum(len(run) for run in runs)

    @property
    def nbytes(self) -> int:
        """Bytes of the runs' files."""
        return sum(run.nbytes for run in self.runs)

    def load(self, end: int) -> list[str]:
        """Open the runs in the folder; return the names of files that were removed as damaged.

        A run that reaches beyond `end`, the end of the log, is of records that do not count.
        """
        removed, runs = [], []
        paths = [path for path in self._folder.iterdir() if run_range(path.name) is not None]
        for path in paths:
            try:
                run = Run(path)
                if run.end > end:
                    raise CorruptError("a run is of another log", expected=end, got=run.end)
                runs.append(run)
            except (RaggedError, OSError):
                path.unlink(missing_ok=True)
                removed.append(path.name)
        # A merge that was interrupted leaves both its result and its sources.
        runs.sort(key=lambda run: (run.first, -run.end))
        kept: list[Run] = []
        for run in runs:
            if kept and run.end <= kept[-1].end:
                run.path.unlink(missing_ok=True)
            else:
                kept.append(run)
        self._state = (self._state[0], tuple(kept))
        return removed

    def gaps(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges of sequences within [first, end) that no run covers."""
        out = []
        position = first
        for run in self.runs:
            if run.first > position:
                out.append((position, min(run.first, end)))
            position = max(position, run.end)
        if position < end:
            out.append((position, end))
        return [(start, stop) for start, stop in out if start < stop]

    def add_run(self, entries: Entries, first: int, end: int) -> None:
        """Write a run for the records [first, end) and use it."""
        run = write_run(self._folder, entries, first, end)
        with self._swap:
            tables, runs = self._state
            self._state = (tables, _ordered((*runs, run)))

    def add_table(self, table: Table) -> None:
        """Use a table, the newest."""
        with self._swap:
            tables, runs = self._state
            self._state = ((*tables, table), runs)

    def look_up(self, keys: Sequence[bytes], raw: Bytes) -> dict[bytes, bytes]:
        """Return the record digests of those ids that are known.

        Parameters
        ----------
        keys : sequence of bytes
            Id digests.
        raw : (n, 16) uint8
            The same.
        """
        found: dict[bytes, bytes] = {}
        tables, runs = self._state
        wanted = set(keys)
        for table in tables:
            ids = table.ids
            if not wanted.isdisjoint(ids):
                found.update((key, ids[key]) for key in wanted if key in ids)
        if runs and len(keys):
            high = np.ascontiguousarray(raw[:, :8]).view(">u8").reshape(-1).astype(np.uint64)
            order = np.argsort(high)
            ordered = high[order]
            for run in runs:
                if run.end > self.floor:
                    for place, digest in run.find(ordered, order, keys, self.floor):
                        found[keys[place]] = digest
        return found

    def flush(self, table: Table) -> None:
        """Write a table of a closed segment as a run and drop it."""
        first, end = table.first_sequence, table.end_sequence
        run = write_run(self._folder, table.entries(), first, end) if end > first else None
        with self._swap:
            tables, runs = self._state
            added = runs if run is None else _ordered((*runs, run))
            self._state = (tuple(other for other in tables if other is not table), added)

    def drop_expired(self) -> None:
        """Remove runs whose ids are all past their time."""
        self._replace([run for run in self.runs if run.end <= self.floor], None)

    def merge(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Merge one group of runs if there is one to merge; return whether there was.

        Takes minutes for many ids, and gives up once `stopped` is true.
        """
        group = _to_merge(self.runs)
        if not group:
            return False
        merged = merge_runs(self._folder, group, self.floor, stopped)
        if merged is None:
            return False
        self._replace(group, merged)
        return True

    def _replace(self, old: Sequence[Run], new: Run | None) -> None:
        if not old and new is None:
            return
        gone = set(map(id, old))
        with self._swap:
            tables, runs = self._state
            kept = tuple(run for run in runs if id(run) not in gone)
            self._state = (tables, _ordered((*kept, *(() if new is None else (new,)))))
        for run in old:
            run.path.unlink(missing_ok=True)


def _ordered(runs: Iterable[Run]) -> tuple[Run, ...]:
    return tuple(sorted(runs, key=lambda run: run.first))


def _size_class(run: Run) -> int:
    size, number = SMALLEST, 0
    while len(run) > size:
        size *= FAN_IN
        number += 1
    return number


def _windows(runs: Sequence[Run]) -> Iterator[Sequence[Run]]:
    for start in range(len(runs) - FAN_IN + 1):
        window = runs[start : start + FAN_IN]
        if all(a.end == b.first for a, b in pairwise(window)):
            yield window


def _to_merge(runs: Sequence[Run]) -> Sequence[Run]:
    """Return neighbouring runs of one size class, or the smallest neighbours if there are many."""
    windows = list(_windows(runs))
    for window in windows:
        if len({_size_class(run) for run in window}) == 1:
            return window
    if len(runs) > MOST_RUNS and windows:
        return min(windows, key=lambda window: sum(map(len, window)))
    return ()
