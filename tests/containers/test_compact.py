"""The compact encoding: exact, smaller, readable like any dataset, damage found."""

import json
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from support.compact_batches import decode_batch

import ragged_format as rf
from ragged_format.compact.encoder import encode_batch
from ragged_format.compact.files import CompactReader, CompactWriter, is_compact
from ragged_format.compact.sets import decode_sets, encode_sets
from ragged_format.files import FileReader, write_file
from ragged_format.packing import pack_row
from ragged_format.testing import (
    assert_ragged_equal,
    packed_batches,
    rollouts,
    sample_batches,
    variants,
)


def round_trip(batch):
    schema = rf.parse_schema(batch.schema)
    return decode_batch(encode_batch(batch, schema), schema)


@given(sample_batches())
def test_samples_come_back_bit_for_bit(batch):
    assert_ragged_equal(round_trip(batch), batch, check_schema=True)


@given(packed_batches())
def test_packed_rows_come_back_bit_for_bit(batch):
    assert_ragged_equal(round_trip(batch), batch, check_schema=True)


def test_every_physical_form_gives_one_encoding():
    batch = rollouts(np.random.default_rng(1), num_samples=6, columns=None)
    schema = rf.parse_schema(batch.schema)
    expected = encode_batch(batch, schema)
    for name, form in variants(batch, same_schema=True).items():
        got = encode_batch(form, schema)
        assert got["column:candidate_ids"].equals(expected["column:candidate_ids"]), name
        assert_ragged_equal(decode_batch(got, schema), batch)


def candidates(sets, sampled, counts=None):
    """One record whose tokens 1.. are scored with these candidate sets."""
    schema = rf.sample_schema(vocab_size=50, columns=["candidate_counts", "candidate_ids"])
    row = {
        "sample_id": "a", "input_ids": [0, *sampled],
        "completion_mask": [0] + [1] * len(sampled),
        "candidate_counts": [len(s) for s in sets] if counts is None else counts,
        "candidate_ids": [i for s in sets for i in s],
    }  # fmt: skip
    return pa.RecordBatch.from_pylist([row], schema=schema)


def transform_of(batch):
    encoded = encode_batch(batch, rf.parse_schema(batch.schema))
    return json.loads(encoded["header"][0].as_py())["blocks"]["column:candidate_ids"][3]


@pytest.mark.parametrize(
    ("sets", "sampled"),
    [
        ([[3], [7], [0]], [3, 7, 0]),
        ([[0, 1, 49], [], [5, 6]], [49, 9, 5]),
        ([[], []], [1, 2]),
        ([], []),
        ([[2, 4, 6, 8], [0, 49], [1]], [6, 0, 1]),
    ],
)
def test_sets_lose_what_the_tokens_say_and_get_it_back(sets, sampled):
    batch = candidates(sets, sampled)
    assert transform_of(batch) == "ranks"
    assert round_trip(batch).equals(batch)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
@pytest.mark.parametrize("shift", [0, 1 << 23, 1 << 40])
def test_many_sets_of_any_width_and_id_come_back(dtype, shift, monkeypatch):
    # Small chunks, so that sets end, begin and lie across them.
    monkeypatch.setattr("ragged_format.compact.sets.CHUNK", 50)
    if shift + 200 > np.iinfo(dtype).max:
        shift = 0
    random = np.random.default_rng(5)
    counts = random.choice([0, 1, 2, 9, 120], 300).astype(np.int64)
    sets = [np.sort(random.choice(200, n, replace=False)) + shift for n in counts]
    sampled = np.array([random.choice(s) if len(s) else shift for s in sets], dtype)
    values = np.concatenate(sets).astype(dtype)
    steps, order = encode_sets(values, counts, sampled)
    assert len(steps) == (counts - (counts > 0)).sum()
    assert sorted(order.tolist()) == sorted(
        set(values[values != np.repeat(sampled, counts)].tolist())
    )
    decoded = decode_sets(steps, order, counts, sampled, dtype)
    assert decoded.dtype == dtype
    assert np.array_equal(decoded, values)


def test_frequent_ids_have_the_lowest_ranks():
    sets = [[1, 40], [2, 40], [3, 40], [4, 40], [5, 9]]
    values, counts = np.array(sets).reshape(-1), np.full(5, 2)
    _, order = encode_sets(values, counts, np.array([1, 2, 3, 4, 5]))
    assert order.tolist() == [40, 9]


