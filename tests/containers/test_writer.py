"""Writers commit all or nothing, in even batches, and never more memory than two of them."""

import io
import os
import pickle
import time

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.containers import equal, small_batch, small_schema, three_batches

import ragged_format as rf
from ragged_format.local_files import create


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def shards_in(folder):
    return [name for name in names(folder) if name.startswith("shard-")]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "train"


def write(path, batches, **options):
    with rf.Writer(path, small_schema(), **options) as writer:
        writer.write(batches)
    return rf.Dataset(path)


def test_everything_that_holds_batches_is_written(path):
    batches = three_batches()
    with rf.Writer(path, batches[0].schema) as writer:
        writer.write(batches[0])
        writer.write(pa.Table.from_batches(batches[1:2]))
        writer.write(iter(batches[2:]))
        assert writer.num_rows == 9
    assert equal([rf.Dataset(path).take(range(9))], [rf.concat(batches)])
    rf.Dataset(path).validate()


def test_nothing_is_visible_before_the_commit(path):
    with rf.Writer(path, small_schema(), batch_rows=1, max_shard_bytes=1) as writer:
        writer.write(small_batch())
        assert len(shards_in(path)) == 3
        with pytest.raises(rf.DatasetNotFoundError):
            rf.Dataset(path)
    assert rf.Dataset(path).num_rows == 3
    assert names(path) == sorted(["manifest.json", "manifest.lock", *shards_in(path)])


def fail_within(path, batch, **options):
    with rf.Writer(path, small_schema(), **options) as writer:
        writer.write(batch)
        raise RuntimeError("stop")


def test_an_exception_commits_nothing(path):
    """bespokelabsai/curator#51."""
    with pytest.raises(RuntimeError, match="stop"):
        fail_within(path, small_batch((1, 2, 3, 4, 5)), batch_rows=2, max_shard_bytes=1)
    assert names(path) == []
    with pytest.raises(rf.DatasetNotFoundError):
        rf.Dataset(path)
    assert write(path, [small_batch()]).num_rows == 3


def test_an_exception_keeps_what_was_there(path):
    write(path, [small_batch()])
    for mode in ("append", "overwrite"):
        with pytest.raises(RuntimeError, match="stop"):
            fail_within(path, small_batch(prefix="more"), mode=mode)
    dataset = rf.Dataset(path)
    assert (dataset.num_rows, dataset.generation) == (3, 1)
    assert len(shards_in(path)) == 1


def test_modes(path):
    a, b, c = three_batches()
    first = write(path, [a])
    with pytest.raises(rf.DatasetExistsError, match="RF-C009"):
        rf.Writer(path, small_schema())
    second = write(path, [b], mode="append")
    assert equal([second.take(range(6))], [rf.concat([a, b])])
    assert (first.generation, second.generation) == (1, 2)
    third = write(path, [c], mode="overwrite")
    assert equal([third.take(range(3))], [c])
    assert third.generation == 3
    assert equal([second.take(range(6))], [rf.concat([a, b])])
    with pytest.raises(rf.LimitExceededError, match="mode has no such choice"):
        rf.Writer(path, small_schema(), mode="update")
    with pytest.raises(rf.LimitExceededError, match="validate has no such choice"):
        rf.Writer(path, small_schema(), mode="append", validate="fully")
    assert write(path.with_name("new"), [a], mode="append").generation == 1
    assert write(path.with_name("newer"), [a], mode="overwrite").generation == 1


def test_a_dataset_that_appears_meanwhile_is_not_overwritten(path):
    writer = rf.Writer(path, small_schema())
    writer.write(small_batch())
    write(path, [small_batch((1,))])
    with pytest.raises(rf.DatasetExistsError):
        writer.close()
    assert rf.Dataset(path).num_rows == 1
    assert len(shards_in(path)) == 1
    writer.close()


