"""Histograms of tallies: bins that a reader finds natural."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ragged_pipeline.reports.tally import Tally

__all__ = ["histogram"]

_FEW = 24
_DISTINCT = 12
# From this ratio of a high to a low quantile on, bins double.
_WIDE = 16


def histogram(tally: Tally) -> list[dict[str, Any]]:
    """Return bins as ``{"low", "high", "count"}``, together all numbers of a tally.

    Whole numbers: both ends belong to a bin; one bin per number where there are few, powers of two
    (0, 1, 2, 3-4, 5-8, …) where they spread widely, else of equal width. Other numbers: one bin per
    number where there are few different ones (``low == high``), else bins of equal width, of which
    the upper end belongs to the next; far outliers are in the first and last bin.

    Examples
    --------
    >>> import numpy as np
    >>> from ragged_pipeline.reports.tally import Tally
    >>> tally = Tally()
    >>> tally.add(np.array([0, 1, 3, 4, 90]))
    >>> [(b["low"], b["high"], b["count"]) for b in histogram(tally)][:4]
    [(0, 0, 1), (1, 1, 1), (2, 2, 0), (3, 4, 2)]
    """
    if not tally.count:
        return []
    ends = _whole(tally) if tally.is_integer else _broken(tally)
    return [
        {"low": low, "high": high, "count": count}
        for low, high, count in ends
    ]  # fmt: skip


def _whole(tally: Tally) -> Iterator[tuple[int, int, int]]:
    low, high = int(tally.low or 0), int(tally.high or 0)
    if high - low < _FEW:
        bins = [(number, number) for number in range(low, high + 1)]
    elif low >= 0 and (tally.quantile(0.99) or 0) >= _WIDE * max(tally.quantile(0.05) or 0, 1):
        bins = [b for b in _doubling(high) if b[1] >= low]
    else:
        step = max(1, int(nice((high - low) / _FEW)))
        start = low // step * step
        bins = [(edge, edge + step - 1) for edge in range(start, high + 1, step)]
    return ((a, b, tally.between(a, b)) for a, b in bins)


def _doubling(high: int) -> Iterator[tuple[int, int]]:
    low, end = 0, 0
    while low <= high:
        yield low, end
        low, end = end + 1, max(1, 2 * end)


def _broken(tally: Tally) -> Iterator[tuple[float, float, int]]:
    values = tally.values
    low, high = float(tally.low or 0.0), float(tally.high or 0.0)
    if len(values) <= _DISTINCT:
        yield from ((v, v, int(n)) for v, n in zip(values.tolist(), tally.often, strict=True))
        return
    inner_low, inner_high = float(tally.quantile(0.01) or 0), float(tally.quantile(0.99) or 0)
    if inner_high <= inner_low or high - low <= 3 * (inner_high - inner_low):
        inner_low, inner_high = low, high
    step = nice((inner_high - inner_low) / _FEW)
    first, last = math.floor(inner_low / step), max(math.ceil(inner_high / step), 1)
    edges = [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]
    for number, (start, end) in enumerate(pairwise(edges)):
        is_last = number == len(edges) - 2
        below = low if number == 0 else start
        above = high if is_last else math.nextafter(end, -math.inf)
        yield min(below, start), max(end, above), tally.between(below, above)


def nice(step: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is not below `step`."""
    power = 10.0 ** math.floor(math.log10(step)) if step > 0 else 1.0
    return next((m * power for m in (1, 2, 5, 10) if m * power >= step * (1 - 1e-9)), step)