@pytest.mark.parametrize(
    ("steps", "order", "sampled"),
    [([0, 5], [7, 8], [1, 2]), ([0], [7], [1, 2]), ([0, 0], [-7], [1, 2]), ([0, 0], [7], [1, -2])],
)
def test_sets_that_contradict_themselves_are_refused(steps, order, sampled):
    arrays = np.array(steps, np.uint32), np.array(order), np.array([2, 2]), np.array(sampled)
    with pytest.raises((rf.CorruptError, IndexError)):
        decode_sets(*arrays, np.int32)


@pytest.mark.parametrize(
    ("sets", "sampled"),
    [
        ([[3, 1, 2]], [1]),
        ([[4, 3]], [3]),
        ([[3, 4]], [5]),
        ([[3, 3]], [3]),
        ([[2, 2, 3]], [3]),
        ([[-1, 3]], [3]),
    ],
)
def test_sets_that_are_not_valid_come_back_too(sets, sampled):
    batch = candidates(sets, sampled)
    assert round_trip(batch).equals(batch)


def heads(ids, log_probs, sampled, sets, token_log_probs):
    """One record whose targets have these heads, sets and log-probs of the sampled tokens."""
    names = [
        "rollout_log_probs", "candidate_counts", "candidate_ids", "topk_counts", "topk_ids",
        "topk_log_probs",
    ]  # fmt: skip
    row = {
        "sample_id": "a", "input_ids": [0, *sampled],
        "completion_mask": [0] + [1] * len(sampled), "rollout_log_probs": token_log_probs,
        "candidate_counts": [len(s) for s in sets], "candidate_ids": [i for s in sets for i in s],
        "topk_counts": [len(i) for i in ids], "topk_ids": [i for head in ids for i in head],
        "topk_log_probs": [p for head in log_probs for p in head],
    }  # fmt: skip
    schema = rf.sample_schema(vocab_size=50, columns=names)
    return pa.RecordBatch.from_pylist([row], schema=schema)


def blocks_of(batch):
    encoded = encode_batch(batch, rf.parse_schema(batch.schema))
    return json.loads(encoded["header"][0].as_py())["blocks"]


def test_a_head_of_a_set_is_positions_and_says_the_log_probs():
    batch = heads(
        [[5, 3], [7], [], [9, 1]], [[-0.25, -1.5], [0.0], [], [-0.5, -2.0]], [3, 7, 2, 4],
        [[3, 5], [7], [2, 6], [1, 4, 9]], [-1.5, 0.0, -3.0, -4.0],
    )  # fmt: skip
    blocks = blocks_of(batch)
    assert blocks["column:topk_ids"] == [
        5,
        "<u8",
        [None, 0, 0, 0, 0, 0, 0, 0],
        "positions:candidate",
    ]
    # The tokens 2 and 4 are not in their heads, so that their log-probs stay.
    assert blocks["column:rollout_log_probs"][0] == 2
    assert blocks["column:rollout_log_probs"][3] == "shared:topk"
    assert round_trip(batch).equals(batch)


def test_ids_of_a_head_outside_of_the_set_come_back():
    batch = heads([[5, 3, 40, 0]], [[-1.0, -2.0, -3.0, -4.0]], [3], [[3, 5]], [-2.0])
    assert blocks_of(batch)["column:topk_ids"][3] == "positions:candidate"
    assert round_trip(batch).equals(batch)


@pytest.mark.parametrize("other", [-1.5000001, float("nan"), 0.0])
def test_a_log_prob_that_is_not_that_of_the_head_comes_back_bit_for_bit(other):
    batch = heads([[5, 3]], [[-0.25, -0.0]], [3], [[3, 5]], [other])
    assert blocks_of(batch)["column:rollout_log_probs"][3] is None
    got = round_trip(batch)["rollout_log_probs"].values.to_numpy().view(np.uint32)
    assert got.tolist() == batch["rollout_log_probs"].values.to_numpy().view(np.uint32).tolist()


@pytest.mark.parametrize(
    ("ids", "sets"),
    [
        ([[5, 5]], [[3, 5]]),
        ([[8, 9, 5]], [[3, 5]]),
        ([[5, 3]], [[5, 3]]),
        ([[-5, 3]], [[3, 5]]),
        ([[5, 3]], [[]]),
    ],
)
def test_heads_that_share_little_or_are_not_valid_come_back(ids, sets):
    batch = heads(ids, [[-1.0] * len(head) for head in ids], [3], sets, [-1.0])
    assert round_trip(batch).equals(batch)