def test_appending_another_identity_is_refused(path):
    write(path, [small_batch()])
    for schema in (small_schema([]), rf.sample_schema(vocab_size=7, columns=[])):
        with pytest.raises(rf.SchemaMismatchError, match="RF-S010") as caught:
            rf.Writer(path, schema, mode="append")
        assert caught.value.where.file.endswith("manifest.json")
    assert write(path, [small_batch(prefix="b")], mode="append").num_rows == 6


def test_overwriting_with_another_identity_is_allowed(path):
    write(path, [small_batch()])
    schema = small_schema([])
    with rf.Writer(path, schema, mode="overwrite") as writer:
        writer.write(small_batch(schema=schema))
    assert rf.Dataset(path).schema.names == schema.names


def test_provenance_may_differ_between_shards(path):
    batch = small_batch()
    write(path, [batch])
    labelled = batch.schema.with_metadata({**batch.schema.metadata, b"run": b"7"})
    with rf.Writer(path, labelled, mode="append") as writer:
        writer.write(small_batch(prefix="b"))
    dataset = rf.Dataset(path)
    assert dataset.take([0, 5]).num_rows == 2
    for got in dataset.batches(verify=True):
        assert got.schema.equals(batch.schema, check_metadata=True)


def test_records_of_another_schema_are_refused(path):
    with rf.Writer(path, small_schema()) as writer:
        with pytest.raises(rf.SchemaMismatchError, match="RF-S010"):
            writer.write(small_batch(schema=small_schema([])))
        with pytest.raises(rf.SchemaMismatchError, match="not an Arrow batch"):
            writer.write([{"sample_id": "a"}])
        with pytest.raises(rf.NotRaggedError):
            writer.write(pa.record_batch({"a": [1]}))
        writer.write(small_batch())
    assert rf.Dataset(path).num_rows == 3
    with pytest.raises(rf.NotRaggedError):
        rf.Writer(path, pa.schema([("a", pa.int32())]))


@pytest.mark.parametrize(
    ("level", "code"), [("full", "RF-I007"), ("structural", None), ("off", None)]
)
def test_validation(path, level, code):
    schema = small_schema([])
    row = {"sample_id": "a", "input_ids": [5000], "completion_mask": [0]}
    bad = pa.RecordBatch.from_pylist([row], schema=schema)
    good = small_batch((2,), schema=schema, prefix="g")
    with rf.Writer(path, schema, validate=level) as writer:
        if code is None:
            writer.write(bad)
        else:
            with pytest.raises(rf.InvariantError, match=code) as caught:
                writer.write([good, bad])
            assert caught.value.where.batch == 1
        writer.write(good)
    assert rf.Dataset(path).num_rows == 2


def test_broken_arrays_are_never_written(path):
    schema = small_schema([])
    ids = pa.LargeListArray.from_arrays([0, 3, 1], pa.array([1, 2, 3], pa.int32()))
    broken = pa.RecordBatch.from_arrays(
        [pa.array(["a", "b"]), ids.cast(schema.field(1).type),
         pa.array([[0], [0]], schema.field(2).type)],
        schema=schema,
    )  # fmt: skip
    with rf.Writer(path, schema, validate="off") as writer, pytest.raises(rf.InvariantError):
        writer.write(broken)


@given(
    sizes=st.lists(st.integers(0, 9), max_size=8),
    rows=st.integers(1, 6),
    size=st.sampled_from([1, 700, 1 << 25]),
)
def test_batches_are_even(tmp_path_factory, sizes, rows, size):
    path = tmp_path_factory.mktemp("w") / "x"
    batches = [small_batch((2,) * n, prefix=f"{i}-") for i, n in enumerate(sizes)]
    dataset = write(path, batches, batch_rows=rows, batch_bytes=size)
    stored = list(dataset.batches())
    total = sum(sizes)
    assert dataset.num_rows == total
    assert all(1 <= b.num_rows <= rows for b in stored)
    assert all(b.nbytes <= size or b.num_rows == 1 for b in stored)
    if size == 1 << 25:
        assert all(b.num_rows == rows for b in stored[:-1])
    if total:
        assert equal([dataset.take(range(total))], [rf.concat(batches)])


