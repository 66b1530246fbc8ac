"""Values that engines put where a log-prob should be: one table, used for every log-prob."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ragged_format.adapters._values import Bools, Floats

__all__ = ["SENTINELS", "classify"]

# Index is the class of a value; 0 is a log-prob. All but NaN and null mean q = 0: outside the set.
SENTINELS = ("", "null", "nan", "minus_infinity", "float32_min", "minus_9999")
_NULL, _NAN, _INFINITE, _FLOAT32_MIN, _FLOOR = range(1, len(SENTINELS))
# vLLM clamps -inf to the first, SGLang's -inf can come as the second (sgl-project/sglang#5761),
# which JSON writers print with 8 digits, rounded up.
FLOOR = -9999.0
FLOAT32_MIN = -3.4028234e38


def classify(values: Floats, null: Bools) -> npt.NDArray[np.uint8]:
    """Return the index into :data:`SENTINELS` of each value, (n,) uint8; 0 is a log-prob.

    Parameters
    ----------
    values : (n,) float64
    null : (n,) bool
        Values that were null; NaN in `values`.
    """
    out = np.zeros(len(values), np.uint8)
    # Comparisons with NaN are false, so one pass finds whether there is anything to name.
    plain = values > FLOOR
    if plain.all():
        return out
    out[values <= FLOOR] = _FLOOR
    out[values <= FLOAT32_MIN] = _FLOAT32_MIN
    out[np.isneginf(values)] = _INFINITE
    out[np.isnan(values)] = _NAN
    out[null] = _NULL
    return out
