"""What packing did with its input, in counts that add up."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["PackReport"]


@dataclass(slots=True)
class PackReport:
    """Counts over all rows that were packed with this report; ``samples`` is the sum of the rest.

    Attributes
    ----------
    rows : int
        Rows made.
    samples, kept, without_target : int
        Samples that came in, are members of a row, were left out because nothing in them is scored.
    tokens : int
        Tokens of the members, one by one.
    unique_tokens : int
        Tokens of the rows: what is forwarded.
    targets : int
        Scored tokens of the members.
    null_advantages : int
        Members whose advantage is null, allowed by name.
    conflicts : dict of str to int
        Per token column: tokens of members that differ from the shared copy of their row.
    """

    rows: int = 0
    samples: int = 0
    kept: int = 0
    without_target: int = 0
    tokens: int = 0
    unique_tokens: int = 0
    targets: int = 0
    null_advantages: int = 0
    conflicts: dict[str, int] = field(default_factory=dict)

    @property
    def packing_ratio(self) -> float:
        """Tokens per forwarded token; 1 where nothing is shared."""
        return self.tokens / self.unique_tokens if self.unique_tokens else 1.0

    def add_conflicts(self, column: str, count: int) -> None:
        """Count tokens of `column` that differ from the shared copy."""
        if count:
            self.conflicts[column] = self.conflicts.get(column, 0) + count

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as plain JSON values."""
        return asdict(self) | {"packing_ratio": round(self.packing_ratio, 4)}
