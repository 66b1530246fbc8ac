"""The head over candidate sets against a target-by-target computation of the same formulas."""

import numpy as np
import pytest
import torch

import ragged_format as rf
from ragged_format.torch import support_log_probs


def one_by_one(hidden, weight, index, labels, ids, counts, temperature, over, bias, scale, cap):
    log_probs, entropies, start = [], [], 0
    for j, label in enumerate(labels.tolist()):
        logits = hidden[index[j]] @ weight.T
        logits = logits if bias is None else logits + bias
        logits = logits * scale
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        logits = logits / (temperature[j] if isinstance(temperature, torch.Tensor) else temperature)
        size = int(counts[j])
        members = ids[start : start + size] if size else torch.arange(len(weight))
        start += size
        log_probs.append(logits[label] - torch.logsumexp(logits[members], 0))
        log_p = torch.log_softmax(logits[members] if over == "support" else logits, 0)
        entropies.append(-(log_p.exp() * log_p).sum())
    return torch.stack(log_probs), torch.stack(entropies)


def case(seed, sizes=(0, 1, 2, 3, 8, 23), targets=9, vocabulary=23, width=5):
    rng = np.random.default_rng(seed)
    counts = rng.choice(sizes, targets)
    sets = [np.sort(rng.choice(vocabulary, size, replace=False)) for size in counts]
    labels = [rng.choice(s) if len(s) else rng.integers(vocabulary) for s in sets]
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(7, width, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(
        vocabulary, width, dtype=torch.float64, generator=generator, requires_grad=True
    )
    index = torch.tensor(rng.integers(0, 7, targets))
    ids = torch.tensor(np.concatenate([*sets, np.zeros(0, np.int64)]))
    return hidden, weight, index, torch.tensor(np.array(labels)), ids, torch.tensor(counts)


@pytest.mark.parametrize("over", ["support", "vocabulary"])
@pytest.mark.parametrize("chunk", [5, 25, 60, 1 << 20])
@pytest.mark.parametrize("seed", range(4))
def test_values_and_gradients_are_those_of_each_target_alone(seed, chunk, over):
    inputs = case(seed)
    hidden, weight = inputs[:2]
    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn(len(weight), dtype=torch.float64, generator=generator, requires_grad=True)
    options = [(1.3, None, 1.0, None), (torch.rand(9, dtype=torch.float64) + 0.5, bias, 0.7, 3.0)]
    for temperature, bias_used, scale, cap in options:
        got = support_log_probs(
            *inputs, temperature, over, bias=bias_used, logit_scale=scale, soft_cap=cap,
            chunk_elements=chunk,
        )  # fmt: skip
        want = one_by_one(*inputs, temperature, over, bias_used, scale, cap)
        upstream = torch.randn(2, 9, dtype=torch.float64, generator=generator)
        leaves = [hidden, weight] + ([] if bias_used is None else [bias])
        grads = [
            torch.autograd.grad((upstream[0] * lp + upstream[1] * ent).sum(), leaves)
            for lp, ent in (got, want)
        ]
        for mine, other in zip([*got, *grads[0]], [*want, *grads[1]], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


def test_gradcheck():
    hidden, weight, *rest = case(3)
    for chunk in (10, 1 << 20):
        assert torch.autograd.gradcheck(
            lambda h, w, chunk=chunk: support_log_probs(h, w, *rest, chunk_elements=chunk),
            (hidden, weight),
        )


def test_a_singleton_set_has_log_prob_and_gradient_zero():
    hidden, weight, index, labels, _, _ = case(0)
    log_probs, entropy = support_log_probs(
        hidden, weight, index, labels, labels.clone(), torch.ones(9, dtype=torch.int64)
    )
    log_probs.sum().backward()
    assert log_probs.abs().max() == 0
    assert entropy.abs().max() < 1e-12
    assert hidden.grad.abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_results_keep_the_dtype_unless_told_otherwise(dtype):
    hidden, weight, *rest = case(1)
    log_probs, entropy = support_log_probs(hidden.to(dtype), weight.to(dtype), *rest)
    assert log_probs.dtype == entropy.dtype == dtype
    log_probs, _ = support_log_probs(
        hidden.to(dtype), weight.to(dtype), *rest, out_dtype=torch.float32
    )
    assert log_probs.dtype == torch.float32


def test_autocast_does_not_round_the_logits():
    hidden, weight, *rest = case(4)
    leaves = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    plain, _ = support_log_probs(*leaves, *rest)
    with torch.autocast("cpu", torch.bfloat16):
        within, _ = support_log_probs(*leaves, *rest)
        grads = torch.autograd.grad(within.sum(), leaves)
    assert torch.equal(within, plain)
    assert all(map(torch.equal, grads, torch.autograd.grad(plain.sum(), leaves)))


@pytest.mark.parametrize("chunk", [5, 1 << 20])
def test_a_label_outside_its_set_is_an_error_or_flagged_never_rescored(chunk):
    hidden, weight, index, labels, ids, counts = case(2, sizes=(3, 8))
    ids = torch.where(ids == labels.repeat_interleave(counts)[0], ids, ids)
    first = ids[: counts[0]]
    labels = labels.clone()
    labels[0] = next(i for i in range(23) if i not in first.tolist())
    inputs = (hidden, weight, index, labels, ids, counts)
    with pytest.raises(rf.InvariantError) as caught:
        support_log_probs(*inputs, chunk_elements=chunk)
    assert caught.value.code == "RF-I013"
    assert caught.value.where.position == 0
    log_probs, _ = support_log_probs(*inputs, on_outside="flag", chunk_elements=chunk)
    assert log_probs[0] == -torch.inf
    assert torch.isfinite(log_probs[1:]).all()
    log_probs[0].backward()
    assert hidden.grad.abs().max() == 0


@pytest.mark.parametrize("stray", [-1, 7])
def test_a_position_without_hidden_states_is_an_error(stray):
    hidden, weight, index, labels, ids, counts = case(6, sizes=(3, 8))
    index[4] = stray
    with pytest.raises(rf.InvariantError, match="RF-I034") as caught:
        support_log_probs(hidden, weight, index, labels, ids, counts)
    assert (caught.value.where.position, caught.value.got) == (4, stray)


@pytest.mark.parametrize("stray", [-1, 23, 10_000])
def test_an_id_that_the_weight_lacks_is_an_error(stray):
    hidden, weight, index, labels, ids, counts = case(6, sizes=(3, 8))
    other = next(i for i, token in enumerate(ids.tolist()) if token != labels[0])
    ids[other] = stray
    for choice in ("error", "flag"):
        with pytest.raises(rf.InvariantError, match="RF-I011") as caught:
            support_log_probs(hidden, weight, index, labels, ids, counts, on_outside=choice)
        assert caught.value.where.position == other


def test_no_targets():
    hidden, weight, *_ = case(0)
    none = torch.zeros(0, dtype=torch.int64)
    log_probs, entropy = support_log_probs(hidden, weight, none, none, none, none)
    assert log_probs.shape == entropy.shape == (0,)
    (log_probs.sum() + entropy.sum()).backward()
    assert hidden.grad.abs().max() == 0


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"candidate_counts": torch.ones(9, dtype=torch.int64)}, rf.InvariantError),
        ({"target_ids": torch.ones(8, dtype=torch.int64)}, rf.SchemaMismatchError),
        ({"weight": torch.ones(23, 4, dtype=torch.float64)}, rf.SchemaMismatchError),
        ({"weight": torch.ones(23, 5)}, rf.SchemaMismatchError),
        ({"temperature": 0.0}, rf.LimitExceededError),
        ({"temperature": torch.ones(3)}, rf.SchemaMismatchError),
        ({"entropy_over": "nothing"}, rf.LimitExceededError),
        ({"on_outside": "nothing"}, rf.LimitExceededError),
        ({"kernel": "nothing"}, rf.LimitExceededError),
        ({"bias": torch.ones(4)}, rf.SchemaMismatchError),
        ({"candidate_ids": torch.ones(3)}, rf.SchemaMismatchError),
    ],
)
def test_inputs_that_do_not_fit_are_typed_errors(change, error):
    names = ("hidden", "weight", "pred_index", "target_ids", "candidate_ids", "candidate_counts")
    inputs = dict(zip(names, case(5, sizes=(3, 8)), strict=True)) | change
    with pytest.raises(error):
        support_log_probs(**inputs)
