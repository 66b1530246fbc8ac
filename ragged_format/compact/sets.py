"""How compact files store candidate sets: without the sampled token, by rank, as differences.

Sets draw on a small part of the vocabulary again and again. The ids of a batch are therefore
numbered anew, frequent ones first; a set is the ascending list of these ranks, and of them the
differences are kept, which are mostly small. The sampled token is left out: the tokens say it.
Decoding is a running sum, a look-up and a sort of each set. Some sets at a time, a row, are sorted
by numpy's sorting network, which is fast on any processor; its partition is up to twenty times
slower on those that write compressed vectors slowly (AMD's Zen 4).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ragged_format.errors import CorruptError
from ragged_format.lists import Int64, offsets_of

if TYPE_CHECKING:
    from ragged_format.compact.planes import Planes

__all__ = ["decode_sets", "encode_sets"]

Array = npt.NDArray[Any]
# Ids that are decoded at a time: what is in work fits the second-level cache.
CHUNK = 1 << 16
# Bytes up to which numpy sorts with a network, several times faster than by partition.
NETWORK = 2048
# Bits of ids that leave room for the sets of a row in keys of 32 and of 64 bits.
NARROW, HUGE = 23, 54
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
    rest_counts = rest_counts[rest_counts > 0]
    bounds = offsets_of(rest_counts)
    rows = _rows(bounds, len(order))
    for first, last in _chunks(rows, bounds[rows], len(order)):
        ends = bounds[rows[first : last + 1]]
        sets = slice(rows[first], rows[last])
        start, end = ends[0], ends[-1]
        keys, low = _keys(ranks[start:end], rest_counts[sets], len(order))
        _sort_rows(keys, ends - start)
        keys &= low
        steps[start:end] = keys
        steps[start + 1 : end] -= keys[:-1].astype(np.uint32)
        heads = bounds[sets]
        steps[heads] = keys[heads - start]
    # Whatever the data is, what is stored gives it back.
    same = np.array_equal(decode_sets(steps, order, counts, sampled, values.dtype), values)
    return (steps, order) if same else None


def decode_sets(
    steps: Array | Planes, order: Array, counts: Int64, sampled: Array, dtype: npt.DTypeLike
) -> Array:
    """Return candidate sets, (T,) of `dtype`, from their stored form.

    Parameters are those of :func:`encode_sets` and what it returns; steps are unsigned integers of
    any width, or planes, which are joined a part at a time.

    Raises
    ------
    CorruptError
        They contradict each other (``RF-C001``).
    """
    filled = counts > 0
    sets = int(np.count_nonzero(filled))
    if len(sampled) != len(counts) or int(counts.sum()) - sets != len(steps):
        raise CorruptError(
            "candidate sets have not the size that their counts state",
            expected=int(counts.sum()) - sets, got=len(steps),
        )  # fmt: skip
    size = 1 + max(_largest("order", order), _largest("sampled tokens", sampled))
    lookup = order.astype(_key_type(size))
    if sets < len(counts):
        counts, sampled = counts[filled], sampled[filled]
    places = offsets_of(counts)
    rows = _rows(places, size)
    out = np.empty(places[-1], dtype)
    for first, last in _chunks(rows, places[rows], size):
        part = rows[first : last + 1]
        start, end = part[0], part[-1]
        _decode_chunk(
            steps[places[start] - start : places[end] - end], lookup,
            places[start : end + 1] - places[start], sampled[start:end], part - start, size,
            out[places[start] : places[end]],
        )  # fmt: skip
    return out


def _decode_chunk(
    steps: Array,
    lookup: Array,
    bounds: Int64,
    sampled: Array,
    rows: Int64,
    size: int,
    out: Array,
) -> None:
    """Write some sets, in rows, whose ids are below `size`, to `out`."""
    # Keys sort by set, then id. Sets of one id, often most of them, have no ranks.
    bits, wide = _key_layout(size, len(sampled))
    numbers = np.arange(len(sampled), dtype=wide)
    numbers <<= wide(bits)
    rest = bounds[1:] - bounds[:-1]
    several = (rest > 1).nonzero()[0]
    rest = rest[several]
    rest -= 1
    if steps.itemsize == 8 and len(steps) and int(steps.max()) >= len(lookup):
        raise _no_id(len(lookup), int(steps.max()))  # their sum might not fit
    total = np.zeros(len(steps) + 1, np.int64)
    ranks = np.cumsum(steps, dtype=np.int64, out=total[1:])
    ranks -= np.repeat(total[bounds[several] - several], rest)
    try:
        ids = lookup.take(ranks)
    except IndexError as err:
        raise _no_id(len(lookup), int(ranks.max())) from err
    others = np.repeat(numbers[several], rest)
    others |= ids
    numbers |= sampled.astype(wide)
    # A row has the ids by rank of all its sets before their sampled tokens.
    ends = bounds[rows]
    tokens = rows[1:] - rows[:-1]
    lengths = np.empty(2 * len(tokens), np.int64)
    lengths[::2] = ends[1:] - ends[:-1] - tokens
    lengths[1::2] = tokens
    is_second = np.zeros(len(lengths), bool)
    is_second[1::2] = True
    is_token = np.repeat(is_second, lengths)
    keys = np.empty(len(out), wide)
    keys[is_token] = numbers
    keys[~is_token] = others
    _sort_rows(keys, ends)
    low = wide((1 << bits) - 1)
    if out.dtype.itemsize == keys.itemsize:
        np.bitwise_and(keys, low, out=out.view(wide))
    else:
        keys &= low
        out[:] = keys


def _largest(name: str, ids: Array) -> int:
    """Return the largest id, -1 of none; raises ``RF-C001`` if one is negative."""
    if not len(ids):
        return -1
    largest = int(ids.view(f"u{ids.itemsize}").max())
    if largest > np.iinfo(ids.dtype).max:
        raise CorruptError(
            f"the {name} of candidate sets have a negative id", expected=">= 0", got=int(ids.min())
        )
    return largest


def _sort_rows(keys: Array, bounds: Int64) -> None:
    for start, end in itertools.pairwise(bounds.tolist()):
        keys[start:end].sort()


def _no_id(known: int, rank: int) -> CorruptError:
    return CorruptError(
        "a rank of a candidate set has no id", expected=f"< {known}", got=rank,
        remedy="restore the file from a copy",
    )  # fmt: skip


def _rows(bounds: Int64, size: int) -> Int64:
    """Return where to part sets, none of them empty, into rows that numpy sorts with a network.

    Wider sets are rows of their own. The first is 0 and the last the number of sets.
    """
    bits = (size - 1).bit_length()
    # Keys of sets and huge ids together would not fit 64 bits.
    most = 1 if bits > HUGE else NETWORK // (4 if bits <= NARROW else 8)
    # A few of the bounds are enough to fill rows well.
    marks = np.arange(0, bounds[-1], max(1, most // 4))
    first = bounds.searchsorted(marks, side="right") - 1
    is_new = np.ones(len(first) + 1, bool)
    np.not_equal(first[1:], first[:-1], out=is_new[1:-1])
    first = np.concatenate((first, (len(bounds) - 1,)))[is_new]
    ends = bounds[first]
    last = ends.searchsorted(ends[:-1] + most, side="right") - 1
    following = np.maximum(last, np.arange(1, len(ends))).tolist()
    rows, row, count = [0], 0, len(following)
    while row < count:
        row = following[row]
        rows.append(row)
    return first[rows]


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


def _chunks(sets: Int64, bounds: Int64, size: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows that are worked on at a time.

    Parameters
    ----------
    sets, bounds : (r + 1,) int64
        Sets and elements before each row.
    size : int
        Ids are below this.
    """
    most = max(1, 1 << max(0, 32 - max(1, (size - 1).bit_length())))
    first, rows = 0, len(sets) - 1
    while first < rows:
        elements = int(np.searchsorted(bounds, bounds[first] + CHUNK, side="right")) - 1
        last = int(np.searchsorted(sets, sets[first] + most, side="right")) - 1
        last = max(min(elements, last), first + 1)
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
