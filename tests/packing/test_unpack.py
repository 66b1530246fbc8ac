"""Unpacking is the inverse of packing."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.prefix_trie import batch_of, sharing_samples

import ragged_format as rf
from ragged_format.lists import flat, to_numpy
from ragged_format.packing import pack_row, unpack_row
from ragged_format.testing import assert_ragged_equal, rollouts, sample_batches, schemas, variants
from ragged_format.validate import validate

WAYS = [("tree", "token"), ("tree", "transition"), ("sequence", "token")]


def kept_of(batch):
    scored = [any(mask) for mask in batch.column("completion_mask").to_pylist()]
    return rf.take(batch, np.flatnonzero(scored))


@pytest.mark.parametrize(("packing", "fork"), WAYS)
@given(samples=sharing_samples())
def test_members_come_back(packing, fork, samples):
    batch = batch_of(samples)
    back = unpack_row(pack_row(batch, packing, fork))
    validate(back)
    assert_ragged_equal(back, kept_of(batch), check_schema=True)


@given(batch=sample_batches(max_length=6))
def test_any_batch_comes_back_where_nothing_is_shared(batch):
    back = unpack_row(pack_row(batch, "sequence", null_advantage="keep"))
    assert_ragged_equal(back, kept_of(batch), check_schema=True)


@given(batch=sample_batches(max_length=6))
def test_all_but_token_columns_come_back_from_a_tree(batch):
    back = unpack_row(pack_row(batch, null_advantage="keep"))
    schema = rf.parse_schema(batch.schema)
    below_token = set(schema.below("token")) - set(schema.below("target"))
    names = [c.name for c in schema if c.axis not in below_token]
    names += ["input_ids", "completion_mask"]
    assert_ragged_equal(back.select(names), kept_of(batch).select(names))


@given(samples=sharing_samples(), fork=st.sampled_from(["token", "transition"]))
def test_packing_again_gives_the_same_row(samples, fork):
    row = pack_row(batch_of(samples), fork=fork)
    assert pack_row(unpack_row(row), fork=fork).equals(row)


@st.composite
def several(draw):
    schema = draw(schemas())
    count = draw(st.integers(0, 4))
    return schema, [draw(sample_batches(schema, prefix=f"p{i}-")) for i in range(count)]


@given(drawn=several())
def test_rows_of_a_batch_come_back_in_their_order(drawn):
    schema, batches = drawn
    packed = [pack_row(batch, "sequence", null_advantage="keep") for batch in batches]
    if not packed:
        empty = pa.RecordBatch.from_pylist([], schema=schema)
        packed = [pack_row(empty).slice(0, 0)]
        batches = [empty]
    rows = rf.concat(packed)
    expected = rf.concat([kept_of(batch) for batch in batches])
    for variant in variants(rows, same_schema=True).values():
        assert_ragged_equal(unpack_row(variant), expected)


def test_target_columns_are_views():
    row = pack_row(rollouts(np.random.default_rng(0), num_samples=8, turns=2))
    back = unpack_row(row)
    for name in ("rollout_log_probs", "candidate_ids", "topk_log_probs"):
        pointers = [to_numpy(flat(b.column(name)).values).ctypes.data for b in (row, back)]
        assert pointers[0] == pointers[1]


def test_samples_cannot_be_unpacked():
    with pytest.raises(rf.SchemaMismatchError, match="only packed rows"):
        unpack_row(batch_of([]))


def test_a_root_axis_without_member_counts_cannot_be_divided():
    schema = rf.packed_schema(
        vocab_size=8, columns=[rf.Column("frame", "frames", pa.int8())], root_axes=["frames"]
    )
    with pytest.raises(rf.PackingError, match="which element is whose"):
        unpack_row(pa.RecordBatch.from_pylist([], schema=schema))


@pytest.mark.parametrize(
    ("column", "values", "code", "position"),
    [("member_index", [[1, 0]], "RF-I036", 1), ("member_lengths", [[2, 3]], "RF-I038", 1)],
)
def test_a_row_that_contradicts_itself_is_an_error(column, values, code, position):
    samples = [{"tokens": [1, 2], "mask": [0, 1]}, {"tokens": [1, 3], "mask": [0, 1]}]
    row = pack_row(batch_of(samples))
    index = row.schema.get_field_index(column)
    field = row.schema.field(index)
    row = row.set_column(index, field, pa.array(values, field.type))
    with pytest.raises(rf.InvariantError) as caught:
        unpack_row(row)
    assert caught.value.code == code
    assert caught.value.where == rf.Where(row=0, column=column, position=position)
