"""Plain arrays for any collator, DLPack and Arrow capsules.

What frameworks without an adapter of their own can take: a dict of flat arrays with offsets, a dict
of padded arrays, objects with ``__dlpack__``, objects with the Arrow PyCapsule methods.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ragged_format.adapters._npz import write_npz
from ragged_format.adapters._tables import pad_rows
from ragged_format.adapters.registry import Adapter, Writer
from ragged_format.adapters.report import ConversionReport
from ragged_format.canonical import canonical
from ragged_format.errors import ConversionError, LimitExceededError, Where
from ragged_format.lists import Int64, flat, offsets_of, to_list, to_numpy
from ragged_format.parse import parse_schema
from ragged_format.ragged import concat
from ragged_format.schema import RECORD, Column, RaggedSchema

if TYPE_CHECKING:
    from ragged_format.canonical import ArrowExportable

__all__ = [
    "ADAPTER",
    "ArrowBatch",
    "DLPackColumn",
    "from_arrays",
    "to_arrays",
    "to_arrow",
    "to_dlpack",
    "to_padded",
    "to_samples",
    "write",
]

Arrays = dict[str, Any]


def to_arrays(batch: pa.RecordBatch, columns: Iterable[str] | None = None) -> Arrays:
    """Return the columns of a batch as flat arrays, with the offsets of its records.

    Guarantees: list columns are read-only views.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
        Either profile.
    columns : iterable of str, optional
        ``None``: all. The counts that their axes need come with them.

    Returns
    -------
    dict
        Each list column as (t,) or (t, ...) values end to end; each record column as an array, or
        as a list where it holds text or nulls; and ``<axis>_offsets`` (n + 1,) int64 for each root
        axis, and for the targets, with the elements of each record.

    Examples
    --------
    >>> import ragged_format as rf
    >>> schema = rf.sample_schema(vocab_size=10, columns=[])
    >>> row = {"sample_id": "a", "input_ids": [5, 6], "completion_mask": [0, 1]}
    >>> arrays = to_arrays(pa.RecordBatch.from_pylist([row], schema=schema))
    >>> arrays["input_ids"].tolist(), arrays["token_offsets"].tolist()
    ([5, 6], [0, 2])
    """
    schema = parse_schema(batch.schema)
    if columns is not None:
        schema = schema.select(columns)
    out: Arrays = {}
    for column in schema:
        array = batch.column(column.name)
        if column.axis == RECORD:
            plain = column.width == 1 and not array.null_count and _is_number(column)
            out[column.name] = to_numpy(array) if plain else array.to_pylist()
            continue
        values, offsets = flat(array)
        text = values.null_count or not _is_number(column)
        found = values.to_pylist() if text else to_numpy(values)
        out[column.name] = found if text or not column.shape else found.reshape(-1, *column.shape)
        if column.axis in schema.root_axes or column.axis == "target":
            out[f"{column.axis}_offsets"] = offsets
    return out


def _is_number(column: Column) -> bool:
    return bool(pa.types.is_integer(column.type) or pa.types.is_floating(column.type))


def from_arrays(arrays: Mapping[str, Any], schema: pa.Schema) -> pa.RecordBatch:
    """Return the batch that :func:`to_arrays` took apart.

    Parameters
    ----------
    arrays : mapping
        All columns of `schema`, with the offsets.
    schema : pyarrow.Schema

    Raises
    ------
    ConversionError
        A column or its offsets are not there (``RF-A006``).
    """
    parsed = parse_schema(schema)
    out = []
    bounds: dict[str, Int64] = {}
    for column in parsed:
        if column.name not in arrays:
            raise ConversionError(
                "the arrays lack a column", code="RF-A006", where=Where(column=column.name),
                expected=column.name, got=", ".join(arrays),
            )  # fmt: skip
        values = arrays[column.name]
        if column.axis == RECORD:
            out.append(pa.array(values, column.value_type))
            continue
        if column.axis not in bounds:
            bounds[column.axis] = _given_offsets(arrays, column)
        offsets = bounds[column.axis]
        if isinstance(values, list):
            values = pa.array(values, column.type)
        elif column.shape:
            values = values.reshape(len(values), column.width)
        out.append(to_list(values, offsets, column))
        if column.opens is not None:
            ends = offsets_of(np.asarray(arrays[column.name], np.int64))[offsets]
            given = arrays.get(f"{column.opens}_offsets")
            bounds[column.opens] = ends if given is None else np.asarray(given, np.int64)
    return pa.RecordBatch.from_arrays(out, schema=parsed.to_arrow())


def _given_offsets(arrays: Mapping[str, Any], column: Column) -> Int64:
    name = f"{column.axis}_offsets"
    if name not in arrays:
        raise ConversionError(
            "the arrays lack the offsets of an axis", code="RF-A006",
            where=Where(column=column.name), expected=name, got=", ".join(arrays),
        )  # fmt: skip
    return np.asarray(arrays[name], np.int64)


def to_padded(
    batch: pa.RecordBatch,
    columns: Iterable[str] | None = None,
    *,
    fills: Mapping[str, float] | None = None,
    widths: Mapping[str, int] | None = None,
) -> Arrays:
    """Return the columns of a batch as dense arrays, padded on the right.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
    columns : iterable of str, optional
        ``None``: all of numbers.
    fills : mapping of str to float, optional
        Instead of the fills that the columns declare: -1 for ids, -30000.0 for log-probs.
    widths : mapping of str to int, optional
        Sizes of axes by name; ``None``: the largest of the batch.

    Returns
    -------
    dict of str to ndarray
        Token and target columns (B, L) and (B, M); what counts open (B, M, K). Numeric record
        columns without nulls (B,), others as lists. ``<axis>_lengths`` (B,) int64.

    Raises
    ------
    LimitExceededError
        An axis is longer than its width (``RF-L001``): nothing is cut.
    """
    schema = parse_schema(batch.schema)
    if columns is None:
        columns = [c.name for c in schema if c.axis == RECORD or _is_number(c)]
    schema = schema.select(columns)
    out: Arrays = {}
    for column in schema:
        array = batch.column(column.name)
        if column.axis == RECORD:
            plain = column.width == 1 and not array.null_count and _is_number(column)
            out[column.name] = to_numpy(array) if plain else array.to_pylist()
            continue
        fill = (fills or {}).get(column.name, column.fill or 0)
        out[column.name] = _dense(batch, schema, column, fill, widths or {})
        if column.axis in (*schema.root_axes, "target"):
            out[f"{column.axis}_lengths"] = np.diff(flat(array).offsets)
    return out


def _dense(
    batch: pa.RecordBatch,
    schema: RaggedSchema,
    column: Column,
    fill: float,
    widths: Mapping[str, int],
) -> npt.NDArray[Any]:
    values, offsets = flat(batch.column(column.name))
    table = to_numpy(values)
    dtype = column.type.to_pandas_dtype()
    axis = schema.axes[column.axis]
    if axis.counts is not None and not axis.mask and schema.root_of(column.axis) != RECORD:
        counts, parents = flat(batch.column(axis.counts))
        per = to_numpy(counts).astype(np.int64)
        width = _width(column, per, widths)
        inner = pad_rows(table, per, width, fill, dtype)
        lengths = np.diff(parents)
        outer = _width(schema[axis.counts], lengths, widths)
        out = np.full((len(lengths), outer, width), fill, dtype)
        out[np.arange(outer) < lengths[:, None]] = inner
        return out
    lengths = np.diff(offsets)
    width = _width(column, lengths, widths)
    shape = (len(lengths), width, *column.shape)
    dense = np.full(shape, fill, dtype)
    dense[np.arange(width) < lengths[:, None]] = table.reshape(-1, *column.shape)
    return dense


def _width(column: Column, lengths: npt.NDArray[Any], widths: Mapping[str, int]) -> int:
    longest = int(lengths.max(initial=0))
    width = widths.get(column.axis, longest)
    if longest > width:
        raise LimitExceededError(
            "an axis is longer than its width", where=Where(column=column.name),
            expected=f"at most {width}", got=longest, remedy="raise the width; nothing is cut",
        )  # fmt: skip
    return width


class DLPackColumn:
    """The values of a list column for ``from_dlpack``, without a copy.

    Guarantees: the memory lives as long as this object or a capsule of it; consumers must not
    write to it (the capsule of version 1.0 says so).

    Parameters
    ----------
    values : pyarrow.Array
        Numbers without nulls.
    """

    def __init__(self, values: pa.Array) -> None:
        self._values = values

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = (1, 0),
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a capsule, versioned unless the consumer knows none of that kind."""
        # pyarrow deprecates capsules without a version.
        version = (1, 0) if max_version is None else max_version
        return self._values.__dlpack__(
            stream=stream, max_version=version, dl_device=dl_device, copy=copy
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the device: the CPU."""
        device: tuple[int, int] = self._values.__dlpack_device__()
        return device

    def __len__(self) -> int:
        return len(self._values)


def to_dlpack(
    batch: pa.RecordBatch, columns: Iterable[str] | None = None
) -> dict[str, DLPackColumn]:
    """Return list columns of numbers as objects for ``torch.from_dlpack`` and its like.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
    columns : iterable of str, optional
        ``None``: all list columns of numbers without nulls. Fixed-size elements come flat.

    Examples
    --------
    >>> import ragged_format as rf
    >>> schema = rf.sample_schema(vocab_size=10, columns=[])
    >>> row = {"sample_id": "a", "input_ids": [5, 6], "completion_mask": [0, 1]}
    >>> columns = to_dlpack(pa.RecordBatch.from_pylist([row], schema=schema))
    >>> np.from_dlpack(columns["input_ids"])
    array([5, 6], dtype=int32)
    """
    schema = parse_schema(batch.schema)
    out = {}
    for column in schema if columns is None else [schema[name] for name in columns]:
        if column.axis == RECORD or not _is_number(column):
            if columns is not None:
                raise ConversionError(
                    "only list columns of numbers are handed over", code="RF-A011",
                    where=Where(column=column.name), expected="a list column of numbers",
                    got=column.arrow_type,
                )  # fmt: skip
            continue
        values = flat(batch.column(column.name)).values
        if values.null_count:
            raise ConversionError(
                "a column with nulls has no plain memory", code="RF-A011",
                where=Where(column=column.name), expected="no nulls", got=values.null_count,
            )  # fmt: skip
        out[column.name] = DLPackColumn(values.flatten() if column.shape else values)
    return out


class ArrowBatch:
    """A batch behind the Arrow PyCapsule interface only.

    For consumers that take any object with ``__arrow_c_array__`` or ``__arrow_c_stream__``, and for
    keeping one's own types out of theirs.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
    """

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch

    def __arrow_c_schema__(self) -> Any:
        return self._batch.schema.__arrow_c_schema__()

    def __arrow_c_array__(self, requested_schema: object | None = None) -> Any:
        return self._batch.__arrow_c_array__(requested_schema)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> Any:
        return self._batch.__arrow_c_stream__(requested_schema)


def to_arrow(batch: pa.RecordBatch) -> ArrowBatch:
    """Return a batch as an object of the Arrow PyCapsule interface, without a copy."""
    return ArrowBatch(batch)


def to_samples(
    payloads: Iterable[pa.RecordBatch | pa.Table | ArrowExportable],
    vocab_size: int | None = None,
    *,
    schema: pa.Schema | None = None,
    report: ConversionReport | MutableMapping[str, Any] | None = None,
) -> pa.RecordBatch:
    """Return Arrow data of any producer as one batch in the canonical types.

    Parameters
    ----------
    payloads : iterable
        Objects with ``__arrow_c_array__`` or ``__arrow_c_stream__``, record batches, tables.
    vocab_size : int, optional
        Checked against the schema's.
    schema : pyarrow.Schema, optional
        Where the producer dropped the metadata.
    report : ConversionReport or mutable mapping, optional
        Receives the counts.

    Raises
    ------
    ConversionError
        There is no payload, or the vocabulary is another (``RF-A011``).
    """
    batches = [canonical(payload, schema) for payload in payloads]
    if not batches:
        raise ConversionError(
            "there is nothing to convert", code="RF-A011", expected="at least one batch", got=0
        )
    batch = concat(batches)
    size = parse_schema(batch.schema).vocab_size
    if vocab_size not in (None, size):
        raise ConversionError(
            "the data has another vocabulary", code="RF-A011", expected=vocab_size, got=size
        )
    counts = ConversionReport()
    counts.responses.taken = counts.responses.stored = len(batches)
    counts.samples.taken = counts.samples.stored = batch.num_rows
    tokens = len(flat(batch.column("input_ids")).values)
    counts.tokens.taken = counts.tokens.stored = tokens
    counts.add_to(report)
    return batch


def write(batches: Iterable[pa.RecordBatch], path: str) -> dict[str, int]:
    """Write the arrays of each batch, as :func:`to_arrays` gives them, as one ``.npz`` file.

    Columns of text become arrays of text; columns with nulls are left out and counted.

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
        Profile ``sample``.
    path : str
        Directory to make.
    """
    counts: Counter[str] = Counter()

    def plain(batch: pa.RecordBatch) -> dict[str, npt.NDArray[Any]]:
        out = {}
        for name, values in to_arrays(batch).items():
            if isinstance(values, list) and None in values:
                counts[f"not_carried.{name}"] += len(values)
                continue
            out[name] = np.array(values, np.str_) if isinstance(values, list) else values
        counts["samples"] += batch.num_rows
        return out

    counts["files"] = write_npz(path, "batch", (plain(batch) for batch in batches))
    return dict(counts)


ADAPTER = Adapter(
    name="tensors",
    title="Plain arrays, DLPack and Arrow capsules",
    writes=Writer(write=write, profile="sample", makes="a directory of one .npz per batch"),
)
