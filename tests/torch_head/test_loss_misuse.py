"""Losses given what does not fit: a typed error, never a broadcast table or a raw one."""

import math

import pytest
import torch
from torch import tensor

import ragged_format as rf
from ragged_format.torch import (
    clipped_policy_loss,
    forward_kl,
    reverse_kl,
    score_centering_loss,
)

OURS = torch.log(tensor([0.5, 0.25, 0.9]))
THEIRS = torch.log(tensor([0.4, 0.3, 0.9]))
ADVANTAGES = tensor([1.0, -1.0, 2.0])
HEAD = torch.log(tensor([0.5, 0.2, 0.25, 0.9]))
COUNTS = tensor([2, 1, 1])

CLIP = {"log_probs": OURS, "old_log_probs": THEIRS, "advantages": ADVANTAGES}
CENTRE = {
    "log_probs": OURS, "rollout_log_probs": THEIRS, "advantages": ADVANTAGES,
    "head_log_probs": HEAD, "head_rollout_log_probs": HEAD, "head_counts": COUNTS,
    "weights": "mis",
}  # fmt: skip
KL = {"head_log_probs": HEAD, "teacher_log_probs": HEAD, "head_counts": COUNTS}

PER_TARGET = [
    ADVANTAGES[:, None], ADVANTAGES[:1], ADVANTAGES[:2], ADVANTAGES.to("meta"),
    ADVANTAGES.to(torch.complex64), ADVANTAGES[None],
]  # fmt: skip
HEAD_COUNTS = [
    tensor([5, -1, 0]), tensor([2.0, 1, 1]), tensor([True, True, True]), tensor([[2, 1, 1]]),
    tensor(4), COUNTS.to(torch.complex64),
]  # fmt: skip
HEADS = [tensor(1.0), HEAD[:, None], HEAD[:3], HEAD.to(torch.complex64), HEAD.to("meta")]
LEAST = [math.nan, -0.1]


def cases():
    for name in ("old_log_probs", "advantages"):
        yield from ((clipped_policy_loss, CLIP | {name: value}) for value in PER_TARGET)
    for name in ("rollout_log_probs", "advantages"):
        yield from ((score_centering_loss, CENTRE | {name: value}) for value in PER_TARGET)
    for name in ("low", "high"):
        yield from ((clipped_policy_loss, CLIP | {name: value}) for value in LEAST)
        yield from ((score_centering_loss, CENTRE | {name: value}) for value in LEAST)
    yield score_centering_loss, CENTRE | {"low": 6.0}
    yield score_centering_loss, CENTRE | {"weights": "tis", "low": 3.0}
    yield score_centering_loss, CENTRE | {"head_counts": tensor([2, 2])}
    for value in HEAD_COUNTS:
        yield score_centering_loss, CENTRE | {"head_counts": value}
        yield forward_kl, KL | {"head_counts": value}
        yield reverse_kl, KL | {"head_counts": value}
    for value in HEADS:
        yield score_centering_loss, CENTRE | {"head_rollout_log_probs": value}
        yield forward_kl, KL | {"head_log_probs": value}
        yield reverse_kl, KL | {"teacher_log_probs": value}


@pytest.mark.parametrize(("loss", "inputs"), list(cases()))
def test_what_does_not_fit_is_a_typed_error(loss, inputs):
    with pytest.raises(rf.RaggedError) as caught:
        loss(**inputs)
    assert caught.value.remedy


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.uint64])
def test_counts_of_any_integer_type(dtype):
    for loss in (forward_kl, reverse_kl):
        for tail in ("bucket", "renormalize"):
            want = loss(**KL | {"teacher_log_probs": HEAD - 0.1}, tail=tail)
            narrow = KL | {"teacher_log_probs": HEAD - 0.1, "head_counts": COUNTS.to(dtype)}
            torch.testing.assert_close(loss(**narrow, tail=tail), want)
    narrow = CENTRE | {"head_counts": COUNTS.to(dtype)}
    torch.testing.assert_close(score_centering_loss(**narrow), score_centering_loss(**CENTRE))


def test_one_advantage_for_all_and_no_targets():
    one = clipped_policy_loss(**CLIP | {"advantages": tensor(2.0)})
    torch.testing.assert_close(
        one, clipped_policy_loss(**CLIP | {"advantages": torch.full((3,), 2.0)})
    )
    none = {name: value[:0] for name, value in CLIP.items()}
    assert clipped_policy_loss(**none).shape == (0,)


def test_the_samplers_log_probs_get_no_gradient():
    sampler = THEIRS.clone().requires_grad_()
    ours = OURS.clone().requires_grad_()
    losses = (
        clipped_policy_loss(**CLIP | {"old_log_probs": sampler, "log_probs": ours}),
        score_centering_loss(**CENTRE | {"rollout_log_probs": sampler, "log_probs": ours}),
    )
    for loss in losses:
        ours_grad, sampler_grad = torch.autograd.grad(
            loss.sum(), (ours, sampler), allow_unused=True
        )
        assert ours_grad is not None
        assert sampler_grad is None
