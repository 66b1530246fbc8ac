"""NeMo-RL's dense batches."""

import numpy as np
import pytest
import torch

import ragged_format as rf
from ragged_format.adapters import nemo_rl
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError


def batch(**changes):
    return {
        "input_ids": np.array([[5, 6, 7, 0], [8, 9, 0, 0]]), "input_lengths": np.array([3, 2]),
        "token_mask": np.array([[0, 1, 1, 0], [0, 1, 0, 0]]),
        "teacher_topk_indices": np.array(
            [[[6, 1], [7, 2], [0, 0], [0, 0]], [[9, 3], [0, 0], [0, 0], [0, 0]]]
        ),
        "teacher_topk_logits": np.array(
            [[[3.5, 1.0], [9.0, -2.0], [0, 0], [0, 0]], [[12.5, 2.0], [0, 0], [0, 0], [0, 0]]],
            np.float32,
        ),
    } | changes  # fmt: skip


def test_dense_batches_come_back_equal():
    report = ConversionReport()
    samples = nemo_rl.to_samples([batch()], vocab_size=10, report=report)
    rf.validate(samples)
    assert report.unbalanced() == []
    # Row t predicts token t + 1; logits have no sign or mass.
    assert samples.column("teacher_topk_ids").to_pylist() == [[6, 1, 7, 2], [9, 3]]
    assert rf.parse_schema(samples.schema)["teacher_topk_log_probs"].log_prob.value == "logit"
    back = nemo_rl.to_batch(samples, multiple_of=4)
    for name, value in batch().items():
        np.testing.assert_array_equal(back[name], value)
        assert back[name].dtype == value.dtype
    tensors = {name: torch.from_numpy(value) for name, value in batch().items()}
    assert nemo_rl.to_samples([tensors], vocab_size=10).equals(samples)


def test_masked_positions_hold_finite_values():
    """NVIDIA-NeMo/RL#4154: inf * 0 is NaN although the position is masked."""
    got = batch()
    got["teacher_topk_logits"][0, 0] = [-np.inf, 1.0]  # what a filter of the trainer's leaves
    report = ConversionReport()
    samples = nemo_rl.to_samples([got], vocab_size=10, report=report)
    assert report.head_entries.dropped == {"log_prob_minus_infinity": 1}
    out = nemo_rl.to_batch(samples, k=3, multiple_of=8)
    assert np.isfinite(out["teacher_topk_logits"]).all()
    assert (out["teacher_topk_logits"] * out["token_mask"][..., None] == 0).any()
    assert out["teacher_topk_indices"].shape == (2, 8, 3)
    again = nemo_rl.to_samples([out], vocab_size=10)
    assert again.equals(samples)


def test_all_columns_have_one_length():
    """verl-project/verl#7514, huggingface/trl#5615: masks and tables padded to other lengths."""
    out = nemo_rl.to_batch(nemo_rl.to_samples([batch()], vocab_size=10), multiple_of=8)
    assert {value.shape[1] for name, value in out.items() if name != "input_lengths"} == {8}


def test_odd_batches():
    none = batch(teacher_topk_indices=np.zeros((2, 4, 2), int),
                 teacher_topk_logits=np.zeros((2, 4, 2)))  # fmt: skip
    samples = nemo_rl.to_samples([none], vocab_size=10)
    assert samples.column("target_flags").to_pylist() == [[16, 16], [16]]
    one = batch(teacher_topk_indices=np.zeros((2, 4, 1), int),
                teacher_topk_logits=np.zeros((2, 4, 1)))  # fmt: skip
    assert nemo_rl.to_samples([one], vocab_size=10).column("teacher_topk_counts").to_pylist() == [
        [1, 1], [1]
    ]  # fmt: skip
    for changes, code in (
        ({"input_lengths": np.array([3])}, "RF-A006"),
        ({"input_lengths": np.array([3, 9])}, "RF-A006"),
        ({"teacher_topk_logits": np.zeros((2, 4, 3))}, "RF-A006"),
        ({"token_mask": None}, "RF-A002"),
        ({"teacher_topk_indices": np.full((2, 4, 2), [10, 1])}, "RF-A005"),
    ):
        with pytest.raises(ConversionError) as info:
            nemo_rl.to_samples([batch(**changes)], vocab_size=10)
        assert info.value.code == code
    with pytest.raises(ConversionError, match="holds a teacher's heads"):
        nemo_rl.to_batch(samples.select(["sample_id", "input_ids", "completion_mask"]))
