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
from ragged_format.packing.deal import score_pairs

__all__ = ["FULL", "Row", "Window", "clusters", "even_out", "fill_gaps", "form_rows", "spread"]

# A row filled to this share of the budget is left alone.
FULL = 0.97
# Of many rows, those of one step find each other by load; few are evened out by themselves.
FEW = 512
# Shares of tokens that are placed for even loads, the heaviest first: what costs no row is taken.
HEAVY = (0.7, 0.6)
# Room of every row, as a share of the budget, at most, that makes exchanges easy.
SPARE = 0.01
Run = tuple[int, int]


class Window:
    """Sorted samples of one window and what they share.

    Parameters
    ----------
    lengths, shared : (n,) int64
        Tokens of each sample in sorted order, and how many of them it shares with the one before;
        n >= 1.
    """

    def __init__(self, lengths: Int64, shared: Int64) -> None:
        self.lengths = lengths
        self.shared = shared
        self._new = offsets_of(lengths - shared)
        self._load = offsets_of(score_pairs(lengths) - score_pairs(shared))
        self._minima: list[Int64] = [shared]
        step = 1
        while 2 * step <= len(shared):
            last = self._minima[-1]
            self._minima.append(np.minimum(last[:-step], last[step:]))
            step *= 2
        # The prefix of all samples, which every row has once.
        self.base = int(shared[1:].min()) if len(shared) > 1 else 0

    def unique(self, run: Run) -> int:
        """Return the unique tokens of a run."""
        first, end = run
        return int(self._new[end] - self._new[first] + self.shared[first])

    def size(self, runs: list[Run]) -> int:
        """Return the unique tokens of a row of these runs."""
        ordered = sorted(runs)
        total = sum(self.unique(run) for run in ordered)
        return total - sum(self._between(left, right) for left, right in pairwise(ordered))

    def _between(self, left: Run, right: Run) -> int:
        """Return what the last sample of a run shares with the first of a later one."""
        end, start = left[1], right[0]
        level = (start - end + 1).bit_length() - 1
        table = self._minima[level]
        return int(min(table[end], table[start + 1 - (1 << level)]))

    def insert(self, row: Row, run: Run) -> None:
        """Add a run to a row whose runs are in order and whose size is exact; both stay so."""
        place = bisect_left(row.runs, run)
        around = row.runs[max(place - 1, 0) : place + 1]
        row.size += self.unique(run)
        if place > 0:
            row.size -= self._between(around[0], run)
        if place < len(row.runs):
            row.size -= self._between(run, around[-1])
        if 0 < place < len(row.runs):
            row.size += self._between(*around)
        row.runs.insert(place, run)

    def load(self, run: Run) -> int:
        """Return the attention score pairs that a run adds to a row that has the base prefix."""
        first, end = run
        above = score_pairs(int(self.shared[first])) - score_pairs(self.base)
        return int(self._load[end] - self._load[first] + above)

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

    def add(self, run: Run, extra: int) -> None:
        """Add a run that brings `extra` tokens."""
        self.runs.append(run)
        self.size += extra

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


def best_fit(
    items: list[Row], budget: int, shared: int, rows: list[Row] | None = None
) -> list[Row]:
    """Merge rows that share `shared` tokens, the largest first, each where it fits best.

    They may go into `rows`, which are changed and come first in the result.
    """
    rows = list(rows or [])
    gaps = sorted((budget - row.size, number) for number, row in enumerate(rows))
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


def fill_gaps(window: Window, rows: list[Row], budget: int, *, max_repeat: float) -> list[Row]:
    """Move runs from the emptiest rows into the gaps of others, and return the rows that remain.

    A run that fits nowhere is split into parts that share more, if moving a part repeats at most
    `max_repeat` times as many tokens of prefix as it moves.
    """
    for row in rows:
        row.runs.sort()
        row.size = window.size(row.runs)
    unfilled = sorted(
        (row for row in rows if row.size < FULL * budget), key=lambda row: (row.size, row.first)
    )
    gaps = Gaps(unfilled, budget)
    for number, donor in enumerate(unfilled):
        gaps.remove(number)
        kept: list[Run] = []
        largest_last = sorted(donor.runs, key=lambda run: (window.unique(run), -run[0]))
        # Each run with the prefix that it shares with other parts of its cluster, and where they
        # went: it is smaller where they are.
        todo: list[tuple[Run, int, list[int]]] = [(run, window.base, []) for run in largest_last]
        while todo:
            run, depth, siblings = todo.pop()
            size = window.unique(run)
            receiver = gaps.best(size - depth, siblings)
            if receiver is None:
                receiver = gaps.best(size - window.base)
            if receiver is not None:
                if receiver not in siblings:
                    siblings.append(receiver)
                gaps.remove(receiver)
                window.insert(unfilled[receiver], run)
                gaps.insert(receiver)
                continue
            parts: list[Run] = []
            if run[1] - run[0] > 1:
                inner, stay, parts = _split(window, run, max_repeat)
                together: list[int] = []
                todo += [(part, inner, together) for part in parts]
                kept += stay
            if not parts:
                kept.append(run)
        donor.runs = sorted(kept)
        donor.size = window.size(kept)
        if kept:
            gaps.insert(number)
    return [row for row in rows if row.runs]