def test_large_batches_are_split_by_bytes(path):
    batch = small_batch((400,) * 64)
    dataset = write(path, [batch], batch_bytes=20_000)
    stored = list(dataset.batches())
    assert len(stored) > 8
    assert max(b.nbytes for b in stored) <= 20_000
    assert equal([rf.concat(stored)], [batch])


def test_shards_end_at_their_size(path):
    batch = small_batch((400,) * 64)
    dataset = write(path, [batch], batch_rows=2, max_shard_bytes=50_000)
    sizes = [shard.bytes for shard in dataset.shards]
    assert len(sizes) > 5
    assert all(size > 50_000 for size in sizes[:-1])
    assert max(sizes) < 50_000 + 40_000
    assert [shard.name[-11:-6] for shard in dataset.shards[:2]] == ["00000", "00001"]


def test_pending_slices_do_not_keep_their_parents(path):
    """One record of each of many large batches must not keep all of them in memory."""
    with rf.Writer(path, small_schema(), validate="off") as writer:
        before = pa.total_allocated_bytes()
        for number in range(20):
            parent = small_batch((2000,) * 50, prefix=f"{number}-")
            copied = rf.decode_message(rf.encode_message(parent), parent.schema)
            writer.write(copied.slice(7, 1))
            size = copied.nbytes
            del parent, copied
        assert pa.total_allocated_bytes() - before < size
    assert rf.Dataset(path).num_rows == 20


def test_lineage(path):
    first = write(path, [small_batch()], lineage={"source": ["a.jsonl"], "seed": 1})
    assert first.lineage == {"source": ["a.jsonl"], "seed": 1}
    second = write(path, [small_batch(prefix="b")], mode="append", lineage={"seed": 2, "n": None})
    assert second.lineage == {"source": ["a.jsonl"], "seed": 2, "n": None}
    assert write(path, [small_batch()], mode="overwrite").lineage == {}


@pytest.mark.parametrize("lineage", [{"a": float("nan")}, {"a": object()}, {1: {2}}, [1]])
def test_lineage_is_json(path, lineage):
    with pytest.raises(rf.SchemaMismatchError, match="RF-S009"):
        rf.Writer(path, small_schema(), lineage=lineage)


def test_an_aborted_writer_removes_the_shard_under_way(path):
    writer = rf.Writer(path, small_schema(), batch_rows=1)
    writer.write(small_batch())
    assert len(names(path)) == 2
    writer.abort()
    assert names(path) == []


def test_an_exception_within_a_new_file_removes_it(tmp_path):
    with pytest.raises(RuntimeError, match="stop"):
        fail_to_create(tmp_path / "a")
    assert names(tmp_path) == []


def fail_to_create(path):
    with create(path) as file:
        file.write(b"half")
        raise RuntimeError("stop")


def test_closing_and_aborting_again(path):
    writer = rf.Writer(path, small_schema())
    writer.write(small_batch())
    writer.close()
    writer.close()
    writer.abort()
    assert rf.Dataset(path).num_rows == 3
    with pytest.raises(rf.DatasetExistsError, match="finished"):
        writer.write(small_batch())
    other = rf.Writer(path, small_schema(), mode="append")
    other.write(small_batch())
    other.abort()
    other.close()
    other.abort()
    assert rf.Dataset(path).generation == 1


def test_a_vanished_shard_is_noticed(path):
    writer = rf.Writer(path, small_schema(), batch_rows=1, max_shard_bytes=1)
    writer.write(small_batch())
    (path / shards_in(path)[0]).unlink()
    with pytest.raises(rf.MissingShardError, match="vanished"):
        writer.close()
    with pytest.raises(rf.DatasetNotFoundError):
        rf.Dataset(path)
    assert shards_in(path) == []


