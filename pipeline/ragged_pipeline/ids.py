"""Whether sample ids are unique over any number of records, in bounded memory.

Each task leaves the sorted 64-bit hashes of its ids; they are compared range by range. Ids whose
hashes agree are read again and compared themselves, so that the answer is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from ragged_format.errors import InvariantError, Where

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["IdHashes", "id_hashes", "repeated_hashes", "require_unique"]

UInt64: TypeAlias = npt.NDArray[np.uint64]
# Hashes that are compared at once.
RANGE = 4 << 20


def id_hashes(ids: pa.Array) -> UInt64:
    """Return xxh3-64 of every text of an array, (n,) uint64."""
    hash_ = xxhash.xxh3_64_intdigest
    texts = ids.to_pylist()
    return np.fromiter((hash_(text.encode()) for text in texts), np.uint64, len(texts))


class IdHashes:
    """The hashes of the ids of one task."""

    def __init__(self) -> None:
        self._parts: list[UInt64] = []

    def add(self, ids: pa.Array) -> None:
        """Add the ids of a batch."""
        self._parts.append(id_hashes(ids))

    def save(self, path: Path) -> None:
        """Write all of them, sorted."""
        parts = [np.zeros(0, np.uint64), *self._parts]
        np.save(path, np.sort(np.concatenate(parts)))


def repeated_hashes(parts: Sequence[UInt64], *, size: int = RANGE) -> UInt64:
    """Return the hashes that occur more than once in sorted arrays, sorted.

    Parameters
    ----------
    parts : sequence of (n,) uint64
        Each sorted; mapped files are read once.
    size : int
        Hashes held at once, about.

    Examples
    --------
    >>> a, b = np.array([1, 5, 9], np.uint64), np.array([2, 5], np.uint64)
    >>> repeated_hashes([a, b])
    array([5], dtype=uint64)
    """
    total = sum(len(part) for part in parts)
    ranges = max(1, -(-total // size))
    bounds = [(1 << 64) * n // ranges for n in range(ranges)]
    cuts = [
        [*(int(np.searchsorted(part, np.uint64(bound))) for bound in bounds), len(part)]
        for part in parts
    ]
    found = [np.zeros(0, np.uint64)]
    for n in range(ranges):
        held = np.concatenate(
            [np.zeros(0, np.uint64)]
            + [part[cut[n] : cut[n + 1]] for part, cut in zip(parts, cuts, strict=True)]
        )
        held.sort()
        found.append(np.unique(held[1:][held[1:] == held[:-1]]))
    return np.concatenate(found)


def require_unique(hashes: Sequence[UInt64], batches: Iterable[tuple[Where, pa.Array]]) -> None:
    """Raise if two records have one id.

    Parameters
    ----------
    hashes : sequence of (n,) uint64
        Sorted, of all ids.
    batches : iterable of (Where, pyarrow.Array)
        All ids again with their places; read only if hashes agree.

    Raises
    ------
    InvariantError
        With both places (``RF-I006``).
    """
    repeated = repeated_hashes(hashes)
    if not len(repeated):
        return
    seen: dict[str, Where] = {}
    for place, sample_id in _suspects(repeated, batches):
        first = seen.setdefault(sample_id, place)
        if first is not place:
            raise InvariantError(
                "a sample_id is not unique", code="RF-I006", where=place,
                expected="an id that no other record has", got=f"{sample_id!r}, also at {first}",
                remedy="give every record its own id",
            )  # fmt: skip


def _suspects(
    repeated: UInt64, batches: Iterable[tuple[Where, pa.Array]]
) -> Iterator[tuple[Where, str]]:
    for where, ids in batches:
        rows = np.flatnonzero(np.isin(id_hashes(ids), repeated))
        for row in rows.tolist():
            yield Where(row=row, column="sample_id").inside(where), str(ids[row].as_py())
