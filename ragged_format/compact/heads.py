"""How compact files store what a head shares with other columns.

A processed head holds ids of the target's candidate set: their positions in the set say as much as
the ids, in a few bits. And the log-prob of the sampled token stands in the head already, wherever
the token is in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ragged_format.errors import CorruptError
from ragged_format.lists import Int64, offsets_of

if TYPE_CHECKING:
    from ragged_format.compact.planes import Planes

__all__ = ["decode_positions", "decode_shared", "encode_positions", "encode_shared"]

Array = npt.NDArray[Any]
# Entries of heads, and targets, that are decoded at a time.
PART = 1 << 16


def encode_positions(
    ids: Array, counts: Int64, members: Array, member_counts: Int64
) -> Array | None:
    """Return the ids of heads as positions in candidate sets.

    Parameters
    ----------
    ids : (H,) integers
        Ids of the heads, end to end.
    counts : (M,) int64
        Ids in the head of each target.
    members : (T,) integers
        Candidate sets, ascending, end to end.
    member_counts : (M,) int64
        Ids in the set of each target.

    Returns
    -------
    (H,) uint64, optional
        The position of an id that is in the set of its target, counted from 0; any other id plus
        the size of that set. ``None`` where fewer than half of them are in the sets, or an id is
        negative.
    """
    if not len(ids) or not len(members) or min(int(ids.min()), int(members.min())) < 0:
        return None
    size = 1 + max(int(ids.max()), int(members.max()))
    targets = np.arange(len(counts), dtype=np.uint64)
    if size * len(counts) >= 1 << 63:
        return None
    keys = members.astype(np.uint64) + np.repeat(targets * np.uint64(size), member_counts)
    if not (keys[1:] > keys[:-1]).all():
        return None
    owner = np.repeat(np.arange(len(counts)), counts)
    wanted = ids.astype(np.uint64) + owner.astype(np.uint64) * np.uint64(size)
    place = np.searchsorted(keys, wanted)
    found = keys[np.minimum(place, len(keys) - 1)] == wanted
    if 2 * np.count_nonzero(found) < len(ids):
        return None
    position = place - offsets_of(member_counts)[owner]
    return np.where(found, position, ids.astype(np.int64) + member_counts[owner]).astype(np.uint64)


def decode_positions(
    stored: Array | Planes,
    counts: Int64,
    members: Array,
    member_counts: Int64,
    dtype: npt.DTypeLike,
) -> Array:
    """Return the ids of heads, (H,) of `dtype`; the inverse of :func:`encode_positions`.

    Raises
    ------
    CorruptError
        Sizes contradict each other (``RF-C001``).
    """
    bounds, starts = offsets_of(counts), offsets_of(member_counts)
    _check_sizes(len(stored), bounds, len(members), starts)
    out = np.empty(len(stored), dtype)
    for first, last in _parts(bounds):
        heads = slice(bounds[first], bounds[last])
        # Repeated once: counts that differ are hard to predict for a processor.
        owner = np.repeat(np.arange(first, last), counts[first:last])
        value = stored[heads].astype(np.int64)
        owned = member_counts.take(owner)
        place = starts.take(owner)
        is_member = value < owned
        place += value
        if is_member.all():
            out[heads] = members.take(place)
        else:
            value -= owned
            value[is_member] = members[place[is_member]]
            out[heads] = value
    return out


def encode_shared(
    values: Array, sampled: Array, counts: Int64, ids: Array, log_probs: Array
) -> Array | None:
    """Return the log-probs of sampled tokens that the heads do not hold.

    Parameters
    ----------
    values : (M,) floats
        Log-prob of the sampled token of each target.
    sampled : (M,) integers
        The sampled tokens.
    counts : (M,) int64
        Entries in the head of each target.
    ids, log_probs : (H,) integers, (H,) floats of the same type as `values`
        The heads.

    Returns
    -------
    (m,) floats, optional
        Values of the targets whose token is not in the head; ``None`` where a value is not that of
        the head, bit for bit.
    """
    if values.dtype != log_probs.dtype or not len(ids):
        return None
    target, entry = _holders(sampled, counts, ids)
    bits = np.dtype(f"u{values.dtype.itemsize}")
    if not np.array_equal(values[target].view(bits), log_probs[entry].view(bits)):
        return None
    rest = np.ones(len(values), bool)
    rest[target] = False
    return values[rest]


def decode_shared(
    stored: Array, sampled: Array, counts: Int64, ids: Array, log_probs: Array
) -> Array:
    """Return the log-probs of all sampled tokens; the inverse of :func:`encode_shared`.

    Raises
    ------
    CorruptError
        Sizes contradict each other (``RF-C001``).
    """
    bounds = offsets_of(counts)
    _check_sizes(len(ids), bounds, len(log_probs), bounds)
    if len(sampled) != len(counts):
        raise CorruptError(
            "heads are not as many as targets", expected=len(sampled), got=len(counts)
        )
    out = np.empty(len(counts), log_probs.dtype)
    used = 0
    for first, last in _parts(bounds):
        heads = slice(bounds[first], bounds[last])
        target, entry = _holders(sampled[first:last], counts[first:last], ids[heads])
        part = out[first:last]
        is_rest = np.ones(len(part), bool)
        is_rest[target] = False
        part[target] = log_probs[heads][entry]
        rest = stored[used : used + len(part) - len(target)]
        used += len(part) - len(target)
        if used <= len(stored):
            part[is_rest] = rest
    if used != len(stored):
        raise CorruptError(
            "log-probs have not the size that the heads leave", expected=used, got=len(stored)
        )
    return out


def _holders(sampled: Array, counts: Int64, ids: Array) -> tuple[Int64, Int64]:
    """Return the targets whose head holds their token, and where it stands first."""
    owner = np.repeat(np.arange(len(counts)), counts)
    entry = np.flatnonzero(ids == sampled.take(owner))
    target = owner.take(entry)
    first = np.ones(len(target), bool)
    first[1:] = target[1:] != target[:-1]
    return target[first], entry[first]


def _parts(bounds: Int64) -> Iterator[tuple[int, int]]:
    """Yield ranges of targets that are worked on at a time: what is in work fits the cache."""
    first, targets = 0, len(bounds) - 1
    while first < targets:
        last = int(np.searchsorted(bounds, bounds[first] + PART, side="right")) - 1
        last = min(max(last, first + 1), first + PART)
        yield first, last
        first = last


def _check_sizes(a: int, a_bounds: Int64, b: int, b_bounds: Int64) -> None:
    if len(a_bounds) != len(b_bounds) or (a, b) != (a_bounds[-1], b_bounds[-1]):
        raise CorruptError(
            "heads have not the size that their counts state",
            expected=(int(a_bounds[-1]), int(b_bounds[-1])), got=(a, b),
        )  # fmt: skip
