"""The problem that the head solves: its inputs, statistics and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ragged_format.torch.transfer import to_device

if TYPE_CHECKING:
    from ragged_format.lists import Int64

__all__ = [
    "Gradients",
    "Kernel",
    "Picked",
    "Picker",
    "Problem",
    "Stats",
    "Sums",
    "Transform",
    "finite",
]

Kernel = Literal["sparse", "gather", "triton"]

# A matrix product over the vocabulary does about this many times the work per second of the sparse
# kernels on one core; sets below `_FEW` are never worth one.
_SHARE = 16
_FEW = 64


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

    def held(self, logits: Tensor) -> Tensor:
        """Return logits that a probability of 0 can multiply: a bias may take ids out by -inf."""
        return logits if self.bias is None else logits.clamp(min=torch.finfo(logits.dtype).min)

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
    kernel : {"sparse", "gather", "triton"}
        What computes the flat way.
    """

    hidden: Tensor
    weight: Tensor
    pred_index: Tensor
    labels: Tensor
    ids: Tensor
    counts: Tensor
    host_counts: Int64
    transform: Transform
    vocab_start: int
    group: dist.ProcessGroup | None
    chunk_elements: int
    kernel: Kernel

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the statistics: float64 for float64 input, else float32."""
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32

    @property
    def rows_per_chunk(self) -> int:
        """Rows of hidden states or weight that one temporary may hold."""
        return max(1, self.chunk_elements // max(1, self.hidden.shape[1]))

    @property
    def flat_limit(self) -> int:
        """Largest set that the flat way takes; beyond, matrix products are faster."""
        if self.kernel == "sparse":
            return max(_FEW, len(self.weight) // _SHARE)
        return self.rows_per_chunk

    def dense_targets(self) -> Int64:
        """Return the targets that go the dense way."""
        return np.flatnonzero((self.host_counts == 0) | (self.host_counts > self.flat_limit))

    def flat_targets(self) -> Int64:
        """Return the targets that go the flat way."""
        return np.flatnonzero((self.host_counts > 0) & (self.host_counts <= self.flat_limit))


class Picked(NamedTuple):
    """Some of the targets, and their candidates end to end.

    Attributes
    ----------
    targets : (m,) int64
    counts : (m,) int64
        Candidates of each; 0 is the full vocabulary.
    owner : (t,) int64
        Which of the m targets a candidate belongs to.
    ids : (t,) int64
    """

    targets: Tensor
    counts: Tensor
    owner: Tensor
    ids: Tensor


class Picker:
    """Picks targets of a problem for one pass.

    Nothing waits for the device: sizes come from the counts on the host, and no more than the
    numbers of the targets is copied, where they are not consecutive.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._starts = np.cumsum(problem.host_counts) - problem.host_counts
        self._starts_there: Tensor | None = None

    def pick(self, chosen: Int64) -> Picked:
        """Return targets by their numbers, which ascend; at least one."""
        problem = self._problem
        device = problem.hidden.device
        total = int(problem.host_counts[chosen].sum())
        first, last = int(chosen[0]), int(chosen[-1])
        consecutive = last - first + 1 == len(chosen)
        if consecutive:
            targets = torch.arange(first, last + 1, device=device)
        else:
            targets = to_device(chosen, device)
        counts = problem.counts[targets]
        owner = torch.repeat_interleave(counts, output_size=total)
        if consecutive:
            begin = int(self._starts[first])
            ids = problem.ids[begin : begin + total]
        else:
            if self._starts_there is None:
                self._starts_there = problem.counts.cumsum(0) - problem.counts
            shift = self._starts_there[targets] - (counts.cumsum(0) - counts)
            ids = problem.ids[shift[owner] + torch.arange(total, device=device)]
        return Picked(targets, counts, owner, ids)


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


class Sums:
    """Running maximum and sums, from which the statistics follow."""

    def __init__(self, size: int, like: Tensor, dtype: torch.dtype) -> None:
        self.top = torch.full((size,), -torch.inf, dtype=dtype, device=like.device)
        self.mass = torch.zeros(size, dtype=dtype, device=like.device)
        self.weighted = torch.zeros_like(self.mass)
        self.label = torch.zeros_like(self.mass)
        self.hits = torch.zeros_like(self.mass)

    def reduce(self, group: dist.ProcessGroup) -> None:
        """Combine the sums of all shards of the vocabulary."""
        top = self.top.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        scale = torch.exp(self.top - finite(top))
        sums = torch.stack([self.mass * scale, self.weighted * scale, self.label, self.hits])
        dist.all_reduce(sums, group=group)
        self.top = top
        self.mass, self.weighted, self.label, self.hits = sums.unbind()

    def stats(self) -> Stats:
        """Return the statistics that follow."""
        return Stats(
            self.top + torch.log(self.mass), self.label, self.weighted / self.mass, self.hits
        )


def finite(top: Tensor) -> Tensor:
    """Replace the maximum of nothing, so that differences with it are not NaN."""
    return torch.where(torch.isinf(top), torch.zeros_like(top), top)
