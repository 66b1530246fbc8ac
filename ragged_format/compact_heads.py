"""How compact files store what a head shares with other columns.

A processed head holds ids of the target's candidate set: their positions in the set say as much as
the ids, in a few bits. And the log-prob of the sampled token stands in the head already, wherever
the token is in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ragged_format.errors import CorruptError
from ragged_format.lists import Int64, offsets_of

__all__ = ["decode_positions", "decode_shared", "encode_positions", "encode_shared"]

Array = npt.NDArray[Any]


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
    stored: Array, counts: Int64, members: Array, member_counts: Int64, dtype: npt.DTypeLike
) -> Array:
    """Return the ids of heads, (H,) of `dtype`; the inverse of :func:`encode_positions`.

    Raises
    ------
    CorruptError
        Sizes contradict each other (``RF-C001``).
    """
    _check_sizes(stored, counts, members, member_counts)
    owned = np.repeat(member_counts, counts)
    start = np.repeat(offsets_of(member_counts)[:-1], counts)
    value = stored.astype(np.int64)
    is_member = value < owned
    if is_member.all():
        start += value
        out: Array = members[start].astype(dtype, copy=False)
        return out
    out = (value - owned).astype(dtype)
    out[is_member] = members[(start + value)[is_member]]
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
    _check_sizes(ids, counts, log_probs, counts)
    target, entry = _holders(sampled, counts, ids)
    if len(sampled) != len(counts) or len(stored) + len(target) != len(counts):
        raise CorruptError(
            "log-probs have not the size that the heads leave",
            expected=len(counts) - len(target), got=len(stored),
        )  # fmt: skip
    out = np.empty(len(counts), log_probs.dtype)
    rest = np.ones(len(counts), bool)
    rest[target] = False
    out[target] = log_probs[entry]
    out[rest] = stored
    return out


def _holders(sampled: Array, counts: Int64, ids: Array) -> tuple[Int64, Int64]:
    """Return the targets whose head holds their token, and where it stands first."""
    entry = np.flatnonzero(ids == np.repeat(sampled, counts))
    target = np.repeat(np.arange(len(counts)), counts)[entry]
    first = np.ones(len(target), bool)
    first[1:] = target[1:] != target[:-1]
    return target[first], entry[first]


def _check_sizes(a: Array, a_counts: Int64, b: Array, b_counts: Int64) -> None:
    if len(a_counts) != len(b_counts) or (len(a), len(b)) != (a_counts.sum(), b_counts.sum()):
        raise CorruptError(
            "heads have not the size that their counts state",
            expected=(int(a_counts.sum()), int(b_counts.sum())), got=(len(a), len(b)),
        )  # fmt: skip
