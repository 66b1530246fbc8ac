"""Check that data keeps every invariant of the format; errors say where.

Two levels. ``structural`` makes the lists safe to index: valid Arrow arrays, no stray nulls,
lengths that agree on every axis. ``full`` adds the rules on values. Everything that comes from
outside a process is validated fully once, where it enters: Arrow's own readers accept decreasing
offsets that crash other readers later.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pyarrow as pa

from ragged_format.arguments import check_choice
from ragged_format.canonical import ArrowExportable, as_batches
from ragged_format.errors import InvariantError, LimitExceededError, Where
from ragged_format.lists import Flat, Int64, flat, offsets_of
from ragged_format.parse import parse_schema
from ragged_format.rules import FULL_RULES
from ragged_format.schema import RECORD, Axis, Column, RaggedSchema
from ragged_format.soundness import check_array, is_sound
from ragged_format.view import View, locate

__all__ = ["UniqueIds", "validate"]

Level = Literal["full", "structural"]
LEVELS: tuple[Level, ...] = ("full", "structural")
MAX_AXIS_LENGTH = 2**62


def validate(
    data: pa.RecordBatch | pa.Table | ArrowExportable,
    *,
    level: Level = "full",
    where: Where | None = None,
) -> None:
    """Raise unless `data` keeps every invariant of its profile.

    Guarantees: reads only; vectorised, a few passes over each column.

    Parameters
    ----------
    data : RecordBatch, Table or anything with ``__arrow_c_stream__``
        With this format's schema metadata.
    level : {"full", "structural"}
        ``structural``: lengths, offsets and nulls only.
    where : Where, optional
        Place of the data (file, first batch) for errors.

    Raises
    ------
    NotRaggedError, SchemaMismatchError, UnsupportedVersionError, UnsupportedFeatureError
        The schema is not one of this format.
    LimitExceededError
        `level` is no level (``RF-L001``).
    InvariantError
        With the code of the broken rule, the row, column and position of its first breach.

    Examples
    --------
    >>> from ragged_format import sample_schema
    >>> schema = sample_schema(vocab_size=10, columns=[])
    >>> row = {"sample_id": "a", "input_ids": [1, 12], "completion_mask": [0, 1]}
    >>> validate(pa.RecordBatch.from_pylist([row], schema=schema))
    Traceback (most recent call last):
    ...
    ragged_format.errors.InvariantError: [RF-I007] a token id is outside the vocabulary
      where:    row 0, column 'input_ids', position 1
      expected: 0 <= id < 10
      got:      12
    """
    check_choice("level", level, LEVELS)
    if where is not None and not isinstance(where, Where):
        raise LimitExceededError(
            "where is the place of the data", expected="rf.Where", got=repr(where),
            remedy="pass rf.Where(file=…)",
        )  # fmt: skip
    outer = where or Where()
    ids = UniqueIds()
    for number, batch in enumerate(as_batches(data), outer.batch or 0):
        place = outer if isinstance(data, pa.RecordBatch) else Where(outer.file, number)
        validate_batch(batch, parse_schema(batch.schema), level, place)
        if level == "full" and "sample_id" in batch.schema.names:
            ids.add(batch.column("sample_id"), place)


def validate_batch(batch: pa.RecordBatch, schema: RaggedSchema, level: Level, where: Where) -> None:
    """Validate one batch whose schema is parsed already; ids are compared within it only."""
    try:
        view = _structure(batch, schema, _check_arrays(batch, schema))
        if level == "full":
            for rule in FULL_RULES:
                if rule.profile in {None, schema.profile}:
                    rule.check(view)
    except InvariantError as err:
        raise err.at(where) from err.__cause__


class UniqueIds:
    """Sample ids seen so far, for uniqueness over several batches.

    Keeps every id, about 200 bytes each: for data that is in memory anyway.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Where, int]] = {}

    def add(self, ids: pa.Array, where: Where) -> None:
        """Add the ids of one batch; raises ``RF-I006`` for one that is empty or known."""
        for row, sample_id in enumerate(ids.to_pylist()):
            first = self._seen.setdefault(sample_id, (where, row))
            if first != (where, row) or not sample_id:
                place = Where(row=row, column="sample_id").inside(where)
                raise InvariantError(
                    "a sample_id is not unique" if sample_id else "a sample_id is empty",
                    code="RF-I006",
                    where=place,
                    expected="an id that no other record has",
                    got=f"{sample_id!r}, also at {Where(row=first[1]).inside(first[0])}"
                    if sample_id
                    else repr(sample_id),
                    remedy="give every record its own id",
                )


