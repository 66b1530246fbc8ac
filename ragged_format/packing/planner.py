"""Forming rows window by window, and steps of them for the ranks of a job."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np

from ragged_format.lists import ranges
from ragged_format.packing.bins import (
    FULL,
    Row,
    Window,
    clusters,
    even_out,
    fill_gaps,
    form_rows,
    spread,
)
from ragged_format.packing.deal import PlannedRow, deal, grouped, split_heaviest
from ragged_format.packing.forest import Fork, Keys, common_prefixes
from ragged_format.packing.steps import even_steps, level_step, slowest

if TYPE_CHECKING:
    from ragged_format.lists import Int64

__all__ = ["Planner", "Sorter", "Tail"]

Tail = Literal["keep", "drop", "open"]
# Rows of the last steps that are taken apart to make even ones with the rows left over.
MOST_TAIL = 512
# A step whose heaviest row is beyond the mean by this share is left open, where steps may be: among
# the rows of more samples it may find better company.
UNEVEN = 0.02


class Sorter:
    """Sorts samples by prefix.

    Parameters
    ----------
    keys : Keys
        What is compared.
    offsets : (n + 1,) int64
        Tokens of each sample, in `keys`.
    lengths : (n,) int64
    fork : {"token", "transition"}
    """

    def __init__(self, keys: Keys, offsets: Int64, lengths: Int64, fork: Fork) -> None:
        self.keys, self.offsets, self.lengths, self.fork = keys, offsets, lengths, fork

    def prefix_order(self, samples: Int64) -> tuple[Int64, Int64]:
        """Return samples in prefix order, and what each shares with the one before."""
        parts = self.keys.parts
        keys = Keys(
            self.keys.tokens,
            self.keys.compared,
            None if parts is None else [parts[i] for i in samples.tolist()],
        )
        order, shared = common_prefixes(
            keys, self.offsets[samples].tolist(), self.lengths[samples].tolist(), self.fork
        )
        return samples[np.array(order, np.int64)], np.array(shared, np.int64)


class Planner:
    """Forms rows window by window and groups them into steps.

    Parameters
    ----------
    sort : Sorter, optional
        ``None``: samples share nothing.
    lengths : (n,) int64
        Tokens of each sample.
    budget, ranks : int
    max_repeat : float
        As for ``plan_rows``.
    most_carried : int
        Samples of a row that is planned again with the next window, at most.
    """

    def __init__(
        self,
        sort: Sorter | None,
        lengths: Int64,
        budget: int,
        ranks: int,
        max_repeat: float,
        most_carried: int,
    ) -> None:
        self.sort, self.lengths, self.budget, self.ranks = sort, lengths, budget, ranks
        self.max_repeat, self.most_carried = max_repeat, most_carried
        self.rows: list[PlannedRow] = []
        self.carried = np.zeros(0, np.int64)

    def add(self, samples: Int64, *, last: bool) -> None:
        """Plan one window; all of its rows are there after the last."""
        rows = self.form(np.sort(np.concatenate([self.carried, samples])))
        if not last:
            emptiest = _emptiest(rows)
            few = len(emptiest.samples) <= self.most_carried
            if few and emptiest.unique_tokens < FULL * self.budget:
                rows = [row for row in rows if row is not emptiest]
                self.carried = emptiest.samples
            else:
                self.carried = np.zeros(0, np.int64)
        self.rows += rows

    def adopt(self, rows: list[Int64], window: int) -> None:
        """Add rows that are formed already; those that are not full are formed anew together."""
        loose: list[PlannedRow] = []
        for samples in rows:
            order, known = self.window(samples)
            row = _planned(order, known, [Row(0, [(0, len(order))])])[0]
            (self.rows if row.unique_tokens >= FULL * self.budget else loose).append(row)
        if loose:
            self.add_all(np.sort(np.concatenate([row.samples for row in loose])), window)

    def add_all(self, samples: Int64, window: int) -> None:
        """Plan samples in windows of equal size: a small last one gives rows hard to fill."""
        windows = np.array_split(samples, -(-len(samples) // window)) if len(samples) else []
        for number, chosen in enumerate(windows, 1):
            self.add(chosen, last=number == len(windows))

    def sorted(self, samples: Int64) -> tuple[Int64, Int64]:
        """Return samples in prefix order, and what each shares with the one before."""
        if self.sort is None:
            return samples, np.zeros(len(samples), np.int64)
        return self.sort.prefix_order(samples)

    def window(self, samples: Int64) -> tuple[Int64, Window]:
        """Return samples in prefix order, and the window they make."""
        order, shared = self.sorted(samples)
        return order, Window(self.lengths[order], shared)

    def form(self, samples: Int64) -> list[PlannedRow]:
        """Return the rows of one window."""
        order, window = self.window(samples)
        rows = form_rows(window, self.budget)
        rows = fill_gaps(window, rows, self.budget, max_repeat=self.max_repeat)
        rows = even_out(window, rows, self.budget, max_repeat=self.max_repeat)
        return _planned(order, window, rows)

    def finish(self, tail: Tail) -> tuple[list[PlannedRow], list[PlannedRow]]:
        """Return all rows, step by step, and those that make no step."""
        loose: list[PlannedRow] = []
        if tail == "open" and self.rows:
            emptiest = _emptiest(self.rows)
            if emptiest.unique_tokens < FULL * self.budget:
                loose = [emptiest]
                self.rows = [row for row in self.rows if row is not emptiest]
        steps, left = self.level_steps(self.rows)
        if tail == "keep" and left:
            steps, left = self.with_tail(steps, left), []
        whole = [step for step in steps if len(step) == self.ranks]
        steps = [*even_steps(whole, self.window, self.budget), *steps[len(whole) :]]
        if tail == "open":
            left = [*loose, *left, *(row for step in steps if _uneven(step) for row in step)]
            steps = [step for step in steps if not _uneven(step)]
        return [row for step in deal(steps, self.ranks) for row in step], left

    def level_steps(
        self, rows: list[PlannedRow]
    ) -> tuple[list[list[PlannedRow]], list[PlannedRow]]:
        """Return rows in steps of like load, the heaviest first, and the rows left over."""
        steps, left = grouped(rows, self.ranks)
        return [level_step(step, self.window, self.budget) for step in steps], left

    def with_tail(
        self, steps: list[list[PlannedRow]], left: list[PlannedRow]
    ) -> list[list[PlannedRow]]:
        """Return steps that hold the rows left over too.

        The last steps are taken apart with them: as many as are needed for one sample per row, and
        more where that takes time from the whole.
        """
        taken = 0
        while taken < len(steps) and _spare_samples(left) < -len(left) % self.ranks:
            taken += 1
            left = [*left, *steps[-taken]]
        best = self.tail_steps(left)
        sizes = [taken or 1]
        while sizes[-1] < len(steps) and sizes[-1] * self.ranks < MOST_TAIL:
            sizes.append(min(2 * sizes[-1], len(steps)))
        for more in sizes[taken > 0 :]:
            between = steps[len(steps) - more : len(steps) - taken]
            wider = [*left, *(row for step in between for row in step)]
            other = self.tail_steps(wider)
            if sum(map(slowest, other)) < sum(map(slowest, [*between, *best])):
                taken, left, best = more, wider, other
        return steps[: len(steps) - taken] + best

    def tail_steps(self, pool: list[PlannedRow]) -> list[list[PlannedRow]]:
        """Return rows as whole steps; the last is short where samples do not suffice."""
        steps, short = self.level_steps(self.even_tail(pool))
        return [*steps, *([short] if short else [])]

    def even_tail(self, pool: list[PlannedRow]) -> list[PlannedRow]:
        """Make of rows a multiple of the ranks, or one per sample where samples do not suffice."""
        count = min(len(pool) + -len(pool) % self.ranks, len(pool) + _spare_samples(pool))
        order, window = self.window(np.sort(np.concatenate([row.samples for row in pool])))
        everything = [Row(0, [(0, len(order))])]
        joined = _planned(order, window, everything)[0]
        ways = [split_heaviest(pool, count)]
        # Cutting all samples anew is more even, unless loads and tokens disagree too much to fit.
        ways.append(joined.split(count))
        runs = clusters(window, self.budget, joined.load / count)
        ways.append(_planned(order, window, spread(window, runs, count, self.budget, share=1.0)))
        fitting = [
            rows
            for rows in ways
            if len(rows) == count and max(row.unique_tokens for row in rows) <= self.budget
        ]
        return min(fitting, key=lambda rows: sorted((row.load for row in rows), reverse=True))


def _emptiest(rows: list[PlannedRow]) -> PlannedRow:
    return min(rows, key=lambda row: (row.unique_tokens, row.first))


def _uneven(step: list[PlannedRow]) -> bool:
    return slowest(step) * len(step) > (1 + UNEVEN) * sum(row.load for row in step)


def _planned(order: Int64, window: Window, rows: list[Row]) -> list[PlannedRow]:
    runs = np.array([run for row in rows for run in sorted(row.runs)], np.int64).reshape(-1, 2)
    held = ranges(runs[:, 0], runs[:, 1] - runs[:, 0])
    ends = np.cumsum([sum(end - first for first, end in row.runs) for row in rows])
    common = np.zeros(len(held), np.int64)
    common[1:] = window.common(held[:-1], held[1:])
    common[ends[:-1]] = 0
    samples, lengths = order[held], window.lengths[held]
    parts = [slice(*bounds) for bounds in pairwise([0, *ends.tolist()])]
    return [PlannedRow(samples[part], lengths[part], common[part]) for part in parts]


def _spare_samples(rows: list[PlannedRow]) -> int:
    """Return how many rows more these could be."""
    return sum(len(row.samples) - 1 for row in rows)
