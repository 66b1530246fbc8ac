"""Sets and planes of compact files: parts, rows and what contradicts itself."""

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from support.compact_batches import decode_batch, decoder_of

import ragged_format as rf
from ragged_format.compact.encoder import encode_batch
from ragged_format.compact.heads import decode_shared
from ragged_format.compact.planes import Block, Planes, split
from ragged_format.compact.sets import decode_sets, encode_sets
from ragged_format.testing import assert_ragged_equal, packed_batches, rollouts, sample_batches


def sets_of(counts, ids, seed=0):
    """Return values, counts and sampled tokens of sets whose ids are drawn of `ids`."""
    random = np.random.default_rng(seed)
    sets = [np.sort(random.choice(ids, n, replace=False)) for n in counts]
    sampled = np.array([random.choice(s) if len(s) else ids[0] for s in sets], np.int64)
    return np.concatenate(sets), np.asarray(counts, np.int64), sampled


def come_back(values, counts, sampled):
    steps, order = encode_sets(values, counts, sampled)
    return np.array_equal(decode_sets(steps, order, counts, sampled, values.dtype), values)


@pytest.mark.parametrize(
    "counts",
    [
        [512], [513], [511, 1, 511], [600, 1, 2, 900, 1], [1] * 2000, [0, 1, 0, 700, 0],
        [256] * 5, [300, 300, 1, 211, 1, 300], [2] * 1500 + [1000] + [1] * 600,
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("shift", [0, 1 << 22, 1 << 40, (1 << 62) + 5])
def test_rows_of_sets_end_at_sets_of_any_width(counts, shift):
    assert come_back(*sets_of(counts, np.arange(1500) + shift))


@pytest.mark.parametrize("network", [32, 64, 4096, 1 << 20])
@pytest.mark.parametrize("chunk", [1, 100, 1 << 16])
def test_rows_and_chunks_change_nothing(network, chunk, monkeypatch):
    random = np.random.default_rng(3)
    data = sets_of(random.choice([0, 1, 1, 1, 2, 9, 40], 400), np.arange(90))
    monkeypatch.setattr("ragged_format.compact.sets.NETWORK", network)
    monkeypatch.setattr("ragged_format.compact.sets.CHUNK", chunk)
    assert come_back(*data)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("steps", [[0, 2], [1, 1], [3, 0], [0, 255]])
def test_a_rank_without_an_id_is_refused(dtype, steps):
    arrays = np.array(steps, dtype), np.array([7, 8]), np.array([3]), np.array([1])
    with pytest.raises(rf.CorruptError, match="no id"):
        decode_sets(*arrays, np.int32)


@pytest.mark.parametrize("steps", [[(1 << 64) - 1, 1], [1 << 63, 1 << 63], [0, (1 << 64) - 1]])
def test_a_sum_of_steps_that_wraps_around_is_refused(steps):
    arrays = np.array(steps, np.uint64), np.array([7, 8]), np.array([3]), np.array([1])
    with pytest.raises(rf.CorruptError, match="no id"):
        decode_sets(*arrays, np.int32)


def test_ranks_of_no_order_are_refused():
    arrays = np.array([0], np.uint32), np.array([], np.int64), np.array([2]), np.array([1])
    with pytest.raises(rf.CorruptError, match="no id"):
        decode_sets(*arrays, np.int32)


@pytest.mark.parametrize("dtype", ["<i4", "<f4"])
@pytest.mark.parametrize("name", ["column:candidate_ids", "column:topk_ids"])
def test_ranks_and_positions_of_other_types_are_refused(name, dtype):
    names = ["candidate_counts", "candidate_ids", "topk_counts", "topk_ids"]
    schema = rf.sample_schema(vocab_size=50, columns=names)
    row = {
        "sample_id": "a", "input_ids": [0, 3], "completion_mask": [0, 1],
        "candidate_counts": [3], "candidate_ids": [3, 5, 9], "topk_counts": [2],
        "topk_ids": [3, 9],
    }  # fmt: skip
    ragged = rf.parse_schema(schema)
    encoded = encode_batch(pa.RecordBatch.from_pylist([row], schema=schema), ragged)
    header = json.loads(encoded["header"][0].as_py())
    block = header["blocks"][name]
    block[1], block[2] = dtype, block[2][:4]
    text = pa.array([json.dumps(header).encode()], pa.large_binary())
    with pytest.raises(rf.CorruptError, match="unsigned"):
        decode_batch(encoded.set_column(0, encoded.schema.field(0), text), ragged)


@pytest.mark.parametrize(
    "values",
    [
        np.arange(1000, dtype=np.int32), np.full(5, -2, np.int64), np.zeros(0, np.uint16),
        np.linspace(-3, 0, 999, dtype=np.float32), np.array([256, 511], np.uint64),
        np.array([1 << 40, 5], np.int64), np.arange(7, dtype=np.int8),
    ],
    ids=lambda values: values.dtype.str,
)  # fmt: skip
def test_planes_give_all_and_any_part(values, monkeypatch):
    monkeypatch.setattr("ragged_format.compact.planes.PART", 300)
    block, data = split(values)
    planes = Planes.of(block, np.frombuffer(data, np.uint8))
    assert len(planes) == len(values)
    assert planes.array().dtype == values.dtype
    assert np.array_equal(planes.array(), values)
    bits = values.view(f"u{values.itemsize}")
    for first, last in ((0, 3), (2, 2), (1, len(values)), (0, len(values) + 5)):
        part = planes[first:last]
        assert part.dtype.kind == "u"
        assert np.array_equal(part, bits[first:last])


def test_a_part_is_no_wider_than_its_planes():
    block, data = split(np.array([3, 4, 5], np.uint32))
    assert planes_of(block, data)[:].dtype == np.uint8
    block, data = split(np.array([3, 400, 5], np.uint32))
    assert planes_of(block, data)[1:].dtype == np.uint16


def planes_of(block, data):
    return Planes.of(Block(*block.to_json()), np.frombuffer(data, np.uint8))


def test_a_batch_of_many_parts_comes_back(monkeypatch):
    monkeypatch.setattr("ragged_format.compact.planes.PART", 7)
    monkeypatch.setattr("ragged_format.compact.sets.CHUNK", 11)
    batch = rollouts(np.random.default_rng(4), num_samples=9, columns=None)
    schema = rf.parse_schema(batch.schema)
    assert decode_batch(encode_batch(batch, schema), schema).equals(batch)


@pytest.mark.parametrize("part", [1, 5, 1 << 16])
def test_heads_of_many_parts_come_back(part, monkeypatch):
    monkeypatch.setattr("ragged_format.compact.heads.PART", part)
    batch = rollouts(np.random.default_rng(4), num_samples=9, columns=None)
    schema = rf.parse_schema(batch.schema)
    encoded = encode_batch(batch, schema)
    blocks = json.loads(encoded["header"][0].as_py())["blocks"]
    transforms = {str(block[3]).partition(":")[0] for block in blocks.values()}
    assert transforms >= {"positions", "shared"}
    assert decode_batch(encoded, schema).equals(batch)


@pytest.mark.parametrize("surplus", [-1, 1])
def test_log_probs_that_are_more_or_fewer_than_the_heads_leave_are_refused(surplus):
    counts, ids = np.array([1, 1, 0]), np.array([4, 5])
    stored = np.zeros(2 + surplus, np.float32)
    with pytest.raises(rf.CorruptError, match="size"):
        decode_shared(stored, np.array([4, 9, 2]), counts, ids, np.zeros(2, np.float32))


def decoders(batch):
    schema = rf.parse_schema(batch.schema)
    return decoder_of(encode_batch(batch, schema), schema)


@given(sample_batches())
def test_any_records_of_samples_come_back_alone(batch):
    decoder = decoders(batch)
    for first in range(batch.num_rows):
        for last in (first, first + 1, batch.num_rows):
            got = decoder.batch(None, (first, last))
            assert_ragged_equal(got, batch.slice(first, last - first))


@given(packed_batches())
def test_any_records_of_packed_rows_come_back_alone(batch):
    decoder = decoders(batch)
    for row in range(batch.num_rows):
        assert_ragged_equal(decoder.batch(None, (row, row + 1)), batch.slice(row, 1))


def test_some_columns_of_some_records_come_back():
    batch = rollouts(np.random.default_rng(4), num_samples=30, columns=None)
    decoder = decoders(batch)
    assert decoder.needs_all(rf.parse_schema(batch.schema))
    for name in batch.schema.names:
        schema = rf.parse_schema(batch.schema).select([name])
        got = decoder.batch(schema, (7, 19))
        assert_ragged_equal(got, batch.select(list(schema.columns)).slice(7, 12))
    assert not decoder.needs_all(rf.parse_schema(batch.schema).select(["topk_ids"]))
    assert decoder.batch(None, (30, 30)).num_rows == 0


def test_a_record_does_not_keep_the_batch_in_memory():
    batch = rollouts(np.random.default_rng(4), num_samples=200, columns=None)
    one = decoders(batch).batch(None, (7, 8))
    for name in batch.schema.names:
        if pa.types.is_large_list(batch.schema.field(name).type):
            kept = sum(b.size for b in one[name].buffers() if b is not None)
            assert kept <= 2 * one[name].nbytes + 64, name
