"""The order of an epoch: a seeded permutation of record positions in constant memory.

The order is a function of the dataset's fingerprint, the seed, the epoch and the way of shuffling
alone. Ranks, batch sizes and workers deal the same order out; they never change it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

__all__ = ["BlockOrder", "EpochOrder", "Order"]

Int64 = npt.NDArray[np.int64]
_UInt64 = npt.NDArray[np.uint64]

# Part of what a seed means: a change of the algorithm below needs a new name.
_ALGORITHM = "ragged-order-1"
# Small domains need more rounds until all permutations are about equally frequent.
_ROUNDS, _SMALL_BITS, _SMALL_ROUNDS = 6, 12, 12


class Order(Protocol):
    """The records of a dataset in the order of one epoch.

    Attributes
    ----------
    size : int
        Number of positions.
    is_sequence : bool
        Whether position and record are the same.
    window : int
        Positions that lie near each other in the data; 0 if any do as well.
    """

    size: int
    is_sequence: bool
    window: int

    def at(self, positions: Int64) -> Int64:
        """Return the records at these positions, each in ``[0, size)``, as (n,) int64."""
        ...


class EpochOrder:
    """All records, permuted as a whole, or as they are stored.

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

    window = 0

    def __init__(
        self, size: int, *, shuffle: bool, fingerprint: str, seed: int, epoch: int
    ) -> None:
        self.size = size
        self.shuffle = shuffle
        self.is_sequence = not shuffle
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
        return self._walk(positions, back=False)

    def find(self, records: Int64) -> Int64:
        """Return the positions of these records, (n,) int64: the inverse of :meth:`at`."""
        return self._walk(records, back=True)

    def _walk(self, values: Int64, *, back: bool) -> Int64:
        if not self.shuffle:
            return values
        out = self._network(values.astype(np.uint64), back=back)
        limit = np.uint64(self.size)
        outside = np.flatnonzero(out >= limit)
        while len(outside):
            out[outside] = self._network(out[outside], back=back)
            outside = outside[out[outside] >= limit]
        return out.astype(np.int64)

    def _network(self, values: _UInt64, *, back: bool) -> _UInt64:
        high, low = values >> self._low_bits, values & self._low
        rounds = list(enumerate(self._keys))
        # Every round undoes itself.
        for number, key in reversed(rounds) if back else rounds:
            if number % 2:
                high = high ^ (_mix(low + key) & self._high)
            else:
                low = low ^ (_mix(high + key) & self._low)
        return (high << self._low_bits) | low


class BlockOrder:
    """Blocks of consecutive records, permuted; records are permuted within windows of blocks.

    While positions advance, records come from one window at a time, so a cache of two windows
    serves an epoch with every block read once. Any part is computed on its own.

    Parameters
    ----------
    size : int
        Number of records.
    block_size : int
        Consecutive records of a block; the last block may be smaller.
    blocks : int
        Blocks of a window.
    fingerprint : str
        Identity of the dataset's content.
    seed, epoch : int
        Any integers.

    Examples
    --------
    >>> order = BlockOrder(8, block_size=2, blocks=2, fingerprint="f", seed=0, epoch=0)
    >>> order[0:8].tolist()
    [0, 3, 1, 2, 7, 5, 4, 6]
    """

    is_sequence = False

    def __init__(
        self, size: int, *, block_size: int, blocks: int, fingerprint: str, seed: int, epoch: int
    ) -> None:
        self.size = size
        self.window = block_size * blocks
        self._block_size, self._blocks = block_size, blocks
        self._seed, self._epoch = seed, epoch
        self._label = f"{fingerprint}|blocks"
        self._number = -(-size // block_size)
        self._permuted = EpochOrder(
            self._number, shuffle=True, fingerprint=self._label, seed=seed, epoch=epoch
        )
        # What the last block lacks, and where in the order of blocks it comes.
        self._lacks = self._number * block_size - size
        self._short = int(self._permuted.find(np.array([self._number - 1]))[0]) if size else 0
        self._inner: tuple[int, EpochOrder] | None = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, span: slice) -> Int64:
        """Return the records at the positions of a slice, (n,) int64."""
        start, stop, step = span.indices(self.size)
        return self.at(np.arange(start, stop, step, dtype=np.int64))

    def at(self, positions: Int64) -> Int64:
        """Return the records at these positions, each in ``[0, size)``, as (n,) int64."""
        short_window = self._short // self._blocks
        # Behind the window with the short block, positions lag by what it lacks.
        behind = positions >= (short_window + 1) * self.window - self._lacks
        shifted = positions + np.where(behind, self._lacks, 0)
        windows = shifted // self.window
        out = np.empty(len(positions), np.int64)
        for number in np.unique(windows).tolist():
            chosen = np.flatnonzero(windows == number)
            first = number * self._blocks
            count = min(self._blocks, self._number - first)
            size = count * self._block_size - (self._lacks if number == short_window else 0)
            slots = self._within(number, size).at(shifted[chosen] - number * self.window)
            place, rows = slots // self._block_size + first, slots % self._block_size
            if number == short_window:
                # The short block comes last in its window, those behind it one earlier.
                last = place == first + count - 1
                place = np.where(last, self._short, place + (place >= self._short))
            out[chosen] = self._permuted.at(place) * self._block_size + rows
        return out

    def _within(self, number: int, size: int) -> EpochOrder:
        if self._inner is None or self._inner[0] != number:
            order = EpochOrder(
                size, shuffle=True, fingerprint=f"{self._label}|{number}", seed=self._seed,
                epoch=self._epoch,
            )  # fmt: skip
            self._inner = number, order
        return self._inner[1]


def _mix(values: _UInt64) -> _UInt64:
    """Return the finalizer of splitmix64; every input bit changes every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
