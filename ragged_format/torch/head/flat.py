"""The flat way: logits of the candidates end to end, with no table at all.

Kernels that compute the same numbers: *sparse*, on CPUs, where the dot products of a chunk are one
sampled matrix product and gradients are weighted sums of rows (bags), so that rows are never
gathered into memory; *gather*, on accelerators and for half precision, where rows of the weight are
gathered in chunks; and *triton*, on request.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from ragged_format.torch.head.problem import Gradients, Picker, Problem, Stats, Sums, finite

__all__ = ["add_flat", "backward_flat", "backward_logits", "candidate_logits"]

# Entries of a sparse chunk in temporaries of the bound: about ten of them live at a time.
_TEMPORARIES = 8

with warnings.catch_warnings():
    # torch warns once per process that its CSR tensors are young; users cannot act on it.
    warnings.simplefilter("ignore")
    torch.sparse_csr_tensor(
        torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), torch.zeros(0),
        size=(0, 1), check_invariants=False,
    )  # fmt: skip


class _Flat(NamedTuple):
    """A chunk: all candidates of some of the flat targets.

    Attributes
    ----------
    targets : (m,) int64
    positions : (m,) int64
        Rows of `hidden`.
    counts : (m,) int64
    owner : (t,) int64
        Which of the m targets a candidate belongs to.
    rows : (t,) int64
        Rows of the weight; 0 where another shard has the id.
    is_local, is_label : (t,) bool
    """

    targets: Tensor
    positions: Tensor
    counts: Tensor
    owner: Tensor
    rows: Tensor
    is_local: Tensor
    is_label: Tensor


def add_flat(problem: Problem, sums: Sums) -> None:
    """Add the flat targets to the sums."""
    for flat in _chunks(problem, problem.flat_targets()):
        logits = _logits(problem, flat)
        masked = torch.where(flat.is_local, logits, -torch.inf)
        top = torch.segment_reduce(masked, "max", lengths=flat.counts, unsafe=True)
        p = torch.exp(masked - finite(top)[flat.owner])
        hit = flat.is_label & flat.is_local
        columns = torch.stack(
            [
                p,
                p * problem.transform.held(logits),
                torch.where(hit, logits, 0),
                hit.to(logits.dtype),
            ],
            dim=1,
        )
        totals = torch.segment_reduce(columns, "sum", lengths=flat.counts, unsafe=True)
        targets = flat.targets
        sums.top[targets] = top
        sums.mass[targets], sums.weighted[targets] = totals[:, 0], totals[:, 1]
        sums.label[targets], sums.hits[targets] = totals[:, 2], totals[:, 3]


def backward_flat(
    problem: Problem,
    stats: Stats,
    grad_label: Tensor,
    grad_log_sum: Tensor,
    grad_entropy: Tensor | None,
    out: Gradients,
) -> None:
    """Add the gradients of the flat targets to `out`."""
    for flat in _chunks(problem, problem.flat_targets()):
        logits = _logits(problem, flat)
        per_target = flat.targets, flat.owner
        log_p = logits - _spread(stats.log_sum, *per_target)
        p = log_p.exp()
        grad = _spread(grad_log_sum, *per_target) * p
        grad += torch.where(flat.is_label, _spread(grad_label, *per_target), 0)
        if grad_entropy is not None:
            slope = problem.transform.held(log_p) + _spread(
                stats.log_sum - stats.mean_logit, *per_target
            )
            grad -= _spread(grad_entropy, *per_target) * p * slope
        grad = torch.where(flat.is_local, grad, 0)
        _add_gradients(problem, flat, logits, grad, out)


def candidate_logits(problem: Problem) -> Tensor:
    """Return the logit of every id, (t,); 0 where another shard has it."""
    out = torch.zeros(len(problem.ids), dtype=problem.dtype, device=problem.hidden.device)
    first = 0
    for flat in _chunks(problem, np.flatnonzero(problem.host_counts)):
        last = first + len(flat.rows)
        out[first:last] = _logits(problem, flat).where(flat.is_local, 0)
        first = last
    return out


def backward_logits(problem: Problem, logits: Tensor, grad: Tensor, out: Gradients) -> None:
    """Add the gradients that follow from those of :func:`candidate_logits` to `out`."""
    first = 0
    for flat in _chunks(problem, np.flatnonzero(problem.host_counts)):
        last = first + len(flat.rows)
        part = grad[first:last].where(flat.is_local, 0)
        _add_gradients(problem, flat, logits[first:last], part, out)
        first = last


def _add_gradients(
    problem: Problem, flat: _Flat, logits: Tensor, grad: Tensor, out: Gradients
) -> None:
    scale = _spread(problem.transform.inverse_temperature, flat.targets, flat.owner)
    grad = problem.transform.chain(grad, logits, scale).where(flat.is_local, 0)
    if out.hidden is not None:
        _add_hidden(problem, flat, grad, out.hidden)
    if out.weight is not None:
        _add_weight(problem, flat, grad, out.weight)
    if out.bias is not None:
        out.bias.index_add_(0, flat.rows, grad)


def _chunks(problem: Problem, chosen: npt.NDArray[np.int64]) -> Iterator[_Flat]:
    ends = np.cumsum(problem.host_counts[chosen])
    picker = Picker(problem)
    first = 0
    size = len(problem.weight)
    if not size:  # a shard without ids
        return
    most_targets, most = len(chosen), problem.rows_per_chunk
    if problem.kernel != "gather":
        # Candidates are numbers only; sparse gathers rows of hidden states, one per target.
        most = max(1, problem.chunk_elements // _TEMPORARIES)
    if problem.kernel == "sparse":
        most_targets = problem.rows_per_chunk
    while first < len(chosen):
        done = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, done + most, side="right"))
        last = min(max(last, first + 1), first + most_targets)
        targets, counts, owner, ids = picker.pick(chosen[first:last])
        local = ids - problem.vocab_start
        is_local = (local >= 0) & (local < size)
        yield _Flat(
            targets, problem.pred_index[targets], counts, owner, local.clamp(0, size - 1),
            is_local, ids == problem.labels[targets][owner],
        )  # fmt: skip
        first = last


def _spread(per_target: Tensor, targets: Tensor, owner: Tensor) -> Tensor:
    """Repeat a value of each target for its candidates."""
    return per_target[targets][owner]


def _logits(problem: Problem, flat: _Flat) -> Tensor:
    dots = _DOTS[problem.kernel](problem, flat)
    transform = problem.transform
    bias = None if transform.bias is None else transform.bias[flat.rows].to(problem.dtype)
    scale = _spread(transform.inverse_temperature, flat.targets, flat.owner)
    return transform.logits(dots, bias, scale)


def _gathered_dots(problem: Problem, flat: _Flat) -> Tensor:
    hidden = problem.hidden[flat.positions].to(problem.dtype)
    rows = problem.weight[flat.rows].to(problem.dtype)
    return torch.einsum("th,th->t", hidden[flat.owner], rows)


def _triton_dots(problem: Problem, flat: _Flat) -> Tensor:
    out = problem.hidden.new_empty(len(flat.rows), dtype=problem.dtype)
    _triton().dots(problem.hidden, problem.weight, flat.positions[flat.owner], flat.rows, out)
    return out


def _sparse_dots(problem: Problem, flat: _Flat) -> Tensor:
    hidden = problem.hidden[flat.positions]
    offsets, rows, chosen = _local(flat)
    pattern = torch.sparse_csr_tensor(
        offsets, rows, hidden.new_zeros(len(rows)),
        size=(len(flat.targets), len(problem.weight)), check_invariants=False,
    )  # fmt: skip
    dots: Tensor
    dots = torch.sparse.sampled_addmm(pattern, hidden, problem.weight.T, beta=0.0).values()
    if chosen is None:
        return dots
    return dots.new_zeros(len(flat.rows)).index_copy_(0, chosen, dots)


_DOTS = {"sparse": _sparse_dots, "gather": _gathered_dots, "triton": _triton_dots}


def _triton() -> ModuleType:
    """Import the kernels: only when they are wanted, since Triton is optional."""
    return importlib.import_module("ragged_format.torch.head.triton_kernels")


def _local(flat: _Flat) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return bounds and rows of the candidates that this shard has, and which they are of all.

    A row may occur once per target only, so that those of other shards cannot stay as row 0.
    """
    if bool(flat.is_local.all()):
        return _offsets(flat.counts), flat.rows, None
    chosen = flat.is_local.nonzero()[:, 0]
    counts = torch.bincount(flat.owner[chosen], minlength=len(flat.targets))
    return _offsets(counts), flat.rows[chosen], chosen


