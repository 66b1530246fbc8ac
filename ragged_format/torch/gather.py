"""Copy runs of records from views into one arena.

The loops here run over runs and columns, and what they do per run is the cost of a shuffled epoch
of small samples; hence slices that are made once per axis and C-level maps over them.
"""

from __future__ import annotations

from itertools import accumulate
from operator import getitem, sub
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ragged_format.torch.plan import Layout, Plan
    from ragged_format.torch.views import Array, View

__all__ = ["Measured", "Runs", "measure", "whole", "write"]


class Runs(NamedTuple):
    """Runs of consecutive records; run i is the records ``[firsts[i], lasts[i])`` of views[i]."""

    views: list[View]
    firsts: list[int]
    lasts: list[int]


class Span(NamedTuple):
    """The elements of each run in one space.

    Attributes
    ----------
    los, his : list of int
        First element in the run's view, and the one after the last.
    sizes : list of int
        Elements of each run.
    total : int
    """

    los: list[int]
    his: list[int]
    sizes: list[int]
    total: int

    def slices(self, unit: int) -> list[slice]:
        """Return where the runs' elements lie in their views, in bytes of `unit` each."""
        if unit == 1:
            return list(map(slice, self.los, self.his))
        return [slice(lo * unit, hi * unit) for lo, hi in zip(self.los, self.his, strict=True)]


class Measured(NamedTuple):
    """Sizes of a batch, known before its memory is acquired.

    Attributes
    ----------
    runs : Runs
    num_rows : int
        Records in all runs.
    spans : list of Span
        For each space of the plan.
    layout : Layout
    """

    runs: Runs
    num_rows: int
    spans: list[Span]
    layout: Layout


def whole(views: list[View]) -> Runs:
    """Return the runs that join views end to end."""
    return Runs(views, [0] * len(views), [view.num_rows for view in views])


def measure(plan: Plan, runs: Runs) -> Measured:
    """Return the sizes of the batch that joins these runs; reads offsets only."""
    views, firsts, lasts = runs
    spans = []
    by_space = zip(*[view.marks for view in views], strict=True) if views else [()] * len(
        plan.spaces
    )  # fmt: skip
    for marks in by_space:
        los = list(map(getitem, marks, firsts))
        his = list(map(getitem, marks, lasts))
        sizes = list(map(sub, his, los))
        spans.append(Span(los, his, sizes, sum(sizes)))
    lengths = [
        spans[part.space].total if part.over < 0 else spans[part.over].total + 1
        for part in plan.parts
    ]
    return Measured(runs, spans[0].total, spans, plan.layout(lengths))


def write(plan: Plan, measured: Measured, memory: npt.NDArray[np.uint8]) -> None:
    """Copy every part to its place in `memory`, which has at least ``layout.nbytes`` bytes."""
    (views, _, _), _, spans, (starts, lengths) = measured
    if not views:
        memory[: starts[-1]] = 0
        return
    number = len(views)
    single = spans[0].sizes.count(1) == number
    sliced: dict[tuple[int, int], list[slice]] = {}
    by_part = zip(*[view.arrays for view in views], strict=True)
    for part, start, length, sources in zip(plan.parts, starts, lengths, by_part, strict=False):
        space, unit = part.space, part.nbytes
        out = memory[start : start + length * unit]
        if part.over >= 0:
            offsets = out.view(np.int64)
            if single and part.over == 0:
                offsets[:] = list(accumulate(spans[space].sizes, initial=0))
            else:
                _rebase(sources, spans[part.over], spans[space], offsets)
            continue
        slices = sliced.get((space, unit))
        if slices is None:
            slices = sliced[space, unit] = spans[space].slices(unit)
        if number == 1:
            out[:] = sources[0][slices[0]]
        else:
            np.concatenate(list(map(getitem, sources, slices)), out=out)


def _rebase(sources: tuple[Array, ...], over: Span, into: Span, out: Array) -> None:
    """Write the offsets of joined runs: each run's own, moved to where the run begins."""
    out[0] = 0
    at, base = 1, 0
    for source, lo, size, begin, inner in zip(
        sources, over.los, over.sizes, into.los, into.sizes, strict=True
    ):
        np.subtract(source[lo + 1 : lo + 1 + size], begin - base, out=out[at : at + size])
        at += size
        base += inner
