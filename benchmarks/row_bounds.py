"""What no plan can do better: lower bounds of the number of rows, and of their imbalance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ragged_format.packing import plan_rows
from ragged_format.packing.deal import score_pairs

if TYPE_CHECKING:
    import pyarrow as pa

    from ragged_format.lists import Int64

__all__ = ["bins_bound", "imbalance_bound", "rows_bound", "tree_imbalance_bound"]


def rows_bound(samples: pa.RecordBatch, lengths: Int64, budget: int, packing: str) -> int:
    """Return a number of rows that no plan undercuts.

    In a tree plan no prefix may be repeated but for the one that all samples share.

    Parameters
    ----------
    samples : pyarrow.RecordBatch
    lengths : (n,) int64
        Tokens of each.
    budget : int
    packing : {"tree", "sequence"}
    """
    if packing == "sequence":
        return bins_bound(lengths[lengths <= budget], budget)
    whole = plan_rows(samples, int(lengths.sum()) + 1)
    total = int(whole.unique_tokens.sum())
    groups = samples.column("group_id").to_pylist() if "group_id" in samples.schema.names else []
    if not groups or None in groups:
        return -(-total // budget)
    order: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        order.setdefault(group, []).append(row)
    sizes = [
        int(plan_rows(samples.take(members), int(lengths.sum()) + 1).unique_tokens.sum())
        for members in order.values()
    ]
    # Groups share nothing if their tokens add up, and each is one item if it fits into a row.
    if sum(sizes) != total or max(sizes) > budget:
        return -(-total // budget)
    return bins_bound(np.array(sizes, np.int64), budget)


def bins_bound(sizes: Int64, budget: int) -> int:
    """Return a number of bins that items need: Martello and Toth's bound L2, and by count.

    Examples
    --------
    >>> bins_bound(np.array([6, 6, 6, 4]), 10), bins_bound(np.array([4, 4, 4, 4, 4]), 10)
    (3, 3)
    """
    best = -(-int(sizes.sum()) // budget)
    half = budget / 2
    for least in np.unique(np.append(sizes[sizes <= half], 0)).tolist():
        alone = int(np.count_nonzero(sizes > budget - least))
        large = sizes[(sizes > half) & (sizes <= budget - least)]
        small = int(sizes[(sizes >= least) & (sizes <= half)].sum())
        room = len(large) * budget - int(large.sum())
        best = max(best, alone + len(large) + max(0, -(-(small - room) // budget)))
    # The n largest items are at most so many a bin as the n-th of them fits into one.
    ordered = np.sort(sizes[sizes > 0])[::-1]
    needed = -(-np.arange(1, len(ordered) + 1) // np.maximum(budget // ordered, 1))
    return max(best, int(needed.max(initial=0)))


def imbalance_bound(lengths: Int64, budget: int, ranks: int) -> float:
    """Return an imbalance that no plan of whole samples undercuts.

    Samples longer than half the budget have a row each, so that of the k slowest steps the time is
    at least the sum of the loads of the 1st, (ranks + 1)-th, … longest. These steps hold at most
    what fits into them of the longest samples; and at most, for each row, its longest sample and
    one of all tokens that remain. The rest takes its share of time elsewhere.

    Examples
    --------
    >>> imbalance_bound(np.array([100, 10, 10, 10]), 100, 2) > 1.9
    True
    """
    longest = np.sort(lengths[lengths <= budget])[::-1]
    loads = score_pairs(longest)
    total = float(loads.sum())
    tokens, load = np.cumsum(longest), np.cumsum(loads)
    is_large = longest > budget / 2
    large = loads[is_large]
    filled = large + score_pairs(budget - longest[is_large])
    without = 2.0 * score_pairs(-(-budget // 2))  # a row of samples of at most half the budget
    best, held = total / ranks, 0.0
    for step in range(-(-len(large) // ranks)):
        held += float(large[step * ranks])
        room = (step + 1) * ranks * budget
        whole = int(np.searchsorted(tokens, room, side="right"))
        most = float(load[whole - 1]) if whole else 0.0
        if whole < len(longest):
            left = room - (int(tokens[whole - 1]) if whole else 0)
            most += float(loads[whole]) * left / int(longest[whole])
        rows = (step + 1) * ranks
        first = filled[:rows]
        most = min(most, float(first.sum()) + max(rows - len(first), 0) * without)
        best = max(best, held + max(total - most, 0.0) / ranks)
    return best * ranks / total if total else 1.0


def tree_imbalance_bound(
    lengths: Int64, unique_tokens: int, unique_load: int, budget: int, ranks: int
) -> float:
    """Return an imbalance that no plan undercuts whose rows store common prefixes once.

    Let all samples save `saved` tokens and `lighter` score pairs if they are one row; those of any
    row save no more, nor do all rows together. So the rows of a tree plan, with every prefix stored
    as often as it occurs, are a plan of whole samples with a budget larger by `saved`, of which the
    steps take at most `lighter` more time in all. The load of the tree plan is at most that of
    whole samples, and its imbalance at least their bound less ``lighter * ranks / load``.

    Parameters
    ----------
    lengths : (n,) int64
        Tokens of each sample.
    unique_tokens, unique_load : int
        Of one row of all samples that fit into the budget.
    budget, ranks : int

    Examples
    --------
    >>> lengths = np.array([100, 10, 10, 10])
    >>> tree_imbalance_bound(lengths, 130, int(score_pairs(lengths).sum()), 100, 2) > 1.9
    True
    """
    fitting = lengths[lengths <= budget]
    load = int(score_pairs(fitting).sum())
    if not load:
        return 1.0
    saved, lighter = int(fitting.sum()) - unique_tokens, load - unique_load
    return max(1.0, imbalance_bound(fitting, budget + saved, ranks) - lighter * ranks / load)
