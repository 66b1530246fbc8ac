"""Arrow data of any producer in the canonical physical types, and schemas that must agree."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ragged_format.errors import InvariantError, LimitExceededError, SchemaMismatchError, Where
from ragged_format.lists import flat, to_list
from ragged_format.parse import not_a_schema, parse_schema
from ragged_format.profiles import STANDARD
from ragged_format.schema import NAMESPACE, RECORD, RaggedSchema

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from ragged_format.lists import Int64
    from ragged_format.schema import Column

__all__ = [
    "ArrowExportable",
    "as_batch",
    "as_batches",
    "as_table",
    "canonical",
    "joined",
    "not_a_batch",
    "require_same",
]


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
    wanted, given = [c.name for c in expected], [c.name for c in got]
    if sorted(wanted) != sorted(given):
        parts = (("without", set(wanted) - set(given)), ("with", set(given) - set(wanted)))
        said = [f"{word} {', '.join(sorted(names))}" for word, names in parts if names]
        raise SchemaMismatchError(
            "schemas differ in their columns", code="RF-S010", where=where,
            expected=", ".join(wanted), got=", ".join(said),
            remedy="write both with one schema; when they are converted, name the columns",
        )  # fmt: skip
    for mine, other in zip(expected, got, strict=True):
        if mine.name == other.name and mine != other:
            names = [f.name for f in fields(mine)]
            differing = [n for n in names if getattr(mine, n) != getattr(other, n)]
            raise SchemaMismatchError(
                "schemas differ in a column", code="RF-S010",
                where=replace(where or Where(), column=mine.name),
                expected=", ".join(f"{name} {getattr(mine, name)}" for name in differing),
                got=", ".join(f"{name} {getattr(other, name)}" for name in differing),
                remedy="write both with one schema",
            )  # fmt: skip
    raise SchemaMismatchError(
        "schemas differ in the order of their columns", code="RF-S010", where=where,
        expected=", ".join(wanted), got=", ".join(given),
        remedy="write both with one schema",
    )  # fmt: skip


def canonical(
    data: pa.RecordBatch | pa.Table | ArrowExportable, schema: pa.Schema | None = None
) -> pa.RecordBatch:
    """Return Arrow data of any producer as one batch in the canonical physical types.

    32-bit lists and list views become large lists, string views and dictionaries become strings,
    chunks become one, list children get their standard name, and nullability and metadata come from
    `schema`. Values are never changed: a cast that would lose something, or that is not between
    numbers or between texts, raises.

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
        A list or a value is null where none may be (``RF-I002``).
    LimitExceededError
        A string column exceeds 2 GiB.

    Examples
    --------
    >>> from ragged_format import sample_schema
    >>> schema = sample_schema(vocab_size=99, columns=[])
    >>> data = {"input_ids": [[5, 6], []], "sample_id": ["a", "b"], "completion_mask": [[0, 1], []]}
    >>> batch = canonical(pa.table(data), schema)
    >>> batch.schema.equals(schema, check_metadata=True), batch.num_rows
    (True, 2)
    >>> canonical(pa.table({**data, "input_ids": [[5, None], []]}), schema)
    Traceback (most recent call last):
    ...
    ragged_format.errors.InvariantError: [RF-I002] a value is null
      where:    row 0, column 'input_ids', position 1
      expected: no nulls
      got:      null
    """
    table = as_table(data)
    declared = parse_schema(_declarable(table.schema if schema is None else schema))
    names = table.schema.names
    if sorted(names) != sorted(declared.columns):
        raise SchemaMismatchError(
            "the data has the columns of the schema", code="RF-S003",
            expected=sorted(declared.columns), got=sorted(names),
        )  # fmt: skip
    arrays = [_column(table.column(column.name), column) for column in declared]
    return pa.RecordBatch.from_arrays(arrays, schema=declared.to_arrow())


def _column(source: pa.ChunkedArray, column: Column) -> pa.Array:
    offsets = None
    try:
        if column.axis == RECORD:
            values = source.combine_chunks()
        else:
            values, offsets = flat(source)
        if not column.nullable:
            _forbid_nulls(values, offsets)
        values = _exact(values, column.value_type, offsets)
    except (InvariantError, SchemaMismatchError) as err:
        raise err.at(Where(column=column.name)) from err.__cause__
    except (pa.ArrowInvalid, pa.ArrowCapacityError) as err:
        raise LimitExceededError(
            "the values of a column do not fit one array", expected="< 2^31 bytes of text",
            got=str(err), where=Where(column=column.name),
            remedy="convert fewer records at a time",
        ) from err  # fmt: skip
    return values if offsets is None else to_list(values, offsets, column)


def _forbid_nulls(values: pa.Array, offsets: Int64 | None) -> None:
    fixed = pa.types.is_fixed_size_list(values.type)
    if values.null_count:
        element = _first_null(values)
    elif fixed and (inner := values.flatten()).null_count:
        element = _first_null(inner) // values.type.list_size
    else:
        return
    raise InvariantError(
        "a value is null", code="RF-I002", expected="no nulls", got="null",
        where=_place(element, offsets),
    )  # fmt: skip


def _first_null(values: pa.Array) -> int:
    return int(pc.index(values.is_null(), True).as_py())


def _exact(values: pa.Array, wanted: pa.DataType, offsets: Int64 | None) -> pa.Array:
    """Cast `values`, nulls apart where they may be, and raise unless every value survives."""
    if values.type == wanted:
        return values
    if _kind(values.type) not in {_kind(wanted), "null"}:
        raise SchemaMismatchError(
            "values are of another kind than declared", expected=wanted, got=values.type
        )
    try:
        out = values.cast(wanted)
    except pa.ArrowException as err:
        raise SchemaMismatchError(
            "values cannot be stored in the declared type without loss",
            expected=wanted, got=str(err),
        ) from err  # fmt: skip
    # Arrow rounds floats, and integers to float16, without a word.
    leaf = wanted.value_type if pa.types.is_fixed_size_list(wanted) else wanted
    if pa.types.is_floating(leaf):
        mine, theirs = _numbers(values), _numbers(out)
        lost = (mine != theirs) & ~(np.isnan(mine) & np.isnan(theirs))
        if lost.any():
            at = int(np.argmax(lost))
            raise SchemaMismatchError(
                "values cannot be stored in the declared type without loss",
                where=_place(at * len(values) // len(mine), offsets), expected=wanted,
                got=f"{mine[at]}, a {values.type}", remedy="round the values beforehand",
            )  # fmt: skip
    return out


def _numbers(values: pa.Array) -> npt.NDArray[np.float64]:
    if pa.types.is_fixed_size_list(values.type):
        values = values.flatten()
    return np.asarray(values.to_numpy(zero_copy_only=False), np.float64)


def _kind(type_: pa.DataType) -> str:
    if pa.types.is_dictionary(type_):
        return _kind(type_.value_type)
    if pa.types.is_fixed_size_list(type_):
        return f"{type_.list_size} x {_kind(type_.value_type)}"
    if pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_boolean(type_):
        return "number"
    return "text" if str(_plain(type_)) in {"string", "binary"} else str(type_)


def _place(element: int, offsets: Int64 | None) -> Where:
    if offsets is None:
        return Where(row=element)
    row = int(np.searchsorted(offsets, element, side="right")) - 1
    return Where(row=row, position=element - int(offsets[row]))


def as_batches(data: Any) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of Arrow data of any producer, at least one (it may be empty)."""
    if isinstance(data, pa.RecordBatch):
        yield data
        return
    table = as_table(data)
    yield from table.to_batches() or [pa.RecordBatch.from_pylist([], schema=table.schema)]


