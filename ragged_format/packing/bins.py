"""Forming rows under a budget of unique tokens: best-fit decreasing over prefix clusters.

Everything works on one window of samples, sorted so that common prefixes are adjacent. A *run* is a
stretch of that order; the unique tokens of a run follow from lengths and adjacent common prefixes
by two look-ups.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ragged_format.lists import Int64, offsets_of

__all__ = ["FULL", "Row", "Window", "fill_gaps", "form_rows"]

# A row filled to this share of the budget is left alone.
FULL = 0.97
# A run is split to fill a gap only if this share of the moved tokens, at most, is repeated prefix:
# an unfilled row costs a bit of overhead, a repeated prefix is computed again.
MAX_REPEAT = 0.1

Run = tuple[int, int]


class Window:
    """Sorted samples of one window and what they share.

    Parameters
    ----------
    lengths, shared : (n,) int64
        Tokens of each sample in sorted order, and how many of them it shares with the one before.
    """

    def __init__(self, lengths: Int64, shared: Int64) -> None:
        self.lengths = lengths
        self.shared = shared
        self._new = offsets_of(lengths - shared)
        self._minima: list[Int64] = [shared]
        step = 1
        while 2 * step <= len(shared):
            last = self._minima[-1]
            self._minima.append(np.minimum(last[:-step], last[step:]))
            step *= 2
        self.base = int(shared[1:].min()) if len(shared) > 1 else 0

    def unique(self, run: Run) -> int:
        """Return the unique tokens of a run."""
        first, end = run
        return int(self._new[end] - self._new[first] + self.shared[first])

    def children(self, run: Run) -> tuple[int, list[Run]]:
        """Return the prefix that all of a run share, and the parts that share more."""
        first, end = run
        inner = self.shared[first + 1 : end]
        depth = int(inner.min())
        cuts = [first, *(np.flatnonzero(inner == depth) + first + 1).tolist(), end]
        return depth, list(pairwise(cuts))

    def common(self, left: Int64, right: Int64) -> Int64:
        """Return the prefix that samples at two places share; 0 unless ``left < right``."""
        span = np.maximum(right - left, 1)
        level = np.frexp(span)[1] - 1
        out = np.zeros(len(left), np.int64)
        for k in np.unique(level).tolist():
            at = np.flatnonzero((level == k) & (left < right))
            table = self._minima[k]
            out[at] = np.minimum(table[left[at] + 1], table[right[at] + 1 - (1 << k)])
        return out


@dataclass(slots=True)
class Row:
    """An open row: its runs and an upper bound of its unique tokens."""

    size: int
    runs: list[Run] = field(default_factory=list)

    @property
    def first(self) -> int:
        """Lowest place in sorted order, which decides between equals."""
        return min(run[0] for run in self.runs)


def form_rows(window: Window, budget: int) -> list[Row]:
    """Return rows of at most `budget` unique tokens that hold every sample of the window once.

    A cluster of samples that fits into a row stays together. A larger one is taken apart where its
    samples share least, its parts are packed together as far as they go, and what does not fill a
    row is packed with the parts of the cluster around it.
    """
    if not len(window.lengths):
        return []
    full: list[Row] = []
    # Depth-first without recursion: chains of nested clusters can be as deep as there are samples.
    done: list[list[Row]] = [[]]
    todo: list[tuple[Run, int]] = [((0, len(window.lengths)), -1)]
    while todo:
        run, depth = todo.pop()
        if depth >= 0:
            packed = best_fit(done.pop(), budget, depth)
            full += [row for row in packed if row.size >= FULL * budget]
            done[-1] += [row for row in packed if row.size < FULL * budget]
        elif (size := window.unique(run)) <= budget:
            done[-1].append(Row(size, [run]))
        else:
            depth, parts = window.children(run)
            todo.append((run, depth))
            todo += [(part, -1) for part in parts]
            done.append([])
    return full + done[0]


def best_fit(items: list[Row], budget: int, shared: int) -> list[Row]:
    """Merge rows that share `shared` tokens, the largest first, each where it fits best."""
    rows: list[Row] = []
    gaps: list[tuple[int, int]] = []
    for item in sorted(items, key=lambda row: (-row.size, row.first)):
        extra = item.size - shared
        place = bisect_left(gaps, (extra, -1))
        if place == len(gaps):
            number = len(rows)
            rows.append(item)
        else:
            number = gaps.pop(place)[1]
            rows[number].size += extra
            rows[number].runs += item.runs
        insort(gaps, (budget - rows[number].size, number))
    return rows


def fill_gaps(window: Window, rows: list[Row], budget: int) -> list[Row]:
    """Move runs from the emptiest rows into the gaps of others, split where little is repeated.

    Rows that become empty are left out of the result.
    """
    unfilled = sorted(
        (row for row in rows if row.size < FULL * budget), key=lambda row: (row.size, row.first)
    )
    gaps = sorted((budget - row.size, number) for number, row in enumerate(unfilled))
    for number, donor in enumerate(unfilled):
        gaps.remove((budget - donor.size, number))
        kept: list[Run] = []
        todo = sorted(donor.runs, key=lambda run: (window.unique(run), -run[0]))
        while todo:
            run = todo.pop()
            extra = window.unique(run) - window.base
            place = bisect_left(gaps, (extra, -1))
            if place < len(gaps):
                gap, receiver = gaps.pop(place)
                unfilled[receiver].size += extra
                unfilled[receiver].runs.append(run)
                insort(gaps, (gap - extra, receiver))
            elif run[1] - run[0] > 1 and gaps:
                kept_whole, parts = _split(window, run)
                kept += kept_whole
                todo += parts
            else:
                kept.append(run)
        donor.runs = kept
        donor.size = window.base + sum(window.unique(run) - window.base for run in kept)
        if kept:
            insort(gaps, (budget - donor.size, number))
    return [row for row in rows if row.runs]


def _split(window: Window, run: Run) -> tuple[list[Run], list[Run]]:
    """Return the parts of a run to keep in place and those that may move, smallest first."""
    depth, parts = window.children(run)
    repeated = depth - window.base
    cheap = [part for part in parts if repeated <= MAX_REPEAT * (window.unique(part) - depth)]
    if not cheap:
        return [run], []
    stay = [part for part in parts if part not in cheap]
    return stay, sorted(cheap, key=lambda part: (window.unique(part), -part[0]))
