"""The names that scripts rely on take their arguments by position too, as they are written."""

import pyarrow as pa
import pytest

import ragged_format as rf
from ragged_format.adapters import vllm

ROW = {"sample_id": "a", "input_ids": [1, 2], "completion_mask": [0, 1]}
RECORD = {
    "request": {"token_ids": [1, 2]},
    "response": {
        "request_id": "r",
        "choices": [
            {
                "index": 0,
                "finish_reason": "length",
                "token_ids": [4],
                "sampling_mask": None,
                "logprobs": {"content": [{"token_id": 4, "logprob": 0.0}]},
            }
        ],
    },
}


@pytest.mark.parametrize("make", [rf.sample_schema, rf.packed_schema])
def test_schemas_take_the_vocabulary_and_columns_by_position(make):
    assert make(100).equals(make(vocab_size=100), check_metadata=True)
    columns = ["rollout_log_probs"]
    by_name = make(vocab_size=100, columns=columns)
    assert make(100, columns).equals(by_name, check_metadata=True)


@pytest.mark.parametrize("name", ["candidate_ids", "topk_log_probs", "teacher_topk_ids"])
def test_a_column_without_its_counts_names_the_counts(name):
    axis = rf.standard_column(name).axis
    with pytest.raises(rf.SchemaMismatchError) as caught:
        rf.sample_schema(100, [name])
    assert caught.value.code == "RF-S006"
    assert f"{axis}_counts" in str(caught.value.remedy)
    assert rf.sample_schema(100, [name, f"{axis}_counts"]).names[3:] == [f"{axis}_counts", name]


def test_a_writer_takes_its_mode_by_position(tmp_path):
    schema = rf.sample_schema(10, [])
    batch = pa.RecordBatch.from_pylist([ROW], schema=schema)
    for mode, rows in (("error", 1), ("append", 2), ("overwrite", 1)):
        with rf.Writer(tmp_path / "data", schema, mode) as writer:
            writer.write(batch)
        assert rf.Dataset(tmp_path / "data").num_rows == rows
    with pytest.raises(rf.DatasetExistsError):
        rf.Writer(tmp_path / "data", schema, "error")


def test_vllm_takes_vocabulary_and_policy_by_position():
    with pytest.raises(rf.ConversionError):
        vllm.to_samples([RECORD], 10)
    samples = vllm.to_samples([RECORD], 10, "full_vocab")
    by_name = vllm.to_samples([RECORD], vocab_size=10, on_missing_support="full_vocab")
    assert samples.equals(by_name)
    assert samples["candidate_counts"].to_pylist() == [[0]]
