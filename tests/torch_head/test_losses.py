"""Losses on heads against the same formulas over the whole vocabulary, target by target."""

import math

import numpy as np
import pytest
import torch

import ragged_format as rf
from ragged_format.schema import LOG_PROB_FILL
from ragged_format.torch import head_log_probs
from ragged_format.torch.losses import forward_kl, reverse_kl, score_centering_loss

V, H, N, M = 17, 4, 6, 8
F64 = torch.float64


def model(seed):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, dtype=F64, generator=generator, requires_grad=True)
    weight = torch.randn(V, H, dtype=F64, generator=generator, requires_grad=True)
    return hidden, weight


def rows(seed, sizes):
    rng = np.random.default_rng(seed)
    counts = rng.choice(sizes, M)
    return [np.sort(rng.choice(V, size, replace=False)) for size in counts], rng


def flat(lists):
    ids = torch.tensor(np.concatenate([*lists, np.zeros(0, np.int64)]).astype(np.int64))
    return ids, torch.tensor([len(row) for row in lists])


@pytest.mark.parametrize("seed", range(4))
def test_head_log_probs_are_those_of_the_set(seed):
    sets, rng = rows(seed, (0, 3, 9))
    labels = [rng.choice(s) if len(s) else rng.integers(V) for s in sets]
    heads, _ = rows(seed + 50, (0, 1, 4))
    hidden, weight = model(seed)
    index = torch.tensor(rng.integers(0, N, M))
    log_probs, head = head_log_probs(
        hidden, weight, index, torch.tensor(np.array(labels)), *flat(sets), *flat(heads), 0.7
    )
    expected, expected_head = [], []
    for j, (members, label) in enumerate(zip(sets, labels, strict=True)):
        logits = hidden[index[j]] @ weight.T / 0.7
        allowed = members if len(members) else np.arange(V)
        log_sum = torch.logsumexp(logits[allowed], 0)
        expected.append(logits[label] - log_sum)
        expected_head += [
            logits[v] - log_sum if v in allowed else torch.tensor(LOG_PROB_FILL, dtype=F64)
            for v in heads[j]
        ]
    torch.testing.assert_close(log_probs, torch.stack(expected))
    torch.testing.assert_close(head, torch.stack(expected_head))
    upstream = torch.randn(len(head), dtype=F64, generator=torch.Generator().manual_seed(seed))
    mine = torch.autograd.grad((head * upstream).sum() + log_probs.sum(), (hidden, weight))
    total = (torch.stack(expected_head) * upstream).sum() + torch.stack(expected).sum()
    torch.testing.assert_close(mine, torch.autograd.grad(total, (hidden, weight)))


@pytest.mark.parametrize("stray", [-1, V])
def test_a_head_id_that_the_weight_lacks_is_an_error(stray):
    hidden, weight = model(0)
    one = torch.tensor([1])
    with pytest.raises(rf.InvariantError, match="RF-I014"):
        head_log_probs(
            hidden, weight, one, one, one[:0], one * 0, torch.tensor([2, stray]), one * 2
        )


def weight_of(kind, ratio):
    if kind == "none":
        return 1.0
    if kind == "tis":
        return min(ratio, 2.0)
    return ratio if 0.5 <= ratio <= 5 else 0.0


@pytest.mark.parametrize("kind", ["none", "tis", "mis"])
@pytest.mark.parametrize("tail", ["proportional", "none"])
def test_score_centering_is_its_formula(kind, tail):
    heads, rng = rows(7, (0, 2, 5))
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(M, V, dtype=F64, generator=generator, requires_grad=True)
    sampler = torch.log_softmax(torch.randn(M, V, dtype=F64, generator=generator), 1)
    labels = torch.tensor(rng.integers(0, V, M))
    advantages = torch.randn(M, dtype=F64, generator=generator)
    ids, counts = flat(heads)
    owner = torch.repeat_interleave(counts)
    log_p = torch.log_softmax(logits, 1)
    row = torch.arange(M)
    loss = score_centering_loss(
        log_p[row, labels], sampler[row, labels], advantages, log_p[owner, ids],
        sampler[owner, ids], counts, kind, tail=tail,
    )  # fmt: skip
    expected = []
    for j, members in enumerate(heads):
        p, q = log_p[j].detach().exp(), sampler[j].exp()
        rest_q = max(1 - sum(q[v].item() for v in members), 1e-6)
        rest_p = max(1 - sum(p[v].item() for v in members), 1e-6)
        rho = rest_q / rest_p
        alpha = rho * weight_of(kind, 1 / rho) if tail == "proportional" else 0.0
        y = labels[j]
        term = weight_of(kind, (p[y] / q[y]).item()) * log_p[j, y]
        for v in members:
            factor = q[v] * weight_of(kind, (p[v] / q[v]).item()) - alpha * p[v]
            term = term - factor * log_p[j, v]
        expected.append(-advantages[j] * term)
    torch.testing.assert_close(loss, torch.stack(expected))
    mine = torch.autograd.grad(loss.sum(), logits, retain_graph=True)
    torch.testing.assert_close(mine, torch.autograd.grad(torch.stack(expected).sum(), logits))


