"""Samples of one id that come together: from several inputs, or by appending."""

import json

import numpy as np
import pytest
from support.jobs import bytes_of
from typer.testing import CliRunner

import ragged_format as rf
import ragged_format.hash_runs as hash_runs
import ragged_pipeline as rp
from ragged_format.cli import app
from ragged_format.packing import pack_row
from ragged_format.testing import rollouts
from ragged_pipeline.jobs.merge import Merge
from ragged_pipeline.runner import run


@pytest.fixture(scope="module")
def batch():
    return rollouts(
        np.random.default_rng(2), num_samples=60, vocab_size=300, prompt_length=8,
        response_length=9, group_size=4, max_candidates=10, top_k=3,
    )  # fmt: skip


def write(folder, batch, **options):
    with rf.Writer(folder, batch.schema, batch_rows=7, **options) as writer:
        writer.write(batch)
    return folder


@pytest.fixture
def halves(batch, tmp_path):
    """Two datasets that share the records 20 to 29."""
    return write(tmp_path / "a", batch[:30]), write(tmp_path / "b", batch[20:])


@pytest.fixture(autouse=True)
def _small_runs(monkeypatch):
    """Several runs on disk and several ranges, however few the ids are."""
    monkeypatch.setattr(hash_runs, "RANGE", 16)
    monkeypatch.setattr(hash_runs, "SUSPECTS", 3)


JOBS = {
    "merge": rp.merge,
    "sort": lambda places, out, **on: rp.merge(places, out, sort_by="token_length", **on),
    "shuffle": rp.shuffle,
    "compact": rp.compact,
    "filter": lambda places, out, **on: rp.filter_dataset(places, out, "token_length > 0", **on),
}


@pytest.mark.parametrize("job", JOBS)
def test_inputs_that_share_an_id_are_refused_with_both_places(halves, tmp_path, job):
    with pytest.raises(rf.InvariantError) as caught:
        JOBS[job](list(halves), tmp_path / "out", workers=1)
    err = caught.value
    assert (err.code, err.where.column) == ("RF-I006", "sample_id")
    assert str(halves[1]) in err.where.file
    assert str(halves[0]) in err.got
    assert "dedupe" in err.remedy
    assert not (tmp_path / "out").exists()
    assert JOBS[job](list(halves), tmp_path / "out", workers=1, on_duplicate="keep").rows == 70


def test_the_places_are_those_of_one_record(halves, batch, tmp_path):
    with pytest.raises(rf.InvariantError) as caught:
        rp.merge(list(halves), tmp_path / "out", workers=1)
    where = caught.value.where
    row = 7 * where.batch + where.row
    sample_id = rf.Dataset(halves[1])[row]["sample_id"][0].as_py()
    assert caught.value.got.startswith(f"{sample_id!r}, also at file ")
    assert sample_id in batch[20:30]["sample_id"].to_pylist()


def test_inputs_that_share_nothing_are_merged_without_a_trace(batch, tmp_path):
    parts = [write(tmp_path / "a", batch[:30]), write(tmp_path / "b", batch[30:])]
    rp.merge(parts, tmp_path / "x", workers=1)
    rp.merge(parts, tmp_path / "y", workers=1, on_duplicate="keep")
    assert bytes_of(tmp_path / "x") == bytes_of(tmp_path / "y")
    rf.Dataset(tmp_path / "x").validate()


def test_files_and_compact_datasets_are_compared_as_well(halves, batch, tmp_path):
    rp.compact(halves[0], tmp_path / "cold", workers=1)
    rf.write_file(tmp_path / "file.arrow", batch[29:])
    with pytest.raises(rf.InvariantError) as caught:
        rp.merge([tmp_path / "cold", tmp_path / "file.arrow"], tmp_path / "out", workers=1)
    assert caught.value.where.file == str(tmp_path / "file.arrow")
    assert caught.value.got.startswith(repr(batch["sample_id"][29].as_py()))


def test_one_input_is_taken_as_it_is_and_dedupe_takes_all(halves, tmp_path):
    rp.merge(list(halves), tmp_path / "both", workers=1, on_duplicate="keep")
    assert rp.reshard(tmp_path / "both", tmp_path / "again", workers=1).rows == 70
    assert rp.dedupe(list(halves), tmp_path / "one", workers=1).rows == 60


@pytest.mark.parametrize("job", JOBS)
def test_appending_an_id_that_is_there_is_refused(halves, tmp_path, job):
    out = tmp_path / "out"
    rp.merge(halves[0], out, workers=1)
    before = (out / "manifest.json").read_bytes()
    with pytest.raises(rf.InvariantError) as caught:
        JOBS[job](halves[1], out, workers=1, mode="append")
    assert caught.value.code == "RF-I006"
    assert str(out) in caught.value.got
    assert (out / "manifest.json").read_bytes() == before
    options = {"mode": "append", "on_duplicate": "keep", "workers": 1}
    again = JOBS[job](halves[1], out, **options)
    assert (again.rows, again.resumed) == (40, again.tasks)
    assert rf.Dataset(out).num_rows == 70


def test_a_job_that_is_appended_again_does_not_meet_its_own_shards(halves, tmp_path):
    out = tmp_path / "out"
    rp.merge(halves[0], out, workers=1)
    rp.merge(halves[1], out, workers=1, mode="append", on_duplicate="keep")
    rf.sweep(out, grace_s=0)
    assert run(Merge(), halves[0], out, workers=1, mode="append", force=True, on_duplicate="keep")
    other = write(tmp_path / "other", rf.Dataset(halves[0])[:10])
    run(Merge(), other, tmp_path / "fresh", workers=1)
    run(Merge(), other, tmp_path / "fresh", workers=1, mode="append", force=True)
    assert rf.Dataset(tmp_path / "fresh").num_rows == 10


def test_ids_that_are_committed_meanwhile_are_compared_too(halves, tmp_path, monkeypatch):
    out = tmp_path / "out"
    from ragged_pipeline import runner

    publish = runner._publish

    def meanwhile(*arguments):
        write(out, rf.Dataset(halves[0])[25:26], mode="append")
        return publish(*arguments)

    monkeypatch.setattr(runner, "_publish", meanwhile)
    with pytest.raises(rf.InvariantError, match="RF-I006"):
        rp.merge(halves[1], out, workers=1, mode="append")
    assert rf.Dataset(out).num_rows == 1
    monkeypatch.undo()
    assert rp.merge(halves[1], out, workers=1, mode="append", on_duplicate="keep").rows == 40


def test_packed_rows_may_repeat_members(batch, tmp_path):
    row = pack_row(batch[:4])
    parts = [write(tmp_path / name, row) for name in "ab"]
    assert rp.merge(parts, tmp_path / "out", workers=1).rows == 2
    rp.merge(parts[0], tmp_path / "more", workers=1)
    rp.reshard(parts[1], tmp_path / "more", workers=1, mode="append", batch_rows=3)
    assert rf.Dataset(tmp_path / "more").num_rows == 2


def test_on_the_command_line(halves, tmp_path):
    words = ["merge", *map(str, halves), str(tmp_path / "out"), "--json"]
    done = CliRunner().invoke(app, words)
    data = json.loads(done.stdout)
    assert (done.exit_code, data["code"]) == (1, "RF-I006")
    assert "--on-duplicate keep" in data["remedy"]
    done = CliRunner().invoke(app, [*words, "--on-duplicate", "keep"])
    assert (done.exit_code, json.loads(done.stdout)["records"]) == (0, 70)
