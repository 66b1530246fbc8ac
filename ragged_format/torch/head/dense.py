"""The dense way: vocabulary chunks with an online log-sum-exp, for full and very wide sets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ragged_format.torch.head.problem import Gradients, Picker, Problem, Stats, Sums, finite

__all__ = ["add_dense", "backward_dense"]


def add_dense(problem: Problem, sums: Sums) -> None:
    """Add the dense targets to the sums."""
    for dense in _dense_chunks(problem):
        for part in dense.parts:
            logits, allowed, _ = _dense_logits(problem, dense, part)
            _add_dense(sums, problem, dense, part, logits, allowed)


def backward_dense(
    problem: Problem,
    stats: Stats,
    grad_label: Tensor,
    grad_log_sum: Tensor,
    grad_entropy: Tensor | None,
    out: Gradients,
) -> None:
    """Add the gradients of the dense targets to `out`."""
    entropy = stats.log_sum - stats.mean_logit
    for dense in _dense_chunks(problem):
        picked = dense.targets
        for part in dense.parts:
            logits, allowed, hidden = _dense_logits(problem, dense, part)
            log_p = logits - stats.log_sum[picked, None]
            p = log_p.exp()
            grad = grad_log_sum[picked, None] * p
            if grad_entropy is not None:
                slope = torch.where(
                    allowed, problem.transform.held(log_p) + entropy[picked, None], 0
                )
                grad -= grad_entropy[picked, None] * p * slope
            column, inside = _label_column(problem, picked, part)
            grad[torch.arange(len(picked), device=grad.device), column] += torch.where(
                inside & (stats.hits[picked] > 0), grad_label[picked], 0
            )
            scale = problem.transform.inverse_temperature[picked, None]
            logits = torch.where(allowed, logits, 0)
            grad = torch.where(allowed, problem.transform.chain(grad, logits, scale), 0)
            _accumulate_dense(out, problem, dense, part, grad, hidden)


class _Dense(NamedTuple):
    """A chunk of the dense way: targets, the parts of the vocabulary, candidates of wide sets."""

    targets: Tensor
    parts: list[tuple[int, int]]
    unrestricted: Tensor
    owner: Tensor
    ids: Tensor


def _dense_chunks(problem: Problem) -> Iterator[_Dense]:
    chosen = problem.dense_targets()
    picker = Picker(problem)
    size = len(problem.weight)
    # The logits stay within the bound, and up to 4,096 wide so do the rows of the weight. Taller
    # chunks read the weight less often.
    width = max(512, problem.hidden.shape[1])
    columns = max(1, min(size, max(1024, problem.chunk_elements // width)))
    height = max(1, problem.chunk_elements // columns)
    parts = [(start, min(start + columns, size)) for start in range(0, size, columns)]
    for first in range(0, len(chosen), height):
        picked = picker.pick(chosen[first : first + height])
        yield _Dense(
            picked.targets, parts, picked.counts == 0, picked.owner,
            picked.ids - problem.vocab_start,
        )  # fmt: skip


def _dense_logits(
    problem: Problem, dense: _Dense, part: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    start, stop = part
    hidden = problem.hidden[problem.pred_index[dense.targets]]
    dots = (hidden @ problem.weight[start:stop].T).to(problem.dtype)
    transform = problem.transform
    bias = None if transform.bias is None else transform.bias[start:stop].to(problem.dtype)
    logits = transform.logits(dots, bias, transform.inverse_temperature[dense.targets, None])
    allowed = dense.unrestricted[:, None].expand(-1, stop - start)
    if len(dense.ids):
        # One slot more takes the candidates of other parts: no shape depends on their number.
        table = torch.zeros(
            len(dense.targets), stop - start + 1, dtype=torch.bool, device=logits.device
        )
        inside = (dense.ids >= start) & (dense.ids < stop)
        table[dense.owner, torch.where(inside, dense.ids - start, stop - start)] = True
        allowed = allowed | table[:, :-1]
    return torch.where(allowed, logits, -torch.inf), allowed, hidden.to(problem.dtype)


def _label_column(
    problem: Problem, targets: Tensor, part: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return the column of each label in a part of the vocabulary, and whether it is there."""
    start, stop = part
    column = problem.labels[targets] - problem.vocab_start - start
    inside = (column >= 0) & (column < stop - start)
    return column.clamp(0, stop - start - 1), inside


def _add_dense(
    sums: Sums, problem: Problem, dense: _Dense, part: tuple[int, int], logits: Tensor,
    allowed: Tensor,
) -> None:  # fmt: skip
    targets = dense.targets
    old = sums.top[targets]
    top = torch.maximum(old, logits.amax(1))
    shrink = torch.exp(old - finite(top))
    p = torch.exp(logits - finite(top)[:, None])
    sums.top[targets] = top
    sums.mass[targets] = sums.mass[targets] * shrink + p.sum(1)
    held = torch.where(allowed, logits, 0)
    weighted = p * problem.transform.held(held)
    sums.weighted[targets] = sums.weighted[targets] * shrink + weighted.sum(1)
    column, inside = _label_column(problem, targets, part)
    row = torch.arange(len(targets), device=column.device)
    hit = inside & allowed[row, column]
    sums.label[targets] += torch.where(hit, held[row, column], 0)
    sums.hits[targets] += hit


def _accumulate_dense(
    out: Gradients, problem: Problem, dense: _Dense, part: tuple[int, int], grad: Tensor,
    hidden: Tensor,
) -> None:  # fmt: skip
    start, stop = part
    if out.hidden is not None:
        rows = problem.weight[start:stop].to(problem.dtype)
        out.hidden.index_add_(0, problem.pred_index[dense.targets], grad @ rows)
    if out.weight is not None:
        # In place: what a product of its own would take is no chunk, but a part of the weight.
        out.weight[start:stop].addmm_(grad.T, hidden)
    if out.bias is not None:
        out.bias[start:stop] += grad.sum(0)
