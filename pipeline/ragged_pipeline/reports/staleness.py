"""Which versions of the policy the samples come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ragged_pipeline.reports.bins import histogram
from ragged_pipeline.reports.tally import Tally

if TYPE_CHECKING:
    from ragged_pipeline.reports.samples import Samples

__all__ = ["Staleness"]


class Staleness:
    """Samples by policy version, and how many versions the targets of one sample span."""

    def __init__(self) -> None:
        self.versions = Tally()
        self.null = 0
        self.spans = Tally()
        self.by_target = Tally()
        self.has_targets = False

    def add(self, samples: Samples) -> None:
        """Add a batch."""
        column = samples.scalar("policy_version")
        self.null += column.null_count
        self.versions.add(column.drop_null().to_numpy())
        if "policy_versions" not in samples.schema:
            return
        self.has_targets = True
        versions = samples.numbers("policy_versions")
        self.by_target.add(versions)
        starts = np.flatnonzero(np.diff(samples.owners, prepend=-1))
        if len(starts):
            newest = np.maximum.reduceat(versions, starts)
            self.spans.add(newest - np.minimum.reduceat(versions, starts))

    def merge(self, other: Staleness) -> None:
        """Add another part of the data."""
        self.null += other.null
        self.has_targets |= other.has_targets
        for name in ("versions", "spans", "by_target"):
            getattr(self, name).merge(getattr(other, name))

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        behind = Tally()
        newest = self.versions.high
        if newest is not None:
            behind = self.versions.mirrored(int(newest))
        described = {"behind": behind, "versions": self.versions}
        if self.has_targets:
            described |= {"span": self.spans, "target_versions": self.by_target}
        return {
            "newest": newest, "oldest": self.versions.low, "null": self.null,
            "span": None, "target_versions": None,
            **{n: t.to_json() | {"histogram": histogram(t)} for n, t in described.items()},
        }  # fmt: skip
