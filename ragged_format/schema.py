"""The model of the format: every column lies on an axis, and a counts column opens an axis.

A :class:`Column` is declared by name, axis, value type and, where it needs them, a fixed shape, a
fill, a log-prob mode. A :class:`RaggedSchema` is a checked set of columns with the axes that follow
from them. Both convert to and from an Arrow schema, whose metadata repeats the declarations. The
standard columns of the two profiles are in :mod:`ragged_format.profiles`.
"""

from __future__ import annotations

import json
import math
import operator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from ragged_format.arguments import check_choice, list_of, names_of, shown, texts_of
from ragged_format.errors import SchemaMismatchError, UnknownColumnError, Where
from ragged_format.log_prob import LOG_PROB_FILL, LogProb, is_finite

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = [
    "FORMAT_VERSION",
    "LOG_PROB_FILL",
    "NAMESPACE",
    "RECORD",
    "Axis",
    "Column",
    "LogProb",
    "Profile",
    "RaggedSchema",
    "type_name",
]

FORMAT_VERSION = (0, 1)
NAMESPACE = "ragged_format:"
# Schema metadata, in the order in which it is written.
OWN_KEYS = tuple(
    NAMESPACE + key
    for key in ("version", "profile", "vocab_size", "root_axes", "required_features")
)
RECORD = "record"
SUPPORTED_FEATURES: frozenset[str] = frozenset()

Profile = Literal["sample", "packed"]
PROFILES: tuple[Profile, ...] = ("sample", "packed")
HEAD_KINDS = ("set", "top_k", "support", "draws")
PRIMITIVES = {
    str(t): t
    for t in (
        pa.int8(), pa.int16(), pa.int32(), pa.int64(),
        pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(),
        pa.float16(), pa.float32(), pa.float64(), pa.string(), pa.binary(),
    )
}  # fmt: skip
# Ids are int32.
MAX_VOCAB_SIZE = 1 << 31
_HEAD_COLUMNS = {
    "_ids": pa.types.is_integer,
    "_log_probs": pa.types.is_floating,
    "_weights": pa.types.is_floating,
}
_TYPE_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}


def type_name(kind: pa.DataType) -> str:
    """Return the name of a value type in the specification: ``int8`` … ``float64``, ``string``."""
    return _TYPE_NAMES.get(str(kind), str(kind))


