"""verl's jagged teacher rows: the ragged axis is declared, whatever the data are."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ragged_format as rf
from ragged_format.adapters import verl
from ragged_format.adapters.report import ConversionReport
from ragged_format.errors import ConversionError
from ragged_format.testing import assert_ragged_equal


def nested(rows):
    offsets = torch.tensor(np.cumsum([0, *map(len, rows)]))
    values = torch.cat([torch.as_tensor(row) for row in rows])
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=1)


def batch_of(lengths, k=2, seed=0):
    rng = np.random.default_rng(seed)
    out = {"input_ids": [], "loss_mask": [], "teacher_ids": [], "teacher_logprobs": []}
    for length in lengths:
        mask = rng.integers(0, 2, length)
        mask[0] = 0
        ids = np.stack([rng.permutation(10)[:k] for _ in range(length)])
        values = -np.sort(-np.log(rng.dirichlet(np.ones(k + 1), length))[:, :k], axis=1)
        values[mask == 0], ids[mask == 0] = -30000.0, 0
        for name, row in zip(
            out, (rng.integers(0, 10, length), mask, ids, values.astype(np.float32)), strict=True
        ):
            out[name].append(row)
    return out


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 99))
def test_nested_batches_come_back_equal(lengths, k, seed):
    rows = batch_of(lengths, k, seed)
    batch = {name: nested(value) for name, value in rows.items()}
    report = ConversionReport()
    samples = verl.to_samples([batch], vocab_size=10, report=report)
    rf.validate(samples)
    assert report.unbalanced() == []
    back = verl.to_nested(samples, k=k)
    for name, value in batch.items():
        assert back[name].is_nested
        assert back[name]._ragged_idx == 1
        assert back[name].shape[2:] == value.shape[2:]
        assert torch.equal(back[name].offsets(), value.offsets())
        assert torch.equal(back[name].values(), value.values())
    assert_ragged_equal(samples, verl.to_samples([rows], vocab_size=10))


@pytest.mark.parametrize("lengths", [[5], [4, 4, 4], [1]])
def test_one_sample_and_equal_lengths_stay_ragged(lengths):
    """verl-project/verl#6407, #6073, #7899, #7661: such batches turned dense, without offsets."""
    rows = batch_of(lengths)
    dense = {name: torch.as_tensor(np.stack(value)) for name, value in rows.items()}
    jagged = {name: nested(value) for name, value in rows.items()}
    a, b = (verl.to_samples([one], vocab_size=10) for one in (dense, jagged))
    assert a.equals(b)
    out = verl.to_nested(a, k=2)
    for name in rows:
        assert out[name].is_nested
        assert out[name].offsets().tolist() == np.cumsum([0, *lengths]).tolist()


def test_the_ragged_axis_is_not_guessed():
    """verl-project/verl#6152: (B, [S], K) rebuilt with the last axis as the ragged one."""
    rows = batch_of([142, 156], k=8)
    batch = {name: nested(value) for name, value in rows.items()}
    samples = verl.to_samples([batch], vocab_size=10)
    assert [len(ids) for ids in samples.column("input_ids").to_pylist()] == [142, 156]
    other = batch | {"teacher_ids": batch["teacher_ids"].transpose(1, 2)}
    with pytest.raises(ConversionError, match="ragged axis") as info:
        verl.to_samples([other], vocab_size=10)
    assert info.value.got == 2


def test_rows_by_predictor_position_are_moved():
    own = {
        "input_ids": [[5, 6, 7]], "loss_mask": [[0, 1, 1]],
        "teacher_ids": [[[0, 0], [6, 1], [7, 2]]],
        "teacher_logprobs": [[[-30000.0] * 2, [-0.5, -1.5], [-0.25, -2.5]]],
    }  # fmt: skip
    shifted = own | {
        "teacher_ids": [[[6, 1], [7, 2], [3, 4]]],
        "teacher_logprobs": [[[-0.5, -1.5], [-0.25, -2.5], [-0.125, -3.5]]],
    }
    a = verl.to_samples([own], vocab_size=10)
    report = ConversionReport()
    b = verl.to_samples([shifted], vocab_size=10, position="predictor", report=report)
    assert a.equals(b)
    assert report.head_entries.dropped == {"beyond_end": 2}
    assert report.unbalanced() == []
    back = verl.to_nested(b, position="predictor")
    assert back["teacher_ids"].values().tolist() == [[6, 1], [7, 2], [0, 0]]
    with pytest.raises(ConversionError, match="own or predictor"):
        verl.to_samples([own], vocab_size=10, position="next")


def test_malformed_batches_are_refused():
    """verl-project/verl#6737, #7514: rows of another rank or length than the tokens."""
    rows = batch_of([3, 4])
    for changes, code in (
        ({"teacher_ids": [r[:, 0] for r in rows["teacher_ids"]]}, "RF-A006"),
        ({"teacher_ids": [r[:-1] for r in rows["teacher_ids"]]}, "RF-A006"),
        ({"loss_mask": rows["loss_mask"][:1]}, "RF-A006"),
        ({"teacher_logprobs": None}, "RF-A002"),
        ({"input_ids": np.zeros(3)}, "RF-A006"),
    ):
        with pytest.raises(ConversionError) as info:
            verl.to_samples([rows | changes], vocab_size=10)
        assert info.value.code == code


def test_longer_heads_are_refused_or_cut_with_a_count():
    samples = verl.to_samples([batch_of([6], k=4)], vocab_size=10)
    with pytest.raises(ConversionError, match="longer than k"):
        verl.to_nested(samples, k=2)
    counts = Counter()
    cut = verl.to_nested(samples, k=2, lossy=True, counts=counts)
    assert cut["teacher_ids"].shape[2] == 2
    assert counts["head_entries_cut"] > 0


def test_filled_slots_leave_the_gradient_finite():
    """huggingface/trl#5594: -inf in unused slots gave a finite loss and a NaN gradient."""
    samples = verl.to_samples([batch_of([4, 6], k=2)], vocab_size=10)
    out = verl.to_nested(samples, k=5)
    teacher = out["teacher_logprobs"].values()
    assert torch.isfinite(teacher).all()
    student = torch.zeros_like(teacher, requires_grad=True)
    (teacher.exp() * (teacher - student)).sum().backward()
    assert torch.isfinite(student.grad).all()
