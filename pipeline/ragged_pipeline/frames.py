"""polars over record columns and lengths, and back from polars to this format.

polars drops schema metadata and non-nullability, and its 32-bit sums wrap; so lengths are Int64 and
the canonical schema is applied again on the way back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import polars as pl
import pyarrow as pa
from polars.io.plugins import register_io_source

from ragged_format.canonical import canonical
from ragged_format.errors import JobError, Where
from ragged_format.lists import Int64, flat, offsets_of
from ragged_format.schema import RECORD, RaggedSchema
from ragged_format.sources import open_source
from ragged_format.validate import validate

if TYPE_CHECKING:
    import os

    from ragged_format.sources import Source

__all__ = ["columns_for", "frame_schema", "from_polars", "scan", "to_frame"]

Frame: TypeAlias = pl.DataFrame
_LENGTH = "_length"


def _lengths_from(schema: RaggedSchema) -> dict[str, tuple[str, bool]]:
    """Return, by axis, a column that tells its lengths, and whether as the sum of counts."""
    out: dict[str, tuple[str, bool]] = {}
    for axis in schema.axes.values():
        if axis.counts is not None:
            out[axis.name] = axis.counts, True
        elif columns := schema.on(axis.name):
            out[axis.name] = columns[0].name, False
    return out


def frame_schema(schema: RaggedSchema) -> dict[str, Any]:
    """Return the columns of :func:`to_frame` and their polars types.

    Record columns come first, under their names; then ``<axis>_length``, the number of elements of
    each record on each other axis: ``token_length``, ``target_length``, ``candidate_length``…

    Examples
    --------
    >>> from ragged_format import parse_schema, sample_schema
    >>> schema = parse_schema(sample_schema(vocab_size=9, columns=["reward"]))
    >>> list(frame_schema(schema))
    ['sample_id', 'reward', 'token_length', 'target_length']
    """
    fields = [column.field() for column in schema.on(RECORD)]
    empty = pa.schema(fields).empty_table()
    types = dict(pl.DataFrame(empty).schema) if fields else {}
    return types | {axis + _LENGTH: pl.Int64() for axis in _lengths_from(schema)}


def columns_for(schema: RaggedSchema, names: Sequence[str]) -> list[str]:
    """Return the columns of the data that columns of the frame are made of."""
    lengths = _lengths_from(schema)
    out = []
    for name in names:
        axis = name.removesuffix(_LENGTH)
        out.append(name if name in schema else lengths[axis][0])
    return list(dict.fromkeys(out))


def to_frame(
    batch: pa.RecordBatch, schema: RaggedSchema, names: Sequence[str] | None = None
) -> Frame:
    """Return record columns and lengths of a batch.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
        With at least the columns that :func:`columns_for` names.
    schema : RaggedSchema
        Of the whole data.
    names : sequence of str, optional
        Columns of the frame; default: all of :func:`frame_schema`.

    Returns
    -------
    polars.DataFrame
        One row per record. Lengths are Int64.
    """
    wanted = list(frame_schema(schema)) if names is None else list(names)
    lengths = _lengths_from(schema)
    columns: dict[str, Any] = {}
    for name in wanted:
        if name in schema:
            columns[name] = pl.Series(name, batch.column(name))
        else:
            source, summed = lengths[name.removesuffix(_LENGTH)]
            columns[name] = pl.Series(name, _lengths(batch.column(source), summed=summed))
    # A frame of no columns is not made of an empty mapping: that has the height 0.
    return pl.DataFrame(columns or None, height=batch.num_rows)


def _lengths(array: pa.Array, *, summed: bool) -> Int64:
    column = flat(array)
    if not summed:
        return np.diff(column.offsets)
    sums = offsets_of(column.numpy().astype(np.int64))
    return np.diff(sums[column.offsets])


def scan(source: str | os.PathLike[str] | Source) -> pl.LazyFrame:
    """Return record columns and lengths as a lazy frame.

    Guarantees: columns that a query does not name are not read, batches stream.

    Parameters
    ----------
    source : path, URL or source
        A dataset, file or whatever :func:`ragged_format.open_source` opens.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> import ragged_format as rf
    >>> from ragged_format.testing import rollouts
    >>> batch = rollouts(np.random.default_rng(0), num_samples=6)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with rf.Writer(folder, batch.schema) as writer:
    ...         writer.write(batch)
    ...     scan(folder).select(pl.len(), pl.col("token_length").sum()).collect().row(0)
    (6, 1781)
    """
    opened: Any = source if hasattr(source, "batches") else open_source(source)
    schema = opened.ragged_schema

    def batches(
        columns: list[str] | None, predicate: pl.Expr | None, rows: int | None, size: int | None
    ) -> Iterator[Frame]:
        del size
        names = list(frame_schema(schema)) if columns is None else columns
        needed = list(
            dict.fromkeys([*names, *(predicate.meta.root_names() if predicate is not None else ())])
        )
        left = rows
        for batch in opened.batches(columns=columns_for(schema, needed) or None):
            frame = to_frame(batch, schema, needed)
            if left is not None:
                frame = frame.head(left)
                left -= frame.height
            if predicate is not None:
                frame = frame.filter(predicate)
            yield frame.select(names)
            if left == 0:
                return

    return register_io_source(batches, schema=pl.Schema(frame_schema(schema)), is_pure=True)


def from_polars(frame: Frame, schema: pa.Schema) -> pa.RecordBatch:
    """Return a frame with all columns of a schema as a batch of this format, validated fully.

    Parameters
    ----------
    frame : polars.DataFrame
        Lists as polars lists. Columns that the schema lacks are an error.
    schema : pyarrow.Schema
        Of this format.

    Raises
    ------
    JobError
        The columns are not those of the schema (``RF-J001``).
    InvariantError
        Values break a rule, as a null in a column without nulls.

    Examples
    --------
    >>> import ragged_format as rf
    >>> schema = rf.sample_schema(vocab_size=9, columns=[])
    >>> rows = {"sample_id": ["a"], "input_ids": [[1, 2]], "completion_mask": [[0, 1]]}
    >>> batch = from_polars(pl.DataFrame(rows), schema)
    >>> batch.schema == schema
    True
    """
    if set(frame.columns) != set(schema.names):
        raise JobError(
            "the columns of the frame are not those of the schema",
            expected=", ".join(schema.names), got=", ".join(frame.columns),
            remedy="select columns of the frame, or pass the schema with them",
        )  # fmt: skip
    table = frame.select(schema.names).to_arrow()
    arrays = [_cast(table.column(field.name), field) for field in schema]
    fields = [
        pa.field(field.name, array.type, metadata=field.metadata)
        for field, array in zip(schema, arrays, strict=True)
    ]
    loose = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields, metadata=schema.metadata))
    batch = canonical(loose)
    batch = pa.RecordBatch.from_arrays(batch.columns, schema=schema)
    validate(batch)
    return batch


def _cast(column: pa.ChunkedArray, field: pa.Field) -> pa.Array:
    array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    try:
        return array.cast(_nullable(field.type))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as err:
        raise JobError(
            "a column of the frame does not fit its type", where=Where(column=field.name),
            expected=field.type, got=f"{column.type}: {err}", remedy="cast it in polars",
        ) from err  # fmt: skip


def _nullable(kind: pa.DataType) -> pa.DataType:
    """Return a type whose list items may be null, as polars makes them."""
    if pa.types.is_large_list(kind):
        return pa.large_list(_nullable(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_nullable(kind.value_type), kind.list_size)
    return kind
