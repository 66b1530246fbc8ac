"""Digests follow their definition byte by byte, and nothing physical enters."""

import importlib
import math
import struct
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.containers import (
    digest_input,
    model_digest,
    model_schema_digest,
    small_batch,
    small_schema,
)

import ragged_format as rf
from ragged_format.testing import packed_batches, sample_batches, schemas, variants


@given(sample_batches() | packed_batches())
def test_a_digest_is_that_of_its_definition(batch):
    expected = model_digest(batch)
    for form in variants(batch, same_schema=True).values():
        assert rf.digest(form) == expected


@given(sample_batches() | packed_batches())
def test_foreign_forms_have_the_same_digest(batch):
    for name, form in variants(batch).items():
        if name != "no chunks":
            assert rf.digest(rf.canonical(form, batch.schema)) == rf.digest(batch)


@given(sample_batches() | packed_batches())
def test_the_digests_of_records_are_those_of_their_batches(batch):
    rows = [model_digest(batch.slice(i, 1)) for i in range(batch.num_rows)]
    for form in variants(batch, same_schema=True).values():
        got = rf.record_digests(form)
        assert got.shape == (batch.num_rows, 16)
        assert got.dtype == np.uint8
        assert [bytes(row) for row in got] == rows
        assert [rf.digest(form.slice(i, 1)) for i in range(batch.num_rows)] == rows


def test_a_worked_example():
    """The example of the specification, written out."""
    schema = rf.sample_schema(vocab_size=10, columns=["reward"])
    row = {"sample_id": "ab", "reward": None, "input_ids": [7, 8], "completion_mask": [0, 1]}
    batch = pa.RecordBatch.from_pylist([row], schema=schema)
    expected = b"".join((
        b"\x17\0\0\0sample_id:record:string",
        b"\x16\0\0\0reward:record:float64?",
        b"\x15\0\0\0input_ids:token:int32",
        b"\x1b\0\0\0completion_mask:token:uint8",
        struct.pack("<Q", 1),
        struct.pack("<2Q", 0, 2), b"ab",
        b"\0", bytes(8),
        struct.pack("<2Q", 0, 2), struct.pack("<2i", 7, 8),
        struct.pack("<2Q", 0, 2), b"\0\1",
    ))  # fmt: skip
    assert digest_input(batch) == expected
    assert rf.digest(batch) == model_digest(batch)


def test_32_bit_lists_are_digested_as_what_they_hold():
    batch = small_batch()
    narrow = batch.schema
    arrays = []
    for i, field in enumerate(batch.schema):
        array = batch.column(i)
        if pa.types.is_large_list(field.type):
            item = pa.field("element", field.type.value_type, nullable=False)
            array = array.cast(pa.list_(item))
            narrow = narrow.set(i, field.with_type(array.type))
        arrays.append(array)
    rewritten = pa.RecordBatch.from_arrays(arrays, schema=narrow)
    assert pa.types.is_list(rewritten.schema.field("input_ids").type)
    assert rf.digest(rewritten) == rf.digest(batch)
    assert (rf.record_digests(rewritten) == rf.record_digests(batch)).all()


def test_what_lies_under_a_null_does_not_count():
    schema = rf.sample_schema(vocab_size=10, columns=["group_id", "reward"])
    rows = [
        {"sample_id": s, "group_id": g, "reward": r, "input_ids": [], "completion_mask": []}
        for s, g, r in (("a", "xyz", 1.5), ("b", "uv", 2.5), ("c", "w", 3.5))
    ]
    full = pa.RecordBatch.from_pylist(rows, schema=schema)
    clean = pa.RecordBatch.from_pylist(
        [rows[0] | {"group_id": None, "reward": None}, rows[1], rows[2] | {"group_id": None}],
        schema=schema,
    )
    text, number = full.column("group_id"), full.column("reward")
    dirty_text = pa.Array.from_buffers(pa.string(), 3, [pa.py_buffer(b"\xfa"), *text.buffers()[1:]])
    dirty_number = pa.Array.from_buffers(
        pa.float64(), 3, [pa.py_buffer(b"\xfe"), *number.buffers()[1:]]
    )
    dirty = full.set_column(1, schema.field("group_id"), dirty_text)
    dirty = dirty.set_column(2, schema.field("reward"), dirty_number)
    dirty = pa.RecordBatch.from_arrays(dirty.columns, schema=schema)
    assert dirty.column("group_id").to_pylist() == [None, "uv", None]
    assert rf.digest(dirty) == rf.digest(clean) == model_digest(clean)
    assert (rf.record_digests(dirty) == rf.record_digests(clean)).all()
    assert rf.digest(dirty) != rf.digest(full)
    assert rf.digest(dirty.slice(0, 1)) == rf.digest(clean.slice(0, 1))


@given(sample_batches(min_rows=1), st.data())
def test_any_other_content_has_another_digest(batch, data):
    name = data.draw(st.sampled_from(batch.schema.names))
    values = batch.column(name).to_pylist()
    row = data.draw(st.integers(0, batch.num_rows - 1))
    column = rf.parse_schema(batch.schema)[name]
    if column.axis == "record":
        values[row] = (
            f"{values[row]}!" if column.type == pa.string() else
            b"!" if column.type == pa.binary() else
            [1] * column.width if column.shape else 1 if values[row] != 1 else 2
        )  # fmt: skip
    else:
        values[row] = values[row][1:] if values[row] else [
            [0] * column.width if column.shape else "" if column.type == pa.string() else
            b"" if column.type == pa.binary() else 0
        ]  # fmt: skip
    changed = batch.set_column(
        batch.schema.get_field_index(name), batch.schema.field(name),
        pa.array(values, column.arrow_type),
    )  # fmt: skip
    changed = pa.RecordBatch.from_arrays(changed.columns, schema=batch.schema)
    if model_digest(changed) == model_digest(batch):
        return  # the change did not change anything, such as ones to ones
    assert rf.digest(changed) != rf.digest(batch)


