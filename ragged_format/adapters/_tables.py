"""Heads and sets as trainers keep them, in padded tables or end to end, made into ours and back.

Everything works on all targets of a call at once. Entries that stand for "outside" (the sentinel
values of :mod:`ragged_format.adapters._sentinels`) are dropped and counted; order and repeats are
put right where that is exact, and refused where the entries contradict each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ragged_format.adapters._sentinels import SENTINELS, classify
from ragged_format.errors import ConversionError, Where
from ragged_format.lists import Int64, offsets_of, ranges, segment_sums
from ragged_format.rules import LOG_PROB_TOLERANCE

if TYPE_CHECKING:
    from ragged_format.adapters._values import Bools
    from ragged_format.adapters.report import ConversionReport

__all__ = [
    "HeadRows",
    "PlaceOf",
    "check_ids",
    "clean_heads",
    "clean_sets",
    "find_in_rows",
    "merge_equal",
    "pad_rows",
    "pick_rows",
    "unpad_rows",
]


class PlaceOf(Protocol):
    """Returns where a target of the call is; called for errors only."""

    def __call__(self, target: int, /) -> Where: ...


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Heads of all targets of a call.

    Attributes
    ----------
    counts : (m,) int64
    ids : (t,) int64 or int32
    log_probs : (t,) float
    weights : (t,) float32, optional
    """

    counts: Int64
    ids: npt.NDArray[Any]
    log_probs: npt.NDArray[Any]
    weights: npt.NDArray[Any] | None = None

    def pick(self, which: Bools | Int64, counts: Int64) -> HeadRows:
        """Return the entries at `which`, with the counts that they then have."""
        weights = None if self.weights is None else self.weights[which]
        return HeadRows(counts, self.ids[which], self.log_probs[which], weights)

    def keep(self, which: Bools) -> HeadRows:
        """Return the heads without the entries where `which`, (t,) bool, is false."""
        return self.pick(which, segment_sums(which, offsets_of(self.counts)))


def unpad_rows(
    table: npt.NDArray[Any], filled: Bools | None = None, *, fill: float = -1
) -> tuple[npt.NDArray[Any], Int64, Bools]:
    """Return the filled slots of a padded table end to end, their counts, and which they are.

    Parameters
    ----------
    table : (n, width) array
    filled : (n, width) bool, optional
        Slots that hold something; ``None``: those that differ from `fill`.
    """
    if filled is None:
        filled = table != fill
    return table[filled], filled.sum(axis=1, dtype=np.int64), filled


def pad_rows(
    values: npt.NDArray[Any],
    counts: npt.NDArray[Any],
    width: int,
    fill: float,
    dtype: npt.DTypeLike,
) -> npt.NDArray[Any]:
    """Return rows end to end as an (n, width) table, left-aligned and padded with `fill`.

    No count exceeds `width` (the caller saw to it).
    """
    out = np.full((len(counts), width), fill, dtype)
    out[np.arange(width) < np.asarray(counts)[:, None]] = values
    return out


def pick_rows(values: npt.NDArray[Any], counts: Int64, rows: Int64) -> npt.NDArray[Any]:
    """Return the values of the rows named, end to end."""
    starts = np.cumsum(counts) - counts
    return values[ranges(starts[rows], counts[rows])]