@pytest.mark.parametrize(
    ("block", "transform"),
    [
        ("column:input_ids", "rot13"),
        ("column:input_ids", "differences"),
        ("axis:token", "differences"),
        ("order:candidate_ids", None),
    ],
)
def test_a_transform_that_a_block_cannot_have_is_refused(data, block, transform):
    schema = rf.parse_schema(data.schema)
    encoded = encode_batch(data, schema)
    header = json.loads(encoded["header"][0].as_py())
    header["blocks"][block][3] = transform
    changed = pa.array([json.dumps(header).encode()], pa.large_binary())
    with pytest.raises(rf.CorruptError, match="transform"):
        decode_batch(encoded.set_column(0, encoded.schema.field(0), changed), schema)


@pytest.fixture(scope="module")
def data():
    return rollouts(np.random.default_rng(0), num_samples=40)


@pytest.fixture
def path(tmp_path, data):
    with rf.Writer(tmp_path / "data", data.schema, encoding="compact", batch_rows=7) as writer:
        writer.write(data)
    return tmp_path / "data"


def test_a_dataset_of_compact_shards_reads_like_any_other(path, data, tmp_path):
    with rf.Writer(tmp_path / "hot", data.schema, batch_rows=7) as writer:
        writer.write(data)
    hot, dataset = rf.Dataset(tmp_path / "hot"), rf.Dataset(path, verify=True)
    assert_ragged_equal(dataset[:], data)
    assert_ragged_equal(dataset.take([39, 0, 7, 7]), hot.take([39, 0, 7, 7]))
    assert_ragged_equal(dataset[-1], data[39:])
    narrow = list(dataset.batches(columns=["candidate_ids"]))
    assert narrow[0].schema.names == ["completion_mask", "candidate_counts", "candidate_ids"]
    dataset.validate()
    dataset.verify()
    # Logical digests do not depend on the encoding, so that neither does the fingerprint.
    assert dataset.fingerprint == hot.fingerprint
    assert dataset.shards[0].encoding == "compact"
    assert dataset.shards[0].bytes < 0.6 * hot.shards[0].bytes


def test_one_dataset_may_hold_both_encodings(path, data):
    more = rollouts(np.random.default_rng(2), num_samples=3, prefix="t")
    with rf.Writer(path, data.schema, mode="append") as writer:
        writer.write(more)
    assert_ragged_equal(rf.Dataset(path)[40:], more)
    assert [shard.encoding for shard in rf.Dataset(path).shards] == ["compact", "hot"]


def test_the_one_door_opens_a_compact_file(path, data):
    file = path / rf.Dataset(path).shards[0].name
    source = rf.open_source(file)
    assert isinstance(source, CompactReader)
    assert_ragged_equal(rf.concat(list(source.batches())), data)
    assert source.num_batches == len(source.rows_per_batch) == 6
    assert source.verify().rows == source.num_rows == 40
    assert next(iter(source)).num_rows == 7
    with pytest.raises(rf.OutOfRangeError):
        source.batch(6)


def test_a_reader_of_plain_batches_refuses_it_by_name(path):
    with pytest.raises(rf.UnsupportedFeatureError, match="requires features"):
        FileReader(path / rf.Dataset(path).shards[0].name)


def test_a_plain_file_is_not_compact(tmp_path, data):
    write_file(tmp_path / "hot.arrow", data)
    assert not is_compact(tmp_path / "hot.arrow")
    assert not is_compact(tmp_path / "absent.arrow")
    with pytest.raises(rf.NotRaggedError):
        CompactReader(tmp_path / "hot.arrow")
    with pytest.raises(rf.DatasetNotFoundError):
        CompactReader(tmp_path / "absent.arrow")


def test_nothing_is_published_by_a_writer_that_gives_up(tmp_path, data):
    writer = CompactWriter(tmp_path / "x.arrow", data.schema, validate="full")
    writer.write(data)
    writer.abort()
    assert list(tmp_path.iterdir()) == []
    broken = data.set_column(
        data.schema.get_field_index("input_ids"), data.schema.field("input_ids"),
        pa.array([[-1] * len(ids) for ids in data["input_ids"].to_pylist()],
                 data.schema.field("input_ids").type),
    )  # fmt: skip
    writer = CompactWriter(tmp_path / "x.arrow", data.schema, validate="full")
    with pytest.raises(rf.InvariantError):
        writer.write(broken)
    writer.abort()


