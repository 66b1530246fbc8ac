"""How much probability the heads of targets hold."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ragged_format.lists import offsets_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from ragged_format.lists import Int64

__all__ = ["Mass"]

# Probabilities are summed as integers, so that no order of summing changes a figure.
_SCALE = 1 << 32
# float32 log-probs leave errors of this size; a mass above one by more is counted.
_SLACK = 1e-4
TAIL_EDGES = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.05, 0.1, 0.2, 0.5, 1.0)
# Elements looked at together.
_PART = 1 << 19
_STEPS = 32
_HUGE = float(1 << 20)
_TAIL_UNITS = np.array([int(edge * _SCALE) for edge in TAIL_EDGES], np.int64)


class Mass:
    """Probability in the heads of one axis, targets without a head left out.

    Parameters
    ----------
    normalizer : {"support", "vocabulary"}
        Over what the probabilities sum to one.
    in_order : bool
        Whether the likeliest ids come first, so that a shorter head is a prefix.
    """

    def __init__(self, normalizer: str, *, in_order: bool) -> None:
        self.normalizer = normalizer
        self.in_order = in_order
        self.heads = 0
        self.above_one = 0
        self.not_finite = 0
        self.tails = np.zeros(len(TAIL_EDGES) - 1, np.int64)
        # Sum over heads of the mass in the first 1, 2, 4, 8, … ids, in units of 1 / _SCALE.
        self.first = [0] * _STEPS
        self.total = 0
        self.widest = 0

    def add(self, log_probs: npt.NDArray[Any], counts: npt.NDArray[Any]) -> None:
        """Add the log-probs of all heads end to end, and the size of each."""
        offsets = offsets_of(counts[counts > 0].astype(np.int64))
        start = 0
        while start < len(offsets) - 1:
            # At least one head, however wide.
            end = int(np.searchsorted(offsets, offsets[start] + _PART, side="right")) - 1
            end = max(end, start + 1)
            self._add(log_probs[offsets[start] : offsets[end]], offsets[start : end + 1])
            start = end

    def _add(self, log_probs: npt.NDArray[Any], offsets: Int64) -> None:
        chances = log_probs.astype(np.float64)
        with np.errstate(over="ignore"):
            np.exp(chances, out=chances)
        # NaN fails every comparison; no chance is that large.
        if not float(chances.max(initial=0.0)) < _HUGE:
            odd = ~(chances < _HUGE)
            self.not_finite += int(odd.sum())
            chances[odd] = 0.0
        chances *= _SCALE
        np.rint(chances, out=chances)
        units = offsets_of(chances.astype(np.int64))
        starts, ends = offsets[:-1] - offsets[0], offsets[1:] - offsets[0]
        sums = units[ends] - units[starts]
        self.heads += len(sums)
        self.total += int(sums.sum())
        self.above_one += int((sums > _SCALE * (1 + _SLACK)).sum())
        bins = np.searchsorted(_TAIL_UNITS, np.maximum(_SCALE - sums, 0), side="right") - 1
        bins = np.minimum(bins, len(self.tails) - 1)
        self.tails += np.bincount(bins, minlength=len(self.tails))
        if self.in_order:
            self._add_first(units, starts, ends - starts, sums)
        self.widest = max(self.widest, int((ends - starts).max()))

    def _add_first(self, units: Int64, starts: Int64, sizes: Int64, sums: Int64) -> None:
        """Add the mass of the first 1, 2, 4, … ids; heads drop out once they are whole."""
        whole = 0
        for step in range(_STEPS):
            is_whole = sizes <= 1 << step
            whole += int(sums[is_whole].sum())
            starts, sizes, sums = (part[~is_whole] for part in (starts, sizes, sums))
            self.first[step] += whole + int((units[starts + (1 << step)] - units[starts]).sum())
            if not len(starts):
                for rest in range(step + 1, _STEPS):
                    self.first[rest] += whole
                return

    def merge(self, other: Mass) -> None:
        """Add another part of the data."""
        self.heads += other.heads
        self.above_one += other.above_one
        self.not_finite += other.not_finite
        self.tails += other.tails
        self.first = [a + b for a, b in zip(self.first, other.first, strict=True)]
        self.total += other.total
        self.widest = max(self.widest, other.widest)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        unit = self.heads * _SCALE
        curve = []
        if self.in_order and self.heads:
            steps = max(1, (self.widest - 1).bit_length() + 1) if self.widest else 0
            curve = [
                {"k": min(1 << step, self.widest), "mass": self.first[step] / unit}
                for step in range(min(steps, _STEPS))
            ]
        return {
            "heads": self.heads, "normalizer": self.normalizer,
            "mean": self.total / unit if unit else None,
            "mean_tail": 1.0 - self.total / unit if unit else None,
            "above_one": self.above_one, "not_finite": self.not_finite,
            "top": curve,
            "tail_histogram": [
                {"low": low, "high": high, "count": count}
                for (low, high), count in zip(
                    pairwise(TAIL_EDGES), self.tails.tolist(), strict=True
                )
            ],
        }  # fmt: skip
