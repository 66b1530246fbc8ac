"""Samples on their way to a trainer: flat arrays, and what the trainer's form cannot hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ragged_format.errors import ConversionError, Where
from ragged_format.lists import Int64, flat, offsets_of, to_numpy
from ragged_format.packing.pack import scored_tokens
from ragged_format.parse import parse_schema
from ragged_format.rules import TargetFlag
from ragged_format.schema import RECORD

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pyarrow as pa

__all__ = ["Outgoing"]

_FLAGS = {
    value: name.lower() for name, value in vars(TargetFlag).items() if not name.startswith("_")
}


class Outgoing:
    """The records of a batch as arrays over all of them.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
        Profile ``sample``, valid.
    system : str
        For errors.
    holds : iterable of str
        Columns below the record axis that the system's form can hold, besides the required ones.

    Attributes
    ----------
    tokens : (t,) int32
        All tokens.
    offsets : (n + 1,) int64
        Tokens of each record.
    scored : (t,) bool
    positions : (m,) int64
        Index of each target among all tokens.
    targets : (n + 1,) int64
        Targets of each record.

    Raises
    ------
    ConversionError
        The batch has another profile, columns that the form cannot hold, or flagged targets, which
        it has no word for (``RF-A001``).
    """

    def __init__(self, batch: pa.RecordBatch, system: str, holds: Iterable[str]) -> None:
        self.schema = parse_schema(batch.schema)
        if self.schema.profile != "sample":
            raise ConversionError(
                f"samples are written for {system}", expected="profile 'sample'",
                got=f"profile {self.schema.profile!r}",
                remedy="unpack the rows: ragged_format.packing.unpack_row",
            )  # fmt: skip
        self.batch = batch
        self.system = system
        held = {*holds, "input_ids", "completion_mask", "target_flags"}
        lost = [c.name for c in self.schema if c.axis != RECORD and c.name not in held]
        if lost:
            raise ConversionError(
                f"the form of {system} has no place for columns", where=Where(column=lost[0]),
                expected=", ".join(sorted(held)), got=", ".join(lost),
                remedy="leave them out: batch.select([...])",
            )  # fmt: skip
        found = scored_tokens(batch)
        self.tokens, self.offsets = found.tokens, found.offsets
        self.positions, self.targets = found.positions, found.bounds
        self.scored = np.zeros(len(self.tokens), bool)
        self.scored[self.positions] = True
        self._refuse_flags()

    def _refuse_flags(self) -> None:
        flags = self.values("target_flags")
        if flags is None or not flags.any():
            return
        target = int(np.argmax(flags != 0))
        names = [name for bit, name in _FLAGS.items() if flags[target] & bit]
        raise ConversionError(
            f"the form of {self.system} cannot say that a target lacks something",
            where=self.place("target_flags", target), expected="no flagged target",
            got=", ".join(names),
            remedy="do not score these targets: ragged_format.select_targets",
        )  # fmt: skip

    @property
    def num_records(self) -> int:
        """Number of records."""
        return int(self.batch.num_rows)

    def place(self, column: str, target: int) -> Where:
        """Return where a target of the batch is."""
        row = int(np.searchsorted(self.targets, target, side="right")) - 1
        return Where(row=row, column=column, position=target - int(self.targets[row]))

    def values(self, name: str) -> npt.NDArray[Any] | None:
        """Return the values of a column below the record axis end to end, if there is one."""
        return to_numpy(flat(self.batch.column(name)).values) if name in self.schema else None

    def record(self, name: str) -> Sequence[Any]:
        """Return the values of a record column; nulls if there is none."""
        if name not in self.schema:
            return [None] * self.num_records
        values: list[Any] = self.batch.column(name).to_pylist()
        return values

    def spread(
        self, values: npt.NDArray[Any], rest: float = 0.0, dtype: npt.DTypeLike = np.float64
    ) -> npt.NDArray[Any]:
        """Return values of targets as values of all tokens, `rest` where a token is none."""
        out = np.full((len(self.tokens), *values.shape[1:]), rest, dtype)
        out[self.positions] = values
        return out

    def sets(self) -> tuple[Int64, npt.NDArray[np.int32], npt.NDArray[np.float32] | None] | None:
        """Return the candidate sets as counts of targets, ids and log-probs, if there are any."""
        counts, ids = self.values("candidate_counts"), self.values("candidate_ids")
        if counts is None or ids is None:
            return None
        return counts.astype(np.int64), ids, self.values("candidate_log_probs")

    def candidate_bounds(self, counts: Int64) -> Int64:
        """Return the candidates of each record, (n + 1,) int64."""
        return offsets_of(counts)[self.targets]
