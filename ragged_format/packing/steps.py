"""Steps of even load: rows of one step wait for the heaviest of them.

Rows of one step are alike already (see :mod:`ragged_format.packing.deal`), and exchange items until
they are even. An item is what a row holds of one cluster, so that only short prefixes are stored
more often than before. Where that does not suffice, the heaviest row gives load to rows of other
steps that do not get slower by it, and the lighter rows are lifted: they take load from the steps
after it, which thereby get lighter as a whole; those of the last steps from the steps before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ragged_format.packing.deal import PlannedRow
from ragged_format.packing.exchange import Trade
from ragged_format.packing.items import WindowOf, items_of, rows_of

if TYPE_CHECKING:
    from ragged_format.lists import Int64

__all__ = ["even_steps", "level_step", "slowest"]

# A step whose heaviest row is within this share of its mean is level.
LEVEL = 0.01
# A step is even if its heaviest row is beyond its mean by this share of a mean row of all steps.
EVEN = 0.001
# A prefix of at most this share of a mean sample may be stored twice; and, where a step would else
# stay uneven, of this.
SHORT, LONGER = 1 / 16, 1 / 4
# Clusters are parted where a step costs more than this share of all time.
PARTED = 0.001
# Rows of the steps that exchange items with each other.
BLOCK = 512
# Steps before and after one with whose rows it exchanges; with all that follow, where it costs more
# than this share of all time.
LENDERS, COSTLY = 2, 0.0001

Step = list[PlannedRow]


def level_step(rows: Step, window: WindowOf, budget: int) -> Step:
    """Return rows of the same samples in which the heaviest is lighter, where that is found.

    Parameters
    ----------
    rows : list of PlannedRow
        The rows of one step.
    window : WindowOf
    budget : int
        Largest number of unique tokens of a row.
    """
    mean = sum(row.load for row in rows) / len(rows)
    if slowest(rows) <= (1 + LEVEL) * mean or sum(len(row.samples) for row in rows) == len(rows):
        return rows
    items = items_of(rows, window, SHORT)
    trade = Trade(items, rows, budget)
    trade.level(np.arange(len(rows)), LEVEL * mean)
    after = rows_of(items, trade.owner, len(rows))
    return after if _keeps(after, budget) and slowest(after) < slowest(rows) else rows


def even_steps(steps: list[Step], window: WindowOf, budget: int) -> list[Step]:
    """Return steps of the same samples that take less time in all, where that is found.

    Parameters
    ----------
    steps : list of lists of PlannedRow
        The heaviest first, all of as many rows.
    window, budget
        As for :func:`level_step`.
    """
    if not steps:
        return []
    mean = sum(row.load for step in steps for row in step) / sum(map(len, steps))
    size = max(BLOCK // len(steps[0]), 2)
    out: list[Step] = []
    for first in range(0, len(steps), size):
        out += _even_block(steps[first : first + size], window, budget, mean)
    return [
        _parted(step, window, budget) if _excess(step) > PARTED * mean * len(steps) else step
        for step in out
    ]


def slowest(step: Step) -> int:
    """Return the load of a step's heaviest row."""
    return max(row.load for row in step)


def _even_block(steps: list[Step], window: WindowOf, budget: int, mean: float) -> list[Step]:
    slack = EVEN * mean
    rows = [row for step in steps for row in step]
    if all(_excess(step) <= slack for step in steps) or len(rows) == sum(
        len(row.samples) for row in rows
    ):
        return steps
    items = items_of(rows, window, SHORT)
    trade = Trade(items, rows, budget)
    ranks = len(steps[0])
    costly = COSTLY * float(trade.loads.sum()) / ranks
    done: list[Int64] = []
    most = np.full(len(rows), np.iinfo(np.int64).max)
    rest = np.arange(len(rows))
    while len(rest):
        rest = _heaviest_first(rest, trade.loads)
        most[rest] = np.repeat(trade.loads[rest[::ranks]], ranks)
        step, rest = rest[:ranks], rest[ranks:]
        if done:
            trade.level(step, slack)
        else:
            _lighten(trade, step, rest[: LENDERS * ranks], most, slack)
        if len(rest) and trade.largest()[step].max() - trade.loads[step].mean() > costly:
            # Rows of long samples can be made as heavy as none without.
            rest = _heaviest_first(np.concatenate([step, rest]), trade.largest())
            step, rest = rest[:ranks], rest[ranks:]
        _lift(trade, step, rest[: LENDERS * ranks], most, slack, slack)
        _lift(trade, step, rest, most, slack, costly)
        most[step] = trade.loads[step].max()
        done.append(step)
    # The last steps have none to take load from but those before, which can then be made lighter.
    for number in range(len(done) - 1, -1, -1):
        step, after = done[number], done[number + 1 : number + 1 + LENDERS]
        before = np.concatenate([step[:0], *done[max(number - LENDERS, 0) : number]])
        _lighten(trade, step, np.concatenate([before, *after]), most, slack)
        _lift(trade, step, before, most, slack, slack)
        most[step] = trade.loads[step].max()
    made = rows_of(items, trade.owner, len(rows))
    dealt = [[made[row] for row in step.tolist()] for step in done]
    better = _keeps(made, budget) and sum(map(slowest, dealt)) < sum(map(slowest, steps))
    return dealt if better else steps


def _heaviest_first(rows: Int64, loads: Int64) -> Int64:
    return rows[np.argsort(-loads[rows], kind="stable")]


def _lighten(trade: Trade, step: Int64, near: Int64, most: Int64, slack: float) -> None:
    """Exchange within a step; where that does not help, with rows near it that are not slowest."""
    for _ in range(2 * len(step)):
        trade.level(step, slack)
        loads = trade.loads[step]
        mean = float(loads.mean())
        if loads.max() <= mean + slack or not len(near):
            return
        if not trade.shift(int(step[np.argmax(loads)]), int(mean), near, most, slack):
            return


def _lift(
    trade: Trade, step: Int64, lenders: Int64, most: Int64, slack: float, least: float
) -> None:
    """Let all rows of a step but the heaviest take load from lenders, if it is uneven."""
    loads = trade.loads[step]
    if len(lenders) and loads.max() - loads.mean() > least:
        for row in step[np.argsort(loads, kind="stable")][:-1].tolist():
            trade.shift(row, int(loads.max()), lenders, most, slack)


def _parted(step: Step, window: WindowOf, budget: int) -> Step:
    """Return a step whose clusters are parted for balance, where time gained outweighs tokens."""
    items = items_of(step, window, LONGER)
    trade = Trade(items, step, budget)
    trade.level(np.arange(len(step)), LEVEL * float(trade.loads.mean()))
    after = rows_of(items, trade.owner, len(step))
    more = sum(row.unique_tokens for row in after) / sum(row.unique_tokens for row in step)
    return after if _keeps(after, budget) and slowest(after) * more < slowest(step) else step


def _excess(step: Step) -> float:
    return slowest(step) - sum(row.load for row in step) / len(step)


def _keeps(rows: Step, budget: int) -> bool:
    return all(row.unique_tokens <= budget for row in rows)
