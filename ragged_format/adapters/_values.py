"""Engine values as flat arrays: id lists, nested rows, log-prob lists.

Each function takes what ``json.loads`` gives, or arrays that a faster reader made already, and
returns arrays. They are exact and complain about anything that is not what the engine documents;
the readers of JSON text fall back to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from ragged_format.errors import ConversionError, Where

if TYPE_CHECKING:
    from ragged_format.lists import Int64

__all__ = [
    "UNKNOWN_RANK",
    "Bools",
    "Entries",
    "Floats",
    "LogProbs",
    "Place",
    "Rows",
    "as_float_rows",
    "as_floats",
    "as_ids",
    "as_log_probs",
    "as_rows",
    "malformed",
    "plain",
]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Place(Protocol):
    """Returns where a field, or one of its elements, is; called for errors only."""

    def __call__(self, position: int | None = None, /) -> Where: ...


UNKNOWN_RANK = -1
_ID_TEXT = "token_id:"


@dataclass(frozen=True, slots=True)
class Rows:
    """A list of lists as flat values and counts.

    Attributes
    ----------
    values : (t,) int64 or float64
        All rows end to end.
    counts : (n,) int64
        Length of each row; 0 for a null row.
    null : (n,) bool, optional
        Rows that are null; ``None`` if none is.
    """

    values: npt.NDArray[Any]
    counts: Int64
    null: Bools | None = None


class Entries(NamedTuple):
    """Entries of top-K lists end to end.

    Attributes
    ----------
    ids : (e,) int64
    log_probs : (e,) float64
        NaN where null.
    null : (e,) bool
        Entries whose log-prob is null.
    ranks : (e,) int64
        From 1; ``UNKNOWN_RANK`` where the engine gave none.
    """

    ids: Int64
    log_probs: Floats
    null: Bools
    ranks: Int64


class LogProbs(NamedTuple):
    """The log-prob content of one choice.

    Attributes
    ----------
    ids : (n,) int64, optional
        Sampled tokens; ``None`` in text mode, which has no ids.
    values : (n,) float64
        Log-prob of the sampled token; NaN where null.
    null : (n,) bool
        Positions whose log-prob is null.
    counts : (n,) int64
        Entries of each top-K list; 0 in text mode.
    entries : Entries
        Of all lists end to end.
    text_entries : int
        Entries that name a token by its text only and are therefore lost.
    """

    ids: Int64 | None
    values: Floats
    null: Bools
    counts: Int64
    entries: Entries
    text_entries: int = 0


def malformed(what: str, where: Where, expected: object, got: object) -> NoReturn:
    """Raise for a value that the engine's documentation does not allow (``RF-A002``)."""
    shown = repr(got)
    raise ConversionError(
        what, code="RF-A002", where=where, expected=expected,
        got=shown if len(shown) <= 200 else shown[:200] + " …",
    )  # fmt: skip


def as_ids(value: Any, place: Place) -> Int64:
    """Return a list of token ids as (n,) int64."""
    if isinstance(value, np.ndarray) and value.ndim == 1:
        if value.dtype == np.int64:
            return value
        if value.dtype.kind in "iu":
            return value.astype(np.int64)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        malformed("token ids are a list of integers", place(), "a list", value)
    return _integers(value, place)


def _integers(values: Sequence[Any], place: Place) -> Int64:
    # Exactly these types: numpy would take true for 1 and truncate 1.5.
    if (kinds := set(map(type, values))) - {int}:
        for position, item in enumerate(values):
            if not _is_whole(item):
                malformed("a token id is an integer", place(position), "an integer", item)
        if float in kinds:  # JSON has one type of number: 5.0 is 5
            values = [int(item) for item in values]
    try:
        return np.array(values, np.int64)
    except OverflowError:
        malformed("a token id is below 2^63", place(), "a token id", max(values, key=abs))


def _is_whole(value: Any) -> bool:
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def as_rows(value: Any, place: Place) -> Rows:
    """Return nested id lists as rows.

    Accepted: a bare list of lists (a row may be null); a mapping or object with nested
    ``token_ids``; one with flat ``token_ids`` and ``offsets``.
    """
    if isinstance(value, Rows):
        return value
    if isinstance(value, Mapping):
        ids, offsets = value.get("token_ids"), value.get("offsets")
    elif hasattr(value, "token_ids"):
        ids, offsets = value.token_ids, getattr(value, "offsets", None)
    else:
        ids, offsets = value, None
    if isinstance(ids, Rows):
        return ids
    if offsets is not None:
        return _from_offsets(as_ids(ids, place), as_ids(offsets, place), place)
    lists, counts, null = _split(ids, place)
    return Rows(_integers(list(chain.from_iterable(lists)), place), counts, null)


def as_float_rows(value: Any, place: Place) -> Rows:
    """Return nested lists of log-probs as rows of float64; null becomes NaN."""
    if isinstance(value, Rows):
        return value
    lists, counts, null = _split(value, place)
    return Rows(_floats(chain.from_iterable(lists), place), counts, null)


