"""What was stored since the store was opened, for its status."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ragged_server.store.prepare import NO_VERSION
from ragged_server.store.records import BUCKETS, AppendRequest

__all__ = ["Counters"]


class Counters:
    """Running sums; see :class:`ragged_server.store.records.StoreStatus` for what they are."""

    def __init__(self) -> None:
        self.stored = 0
        self.duplicates = 0
        self.conflicts = 0
        self.tokens = 0
        self.scored_tokens = 0
        self.set_widths = np.zeros(BUCKETS, np.int64)
        self.staleness = np.zeros(BUCKETS, np.int64)

    def add(self, requests: Sequence[AppendRequest], newest: int | None) -> None:
        """Count stored records; `newest` is the newest policy version of the log."""
        for request in requests:
            self.stored += request.rows
            self.tokens += request.statistics.tokens
            self.scored_tokens += request.statistics.scored_tokens
            self.set_widths += request.statistics.set_widths
            if newest is not None:
                known = request.policy_versions[request.policy_versions != NO_VERSION]
                # The exponent of a float is the number of bits of the integer.
                bits = np.frexp((newest - known).astype(np.float64))[1]
                self.staleness += np.bincount(np.minimum(bits, BUCKETS - 1), minlength=BUCKETS)
