"""Distribution of the counts that open an axis: exact quantiles, and a histogram by powers of two.

The bins are the widths of the power-of-two buckets in which sets are padded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from ragged_format.cli.output import format_count

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Counts", "histogram_table"]

_BAR = 36
_BLOCKS = " ▏▎▍▌▋▊▉█"


@dataclass
class Counts:
    """Counts seen so far, kept as one number per distinct count.

    Examples
    --------
    >>> counts = Counts()
    >>> counts.add(np.array([0, 1, 3, 4, 9]))
    >>> counts.total, counts.max, counts.median
    (17, 9, 3)
    >>> counts.bins()
    [(0, 0, 1), (1, 1, 1), (2, 2, 0), (3, 4, 2), (5, 8, 0), (9, 16, 1)]
    """

    values: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    often: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def add(self, counts: npt.NDArray[Any]) -> None:
        """Add counts, (m,) of any integer type."""
        values, often = np.unique(counts.astype(np.int64), return_counts=True)
        merged = np.concatenate([self.values, values])
        weights = np.concatenate([self.often, often])
        self.values, place = np.unique(merged, return_inverse=True)
        self.often = np.zeros(len(self.values), np.int64)
        np.add.at(self.often, place, weights)

    @property
    def elements(self) -> int:
        """Number of counts."""
        return int(self.often.sum())

    @property
    def total(self) -> int:
        """Sum of the counts."""
        return int(self.values @ self.often)

    @property
    def mean(self) -> float:
        """Mean count, 0 where there is none."""
        return self.total / max(self.elements, 1)

    @property
    def max(self) -> int:
        """Largest count, 0 where there is none."""
        return int(self.values[-1]) if len(self.values) else 0

    @property
    def median(self) -> int:
        """Lower median."""
        return self.quantile(0.5)

    def quantile(self, share: float) -> int:
        """Return the smallest count that at least this share of the counts does not exceed."""
        if not len(self.values):
            return 0
        reached = np.cumsum(self.often)
        return int(self.values[np.searchsorted(reached, share * reached[-1])])

    def bins(self) -> list[tuple[int, int, int]]:
        """Return (lowest, highest, how many) for 0, 1, 2, 3-4, 5-8, … up to the largest count."""
        if not len(self.values):
            return []
        out = []
        low, high = 0, 0
        while low <= self.max:
            inside = (self.values >= low) & (self.values <= high)
            out.append((low, high, int(self.often[inside].sum())))
            low, high = high + 1, max(1, high * 2)
        return out if out[0][2] else out[1:]

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        return {
            "elements": self.elements,
            "total": self.total,
            "mean": round(self.mean, 4),
            "median": self.median,
            "p90": self.quantile(0.9),
            "p99": self.quantile(0.99),
            "max": self.max,
            "histogram": [{"low": a, "high": b, "count": n} for a, b, n in self.bins()],
        }

    def sentence(self) -> str:
        """Return mean, median, 99th percentile and maximum in one line."""
        return (
            f"mean {self.mean:.2f}  median {self.median}  p99 {self.quantile(0.99)}  max {self.max}"
        )


def histogram_table(counts: Counts, *, zero: str = "0") -> Table:
    """Return a bar for each bin; `zero` labels the count 0."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", style="dim")
    table.add_column(justify="right")
    table.add_column(justify="right", style="dim")
    table.add_column(style="cyan", no_wrap=True)
    bins = counts.bins()
    largest = max((n for _, _, n in bins), default=0)
    for number, (low, high, n) in enumerate(bins):
        if not n and number and not bins[number - 1][2]:
            continue  # one line stands for a run of empty bins
        if not n and not bins[number + 1][2]:
            table.add_row("  …", "0", "", "")
            continue
        label = zero if high == 0 else str(low) if low == high else f"{low}-{high}"
        share = f"{n / counts.elements:.1%}"
        table.add_row(f"  {label}", format_count(n), share, _bar(n, largest))
    return table


def _bar(value: int, largest: int) -> str:
    eighths = round(value / largest * _BAR * 8)
    if value and not eighths:
        eighths = 1
    return _BLOCKS[8] * (eighths // 8) + (_BLOCKS[eighths % 8] if eighths % 8 else "")
