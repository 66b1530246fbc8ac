"""Ids that come by once: whatever the batches are, and wherever runs end, repeats are found."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import ragged_format as rf
from ragged_format import hash_runs
from ragged_format.cli import app
from ragged_format.hash_runs import HashRuns, id_hashes
from ragged_format.unique_ids import SeenIds

BATCHES = st.lists(st.lists(st.text("ab", min_size=1, max_size=3), max_size=6), max_size=6)


def placed(batches):
    for number, ids in enumerate(batches):
        yield rf.Where(file="x", batch=number), pa.array(ids, pa.string())


def outcome(batches, *, again, size):
    """The error of comparing all ids, or None."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hash_runs, "RANGE", size)
        patch.setattr(hash_runs, "SUSPECTS", size)
        seen = SeenIds((lambda: placed(batches)) if again else None)
        for where, ids in placed(batches):
            seen.add(ids, where)
        try:
            seen.require_unique()
        except rf.InvariantError as err:
            return err
    return None


@given(batches=BATCHES, again=st.booleans(), size=st.sampled_from([1, 3, 1000]))
def test_an_error_names_two_places_of_one_id(batches, again, size):
    err = outcome(batches, again=again, size=size)
    flat = [text for ids in batches for text in ids]
    if len(set(flat)) == len(flat):
        assert err is None
        return
    assert err.code == "RF-I006"
    text = batches[err.where.batch][err.where.row]
    first = next((b, ids.index(text)) for b, ids in enumerate(batches) if text in ids)
    place = rf.Where("x", *first, "sample_id")
    assert err.got == f"{text!r}, also at {place}"
    assert (err.where.batch, err.where.row) > first


@given(batches=BATCHES, size=st.integers(1, 5))
def test_runs_hold_every_hash_sorted(batches, size):
    runs = HashRuns(size=size)
    for _, ids in placed(batches):
        runs.add(ids)
    parts = [part.tolist() for part in runs.parts()]
    assert all(part == sorted(part) for part in parts)
    expected = [h for _, ids in placed(batches) for h in id_hashes(ids).tolist()]
    assert sorted(h for part in parts for h in part) == sorted(expected)


def test_slices_are_kept_as_they_are():
    ids = pa.array(["a", "b", "a", "c"])
    seen = SeenIds()
    seen.add(ids[1:3], rf.Where(batch=0))
    seen.add(ids[3:], rf.Where(batch=1))
    seen.require_unique()
    assert next(iter(seen._kept()))[1].to_pylist() == ["b", "a"]


def test_a_repeated_id_in_a_stream_is_found(tmp_path):
    schema = rf.sample_schema(vocab_size=10, columns=[])

    def samples(*ids):
        rows = [{"sample_id": i, "input_ids": [1], "completion_mask": [0]} for i in ids]
        return pa.RecordBatch.from_pylist(rows, schema=schema)

    rf.write_stream(tmp_path / "a", [samples("a", "b"), samples("c", "a")])
    done = CliRunner().invoke(app, ["validate", str(tmp_path / "a")])
    assert done.exit_code == 1
    assert "batch 1, row 1" in done.stderr
    assert "'a', also at" in done.stderr
    assert "batch 0, row 0" in done.stderr
