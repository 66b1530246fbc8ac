"""Dealing planned rows to ranks in steps of balanced load."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ragged_format.lists import Int64

__all__ = ["PlannedRow", "deal", "grouped", "heavy_first", "score_pairs", "split_heaviest"]

# A cut may miss the even load by this share of a piece, to fall where less prefix is repeated.
SLACK = 0.05


def score_pairs(lengths: Any) -> Any:
    """Return the attention score pairs of chains from the root: the sum of depth + 1."""
    return lengths * (lengths + 1) // 2


@dataclass(frozen=True)
class PlannedRow:
    """The samples of one row, in an order in which common prefixes are adjacent.

    Attributes
    ----------
    samples : (k,) int64
        Sample numbers.
    lengths, common : (k,) int64
        Tokens of each, and how many of them it shares with the one before; ``common[0] == 0``.
    """

    samples: Int64
    lengths: Int64
    common: Int64

    @cached_property
    def first(self) -> int:
        """Lowest sample number."""
        return int(self.samples.min())

    @cached_property
    def unique_tokens(self) -> int:
        """Tokens that the row forwards."""
        return int((self.lengths - self.common).sum())

    @cached_property
    def loads(self) -> Int64:
        """Score pairs that each sample adds, (k,) int64."""
        loads: Int64 = score_pairs(self.lengths) - score_pairs(self.common)
        return loads

    @cached_property
    def load(self) -> int:
        """Attention score pairs of the row."""
        return int(self.loads.sum())

    def split(self, pieces: int) -> list[PlannedRow]:
        """Return the row in at most as many pieces as it has samples, of about equal load.

        Cuts are made where little is shared.
        """
        size = len(self.samples)
        pieces = min(pieces, size)
        ends = np.cumsum(self.loads)
        cuts = [0]
        for piece in range(1, pieces):
            wanted = ends[-1] * piece / pieces
            slack = SLACK * ends[-1] / pieces
            low = int(np.searchsorted(ends, wanted - slack)) + 1
            high = int(np.searchsorted(ends, wanted + slack, side="right")) + 1
            low = min(max(low, cuts[-1] + 1), size - (pieces - piece))
            high = min(max(high, low + 1), size - (pieces - piece) + 1)
            common = self.common[low:high]
            near = np.abs(ends[low - 1 : high - 1] - wanted)
            cuts.append(low + int(np.lexsort((near, common))[0]))
        out = []
        for first, end in pairwise([*cuts, size]):
            common = self.common[first:end].copy()
            common[0] = 0
            out.append(PlannedRow(self.samples[first:end], self.lengths[first:end], common))
        return out


def split_heaviest(rows: list[PlannedRow], count: int) -> list[PlannedRow]:
    """Split the heaviest rows until there are `count`, which must not exceed their samples."""
    pieces = [1] * len(rows)
    for _ in range(count - len(rows)):
        room = [i for i, row in enumerate(rows) if pieces[i] < len(row.samples)]
        pieces[max(room, key=lambda i: rows[i].load / pieces[i])] += 1
    return [piece for row, size in zip(rows, pieces, strict=True) for piece in row.split(size)]


def heavy_first(row: PlannedRow) -> tuple[int, int]:
    """Return the key that sorts rows by load, the heaviest first."""
    return -row.load, row.first


def grouped(rows: list[PlannedRow], ranks: int) -> tuple[list[list[PlannedRow]], list[PlannedRow]]:
    """Group rows of like load into steps of `ranks` rows.

    Returns
    -------
    steps : list of lists of `ranks` rows
        The heaviest first.
    left : list of PlannedRow
        The lightest rows, fewer than `ranks`, that make no step.
    """
    ordered = sorted(rows, key=heavy_first)
    whole = len(ordered) // ranks * ranks
    return [ordered[i : i + ranks] for i in range(0, whole, ranks)], ordered[whole:]


def deal(steps: list[list[PlannedRow]], ranks: int) -> list[list[PlannedRow]]:
    """Order steps by their first sample, and give each step's rows to ranks.

    The heaviest row of a step goes to the rank that has had the least load so far. A step that has
    fewer rows than ranks comes last, as it is.

    Returns
    -------
    list of lists of PlannedRow
        Steps; their rows by rank.
    """
    loads = [0] * ranks
    out = []
    short = [step for step in steps if len(step) < ranks]
    whole = [step for step in steps if len(step) == ranks]
    for step in sorted(whole, key=lambda step: min(row.first for row in step)):
        by_rank = sorted(range(ranks), key=lambda rank: (loads[rank], rank))
        placed = dict(zip(by_rank, sorted(step, key=heavy_first), strict=True))
        for rank, row in placed.items():
            loads[rank] += row.load
        out.append([placed[rank] for rank in range(ranks)])
    return out + short
