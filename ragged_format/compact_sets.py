"""How compact files store candidate sets: without the sampled token, by rank, as differences.

Sets draw on a small part of the vocabulary again and again. The ids of a batch are therefore
numbered anew, frequent ones first; a set is the ascending list of these ranks, and of them the
differences are kept, which are mostly small. The sampled token is left out: the tokens say it.
Decoding is a running sum, a look-up and a sort of each set.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ragged_format.errors import CorruptError
from ragged_format.lists import Int64, offsets_of

__all__ = ["decode_sets", "encode_sets"]

Array = npt.NDArray[Any]
# Ids that are decoded at a time: what is in work fits the second-level cache.
CHUNK = 1 << 16
# Sets of one id are sorted with the others unless they hold at least this part of all ids, inverse.
ALONE = 8
# Ids below this are counted in a table, others by sorting.
TABLE = 1 << 22


def encode_sets(values: Array, counts: Int64, sampled: Array) -> tuple[Array, Array] | None:
    """Return the stored form of candidate sets.

    Parameters
    ----------
    values : (T,) integers
        Ids end to end.
    counts : (M,) int64
        Ids of each target, 0 for none; their sum is T.
    sampled : (M,) integers
        Sampled token of each target.

    Returns
    -------
    steps : (T - number of sets,) uint32
        Ranks of each set without its sampled token, ascending, each less the one before it.
    order : (U,) int64
        The id of each rank.
    None
        Where the data is not valid, so that this form does not give it back.
    """
    rest = values[values != np.repeat(sampled, counts)]
    rest_counts = counts - (counts > 0)
    if len(rest) != rest_counts.sum() or (len(rest) and int(rest.min()) < 0):
        return None
    if len(sampled) and int(sampled.min()) < 0:
        return None
    order, ranks = _ranked(rest)
    steps = np.empty(len(rest), np.uint32)
    bounds = offsets_of(rest_counts)
    for first, last in _chunks(bounds, len(order)):
        start, end = bounds[first], bounds[last]
        keys, low = _keys(ranks[start:end], rest_counts[first:last], len(order))
        keys.sort()
        keys &= low
        steps[start:end] = keys
        steps[start + 1 : end] -= keys[:-1].astype(np.uint32)
        heads = (bounds[first:last] - start)[rest_counts[first:last] > 0]
        steps[start + heads] = keys[heads]
    # Whatever the data is, what is stored gives it back.
    same = np.array_equal(decode_sets(steps, order, counts, sampled, values.dtype), values)
    return (steps, order) if same else None


def decode_sets(
    steps: Array, order: Array, counts: Int64, sampled: Array, dtype: npt.DTypeLike
) -> Array:
    """Return candidate sets, (T,) of `dtype`, from their stored form.

    Parameters are those of :func:`encode_sets` and what it returns.

    Raises
    ------
    CorruptError
        They contradict each other (``RF-C001``).
    """
    rest_counts = counts - (counts > 0)
    if int(rest_counts.sum()) != len(steps) or len(sampled) != len(counts):
        raise CorruptError(
            "candidate sets have not the size that their counts state",
            expected=int(rest_counts.sum()), got=len(steps),
        )  # fmt: skip
    for name, ids in (("order", order), ("sampled tokens", sampled)):
        if len(ids) and int(ids.min()) < 0:
            raise CorruptError(
                f"the {name} of candidate sets have a negative id", expected=">= 0",
                got=int(ids.min()),
            )  # fmt: skip
    largest = max((int(ids.max()) for ids in (order, sampled) if len(ids)), default=0)
    lookup = order.astype(_key_type(largest + 1))
    out = np.empty(int(counts.sum()), dtype)
    places, bounds = offsets_of(counts), offsets_of(rest_counts)
    for first, last in _chunks(places, largest + 1):
        _decode_chunk(
            steps[bounds[first] : bounds[last]], lookup, counts[first:last],
            sampled[first:last], largest + 1, out[places[first] : places[last]],
        )  # fmt: skip
    return out


def _decode_chunk(
    steps: Array, lookup: Array, counts: Int64, sampled: Array, size: int, out: Array
) -> None:
    """Write the sets of some targets, whose ids are below `size`, to `out`."""
    # Sets of the sampled token alone need no sorting; where they are many, they go their own way.
    alone = np.flatnonzero(counts == 1)
    is_apart = ALONE * len(alone) > len(out)
    filled = np.flatnonzero(counts > (1 if is_apart else 0))
    if is_apart:
        places = offsets_of(counts)[alone]
        out[places] = sampled[alone]
        is_other = np.ones(len(out), bool)
        is_other[places] = False
    if len(filled) < len(counts):
        counts, sampled = counts[filled], sampled[filled]
    rest, targets, number = counts - 1, len(counts), len(steps)
    total = np.zeros(number + 1, np.uint32)
    np.cumsum(steps, dtype=np.uint32, out=total[1:])
    owner = np.repeat(np.arange(targets, dtype=np.uint32), rest)
    ranks = total[1:] - total.take(offsets_of(rest)[:-1]).take(owner)
    if number and int(ranks.max()) >= len(lookup):
        raise CorruptError(
            "a rank of a candidate set has no id", expected=f"< {len(lookup)}", got=int(ranks.max())
        )
    # Keys sort by target, then id; the ids of sampled tokens lie behind the others.
    bits, wide = _key_layout(size, targets)
    keys = np.empty(number + targets, wide)
    np.left_shift(owner, wide(bits), out=keys[:number])
    keys[:number] |= lookup.take(ranks)
    np.left_shift(np.arange(targets, dtype=wide), wide(bits), out=keys[number:])
    keys[number:] |= sampled.astype(wide)
    keys.sort()
    keys &= wide((1 << bits) - 1)
    if is_apart:
        out[np.flatnonzero(is_other)] = keys
    else:
        out[:] = keys


def _ranked(ids: Array) -> tuple[Array, Array]:
    """Return the ids that occur, frequent ones first, and the rank of each element.

    Frequencies are compared by their power of two, so that ids of one class ascend, and their
    differences are small.
    """
    if not len(ids):
        return np.empty(0, np.int64), np.empty(0, np.uint32)
    if int(ids.max()) < TABLE:
        frequency = np.bincount(ids)
        known = np.flatnonzero(frequency)
        frequency = frequency[known]
    else:
        known, inverse, frequency = np.unique(ids, return_inverse=True, return_counts=True)
    classes = np.frexp(frequency.astype(np.float64))[1]
    by_class = np.argsort(-classes, kind="stable")
    rank = np.empty(len(known), np.uint32)
    rank[by_class] = np.arange(len(known), dtype=np.uint32)
    if int(ids.max()) < TABLE:
        table = np.zeros(int(known[-1]) + 1, np.uint32)
        table[known] = rank
        return known[by_class].astype(np.int64), table[ids]
    return known[by_class].astype(np.int64), rank[inverse]


def _chunks(bounds: Int64, size: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of targets that are worked on at a time, for values below `size`."""
    most = max(1, 1 << max(0, 32 - max(1, (size - 1).bit_length())))
    first, targets = 0, len(bounds) - 1
    while first < targets:
        last = int(np.searchsorted(bounds, bounds[first] + CHUNK, side="right")) - 1
        last = min(max(last, first + 1), first + most, targets)
        yield first, last
        first = last


def _key_type(size: int) -> type[np.uint32 | np.uint64]:
    return np.uint32 if size <= 1 << 32 else np.uint64


def _key_layout(size: int, targets: int) -> tuple[int, Any]:
    """Return the bits below the target in a key, and the type of keys."""
    bits = max(1, (size - 1).bit_length())
    narrow = bits + max(0, (targets - 1).bit_length()) <= 32
    return bits, np.uint32 if narrow else np.uint64


def _keys(values: Array, counts: Int64, size: int) -> tuple[Array, np.unsignedinteger[Any]]:
    """Return keys that sort by target, then value, and the mask that gives the value back."""
    bits, wide = _key_layout(size, len(counts))
    prefix: Array = np.arange(len(counts), dtype=wide) << wide(bits)
    return values.astype(wide) | np.repeat(prefix, counts), wide((1 << bits) - 1)
