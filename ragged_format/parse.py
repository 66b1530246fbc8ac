"""From an Arrow schema to checked declarations."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ragged_format.errors import (
    NotRaggedError,
    SchemaMismatchError,
    UnsupportedFeatureError,
    UnsupportedVersionError,
    Where,
)
from ragged_format.profiles import ROOT_AXES, STANDARD, check_standard
from ragged_format.schema import (
    FORMAT_VERSION,
    HEAD_KINDS,
    NAMESPACE,
    OWN_KEYS,
    PRIMITIVES,
    PROFILES,
    RECORD,
    SUPPORTED_FEATURES,
    Column,
    LogProb,
    Profile,
    RaggedSchema,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = [
    "check_major", "is_version", "not_a_schema", "parse_header", "parse_schema", "parse_versions",
]  # fmt: skip

# More digits than any number here needs, and fewer than Python refuses to convert.
MAX_DIGITS = 18


def parse_schema(schema: pa.Schema) -> RaggedSchema:
    """Return the checked declarations of an Arrow schema.

    The last few schemas are remembered, so that batches of one source cost a comparison each.

    Raises
    ------
    NotRaggedError, UnsupportedVersionError, UnsupportedFeatureError, SchemaMismatchError
    """
    if not isinstance(schema, pa.Schema):
        raise not_a_schema(schema)
    for seen, parsed in _recent:
        if seen is schema or seen.equals(schema, check_metadata=True):
            return parsed
    parsed = _parse(schema)
    _recent.insert(0, (schema, parsed))
    del _recent[8:]
    return parsed


_recent: list[tuple[pa.Schema, RaggedSchema]] = []


def not_a_schema(schema: object) -> NotRaggedError:
    """Return the error for what is no Arrow schema."""
    return NotRaggedError(
        "a schema is a pyarrow.Schema of this format", expected="pyarrow.Schema",
        got=type(schema).__name__, remedy="make one with rf.sample_schema(vocab_size=…)",
    )  # fmt: skip


def _parse(schema: pa.Schema) -> RaggedSchema:
    own = parse_header(schema)
    if own["profile"] not in PROFILES:
        raise NotRaggedError(
            "unknown profile", code="RF-S002", expected=", ".join(PROFILES), got=own["profile"]
        )
    profile: Profile = "packed" if own["profile"] == "packed" else "sample"
    if not _is_number(own["vocab_size"]):
        raise SchemaMismatchError(
            "vocab_size is a positive integer",
            code="RF-S009", expected="decimal digits", got=own["vocab_size"],
        )  # fmt: skip
    root_axes = _json_strings(own, "root_axes")
    if root_axes[: len(ROOT_AXES[profile])] != ROOT_AXES[profile]:
        raise SchemaMismatchError(
            "root_axes begins with the profile's own axes",
            code="RF-S006", expected=list(ROOT_AXES[profile]), got=own["root_axes"],
        )  # fmt: skip
    metadata = {key.decode(): value.decode() for key, value in schema.metadata.items()}
    parsed = RaggedSchema(
        profile,
        int(own["vocab_size"]),
        [_parse_field(field, profile) for field in schema],
        root_axes,
        required_features=_json_strings(own, "required_features"),
        metadata={key: value for key, value in metadata.items() if key not in OWN_KEYS},
    )
    check_standard(parsed)
    return parsed


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS


def _parse_field(field: pa.Field, profile: Profile) -> Column:
    where = Where(column=field.name)
    try:
        raw = {key.decode(): value.decode() for key, value in (field.metadata or {}).items()}
    except UnicodeDecodeError as err:
        raise SchemaMismatchError(
            "field metadata is not UTF-8", code="RF-S009", where=where, expected="UTF-8",
            got=str(err),
        ) from err  # fmt: skip
    meta = {k.removeprefix(NAMESPACE): v for k, v in raw.items() if k.startswith(NAMESPACE)}
    standard = STANDARD[profile].get(field.name)
    axis = meta.get("axis") or (standard.axis if standard else None)
    if axis is None:
        raise SchemaMismatchError(
            "a column that is not standard declares its axis",
            code="RF-S006", where=where, expected=f"field metadata '{NAMESPACE}axis'",
            got=sorted(raw),
        )  # fmt: skip
    if standard is not None and axis != standard.axis:
        raise SchemaMismatchError(
            "a standard column lies on its standard axis",
            code="RF-S006", where=where, expected=standard.axis, got=axis,
        )  # fmt: skip
    value, item_nullable = _element_type(field, axis)
    shape: tuple[int, ...] = ()
    if pa.types.is_fixed_size_list(value):
        shape = (value.list_size,)
        value = value.value_type
    if str(value) not in PRIMITIVES:
        raise SchemaMismatchError(
            "a column's value type is an integer, float, string or binary",
            where=where, expected=", ".join(PRIMITIVES), got=value,
        )  # fmt: skip
    declared = _declared(meta, where, pa.types.is_integer(value))
    named = declared.setdefault("shape", shape)
    # An empty product is 1, which no list without a fixed size has for its width.
    if math.prod(named) != math.prod(shape) or bool(named) != bool(shape):
        raise SchemaMismatchError(
            "the declared shape has the width of the fixed-size list",
            where=where, expected=f"a product of {shape[0]}" if shape else "no shape, or a list",
            got=list(named),
        )  # fmt: skip
    if standard is not None:
        for key in ("opens", "head_kind", "log_prob", "fill", "mask"):
            declared.setdefault(key, getattr(standard, key))
    nullable = field.nullable if axis == RECORD else item_nullable
    return Column(field.name, axis, value, nullable=nullable, **declared)


def _element_type(field: pa.Field, axis: str) -> tuple[pa.DataType, bool]:
    if axis == RECORD:
        return field.type, False
    if not pa.types.is_large_list(field.type):
        raise SchemaMismatchError(
            "a column below the record axis is a large_list (64-bit offsets)",
            where=Where(column=field.name), expected="large_list<…>", got=field.type,
            remedy="convert the data with rf.canonical(batch, schema)",
        )  # fmt: skip
    if field.nullable:
        raise SchemaMismatchError(
            "a list column is declared non-null",
            code="RF-S005", where=Where(column=field.name), expected="nullable=False",
            got="nullable=True", remedy="convert the data with rf.canonical(batch, schema)",
        )  # fmt: skip
    return field.type.value_type, field.type.value_field.nullable


def _number(text: str, integer: bool) -> int | float:  # noqa: FBT001
    """Return the number that a JSON text is: of an integer column, 1 and 1.0 are one."""
    value = json.loads(text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("a fill is a JSON number")
    if not integer:
        return float(value)
    if not math.isfinite(value) or value != int(value):
        raise ValueError("the fill of an integer column is an integer")
    return int(value)


def _size(value: object) -> int:
    if type(value) is not int:
        raise TypeError("a shape is a list of integers")
    return value


_FLAGS = ("mask", "approximate", "share_key", "media")


def _declared(meta: dict[str, str], where: Where, integer: bool) -> dict[str, Any]:  # noqa: FBT001
    out: dict[str, Any] = {}
    try:
        for key, text in meta.items():
            if key in _FLAGS:
                out[key] = {"true": True, "false": False}[text]
            elif key == "fill":
                out[key] = _number(text, integer)
            elif key == "shape":
                out[key] = tuple(map(_size, json.loads(text)))
            elif key == "log_prob":
                out[key] = LogProb.from_json(json.loads(text))
            elif key == "head_kind":
                out[key] = HEAD_KINDS[HEAD_KINDS.index(text)]
            elif key == "opens":
                out[key] = text
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        raise SchemaMismatchError(
            f"field metadata '{NAMESPACE}{key}' is malformed", code="RF-S009", where=where,
            expected="a value as the specification's metadata table gives it", got=text,
        ) from err  # fmt: skip
    return out


def parse_header(schema: pa.Schema) -> dict[str, str]:
    """Return this format's schema metadata without the namespace, version and features checked.

    Raises
    ------
    NotRaggedError
        A required key is missing or malformed (``RF-S001``).
    UnsupportedVersionError, UnsupportedFeatureError
        ``RF-V001``, ``RF-V002``.
    """
    own = parse_versions(schema, SUPPORTED_FEATURES)
    for key in ("profile", "vocab_size", "root_axes"):
        if key not in own:
            raise NotRaggedError(
                f"schema metadata lacks '{NAMESPACE}{key}'",
                expected=f"keys version, profile, vocab_size, root_axes under '{NAMESPACE}'",
                got=sorted(own),
            )  # fmt: skip
    return own


def parse_versions(schema: pa.Schema, supported: Collection[str]) -> dict[str, str]:
    """Return this format's schema metadata without the namespace, version and features checked.

    Other keys are as they are. Errors as :func:`parse_header`.
    """
    try:
        raw = {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
    except UnicodeDecodeError as err:
        raise NotRaggedError(
            "schema metadata is not UTF-8", expected="UTF-8", got=str(err)
        ) from err
    own = {k.removeprefix(NAMESPACE): v for k, v in raw.items() if k.startswith(NAMESPACE)}
    if "version" not in own:
        raise NotRaggedError(
            "the Arrow schema does not carry this format's metadata",
            expected=f"schema metadata key '{NAMESPACE}version'", got=sorted(raw),
            remedy="import the data with an adapter, or write it with rf.Writer",
        )  # fmt: skip
    if not is_version(own["version"]):
        raise NotRaggedError(
            "the format version is malformed", expected="MAJOR.MINOR", got=own["version"]
        )
    check_major(own["version"])
    features = _json_strings(own, "required_features")
    if unknown := [feature for feature in features if feature not in supported]:
        raise UnsupportedFeatureError(
            "the data requires features that this library does not know",
            expected=sorted(supported) or "no required features", got=unknown,
            remedy="use a newer library release",
        )  # fmt: skip
    return own


def is_version(text: object) -> bool:
    """Return whether this is text of the form MAJOR.MINOR."""
    parts = text.split(".") if isinstance(text, str) else []
    return len(parts) == 2 and all(map(_is_number, parts))


def check_major(version: str) -> None:
    """Raise :class:`UnsupportedVersionError` unless this library reads a version of the format."""
    if int(version.split(".")[0]) != FORMAT_VERSION[0]:
        raise UnsupportedVersionError(
            "this library does not read that major version of the format",
            expected=f"{FORMAT_VERSION[0]}.x", got=version,
            remedy="use a library release that reads it",
        )  # fmt: skip


def _json_strings(own: Mapping[str, str], key: str) -> tuple[str, ...]:
    text = own.get(key, "[]")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise NotRaggedError(
            f"'{NAMESPACE}{key}' is malformed", expected="a JSON list of strings", got=text
        )
    return tuple(value)
