"""All figures of a report, gathered batch by batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ragged_format.rules import TargetFlag
from ragged_format.schema import RECORD, Column, RaggedSchema, type_name
from ragged_pipeline.reports.bins import histogram
from ragged_pipeline.reports.groups import Groups
from ragged_pipeline.reports.packed import Packing
from ragged_pipeline.reports.runs import Runs
from ragged_pipeline.reports.samples import Samples
from ragged_pipeline.reports.sets import Counted
from ragged_pipeline.reports.staleness import Staleness
from ragged_pipeline.reports.tally import Tally, Words
from ragged_pipeline.reports.widest import Widest

__all__ = ["Options", "Statistics"]

_LENGTHS = ("tokens", "prompt", "completion", "targets")
_WORDS = ("finish_reason", "env_name", "teacher_id")
_NUMBERS = ("reward", "advantage")
_FLAGS = {
    "support_missing": TargetFlag.SUPPORT_MISSING,
    "support_overflow": TargetFlag.SUPPORT_OVERFLOW,
    "log_prob_missing": TargetFlag.LOG_PROB_MISSING,
    "head_missing": TargetFlag.HEAD_MISSING,
    "teacher_missing": TargetFlag.TEACHER_MISSING,
}


@dataclass(frozen=True, slots=True)
class Options:
    """What the figures depend on besides the data.

    Attributes
    ----------
    ranks : int
        Ranks that share packed rows, one row of each step for each; 1: no balance is shown.
    batch_size : int
        Records that are padded together, for the waste of padded token tables.
    row : int, optional
        Record whose forest is shown.
    """

    ranks: int = 1
    batch_size: int = 8
    row: int | None = None


class Statistics:
    """The figures of the batches added so far.

    Guarantees: memory is bounded, whatever the data size. Parts merged in the order of the data
    give the same figures whoever gathered them; all but the sums of a group's rewards are the same
    for any division into parts.
    """

    def __init__(self, schema: RaggedSchema, options: Options) -> None:
        self.schema = schema
        self.options = options
        self.records = 0
        self.lengths = {name: Tally() for name in _LENGTHS}
        self.padded = Runs(options.batch_size)
        self.elements: dict[str, int] = {}
        self.bytes = dict.fromkeys(schema.columns, 0)
        self.nulls = dict.fromkeys(schema.columns, 0)
        self.counted = {
            axis.name: Counted(schema, axis.name)
            for axis in schema.axes.values()
            if axis.counts is not None and not axis.mask
        }
        sets = [
            name for name, counted in self.counted.items()
            if counted.kind == "set" and counted.parent == "target"
        ]  # fmt: skip
        self.widest = Widest(schema, sets[0]) if sets else None
        self.packing = Packing(options.ranks, options.row) if schema.profile == "packed" else None
        prefix = "member_" if schema.profile == "packed" else ""

        def has(name: str) -> bool:
            return prefix + name in schema

        self.words = {name: Words() for name in _WORDS if has(name)}
        self.numbers = {name: Tally() for name in _NUMBERS if has(name)}
        self.number_nulls = dict.fromkeys(self.numbers, 0)
        self.groups = Groups() if has("group_id") and has("reward") else None
        self.group_nulls = 0
        self.staleness = Staleness() if has("policy_version") else None
        self.flags = dict.fromkeys(_FLAGS, 0) if "target_flags" in schema else None

    def add(self, batch: pa.RecordBatch, first_record: int) -> None:
        """Add a structurally valid batch whose first record has this number in the data."""
        samples = Samples(batch, self.schema)
        self.records += batch.num_rows
        for name in self.schema.columns:
            self._measure(name, batch.column(name), samples)
        lengths, prompts = samples.lengths, samples.prompts
        self.lengths["tokens"].add(lengths)
        self.lengths["prompt"].add(prompts)
        self.lengths["completion"].add(lengths - prompts)
        self.lengths["targets"].add(samples.targets)
        self.padded.add(first_record, samples.flat("input_ids").lengths)
        for counted in self.counted.values():
            counted.add(samples)
        if self.widest is not None:
            self.widest.add(samples, first_record)
        if self.packing is not None:
            self.packing.add(samples, first_record)
        if self.staleness is not None:
            self.staleness.add(samples)
        if self.flags is not None:
            flags = np.bincount(samples.numbers("target_flags"), minlength=256)
            for name, bit in _FLAGS.items():
                self.flags[name] += int(flags[np.arange(256) & bit != 0].sum())
        self._add_scalars(samples)

    def _measure(self, name: str, array: pa.Array, samples: Samples) -> None:
        axis = self.schema[name].axis
        values = array if axis == RECORD else samples.flat(name).values
        # Without null bitmaps and the last offset, so that no division of the data changes it.
        self.bytes[name] += _bytes(values) + (0 if axis == RECORD else 8 * len(array))
        self.nulls[name] += values.null_count
        if next(iter(self.schema.on(axis))).name == name:
            self.elements[axis] = self.elements.get(axis, 0) + len(values)

    def _add_scalars(self, samples: Samples) -> None:
        for name, words in self.words.items():
            counts = pc.value_counts(samples.scalar(name))
            words.add(counts.field(0).to_pylist(), counts.field(1).to_pylist())
        for name, tally in self.numbers.items():
            column = samples.scalar(name)
            self.number_nulls[name] += column.null_count
            tally.add(column.drop_null().to_numpy(zero_copy_only=False))
        if self.groups is not None:
            group, reward = samples.scalar("group_id"), samples.scalar("reward")
            usable = pc.and_(group.is_valid(), pc.is_finite(reward).fill_null(False))  # noqa: FBT003
            self.group_nulls += len(usable) - usable.true_count
            rewards = reward.filter(usable).to_numpy(zero_copy_only=False)
            self.groups.add(group.filter(usable), rewards.astype(np.float64))

    def merge(self, other: Statistics) -> None:
        """Add the part of the data that follows."""
        self.records += other.records
        for mine, theirs in (
            (self.elements, other.elements), (self.bytes, other.bytes), (self.nulls, other.nulls),
            (self.number_nulls, other.number_nulls), (self.flags or {}, other.flags or {}),
        ):  # fmt: skip
            for name, count in theirs.items():
                mine[name] = mine.get(name, 0) + count
        self.group_nulls += other.group_nulls
        for name in ("lengths", "counted", "words", "numbers"):
            for key, part in getattr(self, name).items():
                part.merge(getattr(other, name)[key])
        for name in ("padded", "widest", "packing", "groups", "staleness"):
            if (part := getattr(self, name)) is not None:
                part.merge(getattr(other, name))

    def to_json(self, *, token_budget: int | None = None) -> dict[str, Any]:
        """Return all figures as JSON values; parts that the data has no columns for are null.

        Parameters
        ----------
        token_budget : int, optional
            Tokens of a full packed row; by default those of the longest.
        """
        packed = {"packing": None, "balance": None, "tree": None}
        if self.packing is not None:
            packed |= self.packing.to_json(token_budget)
        return {
            "totals": {
                "records": self.records,
                "samples": self.lengths["tokens"].count,
                "tokens": self.elements.get("token", 0),
                "targets": int(self.lengths["targets"].total),
                "elements": {RECORD: self.records, **self._elements()},
                "bytes": sum(self.bytes.values()),
            },
            "columns": [
                _declared(column)
                | {"bytes": self.bytes[column.name], "nulls": self.nulls[column.name]}
                for column in self.schema
            ],
            "lengths": {name: _described(tally) for name, tally in self.lengths.items()},
            "padding": self._padding(),
            "axes": [counted.to_json() for counted in self.counted.values()],
            "widest": None if self.widest is None else self.widest.to_json(),
            **packed,
            "staleness": None if self.staleness is None else self.staleness.to_json(),
            **{
                name: _described(self.numbers[name]) | {"null": self.number_nulls[name]}
                if name in self.numbers else None
                for name in _NUMBERS
            },
            "groups": self._groups(),
            **{name: w.to_json() if (w := self.words.get(name)) else None for name in _WORDS},
            "flags": self.flags,
        }  # fmt: skip

    def _elements(self) -> dict[str, int]:
        out = dict(self.elements)
        out.pop(RECORD, None)
        for axis in self.schema.axes.values():
            if axis.mask:
                out.setdefault(axis.name, int(self.lengths["targets"].total))
            elif axis.name in self.counted:
                out[axis.name] = int(self.counted[axis.name].sizes.total)
        return out

    def _padding(self) -> dict[str, Any]:
        rest = self.padded.unfinished
        longest = max(self.lengths["tokens"].high or 0, 0)
        if self.packing is not None:
            longest = self.packing.tokens.high or 0
        return {
            "batch_size": self.options.batch_size,
            "tokens": self.padded.total + sum(part[2] for part in rest),
            "batches": self.padded.largest * self.padded.size
            + sum(part[0] * part[1] for part in rest),
            "one_table": self.records * int(longest),
        }

    def _groups(self) -> dict[str, Any] | None:
        if self.groups is None:
            return None
        data = self.groups.to_json()
        tallies = data.pop("tallies")
        for name, tally in tallies.items():
            data[name]["histogram"] = histogram(tally)
        return data | {"left_out": self.group_nulls}


def _bytes(values: pa.Array) -> int:
    kind, width = values.type, 1
    if pa.types.is_fixed_size_list(kind):
        kind, width = kind.value_type, kind.list_size
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return int(pc.sum(pc.binary_length(values)).as_py() or 0) + 4 * len(values)
    return len(values) * width * int(kind.bit_width) // 8


def _declared(column: Column) -> dict[str, Any]:
    notes = [f"opens {column.opens}"] if column.opens is not None else []
    if column.mask:
        notes.append("mask")
    if column.head_kind is not None:
        notes.append(column.head_kind)
    if column.log_prob is not None:
        mode = column.log_prob
        notes.append(f"{mode.mode} {mode.value} over the {mode.normalizer}")
    notes += [k for k in ("nullable", "approximate", "share_key", "media") if getattr(column, k)]
    return {
        "name": column.name, "axis": column.axis, "type": type_name(column.type),
        "shape": list(column.shape), "notes": notes,
    }  # fmt: skip


def _described(tally: Tally) -> dict[str, Any]:
    return tally.to_json() | {"histogram": histogram(tally)}
