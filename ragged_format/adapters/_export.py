"""What leaves: columns of a batch as arrays, and the refusal to lose any of them silently."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ragged_format.adapters._tables import HeadRows
from ragged_format.errors import ConversionError, SchemaMismatchError, Where
from ragged_format.lists import Int64, flat, offsets_of, to_numpy
from ragged_format.parse import parse_schema
from ragged_format.schema import RECORD

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Collection

    import pyarrow as pa

    from ragged_format.schema import RaggedSchema

__all__ = ["Samples", "head_of", "refuse_loss", "values_of"]


def values_of(batch: pa.RecordBatch, name: str) -> npt.NDArray[Any] | None:
    """Return a list column's values end to end as a view; ``None`` if there is no such column."""
    if name not in batch.schema.names:
        return None
    return to_numpy(flat(batch.column(name)).values)


def head_of(batch: pa.RecordBatch, axis: str) -> HeadRows | None:
    """Return the set or head of every target of a batch; ``None`` if it has none."""
    counts = values_of(batch, f"{axis}_counts")
    ids = values_of(batch, f"{axis}_ids")
    if counts is None or ids is None:
        return None
    log_probs = values_of(batch, f"{axis}_log_probs")
    return HeadRows(
        counts.astype(np.int64), ids, np.zeros(0, np.float32) if log_probs is None else log_probs,
        values_of(batch, f"{axis}_weights"),
    )  # fmt: skip


def refuse_loss(
    batch: pa.RecordBatch,
    carried: Collection[str],
    *,
    to: str,
    lossy: bool,
    counts: Counter[str] | None = None,
) -> None:
    """Raise if a column below the record axis holds something that the target cannot hold.

    Record columns that are not carried describe the data and are counted as ``not_carried``; so
    are the others where `lossy`.

    Raises
    ------
    ConversionError
        Naming the columns (``RF-A001``).
    """
    schema = parse_schema(batch.schema)
    lost = []
    for column in schema:
        if column.name in carried:
            continue
        array = batch.column(column.name)
        if column.axis in (RECORD, "member"):
            held = len(array) - array.null_count
        else:
            values = flat(array).values
            held = len(values)
            if column.name == "target_flags":
                held = int(np.count_nonzero(to_numpy(values)))
            elif column.name == "loss_weights":
                held = int(np.count_nonzero(to_numpy(values) != 1))
            elif column.opens is not None:
                held = int(np.count_nonzero(to_numpy(values)))
            if held:
                lost.append(column.name)
        if held and counts is not None:
            counts[f"not_carried.{column.name}"] += held
    if lost and not lossy:
        raise ConversionError(
            f"{to} has no place for some columns", where=Where(column=lost[0]),
            expected=f"only {', '.join(sorted(carried))}", got=", ".join(lost),
            remedy="pass lossy=True to leave them out, or select the columns to export",
        )  # fmt: skip


class Samples:
    """A batch of profile ``sample`` taken apart.

    Attributes
    ----------
    schema : RaggedSchema
    ids : (t,) int32
    offsets : (n + 1,) int64
        Tokens of each sample.
    mask : (t,) uint8
    positions : (m,) int64
        Flat index of each target's own token.
    bounds : (n + 1,) int64
        Targets of each sample.

    Raises
    ------
    SchemaMismatchError
        The batch is not of samples (``RF-S002``).
    """

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch
        self.schema: RaggedSchema = parse_schema(batch.schema)
        if self.schema.profile != "sample":
            raise SchemaMismatchError(
                "this is written from samples", code="RF-S002", expected="profile 'sample'",
                got=self.schema.profile, remedy="unpack_row gives the samples of a packed row",
            )  # fmt: skip
        ids, self.offsets = flat(batch.column("input_ids"))
        self.ids = to_numpy(ids)
        self.mask = to_numpy(flat(batch.column("completion_mask")).values)
        self.positions = np.flatnonzero(self.mask)
        self.bounds = np.searchsorted(self.positions, self.offsets)
        self.tokens = self.ids[self.positions]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def record(self, name: str) -> list[Any]:
        """Return a record column as Python values; ``None`` for each sample if it is absent."""
        if name not in self.batch.schema.names:
            return [None] * len(self)
        values: list[Any] = self.batch.column(name).to_pylist()
        return values

    def place(self, field: str) -> Any:
        """Return what tells, for errors, where a target is: its sample and its own position."""

        def at(target: int, /) -> Where:
            token = int(self.positions[target])
            row = int(np.searchsorted(self.offsets, token, side="right")) - 1
            return Where(row=row, column=field, position=token - int(self.offsets[row]))

        return at

    def on_tokens(self, values: npt.NDArray[Any], fill: float, dtype: npt.DTypeLike) -> Any:
        """Return a target column as one of all tokens, (t, ...), `fill` on context."""
        out = np.full((len(self.ids), *values.shape[1:]), fill, dtype)
        out[self.positions] = values
        return out

    def token_counts(self, counts: Int64) -> Int64:
        """Return counts of targets as counts of all tokens, 0 on context."""
        out: Int64 = self.on_tokens(counts, 0, np.int64)
        return out

    def entry_bounds(self, counts: Int64) -> Int64:
        """Return where the entries of each sample begin and end, (n + 1,) int64."""
        return offsets_of(counts)[self.bounds]
