"""What rows hold of each prefix cluster: the items that they exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ragged_format.lists import Int64, offsets_of
from ragged_format.packing.bins import Window
from ragged_format.packing.deal import PlannedRow, score_pairs

__all__ = ["Items", "WindowOf", "items_of", "rows_of"]

# Takes sample numbers, ascending, and returns them in prefix order with their window.
WindowOf = Callable[[Int64], tuple[Int64, Window]]


@dataclass(frozen=True, slots=True)
class Items:
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
    load, released : (k,) int64
        Score pairs that it brings at most, and those that a row without it has less at least.
    """

    order: Int64
    window: Window
    item: Int64
    owner: Int64
    tokens: Int64
    freed: Int64
    load: Int64
    released: Int64


def items_of(rows: list[PlannedRow], window: WindowOf, short: float) -> Items:
    """Return the items of rows.

    Parameters
    ----------
    rows : list of PlannedRow
    window : WindowOf
    short : float
        Samples are of one cluster if they share more than this share of a mean sample, besides the
        prefix that all samples of all rows share.
    """
    samples = np.concatenate([row.samples for row in rows])
    holder = np.repeat(np.arange(len(rows)), [len(row.samples) for row in rows])
    ascending = np.argsort(samples)
    order, place = window(samples[ascending])
    holder = holder[ascending][np.searchsorted(samples[ascending], order)]
    own = place.shared <= place.base + int(short * place.lengths.mean())
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
    beside = np.maximum(edges[:-1], edges[1:])[cluster[by_item[starts]] - 1]
    tokens = np.add.reduceat(lengths - common, starts)
    load = np.add.reduceat(score_pairs(lengths) - score_pairs(common), starts)
    return Items(
        order, place, item,
        owner=holder[by_item[starts]],
        tokens=tokens,
        freed=tokens - (beside - place.base),
        load=load,
        released=load - (score_pairs(beside) - score_pairs(place.base)),
    )  # fmt: skip


def rows_of(items: Items, owner: Int64, count: int) -> list[PlannedRow]:
    """Return the rows of items whose rows are `owner`."""
    holder = owner[items.item]
    places = np.argsort(holder, kind="stable")
    common = np.zeros(len(places), np.int64)
    common[1:] = items.window.common(places[:-1], places[1:])
    bounds = offsets_of(np.bincount(holder, minlength=count))
    common[bounds[:-1]] = 0
    samples, lengths = items.order[places], items.window.lengths[places]
    parts = [slice(*pair) for pair in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
    return [PlannedRow(samples[part], lengths[part], common[part]) for part in parts]