def clean_heads(
    heads: HeadRows,
    vocab_size: int,
    report: ConversionReport,
    place: PlaceOf,
    *,
    null: Bools | None = None,
    exact: bool = True,
    logits: bool = False,
    kind: str = "head",
) -> HeadRows:
    """Return heads as the format keeps them: no sentinels, ids once, log-probs not increasing.

    Parameters
    ----------
    heads : HeadRows
        As the system gave them, padding removed.
    vocab_size : int
        Ids are below it.
    report : ConversionReport
        Entries are counted as taken in ``head_entries``, those left out with their reason.
    place : PlaceOf
    null : (t,) bool, optional
        Entries whose log-prob is null (and NaN in `heads`).
    exact : bool
        Whether the values are exact log-probs, which are then put in order and whose sign and mass
        are checked. Entries of approximate ones stay in the order of their ranks.
    logits : bool
        Whether the values are logits, of which sign and mass say nothing.
    kind : str
        For the counts: which heads these are.

    Raises
    ------
    ConversionError
        An id outside the vocabulary, or twice with two log-probs (``RF-A005``); positive log-probs
        or a mass above 1 (``RF-A007``).
    """
    ledger = report.head_entries
    ledger.taken += len(heads.ids)
    values = heads.log_probs.astype(np.float64, copy=False)
    kinds = classify(values, np.zeros(len(values), bool) if null is None else null)
    if kinds.any():
        for number, name in enumerate(SENTINELS[1:], 1):
            ledger.drop(f"log_prob_{name}", int(np.count_nonzero(kinds == number)))
        heads = heads.keep(kinds == 0)
    check_ids(heads.ids, heads.counts, vocab_size, place)
    if exact:
        heads = _descending(heads, report, kind)
    heads = _once(heads, report, place)
    log_probs = heads.log_probs.astype(np.float32, copy=False)
    if exact and not logits:
        _check_values(log_probs, heads.counts, place)
    return HeadRows(heads.counts, heads.ids.astype(np.int32, copy=False), log_probs, heads.weights)


def check_ids(ids: npt.NDArray[Any], counts: Int64, vocab_size: int, place: PlaceOf) -> None:
    """Raise ``RF-A005`` unless every id is in the vocabulary."""
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        first = int(np.argmax((ids < 0) | (ids >= vocab_size)))
        raise ConversionError(
            "an id is outside the vocabulary", code="RF-A005",
            where=place(_owner(first, counts)), expected=f"0 <= id < {vocab_size}",
            got=int(ids[first]), remedy="pass the model's vocab_size, not the tokenizer's",
        )  # fmt: skip


def _owner(entry: int, counts: Int64) -> int:
    return int(np.searchsorted(offsets_of(counts), entry, side="right")) - 1


def _descending(heads: HeadRows, report: ConversionReport, kind: str) -> HeadRows:
    values, offsets = heads.log_probs, offsets_of(heads.counts)
    rises = values[1:] > values[:-1]
    begins = offsets[1:-1]
    rises[begins[(begins > 0) & (begins < len(values))] - 1] = False
    if not rises.any():
        return heads
    owner = np.repeat(np.arange(len(heads.counts)), heads.counts)
    report.converted[f"{kind}s_sorted"] += len(np.unique(owner[1:][rises]))
    # Stable: entries of one log-prob keep the order in which they came.
    return heads.pick(np.lexsort((-values, owner)), heads.counts)


def _once(heads: HeadRows, report: ConversionReport, place: PlaceOf) -> HeadRows:
    """Return the heads without repeats of an id at its log-prob."""
    owner = np.repeat(np.arange(len(heads.counts)), heads.counts)
    order = np.lexsort((heads.ids, owner))
    ids, owners = heads.ids[order], owner[order]
    again = (ids[1:] == ids[:-1]) & (owners[1:] == owners[:-1])
    if not again.any():
        return heads
    values = heads.log_probs[order]
    torn = again & (values[1:] != values[:-1])
    if torn.any():
        first = int(np.argmax(torn))
        raise ConversionError(
            "an id is twice in one head, with two log-probs", code="RF-A005",
            where=place(int(owners[first])), expected="ids once",
            got=f"id {int(ids[first])} at {float(values[first])} and {float(values[first + 1])}",
        )  # fmt: skip
    keep = np.ones(len(order), bool)
    keep[order[1:][again]] = False
    report.head_entries.drop("duplicate_ids", int(np.count_nonzero(again)))
    return heads.keep(keep)