def test_the_boundary_between_records_counts():
    schema = rf.sample_schema(vocab_size=10, columns=[])
    one = [{"sample_id": "a", "input_ids": [1, 2], "completion_mask": [0, 0]},
           {"sample_id": "b", "input_ids": [3], "completion_mask": [0]}]  # fmt: skip
    two = [{"sample_id": "a", "input_ids": [1], "completion_mask": [0]},
           {"sample_id": "b", "input_ids": [2, 3], "completion_mask": [0, 0]}]  # fmt: skip
    a, b = (pa.RecordBatch.from_pylist(rows, schema=schema) for rows in (one, two))
    assert rf.digest(a) != rf.digest(b)


def test_floats_count_by_their_bits():
    schema = rf.sample_schema(vocab_size=10, columns=["reward"])
    digests = set()
    for reward in (0.0, -0.0, math.nan, None):
        row = {"sample_id": "a", "reward": reward, "input_ids": [], "completion_mask": []}
        digests.add(rf.digest(pa.RecordBatch.from_pylist([row], schema=schema)))
    assert len(digests) == 4


def test_the_declaration_counts():
    name = rf.Column("extra", "token", pa.int32())
    other = [replace(name, name="other"), replace(name, type=pa.int64()), replace(name, shape=(2,)),
             replace(name, axis="target")]  # fmt: skip
    digests = set()
    for column in (name, *other):
        schema = rf.sample_schema(vocab_size=10, columns=[column])
        digests.add(rf.digest(pa.RecordBatch.from_pylist([], schema=schema)))
    assert len(digests) == 5


def test_metadata_does_not_count():
    batch = small_batch()
    labelled = batch.schema.with_metadata({**batch.schema.metadata, b"run": b"7"})
    assert rf.digest(pa.RecordBatch.from_arrays(batch.columns, schema=labelled)) == rf.digest(batch)


def test_long_columns_without_nulls(monkeypatch):
    """More values than the constant that stands for 'no nulls' has."""
    module = importlib.import_module("ragged_format.digest")
    monkeypatch.setattr(module, "_ONES", np.ones(2, np.uint8))
    batch = pa.RecordBatch.from_pylist(
        [
            {"sample_id": str(i), "reward": float(i), "input_ids": [], "completion_mask": []}
            for i in range(3)
        ],
        schema=rf.sample_schema(vocab_size=10, columns=["reward"]),
    )
    assert rf.digest(batch) == model_digest(batch)


def test_broken_arrays_are_refused():
    schema = small_schema([])
    ids = pa.LargeListArray.from_arrays([0, 3, 1], pa.array([1, 2, 3], pa.int32()))
    broken = pa.RecordBatch.from_arrays(
        [pa.array(["a", "b"]), ids.cast(schema.field(1).type),
         pa.array([[0], [0]], schema.field(2).type)],
        schema=schema,
    )  # fmt: skip
    with pytest.raises(rf.InvariantError, match="RF-I001"):
        rf.digest(broken)


def test_nulls_where_none_may_be_are_refused():
    schema = small_schema([])
    masks = pa.array([[0]], schema.field(2).type)
    for ids in ([None], [[None]]):
        batch = pa.RecordBatch.from_arrays(
            [pa.array(["a"]), pa.array(ids, pa.large_list(pa.int32())), masks],
            schema=pa.schema(
                [schema.field(0), schema.field(1).with_type(pa.large_list(pa.int32())),
                 schema.field(2)], metadata=schema.metadata,
            ),
        )  # fmt: skip
        with pytest.raises(rf.RaggedError) as caught:
            rf.digest(batch)
        assert caught.value.code in ("RF-I002", "RF-S005")


def test_foreign_schemas_are_refused():
    with pytest.raises(rf.NotRaggedError):
        rf.digest(pa.record_batch({"a": [1]}))


@given(schemas())
def test_a_schema_digest_is_that_of_its_definition(schema):
    assert rf.schema_digest(schema) == model_schema_digest(schema)


def test_all_metadata_counts_in_a_schema_digest_but_names_of_list_children_do_not():
    schema = small_schema()
    digest = rf.schema_digest(schema)
    labelled = schema.with_metadata({**schema.metadata, b"run": b"7"})
    assert rf.schema_digest(labelled) != digest
    field = schema.field("input_ids")
    noted = schema.set(3, field.with_metadata({**field.metadata, b"note": b"x"}))
    assert rf.schema_digest(noted) != digest
    renamed = pa.large_list(pa.field("element", pa.int32(), nullable=False))
    assert rf.schema_digest(schema.set(3, field.with_type(renamed))) == digest
    assert rf.schema_digest(schema.with_metadata(dict(reversed(schema.metadata.items())))) == digest


def test_metadata_that_is_not_text_is_refused():
    with pytest.raises(rf.SchemaMismatchError, match="RF-S009"):
        rf.schema_digest(small_schema().with_metadata({b"\xff": b"x"}))
