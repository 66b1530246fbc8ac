"""Sizes, padding and mass of the sets and heads of targets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ragged_format.rules import TargetFlag
from ragged_pipeline.reports.bins import histogram
from ragged_pipeline.reports.mass import Mass
from ragged_pipeline.reports.tally import Tally

if TYPE_CHECKING:
    from ragged_format.schema import RaggedSchema
    from ragged_pipeline.reports.samples import Samples

__all__ = ["Counted"]

_FLAGS = {
    "candidate": (TargetFlag.SUPPORT_MISSING, TargetFlag.SUPPORT_OVERFLOW),
    "topk": (TargetFlag.HEAD_MISSING,),
    "teacher_topk": (TargetFlag.TEACHER_MISSING,),
}


class Counted:
    """One axis that a counts column opens: how many elements each of its owners has.

    Attributes
    ----------
    sizes : Tally
        The counts.
    flagged : int
        Owners without elements because a flag says that those are missing.
    mass : Mass, optional
        Where the axis is a set or head with log-probs.
    """

    def __init__(self, schema: RaggedSchema, axis: str) -> None:
        self.axis = axis
        self.counts = str(schema.axes[axis].counts)
        self.parent = schema.axes[axis].parent
        self.kind = schema[self.counts].head_kind
        self.vocab_size = schema.vocab_size
        self.sizes = Tally()
        self.flagged = 0
        self.record_slots = self.bucket_slots = 0
        self.mass: Mass | None = None
        column = schema.columns.get(f"{axis}_log_probs")
        mode = None if column is None else column.log_prob
        if self.kind not in {None, "draws"} and mode is not None and mode.value == "log_prob":
            self.mass = Mass(mode.normalizer, in_order=self.kind != "set")

    def add(self, samples: Samples) -> None:
        """Add a batch."""
        column = samples.flat(self.counts)
        counts = column.numpy()
        self.sizes.add(counts)
        # The record's table is as wide as its largest count.
        full = np.flatnonzero(column.lengths)
        if len(full):
            widest = np.maximum.reduceat(counts, column.offsets[full]).astype(np.int64)
            self.record_slots += int((widest * column.lengths[full]).sum())
        if self.axis in _FLAGS and "target_flags" in samples.schema:
            bits = sum(_FLAGS[self.axis])
            flagged = (samples.numbers("target_flags") & bits != 0) & (counts == 0)
            self.flagged += int(flagged.sum())
        if self.mass is not None:
            self.mass.add(samples.numbers(f"{self.axis}_log_probs"), counts)

    def merge(self, other: Counted) -> None:
        """Add another part of the data."""
        self.sizes.merge(other.sizes)
        self.flagged += other.flagged
        self.record_slots += other.record_slots
        if self.mass is not None and other.mass is not None:
            self.mass.merge(other.mass)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        sizes = self.sizes
        owners, elements = sizes.count, int(sizes.total)
        zero, one = sizes.between(0, 0), sizes.between(1, 1)
        values = sizes.values.astype(np.int64)
        buckets = np.where(values > 0, 1 << _bits(values), 0)
        padding = {
            "elements": elements,
            "power_of_two_buckets": int((buckets * sizes.often).sum()),
            "table_per_record": self.record_slots,
            "one_table": owners * int(sizes.high or 0),
        }
        if self.kind is not None:
            padding["vocabulary"] = owners * self.vocab_size
        return {
            "axis": self.axis, "per": self.parent, "head_kind": self.kind,
            "sizes": sizes.to_json() | {"histogram": histogram(sizes)},
            "zero": zero, "flagged": self.flagged, "singletons": one,
            "singleton_share": one / (owners - zero) if owners > zero else None,
            "slots": padding,
            "mass": None if self.mass is None else self.mass.to_json(),
        }  # fmt: skip


def _bits(values: Any) -> Any:
    """Return the exponent of the smallest power of two that is not below each value."""
    return np.ceil(np.log2(np.maximum(values, 1))).astype(np.int64)
