"""The head given what cannot be: a typed error, where numbers would be wrong without a word."""

import math

import pytest
import torch
from torch import tensor

import ragged_format as rf
from ragged_format.torch import head_log_probs, support_log_probs

V, H = 23, 5
NAN, INF = math.nan, math.inf


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(7, H, dtype=dtype, generator=generator),
        "weight": torch.randn(V, H, dtype=dtype, generator=generator),
        "pred_index": torch.arange(4), "target_ids": tensor([0, 4, 0, 0]),
        "candidate_ids": tensor([0, 2, 0, 2, 4, 0]), "candidate_counts": tensor([2, 0, 3, 1]),
    }  # fmt: skip


HEADS = {"head_ids": tensor([0, 2, 4]), "head_counts": tensor([1, 1, 1, 0])}


@pytest.mark.parametrize(
    "temperature",
    [
        INF, 1e-320, tensor(NAN), tensor([1.0, 0.0, 1.0, 1.0]), tensor([1.0, -1.0, 1.0, 1.0]),
        tensor([1.0, NAN, 1.0, 1.0]), tensor([1.0, INF, 1.0, 1.0]), torch.ones(4, 1),
        torch.ones(4, dtype=torch.complex64), torch.ones(4, dtype=torch.bool),
        torch.ones(4, requires_grad=True), torch.ones((), requires_grad=True),
    ],
)  # fmt: skip
def test_temperatures_that_are_none(temperature):
    with pytest.raises(rf.RaggedError) as caught:
        support_log_probs(**inputs(), temperature=temperature)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "change",
    [
        {"logit_scale": NAN}, {"logit_scale": INF}, {"soft_cap": 0.0}, {"soft_cap": -1.0},
        {"soft_cap": NAN}, {"soft_cap": INF}, {"bias": torch.ones(V, dtype=torch.int64)},
        {"bias": torch.ones(V, dtype=torch.complex64)}, {"bias": torch.ones(V, device="meta")},
        {"weight": torch.ones(V, H, dtype=torch.float64, device="meta")},
        {"weight": torch.ones(V, H, dtype=torch.float64).to_sparse()},
        {"pred_index": tensor([True, False, True, False])},
        {"target_ids": torch.zeros(4, dtype=torch.complex64)},
        {"candidate_counts": tensor([True] * 4), "candidate_ids": torch.zeros(4).long()},
        {"host_counts": [0, 2, 3, 1]}, {"group": "x"}, {"out_dtype": torch.int64},
        {"out_dtype": torch.complex64},
    ],
)  # fmt: skip
def test_inputs_of_the_wrong_kind(change):
    with pytest.raises(rf.RaggedError) as caught:
        support_log_probs(**inputs() | change)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "change",
    [
        {"head_ids": tensor([0.5, 2, 4])}, {"head_ids": tensor([[0, 2, 4]])},
        {"head_counts": tensor([1.0, 1, 1, 0])}, {"host_head_counts": [0, 1, 1, 1]},
    ],
)  # fmt: skip
def test_heads_of_the_wrong_kind(change):
    with pytest.raises(rf.RaggedError) as caught:
        head_log_probs(**inputs() | HEADS | change)
    assert caught.value.remedy


@pytest.mark.parametrize("ids", [[0, 2, 0, 2, 2, 0], [0, 2, 2, 0, 2, 0], [0, 2, 0, 4, 4, 0]])
def test_an_id_that_is_twice_in_a_set_is_named(ids):
    with pytest.raises(rf.InvariantError, match="RF-I012") as caught:
        support_log_probs(**inputs() | {"candidate_ids": tensor(ids)})
    assert "of target 2" in str(caught.value) or caught.value.where.position == 2


def test_sets_need_no_order():
    shuffled = inputs() | {"candidate_ids": tensor([2, 0, 4, 0, 2, 0])}
    for got, want in zip(support_log_probs(**shuffled), support_log_probs(**inputs()), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kernel", ["sparse", "gather"])
@pytest.mark.parametrize("over", ["support", "vocabulary"])
def test_a_bias_of_minus_infinity_takes_an_id_out(kernel, over):
    """A padded vocabulary is often masked so; the rest is that of a smaller vocabulary."""
    masked = torch.zeros(V, dtype=torch.float64)
    masked[2] = masked[20:] = -INF
    case = inputs()
    got = scored(case | {"bias": masked}, over, kernel)
    kept = [n for n in range(20) if n != 2]
    place = {old: new for new, old in enumerate(kept)}
    smaller = case | {
        "weight": case["weight"][kept], "bias": masked[kept],
        "target_ids": tensor([place[n] for n in case["target_ids"].tolist()]),
        "candidate_ids": tensor([place[n] for n in [0, 0, 4, 0]]),
        "candidate_counts": tensor([1, 0, 2, 1]),
    }  # fmt: skip
    want = scored(smaller, over, kernel)
    torch.testing.assert_close(got[:3], want[:3])
    torch.testing.assert_close(got[3][kept], want[3])
    assert got[3].isfinite().all()


def scored(case, over, kernel):
    """Log-probs, entropies and the gradients of hidden and weight."""
    case = case | {name: case[name].clone().requires_grad_() for name in ("hidden", "weight")}
    log_probs, entropy = support_log_probs(**case, entropy_over=over, kernel=kernel)
    loss = log_probs.sum() + entropy.square().sum()
    return log_probs, entropy, *torch.autograd.grad(loss, (case["hidden"], case["weight"]))


@pytest.mark.parametrize("call", [support_log_probs, head_log_probs])
def test_a_second_derivative_is_refused(call):
    case = inputs() | ({} if call is support_log_probs else HEADS)
    case["hidden"].requires_grad_()
    loss = call(**case)[1].sum()
    with pytest.raises(rf.UnsupportedFeatureError, match="gradient"):
        torch.autograd.grad(loss, case["hidden"], create_graph=True)


@pytest.mark.parametrize("name", ["candidate_ids", "candidate_counts", "target_ids", "pred_index"])
@pytest.mark.parametrize("call", [support_log_probs, head_log_probs])
def test_sets_that_change_before_the_backward_pass_are_an_error(call, name):
    case = inputs() | ({} if call is support_log_probs else HEADS)
    case["hidden"].requires_grad_()
    loss = call(**case)[0].sum()
    case[name].add_(1)
    with pytest.raises(rf.UnsupportedFeatureError, match="between forward and backward"):
        loss.backward()


def test_sets_of_inference_mode_can_be_trained_on():
    with torch.inference_mode():
        sets = {
            name: value.clone() for name, value in inputs().items() if not value.is_floating_point()
        }
    case = inputs() | sets
    case["hidden"].requires_grad_()
    support_log_probs(**case)[0].sum().backward()
    assert case["hidden"].grad.isfinite().all()


@pytest.mark.filterwarnings("default")
def test_inside_a_compiled_function_the_head_runs_as_it_is():
    case = inputs()
    leaves = [case[name].requires_grad_() for name in ("hidden", "weight")]

    def loss(hidden, weight):
        log_probs, entropy = support_log_probs(**case | {"hidden": hidden, "weight": weight})
        return (2 * log_probs - entropy).sum()

    want = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves), leaves), want)
