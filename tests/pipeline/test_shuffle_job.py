"""Shuffle: every record once, in an order that is random and can be had again."""

import io

import numpy as np
import pyarrow as pa
import pytest

import ragged_format as rf
from ragged_format.testing import assert_ragged_equal
from ragged_pipeline.jobs import shuffle as shuffling
from ragged_pipeline.jobs.shuffle import shuffle

COUNT = 4000
SCHEMA = rf.sample_schema(vocab_size=99, columns=["group_id", "rollout_log_probs"])
SMALL = {"shard_bytes": 1 << 15}


def records(count=COUNT, size=5):
    """Records of a few tokens in groups of `size`, every tenth record without a group."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(count):
        length = int(rng.integers(2, 9))
        rows.append({
            "sample_id": f"{number}", "input_ids": rng.integers(0, 99, length).tolist(),
            "group_id": None if number % 10 == 9 else f"g{number // size}",
            "completion_mask": [0] + [1] * (length - 1), "rollout_log_probs": [-0.5] * (length - 1),
        })  # fmt: skip
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


@pytest.fixture(scope="module")
def samples():
    return records()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory, samples):
    path = tmp_path_factory.mktemp("shuffle") / "in"
    with rf.Writer(path, SCHEMA, batch_rows=100, max_shard_bytes=1 << 17) as writer:
        writer.write(samples)
    return path


def order_of(path):
    """The places that the records had."""
    return np.array(rf.Dataset(path)[:]["sample_id"].to_pylist()).astype(int)


@pytest.mark.parametrize("options", [{}, SMALL], ids=["one task", "buckets"])
def test_every_record_is_there_once_and_unchanged(dataset, samples, tmp_path, options):
    done = shuffle(dataset, tmp_path / "out", seed=3, **options)
    assert (done.shards > 2) == bool(options)
    rf.Dataset(tmp_path / "out").validate()
    order = order_of(tmp_path / "out")
    assert_ragged_equal(rf.Dataset(tmp_path / "out")[:], rf.take(samples, order))
    assert sorted(order.tolist()) == list(range(COUNT))


def test_buckets_do_not_change_the_order(dataset, tmp_path):
    shuffle(dataset, tmp_path / "one", seed=3)
    shuffle(dataset, tmp_path / "many", seed=3, **SMALL)
    assert order_of(tmp_path / "one").tolist() == order_of(tmp_path / "many").tolist()
    shuffle(dataset, tmp_path / "other", seed=4)
    assert order_of(tmp_path / "one").tolist() != order_of(tmp_path / "other").tolist()


@pytest.mark.parametrize("seed", [0, 1, -7])
def test_the_order_is_random(dataset, tmp_path, seed):
    shuffle(dataset, tmp_path / "out", seed=seed)
    order = order_of(tmp_path / "out")
    # Where records of each twentieth of the input went: chi-square with 361 degrees of freedom.
    cells = np.zeros((20, 20))
    np.add.at(cells, (order * 20 // COUNT, np.arange(COUNT) * 20 // COUNT), 1)
    expected = COUNT / 400
    chi_square = ((cells - expected) ** 2 / expected).sum()
    assert 270 < chi_square < 460  # 99.9 % on either side
    # Neighbours stay neighbours as often as chance has it: about once.
    assert np.count_nonzero(np.diff(order) == 1) < 8
    assert abs(np.corrcoef(order, np.arange(COUNT))[0, 1]) < 0.06


def test_workers_change_nothing(dataset, tmp_path):
    for workers in (1, 2):
        shuffle(dataset, tmp_path / str(workers), workers=workers, **SMALL)
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert len(names) > 3
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def test_very_many_files_are_copied(dataset, tmp_path, monkeypatch):
    shuffle(dataset, tmp_path / "mapped", **SMALL)
    monkeypatch.setattr(shuffling, "MAPPED", 0)
    shuffle(dataset, tmp_path / "copied", workers=1, **SMALL)
    assert order_of(tmp_path / "mapped").tolist() == order_of(tmp_path / "copied").tolist()


@pytest.mark.parametrize("options", [{}, SMALL], ids=["one task", "buckets"])
def test_groups_stay_together_in_their_order(dataset, samples, tmp_path, options):
    shuffle(dataset, tmp_path / "out", keep_groups=True, **options)
    order = order_of(tmp_path / "out").tolist()
    assert sorted(order) == list(range(COUNT))
    place = {number: at for at, number in enumerate(order)}
    for first in range(0, COUNT, 5):
        members = [number for number in range(first, first + 5) if number % 10 != 9]
        places = [place[number] for number in members]
        assert places == list(range(places[0], places[0] + len(members)))
    firsts = [number // 5 for number in order if number % 5 == 0]
    assert abs(np.corrcoef(firsts, np.arange(len(firsts)))[0, 1]) < 0.12


def test_groups_must_be_known(tmp_path):
    schema = rf.sample_schema(vocab_size=9, columns=[])
    rf.write_file(tmp_path / "in", [], schema)
    with pytest.raises(rf.JobError, match="group_id"):
        shuffle(tmp_path / "in", tmp_path / "out", keep_groups=True)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_records(tmp_path, count):
    rf.write_file(tmp_path / "in", [records(count)], SCHEMA)
    assert shuffle(tmp_path / "in", tmp_path / "out", shard_bytes=1).rows == count
    assert sorted(rf.Dataset(tmp_path / "out")[:]["sample_id"].to_pylist()) == [
        f"{number}" for number in range(count)
    ]


def test_large_records_are_copied_as_slices(tmp_path):
    tokens = [1] * 3000
    rows = [
        {"sample_id": f"{n}", "group_id": None, "input_ids": [n % 99, *tokens],
         "completion_mask": [0] + [1] * 3000, "rollout_log_probs": [-0.5] * 3000}
        for n in range(40)
    ]  # fmt: skip
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    rf.write_file(tmp_path / "in", [batch.slice(0, 25), batch.slice(25)])
    shuffle(tmp_path / "in", tmp_path / "out")
    order = order_of(tmp_path / "out")
    assert_ragged_equal(rf.Dataset(tmp_path / "out")[:], rf.take(batch, order))


def test_the_command(tmp_path, samples):
    import json

    from typer.testing import CliRunner

    from ragged_format.cli import app

    sink = io.BytesIO()
    rf.write_stream(sink, [samples.slice(0, 50)])
    out = str(tmp_path / "out")
    done = CliRunner().invoke(app, ["shuffle", "-", out, "--seed", "2", "--json"],
                              input=sink.getvalue())  # fmt: skip
    found = json.loads(done.stdout)
    assert (found["ok"], found["records"], found["seed"], found["input"]) == (True, 50, 2, "-")
    assert sorted(order_of(out).tolist()) == list(range(50))
