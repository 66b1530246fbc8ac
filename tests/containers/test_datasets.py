"""Datasets: one snapshot, any record at any time, nothing loaded that is not asked for."""

import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.containers import equal, small_batch, small_schema

import ragged_format as rf
from ragged_format import snapshot
from ragged_format.testing import assert_ragged_equal, packed_batches, sample_batches, schemas

ROWS = 23


@pytest.fixture(scope="module")
def records():
    lengths = np.random.default_rng(1).integers(0, 9, ROWS)
    return small_batch(lengths)


@pytest.fixture(scope="module")
def place(tmp_path_factory, records):
    """Return a dataset of several shards of several batches; nobody writes to it."""
    path = tmp_path_factory.mktemp("data") / "train"
    with rf.Writer(path, records.schema, batch_rows=4, max_shard_bytes=4000) as writer:
        writer.write(records)
    return path


@pytest.fixture
def own(place, tmp_path):
    """Return a copy to be damaged."""
    return shutil.copytree(place, tmp_path / "copy")


def write(path, batches, **options):
    with rf.Writer(path, batches[0].schema, **options) as writer:
        writer.write(batches)
    return rf.Dataset(path)


def test_the_layout_of_the_fixture(place):
    dataset = rf.Dataset(place)
    assert len(dataset.shards) > 2
    assert sum(shard.rows for shard in dataset.shards) == len(dataset) == ROWS
    assert [b.num_rows for b in dataset.batches()] == [4, 4, 4, 4, 4, 3]
    assert f"rows={ROWS}" in repr(dataset)


def test_attributes(place, records):
    dataset = rf.Dataset(str(place))
    assert dataset.num_rows == ROWS
    assert dataset.schema.equals(records.schema, check_metadata=True)
    assert dataset.ragged_schema == rf.parse_schema(records.schema)
    assert dataset.generation == 1
    assert len(dataset.fingerprint) == 32
    assert dataset.lineage == {}
    assert dataset.is_random_access
    assert equal([dataset.take(range(ROWS))], [records])
    assert rf.Dataset(place.as_uri()).fingerprint == dataset.fingerprint


def test_one_record(place, records):
    dataset = rf.Dataset(place)
    for index in (*range(ROWS), *range(-ROWS, 0)):
        assert equal([dataset[index]], [records.slice(index % ROWS, 1)])
    assert dataset[np.int64(3)].num_rows == 1


@pytest.mark.parametrize("index", [ROWS, -ROWS - 1, 10**12])
def test_there_is_no_record_outside(place, index):
    dataset = rf.Dataset(place)
    with pytest.raises(IndexError):
        dataset[index]
    with pytest.raises(rf.OutOfRangeError, match="RF-L002") as caught:
        dataset.take([0, index])
    assert caught.value.got == index


@pytest.mark.parametrize("bounds", [(None, None), (3, 11), (-5, None), (0, 0), (20, 2), (1, 99)])
@pytest.mark.parametrize("step", [None, 2, -3])
def test_slices(place, records, bounds, step):
    expected = list(range(ROWS))[slice(*bounds, step)]
    got = rf.Dataset(place)[slice(*bounds, step)]
    assert equal([got], [records.take(pa.array(expected, pa.int64()))])