def _check_values(log_probs: npt.NDArray[Any], counts: Int64, place: PlaceOf) -> None:
    if not len(log_probs):
        return
    top = int(np.argmax(log_probs))
    if log_probs[top] > LOG_PROB_TOLERANCE:
        raise ConversionError(
            "a log-prob is positive", code="RF-A007", where=place(_owner(top, counts)),
            expected=f"<= {LOG_PROB_TOLERANCE}", got=float(log_probs[top]),
            remedy="the values may be logits, or from a lossy source",
        )  # fmt: skip
    some = np.flatnonzero(counts)
    starts = (np.cumsum(counts) - counts)[some]
    mass = np.add.reduceat(np.exp(log_probs, dtype=np.float64), starts)
    if mass.max() > 1 + LOG_PROB_TOLERANCE:
        first = int(np.argmax(mass > 1 + LOG_PROB_TOLERANCE))
        raise ConversionError(
            "the probabilities of one head sum to more than 1", code="RF-A007",
            where=place(int(some[first])), expected=f"<= {1 + LOG_PROB_TOLERANCE}",
            got=float(mass[first]), remedy="the values may be of several temperatures, or logits",
        )  # fmt: skip


def clean_sets(
    ids: npt.NDArray[Any], counts: Int64, vocab_size: int, report: ConversionReport, place: PlaceOf
) -> tuple[npt.NDArray[np.int32], Bools]:
    """Return the ids ascending within each set, and the sets with an id twice, (m,) bool.

    Raises
    ------
    ConversionError
        An id is outside the vocabulary (``RF-A005``).
    """
    check_ids(ids, counts, vocab_size, place)
    out = ids.astype(np.int32, copy=False)
    falls = _falls(out, counts)
    repeated = np.zeros(len(counts), bool)
    if falls.any():
        owner = np.repeat(np.arange(len(counts)), counts)
        report.converted["sets_sorted"] += len(np.unique(owner[1:][falls & (out[1:] != out[:-1])]))
        out = out[np.lexsort((out, owner))]
        repeated[owner[1:][_falls(out, counts)]] = True
    return out, repeated


def _falls(ids: npt.NDArray[Any], counts: Int64) -> Bools:
    falls: Bools = ids[1:] <= ids[:-1]
    begins = offsets_of(counts)[1:-1]
    falls[begins[(begins > 0) & (begins < len(ids))] - 1] = False
    return falls


def find_in_rows(
    ids: npt.NDArray[Any], counts: Int64, wanted: npt.NDArray[Any]
) -> tuple[Int64, Bools]:
    """Return the index of the wanted id of each row among `ids`, (m,) int64, and where it is there.

    Of ids that are not there the index is 0.
    """
    hits = np.flatnonzero(ids == np.repeat(wanted, counts))
    at = np.zeros(len(counts), np.int64)
    held = np.zeros(len(counts), bool)
    rows = np.searchsorted(offsets_of(counts), hits, side="right") - 1
    at[rows], held[rows] = hits, True
    return at, held


def merge_equal(
    positions: Int64, counts: Int64, *values: npt.NDArray[Any]
) -> tuple[Int64, Int64, Int64]:
    """Return which rows stay where several share a position: the last one of each position.

    Parameters
    ----------
    positions : (m,) int64
        Where each row is to be stored.
    counts : (m,) int64
        Size of each row.
    *values : (t,) arrays
        Rows end to end, compared with the row that stays.

    Returns
    -------
    positions : (p,) int64
        Unique, ascending.
    rows : (p,) int64
        The row that stays at each.
    torn : (x,) int64
        Rows that do not stay and differ from the one that does.
    """
    # The first of a reversed array is the last.
    kept_positions, back = np.unique(positions[::-1], return_index=True)
    rows = len(positions) - 1 - back
    stays = rows[np.searchsorted(kept_positions, positions)]
    others = np.flatnonzero(stays != np.arange(len(positions)))
    differs = counts[others] != counts[stays[others]]
    starts = np.cumsum(counts) - counts
    alike = others[~differs]
    mine = ranges(starts[alike], counts[alike])
    theirs = ranges(starts[stays[alike]], counts[alike])
    bounds = offsets_of(counts[alike])
    for part in values:
        unequal = segment_sums(part[mine] != part[theirs], bounds) > 0
        differs[~differs] |= unequal
        if unequal.any():
            alike = others[~differs]
            mine = ranges(starts[alike], counts[alike])
            theirs = ranges(starts[stays[alike]], counts[alike])
            bounds = offsets_of(counts[alike])
    return kept_positions, rows, others[differs]
