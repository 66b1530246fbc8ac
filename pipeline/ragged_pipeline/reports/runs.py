"""Figures of runs of consecutive records: the steps of a training run, the batches that pad."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ragged_pipeline.reports.tally import Tally

if TYPE_CHECKING:
    from ragged_format.lists import Int64

__all__ = ["Runs"]


class Runs:
    """Largest value and sum of each run of `size` records, runs counted from record 0.

    Guarantees: the result depends on the values only, not on how they were divided into calls and
    merges; a run may lie in several parts.

    Attributes
    ----------
    count : int
        Runs with all their records.
    largest, total : int
        Sums over these runs, of the largest value of each and of all values.
    by_place : (size,) int64
        Sum of the values at each place within a run, unfinished runs included.
    ratios : Tally
        Largest value over mean of each complete run whose sum is positive.

    Examples
    --------
    >>> runs = Runs(2)
    >>> runs.add(0, np.array([3, 1, 5]))
    >>> runs.add(3, np.array([5]))
    >>> runs.count, runs.largest, runs.total, runs.by_place.tolist()
    (2, 8, 14, [8, 6])
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.count = self.largest = self.total = 0
        self.by_place = np.zeros(size, np.int64)
        self.ratios = Tally()
        # Run: records, largest value, sum.
        self._open: dict[int, tuple[int, int, int]] = {}

    def add(self, first: int, values: Int64) -> None:
        """Add the values, (m,) int64, of records from number `first` on."""
        if not len(values):
            return
        places = (first + np.arange(len(values))) % self.size
        np.add.at(self.by_place, places, values)
        head = min(-first % self.size, len(values))
        whole = (len(values) - head) // self.size * self.size
        self._note(first // self.size, values[:head])
        self._note((first + head + whole) // self.size, values[head + whole :])
        body = values[head : head + whole].reshape(-1, self.size)
        self._finish(body.max(axis=1), body.sum(axis=1))

    def merge(self, other: Runs) -> None:
        """Add what another has of the same records' other parts."""
        self.count += other.count
        self.largest += other.largest
        self.total += other.total
        self.by_place += other.by_place
        self.ratios.merge(other.ratios)
        for run, part in other._open.items():
            self._join(run, part)

    def _note(self, run: int, values: Int64) -> None:
        if len(values):
            self._join(run, (len(values), int(values.max()), int(values.sum())))

    def _join(self, run: int, part: tuple[int, int, int]) -> None:
        size, largest, total = self._open.pop(run, (0, 0, 0))
        joined = (size + part[0], max(largest, part[1]), total + part[2])
        if joined[0] < self.size:
            self._open[run] = joined
        else:
            self._finish(np.array([joined[1]]), np.array([joined[2]]))

    def _finish(self, largest: Int64, sums: Int64) -> None:
        self.count += len(largest)
        self.largest += int(largest.sum())
        self.total += int(sums.sum())
        full = sums > 0
        self.ratios.add(largest[full] * self.size / sums[full])

    @property
    def unfinished(self) -> list[tuple[int, int, int]]:
        """Records, largest value and sum of every run that lacks records."""
        return [self._open[run] for run in sorted(self._open)]
