"""The widest candidate sets, with what is in them and where they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ragged_format.lists import offsets_of
from ragged_format.view import locate

if TYPE_CHECKING:
    from ragged_format.schema import RaggedSchema
    from ragged_pipeline.reports.samples import Samples

__all__ = ["Widest"]

_KEPT = 10
_IDS = 32


class Widest:
    """The ten widest sets of one axis; of equal ones, the first.

    Parameters
    ----------
    schema : RaggedSchema
        Of the data.
    axis : str
        Axis below ``target`` that holds sets.
    """

    def __init__(self, schema: RaggedSchema, axis: str) -> None:
        self.axis = axis
        self.counts = str(schema.axes[axis].counts)
        self._found: list[dict[str, Any]] = []

    def add(self, samples: Samples, first_record: int) -> None:
        """Add a batch whose first record has this number in the data."""
        column = samples.flat(self.counts)
        counts = column.numpy()
        least = self._found[-1]["size"] if len(self._found) == _KEPT else 0
        wide = np.flatnonzero(counts > least)
        if not len(wide):
            return
        if len(wide) > _KEPT:
            limit = np.partition(counts[wide], -_KEPT)[-_KEPT]
            wide = wide[counts[wide] >= limit]
        wide = wide[np.lexsort((wide, -counts[wide].astype(np.int64)))][:_KEPT]
        offsets = offsets_of(counts.astype(np.int64))
        ids = samples.scalar("sample_id")
        for target in wide.tolist():
            row, _ = locate(column.offsets, target)
            start, end = int(offsets[target]), int(offsets[target + 1])
            shown = slice(start, min(end, start + _IDS))
            owner = int(samples.owners[target])
            self._found.append(
                {
                    "size": end - start,
                    "record": first_record + row,
                    "sample_id": ids[owner].as_py(),
                    "position": int(samples.positions[target]),
                    "token": self._token(samples, target),
                    "ids": self._part(samples, "_ids", shown),
                    "log_probs": self._part(samples, "_log_probs", shown),
                }
            )
        self._keep()

    def _token(self, samples: Samples, target: int) -> int:
        if samples.is_packed:
            return int(samples.numbers("target_ids")[target])
        start = samples.flat("input_ids").offsets[samples.owners[target]]
        return int(samples.numbers("input_ids")[start + samples.positions[target]])

    def _part(self, samples: Samples, suffix: str, shown: slice) -> list[Any] | None:
        name = self.axis + suffix
        if name not in samples.schema:
            return None
        values: list[Any] = samples.numbers(name)[shown].tolist()
        return values

    def merge(self, other: Widest) -> None:
        """Add what another part of the data has."""
        self._found += other._found
        self._keep()

    def _keep(self) -> None:
        self._found.sort(key=lambda e: (-e["size"], e["record"], e["sample_id"], e["position"]))
        del self._found[_KEPT:]

    def to_json(self) -> list[dict[str, Any]]:
        """Return the sets, widest first, as JSON values; ids and log-probs of the first 32."""
        return self._found
