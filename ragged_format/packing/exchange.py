"""Evening out the loads of one step's rows by exchanging what they hold.

A row waits for the heaviest row of its step. Rows of one step are alike already (see
:mod:`ragged_format.packing.deal`); here the heaviest gives one or two items for up to two of a
lighter row, as long as both stay within the budget. An item is what a row holds of one cluster, so
that no prefix is stored twice that was stored once, but for short ones. Where a step stays uneven,
as the heaviest may, its lighter rows take load from the steps after it, which thereby get lighter
as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ragged_format.lists import Int64, offsets_of
from ragged_format.packing.bins import Window
from ragged_format.packing.deal import PlannedRow, score_pairs

__all__ = ["even_step", "even_steps"]

# A step whose heaviest row is within this share of the mean is left alone.
EVEN = 0.01
# A prefix of at most this share of a mean sample may be stored twice.
SHORT = 1 / 16
# Smallest gain of an exchange, as a share of the mean load: fewer, larger steps.
GAIN = 0.0005
# Items of a row that are tried, of all sizes; the pairs of them are tried too.
TRIED = 20
# Exchanges of a step, per row.
EXCHANGES = 16
# Steps from which an uneven one takes load.
LENDERS = 4
# A step is uneven if that costs more than this share of all steps' time.
COSTLY = 0.001

Sorted = Callable[[Int64], tuple[Int64, Window]]
Bools = npt.NDArray[np.bool_]


def even_step(rows: list[PlannedRow], window: Sorted, budget: int) -> list[PlannedRow]:
    """Return rows of the same samples in which the heaviest is lighter, where that is found.

    Parameters
    ----------
    rows : list of PlannedRow
        The rows of one step.
    window : callable
        Takes sample numbers, ascending, and returns them in prefix order with their window.
    budget : int
        Largest number of unique tokens of a row.
    """
    loads = [row.load for row in rows]
    limit = (1 + EVEN) * sum(loads) / len(rows)
    held = sum(len(row.samples) for row in rows)
    if max(loads) <= limit or held == len(rows):
        return rows
    items = _items(rows, window)
    trade = _Trade(items, rows, budget)
    if not trade.run(limit):
        return rows
    after = _rows(items, trade.owner, len(rows))
    return after if max(row.load for row in after) < max(loads) else rows


def even_steps(steps: list[list[PlannedRow]], window: Sorted, budget: int) -> None:
    """Even out the loads of all steps, in place.

    Parameters
    ----------
    steps : list of lists of PlannedRow
        The heaviest first, all of as many rows.
    window, budget
        As for :func:`even_step`.
    """
    for number, step in enumerate(steps):
        steps[number] = even_step(step, window, budget)
    whole = sum(row.load for step in steps for row in step)
    for number, step in enumerate(steps):
        loads = [row.load for row in step]
        if max(loads) * len(step) - sum(loads) > COSTLY * whole:
            part = slice(number, number + 1 + LENDERS)
            steps[part] = _lend(steps[part], window, budget)


def _lend(steps: list[list[PlannedRow]], window: Sorted, budget: int) -> list[list[PlannedRow]]:
    """Return steps of which the first has taken load from the others, if that saves time."""
    rows = [row for step in steps for row in step]
    ranks = len(steps[0])
    items = _items(rows, window)
    trade = _Trade(items, rows, budget)
    trade.raise_to_heaviest(ranks)
    moved = _rows(items, trade.owner, len(rows))
    after = [
        even_step(moved[first : first + ranks], window, budget)
        for first in range(0, len(rows), ranks)
    ]
    return after if _time(after) < _time(steps) else steps


def _time(steps: list[list[PlannedRow]]) -> int:
    return sum(max(row.load for row in step) for step in steps)


@dataclass(frozen=True, slots=True)
class _Items:
    """What rows hold of each cluster.

    Attributes
    ----------
    order : (n,) int64
        Samples in prefix order.
    window : Window
        What they share.
    item : (n,) int64
        Item of each place in the order.
    owner : (k,) int64
        Row of each item.
    tokens, freed : (k,) int64
        Tokens that it brings to a row at most, and those that a row without it has less at least.
    load : (k,) int64
        Score pairs that it brings at most.
    """

    order: Int64
    window: Window
    item: Int64
    owner: Int64
    tokens: Int64
    freed: Int64
    load: Int64


def _items(rows: list[PlannedRow], window: Sorted) -> _Items:
    samples = np.concatenate([row.samples for row in rows])
    holder = np.repeat(np.arange(len(rows)), [len(row.samples) for row in rows])
    ascending = np.argsort(samples)
    order, place = window(samples[ascending])
    holder = holder[ascending][np.searchsorted(samples[ascending], order)]
    own = place.shared <= place.base + int(SHORT * place.lengths.mean())
    cluster = np.cumsum(own)
    _, item = np.unique(cluster * len(rows) + holder, return_inverse=True)
    by_item = np.argsort(item, kind="stable")
    bounds = offsets_of(np.bincount(item))
    starts = bounds[:-1]
    common = np.full(len(order), place.base, np.int64)
    common[1:] = place.common(by_item[:-1], by_item[1:])
    common[starts] = place.base
    lengths = place.lengths[by_item]
    # What a cluster shares with those beside it is there once, or again in another row.
    begins = np.flatnonzero(own)
    edges = np.append(np.maximum(place.shared[begins], place.base), place.base)
    beside = np.maximum(edges[:-1], edges[1:])[cluster[by_item[starts]] - 1] - place.base
    tokens = np.add.reduceat(lengths - common, starts)
    return _Items(
        order, place, item,
        owner=holder[by_item[starts]],
        tokens=tokens,
        freed=tokens - beside,
        load=np.add.reduceat(score_pairs(lengths) - score_pairs(common), starts),
    )  # fmt: skip


def _rows(items: _Items, owner: Int64, count: int) -> list[PlannedRow]:
    out = []
    holder = owner[items.item]
    for row in range(count):
        places = np.flatnonzero(holder == row)
        common = np.zeros(len(places), np.int64)
        common[1:] = items.window.common(places[:-1], places[1:])
        out.append(PlannedRow(items.order[places], items.window.lengths[places], common))
    return out


class _Sets(NamedTuple):
    """Sets of up to two items of one row: the items (-1 for none), and their sums."""

    first: Int64
    second: Int64
    size: Int64
    tokens: Int64
    freed: Int64
    load: Int64


class _Trade:
    """The exchanges of one step; `owner` says which row has each item."""

    def __init__(self, items: _Items, rows: list[PlannedRow], budget: int) -> None:
        self.items, self.budget = items, budget
        self.owner = items.owner.copy()
        self.counts = np.bincount(self.owner, minlength=len(rows))
        self.loads = np.array([row.load for row in rows], np.int64)
        self.tokens = np.array([row.unique_tokens for row in rows], np.int64)
        self.least = GAIN * float(self.loads.mean())

    def run(self, limit: float) -> bool:
        """Exchange until no row is above the limit or nothing helps; return whether any did."""
        done = False
        for _ in range(EXCHANGES * len(self.loads)):
            heaviest = int(np.argmax(self.loads))
            if self.loads[heaviest] <= limit:
                break
            lighter = np.argsort(self.loads, kind="stable")[:-1].tolist()
            mine = self._sets(heaviest)
            if not any(self._exchange(heaviest, mine, row) for row in lighter if row != heaviest):
                break
            done = True
        return done

    def raise_to_heaviest(self, ranks: int) -> None:
        """Let the first `ranks` rows, but the heaviest of them, take load from the others."""
        top = int(self.loads[:ranks].max())
        for row in np.argsort(self.loads[:ranks], kind="stable").tolist():
            for _ in range(EXCHANGES):
                room = top - int(self.loads[row])
                lenders = ranks + np.argsort(-self.loads[ranks:], kind="stable")
                if room <= self.least or not any(
                    self._exchange(lender, self._sets(lender), row, room)
                    for lender in lenders.tolist()
                ):
                    break

    def _sets(self, row: int) -> _Sets:
        held = np.flatnonzero(self.owner == row)
        load = self.items.load
        if len(held) > TRIED:
            by_load = held[np.argsort(load[held], kind="stable")]
            held = by_load[np.linspace(0, len(held) - 1, TRIED).astype(np.int64)]
        left, right = np.triu_indices(len(held), k=1)
        none = np.array([-1])
        first = np.concatenate([none, held, held[left]])
        second = np.concatenate([none, np.full(len(held), -1), held[right]])
        size = (first >= 0).astype(np.int64) + (second >= 0)
        # The last element stands for no item.
        padded = [np.append(v, 0) for v in (self.items.tokens, self.items.freed, load)]
        return _Sets(first, second, size, *(v[first] + v[second] for v in padded))

    def _exchange(self, heavy: int, mine: _Sets, light: int, room: int | None = None) -> bool:
        """Make the exchange of two rows that evens them out most; return whether there is one.

        With `room`, the one that moves most load, but no more than that.
        """
        gap = int(self.loads[heavy] - self.loads[light])
        if room is None and gap <= self.least:
            return False
        theirs = self._sets(light)
        taken = mine.tokens[:, None] - theirs.freed
        fits = taken <= self.budget - self.tokens[light]
        got = theirs.tokens - mine.freed[:, None]
        fits &= got <= self.budget - self.tokens[heavy]
        number = mine.size[:, None] - theirs.size
        fits &= (number < self.counts[heavy]) & (-number < self.counts[light])
        given = mine.load[:, None] - theirs.load
        if room is None:
            after = np.where(fits, np.maximum(-given, given - gap), 0)
        else:
            after = np.where(fits & (given <= room), -given, 0)
        best = int(np.argmin(after))
        if after.flat[best] > -self.least:
            return False
        a, b = np.unravel_index(best, after.shape)
        for sets, at, to in ((mine, a, light), (theirs, b, heavy)):
            for item in (sets.first[at], sets.second[at]):
                if item >= 0:
                    self.owner[item] = to
        self.loads[heavy] -= given[a, b]
        self.loads[light] += given[a, b]
        self.tokens[heavy] += got[a, b]
        self.tokens[light] += taken[a, b]
        self.counts[heavy] -= number[a, b]
        self.counts[light] += number[a, b]
        return True
