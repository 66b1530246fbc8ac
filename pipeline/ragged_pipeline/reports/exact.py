"""Sums that do not depend on the order of their terms."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["ExactSum"]

# Finite float64 are integers times 2 ** -_UNIT.
_UNIT = 1074 + 53
_LOW = np.int64((1 << 26) - 1)


class ExactSum:
    """Sum of numbers without any rounding, as one integer in units below every float64.

    Examples
    --------
    >>> total = ExactSum()
    >>> total.add(np.array([1e16, 1.0, -1e16]))
    >>> total.total
    1.0
    """

    def __init__(self) -> None:
        self._units = 0

    def add(self, numbers: npt.NDArray[Any]) -> None:
        """Add finite numbers, (m,) of an integer type, or float64."""
        if numbers.dtype.kind != "f":
            self._units += _whole(numbers.astype(np.int64, copy=False)) << _UNIT
            return
        significands, exponents = np.frexp(numbers)
        whole = np.ldexp(significands, 53).astype(np.int64)
        for exponent in np.unique(exponents).tolist():
            self._units += _whole(whole[exponents == exponent]) << (exponent - 53 + _UNIT)

    def merge(self, other: ExactSum) -> None:
        """Add another sum."""
        self._units += other._units

    def mirrored(self, top: int, count: int) -> ExactSum:
        """Return the sum of ``top - number`` for every one of `count` numbers."""
        out = ExactSum()
        out._units = (top * count << _UNIT) - self._units
        return out

    @property
    def total_exact(self) -> Fraction:
        """The sum."""
        return Fraction(self._units, 1 << _UNIT)

    @property
    def total(self) -> float:
        """The sum, rounded once."""
        return float(self.total_exact)


def _whole(numbers: npt.NDArray[np.int64]) -> int:
    """Return the sum of integers, in two halves that cannot overflow."""
    return (int((numbers >> 26).sum()) << 26) + int((numbers & _LOW).sum())
