"""pysimdjson, of the extra ``adapters``: a JSON document's values, number lists as arrays.

What it does not read exactly as ``json`` does raises ``ValueError``, and the caller lets ``json``
decide. Without pysimdjson everything is read by ``json``.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ragged_format.adapters._values import Rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from ragged_format.lists import Int64

__all__ = ["doubles", "is_available", "read_document"]

simdjson: Any
try:
    import simdjson
except ImportError:
    simdjson = None

_BRACKET = ord("[")
_INT32_BITS = 2**31 - 1
_FLAT = frozenset({"prompt_token_ids", "offsets"})
_EITHER = "token_ids"
_NESTED = "sampling_mask"
# What pysimdjson raises for text, types and numbers that it does not take.
_REFUSALS = (ValueError, TypeError, RuntimeError, AttributeError, KeyError)
_local = threading.local()


def is_available() -> bool:
    """Return whether pysimdjson is installed."""
    return simdjson is not None


def _parse(text: bytes) -> Any:
    """Return the parsed document; no value of it may be alive at the next call in this thread."""
    try:
        parser = _local.parser
    except AttributeError:
        parser = _local.parser = simdjson.Parser()
    return parser.parse(text)


def doubles(text: bytes) -> npt.NDArray[np.float64] | None:
    """Return the numbers of ``1,2.5,-3e-05``, (n,) float64, each correctly rounded, or ``None``."""
    text = b"[" + text + b"]"
    if simdjson is None:
        return _doubles_by_json(text)
    try:
        return np.frombuffer(_parse(text).as_buffer(of_type="d"), np.float64)
    except _REFUSALS:
        return None


def _doubles_by_json(text: bytes) -> npt.NDArray[np.float64] | None:
    try:
        values = json.loads(text)
        if set(map(type, values)) - {int, float}:
            return None
        out = np.array(values, np.float64)
    except (ValueError, OverflowError, RecursionError):
        return None
    # JSON has no NaN, and a number beyond the range of a double is for json.
    return out if bool(np.isfinite(out).all()) else None


def read_document(text: bytes, replace: Callable[[str, Any], Any]) -> Any:
    """Return the value of JSON text, its big lists as arrays.

    Lists of integers under ``token_ids``, ``prompt_token_ids`` and ``offsets`` become int64 arrays,
    lists of such lists under ``token_ids`` and ``sampling_mask`` become :class:`Rows`.

    Parameters
    ----------
    text : bytes
    replace : callable
        Takes the key and value of each string in an object and returns the value to use.

    Raises
    ------
    ValueError
        The text is not JSON, or not read here as ``json`` reads it.
    """
    walk = _Walk(replace)
    try:
        value = walk.value(_parse(text))
    except _REFUSALS as err:
        raise ValueError(str(err)) from None
    # as_buffer flattens lists of any depth: a list that was not seen is inside one of them.
    if np.count_nonzero(np.frombuffer(text, np.uint8) == _BRACKET) != walk.lists:
        raise ValueError("brackets in strings, or lists nested in number lists")
    return value


class _Walk:
    """Turns values of simdjson into Python values and counts the lists."""

    def __init__(self, replace: Callable[[str, Any], Any]) -> None:
        self.replace = replace
        self.lists = 0
        self._object, self._array = simdjson.Object, simdjson.Array

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind is self._object:
            return self._members(value)
        if kind is self._array:
            self.lists += 1
            return [self.value(item) for item in value]
        return value

    def _members(self, value: Any) -> dict[str, Any]:
        keys = list(value.keys())
        out: dict[str, Any] = {}
        for key in keys:
            item = value[key]
            kind = type(item)
            if kind is self._array:
                out[key] = self._list(key, item)
            elif kind is str:
                out[key] = self.replace(key, item)
            else:
                out[key] = self.value(item)
        if len(out) < len(keys):
            raise ValueError(
                "a key is twice in an object"
            )  # simdjson finds the first, json the last
        return out

    def _list(self, key: str, item: Any) -> Any:
        if key in _FLAT:
            return self._flat(item)
        if key == _NESTED:
            return self._rows(item)
        if key == _EITHER:
            is_nested = len(item) > 0 and type(item[0]) is self._array
            return self._rows(item) if is_nested else self._flat(item)
        return self.value(item)

    def _flat(self, item: Any) -> Int64:
        self.lists += 1
        return self._integers(item) if len(item) else np.zeros(0, np.int64)

    def _integers(self, item: Any) -> Int64:
        return np.frombuffer(item.as_buffer(of_type="i"), np.int64)

    def _rows(self, item: Any) -> Rows:
        counts = np.fromiter(map(len, item), np.int64, len(item))
        self.lists += 1 + len(counts)
        total = int(counts.sum())
        wide = self._integers(item) if total else counts[:0]
        if total != len(wide):
            raise ValueError("a candidate set holds lists")
        # Narrow at once, while the numbers are in the cache; their bits together tell the largest.
        fits = 0 <= np.bitwise_or.reduce(wide) <= _INT32_BITS
        return Rows(wide.astype(np.int32) if fits else wide, counts)
