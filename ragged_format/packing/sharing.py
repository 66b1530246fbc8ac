"""Which samples may share a prefix, and what sharing compares besides token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ragged_format.errors import PackingError, Where
from ragged_format.lists import Flat, Int64, flat, to_numpy
from ragged_format.packing.forest import Keys
from ragged_format.schema import RECORD, Column, RaggedSchema

__all__ = ["ShareRules", "is_set"]

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ShareRules:
    """The columns of a sample schema that restrict sharing.

    Attributes
    ----------
    token_keys, record_keys, media : tuple of Column
        Share keys on the two axes, and the media columns that count as there is no share key.
    group : Column, optional
        ``group_id``, where the schema has it.
    """

    token_keys: tuple[Column, ...]
    record_keys: tuple[Column, ...]
    media: tuple[Column, ...]
    group: Column | None

    @classmethod
    def of(cls, schema: RaggedSchema) -> ShareRules:
        """Return the rules of a sample schema.

        Raises
        ------
        PackingError
            A share key lies on another axis than token or record (``RF-P001``).
        """
        keys = [column for column in schema if column.share_key]
        for column in keys:
            if column.axis not in (RECORD, "token"):
                raise PackingError(
                    "a share key lies on the token or the record axis",
                    where=Where(column=column.name), expected="axis 'token' or 'record'",
                    got=column.axis, remedy="declare a key of the record, such as a hash",
                )  # fmt: skip
        return cls(
            tuple(column for column in keys if column.axis == "token"),
            tuple(column for column in keys if column.axis == RECORD),
            () if keys else tuple(column for column in schema if column.media),
            schema.columns.get("group_id"),
        )

    def keys(
        self,
        samples: pa.RecordBatch,
        tokens: npt.NDArray[Any],
        offsets: Int64,
        *,
        within_group: bool = False,
    ) -> Keys:
        """Return what sharing compares for these samples.

        Parameters
        ----------
        samples : pyarrow.RecordBatch
            n samples.
        tokens : (t,) int32
            Their ``input_ids``, end to end.
        offsets : (n + 1,) int64
            Tokens of each sample.
        within_group : bool
            Samples of different groups share nothing, those without a group with nobody.

        Raises
        ------
        PackingError
            ``within_group`` without a ``group_id`` column (``RF-P001``).
        """
        if within_group and self.group is None:
            raise PackingError(
                "sharing within groups needs to know the groups", expected="column 'group_id'",
                got=samples.schema.names, remedy="add group_id, or share across all samples",
            )  # fmt: skip
        by_record = [*self.record_keys]
        if within_group and self.group is not None:
            by_record.append(self.group)
        parts = None
        if by_record or self.media:
            parts = _parts(samples, by_record, self.media, offsets)
        compared = tokens
        if self.token_keys:
            compared = _token_codes(samples, tokens, self.token_keys)
        return Keys(tokens, compared, parts)


def _parts(
    samples: pa.RecordBatch,
    columns: list[Column],
    media: tuple[Column, ...],
    offsets: Int64,
) -> list[int] | None:
    """Return a number per sample that is equal where samples may share; ``None`` if all may."""
    codes = np.zeros(samples.num_rows, np.int64)
    alone = np.zeros(samples.num_rows, bool)
    for column in columns:
        array = samples.column(column.name)
        alone |= array.is_null().to_numpy(zero_copy_only=False)
        codes = _combine(codes, _codes(array, column))
    for column in media:
        alone |= _has_media(samples.column(column.name), column, offsets)
    if alone.any():
        codes[alone] = codes.max() + 1 + np.arange(np.count_nonzero(alone))
    elif len(codes) and (codes == codes[0]).all():
        return None
    return [int(code) for code in codes]


def _token_codes(
    samples: pa.RecordBatch, tokens: npt.NDArray[Any], columns: tuple[Column, ...]
) -> npt.NDArray[Any]:
    codes = tokens.astype(np.int64)
    for column in columns:
        values = flat(samples.column(column.name)).values
        codes = _combine(codes, _codes(values, column))
    # Big-endian, so that the order of bytes is the order of numbers: by token id first.
    return codes.astype(">i8")


def _combine(codes: Int64, more: Int64) -> Int64:
    """Return codes of pairs, dense and ordered by `codes` first."""
    if not len(codes):
        return codes
    pairs = np.unique(codes, return_inverse=True)[1] * (int(more.max()) + 1) + more
    dense: Int64 = np.unique(pairs, return_inverse=True)[1]
    return dense


def _codes(values: pa.Array, column: Column) -> Int64:
    """Return a number >= 0 per element that is equal where elements are; nulls have any."""
    if column.shape:
        rows = np.ascontiguousarray(to_numpy(values))
        as_bytes = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).reshape(-1)
        dense: Int64 = np.unique(as_bytes, return_inverse=True)[1]
        return dense
    indices = pc.dictionary_encode(values).indices.fill_null(0)
    return np.asarray(indices.to_numpy(zero_copy_only=False), np.int64)


def _has_media(array: pa.Array, column: Column, offsets: Int64) -> Bools:
    """Return which records have media: a value, or an element (on the token axis a set one)."""
    if column.axis == RECORD:
        there: Bools = array.is_valid().to_numpy(zero_copy_only=False)
        if column.fill is None:
            there &= pc.fill_null(pc.binary_length(array), 0).to_numpy(zero_copy_only=False) > 0
        return there
    values, bounds = flat(array)
    if column.axis != "token":
        return np.diff(bounds) > 0
    sums = np.zeros(len(values) + 1, np.int64)
    np.cumsum(is_set(Flat(values, bounds), column), out=sums[1:])
    return sums[offsets[1:]] > sums[offsets[:-1]]


def is_set(source: Flat, column: Column) -> Bools:
    """Return which elements of a column are not all fill; strings always are set."""
    if column.fill is None:
        return np.ones(len(source.values), bool)
    values = source.numpy()
    if not column.shape:
        return np.asarray(values != column.fill)
    # Almost always the first value tells.
    there: Bools = values[:, 0] != column.fill
    rest = np.flatnonzero(~there)
    there[rest] = (values[rest] != column.fill).any(axis=1)
    return there
