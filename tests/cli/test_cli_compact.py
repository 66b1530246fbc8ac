"""`ragged compact` and `ragged expand`: the same records, other bytes."""

import io

import ragged_format as rf
from ragged_format.testing import assert_ragged_equal

KEYS = {
    "command", "ok", "path", "input", "encoding", "records", "bytes", "input_bytes", "shards",
    "tasks", "resumed", "unchanged",
}  # fmt: skip


def test_there_and_back(invoke, invoke_json, tmp_path, dataset, samples):
    found = invoke_json("compact", dataset, tmp_path / "cold")
    assert set(found) == KEYS
    assert found["records"] == samples.num_rows
    assert found["bytes"] < 0.8 * found["input_bytes"]
    assert invoke("validate", tmp_path / "cold").exit_code == 0
    assert invoke("inspect", tmp_path / "cold", "--head", "1").exit_code == 0
    found = invoke_json("expand", tmp_path / "cold", tmp_path / "hot")
    assert found["encoding"] == "hot"
    assert_ragged_equal(rf.Dataset(tmp_path / "hot")[:], samples)


def test_a_file_goes_in_and_people_read_the_gain(invoke, tmp_path, dataset):
    shard = next(dataset.glob("*.arrow"))
    done = invoke("compact", shard, tmp_path / "cold")
    assert done.exit_code == 0
    assert "now" in done.stdout


def test_an_existing_dataset_is_refused(invoke_json, tmp_path, dataset):
    first = invoke_json("compact", dataset, tmp_path / "cold")
    again = invoke_json("compact", dataset, tmp_path / "cold")
    assert (first["unchanged"], again["unchanged"]) == (False, True)
    assert invoke_json("expand", dataset, tmp_path / "cold", exit_code=1)["code"] == "RF-C009"
    found = invoke_json("expand", dataset, tmp_path / "cold", "--mode", "overwrite")
    assert found["records"] == rf.Dataset(tmp_path / "cold").num_rows == 24


def test_a_stream_goes_in(invoke_json, tmp_path, samples):
    sink = io.BytesIO()
    rf.write_stream(sink, [samples])
    found = invoke_json("compact", "-", tmp_path / "cold", stdin=sink.getvalue())
    assert (found["records"], found["input_bytes"]) == (24, None)
    assert_ragged_equal(rf.Dataset(tmp_path / "cold")[:], samples)