class Gaps:
    """The room that is left in rows, in order."""

    def __init__(self, rows: list[Row], budget: int) -> None:
        self._rows, self._budget = rows, budget
        self._sorted = sorted((self.of(number), number) for number in range(len(rows)))

    def of(self, number: int) -> int:
        """Return the gap of a row."""
        return self._budget - self._rows[number].size

    def best(self, needed: int, among: list[int] | None = None) -> int | None:
        """Return the row with the smallest gap that suffices, of `among` or of all."""
        if among is not None:
            return min(
                (number for number in among if self.of(number) >= needed),
                key=lambda number: (self.of(number), number),
                default=None,
            )
        place = bisect_left(self._sorted, (needed, -1))
        return self._sorted[place][1] if place < len(self._sorted) else None

    def remove(self, number: int) -> None:
        """Take a row out, before its size changes."""
        del self._sorted[bisect_left(self._sorted, (self.of(number), number))]

    def insert(self, number: int) -> None:
        """Put a row back."""
        insort(self._sorted, (self.of(number), number))


def _split(window: Window, run: Run, max_repeat: float) -> tuple[int, list[Run], list[Run]]:
    """Return the prefix that a run shares, its parts to keep, and those to move, smallest first."""
    depth, parts = window.children(run)
    repeated = depth - window.base
    move: list[Run] = []
    stay: list[Run] = []
    for part in parts:
        pays = repeated <= max_repeat * (window.unique(part) - depth)
        (move if pays else stay).append(part)
    if not move:
        return depth, [], []
    return depth, stay, sorted(move, key=lambda part: (window.unique(part), -part[0]))


def clusters(window: Window, budget: int, load: float) -> list[Run]:
    """Return the largest clusters, down to one sample, of at most these tokens and score pairs."""
    out = []
    todo = [(0, len(window.lengths))]
    while todo:
        run = todo.pop()
        if run[1] - run[0] == 1 or (window.unique(run) <= budget and window.load(run) <= load):
            out.append(run)
        else:
            todo += window.children(run)[1]
    return out


def spread(window: Window, runs: list[Run], count: int, budget: int, *, share: float) -> list[Row]:
    """Place runs into about `count` rows of like load.

    The heaviest, up to `share` of all tokens, go each into the lightest row, the others, the
    largest first, where they fit best, and what does not fit into rows of its own.
    """
    rows = [Row(window.base) for _ in range(count)]
    loads = np.zeros(count)
    sizes = np.full(count, window.base, np.int64)
    heavy = sorted(runs, key=lambda run: (window.load(run), run), reverse=True)
    extras = [window.unique(run) - window.base for run in heavy]
    place, placed, limit = 0, 0, share * sum(extras)
    while place < len(heavy) and placed + extras[place] <= limit:
        fits = sizes + extras[place] <= max(budget, window.base + extras[place])
        if not fits.any():
            break
        lightest = int(np.argmin(np.where(fits, loads, np.inf)))
        loads[lightest] += window.load(heavy[place])
        sizes[lightest] += extras[place]
        rows[lightest].add(heavy[place], extras[place])
        placed += extras[place]
        place += 1
    rest = [
        Row(window.base + extra, [run])
        for run, extra in zip(heavy[place:], extras[place:], strict=True)
    ]
    return best_fit(rest, budget, window.base, [row for row in rows if row.runs])


def even_out(window: Window, rows: list[Row], budget: int, *, max_repeat: float) -> list[Row]:
    """Return as many rows with more even loads, where there is a simple way to have them."""
    if not 1 < len(rows) <= FEW:
        return rows
    runs = [run for row in rows for run in row.runs]
    spare = (len(rows) * budget - sum(row.size for row in rows)) // (2 * len(rows))
    spare = min(spare, int(SPARE * budget))
    for share in HEAVY:
        # Rows that all have some room can exchange more.
        for size in (budget - spare, budget):
            other = spread(window, runs, len(rows), size, share=share)
            other = fill_gaps(window, other, size, max_repeat=max_repeat)
            if len(other) <= len(rows):
                return min(rows, other, key=lambda rows: _unevenness(window, rows))
    return rows


def _unevenness(window: Window, rows: list[Row]) -> float:
    return float(np.std([sum(window.load(run) for run in row.runs) for row in rows]))
