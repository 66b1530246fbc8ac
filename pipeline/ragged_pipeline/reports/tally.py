"""Distributions that are counted exactly, merge in any order, and stay bounded."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ragged_pipeline.reports.exact import ExactSum

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

__all__ = ["LIMIT", "Tally", "Words"]

# Distinct values that are told apart.
LIMIT = 1 << 16
# Beyond it, bits of a float's significand that are kept: neighbours differ by less than 1 %.
KEPT_BITS = 7
_FOLD = np.int64(-1 << (52 - KEPT_BITS))
# Integers below this are counted by place, others by sorting.
_DENSE = 1 << 20
_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_WORDS = 1024
_LETTERS = 200


class Tally:
    """How often each number occurs.

    Guarantees: the result depends on the numbers only, not on how they were divided into calls and
    merges. Up to 65,536 distinct numbers are told apart; with more, all are cut to 8 significant
    bits (relative error below 1 %). Count, sum, smallest and largest are always exact.

    Attributes
    ----------
    odd : int
        NaN and infinite numbers, which are in no other figure.
    is_integer : bool
        Whether all numbers are whole.

    Examples
    --------
    >>> tally = Tally()
    >>> tally.add(np.array([3, 1, 3]))
    >>> other = Tally()
    >>> other.add(np.array([7]))
    >>> tally.merge(other)
    >>> tally.count, tally.mean, tally.quantile(0.5), tally.high
    (4, 3.5, 3, 7)
    """

    def __init__(self) -> None:
        self._exact = True
        self.odd = 0
        self.is_integer = True
        self._values = np.zeros(0, np.float64)
        self._often = np.zeros(0, np.int64)
        self._pending: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []
        self._waiting = 0
        self._sum = ExactSum()
        self._low, self._high = math.inf, -math.inf

    def add(self, numbers: npt.NDArray[Any]) -> None:
        """Add numbers, (m,) of an integer type, or float64."""
        if numbers.dtype.kind == "f":
            numbers = numbers.astype(np.float64, copy=False)
            finite = np.isfinite(numbers)
            if not finite.all():
                self.odd += int(len(numbers) - finite.sum())
                numbers = numbers[finite]
            self.is_integer &= not len(numbers) or bool((numbers == np.rint(numbers)).all())
        if not len(numbers):
            return
        self._sum.add(numbers)
        low, high = numbers.min(), numbers.max()
        self._low, self._high = min(self._low, float(low)), max(self._high, float(high))
        if numbers.dtype.kind != "f" and low >= 0 and high < min(_DENSE, 64 * len(numbers)):
            counts = np.bincount(numbers)
            values: npt.NDArray[Any] = np.flatnonzero(counts)
            often = counts[values]
        else:
            values, often = np.unique(numbers, return_counts=True)
        self._take(values.astype(np.float64), often)

    def merge(self, other: Tally) -> None:
        """Add all that another tally has."""
        other._settle()
        self._exact &= other._exact
        self.is_integer &= other.is_integer
        self.odd += other.odd
        self._low, self._high = min(self._low, other._low), max(self._high, other._high)
        self._sum.merge(other._sum)
        self._take(other._values, other._often)

    def _take(self, values: npt.NDArray[np.float64], often: npt.NDArray[np.int64]) -> None:
        self._pending.append((values, often))
        self._waiting += len(values)
        if self._waiting >= LIMIT:
            self._settle()

    def _settle(self) -> None:
        if not self._pending and self._exact:
            return
        values = np.concatenate([self._values, *[v for v, _ in self._pending]])
        often = np.concatenate([self._often, *[n for _, n in self._pending]])
        self._pending, self._waiting = [], 0
        if self._exact:
            values, often = _joined(values, often)
            self._exact = len(values) <= LIMIT
        if not self._exact:
            values, often = _joined((values.view(np.int64) & _FOLD).view(np.float64), often)
        self._values, self._often = values, often

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return self.__dict__

    @property
    def is_exact(self) -> bool:
        """Whether all numbers are told apart."""
        self._settle()
        return self._exact

    @property
    def values(self) -> npt.NDArray[np.float64]:
        """Distinct numbers, (d,) ascending."""
        self._settle()
        return self._values

    @property
    def often(self) -> npt.NDArray[np.int64]:
        """How often each of them occurs, (d,)."""
        self._settle()
        return self._often

    @property
    def count(self) -> int:
        """How many numbers were added."""
        return int(self.often.sum())

    @property
    def total(self) -> int | float:
        """Their sum, rounded once; an int where all are."""
        return self._sum.total if not self.is_integer else round(self._sum.total_exact)

    @property
    def mean(self) -> float | None:
        """Their mean, None where there is none."""
        count = self.count
        return float(self._sum.total_exact / count) if count else None

    @property
    def low(self) -> int | float | None:
        """The smallest."""
        return self._number(self._low) if self.count else None

    @property
    def high(self) -> int | float | None:
        """The largest."""
        return self._number(self._high) if self.count else None

    def quantile(self, share: float) -> int | float | None:
        """Return the smallest number that at least this share of all does not exceed."""
        values = self.values
        if not len(values):
            return None
        reached = np.cumsum(self._often)
        place = int(np.searchsorted(reached, share * reached[-1]))
        return self._number(float(values[min(place, len(values) - 1)]))

    def between(self, low: float, high: float) -> int:
        """Return how many are in [low, high]."""
        first = int(np.searchsorted(self.values, low, side="left"))
        return int(self._often[first : int(np.searchsorted(self._values, high, "right"))].sum())

    def mirrored(self, top: int) -> Tally:
        """Return the tally of ``top - number`` for every number."""
        out = Tally()
        values, often = top - self.values[::-1], self._often[::-1]
        out._exact, out.is_integer, out.odd = self._exact, self.is_integer, self.odd
        out._low, out._high = top - self._high, top - self._low
        out._values, out._often = values, often
        out._sum = self._sum.mirrored(top, self.count)
        return out

    def _number(self, value: float) -> int | float:
        return int(value) if self.is_integer else value

    def to_json(self) -> dict[str, Any]:
        """Return count, sum, mean, extremes and quantiles as JSON values."""
        quantiles = {f"p{100 * share:.0f}": self.quantile(share) for share in _QUANTILES}
        return {
            "count": self.count, "total": self.total, "mean": self.mean,
            "min": self.low, **quantiles, "max": self.high, "exact": self.is_exact,
            "not_finite": self.odd,
        }  # fmt: skip


def _joined(
    values: npt.NDArray[np.float64], often: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    distinct, place = np.unique(values, return_inverse=True)
    sums = np.zeros(len(distinct), np.int64)
    np.add.at(sums, place, often)
    return distinct, sums


class Words:
    """How often each text occurs; beyond 1,024 different ones, those first met are told apart.

    Texts are cut to 200 letters.

    Guarantees: merged in the order of the data, the result is the same for any division of it
    into the same parts.

    Examples
    --------
    >>> words = Words()
    >>> words.add(["stop", None, "stop"], [1, 2, 3])
    >>> words.to_json()
    {'null': 2, 'others': 0, 'values': [{'value': 'stop', 'count': 4}]}
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.null = 0
        self.others = 0

    def add(self, words: Iterable[str | None], often: Iterable[int]) -> None:
        """Add texts with how often each occurs; None is a null."""
        for word, count in zip(words, often, strict=True):
            if word is None:
                self.null += count
                continue
            if len(word) > _LETTERS:
                word = word[:_LETTERS] + "…"
            if word in self.counts or len(self.counts) < _WORDS:
                self.counts[word] = self.counts.get(word, 0) + count
            else:
                self.others += count

    def merge(self, other: Words) -> None:
        """Add all that another has, which is later in the data."""
        self.add(other.counts, other.counts.values())
        self.null += other.null
        self.others += other.others

    @property
    def total(self) -> int:
        """Texts added, nulls excepted."""
        return sum(self.counts.values()) + self.others

    def to_json(self) -> dict[str, Any]:
        """Return the counts, the most frequent first, as JSON values."""
        ordered = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        return {
            "null": self.null,
            "others": self.others,
            "values": [{"value": word, "count": count} for word, count in ordered],
        }
