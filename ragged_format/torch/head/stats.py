"""Statistics of logits over sets of ids, in chunks: the arithmetic under the head.

For target j with hidden row h, set S and label y: the log-sum-exp of z over S, the logit of y, and
(for the entropy) the sum of p z. Two ways compute the same numbers: *flat*, over the candidates end
to end, and *dense*, over chunks of the vocabulary. Both are run again in the backward pass instead
of keeping logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragged_format.torch.head.dense import add_dense, backward_dense
from ragged_format.torch.head.flat import add_flat, backward_flat
from ragged_format.torch.head.problem import Gradients, Problem, Stats, Sums

__all__ = ["backward", "empty_gradients", "forward"]


def forward(problem: Problem) -> Stats:
    """Return the statistics of every target, shards of the vocabulary combined."""
    sums = Sums(len(problem.labels), problem.hidden, problem.dtype)
    add_flat(problem, sums)
    add_dense(problem, sums)
    if problem.group is not None:
        sums.reduce(problem.group)
    return sums.stats()


def backward(
    problem: Problem,
    stats: Stats,
    grad_label: Tensor,
    grad_log_sum: Tensor,
    grad_entropy: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> Gradients:
    """Return the gradients of hidden, weight and bias.

    With p = softmax(z) over the set, H its entropy and y the label: d z_y / d z_k = [k = y],
    d logsumexp(z) / d z_k = p_k and d H / d z_k = -p_k (log p_k + H).
    """
    out = empty_gradients(problem, needs)
    upstream = grad_label, grad_log_sum, grad_entropy
    backward_flat(problem, stats, *upstream, out)
    backward_dense(problem, stats, *upstream, out)
    return out


def empty_gradients(problem: Problem, needs: tuple[bool, bool, bool]) -> Gradients:
    """Return zeros to add the gradients of hidden, weight and bias to, where they are needed."""
    want_hidden, want_weight, want_bias = needs
    return Gradients(
        torch.zeros_like(problem.hidden, dtype=problem.dtype) if want_hidden else None,
        torch.zeros_like(problem.weight, dtype=problem.dtype) if want_weight else None,
        torch.zeros(len(problem.weight), dtype=problem.dtype, device=problem.weight.device)
        if want_bias else None,
    )  # fmt: skip