def small_file(path):
    batch = candidates([[3, 5], [7]], [5, 7])
    writer = CompactWriter(path, batch.schema)
    writer.write(batch)
    writer.write(batch)
    writer.close()
    assert writer.close() is writer.trailer
    return batch, path.read_bytes()


def outcome(path):
    reader = CompactReader(path)
    return list(reader.scan())


def test_cut_anywhere_it_is_a_typed_error(tmp_path):
    path = tmp_path / "x.arrow"
    _, data = small_file(path)
    for size in range(0, len(data), 17):
        path.write_bytes(data[:size])
        with pytest.raises(rf.RaggedError):
            outcome(path)


def test_a_flipped_byte_is_found_or_changes_nothing(tmp_path):
    path = tmp_path / "x.arrow"
    batch, data = small_file(path)
    for position in range(6, len(data), 11):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x41]) + data[position + 1 :])
        try:
            for got in outcome(path):
                assert_ragged_equal(got, batch)
        except rf.RaggedError:
            pass


def test_blocks_that_contradict_the_header_are_corrupt(data):
    schema = rf.parse_schema(data.schema)
    encoded = encode_batch(data, schema)
    for name in set(encoded.schema.names) - {"record"}:  # Arrow reads a stream without its end
        index = encoded.schema.get_field_index(name)
        short = pa.array([encoded[name][0].as_py()[:-1]], pa.large_binary())
        broken = encoded.set_column(index, encoded.schema.field(index), short)
        with pytest.raises(rf.CorruptError):
            decode_batch(broken, schema)


def test_packed_rows_are_smaller_too(tmp_path, data):
    samples = rf.select(data, "record", np.arange(40) < 8)
    row = pack_row(samples, null_advantage="keep")
    for encoding in ("hot", "compact"):
        with rf.Writer(tmp_path / encoding, row.schema, encoding=encoding) as writer:
            writer.write(row)
    assert_ragged_equal(rf.Dataset(tmp_path / "compact")[:], row)


def test_the_version_of_the_encoding_is_checked(tmp_path, monkeypatch):
    monkeypatch.setattr("ragged_format.compact.files.COMPACT_VERSION", 99)
    small_file(tmp_path / "x.arrow")
    monkeypatch.undo()
    with pytest.raises(rf.UnsupportedFeatureError) as caught:
        CompactReader(tmp_path / "x.arrow")
    assert caught.value.got == "99"


@pytest.mark.parametrize("size", [1 << 29, 1 << 62, -1])
@pytest.mark.parametrize("planes", [[0], [None]], ids=str)
def test_a_size_that_lies_is_found_before_memory_is_allocated(size, planes):
    batch = rollouts(np.random.default_rng(2), num_samples=3, columns=None)
    schema = rf.parse_schema(batch.schema)
    encoded = encode_batch(batch, schema)
    header = json.loads(encoded["header"][0].as_py())
    place = encoded.schema.get_field_index("header")
    for name in header["blocks"]:
        lying = json.loads(json.dumps(header))
        block = lying["blocks"][name]
        block[0], block[2] = size, planes * len(block[2])
        text = pa.array([json.dumps(lying).encode()], pa.large_binary())
        tracemalloc.start()
        try:
            with pytest.raises((rf.CorruptError, rf.LimitExceededError)):
                decode_batch(encoded.set_column(place, encoded.schema.field(place), text), schema)
            assert tracemalloc.get_traced_memory()[1] < 16 << 20, name
        finally:
            tracemalloc.stop()


def test_an_order_of_other_numbers_than_integers_is_refused():
    batch = rollouts(np.random.default_rng(2), num_samples=3)
    schema = rf.parse_schema(batch.schema)
    encoded = encode_batch(batch, schema)
    header = json.loads(encoded["header"][0].as_py())
    header["blocks"]["order:candidate_ids"][1] = "<f4"
    place = encoded.schema.get_field_index("header")
    text = pa.array([json.dumps(header).encode()], pa.large_binary())
    with pytest.raises(rf.CorruptError):
        decode_batch(encoded.set_column(place, encoded.schema.field(place), text), schema)
