"""Samples of a batch, seen alike in both profiles."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ragged_format.errors import InvariantError, Where
from ragged_format.lists import Flat, flat, segment_sums
from ragged_format.profiles import MEMBER_PREFIX
from ragged_format.view import locate

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

    from ragged_format.lists import Int64
    from ragged_format.schema import RaggedSchema

__all__ = ["Samples"]


class Samples:
    """The samples of a structurally valid batch: its records, or the members of packed ones.

    Raises
    ------
    InvariantError
        An index of a packed batch lies outside its axis (``RF-I034``, ``RF-I035``).
    """

    def __init__(self, batch: pa.RecordBatch, schema: RaggedSchema) -> None:
        self.batch = batch
        self.schema = schema
        self.is_packed = schema.profile == "packed"
        self._flat: dict[str, Flat] = {}

    def flat(self, name: str) -> Flat:
        """Return a list column as flat values and offsets per record."""
        if name not in self._flat:
            self._flat[name] = flat(self.batch.column(name))
        return self._flat[name]

    def numbers(self, name: str) -> npt.NDArray[Any]:
        """Return the flat values of a list column without nulls."""
        return self.flat(name).numpy()

    def scalar(self, name: str) -> pa.Array:
        """Return a record column of the samples, (samples,), which the data must have."""
        if not self.is_packed:
            return self.batch.column(name)
        return self.flat(MEMBER_PREFIX + name).values

    @property
    def count(self) -> int:
        """Number of samples."""
        return len(self.lengths)

    @cached_property
    def lengths(self) -> Int64:
        """Tokens of each sample, (samples,) int64."""
        if self.is_packed:
            return self.numbers("member_lengths").astype(np.int64)
        return self.flat("input_ids").lengths

    @cached_property
    def targets(self) -> Int64:
        """Targets of each sample, (samples,) int64."""
        if self.is_packed:
            return np.bincount(self.owners, minlength=self.count).astype(np.int64)
        mask = self.flat("completion_mask")
        return segment_sums(mask.numpy(), mask.offsets)

    @cached_property
    def owners(self) -> Int64:
        """Sample of each target, (targets,) int64."""
        if not self.is_packed:
            return np.repeat(np.arange(self.count), self.targets)
        column, members = self.flat("member_index"), self.flat("member_lengths")
        index = column.numpy().astype(np.int64)
        self._inside("RF-I035", "member_index", index, column, members.lengths)
        return index + np.repeat(members.offsets[:-1], column.lengths)

    @cached_property
    def positions(self) -> Int64:
        """Position within its sample of each target's token, (targets,) int64."""
        if self.is_packed:
            column, tokens = self.flat("pred_index"), self.flat("position_ids")
            index = column.numpy().astype(np.int64)
            self._inside("RF-I034", "pred_index", index, column, tokens.lengths)
            index += np.repeat(tokens.offsets[:-1], column.lengths)
            return tokens.numpy()[index].astype(np.int64) + 1
        offsets = self.flat("completion_mask").offsets
        ones = np.flatnonzero(self.numbers("completion_mask"))
        return ones - np.repeat(offsets[:-1], self.targets)

    @cached_property
    def prompts(self) -> Int64:
        """Tokens before the first target of each sample; all of them where it has none."""
        out = self.lengths.copy()
        first = np.flatnonzero(np.diff(self.owners, prepend=-1))
        out[self.owners[first]] = self.positions[first]
        return np.minimum(out, self.lengths)

    def record_of(self, sample: int) -> int:
        """Return the record of a sample within the batch."""
        return locate(self.flat("member_lengths").offsets, sample)[0] if self.is_packed else sample

    def _inside(self, code: str, name: str, index: Int64, column: Flat, sizes: Int64) -> None:
        bad = (index < 0) | (index >= np.repeat(sizes, column.lengths))
        if bad.any():
            first = int(np.argmax(bad))
            row, position = locate(column.offsets, first)
            raise InvariantError(
                f"{name} lies outside its axis", code=code,
                where=Where(row=row, column=name, position=position),
                expected=f"0 <= value < {int(sizes[row])}", got=int(index[first]),
                remedy="see all that is wrong with ragged validate",
            )  # fmt: skip
