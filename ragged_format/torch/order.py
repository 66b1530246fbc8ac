"""The order of an epoch: a seeded permutation of record positions in constant memory.

The order is a function of the dataset's fingerprint, the seed and the epoch alone. Ranks, batch
sizes and workers deal the same order out; they never change it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["EpochOrder"]

Int64 = npt.NDArray[np.int64]
_UInt64 = npt.NDArray[np.uint64]

# Part of what a seed means: a change of the algorithm below needs a new name.
_ALGORITHM = "ragged-order-1"
# Small domains need more rounds until all permutations are about equally frequent.
_ROUNDS, _SMALL_BITS, _SMALL_ROUNDS = 6, 12, 12


class EpochOrder:
    """The records of a dataset in the order of one epoch.

    With shuffle, a keyed Feistel network over the smallest power of two that holds all positions;
    a result outside is fed in again until it falls inside, which keeps it a permutation. Any part
    of the order is computed on its own, so nothing grows with the dataset.

    Parameters
    ----------
    size : int
        Number of records.
    shuffle : bool
        Without it the order is that of the dataset.
    fingerprint : str
        Identity of the dataset's content.
    seed, epoch : int
        Any integers.

    Examples
    --------
    >>> order = EpochOrder(5, shuffle=True, fingerprint="f", seed=0, epoch=0)
    >>> sorted(order[0:5].tolist())
    [0, 1, 2, 3, 4]
    """

    def __init__(
        self, size: int, *, shuffle: bool, fingerprint: str, seed: int, epoch: int
    ) -> None:
        self.size = size
        self.shuffle = shuffle
        bits = max(size - 1, 1).bit_length()
        self._low_bits = np.uint64(bits - bits // 2)
        self._low = np.uint64((1 << (bits - bits // 2)) - 1)
        self._high = np.uint64((1 << (bits // 2)) - 1)
        label = f"{_ALGORITHM}|{fingerprint}|{seed}|{epoch}"
        self._keys = [
            np.uint64(xxhash.xxh3_64_intdigest(label.encode(), seed=number))
            for number in range(_SMALL_ROUNDS if bits <= _SMALL_BITS else _ROUNDS)
        ]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, span: slice) -> Int64:
        """Return the records at the positions of a slice, (n,) int64."""
        start, stop, step = span.indices(self.size)
        return self.at(np.arange(start, stop, step, dtype=np.int64))

    def at(self, positions: Int64) -> Int64:
        """Return the records at these positions, each in ``[0, size)``, as (n,) int64."""
        if not self.shuffle:
            return positions
        out = self._network(positions.astype(np.uint64))
        limit = np.uint64(self.size)
        outside = np.flatnonzero(out >= limit)
        while len(outside):
            out[outside] = self._network(out[outside])
            outside = outside[out[outside] >= limit]
        return out.astype(np.int64)

    def _network(self, values: _UInt64) -> _UInt64:
        high, low = values >> self._low_bits, values & self._low
        for number, key in enumerate(self._keys):
            if number % 2:
                high = high ^ (_mix(low + key) & self._high)
            else:
                low = low ^ (_mix(high + key) & self._low)
        return (high << self._low_bits) | low


def _mix(values: _UInt64) -> _UInt64:
    """Return the finalizer of splitmix64; every input bit changes every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
