"""Copy runs of records from views into one arena.

The loops here run over runs and columns, and what they do per run is the cost of a shuffled epoch
of small samples; hence slices that are made once per axis and C-level maps over them.
"""

from __future__ import annotations

from itertools import accumulate
from operator import getitem, sub
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ragged_format.torch.arena import ALIGNMENT

if TYPE_CHECKING:
    from ragged_format.lists import Int64
    from ragged_format.torch.plan import Layout, Plan
    from ragged_format.torch.views import Array, View

Bytes: TypeAlias = npt.NDArray[np.uint8]

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


# Bytes up to which joining pieces first, a further copy in the cache, costs less than an array for
# each piece.
_SMALL_PIECE = 2048
_SMALL_PART = 1 << 15


def whole(views: list[View]) -> Runs:
    """Return the runs that join views end to end."""
    return Runs(views, [0] * len(views), [view.num_rows for view in views])


def measure(plan: Plan, runs: Runs) -> Measured:
    """Return the sizes of the batch that joins these runs; reads offsets only."""
    views, firsts, lasts = runs
    if len(views) == 1:
        first, last = firsts[0], lasts[0]
        ends = [(marks[first], marks[last]) for marks in views[0].marks]
        spans = [Span([lo], [hi], [hi - lo], hi - lo) for lo, hi in ends]
    elif views:
        spans = []
        for marks in zip(*[view.marks for view in views], strict=True):
            los = list(map(getitem, marks, firsts))
            his = list(map(getitem, marks, lasts))
            sizes = list(map(sub, his, los))
            spans.append(Span(los, his, sizes, sum(sizes)))
    else:
        spans = [Span([], [], [], 0)] * len(plan.spaces)
    lengths = [
        spans[space].total if over < 0 else spans[over].total + 1 for space, _, over in plan.moves
    ]
    return Measured(runs, spans[0].total, spans, plan.layout(lengths))


def write(plan: Plan, measured: Measured, memory: Bytes) -> None:
    """Copy every part to its place in `memory`, which has at least ``layout.nbytes`` bytes."""
    starts = measured.layout.starts
    number = len(measured.runs.views)
    if number == 0:
        memory[: starts[-1]] = 0
        return
    if number == 1:
        _write_one(plan, measured, memory)
        return
    # One call copies all parts and the gaps between them.
    np.concatenate(_of_many(plan, measured), out=memory[: starts[-1]])


_ZEROS = bytes(ALIGNMENT)
_GAPS = [np.zeros(size, np.uint8) for size in range(ALIGNMENT)]


def _write_one(plan: Plan, measured: Measured, memory: Bytes) -> None:
    """Copy every part where all records are one run.

    Large parts one by one, so that each is copied past the caches, and from the end, where what
    verification has just read is still in a cache; small ones and gaps are joined first.
    """
    ((view,), _, _), _, spans, (starts, _) = measured
    bounds = [(los[0], his[0]) for los, his, _, _ in spans]
    end = stop = starts[-1]
    small: list[Any] = []
    for number in range(len(plan.moves) - 1, -1, -1):
        space, unit, over = plan.moves[number]
        start = starts[number]
        lo, hi = bounds[space]
        if over >= 0:
            first, last = bounds[over]
            offsets = np.subtract(view.arrays[number][first : last + 1], lo, dtype=np.int64)
            size = (last + 1 - first) * unit
            small.append(_ZEROS[: stop - start - size])
            small.append(offsets.view(np.uint8))
        else:
            size = (hi - lo) * unit
            small.append(_ZEROS[: stop - start - size])
            if size < _SMALL_PART:
                small.append(view.buffers[number][lo * unit : hi * unit])
            else:
                _flush(memory, small, end)
                end = start
                memory[start : start + size] = view.arrays[number][lo * unit : hi * unit]
        stop = start
    _flush(memory, small, end)


def _flush(memory: Bytes, small: list[Any], end: int) -> None:
    """Write parts that were collected from the end, so that they end at `end`."""
    joined = b"".join(reversed(small))
    small.clear()
    memory[end - len(joined) : end] = np.frombuffer(joined, np.uint8)


def _of_many(plan: Plan, measured: Measured) -> list[Bytes]:
    """Return the content of the arena where the records are several runs."""
    (views, _, _), _, spans, (starts, lengths) = measured
    single = spans[0].sizes.count(1) == len(views)
    sliced: dict[tuple[int, int], list[slice]] = {}
    by_part = zip(*[view.arrays for view in views], strict=True)
    as_buffers = list(zip(*[view.buffers for view in views], strict=True))
    pieces: list[Bytes] = []
    at = 0
    for (space, unit, over), start, length, sources, buffers in zip(
        plan.moves, starts, lengths, by_part, as_buffers, strict=False
    ):
        if at < start:
            pieces.append(_GAPS[start - at])
        at = start + length * unit
        if over < 0:
            slices = sliced.get((space, unit))
            if slices is None:
                slices = sliced[space, unit] = spans[space].slices(unit)
            if length * unit < _SMALL_PIECE * len(views):
                small = b"".join(map(getitem, buffers, slices))
                pieces.append(np.frombuffer(small, np.uint8))
            else:
                pieces.extend(map(getitem, sources, slices))
        elif single and over == 0:
            offsets = np.array(list(accumulate(spans[space].sizes, initial=0)), np.int64)
            pieces.append(offsets.view(np.uint8))
        else:
            pieces.append(_rebased(sources, spans[over], spans[space]).view(np.uint8))
    if at < starts[-1]:
        pieces.append(_GAPS[starts[-1] - at])
    return pieces


def _rebased(sources: tuple[Array, ...], over: Span, into: Span) -> Int64:
    """Return the offsets of joined runs: each run's own, moved to where the run begins."""
    out = np.zeros(over.total + 1, np.int64)
    at, base = 1, 0
    for source, lo, size, begin, inner in zip(
        sources, over.los, over.sizes, into.los, into.sizes, strict=True
    ):
        np.subtract(source[lo + 1 : lo + 1 + size], begin - base, out=out[at : at + size])
        at += size
        base += inner
    return out
