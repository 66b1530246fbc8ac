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
    slices : list of slice
        Of the run's view.
    sizes : list of int
        Elements of each run.
    total : int
    """

    slices: list[slice]
    sizes: list[int]
    total: int


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
        spans.append(Span(list(map(slice, los, his)), sizes, sum(sizes)))
    lengths = [
        spans[part.space].total if part.over < 0 else spans[part.over].total + 1
        for part in plan.parts
    ]
    return Measured(runs, spans[0].total, spans, plan.layout(lengths))


def write(plan: Plan, measured: Measured, memory: npt.NDArray[np.uint8]) -> None:
    """Copy every part to its place in `memory`, which has at least ``layout.nbytes`` bytes."""
    runs, num_rows, spans, layout = measured
    if not runs.views:
        memory[: layout.nbytes] = 0
        return
    single = num_rows == len(runs.views)
    by_part = zip(*[view.arrays for view in runs.views], strict=True)
    for part, start, length, sources in zip(
        plan.parts, layout.starts, layout.lengths, by_part, strict=False
    ):
        out = memory[start : start + length * part.width * part.itemsize]
        slices, sizes, _ = spans[part.space]
        if part.over < 0:
            if part.width > 1:
                slices = [slice(s.start * part.width, s.stop * part.width) for s in slices]
            pieces = list(map(getitem, sources, slices))
            np.concatenate(pieces, out=out.view(sources[0].dtype))
        elif single and part.over == 0:
            out.view(np.int64)[:] = list(accumulate(sizes, initial=0))
        else:
            _rebase(sources, spans[part.over], spans[part.space], out.view(np.int64))


def _rebase(sources: tuple[Array, ...], over: Span, into: Span, out: Array) -> None:
    """Write the offsets of joined runs: each run's own, moved to where the run begins."""
    pieces = [
        source[s.start + 1 : s.stop + 1] for source, s in zip(sources, over.slices, strict=True)
    ]
    out[0] = 0
    np.concatenate(pieces, out=out[1:])
    begins = accumulate(into.sizes[:-1], initial=0)
    shifts = [begin - s.start for begin, s in zip(begins, into.slices, strict=True)]
    out[1:] += shifts[0] if len(shifts) == 1 else np.repeat(shifts, over.sizes)