def _json(value: Any) -> str:
    """Return canonical JSON: no whitespace, keys sorted, non-ASCII characters as they are."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Column:
    """Declaration of one column.

    Parameters
    ----------
    name : str
        Column name, unique in its schema.
    axis : str
        Axis on which it lies. On ``"record"`` the Arrow type is the scalar itself, otherwise
        ``large_list`` of it.
    type : pyarrow.DataType
        Value type: an integer, float, string or binary type.
    shape : tuple of int
        Shape of one element where every element is a fixed-size tensor; ``()`` is a scalar.
    fill : int or float, optional
        Value of the slots that padding adds. Defaults to 0 for numbers.
    nullable : bool
        Whether a record's value (record axis) or an item (member axis only) may be null.
    opens : str, optional
        Axis that this column opens: each value is the number of elements that the opened axis has
        under the element of this column's axis.
    mask : bool
        The counts are 0 or 1 and the opened axis is a subset of this column's axis.
    log_prob : LogProb, optional
        Declares a log-prob column and its mode.
    head_kind : {"set", "top_k", "support", "draws"}, optional
        On a counts column: what the opened axis holds. A candidate set (ascending ids, the sampled
        token among them), a head of the K most likely ids, a head of a whole candidate set, or
        random draws with weights. Its ids are the column ``<axis>_ids``.
    approximate : bool
        From a lossy source: the checks of sign, mass and order do not apply.
    share_key : bool
        Prefix sharing compares this column besides the token ids.
    media : bool
        Records where this column is set are never shared unless a share key exists.
    """

    name: str
    axis: str
    type: pa.DataType
    shape: tuple[int, ...] = ()
    fill: int | float | None = None
    nullable: bool = False
    opens: str | None = None
    mask: bool = False
    log_prob: LogProb | None = None
    head_kind: str | None = None
    approximate: bool = False
    share_key: bool = False
    media: bool = False

    def __post_init__(self) -> None:
        where = Where(column=self.name)
        names_of("names of columns and axes", (self.name, self.axis, self.opens or ""))
        object.__setattr__(self, "shape", self._checked_shape())
        if not isinstance(self.type, pa.DataType) or str(self.type) not in PRIMITIVES:
            raise SchemaMismatchError(
                "a column's value type is an integer, float, string or binary",
                where=where, expected=", ".join(PRIMITIVES), got=shown(self.type),
                remedy="convert data of other producers with rf.canonical(data, schema)",
            )  # fmt: skip
        numeric = pa.types.is_integer(self.type) or pa.types.is_floating(self.type)
        if self.opens is not None and not pa.types.is_integer(self.type):
            raise SchemaMismatchError(
                "a counts column is of an integer type",
                code="RF-S006", where=where, expected="an integer type", got=self.type,
            )  # fmt: skip
        if self.opens is not None and (self.axis == RECORD or self.shape):
            raise SchemaMismatchError(
                "a counts column is a list of scalars on an axis below the record",
                code="RF-S006", where=where, expected="an axis other than 'record', no shape",
                got=f"axis {self.axis!r}, shape {self.shape}",
            )  # fmt: skip
        if self.mask and self.opens is None:
            raise SchemaMismatchError(
                "a mask opens an axis",
                code="RF-S006", where=where, expected="the name of an axis", got=None,
            )  # fmt: skip
        if self.nullable and self.axis not in (RECORD, "member"):
            raise SchemaMismatchError(
                "only record and member columns may hold nulls",
                code="RF-S005", where=where, expected="nullable=False", got="nullable=True",
            )  # fmt: skip
        if self.shape and (not numeric or self.nullable):
            raise SchemaMismatchError(
                "a fixed shape needs a number type without nulls",
                where=where, expected="numbers, nullable=False", got=f"shape {self.shape}",
            )  # fmt: skip
        if self.log_prob is not None and not pa.types.is_floating(self.type):
            raise SchemaMismatchError(
                "a log-prob column is of a float type",
                where=where, expected="float16, float32 or float64", got=self.type,
            )  # fmt: skip
        if self.head_kind is not None and (self.opens is None or self.head_kind not in HEAD_KINDS):
            raise SchemaMismatchError(
                "a head kind belongs to a counts column",
                code="RF-S009", where=where, expected=", ".join(HEAD_KINDS), got=self.head_kind,
            )  # fmt: skip
        object.__setattr__(self, "fill", self._checked_fill() if numeric else self.fill)
        if not numeric and self.fill is not None:
            raise SchemaMismatchError(
                "only numbers are padded", code="RF-S009", where=where,
                expected="no fill", got=self.fill,
            )  # fmt: skip

    def _checked_shape(self) -> tuple[int, ...]:
        """Return the shape as Python integers; an element must fit a fixed-size list."""
        try:
            shape = tuple(operator.index(size) for size in self.shape)
        except TypeError:
            shape = (-1,)
        # 32-bit sizes are those of Arrow.
        if shape and (min(shape) < 1 or math.prod(shape) >= 1 << 31):
            raise SchemaMismatchError(
                "a shape is a sequence of positive sizes", where=Where(column=self.name),
                expected="sizes >= 1, fewer than 2^31 values in all", got=self.shape,
            )  # fmt: skip
        return shape

    def _checked_fill(self) -> int | float:
        """Return the fill as Python number of the column's kind; it must be a value of the type."""
        fill = self.fill
        if fill is None:
            fill = LOG_PROB_FILL if self.log_prob else 0
        dtype = self.type.to_pandas_dtype()
        limits = np.finfo(dtype) if pa.types.is_floating(self.type) else np.iinfo(dtype)
        kind = float if pa.types.is_floating(self.type) else int
        low, high = kind(limits.min), kind(limits.max)
        if not (is_finite(fill) and low <= fill <= high and kind(fill) == fill):
            raise SchemaMismatchError(
                "the fill is a finite value of the column's type", code="RF-S009",
                where=Where(column=self.name), expected=self.type, got=fill,
            )  # fmt: skip
        return kind(fill)

    @property
    def width(self) -> int:
        """Number of values in one element."""
        return math.prod(self.shape)

    @property
    def value_type(self) -> pa.DataType:
        """Arrow type of one element: the scalar, or a fixed-size list of it."""
        if not self.shape:
            return self.type
        return pa.list_(pa.field("item", self.type, nullable=False), self.width)

    @property
    def arrow_type(self) -> pa.DataType:
        """Arrow type of the column: the element type on the record axis, else a large list."""
        if self.axis == RECORD:
            return self.value_type
        return pa.large_list(pa.field("item", self.value_type, nullable=self.nullable))

    def metadata(self) -> dict[str, str]:
        """Return the field metadata that declares this column."""
        out = {"axis": self.axis}
        if self.fill is not None and self.axis != RECORD:
            out["fill"] = _json(self.fill)
        if self.shape:
            out["shape"] = _json(self.shape)
        for key in ("opens", "head_kind"):
            if (value := getattr(self, key)) is not None:
                out[key] = value
        if self.log_prob is not None:
            out["log_prob"] = _json(self.log_prob.to_json())
        for key in ("mask", "approximate", "share_key", "media"):
            if getattr(self, key):
                out[key] = "true"
        return {NAMESPACE + key: value for key, value in out.items()}

    def field(self) -> pa.Field:
        """Return the Arrow field, metadata included."""
        nullable = self.nullable and self.axis == RECORD
        return pa.field(self.name, self.arrow_type, nullable=nullable, metadata=self.metadata())

    def renamed(self, name: str, axis: str) -> Column:
        """Return the same declaration under another name and axis."""
        return replace(self, name=name, axis=axis)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a schema.

    Attributes
    ----------
    name : str
        Axis name.
    parent : str
        Axis whose elements own this axis' elements; ``"record"`` for a root axis.
    counts : str, optional
        Column on the parent axis that opens this one; ``None`` for a root axis.
    mask : bool
        The counts are 0 or 1: an element of this axis is an element of its parent.
    """

    name: str
    parent: str
    counts: str | None = None
    mask: bool = False


class RaggedSchema:
    """A checked set of columns, the axes that follow, and the identity of the data.

    Parameters
    ----------
    profile : {"sample", "packed"}
        Which set of standard columns and rules applies.
    vocab_size : int
        Size of the model's vocabulary: ids are below it.
    columns : iterable of Column
        In schema order.
    root_axes : iterable of str
        Axes that each record opens itself.
    metadata : mapping of str to str, optional
        Further schema metadata, kept as it is.

    Raises
    ------
    SchemaMismatchError
        The columns contradict each other (``RF-S006``, ``RF-S008``).
    """

    def __init__(
        self,
        profile: Profile,
        vocab_size: int,
        columns: Iterable[Column],
        root_axes: Iterable[str],
        *,
        required_features: Iterable[str] = (),
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.version = FORMAT_VERSION
        self.profile: Profile = PROFILES[check_choice("profile", profile, PROFILES)]
        self.vocab_size = vocab_size
        self.root_axes = names_of("root_axes", root_axes)
        self.required_features = (*sorted(names_of("required_features", required_features)),)
        self.metadata = texts_of("metadata", metadata)
        listed = list_of("columns", Column, columns)
        self.columns = {column.name: column for column in listed}
        if len(self.columns) < len(listed):
            names = [column.name for column in listed]
            raise SchemaMismatchError(
                "column names are unique", code="RF-S008",
                got=sorted({name for name in names if names.count(name) > 1}), expected="one each",
            )  # fmt: skip
        if type(vocab_size) is not int or not 1 <= vocab_size <= MAX_VOCAB_SIZE:
            raise SchemaMismatchError(
                "vocab_size is a positive integer of at most 2^31",
                code="RF-S009", expected=f"1 to {MAX_VOCAB_SIZE}", got=repr(vocab_size),
                remedy="pass the rows of the model's output layer",
            )  # fmt: skip
        if own := sorted({key for key in self.metadata if key in OWN_KEYS}):
            raise SchemaMismatchError(
                "metadata does not contain the keys that the schema itself writes",
                code="RF-S009", expected=f"keys other than {', '.join(sorted(OWN_KEYS))}", got=own,
            )  # fmt: skip
        self.axes = _axes(listed, self.root_axes)
        self._check_heads()

    def _check_heads(self) -> None:
        """Check the columns that the rules on sets and heads read by name."""
        for axis in self.axes.values():
            if axis.counts is None or self.columns[axis.counts].head_kind is None:
                continue
            for suffix, fits in _HEAD_COLUMNS.items():
                column = self.columns.get(axis.name + suffix)
                if column is None:
                    continue
                if column.axis != axis.name:
                    raise SchemaMismatchError(
                        "a column named like a part of a set or head lies on its axis",
                        code="RF-S006", where=Where(column=column.name), expected=axis.name,
                        got=column.axis,
                    )  # fmt: skip
                if column.shape or not fits(column.type):
                    raise SchemaMismatchError(
                        "the ids of a set or head are integers, its log-probs and weights floats",
                        where=Where(column=column.name), got=column.value_type,
                        expected="integers" if suffix == "_ids" else "floats",
                    )  # fmt: skip

    def __iter__(self) -> Iterator[Column]:
        return iter(self.columns.values())

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Column:
        try:
            return self.columns[name]
        except (KeyError, TypeError):
            raise UnknownColumnError(
                "there is no such column",
                expected=", ".join(self.columns), got=shown(name),
                remedy="name one of the columns that the data has",
            ) from None  # fmt: skip

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedSchema) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __repr__(self) -> str:
        return f"RaggedSchema({self.profile!r}, vocab_size={self.vocab_size}, {list(self.columns)})"

    @cached_property
    def identity(self) -> str:
        """Canonical text of all that must agree between the shards of a dataset.

        Canonical JSON of ``{"columns": [{"metadata": {…}, "name": …, "nullable": …, "type": …}, …],
        "profile": …, "required_features": […], "root_axes": […], "vocab_size": …}``, where
        ``metadata`` is :meth:`Column.metadata` and ``type`` is :func:`type_name`.
        """
        columns = [
            {
                "metadata": c.metadata(), "name": c.name, "nullable": c.nullable,
                "type": type_name(c.type),
            }
            for c in self
        ]  # fmt: skip
        return _json(
            {
                "columns": columns, "profile": self.profile, "root_axes": self.root_axes,
                "required_features": self.required_features, "vocab_size": self.vocab_size,
            }
        )  # fmt: skip

    def on(self, axis: str) -> list[Column]:
        """Return the columns that lie on `axis`, in schema order."""
        return [column for column in self if column.axis == axis]

    def children(self, axis: str) -> list[Axis]:
        """Return the axes that columns of `axis` open."""
        return [a for a in self.axes.values() if a.parent == axis]

    def below(self, axis: str) -> list[str]:
        """Return `axis` and every axis opened under it, parents first."""
        out = [axis]
        for name in out:
            out.extend(child.name for child in self.children(name))
        return out

    def root_of(self, axis: str) -> str:
        """Return the root axis under which `axis` is opened."""
        while axis != RECORD and self.axes[axis].parent != RECORD:
            axis = self.axes[axis].parent
        return axis

    def select(self, names: Iterable[str]) -> RaggedSchema:
        """Return the schema with these columns only, plus the counts that their axes need."""
        wanted = {self[name].name for name in names_of("columns", names)}
        for name in list(wanted):
            axis = self[name].axis
            while axis != RECORD and (counts := self.axes[axis].counts) is not None:
                wanted.add(counts)
                axis = self[counts].axis
        return self.replace_columns(c for c in self if c.name in wanted)

    def replace_columns(self, columns: Iterable[Column]) -> RaggedSchema:
        """Return the same identity with other columns."""
        return RaggedSchema(
            self.profile, self.vocab_size, columns, self.root_axes,
            required_features=self.required_features, metadata=self.metadata,
        )  # fmt: skip

    def to_arrow(self) -> pa.Schema:
        """Return the Arrow schema with all metadata."""
        return self._arrow

    @cached_property
    def _arrow(self) -> pa.Schema:
        own = (
            ".".join(map(str, self.version)), self.profile, str(self.vocab_size),
            _json(self.root_axes), _json(self.required_features),
        )  # fmt: skip
        metadata = dict(zip(OWN_KEYS, own, strict=True)) | self.metadata
        return pa.schema([column.field() for column in self], metadata=metadata)


def _axes(columns: list[Column], root_axes: tuple[str, ...]) -> dict[str, Axis]:
    if len(set(root_axes)) < len(root_axes) or not all(root_axes) or RECORD in root_axes:
        raise SchemaMismatchError(
            "root axes have names of their own", code="RF-S006",
            expected=f"unique names other than {RECORD!r}", got=list(root_axes),
        )  # fmt: skip
    axes = {name: Axis(name, RECORD) for name in root_axes}
    openers = [column for column in columns if column.opens is not None]
    for column in openers:
        name = str(column.opens)
        if name in axes or name == RECORD:
            raise SchemaMismatchError(
                f"axis {name!r} is opened twice", code="RF-S006", where=Where(column=column.name),
                expected="one opener", got=axes[name].counts if name in axes else RECORD,
            )  # fmt: skip
        axes[name] = Axis(name, column.axis, column.name, column.mask)
    for column in columns:
        seen: list[str] = []
        axis = column.axis
        while axis != RECORD:
            if axis not in axes or axis in seen:
                raise SchemaMismatchError(
                    f"no column opens axis {axis!r}" if axis not in axes else
                    f"the axes {', '.join(seen)} open each other",
                    code="RF-S006", where=Where(column=column.name),
                    expected=f"one of {', '.join([RECORD, *axes])}", got=axis,
                    remedy=f"add the counts column that opens the axis, such as {axis}_counts, "
                    "or declare a root axis",
                )  # fmt: skip
            seen.append(axis)
            axis = axes[axis].parent
    return axes