@pytest.mark.parametrize(("large", "few"), [(0, 0), (1 << 40, 0), (1 << 40, 1 << 40)])
@given(indices=st.lists(st.integers(-ROWS, ROWS - 1), max_size=40))
def test_take_keeps_order_and_repeats(place, records, indices, large, few):
    """By either way of copying records: large ones, and few of them, are copied as slices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "LARGE_RECORD", large)
        patch.setattr(snapshot, "FEW_RECORDS", few)
        got = rf.Dataset(place).take(indices)
    wanted = records.take(pa.array([i % ROWS for i in indices], pa.int64()))
    assert equal([got], [wanted])
    assert got.schema.equals(records.schema, check_metadata=True)


@pytest.mark.parametrize("indices", [[0.5], [[1]], 3, ["a"], [True, False]])
def test_take_wants_integers(place, indices):
    with pytest.raises(rf.OutOfRangeError):
        rf.Dataset(place).take(indices)


def test_take_does_not_wrap_large_unsigned_indices(place):
    with pytest.raises(rf.OutOfRangeError, match="RF-L002"):
        rf.Dataset(place).take(np.array([0, 2**64 - 1], np.uint64))


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.uint64])
def test_take_of_any_integer_type(place, records, dtype):
    got = rf.Dataset(place).take(np.array([5, 2, 5], dtype))
    assert equal([got], [records.take(pa.array([5, 2, 5]))])


@settings(max_examples=15)
@given(schemas(), st.data())
def test_any_data_in_any_layout(tmp_path_factory, schema, data):
    batches = data.draw(st.lists(sample_batches(schema, max_rows=6), min_size=1, max_size=5))
    path = tmp_path_factory.mktemp("d") / "x"
    rows, size = data.draw(st.integers(1, 7)), data.draw(st.sampled_from([1, 3000, 1 << 30]))
    dataset = write(path, batches, batch_rows=rows, max_shard_bytes=size)
    whole = rf.concat(batches)
    assert equal([dataset.take(range(whole.num_rows))], [whole])
    order = data.draw(st.permutations(range(whole.num_rows)))
    assert equal([dataset.take(order)], [whole.take(pa.array(order, pa.int64()))])
    dataset.verify()
    dataset.validate("structural")


@settings(max_examples=15)
@given(packed_batches())
def test_packed_data(tmp_path_factory, batch):
    dataset = write(tmp_path_factory.mktemp("d") / "x", [batch], batch_rows=1)
    dataset.validate()
    assert equal([dataset.take(range(batch.num_rows))], [batch])


@pytest.mark.parametrize("size", [1, 3, 4, 7, 100])
def test_batches_of_a_size(place, records, size):
    batches = list(rf.Dataset(place).batches(batch_size=size))
    assert equal([rf.concat(batches)], [records])
    assert {b.num_rows for b in batches[:-1]} <= {size}


@pytest.mark.parametrize("size", [0, -1])
def test_batches_have_records(place, size):
    with pytest.raises(rf.LimitExceededError):
        rf.Dataset(place).batches(batch_size=size)


def test_iterating_gives_records(place, records):
    got = list(rf.Dataset(place))
    assert equal(got, [records.slice(i, 1) for i in range(ROWS)])


def test_columns(place, records):
    names = ["sample_id", "completion_mask", "candidate_counts", "candidate_ids"]
    dataset = rf.Dataset(place, columns=["candidate_ids", "sample_id"])
    assert dataset.schema.names == list(dataset.ragged_schema.columns) == names
    wanted = records.select(names)
    assert dataset.take([3, 1]).equals(wanted.take(pa.array([3, 1])))
    assert dataset[7].equals(wanted.slice(7, 1))
    assert_ragged_equal(rf.concat(list(dataset.batches())), wanted)
    fewer = dataset.take([5], columns=["sample_id"])
    assert fewer.schema.names == ["sample_id"]
    assert next(dataset.batches(columns=["sample_id"])).schema.names == ["sample_id"]
    for bad in (["reward"], ["nothing"], []):
        with pytest.raises(rf.SchemaMismatchError, match="RF-S003"):
            dataset.take([1], columns=bad)
        with pytest.raises(rf.SchemaMismatchError, match="RF-S003"):
            dataset.batches(columns=bad)


def test_records_are_views(place):
    dataset = rf.Dataset(place)
    dataset[0]
    before = pa.total_allocated_bytes()
    kept = [dataset[0], *dataset.batches(columns=["input_ids"])]
    assert pa.total_allocated_bytes() - before < 1000
    assert len(kept) > 1


def test_shards_are_opened_when_needed(own):
    dataset = rf.Dataset(own)
    *_, last = dataset.shards
    (own / last.name).unlink()
    assert dataset[0].num_rows == 1
    with pytest.raises(rf.MissingShardError, match="RF-C006") as caught:
        dataset[-1]
    assert caught.value.where.file == str(own / last.name)
    with pytest.raises(FileNotFoundError):
        list(dataset.batches())


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.unlink()
    path.write_bytes(data)


def test_a_shard_of_another_size_is_broken(own):
    dataset = rf.Dataset(own)
    path = own / dataset.shards[0].name
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(rf.BrokenShardError, match="size in bytes"):
        dataset[0]


def test_a_shard_that_cannot_be_opened_is_broken(own):
    dataset = rf.Dataset(own)
    path = own / dataset.shards[0].name
    flip(path, path.stat().st_size - 1)
    with pytest.raises(rf.BrokenShardError, match="cannot be opened") as caught:
        dataset[0]
    assert isinstance(caught.value.__cause__, rf.TruncatedError)


def test_a_shard_whose_sizes_leave_the_limits_is_broken(own):
    dataset = rf.Dataset(own)
    path = own / dataset.shards[0].name
    data = bytearray(path.read_bytes())
    data[15] ^= 0x10  # of the size of the schema message, behind the start of the file
    path.write_bytes(data)
    with pytest.raises(rf.BrokenShardError) as caught:
        dataset[0]
    assert isinstance(caught.value.__cause__, rf.LimitExceededError)


def test_exchanged_shards_are_broken(tmp_path):
    batches = [small_batch((2, 2), seed=i, prefix=f"{i}-") for i in range(2)]
    dataset = write(tmp_path / "x", batches, batch_rows=2, max_shard_bytes=1)
    first, second = (dataset.path / shard.name for shard in dataset.shards)
    data = first.read_bytes(), second.read_bytes()
    first.unlink()
    second.unlink()
    first.write_bytes(data[1])
    second.write_bytes(data[0])
    with pytest.raises(rf.BrokenShardError):
        rf.Dataset(tmp_path / "x")[0]


def test_flips_in_values_are_found_when_asked_for(own):
    dataset = rf.Dataset(own)
    path = own / dataset.shards[0].name
    text = b"".join(s.encode() for s in dataset.take(range(4))["sample_id"].to_pylist())
    flip(path, path.read_bytes().index(text))
    assert rf.Dataset(own)[0].num_rows == 1
    with pytest.raises(rf.ChecksumError, match="RF-C004"):
        rf.Dataset(own, verify=True)[0]
    with pytest.raises(rf.ChecksumError) as caught:
        list(rf.Dataset(own).batches(verify=True))
    assert caught.value.where == rf.Where(str(path), 0)
    with pytest.raises(rf.ChecksumError):
        rf.Dataset(own).verify()


def test_broken_offsets_are_found_without_verification(own):
    """huggingface/datasets#8350: unchecked, they crash whoever follows them."""
    dataset = rf.Dataset(own)
    path = own / dataset.shards[0].name
    offsets = dataset._snapshot.reader(0).batch(0).column("input_ids").buffers()[1].to_pybytes()
    data = bytearray(path.read_bytes())
    place = data.index(offsets)
    data[place + 8 : place + 16] = (1 << 40).to_bytes(8, "little")
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(rf.InvariantError, match="RF-I001"):
        rf.Dataset(own)[0]


