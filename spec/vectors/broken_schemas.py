"""Schemas that break one rule each, by one edit of a valid schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from ragged_format import Column
from spec.vectors.valid import sample

PREFIX = "ragged_format:"
LISTS = pa.large_list(pa.field("item", pa.int32(), nullable=False))
BASE = sample("rollout_log_probs", "topk_counts", "topk_ids")


@dataclass(frozen=True)
class BrokenSchema:
    """A schema that is refused with `code`; `column` is the field at fault, if one is."""

    code: str
    name: str
    description: str
    schema: pa.Schema
    column: str | None = None


def _header(code: str, name: str, description: str, **values: str | None) -> BrokenSchema:
    """Replace keys of the schema's metadata, or remove them."""
    metadata = {key.decode(): value.decode() for key, value in BASE.metadata.items()}
    for key, value in values.items():
        if value is None:
            del metadata[PREFIX + key]
        else:
            metadata[PREFIX + key] = value
    return BrokenSchema(code, name, description, BASE.with_metadata(metadata))


def _field(
    code: str,
    name: str,
    description: str,
    column: str,
    *,
    kind: pa.DataType | None = None,
    nullable: bool | None = None,
    metadata: Mapping[str, str] | None = None,
) -> BrokenSchema:
    """Replace type, nullability or metadata of one field."""
    index = BASE.get_field_index(column)
    field = BASE.field(index)
    field = field if kind is None else field.with_type(kind)
    field = field if nullable is None else field.with_nullable(nullable)
    if metadata is not None:
        own = {(PREFIX + key).encode(): value.encode() for key, value in metadata.items()}
        field = field.with_metadata({**(field.metadata or {}), **own})
    return BrokenSchema(code, name, description, BASE.set(index, field), column)


def _added(
    code: str,
    name: str,
    description: str,
    metadata: Mapping[str, str],
    kind: pa.DataType = LISTS,
) -> BrokenSchema:
    """Add a column of one's own."""
    own = {PREFIX + key: value for key, value in metadata.items()}
    field = pa.field("own", kind, nullable=False, metadata=own)
    return BrokenSchema(code, name, description, BASE.append(field), "own")


def _own_head(code: str, name: str, description: str, axis: str, kind: pa.DataType) -> BrokenSchema:
    """Add an own head whose ids lie on `axis` and are of type `kind`."""
    counts = Column("kin_counts", "token", pa.int32(), opens="kin", head_kind="top_k")
    ids = pa.field("kin_ids", kind, nullable=False, metadata={PREFIX + "axis": axis})
    schema = BASE.append(counts.field()).append(ids)
    return BrokenSchema(code, name, description, schema, "kin_ids")


def _without(code: str, name: str, description: str, column: str, fault: str) -> BrokenSchema:
    schema = BASE.remove(BASE.get_field_index(column))
    return BrokenSchema(code, name, description, schema, fault)


def broken_schemas() -> list[BrokenSchema]:
    """Return all broken schemas, by code."""
    none = BASE.remove_metadata()
    plain = pa.schema([field.remove_metadata() for field in none])
    nullable_items = pa.large_list(pa.field("item", pa.float32()))
    twice = BASE.append(BASE.field("rollout_log_probs"))
    return [
        BrokenSchema("RF-S001", "plain-arrow", "No metadata of this format.", plain),
        _header("RF-S001", "no-profile", "A required key is missing.", profile=None),
        _header("RF-S001", "version-text", "The version is not MAJOR.MINOR.", version="0.1.0"),
        _header("RF-S001", "root-axes-text", "root_axes is not a JSON list.", root_axes="token"),
        _header("RF-S002", "profile", "An unknown profile.", profile="dialog"),
        _without("RF-S003", "required", "A required column is missing.", "input_ids", "input_ids"),
        _field("RF-S004", "list", "A list with 32-bit offsets.", "input_ids",
               kind=pa.list_(pa.field("item", pa.int32(), nullable=False))),
        _field("RF-S004", "item", "A standard column of another type.", "input_ids",
               kind=pa.large_list(pa.field("item", pa.int64(), nullable=False))),
        _field("RF-S004", "scalar", "A scalar below the record axis.", "input_ids",
               kind=pa.int32()),
        _added("RF-S004", "nested", "A value type that is not allowed.", {"axis": "token"},
               pa.large_list(pa.field("item", pa.struct([("a", pa.int32())]), nullable=False))),
        _field("RF-S005", "list", "A nullable list.", "input_ids", nullable=True),
        _field("RF-S005", "item", "Nullable items.", "rollout_log_probs", kind=nullable_items),
        _field("RF-S005", "record", "A nullable sample_id.", "sample_id", nullable=True),
        _without("RF-S006", "no-counts", "Nothing opens an axis.", "topk_counts", "topk_ids"),
        _added("RF-S006", "no-axis", "An own column that names no axis.", {}),
        _added("RF-S006", "opened-twice", "Two columns open one axis.",
               {"axis": "token", "opens": "topk"}),
        _added("RF-S006", "counts-on-record", "A counts column on the record axis.",
               {"axis": "record", "opens": "kin"}, pa.int32()),
        _added("RF-S006", "counts-type", "A counts column of floats.",
               {"axis": "token", "opens": "kin"},
               pa.large_list(pa.field("item", pa.float32(), nullable=False))),
        _field("RF-S006", "other-axis", "A standard column on another axis.", "rollout_log_probs",
               metadata={"axis": "token"}),
        _header("RF-S006", "root-axes", "The profile's root axis is missing.", root_axes="[]"),
        _own_head("RF-S006", "head-part", "The ids of a head on another axis.", "token", LISTS),
        _own_head("RF-S004", "head-ids", "The ids of a head as text.", "kin",
                  pa.large_list(pa.field("item", pa.string(), nullable=False))),
        _field("RF-S007", "fill", "A standard column with another fill.", "topk_ids",
               metadata={"fill": "0"}),
        BrokenSchema("RF-S008", "twice", "Two columns of one name.", twice),
        _header("RF-S009", "vocab-size", "vocab_size is 0.", vocab_size="0"),
        _field("RF-S009", "log-prob", "An unknown log-prob mode.", "rollout_log_probs",
               metadata={"log_prob": '{"mode":"cooked"}'}),
        _field("RF-S009", "head-kind", "An unknown head kind.", "topk_counts",
               metadata={"head_kind": "beam"}),
        _header("RF-V001", "major", "A later major version.", version="1.0"),
        _header("RF-V002", "feature", "An unknown required feature.",
                required_features='["delta_ids"]'),
    ]  # fmt: skip
