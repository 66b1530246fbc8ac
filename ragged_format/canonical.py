"""Arrow data of any producer in the canonical physical types, and schemas that must agree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from ragged_format.errors import InvariantError, SchemaMismatchError, Where
from ragged_format.lists import flat, to_list
from ragged_format.parse import parse_schema
from ragged_format.schema import RECORD, RaggedSchema

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ArrowExportable", "as_batches", "as_table", "canonical", "require_same"]


class ArrowExportable(Protocol):
    """Anything that exports an Arrow stream, such as a polars frame or a pyarrow table."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


def require_same(expected: RaggedSchema, got: RaggedSchema, where: Where | None = None) -> None:
    """Raise ``RF-S010`` unless two schemas agree in identity, naming the first difference."""
    if expected == got:
        return
    for what in ("profile", "vocab_size", "root_axes", "required_features"):
        if getattr(expected, what) != getattr(got, what):
            raise SchemaMismatchError(
                f"schemas differ in {what}", code="RF-S010", where=where,
                expected=getattr(expected, what), got=getattr(got, what),
            )  # fmt: skip
    for mine, other in zip(expected, got, strict=False):
        if mine != other:
            raise SchemaMismatchError(
                "schemas differ in a column", code="RF-S010", where=where,
                expected=mine, got=other, remedy="write both with one schema",
            )  # fmt: skip
    raise SchemaMismatchError(
        "schemas differ in their columns", code="RF-S010", where=where,
        expected=list(expected.columns), got=list(got.columns),
    )  # fmt: skip


def canonical(
    data: pa.RecordBatch | pa.Table | ArrowExportable, schema: pa.Schema | None = None
) -> pa.RecordBatch:
    """Return Arrow data of any producer as one batch in the canonical physical types.

    32-bit lists become large lists, string views and dictionaries become strings, chunks become
    one, list children get their standard name, and nullability and metadata come from `schema`.
    Values are never changed: a cast that would lose something raises.

    Parameters
    ----------
    data : RecordBatch, Table or anything with ``__arrow_c_stream__`` or ``__arrow_c_array__``
        Columns in any order.
    schema : pyarrow.Schema, optional
        Schema of this format. Needed where the producer dropped metadata (polars does).

    Raises
    ------
    SchemaMismatchError, NotRaggedError
        A column is missing or surplus, or its values do not fit.
    InvariantError
        A list is null where none may be (``RF-I002``).
    """
    table = as_table(data)
    schema = table.schema if schema is None else schema
    declared = parse_schema(_with_large_lists(schema))
    wanted = declared.to_arrow()
    if set(table.schema.names) != set(wanted.names):
        raise SchemaMismatchError(
            "the data has the columns of the schema", code="RF-S003",
            expected=sorted(wanted.names), got=sorted(table.schema.names),
        )  # fmt: skip
    arrays = []
    for column in declared:
        source = table.column(column.name)
        try:
            if column.axis == RECORD:
                array = source.combine_chunks().cast(column.arrow_type)
                array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
            else:
                array = to_list(*flat(source), column)
        except InvariantError as err:
            raise err.at(Where(column=column.name)) from None
        except pa.ArrowException as err:
            raise SchemaMismatchError(
                "values cannot be stored in the declared type without loss",
                where=Where(column=column.name), expected=column.arrow_type, got=str(err),
            ) from err  # fmt: skip
        if array.null_count and not column.nullable:
            raise InvariantError(
                "a value is null", code="RF-I002", expected="no nulls", got="null",
                where=Where(column=column.name, row=pc.index(array.is_null(), True).as_py()),
            )  # fmt: skip
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def as_batches(data: Any) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of Arrow data of any producer, at least one (it may be empty)."""
    if isinstance(data, pa.RecordBatch):
        yield data
        return
    table = as_table(data)
    yield from table.to_batches() or [pa.RecordBatch.from_pylist([], schema=table.schema)]


def as_table(data: Any) -> pa.Table:
    """Return Arrow data of any producer as a table, a view where that is possible."""
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    if hasattr(data, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(data).read_all()
    if hasattr(data, "__arrow_c_array__"):
        return pa.Table.from_batches([pa.record_batch(data)])
    raise SchemaMismatchError(
        "the data is not Arrow data", got=type(data).__name__,
        expected="a RecordBatch, a Table or an object with __arrow_c_stream__",
    )  # fmt: skip


def _with_large_lists(schema: pa.Schema) -> pa.Schema:
    """Return `schema` with 32-bit lists widened, so that foreign input can be declared."""
    fields = []
    for field in schema:
        if pa.types.is_list(field.type):
            item = pa.field("item", field.type.value_type, nullable=field.type.value_field.nullable)
            field = field.with_type(pa.large_list(item))
        if pa.types.is_large_list(field.type):
            field = field.with_nullable(False)  # noqa: FBT003
        fields.append(field)
    return pa.schema(fields, metadata=schema.metadata)
