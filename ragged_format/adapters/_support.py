"""Candidate sets of many choices, checked and put in order, vectorised over all ids of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ragged_format.adapters._sentinels import classify
from ragged_format.errors import ConversionError
from ragged_format.lists import Int64, offsets_of, segment_sums
from ragged_format.rules import count_held

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragged_format.adapters._choice import Choice
    from ragged_format.adapters._values import Bools

__all__ = ["REASONS", "Support", "read_support"]

# What can be wrong with the set of one target; the index is the value in ``Support.fault``.
REASONS = (
    "", "null", "empty", "duplicate_ids", "sampled_outside", "log_prob_missing", "overflow",
)  # fmt: skip
NULL, EMPTY, DUPLICATE, OUTSIDE, NO_LOG_PROB, OVERFLOW = range(1, len(REASONS))


@dataclass(slots=True)
class Support:
    """Sets of all generated tokens of a call.

    Attributes
    ----------
    counts : (g,) int64
        Ids of each set as the engine gave them; 0 where it gave none.
    ids : (t,) int32
        Ascending within each set.
    log_probs : (t,) float32, optional
        Parallel to `ids`.
    fault : (g,) uint8
        Index into :data:`REASONS`; 0 is a good set.
    sorted_sets : int
        Sets that came in another order.
    """

    counts: Int64
    ids: npt.NDArray[np.int32]
    log_probs: npt.NDArray[np.float32] | None
    fault: npt.NDArray[np.uint8]
    sorted_sets: int

    def without_faults(self) -> Support:
        """Return the sets with those of faulty targets emptied."""
        bad = self.fault != 0
        if not self.counts[bad].any():
            return self
        keep = np.repeat(~bad, self.counts)
        log_probs = None if self.log_probs is None else self.log_probs[keep]
        counts = np.where(bad, 0, self.counts)
        return Support(counts, self.ids[keep], log_probs, self.fault, self.sorted_sets)


def read_support(
    choices: Sequence[Choice], sampled: Int64, vocab_size: int, *, log_probs: bool = False
) -> Support:
    """Return the sets of all choices, faults marked.

    Parameters
    ----------
    choices : sequence of Choice
        Their token counts sum to ``len(sampled)``.
    sampled : (g,) int64
        All generated tokens.
    vocab_size : int
        Ids are below it.
    log_probs : bool
        Whether to read the log-probs of the candidates.

    Raises
    ------
    ConversionError
        An id is outside the vocabulary (``RF-A005``): no policy makes sense of that.
    """
    fault = np.zeros(len(sampled), np.uint8)
    counts = np.zeros(len(sampled), np.int64)
    values: list[npt.NDArray[Any]] = []
    masses: list[npt.NDArray[Any]] = []
    begin = 0
    cut = np.zeros(len(sampled), bool)
    for choice in choices:
        rows, end = choice.support, begin + len(choice.token_ids)
        if rows is None:
            fault[begin:end] = NULL
        else:
            counts[begin:end] = rows.counts
            values.append(rows.values)
            if rows.null is not None:
                fault[begin:end][rows.null] = NULL
            if choice.support_cut is not None:
                cut[begin:end] = choice.support_cut
            if log_probs:
                given = choice.support_log_probs
                missing = np.full(len(rows.values), np.nan)
                masses.append(missing if given is None else given.values)
        begin = end
    wide = np.concatenate(values) if values else np.zeros(0, np.int64)
    if len(wide) and (wide.min() < 0 or wide.max() >= vocab_size):
        _outside_vocabulary(choices, vocab_size)
    ids = wide.astype(np.int32, copy=False)
    mass = np.concatenate(masses or [np.zeros(0)]) if log_probs else None
    fault[(counts == 0) & (fault == 0)] = EMPTY
    offsets = offsets_of(counts)
    unsorted = repeated = 0
    if _falls(ids, offsets).any():
        at = np.flatnonzero(_falls(ids, offsets) & (ids[1:] != ids[:-1])) + 1
        unsorted = len(np.unique(_owner(at, offsets)))
        order = np.lexsort((ids, np.repeat(np.arange(len(counts)), counts)))
        ids = ids[order]
        mass = None if mass is None else mass[order]
        repeats = np.flatnonzero(_falls(ids, offsets)) + 1
        repeated = len(repeats)
        fault[_owner(repeats, offsets)] = DUPLICATE
    tokens = sampled.astype(np.int32)
    # One hit for every set, unless an id is twice in one.
    if repeated or count_held(ids, offsets, tokens) != np.count_nonzero(counts):
        is_sampled = ids == np.repeat(tokens, counts)
        held = np.zeros(len(sampled), bool)
        held[_owner(np.flatnonzero(is_sampled), offsets)] = True
        fault[~held & (fault == 0)] = OUTSIDE
    if mass is not None:
        given_mass = segment_sums(classify(mass, np.zeros(len(mass), bool)) == 0, offsets)
        fault[(given_mass != counts) & (fault == 0)] = NO_LOG_PROB
    fault[cut & (fault == 0)] = OVERFLOW
    narrow = None if mass is None else mass.astype(np.float32)
    return Support(counts, ids, narrow, fault, unsorted)


def _owner(positions: Int64, offsets: Int64) -> Int64:
    return np.searchsorted(offsets, positions, side="right") - 1


def _falls(ids: npt.NDArray[np.int32], offsets: Int64) -> Bools:
    """Return where an id is not above the one before it in its set, (t - 1,) bool."""
    falls: Bools = ids[1:] <= ids[:-1]
    begins = offsets[1:-1]
    falls[begins[(begins > 0) & (begins < len(ids))] - 1] = False
    return falls


def _outside_vocabulary(choices: Sequence[Choice], vocab_size: int) -> None:
    for choice in choices:
        if choice.support is None:
            continue
        values = choice.support.values
        bad = (values < 0) | (values >= vocab_size)
        if bad.any():
            first = int(np.argmax(bad))
            row = int(np.searchsorted(offsets_of(choice.support.counts), first, side="right")) - 1
            raise ConversionError(
                "an id of a candidate set is outside the vocabulary", code="RF-A005",
                where=choice.place("sampling_mask", row), expected=f"0 <= id < {vocab_size}",
                got=int(values[first]), remedy="pass the model's vocab_size, not the tokenizer's",
            )  # fmt: skip
