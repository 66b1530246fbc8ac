"""Plain arrays for any collator, DLPack and Arrow capsules."""

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ragged_format as rf
from ragged_format.adapters import tensors
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError, LimitExceededError
from ragged_format.testing import assert_ragged_equal, sample_batches

SCHEMA = rf.sample_schema(
    vocab_size=100,
    columns=["reward", "advantage", "group_id", "rollout_log_probs", "candidate_counts",
             "candidate_ids", rf.Column("experts", "token", pa.int16(), shape=(2, 3), fill=-1)],
)  # fmt: skip
BATCH = pa.RecordBatch.from_pylist([
    {"sample_id": "a", "reward": 1.0, "advantage": 0.5, "group_id": "g", "input_ids": [1, 2, 3],
     "completion_mask": [0, 1, 1], "rollout_log_probs": [-0.5, -1.5], "candidate_counts": [2, 1],
     "candidate_ids": [2, 9, 3], "experts": [[i] * 6 for i in range(3)]},
    {"sample_id": "b", "reward": None, "advantage": 1.5, "group_id": None, "input_ids": [4],
     "completion_mask": [0], "rollout_log_probs": [], "candidate_counts": [], "candidate_ids": [],
     "experts": [[7] * 6]},
], schema=SCHEMA)  # fmt: skip


@settings(deadline=None, max_examples=40)
@given(sample_batches(), st.integers(0, 3))
def test_arrays_come_back_as_the_batch(batch, start):
    batch = batch.slice(min(start, batch.num_rows))
    arrays = tensors.to_arrays(batch)
    assert_ragged_equal(tensors.from_arrays(arrays, batch.schema), batch, check_schema=True)


def test_arrays_are_views():
    arrays = tensors.to_arrays(BATCH, ["candidate_ids", "reward", "advantage", "experts"])
    assert arrays["candidate_ids"].tolist() == [2, 9, 3]
    assert arrays["candidate_counts"].tolist() == [2, 1]
    assert arrays["target_offsets"].tolist() == [0, 2, 2]
    assert arrays["reward"] == [1.0, None]
    assert arrays["advantage"].tolist() == [0.5, 1.5]
    assert arrays["experts"].shape == (4, 2, 3)
    assert not arrays["candidate_ids"].flags.owndata
    full = tensors.to_arrays(BATCH)
    for gone in ("token_offsets", "candidate_ids"):
        with pytest.raises(ConversionError, match="the arrays lack"):
            tensors.from_arrays({k: v for k, v in full.items() if k != gone}, SCHEMA)


def test_padded_arrays():
    padded = tensors.to_padded(BATCH, fills={"input_ids": 0}, widths={"candidate": 3})
    assert padded["input_ids"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert padded["candidate_ids"].tolist() == [
        [[2, 9, -1], [3, -1, -1]], [[-1] * 3, [-1] * 3]
    ]  # fmt: skip
    assert padded["rollout_log_probs"].tolist() == [[-0.5, -1.5], [-30000.0] * 2]
    assert padded["token_lengths"].tolist() == [3, 1]
    assert padded["experts"].shape == (2, 3, 2, 3)
    assert (padded["experts"][1, 1:] == -1).all()
    with pytest.raises(LimitExceededError, match="longer than its width"):
        tensors.to_padded(BATCH, ["input_ids"], widths={"token": 2})


def test_dlpack_shares_memory():
    columns = tensors.to_dlpack(BATCH.slice(0, 1))
    ids = torch.from_dlpack(columns["candidate_ids"])
    assert ids.tolist() == [2, 9, 3]
    assert ids.dtype == torch.int32
    assert np.from_dlpack(columns["rollout_log_probs"]).tolist() == [-0.5, -1.5]
    assert len(columns["experts"]) == 18
    address = BATCH.column("candidate_ids").values.buffers()[1].address
    assert ids.data_ptr() == address
    assert columns["input_ids"].__dlpack_device__()[0] == 1
    again = np.from_dlpack(columns["input_ids"])
    assert not again.flags.writeable
    assert columns["input_ids"].__dlpack__(max_version=None) is not None
    with pytest.raises(ConversionError, match="list columns of numbers"):
        tensors.to_dlpack(BATCH, ["reward"])


class OnlyArray:
    """A producer of another library: nothing but the capsule."""

    def __init__(self, batch):
        self.batch = batch

    def __arrow_c_array__(self, requested_schema=None):
        return self.batch.__arrow_c_array__(requested_schema)


class OnlyStream:
    def __init__(self, batch):
        self.batch = batch

    def __arrow_c_stream__(self, requested_schema=None):
        return pa.Table.from_batches([self.batch]).__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize("wrap", [OnlyArray, OnlyStream, tensors.to_arrow])
def test_capsules_of_any_class_are_read(wrap):
    report = ConversionReport()
    batch = tensors.to_samples([wrap(BATCH)], vocab_size=100, report=report)
    assert_ragged_equal(batch, BATCH, check_schema=True)
    assert report.samples.stored == 2
    assert report.unbalanced() == []


def test_capsules_are_taken_by_others():
    shown = tensors.to_arrow(BATCH)
    assert pa.record_batch(shown).equals(BATCH)
    assert pa.schema(shown).equals(SCHEMA)
    frame = pl.DataFrame(shown)
    assert frame["input_ids"].to_list() == [[1, 2, 3], [4]]
    back = tensors.to_samples([frame], schema=SCHEMA)  # its metadata are gone
    assert_ragged_equal(back, BATCH)
    with pytest.raises(ConversionError, match="another vocabulary"):
        tensors.to_samples([shown], vocab_size=5)
    with pytest.raises(ConversionError, match="nothing to convert"):
        tensors.to_samples([])


def test_files(tmp_path):
    counts = tensors.write([BATCH, BATCH.slice(0, 1)], str(tmp_path / "out"))
    assert (counts["files"], counts["samples"]) == (2, 3)
    assert counts["not_carried.reward"] == 2
    with np.load(tmp_path / "out" / "batch-000000.npz") as stored:
        assert stored["sample_id"].tolist() == ["a", "b"]
        assert stored["candidate_ids"].tolist() == [2, 9, 3]