def _add_hidden(problem: Problem, flat: _Flat, grad: Tensor, out: Tensor) -> None:
    if problem.kernel == "triton":
        offsets = _offsets(flat.counts)
        _triton().add_hidden(problem.weight, flat.positions, offsets, flat.rows, grad, out)
    elif problem.kernel == "sparse":
        offsets, rows, chosen = _local(flat)
        sums = embedding_bag(
            rows, problem.weight, offsets, mode="sum", include_last_offset=True,
            per_sample_weights=grad if chosen is None else grad[chosen],
        )  # fmt: skip
        out.index_add_(0, flat.positions, sums)
    else:
        # Nine times faster on CPUs than first a segment_reduce of rows per target.
        rows = problem.weight[flat.rows].to(problem.dtype)
        out.index_add_(0, flat.positions[flat.owner], rows.mul_(grad[:, None]))


def _add_weight(problem: Problem, flat: _Flat, grad: Tensor, out: Tensor) -> None:
    positions = flat.positions[flat.owner]
    if problem.kernel == "triton":
        _triton().add_weight(problem.hidden, positions, flat.rows, grad, out)
        return
    if problem.kernel == "gather":
        hidden = problem.hidden[positions].to(problem.dtype)
        out.index_add_(0, flat.rows, hidden.mul_(grad[:, None]))
        return
    # Sorted by row, the terms of each row are a bag; only rows that occur are summed. Those of
    # other shards are in the bag of row 0, with gradient 0.
    rows, order = flat.rows.sort()
    present, sizes = torch.unique_consecutive(rows, return_counts=True)
    bounds = _offsets(sizes)
    terms, weights = positions[order], grad[order]
    step = problem.rows_per_chunk
    for start in range(0, len(present), step):
        offsets = bounds[start : start + step + 1]
        low, high = int(offsets[0]), int(offsets[-1])
        sums = embedding_bag(
            terms[low:high], problem.hidden, offsets - low, mode="sum",
            per_sample_weights=weights[low:high], include_last_offset=True,
        )  # fmt: skip
        out.index_add_(0, present[start : start + step], sums)


def _offsets(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))
