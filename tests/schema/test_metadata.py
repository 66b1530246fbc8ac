"""Declarations survive Arrow metadata, files and other libraries' names."""

import io
import json

import pyarrow as pa
import pytest
from hypothesis import given

import ragged_format as rf
from ragged_format.parse import parse_header
from ragged_format.profiles import packed_from_sample, sample_from_packed
from ragged_format.schema import NAMESPACE
from ragged_format.testing import schemas


def through_ipc(schema):
    sink = io.BytesIO()
    pa.ipc.new_stream(sink, schema).close()
    return pa.ipc.open_stream(sink.getvalue()).schema


def through_json(schema):
    """Rebuild the schema from its types and the JSON text of its metadata."""

    def text(metadata):
        pairs = {key.decode(): value.decode() for key, value in metadata.items()}
        return json.loads(json.dumps(pairs))

    fields = [
        pa.field(f.name, f.type, nullable=f.nullable, metadata=text(f.metadata)) for f in schema
    ]
    return pa.schema(fields, metadata=text(schema.metadata))


@given(schema=schemas())
def test_schemas_round_trip(schema):
    parsed = rf.parse_schema(schema)
    assert parsed.to_arrow().equals(schema, check_metadata=True)
    for other in (parsed.to_arrow(), through_ipc(schema), through_json(schema)):
        again = rf.parse_schema(other)
        assert again == parsed
        assert hash(again) == hash(parsed)
        assert list(again) == list(parsed)
        assert again.axes == parsed.axes
        assert again.metadata == parsed.metadata


@given(schema=schemas())
def test_packed_schemas_round_trip_and_invert(schema):
    sample = rf.parse_schema(schema)
    packed = packed_from_sample(sample)
    assert rf.parse_schema(through_ipc(packed.to_arrow())) == packed
    back = sample_from_packed(packed)
    assert back == sample
    assert back.metadata == sample.metadata


@given(schema=schemas())
def test_every_declaration_is_in_the_arrow_schema(schema):
    for column in rf.parse_schema(schema):
        field = schema.field(column.name)
        meta = {k.decode().removeprefix(NAMESPACE): v.decode() for k, v in field.metadata.items()}
        assert meta["axis"] == column.axis
        assert (meta.get("opens"), meta.get("head_kind")) == (column.opens, column.head_kind)
        assert json.loads(meta.get("shape", "[]")) == list(column.shape)
        assert ("log_prob" in meta) == (column.log_prob is not None)
        if column.axis != "record" and column.fill is not None:
            assert json.loads(meta["fill"]) == column.fill


@pytest.mark.parametrize("make", [rf.sample_schema, rf.packed_schema])
def test_standard_names_need_no_field_metadata(make):
    """pola-rs/polars#18316, pola-rs/polars#17418: field metadata is lost on the way."""
    schema = make(vocab_size=100)
    bare = pa.schema([f.remove_metadata() for f in schema], metadata=schema.metadata)
    assert rf.parse_schema(bare) == rf.parse_schema(schema)
    assert rf.parse_schema(bare).to_arrow().equals(schema, check_metadata=True)


def test_the_name_of_the_list_child_does_not_matter():
    """Parquet names the child of a list 'element', DuckDB names it after the column."""
    schema = rf.sample_schema(vocab_size=100)
    fields = [
        f.with_type(pa.large_list(f.type.value_field.with_name("element")))
        if pa.types.is_large_list(f.type) else f
        for f in schema
    ]  # fmt: skip
    other = pa.schema(fields, metadata=schema.metadata)
    assert not other.equals(schema, check_metadata=True)
    assert rf.parse_schema(other).to_arrow().equals(schema, check_metadata=True)


