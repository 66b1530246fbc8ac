"""Exchanges of items between rows.

Sums of rows are kept as upper bounds: what comes counts in full, what goes counts as what it cannot
have in common with the rest of its row. So a row keeps its budget whatever is exchanged.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ragged_format.lists import Int64
    from ragged_format.packing.deal import PlannedRow
    from ragged_format.packing.items import Items

__all__ = ["Trade"]

# Smallest gain of an exchange, as a share of the mean load: fewer, larger steps.
GAIN = 0.0001
# Items of a row that are tried, of all sizes, and their pairs; of so few items, triples too.
TRIED = 20
TRIPLES = 9
# Exchanges of a step, per row, and of one row that is lifted.
EXCHANGES = 16
# More than any load.
NEVER = np.iinfo(np.int64).max
# Exchanges that are compared at a time.
COMPARED = 1 << 16
# What a token costs that is stored again, as a share of its part of the row's load.
PRICE = 0.1
# Items of all lenders that are tried, at most, and with how many of its neighbours each.
LENT, BESIDE = 2048, 4


class _Sets(NamedTuple):
    """Sets of items of one row, or of several rows: the items (-1 for none), and their sums."""

    items: Int64
    row: Int64
    size: Int64
    tokens: Int64
    freed: Int64
    load: Int64
    released: Int64

    def where(self, chosen: npt.NDArray[np.bool_]) -> _Sets:
        """Return some of the sets."""
        return _Sets(*(values[chosen] for values in self))


class Trade:
    """Rows that exchange items.

    Attributes
    ----------
    owner : (k,) int64
        Row that has each item.
    loads, tokens, counts : (rows,) int64
        Score pairs and tokens at most, and items, of each row.
    """

    def __init__(self, items: Items, rows: list[PlannedRow], budget: int) -> None:
        self.budget = budget
        self.owner = items.owner.copy()
        self.counts = np.bincount(self.owner, minlength=len(rows))
        self.loads = np.array([row.load for row in rows], np.int64)
        self.tokens = np.array([row.unique_tokens for row in rows], np.int64)
        # The last element stands for no item.
        values = (items.tokens, items.freed, items.load, items.released)
        self._values = np.pad(np.stack(values), ((0, 0), (0, 1)))
        self._known: dict[int, _Sets] = {}
        self._price = 0.0
        if (items.tokens > items.freed).any():
            self._price = PRICE * float(self.loads.sum()) / float(self.tokens.sum())

    def level(self, rows: Int64, slack: float) -> bool:
        """Exchange between rows until the heaviest is within `slack` score pairs of their mean.

        Returns whether anything was exchanged.
        """
        done = False
        for _ in range(EXCHANGES * len(rows)):
            by_load = rows[np.argsort(self.loads[rows], kind="stable")]
            heavy, mean = int(by_load[-1]), float(self.loads[rows].mean())
            if self.loads[heavy] <= mean + slack or not self._lighten(heavy, by_load[:-1], mean):
                break
            done = True
        return done

    def shift(self, row: int, target: int, others: Int64, most: Int64, slack: float) -> bool:
        """Exchange with others until the load of a row is within `slack` of `target`.

        It comes nearer from its side. Of `others`, none becomes heavier than `most`, (rows,) int64.
        Returns whether anything was exchanged.
        """
        done = False
        for _ in range(EXCHANGES):
            apart = abs(target - int(self.loads[row]))
            if apart <= slack or not self._shift_once(row, target, others, most):
                break
            done = True
        return done

    def _shift_once(self, row: int, target: int, others: Int64, most: Int64) -> bool:
        now = int(self.loads[row])
        mine, theirs = self._sets(row), self._lent(others)
        side = 1 if now < target else -1
        if side > 0:
            # A row gets heavier about its largest item.
            mine = mine.where(mine.load < max(self._values[2, mine.items].max(), 1))
        apart: npt.NDArray[Any] = (side * (target - now + mine.released))[
            :, None
        ] - side * theirs.load
        fits = apart >= 0
        fits &= mine.tokens[:, None] <= self.budget - self.tokens[theirs.row] + theirs.freed
        fits &= theirs.tokens <= (self.budget - self.tokens[row] + mine.freed)[:, None]
        fits &= mine.load[:, None] <= most[theirs.row] - self.loads[theirs.row] + theirs.released
        self._keep_one(fits, row, mine, theirs)
        if self._price:
            # Of repeated tokens, the fewer the better.
            apart = apart + (self._again(mine)[:, None] + self._again(theirs))
        score = np.where(fits, apart, NEVER)
        best = int(np.argmin(score))
        if score.flat[best] >= abs(target - now) - GAIN * target:
            return False
        at, its = np.unravel_index(best, score.shape)
        self._swap(row, mine, int(at), theirs, int(its))
        return True

    def largest(self) -> Int64:
        """Return the load of the heaviest item of each row, (rows,) int64."""
        out = np.zeros(len(self.loads), np.int64)
        np.maximum.at(out, self.owner, self._values[2, :-1])
        return out

    def _lighten(self, heavy: int, others: Int64, mean: float) -> bool:
        """Make the best exchange of the heaviest row with the first others that have one."""
        mine = self._sets(heavy)
        place = 0
        while place < len(others):
            parts = [self._sets(int(others[place]))]
            place += 1
            held = len(parts[0].size)
            while place < len(others) and held * len(mine.size) < COMPARED:
                parts.append(self._sets(int(others[place])))
                held += len(parts[-1].size)
                place += 1
            theirs = (
                parts[0]
                if len(parts) == 1
                else _Sets(*map(np.concatenate, zip(*parts, strict=True)))
            )
            again = self._again(theirs)
            mine_again = self._again(mine)
            kept = self.loads[heavy] - mine.released + mine_again
            left = self.loads[theirs.row] - theirs.released + again
            after = np.maximum(
                kept[:, None] + (theirs.load + again), (mine.load + mine_again)[:, None] + left
            )
            fits = mine.tokens[:, None] <= self.budget - self.tokens[theirs.row] + theirs.freed
            fits &= theirs.tokens <= (self.budget - self.tokens[heavy] + mine.freed)[:, None]
            self._keep_one(fits, heavy, mine, theirs)
            score = np.where(fits, after, NEVER)
            best = int(np.argmin(score))
            if score.flat[best] < self.loads[heavy] - GAIN * mean:
                at, its = np.unravel_index(best, score.shape)
                self._swap(heavy, mine, int(at), theirs, int(its))
                return True
        return False

    def _again(self, sets: _Sets) -> npt.NDArray[Any]:
        """Return the cost of tokens that sets may repeat where they go to."""
        return self._price * (sets.tokens - sets.freed)

    def _keep_one(self, fits: npt.NDArray[np.bool_], row: int, mine: _Sets, theirs: _Sets) -> None:
        """Rule out exchanges after which a row has nothing."""
        fits[np.ix_(mine.size == self.counts[row], theirs.size == 0)] = False
        fits[np.ix_(mine.size == 0, theirs.size == self.counts[theirs.row])] = False

    def _swap(self, row: int, mine: _Sets, at: int, theirs: _Sets, its: int) -> None:
        other = int(theirs.row[its])
        for one, two, a, b, sets, back in (
            (row, other, at, its, mine, theirs),
            (other, row, its, at, theirs, mine),
        ):
            given = sets.items[a]
            self.owner[given[given >= 0]] = two
            self.counts[one] += back.size[b] - sets.size[a]
            self.tokens[one] += back.tokens[b] - sets.freed[a]
            self.loads[one] += back.load[b] - sets.released[a]
            self._known.pop(one, None)

    def _sets(self, row: int) -> _Sets:
        known = self._known.get(row)
        if known is None:
            held = np.flatnonzero(self.owner == row)
            if len(held) > TRIED:
                by_load = held[np.argsort(self._values[2, held], kind="stable")]
                held = by_load[np.linspace(0, len(held) - 1, TRIED).astype(np.int64)]
            chosen = np.append(held, -1)[_choices(len(held))]
            known = self._known[row] = self._summed(chosen, np.full(len(chosen), row))
        return known

    def _lent(self, lenders: Int64) -> _Sets:
        """Return nothing, single items and pairs of them, of each row."""
        is_lender = np.zeros(len(self.loads), bool)
        is_lender[lenders] = True
        items = np.flatnonzero(is_lender[self.owner])
        if len(items) > LENT:
            items = items[np.linspace(0, len(items) - 1, LENT).astype(np.int64)]
        items = items[np.argsort(self.owner[items], kind="stable")]
        rows = self.owner[items]
        none, alone = np.full((len(lenders), 2), -1), np.full(len(items), -1)
        parts = [none, np.stack([items, alone], axis=1)]
        for apart in range(1, min(BESIDE + 1, len(items))):
            same = rows[apart:] == rows[:-apart]
            parts.append(np.stack([items[:-apart][same], items[apart:][same]], axis=1))
        chosen = np.concatenate(parts)
        return self._summed(chosen, np.append(lenders, self.owner[chosen[len(lenders) :, 0]]))

    def _summed(self, chosen: Int64, row: Int64) -> _Sets:
        sums = self._values[:, chosen].sum(axis=2)
        return _Sets(chosen, row, np.count_nonzero(chosen >= 0, axis=1), *sums)


@cache
def _choices(count: int) -> Int64:
    """Return all sets of up to three of `count` places, (n, 3); -1 for none."""
    parts = [np.full((1, 3), -1), np.full((count, 3), -1)]
    parts[1][:, 0] = np.arange(count)
    left, right = np.triu_indices(count, k=1)
    parts.append(np.stack([left, right, np.full(len(left), -1)], axis=1))
    if count <= TRIPLES:
        parts.append(np.argwhere(_ascending(count)))
    return np.concatenate(parts)


def _ascending(count: int) -> npt.NDArray[np.bool_]:
    place = np.arange(count)
    return (place[:, None, None] < place[:, None]) & (place[:, None] < place)
