"""Compact and expand by jobs: the same records, other bytes."""

import numpy as np
import pytest

import ragged_format as rf
from ragged_format.packing import pack_row
from ragged_format.testing import assert_ragged_equal, rollouts
from ragged_pipeline.jobs.recode import compact, expand


@pytest.fixture(scope="module")
def samples():
    return rollouts(np.random.default_rng(1), num_samples=300, vocab_size=500, max_candidates=40)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, samples):
    path = tmp_path_factory.mktemp("recode") / "hot"
    with rf.Writer(path, samples.schema, batch_rows=32, max_shard_bytes=1 << 18) as writer:
        writer.write(samples)
    assert len(rf.Dataset(path).shards) > 2
    return path


@pytest.mark.parametrize("shard_bytes", [1 << 16, "1GiB"], ids=["cut", "whole"])
def test_there_and_back(dataset, samples, tmp_path, shard_bytes):
    cold = compact(dataset, tmp_path / "cold", shard_bytes=shard_bytes)
    rf.Dataset(tmp_path / "cold").validate()
    assert {shard.encoding for shard in rf.Dataset(tmp_path / "cold").shards} == {"compact"}
    assert cold.bytes < sum(shard.bytes for shard in rf.Dataset(dataset).shards)
    expand(tmp_path / "cold", tmp_path / "hot", shard_bytes=shard_bytes)
    assert_ragged_equal(rf.Dataset(tmp_path / "hot")[:], samples)
    assert (len(rf.Dataset(tmp_path / "hot").shards) == 1) == (shard_bytes == "1GiB")


def test_workers_change_nothing(dataset, tmp_path):
    for workers in (1, 2):
        compact(dataset, tmp_path / str(workers), workers=workers)
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_packed_rows_too(samples, tmp_path):
    row = pack_row(samples.slice(0, 40))
    rf.write_file(tmp_path / "in", [row])
    compact(tmp_path / "in", tmp_path / "cold")
    assert_ragged_equal(rf.Dataset(tmp_path / "cold")[:], row)


def test_nothing_in_nothing_out(samples, tmp_path):
    rf.write_file(tmp_path / "in", [], samples.schema)
    done = compact(tmp_path / "in", tmp_path / "cold")
    assert (done.rows, done.shards) == (0, 0)
    assert rf.Dataset(tmp_path / "cold").schema.equals(samples.schema)


def test_a_damaged_shard_is_named_and_nothing_is_committed(dataset, tmp_path):
    source = tmp_path / "hot"
    source.mkdir()
    for path in dataset.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    shard = source / rf.Dataset(source).shards[1].name
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 255
    shard.write_bytes(data)
    with pytest.raises(rf.RaggedError) as caught:
        compact(source, tmp_path / "cold", workers=2)
    assert shard.name in str(caught.value)
    assert not (tmp_path / "cold" / "manifest.json").exists()