def _split(value: Any, place: Place) -> tuple[list[Any], Int64, Bools | None]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        malformed("a candidate set per token", place(), "a list of lists", value)
    null = np.fromiter((row is None for row in value), bool, len(value))
    lists = [() if row is None else row for row in value]
    for position, row in enumerate(lists):
        if not isinstance(row, list | tuple | np.ndarray):
            malformed("a candidate set per token", place(position), "a list or null", row)
    counts = np.fromiter(map(len, lists), np.int64, len(lists))
    return lists, counts, null if null.any() else None


def _from_offsets(ids: Int64, offsets: Int64, place: Place) -> Rows:
    counts = np.diff(offsets)
    if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(ids) or (counts < 0).any():
        malformed(
            "offsets rise from 0 to the number of ids", place(),
            f"0 … {len(ids)}, non-decreasing", offsets.tolist(),
        )  # fmt: skip
    return Rows(ids, counts)


def as_log_probs(content: Any, place: Place) -> LogProbs:
    """Return the ``content`` list of a choice's log-probs as arrays."""
    if isinstance(content, LogProbs):
        return content
    if not isinstance(content, Sequence) or isinstance(content, str | bytes):
        malformed("log-probs have a content list", place(), "a list", content)
    tops = []
    for position, entry in enumerate(content):
        top = entry.get("top_logprobs") if isinstance(entry, Mapping) else ()
        if not isinstance(entry, Mapping) or not isinstance(top, list | tuple | None):
            malformed("a log-prob entry per token", place(position), "an object", entry)
        tops.append(top or ())
    flat = list(chain.from_iterable(tops))
    for entry in flat:
        if not isinstance(entry, Mapping):
            malformed("a top-K list has objects", place(), "an object", entry)
    values, null = _log_probs(content, place)
    ids, entry_ids = _entry_ids(content, place), _entry_ids(flat, place)
    if ids is None or entry_ids is None:
        counts = np.zeros(len(content), np.int64)
        none = Entries(counts[:0], values[:0], null[:0], counts[:0])
        return LogProbs(ids, values, null, counts, none, len(flat))
    counts = np.fromiter(map(len, tops), np.int64, len(tops))
    ranks = [entry.get("rank") for entry in flat]
    known = [UNKNOWN_RANK if rank is None else rank for rank in ranks]
    entries = Entries(entry_ids, *_log_probs(flat, place), _integers(known, place))
    return LogProbs(ids, values, null, counts, entries)


def _entry_ids(entries: Sequence[Mapping[str, Any]], place: Place) -> Int64 | None:
    """Return the ids of entries, or ``None`` if one has only its text."""
    ids = []
    for entry in entries:
        id_ = entry.get("token_id")
        if id_ is None:
            text = entry.get("token")
            # Older builds put the id into the text.
            if not isinstance(text, str) or not text.startswith(_ID_TEXT):
                return None
            digits = text.removeprefix(_ID_TEXT)
            if not (digits.isascii() and digits.isdigit()):
                return None
            id_ = int(digits)
        ids.append(id_)
    return _integers(ids, place)


def _log_probs(entries: Iterable[Mapping[str, Any]], place: Place) -> tuple[Floats, Bools]:
    raw = [entry.get("logprob") for entry in entries]
    null = np.fromiter((value is None for value in raw), bool, len(raw))
    return _floats(raw, place), null


def as_floats(values: Any, place: Place) -> tuple[Floats, Bools]:
    """Return a list of log-probs as (n,) float64, NaN where null, and where null, (n,) bool."""
    if isinstance(values, np.ndarray) and values.dtype.kind == "f":
        return values.astype(np.float64), np.zeros(len(values), bool)
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        malformed("log-probs are a list of numbers", place(), "a list", values)
    null = np.fromiter((value is None for value in values), bool, len(values))
    if set(map(type, values)) <= {float}:
        return np.array(values, np.float64), null
    return _floats(values, place), null


def _floats(values: Iterable[Any], place: Place) -> Floats:
    return np.array([_float(value, place) for value in values], np.float64)


def _float(value: Any, place: Place) -> float:
    if value is None:
        return float("nan")
    if isinstance(value, int | float | np.floating) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    elif isinstance(value, str) and value.lower().lstrip("+-") in ("inf", "infinity", "nan"):
        return float(value)  # writers that refuse non-finite JSON numbers quote them
    malformed("a log-prob is a number or null", place(), "a number or null", value)


def plain(value: Any) -> Any:
    """Return arrays of a faster reader as the lists they were, for ``json.dumps(default=…)``."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Rows):
        bounds = np.cumsum(value.counts)[:-1]
        return [row.tolist() for row in np.split(value.values, bounds)]
    msg = f"not a JSON value: {value!r}"
    raise TypeError(msg)