def _check_arrays(batch: pa.RecordBatch, schema: RaggedSchema) -> dict[str, Flat]:
    lists: dict[str, Flat] = {}
    arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
    all_sound = is_sound(batch)
    for column in schema:
        array = arrays[column.name]
        if not all_sound:
            check_array(array, column.name)
        if column.axis == RECORD:
            _check_nulls(column, array, None)
        else:
            lists[column.name] = found = _flat(array, column.name)
            _check_nulls(column, found.values, found.offsets)
    return lists


def _flat(array: pa.Array, name: str) -> Flat:
    """Return a list column as :func:`flat` does; the error for a null list names the column."""
    try:
        return flat(array)
    except InvariantError as err:
        raise err.at(Where(column=name)) from None


def _check_nulls(column: Column, elements: pa.Array, offsets: Int64 | None) -> None:
    """Raise ``RF-I002`` for a null that may not be; `offsets` is None on the record axis."""
    bad = None
    if elements.null_count and not column.nullable:
        bad = _first_null(elements)
    elif column.shape and (numbers := elements.flatten()).null_count:
        bad = _first_null(numbers) // column.width
    if bad is None:
        return
    row, position = (bad, None) if offsets is None else locate(offsets, bad)
    raise InvariantError(
        "a value is null", code="RF-I002", expected="no nulls", got="null",
        where=Where(row=row, column=column.name, position=position),
    )  # fmt: skip


def _first_null(array: pa.Array) -> int:
    return int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))


def _structure(batch: pa.RecordBatch, schema: RaggedSchema, lists: dict[str, Flat]) -> View:
    records: dict[str, Int64] = {}
    parents: dict[str, Int64] = {}
    pending: list[Axis] = [axis for axis in schema.axes.values() if axis.counts is None]
    for axis in pending:
        pending.extend(schema.children(axis.name))
        on_axis = [column.name for column in schema.on(axis.name)]
        if axis.counts is None:
            reference = lists[on_axis[0]].offsets if on_axis else np.zeros(
                batch.num_rows + 1, np.int64
            )  # fmt: skip
            records[axis.name] = parents[axis.name] = reference
        else:
            counts = lists[axis.counts]
            per_parent = _checked_counts(counts, axis)
            parents[axis.name] = offsets_of(per_parent)
            records[axis.name] = parents[axis.name][counts.offsets]
        _check_lengths(axis, records[axis.name], {name: lists[name] for name in on_axis})
    return View(batch, schema, lists, records, parents)


def _checked_counts(counts: Flat, axis: Axis) -> Int64:
    values = counts.numpy()
    if not len(values):
        return values.astype(np.int64)
    # Sums that wrap around could pass for the right length; those of narrower types do not.
    is_wide = values.itemsize == 8 and not axis.mask
    is_long = is_wide and np.sum(values, dtype=np.float64) >= MAX_AXIS_LENGTH
    if values.min() >= 0 and not is_long and not (axis.mask and values.max() > 1):
        return values.astype(np.int64)
    bad = values < 0
    code, what, expected = "RF-I004", "a count is negative", ">= 0"
    if axis.mask:
        bad |= values > 1
        code, what, expected = "RF-I008", "a mask is not 0 or 1", "0 or 1"
    elif is_long:
        bad |= np.cumsum(values, dtype=np.float64) >= MAX_AXIS_LENGTH
        what, expected = "the counts of a batch sum to too much", f"a sum < {MAX_AXIS_LENGTH}"
    if bad.any():
        first = int(np.argmax(bad))
        row, position = locate(counts.offsets, first)
        raise InvariantError(
            what, code=code, where=Where(row=row, column=axis.counts, position=position),
            expected=expected, got=int(values[first]),
        )  # fmt: skip
    return values.astype(np.int64)


def _check_lengths(axis: Axis, expected: Int64, lists: dict[str, Flat]) -> None:
    for name, (_, offsets) in lists.items():
        if offsets is expected or np.array_equal(offsets, expected):
            continue
        wanted, got = np.diff(expected), np.diff(offsets)
        row = int(np.argmax(wanted != got))
        if axis.counts is None:
            what, code = f"columns of axis {axis.name!r} differ in length", "RF-I003"
            source = f"as {next(iter(lists))!r}"
        else:
            what, code = "the counts do not sum to the length of a column", "RF-I005"
            source = f"the sum of {axis.counts!r}"
        raise InvariantError(
            what, code=code, where=Where(row=row, column=name),
            expected=f"{wanted[row]} elements, {source}", got=f"{got[row]} elements",
        )  # fmt: skip