def test_unlisted_files_are_nobodys(own, records):
    rf.write_file(own / "shard-0000000000000000-00000.arrow", [records])
    (own / "notes.txt").write_text("hello")
    assert rf.Dataset(own).num_rows == ROWS


def test_a_snapshot_stays_until_refresh(tmp_path):
    a, b, c = (small_batch((2, 3), seed=i, prefix=f"{i}-") for i in range(3))
    dataset = write(tmp_path / "x", [a])
    before = dataset.fingerprint
    write(tmp_path / "x", [b], mode="append")
    assert dataset.num_rows == 2
    running = dataset.batches()
    assert dataset.refresh()
    assert not dataset.refresh()
    assert (dataset.num_rows, dataset.generation) == (4, 2)
    assert dataset.fingerprint != before
    assert equal(list(running), [a])
    assert equal([dataset.take(range(4))], [rf.concat([a, b])])
    write(tmp_path / "x", [c], mode="overwrite")
    assert equal([dataset.take(range(4))], [rf.concat([a, b])])
    assert dataset.refresh()
    assert equal([dataset.take(range(2))], [c])


def test_fingerprints_are_of_content(tmp_path):
    batch = small_batch()
    one, two = (write(tmp_path / name, [batch]) for name in ("one", "two"))
    assert one.shards[0].name != two.shards[0].name
    assert one.fingerprint == two.fingerprint
    assert write(tmp_path / "three", [batch.slice(0, 2)]).fingerprint != one.fingerprint


def test_a_pickled_dataset_is_the_same_snapshot(tmp_path):
    a, b = (small_batch((2, 3), seed=i, prefix=f"{i}-") for i in range(2))
    dataset = write(tmp_path / "x", [a])
    dataset[0]
    data = pickle.dumps(rf.Dataset(tmp_path / "x", columns=["input_ids"], verify=True))
    write(tmp_path / "x", [b], mode="append")
    again = pickle.loads(data)
    assert again.num_rows == 2
    assert again.schema.names == ["input_ids"]
    assert equal([pickle.loads(pickle.dumps(dataset)).take([1, 0])], [a.take(pa.array([1, 0]))])


