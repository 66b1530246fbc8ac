"""Rewards of groups that lie anywhere in the data, in bounded memory."""

from __future__ import annotations

from heapq import nsmallest
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from ragged_pipeline.reports.tally import Tally

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

__all__ = ["LIMIT", "Groups"]

# Groups that are kept at once.
LIMIT = 1 << 17
_FIELDS = ("count", "total", "squares", "low", "high")
# Groups that are shown by name: those of the smallest hashes.
_NAMED = 12
_LETTERS = 200


class Groups:
    """Count, mean and spread of the rewards of each group.

    Groups are known by the hash of their id. Where there are more than 131,072, only those whose
    hash is below a limit are kept, all of their records or none: a sample of whole groups, which
    depends on the ids alone. The limit halves until what is left fits.

    Attributes
    ----------
    level : int
        One in ``2 ** level`` groups is kept; 0: all.
    """

    def __init__(self) -> None:
        self.level = 0
        self._keys = np.zeros(0, np.uint64)
        self._data = np.zeros((0, len(_FIELDS)))
        self._pending: list[tuple[npt.NDArray[np.uint64], npt.NDArray[np.float64]]] = []
        self._waiting = 0
        self._names: dict[int, str] = {}

    def add(self, ids: pa.Array, rewards: npt.NDArray[np.float64]) -> None:
        """Add the group's id, not null, and the finite reward of each record, both (m,)."""
        encoded = ids.dictionary_encode()
        names = encoded.dictionary.to_pylist()
        hashes = [xxhash.xxh3_64_intdigest(name.encode()) for name in names]
        self._name(dict(zip(hashes, names, strict=True)))
        keys: npt.NDArray[np.uint64] = np.array(hashes, np.uint64)[encoded.indices.to_numpy()]
        rows = np.stack([np.ones(len(rewards)), rewards, rewards * rewards, rewards, rewards], 1)
        self._take(*_joined(keys, rows))

    def _name(self, names: dict[int, str]) -> None:
        self._names |= {key: names[key][:_LETTERS] for key in nsmallest(_NAMED, names)}
        if len(self._names) > _NAMED:
            self._names = {key: self._names[key] for key in nsmallest(_NAMED, self._names)}

    def merge(self, other: Groups) -> None:
        """Add all that another has, which is later in the data."""
        other._settle()
        self._name(other._names)
        self.level = max(self.level, other.level)
        self._take(other._keys, other._data)

    def _take(self, keys: npt.NDArray[np.uint64], data: npt.NDArray[np.float64]) -> None:
        kept = self._kept(keys)
        self._pending.append((keys[kept], data[kept]))
        self._waiting += int(kept.sum())
        if self._waiting >= LIMIT:
            self._settle()

    def _kept(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        kept: npt.NDArray[np.bool_] = keys <= np.uint64((1 << (64 - self.level)) - 1)
        return kept

    def _settle(self) -> None:
        keys = np.concatenate([self._keys, *[k for k, _ in self._pending]])
        data = np.concatenate([self._data, *[d for _, d in self._pending]])
        self._pending, self._waiting = [], 0
        kept = self._kept(keys)
        keys, data = _joined(keys[kept], data[kept])
        while len(keys) > LIMIT:
            self.level += 1
            kept = self._kept(keys)
            keys, data = keys[kept], data[kept]
        self._keys, self._data = keys, data

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        return self.__dict__

    @property
    def table(self) -> dict[str, npt.NDArray[np.float64]]:
        """Per kept group, by ascending hash: count, mean, std (population), low, high."""
        self._settle()
        count, total, squares, low, high = self._data.T
        mean = np.clip(total / np.maximum(count, 1), low, high)
        spread = np.sqrt(np.maximum(squares / np.maximum(count, 1) - mean * mean, 0.0))
        return {
            "count": count, "mean": mean, "std": np.where(low == high, 0.0, spread),
            "low": low, "high": high,
        }  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return the distributions over groups as JSON values."""
        table = self.table
        size = len(table["count"])
        equal = table["low"] == table["high"]
        several = table["count"] > 1
        tallies = {"mean": Tally(), "std": Tally(), "size": Tally()}
        tallies["mean"].add(table["mean"])
        tallies["std"].add(table["std"][several])
        tallies["size"].add(table["count"].astype(np.int64))
        return {
            "kept": size,
            "one_in": 1 << self.level,
            "of_one": int(size - several.sum()),
            "without_spread": int((equal & several).sum()),
            "named": self._named(table),
            **{name: tally.to_json() for name, tally in tallies.items()},
            "tallies": tallies,
        }

    def _named(self, table: dict[str, npt.NDArray[np.float64]]) -> list[dict[str, Any]]:
        """Return the groups of the smallest hashes, which are the first of the table."""
        first = {name: column[:_NAMED].tolist() for name, column in table.items()}
        return [
            {
                "group_id": self._names[key], "samples": int(first["count"][place]),
                "mean": first["mean"][place], "std": first["std"][place],
                "min": first["low"][place], "max": first["high"][place],
            }
            for place, key in enumerate(self._keys[:_NAMED].tolist())
        ]  # fmt: skip


def _joined(
    keys: npt.NDArray[np.uint64], data: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float64]]:
    """Return each key once, with sums, and extremes, over its rows in their order."""
    distinct, place = np.unique(keys, return_inverse=True)
    out = np.zeros((len(distinct), len(_FIELDS)))
    for column in range(3):
        out[:, column] = np.bincount(place, data[:, column], minlength=len(distinct))
    out[:, 3], out[:, 4] = np.inf, -np.inf
    np.minimum.at(out[:, 3], place, data[:, 3])
    np.maximum.at(out[:, 4], place, data[:, 4])
    return distinct, out