def as_batch(data: pa.RecordBatch | pa.Table) -> pa.RecordBatch:
    """Return a batch as it is, and a table as one batch (a copy if it has several chunks).

    Raises
    ------
    SchemaMismatchError
        The data is neither.
    """
    if isinstance(data, pa.RecordBatch):
        return data
    if isinstance(data, pa.Table):
        batches = list(as_batches(data))
        return batches[0] if len(batches) == 1 else joined(batches)
    raise not_a_batch(data)


def joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return batches of one Arrow schema as one, a copy.

    Raises
    ------
    LimitExceededError
        They do not fit one (``RF-L001``).
    """
    try:
        return pa.concat_batches(batches)
    except pa.ArrowInvalid as err:
        raise LimitExceededError(
            "a string column of the result exceeds 2 GiB", expected="< 2^31 bytes", got=str(err),
            remedy="concatenate fewer records at a time",
        ) from err  # fmt: skip


def not_a_batch(data: object) -> SchemaMismatchError:
    """Return the error for data that is no Arrow batch."""
    return SchemaMismatchError(
        "the data is not an Arrow batch", expected="a RecordBatch or a Table",
        got=type(data).__name__, remedy="convert it with rf.canonical(data, schema)",
    )  # fmt: skip


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
        remedy="make a table of it: pyarrow.table(data)",
    )  # fmt: skip


def _declarable(schema: pa.Schema) -> pa.Schema:
    """Return `schema` in canonical types and nullability, so that foreign input can be parsed."""
    if not isinstance(schema, pa.Schema):
        raise not_a_schema(schema)
    return pa.schema([_declarable_field(field) for field in schema], metadata=schema.metadata)


def _declarable_field(field: pa.Field) -> pa.Field:
    type_ = field.type
    if not _is_list(type_):
        standard = STANDARD["sample"].get(field.name)
        nullable = field.nullable if standard is None else standard.nullable
        nullable = nullable and not pa.types.is_fixed_size_list(type_)
        return field.with_type(_plain(type_)).with_nullable(nullable)
    # Only members may hold nulls below the record.
    axis = (field.metadata or {}).get(f"{NAMESPACE}axis".encode())
    standard = STANDARD["packed"].get(field.name)
    nullable = type_.value_field.nullable and axis == b"member"
    if standard is not None and standard.axis == "member":
        nullable = standard.nullable
    item = pa.field("item", _plain(type_.value_type), nullable=nullable)
    return field.with_type(pa.large_list(item)).with_nullable(False)  # noqa: FBT003


def _is_list(type_: pa.DataType) -> bool:
    tests = ("is_list", "is_large_list", "is_list_view", "is_large_list_view")
    return any(getattr(pa.types, test)(type_) for test in tests)


def _plain(type_: pa.DataType) -> pa.DataType:
    """Return the canonical type of text in any encoding; other types as they are."""
    if pa.types.is_dictionary(type_):
        return _plain(type_.value_type)
    if pa.types.is_large_string(type_) or pa.types.is_string_view(type_):
        return pa.string()
    if pa.types.is_large_binary(type_) or pa.types.is_binary_view(type_):
        return pa.binary()
    return type_