def digests_of(dataset):
    return [rf.digest(dataset[i]) for i in range(len(dataset))]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_datasets_cross_process_boundaries(place, method):
    dataset = rf.Dataset(place)
    expected = digests_of(dataset)
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        assert pool.apply_async(digests_of, (dataset,)).get(timeout=60) == expected


def test_validation_names_file_batch_and_row(tmp_path):
    schema = small_schema([])
    rows = [{"sample_id": str(i), "input_ids": [i], "completion_mask": [0]} for i in range(7)]
    rows[5]["input_ids"] = [1000]
    batch = pa.RecordBatch.from_pylist(rows, schema=schema)
    dataset = write(tmp_path / "x", [batch], batch_rows=2, validate="off", max_shard_bytes=3000)
    dataset.validate("structural")
    with pytest.raises(rf.InvariantError, match="RF-I007") as caught:
        dataset.validate()
    where = caught.value.where
    assert where.file.startswith(str(tmp_path / "x" / "shard-"))
    assert (where.row, where.column, where.position) == (1, "input_ids", 0)


def test_sample_ids_are_unique_over_all_shards(tmp_path):
    parts = [small_batch((1, 2), seed=i, prefix=f"{i}-") for i in range(3)]
    dataset = write(tmp_path / "x", [*parts, parts[1]], batch_rows=2, max_shard_bytes=1)
    dataset.validate("structural")
    with pytest.raises(rf.InvariantError, match="RF-I006") as caught:
        dataset.validate()
    assert caught.value.where.file.endswith("-00003.arrow")
    assert caught.value.where.row == 0
    assert "-00001.arrow" in caught.value.got


def test_equal_hashes_of_different_ids_are_no_repetition(tmp_path, monkeypatch):
    import xxhash

    monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda text: 7)
    write(tmp_path / "x", [small_batch()]).validate()


def test_a_projection_that_lacks_the_ids_is_validated_whole(place):
    rf.Dataset(place, columns=["input_ids"]).validate()


def test_an_empty_dataset(tmp_path):
    with rf.Writer(tmp_path / "x", small_schema()):
        pass
    dataset = rf.Dataset(tmp_path / "x")
    assert (len(dataset), dataset.shards) == (0, ())
    assert list(dataset) == list(dataset.batches()) == []
    assert dataset.take([]).num_rows == 0
    assert dataset.take([]).schema.equals(small_schema(), check_metadata=True)
    dataset.verify()
    dataset.validate()
    with pytest.raises(IndexError):
        dataset[0]


def test_there_is_no_dataset(tmp_path, place):
    for path in (tmp_path, tmp_path / "none", place / "manifest.json"):
        with pytest.raises(rf.DatasetNotFoundError, match="RF-C008"):
            rf.Dataset(path)
    with pytest.raises(rf.UnsupportedFeatureError):
        rf.Dataset("gopher://bucket/data")


MEMORY = """
import resource, sys
import numpy as np
import ragged_format as rf
dataset = rf.Dataset(sys.argv[1])
dataset.take([0])
def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))
before = anonymous()
touched = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
rng = np.random.default_rng(0)
for _ in range(20):
    dataset.take(rng.integers(0, len(dataset), 8))
print(anonymous() - before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - touched)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_take_does_not_load_the_shards(tmp_path):
    """apache/arrow#37766: take on a mapped table reads everything into memory."""
    schema = small_schema([])
    ids = np.arange(100_000, dtype=np.int32) % 1000
    lists = pa.LargeListArray.from_arrays(np.arange(0, 100_001, 1000), ids)
    masks = pa.LargeListArray.from_arrays(np.arange(0, 100_001, 1000), np.zeros(100_000, np.uint8))
    with rf.Writer(tmp_path / "x", schema, batch_rows=100, validate="off") as writer:
        for number in range(120):
            names = pa.array([f"{number}-{i}" for i in range(100)])
            writer.write(
                pa.RecordBatch.from_arrays(
                    [names, lists.cast(schema.field(1).type), masks.cast(schema.field(2).type)],
                    schema=schema,
                )
            )
    size = sum(shard.bytes for shard in rf.Dataset(tmp_path / "x").shards)
    assert size > 55 << 20
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "x")],
        capture_output=True, text=True, check=True, env={**os.environ, "ARROW_IO_THREADS": "1"},
    )  # fmt: skip
    anonymous, touched = map(int, done.stdout.split())  # KiB
    assert anonymous < 8 << 10
    assert touched < 24 << 10
