"""Sorted 64-bit hashes of any number of ids: those beyond the first few million lie on disk.

They are compared range by range, so that memory is bounded.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

__all__ = ["HashRuns", "UInt64", "id_hashes", "repeated", "shared"]

UInt64: TypeAlias = npt.NDArray[np.uint64]

# Hashes that are held and compared at once.
RANGE = 4 << 20
# Hashes that are yielded at a time: their ids are read again at once.
SUSPECTS = 1 << 16
_hash = xxhash.xxh3_64_intdigest


def id_hashes(ids: pa.Array) -> UInt64:
    """Return xxh3-64 of every text of an array, (n,) uint64."""
    texts = ids.to_pylist()
    return np.fromiter((_hash(text.encode()) for text in texts), np.uint64, len(texts))


class HashRuns:
    """The hashes of any number of ids: sorted runs, those that are full in files without a name.

    Parameters
    ----------
    folder : path, optional
        Where the files lie. Default: where the system keeps temporary files.
    size : int, optional
        Hashes of a run, about; 8 bytes each are held in memory.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, *, size: int | None = None
    ) -> None:
        self._folder = folder
        self._size = size or RANGE
        self._runs: list[UInt64] = []
        self._pending: list[UInt64] = []
        self._held = 0

    def add(self, ids: pa.Array) -> None:
        """Add the ids of a batch."""
        self._pending.append(id_hashes(ids))
        self._held += len(ids)
        if self._held >= self._size:
            self._spill()

    def parts(self) -> list[UInt64]:
        """Return all hashes, (n,) uint64 each, sorted; of runs on disk as maps of their files."""
        rest = np.sort(np.concatenate([np.zeros(0, np.uint64), *self._pending]))
        return [*self._runs, rest]

    def _spill(self) -> None:
        run = self.parts()[-1]
        # Without a name nothing is left over, however this process ends.
        with tempfile.TemporaryFile(dir=self._folder) as file:
            file.write(run.data)
            file.flush()
            self._runs.append(np.memmap(file, np.uint64, mode="r", shape=run.shape))
        self._pending, self._held = [], 0


def repeated(parts: Sequence[UInt64], *, size: int | None = None) -> Iterator[UInt64]:
    """Yield the hashes that occur more than once in sorted arrays, sorted, a few at a time.

    Parameters
    ----------
    parts : sequence of (n,) uint64
        Each sorted; mapped files are read once.
    size : int, optional
        Hashes held at once, about.

    Examples
    --------
    >>> a, b = np.array([1, 5, 9], np.uint64), np.array([2, 5], np.uint64)
    >>> list(repeated([a, b]))
    [array([5], dtype=uint64)]
    """
    for (held,) in _ranges([parts], size):
        held.sort()
        yield from _few(np.unique(held[1:][held[1:] == held[:-1]]))


def shared(old: Sequence[UInt64], new: Sequence[UInt64]) -> Iterator[UInt64]:
    """Yield the hashes that both have, sorted, a few at a time; parts as of :func:`repeated`."""
    for first, second in _ranges([old, new]):
        yield from _few(np.intersect1d(first, second))


def _few(found: UInt64) -> Iterator[UInt64]:
    return (found[start : start + SUSPECTS] for start in range(0, len(found), SUSPECTS))


def _ranges(groups: Sequence[Sequence[UInt64]], size: int | None = None) -> Iterator[list[UInt64]]:
    """Yield the hashes of each group, range by range."""
    total = sum(len(part) for parts in groups for part in parts)
    ranges = max(1, -(-total // (size or RANGE)))
    bounds = [(1 << 64) * n // ranges for n in range(ranges)]
    cuts = [
        [[*(int(np.searchsorted(part, np.uint64(b))) for b in bounds), len(part)] for part in parts]
        for parts in groups
    ]
    for n in range(ranges):
        yield [
            np.concatenate(
                [np.zeros(0, np.uint64)]
                + [part[cut[n] : cut[n + 1]] for part, cut in zip(parts, cut_of, strict=True)]
            )
            for parts, cut_of in zip(groups, cuts, strict=True)
        ]
