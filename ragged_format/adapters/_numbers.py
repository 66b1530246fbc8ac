"""Lists of numbers in JSON text as arrays, without an object per number.

The caller cuts the lists out of a document. Text that is not exactly of the expected form gives
``None``: the caller then lets the slow, exact reader decide.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ragged_format.lists import Int64

__all__ = ["doubles", "integers", "rows"]

simdjson: Any
try:
    import simdjson
except ImportError:
    simdjson = None

_OPEN, _CLOSE, _COMMA, _MINUS, _SPACE, _ZERO, _NINE = b"[],- 09"
_local = threading.local()


def integers(text: bytes) -> Int64 | None:
    """Return the integers of ``1,2,3``, (n,) int64."""
    return _numbers(b"[" + text + b"]", "i")


def doubles(text: bytes) -> npt.NDArray[np.float64] | None:
    """Return the numbers of ``1,2.5,-3e-05``, (n,) float64, each correctly rounded."""
    return _numbers(b"[" + text + b"]", "d")


def _numbers(text: bytes | bytearray, kind: str) -> npt.NDArray[Any] | None:
    """Return the numbers of a JSON list, nested lists flattened: int64 for "i", float64 for "d"."""
    if simdjson is None:
        return _without_simdjson(text, kind)
    try:
        parser = _local.parser
    except AttributeError:
        parser = _local.parser = simdjson.Parser()
    try:
        # No name holds the parsed document, so that the parser can be used again.
        buffer = parser.parse(text).as_buffer(of_type=kind)
    except (ValueError, TypeError, RuntimeError, AttributeError):
        return None
    return np.frombuffer(buffer, np.int64 if kind == "i" else np.float64)


def _without_simdjson(text: bytes | bytearray, kind: str) -> npt.NDArray[Any] | None:
    try:
        values = json.loads(text)
    except ValueError:
        return None
    allowed = {int} if kind == "i" else {int, float}
    if set(map(type, values)) - allowed:
        return None
    try:
        out = np.array(values, np.int64 if kind == "i" else np.float64)
    except OverflowError:
        return None
    # JSON has no NaN, and a number beyond the range of a double is for the slow reader.
    return out if kind == "i" or bool(np.isfinite(out).all()) else None


def rows(text: bytes) -> tuple[npt.NDArray[np.int32], Int64, Int64] | None:
    """Return the rows of ``[3],[1,4,9],[2,7]``, none of them empty, ids below 2^31.

    Each opening bracket becomes a minus sign, so that one pass over a flat list of numbers gives
    the ids and, by their sign, where rows begin.

    Returns
    -------
    values : (t,) int32
        All rows end to end.
    counts : (n,) int64
        Length of each row.
    starts : (n,) int64
        Position of each row's opening bracket in `text`.
    """
    size = len(text)
    source = np.frombuffer(text, np.uint8)
    opens = np.flatnonzero(source == _OPEN)
    if not len(opens) or opens[0] != 0 or source[-1] != _CLOSE:
        return None
    # A row ends before the comma that precedes the next one. A bracket elsewhere stays in the text
    # of the flat list, which then is not JSON.
    closes = np.append(opens[1:] - 2, size - 1)
    firsts = source[opens + 1]
    if (
        (source[closes] != _CLOSE).any()
        or (source[opens[1:] - 1] != _COMMA).any()
        or firsts.min() < _ZERO
        or firsts.max() > _NINE
    ):
        return None
    buffer = bytearray(size + 2)
    buffer[1:-1] = text
    buffer[0], buffer[-1] = _OPEN, _CLOSE
    edited = np.frombuffer(buffer, np.uint8)
    edited[opens + 1] = _MINUS
    edited[closes + 1] = _SPACE
    # -0 would have no sign, so a first id of 0 is read as -9 and put right below.
    zeros = np.flatnonzero(firsts == _ZERO)
    if len(zeros):
        after = source[opens[zeros] + 2]
        if not ((after == _COMMA) | (after == _CLOSE)).all():
            return None
        edited[opens[zeros] + 2] = _NINE
    wide = _numbers(buffer, "i")
    if wide is None:
        return None
    values = wide.astype(np.int32)
    if not np.array_equal(values, wide):
        return None
    begins = np.flatnonzero(values < 0)
    if len(begins) != len(opens):
        return None
    values[begins] *= -1
    values[begins[zeros]] = 0
    return values, np.diff(begins, append=len(values)), opens
