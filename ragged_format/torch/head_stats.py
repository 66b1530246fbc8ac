"""Statistics of logits over sets of ids, in chunks: the arithmetic under the head.

For target j with hidden row h, set S and label y: the log-sum-exp of z over S, the logit of y, and
(for the entropy) the sum of p z. Two ways compute the same numbers. *Flat*: rows of the weight are
gathered for the candidates end to end, with no table at all. *Dense*: vocabulary chunks with an
online log-sum-exp, for targets whose set is the whole vocabulary or very wide. Both are run again
in the backward pass instead of keeping logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Gradients", "Problem", "Stats", "Transform", "backward", "forward"]

HostCounts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Transform:
    """From a dot product to a logit: ``soft_cap(logit_scale * (dot + bias)) / temperature``.

    Attributes
    ----------
    bias : (V,) Tensor, optional
    inverse_temperature : (M,) Tensor
        In the dtype of the statistics.
    logit_scale : float
    soft_cap : float, optional
        ``cap * tanh(x / cap)``.
    """

    bias: Tensor | None
    inverse_temperature: Tensor
    logit_scale: float
    soft_cap: float | None

    def logits(self, dots: Tensor, bias: Tensor | None, inverse_temperature: Tensor) -> Tensor:
        """Return logits of `dots`; `bias` and `inverse_temperature` broadcast against them."""
        out = dots if bias is None else dots + bias
        if self.logit_scale != 1.0:
            out = out * self.logit_scale
        if self.soft_cap is not None:
            out = self.soft_cap * torch.tanh(out / self.soft_cap)
        return out * inverse_temperature

    def chain(self, grad: Tensor, logits: Tensor, inverse_temperature: Tensor) -> Tensor:
        """Return the gradient of the dot products from that of the logits."""
        out = grad * inverse_temperature
        if self.soft_cap is not None:
            capped = logits / inverse_temperature / self.soft_cap
            out = out * (1 - capped * capped)
        return out * self.logit_scale if self.logit_scale != 1.0 else out


@dataclass(frozen=True, slots=True)
class Problem:
    """The inputs of one evaluation, split into chunks on the host.

    Attributes
    ----------
    hidden, weight : (N, H), (V, H) Tensor
    pred_index, labels : (M,) int64 Tensor
        Labels count from the first row of the whole vocabulary.
    ids : (T,) int64 Tensor
        Candidates of all targets end to end.
    counts : (M,) int64 Tensor, and the same on the host
    transform : Transform
    vocab_start : int
        First id of this weight's rows.
    group : process group, optional
        Over which the vocabulary is sharded.
    chunk_elements : int
        Bound on the elements of one temporary.
    """

    hidden: Tensor
    weight: Tensor
    pred_index: Tensor
    labels: Tensor
    ids: Tensor
    counts: Tensor
    host_counts: HostCounts
    transform: Transform
    vocab_start: int
    group: dist.ProcessGroup | None
    chunk_elements: int

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the statistics: float64 for float64 input, else float32."""
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32

    @property
    def flat_limit(self) -> int:
        """Largest set that the flat way takes: one temporary holds all its rows."""
        return max(1, self.chunk_elements // max(1, self.hidden.shape[1]))

    def dense_targets(self) -> npt.NDArray[np.int64]:
        """Return the targets that go the dense way."""
        return np.flatnonzero((self.host_counts == 0) | (self.host_counts > self.flat_limit))

    def flat_targets(self) -> npt.NDArray[np.int64]:
        """Return the targets that go the flat way."""
        return np.flatnonzero((self.host_counts > 0) & (self.host_counts <= self.flat_limit))


class Stats(NamedTuple):
    """Per target, each (M,) in the dtype of the statistics.

    Attributes
    ----------
    log_sum : Tensor
        Log-sum-exp of the logits over the set.
    label_logit : Tensor
        Logit of the label; 0 where the set lacks it.
    mean_logit : Tensor
        Sum of p z over the set.
    hits : Tensor
        How often the set holds the label.
    """

    log_sum: Tensor
    label_logit: Tensor
    mean_logit: Tensor
    hits: Tensor


class Gradients(NamedTuple):
    """Accumulated gradients; ``None`` where not asked for."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class _Sums:
    """Running maximum and sums, from which the statistics follow."""

    def __init__(self, size: int, like: Tensor, dtype: torch.dtype) -> None:
        self.top = torch.full((size,), -torch.inf, dtype=dtype, device=like.device)
        self.mass = torch.zeros(size, dtype=dtype, device=like.device)
        self.weighted = torch.zeros_like(self.mass)
        self.label = torch.zeros_like(self.mass)
        self.hits = torch.zeros_like(self.mass)

    def reduce(self, group: dist.ProcessGroup) -> None:
        top = self.top.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        scale = torch.exp(self.top - _finite(top))
        sums = torch.stack([self.mass * scale, self.weighted * scale, self.label, self.hits])
        dist.all_reduce(sums, group=group)
        self.top = top
        self.mass, self.weighted, self.label, self.hits = sums.unbind()

    def stats(self) -> Stats:
        return Stats(
            self.top + torch.log(self.mass), self.label, self.weighted / self.mass, self.hits
        )


def _finite(top: Tensor) -> Tensor:
    """Replace the maximum of nothing, so that differences with it are not NaN."""
    return torch.where(torch.isinf(top), torch.zeros_like(top), top)


def forward(problem: Problem) -> Stats:
    """Return the statistics of every target, shards of the vocabulary combined."""
    sums = _Sums(len(problem.labels), problem.hidden, problem.dtype)
    for flat in _flat_chunks(problem):
        logits, _, _ = _flat_logits(problem, flat)
        _add_flat(sums, flat, logits)
    for dense in _dense_chunks(problem):
        for part in dense.parts:
            logits, allowed, _ = _dense_logits(problem, dense, part)
            _add_dense(sums, problem, dense, part, logits, allowed)
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
    want_hidden, want_weight, want_bias = needs
    out = Gradients(
        torch.zeros_like(problem.hidden, dtype=problem.dtype) if want_hidden else None,
        torch.zeros_like(problem.weight, dtype=problem.dtype) if want_weight else None,
        torch.zeros(len(problem.weight), dtype=problem.dtype, device=problem.weight.device)
        if want_bias else None,
    )  # fmt: skip
    entropy = stats.log_sum - stats.mean_logit
    for flat in _flat_chunks(problem):
        logits, rows, hidden = _flat_logits(problem, flat)
        log_p = logits - stats.log_sum[flat.targets][flat.owner]
        grad = grad_log_sum[flat.targets][flat.owner] * log_p.exp()
        grad += torch.where(flat.is_label, grad_label[flat.targets][flat.owner], 0)
        if grad_entropy is not None:
            slope = log_p + entropy[flat.targets][flat.owner]
            grad -= grad_entropy[flat.targets][flat.owner] * log_p.exp() * slope
        grad = torch.where(flat.is_local, grad, 0)
        scale = problem.transform.inverse_temperature[flat.targets][flat.owner]
        grad = problem.transform.chain(grad, logits, scale).where(flat.is_local, 0)
        _accumulate_flat(out, problem, flat, grad, rows, hidden)
    for dense in _dense_chunks(problem):
        picked = dense.targets
        for part in dense.parts:
            logits, allowed, hidden = _dense_logits(problem, dense, part)
            log_p = logits - stats.log_sum[picked, None]
            p = log_p.exp()
            grad = grad_log_sum[picked, None] * p
            if grad_entropy is not None:
                slope = torch.where(allowed, log_p + entropy[picked, None], 0)
                grad -= grad_entropy[picked, None] * p * slope
            column, inside = _label_column(problem, picked, part)
            grad[torch.arange(len(picked), device=grad.device), column] += torch.where(
                inside & (stats.hits[picked] > 0), grad_label[picked], 0
            )
            scale = problem.transform.inverse_temperature[picked, None]
            logits = torch.where(allowed, logits, 0)
            grad = torch.where(allowed, problem.transform.chain(grad, logits, scale), 0)
            _accumulate_dense(out, problem, dense, part, grad, hidden)
    return out


class _Flat(NamedTuple):
    """A chunk of the flat way: consecutive entries of the flat targets."""

    targets: Tensor
    counts: Tensor
    owner: Tensor
    rows: Tensor
    is_local: Tensor
    is_label: Tensor


class _Dense(NamedTuple):
    """A chunk of the dense way: targets, the parts of the vocabulary, candidates of wide sets."""

    targets: Tensor
    parts: list[tuple[int, int]]
    unrestricted: Tensor
    owner: Tensor
    ids: Tensor


def _flat_chunks(problem: Problem) -> Iterator[_Flat]:
    chosen = problem.flat_targets()
    counts = problem.host_counts
    device = problem.hidden.device
    ends = np.cumsum(counts[chosen])
    contiguous = len(chosen) == len(counts)
    starts_all = np.cumsum(counts) - counts
    first = 0
    size = len(problem.weight)
    while first < len(chosen):
        done = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, done + problem.flat_limit, side="right"))
        last = max(last, first + 1)
        part = chosen[first:last]
        total = int(ends[last - 1]) - done
        if contiguous:
            targets = torch.arange(first, last, device=device)
        else:
            targets = torch.from_numpy(part).to(device, non_blocking=True)
        per_target = problem.counts[targets]
        owner = torch.repeat_interleave(per_target, output_size=total)
        if contiguous or part[-1] - part[0] + 1 == len(part):
            begin = int(starts_all[part[0]])
            ids = problem.ids[begin : begin + total]
        else:
            starts = torch.from_numpy(starts_all[part]).to(device, non_blocking=True)
            shift = starts - (per_target.cumsum(0) - per_target)
            ids = problem.ids[shift[owner] + torch.arange(total, device=device)]
        local = ids - problem.vocab_start
        is_local = (local >= 0) & (local < size)
        yield _Flat(
            targets, per_target, owner, local.clamp(0, size - 1), is_local,
            ids == problem.labels[targets][owner],
        )  # fmt: skip
        first = last


def _flat_logits(problem: Problem, flat: _Flat) -> tuple[Tensor, Tensor, Tensor]:
    rows = problem.weight[flat.rows].to(problem.dtype)
    hidden = problem.hidden[problem.pred_index[flat.targets]].to(problem.dtype)
    dots = torch.einsum("th,th->t", hidden[flat.owner], rows)
    transform = problem.transform
    bias = None if transform.bias is None else transform.bias[flat.rows].to(problem.dtype)
    scale = transform.inverse_temperature[flat.targets][flat.owner]
    return transform.logits(dots, bias, scale), rows, hidden


def _add_flat(sums: _Sums, flat: _Flat, logits: Tensor) -> None:
    masked = torch.where(flat.is_local, logits, -torch.inf)
    top = torch.segment_reduce(masked, "max", lengths=flat.counts, unsafe=True)
    p = torch.exp(masked - _finite(top)[flat.owner])
    hit = flat.is_label & flat.is_local
    columns = torch.stack([p, p * logits, torch.where(hit, logits, 0), hit.to(logits.dtype)], dim=1)
    totals = torch.segment_reduce(columns, "sum", lengths=flat.counts, unsafe=True)
    targets = flat.targets
    sums.top[targets] = top
    sums.mass[targets], sums.weighted[targets] = totals[:, 0], totals[:, 1]
    sums.label[targets], sums.hits[targets] = totals[:, 2], totals[:, 3]


def _accumulate_flat(
    out: Gradients, problem: Problem, flat: _Flat, grad: Tensor, rows: Tensor, hidden: Tensor
) -> None:
    if out.hidden is not None:
        per_target = torch.segment_reduce(
            grad[:, None] * rows, "sum", lengths=flat.counts, unsafe=True
        )
        out.hidden.index_add_(0, problem.pred_index[flat.targets], per_target)
    if out.weight is not None:
        out.weight.index_add_(0, flat.rows, grad[:, None] * hidden[flat.owner])
    if out.bias is not None:
        out.bias.index_add_(0, flat.rows, grad)


def _dense_chunks(problem: Problem) -> Iterator[_Dense]:
    chosen = problem.dense_targets()
    counts = problem.host_counts
    device = problem.hidden.device
    size = len(problem.weight)
    # Square-ish chunks: both the logits and the rows of the weight stay within the bound.
    columns = max(1, min(size, max(1024, problem.chunk_elements // 512)))
    height = max(1, problem.chunk_elements // columns)
    parts = [(start, min(start + columns, size)) for start in range(0, size, columns)]
    starts_all = np.cumsum(counts) - counts
    for first in range(0, len(chosen), height):
        part = chosen[first : first + height]
        wide = counts[part]
        pieces = [
            problem.ids[int(starts_all[target]) : int(starts_all[target] + counts[target])]
            for target in part[wide > 0]
        ]
        empty = problem.ids[:0]
        owner = np.repeat(np.arange(len(part)), wide)
        yield _Dense(
            torch.from_numpy(part).to(device, non_blocking=True),
            parts,
            torch.from_numpy(wide == 0).to(device, non_blocking=True),
            torch.from_numpy(owner).to(device, non_blocking=True),
            torch.cat(pieces) - problem.vocab_start if pieces else empty,
        )


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
    sums: _Sums, problem: Problem, dense: _Dense, part: tuple[int, int], logits: Tensor,
    allowed: Tensor,
) -> None:  # fmt: skip
    targets = dense.targets
    old = sums.top[targets]
    top = torch.maximum(old, logits.amax(1))
    shrink = torch.exp(old - _finite(top))
    p = torch.exp(logits - _finite(top)[:, None])
    sums.top[targets] = top
    sums.mass[targets] = sums.mass[targets] * shrink + p.sum(1)
    finite = torch.where(allowed, logits, 0)
    sums.weighted[targets] = sums.weighted[targets] * shrink + (p * finite).sum(1)
    column, inside = _label_column(problem, targets, part)
    row = torch.arange(len(targets), device=column.device)
    hit = inside & allowed[row, column]
    sums.label[targets] += torch.where(hit, finite[row, column], 0)
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
        out.weight[start:stop] += grad.T @ hidden
    if out.bias is not None:
        out.bias[start:stop] += grad.sum(0)
