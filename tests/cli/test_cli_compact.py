"""`ragged compact` and `ragged expand`: the same records, other bytes."""

import ragged_format as rf
from ragged_format.testing import assert_ragged_equal

KEYS = {"command", "ok", "path", "input", "encoding", "records", "bytes", "input_bytes"}


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
    invoke_json("compact", dataset, tmp_path / "cold")
    assert invoke_json("compact", dataset, tmp_path / "cold", exit_code=1)["code"] == "RF-C009"
    found = invoke_json("compact", dataset, tmp_path / "cold", "--mode", "overwrite")
    assert found["records"] == 24
