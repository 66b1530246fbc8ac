"""A writer that compares sample ids: its own, and those of the dataset that it appends to."""

import pyarrow as pa
import pytest

import ragged_format as rf
import ragged_format.hash_runs as hash_runs
from ragged_format.packing import pack_row

SCHEMA = rf.sample_schema(vocab_size=10, columns=[])


def samples(*ids):
    rows = [{"sample_id": i, "input_ids": [1, 2], "completion_mask": [0, 1]} for i in ids]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def write(folder, *batches, **options):
    with rf.Writer(folder, SCHEMA, batch_rows=3, **options) as writer:
        for ids in batches:
            writer.write(samples(*ids))


@pytest.fixture(autouse=True, params=[4, 4 << 20], ids=["runs on disk", "in memory"])
def _small_runs(monkeypatch, request):
    monkeypatch.setattr(hash_runs, "RANGE", request.param)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("encoding", ["hot", "compact"])
def test_an_id_that_is_written_twice_commits_nothing(tmp_path, encoding):
    with pytest.raises(rf.InvariantError) as caught:
        write(tmp_path, "abcde", "fgha", encoding=encoding, on_duplicate="error")
    err = caught.value
    assert (err.code, err.where.row, err.where.column) == ("RF-I006", 8, "sample_id")
    assert err.got.startswith("'a', also at")
    assert "row 0" in err.got
    assert names(tmp_path) == []


@pytest.mark.parametrize("encoding", ["hot", "compact"])
def test_an_id_of_the_dataset_is_not_appended(tmp_path, encoding):
    write(tmp_path, "abcde", encoding=encoding, on_duplicate="error", max_shard_bytes=1)
    before = names(tmp_path)
    with pytest.raises(rf.InvariantError) as caught:
        write(tmp_path, "xyz", "wd", mode="append", on_duplicate="error")
    err = caught.value
    assert (err.code, err.where.row) == ("RF-I006", 4)
    assert err.got.startswith("'d', also at")
    assert "shard-" in err.got
    assert names(tmp_path) == before
    write(tmp_path, "xyz", "w", mode="append", on_duplicate="error")
    dataset = rf.Dataset(tmp_path)
    assert dataset.num_rows == 9
    dataset.validate()


def test_replacing_a_dataset_does_not_look_at_its_ids(tmp_path):
    write(tmp_path, "abc", on_duplicate="error")
    write(tmp_path, "cba", mode="overwrite", on_duplicate="error")
    assert rf.Dataset(tmp_path).num_rows == 3


def test_what_another_writer_appended_meanwhile_is_compared(tmp_path):
    write(tmp_path, "abc")
    writer = rf.Writer(tmp_path, SCHEMA, mode="append", on_duplicate="error")
    writer.write(samples("d"))
    write(tmp_path, "ed", mode="append")
    with pytest.raises(rf.InvariantError, match="RF-I006"):
        writer.close()
    assert rf.Dataset(tmp_path).num_rows == 5


def test_ids_are_kept_by_default_and_validation_finds_them(tmp_path):
    write(tmp_path, "abc", "c")
    with pytest.raises(rf.InvariantError, match="RF-I006"):
        rf.Dataset(tmp_path).validate()


def test_unknown_choices_are_refused(tmp_path):
    with pytest.raises(rf.LimitExceededError, match="on_duplicate"):
        rf.Writer(tmp_path, SCHEMA, on_duplicate="first")


def test_packed_rows_have_no_ids_to_compare(tmp_path):
    row = pack_row(samples("a", "b"))
    with rf.Writer(tmp_path, row.schema, on_duplicate="error") as writer:
        writer.write(row)
        writer.write(row)
    assert rf.Dataset(tmp_path).num_rows == 2