def test_unknown_metadata_survives():
    schema = rf.sample_schema(vocab_size=100, columns=[])
    more = {"pipeline:run": "7", NAMESPACE + "hint": "from a later minor version", "pandas": "{}"}
    parsed = rf.parse_schema(schema.with_metadata(schema.metadata | more))
    assert parsed.metadata == more
    assert parsed == rf.parse_schema(schema)
    back = through_ipc(parsed.to_arrow()).metadata
    assert {k.decode(): v.decode() for k, v in back.items() if k not in schema.metadata} == more
    assert parsed.select(["input_ids"]).metadata == more


def test_unknown_field_metadata_is_no_obstacle():
    schema = rf.sample_schema(vocab_size=100, columns=[])
    field = schema.field("input_ids")
    more = {NAMESPACE + "later": "1", "PARQUET:field_id": "3"}
    other = schema.set(1, field.with_metadata(field.metadata | more))
    assert rf.parse_schema(other) == rf.parse_schema(schema)


@pytest.mark.parametrize("version", ["0.1", "0.2", "0.99"])
def test_later_minor_versions_are_read(version):
    schema = rf.sample_schema(vocab_size=100, columns=[])
    metadata = schema.metadata | {b"ragged_format:version": version.encode()}
    assert rf.parse_schema(schema.with_metadata(metadata)) == rf.parse_schema(schema)
    assert parse_header(schema.with_metadata(metadata))["version"] == version


def test_required_features_may_be_absent():
    schema = rf.sample_schema(vocab_size=100, columns=[])
    metadata = dict(schema.metadata)
    del metadata[b"ragged_format:required_features"]
    assert rf.parse_schema(schema.with_metadata(metadata)) == rf.parse_schema(schema)


def test_parsed_schemas_are_remembered():
    first = rf.sample_schema(vocab_size=123, columns=["reward"])
    second = rf.sample_schema(vocab_size=123, columns=["reward"])
    assert first is not second
    assert rf.parse_schema(first) is rf.parse_schema(second)
    for size in range(2, 20):
        assert rf.parse_schema(rf.sample_schema(vocab_size=size, columns=[])).vocab_size == size
    again = first.with_metadata(first.metadata | {"x": "y"})
    assert rf.parse_schema(again).metadata == {"x": "y"}


def test_an_own_axis_of_samples_is_opened_by_members_when_packed():
    image = rf.Column("image_patches", "image", pa.int32())
    schema = rf.parse_schema(rf.sample_schema(vocab_size=9, columns=[image], root_axes=["image"]))
    packed = packed_from_sample(schema)
    assert packed.axes["image"] == rf.Axis("image", "member", "member_image_counts")
    assert sample_from_packed(packed) == schema


@pytest.mark.parametrize(
    "name", ["position_ids", "node_lengths", "node_parents", "pred_index", "target_ids",
             "member_index", "member_leaf", "member_lengths"],
)  # fmt: skip
def test_names_that_packing_needs(name):
    own = rf.Column(name, "token", pa.int32())
    schema = rf.parse_schema(rf.sample_schema(vocab_size=9, columns=[own]))
    with pytest.raises(rf.SchemaMismatchError, match="packing needs") as caught:
        packed_from_sample(schema)
    assert (caught.value.code, caught.value.where.column) == ("RF-S008", name)


@pytest.mark.parametrize("name", ["leaf", "lengths", "index"])
def test_record_names_that_collide_once_packed(name):
    own = rf.Column(name, "record", pa.int32())
    schema = rf.parse_schema(rf.sample_schema(vocab_size=9, columns=[own]))
    with pytest.raises(rf.SchemaMismatchError, match="unique") as caught:
        packed_from_sample(schema)
    assert caught.value.got == [f"member_{name}"]


def test_packed_columns_may_be_declared_by_hand():
    mine = rf.Column("rows", "row", pa.float32())
    schema = rf.parse_schema(rf.packed_schema(vocab_size=9, columns=[mine], root_axes=["row"]))
    back = sample_from_packed(schema)
    assert back.root_axes == ("token", "row")
    assert back["rows"] == mine