def test_score_centering_has_no_gradient_on_policy():
    """With sampler = trainer the expected gradient of the loss over sampled tokens vanishes."""
    logits = torch.randn(1, V, dtype=F64, generator=torch.Generator().manual_seed(1))
    logits.requires_grad_()
    log_p = torch.log_softmax(logits, 1)
    ids, counts = torch.arange(5), torch.tensor([5])
    total = sum(
        log_p[0, y].detach().exp()
        * score_centering_loss(
            log_p[:, y], log_p[:, y].detach(), torch.ones(1, dtype=F64), log_p[0, ids],
            log_p[0, ids].detach(), counts,
        ).sum()
        for y in range(V)
    )  # fmt: skip
    assert torch.autograd.grad(total, logits)[0].abs().max() < 1e-12


@pytest.mark.parametrize("loss", [forward_kl, reverse_kl])
@pytest.mark.parametrize("tail", ["bucket", "renormalize"])
def test_kl_is_its_formula(loss, tail):
    heads, _ = rows(3, (0, 1, 4, V))
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(M, V, dtype=F64, generator=generator, requires_grad=True)
    teacher = torch.log_softmax(torch.randn(M, V, dtype=F64, generator=generator), 1)
    ids, counts = flat(heads)
    owner = torch.repeat_interleave(counts)
    student = torch.log_softmax(logits, 1)
    got = loss(student[owner, ids], teacher[owner, ids], counts, tail=tail)
    expected = []
    for j, members in enumerate(heads):
        if not len(members):
            expected.append(student.new_zeros(()))
            continue
        p, q = student[j, members].exp(), teacher[j, members].exp()
        if tail == "bucket":
            p = torch.cat([p, (1 - p.sum()).clamp(min=1e-6)[None]])
            q = torch.cat([q, (1 - q.sum()).clamp(min=1e-6)[None]])
        else:
            p, q = p / p.sum(), q / q.sum()
        a, b = (q, p) if loss is forward_kl else (p, q)
        expected.append((a * (a.log() - b.log())).sum())
    torch.testing.assert_close(got, torch.stack(expected))
    mine = torch.autograd.grad(got.sum(), logits, retain_graph=True)
    torch.testing.assert_close(mine, torch.autograd.grad(torch.stack(expected).sum(), logits))


def test_gradients_are_finite_with_the_fill_of_log_probs():
    """huggingface/trl#5594: padding with -inf gave a finite loss and NaN gradients."""
    student = torch.tensor([-0.1, LOG_PROB_FILL], requires_grad=True)
    teacher = torch.tensor([LOG_PROB_FILL, -0.2])
    counts = torch.tensor([2])
    for loss in (forward_kl, reverse_kl):
        for tail in ("bucket", "renormalize"):
            value = loss(student, teacher, counts, tail=tail)
            (grad,) = torch.autograd.grad(value.sum(), student)
            assert math.isfinite(value.item())
            assert torch.isfinite(grad).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda: forward_kl(torch.zeros(2), torch.zeros(3), torch.tensor([2])),
        lambda: forward_kl(torch.zeros(2), torch.zeros(2), torch.tensor([3])),
        lambda: forward_kl(torch.zeros(2), torch.zeros(2), torch.tensor([2]), tail="x"),
        lambda: score_centering_loss(*[torch.zeros(1)] * 5, torch.tensor([1]), "x"),
        lambda: score_centering_loss(*[torch.zeros(1)] * 5, torch.tensor([1]), tail="x"),
    ],
)
def test_wrong_inputs_are_typed_errors(call):
    with pytest.raises(rf.RaggedError):
        call()