def test_a_failing_commit_keeps_the_shards(path, monkeypatch):
    """The manifest may have been renamed before its directory failed to sync."""
    writer = rf.Writer(path, small_schema())
    writer.write(small_batch())
    writer._flush()
    writer._close_shard()

    def full(descriptor):
        raise OSError(5, "input/output error")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="input/output"):
        writer.close()
    monkeypatch.undo()
    left = shards_in(path)
    assert len(left) == 1
    assert rf.sweep(path, grace_s=0) == left


def test_urls(tmp_path):
    path = tmp_path / "with space"
    write(path.as_uri(), [small_batch()])
    assert rf.Dataset(path).num_rows == 3
    with pytest.raises(rf.UnsupportedFeatureError):
        rf.Writer("gopher://bucket/data", small_schema())


def age(path, seconds=3600.0):
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_sweep_removes_what_is_left_over_after_the_grace_period(path):
    write(path, [small_batch()])
    keep = shards_in(path)
    left = [
        "shard-0123456789abcdef-00000.arrow",
        "shard-0123456789abcdef-00001.arrow.tmp-00ff",
        "manifest.json.tmp-12ab",
        "writer-0123456789abcdef.lock",
    ]
    other = ["notes.txt", "shard-1.arrow", "data.tmp-1", "shard-0123456789abcdef-00000.parquet"]
    for name in (*left, *other):
        (path / name).write_bytes(b"x")
    assert rf.sweep(path) == []
    assert rf.sweep(path, grace_s=60) == []
    for name in names(path):
        age(path / name)
    assert rf.sweep(path, grace_s=7200) == []
    assert rf.sweep(path, grace_s=60) == sorted(left)
    assert names(path) == sorted([*keep, *other, "manifest.json", "manifest.lock"])


def test_sweep_spares_writers_that_live(path):
    writer = rf.Writer(path, small_schema(), batch_rows=2, max_shard_bytes=1)
    writer.write(small_batch((1, 1, 1, 1)))
    writer._max_shard_bytes = 1 << 30
    writer.write(small_batch((1, 1), prefix="c"))
    for name in names(path):
        age(path / name)
    assert len(shards_in(path)) == 3
    assert rf.sweep(path, grace_s=60) == []
    writer.close()
    assert rf.Dataset(path).num_rows == 6


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_a_writer_that_was_dropped_does_not_live(path):
    writer = rf.Writer(path, small_schema(), batch_rows=2, max_shard_bytes=1)
    writer.write(small_batch((1, 1)))
    assert rf.sweep(path, grace_s=0) == []
    del writer
    assert len(rf.sweep(path, grace_s=0)) == 2


def test_replaced_shards_stay_for_the_grace_period(path):
    old = write(path, [small_batch()])
    for name in shards_in(path):
        age(path / name, 10**6)
    write(path, [small_batch((1,))], mode="overwrite")
    assert rf.sweep(path, grace_s=60) == []
    assert old.take([2]).num_rows == 1
    assert rf.sweep(path, grace_s=0) == [shard.name for shard in old.shards]
    assert old.take([2]).num_rows == 1  # mapped already
    with pytest.raises(rf.MissingShardError, match="swept"):
        pickle.loads(pickle.dumps(old)).take([0])


def test_sweep_of_nothing(tmp_path):
    with pytest.raises(rf.DatasetNotFoundError):
        rf.sweep(tmp_path / "none")
    assert rf.sweep(tmp_path) == []


def test_writing_from_a_stream(path):
    batches = three_batches()
    sink = io.BytesIO()
    rf.write_stream(sink, batches)
    reader = rf.read_stream(sink.getvalue())
    with rf.Writer(path, reader.schema) as writer:
        writer.write(reader)
    assert equal([rf.Dataset(path).take(range(9))], [rf.concat(batches)])
